"""The row events that a database's binlog has for a write plan: its rows before and after."""

from __future__ import annotations

from tao.model.edge_states import EdgeRegisters, NodeState
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import ExistingRows, ListRow, ObjectRow, RowChanges
from tao.planning.row_events import Row, RowEvent
from tao.schema.registry import Schema
from tao.schema.types import STATES_TABLE


def object_image(row: ObjectRow) -> Row:
    return {"id": row.id, "otype": row.otype, "version": row.version, "deleted": int(row.deleted), "data": row.data}


def list_image(id1: int, atype: int, row: ListRow) -> Row:
    return {"id1": id1, "atype": atype, "count": row.count, "version": row.version}


def edge_image(key: EdgeKey, edge: Edge, registers: EdgeRegisters | None = None) -> Row:
    image: Row = {
        "id1": key.id1,
        "atype": key.atype,
        "id2": key.id2,
        "time": edge.time,
        "version": 0,
        "data": edge.data,
    }
    if registers is None:
        return image
    times = {"state_us": registers.state_us, "payload_us": registers.payload_us, "changed_unix_s": 0}
    node = {"id2_state": registers.id2_state, "id2_state_us": registers.id2_state_us}
    return {**image, "own_state": registers.own_state, **times, **node}


def node_image(key: ListKey, node: NodeState) -> Row:
    return {"id": key.id1, "atype": key.atype, "state": node.state, "state_us": node.state_us}


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
                None if old_edge is None else edge_image(edge_key, old_edge, before.registers.get(edge_key)),
                edge_image(edge_key, edge, changes.put_registers.get(edge_key)),
            )
        )
    for edge_key, registers in changes.put_registers.items():
        if edge_key not in changes.put_edges:
            stored = before.edges[edge_key]
            images = [edge_image(edge_key, stored, each) for each in (before.registers.get(edge_key), registers)]
            events.append(RowEvent(edge_key.id1 >> SHARD_SHIFT, STATES_TABLE, *images))
    for edge_key in changes.delete_edges:
        table = schema.atype(edge_key.atype).table or "assocs"
        gone = edge_image(edge_key, before.edges[edge_key], before.registers.get(edge_key))
        events.append(RowEvent(edge_key.id1 >> SHARD_SHIFT, table, gone, None))
    for key, node in changes.put_nodes.items():
        old_node = before.nodes.get(key)
        old_image = None if old_node is None else node_image(key, old_node)
        events.append(RowEvent(key.id1 >> SHARD_SHIFT, "node_states", old_image, node_image(key, node)))
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
