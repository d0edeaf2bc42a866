"""Looking into a cache without touching it: what is held for given keys, which keys there are (DESIGN.md §13)."""

from __future__ import annotations

from tao.cache import GraphCache
from tao.cache.outcomes import EntryKind
from tao.model.errors import InvalidArgument
from tao.model.ports import Clock
from tao.wire.v1 import session_pb2 as pb

MAX_SAMPLE = 1_000
"""Entries in one page of a sample: each may be a list of hundreds of kilobytes."""


def inspect(cache: GraphCache, clock: Clock, asked: pb.Inspect) -> pb.Inspection:
    """Entries and floors of the keys asked, or a page of a shard's keys. Raises `InvalidArgument`."""
    now = clock.monotonic()
    inspection = pb.Inspection()
    if len(asked.list_id1s) != len(asked.list_atypes):
        raise InvalidArgument("list_id1s and list_atypes differ in length")
    for object_id in asked.obj_ids:
        _add(inspection, cache, now, "object", object_id, 0)
    for id1, atype in zip(asked.list_id1s, asked.list_atypes, strict=True):
        _add(inspection, cache, now, "list", id1, atype)
        _add(inspection, cache, now, "count", id1, atype)
    if asked.sample_limit:
        _sample(cache, now, asked, inspection)
    return inspection


def _sample(cache: GraphCache, now: float, asked: pb.Inspect, inspection: pb.Inspection) -> None:
    if asked.sample_after and not asked.sample_after.isdecimal():
        raise InvalidArgument("sample_after is the next_cursor of an earlier page")
    limit = min(asked.sample_limit, MAX_SAMPLE)
    page = cache.sample_keys(asked.sample_shard, limit, int(asked.sample_after or 0))
    for key in page.keys:
        _add(inspection, cache, now, key.kind, key.id, key.atype)
    inspection.next_cursor = "" if page.after is None else str(page.after)


def _add(inspection: pb.Inspection, cache: GraphCache, now: float, kind: EntryKind, key: int, atype: int) -> None:
    if kind == "object":
        value, floor = cache.peek_object(key), cache.floor_of_object(key, now)
    else:
        value = cache.peek_list(key, atype) if kind == "list" else cache.peek_count(key, atype)
        floor = cache.floor_of_list(key, atype, now)
    inspection.entries.add(kind=kind, id=key, atype=atype, value=value or b"", floor=floor)
