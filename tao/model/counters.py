"""Counters: sums of slots, each of which holds the totals of one life of one follower.

A counter of an object is a list of slots, stored like edges: the number of the slot is their ``id2``. A follower counts
in memory and writes its totals to the slot of its life, never a difference, with the number of the flush. The higher
number wins, so a flush may be repeated, delayed or lost, and the next one says all that the lost one did. Slot 0 holds
the sum of slots that were folded. A slot that was folded stays for a while and says how much of it that was: a later
flush of its life counts for the difference only.
"""

from __future__ import annotations

from typing import Final

import msgspec

PLUS_FIELD: Final = 1
MINUS_FIELD: Final = 2
FOLDED_FIELD: Final = 3
"""Numbers of the fields of a slot, which is encoded as an edge."""

FOLDED_SLOT: Final = 0
MAX_COUNTED: Final = 2**63 - 1
"""The highest total of a slot, and the highest value of a counter; the lowest is its negative."""
MAX_BY: Final = 2**62
"""The most that one call adds or takes away."""
LIFE_HORIZON_SECONDS: Final = 86_400
"""How long after it began a life may write its first flush of a counter. A folded slot is kept until then, and for
`LIFE_MARGIN_SECONDS` more, so no flush of its life can be counted a second time."""
LIFE_MARGIN_SECONDS: Final = 3_600
"""More than the clocks of leaders and followers differ."""
_BORN_SHIFT: Final = 32
_EPOCH_UNIX_S: Final = 1_577_836_800  # 2020-01-01
_TAG_BITS: Final = (1 << _BORN_SHIFT) - 1

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[int, int]).decode


class SlotTotals(msgspec.Struct, frozen=True, gc=False):
    """What a slot holds: how much its life has added and taken away, and how much of that is counted in slot 0."""

    plus: int = 0
    minus: int = 0
    folded: int = 0

    @property
    def net(self) -> int:
        """Return what the life has counted."""
        return self.plus - self.minus

    @property
    def value(self) -> int:
        """Return what the slot adds to the counter."""
        return self.plus - self.minus - self.folded


NOTHING: Final = SlotTotals()


def encode_totals(totals: SlotTotals) -> bytes:
    """Return the data of a slot."""
    values = ((PLUS_FIELD, totals.plus), (MINUS_FIELD, totals.minus), (FOLDED_FIELD, totals.folded))
    return _encode({number: value for number, value in values if value})


def decode_totals(data: bytes) -> SlotTotals:
    """Return the totals of a slot. One that a foreign writer has put, and that holds none, counts for nothing."""
    try:
        found = _decode(data)
    except msgspec.DecodeError:
        return NOTHING
    return SlotTotals(found.get(PLUS_FIELD, 0), found.get(MINUS_FIELD, 0), found.get(FOLDED_FIELD, 0))


def slot_of_life(born_unix_s: int, tag: int) -> int:
    """Return the slot of a life that begins now. ``tag``: random, so that lives of one second differ."""
    return max(1, born_unix_s - _EPOCH_UNIX_S) << _BORN_SHIFT | tag & _TAG_BITS


def born_unix_s(slot: int) -> int:
    """Return the second in which the life of a slot began, by the clock of its follower."""
    return (slot >> _BORN_SHIFT) + _EPOCH_UNIX_S


def may_begin(slot: int, now_unix_s: int) -> bool:
    """Return whether a life that has no slot in a counter may write one."""
    return born_unix_s(slot) + LIFE_HORIZON_SECONDS >= now_unix_s


def may_be_dropped(slot: int, now_unix_s: int) -> bool:
    """Return whether a folded slot may be removed, because no leader accepts a first flush of its life any more."""
    return born_unix_s(slot) + LIFE_HORIZON_SECONDS + LIFE_MARGIN_SECONDS < now_unix_s


def clamped(value: int) -> int:
    """Return the value of a counter, which has 63 bits and a sign."""
    return max(-MAX_COUNTED, min(value, MAX_COUNTED))
