"""The access document (``access.yaml``): which callers have which roles, and which rights a role gives.

Rights are only ever granted, never taken: what no role of a caller grants is denied. So the rights of a caller with
several roles are the union of theirs, and the order of a document means nothing. Types are named as in the schema, and
a document may name types that the schema does not have yet; `tao access check` lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Final, Literal

import pydantic
from pydantic_core import PydanticCustomError

from tao.model.errors import AccessError
from tao.schema.plain_data import STRICT, DocumentKind, Path, parse_yaml, validate

ACCESS: Final = DocumentKind("access document", AccessError)
ALL: Final = "all"
"""Stands in place of a list of types for all of them, also for those that the schema gets later."""


class Operation(StrEnum):
    """The kinds of operation that a right is for. The enum's value is the word used in documents."""

    READ = "read"
    WRITE = "write"
    CRITICAL = "critical"
    """Critical reads, of the master; the types have to be among those of ``read``, too."""
    WATCH = "watch"
    """Watching for changes of topology and schema, in a series; it needs all types."""
    ADMINISTER = "administer"
    """The requests that commands of operators send to servers."""


def _type_names(value: object) -> tuple[str, ...] | Literal["all"]:
    if value == ALL:
        return ALL
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise PydanticCustomError("types", "must be a list of names of types, or the word all")


def _both_kinds(value: object) -> object:
    return {"objects": ALL, "associations": ALL} if value == ALL else value


TypeNames = Annotated[tuple[str, ...] | Literal["all"], pydantic.PlainValidator(_type_names)]
RoleName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
CallerName = Annotated[str, pydantic.StringConstraints(pattern=r"^[!-~]{1,200}$")]


class _Entry(pydantic.BaseModel):
    model_config = STRICT


class TypesEntry(_Entry):
    """The types for which a role grants one operation."""

    objects: TypeNames = ()
    associations: TypeNames = ()


GrantedTypes = Annotated[TypesEntry, pydantic.BeforeValidator(_both_kinds)]


Units = Annotated[int, pydantic.Field(ge=1, le=1_000_000_000)]


class BudgetEntry(_Entry):
    """What the misses, critical reads and writes of each caller may cost one follower, in units of cost."""

    units_under_way: Units | None = None
    """Units under way at the same time; further requests wait."""
    units_per_second: Units | None = None
    """Requests of a caller that has spent more are refused."""


class RoleEntry(_Entry):
    """What a role grants. ``min_staleness_ms``: the least ``max_staleness_ms`` that its callers may ask for; it has an
    effect on callers all of whose roles that grant reads have one. ``budget`` has one on callers all of whose roles
    that grant reads or writes have one."""

    read: GrantedTypes = TypesEntry()
    write: GrantedTypes = TypesEntry()
    critical: GrantedTypes = TypesEntry()
    watch: GrantedTypes = TypesEntry()
    administer: GrantedTypes = TypesEntry()
    min_staleness_ms: Annotated[int, pydantic.Field(ge=0, le=(1 << 32) - 1)] | None = None
    budget: BudgetEntry | None = None

    def types(self, operation: Operation) -> TypesEntry:
        """Return the types for which the role grants the operation."""
        found: TypesEntry = getattr(self, operation.value)
        return found


class AccessDocument(_Entry):
    """A whole access document.

    ``version`` rises with every change. ``others`` are the roles of callers that ``callers`` does not name,
    ``anonymous`` those of peers that name no caller."""

    format: Literal[1]
    version: Annotated[int, pydantic.Field(ge=1)]
    mode: Literal["enforce", "count"] = "enforce"
    roles: dict[RoleName, RoleEntry] = {}
    callers: dict[CallerName, list[RoleName]] = {}
    others: list[RoleName] = []
    anonymous: list[RoleName] = []

    def roles_of(self, caller: str) -> Sequence[str]:
        """Return the names of a caller's roles; ``caller`` is empty for a peer that names none."""
        return self.callers.get(caller, self.others) if caller else self.anonymous


_KEYS: Final = sorted({key for entry in _Entry.__subclasses__() for key in entry.model_fields})


def load_access(text: str, source: str) -> AccessDocument:
    """Return the document of a YAML file's ``text``. ``source`` is the file's name, for messages.

    Raises `AccessError` that lists each fault with file, line and path of the key."""
    parsed = parse_yaml(text, source, ACCESS)
    document = validate(parsed, AccessDocument, _KEYS)
    faults = list(_faults(document))
    if faults:
        raise parsed.error(faults)
    return document


def _faults(document: AccessDocument) -> Iterator[tuple[Path, str]]:
    named: Mapping[Path, Sequence[str]] = {
        **{("callers", caller): roles for caller, roles in document.callers.items()},
        ("others",): document.others,
        ("anonymous",): document.anonymous,
    }
    for path, roles in named.items():
        for index, role in enumerate(roles):
            if role not in document.roles:
                near = difflib.get_close_matches(role, document.roles, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                yield (*path, index), f"there is no role {role!r}{hint}"
