"""A subscriber's positions: duplicates, gaps and resets."""

from __future__ import annotations

from typing import Final

import msgspec

from tao.delivery.inbox import Inbox
from tao.model.changes import ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery


def run(sequence: int, *versions: int, reset: bool = False, stream: str = "s", shard: int = 1) -> ShardDelivery:
    messages = tuple(ObjectInvalidation(shard << 47 | 1, version) for version in versions)
    return ShardDelivery(Position(shard, stream, sequence), reset, ShardMessages(shard, 1, messages))


def versions(messages: list[ShardMessages]) -> list[int]:
    found = [message for part in messages for message in part.messages]
    return [message.version for message in found if isinstance(message, ObjectInvalidation)]


def subscribed() -> Inbox:
    inbox = Inbox(lambda _: "db")
    assert inbox.positions_for([1]) == [Position(1)]
    assert inbox.receive(Delivery(1, (run(5, reset=True),))).resets == [1]
    return inbox


def test_a_reset_becomes_the_new_position() -> None:
    assert subscribed().positions_for([1]) == [Position(1, "s", 5)]


def test_following_messages_are_passed_on_and_move_the_position() -> None:
    inbox = subscribed()
    received = inbox.receive(Delivery(2, (run(7, 60, 70), run(8, 80))))
    assert versions(received.messages) == [60, 70, 80]
    assert inbox.positions_for([1]) == [Position(1, "s", 8)]


def test_messages_received_before_are_skipped() -> None:
    inbox = subscribed()
    inbox.receive(Delivery(2, (run(7, 60, 70),)))
    assert versions(inbox.receive(Delivery(2, (run(7, 60, 70),))).messages) == []
    assert versions(inbox.receive(Delivery(3, (run(8, 70, 80),))).messages) == [80]
    assert versions(inbox.receive(Delivery(4, (run(6, 60),))).messages) == []
    assert inbox.positions_for([1]) == [Position(1, "s", 8)]


def repeated(sequence: int, repeats: int, *versions: int) -> ShardDelivery:
    return msgspec.structs.replace(run(sequence, *versions), repeated=repeats)


def test_repeats_that_are_left_out_count_as_received() -> None:
    inbox = subscribed()
    received = inbox.receive(Delivery(2, (repeated(8, 2, 80),)))
    assert (versions(received.messages), received.gaps) == ([80], [])
    assert inbox.positions_for([1]) == [Position(1, "s", 8)]


def test_a_message_that_is_missing_before_repeats_is_a_gap() -> None:
    assert subscribed().receive(Delivery(2, (repeated(9, 2, 90),))).gaps == [1]


def test_of_a_run_with_repeats_nothing_is_skipped() -> None:
    inbox = subscribed()
    inbox.receive(Delivery(2, (run(7, 60, 70),)))
    assert versions(inbox.receive(Delivery(3, (repeated(9, 1, 60, 70, 90),))).messages) == [60, 70, 90]
    assert inbox.positions_for([1]) == [Position(1, "s", 9)]


def test_a_missing_message_resets_the_shard_and_reports_a_gap() -> None:
    inbox = subscribed()
    received = inbox.receive(Delivery(2, (run(6, 60), run(8, 80))))
    assert (received.resets, received.gaps, received.messages, received.confirmed) == ([1], [1], [], [])
    assert inbox.positions_for([1]) == [Position(1)]


def test_a_confirmation_ahead_of_the_held_position_is_a_gap_too() -> None:
    assert subscribed().receive(Delivery(2, (run(6),))).gaps == [1]


def test_another_stream_without_a_reset_is_a_gap() -> None:
    assert subscribed().receive(Delivery(2, (run(6, 60, stream="other"),))).gaps == [1]


def test_deliveries_between_a_gap_and_its_reset_are_ignored() -> None:
    inbox = subscribed()
    inbox.receive(Delivery(2, (run(9, 90),)))
    received = inbox.receive(Delivery(3, (run(10, 100),)))
    assert (received.resets, received.gaps, received.messages) == ([], [], [])
    assert inbox.receive(Delivery(4, (run(10, reset=True),))).confirmed == [1]


