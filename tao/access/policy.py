"""An access document compiled for the servers that check it.

A right is a bit in a set: an `int` with the bit of every type's number that it covers, -1 for all of them. Whatever a
document says in names, roles and inverse types is decided when it is compiled, so that a check is one shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from tao.access.document import ALL, AccessDocument, BudgetEntry, Operation, RoleEntry
from tao.schema.registry import Schema
from tao.schema.types import GraphType

ALL_TYPES: Final = -1
"""The set of all types, also of those that the schema gets later."""

NO_TYPES: Final = 0


class Grant(NamedTuple):
    """The types for which a caller may do one operation, as bit sets."""

    objects: int
    associations: int

    @property
    def covers_all(self) -> bool:
        """Return whether the operation is granted for all types, and so for requests that name none."""
        return self == (ALL_TYPES, ALL_TYPES)


class Budget(NamedTuple):
    """What the costly work of a caller may cost one follower, in units; None: no bound of its own."""

    units_under_way: int | None
    units_per_second: int | None


@dataclass(frozen=True, slots=True)
class Rights:
    """What one caller may do. An association type is in ``write`` only together with its inverse, and a type in
    ``critical`` only together with ``read``."""

    read: Grant
    write: Grant
    critical: Grant
    watch: Grant
    administer: Grant
    min_staleness_ms: int
    budget: Budget | None
    reads_all: bool
    """The caller may read everything, so its reads need no check."""

    def of(self, operation: Operation) -> Grant:
        """Return the types for which the caller may do an operation."""
        found: Grant = getattr(self, operation.value)
        return found


@dataclass(frozen=True, slots=True)
class Policy:
    """The compiled rights of every caller. ``enforced`` is False while denials are only counted."""

    version: int
    enforced: bool
    named: Mapping[str, Rights]
    others: Rights
    anonymous: Rights

    def rights(self, caller: str) -> Rights:
        """Return the rights of a caller; an empty name is that of a peer that names none."""
        return self.named.get(caller, self.others) if caller else self.anonymous


def compile_policy(document: AccessDocument, schema: Schema) -> Policy:
    """Return the policy of a document. Types that the schema does not have grant nothing until it has them."""
    granted = {name: _grants(role, schema) for name, role in document.roles.items()}
    made: dict[tuple[str, ...], Rights] = {}  # thousands of callers share a few sets of roles

    def rights(names: Sequence[str]) -> Rights:
        key = tuple(names)
        if key not in made:
            made[key] = _rights([document.roles[name] for name in key], [granted[name] for name in key], schema)
        return made[key]

    return Policy(
        version=document.version,
        enforced=document.mode == "enforce",
        named={caller: rights(roles) for caller, roles in document.callers.items()},
        others=rights(document.others),
        anonymous=rights(document.anonymous),
    )


_Grants = Mapping[Operation, Grant]


def _grants(role: RoleEntry, schema: Schema) -> _Grants:
    found = {operation: role.types(operation) for operation in Operation}
    return {
        operation: Grant(_bits(types.objects, schema.objects), _bits(types.associations, schema.assocs))
        for operation, types in found.items()
    }


def _rights(roles: Sequence[RoleEntry], granted: Sequence[_Grants], schema: Schema) -> Rights:
    def union(operation: Operation) -> Grant:
        objects = associations = NO_TYPES
        for grants in granted:
            objects |= grants[operation].objects
            associations |= grants[operation].associations
        return Grant(objects, associations)

    read, write, critical = union(Operation.READ), union(Operation.WRITE), union(Operation.CRITICAL)
    critical = Grant(critical.objects & read.objects, critical.associations & read.associations)
    # A role that grants reads with any bound takes nothing away by that, and another role's bound takes none of it.
    reading = [role for role, grants in zip(roles, granted, strict=True) if any(grants[Operation.READ])]
    min_staleness_ms = min((role.min_staleness_ms or 0 for role in reading), default=0)
    return Rights(
        read=read,
        write=Grant(write.objects, _with_inverses(write.associations, schema)),
        critical=critical,
        watch=union(Operation.WATCH),
        administer=union(Operation.ADMINISTER),
        min_staleness_ms=min_staleness_ms,
        budget=_budget([role for role, grants in zip(roles, granted, strict=True) if _grants_work(grants)]),
        reads_all=read.covers_all and critical.covers_all and not min_staleness_ms,
    )


def _grants_work(grants: _Grants) -> bool:
    return any(any(grants[operation]) for operation in (Operation.READ, Operation.WRITE))


def _budget(roles: Sequence[RoleEntry]) -> Budget | None:
    """Return the budget of a caller with these roles, which grant reads or writes. As everywhere a role only gives: the
    largest bound counts, and a role without one takes the others' away."""
    entries = [role.budget or BudgetEntry() for role in roles]
    under_way = [entry.units_under_way for entry in entries]
    per_second = [entry.units_per_second for entry in entries]
    found = Budget(_largest(under_way), _largest(per_second))
    return None if found == (None, None) else found


def _largest(bounds: Sequence[int | None]) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return max(known) if known and len(known) == len(bounds) else None


def _bits(names: Iterable[str] | Literal["all"], types: Iterable[GraphType]) -> int:
    if names == ALL:
        return ALL_TYPES
    wanted, bits = frozenset(names), NO_TYPES
    for each in types:
        if each.name in wanted:
            bits |= 1 << each.number
    return bits


def _with_inverses(associations: int, schema: Schema) -> int:
    """Return the set without the types whose inverse it lacks: an edge is written at both of its ends."""
    if associations == ALL_TYPES:
        return ALL_TYPES
    for atype in schema.assocs:
        if atype.inverse is not None and not associations >> atype.inverse & 1:
            associations &= ~(1 << atype.number)
    return associations
