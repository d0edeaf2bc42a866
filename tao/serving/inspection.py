"""Inspect a cache without touching it, and compare its entries with the database.

An inspection returns what is cached for given keys and what happened to them, which keys of a shard are cached, or what
is read most. The comparison of an entry is a pure function of encoded values. Versions separate a change in flight from
an error: an entry of the stored version must equal the stored value, an older one may be about to be corrected, and a
newer one may mean that the database was read first. The latter two are checked again later.
"""

from __future__ import annotations

import enum
from typing import Final

from tao.cache import GraphCache
from tao.cache.outcomes import EntryKind
from tao.model.edge_block import COMPLETE, PREFIX, decode_block, header
from tao.model.errors import InvalidArgument
from tao.model.graph import version_of
from tao.serving.traffic import Traffic
from tao.wire.v1 import session_pb2 as pb

MAX_SAMPLE: Final = 1_000
"""Most entries in one page of a sample: each may be a list of hundreds of kilobytes."""

MAX_STORIES: Final = 10
"""Most keys in one request for key histories: each is a search through the whole event log, which takes
milliseconds."""


def inspect(cache: GraphCache, traffic: Traffic, asked: pb.Inspect) -> pb.Inspection:
    """Return the entries, version floors and, if wanted, the histories of the named keys, a page of a shard's keys, or
    what is read most. Raises `InvalidArgument`."""
    inspection = pb.Inspection()
    if len(asked.list_id1s) != len(asked.list_atypes):
        raise InvalidArgument("list_id1s and list_atypes differ in length")
    if asked.stories and len(asked.obj_ids) + len(asked.list_id1s) > MAX_STORIES:
        raise InvalidArgument(f"ask for the histories of at most {MAX_STORIES} keys at a time")
    for object_id in asked.obj_ids:
        _add(inspection, cache, "object", object_id, 0)
        if asked.stories:
            _add_history(inspection, cache, object_id, 0)
    for id1, atype in zip(asked.list_id1s, asked.list_atypes, strict=True):
        _add(inspection, cache, "list", id1, atype)
        _add(inspection, cache, "count", id1, atype)
        if asked.stories:
            _add_history(inspection, cache, id1, atype)
    if asked.sample_limit:
        _sample(cache, asked, inspection)
    if asked.hot_limit:
        inspection.traffic.CopyFrom(traffic.most_read(asked.hot_limit))
    return inspection


def _sample(cache: GraphCache, asked: pb.Inspect, inspection: pb.Inspection) -> None:
    if asked.sample_after and not asked.sample_after.isdecimal():
        raise InvalidArgument("sample_after must be the next_cursor of an earlier page")
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


def _add_history(inspection: pb.Inspection, cache: GraphCache, key: int, atype: int) -> None:
    history = cache.recorder.history_of(key, atype)
    story = inspection.stories.add(since_unix_ms=history.since_unix_ms)
    for event in history.events:
        story.events.add(
            unix_ms=event.unix_ms,
            event=event.event,
            version=event.version,
            cause=event.cause,
            of_shard=event.of_shard,
        )


class Verdict(enum.Enum):
    """The result of one comparison."""

    EQUAL = "equal"
    BEHIND = "behind"
    """The cache holds an older version."""
    AHEAD = "ahead"
    """The cache holds a version that the database does not have."""
    DIFFERENT = "different"
    """The cache holds the same version with other content, which is always an error."""


def compare_value(cached: bytes, stored: bytes) -> Verdict:
    """Compare objects or counts, which have one encoding."""
    return _by_version(cached, stored) or (Verdict.EQUAL if cached == stored else Verdict.DIFFERENT)


def compare_list(cached: bytes, stored: bytes) -> Verdict:
    """Compare a cached list. ``stored`` is a prefix that is at least one edge longer than ``cached``, or the whole
    list."""
    if cached == stored:
        return Verdict.EQUAL  # the usual case of a list that is cached as a whole
    by_version = _by_version(cached, stored)
    if by_version is not None:
        return by_version
    _, count, n, flags = header(cached)
    _, stored_count, _, _ = header(stored)
    same = (
        count == stored_count
        and bool(flags & PREFIX)
        and bool(flags & COMPLETE) == (n == count)
        and decode_block(cached) == decode_block(stored)[:n]
    )
    return Verdict.EQUAL if same else Verdict.DIFFERENT


def _by_version(cached: bytes, stored: bytes) -> Verdict | None:
    held, have = version_of(cached), version_of(stored)
    if held == have:
        return None
    return Verdict.BEHIND if held < have else Verdict.AHEAD
