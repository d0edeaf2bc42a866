"""Why a caller may do something or not, in words, and what is odd about a document.

The verdicts are those of the compiled policy; the reasons are found in the document.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tao.access.document import ALL, AccessDocument, Operation
from tao.access.policy import ALL_TYPES, Policy, compile_policy
from tao.model.errors import UnknownType
from tao.schema.registry import Schema
from tao.schema.types import GraphType


class TypeKind(StrEnum):
    """The kind of a type: an object type and an association type may have one name, or one number."""

    OBJECT = "object"
    ASSOCIATION = "association"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one question. ``granted_by``: the roles that grant it; ``why``: what is missing, if it is denied,
    or why it needs no role; ``who``: the caller and the roles that it has."""

    kind: TypeKind
    type_name: str
    allowed: bool
    granted_by: tuple[str, ...]
    who: str
    why: str


class Decisions:
    """Answers questions about one document under one schema."""

    def __init__(self, document: AccessDocument, schema: Schema) -> None:
        self.document = document
        self.schema = schema
        self.policy: Policy = compile_policy(document, schema)

    def explain(self, caller: str, operation: Operation, type_name: str) -> list[Verdict]:
        """Return the verdict on the object type and on the association type of this name. Raises `UnknownType` when the
        schema has neither."""
        kinds = [kind for kind in TypeKind if self._find(kind, type_name) is not None]
        if not kinds:
            names = [*(each.name for each in self.schema.objects), *(each.name for each in self.schema.declared_assocs)]
            raise UnknownType(f"the schema has no type {type_name!r}{_hint(type_name, names)}")
        return [self.verdict(caller, operation, kind, type_name) for kind in kinds]

    def verdict(self, caller: str, operation: Operation, kind: TypeKind, type_name: str) -> Verdict:
        """Return whether a caller may do an operation with a type. A type that the schema does not have is denied,
        unless a role has the right on all types."""
        if is_operator(caller) and (caller not in self.document.callers or operation is not Operation.ADMINISTER):
            return self._verdict_on_operator(caller, kind, type_name)
        grant = self.policy.rights(caller).of(operation)
        found = self._find(kind, type_name)
        granted = grant.objects if kind is TypeKind.OBJECT else grant.associations
        allowed = granted == ALL_TYPES or (found is not None and bool(granted >> found.number & 1))
        granting = self._granting(caller, operation, kind, type_name)
        why = "" if allowed else self._missing(caller, operation, kind, type_name, granting)
        return Verdict(kind, type_name, allowed, granting if allowed else (), self.who(caller), why)

    def _verdict_on_operator(self, caller: str, kind: TypeKind, type_name: str) -> Verdict:
        """Return whether an operator may send requests other than for the types that it administers."""
        who = self.who(caller)
        if caller not in self.document.callers:
            why = "an operator that `callers` does not name may do everything that operators may"
            return Verdict(kind, type_name, True, (), who, why)
        if not self.policy.rights(caller).administer.covers_all:
            why = f"an operator needs {Operation.ADMINISTER} of all types for it, which none of its roles grants"
            return Verdict(kind, type_name, False, (), who, why)
        roles = dict.fromkeys(self.document.roles_of(caller))
        granting = (role for role in roles if self._types(role, Operation.ADMINISTER, kind) == ALL)
        return Verdict(kind, type_name, True, tuple(granting), who, "")

    def who(self, caller: str) -> str:
        """Return a caller and its roles in words."""
        if is_operator(caller) and caller not in self.document.callers:
            return f"operator {caller!r} is not named"
        roles = self.document.roles_of(caller)
        has = f"has the {'role' if len(roles) == 1 else 'roles'} {', '.join(roles)}" if roles else "has no role"
        if not caller:
            return f"a peer that names no caller {has} (anonymous)"
        return f"caller {caller!r} {has}{'' if caller in self.document.callers else ' (others)'}"

    def _find(self, kind: TypeKind, name: str) -> GraphType | None:
        types: Sequence[GraphType] = self.schema.objects if kind is TypeKind.OBJECT else self.schema.declared_assocs
        return next((each for each in types if each.name == name), None)

    def is_named(self, caller: str, operation: Operation, kind: TypeKind, type_name: str) -> bool:
        """Return whether a role of the caller names this very type for an operation."""
        of_roles = (self._types(role, operation, kind) for role in self.document.roles_of(caller))
        return any(types != ALL and type_name in types for types in of_roles)

    def _granting(self, caller: str, operation: Operation, kind: TypeKind, type_name: str) -> tuple[str, ...]:
        return tuple(
            role
            for role in dict.fromkeys(self.document.roles_of(caller))
            if (types := self._types(role, operation, kind)) == ALL or type_name in types
        )

    def _types(self, role: str, operation: Operation, kind: TypeKind) -> Sequence[str]:
        entry = self.document.roles[role].types(operation)
        return entry.objects if kind is TypeKind.OBJECT else entry.associations

    def _missing(
        self, caller: str, operation: Operation, kind: TypeKind, type_name: str, granting: Sequence[str]
    ) -> str:
        if not granting:
            return f"none of its roles grants {operation} of the {kind} type {type_name!r}"
        if operation is Operation.CRITICAL:
            return f"none of its roles grants read of the {kind} type {type_name!r}, which {operation} needs too"
        atype = next((each for each in self.schema.declared_assocs if each.name == type_name), None)
        inverse = None if atype is None else self.schema.inverse_of(atype)
        if kind is TypeKind.ASSOCIATION and inverse is not None:
            return f"none of its roles grants {operation} of {inverse.name!r}, the inverse type of {type_name!r}"
        return f"the schema has no {kind} type {type_name!r}"


