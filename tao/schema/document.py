"""The schema document: check the plain data of a schema file, and translate it to types and back.

Checking takes two passes: pydantic checks each entry by itself, then `_faults` checks what spans entries (numbers used
twice, inverse pairs, defaults against kinds). Both report every fault with its path, so that one run of an editor mends
the file.

A pair of inverse types shares one field list and one ``max_data_bytes``, because the inverse of an edge carries the
same data. The type that leaves out ``fields`` takes its partner's; if both define them, they must be equal."""

from __future__ import annotations

import base64
import binascii
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal

import pydantic

from tao.model.edge_states import DEFAULT_KEEP_REMOVED_DAYS, State
from tao.model.errors import SchemaError
from tao.schema.plain_data import STRICT, DocumentKind, Parsed, Path, validate
from tao.schema.types import (
    DEFAULT_ARENA,
    DEFAULT_FLUSH_SECONDS,
    DEFAULT_LIST_LIMIT,
    MAX_ASSOC_DATA_BYTES,
    MAX_CUSTOM_ASSOC_DATA_BYTES,
    MAX_FIELD_NUMBER,
    MAX_FLUSH_SECONDS,
    MAX_TYPE_NUMBER,
    MIN_FLUSH_SECONDS,
    STATES_TABLE,
    AssocType,
    CounterOptions,
    Field,
    FieldKind,
    FieldValue,
    ObjectType,
    WrongValue,
    check_of,
    counter_type,
)

SCHEMA: Final = DocumentKind("schema", SchemaError)

FORMER_REVERSE_LOOKUP: Final = "turn_gets"
"""The former name of the key ``reverse_lookup``. It is still accepted, and the canonical document keeps it, because
its hash and older programs depend on it."""

_NAME: Final = r"^[a-z][a-z0-9_]{0,62}$"
# Full names of tables, as the database shows them; the prefix keeps them apart from the system's tables.
_TABLE: Final = r"^assocs_[a-z0-9][a-z0-9_]{0,33}$"
_MAX_FIELDS: Final = 1000
_MAX_KEEP_REMOVED_DAYS: Final = 3650
_MAX_LIST_LIMIT: Final = 1_000_000  # one list of this many edges is already tens of megabytes in every cache

Name = Annotated[str, pydantic.StringConstraints(pattern=_NAME)]
TypeNumber = Annotated[int, pydantic.Field(ge=1, le=MAX_TYPE_NUMBER)]
FieldNumber = Annotated[int, pydantic.Field(ge=1, le=MAX_FIELD_NUMBER)]


class _Entry(pydantic.BaseModel):
    model_config = STRICT


class FieldEntry(_Entry):
    """One field. ``default`` of a bytes field is base64 text."""

    number: FieldNumber
    type: Annotated[FieldKind, pydantic.Field(strict=False)]
    default: object = None
    required: bool = False


Fields = Annotated[dict[Name, FieldEntry], pydantic.Field(max_length=_MAX_FIELDS)]


class CounterEntry(_Entry):
    """One counter of an object type. ``number`` is one of association types."""

    number: TypeNumber
    flush_seconds: Annotated[float, pydantic.Field(ge=MIN_FLUSH_SECONDS, le=MAX_FLUSH_SECONDS)] = DEFAULT_FLUSH_SECONDS
    publish_share: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    exact: bool = False


class ObjectEntry(_Entry):
    """One object type."""

    number: TypeNumber
    fields: Fields = {}
    arena: Name = DEFAULT_ARENA
    reserved: list[FieldNumber] = []
    audit: bool = False
    counters: dict[Name, CounterEntry] = {}


class StatesEntry(_Entry):
    """The numbers of the state types of a type with states, one for each state but normal."""

    removed: TypeNumber
    archived: TypeNumber | None = None
    negative: TypeNumber | None = None

    def numbers(self) -> dict[State, int]:
        """Return the numbers of the states that the type has."""
        numbers = {
            State.NEGATIVE: self.negative,
            State.ARCHIVED: self.archived,
            State.REMOVED: self.removed,
        }
        return {state: number for state, number in numbers.items() if number is not None}


