"""The tables of a simulated shard as a move sees them: rows by primary key, whose contents it need not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import astuple

from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import PausedKind
from tao.model.rows import RowChanges
from tao.planning.row_events import RowEvent
from tao.replication.move_statements import CopiedTable, PrimaryKey
from tests.sim.rows import CopiedRows

_KEYS: Final = {
    "objects": ("id",),
    "lists": ("id1", "atype"),
    "edges": ("id1", "atype", "id2"),
    "intents": ("low_id", "high_id"),
    "reserved_times": ("shard",),
    "registers": ("id1", "atype", "id2"),
    "nodes": ("id1", "atype"),
    "jobs": ("id",),
    "paused_jobs": ("shard", "kind"),
}
ROW: Final = "row"
"""The column that has everything but the primary key."""
TABLES: Final = {name: CopiedTable(name, (*key, ROW), key) for name, key in _KEYS.items()}
_OF_SHARDS: Final = ("reserved_times", "paused_jobs")
"""Tables whose keys begin with the shard; the keys of the others begin with an id."""


def tables_of(changes: RowChanges) -> dict[str, dict[PrimaryKey, object]]:
    """Return the rows that changes leave, by table and primary key; None for a row that is deleted."""
    return {
        "objects": {(row.id,): row for row in changes.put_objects},
        "lists": {astuple(key): row for key, row in changes.put_lists.items()},
        "edges": {
            **{astuple(key): edge for key, edge in changes.put_edges.items()},
            **dict.fromkeys(map(astuple, changes.delete_edges)),
        },
        "intents": {
            **{(key.low_id, key.high_id): None for key in changes.delete_intents},
            **{(row.low_id, row.high_id): row for row in changes.put_intents},
        },
        "reserved_times": {(shard,): time for shard, time in changes.put_reserved_times.items()},
        "registers": {
            **dict.fromkeys(map(astuple, changes.delete_edges)),
            **{astuple(key): row for key, row in changes.put_registers.items()},
        },
        "nodes": {astuple(key): row for key, row in changes.put_nodes.items()},
        "jobs": {
            **{(key,): row for key, row in changes.put_jobs.items()},
            **{(key,): None for key in changes.delete_jobs},
        },
        "paused_jobs": {(key.shard, key.kind): paused for key, paused in changes.put_paused_jobs.items()},
    }


def changes_of(tables: CopiedRows) -> RowChanges:
    """Return the changes that write the rows of tables."""
    rows: Mapping[str, Any] = {name: tables.get(name, {}) for name in TABLES}  # Any: each table has rows of its own
    return RowChanges(
        put_objects=[*rows["objects"].values()],
        put_lists={ListKey(*key): row for key, row in rows["lists"].items()},
        put_edges={EdgeKey(*key): row for key, row in rows["edges"].items()},
        put_intents=[*rows["intents"].values()],
        put_reserved_times={shard: row for (shard,), row in rows["reserved_times"].items()},
        put_registers={EdgeKey(*key): row for key, row in rows["registers"].items()},
        put_nodes={ListKey(*key): row for key, row in rows["nodes"].items()},
        put_jobs={job: row for (job,), row in rows["jobs"].items()},
        put_paused_jobs={PausedKind(*key): row for key, row in rows["paused_jobs"].items()},
    )


def events_of(changes: RowChanges) -> list[RowEvent]:
    """Return the row events of all tables, as the binlog has them."""
    events: list[RowEvent] = []
    for table, rows in tables_of(changes).items():
        for key, row in rows.items():
            first = key[0]
            assert isinstance(first, int), "primary keys begin with a number"
            shard = first if table in _OF_SHARDS else first >> SHARD_SHIFT
            image = {**dict(zip(_KEYS[table], key, strict=True)), ROW: row}
            events.append(RowEvent(shard, table, image, None) if row is None else RowEvent(shard, table, None, image))
    return events
