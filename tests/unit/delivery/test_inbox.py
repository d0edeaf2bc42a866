"""A subscriber's positions: duplicates, gaps and resets."""

from __future__ import annotations

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
    inbox = Inbox()
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
    inbox = Inbox()
    inbox.positions_for(numbers)
    parts = [run(0, reset=True, shard=CountingNumber(shard)) for shard in range(1_000, 1_000 + shards)]
    CountingNumber.comparisons = 0
    assert inbox.receive(Delivery(1, tuple(parts))).resets == numbers
    return CountingNumber.comparisons - shards  # without those of this assertion


def test_the_cost_of_a_first_delivery_grows_with_its_shards_and_not_with_their_square() -> None:
    assert comparisons_of_a_first_delivery(400) <= 2 * comparisons_of_a_first_delivery(200) <= 10 * 400