class AssocEntry(_Entry):
    """One association type; ``inverse`` is the name of one, maybe its own."""

    number: TypeNumber
    fields: Fields | None = None
    inverse: Name | None = None
    limit: Annotated[int, pydantic.Field(ge=1, le=_MAX_LIST_LIMIT)] = DEFAULT_LIST_LIMIT
    max_data_bytes: Annotated[int, pydantic.Field(ge=0, le=MAX_CUSTOM_ASSOC_DATA_BYTES)] = MAX_ASSOC_DATA_BYTES
    table: Annotated[str, pydantic.StringConstraints(pattern=_TABLE)] | None = None
    arena: Name = DEFAULT_ARENA
    reverse_lookup: Annotated[
        bool, pydantic.Field(validation_alias=pydantic.AliasChoices("reverse_lookup", FORMER_REVERSE_LOOKUP))
    ] = False
    reserved: list[FieldNumber] = []
    audit: bool = False
    max_edges: Annotated[int, pydantic.Field(ge=1)] | None = None
    keep: Annotated[int, pydantic.Field(ge=1)] | None = None
    exists_filter: bool = False
    states: StatesEntry | None = None
    keep_removed_days: Annotated[int, pydantic.Field(ge=1, le=_MAX_KEEP_REMOVED_DAYS)] | None = None


class ReservedEntry(_Entry):
    """Numbers of former types, which must not be used again."""

    objects: list[TypeNumber] = []
    associations: list[TypeNumber] = []


class SchemaDocument(_Entry):
    """A whole schema file."""

    format: Literal[1]
    objects: dict[Name, ObjectEntry] = {}
    associations: dict[Name, AssocEntry] = {}
    reserved: ReservedEntry = ReservedEntry()


_KEYS: Final = sorted({key for entry in _Entry.__subclasses__() for key in entry.model_fields})


def read_document(parsed: Parsed) -> SchemaDocument:
    """Return the checked document of plain data. Raises `SchemaError` with every fault's line and path."""
    document = validate(parsed, SchemaDocument, _KEYS)
    faults = list(_faults(document))
    if faults:
        raise parsed.error(faults)
    return document


def former_keys(parsed: Parsed) -> list[str]:
    """Return a warning for each key of the document that has been renamed and is still accepted."""
    associations = parsed.data.get("associations") if isinstance(parsed.data, dict) else None
    return [
        f"{parsed.source}: associations.{name}: the key {FORMER_REVERSE_LOOKUP!r} is now called 'reverse_lookup'"
        for name, entry in (associations.items() if isinstance(associations, dict) else ())
        if isinstance(entry, dict) and FORMER_REVERSE_LOOKUP in entry
    ]


def types_of(document: SchemaDocument) -> tuple[tuple[ObjectType, ...], tuple[AssocType, ...]]:
    """Return the object types and association types of a checked document, ascending by number."""
    objects = [
        ObjectType(entry.number, name, _fields(entry.fields), entry.arena, frozenset(entry.reserved), entry.audit)
        for name, entry in document.objects.items()
    ]
    assocs = [
        AssocType(
            number=entry.number,
            name=name,
            fields=_fields(_shared_fields(document, name)),
            inverse=None if entry.inverse is None else document.associations[entry.inverse].number,
            limit=entry.limit,
            max_data_bytes=entry.max_data_bytes,
            table=entry.table if entry.states is None else STATES_TABLE,
            arena=entry.arena,
            reserved=frozenset(entry.reserved),
            reverse_lookup=entry.reverse_lookup,
            audit=entry.audit,
            max_edges=entry.max_edges,
            keep=entry.keep,
            exists_filter=entry.exists_filter,
            states=_states(entry),
            keep_removed_days=_keep_removed_days(document, entry),
        )
        for name, entry in document.associations.items()
    ]
    for owner in objects:
        for name, entry in document.objects[owner.name].counters.items():
            options = CounterOptions(entry.flush_seconds, entry.publish_share)
            assocs.append(counter_type(entry.number, owner, name, options))
    return tuple(sorted(objects, key=_number)), tuple(sorted(assocs, key=_number))


