"""Versions: ``epoch (15 bits) | counter (48 bits)``, one per object and one per association list.

The store raises a key's counter by exactly one per transaction. The epoch is the shard's version epoch, raised when a
master is promoted: every later version is then higher than any that the lost master may have given out. A version is a
plain integer, so that comparing two is comparing integers; 0 means "never written".
"""

from __future__ import annotations

from typing import Final

COUNTER_BITS: Final = 48
COUNTER_MASK: Final = (1 << COUNTER_BITS) - 1
NEVER_WRITTEN: Final = 0
FIRST_EPOCH: Final = 1
MAX_EPOCH: Final = (1 << 63 - COUNTER_BITS) - 1
"""A promotion raises the epoch by one: 32,766 promotions."""


def epoch_of(version: int) -> int:
    """Return the version epoch in the high bits; 0 for `NEVER_WRITTEN`."""
    return version >> COUNTER_BITS


def counter_of(version: int) -> int:
    """Return how many transactions have changed the key."""
    return version & COUNTER_MASK


def answers(version: int, minimum: int, version_epoch: int) -> bool:
    """Return whether a value at ``version`` may answer a read that asks for ``minimum``: it is as new; or it was read
    under a later version epoch, whose master has everything that is left of the older one. In the second case a version
    below the minimum says that the write it stands for was lost."""
    return version >= minimum or version_epoch > epoch_of(minimum)


def next_version(before: int, epoch: int) -> int:
    """Return the version after one more transaction under ``epoch``. It is never lower than ``before``: a shard whose
    epoch went back (which nothing legal does) keeps the higher one."""
    return max(before >> COUNTER_BITS, epoch) << COUNTER_BITS | (before & COUNTER_MASK) + 1