def test_deliveries_of_forgotten_or_unknown_shards_are_ignored() -> None:
    inbox = subscribed()
    inbox.forget(1)
    received = inbox.receive(Delivery(2, (run(9, reset=True), run(1, 1, reset=True, shard=2))))
    assert (received.resets, received.messages, received.confirmed) == ([], [], [])


def test_a_refused_shard_keeps_its_position_for_the_next_leader() -> None:
    inbox = subscribed()
    assert inbox.receive(Delivery(2, (), (1,))).refused == [1]
    assert inbox.positions_for([1]) == [Position(1, "s", 5)]


class CountingNumber(int):
    """A shard number that counts how often it is compared with another one."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountingNumber.comparisons += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def comparisons_of_a_first_delivery(shards: int) -> int:
    numbers = [CountingNumber(shard) for shard in range(1_000, 1_000 + shards)]
    inbox = Inbox(lambda _: "db")
    inbox.positions_for(numbers)
    parts = [run(0, reset=True, shard=CountingNumber(shard)) for shard in range(1_000, 1_000 + shards)]
    CountingNumber.comparisons = 0
    assert inbox.receive(Delivery(1, tuple(parts))).resets == numbers
    return CountingNumber.comparisons - shards  # without those of this assertion


def test_the_cost_of_a_first_delivery_grows_with_its_shards_and_not_with_their_square() -> None:
    assert comparisons_of_a_first_delivery(400) <= 2 * comparisons_of_a_first_delivery(200) <= 10 * 400


H: Final = "db@1:0-1"


def at(sequence: int, reached: int, *, reset: bool = False, shard: int = 1) -> ShardDelivery:
    messages = ShardMessages(shard, 1, ())
    return ShardDelivery(Position(shard, "s", sequence, H, reached), reset, messages)


def test_a_proven_position_continues_all_shards_that_were_confirmed_before_it() -> None:
    inbox = Inbox(lambda _: "db")
    inbox.begin_stream("leader")
    inbox.positions_for([1, 2])
    inbox.confirm("leader", inbox.receive(Delivery(1, (at(0, 10, reset=True),))).confirmed)
    inbox.prove("leader", Delivery(2, reached=((H, 20), ("other", 99))))
    inbox.confirm("leader", inbox.receive(Delivery(3, (at(0, 10, reset=True, shard=2),))).confirmed)
    assert [position.reached for position in inbox.positions_for([1, 2])] == [20, 10]
    inbox.prove("leader", Delivery(4, reached=((H, 30),)))
    inbox.begin_stream("leader")
    inbox.prove("leader", Delivery(1, reached=((H, 40),)))
    assert [position.reached for position in inbox.positions_for([1, 2])] == [30, 30]


def test_a_reset_to_an_earlier_position_is_not_raised_by_what_was_proved_before() -> None:
    inbox = Inbox(lambda _: "db")
    inbox.begin_stream("leader")
    inbox.positions_for([1])
    inbox.confirm("leader", inbox.receive(Delivery(1, (at(0, 10, reset=True),))).confirmed)
    inbox.prove("leader", Delivery(2, reached=((H, 20),)))
    inbox.confirm("leader", inbox.receive(Delivery(3, (at(0, 15, reset=True),))).confirmed)
    assert inbox.positions_for([1]) == [Position(1, "s", 0, H, 15)]


def test_a_proof_touches_no_shard() -> None:
    inbox = Inbox(lambda _: "db")
    inbox.begin_stream("leader")
    inbox.positions_for(range(100))
    parts = tuple(at(0, 10, reset=True, shard=shard) for shard in range(100))
    inbox.confirm("leader", inbox.receive(Delivery(1, parts)).confirmed)
    held = {shard: (inbox._positions[shard], inbox._joined[shard]) for shard in range(100)}
    inbox.prove("leader", Delivery(2, proven=(("db", 5_000),), reached=((H, 20),)))
    assert all(
        inbox._positions[shard] is position and inbox._joined[shard] is joined
        for shard, (position, joined) in held.items()
    )
    assert {inbox.proven_unix_ms(shard) for shard in range(100)} == {5_000}
    assert {position.reached for position in inbox.positions_for(range(100))} == {20}
