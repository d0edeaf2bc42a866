"""What the read benchmarks read: made from a seed, written through the SDK, and copied as it is into Redis.

An object's value is 100 bytes as the store holds it, and Redis holds the very same bytes. Edges carry no data (two
fifths of the paper's did not): Redis has no place for it beside a member and its score.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

import msgspec

from loadtest.workloads import Query, StoredList, list_length, read_mix
from tao.client import Graph

ITEM: Final = "item"
LINK: Final = "link"
VALUE_BYTES: Final = 100
_FRAMING_BYTES: Final = 4
"""msgpack around the one field: map, field number, type and length of the bytes."""
_BATCH: Final = 2000
_FIRST_TIME: Final = 1_700_000_000


@dataclass(frozen=True, slots=True)
class DatasetSize:
    """How much there is; the defaults fit every cache and outgrow the processor's."""

    objects: int = 10_000
    lists: int = 500
    """Lists to page through."""
    list_edges: int = 40
    """Of each such list: two pages of 20."""
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
    """Make it and write it. Raises `TaoError`."""
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
