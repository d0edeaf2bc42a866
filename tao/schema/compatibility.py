"""Decide whether a schema may be replaced by another one while servers run and data is stored.

The store and the wire hold types and fields by number. So a number may be added, and may be retired into
``reserved``, but it never changes its meaning and is never used again. Names are for people: a rename harms no data,
but programs that use the old name must follow. Limits of caches and answers may change at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tao.model.edge_states import State
from tao.schema.registry import Schema
from tao.schema.types import AssocType, CounterOptions, Field, ObjectType


class ChangeKind(StrEnum):
    """The kind of a difference between two schemas."""

    ADDED = "added"
    REMOVED = "removed"
    RENAMED = "renamed"
    RENUMBERED = "renumbered"
    REUSED = "number reused"
    UNRESERVED = "number no longer reserved"
    TYPE_CHANGED = "type changed"
    INVERSE_CHANGED = "inverse changed"
    TABLE_CHANGED = "table changed"
    DATA_BOUND_CHANGED = "data bound changed"
    LIMIT_CHANGED = "limit changed"
    ARENA_CHANGED = "arena changed"
    REVERSE_LOOKUP_CHANGED = "reverse look-up changed"
    DEFAULT_CHANGED = "default changed"
    REQUIRED_CHANGED = "required changed"
    AUDIT_CHANGED = "audit changed"
    MAX_EDGES_CHANGED = "max_edges changed"
    KEEP_CHANGED = "keep changed"
    EXISTS_FILTER_CHANGED = "exists_filter changed"
    STATES_CHANGED = "states changed"
    COUNTER_CHANGED = "counter changed"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two schemas.

    ``path``: as in the schema file, by the old name where there is one. ``why``: a sentence that says why the change
    is safe, or what it would break. ``warns``: marks a safe change that an operator should know of."""

    kind: ChangeKind
    path: str
    compatible: bool
    why: str
    warns: bool = False


def compare(old: Schema, new: Schema) -> list[Change]:
    """Return the differences that matter, ordered by path; empty when there are none."""
    new_objects = {each.number: each for each in new.objects}
    new_assocs = {each.number: each for each in new.assocs}
    retired = [each for each in old.assocs if _is_retired_state(each, new_assocs)]
    others = [each for each in old.assocs if each not in retired]
    changes = [
        *_numbered_changes("objects", old.objects, new.objects, old.reserved_otypes, new.reserved_otypes),
        *_numbered_changes("associations", others, new.assocs, old.reserved_atypes, new.reserved_atypes),
        *map(_retirement, retired),
    ]
    for otype in old.objects:
        if (other := new_objects.get(otype.number)) is not None:
            changes.extend(_inside(f"objects.{otype.name}", otype, other))
    for atype in old.assocs:
        successor = new_assocs.get(atype.number)
        if successor is None:
            continue
        if _use_of(atype) != _use_of(successor):
            why = f"{atype.number} was that of {_path_name(atype)!r}: stored edges would change their meaning"
            changes.append(Change(ChangeKind.REUSED, f"associations.{_path_name(successor)}", False, why))
        elif atype.counter is not None and successor.counter is not None:
            changes.extend(_counter_changes(atype.counter, successor.counter, _path_name(atype)))
        elif atype.state is State.NORMAL:
            changes.extend(_inside(f"associations.{atype.name}", atype, successor))
            changes.extend(_assoc_changes(f"associations.{atype.name}", atype, successor))
    return sorted(changes, key=lambda change: (change.path, change.kind))


def _use_of(atype: AssocType) -> tuple[State, int, bool]:
    """Return what decides the meaning of a stored row of a type's number."""
    return atype.state, atype.state_numbers[0], atype.counter is not None


def _counter_changes(old: CounterOptions, new: CounterOptions, name: str) -> Iterator[Change]:
    if old != new:
        why = "followers flush by the new options from now on"
        yield Change(ChangeKind.COUNTER_CHANGED, f"associations.{name}", True, why)


def _is_retired_state(atype: AssocType, new_assocs: Mapping[int, AssocType]) -> bool:
    """Return whether the type lives on without the state that this list of it holds."""
    successor = new_assocs.get(atype.state_numbers[0])
    is_left = atype.number not in new_assocs and atype.state is not State.NORMAL
    return is_left and successor is not None and bool(successor.states) and not successor.states[atype.state]


