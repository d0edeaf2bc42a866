"""Object ids, 63 bits: ``shard (16) | milliseconds since 2020-01-01 UTC (41) | sequence (6)``.

The shard is part of the id, so every holder of an id can route without a look-up, and an object stays on its shard for
life. Ids of a shard grow with time, so that InnoDB inserts at the end of the clustered index.
"""

from __future__ import annotations

from typing import Final

from tao.model.errors import InvalidArgument

SHARD_BITS: Final = 16
TIME_BITS: Final = 41
SEQUENCE_BITS: Final = 6

SHARD_SHIFT: Final = TIME_BITS + SEQUENCE_BITS
"""``id >> SHARD_SHIFT`` is the shard: the hot paths write it out."""

MAX_SHARDS: Final = 1 << SHARD_BITS
MAX_ID: Final = (1 << 63) - 1
EPOCH_UNIX_MS: Final = 1_577_836_800_000  # 2020-01-01T00:00:00Z
SEQUENCE_PER_MS: Final = 1 << SEQUENCE_BITS
MAX_RESERVED_IDS: Final = 10_000
"""Ids in one reservation. At 64 a millisecond they run 156 ms ahead of the clock."""

_MAX_TIME_MS: Final = (1 << TIME_BITS) - 1


def shard_of(object_id: int) -> int:
    """Return the shard that hosts the object for life, 0 to 65535."""
    return object_id >> SHARD_SHIFT


def make_id(shard: int, unix_ms: int, sequence: int) -> int:
    """Compose an id. Raises `InvalidArgument` when a part does not fit its bits."""
    since_epoch = unix_ms - EPOCH_UNIX_MS
    if not 0 <= shard < MAX_SHARDS:
        raise InvalidArgument(f"shard {shard} is outside 0 … {MAX_SHARDS - 1}")
    if not 0 <= since_epoch <= _MAX_TIME_MS:
        raise InvalidArgument(f"{unix_ms} ms is outside the 41 bits after 2020-01-01 that an id can hold")
    if not 0 <= sequence < SEQUENCE_PER_MS:
        raise InvalidArgument(f"sequence {sequence} is outside 0 … {SEQUENCE_PER_MS - 1}")
    return shard << SHARD_SHIFT | since_epoch << SEQUENCE_BITS | sequence


def check_id(object_id: int, name: str = "id") -> int:
    """Return the id, or raise `InvalidArgument` when it is not one (63 bits, positive)."""
    if not 0 < object_id <= MAX_ID:
        raise InvalidArgument(f"{name} {object_id} is not an object id (1 … 2^63 - 1)")
    return object_id


class IdAllocator:
    """Allocates growing ids per shard; time is passed in. Memory: one integer per shard used.

    Two allocators may propose the same id (two leaders, a clock set back). The store decides: a duplicate key is
    answered by taking the next one, so no two objects ever share an id.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def allocate(self, shard: int, unix_ms: int) -> int:
        """Return the next id of the shard: never lower than an earlier one, even when the clock goes back or more than
        64 are asked for within a millisecond (the time part then runs ahead of the clock)."""
        candidate = make_id(shard, unix_ms, 0)
        last = self._last.get(shard, -1)
        if candidate <= last:
            candidate = last + 1
            if shard_of(candidate) != shard:
                raise InvalidArgument(f"shard {shard} has no ids left")
        self._last[shard] = candidate
        return candidate
