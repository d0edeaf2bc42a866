"""A database in a dictionary for planner tests: it hands out exactly the rows asked for, and applies plans strictly."""

from __future__ import annotations

from collections.abc import Sequence

from tao.model.changes import sort_edges
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import make_id
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ListRow, OldestEdges, ShardRow
from tao.model.writes import SettleEdge, Write
from tao.planning.coordination import PlannedWrite, keys_of, shards_of
from tao.planning.node_states import pages_wanted
from tao.planning.retention import oldest_wanted
from tao.planning.write_plan import WritePlan, draft_writes, plan_of
from tao.schema.registry import Schema
from tao.schema.types import AssocType, Field, FieldKind, ObjectType
from tests.rigs.memory_store import page_in

NOW = 1_750_000_000_000
USER, PAGE = 1, 2
FRIEND, LIKES, LIKED_BY, FOLLOWS, NOTE, WIDE, TAGS, TAGGED_IN = 1, 2, 3, 4, 5, 6, 7, 8
_WEIGHT = (Field(1, "weight", FieldKind.INT),)
SCHEMA = Schema(
    (
        ObjectType(USER, "user", (Field(1, "name", FieldKind.STR), Field(2, "age", FieldKind.INT))),
        ObjectType(PAGE, "page", (Field(1, "views", FieldKind.INT),)),
    ),
    (
        AssocType(FRIEND, "friend", _WEIGHT, inverse=FRIEND),
        AssocType(LIKES, "likes", _WEIGHT, inverse=LIKED_BY),
        AssocType(LIKED_BY, "liked_by", _WEIGHT, inverse=LIKES),
        AssocType(FOLLOWS, "follows", _WEIGHT),
        AssocType(NOTE, "note", (Field(1, "text", FieldKind.STR),)),
        AssocType(WIDE, "wide", (Field(1, "text", FieldKind.STR),), max_data_bytes=4000, table="assocs_wide"),
        AssocType(TAGS, "tags", _WEIGHT, inverse=TAGGED_IN),
        AssocType(TAGGED_IN, "tagged_in", _WEIGHT, inverse=TAGS),
    ),
    frozenset(),
    frozenset(),
)


def on_shard(shard: int, sequence: int = 0) -> int:
    return make_id(shard, NOW, sequence)


LOW, HIGH = on_shard(1), on_shard(2)
PAIR = IntentKey(LOW, HIGH)


class StoredRows:
    def __init__(self, epoch: int = 1, full_schema: Schema = SCHEMA) -> None:
        """``full_schema`` has every type that was ever written; plans may be made under a smaller one."""
        self.rows = ExistingRows()
        self.full_schema = full_schema
        self.epoch = epoch

    def plan(
        self, *writes: Write, both_sides: bool | Sequence[bool] = True, now: int = NOW, schema: Schema = SCHEMA
    ) -> WritePlan:
        sides = [both_sides] * len(writes) if isinstance(both_sides, bool) else both_sides
        planned = [PlannedWrite(write, both) for write, both in zip(writes, sides, strict=True)]
        keys = keys_of(planned, schema)
        named = keys.rows_of_edges()
        existing = ExistingRows(
            {key: row for key, row in self.rows.objects.items() if key in keys.objects},
            {key: row for key, row in self.rows.lists.items() if key in keys.lists},
            {key: row for key, row in self.rows.edges.items() if key in named},
            {key: row for key, row in self.rows.intents.items() if key in keys.intents},
            registers={key: row for key, row in self.rows.registers.items() if key in named},
            nodes={key: row for key, row in self.rows.nodes.items() if key in keys.nodes},
            jobs={key: row for key, row in self.rows.jobs.items() if key in keys.jobs},
            paused_jobs=keys.paused_jobs & self.rows.paused_jobs,
        )
        for page in pages_wanted(planned, schema):
            existing.pages[page] = page_in(page, self.rows.edges, self.rows.registers)
        for key, limit in oldest_wanted(existing, planned, schema).items():
            edges = [edge for each, edge in self.rows.edges.items() if ListKey(each.id1, each.atype) == key]
            oldest = tuple(reversed(sort_edges(edges)))
            existing.oldest[key] = OldestEdges(oldest[:limit], len(oldest) < limit)
        shards = {
            shard: ShardRow(shard, "db1", self.epoch, "leader1", 1)
            for each in writes
            for shard in shards_of(each, self.full_schema)
        }
        drafted = draft_writes(existing, planned, schema, now)
        unread = drafted.unread_lists(keys)
        existing.lists.update({key: row for key, row in self.rows.lists.items() if key in unread})
        return plan_of(drafted, shards)

    def run(
        self, *writes: Write, both_sides: bool | Sequence[bool] = True, now: int = NOW, schema: Schema = SCHEMA
    ) -> WritePlan:
        planned = self.plan(*writes, both_sides=both_sides, now=now, schema=schema)
        self.apply(planned)
        return planned

    def apply(self, planned: WritePlan) -> None:
        changes = planned.rows
        for row in changes.put_objects:
            self.rows.objects[row.id] = row
        self.rows.lists.update(changes.put_lists)
        for key in (*changes.put_edges, *changes.delete_edges):
            assert ListKey(key.id1, key.atype) in changes.put_lists
        self.rows.edges.update(changes.put_edges)
        self.rows.registers.update(changes.put_registers)
        self.rows.nodes.update(changes.put_nodes)
        for key in changes.delete_edges:
            del self.rows.edges[key]
            self.rows.registers.pop(key, None)
        assert self.rows.registers.keys() <= self.rows.edges.keys()
        for intent in changes.put_intents:
            self.rows.intents[IntentKey(intent.low_id, intent.high_id)] = intent
        for pair in changes.delete_intents:
            del self.rows.intents[pair]
        self.rows.jobs.update(changes.put_jobs)
        for job_id in changes.delete_jobs:
            del self.rows.jobs[job_id]
        for kind, paused in changes.put_paused_jobs.items():
            (self.rows.paused_jobs.add if paused else self.rows.paused_jobs.remove)(kind)

    def put_edge(self, id1: int, atype: int, id2: int, time: int = 1, data: bytes = b"") -> None:
        self.rows.edges[EdgeKey(id1, atype, id2)] = Edge(id2, time, data)
        row = self.rows.lists.get(ListKey(id1, atype), ListRow(0, 0))
        self.rows.lists[ListKey(id1, atype)] = ListRow(row.count + 1, max(row.version, version(0)) + 1)

    def put_intent(self, *atypes: int, token: int = 7) -> IntentRow:
        self.rows.intents[PAIR] = IntentRow(LOW, HIGH, atypes, token, NOW - 1000)
        return self.rows.intents[PAIR]

    def edge(self, id1: int, atype: int, id2: int) -> Edge | None:
        return self.rows.edges.get(EdgeKey(id1, atype, id2))

    def settle(self, settles: Sequence[SettleEdge]) -> WritePlan:
        return self.run(*settles)


def version(counter: int, epoch: int = 1) -> int:
    return epoch << 48 | counter
