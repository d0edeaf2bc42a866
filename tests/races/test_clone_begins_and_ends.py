"""A clone starts or stops serving a shard while servers with old or new documents forward writes of that shard.

operator                     near-1, home, knows version 1          near-2, to be a clone       reader
                             writes go through it                   gets version 2
                             a write: hands nothing on              has the shard cached
← acknowledged
                                                                    answers from its cache  →   misses the write

So there are two documents. By the first, near-2 is handed every change and answers nothing. The second, which lets it
answer, is stored only when near-1 follows the first. A clone ends by the same steps in reverse.
"""

from __future__ import annotations

import asyncio

import pytest

from tao.model.errors import NotMine, TopologyConflict, TopologyError, Unavailable
from tao.model.topology import CacheServer, Topology
from tao.model.writes import AssocAdd
from tao.topology import edits
from tao.topology.clones import hosts_of, plan_copies
from tao.watcher.shard_clones import Cloner, CloningSettings
from tests.rigs.leader_rig import COMMENT, make_id
from tests.rigs.pacing import quiet, until
from tests.rigs.region_rig import FollowerRig, RegionRig

A, B = make_id(64), make_id(128)
PATIENT = CloningSettings(poll_seconds=0.001)


class Document:
    """A topology store; followers receive a version when the test delivers it."""

    def __init__(self, region: RegionRig) -> None:
        self.topology = region.topology
        self.followers = {each.name: each for each in (region.near, region.far)}
        self.steps: list[str] = []

    async def load(self) -> Topology:
        return self.topology

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        if self.topology.version != expected_version:
            raise TopologyConflict("somebody was faster")
        self.topology = changed
        return changed

    async def version_at(self, server: CacheServer) -> int:
        return self.followers[server.name].configuration.routes.version

    def cloner(self, settings: CloningSettings = PATIENT) -> Cloner:
        return Cloner(self, self.version_at, settings, self.steps.append)

    def deliver(self, *followers: FollowerRig) -> None:
        for each in followers:
            each.configuration.use_topology(self.topology)

    async def deliver_until(self, task: asyncio.Task[Topology]) -> Topology:
        while not task.done():
            self.deliver(*self.followers.values())
            await asyncio.sleep(0)
        return await task


@pytest.fixture
def document(region: RegionRig) -> Document:
    return Document(region)


async def clone(document: Document, copies: int) -> asyncio.Task[Topology]:
    cloner = document.cloner()
    return asyncio.ensure_future(cloner.run(await cloner.plan("east", "near", 0, copies)))


async def cloned(region: RegionRig, document: Document) -> None:
    await document.deliver_until(await clone(document, 1))
    await until(lambda: region.far.cache.is_open(0))


async def test_a_clone_serves_only_when_all_servers_that_forward_writes_know_it(
    region: RegionRig, document: Document
) -> None:
    near, far = region.near, region.far
    running = await clone(document, 1)
    await until(lambda: document.topology.version == 2)
    document.deliver(far)
    await quiet()
    assert document.topology.version == 2, "near-1 does not know yet"
    with pytest.raises(NotMine):
        await far.times(A, COMMENT)
    stored = await document.deliver_until(running)
    assert stored.version == 3
    far.links["leader-1"].hold_answers.add("subscribe")  # the leader's messages come later
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert await far.times(A, COMMENT) == [1]


async def test_a_server_that_knows_the_first_document_alone_hands_its_writes_to_a_clone_at_work(
    region: RegionRig, document: Document
) -> None:
    near, far = region.near, region.far
    running = await clone(document, 1)
    await until(lambda: document.topology.version == 2)
    document.deliver(near, far)
    await until(lambda: document.topology.version == 3)
    document.deliver(far)
    await until(lambda: far.cache.is_open(0))
    assert await far.times(A, COMMENT) == []
    far.links["leader-1"].hold_answers.add("subscribe")
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert near.configuration.routes.version == 2
    assert await far.times(A, COMMENT) == [1]
    await document.deliver_until(running)


async def test_a_clone_that_is_not_subscribed_yet_answers_what_it_fetches_and_keeps_nothing(
    region: RegionRig, document: Document
) -> None:
    near, far = region.near, region.far
    far.links["leader-1"].hold_answers.add("subscribe")
    await document.deliver_until(await clone(document, 1))
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert await far.times(A, COMMENT) == [1]
    assert not far.cache.is_open(0)
    await near.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    assert await far.times(A, COMMENT) == [2, 1]
    far.links["leader-1"].hold_answers.clear()
    far.links["leader-1"].let_go()
    await until(lambda: far.cache.is_open(0))


