"""Two regions of the development cluster: databases that replicate through the delay line, cuts, crashes, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import aiomysql
import msgspec
import pymysql.err
import pytest
import pytest_asyncio

from tao.admin.replication import ReplicaState
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.inspection import ClusterStatus, cluster_status, stop_cluster
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.line_control import Cut, Heal, ask_line
from tao.devcluster.state_folder import StateFolder
from tao.model.errors import OperatorError
from tao.storage.names import schema_name
from tao.topology.document import dump_topology, parse_topology
from tests.rigs.forked_programs import run_tao
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.database, pytest.mark.e2e]

RTT_MS = 60.0
ONE_MASTER = Shape(regions=2, shards=2)
BOTH_MASTERS = Shape(regions=2, databases=2, shards=2, mixed_mastership=True)
STORAGE_ONLY = frozenset({Role.DATABASE, Role.LINE})
EAST_WEST = ("east", "west")
IN_SHARED = pytest.mark.asyncio(loop_scope="module")
NUMBERS = count(1000)
"""Numbers of rows in the shared cluster, which tests write one after the other."""
_FIND = "SELECT 1 FROM schema_migrations WHERE number = %s"


def settings(folder: Path, **changes: Any) -> ClusterSettings:
    return ClusterSettings(
        **{
            "state_dir": folder,
            "shape": ONE_MASTER,
            "rtt_ms": RTT_MS,
            "roles": STORAGE_ONLY,
            "durability": Durability.RELAXED,
            **changes,
        }
    )


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """Yield a state folder, and stop its processes at the end, whichever command left them."""
    path = tmp_path / "s"
    yield path
    if StateFolder(path).read() is not None:
        await stop_cluster(path, lambda _: None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    """Yield a cluster for the tests that leave it as it was."""
    async with DevCluster(settings(tmp_path_factory.mktemp("shared") / "s")) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def leader_of(cluster: DevCluster, server: str, shard: int = 0) -> AsyncIterator[Any]:
    """Yield a cursor of the leaders' account in a shard's schema."""
    database = cluster.database(server)
    account = database.accounts.leader
    connection = await aiomysql.connect(
        host=database.host,
        port=database.port,
        user=account.user,
        password=account.password,
        autocommit=True,
        db=schema_name(shard),
    )
    try:
        async with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


async def write(cluster: DevCluster, server: str, number: int, shard: int = 0) -> None:
    async with leader_of(cluster, server, shard) as cursor:
        await cursor.execute("INSERT INTO schema_migrations (number, name) VALUES (%s, 'x')", (number,))


async def has(cluster: DevCluster, server: str, number: int, shard: int = 0) -> bool:
    async with leader_of(cluster, server, shard) as cursor:
        return bool(await cursor.execute(_FIND, (number,)))


async def arrives(cluster: DevCluster, server: str, number: int, shard: int = 0) -> float:
    """Wait until a replica has the row; return the time by the loop's clock."""
    async with asyncio.timeout(PATIENT_SECONDS), leader_of(cluster, server, shard) as cursor:
        while not await cursor.execute(_FIND, (number,)):  # noqa: ASYNC110 - a replica sends no notification
            await asyncio.sleep(0.001)
    return asyncio.get_running_loop().time()


async def until(folder: Path, condition: Callable[[ClusterStatus], bool]) -> ClusterStatus:
    async with asyncio.timeout(PATIENT_SECONDS):
        while not condition(status := await cluster_status(folder)):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.05)
    return status


def replica_of(status: ClusterStatus, name: str) -> ReplicaState:
    (process,) = (process for process in status.processes if process.name == name)
    assert process.replication is not None
    return process.replication


