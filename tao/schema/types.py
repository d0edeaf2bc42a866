"""Object and association types: what the schema says of one number.

They are values, built once per schema version. Each carries a `FieldLayout`, the look-ups that the codec needs, made
here and not per call, because decoding the fields of a result is the hottest thing the SDK does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tao.schema.kinds import FieldKind, FieldValue, check_of

MAX_TYPE_NUMBER: Final = 65535  # otype and atype are SMALLINT UNSIGNED in the store
MAX_FIELD_NUMBER: Final = 65535
DEFAULT_ARENA: Final = "default"
DEFAULT_LIST_LIMIT: Final = 6000  # edges of one list that caches keep and one answer returns (the paper, §3.4)
MAX_OBJECT_DATA_BYTES: Final = 1 << 20
MAX_ASSOC_DATA_BYTES: Final = 255  # the width of the column in the default table: edges stay small, as in the paper
MAX_CUSTOM_ASSOC_DATA_BYTES: Final = 65535


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its number in blobs, its name in the schema and the SDK. ``default`` None means there is none."""

    number: int
    name: str
    kind: FieldKind
    default: FieldValue | None = field(default=None, hash=False)  # may be a list


class FieldLayout:
    """The look-ups derived from a field list: for the codec alone, immutable by convention, one per type.

    ``checks``: name → (number, check); ``names``: number → name; ``fallbacks``: name → default or None;
    ``fresh_lists``: names whose default is a list and must be copied per reader; ``floats``: names of float fields.
    """

    __slots__ = ("by_number", "checks", "decode", "fallbacks", "floats", "fresh_lists", "names")

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.by_number: Final = {each.number: each for each in fields}
        self.checks: Final[dict[str, tuple[int, Callable[[object], FieldValue]]]] = {
            each.name: (each.number, check_of(each.kind)) for each in fields
        }
        self.names: Final = {each.number: each.name for each in fields}
        self.fallbacks: Final[dict[str, FieldValue | None]] = {each.name: each.default for each in fields}
        self.fresh_lists: Final = tuple(each.name for each in fields if isinstance(each.default, list))
        self.floats: Final = tuple(each.name for each in fields if each.kind is FieldKind.FLOAT)
        self.decode: Final = msgspec.msgpack.Decoder(dict[int, object]).decode


@dataclass(frozen=True, slots=True)
class ObjectType:
    """A type of object. ``number`` 1…65535; ``fields`` ascending by number; ``arena`` names the cache arena;
    ``reserved`` are the numbers of fields that existed once and must not come back (DESIGN.md §2)."""

    number: int
    name: str
    fields: tuple[Field, ...] = ()
    arena: str = DEFAULT_ARENA
    reserved: frozenset[int] = frozenset()
    layout: FieldLayout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", FieldLayout(self.fields))

    @property
    def max_data_bytes(self) -> int:
        """Bound on an encoded blob; the same for every object type."""
        return MAX_OBJECT_DATA_BYTES


@dataclass(frozen=True, slots=True)
class AssocType:
    """A type of association. ``inverse`` is the number of the type of the edge the other way (maybe itself), or None.

    ``limit``: edges per list that caches keep and one answer may hold; ``max_data_bytes``: bound on an encoded blob;
    ``table``: a custom table in each shard, or None for the default one (DESIGN.md §2, §3). ``turn_gets``: the SDK may
    ask the inverse lists for edges of a list that is longer than ``limit`` (§10).
    """

    number: int
    name: str
    fields: tuple[Field, ...] = ()
    inverse: int | None = None
    limit: int = DEFAULT_LIST_LIMIT
    max_data_bytes: int = MAX_ASSOC_DATA_BYTES
    table: str | None = None
    arena: str = DEFAULT_ARENA
    reserved: frozenset[int] = frozenset()
    turn_gets: bool = False
    layout: FieldLayout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", FieldLayout(self.fields))


GraphType = ObjectType | AssocType