def _retirement(atype: AssocType) -> Change:
    why = (
        f"a type that is in use keeps its states: edges in the list {atype.number} would lose their history, so that "
        "an old operation could bring them back; stop writing the state, or retire the whole type"
    )
    return Change(ChangeKind.STATES_CHANGED, f"associations.{_path_name(atype)}", False, why)


_Numbered = ObjectType | AssocType | Field


def _numbered_changes(
    path: str,
    old: Iterable[_Numbered],
    new: Iterable[_Numbered],
    old_reserved: frozenset[int],
    new_reserved: frozenset[int],
) -> Iterator[Change]:
    """Yield the changes of the numbers of one list of types or fields."""
    old_names = {each.number: _path_name(each) for each in old}
    new_names = {each.number: _path_name(each) for each in new}
    old_numbers = _inverted(old_names)
    new_numbers = _inverted(new_names)
    for number, name in old_names.items():
        at = f"{path}.{name}"
        moved_to = new_numbers.get(name, number)
        if moved_to != number:
            why = f"from {number} to {moved_to}: data stored under {number} would no longer be found"
            yield Change(ChangeKind.RENUMBERED, at, False, why)
        elif number in new_names and new_names[number] != name:
            why = f"to {new_names[number]}: stored data is safe, but programs that use {name!r} must change"
            yield Change(ChangeKind.RENAMED, at, True, why, warns=True)
        elif number not in new_names and number in new_reserved:
            why = f"number {number} is reserved; stored data is kept but no longer returned"
            yield Change(ChangeKind.REMOVED, at, True, why, warns=True)
        elif number not in new_names:
            why = f"list {number} under 'reserved', or it may be used again with another meaning"
            yield Change(ChangeKind.REMOVED, at, False, why)
    for number, name in new_names.items():
        at = f"{path}.{name}"
        if number in old_reserved:
            why = f"{number} was reserved: data of its former type may still be stored"
            yield Change(ChangeKind.REUSED, at, False, why)
        elif number not in old_names and name not in old_numbers:
            yield Change(ChangeKind.ADDED, at, True, "servers and programs with the former schema ignore it")
        elif number in old_names and name in old_numbers and old_numbers[name] != number:
            why = f"{number} was {old_names[number]!r}: stored data would change its meaning"
            yield Change(ChangeKind.REUSED, at, False, why)
    for number in sorted(old_reserved - new_reserved - new_names.keys()):
        why = f"{number} could be used again, though data of its former type may still be stored"
        yield Change(ChangeKind.UNRESERVED, f"{path}.{number}", False, why)


def _path_name(each: _Numbered) -> str:
    """Return the name of a type or field in paths: that of a state type says which state its lists hold."""
    if isinstance(each, AssocType) and each.state is not State.NORMAL:
        return f"{each.name}.states.{each.state.label}"
    return each.name


def _inverted(names: Mapping[int, str]) -> dict[str, int]:
    return {name: number for number, name in names.items()}


def _inside(path: str, old: ObjectType | AssocType, new: ObjectType | AssocType) -> Iterator[Change]:
    yield from _numbered_changes(f"{path}.fields", old.fields, new.fields, old.reserved, new.reserved)
    for field in old.fields:
        successor = new.layout.by_number.get(field.number)
        if successor is None:
            continue
        at = f"{path}.fields.{field.name}"
        if successor.kind is not field.kind:
            why = f"from {field.kind} to {successor.kind}: stored values have the old type; add a new field instead"
            yield Change(ChangeKind.TYPE_CHANGED, at, False, why)
        elif repr(successor.default) != repr(field.default):
            why = f"from {field.default!r} to {successor.default!r}: readers see it where the field is not set"
            yield Change(ChangeKind.DEFAULT_CHANGED, at, True, why, warns=True)
    for field in new.fields:
        former = old.layout.by_number.get(field.number)
        if field.required == (former is not None and former.required):
            continue
        why = "new objects and edges may lack it"
        if field.required:
            why = "programs that write without it fail from now on; what is stored may lack it and stays readable"
        at = f"{path}.fields.{field.name if former is None else former.name}"
        yield Change(ChangeKind.REQUIRED_CHANGED, at, True, why, warns=field.required)
    if old.arena != new.arena:
        why = f"from {old.arena} to {new.arena}: caches use the new arena for what they read from now on"
        yield Change(ChangeKind.ARENA_CHANGED, path, True, why)
    if old.audit != new.audit:
        why = "leaders with an audit log record its writes from now on"
        if not new.audit:
            why = "its writes are no longer recorded in audit logs"
        yield Change(ChangeKind.AUDIT_CHANGED, path, True, why, warns=not new.audit)


