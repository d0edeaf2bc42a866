"""The rows of a simulated database server, and a memory of every content that any version of a key ever had."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from tao.model.changes import sort_edges
from tao.model.edge_block import COMPLETE, PREFIX, encode_block
from tao.model.edge_states import NO_OPERATION, UNSET_NODE, EdgeRegisters, NodeState
from tao.model.graph import ABSENT, Edge, EdgeKey, ListKey, deleted_data, encode_count, encode_object
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.jobs import JobRow, PausedKind
from tao.model.queries import CountQuery, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.model.rows import EdgePage, IntentKey, IntentRow, ListRow, ObjectRow, RowChanges, ShardRow, StateRows
from tao.planning.row_events import RowEvent
from tao.replication.shard_move_plan import CopyState

ListContent = tuple[int, tuple[Edge, ...]]
"""Count, and edges with the newest first."""
ObjectContent = tuple[int, bytes]
"""Type (`ABSENT`: none) and data."""


def join(registers: Sequence[EdgeRegisters]) -> EdgeRegisters:
    """Return the join by its definition: what the product makes of it is what is checked."""
    state_us, own_state = max(((each.state_us, each.own_state) for each in registers), default=(0, 0))
    payload = max(((each.payload_us, each.time, each.data) for each in registers), default=(0, 0, b""))
    node_us, node = max(((each.id2_state_us, each.id2_state) for each in registers), default=(0, 0))
    return EdgeRegisters(own_state, state_us, *payload, node, node_us)


CopiedRows = dict[str, dict[tuple[object, ...], object]]
"""By table and primary key, the rows of a shard (`tests.sim.shard_copies`)."""


@dataclass(slots=True)
class IncomingCopy:
    """A copy of a shard that a move makes: its state, and its tables."""

    state: CopyState
    tables: CopiedRows = field(default_factory=dict)
    is_renamed: bool = False
    """Its tables are the shard's by now, so that it has none."""

    def copied(self) -> IncomingCopy:
        """Return the same in tables of its own."""
        tables = {name: dict(rows) for name, rows in self.tables.items()}
        return IncomingCopy(self.state, tables, self.is_renamed)


