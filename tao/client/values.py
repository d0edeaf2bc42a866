"""The values that operations return: objects, associations and lists of associations.

They hold the encoded bytes, and decode fields when they are first read: a page that shows the names of ten friends out
of a list of a hundred pays for ten. Values are immutable; a change is a write to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, cast, overload

from msgspec import Struct
from msgspec.structs import force_setattr

from tao.client.batches import objects_of
from tao.model.edge_block import LIMIT_CUT, checked_header, columns_of, id2_column, time_column
from tao.model.errors import ProtocolError, TaoError
from tao.model.graph import ABSENT, OBJECT_HEADER_BYTES
from tao.model.receipts import Receipt
from tao.model.tokens import WriteToken
from tao.schema.codec import decode_fields
from tao.schema.registry import Schema
from tao.schema.types import AssocType, FieldValue, ObjectType

Fields = Mapping[str, FieldValue | None]


class Object(Struct, frozen=True, eq=False, weakref=True):
    """A typed node. ``id`` is a 63-bit integer, ``otype`` the name of its type, and ``fields`` its values by name, with
    the default for each that is not set. Two objects are equal when their ids, types and fields are."""

    id: int
    _type: ObjectType
    _data: bytes = b""
    _fields: Fields | None = None

    @property
    def otype(self) -> str:
        return self._type.name

    @property
    def object_type(self) -> ObjectType:
        """Return the object's type as the schema defines it."""
        return self._type

    @property
    def fields(self) -> Fields:
        """Return the values by name; they are decoded once. Raises `InvalidField` for bytes that no version of the
        schema could have written."""
        fields = self._fields
        if fields is None:
            fields = MappingProxyType(decode_fields(self._type, self._data))
            force_setattr(self, "_fields", fields)
        return fields

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Object):
            return NotImplemented
        return (
            self.id == other.id
            and self._type.number == other._type.number
            and (self._data == other._data or self.fields == other.fields)
        )

    def __hash__(self) -> int:
        return hash((self.id, self._type.number))

    def __repr__(self) -> str:
        return f"Object(id={self.id}, otype={self.otype!r}, fields={dict(self.fields)!r})"


