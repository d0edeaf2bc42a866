"""The `Schema`: types by number and by name, as one immutable value with a hash that identifies its version.

A schema is replaced as a whole, never changed. A server that reloads the file swaps one reference, and an answer in
progress keeps the schema it started with."""

from __future__ import annotations

import difflib
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from tao.model.edge_states import State
from tao.model.errors import InvalidArgument, UnknownType
from tao.schema.document import SCHEMA, SchemaDocument, document_of, former_keys, read_document, types_of
from tao.schema.plain_data import parse_json, parse_yaml
from tao.schema.types import STATES_TABLE, AssocType, GraphType, ObjectType

_NAMES_SHOWN: Final = 10  # known types listed in an error message

_Type = TypeVar("_Type", ObjectType, AssocType)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Schema:
    """Look-ups of types. Made by `load_schema` from a file's text or by `Schema.from_json`.

    ``objects`` and ``assocs`` ascend by number; the latter has the state types and the counters, too.
    ``reserved_otypes`` and ``reserved_atypes`` are numbers of former types; ``version_hash`` is the SHA-256 of the
    canonical document in hex, equal for equal schemas. ``has_audited``: writes of some type are recorded in the audit
    log. ``counters``: the types whose edges are the slots of counters, ascending by number. ``retention``: of the types
    whose lists keep only their newest edges, how many they keep, and how many more they may have."""

    objects: tuple[ObjectType, ...]
    assocs: tuple[AssocType, ...]
    reserved_otypes: frozenset[int]
    reserved_atypes: frozenset[int]
    version_hash: str = field(init=False)
    has_audited: bool = field(init=False)
    counters: tuple[AssocType, ...] = field(init=False)
    retention: Mapping[int, tuple[int, int]] = field(init=False)
    _canonical: str = field(init=False)
    _objects: Mapping[int | str, ObjectType] = field(init=False)
    _assocs: Mapping[int | str, AssocType] = field(init=False)
    _counters: Mapping[int | str, tuple[AssocType, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "assocs", _with_state_types(self.assocs))
        document = document_of(self.objects, self.assocs, self.reserved_otypes, self.reserved_atypes)
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        object.__setattr__(self, "_canonical", canonical)
        object.__setattr__(self, "version_hash", hashlib.sha256(canonical.encode()).hexdigest())
        has_audited = any(each.audit for each in self.objects) or any(each.audit for each in self.assocs)
        object.__setattr__(self, "has_audited", has_audited)
        object.__setattr__(self, "_objects", _by_key(self.objects))
        object.__setattr__(self, "_assocs", _assocs_by_key(self.assocs))
        counters = tuple(each for each in self.assocs if each.counter is not None)
        object.__setattr__(self, "counters", counters)
        retention = {each.number: (each.keep, each.keep_slack) for each in self.assocs if each.keep is not None}
        object.__setattr__(self, "retention", retention)
        object.__setattr__(self, "_counters", _by_short_name(counters))

    @staticmethod
    def from_json(text: str | bytes, source: str = "schema document") -> Schema:
        """Return the schema of a canonical document, as `GetSchema` returns it. Raises `SchemaError` naming
        ``source``."""
        return _schema_of(read_document(parse_json(text, source, SCHEMA)))

    def to_json(self) -> str:
        """Return the canonical document: JSON with sorted keys, every default written out, bytes as base64."""
        return self._canonical

    def otype(self, key: int | str) -> ObjectType:
        """Return the object type of a number or name. Raises `UnknownType`, with similar names."""
        found = self._objects.get(key)
        if found is None:
            raise _unknown("object", key, self._objects, "association", self._assocs)
        return found

    def atype(self, key: int | str) -> AssocType:
        """Return the association type of a number or name. Raises `UnknownType`, with similar names."""
        found = self._assocs.get(key)
        if found is None:
            raise _unknown("association", key, self._assocs, "object", self._objects)
        return found

    def knows_atype(self, number: int) -> bool:
        """Return whether an association type of this number exists."""
        return number in self._assocs

    @property
    def declared_assocs(self) -> tuple[AssocType, ...]:
        """Return the association types without the state types, ascending by number."""
        return tuple(each for each in self.assocs if each.state is State.NORMAL)

    def declared(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of the types to which these belong: state types are replaced by their types."""
        known = self._assocs
        return tuple(dict.fromkeys(known[each].state_numbers[0] if each in known else each for each in numbers))

    def counter(self, key: int | str) -> AssocType:
        """Return the counter of a number or a name: ``views``, or ``post.views`` where several object types have one of
        that name. Raises `UnknownType`, with the names of counters."""
        found = self._assocs.get(key)
        if found is not None and found.counter is not None:
            return found
        named = self._counters.get(key, ())
        if len(named) == 1:
            return named[0]
        if named:
            hint = "several object types have one: write " + " or ".join(repr(each.name) for each in named)
        else:
            hint = "the schema has " + (", ".join(each.name for each in self.counters[:_NAMES_SHOWN]) or "none")
        raise UnknownType(f"unknown counter {key!r}; {hint}")

    def state_type(self, atype: AssocType, state: State) -> AssocType:
        """Return the type whose lists hold the edges of ``atype`` in a state. Raises `InvalidArgument` for a state that
        the type does not have."""
        number = atype.states[state] if atype.states else 0
        if number:
            return self._assocs[number]
        if not atype.states:
            raise InvalidArgument(f"type {atype.name!r} has no states: give it 'states' in the schema, or leave it out")
        has = ", ".join(each.label for each, known in zip(State, atype.states, strict=True) if known)
        raise InvalidArgument(f"type {atype.name!r} has no state {state.label!r}; it has {has}")

    def inverse_of(self, atype: AssocType) -> AssocType | None:
        """Return the type of the inverse edge (maybe ``atype`` itself), or None when its edges have no inverse."""
        return None if atype.inverse is None else self._assocs[atype.inverse]

    def is_audited(self, graph_type: GraphType) -> bool:
        """Return whether writes of a type are recorded in the audit log, by the type itself or by its inverse."""
        if graph_type.audit or isinstance(graph_type, ObjectType):
            return graph_type.audit
        inverse = self.inverse_of(graph_type)
        return inverse is not None and inverse.audit

    def custom_tables(self) -> dict[str, int]:
        """Return the custom tables for migrations: name → the largest ``max_data_bytes`` of the types stored in it."""
        widths: dict[str, int] = {}
        for atype in self.assocs:
            if atype.table not in (None, STATES_TABLE):
                widths[atype.table] = max(widths.get(atype.table, 0), atype.max_data_bytes)
        return widths

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self._canonical == other._canonical

    def __hash__(self) -> int:
        return hash(self.version_hash)

    def __repr__(self) -> str:
        return f"Schema({len(self.objects)} otypes, {len(self.assocs)} atypes, {self.version_hash[:12]})"


def load_schema(text: str, source: str) -> Schema:
    """Return the schema of a YAML file's ``text``. ``source`` is the file's name, for messages.

    Raises `SchemaError` that lists each fault with file, line and path of the key. Warns of renamed keys."""
    parsed = parse_yaml(text, source, SCHEMA)
    schema = _schema_of(read_document(parsed))
    for warning in former_keys(parsed):
        warnings.warn(warning, FutureWarning, stacklevel=2)
    return schema


def _schema_of(document: SchemaDocument) -> Schema:
    objects, assocs = types_of(document)
    return Schema(objects, assocs, frozenset(document.reserved.objects), frozenset(document.reserved.associations))


def _by_key(types: Iterable[_Type]) -> dict[int | str, _Type]:
    keyed: dict[int | str, _Type] = {}
    for each in types:
        keyed[each.number] = keyed[each.name] = each
    return keyed


def _assocs_by_key(assocs: Iterable[AssocType]) -> dict[int | str, AssocType]:
    """Return the types by number and by name; a name is that of the type, and not of its state types."""
    keyed = _by_key(each for each in assocs if each.state is State.NORMAL)
    keyed.update((each.number, each) for each in assocs)
    return keyed


def _by_short_name(counters: Iterable[AssocType]) -> dict[int | str, tuple[AssocType, ...]]:
    """Return the counters by their names without the object type, which several may have."""
    named: dict[int | str, tuple[AssocType, ...]] = {}
    for each in counters:
        _, _, short = each.name.partition(".")
        named[short] = (*named.get(short, ()), each)
    return named


def _with_state_types(assocs: Iterable[AssocType]) -> tuple[AssocType, ...]:
    declared = {each.number: each for each in assocs if each.state is State.NORMAL}
    state_types = [
        replace(
            each,
            number=number,
            state=state,
            exists_filter=False,  # only edges in the normal state count
            inverse=None if each.inverse is None else declared[each.inverse].states[state],
        )
        for each in declared.values()
        for state, number in zip(State, each.states, strict=False)
        if number and state
    ]
    return tuple(sorted([*declared.values(), *state_types], key=lambda each: each.number))


def _unknown(
    wanted: str, key: object, types: Mapping[int | str, GraphType], other: str, others: Mapping[int | str, GraphType]
) -> UnknownType:
    names = [name for name in types if isinstance(name, str)]
    if isinstance(key, str):
        near = difflib.get_close_matches(key, names, n=3)
        if near:
            hint = "did you mean " + " or ".join(repr(name) for name in near) + "?"
        elif key in others:
            hint = f"it is an {other} type"
        else:
            more = ", …" if len(names) > _NAMES_SHOWN else ""
            hint = f"the schema has {len(names)}: " + ", ".join(names[:_NAMES_SHOWN]) + more
    else:
        hint = "see the schema for the numbers in use"
    return UnknownType(f"unknown {wanted} type {key!r}; {hint}")
