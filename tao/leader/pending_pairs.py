"""Decide which pairs with a pending inverse are tried next.

A leader remembers every pair whose far side it could not write, by the leader of that side. At each look it tries one
pair of each such leader. When that pair is settled there is contact again, and the others follow at once. A pair that
was not answered in time is left alone for longer each time, since it may be held up by more than its leader. A refusal
costs little, so it leads to a try at the next look.

Pure: times are passed in. The memory is bounded; what does not fit is found by the scan of intents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tao.model.ids import SHARD_SHIFT
from tao.model.rows import IntentKey, IntentRow

MAX_PENDING_PAIRS: Final = 10_000
"""Pairs remembered, at about 500 bytes. Further ones are settled after the scan of intents finds them."""


@dataclass(frozen=True, slots=True)
class RetryTimes:
    """Pauses between two tries of one pair, in seconds."""

    first_seconds: float
    """After a refusal, and after the first try that was not answered in time."""

    longest_seconds: float
    """Longest pause. It is also the pause after an error that only a person can mend."""


@dataclass(slots=True)
class _PendingPair:
    intent: IntentRow
    due_at: float
    unanswered: int = 0


class PendingPairs:
    """The pairs whose inverse is pending. Every ``now`` must come from the same monotonic clock."""

    def __init__(self, times: RetryTimes) -> None:
        self._times: Final = times
        self._pairs: dict[IntentKey, _PendingPair] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, pair: IntentKey) -> bool:
        return pair in self._pairs

    def intent(self, pair: IntentKey) -> IntentRow | None:
        """Return the newest intent that is known of the pair, or None when no inverse of it is known to be pending."""
        known = self._pairs.get(pair)
        return None if known is None else known.intent

    def add(self, intent: IntentRow, now: float) -> bool:
        """Remember a pair, due after the first pause. Return False when there is no room for it."""
        pair = IntentKey(intent.low_id, intent.high_id)
        known = self._pairs.get(pair)
        if known is not None:
            if intent.token >= known.intent.token:  # the row itself, which may have been changed by hand
                known.intent = intent
            return True
        if len(self._pairs) >= MAX_PENDING_PAIRS:
            return False
        self._pairs[pair] = _PendingPair(intent, now + self._times.first_seconds)
        return True

    def settled(self, intent: IntentRow) -> bool:
        """Forget the pair, unless a later write of it is pending. Return whether it was pending."""
        pair = IntentKey(intent.low_id, intent.high_id)
        known = self._pairs.get(pair)
        if known is None or known.intent.token > intent.token:
            return False
        del self._pairs[pair]
        return True

    def refused(self, pair: IntentKey, now: float, *, for_good: bool = False) -> None:
        """Try the pair again at the next look; ``for_good``: an operator has to act first, so after the longest
        pause."""
        known = self._pairs.get(pair)
        if known is not None:
            known.due_at = now + (self._times.longest_seconds if for_good else self._times.first_seconds)

    def unanswered(self, pair: IntentKey, now: float) -> None:
        """Try the pair again after a pause that doubles each time."""
        known = self._pairs.get(pair)
        if known is not None:
            known.due_at = now + min(self._times.first_seconds * 2**known.unanswered, self._times.longest_seconds)
            known.unanswered = min(known.unanswered + 1, 30)

    def keep_only(self, shards: Callable[[int], bool]) -> None:
        """Forget the pairs whose coordinating shard is not one of ``shards``: their new leader finds the intents."""
        for pair in [pair for pair in self._pairs if not shards(pair.low_id >> SHARD_SHIFT)]:
            del self._pairs[pair]

    def by_leader(
        self, leader_of: Callable[[int], str], is_busy: Callable[[IntentKey], bool], now: float
    ) -> dict[str, list[IntentKey]]:
        """Return the pairs to settle, less the busy ones, grouped by the leader of the far side, which ``leader_of``
        returns for a shard.

        The first of each group is due, and is to be tried before the others, which are only to be tried if it is
        settled. A leader none of whose pairs is due is left out."""
        groups: dict[str, list[IntentKey]] = {}
        for pair in sorted(self._pairs, key=lambda each: self._pairs[each].due_at):
            if is_busy(pair):
                continue
            leader = leader_of(pair.high_id >> SHARD_SHIFT)
            if leader in groups or self._pairs[pair].due_at <= now:
                groups.setdefault(leader, []).append(pair)
        return groups
