"""Relays that a leader does not accept, or not for one shard, delay nothing else and use bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.model.errors import InternalError, InvalidArgument, NotMine, ShardBlocked, TaoError, Unavailable
from tao.model.relay import Relay, Relayed, Touch
from tao.model.topology import CacheServer
from tao.planning.row_events import Translated
from tao.routing.routes import Routes, TierRoutes
from tao.tailer.settings import OutboxSettings
from tests.rigs.leader_rig import make_id, make_topology
from tests.rigs.pacing import until
from tests.unit.tailer.test_delivery_path import BOTH, Rig, about, change, turns


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    for task in rig.tasks:
        task.cancel()
    await asyncio.gather(*rig.tasks, return_exceptions=True)


def speaks_of(relay: Relay, shard: int) -> bool:
    return shard in relay.bulk_shards or any(each.shard == shard for each in relay.changes)


async def test_receipts_are_merged_while_a_leader_is_away_and_all_transactions_finish_in_the_end(rig: Rig) -> None:
    rig.leaders.failures["leader-2"] = lambda _: Unavailable("away")
    await rig.path.submit("0-1-1", about(change(1, 1)))
    for number in range(2, 1_000):
        await rig.path.submit(f"{number % 2}-1-{number}", about(change(0, number)))
        if number % 100 == 0:
            await until(lambda: not rig.path._outboxes["leader-1"].parts)
    await until(lambda: not rig.path._outboxes["leader-1"].parts)
    assert len(rig.path._receipts) < 100
    rig.leaders.failures.clear()
    await rig.path.drained()
    assert rig.acknowledged[0] == "0-1-1"
    assert {"0-1-998", "1-1-999"} <= set(rig.acknowledged)


async def test_a_leader_that_is_away_delays_no_other_and_later_receives_bulk_invalidations() -> None:
    rig = Rig(OutboxSettings(backoff_first_seconds=0.001, backoff_max_seconds=0.002, unacknowledged_bytes=20_000))
    rig.leaders.failures["leader-2"] = lambda _: Unavailable("away")
    for version in range(1, 300):
        await rig.path.submit(f"0-1-{version}", about(change(1, version)), version)
    await rig.path.submit("0-1-300", about(change(0, 7)))
    await until(lambda: rig.leaders.versions(0) == [7])
    assert rig.acknowledged == []
    assert rig.path.dropped_parts > 0
    rig.leaders.failures.clear()
    await rig.path.drained()
    assert any(leader == "leader-2" and relay.bulk_shards == (1,) for leader, relay in rig.leaders.relayed)
    assert rig.leaders.versions(1) == sorted(rig.leaders.versions(1))
    assert max(relay.source_unix_ms for leader, relay in rig.leaders.relayed if leader == "leader-2") == 299
    assert rig.acknowledged[-1] == "0-1-300"
    assert rig.path.unacknowledged_bytes == 0
    await asyncio.gather(*rig.tasks)


async def test_a_shard_that_is_not_accepted_delays_no_other_and_no_time_is_proved_meanwhile(rig: Rig) -> None:
    rig.leaders.failures["leader-1"] = lambda relay: NotMine("no", 1) if speaks_of(relay, 2) else None
    await rig.path.submit("t1", about(change(2, 1), change(0, 1)))
    for version in range(2, 20):
        await rig.path.submit(f"t{version}", about(change(0, version), change(2, version)), version)
        await turns()
    await until(lambda: rig.leaders.versions(0) == list(range(1, 20)))
    assert all(not relay.source_unix_ms for leader, relay in rig.leaders.relayed if leader == "leader-1")
    rig.leaders.failures.clear()
    await rig.path.drained()
    assert rig.leaders.versions(2) == list(range(1, 20))
    assert rig.leaders.relayed[-1][1].source_unix_ms == 19
    assert rig.acknowledged == [f"t{version}" for version in range(1, 20)]
    assert rig.path.unacknowledged_bytes == 0


async def test_a_held_shard_is_reduced_to_an_invalidation_and_others_keep_their_messages() -> None:
    rig = Rig(OutboxSettings(backoff_first_seconds=0.001, backoff_max_seconds=0.002, unacknowledged_bytes=20_000))
    rig.leaders.failures["leader-1"] = lambda relay: NotMine("no", 1) if speaks_of(relay, 2) else None
    for version in range(1, 200):
        await rig.path.submit(f"0-1-{version}", about(change(0, version), change(2, version)))
    await until(lambda: rig.leaders.versions(0) == list(range(1, 200)))
    rig.leaders.failures.clear()
    await rig.path.drained()
    assert any(relay.bulk_shards == (2,) for _, relay in rig.leaders.relayed)
    await asyncio.gather(*rig.tasks)


async def test_content_on_which_a_leader_fails_twice_is_invalidated_and_the_rest_is_sent_unchanged(rig: Rig) -> None:
    rig.leaders.failures["leader-1"] = lambda relay: (
        InternalError("a bug") if any(each.shard == 2 for each in relay.changes) else None
    )
    await rig.path.submit("t1", about(change(2, 1), change(0, 7)))
    await rig.path.drained()
    assert rig.leaders.versions(0) == [7]
    assert [relay.bulk_shards for _, relay in rig.leaders.relayed if relay.bulk_shards] == [(2,)]
    assert rig.path.rejected_relays == 1
    assert rig.acknowledged == ["t1"]


async def test_content_that_cannot_be_encoded_is_invalidated(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    relay_on = rig.leaders.relay

    async def relay(leader: CacheServer, relay: Relay, timeout_seconds: float) -> Relayed:
        if relay.changes:
            raise ValueError("no number of 64 bits")
        return await relay_on(leader, relay, timeout_seconds)

    monkeypatch.setattr(rig.leaders, "relay", relay)
    await rig.path.submit("t1", about(change(0, 1)))
    await rig.path.drained()
    assert [relay.bulk_shards for _, relay in rig.leaders.relayed] == [(0,)]


async def test_an_outbox_survives_errors_while_refreshing_routes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.leaders.failures["leader-1"] = lambda _: NotMine("no", 1)
    failing = 3

    async def refresh() -> None:
        nonlocal failing
        failing -= 1
        if failing >= 0:
            raise ValueError("a bug")
        rig.leaders.failures.clear()

    monkeypatch.setattr(rig, "refresh", refresh)
    await rig.path.submit("t1", about(change(0, 1)))
    await rig.path.drained()
    assert rig.leaders.versions(0) == [1]


async def test_a_shard_that_left_the_topology_disturbs_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = 1

    def away(_: Relay) -> TaoError | None:
        nonlocal failing
        failing -= 1
        return Unavailable("away") if failing >= 0 else None

    rig.leaders.failures["leader-1"] = away
    await rig.path.submit("t1", about(change(0, 1), change(2, 1)))
    home = TierRoutes.home

    def home_of(tier: TierRoutes, shard: int) -> CacheServer:
        if shard == 2:
            raise InvalidArgument("there is no shard 2")
        return home(tier, shard)

    monkeypatch.setattr(TierRoutes, "home", home_of)
    await rig.path.drained()
    assert (rig.leaders.versions(0), rig.leaders.versions(2)) == ([1], [])
    assert rig.path.unrouted_parts == 1
    assert rig.acknowledged == ["t1"]


async def test_a_held_shard_that_moves_is_sent_to_its_new_leader_in_order(rig: Rig) -> None:
    rig.leaders.failures["leader-1"] = lambda relay: NotMine("no", 2) if speaks_of(relay, 2) else None
    await rig.path.submit("t1", about(change(2, 1), change(0, 1)), 1)
    await until(lambda: rig.path._outboxes["leader-1"].rejected == {2})
    await rig.path.submit("t2", about(change(2, 2), change(0, 2)), 2)
    # Moved before this proof is sent, the shard would take the proof with it.
    await until(lambda: "leader-2" in {leader for leader, relay in rig.leaders.relayed if relay.source_unix_ms == 2})
    rig.next_routes = Routes(make_topology(2, leaders=BOTH | {2: ("leader-2",)}))
    await rig.path.drained()
    assert rig.leaders.versions(2, "leader-2") == rig.leaders.versions(2) == [1, 2]
    assert rig.leaders.versions(0, "leader-1") == [1, 2]
    assert {leader for leader, relay in rig.leaders.relayed if relay.source_unix_ms == 2} == {"leader-1", "leader-2"}
    assert rig.acknowledged == ["t1", "t2"]
    assert rig.path.unacknowledged_bytes == 0


async def test_touches_that_fail_delay_their_shard_alone_and_are_retried_until_they_succeed(rig: Rig) -> None:
    rig.leaders.failures["leader-1"] = lambda relay: ShardBlocked("locked") if relay.touches else None
    touch = Touch(make_id(1, 0), 4, 9)
    await rig.path.submit("t1", Translated(touches=(touch,)))
    await rig.path.submit("t2", about(change(2, 1), change(0, 1)))
    await until(lambda: rig.leaders.versions(2) == [1])
    assert (rig.leaders.versions(0), rig.acknowledged) == ([], [])
    rig.leaders.failures.clear()
    await rig.path.drained()
    assert [touch for _, relay in rig.leaders.relayed for touch in relay.touches] == [touch]
    assert rig.acknowledged == ["t1", "t2"]
