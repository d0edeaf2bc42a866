"""Translate row events of a committed transaction into its changeset and the keys that foreign writers changed.

A leader's transaction is recognised by its version steps: the edges that change come with one step of their list's
version, and a changed object with a rise of its own version. Its changeset equals the leader's, because both are
computed by `tao.planning.net_changes`. Rows that changed without their step are *foreign*: their new state has the
version of the old one, so the only message to caches is a touch. A version that rises without changed rows is how a
touch returns through the binlog; it invalidates the key everywhere below it. It is not a foreign change, or touching
would never end.

Nothing in a binlog may stop the stream. When a row of a shard cannot be read, the whole shard is invalidated; rows
that do not belong to the graph are counted and skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, Literal, TypeVar

import msgspec

from tao.model.changes import ListInvalidation, Message, ShardMessages
from tao.model.errors import UnknownType
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.relay import WHOLE_OBJECT, Touch
from tao.model.rows import ListRow, ObjectRow
from tao.model.versions import FIRST_EPOCH, NEVER_WRITTEN, counter_of, epoch_of
from tao.planning.net_changes import EdgeImages, ListImages, ObjectImages, list_change, object_change
from tao.schema.registry import Schema
from tao.schema.types import STATES_TABLE

OBJECTS_TABLE: Final = "objects"
LISTS_TABLE: Final = "assoc_lists"
EDGES_TABLE: Final = "assocs"
CUSTOM_EDGES_PREFIX: Final = "assocs_"
HEARTBEAT_TABLE: Final = "heartbeat"
HOUSEKEEPING_TABLES: Final = frozenset(
    {"shard", "inverse_intents", "reserved_ids", "schema_migrations", "node_states", "jobs", "paused_jobs"}
)
"""Tables of leaders and operators; caches hold nothing of them. A node's state shows in the rows of its edges."""

MAX_TOUCHES_PER_SHARD: Final = 100_000
"""Touched keys of one shard in one transaction. Each costs some hundred bytes and all of them seconds of a leader's
time: a transaction that changes more is a restored shard rather than an import, and its operator recounts the lists."""

Row = Mapping[str, Any]
"""A row image by column name: int, bytes or None as the column says, which no type checker can know."""

_OBJECT_COLUMNS: Final = itemgetter("id", "otype", "version", "deleted", "data")
_LIST_COLUMNS: Final = itemgetter("id1", "atype", "count", "version")
_EDGE_COLUMNS: Final = itemgetter("id1", "atype", "id2", "time", "data")
_HEARTBEAT_COLUMNS: Final = itemgetter("writer", "written_unix_ms")
_KNOWN_COLUMNS: Final = {OBJECTS_TABLE: 5, LISTS_TABLE: 4, HEARTBEAT_TABLE: 2}
_KNOWN_EDGE_COLUMNS: Final = 6
_KNOWN_STATE_COLUMNS: Final = 6
"""Further columns of edges of types with states. Caches hold nothing of them: a row in which they alone change is the
same before and after."""


class RowEvent(msgspec.Struct, frozen=True, gc=False):
    """One row of a shard's table before and after. An insertion has no ``before``, a deletion no ``after``."""

    shard: int
    table: str
    before: Row | None
    after: Row | None

    @property
    def kind(self) -> Literal["insert", "update", "delete"]:
        """Return the kind of the row event."""
        if self.before is None:
            return "insert"
        return "delete" if self.after is None else "update"


class Heartbeat(msgspec.Struct, frozen=True):
    """A heartbeat row: ``writer`` wrote it on the master at ``unix_ms``."""

    writer: str
    unix_ms: int


class Translated(msgspec.Struct, frozen=True):
    """The meaning of one transaction for caches.

    ``messages``: by shard and version epoch, each the part of the leader's changeset that concerns the shard.
    ``touches``: in key order. ``bulk_shards``: shards to invalidate as a whole; nothing else is reported for them.
    ``passed_over``: the number of rows that are no part of the graph. ``unknown_columns``: the number of rows with
    columns unknown here."""

    messages: tuple[ShardMessages, ...] = ()
    touches: tuple[Touch, ...] = ()
    bulk_shards: tuple[int, ...] = ()
    heartbeats: tuple[Heartbeat, ...] = ()
    passed_over: int = 0
    unknown_columns: int = 0


