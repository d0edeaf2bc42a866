"""A row of a replica is wrong or only late, over two databases that the tests make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from tao.admin.replica_verification import ReplicasReport, compare_replicas
from tao.model.errors import Unavailable
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import ListRow, ObjectRow
from tao.model.topology import DatabaseServer, Topology
from tao.routing.routes import Routes
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.storage.scans import Scans
from tests.rigs.leader_rig import FRIEND, NOTE, SCHEMA
from tests.unit.leader.test_forwarded_writes import topology


@dataclass
class Tables:
    """A region's databases: shard 0 has rows, other shards are empty. Scanned as `Scans` does."""

    objects: dict[int, ObjectRow] = field(default_factory=dict)
    lists: dict[ListKey, ListRow] = field(default_factory=dict)
    edges: dict[str, dict[EdgeKey, Edge]] = field(default_factory=dict)
    away: bool = False
    on_scan: Callable[[], None] = lambda: None

    async def scan_objects(self, shard: int, after_id: int, limit: int) -> list[ObjectRow]:
        self._asked()
        return [self.objects[key] for key in sorted(self.objects) if key > after_id and shard == 0][:limit]

    async def scan_lists(self, shard: int, after: ListKey, limit: int) -> list[tuple[ListKey, ListRow]]:
        self._asked()
        return [(key, self.lists[key]) for key in sorted(self.lists) if key > after and shard == 0][:limit]

    async def scan_edges(self, shard: int, table: str, after: EdgeKey, limit: int) -> list[tuple[EdgeKey, Edge]]:
        self._asked()
        edges = self.edges.get(table, {})
        return [(key, edges[key]) for key in sorted(edges) if key > after and shard == 0][:limit]

    def _asked(self) -> None:
        if self.away:
            raise Unavailable("the replica is away")
        self.on_scan()


def filled() -> Tables:
    """Objects 1 … 9, a list each, and edges in two tables."""
    note_table = SCHEMA.atype(NOTE).table
    assert note_table is not None
    return Tables(
        objects={number: ObjectRow(number, 1, 1, False, b"") for number in range(1, 10)},
        lists={ListKey(number, FRIEND): ListRow(1, 1) for number in range(1, 10)},
        edges={
            DEFAULT_EDGE_TABLE: {EdgeKey(number, FRIEND, 5): Edge(5, number) for number in range(1, 10)},
            note_table: {EdgeKey(number, NOTE, 5): Edge(5, number) for number in range(1, 10)},
        },
    )


TWO_REGIONS = topology(shard_1_in="west")


async def compare(
    master: Tables, replica: Tables, page_rows: int = 4, *, topology: Topology = TWO_REGIONS, away: str = ""
) -> ReplicasReport:
    """Shard 0 is mastered in east; the replica of shard 1, which is empty, is there. ``away``: a server that does not
    answer."""

    def scans_at(name: str) -> Scans:
        return cast(Scans, Tables(away=True) if name == away else master if name.endswith("east") else replica)

    return await compare_replicas(
        Routes(topology),
        SCHEMA,
        cast(Scans, master),
        scans_at,
        recheck_seconds=0.0,
        page_rows=page_rows,
    )


async def test_equal_replicas_are_clean_at_any_page_size() -> None:
    for page_rows in (1, 3, 4, 9, 100):
        report = await compare(filled(), filled(), page_rows)
        assert report.clean
        assert [(line.server, line.region, line.rows) for line in report.servers] == [
            ("db-0-west", "west", 36),
            ("db-1-east", "east", 0),
        ]


async def test_a_row_that_differs_or_is_missing_is_found_anywhere_on_a_page() -> None:
    for number in range(1, 10):
        master, replica = filled(), filled()
        replica.objects[number] = ObjectRow(number, 1, 1, False, b"other")
        del replica.lists[ListKey(number, FRIEND)]
        del master.edges[DEFAULT_EDGE_TABLE][EdgeKey(number, FRIEND, 5)]
        replica.edges[DEFAULT_EDGE_TABLE][EdgeKey(number, FRIEND, 6)] = Edge(6, 1)
        report = await compare(master, replica)
        assert not report.clean
        assert report.servers[0].wrong == 4
        assert {(found.table, found.key, found.at_master, found.at_replica) for found in report.findings} == {
            ("objects", (number,), True, True),
            ("assoc_lists", (number, FRIEND), True, False),
            (DEFAULT_EDGE_TABLE, (number, FRIEND, 5), False, True),
            (DEFAULT_EDGE_TABLE, (number, FRIEND, 6), False, True),
        }
        assert {(found.server, found.shard) for found in report.findings} == {("db-0-west", 0)}


async def test_a_row_that_is_equal_or_newer_at_the_second_look_is_in_flight() -> None:
    master, replica = filled(), filled()
    master.objects[3] = ObjectRow(3, 1, 3, False, b"newest")
    master.objects[4] = ObjectRow(4, 1, 2, False, b"new")
    scans = 0

    def catch_up() -> None:
        nonlocal scans
        scans += 1
        if scans == 2:
            replica.objects[3] = ObjectRow(3, 1, 2, False, b"newer")
            replica.objects[4] = master.objects[4]

    replica.on_scan = catch_up
    report = await compare(master, replica)
    assert report.clean
    assert report.servers[0].in_flight == 2


async def test_a_replica_that_does_not_answer_is_not_clean() -> None:
    report = await compare(filled(), Tables(away=True))
    assert [line.error for line in report.servers] == ["the replica is away", ""]
    assert not report.clean


async def test_a_standby_is_compared_with_its_master_wherever_it_is_and_named_when_it_does_not_answer() -> None:
    first, second = TWO_REGIONS.databases
    standbys = {region: DatabaseServer(name=f"db-0-{region}b") for region in ("east", "west")}
    with_standbys = msgspec.structs.replace(
        TWO_REGIONS, databases=(msgspec.structs.replace(first, standbys=standbys), second)
    )
    master, late = filled(), filled()
    late.objects[3] = ObjectRow(3, 1, 1, False, b"other")
    report = await compare(master, late, topology=with_standbys, away="db-0-westb")
    assert [(line.server, line.region, line.wrong, line.error) for line in report.servers] == [
        ("db-0-west", "west", 1, ""),
        ("db-0-eastb", "east/standby", 1, ""),
        ("db-0-westb", "west/standby", 0, "the replica is away"),
        ("db-1-east", "east", 0, ""),
    ]
    assert [(found.server, found.key) for found in report.findings] == [("db-0-west", (3,)), ("db-0-eastb", (3,))]
    assert not report.clean
