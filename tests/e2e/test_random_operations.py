"""Many random operations by several clients on several tiers, on real processes and a real database."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tao.client import Assoc, ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.schema.registry import Schema, load_schema
from tests.e2e.cluster_access import assert_converges
from tests.e2e.graph_model import GraphModel, inverse_of
from tests.rigs.effort import examples
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.database]

SHAPE = Shape(tiers=2, followers=2, leaders=2, databases=2, shards=16)
ATYPES = ("friend", "likes", "liked_by", "follows", "comment", "note")
STEPS = min(500, examples(600))
SEED = 20131


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("cluster"), shape=SHAPE, durability=Durability.RELAXED, log_level="warning"
    )
    async with DevCluster(settings) as running:
        yield running


def schema_of(path: Path) -> Schema:
    return load_schema(path.read_text(), str(path))


def plain(edges: Sequence[Assoc]) -> list[tuple[int, int, dict[str, Any]]]:
    return [(edge.id2, edge.time, dict(edge.fields)) for edge in edges]


def fields_for(atype: str, rng: random.Random) -> dict[str, Any]:
    if atype in {"follows", "followed_by"}:
        return {"notify": rng.random() < 0.5}
    if atype == "friend":
        return {"since": rng.randrange(3000) if rng.random() < 0.5 else None}
    if atype == "note":
        return {"text": "n" * rng.randrange(600), "labels": []}
    return {}


class Worker:
    """A client that owns some objects: only it writes their edges, so the model predicts every answer."""

    def __init__(self, graph: Graph, rng: random.Random) -> None:
        self.graph = graph
        self.rng = rng
        self.model = GraphModel()
        self.ids: list[int] = []

    async def prepare(self, count: int) -> None:
        for number in range(count):
            fields = {"name": f"u{number}", "home": "x"}
            self.ids.append(await self.graph.obj_add("user", fields))
            self.model.objects[self.ids[-1]] = ("user", fields)

    async def step(self) -> None:
        rng = self.rng
        id1, id2 = rng.choice(self.ids), rng.choice(self.ids)
        atype = rng.choice(ATYPES)
        kind = rng.random()
        if kind < 0.30:
            fields = fields_for(atype, rng)
            time = rng.randrange(50)
            await self.graph.assoc_add(id1, atype, id2, time, fields)
            self.model.assoc_add(id1, atype, id2, time, fields)
        elif kind < 0.42:
            expected = self.model.assoc_delete(id1, atype, id2)
            found = bool(await self.graph.assoc_delete(id1, atype, id2))
            if inverse_of(atype) != atype or id1 != id2:
                assert found == expected
        elif kind < 0.50:
            new = "likes" if atype == "liked_by" else rng.choice(("likes", "comment"))
            if atype in {"likes", "liked_by", "comment"}:
                expected = self.model.assoc_change_type(id1, atype, id2, new)
                assert bool(await self.graph.assoc_change_type(id1, atype, id2, new)) == expected
        elif kind < 0.56:
            home = f"h{rng.randrange(9)}"
            if id1 in self.model.objects:
                assert await self.graph.obj_update(id1, {"home": home}, "user")
                self.model.objects[id1][1]["home"] = home
        elif kind < 0.57 and len(self.ids) > 4:
            self.model.objects.pop(id1, None)
            await self.graph.obj_delete(id1)
        await self.check(id1, rng.choice(ATYPES), id2)

    async def check(self, id1: int, atype: str, id2: int) -> None:
        """The tier of the writes agrees with the model at once (invariant 3)."""
        expected = self.model.assoc_list(id1, atype)
        rng, graph = self.rng, self.graph
        match rng.randrange(6):
            case 0:
                found = await graph.obj_get(id1)
                held = self.model.objects.get(id1)
                assert (None if found is None else dict(found.fields)) == (None if held is None else held[1])
            case 1:
                assert await graph.assoc_count(id1, atype) == len(expected)
            case 2:
                pos, limit = rng.randrange(4), rng.randrange(1, 9)
                assert plain(await graph.assoc_range(id1, atype, pos, limit)) == expected[pos : pos + limit]
            case 3:
                high, low = sorted((rng.randrange(50), rng.randrange(50)), reverse=True)
                pos = rng.randrange(4)
                window = [edge for edge in expected if high >= edge[1] >= low][pos : pos + 5]
                assert plain(await graph.assoc_time_range(id1, atype, high, low, 5, pos)) == window
            case 4:
                asked = rng.sample(self.ids, 3)
                found_edges = plain(await graph.assoc_get(id1, atype, asked))
                assert found_edges == [edge for edge in expected if edge[0] in asked]
                present = await graph.assoc_exists_many([(id1, atype, each) for each in asked])
                assert present == [each in {edge[0] for edge in expected} for each in asked]
            case _:
                assert plain(await graph.assoc_range(id2, atype, 0, 100)) == self.model.assoc_list(id2, atype)


async def graphs_of(cluster: DevCluster, stack: AsyncExitStack) -> list[Graph]:
    target = str(cluster.topology_path)
    settings = ClientSettings(timeout_seconds=PATIENT_SECONDS, connect_timeout_seconds=PATIENT_SECONDS)
    return [
        await stack.enter_async_context(connect(target, tier=tier, settings=settings))
        for tier in ("tier-1", "tier-2", "tier-1", "tier-2")
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_client_reads_its_own_writes_and_all_caches_end_equal_to_the_database(cluster: DevCluster) -> None:
    async with AsyncExitStack() as stack:
        graphs = await graphs_of(cluster, stack)
        workers = [Worker(graph, random.Random(SEED + number)) for number, graph in enumerate(graphs)]
        await asyncio.gather(*(worker.prepare(12) for worker in workers))

        async def run(worker: Worker) -> None:
            for _ in range(STEPS):
                await worker.step()

        await asyncio.gather(*(run(worker) for worker in workers))
        await assert_converges(cluster)
        # No operation is in flight any more: every tier agrees with the model, whichever client wrote.
        for worker in workers:
            for graph in graphs[:2]:
                for id1 in worker.ids:
                    for atype in ATYPES:
                        assert plain(await graph.assoc_range(id1, atype, 0, 100)) == worker.model.assoc_list(id1, atype)


@pytest.mark.asyncio(loop_scope="module")
async def test_hot_keys_written_by_all_clients_at_once_converge_with_their_inverses(cluster: DevCluster) -> None:
    async with AsyncExitStack() as stack:
        graphs = await graphs_of(cluster, stack)
        hot = [await graphs[0].obj_add("user", {"name": f"hot{number}"}) for number in range(6)]

        async def hammer(graph: Graph, rng: random.Random) -> None:
            for step in range(STEPS // 2):
                id1, id2 = rng.choice(hot), rng.choice(hot)
                atype = rng.choice(("friend", "likes", "liked_by", "follows"))
                if rng.random() < 0.6:
                    await graph.assoc_add(id1, atype, id2, step, {})
                elif rng.random() < 0.7:
                    await graph.assoc_delete(id1, atype, id2)
                elif atype in {"likes", "liked_by"}:
                    await graph.assoc_change_type(id1, atype, id2, "friend")
                else:
                    await graph.assoc_range(id1, atype, 0, 10)

        await asyncio.gather(*(hammer(graph, random.Random(SEED + n)) for n, graph in enumerate(graphs * 2)))
        await assert_converges(cluster)
        for id1 in hot:
            for atype in ("friend", "likes", "liked_by", "follows", "followed_by"):
                answers = [plain(await graph.assoc_range(id1, atype, 0, 100)) for graph in graphs[:2]]
                assert answers[0] == answers[1]
                for id2, time, _ in answers[0]:
                    back = plain(await graphs[0].assoc_get(id2, inverse_of(atype) or "", [id1]))
                    assert [edge[1] for edge in back] == [time]


def test_the_schema_of_the_cluster_has_the_inverses_that_the_model_believes() -> None:
    schema = schema_of(Path(__file__).parents[2] / "config" / "schema.yaml")
    for atype in ATYPES:
        inverse = schema.inverse_of(schema.atype(atype))
        assert (inverse.name if inverse else None) == inverse_of(atype)
