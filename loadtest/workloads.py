"""Which queries the benchmarks ask: the paper's read mix, drawn over lists of the lengths that the paper saw.

Figures are from "TAO: Facebook's Distributed Data Store for the Social Graph", USENIX ATC 2013, section 7: figure 3
(frequencies, and the shares of non-empty results beside it), figure 4 (counts), figure 5 (lengths and limits).
What the paper does not give is named below. Pure: chance is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from tao.model.graph import MAX_TIME


class Operation(StrEnum):
    """The reads of the API."""

    OBJ_GET = "obj_get"
    ASSOC_COUNT = "assoc_count"
    ASSOC_RANGE = "assoc_range"
    ASSOC_TIME_RANGE = "assoc_time_range"
    ASSOC_GET = "assoc_get"


READ_SHARES: Final = {
    Operation.ASSOC_GET: 0.157,
    Operation.ASSOC_RANGE: 0.409,
    Operation.ASSOC_TIME_RANGE: 0.028,
    Operation.ASSOC_COUNT: 0.117,
    Operation.OBJ_GET: 0.289,
}
NON_EMPTY_SHARES: Final = {
    Operation.ASSOC_GET: 0.196,
    Operation.ASSOC_RANGE: 0.310,
    Operation.ASSOC_TIME_RANGE: 0.019,
    Operation.ASSOC_COUNT: 0.55,
}
LIMIT_ONE_SHARE: Final = 0.12
LARGE_LIMIT_SHARE: Final = 0.95
"""Of the queries whose limit is not 1: those with a limit of 1,000 or more."""
ONE_EDGE_SHARE: Final = 0.64
"""Of the non-empty results of assoc_range."""

LARGE_LIMIT: Final = 1000
SMALL_LIMIT: Final = 50
"""Not in the paper: a page of a list."""
LONGEST_LIST: Final = 500
"""Not in the paper: lists of more than one edge are drawn log-uniformly up to this length, so that the longer answers
count without becoming the whole of the work."""


@dataclass(frozen=True, slots=True)
class StoredList:
    """The association list of ``id1``: edges ``(id2, time)``, newest first."""

    id1: int
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Query:
    """One read and how many edges it finds (of an object: 1; of a count: the count). What an operation has no use for
    is 0; ``high`` and ``low`` are inclusive."""

    operation: Operation
    id: int
    id2: int = 0
    limit: int = 0
    high: int = 0
    low: int = 0
    expected: int = 1


def list_length(chance: Random) -> int:
    """The length of a non-empty list."""
    if chance.random() < ONE_EDGE_SHARE:
        return 1
    return int(2 * math.pow(LONGEST_LIST / 2, chance.random()))


def range_limit(chance: Random) -> int:
    """The limit that a caller of assoc_range or assoc_time_range names."""
    if chance.random() < LIMIT_ONE_SHARE:
        return 1
    return LARGE_LIMIT if chance.random() < LARGE_LIMIT_SHARE else SMALL_LIMIT


def read_mix(
    chance: Random, count: int, objects: Sequence[int], lists: Sequence[StoredList], empty: Sequence[int]
) -> list[Query]:
    """``count`` queries of the paper's mix over ``objects`` that exist, non-empty ``lists``, and ids without edges."""
    operations = chance.choices(list(READ_SHARES), list(READ_SHARES.values()), k=count)
    return [_draw(chance, operation, objects, lists, empty) for operation in operations]


def _draw(
    chance: Random, operation: Operation, objects: Sequence[int], lists: Sequence[StoredList], empty: Sequence[int]
) -> Query:
    if operation is Operation.OBJ_GET:
        return Query(operation, chance.choice(objects))
    finds_edges = chance.random() < NON_EMPTY_SHARES[operation]
    chosen = chance.choice(lists) if finds_edges else StoredList(chance.choice(empty), ())
    limit = range_limit(chance)
    if operation is Operation.ASSOC_COUNT:
        return Query(operation, chosen.id1, expected=len(chosen.edges))
    if operation is Operation.ASSOC_RANGE:
        return Query(operation, chosen.id1, limit=limit, expected=min(limit, len(chosen.edges)))
    if operation is Operation.ASSOC_TIME_RANGE:
        found = min(limit, len(chosen.edges))
        return Query(operation, chosen.id1, limit=limit, high=MAX_TIME, low=0, expected=found)
    id2 = chance.choice(chosen.edges)[0] if finds_edges else chance.choice(objects)
    return Query(operation, chosen.id1, id2=id2, expected=int(finds_edges))
