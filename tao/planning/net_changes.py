"""Compute the changeset of a transaction from its row images before and after.

A leader derives the images from the rows it locked, a tailer reads them from the binlog. Because both use this
module, both produce the identical changeset, byte for byte and in one order. So the module knows nothing of writes,
only what rows were and what they became."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec

from tao.model.changes import Change, GoneEdge, ListChange, ObjectChange, sort_edges
from tao.model.graph import ABSENT, Edge, ListKey, deleted_data
from tao.model.rows import ListRow, ObjectRow
from tao.model.versions import NEVER_WRITTEN

EdgeImages = tuple[Edge | None, Edge | None]
"""One edge before and after the transaction; None where it did not exist."""

_PLACE = attrgetter("time", "id2")


class ObjectImages(msgspec.Struct, frozen=True):
    """The row of one object before the transaction (None: there was none) and after it."""

    before: ObjectRow | None
    after: ObjectRow


class ListImages(msgspec.Struct, frozen=True):
    """One list: its ``assoc_lists`` row before (None: there was none) and after, and the images of its written
    edges."""

    key: ListKey
    before: ListRow | None
    after: ListRow
    edges: Sequence[EdgeImages]


def object_change(images: ObjectImages) -> ObjectChange:
    """Return the net change of one object."""
    before, after = images.before, images.after
    version_before = NEVER_WRITTEN if before is None else before.version
    if after.deleted:
        return ObjectChange(after.id, version_before, after.version, ABSENT, deleted_data(after.otype))
    return ObjectChange(after.id, version_before, after.version, after.otype, after.data)


def list_change(images: ListImages) -> ListChange:
    """Return the net change of one list. Edges that are the same before and after are left out."""
    gone: list[GoneEdge] = []
    put: list[Edge] = []
    for before, after in images.edges:
        if before == after:
            continue
        if before is not None and (after is None or before.time != after.time):
            gone.append(GoneEdge(before.id2, before.time))
        if after is not None:
            put.append(after)
    if len(gone) > 1:
        gone.sort(key=_PLACE, reverse=True)
    if len(put) > 1:
        put = sort_edges(put)
    key, after_row = images.key, images.after
    version_before = NEVER_WRITTEN if images.before is None else images.before.version
    return ListChange(key.id1, key.atype, version_before, after_row.version, after_row.count, tuple(gone), tuple(put))


def net_changes(objects: Iterable[ObjectImages], lists: Iterable[ListImages]) -> tuple[Change, ...]:
    """Return the changeset of one transaction: objects by id, then lists by ``(id1, atype)``.

    The caller passes each object and each list once, with its first image before and its last image after."""
    changed_objects = sorted(map(object_change, objects), key=attrgetter("id"))
    changed_lists = sorted(map(list_change, lists), key=attrgetter("id1", "atype"))
    return (*changed_objects, *changed_lists)
