"""Invalidations reach all servers in the right order, and servers that could not be reached are reported."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from tao.admin.invalidation import SHARDS_PER_CALL, Types, invalidate, plan_invalidation, types_named
from tao.cli import invalidate as command
from tao.cli.commands import tao
from tao.model.errors import TaoError, TopologyError, Unavailable, UnknownType
from tao.model.topology import CacheServer, Topology
from tao.routing.routes import Routes
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, LIKES, SCHEMA, SHARDS, USER, make_topology
from tests.unit.leader.test_forwarded_writes import topology

TWO_REGIONS = Routes(topology(shard_1_in="west"))
ONE_REGION = Routes(make_topology())


@dataclass
class Servers:
    """Links to servers that invalidate what they are asked to, unless they are away."""

    away: set[str] = field(default_factory=set)
    received: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def to(self, server: CacheServer) -> _Server:
        return _Server(self, server.name)


@dataclass
class _Server:
    servers: Servers
    name: str

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        if self.name in self.servers.away:
            raise Unavailable("it is away")
        asked = request.invalidate
        self.servers.received.append((self.name, tuple(asked.shards), tuple(asked.atypes)))
        return pb.Answer(invalidated=pb.Invalidated(shards=len(asked.shards)))


def links(servers: Servers) -> Links:
    return cast(Links, servers)


async def test_master_leaders_come_before_the_other_regions_leaders_and_followers_last() -> None:
    servers = Servers()
    await invalidate(plan_invalidation(TWO_REGIONS, (), ()), links(servers), Types())
    assert [(name, shards) for name, shards, _ in servers.received] == [
        ("leader-east", (0,)),
        ("leader-west", (1,)),
        ("leader-east", (1,)),
        ("leader-west", (0,)),
        ("east-near-1", (0, 1)),
        ("west-near-1", (0, 1)),
    ]


async def test_shards_and_servers_and_types_narrow_it_together() -> None:
    servers = Servers()
    plan = plan_invalidation(ONE_REGION, (2, 1, 2), ("near-1",))
    (result,) = await invalidate(plan, links(servers), Types(atypes=(COMMENT,)))
    assert servers.received == [("near-1", (1, 2), (COMMENT,))]
    assert (result.server, result.role, result.region, result.has, result.invalidated) == (
        "near-1",
        "follower",
        "east",
        2,
        2,
    )


async def test_a_silent_server_is_named_and_all_others_are_invalidated() -> None:
    servers = Servers(away={"leader-1"})
    results = await invalidate(plan_invalidation(ONE_REGION, (0,), ()), links(servers), Types())
    assert {each.server for each in results if each.error} == {"leader-1"}
    assert {each.server for each in results if each.invalidated} == {"leader-2", "near-1", "near-2"}


async def test_many_shards_are_sent_in_parts_and_progress_is_reported() -> None:
    servers, progress = Servers(), list[int]()
    many = Routes(Topology(**{**{f: getattr(make_topology(), f) for f in ("version", "regions")}, **_many()}))
    plan = plan_invalidation(many, (), ("near-1",))
    await invalidate(plan, links(servers), Types(), lambda _, total: progress.append(total))
    assert [len(shards) for _, shards, _ in servers.received] == [SHARDS_PER_CALL, SHARDS_PER_CALL, 1]
    assert progress == [SHARDS_PER_CALL, 2 * SHARDS_PER_CALL, 2 * SHARDS_PER_CALL + 1]


def _many() -> dict[str, Any]:
    shards = 2 * SHARDS_PER_CALL + 1
    (database,) = make_topology().databases
    return {"shards": shards, "databases": (type(database)(**_of(database), shards=((0, shards - 1),)),)}


def _of(database: Any) -> dict[str, Any]:
    return {"name": database.name, "master_region": database.master_region, "servers": database.servers}


def test_what_does_not_exist_is_refused_before_anything_is_done() -> None:
    with pytest.raises(TopologyError, match="no shard 4"):
        plan_invalidation(ONE_REGION, (SHARDS,), ())
    with pytest.raises(TaoError, match="nobody"):
        plan_invalidation(ONE_REGION, (), ("nobody",))
    with pytest.raises(UnknownType, match="nothing"):
        types_named(SCHEMA, ("nothing",))


def test_types_are_named_or_numbered_and_a_name_of_both_kinds_means_both() -> None:
    assert types_named(SCHEMA, ("likes", "user")) == Types((USER,), (LIKES,))
    assert types_named(SCHEMA, (str(COMMENT),)) == Types((), (COMMENT,))
    assert types_named(SCHEMA, ("comment",)) == Types((SCHEMA.otype("comment").number,), (COMMENT,))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers = Servers()

    async def topology_of(_: object) -> Topology:
        return make_topology()

    async def work(_: Topology, plan: Any, types: Types) -> Any:
        return await invalidate(plan, links(servers), types)

    monkeypatch.setattr("tao.cli.invalidate.target_of", lambda *_: None)
    monkeypatch.setattr("tao.cli.invalidate.current_topology", topology_of)
    monkeypatch.setattr(command, "_invalidate", work)
    return servers


def call(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(tao, ["invalidate", *arguments], input=given, catch_exceptions=False)


def test_it_shows_the_plan_and_asks(servers: Servers) -> None:
    result = call("--range", "1-2", "--shard", "0", given="n\n")
    assert result.exit_code == 1
    assert "everything in shards 0, 1, 2" in result.stdout
    assert servers.received == []
    assert call("--shard", "0", given="y\n").exit_code == 0
    assert servers.received


def test_a_server_that_could_not_be_reached_is_listed_and_the_status_is_1(servers: Servers) -> None:
    servers.away.add("near-2")
    result = call("--shard", "0", "--yes", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["unreachable"] == ["near-2"]
    assert {each["server"]: each["invalidated"] for each in report["servers"]} == {
        "leader-1": 1,
        "leader-2": 1,
        "near-1": 1,
        "near-2": 0,
    }


@pytest.mark.parametrize("arguments", [[], ["--range", "2-1"], ["--range", "x"], ["--shard", "99"]])
def test_wrong_options_are_an_operators_mistake(servers: Servers, arguments: list[str]) -> None:
    assert CliRunner().invoke(tao, ["invalidate", *arguments, "--yes"]).exit_code == 2
    assert servers.received == []
