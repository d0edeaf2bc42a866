"""Who comes back with a position of the binlog: warm when the leader has what follows it, waiting while the tailer may
say so, cold when nobody can (DESIGN §7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, Span
from tests.rigs.memory_spool import MemorySpool, SpoolDisk

H = "db@1:0-1"
SETTINGS = DeliverySettings(log_messages_per_shard=4, max_delivery_messages=3)


class Leader:
    def __init__(self, disk: SpoolDisk | None = None, run: str = "run-1") -> None:
        self.timers: list[Callable[[], None]] = []
        spool = None if disk is None else MemorySpool(disk)
        self.publisher = Publisher(SETTINGS, run, lambda _: "db", spool, lambda _, do: self.timers.append(do))
        self.publisher.open_shard(1, 1, 1)
        self.stored = 0

    def tell(self, after: int, *numbers: int) -> None:
        """What the tailer says of shard 1 after a transaction, up to the last of these."""
        messages = tuple(ObjectInvalidation(1 << 47 | 1, number) for number in numbers)
        span = Span(1, H, after, numbers[-1] if numbers else after)
        self.publisher.relayed([ShardMessages(1, 1, messages)], [span], self._stored)

    def _stored(self) -> None:
        self.stored += 1

    def subscribe(self, position: Position) -> list[Delivery]:
        deliveries: list[Delivery] = []
        subscription = self.publisher.subscribe("f", [position], deliveries.append)
        assert not subscription.closed
        return deliveries


def told(deliveries: list[Delivery]) -> list[int]:
    runs = [part.messages.messages for each in deliveries for part in each.shards if part.messages is not None]
    return [message.version for run in runs for message in run if isinstance(message, ObjectInvalidation)]


def outcomes(deliveries: list[Delivery]) -> list[str]:
    parts = [part for each in deliveries for part in each.shards]
    return ["reset" if part.reset else "continued" if part.continued else "more" for part in parts]


def claim(deliveries: list[Delivery]) -> tuple[str, int]:
    position = deliveries[-1].shards[-1].position
    return position.source, position.reached


AT_11 = Position(1, "another run/1", 7, H, 11)


def test_a_leader_that_has_taken_the_shard_over_waits_for_the_tailer_and_goes_on_warm() -> None:
    leader = Leader()
    deliveries = leader.subscribe(AT_11)
    assert outcomes(deliveries) == []
    assert leader.publisher.wants("db") == [Span(1, H, 11, 11)]
    assert leader.publisher.wants("db") == [], "it is asked once"
    leader.tell(11, 13)
    assert outcomes(deliveries) == ["continued"]
    assert told(deliveries) == [13]
    assert claim(deliveries) == (H, 13)


def test_what_was_told_to_another_leader_meanwhile_is_waited_for_too() -> None:
    leader = Leader()
    deliveries = leader.subscribe(AT_11)
    leader.tell(20, 21)
    assert outcomes(deliveries) == []
    leader.tell(11, 15)
    leader.tell(15, 20)
    assert outcomes(deliveries) == ["continued"]
    assert sorted(told(deliveries)) == [15, 20, 21]
    assert claim(deliveries) == (H, 21)


def test_who_waits_in_vain_starts_cold() -> None:
    leader = Leader()
    deliveries = leader.subscribe(AT_11)
    for timer in leader.timers:
        timer()
    assert outcomes(deliveries) == ["reset"]


def test_who_was_told_in_another_history_starts_cold() -> None:
    leader = Leader()
    leader.tell(11, 12)
    assert outcomes(leader.subscribe(Position(1, "x", 1, "db@0:0-1", 12))) == ["reset"]


@pytest.mark.parametrize("is_told_again", [True, False])
def test_what_a_leader_without_a_spool_acknowledged_and_took_with_it_is_told_again_or_the_shard_reset(
    is_told_again: bool,
) -> None:
    before = Leader()
    before.tell(10, 11)
    lost = before.subscribe(Position(1, "another run/1", 7, H, 11))
    before.tell(11, 12)
    assert before.stored == 2, "the tailer goes on, whatever becomes of the delivery"
    assert lost, "which its subscriber never got"
    after = Leader(run="run-2")
    deliveries = after.subscribe(Position(1, "run-1/1", 1, H, 11))
    assert after.publisher.wants("db") == [Span(1, H, 11, 11)], "read again, what the tailer had told already"
    after.tell(12, 13)
    assert outcomes(deliveries) == [], "12 is missing"
    if is_told_again:
        after.tell(11, 12)
        assert (outcomes(deliveries), sorted(told(deliveries)), claim(deliveries)) == (["continued"], [12, 13], (H, 13))
    else:
        for timer in after.timers:
            timer()
        assert outcomes(deliveries)[0] == "reset"


def test_a_leader_that_restarts_goes_on_from_its_spool_once_the_tailer_joins_it() -> None:
    disk = SpoolDisk()
    before = Leader(disk)
    before.tell(10, 11)
    for number in range(12, 22):
        before.tell(number - 1, number)
    assert before.stored == 11
    after = Leader(disk, "run-2")
    deliveries = after.subscribe(Position(1, "run-1/1", 3, H, 13))
    assert outcomes(deliveries) == []
    assert after.publisher.wants("db") == [Span(1, H, 21, 21)]
    after.tell(21)
    assert outcomes(deliveries)[0] == "continued"
    assert "reset" not in outcomes(deliveries)
    assert told(deliveries) == list(range(14, 22))
    assert claim(deliveries) == (H, 21)


def test_a_spool_that_was_lost_continues_nobody_but_whoever_has_been_told_all() -> None:
    disk = SpoolDisk()
    before = Leader(disk)
    before.tell(10, *range(11, 22))
    spool = before.publisher.spool
    assert isinstance(spool, MemorySpool)
    spool.fail()
    assert outcomes(before.subscribe(Position(1, "x", 3, H, 13))) == []  # the tailer may read it again
    assert outcomes(before.subscribe(Position(1, "x", 3, H, 21))) == ["continued"]


def test_followers_learn_of_a_gap_between_two_relays() -> None:
    leader = Leader()
    deliveries = leader.subscribe(Position(1))
    leader.tell(10, 11)
    leader.tell(15, 16)
    for timer in leader.timers:
        timer()
    assert outcomes(deliveries) == ["reset", "more", "reset"]
    assert told(deliveries) == [11]


def test_times_and_positions_are_proved_only_of_shards_of_which_the_tailer_has_said_where_it_goes_on() -> None:
    leader = Leader()
    deliveries = leader.subscribe(Position(1))
    leader.publisher.prove("db", 1_000, H, 30)
    assert not deliveries[-1].proven
    assert not deliveries[-1].reached
    leader.tell(11)
    assert deliveries[-1].proven == (("db", 1_000),)
    assert list(deliveries[-1].reached) == [(H, 30)]
    leader.publisher.prove("db", 2_000, H, 40)
    assert list(deliveries[-1].reached) == [(H, 40)]
    leader.publisher.forget_proofs()
    before = len(deliveries)
    leader.publisher.prove("db", 3_000, H, 50)
    assert len(deliveries) == before, "by a topology in between another may have been told"