class _Unreadable(ValueError):
    """A row image lacks a column, or has NULL in a column that is never NULL."""


_Value = TypeVar("_Value")
_Images = list[_Value | None]
"""The first image before the transaction, and the last image after it."""


@dataclass(slots=True)
class _NetImages:
    """The net row images of the transaction."""

    objects: dict[int, _Images[ObjectRow]] = field(default_factory=dict)
    lists: dict[ListKey, _Images[ListRow]] = field(default_factory=dict)
    edges: dict[ListKey, dict[EdgeKey, _Images[Edge]]] = field(default_factory=dict)
    heartbeats: dict[str, int] = field(default_factory=dict)
    bulk: set[int] = field(default_factory=set)
    passed_over: int = 0
    unknown_columns: int = 0


def translate(
    transaction: Sequence[RowEvent], schema: Schema, max_touches_per_shard: int = MAX_TOUCHES_PER_SHARD
) -> Translated:
    """Translate the row events of one transaction, given in their order. Never raises for the content of a row."""
    draft = _NetImages()
    for event in transaction:
        try:
            _take(draft, event, schema)
        except _Unreadable:
            draft.bulk.add(event.shard)
    by_shard: dict[tuple[int, int], list[Message]] = {}
    touches: dict[int, list[Touch]] = {}
    for shard, version, message in _messages_and_touches(draft):
        if isinstance(message, Touch):
            touches.setdefault(shard, []).append(message)
        else:
            by_shard.setdefault((shard, epoch_of(version)), []).append(message)
    bulk = draft.bulk | {shard for shard, keys in touches.items() if len(keys) > max_touches_per_shard}
    return Translated(
        tuple(
            ShardMessages(shard, epoch, tuple(messages))
            for (shard, epoch), messages in sorted(by_shard.items())
            if shard not in bulk
        ),
        tuple(sorted(touch for shard, keys in touches.items() if shard not in bulk for touch in keys)),
        tuple(sorted(bulk)),
        tuple(Heartbeat(*each) for each in draft.heartbeats.items()),
        draft.passed_over,
        draft.unknown_columns,
    )


# ---- rows into net images --------------------------------------------------------------------------------------


def _take(draft: _NetImages, event: RowEvent, schema: Schema) -> None:
    table, before, after = event.table, event.before, event.after
    known: int | None
    if table == EDGES_TABLE or table.startswith(CUSTOM_EDGES_PREFIX):
        known = _KNOWN_EDGE_COLUMNS + (_KNOWN_STATE_COLUMNS if table == STATES_TABLE else 0)
    else:
        known = _KNOWN_COLUMNS.get(table)
        if known is None:
            draft.passed_over += table not in HOUSEKEEPING_TABLES
            return
    if len(after or before or ()) > known:
        draft.unknown_columns += 1
    if table == HEARTBEAT_TABLE:
        if after is not None:
            _take_heartbeat(draft, after)
        return
    if before is not None:
        _take_image(draft, event.shard, table, before, 0, schema)
    if after is not None:
        _take_image(draft, event.shard, table, after, 1, schema)


def _take_image(draft: _NetImages, shard: int, table: str, row: Row, side: int, schema: Schema) -> None:
    """Add one row image; ``side`` is 0 for before, 1 for after.

    An update that changes the key removes one row and puts another."""
    if table == OBJECTS_TABLE:
        object_id, otype, version, deleted, data = _columns(row, _OBJECT_COLUMNS)
        if object_id >> SHARD_SHIFT != shard:
            draft.passed_over += 1
            return
        _put(draft.objects, object_id, ObjectRow(object_id, otype, version, bool(deleted), _bytes(data)), side)
    elif table == LISTS_TABLE:
        id1, atype, count, version = _columns(row, _LIST_COLUMNS)
        if id1 >> SHARD_SHIFT != shard:
            draft.passed_over += 1
            return
        _put(draft.lists, ListKey(id1, atype), ListRow(count, version), side)
    else:
        id1, atype, id2, time, data = _columns(row, _EDGE_COLUMNS)
        if id1 >> SHARD_SHIFT != shard or not _is_stored_in(schema, atype, table):
            draft.passed_over += 1
            return
        key = ListKey(id1, atype)
        edges = draft.edges.get(key)
        if edges is None:
            edges = draft.edges[key] = {}
        _put(edges, EdgeKey(id1, atype, id2), Edge(id2, time, _bytes(data)), side)