class Assoc(Struct, frozen=True, eq=False, weakref=True):
    """A typed, directed edge; at most one exists per ``(id1, atype, id2)``. The application chooses ``time``, which is
    0 … 2^63-1; ``fields`` are like those of an `Object`."""

    id1: int
    _type: AssocType
    id2: int
    time: int
    _data: bytes = b""
    _fields: Fields | None = None

    @property
    def atype(self) -> str:
        return self._type.name

    @property
    def fields(self) -> Fields:
        """Return the values by name; they are decoded once. Raises as `Object.fields`."""
        fields = self._fields
        if fields is None:
            fields = MappingProxyType(decode_fields(self._type, self._data))
            force_setattr(self, "_fields", fields)
        return fields

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Assoc):
            return NotImplemented
        return (
            (self.id1, self._type.number, self.id2, self.time) == (other.id1, other._type.number, other.id2, other.time)
        ) and (self._data == other._data or self.fields == other.fields)

    def __hash__(self) -> int:
        return hash((self.id1, self._type.number, self.id2, self.time))

    def __repr__(self) -> str:
        return (
            f"Assoc(id1={self.id1}, atype={self.atype!r}, id2={self.id2}, time={self.time}, "
            f"fields={dict(self.fields)!r})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Accepted:
    """The receipt of a write that a follower's journal has accepted. ``id``: an opaque text, for logs and people."""

    receipt: bytes
    shards: tuple[int, ...]
    """The shards that the write concerns."""
    wait: Callable[[Accepted, float | None], Coroutine[Any, Any, WriteToken]] = field(compare=False)

    @property
    def id(self) -> str:
        """Return the receipt as text: the follower, and the number of the write in its journal. `tao journal parked`
        shows the write by it, unless another follower took it over."""
        found = Receipt.decoded(self.receipt)
        return f"{found.server}/{found.number}"

    def __repr__(self) -> str:
        # Logs must not have the receipt itself: who has it may read the result of the write.
        return f"<Receipt {self.id}>"

    async def applied(self, timeout: float | None = None) -> WriteToken:  # noqa: ASYNC109 - what callers know it by
        """Wait until the write is made, at most so many seconds (by default as long as an operation may take). Return
        a token of it, for readers that must see it; while an inverse edge is still owed the token names its list. When
        the result is no longer kept, the token has the master read.

        Raises `DeadlineExceeded` while the write still waits, and the reason why it was given up when it is parked:
        operators decide what happens to it (`tao journal`)."""
        return await self.wait(self, timeout)


if TYPE_CHECKING:
    from typing_extensions import TypeVar  # for the default, which CPython 3.11 does not know

    Receipt_co = TypeVar("Receipt_co", bound=Accepted, default=Accepted, covariant=True)
else:
    from typing import TypeVar

    Receipt_co = TypeVar("Receipt_co", bound=Accepted, covariant=True)


class AddedObject(int, Generic[Receipt_co]):
    """The id of an added object: an integer, and whether there was such an object before.

    ``existed``: an object with this id and the same content existed. An id that the leader chose is always new.
    ``receipt``: of a write that a journal has accepted; whether the object existed is not known then."""

    existed: bool
    receipt: Receipt_co | None

    def __new__(cls, id: int, *, existed: bool = False, receipt: Receipt_co | None = None) -> Self:  # noqa: A002 - see `tao.client.writes`
        made = super().__new__(cls, id)
        made.existed = existed
        made.receipt = receipt
        return made

    @property
    def is_new(self) -> bool:
        """Return whether this write made the object. A write that was repeated after a lost answer made it before."""
        return not self.existed


class Counter(NamedTuple):
    """The value of a counter. ``max_behind_ms``: an addition that was acknowledged longer ago is in it, while followers
    reach their leaders; None: not known."""

    value: int
    max_behind_ms: int | None


class EdgeState(Struct, frozen=True):
    """The state of an edge of a type with states. ``own``: the state that operations have given it; ``effective``: the
    state whose list holds it, which is the highest of its own and those of its two nodes, and "removed" while the edge
    was never added. ``state_us`` and ``payload_us``: the times of the newest operations that have set the state, and
    the edge's time and fields, in microseconds since 1970; 0 where none has."""

    own: str
    effective: str
    state_us: int
    payload_us: int


class EdgeWrite(Struct, Generic[Receipt_co], frozen=True):
    """The result of a write of an edge. It is true when the edge existed before.

    ``existed``: the edge that the write names existed. ``inverse_pending``: the write is committed at one end, and its
    inverse edge follows as soon as the other end can be reached. Reads of this graph, and reads with a token of the
    write, wait for it or raise `StaleRead`; other readers of that list do not see the edge until then.

    Of an edge of a type with states: ``state`` is the state whose list holds it now, and ``superseded`` says that a
    newer operation was there already, which is a success. An edge that was removed did not exist before.

    ``receipt``: of a write that a journal has accepted (`Graph.journaled`); nothing else is known of it yet."""

    existed: bool
    inverse_pending: bool = False
    state: str | None = None
    superseded: bool = False
    receipt: Receipt_co | None = None

    def __bool__(self) -> bool:
        return self.existed

    @property
    def is_new(self) -> bool:
        """Return whether the write of an added edge made it, instead of replacing one."""
        return not self.existed


class AssocList(Sequence[Assoc]):
    """Edges of one association list, newest first: an immutable sequence of `Assoc`, which are made on first access.

    ``limit_cut`` says that the limit asked for was above the type's limit and was cut to it. ``list_count`` is the
    number of edges of the whole list at the moment of the answer. ``id2s`` and ``times`` are columns, which cost no
    `Assoc`. Raises `ProtocolError` when the bytes are not an edge block.
    """

    __slots__ = ("_block", "_items", "_length", "_type", "id1", "limit_cut", "list_count")

    def __init__(self, id1: int, atype: AssocType, block: bytes) -> None:
        _, count, length, flags = checked_header(block)
        self.id1 = id1
        self.limit_cut = flags & LIMIT_CUT != 0
        self.list_count = count
        self._type = atype
        self._block = block
        self._length = length
        self._items: list[Assoc] | None = None

    @property
    def atype(self) -> str:
        return self._type.name

    @property
    def id2s(self) -> list[int]:
        return id2_column(self._block).tolist()

    @property
    def times(self) -> list[int]:
        return time_column(self._block).tolist()

    def _made(self) -> list[Assoc]:
        items = self._items
        if items is None:
            items = list(map(Assoc, repeat(self.id1), repeat(self._type), *columns_of(self._block)))
            self._items = items
        return items

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Assoc]:
        return iter(self._made())

    @overload
    def __getitem__(self, index: int) -> Assoc: ...

    @overload
    def __getitem__(self, index: slice) -> list[Assoc]: ...

    def __getitem__(self, index: int | slice) -> Assoc | list[Assoc]:
        return self._made()[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, AssocList):
            return self.id1 == other.id1 and self._made() == other._made()
        if isinstance(other, list):
            return self._made() == other
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to some lists, so unhashable like a list

    def __repr__(self) -> str:
        return f"AssocList({self._made()!r}{', limit_cut=True' if self.limit_cut else ''})"


class ObjectReader:
    """Makes objects of encoded values, by one schema.

    It looks types up by the bytes of their number in a value. A many-form spends half its time here, and unpacking each
    header would double that.
    """

    __slots__ = ("_schema", "_types")

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._types = {each.number.to_bytes(4, "little"): each for each in schema.objects}

    def read(self, object_id: int, value: bytes) -> Object | None:
        """Return the object, None when it is absent. Raises `UnknownType` and `ProtocolError`."""
        otype = self._types.get(value[8:12])
        if otype is None:
            if len(value) < OBJECT_HEADER_BYTES:
                raise ProtocolError(f"an object value has at least {OBJECT_HEADER_BYTES} bytes, this one {len(value)}")
            number = int.from_bytes(value[8:12], "little")
            if number == ABSENT:
                return None
            otype = self._schema.otype(number)
        return Object(object_id, otype, value[OBJECT_HEADER_BYTES:])

    def read_all(self, ids: Sequence[int], values: Sequence[bytes | TaoError]) -> list[Object | TaoError | None]:
        """Do `read` for each value, and keep each error in its place. Raises as `read`."""
        made = objects_of(ids, values, self._types, Object)
        if made is not None:  # no error, and no object that is absent or of an unknown type: the usual case
            return cast("list[Object | TaoError | None]", made)
        return [
            value if isinstance(value, TaoError) else self.read(object_id, value)
            for object_id, value in zip(ids, values, strict=True)
        ]
