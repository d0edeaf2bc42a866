"""Looking into a cache without touching it: what is held for given keys and what happened to them, which keys there
are (DESIGN.md §13)."""

from __future__ import annotations

from typing import Final

from tao.cache import GraphCache
from tao.cache.outcomes import EntryKind
from tao.model.errors import InvalidArgument
from tao.serving.traffic import Traffic
from tao.wire.v1 import session_pb2 as pb

MAX_SAMPLE: Final = 1_000
"""Entries in one page of a sample: each may be a list of hundreds of kilobytes."""

MAX_STORIES: Final = 10
"""Keys in one request that wants stories: each is a search through the whole event log, of some milliseconds."""


def inspect(cache: GraphCache, traffic: Traffic, asked: pb.Inspect) -> pb.Inspection:
    """Entries, floors and if wanted stories of the keys asked, a page of a shard's keys, or what is read most. Raises
    `InvalidArgument`."""
    inspection = pb.Inspection()
    if len(asked.list_id1s) != len(asked.list_atypes):
        raise InvalidArgument("list_id1s and list_atypes differ in length")
    if asked.stories and len(asked.obj_ids) + len(asked.list_id1s) > MAX_STORIES:
        raise InvalidArgument(f"ask for the stories of at most {MAX_STORIES} keys at a time")
    for object_id in asked.obj_ids:
        _add(inspection, cache, "object", object_id, 0)
        if asked.stories:
            _tell(inspection, cache, object_id, 0)
    for id1, atype in zip(asked.list_id1s, asked.list_atypes, strict=True):
        _add(inspection, cache, "list", id1, atype)
        _add(inspection, cache, "count", id1, atype)
        if asked.stories:
            _tell(inspection, cache, id1, atype)
    if asked.sample_limit:
        _sample(cache, asked, inspection)
    if asked.hot_limit:
        inspection.traffic.CopyFrom(traffic.told(asked.hot_limit))
    return inspection


def _sample(cache: GraphCache, asked: pb.Inspect, inspection: pb.Inspection) -> None:
    if asked.sample_after and not asked.sample_after.isdecimal():
        raise InvalidArgument("sample_after is the next_cursor of an earlier page")
    limit = min(asked.sample_limit, MAX_SAMPLE)
    page = cache.sample_keys(asked.sample_shard, limit, int(asked.sample_after or 0), max(1, asked.sample_stride))
    for key in page.keys:
        _add(inspection, cache, key.kind, key.id, key.atype)
    inspection.next_cursor = "" if page.after is None else str(page.after)
    inspection.shard_entries = page.total


def _add(inspection: pb.Inspection, cache: GraphCache, kind: EntryKind, key: int, atype: int) -> None:
    if kind == "object":
        value, floor = cache.peek_object(key), cache.floor_of_object(key)
    else:
        value = cache.peek_list(key, atype) if kind == "list" else cache.peek_count(key, atype)
        floor = cache.floor_of_list(key, atype)
    inspection.entries.add(kind=kind, id=key, atype=atype, value=value or b"", floor=floor)


def _tell(inspection: pb.Inspection, cache: GraphCache, key: int, atype: int) -> None:
    told = cache.witness.story_of(key, atype)
    story = inspection.stories.add(since_unix_ms=told.since_unix_ms)
    for event in told.events:
        story.events.add(
            unix_ms=event.unix_ms,
            event=event.event,
            version=event.version,
            cause=event.cause,
            of_shard=event.of_shard,
        )