def _columns(row: Row, of: Callable[[Row], tuple[Any, ...]]) -> tuple[Any, ...]:
    try:
        values = of(row)
    except KeyError as error:
        raise _Unreadable(f"the column {error} is missing") from error
    if None in values:
        raise _Unreadable("a column that is never NULL is NULL: the row image is incomplete")
    return values


def _bytes(value: object) -> bytes:
    """Return the value of a binary column. Readers that decode by character set return text for an empty value."""
    if isinstance(value, bytes):
        return value
    if value == "":
        return b""
    raise _Unreadable(f"a column of bytes holds {type(value).__name__}")


_Key = TypeVar("_Key", int, ListKey, EdgeKey)


def _put(images: dict[_Key, _Images[_Value]], key: _Key, row: _Value, side: int) -> None:
    found = images.get(key)
    if found is None:
        images[key] = [row, None] if side == 0 else [None, row]
    else:
        # The first image before stands. A further image before means that the row put since is deleted or replaced.
        found[1] = row if side else None


def _take_heartbeat(draft: _NetImages, row: Row) -> None:
    writer, unix_ms = _columns(row, _HEARTBEAT_COLUMNS)
    name = writer.decode(errors="replace") if isinstance(writer, bytes) else str(writer)
    draft.heartbeats[name] = max(unix_ms, draft.heartbeats.get(name, 0))


def _is_stored_in(schema: Schema, atype: int, table: str) -> bool:
    """Return whether the table stores edges of this type. A type unknown here, which a leader may know already,
    passes."""
    try:
        return (schema.atype(atype).table or EDGES_TABLE) == table
    except UnknownType:
        return True


# ---- net images into messages and touches ----------------------------------------------------------------------


def _messages_and_touches(draft: _NetImages) -> Iterator[tuple[int, int, Message | Touch]]:
    """Yield ``(shard, version after, message or touch)``: objects by id, then lists by key, as in a changeset."""
    for object_id in sorted(draft.objects):
        before, after = draft.objects[object_id]
        if before == after:
            continue
        shard = object_id >> SHARD_SHIFT
        if after is None or not _rose(before, after):
            yield shard, 0, Touch(object_id, WHOLE_OBJECT, _highest(before, after))
        else:
            yield shard, after.version, object_change(ObjectImages(before, after))
    for key in sorted(draft.lists.keys() | draft.edges.keys()):
        message = _list_message(key, draft.lists.get(key), draft.edges.get(key))
        if message is not None:
            yield key.id1 >> SHARD_SHIFT, *message


def _list_message(
    key: ListKey, rows: _Images[ListRow] | None, edge_rows: Mapping[EdgeKey, _Images[Edge]] | None
) -> tuple[int, Message | Touch] | None:
    changed: list[EdgeImages] = []
    if edge_rows is not None:
        changed = [(before, after) for before, after in edge_rows.values() if before != after]
    before, after = rows if rows is not None else (None, None)
    if not changed and before == after:
        return None
    if after is None or not _rose(before, after):
        return 0, Touch(key.id1, key.atype, _highest(before, after))
    if not changed:
        return after.version, ListInvalidation(key.id1, key.atype, after.version)
    if not _is_one_step(before, after) or not _counts_right(before, after, changed):
        return 0, Touch(key.id1, key.atype, _highest(before, after))
    return after.version, list_change(ListImages(key, before, after, changed))


def _rose(before: ObjectRow | ListRow | None, after: ObjectRow | ListRow) -> bool:
    """Return whether the version was given by a leader and is higher than before."""
    floor = NEVER_WRITTEN if before is None else before.version
    return after.version > floor and epoch_of(after.version) >= FIRST_EPOCH


def _is_one_step(before: ListRow | None, after: ListRow) -> bool:
    return counter_of(after.version) == 1 + (0 if before is None else counter_of(before.version))


def _counts_right(before: ListRow | None, after: ListRow, changed: Sequence[EdgeImages]) -> bool:
    """Return whether the count moved with the edges. A leader never writes a count below zero, whatever it found."""
    grown = sum((new is not None) - (old is not None) for old, new in changed)
    return after.count == max(0, (0 if before is None else before.count) + grown)


def _highest(*rows: ObjectRow | ListRow | None) -> int:
    return max((row.version for row in rows if row is not None), default=NEVER_WRITTEN)
