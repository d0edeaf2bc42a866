"""The types and shards that a request names, for the audit log's records of what operators ask for and of denials.

They are read from requests that may be refused, so their sender need not mean well: at most `MAX_KEYS` keys of a
request are looked at, and as many types, and the others are counted. A number that is no type of the schema stays a
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from google.protobuf.message import Message

from tao.access.decisions import TypeKind
from tao.model.ids import SHARD_SHIFT
from tao.wire.v1 import session_pb2 as pb

MAX_KEYS: Final = 10_000
"""As many as a batch of reads may have (`tao.serving.misses.BatchSettings`)."""

_IDS: Final = frozenset({"id", "id1", "id2", "low_id", "high_id"})
_SHARDS: Final = frozenset({"shard", "low_shard", "high_shard"})
_OBJECT_TYPES: Final = frozenset({"otype", "otypes"})
_ASSOCIATION_TYPES: Final = frozenset({"atype", "new_atype", "atypes"})
_KEYS: Final = {
    "apply": ("changes",),
    "keep_copies": ("copies",),
    "relay": ("changes", "touches", "spans"),
    "relay_by_reference": ("changes", "touches", "spans", "references"),
    "settle_pairs": ("pairs", "shards"),
    "subscribe": ("positions",),
    "touch_keys": ("touches",),
}
"""The repeated fields of a request whose messages name ids, shards and types, by its kind."""
_NAME_TYPES: Final = frozenset({"pairs", "touches"})
"""Those whose messages name types."""
_Item = TypeVar("_Item")


class NamedType(NamedTuple):
    """A type by its number, which the schema need not have."""

    kind: TypeKind
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Scope(NamedTuple):
    """The types and shards of a request, or of a part of one. ``unread_types`` and ``unread_shards``: those that were
    not looked at, each counted as often as it stands there."""

    types: frozenset[NamedType] = frozenset()
    shards: frozenset[int] = frozenset()
    unread_types: int = 0
    unread_shards: int = 0


def scope_of(request: pb.Request) -> Scope:
    """Return what a request names."""
    reader = _ScopeReader()
    kind = request.WhichOneof("body")
    if kind is None:
        return Scope()
    body = getattr(request, kind)
    if kind == "read":
        reader.read(body)
    elif kind == "write":
        for write in reader.some_messages(body.writes, name_types=True):
            reader.take_operation(write)
    elif kind == "inspect":
        reader.take_lists(body.list_id1s, body.list_atypes)
        reader.take_ids(body.obj_ids)
        if body.sample_limit:
            reader.shards.add(body.sample_shard)
    elif kind == "select":
        for term in reader.some_messages(body.terms, name_types=True):
            reader.take(term.list)
            reader.take_lists(term.union.id1s, (term.union.atype,))
    elif kind in _KEYS:
        for field in _KEYS[kind]:
            for each in reader.some_messages(getattr(body, field), name_types=field in _NAME_TYPES):
                reader.take(each)
        if kind.startswith("relay"):
            reader.take_shards(body.bulk_shards)
    elif kind == "invalidate":
        reader.take_shards(body.shards)
        reader.take(body)
    else:
        reader.take(body)
    return reader.scope()


def scope_of_write(write: pb.Write) -> Scope:
    """Return what a write names."""
    reader = _ScopeReader()
    reader.take_operation(write)
    return reader.scope()


class _ScopeReader:
    """Collects types and shards, of at most `MAX_KEYS` keys and as many types. Neither takes the room of the other."""

    def __init__(self) -> None:
        self._types: Final[set[NamedType]] = set()
        self.shards: Final[set[int]] = set()
        self._types_left = self._keys_left = MAX_KEYS
        self._unread_types = self._unread_shards = 0

    def scope(self) -> Scope:
        return Scope(frozenset(self._types), frozenset(self.shards), self._unread_types, self._unread_shards)

    def some_messages(self, column: Sequence[_Item], *, name_types: bool) -> Sequence[_Item]:
        """Return as many messages as may still be looked at. Each other one counts as a shard, and as a type if they
        name types."""
        some = self._some_keys(column)
        if name_types:
            self._unread_types += len(column) - len(some)
        return some

    def _some_keys(self, column: Sequence[_Item]) -> Sequence[_Item]:
        some = column[: self._keys_left]
        self._keys_left -= len(some)
        self._unread_shards += len(column) - len(some)
        return some

    def read(self, batch: pb.ReadBatch) -> None:
        self.take_ids(batch.obj_ids)
        self.take_lists(batch.count_id1s, batch.count_atypes)
        self.take_lists(batch.range_id1s, batch.range_atypes)
        self.take_lists(batch.time_range_id1s, batch.time_range_atypes)
        self.take_lists(batch.get_id1s, batch.get_atypes)
        self.take_lists(batch.exist_id1s, batch.exist_atypes)

    def take_ids(self, ids: Sequence[int]) -> None:
        self.shards.update(each >> SHARD_SHIFT for each in self._some_keys(ids))

    def take_shards(self, shards: Sequence[int]) -> None:
        self.shards.update(self._some_keys(shards))

    def take_lists(self, id1s: Sequence[int], atypes: Sequence[int]) -> None:
        self.take_ids(id1s)
        self._take_types(TypeKind.ASSOCIATION, atypes)

    def take_operation(self, write: pb.Write) -> None:
        operation = write.WhichOneof("operation")
        if operation is not None:
            self.take(getattr(write, operation))

    def take(self, message: Message) -> None:
        """Take the fields of one message. 0 is no id and no type. A shard stands beside an id only in place of it."""
        has_id = False
        for field in message.DESCRIPTOR.fields:
            name = field.name
            if name in _IDS:
                if key := getattr(message, name):
                    has_id = True
                    self.shards.add(key >> SHARD_SHIFT)
            elif name in _SHARDS:
                if not has_id:
                    self.shards.add(getattr(message, name))
            elif name in _OBJECT_TYPES:
                self._take_types(TypeKind.OBJECT, getattr(message, name))
            elif name in _ASSOCIATION_TYPES:
                self._take_types(TypeKind.ASSOCIATION, getattr(message, name))

    def _take_types(self, kind: TypeKind, found: int | Sequence[int]) -> None:
        """Take a type, or a column of types."""
        if isinstance(found, int):
            found = (found,)
        some = found[: self._types_left]
        self._types_left -= len(some)
        self._unread_types += len(found) - len(some)
        self._types.update(NamedType(kind, each) for each in set(some) if each)