@IN_SHARED
async def test_a_write_reaches_the_other_region_no_sooner_than_half_a_round_trip_later(shared: DevCluster) -> None:
    assert shared.running == ["east-db-1", "west-db-1", "line"]
    took = []
    for number in islice(NUMBERS, 5):
        async with leader_of(shared, "east-db-1") as cursor:
            began = asyncio.get_running_loop().time()
            await cursor.execute("INSERT INTO schema_migrations (number, name) VALUES (%s, 'x')", (number,))
        took.append(await arrives(shared, "west-db-1", number) - began)
    assert min(took) >= RTT_MS / 2000

    status = await shared.status()
    assert [process.region for process in status.processes[:3]] == ["east", "west", ""]
    assert replica_of(status, "east-db-1").part == "master"
    west = replica_of(status, "west-db-1")
    assert (west.part, west.receiving, west.applying, west.error) == ("replica", True, True, "")
    assert west.position == replica_of(status, "east-db-1").position
    assert status.line is not None
    assert (status.line.rtt_ms, status.line.pairs[0].state) == (RTT_MS, "open")
    assert status.line.pairs[0].carried_bytes > 0


@IN_SHARED
async def test_a_replica_rejects_writes(shared: DevCluster) -> None:
    rejected, accepted = islice(NUMBERS, 2)
    with pytest.raises(pymysql.err.MySQLError, match="read-only"):
        await write(shared, "west-db-1", rejected)
    await shared.kill("west-db-1")
    await shared.restart("west-db-1")
    with pytest.raises(pymysql.err.MySQLError, match="read-only"):
        await write(shared, "west-db-1", rejected)
    await write(shared, "east-db-1", accepted)
    await arrives(shared, "west-db-1", accepted)


@IN_SHARED
@pytest.mark.parametrize("silent", [False, True], ids=["refusing", "silent"])
async def test_a_cut_stops_replication_and_healing_resumes_it(shared: DevCluster, silent: bool) -> None:
    folder, (before, during) = shared.topology_path.parent, islice(NUMBERS, 2)
    await write(shared, "east-db-1", before)
    await arrives(shared, "west-db-1", before)
    await ask_line(shared.line_control, Cut(EAST_WEST, silent))
    await write(shared, "east-db-1", during)
    # Missing heartbeats reveal a silent line; a cut is noticed at once.
    await until(folder, lambda status: not replica_of(status, "west-db-1").receiving)
    assert not await has(shared, "west-db-1", during)
    await ask_line(shared.line_control, Heal(EAST_WEST))
    await arrives(shared, "west-db-1", during)
    await until(folder, lambda status: replica_of(status, "west-db-1").receiving)


@IN_SHARED
async def test_a_line_that_was_killed_is_started_again_and_replication_goes_on(shared: DevCluster) -> None:
    folder, number = shared.topology_path.parent, next(NUMBERS)
    await shared.kill("line")
    await until(folder, lambda status: status.line is None and not replica_of(status, "west-db-1").receiving)
    await write(shared, "east-db-1", number)
    await shared.restart("line")
    await arrives(shared, "west-db-1", number)


async def test_the_next_start_of_the_folder_resumes_replication(folder: Path) -> None:
    async with DevCluster(settings(folder)) as cluster:
        await write(cluster, "east-db-1", 1000)
        await arrives(cluster, "west-db-1", 1000)
        await cluster.kill("west-db-1")
        await write(cluster, "east-db-1", 1001)
    async with DevCluster(settings(folder, shape=None, rtt_ms=None)) as again:
        assert again.record.rtt_ms == RTT_MS
        # The start has waited until the replica had everything.
        assert await has(again, "west-db-1", 1001)
        await write(again, "east-db-1", 1002)
        await arrives(again, "west-db-1", 1002)
    with pytest.raises(OperatorError, match="data of 2 region"):
        await DevCluster(settings(folder, shape=Shape(shards=2))).start()


