"""Decide which pairs with a pending inverse are tried next.

A leader remembers every pair whose far side it could not write, in a queue for each far shard. At each look it tries a
few pairs of each leader of such shards, of as many shards: one of them may still be changing hands. When one pair is
settled there is contact again, and the others follow at once.
A pair that was not answered in time is left alone for longer each time, since it may be held up by more than its
leader. A refusal costs little, so it leads to a try at the next look.

A look costs by the number of far shards, and not by the number of pairs, which grows during a cut.

Pure: times are passed in. The memory is bounded; what does not fit is found by the scan of intents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from math import inf
from typing import Final

from tao.model.ids import SHARD_SHIFT
from tao.model.rows import IntentKey, IntentRow

MAX_PENDING_PAIRS: Final = 10_000
"""Pairs remembered, at about 500 bytes. Further ones are settled after the scan of intents finds them."""

MAX_FIRST_TRIES: Final = 8
"""Pairs of one leader that are tried at a look: they show whether there is contact, cheaply when there is none."""


@dataclass(frozen=True, slots=True)
class RetryTimes:
    """Pauses between two tries of one pair, in seconds."""

    first_seconds: float
    """Pause after the write, and after the first try that was not answered in time."""

    longest_seconds: float
    """Longest pause. It is also the pause after an error that only a person can mend."""


@dataclass(slots=True)
class _PendingPair:
    intent: IntentRow
    due_at: float
    unanswered: int = 0


class PendingPairs:
    """The pairs whose inverse is pending. Every ``now`` must come from the same monotonic clock."""

    def __init__(self, times: RetryTimes, on_first: Callable[[], None] = lambda: None) -> None:
        """``on_first`` is called when a pair is added and there was none: looks have to begin."""
        self._times: Final = times
        self._on_first: Final = on_first
        self._pairs: dict[IntentKey, _PendingPair] = {}
        self._of_shard: dict[int, dict[IntentKey, None]] = {}  # by the coordinating shard
        # Far shard → (time, pair) as a heap. An entry whose time is not the pair's any more is invalid.
        self._queues: dict[int, list[tuple[float, IntentKey]]] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, pair: IntentKey) -> bool:
        return pair in self._pairs

    def intent(self, pair: IntentKey) -> IntentRow | None:
        """Return the newest intent that is known of the pair, or None when no inverse of it is known to be pending."""
        known = self._pairs.get(pair)
        return None if known is None else known.intent

    def add(self, intent: IntentRow, now: float, *, at_once: bool = False) -> bool:
        """Remember a pair, due after the first pause, or at once, whatever is known of it. Return False when there is
        no room for it."""
        pair = IntentKey(intent.low_id, intent.high_id)
        known = self._pairs.get(pair)
        if known is not None:
            if intent.token >= known.intent.token:  # the row itself, which may have been changed by hand
                known.intent = intent
            if at_once:
                self._queue(pair, now)
            return True
        if len(self._pairs) >= MAX_PENDING_PAIRS:
            return False
        if not self._pairs:
            self._on_first()
        self._pairs[pair] = _PendingPair(intent, -inf)
        self._of_shard.setdefault(pair.low_id >> SHARD_SHIFT, {})[pair] = None
        self._queue(pair, now if at_once else now + self._times.first_seconds)
        return True

    def _queue(self, pair: IntentKey, due_at: float) -> None:
        known = self._pairs[pair]
        if due_at != known.due_at:
            known.due_at = due_at
            heappush(self._queues.setdefault(pair.high_id >> SHARD_SHIFT, []), (due_at, pair))

    def _is_valid(self, entry: tuple[float, IntentKey]) -> bool:
        known = self._pairs.get(entry[1])
        return known is not None and known.due_at == entry[0]

    def settled(self, intent: IntentRow) -> bool:
        """Forget the pair, unless a later write of it is pending. Return whether it was pending."""
        pair = IntentKey(intent.low_id, intent.high_id)
        known = self._pairs.get(pair)
        if known is None or known.intent.token > intent.token:
            return False
        del self._pairs[pair]
        shard = pair.low_id >> SHARD_SHIFT
        del self._of_shard[shard][pair]
        if not self._of_shard[shard]:
            del self._of_shard[shard]
        self._drop_invalid_queues()
        return True

    def _drop_invalid_queues(self) -> None:
        if not self._pairs:  # there are no looks then, which would drop invalid entries
            self._queues.clear()

    def refused(self, pair: IntentKey, now: float, *, for_good: bool = False) -> None:
        """Try the pair again at the next look; ``for_good``: an operator has to act first, so after the longest
        pause."""
        if pair in self._pairs:
            self._queue(pair, now + (self._times.longest_seconds if for_good else 0.0))

    def unanswered(self, pair: IntentKey, now: float) -> None:
        """Try the pair again after a pause that doubles each time."""
        known = self._pairs.get(pair)
        if known is not None:
            self._queue(pair, now + min(self._times.first_seconds * 2**known.unanswered, self._times.longest_seconds))
            known.unanswered = min(known.unanswered + 1, 30)

    def keep_only(self, shards: Callable[[int], bool]) -> None:
        """Forget the pairs whose coordinating shard is not one of ``shards``: their new leader finds the intents."""
        for shard in [shard for shard in self._of_shard if not shards(shard)]:
            for pair in self._of_shard.pop(shard):
                del self._pairs[pair]
        self._drop_invalid_queues()

    def due(
        self, leader_of: Callable[[int], str], is_busy: Callable[[IntentKey], bool], now: float
    ) -> dict[str, list[IntentKey]]:
        """Return, by leader of the far side, the pairs that are due for longest and not busy, at most one of each shard
        and `MAX_FIRST_TRIES`. ``leader_of`` returns the leader of a shard. A leader none of whose pairs is due is left
        out."""
        found: dict[str, list[tuple[float, IntentKey]]] = {}
        for shard in list(self._queues):
            first = self._first_due(shard, is_busy, now)
            if first is not None:
                found.setdefault(leader_of(shard), []).append(first)
        return {leader: [pair for _, pair in nsmallest(MAX_FIRST_TRIES, firsts)] for leader, firsts in found.items()}

    def _first_due(
        self, shard: int, is_busy: Callable[[IntentKey], bool], now: float
    ) -> tuple[float, IntentKey] | None:
        queue = self._queues[shard]
        first: tuple[float, IntentKey] | None = None
        seen: list[tuple[float, IntentKey]] = []
        while queue and (queue[0][0] <= now or not self._is_valid(queue[0])):
            entry = heappop(queue)
            if not self._is_valid(entry):
                continue
            seen.append(entry)
            if not is_busy(entry[1]):
                first = entry
                break
        for entry in seen:
            heappush(queue, entry)
        if not queue:
            del self._queues[shard]
        return first

    def others(
        self, leader: str, leader_of: Callable[[int], str], is_busy: Callable[[IntentKey], bool]
    ) -> list[IntentKey]:
        """Return all pairs of this leader that are not busy, due or not, in the order in which they are due: those to
        try once the one that was `due` is settled."""
        entries = {
            entry
            for shard, queue in self._queues.items()
            if leader_of(shard) == leader
            for entry in queue
            if self._is_valid(entry) and not is_busy(entry[1])
        }
        return [pair for _, pair in sorted(entries)]
