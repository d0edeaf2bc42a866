"""Builders for the cache's unit tests: one open shard, short names, versions of the first epoch."""

from __future__ import annotations

from tao.cache import CacheSettings, GraphCache, Stored
from tao.model.changes import GoneEdge, ListChange, sort_edges
from tao.model.edge_block import PREFIX, decode_block, encode_block
from tao.model.graph import Edge, encode_count, encode_object
from tests.rigs.versions import make_version

SHARD = 3
ID1 = (SHARD << 47) + 64
ATYPE = 7
SMALL_ATYPE = 8
SMALL_LIMIT = 3


class Types:
    """Objects of type 2 and lists of type 9 have an arena of their own."""

    def __init__(self, special_list: int = 9, special_object: int = 2) -> None:
        self._special_list = special_list
        self._special_object = special_object

    def object_arena(self, otype: int) -> str:
        return "special" if otype == self._special_object else "default"

    def list_arena(self, atype: int) -> str:
        return "special" if atype == self._special_list else "default"

    def list_limit(self, atype: int) -> int:
        return SMALL_LIMIT if atype == SMALL_ATYPE else 6000


def v(counter: int, epoch: int = 1) -> int:
    return make_version(epoch, counter)


def open_cache(**options: object) -> GraphCache:
    arena_bytes = options.pop("arena_bytes", {"default": 1 << 20, "special": 1 << 20})
    cache = GraphCache(CacheSettings(arena_bytes=arena_bytes, credit_slots=1009, **options), Types())  # type: ignore[arg-type]
    cache.open_shard(SHARD, 1)
    return cache


def edges_of(*times: int) -> list[Edge]:
    """One edge per time, with id2 = 100 + time and a little data, newest first."""
    return sort_edges(Edge(100 + time, time, b"d%d" % time) for time in times)


def store_list(
    cache: GraphCache, version: int, edges: list[Edge], count: int | None = None, atype: int = ATYPE, id1: int = ID1
) -> Stored:
    block = encode_block(version, len(edges) if count is None else count, edges, PREFIX)
    return cache.store_list(cache.list_ticket(id1, atype, 0.0), block, 1, 0.0)


def store_count(cache: GraphCache, version: int, count: int) -> Stored:
    return cache.store_count(cache.list_ticket(ID1, ATYPE, 0.0), encode_count(version, count), 1, 0.0)


def store_object(cache: GraphCache, version: int, data: bytes = b"data", id_: int = ID1, otype: int = 1) -> Stored:
    return cache.store_object(cache.object_ticket(id_, 0.0), encode_object(version, otype, data), 1, 0.0)


def list_change(
    before: int, count: int, gone: tuple[int, ...] = (), put: tuple[int, ...] = (), atype: int = ATYPE
) -> ListChange:
    """From counter ``before`` to the next; edges named by their time."""
    places = tuple(GoneEdge(100 + time, time) for time in gone)
    return ListChange(ID1, atype, v(before) if before else 0, v(before + 1), count, places, tuple(edges_of(*put)))


def times_in(block: bytes | None) -> list[int] | None:
    return None if block is None else [edge.time for edge in decode_block(block)]