async def test_mastership_that_the_topology_file_moves_is_moved_by_the_next_start(folder: Path) -> None:
    async with DevCluster(settings(folder)) as cluster:
        await write(cluster, "east-db-1", 1000)
        await arrives(cluster, "west-db-1", 1000)
        topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    (database,) = topology.databases
    moved = msgspec.structs.replace(
        topology, version=topology.version + 1, databases=(msgspec.structs.replace(database, master_region="west"),)
    )
    cluster.topology_path.write_text(dump_topology(moved))
    async with DevCluster(settings(folder)) as again:
        await write(again, "west-db-1", 1001)
        await arrives(again, "east-db-1", 1001)
        with pytest.raises(pymysql.err.MySQLError, match="read-only"):
            await write(again, "east-db-1", 1002)


async def test_a_replica_that_has_diverged_says_why_and_no_start_passes_over_it(folder: Path) -> None:
    async with DevCluster(settings(folder)) as cluster:
        west = cluster.database("west-db-1")
        admin = west.accounts.administrator
        connection = await aiomysql.connect(
            host=west.host, port=west.port, user=admin.user, password=admin.password, db=schema_name(0), autocommit=True
        )
        async with connection.cursor() as cursor:
            await cursor.execute("SET GLOBAL read_only = 0")
            await cursor.execute("SET SESSION sql_log_bin = 0")
            await cursor.execute("INSERT INTO schema_migrations (number, name) VALUES (1000, 'astray')")
        connection.close()
        await write(cluster, "east-db-1", 1000)
        status = await until(folder, lambda status: not replica_of(status, "west-db-1").applying)
        assert replica_of(status, "west-db-1").error
    with pytest.raises(OperatorError, match=r"west-db-1 does not follow east-db-1: replication from .* has stopped: "):
        await DevCluster(settings(folder)).start()
    assert not (await cluster_status(folder)).running


async def test_with_mixed_mastership_each_region_writes_a_database_of_its_own(folder: Path) -> None:
    async with DevCluster(settings(folder, shape=BOTH_MASTERS)) as cluster:
        await write(cluster, "east-db-1", 1000, shard=0)
        await write(cluster, "west-db-2", 1000, shard=1)
        await arrives(cluster, "west-db-1", 1000, shard=0)
        await arrives(cluster, "east-db-2", 1000, shard=1)
        for replica, shard in (("west-db-1", 0), ("east-db-2", 1)):
            with pytest.raises(pymysql.err.MySQLError, match="read-only"):
                await write(cluster, replica, 1001, shard)


async def test_a_detached_cluster_of_two_regions_is_found_cut_healed_and_ended_by_command(folder: Path) -> None:
    cluster = DevCluster(settings(folder, detached=True))
    await cluster.start()
    cluster.release()
    status = await cluster_status(folder)
    assert [process.name for process in status.processes if process.state == "ready"] == [
        "east-db-1",
        "west-db-1",
        "line",
    ]
    where = ("--state-dir", str(folder))
    code, out, _ = await run_tao("dev", "partition", "east", "west", "--silent", "--json", *where, folder=folder)
    assert (code, json.loads(out)["pairs"][0]["state"]) == (0, "silent")
    code, out, _ = await run_tao("dev", "heal", "--json", *where, folder=folder)
    assert (code, json.loads(out)["pairs"][0]["state"]) == (0, "open")
    code, out, _ = await run_tao("dev", "rtt", "7.5", "--json", *where, folder=folder)
    assert (code, json.loads(out)["rtt_ms"]) == (0, 7.5)
    code, out, _ = await run_tao("dev", "status", *where, folder=folder)
    assert code == 0
    assert re.search(r"east and west +open +7\.5", out)
    assert re.search(r"west-db-1 +replica +yes +yes", out)
    code, _, err = await run_tao("dev", "partition", "east", "north", *where, folder=folder)
    assert (code, err) == (2, "tao: there is no line between east and north; there is one between east and west\n")

    assert await stop_cluster(folder, lambda _: None) == []
    code, _, err = await run_tao("dev", "heal", *where, folder=folder)
    assert (code, err.count("\n")) == (2, 1)
    assert "tao dev up" in err
    assert not (await cluster_status(folder)).running