def _states(entry: AssocEntry) -> tuple[int, ...]:
    if entry.states is None:
        return ()
    numbers = {State.NORMAL: entry.number, **entry.states.numbers()}
    return tuple(numbers.get(state, 0) for state in State)


def _keep_removed_days(document: SchemaDocument, entry: AssocEntry) -> int:
    days = entry.keep_removed_days
    if days is None and entry.inverse is not None:
        days = document.associations[entry.inverse].keep_removed_days
    return DEFAULT_KEEP_REMOVED_DAYS if days is None else days


def document_of(
    objects: Iterable[ObjectType],
    assocs: Sequence[AssocType],
    reserved_otypes: Iterable[int],
    reserved_atypes: Iterable[int],
) -> dict[str, object]:
    """Return the canonical document of the types, as plain data for JSON.

    Every default is written out except ``turn_gets`` (the former name of ``reverse_lookup``), ``required``, ``audit``,
    ``max_edges``, ``keep``, ``exists_filter``, ``states`` and ``counters``, which older programs refuse. Siblings are
    part of their type, and counters of that of their objects."""
    counters: dict[str, dict[str, object]] = {}
    for each in assocs:
        if each.counter is not None:
            owner, name = each.name.split(".")
            counters.setdefault(owner, {})[name] = _counter_document(each.number, each.counter)
    assocs = [each for each in assocs if each.state is State.NORMAL and each.counter is None]
    names = {atype.number: atype.name for atype in assocs}
    return {
        "format": 1,
        "objects": {
            each.name: {
                **_type_document(each),
                **({"counters": counters[each.name]} if each.name in counters else {}),
            }
            for each in objects
        },
        "associations": {
            each.name: {
                **_type_document(each),
                "inverse": None if each.inverse is None else names[each.inverse],
                "limit": each.limit,
                "max_data_bytes": each.max_data_bytes,
                "table": None if each.states else each.table,
                **({FORMER_REVERSE_LOOKUP: True} if each.reverse_lookup else {}),
                **({} if each.max_edges is None else {"max_edges": each.max_edges}),
                **({} if each.keep is None else {"keep": each.keep}),
                **({"exists_filter": True} if each.exists_filter else {}),
                **(_states_document(each) if each.states else {}),
            }
            for each in assocs
        },
        "reserved": {"objects": sorted(reserved_otypes), "associations": sorted(reserved_atypes)},
    }


def _counter_document(number: int, options: CounterOptions) -> dict[str, object]:
    share = options.publish_share
    return {
        "number": number,
        "flush_seconds": options.flush_seconds,
        **({} if share is None else {"publish_share": share}),
    }


def _states_document(each: AssocType) -> dict[str, object]:
    numbers = {state.label: number for state, number in zip(State, each.states, strict=True) if state and number}
    return {"states": numbers, "keep_removed_days": each.keep_removed_days}


def _type_document(each: ObjectType | AssocType) -> dict[str, object]:
    fields: dict[str, object] = {}
    for known in each.fields:
        default = known.default
        written = base64.b64encode(default).decode() if isinstance(default, bytes) else default
        fields[known.name] = {
            "number": known.number,
            "type": known.kind.value,
            "default": written,
            **({"required": True} if known.required else {}),
        }
    return {
        "number": each.number,
        "fields": fields,
        "arena": each.arena,
        "reserved": sorted(each.reserved),
        **({"audit": True} if each.audit else {}),
    }


def _number(each: ObjectType | AssocType) -> int:
    return each.number


def _fields(entries: Mapping[str, FieldEntry]) -> tuple[Field, ...]:
    fields = [Field(entry.number, name, entry.type, _default(entry), entry.required) for name, entry in entries.items()]
    return tuple(sorted(fields, key=lambda field: field.number))


