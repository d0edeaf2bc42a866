"""Sample the queries that a server is asked, and mark hot items in its answers.

Sampling is always on, so it must cost next to nothing: a subtraction for each batch, and a look at one query in
hundreds. A server that is asked little looks at more of them, up to every one, because a few samples a minute would
say nothing about its reads. A generator chooses which query, because with a fixed step batches that repeat would show
the same slot for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock
from tao.routing.read_rates import Key, RateSettings, ReadRates
from tao.serving.access import NOTHING_SHOWN, ReadCheck
from tao.wire.read_batch import OperationSizes
from tao.wire.v1 import session_pb2 as pb

MAX_REPORTED: Final = 1_000
"""Most shards, and most keys, in one answer to an operator."""

_FADE_SECONDS: Final = 0.5
"""Interval at which the counts decay and the sampling is fitted to the rate of reads."""

_SAMPLES_WANTED: Final = 200
"""Samples in that interval: 400 reads a second are counted one by one. Measured: 0.8 ms of CPU a second there,
1.5 ms at 10,000 reads a second, and 1.8 ms at 100,000, as without this."""


class Traffic:
    """The samples of one server's reads. ``left`` is the number of queries until the next sample; the read service
    counts it down."""

    __slots__ = (
        "_clock",
        "_fade_at",
        "_gap",
        "_mean_gap",
        "_reads",
        "_samples",
        "_settings",
        "_state",
        "left",
        "rates",
    )

    def __init__(self, clock: Clock, settings: RateSettings | None = None) -> None:
        self._clock: Final = clock
        self._settings: Final = settings or RateSettings()
        now = clock.monotonic()
        self.rates: Final = ReadRates(self._settings, now)
        self._fade_at = now + _FADE_SECONDS
        self._state = 0x9E3779B9
        self._mean_gap = 1
        self._samples = self._reads = 0
        self._gap = self.left = self._draw_gap()

    def sample(self, batch: pb.ReadBatch, sizes: OperationSizes, check: ReadCheck | None = None) -> None:
        """Sample the query at which ``left`` came to 0 within this batch, and each further one that is due. Those that
        ``check`` refuses make nothing hot."""
        total = sum(sizes)
        while self.left <= 0:
            key = key_at(batch, sizes, total - 1 + self.left)
            if check is None or check.may_ask_for(key[1]):
                self.rates.count(key, key[0] >> SHARD_SHIFT, self._gap)
            self._reads += self._gap
            self._samples += 1
            if self._samples > _SAMPLES_WANTED:  # a burst: what is sampled until the interval ends is bounded
                self._mean_gap = self._settings.queries_per_sample
            self._gap = self._draw_gap()
            self.left += self._gap
        self._refresh(self._clock.monotonic())

    def add_hot_items(
        self,
        batch: pb.ReadBatch,
        sizes: OperationSizes,
        answer: pb.ReadAnswer,
        values: Sequence[bytes | None] = (),
        check: ReadCheck | None = None,
    ) -> None:
        """Add the batch's queries for hot items to the answer: to a caller with a ``check``, those of which ``values``
        show something. Call this only when there are hot items."""
        hot, slot, answered = self.rates.hot, 0, len(values)
        for operation, size in enumerate(sizes):
            if size:
                ids = _ids(batch, operation)
                atypes = _atypes(batch, operation)[:] if operation else [0] * size
                keys = list(zip(ids[:], atypes, strict=True))
                # Most batches ask for no hot item: one set operation in C finds that out.
                if not hot.keys().isdisjoint(keys):
                    for place in (place for place, key in enumerate(keys, slot) if key in hot):
                        # Compared here: when much of a batch is hot, a call would be most of what rights cost.
                        if check is not None and (place >= answered or values[place] in NOTHING_SHOWN):
                            continue
                        rate = hot[keys[place - slot]]
                        answer.hot_slots.append(place)
                        answer.hot_rates.append(round(rate))
                        answer.slow_down_ms.append(self.rates.slow_down_ms(rate))
            slot += size

    def most_read(self, limit: int) -> pb.Traffic:
        """Return what is read most, for an operator."""
        limit, now = min(limit, MAX_REPORTED), self._clock.monotonic()
        self._refresh(now)
        report = pb.Traffic(read_rate=self.rates.total(now))
        for shard, rate in self.rates.shards(limit, now):
            report.shards.append(shard)
            report.shard_rates.append(rate)
        for (key_id, atype), rate in self.rates.keys(limit, now):
            report.key_ids.append(key_id)
            report.key_atypes.append(atype)
            report.key_rates.append(rate)
        return report

    def hot_keys(self) -> int:
        """Return the number of objects and lists whose read rate is above the threshold."""
        now = self._clock.monotonic()
        self._refresh(now)
        self.rates.fade(now)
        return len(self.rates.hot)

    def summary(self, limit: int = 5) -> dict[str, object]:
        """Return the summary for ``/stats``."""
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

    def _refresh(self, now: float) -> None:
        """Once in each interval, decay the counts and fit the sampling to the reads since the last time."""
        if now < self._fade_at:
            return
        intervals = 1 + (now - self._fade_at) / _FADE_SECONDS
        wanted = round(self._reads / intervals / _SAMPLES_WANTED)
        self._mean_gap = min(max(wanted, 1), self._settings.queries_per_sample)
        self._samples = self._reads = 0
        self._fade_at = now + _FADE_SECONDS
        self.rates.fade(now)
        if self.left > 2 * self._mean_gap:  # drawn when more was read: it would hide the next reads for long
            self._gap = self.left = self._draw_gap()

    def _draw_gap(self) -> int:
        """Draw the number of queries until the next sample: evenly between 1 and twice the average, less one."""
        self._state = (self._state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        return 1 + (self._state >> 8) % (2 * self._mean_gap - 1)


def key_at(batch: pb.ReadBatch, sizes: OperationSizes, slot: int) -> Key:
    """Return the key of the query in a slot."""
    for operation, size in enumerate(sizes):
        if slot < size:
            return _ids(batch, operation)[slot], _atypes(batch, operation)[slot] if operation else 0
        slot -= size
    raise IndexError("no such slot")


# By name, because reading a column that was not sent creates it.
_ID_COLUMNS: Final = ("obj_ids", "count_id1s", "range_id1s", "time_range_id1s", "get_id1s", "exist_id1s")
_ATYPE_COLUMNS: Final = ("count_atypes", "range_atypes", "time_range_atypes", "get_atypes", "exist_atypes")


def _ids(batch: pb.ReadBatch, operation: int) -> Sequence[int]:
    column: Sequence[int] = getattr(batch, _ID_COLUMNS[operation])
    return column


def _atypes(batch: pb.ReadBatch, operation: int) -> Sequence[int]:
    column: Sequence[int] = getattr(batch, _ATYPE_COLUMNS[operation - 1])
    return column
