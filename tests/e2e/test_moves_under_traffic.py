"""Shards move between the databases of a running cluster, and shards are added, while clients read and write."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from tao.admin.documents import topology_file
from tao.admin.shard_mover import MoverAccounts, OnStep, ShardMover
from tao.client import Consistency, Graph, TaoError, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import find_server_binary
from tao.devcluster.layout import Role, Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.errors import Unavailable
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import Topology
from tao.observability.logs import logger
from tao.replication.gtid import parse_position
from tao.replication.locks import FileLocks
from tao.replication.replication_set import SetAccounts
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.replication.shard_move_plan import MoveStep
from tao.routing.routes import Routes
from tao.storage.dialect import Dialect, SessionSetup
from tao.storage.session import ServerAccount, open_session
from tao.topology.document import parse_topology
from tests.e2e.cluster_access import (
    PACE_SECONDS,
    PATIENT,
    assert_converges,
    bystander_of,
    patient_stats,
    running_cluster,
)
from tests.rigs.forked_programs import run_tao
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

SHARDS = 8
SETTINGS = MoveSettings(steady_seconds=0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=2, followers=1, leaders=2, databases=2, shards=SHARDS)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


def topology_of(cluster: DevCluster) -> Topology:
    return parse_topology(cluster.topology_path.read_bytes(), "topology")


def database_of(cluster: DevCluster, shard: int) -> str:
    return Routes(topology_of(cluster)).database_of(shard).name


def other_database(cluster: DevCluster, shard: int) -> str:
    names = [each.name for each in topology_of(cluster).databases]
    return next(name for name in names if name != database_of(cluster, shard))


async def tao(cluster: DevCluster, *arguments: str) -> Any:
    """Run a command; return the JSON that it prints."""
    state_dir = cluster.topology_path.parent
    ended = await run_tao(*arguments, "--json", "--state-dir", state_dir, folder=state_dir.parent)
    assert ended.status == 0, ended.errors
    return json.loads(ended.output)


def moves_of(cluster: DevCluster) -> ShardMoves:
    known = service_accounts(cluster.record.passwords)
    accounts = SetAccounts(known.administrator, known.replicator)
    return ShardMoves(topology_file(cluster.topology_path), FileLocks(cluster.topology_path), accounts, SETTINGS)


def mover_of(cluster: DevCluster, on_step: OnStep | None = None) -> ShardMover:
    known = service_accounts(cluster.record.passwords)
    accounts = MoverAccounts(known.leader, known.replicator)
    return ShardMover(moves_of(cluster), SETTINGS, accounts, logger("test"), on_step=on_step)


def binary_dialect() -> Dialect:
    flavour = find_server_binary(os.environ).flavour
    return Dialect.MARIADB if "mariadb" in str(flavour).lower() else Dialect.MYSQL


async def rows(cluster: DevCluster, database: str, sql: str) -> list[tuple[Any, ...]]:
    """Run statements at the master of a database, and return the rows of the first."""
    found = next(each for each in topology_of(cluster).databases if each.name == database)
    master, account = found.servers[found.master_region], service_accounts(cluster.record.passwords).administrator
    login = ServerAccount(master.host, master.port, account.user, account.password, socket="", tls=None)
    deadline = asyncio.get_running_loop().time() + PATIENT_SECONDS
    session = await open_session(login, master.name, SessionSetup(writes=True), deadline=deadline)
    try:
        return (await session.run(sql, deadline=deadline))[0]
    finally:
        session.quit()


class Traffic:
    """One client that writes objects and pairs of one shard and others, and reads what it wrote."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rounds = 0
        self.faults: list[str] = []

    async def run(self, one: int, other: int) -> None:
        """Work on two objects, ``one`` on the shard that moves, until cancelled."""
        while True:
            number = self.rounds + 1
            try:
                await self.graph.obj_update(one, {"home": str(number)}, "user")
                await self.graph.assoc_add(one, "friend", other, number)
                for consistency in (Consistency.cached(), Consistency.master()):
                    found = await self.graph.obj_get(one, consistency=consistency)
                    seen = None if found is None else found.fields["home"]
                    if seen != str(number):
                        self.faults.append(f"{consistency}: {seen!r} instead of {number}")
                edges = await self.graph.assoc_range(other, "friend", 0, 1)
                if [edge.time for edge in edges] != [number]:
                    self.faults.append(f"the far end has {edges} in round {number}")
            except TaoError as error:
                self.faults.append(f"round {number}: {error!r}")
            self.rounds = number
            await asyncio.sleep(PACE_SECONDS)

    async def more(self, count: int) -> None:
        until = self.rounds + count
        async with asyncio.timeout(PATIENT_SECONDS):
            while self.rounds < until:  # noqa: ASYNC110 - counts what another task does
                await asyncio.sleep(0.01)


async def objects_on(graph: Graph, shard: int, count: int) -> list[int]:
    """Return new objects of the shard."""
    found: list[int] = []
    while len(found) < count:
        near = found[0] if found else None
        key = await graph.obj_add("user", {"name": "somebody", "home": "0"}, near=near)
        if key >> SHARD_SHIFT == shard:
            found.append(key)
    return found


