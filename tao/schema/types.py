"""Object and association types, their fields, and the kinds of value that a field may hold.

Types are values, built once per schema version. Each carries a `FieldLayout` with the look-ups that the codec needs. It
is made here and not per call, because decoding the fields of a result is the hottest thing the SDK does.

The kinds are a small closed set: each has one msgpack form, so that a blob written in any language reads the same in
every other. A kind never changes during a field's life (see `tao.schema.compatibility`), because stored blobs carry
no kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from tao.model.counters import FOLDED_FIELD, MINUS_FIELD, PLUS_FIELD
from tao.model.edge_states import DEFAULT_KEEP_REMOVED_DAYS, State

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
UINT64_MAX: Final = 2**64 - 1
_SHOWN_CHARACTERS: Final = 40  # of a wrong value in an error message; longer values would flood logs

FieldValue = bool | int | float | str | bytes | list[str] | list[int]


class FieldKind(StrEnum):
    """The kind of value that a field holds. The enum's value is the word used in schema files."""

    BOOL = "bool"
    INT = "int"
    UINT = "uint"
    FLOAT = "float"
    STR = "str"
    BYTES = "bytes"
    LIST_STR = "list[str]"
    LIST_INT = "list[int]"


class WrongValue(ValueError):
    """A value does not fit its kind. Internal to the package: callers see `InvalidField` or `SchemaError`, which
    also name the type and the field."""


def _wrong(expected: str, value: object) -> WrongValue:
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "…"
    return WrongValue(f"expected {expected}, got {type(value).__name__} {shown}")


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong("bool", value)


def _whole(value: object, low: int, high: int, expected: str) -> int:
    # bool is an int in Python but not in msgpack: stored as an int, it would be read back as another kind.
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return int(value)
    raise _wrong(expected, value)


def _int(value: object) -> int:
    return _whole(value, INT64_MIN, INT64_MAX, "int (signed 64-bit)")


def _uint(value: object) -> int:
    return _whole(value, 0, UINT64_MAX, "uint (unsigned 64-bit)")


