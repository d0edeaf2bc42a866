"""Versions as the store would assign them."""

from __future__ import annotations

from tao.model.versions import COUNTER_BITS


def make_version(epoch: int, counter: int) -> int:
    """Return the version of a key after ``counter`` transactions, the last of them under ``epoch``."""
    return epoch << COUNTER_BITS | counter
