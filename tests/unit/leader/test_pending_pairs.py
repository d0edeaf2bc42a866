"""Which pairs with a pending inverse are tried next."""

from __future__ import annotations

from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.leader.pending_pairs import MAX_FIRST_TRIES, MAX_PENDING_PAIRS, PendingPairs, RetryTimes
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import IntentKey, IntentRow

TIMES = RetryTimes(first_seconds=0.25, longest_seconds=10.0)


def intent(number: int, far_shard: int = 1, token: int = 1) -> IntentRow:
    return IntentRow(number + 1, far_shard << SHARD_SHIFT | number, (1,), token, 0)


def pair(of: IntentRow) -> IntentKey:
    return IntentKey(of.low_id, of.high_id)


def leader_of(shard: int) -> str:
    return f"leader-{shard}"


def groups(pairs: PendingPairs, now: float) -> dict[str, list[IntentKey]]:
    """Return the pairs of each leader with which contact is tried; the first of each is the one that is due."""
    due = pairs.due(leader_of, lambda _: False, now)
    found = {leader: pairs.others(leader, leader_of, lambda _: False) for leader in due}
    assert {leader: group[:1] for leader, group in found.items()} == due
    return found


def test_pairs_are_grouped_by_the_leader_of_their_far_side_and_tried_after_a_pause() -> None:
    pairs = PendingPairs(TIMES)
    first, second, third = intent(1), intent(2), intent(3, far_shard=2)
    for number, each in enumerate((first, second, third)):
        pairs.add(each, float(number))
    assert groups(pairs, 0.2) == {}
    assert groups(pairs, 0.25) == {"leader-1": [pair(first), pair(second)]}
    assert groups(pairs, 9.0) == {"leader-1": [pair(first), pair(second)], "leader-2": [pair(third)]}


def test_looks_begin_anew_with_the_first_pair_after_there_was_none() -> None:
    begun: list[int] = []
    pairs = PendingPairs(TIMES, on_first=lambda: begun.append(len(pairs)))
    pairs.add(intent(1), 0.0)
    pairs.add(intent(2), 0.0)
    assert begun == [0]
    assert pairs.settled(intent(1))
    pairs.add(intent(3), 0.0)
    assert begun == [0]
    pairs.keep_only(lambda _: False)
    pairs.add(intent(1), 0.0)
    assert begun == [0, 0]


def test_a_busy_pair_is_left_out() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1), 0.0)
    pairs.add(intent(2), 0.0)

    def is_busy(each: IntentKey) -> bool:
        return each == pair(intent(1))

    assert pairs.due(leader_of, is_busy, 1.0) == {"leader-1": [pair(intent(2))]}
    assert pairs.others("leader-1", leader_of, is_busy) == [pair(intent(2))]
    assert groups(pairs, 1.0) == {"leader-1": [pair(intent(1)), pair(intent(2))]}, "it was left out, not forgotten"


@pytest.mark.parametrize("number", [10, 10_000])
def test_a_look_costs_the_same_however_many_pairs_are_remembered(number: int) -> None:
    pairs = PendingPairs(TIMES)
    asked: list[IntentKey | int] = []
    for each in range(number):
        pairs.add(intent(each, far_shard=1 + each % 2), 0.0)

    def is_busy(each: IntentKey) -> bool:
        asked.append(each)
        return False

    def count_owned(shard: int) -> bool:
        asked.append(shard)
        return True

    for look in range(1, 6):
        pairs.keep_only(count_owned)
        for due in chain.from_iterable(pairs.due(leader_of, is_busy, float(look)).values()):
            pairs.unanswered(due, float(look))
    assert len(asked) == 5 * (1 + 2)


def test_the_leader_of_a_far_shard_may_change() -> None:
    pairs = PendingPairs(TIMES)
    first, second = intent(1, far_shard=1), intent(2, far_shard=2)
    pairs.add(first, 1.0)
    pairs.add(second, 0.0)
    assert pairs.due(lambda _: "only", lambda _: False, 2.0) == {"only": [pair(second), pair(first)]}
    assert pairs.others("only", lambda _: "only", lambda _: False) == [pair(second), pair(first)]


