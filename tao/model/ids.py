"""Object ids, 63 bits: ``shard (16) | milliseconds since 2020-01-01 UTC (41) | sequence (6)``.

The shard is part of the id, so every holder of an id can route without a look-up, and an object stays on its shard for
life. Ids of a shard grow with time, so that InnoDB inserts at the end of the clustered index.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
"""The time that an owner reserves ahead of its clock, in one commit."""
STEP_MS: Final = 1_000
"""The time that an owner reserves at least, as much as 64,000 ids."""
WINDOW_MS: Final = 20_000
"""The length of a window of times, which is 1.28 million ids: see `next_reserved`."""
MAX_AHEAD_MS: Final = 2 * RESERVED_AHEAD_MS
"""How far ahead of its clock an owner may begin a window: in normal work ids run 140 s ahead at most."""
FARTHEST_AHEAD_MS: Final = 300_000
"""How far ahead of its clock an owner may use a window, whatever is stored. Seven promotions within a moment that lack
commits need as much."""
CLOCKS_DIFFER_MS: Final = 10_000
"""Largest difference between two clocks that is allowed for, of leaders, database servers and the machine of a restore.
After a restore ids are refused until the clock has gone on by this and by a window: for 30 s, and for 40 s where the
clocks do differ by as much."""

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
    former owners may have given out all of that. `LostTimes` says where it begins when a database lacks commits."""

    __slots__ = ("_last", "_shard", "reserved_unix_ms")

    def __init__(self, shard: int, reserved_unix_ms: int) -> None:
        """``reserved_unix_ms``: the highest time of an id that an owner before may have given out."""
        self.reserved_unix_ms = reserved_unix_ms
        self._shard: Final = shard
        self._last = _last_id(shard, reserved_unix_ms)

    def take(self, count: int, unix_ms: int) -> int | None:
        """Give out ``count`` consecutive ids and return the first. None: a higher time must be reserved first.

        The ids grow, also when the clock goes back or more than 64 are taken in a millisecond. Raises `Overloaded` when
        no higher time may be reserved yet, and `InvalidArgument` when the shard has no ids left."""
        first = max(self._last + 1, make_id(self._shard, unix_ms, 0))
        last = first + count - 1
        if shard_of(last) != self._shard:
            raise InvalidArgument(f"shard {self._shard} has no ids left")
        if unix_ms_of(last) <= self.reserved_unix_ms:
            self._last = last
            return first
        if next_reserved(self.reserved_unix_ms, unix_ms) is None:
            ahead_ms = self.reserved_unix_ms - unix_ms
            wait_ms = _goes_on_at(self.reserved_unix_ms) - unix_ms
            raise Overloaded(
                f"the ids of shard {self._shard} are reserved to {ahead_ms} ms ahead of the clock of this leader; more "
                f"are reserved when that is {ahead_ms - wait_ms} ms at most, because an id could be given out twice "
                f"otherwise: try again in {-(-wait_ms // 1_000)} s"
            )
        return None

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
        if next_reserved(self.reserved_unix_ms, unix_ms) is None:
            return False
        left_ms = self.reserved_unix_ms - unix_ms_of(self._last)
        return left_ms < STEP_MS // 2 or self.reserved_unix_ms - unix_ms < RESERVED_AHEAD_MS // 2

    def is_worth_raising(self, unix_ms: int) -> bool:
        """Return whether a commit that is made anyway should reserve more: a quarter of the time is used up, and ids
        were given out since it was reserved."""
        is_used = unix_ms_of(self._last) > self.reserved_unix_ms - RESERVED_AHEAD_MS
        return is_used and self.reserved_unix_ms - unix_ms < RESERVED_AHEAD_MS * 3 // 4


def next_reserved(stored_unix_ms: int, unix_ms: int) -> int | None:
    """Return the time to reserve next, above the stored one: a minute ahead of the clock, and a second more at least.
    None: no higher time may be reserved before the clock has gone on.

    Two bounds say where ids that nobody knows of any more can be (`LostTimes`):

    - An owner stays in the window of the stored time, or in windows that begin at most `MAX_AHEAD_MS` ahead of its
      clock. So a chain of commits leaves the window that it began in for such windows only, however long it is.
    - It stays in windows that begin at most `FARTHEST_AHEAD_MS` ahead of its clock.

    A stored time that is further ahead than clocks allow comes from a clock that was wrong. Neither bound can hold
    then, and ids go on in steps of a second."""
    is_wrong = stored_unix_ms > _next_window(unix_ms + FARTHEST_AHEAD_MS) + WINDOW_MS + 2 * CLOCKS_DIFFER_MS
    if not is_wrong and unix_ms < _goes_on_at(stored_unix_ms):
        return None
    return max(unix_ms + RESERVED_AHEAD_MS, stored_unix_ms + STEP_MS)


def _goes_on_at(stored_unix_ms: int) -> int:
    """Return the clock from which on the two bounds of `next_reserved` let an owner reserve a second more."""
    window = (stored_unix_ms + STEP_MS) // WINDOW_MS * WINDOW_MS
    return window - (FARTHEST_AHEAD_MS if stored_unix_ms >= window else MAX_AHEAD_MS)


class LostTimes(NamedTuple):
    """The times that lost commits may have reserved: what a database that lacks them lets its shards begin with.

    ``normal_unix_ms``: the window above all that owners may have begun in normal work. ``farthest_unix_ms``: the window
    above all that they may have used, whatever was stored."""

    normal_unix_ms: int
    farthest_unix_ms: int

    @classmethod
    def at(cls, unix_ms: int) -> LostTimes:
        """``unix_ms``: the time, when nobody can commit any more what is lost."""
        latest = unix_ms + CLOCKS_DIFFER_MS
        return cls(_next_window(latest + MAX_AHEAD_MS), _next_window(latest + FARTHEST_AHEAD_MS))

    def begin(self, stored_unix_ms: int, *, lacks_epoch: bool) -> int:
        """Return the time above which a shard's ids begin. ``stored_unix_ms``: what is left, 0 for nothing.

        ``lacks_epoch``: the database lacks where the shard's ids began under its last version epoch, and not only
        commits after that. Otherwise the lost commits have left the window of the stored time for none that
        `MAX_AHEAD_MS` does not allow. `tao.replication.server_statements.raise_epoch` has this in SQL."""
        if stored_unix_ms > self.right_until_unix_ms:
            return _next_window(stored_unix_ms + RESERVED_AHEAD_MS)
        begin = self.farthest_unix_ms if lacks_epoch else max(self.normal_unix_ms, _next_window(stored_unix_ms))
        return max(stored_unix_ms, min(begin, self.farthest_unix_ms))

    @property
    def right_until_unix_ms(self) -> int:
        """The highest time that clocks which differ by `CLOCKS_DIFFER_MS` can have stored: what another promotion or
        restore begins with, a window above these at most. A wrong clock has stored a higher one, and the lost commits
        were steps from there (`next_reserved`): a minute of them, as much as is reserved at once, is left out."""
        return self.farthest_unix_ms + WINDOW_MS


def _next_window(unix_ms: int) -> int:
    return (unix_ms // WINDOW_MS + 1) * WINDOW_MS


def _last_id(shard: int, unix_ms: int) -> int:
    """Return the highest id of the shard with that time."""
    return make_id(shard, unix_ms, SEQUENCE_PER_MS - 1)
