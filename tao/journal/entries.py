"""Entries of a journal: accepted writes, their priorities."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from tao.model.errors import InvalidArgument


class Priority(IntEnum):
    """How soon an accepted write is made. The numbers are stored and sent."""

    HIGH = 1
    NORMAL = 2
    LOW = 3

    @property
    def label(self) -> str:
        """Return the name in the SDK and in metrics."""
        return self.name.lower()


def priority_of(number: int) -> Priority:
    """Return the priority that a request names, 0 for the usual one. Raises `InvalidArgument`."""
    try:
        return Priority(number or Priority.NORMAL)
    except ValueError:
        raise InvalidArgument(f"there is no priority {number}; 1 is high, 2 normal, 3 low") from None


class EntryBody(msgspec.Struct, frozen=True, array_like=True):
    """What the disk holds of a write: ``write`` is an encoded `pb.Write`, made on behalf of ``caller`` and
    ``operator``."""

    write: bytes
    caller: str | None
    operator: str = ""


class Entry(msgspec.Struct):
    """One accepted write. ``number`` is its place in the journal, ``body`` an encoded `EntryBody`. ``shard`` is the one
    that coordinates the write: its leader and its database decide whether the write can be made. ``attempts`` are those
    that have failed and may be repeated."""

    number: int
    priority: Priority
    shard: int
    accepted_ms: int
    body: bytes
    attempts: int = 0


class ParkedEntry(NamedTuple):
    """An entry that was given up, and why."""

    entry: Entry
    reason: str
    message: str


class LostEntry(NamedTuple):
    """An entry that is never made, and why."""

    message: str


encode_body = msgspec.msgpack.Encoder().encode
decode_body: Final = msgspec.msgpack.Decoder(EntryBody).decode
