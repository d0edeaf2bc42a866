"""The types and shards that a request names, for the audit log's records of what operators ask for and of denials.

They are read from requests that may be refused, so their sender need not mean well: so many keys and types of a request
are looked at, and the others are counted. A number that is no type of the schema stays a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from tao.access.decisions import TypeKind
from tao.model.ids import SHARD_SHIFT
from tao.wire.v1 import session_pb2 as pb

MAX_KEYS: Final = 10_000
"""As many as a batch of reads may have (`tao.serving.misses.BatchSettings`)."""
_NUMBERS_OF_A_KEY: Final = 25
"""Numbers of types that are looked at for each key: whether they repeat is found out by building a set of them."""

_IDS: Final = frozenset({"id", "id1", "id2", "low_id", "high_id"})
_SHARDS: Final = frozenset({"shard", "low_shard", "high_shard"})
_TYPES: Final = {
    **dict.fromkeys(("otype", "otypes"), TypeKind.OBJECT),
    **dict.fromkeys(("atype", "new_atype", "atypes"), TypeKind.ASSOCIATION),
}
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


class _Fields(NamedTuple):
    """The fields of a message that name ids, shards, and types with their kind."""

    ids: tuple[str, ...]
    shards: tuple[str, ...]
    types: tuple[tuple[str, TypeKind], ...]

    @classmethod
    def of(cls, message: Descriptor) -> _Fields:
        names = [field.name for field in message.fields]
        return cls(
            tuple(each for each in names if each in _IDS),
            tuple(each for each in names if each in _SHARDS),
            tuple((each, _TYPES[each]) for each in names if each in _TYPES),
        )


_FIELDS: Final = {name: _Fields.of(message) for name, message in pb.DESCRIPTOR.message_types_by_name.items()}


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


Scoped = pb.Request | Sequence[pb.Write] | Scope
"""What has a scope: a request or some writes, of which it is not read yet, or the scope itself."""


def scope_of(what: Scoped, max_keys: int = MAX_KEYS) -> Scope:
    """Return what a request or some writes name. ``max_keys``: so many keys are looked at, and so many types are named;
    with 0, what may stand there more than once is only counted."""
    if isinstance(what, Scope):
        return what
    reader = _ScopeReader(max_keys)
    if isinstance(what, pb.Request):
        reader.take_request(what)
    else:
        reader.take_writes(what)
    return reader.scope()


class _ScopeReader:
    """Collects types and shards, of so many keys, and so many types. Neither takes the room of the other."""

    def __init__(self, max_keys: int) -> None:
        self._numbers: Final[dict[TypeKind, set[int]]] = {kind: set() for kind in TypeKind}
        self._shards: Final[set[int]] = set()
        self._keys_left = self._types_left = max_keys
        self._numbers_left = max_keys * _NUMBERS_OF_A_KEY
        self._unread_types = self._unread_shards = 0

    def scope(self) -> Scope:
        types = frozenset(NamedType(kind, each) for kind, numbers in self._numbers.items() for each in numbers)
        return Scope(types, frozenset(self._shards), self._unread_types, self._unread_shards)

    def take_request(self, request: pb.Request) -> None:
        kind = request.WhichOneof("body")
        if kind is None:
            return
        body = getattr(request, kind)
        if kind == "read":
            self._take_reads(body)
        elif kind == "write":
            self.take_writes(body.writes)
        elif kind == "inspect":
            self._take_lists(body.list_id1s, body.list_atypes)
            self._take_ids(body.obj_ids)
            if body.sample_limit:
                self._shards.add(body.sample_shard)
        elif kind == "get_counters":
            self._take_lists(body.ids, body.atypes)
        elif kind == "select":
            for term in self._some_messages(body.terms, name_types=True):
                self._take(term.list)
                self._take_lists(term.union.id1s, (term.union.atype,))
        elif kind in _KEYS:
            for field in _KEYS[kind]:
                for each in self._some_messages(getattr(body, field), name_types=field in _NAME_TYPES):
                    self._take(each)
            if kind.startswith("relay"):
                self._take_shards(body.bulk_shards)
        elif kind == "invalidate":
            self._take_shards(body.shards)
            self._take(body)
        else:
            self._take(body)

    def take_writes(self, writes: Sequence[pb.Write]) -> None:
        for write in self._some_messages(writes, name_types=True):
            operation = write.WhichOneof("operation")
            if operation is not None:
                self._take(getattr(write, operation))

    def _some_messages(self, column: Sequence[_Item], *, name_types: bool) -> Sequence[_Item]:
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

    def _take_reads(self, batch: pb.ReadBatch) -> None:
        self._take_ids(batch.obj_ids)
        self._take_lists(batch.count_id1s, batch.count_atypes)
        self._take_lists(batch.range_id1s, batch.range_atypes)
        self._take_lists(batch.time_range_id1s, batch.time_range_atypes)
        self._take_lists(batch.get_id1s, batch.get_atypes)
        self._take_lists(batch.exist_id1s, batch.exist_atypes)

    def _take_ids(self, ids: Sequence[int]) -> None:
        self._shards.update(each >> SHARD_SHIFT for each in self._some_keys(ids))

    def _take_shards(self, shards: Sequence[int]) -> None:
        self._shards.update(self._some_keys(shards))

    def _take_lists(self, id1s: Sequence[int], atypes: Sequence[int]) -> None:
        self._take_ids(id1s)
        self._take_types(TypeKind.ASSOCIATION, atypes)

    def _take(self, message: Message) -> None:
        """Take the fields of one message. 0 is no id and no type. A shard stands beside an id only in place of it."""
        fields = _FIELDS[message.DESCRIPTOR.name]
        ids = [key for name in fields.ids if (key := getattr(message, name))]
        self._shards.update([key >> SHARD_SHIFT for key in ids])
        if not ids:
            self._shards.update([getattr(message, name) for name in fields.shards])
        for name, kind in fields.types:
            found = getattr(message, name)
            self._take_types(kind, (found,) if isinstance(found, int) else found)

    def _take_types(self, kind: TypeKind, column: Sequence[int]) -> None:
        some = column[: self._numbers_left]
        self._numbers_left -= len(some)
        known = self._numbers[kind]
        new = {*some} - known
        new.discard(0)
        taken = [*islice(new, self._types_left)]
        known.update(taken)
        self._types_left -= len(taken)
        self._unread_types += len(column) - len(some) + len(new) - len(taken)
