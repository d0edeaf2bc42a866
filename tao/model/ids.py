"""Object ids, 63 bits: ``shard (16) | milliseconds since 2020-01-01 UTC (41) | sequence (6)``.

The shard is part of the id, so every holder of an id can route without a look-up, and an object stays on its shard for
life. Ids of a shard grow with time, so that InnoDB inserts at the end of the clustered index.
"""

from __future__ import annotations

from typing import Final

from tao.model.errors import IdNotReserved, InvalidArgument, Overloaded

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
RESERVED_AHEAD_MS: Final = 60_000
"""The time that an owner reserves ahead of its clock, in one commit. It bounds how far a former owner that was cut off
can run ahead: see `PROMOTION_AHEAD_MS`."""
STEP_MS: Final = 1_000
"""The time that an owner reserves at least, as much as 64,000 ids."""
MAX_AHEAD_MS: Final = 30_000
"""How far ids may run ahead of the clock, or of the time at which their owner began: 1.9 million ids in a burst."""
PROMOTION_AHEAD_MS: Final = 2 * RESERVED_AHEAD_MS
"""How far above its clock a new master begins that may lack the last reservations of the lost one: above what a
former owner may have reserved a minute ahead, with a minute for a burst of ids and for clocks that differ."""

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


def unix_ms_of(object_id: int) -> int:
    """Return the time in an id, in milliseconds since 1970."""
    return (object_id >> SEQUENCE_BITS & _MAX_TIME_MS) + EPOCH_UNIX_MS


def check_id(object_id: int, name: str = "id") -> int:
    """Return the id, or raise `InvalidArgument` when it is not one (63 bits, positive)."""
    if not 0 < object_id <= MAX_ID:
        raise InvalidArgument(f"{name} {object_id} is not an object id (1 … 2^63 - 1)")
    return object_id


class IdSequence:
    """The ids that one owner of a shard gives out, under one ownership; time is passed in. Memory: three integers.

    No id is given out twice, because of two rules. An owner gives out no id whose time is above ``reserved_unix_ms``,
    which the shard's database holds. And it begins above what the database held when it began, whatever its clock says:
    former owners may have given out all of that."""

    __slots__ = ("_last", "_latest_unix_ms", "_shard", "reserved_unix_ms")

    def __init__(self, shard: int, reserved_unix_ms: int) -> None:
        """``reserved_unix_ms``: the highest time of an id that an owner before may have given out."""
        self.reserved_unix_ms = reserved_unix_ms
        self._shard: Final = shard
        self._last = _last_id(shard, reserved_unix_ms)
        self._latest_unix_ms = reserved_unix_ms

    def take(self, count: int, unix_ms: int) -> int | None:
        """Give out ``count`` consecutive ids and return the first. None: a higher time must be reserved first.

        The ids grow, also when the clock goes back or more than 64 are taken in a millisecond. Raises `Overloaded` when
        they would run too far ahead of the clock, and `InvalidArgument` when the shard has no ids left."""
        self._latest_unix_ms = max(self._latest_unix_ms, unix_ms)
        first = max(self._last + 1, make_id(self._shard, unix_ms, 0))
        last = first + count - 1
        if shard_of(last) != self._shard:
            raise InvalidArgument(f"shard {self._shard} has no ids left")
        ahead_ms = unix_ms_of(last) - self._latest_unix_ms
        if ahead_ms > MAX_AHEAD_MS:
            raise Overloaded(
                f"the ids of shard {self._shard} would run {ahead_ms} ms ahead of the clock, above the bound of "
                f"{MAX_AHEAD_MS} ms: try again in a moment, or use another shard"
            )
        if unix_ms_of(last) > self.reserved_unix_ms:
            return None
        self._last = last
        return first

    def admit(self, object_id: int, unix_ms: int) -> bool:
        """Admit an id of the caller's choice. Returns False when a higher time must be reserved first.

        An id that was admitted once is admitted for ever. Raises `IdNotReserved` for an id that may be given out later,
        which is one above the clock and above all ids given out so far."""
        if object_id <= self._last:
            return True
        if object_id > _last_id(self._shard, unix_ms):
            raise IdNotReserved(
                f"id {object_id} was not reserved, and may be given to another caller later: reserve ids by "
                "reserve_ids, or leave the id out"
            )
        if unix_ms_of(object_id) > self.reserved_unix_ms:
            return False
        self._last = object_id
        return True

    def is_running_out(self, unix_ms: int) -> bool:
        """Return whether more should be reserved soon: ids or the clock come near the reserved time."""
        left_ms = self.reserved_unix_ms - unix_ms_of(self._last)
        return left_ms < STEP_MS // 2 or self.reserved_unix_ms - unix_ms < RESERVED_AHEAD_MS // 2

    def is_worth_raising(self, unix_ms: int) -> bool:
        """Return whether a commit that is made anyway should reserve more: a quarter of the time is used up, and ids
        were given out since it was reserved."""
        is_used = unix_ms_of(self._last) > self.reserved_unix_ms - RESERVED_AHEAD_MS
        return is_used and self.reserved_unix_ms - unix_ms < RESERVED_AHEAD_MS * 3 // 4


def next_reserved(stored_unix_ms: int, unix_ms: int) -> int:
    """Return the time to reserve next, above the stored one: a minute ahead of the clock.

    Where the stored time is further ahead, add only a second, so that owners who take a shard from each other do not
    run ever further ahead."""
    return max(unix_ms + RESERVED_AHEAD_MS, stored_unix_ms + STEP_MS)


def _last_id(shard: int, unix_ms: int) -> int:
    """Return the highest id of the shard with that time."""
    return make_id(shard, unix_ms, SEQUENCE_PER_MS - 1)