def _float(value: object) -> float:
    if isinstance(value, float):
        return float(value)
    # Whole numbers are accepted because many msgpack encoders write 1.0 as the integer 1, and because people write
    # `lat: 47`. A number that a double cannot hold exactly is refused, because it would be changed silently.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53:
        return float(value)
    raise _wrong("float", value)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong("str", value)
    text = value if type(value) is str else str.__str__(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _wrong("str of valid Unicode (without lone surrogates)", value) from None
    return text


def _bytes(value: object) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise _wrong("bytes", value)


def _items(value: object, kind: FieldKind) -> list[object]:
    if isinstance(value, (list, tuple)):
        return list(value)
    raise _wrong(kind.value, value)


def _list_str(value: object) -> list[str]:
    return [_str(item) for item in _items(value, FieldKind.LIST_STR)]


def _list_int(value: object) -> list[int]:
    return [_int(item) for item in _items(value, FieldKind.LIST_INT)]


_CHECKS: Final[Mapping[FieldKind, Callable[[object], FieldValue]]] = {
    FieldKind.BOOL: _bool,
    FieldKind.INT: _int,
    FieldKind.UINT: _uint,
    FieldKind.FLOAT: _float,
    FieldKind.STR: _str,
    FieldKind.BYTES: _bytes,
    FieldKind.LIST_STR: _list_str,
    FieldKind.LIST_INT: _list_int,
}


def check_of(kind: FieldKind) -> Callable[[object], FieldValue]:
    """Return the check of a kind.

    The check returns the value in its plain built-in type: a subclass of str becomes str, a tuple a list, a whole
    number in a float field a float. It raises `WrongValue` with the expected and the actual value."""
    return _CHECKS[kind]


MAX_TYPE_NUMBER: Final = 65535  # otype and atype are SMALLINT UNSIGNED in the store
MAX_FIELD_NUMBER: Final = 65535
DEFAULT_ARENA: Final = "default"
DEFAULT_LIST_LIMIT: Final = 6000  # edges of one list that caches keep and one answer returns (the paper, §3.4)
KEEP_SLACK: Final = 128  # edges above ``keep`` that a list may have: one add in so many trims it
MAX_OBJECT_DATA_BYTES: Final = 1 << 20
MAX_ASSOC_DATA_BYTES: Final = 255  # the width of the column in the default table: edges stay small, as in the paper
MAX_CUSTOM_ASSOC_DATA_BYTES: Final = 65535
STATES_TABLE: Final = "assocs_states"
"""The table of the edges of all types with states, and of the slots of counters."""
MIN_FLUSH_SECONDS: Final = 0.5
MAX_FLUSH_SECONDS: Final = 60.0
DEFAULT_FLUSH_SECONDS: Final = 1.0
MAX_COUNTER_SLOTS: Final = 10_000
"""Slots of one counter that caches keep and one answer holds: those of a few thousand followers."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its number in blobs, and its name in the schema and the SDK. ``default`` None means there is none.
    ``required``: a new object or edge must have it, and an update may not remove it. What is stored may lack it."""

    number: int
    name: str
    kind: FieldKind
    default: FieldValue | None = field(default=None, hash=False)  # may be a list
    required: bool = False


class FieldLayout:
    """Look-ups that the codec derives from a field list. Immutable by convention, one per type.

    ``checks``: name → (number, check); ``names``: number → name; ``fallbacks``: name → default or None;
    ``fresh_lists``: names whose default is a list and must be copied per reader; ``floats``: names of float fields;
    ``required``: number → name of the required fields."""

    __slots__ = ("by_number", "checks", "decode", "fallbacks", "floats", "fresh_lists", "names", "required")

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.by_number: Final = {each.number: each for each in fields}
        self.checks: Final[dict[str, tuple[int, Callable[[object], FieldValue]]]] = {
            each.name: (each.number, check_of(each.kind)) for each in fields
        }
        self.names: Final = {each.number: each.name for each in fields}
        self.fallbacks: Final[dict[str, FieldValue | None]] = {each.name: each.default for each in fields}
        self.fresh_lists: Final = tuple(each.name for each in fields if isinstance(each.default, list))
        self.floats: Final = tuple(each.name for each in fields if each.kind is FieldKind.FLOAT)
        self.required: Final = {each.number: each.name for each in fields if each.required}
        self.decode: Final = msgspec.msgpack.Decoder(dict[int, object]).decode


@dataclass(frozen=True, slots=True)
class ObjectType:
    """A type of object.

    ``number``: 1 to 65535; ``fields``: ascending by number; ``arena``: the cache arena that holds its objects;
    ``reserved``: numbers of former fields, which must not be used again; ``audit``: its writes are recorded in the
    audit log."""

    number: int
    name: str
    fields: tuple[Field, ...] = ()
    arena: str = DEFAULT_ARENA
    reserved: frozenset[int] = frozenset()
    audit: bool = False
    layout: FieldLayout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", FieldLayout(self.fields))

    @property
    def max_data_bytes(self) -> int:
        """Return the bound on an encoded blob, which is the same for every object type."""
        return MAX_OBJECT_DATA_BYTES


@dataclass(frozen=True, slots=True)
class CounterOptions:
    """How followers flush what they have counted of one counter of an object type.

    ``flush_seconds``: least time between two flushes of one follower. ``publish_share``: a change is flushed once it is
    this share of the counter's value, or after `MAX_FLUSH_SECONDS`; None: at each flush."""

    flush_seconds: float = DEFAULT_FLUSH_SECONDS
    publish_share: float | None = None

    @property
    def max_flush_seconds(self) -> float:
        """Return for how long a follower may hold a change back."""
        return self.flush_seconds + (0.0 if self.publish_share is None else MAX_FLUSH_SECONDS)


@dataclass(frozen=True, slots=True)
class AssocType:
    """A type of association.

    ``inverse``: the number of the type of the edge in the other direction (maybe its own), or None. ``limit``: edges
    per list that caches keep and one answer may hold. ``max_data_bytes``: bound on an encoded blob. ``table``: a
    custom table in each shard, or None for the default one. ``reverse_lookup``: the SDK may look for edges of a list
    longer than ``limit`` in the inverse lists. ``audit``: writes of its edges are recorded in the audit log, from
    whichever end. ``max_edges``: a list with so many edges takes no new one; None: any number. ``keep``: a list keeps
    its newest edges, so many at least and ``keep_slack`` more at most; None: all of them. ``exists_filter``: followers
    answer whether an edge exists from pair filters.

    A type with states has a *state type* for each state but normal: a type of the same name, whose lists hold the edges
    in that state. ``states``: their numbers by state, 0 for a state that the type lacks, its own number for normal;
    empty for a type without states. ``state``: the state of the edges in this type's lists.
    ``keep_removed_days``: see `tao.model.edge_states`.

    A counter of an object type is a type of this kind, too, whose edges are its slots (`tao.model.counters`).
    ``counter``: its options; None: the type is no counter."""

    number: int
    name: str
    fields: tuple[Field, ...] = ()
    inverse: int | None = None
    limit: int = DEFAULT_LIST_LIMIT
    max_data_bytes: int = MAX_ASSOC_DATA_BYTES
    table: str | None = None
    arena: str = DEFAULT_ARENA
    reserved: frozenset[int] = frozenset()
    reverse_lookup: bool = False
    audit: bool = False
    max_edges: int | None = None
    keep: int | None = None
    keep_slack: int = KEEP_SLACK
    exists_filter: bool = False
    states: tuple[int, ...] = ()
    state: State = State.NORMAL
    keep_removed_days: int = DEFAULT_KEEP_REMOVED_DAYS
    counter: CounterOptions | None = None
    layout: FieldLayout = field(init=False, repr=False, compare=False)
    state_numbers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The numbers of the types whose lists hold the edges of this type, that of the type itself first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", FieldLayout(self.fields))
        object.__setattr__(self, "state_numbers", tuple(filter(None, self.states)) or (self.number,))

    @property
    def label(self) -> str:
        """Return the name for people: with the state of the edges, unless it is normal."""
        return self.name if self.state is State.NORMAL else f"{self.name} ({self.state.label})"


GraphType = ObjectType | AssocType

_SLOT_FIELDS: Final = (
    Field(PLUS_FIELD, "plus", FieldKind.UINT),
    Field(MINUS_FIELD, "minus", FieldKind.UINT),
    Field(FOLDED_FIELD, "folded", FieldKind.INT),
)


def counter_type(number: int, owner: ObjectType, name: str, options: CounterOptions) -> AssocType:
    """Return the association type whose edges are the slots of a counter of ``owner``."""
    return AssocType(
        number,
        f"{owner.name}.{name}",
        _SLOT_FIELDS,
        limit=MAX_COUNTER_SLOTS,
        table=STATES_TABLE,
        arena=owner.arena,
        counter=options,
    )
