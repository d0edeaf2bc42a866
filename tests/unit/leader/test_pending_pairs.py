"""Which pairs with a pending inverse are tried next."""

from __future__ import annotations

import msgspec

from tao.leader.pending_pairs import MAX_PENDING_PAIRS, PendingPairs, RetryTimes
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import IntentKey, IntentRow

TIMES = RetryTimes(first_seconds=0.25, longest_seconds=10.0)


def intent(number: int, far_shard: int = 1, token: int = 1) -> IntentRow:
    return IntentRow(number + 1, far_shard << SHARD_SHIFT | number, (1,), token, 0)


def pair(of: IntentRow) -> IntentKey:
    return IntentKey(of.low_id, of.high_id)


def groups(pairs: PendingPairs, now: float) -> dict[str, list[IntentKey]]:
    return pairs.by_leader(lambda shard: f"leader-{shard}", lambda _: False, now)


def test_pairs_are_grouped_by_the_leader_of_their_far_side_and_tried_after_a_pause() -> None:
    pairs = PendingPairs(TIMES)
    first, second, third = intent(1), intent(2), intent(3, far_shard=2)
    for number, each in enumerate((first, second, third)):
        pairs.add(each, float(number))
    assert groups(pairs, 0.2) == {}
    assert groups(pairs, 0.25) == {"leader-1": [pair(first), pair(second)]}
    assert groups(pairs, 9.0) == {"leader-1": [pair(first), pair(second)], "leader-2": [pair(third)]}


def test_a_busy_pair_is_left_out() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1), 0.0)
    pairs.add(intent(2), 0.0)
    found = pairs.by_leader(lambda _: "leader", lambda each: each == pair(intent(1)), 1.0)
    assert found == {"leader": [pair(intent(2))]}


def test_a_refusal_is_followed_by_a_try_at_the_next_look_however_many_there_were() -> None:
    pairs = PendingPairs(TIMES)
    pairs.add(intent(1), 0.0)
    for now in range(100):
        pairs.refused(pair(intent(1)), float(now))
    assert groups(pairs, 99.2) == {}
    assert groups(pairs, 99.25) == {"leader-1": [pair(intent(1))]}


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
