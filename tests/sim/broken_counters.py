"""Counters, broken on purpose: see `tests.sim.variants`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from tao.follower import counters as of_follower
from tao.follower.counter_totals import Flush
from tao.model.writes import FlushCounter
from tao.planning import counters as planned


def flush_sends_deltas() -> AbstractContextManager[object]:
    """Let a follower flush what it has counted since its last flush, and not its totals."""

    def write_of(flush: Flush) -> FlushCounter:
        held = flush.held
        return FlushCounter(*held.key, held.life.slot, flush.number, flush.plus - flush.minus - held.flushed, 0)

    return patch.object(of_follower, "_write_of", write_of)


def tombstone_forgets_what_was_folded() -> AbstractContextManager[object]:
    """Let a fold leave slots as if nothing of them had been folded before."""
    return patch.object(planned, "may_be_dropped", lambda *_: True)
