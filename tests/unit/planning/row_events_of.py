"""The row events that a database's binlog has for a write plan: its rows before and after."""

from __future__ import annotations

from tao.model.graph import Edge, EdgeKey
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import ExistingRows, ListRow, ObjectRow, RowChanges
from tao.planning.row_events import Row, RowEvent
from tao.schema.registry import Schema


def object_image(row: ObjectRow) -> Row:
    return {"id": row.id, "otype": row.otype, "version": row.version, "deleted": int(row.deleted), "data": row.data}


def list_image(id1: int, atype: int, row: ListRow) -> Row:
    return {"id1": id1, "atype": atype, "count": row.count, "version": row.version}


def edge_image(key: EdgeKey, edge: Edge) -> Row:
    return {
        "id1": key.id1,
        "atype": key.atype,
        "id2": key.id2,
        "time": edge.time,
        "version": 0,
        "data": edge.data,
    }


def row_events_of(before: ExistingRows, changes: RowChanges, schema: Schema) -> list[RowEvent]:
    events: list[RowEvent] = []
    for row in changes.put_objects:
        old = before.objects.get(row.id)
        old_image = None if old is None else object_image(old)
        events.append(RowEvent(row.id >> SHARD_SHIFT, "objects", old_image, object_image(row)))
    for edge_key, edge in changes.put_edges.items():
        old_edge = before.edges.get(edge_key)
        events.append(
            RowEvent(
                edge_key.id1 >> SHARD_SHIFT,
                schema.atype(edge_key.atype).table or "assocs",
                None if old_edge is None else edge_image(edge_key, old_edge),
                edge_image(edge_key, edge),
            )
        )
    for edge_key in changes.delete_edges:
        table = schema.atype(edge_key.atype).table or "assocs"
        gone = edge_image(edge_key, before.edges[edge_key])
        events.append(RowEvent(edge_key.id1 >> SHARD_SHIFT, table, gone, None))
    for key, list_row in changes.put_lists.items():
        old_list = before.lists.get(key)
        events.append(
            RowEvent(
                key.id1 >> SHARD_SHIFT,
                "assoc_lists",
                None if old_list is None else list_image(key.id1, key.atype, old_list),
                list_image(key.id1, key.atype, list_row),
            )
        )
    return events
