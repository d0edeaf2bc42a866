"""The data and the queries of the read benchmarks.

The data is made from a seed, written through the SDK, and copied as it is into Redis. An object's value is 100 bytes as
the store holds it, and Redis holds the very same bytes. Edges carry no data (two fifths of the paper's did not): Redis
has no place for it beside a member and its score.

The queries are the paper's read mix (`loadtest.published.workload`), drawn over lists of the lengths that the paper
saw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

import msgspec

from loadtest.published.workload import Kind, workload_named
from tao.client import Graph
from tao.model.graph import MAX_TIME


class Operation(StrEnum):
    """The reads of the API."""

    OBJ_GET = "obj_get"
    ASSOC_COUNT = "assoc_count"
    ASSOC_RANGE = "assoc_range"
    ASSOC_TIME_RANGE = "assoc_time_range"
    ASSOC_GET = "assoc_get"


_PAPER: Final = workload_named("tao_atc13")
_ALL_READS: Final = sum(_PAPER.mix[Kind(each)] for each in Operation)
READ_SHARES: Final = {each: _PAPER.mix[Kind(each)] / _ALL_READS for each in Operation}
NON_EMPTY_SHARES: Final[dict[Operation, float]] = {
    each: _PAPER.non_empty[Kind(each)] for each in Operation if each is not Operation.OBJ_GET
}
ONE_EDGE_SHARE: Final = 0.64
"""Share of one edge among the non-empty results of assoc_range (figure 5)."""

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
    if chance.random() < _PAPER.limit_one:
        return 1
    return LARGE_LIMIT if chance.random() < _PAPER.large_limit else SMALL_LIMIT


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


ITEM: Final = "item"
LINK: Final = "link"
VALUE_BYTES: Final = 100
_FRAMING_BYTES: Final = 4
"""msgpack around the one field: map, field number, type and length of the bytes."""
_BATCH: Final = 2000
_FIRST_TIME: Final = 1_700_000_000


@dataclass(frozen=True, slots=True)
class DatasetSize:
    """The size of the data; the defaults fit every cache and outgrow the processor's."""

    objects: int = 10_000
    lists: int = 500
    """Lists to page through."""
    list_edges: int = 40
    """Edges of each such list: two pages of 20."""
    mixed_lists: int = 500
    """Non-empty lists for the paper's mix."""
    queries: int = 20_000
    """Queries of the mix, drawn before and asked again and again."""


TOY = DatasetSize(objects=300, lists=20, list_edges=30, mixed_lists=20, queries=400)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Ids, values as stored, lists, and ids whose lists are empty."""

    objects: dict[int, bytes]
    pages: tuple[StoredList, ...]
    mixed: tuple[StoredList, ...]
    empty: tuple[int, ...]
    mix: tuple[Query, ...]


async def write_dataset(graph: Graph, size: DatasetSize, seed: int = 1) -> Dataset:
    """Make the data and write it. Raises `TaoError`."""
    chance = Random(seed)
    values = [chance.randbytes(VALUE_BYTES - _FRAMING_BYTES) for _ in range(size.objects)]
    ids: list[int] = []
    for start in range(0, size.objects, _BATCH):
        ids += await graph.obj_add_many([(ITEM, {"value": value}) for value in values[start : start + _BATCH]])
    lengths = [size.list_edges] * size.lists + [list_length(chance) for _ in range(size.mixed_lists)]
    owners = chance.sample(ids, len(lengths))
    lists = [_draw_list(chance, id1, length, ids) for id1, length in zip(owners, lengths, strict=True)]
    edges = [(stored.id1, LINK, id2, time) for stored in lists for id2, time in stored.edges]
    for start in range(0, len(edges), _BATCH):
        await graph.assoc_add_many(edges[start : start + _BATCH])
    pages, mixed = tuple(lists[: size.lists]), tuple(lists[size.lists :])
    empty = tuple(sorted(set(ids) - set(owners))[: 2 * size.mixed_lists])
    return Dataset(
        objects={object_id: stored_value(value) for object_id, value in zip(ids, values, strict=True)},
        pages=pages,
        mixed=mixed,
        empty=empty,
        mix=tuple(read_mix(chance, size.queries, ids, mixed, empty)),
    )


def stored_value(value: bytes) -> bytes:
    """An item's data as the store holds it: a msgpack map by field number."""
    return msgspec.msgpack.encode({1: value})


def _draw_list(chance: Random, id1: int, length: int, ids: list[int]) -> StoredList:
    # Distinct times: ties are the list's own affair, and Redis breaks them its own way.
    newest = _FIRST_TIME + length
    return StoredList(id1, tuple((id2, newest - i) for i, id2 in enumerate(chance.sample(ids, min(length, len(ids))))))
