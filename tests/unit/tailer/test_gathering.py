"""What the region's leader has told already waits for more of the kind; nothing else does."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tao.model.errors import NotMine, Unavailable
from tao.model.relay import Touch
from tao.planning.row_events import Translated
from tao.routing.routes import Routes
from tao.tailer.settings import DeliverySettings
from tests.rigs.leader_rig import make_id, make_topology
from tests.rigs.pacing import until
from tests.unit.tailer.test_delivery_path import BOTH, Rig, about, change, turns

NEVER = DeliverySettings(gather_seconds=3_600, gather_parts=4, backoff_first_seconds=0.001, backoff_max_seconds=0.002)


async def test_what_the_leader_has_told_waits_for_more_and_goes_together() -> None:
    rig = Rig(replace(NEVER, gather_seconds=0.05))
    for version in range(1, 4):
        await rig.path.submit(f"t{version}", about(change(0, version)))
        await turns()
    assert not rig.leaders.told
    await rig.path.drained()
    assert [len(relay.changes[0].messages) for _, relay in rig.leaders.told] == [3]
    assert rig.acknowledged == ["t1", "t2", "t3"]


async def test_so_many_do_not_wait() -> None:
    rig = Rig(NEVER)
    for version in range(1, 7):
        await rig.path.submit(f"t{version}", about(change(0, version)))
        await turns()
    assert [len(relay.changes[0].messages) for _, relay in rig.leaders.told] == [4]
    for version in range(7, 9):
        await rig.path.submit(f"t{version}", about(change(0, version)))
    await rig.path.drained()
    assert rig.leaders.versions(0) == list(range(1, 9))


async def test_what_nobody_has_told_takes_along_what_waits_with_its_leader() -> None:
    for urgent, proven in ((Translated(touches=(Touch(make_id(1, 0), 4, 9),)), 0), (about(), 5_000)):
        rig = Rig(NEVER)
        await rig.path.submit("t1", about(change(0, 1)))
        await turns()
        assert not rig.leaders.told
        await rig.path.submit("t2", urgent, proven)
        await rig.path.drained()
        assert [relay.changes[0].shard for leader, relay in rig.leaders.told if leader == "leader-1"] == [0]


async def test_what_no_position_counts_or_another_region_commits_is_told_at_once() -> None:
    for gtid, master in (("", "east"), ("t1", "west")):
        rig = Rig(NEVER)
        topology = make_topology(leaders=BOTH)
        databases = tuple(msgspec.structs.replace(each, master_region=master) for each in topology.databases)
        rig.routes = Routes(msgspec.structs.replace(topology, databases=databases))
        await rig.path.submit(gtid, about(change(0, 1)))
        await rig.path.drained()
        assert rig.leaders.versions(0) == [1]


async def test_a_leader_that_was_away_is_told_as_soon_as_it_is_there_whatever_waits() -> None:
    rig = Rig(NEVER)
    rig.leaders.failures["leader-1"] = lambda _: Unavailable("away") if len(rig.leaders.attempts) < 3 else None
    for version in range(1, 6):
        await rig.path.submit(f"t{version}", about(change(0, version)))
    await rig.path.submit("t6", about(change(0, 6)), 5_000)
    await rig.path.drained()
    assert rig.leaders.versions(0) == [1, 2, 3, 4, 5, 6]


async def test_what_waited_behind_a_held_shard_waits_for_no_more_once_it_is_accepted() -> None:
    rig = Rig(NEVER)
    rig.leaders.failures["leader-1"] = lambda _: NotMine("no", 1)
    await rig.path.submit("t1", Translated(bulk_shards=(0,)))
    await until(lambda: bool(rig.path._lanes["leader-1"].refused))
    await rig.path.submit("t2", about(), 5_000)
    rig.leaders.failures.clear()
    await until(lambda: any(relay.source_unix_ms for leader, relay in rig.leaders.told if leader == "leader-1"))
    await rig.path.drained()
    assert rig.acknowledged == ["t1", "t2"]