def is_operator(caller: str) -> bool:
    """Return whether a caller is an operator, by its name."""
    return caller == "operator" or caller.startswith("operator/")


class Oddity(NamedTuple):
    """Something in a document that is allowed and probably not meant."""

    path: str
    what: str


def oddities(document: AccessDocument, schema: Schema) -> list[Oddity]:
    """Return what is odd about a document: unknown types, callers without roles, or without rights that the SDK asks
    for, roles without callers or rights, and rights that have no effect without others."""
    return [*_odd_roles(document, schema), *_odd_callers(document, schema)]


def _odd_roles(document: AccessDocument, schema: Schema) -> Iterator[Oddity]:
    names = {
        "objects": [each.name for each in schema.objects],
        "associations": [each.name for each in schema.declared_assocs],
    }
    used = {*document.others, *document.anonymous, *(role for roles in document.callers.values() for role in roles)}
    for role, entry in document.roles.items():
        grants = False
        for operation in Operation:
            for group, known in names.items():
                types: Sequence[str] = getattr(entry.types(operation), group)
                grants = grants or bool(types)
                for each in types if types != ALL else ():
                    if each not in known:
                        path = f"roles.{role}.{operation}.{group}"
                        yield Oddity(path, f"the schema has no such type: {each!r}{_hint(each, known)}")
        if not grants:
            yield Oddity(f"roles.{role}", "grants nothing")
        if role not in used:
            yield Oddity(f"roles.{role}", "no caller has this role")


def _odd_callers(document: AccessDocument, schema: Schema) -> Iterator[Oddity]:
    decisions = Decisions(document, schema)
    groups = {
        **{f"callers.{caller}": (caller, roles) for caller, roles in document.callers.items()},
        "others": (_unnamed(document), document.others),
        "anonymous": ("", document.anonymous),
    }
    for path, (caller, roles) in groups.items():
        if path.startswith("callers.") and not roles:
            yield Oddity(path, "has no role: it may do nothing")
        for operation, kind, names in (
            (Operation.WRITE, TypeKind.ASSOCIATION, [each.name for each in schema.declared_assocs]),
            (Operation.CRITICAL, TypeKind.OBJECT, [each.name for each in schema.objects]),
            (Operation.CRITICAL, TypeKind.ASSOCIATION, [each.name for each in schema.declared_assocs]),
        ):
            for name in names:
                verdict = decisions.verdict(caller, operation, kind, name)
                if not verdict.allowed and decisions.is_named(caller, operation, kind, name):
                    yield Oddity(path, f"{operation} of {name!r} has no effect: {verdict.why}")
        yield from (Oddity(path, what) for what in _lacks(decisions, caller, roles))
        reads = decisions.policy.rights(caller).read.associations
        for atype in schema.declared_assocs:
            if atype.reverse_lookup and atype.inverse is not None and reads >> atype.number & 1:
                inverse = schema.atype(atype.inverse)
                if not reads >> inverse.number & 1:
                    why = f"the SDK looks edges of {atype.name!r} up in reverse, and it may not read {inverse.name!r}"
                    yield Oddity(path, why)


def _lacks(decisions: Decisions, caller: str, roles: Sequence[str]) -> Iterator[str]:
    """Yield what a caller with roles can do badly without."""
    if not roles or is_operator(caller):
        return
    rights = decisions.policy.rights(caller)
    if not rights.watch.covers_all:
        yield "may not watch all types: the SDK learns of a new topology or schema later"
    uncertain = rights.write.associations & rights.read.associations & ~rights.critical.associations
    names = [
        each.name
        for each in decisions.schema.declared_assocs
        if each.inverse is not None and uncertain >> each.number & 1
    ]
    if names:
        listed = ", ".join(names)
        yield f"writes edges with an inverse ({listed}) that it may not read critically: reading them may fail as stale"


def _unnamed(document: AccessDocument) -> str:
    """Return a name that the document gives to no caller."""
    name = "?"
    while name in document.callers:
        name += "?"
    return name


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