def _default(entry: FieldEntry) -> FieldValue | None:
    """Return the default of a field. Raises `WrongValue` when it is not of the field's kind."""
    if entry.default is None:
        return None
    if entry.type is FieldKind.BYTES:
        if not isinstance(entry.default, str):
            raise WrongValue("the default of a bytes field is written as base64 text")
        try:
            return base64.b64decode(entry.default, validate=True)
        except (binascii.Error, ValueError) as why:
            raise WrongValue(f"the default of a bytes field is written as base64 text: {why}") from None
    value = check_of(entry.type)(entry.default)
    if isinstance(value, float) and not math.isfinite(value):
        raise WrongValue("a default must be a finite number")  # JSON, in which schemas travel, has no others
    return value


def _shared_fields(document: SchemaDocument, name: str) -> Mapping[str, FieldEntry]:
    entry = document.associations[name]
    if entry.fields is None and entry.inverse is not None:
        return document.associations[entry.inverse].fields or {}
    return entry.fields or {}


def _faults(document: SchemaDocument) -> Iterator[tuple[Path, str]]:
    yield from _number_faults("objects", document.objects, document.reserved.objects)
    yield from _number_faults("associations", document.associations, document.reserved.associations)
    yield from _counter_faults(document)
    for name, entry in document.objects.items():
        yield from _field_faults(("objects", name), entry.fields, entry.reserved)
    for name, assoc in document.associations.items():
        path: Path = ("associations", name)
        yield from _field_faults(path, assoc.fields or {}, assoc.reserved)
        if assoc.table is None and assoc.max_data_bytes > MAX_ASSOC_DATA_BYTES:
            yield (
                (*path, "max_data_bytes"),
                f"the default table holds at most {MAX_ASSOC_DATA_BYTES} bytes; name a custom 'table' for more",
            )
        if assoc.reverse_lookup and assoc.inverse is None:
            yield (*path, "reverse_lookup"), "needs an 'inverse' type, whose lists would be searched"
        yield from _length_faults(path, assoc)
        if assoc.inverse is not None:
            yield from _inverse_faults(document, name, assoc, assoc.inverse)
        yield from _state_faults(path, assoc)


def _length_faults(path: Path, assoc: AssocEntry) -> Iterator[tuple[Path, str]]:
    """Yield the faults of the bounds on the lengths of lists."""
    for key, most in (("max_edges", assoc.max_edges), ("keep", assoc.keep)):
        if most is not None and most > assoc.limit:
            yield (*path, key), f"{most} is above the 'limit' of {assoc.limit}, which caches keep of a list"
    if assoc.keep is not None and assoc.inverse is not None:
        yield (*path, "keep"), "needs a type without an 'inverse': a trim would leave the other end of an edge behind"
    if assoc.max_edges is not None and assoc.states is not None and assoc.inverse is not None:
        why = "an operation that one end has joined cannot be taken back when the list of the other end is full"
        yield (*path, "max_edges"), f"needs a type without an 'inverse' where it has 'states': {why}"
    if assoc.keep is not None and assoc.states is not None:
        yield (*path, "keep"), "excludes 'states': edges of such a type move between lists"
    if assoc.keep is not None and assoc.max_edges is not None:
        yield (*path, "keep"), "excludes 'max_edges': a list that is trimmed is never full"


def _number_faults(
    group: str, entries: Mapping[str, ObjectEntry | AssocEntry], reserved: Iterable[int]
) -> Iterator[tuple[Path, str]]:
    taken = dict.fromkeys(reserved, "reserved")
    for name, entry in entries.items():
        if entry.number in taken:
            yield (group, name, "number"), f"{entry.number} is already {taken[entry.number]}"
        taken.setdefault(entry.number, f"that of {name!r}")
    for name, entry in entries.items():
        if not isinstance(entry, AssocEntry) or entry.states is None:
            continue
        for state, number in entry.states.numbers().items():
            if number in taken:
                yield (group, name, "states", state.label), f"{number} is already {taken[number]}"
            taken.setdefault(number, f"that of the {state.label} edges of {name!r}")


