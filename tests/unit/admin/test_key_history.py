"""The history of a key is one timeline of all servers' events, with the versions that each server has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from tao.admin.key_history import SENTENCES, key_timeline, version_text
from tao.cache import key_recorder
from tao.cache.outcomes import Applied, Stored
from tao.model.errors import InvalidArgument, Unavailable
from tao.model.graph import encode_count, encode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer
from tao.routing.routes import Routes
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, SHARDS, USER, make_id, make_topology
from tests.rigs.versions import make_version

A = make_id(64)
V1, V2 = make_version(1, 1), make_version(1, 2)
ROUTES = Routes(make_topology())


@dataclass
class Servers:
    """What each server says; who is not there is away. ``stored``: what a critical read is answered with, ``later``:
    what they say after it."""

    inspections: dict[str, pb.Inspection] = field(default_factory=dict)
    stored: bytes | None = None
    later: dict[str, pb.Inspection] = field(default_factory=dict)

    def to(self, server: CacheServer) -> _Server:
        return _Server(self, server.name)


@dataclass
class _Server:
    servers: Servers
    name: str

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        if request.HasField("read"):
            assert request.read.critical
            if self.servers.stored is None:
                raise Unavailable("no database")
            self.servers.inspections.update(self.servers.later)
            return pb.Answer(read=pb.ReadAnswer(values=[self.servers.stored]))
        if self.name not in self.servers.inspections:
            raise Unavailable("it is away")
        return pb.Answer(inspection=self.servers.inspections[self.name])


def said(version: int | None, *events: tuple[int, str, int]) -> pb.Inspection:
    inspection = pb.Inspection()
    value = b"" if version is None else encode_object(version, USER, b"")
    inspection.entries.add(kind="object", id=A, value=value, floor=V2)
    story = inspection.stories.add(since_unix_ms=5)
    for unix_ms, event, event_version in events:
        story.events.add(unix_ms=unix_ms, event=event, version=event_version, cause="somebody")
    return inspection


async def test_events_are_ordered_by_time_and_each_servers_events_keep_their_order() -> None:
    servers = Servers(
        {
            "leader-1": said(V2, (20, "applied", V2)),
            "leader-2": said(None),
            "near-1": said(V1, (10, "fill_begun", 0), (10, "stored", V1), (30, "evicted", V1)),
            "near-2": said(None, (15, "not_cached", V2)),
        },
        encode_object(V2, USER, b""),
    )
    history = await key_timeline(ROUTES, cast(Links, servers), A, 0, recheck_seconds=0)
    assert [(event.server, event.event) for event in history.events] == [
        ("near-1", "fill_begun"),
        ("near-1", "stored"),
        ("near-2", "not_cached"),
        ("leader-1", "applied"),
        ("near-1", "evicted"),
    ]
    assert [held.server for held in history.servers] == ["leader-1", "near-1", "near-2"]
    assert [held.server for held in history.stale] == ["near-1"]
    assert history.stored_version == V2


async def test_a_write_between_two_looks_makes_no_server_stale() -> None:
    """The servers are asked before the database: under writes they hold less than it has then, for a moment."""
    old, new = said(V1), said(V2, (20, "applied", V2))
    servers = Servers({"leader-1": old, "near-1": old, "near-2": old}, encode_object(V2, USER, b""))
    servers.later = {"leader-1": new, "near-1": new, "near-2": said(None, (20, "dropped", V2))}
    history = await key_timeline(ROUTES, cast(Links, servers), A, 0, recheck_seconds=0)
    assert [held.cached_version for held in history.servers if not held.error] == [V1, V1, V1], "as they were"
    assert history.stale == []


async def test_an_owner_that_has_the_version_only_from_this_query_was_stale() -> None:
    owner = ROUTES.leaders(ROUTES.master_region(A >> SHARD_SHIFT)).home(A >> SHARD_SHIFT).name
    servers = Servers({owner: said(V1, (10, "stored", V1))}, encode_object(V2, USER, b""))
    servers.later = {owner: said(V2, (10, "stored", V1), (20, "stored", V2))}
    history = await key_timeline(ROUTES, cast(Links, servers), A, 0, recheck_seconds=0)
    assert [held.server for held in history.stale] == [owner]


async def test_silent_servers_are_named_and_the_rest_is_shown_even_without_the_database() -> None:
    servers = Servers({"near-1": said(V1)})
    history = await key_timeline(ROUTES, cast(Links, servers), A, 0, recheck_seconds=0)
    assert {held.server for held in history.unreachable} == {"leader-1", "leader-2", "near-2"}
    assert (history.stored_version, history.stored_error) == (None, "no database")
    assert history.stale == []


async def test_a_list_is_held_when_its_count_is() -> None:
    inspection = pb.Inspection()
    inspection.entries.add(kind="list", id=A, atype=COMMENT)
    inspection.entries.add(kind="count", id=A, atype=COMMENT, value=encode_count(V1, 3))
    inspection.stories.add()
    servers = Servers(dict.fromkeys(("leader-1", "leader-2", "near-1", "near-2"), inspection), encode_count(V2, 4))
    history = await key_timeline(ROUTES, cast(Links, servers), A, COMMENT, recheck_seconds=0)
    assert {held.cached_version for held in history.servers} == {V1}
    assert len(history.stale) == 4


async def test_an_id_of_no_shard_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="this cluster has"):
        await key_timeline(ROUTES, cast(Links, Servers()), make_id(1, SHARDS), 0)


def test_every_event_has_a_sentence() -> None:
    own = {value for name, value in vars(key_recorder).items() if name.isupper()}
    assert set(SENTENCES) == own | {str(each) for each in (*Applied, *Stored)}


def test_versions_are_shown_as_epoch_and_number_of_changes() -> None:
    assert [version_text(version) for version in (V2, make_version(3, 7), 0, None)] == ["1.2", "3.7", "-", "-"]
