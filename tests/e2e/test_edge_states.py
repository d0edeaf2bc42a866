"""Edges with states on real databases: two regions, ends on two masters, rows changed by hand, repair, load, export."""

from __future__ import annotations

import asyncio
import csv
import io
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tao.admin.access import Access, ReaderLogin
from tao.admin.connection import ClusterTarget
from tao.admin.edge_registers import UnequalEnds, find_unequal_ends
from tao.admin.export import export_edges, export_nodes
from tao.admin.load.pipeline import PipelineSettings
from tao.admin.load.session import EdgeInput, LoadInput, NodeInput, load_edges, load_nodes
from tao.admin.repair import find_broken_pairs, repair_pairs
from tao.client import EdgeState, Graph, OperationAhead, OperationTooOld, SomeFailed, connect
from tao.devcluster.layout import Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.ids import SHARD_SHIFT
from tao.schema.registry import Schema, load_schema
from tests.e2e.cluster_access import PATIENT
from tests.e2e.region_access import Regions, plain, running_regions, until
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SHAPE = Shape(regions=2, tiers=1, followers=1, leaders=2, databases=2, mixed_mastership=True, shards=4, workers=1)
LABELS = ("normal", "negative", "archived", "removed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    async with running_regions(tmp_path_factory.mktemp("regions"), SHAPE) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def graphs(regions: Regions) -> AsyncIterator[tuple[Graph, Graph]]:
    async with (
        connect(regions.target, region="east", settings=PATIENT) as east,
        connect(regions.target, region="west", settings=PATIENT) as west,
    ):
        yield east, west


async def ids_on(graph: Graph, shard: int, count: int = 1) -> list[int]:
    return await graph.reserve_ids(count, shard=shard)


async def lists_of(graph: Graph, user: int, atype: str = "subscribes") -> dict[str, list[tuple[int, int]]]:
    """Return the edges of each state, and check each count."""
    found = {label: plain(await graph.assoc_range(user, atype, 0, 50, state=label)) for label in LABELS}
    counts = await graph.assoc_count_many([(user, atype, label) for label in LABELS])
    assert counts == [len(edges) for edges in found.values()]
    return {label: edges for label, edges in found.items() if edges}


async def shown(graphs: tuple[Graph, Graph], user: int, atype: str, lists: dict[str, list[tuple[int, int]]]) -> None:
    for graph in graphs:

        async def is_shown(graph: Graph = graph) -> bool:
            try:
                return await lists_of(graph, user, atype) == lists
            except AssertionError:
                return False  # lists and counts are read at different moments

        await until(is_shown, f"{lists} are not shown")


async def test_archived_edges_are_restored_at_their_place_at_both_ends_in_every_region(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    east, west = graphs
    for far_shard in (0, 1, 2, 3):
        (user,) = await ids_on(east, 0)
        pages = await ids_on(east, far_shard, 3)
        for time, page in enumerate(pages, start=1):
            assert (await east.assoc_add(user, "subscribes", page, time)).is_new
        written = await east.assoc_archive(user, "subscribes", pages[1])
        assert (written.existed, written.state, written.superseded) == (True, "archived", False)
        ends = [(pages[2], 3), (pages[0], 1)]
        assert await lists_of(east, user) == {"normal": ends, "archived": [(pages[1], 2)]}
        await shown(graphs, user, "subscribes", {"normal": ends, "archived": [(pages[1], 2)]})
        await shown(graphs, pages[1], "subscribers", {"archived": [(user, 2)]})
        await west.assoc_restore(pages[1], "subscribers", user)
        await west.assoc_delete(pages[0], "subscribers", user)
        await shown(graphs, user, "subscribes", {"normal": [(pages[2], 3), (pages[1], 2)], "removed": [(pages[0], 1)]})
        await shown(graphs, pages[0], "subscribers", {"removed": [(user, 1)]})
    await regions.assert_converges()


async def test_operations_in_any_order_from_both_regions_end_the_same(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    east = graphs[0]
    users, pages = await ids_on(east, 1, 2), await ids_on(east, 2, 2)
    (probe,) = await ids_on(east, 1)
    await east.assoc_archive(probe, "subscribes", pages[0])
    known = await east.assoc_state(probe, "subscribes", pages[0])
    assert known is not None
    now_us = known.state_us  # the leader's clock
    rng = random.Random(11)
    operations: list[tuple[int, str, int, str, int, int | None]] = []
    for at in range(1, 121):
        edge, time = (rng.choice(users), "subscribes", rng.choice(pages)), rng.choice([None, at])
        operations.append((*edge, rng.choice(LABELS), now_us - 1000 + at, time))
    expected: dict[tuple[int, int], tuple[str, int]] = {}
    for one, _, two, state, _, time in operations:
        before = expected.get((one, two), ("", 0))
        expected[one, two] = (state, before[1] if time is None else time)
    shuffled = rng.sample([*operations, *operations], 2 * len(operations))
    for graph, some in ((graphs[0], shuffled[::2]), (graphs[1], shuffled[1::2])):
        left = some
        while left:
            try:
                await graph.assoc_set_state_many(left)
                left = []
            except SomeFailed as failed:  # a hot edge: the operations may be repeated
                left = [left[index] for index in failed.errors]
    for (one, two), (state, time) in expected.items():
        place = state if time else "removed"
        assert plain(await east.assoc_get(one, "subscribes", [two], state=place, critical=True)) == [(two, time)]
        assert plain(await east.assoc_get(two, "subscribers", [one], state=place, critical=True)) == [(one, time)]
        near = await east.assoc_state(one, "subscribes", two)
        assert near == await east.assoc_state(two, "subscribers", one)
        assert near is not None
        assert (near.own, near.effective) == (state, place)
    await regions.assert_converges()


async def test_times_are_bounded_and_an_older_operation_is_superseded(graphs: tuple[Graph, Graph]) -> None:
    east = graphs[0]
    (user,), (page,) = await ids_on(east, 0), await ids_on(east, 1)
    assert await east.assoc_state(user, "subscribes", page) is None
    await east.assoc_add(user, "subscribes", page, 5)
    state = await east.assoc_state(user, "subscribes", page)
    assert state is not None
    assert state == EdgeState("normal", "normal", state.state_us, state.state_us)
    older = await east.assoc_delete(user, "subscribes", page, at=state.state_us - 1)
    assert (older.superseded, older.state) == (True, "normal")
    with pytest.raises(OperationAhead):
        await east.assoc_archive(user, "subscribes", page, at=state.state_us + 3_600_000_000)
    with pytest.raises(OperationTooOld):
        await east.assoc_archive(user, "subscribes", page, at=state.state_us - 31 * 24 * 3_600_000_000)


async def test_a_node_is_archived_and_restored_as_it_was_in_every_region(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    east, west = graphs
    (user,) = await ids_on(east, 0)
    others = [each for shard in range(4) for each in await ids_on(east, shard, 3)]
    await east.assoc_add_many([(user, "subscribes", page, time) for time, page in enumerate(others, 1)])
    await east.assoc_add(others[0], "subscribes", user, 7)
    await east.assoc_archive(user, "subscribes", others[2])
    await east.assoc_set_state(user, "subscribes", others[3], "negative")
    await east.assoc_delete(user, "subscribes", others[4])
    before = await lists_of(east, user)
    job = await west.node_set_state(user, "archived")
    await east.assoc_add(user, "subscribes", others[5], 99)  # at once, and where the job may be now
    await job.wait(timeout=PATIENT_SECONDS)
    assert (job.state, job.edges) == ("done", len(others) + 1)
    hidden = {state: edges for state, edges in (await lists_of(east, user)).items() if state != "archived"}
    assert hidden == {"removed": before["removed"]}
    await shown(graphs, user, "subscribers", {"archived": [(others[0], 7)]})
    await shown(graphs, others[1], "subscribers", {"archived": [(user, 2)]})
    state = await west.assoc_state(user, "subscribes", others[3])
    assert state is not None
    assert (state.own, state.effective) == ("negative", "archived")
    # The node at the other end is hidden, too: restoring one of them does not show the edge.
    await (await east.node_set_state(others[1], "removed")).wait(timeout=PATIENT_SECONDS)
    await (await east.node_set_state(user, "normal")).wait(timeout=PATIENT_SECONDS)
    before["normal"] = sorted([*before["normal"], (others[5], 99)], key=lambda edge: -edge[1])
    before["normal"].remove((others[5], 6))
    before["normal"].remove((others[1], 2))
    before["removed"].append((others[1], 2))
    await shown(graphs, user, "subscribes", before)
    await shown(graphs, others[1], "subscribers", {"removed": [(user, 2)]})
    await shown(graphs, others[0], "subscribes", {"normal": [(user, 7)]})
    await regions.assert_converges()


async def test_five_hundred_adds_fifty_removes_and_ten_bulk_operations_leave_four_hundred_fifty_archived(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    """The scenario of FlockDB's regression test of its optimistic lock: everything at once, and in any order."""
    east = graphs[0]
    (user,) = await ids_on(east, 1)
    pages = [each for shard in range(4) for each in await ids_on(east, shard, 125)]
    (probe,) = await ids_on(east, 1)
    await east.assoc_archive(probe, "subscribes", pages[0])
    known = await east.assoc_state(probe, "subscribes", pages[0])
    assert known is not None
    now_us = known.state_us

    async def write(state: str, some: list[int], at: int) -> None:
        left = [(user, "subscribes", page, state, at, at if state == "normal" else None) for page in some]
        while left:
            try:
                await east.assoc_set_state_many(left)
                left = []
            except SomeFailed as failed:
                left = [left[index] for index in failed.errors]

    states = ["archived" if number % 2 else "normal" for number in range(10)]
    jobs, *_ = await asyncio.gather(
        asyncio.gather(*(east.node_set_state(user, state, at=now_us + at) for at, state in enumerate(states))),
        write("normal", pages, now_us + 1),
        write("removed", pages[:50], now_us + 2),
    )
    for job in jobs:
        assert (await job.wait(timeout=2 * PATIENT_SECONDS)).done
    counts = await east.assoc_count_many([(user, "subscribes", label) for label in LABELS])
    assert counts == [0, 0, 450, 50]
    seen = [edge.id2 async for edge in east.assoc_iter(user, "subscribes", state="archived")]
    assert sorted(seen) == pages[50:]
    async with regions.access() as access:
        schema = load_schema(regions.cluster.schema_path.read_text(), "schema.yaml")
        assert [pair async for pair in _unequal(access, schema)] == []


async def _unequal(access: Access, schema: Schema) -> AsyncIterator[UnequalEnds]:
    async for found in find_unequal_ends(
        access.routes, schema, access.scans, recheck_seconds=0.5, on_progress=lambda *_: None
    ):
        yield found


async def test_repair_brings_an_end_the_state_of_the_node_at_the_other(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    east, routes = graphs[0], regions.routes
    (user,), (page,) = await ids_on(east, 2), await ids_on(east, 3)
    await east.assoc_add(user, "subscribes", page, 1)
    number, inverse = east.schema.atype("subscribes").number, east.schema.atype("subscribers").number
    for shard, node, atype in ((2, user, number), (3, page, inverse)):
        server = routes.database_server(shard, routes.master_region(shard)).name
        await regions.sql(server, f"INSERT INTO node_states VALUES ({node}, {atype}, 2, 5)", shard=shard)
    async with regions.access() as access:
        schema = load_schema(regions.cluster.schema_path.read_text(), "schema.yaml")
        (pair,) = await find_broken_pairs(access.routes, schema, access.scans, access.store)
        (result,) = await repair_pairs(access.routes, access.links, [pair])
        assert (result.repaired, result.error) == (1, "")
        assert [pair async for pair in _unequal(access, schema)] == []
    await shown(graphs, user, "subscribes", {"archived": [(page, 1)]})
    await shown(graphs, page, "subscribers", {"archived": [(user, 1)]})


async def test_rows_changed_by_hand_are_shown_lose_against_operations_and_are_joined_by_repair(
    regions: Regions, graphs: tuple[Graph, Graph]
) -> None:
    east = graphs[0]
    routes = regions.routes
    (user,), pages = await ids_on(east, 0), await ids_on(east, 1, 2)
    await east.assoc_add(user, "subscribes", pages[0], 1)
    await shown(graphs, user, "subscribes", {"normal": [(pages[0], 1)]})

    async def by_hand(shard: int, statement: str) -> None:
        await regions.sql(routes.database_server(shard, routes.master_region(shard)).name, statement, shard=shard)

    archived = east.schema.atype("subscribes").states[2]
    columns = "(id1, atype, id2, time, version, data)"
    await by_hand(0, f"INSERT INTO assocs_states {columns} VALUES ({user}, {archived}, {pages[1]}, 9, 0, '')")
    await shown(graphs, user, "subscribes", {"normal": [(pages[0], 1)], "archived": [(pages[1], 9)]})
    await east.assoc_restore(user, "subscribes", pages[1])
    await shown(graphs, pages[1], "subscribers", {"normal": [(user, 9)]})

    # One end has lost its newest operation: the registers differ, and nothing else.
    await by_hand(0, f"UPDATE assocs_states SET state_us = state_us - 5 WHERE id1 = {user} AND id2 = {pages[0]}")
    assert user >> SHARD_SHIFT == 0
    async with regions.access() as access:
        schema = load_schema(regions.cluster.schema_path.read_text(), "schema.yaml")
        (pair,) = await find_broken_pairs(access.routes, schema, access.scans, access.store)
        assert (pair.joins, pair.deletes, pair.repair) == (True, False, "joined at both ids")
        (result,) = await repair_pairs(access.routes, access.links, [pair])
        assert (result.repaired, result.error) == (1, "")
    ends = [(user, "subscribes", pages[0]), (pages[0], "subscribers", user)]
    near, far = [await east.assoc_state(*end) for end in ends]
    assert near == far
    await regions.assert_converges()


async def test_edges_are_exported_and_loaded_with_their_states(
    regions: Regions, graphs: tuple[Graph, Graph], tmp_path: Path
) -> None:
    east = graphs[0]
    (user,), pages = await ids_on(east, 3), await ids_on(east, 2, 3)
    file = tmp_path / "edges.csv"
    rows = [(user, page, 7, state) for page, state in zip(pages, ("normal", "archived", "negative"), strict=True)]
    text = "id1,id2,time,state\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows)
    file.write_text(text + f"{user},{pages[0]},7,gone\n")
    edges = EdgeInput("subscribes", ("id1", "id2"), time="time", state="state")
    target = ClusterTarget(regions.target, region="east")
    given = LoadInput(file, raw_ids=True)
    summary = await load_edges(target, given, edges, PipelineSettings(), lambda *_: None)
    assert (summary.loaded, summary.rejected) == (3, 1)
    await shown(graphs, user, "subscribes", {state: [(page, time)] for _, page, time, state in rows})
    reader = service_accounts(regions.cluster.record.passwords).reader
    schema = load_schema(regions.cluster.schema_path.read_text(), "schema.yaml")
    login = ReaderLogin(regions.topology, schema, reader.user, reader.password)
    out = io.StringIO()
    await asyncio.wait_for(export_edges(out, login, "subscribes", ("id1", "id2"), None), PATIENT_SECONDS)
    exported = [row for row in csv.DictReader(io.StringIO(out.getvalue())) if row["id1"] == str(user)]
    assert sorted((int(each["id2"]), each["time"], each["state"]) for each in exported) == sorted(
        (page, "7", state) for _, page, _, state in rows
    )


async def test_states_of_nodes_and_what_they_hide_survive_an_export_and_a_load(
    regions: Regions, graphs: tuple[Graph, Graph], tmp_path: Path
) -> None:
    east = graphs[0]
    (user,), pages = await ids_on(east, 3), await ids_on(east, 2, 3)
    await east.assoc_add_many([(user, "subscribes", page, 7) for page in pages])
    await east.assoc_archive(user, "subscribes", pages[1])
    await east.assoc_delete(user, "subscribes", pages[2])
    await (await east.node_set_state(user, "archived", ["subscribes"])).wait(timeout=PATIENT_SECONDS)
    reader = service_accounts(regions.cluster.record.passwords).reader
    schema = load_schema(regions.cluster.schema_path.read_text(), "schema.yaml")
    login = ReaderLogin(regions.topology, schema, reader.user, reader.password)
    edges, nodes = io.StringIO(), io.StringIO()
    await asyncio.wait_for(export_edges(edges, login, "subscribes", ("id1", "id2"), None), PATIENT_SECONDS)
    await asyncio.wait_for(export_nodes(nodes, login, "subscribes", "id", None), PATIENT_SECONDS)
    exported = [row for row in csv.DictReader(io.StringIO(edges.getvalue())) if row["id1"] == str(user)]
    assert {(int(each["id2"]), each["state"]) for each in exported} == {(pages[0], "normal"), (pages[1], "archived")}
    assert f"{user},archived" in nodes.getvalue().splitlines()

    (other,) = await ids_on(east, 0)
    lines = [line.replace(str(user), str(other)) for line in edges.getvalue().splitlines() if str(user) in line]
    (tmp_path / "edges.csv").write_text("\n".join(["id1,id2,time,state", *lines, ""]))
    (tmp_path / "nodes.csv").write_text(f"id,state\n{other},archived\n{other},negative\nx,archived\n")
    target = ClusterTarget(regions.target, region="east")
    given = EdgeInput("subscribes", ("id1", "id2"), time="time", state="state")
    loaded = await load_edges(
        target, LoadInput(tmp_path / "edges.csv", raw_ids=True), given, PipelineSettings(), _quiet
    )
    assert (loaded.loaded, loaded.rejected) == (2, 0)
    of_nodes = NodeInput("subscribes", "id", "state")
    loaded = await load_nodes(
        target, LoadInput(tmp_path / "nodes.csv", raw_ids=True), of_nodes, PipelineSettings(), _quiet
    )
    assert (loaded.loaded, loaded.rejected) == (1, 2)
    await shown(graphs, other, "subscribes", {"archived": sorted([(page, 7) for page in pages[:2]], reverse=True)})
    await east.node_set_state(other, "normal", ["subscribes"])
    await shown(graphs, other, "subscribes", {"normal": [(pages[0], 7)], "archived": [(pages[1], 7)]})


def _quiet(*_: object) -> None:
    """Show no progress."""


async def pages_of(graph: Graph, user: int, state: str) -> list[int]:
    """Walk over a list with cursors, a few edges at a time."""
    found: list[int] = []
    cursor: str | None = None
    while True:
        page = await graph.assoc_page(user, "subscribes", 5, cursor, state=state)
        found += [edge.id2 for edge in page.edges]
        cursor = page.cursor
        if cursor is None:
            return found


async def test_pages_of_a_state_skip_nothing_that_stays_and_repeat_nothing_while_others_move(
    graphs: tuple[Graph, Graph],
) -> None:
    east = graphs[0]
    (user,), pages = await ids_on(east, 3), await ids_on(east, 2, 60)
    await east.assoc_add_many([(user, "subscribes", page, time) for time, page in enumerate(pages, 1)])
    archived, moving = set(pages[::3]), set(pages[1::3])
    await east.assoc_set_state_many([(user, "subscribes", page, "archived") for page in sorted(archived)])
    staying = {"normal": set(pages) - archived - moving, "archived": archived}
    moves = 0
    stopped = asyncio.Event()

    async def move() -> None:
        nonlocal moves
        chance = random.Random(9)
        while not stopped.is_set():
            some = chance.sample(sorted(moving), 4)
            await east.assoc_set_state_many([(user, "subscribes", page, "archived") for page in some])
            await east.assoc_set_state_many([(user, "subscribes", page, "normal") for page in some])
            moves += 1

    moving_task = asyncio.create_task(move())
    try:
        for _ in range(10):
            for state, stays in staying.items():
                before = moves

                async def has_moved(before: int = before) -> bool:
                    return moves > before

                for graph in graphs:
                    found = await pages_of(graph, user, state)
                    assert len(found) == len(set(found)), "an edge came twice"
                    assert stays <= set(found) <= stays | moving
                await until(has_moved, "nothing moves")
    finally:
        stopped.set()
        await moving_task