def test_contact_is_tried_with_few_pairs_of_as_many_shards() -> None:
    """A shard that is changing hands just then must not keep the pairs of the others waiting."""
    pairs = PendingPairs(TIMES)
    for number in range(4 * MAX_FIRST_TRIES):
        pairs.add(intent(number, far_shard=1 + number // 2), float(number))
    tried = pairs.due(lambda _: "only", lambda _: False, 100.0)["only"]
    assert tried == [pair(intent(number, far_shard=1 + number // 2)) for number in range(0, 2 * MAX_FIRST_TRIES, 2)]


def test_nothing_is_left_in_the_queues_of_pairs_that_are_settled() -> None:
    pairs = PendingPairs(TIMES)
    for number in range(100):
        pairs.add(intent(number), float(number))
        if number % 10 == 9:
            pairs.due(leader_of, lambda _: False, float(number))
        pairs.settled(intent(number))
    assert not pairs._queues
    pairs.add(intent(0), 200.0)
    pairs.keep_only(lambda _: False)
    assert not pairs._queues


class Model:
    """The pairs with the times at which they are due, sorted at each look."""

    def __init__(self) -> None:
        self.due_at: dict[IntentKey, float] = {}

    def groups(self, now: float) -> dict[str, list[IntentKey]]:
        found: dict[str, list[IntentKey]] = {}
        for each in sorted(self.due_at, key=lambda each: (self.due_at[each], each)):
            leader = leader_of(each.high_id >> SHARD_SHIFT)
            if leader in found or self.due_at[each] <= now:
                found.setdefault(leader, []).append(each)
        return found


@given(st.lists(st.tuples(st.sampled_from(["add", "settled", "refused", "look"]), st.integers(0, 7)), max_size=60))
def test_the_queues_return_what_sorting_all_pairs_would(steps: list[tuple[str, int]]) -> None:
    pairs, model = PendingPairs(TIMES), Model()
    for step, (what, number) in enumerate(steps):
        now, one = step / 8, intent(number, far_shard=1 + number % 3)
        if what == "add":
            pairs.add(one, now)
            model.due_at.setdefault(pair(one), now + TIMES.first_seconds)
        elif what == "settled":
            pairs.settled(one)
            model.due_at.pop(pair(one), None)
        elif what == "refused":
            pairs.refused(pair(one), now, for_good=number % 2 == 0)
            if pair(one) in model.due_at:
                model.due_at[pair(one)] = now + (TIMES.longest_seconds if number % 2 == 0 else 0.0)
        assert groups(pairs, now) == model.groups(now)


def test_a_refusal_is_followed_by_a_try_at_the_next_look_however_many_there_were() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1), 0.0)
    for now in range(100):
        pairs.refused(pair(intent(1)), now + 0.01)
    assert groups(pairs, 99.25) == {"leader-1": [pair(intent(1))]}, "a pause as long as that between looks misses one"


def test_the_pause_after_silence_doubles_up_to_the_longest() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1), 0.0)
    pauses = []
    for _ in range(8):
        pairs.unanswered(pair(intent(1)), 0.0)
        pauses.append(next(each / 8 for each in range(200) if groups(pairs, each / 8)))
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_pair_that_only_a_person_can_mend_does_not_hide_the_others() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1), 0.0)
    pairs.add(intent(2), 0.5)
    pairs.refused(pair(intent(1)), 0.25, for_good=True)
    assert groups(pairs, 1.0) == {"leader-1": [pair(intent(2)), pair(intent(1))]}


def test_a_pair_is_forgotten_when_the_newest_of_its_writes_is_settled() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1, token=1), 0.0)
    pairs.add(intent(1, token=2), 0.0)
    assert not pairs.settled(intent(1, token=1))
    assert pair(intent(1)) in pairs
    assert pairs.settled(intent(1, token=2))
    assert pair(intent(1)) not in pairs
    assert not pairs.settled(intent(1, token=2))


def test_what_is_known_of_a_pair_follows_its_row() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1, token=2), 0.0)
    changed = msgspec.structs.replace(intent(1, token=2), atypes=(7,))
    pairs.add(changed, 0.0)
    pairs.add(intent(1, token=1), 0.0)
    assert pairs.intent(pair(intent(1))) == changed


def test_pairs_of_shards_that_other_leaders_have_are_forgotten() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1), 0.0)
    pairs.keep_only(lambda shard: shard == 0)
    assert len(pairs) == 1
    pairs.keep_only(lambda _: False)
    assert len(pairs) == 0


def test_the_number_of_pairs_is_bounded() -> None:
    pairs = PendingPairs(TIMES)
    assert all(pairs.add(intent(number), 0.0) for number in range(MAX_PENDING_PAIRS))
    assert not pairs.add(intent(MAX_PENDING_PAIRS), 0.0)
    assert pairs.add(intent(7, token=9), 0.0), "one that is known takes no room"


def test_a_pair_found_when_its_shard_was_taken_is_due_at_once_whatever_is_known_of_it() -> None:
    pairs = PendingPairs(TIMES)
    silent = intent(1)
    pairs.add(silent, 0.0)
    for _ in range(4):
        pairs.unanswered(pair(silent), 0.0)
    for each in (silent, intent(2, far_shard=2)):
        pairs.add(each, 1.0, at_once=True)
    assert groups(pairs, 1.0) == {"leader-1": [pair(silent)], "leader-2": [pair(intent(2, far_shard=2))]}
