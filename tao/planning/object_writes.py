"""Creating, updating and deleting objects, on the working copy (DESIGN.md §2)."""

from __future__ import annotations

from typing import ClassVar

from tao.model.errors import InvalidArgument, RetryableError, WrongType
from tao.model.rows import ObjectRow
from tao.model.versions import NEVER_WRITTEN
from tao.model.writes import ObjAdd, ObjDelete, ObjUpdate, WriteOutcome
from tao.planning.draft import Draft
from tao.schema.codec import merge_data, validate_patch
from tao.schema.registry import Schema


class IdTaken(RetryableError):
    """An id that the leader allocated is in use: it takes the next one and plans again. Never leaves the leader."""

    reason: ClassVar[str] = "ID_TAKEN"


def add_object(draft: Draft, write: ObjAdd) -> WriteOutcome:
    """Raises `IdTaken`, or `InvalidArgument` for a reserved id that was used for something else."""
    row = draft.object(write.id)
    if row is None:
        draft.set_object(ObjectRow(write.id, write.otype, NEVER_WRITTEN, False, write.data))
        return WriteOutcome(write.id)
    if write.allocated:
        raise IdTaken(f"id {write.id} is taken; allocate another")
    if row.deleted:
        raise InvalidArgument(f"object {write.id} was deleted, and ids are not used again; reserve a new id")
    if row.otype != write.otype or row.data != write.data:
        raise InvalidArgument(f"object {write.id} exists with other content; update it instead of adding it")
    return WriteOutcome(write.id, True)


def update_object(draft: Draft, write: ObjUpdate, schema: Schema) -> WriteOutcome:
    """Raises `WrongType`, `InvalidField`, `UnknownType` or (of the merged data) `TooLarge`."""
    row = draft.object(write.id)
    if row is None or row.deleted:
        return WriteOutcome(write.id)
    otype = schema.otype(row.otype)
    if write.otype not in (0, row.otype):
        named = schema.otype(write.otype).name
        raise WrongType(f"object {write.id} is of type {otype.name!r}, not {named!r}")
    if not write.otype:
        # Only now is the type known by which to judge the fields.
        validate_patch(otype, write.patch)
    data = merge_data(otype, row.data, write.patch)
    draft.set_object(ObjectRow(row.id, row.otype, row.version, False, data))
    return WriteOutcome(write.id, True)


def delete_object(draft: Draft, write: ObjDelete) -> WriteOutcome:
    """The row stays as a tombstone, so that the version never goes back; the object's edges are left alone."""
    row = draft.object(write.id)
    if row is None or row.deleted:
        return WriteOutcome(write.id)
    draft.set_object(ObjectRow(row.id, row.otype, row.version, True, b""))
    return WriteOutcome(write.id, True)
