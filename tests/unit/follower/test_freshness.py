"""The staleness bounds of a follower: only from proofs of the current leader, and only behind the messages."""

from __future__ import annotations

from math import inf

import pytest

from tao.delivery.inbox import Inbox
from tao.follower.subscriptions import Freshness
from tao.model.delivery import Delivery, Span
from tao.model.errors import StaleRead, Unavailable
from tao.model.writes import AssocAdd
from tao.runtime.clock import LoopClock
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, make_id
from tests.rigs.pacing import ManualClock, until
from tests.rigs.region_rig import FollowerRig, RegionRig

A, B = make_id(64), make_id(128)
HOSTED = frozenset(range(4))


class Known:
    """Shards 0 and 1 are of ``db-0``, 2 and 3 of ``db-1``; ``leader-1`` sends 0 and 2, ``leader-2`` 1 and 3."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.inbox = Inbox(database_of)
        self.inbox.positions_for(HOSTED)
        self.freshness = Freshness(self.clock.unix_ms, database_of, self.inbox.proven_unix_ms)
        for leader, shards in (("leader-1", (0, 2)), ("leader-2", (1, 3))):
            self.inbox.begin_stream(leader)
            self.inbox.confirm(leader, shards)

    def note_proven(self, leader: str, *databases: str) -> None:
        """Note that the leader has proved these databases as of now."""
        proven = tuple((database, self.clock.unix_ms()) for database in databases)
        self.inbox.prove(leader, Delivery(1, proven=proven))

    def ages(self) -> list[float]:
        return [self.freshness.staleness_ms(shard) for shard in range(4)]


def database_of(shard: int) -> str:
    return f"db-{shard // 2}"


def test_a_proof_counts_for_the_leader_s_own_shards_of_that_database() -> None:
    known = Known()
    assert known.ages() == [inf] * 4
    known.note_proven("leader-1", "db-0", "db-1")
    known.clock.now += 2
    known.note_proven("leader-2", "db-1")
    assert known.ages() == [2_000, inf, 2_000, 0]
    assert known.freshness.by_database(HOSTED) == {"db-0": inf, "db-1": 2.0}


def test_the_bounds_of_all_databases_look_at_each_shard_once() -> None:
    known = Known()
    for leader in ("leader-1", "leader-2"):
        known.note_proven(leader, "db-0", "db-1")
    looked: list[int] = []
    times: list[int] = []

    def proven_unix_ms(shard: int) -> int:
        looked.append(shard)
        return known.inbox.proven_unix_ms(shard)

    def unix_ms() -> int:
        times.append(known.clock.unix_ms())
        return times[-1]

    assert Freshness(unix_ms, database_of, proven_unix_ms).by_database(HOSTED) == {"db-0": 0.0, "db-1": 0.0}
    assert (sorted(looked), len(times)) == ([0, 1, 2, 3], 2), "the clock is read once for each database"


def test_without_proofs_the_bound_grows_and_older_proofs_do_not_raise_it() -> None:
    known = Known()
    known.note_proven("leader-1", "db-0")
    proven = known.clock.unix_ms()
    known.clock.now += 30
    assert known.ages()[0] == 30_000
    known.inbox.prove("leader-1", Delivery(2, proven=(("db-0", proven - 1),)))
    assert known.ages()[0] == 30_000


def test_a_shard_whose_leader_sends_no_more_keeps_its_time() -> None:
    known = Known()
    known.note_proven("leader-1", "db-0")
    known.inbox.suspend((0,))
    known.clock.now += 1
    known.note_proven("leader-1", "db-0")
    assert known.ages()[0] == 1_000
    known.inbox.confirm("leader-1", (0,))
    assert known.ages()[0] == 1_000, "what was proved meanwhile says nothing about this shard"
    known.note_proven("leader-1", "db-0")
    assert known.ages()[0] == 0


def test_a_proof_of_the_same_time_holds_for_the_shards_confirmed_in_between() -> None:
    known = Known()
    known.note_proven("leader-1", "db-0")
    known.inbox.confirm("leader-1", (1,))
    assert known.ages()[1] == inf
    known.note_proven("leader-1", "db-0")
    assert known.ages()[1] == 0


def test_no_leader_is_trusted_for_a_moved_shard_before_the_new_one_confirms_it() -> None:
    known = Known()
    known.note_proven("leader-1", "db-0")
    known.note_proven("leader-2", "db-0")
    known.inbox.suspend((0,))
    known.clock.now += 1
    known.note_proven("leader-1", "db-0")
    known.note_proven("leader-2", "db-0")
    assert known.ages()[:2] == [1_000, 0]
    known.inbox.confirm("leader-2", [0])
    known.note_proven("leader-2", "db-0")
    assert known.ages()[0] == 0


def test_a_new_stream_of_a_leader_proves_nothing_of_shards_that_it_has_not_confirmed_in_it() -> None:
    known = Known()
    known.note_proven("leader-1", "db-0", "db-1")
    known.inbox.begin_stream("leader-1")
    known.inbox.confirm("leader-1", (2,))
    known.clock.now += 1
    known.note_proven("leader-1", "db-0", "db-1")
    assert known.ages() == [1_000, inf, 0, inf]
    known.inbox.end_stream("leader-1")
    assert known.ages() == [1_000, inf, 0, inf]


def test_shards_that_are_not_hosted_any_more_are_forgotten() -> None:
    known = Known()
    known.note_proven("leader-1", "db-0", "db-1")
    for shard in (0, 1, 3):
        known.inbox.forget(shard)
    assert known.ages() == [inf, inf, 0, inf]


def prove(region: RegionRig, seconds_ago: float = 0) -> None:
    spans = [Span(shard, "db@1:0-1", 1, 1) for shard in region.leader.ownership.owned]
    region.leader.publisher.publish_relay((), spans)
    region.leader.publisher.prove("db", LoopClock().unix_ms() - int(1000 * seconds_ago))


def staleness_ms(follower: FollowerRig) -> float:
    return follower.subscriptions.freshness.staleness_ms(0)


async def read(follower: FollowerRig, max_staleness_ms: int) -> bytes:
    return await follower.read(obj_ids=[A], max_staleness_ms=max_staleness_ms)


async def test_a_proof_does_not_overtake_the_messages_that_wait_before_it(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    prove(region, seconds_ago=60)
    await until(lambda: staleness_ms(near) < inf)
    link.hold_answers.add("subscribe")
    await region.leader.write(AssocAdd(A, COMMENT, B, 1, b""))
    prove(region)
    await until(lambda: len(link.held) == 2)
    assert staleness_ms(near) >= 60_000
    link.let_go()
    await until(lambda: staleness_ms(near) < 60_000)
    assert near.subscriptions.messages == 1


async def test_a_follower_whose_leader_is_down_reports_growing_staleness(region: RegionRig) -> None:
    near = region.near
    prove(region, seconds_ago=60)
    await until(lambda: staleness_ms(near) < inf)
    near.links["leader-1"].break_off()
    await until(lambda: near.subscriptions.unsubscribed)
    assert staleness_ms(near) >= 60_000


async def test_a_read_that_asks_for_fresher_data_than_proven_here_goes_to_the_master(region: RegionRig) -> None:
    near, store = region.near, region.store
    await near.read(obj_ids=[A])
    before = len(store.reads)
    await read(near, 1_000)  # nothing is known yet
    assert [critical for _, critical in store.reads[before:]] == [True]
    prove(region, seconds_ago=60)
    await until(lambda: staleness_ms(near) < inf)
    await read(near, 3_600_000)
    assert len(store.reads) == before + 1
    await read(near, 1_000)
    assert [critical for _, critical in store.reads[before:]] == [True, True]
    await near.read(obj_ids=[A])
    assert len(store.reads) == before + 2
    assert near.reads.misses.too_stale == 2


async def test_a_batch_is_read_from_the_master_only_where_it_is_too_old(region: RegionRig) -> None:
    near, store = region.near, region.store
    prove(region)  # of all shards that leader-1 leads, on the one database
    await until(lambda: staleness_ms(near) < inf)
    other = make_id(64, 2)
    await near.read(obj_ids=[A])
    await near.read(obj_ids=[other])
    near.subscriptions._inbox.forget(2)
    before = len(store.reads)
    batch = pb.ReadBatch(obj_ids=[A, other], max_staleness_ms=3_600_000)
    answer = (await near.ask(pb.Request(read=batch))).read
    assert sorted(answer.slots) == [0, 1]
    assert list(answer.missed_slots) == [1]
    assert len(store.reads) == before + 1


async def test_when_the_master_cannot_be_read_either_the_error_says_how_old_the_answer_would_be(
    region: RegionRig,
) -> None:
    near = region.near
    prove(region, seconds_ago=60)
    await until(lambda: staleness_ms(near) < inf)
    region.store.read_faults = [Unavailable("the sea is rough")] * 20
    with pytest.raises(StaleRead, match=r"up to 60\.\d s here, max_staleness_ms is 1000.*the sea is rough"):
        await read(near, 1_000)