@dataclass(slots=True)
class Rows:
    """The tables of one server."""

    shards: dict[int, ShardRow] = field(default_factory=dict)
    objects: dict[int, ObjectRow] = field(default_factory=dict)
    lists: dict[ListKey, ListRow] = field(default_factory=dict)
    edges: dict[ListKey, dict[int, Edge]] = field(default_factory=dict)
    intents: dict[IntentKey, IntentRow] = field(default_factory=dict)
    reserved_times: dict[int, int] = field(default_factory=dict)
    registers: dict[EdgeKey, EdgeRegisters] = field(default_factory=dict)
    nodes: dict[ListKey, NodeState] = field(default_factory=dict)
    jobs: dict[int, JobRow] = field(default_factory=dict)
    paused_jobs: dict[PausedKind, bool] = field(default_factory=dict)
    incoming: dict[int, IncomingCopy] = field(default_factory=dict)
    """By shard, the copy that a move makes here."""
    moved_away: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By shard that has left, the database that it moved to, and when, in seconds since 1970."""

    def write(self, changes: RowChanges) -> None:
        self.objects.update({row.id: row for row in changes.put_objects})
        self.lists.update(changes.put_lists)
        for edge, value in changes.put_edges.items():
            self.edges.setdefault(ListKey(edge.id1, edge.atype), {})[edge.id2] = value
        for edge in changes.delete_edges:
            self.edges.get(ListKey(edge.id1, edge.atype), {}).pop(edge.id2, None)
            self.registers.pop(edge, None)
        self.registers.update(changes.put_registers)
        self.nodes.update(changes.put_nodes)
        for intent in changes.delete_intents:
            self.intents.pop(intent, None)
        self.intents.update({IntentKey(row.low_id, row.high_id): row for row in changes.put_intents})
        self.reserved_times.update(changes.put_reserved_times)
        self.jobs.update(changes.put_jobs)
        for job_id in changes.delete_jobs:
            self.jobs.pop(job_id, None)
        self.paused_jobs.update(changes.put_paused_jobs)

    def version_of(self, key: int, atype: int) -> int:
        """Return the version of an object (``atype`` 0) or a list; 0 if it was never written."""
        if atype:
            return self.lists.get(ListKey(key, atype), ListRow(0, 0)).version
        found = self.objects.get(key)
        return found.version if found else 0

    def take_over(self, other: Rows) -> None:
        """Replace the contents of these tables by those of the others."""
        self.shards = dict(other.shards)
        self.objects = dict(other.objects)
        self.lists = dict(other.lists)
        self.edges = {key: dict(edges) for key, edges in other.edges.items()}
        self.intents = dict(other.intents)
        self.reserved_times = dict(other.reserved_times)
        self.registers = dict(other.registers)
        self.nodes = dict(other.nodes)
        self.jobs = dict(other.jobs)
        self.paused_jobs = dict(other.paused_jobs)
        self.incoming = {shard: copy.copied() for shard, copy in other.incoming.items()}
        self.moved_away = dict(other.moved_away)

    def of_shard(self, shard: int) -> RowChanges:
        """Return everything of a shard, as the changes that write it."""

        def here(key: int) -> bool:
            return key >> SHARD_SHIFT == shard

        return RowChanges(
            put_objects=[row for key, row in self.objects.items() if here(key)],
            put_lists={key: row for key, row in self.lists.items() if here(key.id1)},
            put_edges={
                EdgeKey(key.id1, key.atype, id2): edge
                for key, edges in self.edges.items()
                if here(key.id1)
                for id2, edge in edges.items()
            },
            put_intents=[row for key, row in self.intents.items() if here(key.low_id)],
            put_reserved_times={key: time for key, time in self.reserved_times.items() if key == shard},
            put_registers={key: row for key, row in self.registers.items() if here(key.id1)},
            put_nodes={key: row for key, row in self.nodes.items() if here(key.id1)},
            put_jobs={key: row for key, row in self.jobs.items() if here(key)},
            put_paused_jobs={key: paused for key, paused in self.paused_jobs.items() if key.shard == shard},
        )

    def forget(self, shard: int) -> None:
        """Drop a shard."""
        gone = self.of_shard(shard)
        for table, keys in (
            (self.objects, [row.id for row in gone.put_objects]),
            (self.lists, gone.put_lists),
            (self.edges, {ListKey(key.id1, key.atype) for key in gone.put_edges}),
            (self.intents, [IntentKey(row.low_id, row.high_id) for row in gone.put_intents]),
            (self.reserved_times, gone.put_reserved_times),
            (self.registers, gone.put_registers),
            (self.nodes, gone.put_nodes),
            (self.jobs, gone.put_jobs),
            (self.paused_jobs, gone.put_paused_jobs),
        ):
            for key in keys:
                del cast(dict[object, object], table)[key]
        self.shards.pop(shard, None)
        self.moved_away.pop(shard, None)

    def edge(self, key: EdgeKey) -> Edge | None:
        return self.edges.get(ListKey(key.id1, key.atype), {}).get(key.id2)

    def page(self, page: EdgePage) -> StateRows:
        """Return the rows of a page of edges with states."""
        edges: dict[EdgeKey, Edge] = {}
        for atype in page.atypes:
            of_list = self.edges.get(ListKey(page.id1, atype), {})
            id2s = sorted(id2 for id2 in of_list if id2 > page.after)[: page.limit]
            edges.update((EdgeKey(page.id1, atype, id2), of_list[id2]) for id2 in id2s)
        return StateRows(edges, {key: self.registers.get(key, NO_OPERATION) for key in edges})

    def joined(self, id1: int, atypes: Iterable[int], id2: int) -> EdgeRegisters:
        """Return the join of the registers that these types' lists have of an edge."""
        return join([self.registers.get(EdgeKey(id1, atype, id2), NO_OPERATION) for atype in atypes])

    def sorted_edges(self, key: ListKey) -> list[Edge]:
        return sort_edges(self.edges.get(key, {}).values())

    def value(self, query: Query) -> bytes:
        """Return the encoded answer of a query now."""
        if isinstance(query, ObjectQuery):
            row = self.objects.get(query.id)
            if row is None or row.deleted:
                return encode_object(row.version if row else 0, ABSENT, deleted_data(row.otype) if row else b"")
            return encode_object(row.version, row.otype, row.data)
        key = ListKey(query.id1, query.atype)
        listed = self.lists.get(key, ListRow(0, 0))
        if isinstance(query, CountQuery):
            return encode_count(listed.version, listed.count)
        part, flags = part_of(query, listed.count, self.sorted_edges(key))
        return encode_block(listed.version, listed.count, part, flags)


def part_of(query: Query, count: int, edges: list[Edge]) -> tuple[list[Edge], int]:
    """Return the part of a list that answers the query, and the flags of its block."""
    match query:
        case RangeQuery(pos=pos, limit=limit):
            part = edges[pos : pos + limit]
            return part, PREFIX | (COMPLETE if len(part) == count else 0) if pos == 0 else 0
        case TimeRangeQuery(high=high, low=low, limit=limit, pos=pos):
            below = (high, query.below_id2 or MAX_ID + 1)
            within = [edge for edge in edges if edge.time >= low and (edge.time, edge.id2) < below]
            return within[pos : pos + limit], 0
        case CountQuery() | ObjectQuery():
            raise TypeError("has no edges")
        case _:
            return [each for each in edges if each.id2 in query.id2s and query.high >= each.time >= query.low], 0


Statement = Callable[[Rows], None]
"""A statement that changes tables, or rows that servers do not read."""


class Logged(msgspec.Struct):
    """One transaction of a binlog. ``statement``: what it does beside its changes of rows. ``invalid``: shards that it
    changes in a way that no row events describe."""

    gtid: str
    events: list[RowEvent]
    changes: RowChanges
    shards: dict[int, ShardRow]
    unix_ms: int
    statement: Statement | None = None
    invalid: frozenset[int] = frozenset()


