"""The audit log's records of writes, made by the leader that commits them.

A write is recorded when its type asks for it in the schema, or the type of its edge's inverse. An update or deletion of
an object may leave the type open; then it is recorded unless its result shows a type that does not ask.
"""

from __future__ import annotations

from typing import Final

from tao.leader.write_path import Written
from tao.model.changes import ObjectChange
from tao.model.errors import NotMine
from tao.model.graph import ABSENT
from tao.model.writes import (
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    AssocMerge,
    NodeSetState,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    Write,
)
from tao.observability.audit_records import Activity
from tao.planning.coordination import shards_of
from tao.schema.registry import Schema
from tao.schema.types import GraphType
from tao.serving.audit import AuditEntry
from tao.serving.configuration import ServerContext

_ACTIVITIES: Final[dict[type[Write], tuple[str, Activity]]] = {
    ObjAdd: ("obj_add", Activity.CREATE),
    ObjUpdate: ("obj_update", Activity.UPDATE),
    ObjDelete: ("obj_delete", Activity.DELETE),
    AssocAdd: ("assoc_add", Activity.CREATE),
    AssocDelete: ("assoc_delete", Activity.DELETE),
    AssocChangeType: ("assoc_change_type", Activity.UPDATE),
    AssocMerge: ("assoc_merge", Activity.UPDATE),
    NodeSetState: ("node_set_state", Activity.UPDATE),
}
"""The writes that callers ask for. Others copy or correct what such a write has done, and are not recorded again."""


class AuditedWrite:
    """One recorded write that is under way."""

    def __init__(self, entry: AuditEntry, schema: Schema, *, knows_type: bool) -> None:
        self._entry: Final = entry
        self._schema: Final = schema
        self._knows_type: Final = knows_type

    def done(self, written: Written, *, pending: bool) -> None:
        """Record that the write is committed. ``pending``: its inverse is not written yet."""
        assert self._entry.event is not None, "a write ends once"
        details = {**self._entry.event.details, "found": written.outcome.found}
        if written.outcome.id:
            details["id"] = written.outcome.id
        if pending:
            details["inverse_pending"] = True
        types = self._entry.event.types
        if not self._knows_type and (otype := _object_type(written)):
            found = self._schema.otype(otype)
            if not found.audit:
                self._entry.give_up()
                return
            types = (found.name,)
        self._entry.end(details=details, types=types)

    def failed(self, error: BaseException) -> None:
        """Record that the write failed, or may have. One of a shard that another leader owns is recorded there."""
        if isinstance(error, NotMine):
            self._entry.give_up()
        else:
            self._entry.end(error)


class WriteAudit:
    """Begins the records of writes at one leader."""

    def __init__(self, context: ServerContext) -> None:
        self._audit: Final = context.audit
        self._configuration: Final = context.configuration

    def begin(self, write: Write, caller: str) -> AuditedWrite | None:
        """Begin the record of a checked write; None when it needs none. Raises `AuditFull`."""
        schema = self._configuration.schema
        if type(write) not in _ACTIVITIES or not self._audit.is_on:
            return None
        types = _types_of(write, schema)
        if not any(map(schema.is_audited, types or schema.objects)):
            return None
        action, activity = _ACTIVITIES[type(write)]
        entry = self._audit.begin(
            caller,
            action,
            activity=activity,
            types=tuple(each.name for each in types),
            shards=tuple(sorted(shards_of(write, schema))),
            details=_ids_of(write),
        )
        return None if entry is None else AuditedWrite(entry, schema, knows_type=bool(types))


def _types_of(write: Write, schema: Schema) -> tuple[GraphType, ...]:
    """Return the types that a write names: none where it leaves that of an object open."""
    match write:
        case ObjAdd(otype=otype) | ObjUpdate(otype=otype) | ObjDelete(otype=otype):
            return (schema.otype(otype),) if otype else ()
        case AssocChangeType(atype=atype, new_atype=new_atype):
            return (schema.atype(atype), schema.atype(new_atype))
        case AssocAdd(atype=atype) | AssocDelete(atype=atype) | AssocMerge(atype=atype):
            return (schema.atype(atype),)
        case NodeSetState(atypes=atypes):
            return tuple(map(schema.atype, atypes))
        case _:
            return ()


def _ids_of(write: Write) -> dict[str, object]:
    names = ("id", "id1", "id2")
    return {name: getattr(write, name) for name in names if name in write.__struct_fields__}


def _object_type(written: Written) -> int:
    """Return the type of the object that a write has changed, 0 if it does not show."""
    changes = (each for messages in written.messages for each in messages.messages)
    found = (each.otype for each in changes if isinstance(each, ObjectChange) and each.otype != ABSENT)
    return next(found, 0)
