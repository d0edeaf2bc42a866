"""Two regions route by different topologies, and each takes the other for the master of a shard.

    follower          leader-east, topology 2           leader-west, topology 1
    writes       →    the master is in west: passes on  →   the master is in east: passes on …
                  …   passes on  →                      →   … until the deadline: OUTCOME_UNKNOWN,
                                                            although nothing was ever written

One hop between regions instead: what another region has sent is answered `NOT_MINE`, with the version that it was
judged by. The sender looks for that version, sends nothing before it has it, and tries again within its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from tao.leader.replica_shards import ForwardedWrites
from tao.model.errors import DeadlineExceeded, NotMine, TaoError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.model.writes import AssocAdd
from tao.runtime.clock import LoopClock
from tao.wire.convert import error_from_pb, write_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, LeaderRig, make_id
from tests.rigs.links_rig import MemoryLinks, MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import until

A, B = make_id(64), make_id(128)
DEADLINE_MS = 20_000
"""Long enough for all attempts."""


def topology(version: int, master_region: str) -> Topology:
    def region(name: str) -> Region:
        leader = CacheServer(name=f"leader-{name}", grpc=f"leader-{name}:7000")
        near = CacheServer(name=f"{name}-near-1", grpc=f"{name}-near-1:7000")
        return Region(
            name=name,
            leaders=Tier(name="leaders", servers=(leader,)),
            followers=(Tier(name="near", servers=(near,)),),
        )

    servers = {name: DatabaseServer(name=f"db-{name}") for name in ("east", "west")}
    database = Database(name="db", master_region=master_region, servers=servers, shards=((0, 0),))
    return Topology(version=version, shards=1, regions=(region("east"), region("west")), databases=(database,))


class Regions:
    """The leaders of two regions and one store. Each leader has a topology of its own."""

    def __init__(self) -> None:
        self.store = MemoryStore(1)
        self.links = {name: MemoryLinks(f"leader-{name}") for name in ("east", "west")}
        self.leaders = {
            name: LeaderRig(
                self.store,
                self.store,
                name=f"leader-{name}",
                clock=LoopClock(),
                topology=topology(1, "east"),
                region=name,
                links=links.as_links(),
            )
            for name, links in self.links.items()
        }
        for links in self.links.values():
            for name, leader in self.leaders.items():
                links[f"leader-{name}"].handler = leader.service

    async def learn(self, name: str, version: int, master_region: str) -> None:
        leader = self.leaders[name]
        leader.configuration.use_topology(topology(version, master_region))
        if master_region == name:
            await leader.take(0)
        else:
            leader.ownership.want(())

    def sent(self, sender: str, to: str) -> int:
        return sum(request.HasField("write") for request in self.links[sender][f"leader-{to}"].sent)

    async def write(self, through: str, *, within_ms: int = DEADLINE_MS) -> TaoError | None:
        """Write an edge as a follower of that region does; return the error."""
        answers: list[pb.Answer] = []
        batch = pb.WriteBatch(writes=[write_to_pb(AssocAdd(A, COMMENT, B, 1, b""))])
        request = pb.Request(write=batch, deadline_ms=within_ms)
        self.leaders[through].service.handle(request, MemoryReply(answers.append, peer=f"{through}-near-1"))
        await until(lambda: answers)
        (result,) = answers[-1].write.results
        return error_from_pb(result.error) if result.HasField("error") else None

    def is_written(self) -> bool:
        return bool(self.store.edges(A, COMMENT))


@pytest.fixture
async def regions() -> AsyncIterator[Regions]:
    rig = Regions()
    yield rig
    for leader in rig.leaders.values():
        await leader.close()
        assert leader.tasks.errors == []


async def test_a_write_goes_one_hop_and_is_done_when_its_receiver_has_learned_the_topology(regions: Regions) -> None:
    await regions.learn("east", 2, "west")
    writing = asyncio.ensure_future(regions.write("east"))
    await until(lambda: regions.sent("east", "west") == 2)
    assert regions.sent("west", "east") == 0, "the receiver passes nothing on"
    await regions.learn("west", 2, "west")
    assert await writing is None
    assert regions.is_written()


async def test_a_sender_that_hears_of_a_newer_topology_sends_nothing_before_it_has_it(regions: Regions) -> None:
    await regions.learn("east", 2, "west")
    await regions.learn("west", 3, "east")
    writing = asyncio.ensure_future(regions.write("east"))
    looks = 0
    east = regions.leaders["east"].configuration
    refresh = east.refresh

    async def count(seconds: float = 0.0) -> bool:
        nonlocal looks
        looks += 1
        return await refresh(seconds)

    east.refresh = count  # type: ignore[method-assign]
    await until(lambda: looks == 3)
    assert regions.sent("east", "west") == 1
    await regions.learn("east", 3, "east")
    assert await writing is None
    assert regions.is_written()
    assert regions.sent("east", "west") == 1


@pytest.mark.parametrize("newer", ["east", "west"])
async def test_a_write_that_no_region_takes_fails_with_its_cause_and_not_with_an_unknown_outcome(
    regions: Regions, newer: str
) -> None:
    await regions.learn("east", 2, "west")
    if newer == "west":
        await regions.learn("west", 3, "east")
        regions.leaders["west"].ownership.want(())
    error = await regions.write("east", within_ms=1_000)
    assert isinstance(error, DeadlineExceeded), error
    assert "leader-west" in error.message
    assert regions.sent("west", "east") == 0
    assert regions.sent("east", "west") <= 6
    assert not regions.is_written()


async def test_reservations_and_critical_reads_go_one_hop_too(regions: Regions) -> None:
    """The leader in west believes that east masters the shard, and is asked by the leader of east."""
    west = regions.leaders["west"]
    answers: list[pb.Answer] = []
    reserve = pb.Request(reserve_ids=pb.ReserveIds(shard=0, count=1), deadline_ms=DEADLINE_MS)
    with pytest.raises(NotMine) as refused:
        west.service.handle(reserve, MemoryReply(answers.append, peer="leader-east"))
    assert refused.value.topology_version == 1
    forwarded: ForwardedWrites = west.forwarded
    for peer, may in (("leader-east", False), ("east-near-1", False), ("west-near-1", True), ("operator", True)):
        assert forwarded.may_pass_on(MemoryReply(answers.append, peer=peer).peer) is may


def test_the_topologies_differ_in_the_master_alone() -> None:
    one, two = topology(1, "east"), topology(1, "west")
    (database,) = one.databases
    assert msgspec.structs.replace(one, databases=(msgspec.structs.replace(database, master_region="west"),)) == two