async def test_writers_wait_and_none_fails(cluster: DevCluster) -> None:
    target = str(cluster.topology_path)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        bystander = await stack.enter_async_context(bystander_of(cluster))
        graphs = [await stack.enter_async_context(connect(target, settings=PATIENT)) for _ in range(2)]
        shard = 1
        traffic = [Traffic(graph) for graph in graphs]
        running = []
        for each in traffic:
            one, other = (*await objects_on(each.graph, shard, 1), *await objects_on(each.graph, 5, 1))
            running.append(tasks.create_task(each.run(one, other)))
        for by_command in (True, False):
            there = other_database(cluster, shard)
            await traffic[0].more(20)
            if by_command:
                options = ("--to", there, "--steady-seconds", "0.5", "--yes")
                stood = (await tao(cluster, "database", "move", str(shard), *options))["writes_stood_seconds"]
            else:
                stood = (await mover_of(cluster).move(shard, there)).writes_stood_seconds
            assert (database_of(cluster, shard), stood is not None) == (there, True)
            for each in traffic:
                await each.more(10)
            if by_command:
                dropped = await tao(cluster, "database", "drop-moved", "--keep-hours", "0", "--yes")
                assert [each["shard"] for each in dropped["dropped"]] == [shard], "or it could not come back"
        await bystander.more_rounds(5)
        for task in running:
            task.cancel()
        assert [each.faults for each in traffic] == [[], []]
        assert bystander.errors == []
    await assert_converges(cluster)


async def test_incoming_schema_sends_no_cache_messages(cluster: DevCluster) -> None:
    shard = 2
    there = other_database(cluster, shard)
    (tailer,) = [each for each in topology_of(cluster).regions[0].tailers if each.database == there]

    async def stats() -> dict[str, Any]:
        return await patient_stats(tailer.admin)

    async def counts() -> dict[str, int]:
        found = await stats()
        return {name: found[name] for name in ("messages", "touches", "invalidated_shards")}

    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
        await objects_on(graph, shard, 30)
    dialect = binary_dialect()

    async def until_read() -> None:
        """Wait until the tailer has read everything that is in the binlog now."""
        name = "gtid_binlog_pos" if dialect is Dialect.MARIADB else "gtid_executed"
        reached = str((await rows(cluster, there, f"SELECT @@GLOBAL.{name}"))[0][0]).replace("\n", "")
        async with asyncio.timeout(PATIENT_SECONDS):
            while not parse_position(dialect, (await stats())["position"]).has(reached):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    await until_read()
    before = await counts()

    async def stop(step: MoveStep) -> None:
        if step is MoveStep.FENCE:
            raise Unavailable("far enough")

    with pytest.raises(Unavailable, match="far enough"):
        await mover_of(cluster, stop).move(shard, there)
    copied = await rows(cluster, there, f"SELECT COUNT(*) FROM tao_{shard:05d}_incoming.objects")
    assert copied[0][0] >= 30
    await until_read()
    assert await counts() == before
    assert await moves_of(cluster).undo(shard, there) == [MoveStep.DROP_COPY]


async def test_pairs_jobs_and_intents_move_with_the_shard(cluster: DevCluster) -> None:
    """Whatever tables a shard has move with it; pairs are found at both ends, and intents settled by the new owner."""
    shard = 3
    here, there = database_of(cluster, shard), other_database(cluster, shard)
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph:
        one, *others = await objects_on(graph, shard, 3)
        others += await objects_on(graph, 6, 3)
        for at, other in enumerate(others, start=1):
            await graph.assoc_add(one, "friend", other, at)
        low, high = sorted((one, others[-1]))
        intent = f"{low}, {high}, '1', 7, 1" if low == one else ""
        if intent:
            # The one of the edge itself may not be settled yet.
            await rows(cluster, here, f"REPLACE INTO tao_{shard:05d}.inverse_intents VALUES ({intent}); COMMIT")
        await mover_of(cluster).move(shard, there)
        assert [edge.id2 for edge in await graph.assoc_range(one, "friend", 0, 10)] == others[::-1]
        for at, other in enumerate(others, start=1):
            assert [edge.time for edge in await graph.assoc_range(other, "friend", 0, 1)] == [at]
            await graph.assoc_add(one, "friend", other, at + 10)
        reserved = await rows(cluster, there, f"SELECT reserved_unix_ms FROM tao_{shard:05d}.reserved_ids")
        assert reserved, "no id of the shard is given out twice"
    await assert_converges(cluster)
    assert await rows(cluster, there, f"SELECT * FROM tao_{shard:05d}.inverse_intents") == []


async def test_added_shards_receive_new_objects_and_existing_ids_stay(cluster: DevCluster) -> None:
    async with connect(str(cluster.topology_path), settings=PATIENT) as graph, bystander_of(cluster) as bystander:
        kept = {key: key >> SHARD_SHIFT for key in [await graph.obj_add("user", {"name": "old"}) for _ in range(20)]}
        added = await tao(cluster, "topology", "add-shards", "4", "--yes")
        assert (added["shards"], topology_of(cluster).shards) == (SHARDS + 4, SHARDS + 4)
        async with asyncio.timeout(PATIENT_SECONDS):
            seen: set[int] = set()
            while not seen >= set(range(SHARDS, SHARDS + 4)):
                seen.add(await graph.obj_add("user", {"name": "new"}) >> SHARD_SHIFT)
        for key, shard in kept.items():
            found = await graph.obj_get(key)
            assert found is not None
            assert (found.fields["name"], key >> SHARD_SHIFT) == ("old", shard)
        await bystander.more_rounds(5)
        assert bystander.errors == []
    assert {Role.LEADER, Role.TAILER} <= set(cluster.processes.values())
    await assert_converges(cluster)
