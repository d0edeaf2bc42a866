"""Writes as the leader plans them: validated, ids fixed, types numeric."""

from __future__ import annotations

from typing import Final

import msgspec

from tao.model.errors import TaoError
from tao.model.relay import Touch


class ObjAdd(msgspec.Struct, frozen=True, tag="obj_add"):
    """Create object ``id``. ``allocated``: the leader chose the id itself, so when it is taken another is chosen;
    otherwise the caller reserved it, and adding the same type and data again is a success without effect."""

    id: int
    otype: int
    data: bytes
    allocated: bool


EVERY_TYPE: Final = -1
"""The bit set of all object types."""


class ObjUpdate(msgspec.Struct, frozen=True, tag="obj_update"):
    """Merge ``patch`` (msgpack map; nil removes a field) into the object. ``otype=0``: of any type. An object of a type
    that is not in the bit set ``writable`` is left alone, as if it did not exist."""

    id: int
    otype: int
    patch: bytes
    writable: int = EVERY_TYPE


class ObjDelete(msgspec.Struct, frozen=True, tag="obj_delete"):
    """Delete an object; its edges stay. ``otype=0``: of any type. ``writable``: see `ObjUpdate`."""

    id: int
    otype: int = 0
    writable: int = EVERY_TYPE


class AssocAdd(msgspec.Struct, frozen=True, tag="assoc_add"):
    """Add or overwrite an edge, and its inverse when the type has one."""

    id1: int
    atype: int
    id2: int
    time: int
    data: bytes


class AssocDelete(msgspec.Struct, frozen=True, tag="assoc_delete"):
    """Delete an edge, and its inverse."""

    id1: int
    atype: int
    id2: int


class AssocChangeType(msgspec.Struct, frozen=True, tag="assoc_change_type"):
    """Move an edge, and its inverse, to another type; time and data stay."""

    id1: int
    atype: int
    id2: int
    new_atype: int


class SettleEdge(msgspec.Struct, frozen=True, tag="settle_edge"):
    """Make one edge equal to what the coordinator of its pair holds: ``present`` with this time and data, or absent.

    The sub-write that mirrors a coordinator's current rows to the other side of a pair; idempotent."""

    id1: int
    atype: int
    id2: int
    present: bool
    time: int = 0
    data: bytes = b""


class Coordinator(msgspec.Struct, frozen=True):
    """The ownership under which the mirrors of a pair are written: the shard that coordinates the pair, and the
    generation of its owner. A leader rejects copies of a deposed owner, because they may be older than what its
    successor has written."""

    shard: int
    generation: int


class ForgetIntent(msgspec.Struct, frozen=True, tag="forget_intent"):
    """Remove the intent of a pair if it still carries ``token``: the pair's other side has been settled up to then."""

    low_id: int
    high_id: int
    token: int


class TouchKeys(msgspec.Struct, frozen=True, tag="touch"):
    """Give these keys of ``shard`` a new version each, and each list the count that its edges have, because a program
    that keeps no versions has changed them. An object whose row is gone leaves a tombstone."""

    shard: int
    touches: tuple[Touch, ...]


Write = (
    ObjAdd | ObjUpdate | ObjDelete | AssocAdd | AssocDelete | AssocChangeType | SettleEdge | ForgetIntent | TouchKeys
)


class WriteOutcome(msgspec.Struct):
    """The outcome of one write. ``id``: the object's id for `ObjAdd`. ``found``: the object or edge named existed
    before. ``error``: the write failed and nothing of it was written. ``otype``: the type of the object that an update
    or deletion has met, also of one that it may not write."""

    id: int = 0
    found: bool = False
    error: TaoError | None = None
    otype: int = 0