async def test_a_clone_has_ended_before_any_server_leaves_it_out(region: RegionRig, document: Document) -> None:
    near, far = region.near, region.far
    await cloned(region, document)
    assert await far.times(A, COMMENT) == []
    running = await clone(document, 0)
    await until(lambda: document.topology.version == 4)
    document.deliver(near)
    await quiet()
    assert document.topology.version == 4, "near-2 may still answer"
    far.links["leader-1"].hold_answers.add("subscribe")
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert await far.times(A, COMMENT) == [1], "it receives changes as long as it answers"
    document.deliver(far)
    with pytest.raises(NotMine) as refused:
        await far.times(A, COMMENT)
    assert refused.value.topology_version == 4, "a client learns where to go"
    far.links["leader-1"].hold_answers.clear()
    far.links["leader-1"].let_go()
    (tier,) = (await document.deliver_until(running)).regions[0].followers
    assert (hosts_of(tier, 0), tier.told) == (("near-1",), {})


async def test_a_clone_that_misses_a_change_drops_the_shard(region: RegionRig, document: Document) -> None:
    near, far = region.near, region.far
    await cloned(region, document)
    assert await far.times(A, COMMENT) == []
    far.links["leader-1"].hold_answers.add("subscribe")  # the leader's message does not come either
    near.links["near-2"].faults["apply"] = [Unavailable("cut off")]
    near.links["near-2"].faults["invalidate"] = [Unavailable("cut off")] * 3
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert near.writes.siblings_missed == 1
    await until(lambda: near.sibling_invalidation.dropped)
    assert await far.times(A, COMMENT) == [1]
    far.links["leader-1"].hold_answers.clear()
    far.links["leader-1"].let_go()


async def test_a_clone_that_cannot_be_reached_at_all_is_given_up_in_the_end(
    region: RegionRig, document: Document
) -> None:
    near = region.near
    await cloned(region, document)
    near.links["near-2"].down = True
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    await until(lambda: sum(sent.HasField("invalidate") for sent in near.links["near-2"].sent) == 8)
    await until(lambda: not near.sibling_invalidation.is_pending)
    assert near.sibling_invalidation.dropped == 0


async def test_an_interrupted_change_is_continued(region: RegionRig, document: Document) -> None:
    cloner = document.cloner(CloningSettings(poll_seconds=0.001, timeout_seconds=0.5))
    with pytest.raises(Unavailable, match="near-1, near-2 did not hear of topology version 2"):
        await cloner.run(await cloner.plan("east", "near", 0, 1))
    plan = await cloner.plan("east", "near", 0, 1)
    assert (plan.between, plan.extra_receivers) == (("near-1",), ("near-2",))
    await cloned(region, document)
    assert document.topology.regions[0].followers[0].moved[0] == ("near-1", "near-2")


async def test_a_server_that_is_marked_down_is_not_waited_for(region: RegionRig, document: Document) -> None:
    running = await clone(document, 1)
    await until(lambda: document.topology.version == 2)
    document.deliver(region.far)
    document.topology = edits.mark_server(document.topology, "near-1", down=True)
    await until(lambda: document.topology.version == 4)
    document.deliver(region.far)
    assert (await running).version == 4


async def test_another_change_of_the_document_between_the_steps_is_kept(region: RegionRig, document: Document) -> None:
    running = await clone(document, 1)
    await until(lambda: document.topology.version == 2)
    document.topology = edits.mark_server(document.topology, "leader-2", down=True)
    stored = await document.deliver_until(running)
    assert [each.down for each in stored.regions[0].leaders.servers] == [False, True]


async def test_a_shard_that_is_placed_otherwise_between_the_steps_is_left_alone(
    region: RegionRig, document: Document
) -> None:
    running = await clone(document, 1)
    await until(lambda: document.topology.version == 2)
    document.topology = edits.move_shard(document.topology, "east", "near", 0, "near-2")
    document.deliver(region.near, region.far)
    with pytest.raises(TopologyError, match="placed otherwise"):
        await running
    stale = plan_copies(region.topology, "east", "near", 0, 1)
    with pytest.raises(TopologyError, match="look again"):
        await document.cloner().run(stale)