def _assoc_changes(path: str, old: AssocType, new: AssocType) -> Iterator[Change]:
    if old.inverse != new.inverse:
        why = f"from {old.inverse} to {new.inverse}: stored edges would lack their inverse, or leave one behind"
        yield Change(ChangeKind.INVERSE_CHANGED, path, False, why)
    if bool(old.states) != bool(new.states):
        why = "edges with states are stored in another table, with their history; add a new type instead"
        yield Change(ChangeKind.STATES_CHANGED, path, False, why)
    elif old.keep_removed_days != new.keep_removed_days:
        why = f"from {old.keep_removed_days} to {new.keep_removed_days}: later operations are refused, or accepted"
        yield Change(ChangeKind.STATES_CHANGED, f"{path}.keep_removed_days", True, why, warns=True)
    elif old.table != new.table:
        why = f"from {old.table or 'the default'} to {new.table or 'the default'}: stored edges would not be found"
        yield Change(ChangeKind.TABLE_CHANGED, path, False, why)
    if old.max_data_bytes > new.max_data_bytes:
        why = f"from {old.max_data_bytes} to {new.max_data_bytes}: stored edges may exceed it"
        yield Change(ChangeKind.DATA_BOUND_CHANGED, path, False, why)
    elif old.max_data_bytes < new.max_data_bytes:
        why = f"from {old.max_data_bytes} to {new.max_data_bytes}: stored edges still fit"
        yield Change(ChangeKind.DATA_BOUND_CHANGED, path, True, why)
    if old.limit != new.limit:
        why = f"from {old.limit} to {new.limit}: it bounds caches and answers, not stored data"
        yield Change(ChangeKind.LIMIT_CHANGED, path, True, why)
    yield from _length_changes(path, old, new)
    if old.exists_filter != new.exists_filter:
        why = "followers build filters of its edges, of about 2 bytes an edge and 30 a list"
        if not new.exists_filter:
            why = "followers discard their filters of its edges"
        yield Change(ChangeKind.EXISTS_FILTER_CHANGED, path, True, why)
    if old.reverse_lookup != new.reverse_lookup:
        why = "clients look for edges of long lists in the inverse lists: edges must be written or loaded at both ends"
        if not new.reverse_lookup:
            why = "clients ask the list itself, however long it is"
        yield Change(ChangeKind.REVERSE_LOOKUP_CHANGED, path, True, why, warns=new.reverse_lookup)


def _length_changes(path: str, old: AssocType, new: AssocType) -> Iterator[Change]:
    """Yield the changes of the bounds on the lengths of lists, of which only those that tighten matter."""
    if old.max_edges != new.max_edges:
        tightens = new.max_edges is not None and (old.max_edges is None or new.max_edges < old.max_edges)
        why = f"from {old.max_edges or 'no bound'} to {new.max_edges or 'no bound'}: lists may grow longer"
        if tightens:
            why = f"to {new.max_edges}: longer lists keep their edges and take no new one, so programs may fail"
        yield Change(ChangeKind.MAX_EDGES_CHANGED, path, True, why, warns=tightens)
    if old.keep != new.keep:
        tightens = new.keep is not None and (old.keep is None or new.keep < old.keep)
        why = f"from {old.keep or 'all'} to {new.keep or 'all'}: edges that were trimmed do not come back"
        if tightens:
            why = f"to {new.keep}: the next add to a longer list deletes its oldest edges for good"
        yield Change(ChangeKind.KEEP_CHANGED, path, True, why, warns=tightens)