class Past:
    """Every version of every key with its contents: one content, unless a foreign write bypassed the product."""

    def __init__(self) -> None:
        self.lists: Final[dict[ListKey, dict[int, list[ListContent]]]] = defaultdict(dict)
        self.objects: Final[dict[int, dict[int, list[ObjectContent]]]] = defaultdict(dict)
        self.foreign: Final[set[int | ListKey]] = set()
        """Keys with a foreign write. Until the product has received that write, its own changes are right and their
        result in a cache is not, and both have the same version."""
        self.lost: Final[dict[tuple[int, int], dict[int, int]]] = defaultdict(dict)
        """Object (with 0) or list → lost version → the version left in its place after the loss of a master."""
        self.committed: Final[dict[tuple[int, int], list[tuple[float, int]]]] = defaultdict(list)
        """Object (with 0) or list → (time in seconds, version reached then), in the order of time."""
        self.lost_jobs: Final[set[int]] = set()
        """Jobs in lost transactions."""
        self.lost_nodes: Final[dict[ListKey, NodeState]] = {}
        """Node → the newest of its operations in lost transactions."""
        self.lost_pairs: Final[set[IntentKey]] = set()
        """Pairs of the edges in lost transactions: what other databases had written about them was not lost."""
        self.repaired_pairs: Final[set[IntentKey]] = set()
        """Those of them that were repaired since."""

    def lose(self, left: Rows, gone: Iterable[Logged]) -> None:
        """Record that a promotion has left these rows, without these transactions."""
        for key, of_object in self.objects.items():
            row = left.objects.get(key)
            self._lose((key, 0), of_object, row.version if row else 0)
        for list_key, of_list in self.lists.items():
            self._lose((list_key.id1, list_key.atype), of_list, left.lists.get(list_key, ListRow(0, 0)).version)
        for logged in gone:
            changes = logged.changes
            edges = (*changes.put_edges, *changes.delete_edges, *changes.put_registers)
            self.lost_pairs.update(IntentKey(*sorted((edge.id1, edge.id2))) for edge in edges)
            self.lost_pairs.update(IntentKey(row.low_id, row.high_id) for row in changes.put_intents)
            self.lost_pairs.update(changes.delete_intents)
            self.repaired_pairs.clear()
            self.lost_jobs.update(changes.put_jobs)
            for node, state in changes.put_nodes.items():
                self.lost_nodes[node] = max(state, self.lost_nodes.get(node, UNSET_NODE))

    def _lose(self, key: tuple[int, int], versions: Iterable[int], left: int) -> None:
        known = self.lost[key]
        known.update({version: left for version in versions if version > left and version not in known})

    def hand_over(self, other: Past, shard: int) -> None:
        """Hand the history of a shard to the database which holds it from now on. What this one loses later is not of
        that shard."""
        for list_key in [key for key in self.lists if key.id1 >> SHARD_SHIFT == shard]:
            other.lists[list_key] = self.lists.pop(list_key)
        for object_id in [key for key in self.objects if key >> SHARD_SHIFT == shard]:
            other.objects[object_id] = self.objects.pop(object_id)
        for place in [key for key in self.lost if key[0] >> SHARD_SHIFT == shard]:
            other.lost[place] = self.lost.pop(place)
        for place in [key for key in self.committed if key[0] >> SHARD_SHIFT == shard]:
            other.committed[place] = self.committed.pop(place)
        foreign = {key for key in self.foreign if (key if isinstance(key, int) else key.id1) >> SHARD_SHIFT == shard}
        other.foreign.update(foreign)
        self.foreign.difference_update(foreign)
        other.lost_pairs.update(self.lost_pairs)
        other.lost_jobs.update(self.lost_jobs)
        other.lost_nodes.update(self.lost_nodes)

    def least(self, key: int, atype: int, version: int) -> int:
        """Return the version that a reader who knows ``version`` may demand: a lower one if it is lost."""
        known = self.lost.get((key, atype), {})
        while version in known:
            version = known[version]
        return version

    def version_at(self, key: int, atype: int, when: float) -> int:
        """Return the version that a reader who knows all commits until ``when`` may demand."""
        known = self.committed.get((key, atype), ())
        newest = max((version for at, version in known if at <= when), default=0)
        return self.least(key, atype, newest)

    def keep(self, rows: Rows, objects: Iterable[int], lists: Iterable[ListKey], now: float) -> None:
        """Record the committed contents of these objects and lists."""
        for key in objects:
            row = rows.objects[key]
            content = (ABSENT, deleted_data(row.otype)) if row.deleted else (row.otype, row.data)
            contents = self.objects[key].setdefault(row.version, [])
            self.lost[key, 0].pop(row.version, None)
            self.committed[key, 0].append((now, row.version))
            if content not in contents:
                contents.append(content)
        for list_key in lists:
            listed = rows.lists.get(list_key, ListRow(0, 0))
            edges = (listed.count, tuple(rows.sorted_edges(list_key)))
            known = self.lists[list_key].setdefault(listed.version, [])
            self.lost[list_key.id1, list_key.atype].pop(listed.version, None)
            self.committed[list_key.id1, list_key.atype].append((now, listed.version))
            if edges not in known:
                known.append(edges)
