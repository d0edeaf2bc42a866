"""Samples of what a server is asked, and what answers say of hot items (DESIGN.md §10).

Always on, so it has to cost nothing: per batch a subtraction, and one query in hundreds is looked at. Which one is
drawn by a generator of its own, or batches that repeat would show the same place for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock
from tao.routing.read_rates import Key, RateSettings, ReadRates
from tao.wire.v1 import session_pb2 as pb

MAX_TOLD: Final = 1_000
"""Shards, and keys, in one answer to an operator."""

_FADE_SECONDS: Final = 0.5


class Traffic:
    """One server's reads. ``left``: queries until the next sample, counted down by whoever serves batches."""

    __slots__ = ("_clock", "_fade_at", "_gap", "_settings", "_state", "left", "rates")

    def __init__(self, clock: Clock, settings: RateSettings | None = None) -> None:
        self._clock: Final = clock
        self._settings: Final = settings or RateSettings()
        now = clock.monotonic()
        self.rates: Final = ReadRates(self._settings, now)
        self._fade_at = now + _FADE_SECONDS
        self._state = 0x9E3779B9
        self._gap = self.left = self._drawn()

    def sample(self, batch: pb.ReadBatch, sizes: tuple[int, ...]) -> None:
        """``left`` has come to 0 or below within this batch: look at the query where it did, and at each further one
        that is due."""
        total = sum(sizes)
        while self.left <= 0:
            key = key_at(batch, sizes, total - 1 + self.left)
            self.rates.count(key, key[0] >> SHARD_SHIFT, self._gap)
            self._gap = self._drawn()
            self.left += self._gap
        now = self._clock.monotonic()
        if now >= self._fade_at:
            self.rates.fade(now)
            self._fade_at = now + _FADE_SECONDS

    def tell_hot(self, batch: pb.ReadBatch, sizes: tuple[int, ...], answer: pb.ReadAnswer) -> None:
        """Name the queries for hot items. To be called when there are any."""
        hot, slot = self.rates.hot, 0
        for operation, (size, ids) in enumerate(zip(sizes, _ids(batch), strict=True)):
            if size:
                atypes = _atypes(batch, operation)[:] if operation else [0] * size
                keys = list(zip(ids[:], atypes, strict=True))
                # Most batches ask for nothing that is hot: that is found out at the speed of C.
                if not hot.keys().isdisjoint(keys):
                    for place in (place for place, key in enumerate(keys, slot) if key in hot):
                        rate = hot[keys[place - slot]]
                        answer.hot_slots.append(place)
                        answer.hot_rates.append(round(rate))
                        answer.slow_down_ms.append(self.rates.slow_down_ms(rate))
            slot += size

    def told(self, limit: int) -> pb.Traffic:
        """What is read most, for an operator."""
        limit, now = min(limit, MAX_TOLD), self._clock.monotonic()
        told = pb.Traffic(read_rate=self.rates.total(now))
        for shard, rate in self.rates.shards(limit, now):
            told.shards.append(shard)
            told.shard_rates.append(rate)
        for (key_id, atype), rate in self.rates.keys(limit, now):
            told.key_ids.append(key_id)
            told.key_atypes.append(atype)
            told.key_rates.append(rate)
        return told

    def hot_keys(self) -> int:
        """Objects and lists whose rate is above the threshold."""
        self.rates.fade(self._clock.monotonic())
        return len(self.rates.hot)

    def summary(self, limit: int = 5) -> dict[str, object]:
        """For ``/stats``."""
        now = self._clock.monotonic()
        shards, keys = self.rates.shards(limit, now), self.rates.keys(limit, now)
        return {
            "reads_per_second": round(self.rates.total(now), 1),
            "hot_keys": self.hot_keys(),
            "shards": [{"shard": shard, "reads_per_second": round(rate, 1)} for shard, rate in shards],
            "keys": [
                {"id": each.key[0], "atype": each.key[1], "reads_per_second": round(each.per_second, 1)}
                for each in keys
            ],
        }

    def _drawn(self) -> int:
        """Queries to the next sample: evenly between 1 and twice the average, less one."""
        self._state = (self._state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        return 1 + (self._state >> 8) % (2 * self._settings.queries_per_sample - 1)


def key_at(batch: pb.ReadBatch, sizes: tuple[int, ...], slot: int) -> Key:
    """What the query in a slot is about."""
    for operation, (size, ids) in enumerate(zip(sizes, _ids(batch), strict=True)):
        if slot < size:
            return ids[slot], _atypes(batch, operation)[slot] if operation else 0
        slot -= size
    raise IndexError("no such slot")


def _ids(batch: pb.ReadBatch) -> tuple[Sequence[int], ...]:
    return batch.obj_ids, batch.count_id1s, batch.range_id1s, batch.time_range_id1s, batch.get_id1s


def _atypes(batch: pb.ReadBatch, operation: int) -> Sequence[int]:
    return (batch.count_atypes, batch.range_atypes, batch.time_range_atypes, batch.get_atypes)[operation - 1]