def _counter_faults(document: SchemaDocument) -> Iterator[tuple[Path, str]]:
    taken = dict.fromkeys(document.reserved.associations, "reserved")
    for name, assoc in document.associations.items():
        numbers = [assoc.number, *(() if assoc.states is None else assoc.states.numbers().values())]
        taken.update(dict.fromkeys(numbers, f"that of association type {name!r}"))
    for owner, entry in document.objects.items():
        for name, counter in entry.counters.items():
            path: Path = ("objects", owner, "counters", name)
            if counter.number in taken:
                yield (*path, "number"), f"{counter.number} is already {taken[counter.number]}"
            taken.setdefault(counter.number, f"that of counter '{owner}.{name}'")
            if counter.exact:
                yield (*path, "exact"), "exact counters are not available; leave it out, or count by edges"


def _field_faults(path: Path, fields: Mapping[str, FieldEntry], reserved: Iterable[int]) -> Iterator[tuple[Path, str]]:
    taken = dict.fromkeys(reserved, "reserved")
    for name, entry in fields.items():
        at = (*path, "fields", name)
        if entry.number in taken:
            yield (*at, "number"), f"{entry.number} is already {taken[entry.number]}"
        taken.setdefault(entry.number, f"that of {name!r}")
        try:
            _default(entry)
        except WrongValue as wrong:
            yield (*at, "default"), str(wrong)


def _state_faults(path: Path, assoc: AssocEntry) -> Iterator[tuple[Path, str]]:
    if assoc.table == STATES_TABLE:
        yield (*path, "table"), f"{STATES_TABLE!r} is the table of types with 'states'; choose another name"
    if assoc.states is None:
        if assoc.keep_removed_days is not None:
            yield (*path, "keep_removed_days"), "needs 'states': only their removed edges are kept"
    elif assoc.table is not None:
        yield (*path, "table"), f"a type with 'states' is stored in {STATES_TABLE!r}; leave 'table' out"


def _inverse_faults(document: SchemaDocument, name: str, entry: AssocEntry, inverse: str) -> Iterator[tuple[Path, str]]:
    path: Path = ("associations", name)
    partner = document.associations.get(inverse)
    if partner is None:
        near = difflib.get_close_matches(inverse, document.associations, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        yield (*path, "inverse"), f"there is no association type {inverse!r}{hint}"
        return
    if partner.inverse != name:
        yield (*path, "inverse"), f"{inverse!r} must name {name!r} as its inverse"
        return
    if entry.fields is None:
        for field_name, each in (partner.fields or {}).items():
            if each.number in entry.reserved:
                yield (*path, "reserved"), f"{each.number} is in use as {field_name!r}, taken from {inverse!r}"
    if entry.number > partner.number:
        return  # the following faults are reported once per pair
    if None not in (entry.fields, partner.fields) and entry.fields != partner.fields:
        yield (
            (*path, "fields"),
            f"differ from the fields of the inverse {inverse!r}; define them at one of the two only",
        )
    if entry.max_data_bytes != partner.max_data_bytes:
        yield (
            (*path, "max_data_bytes"),
            f"differs from the {partner.max_data_bytes} of the inverse {inverse!r}: both carry the same data",
        )
    labels = [set() if each.states is None else set(each.states.numbers()) for each in (entry, partner)]
    if labels[0] != labels[1]:
        has = ", ".join(state.label for state in sorted(labels[1])) or "none"
        yield (
            (*path, "states"),
            f"differ from those of the inverse {inverse!r}, which has {has}: as both do",
        )
    elif None not in (days := {entry.keep_removed_days, partner.keep_removed_days}) and len(days) > 1:
        yield (
            (*path, "keep_removed_days"),
            f"differs from that of the inverse {inverse!r}: both ends of an edge are kept for as long",
        )
