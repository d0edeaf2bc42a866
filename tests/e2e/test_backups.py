"""`tao backup` with two databases: made under writes, restored into new ones, to the end and to a moment, damaged.

      writes a   create   writes b   binlogs   moment   writes c   binlogs
--------|-----------[=======]----|---------|--------|-------|---------|-----> time
create                  a        some of b
until the moment        a        b
to the end              a        b                          c
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tao.admin.access import ReaderLogin
from tao.admin.backup import OnProgress, archive_binlogs, create_backup
from tao.admin.backup_files import read_index, read_manifest
from tao.admin.documents import read_schema
from tao.admin.replication import administrator_session
from tao.admin.restore import (
    RestoreRefused,
    RestoreRepair,
    RestoreResult,
    observe_targets,
    plan_restore,
    repair_restored,
    restore_backup,
)
from tao.client import Consistency, Graph, WriteLost, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.errors import Overloaded, TaoError
from tao.model.ids import LostTimes, unix_ms_of
from tao.model.topology import Topology
from tao.replication.accounts import ServiceAccounts
from tao.replication.promotion_plan import PromotionRequest
from tao.replication.replica_seed import read_contents
from tao.replication.server_statements import executed_position
from tao.storage.dialect import Dialect
from tao.storage.names import schema_name
from tao.storage.result_packets import Row
from tao.topology.document import dump_topology, parse_topology
from tests.e2e.cluster_access import PACE_SECONDS, PATIENT, assert_converges
from tests.e2e.region_access import until
from tests.rigs.forked_programs import run_tao
from tests.rigs.move_rig import MoveRig, move_rig, soon
from tests.rigs.move_rig import Writer as RowWriter
from tests.rigs.replication_rig import (
    EAST,
    SHARDS,
    WEST,
    ReplicationRig,
    replication_rig,
    statement_deadline,
    until_arrived,
)

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.unhurried]

SHAPE = Shape(databases=2, shards=4, leaders=1, tiers=1, followers=1, watchers=0)
DATABASES_ONLY = frozenset({Role.DATABASE})


async def tao(*words: str | Path, **environment: str) -> tuple[int, Any, str]:
    """Run a command as an operator does; return its exit status, its JSON and its errors. (`Any`: a document.)"""
    status, said, errors = await run_tao(*words, "--json", folder=Path(), env=environment)
    return status, json.loads(said) if said else None, errors


@asynccontextmanager
async def cluster_in(folder: Path, roles: frozenset[Role] = frozenset(Role)) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(state_dir=folder, shape=SHAPE, durability=Durability.RELAXED, roles=roles)
    async with DevCluster(settings) as cluster:
        yield cluster


async def on_masters(cluster: DevCluster, statement: str) -> list[Row]:
    """Run a statement, with ``{schema}``, in each shard's schema at its master. Returns all rows."""
    rows: list[Row] = []
    administrator = service_accounts(cluster.record.passwords).administrator
    for database in parse_topology(cluster.topology_path.read_bytes(), "topology").databases:
        async with administrator_session(database.servers[database.master_region], administrator) as session:
            for first, last in database.shards:
                for shard in range(first, last + 1):
                    sql = statement.format(schema=schema_name(shard))
                    rows += (await session.run(f"{sql}; COMMIT", deadline=statement_deadline()))[0]
    return rows


BEGUN_MOVES = (
    "CREATE DATABASE tao_00003",
    "CREATE TABLE tao_00003.shard (only_row TINYINT UNSIGNED PRIMARY KEY)",
    "CREATE DATABASE tao_00003_incoming",
    "CREATE TABLE tao_00003_incoming.objects (id BIGINT UNSIGNED PRIMARY KEY)",
    "INSERT INTO tao_00003_incoming.objects VALUES (1)",
)
CONTINUED_MOVES = (
    "CREATE TABLE tao_00003.moved_away (only_row TINYINT UNSIGNED PRIMARY KEY)",
    "UPDATE tao_00003_incoming.objects SET id = 2",
)
"""What a database has of a shard that moves to it, or has left it, and what the move does after the backup."""


async def on_first_master(cluster: DevCluster, *statements: str) -> list[Row]:
    """Run statements at the master of the first database. Returns the rows of the first one."""
    administrator = service_accounts(cluster.record.passwords).administrator
    database = parse_topology(cluster.topology_path.read_bytes(), "topology").databases[0]
    async with administrator_session(database.servers[database.master_region], administrator) as session:
        rows: list[Row] = (await session.run("; ".join([*statements, "COMMIT"]), deadline=statement_deadline()))[0]
        return rows


async def emptied(cluster: DevCluster) -> None:
    """Make the databases of a cluster like new ones: the development cluster makes tables when it starts them."""
    await on_masters(cluster, "DROP DATABASE {schema}")


class Writer:
    """Writes users, each a friend of the one before, across shards, and notes what was acknowledged."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.users: list[int] = []
        self.pairs: list[tuple[int, int]] = []

    async def write(self, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        users, pairs = len(self.users), len(self.pairs)
        for _ in range(count):
            user = int(await self._graph.obj_add("user", {"name": "somebody"}))
            if self.users:
                await self._graph.assoc_add(self.users[-1], "friend", user, 1)
                self.pairs.append((self.users[-1], user))
            self.users.append(user)
        return self.users[users:], self.pairs[pairs:]

    async def run(self) -> None:
        while True:
            await self.write(1)
            await asyncio.sleep(PACE_SECONDS / 2)


async def assert_present(graph: Graph, users: list[int], pairs: list[tuple[int, int]]) -> None:
    assert None not in await graph.obj_get_many(users)
    for low, high in pairs:
        for one, other in ((low, high), (high, low)):
            assert [edge.id2 for edge in await graph.assoc_get(one, "friend", [other])] == [other]


async def stored_users(cluster: DevCluster) -> set[int]:
    """Read the ids of all objects from the databases."""
    rows = await on_masters(cluster, "SELECT id FROM {schema}.objects")
    return {int(row[0]) for row in rows}


async def repaired(cluster: DevCluster) -> RestoreRepair:
    """Repair as a restore does when the leaders run."""
    administrator = service_accounts(cluster.record.passwords).administrator
    topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    schema, _ = read_schema(cluster.schema_path)
    return await repair_restored(ReaderLogin(topology, schema, administrator.user, administrator.password), "", None)


async def added(graph: Graph, count: int) -> list[int]:
    """Add users once leaders give out ids again, which they refuse for some seconds after a restore."""
    ids: list[int] = []

    async def has_added() -> bool:
        with suppress(Overloaded):
            while len(ids) < count:
                ids.append(await graph.obj_add("user", {"name": "new"}))
        return len(ids) == count

    await until(has_added)
    return ids


async def next_second() -> int:
    """Wait until a second has begun, and return it: all writes so far began before it."""
    now = int(time.time())

    async def has_begun() -> bool:
        return time.time() >= now + 1

    await until(has_begun)
    return now + 1


def utc(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_seconds))


async def test_a_backup_under_writes_is_restored_with_every_acknowledged_write_and_to_any_moment(
    tmp_path: Path,
) -> None:
    old, new, backup = tmp_path / "old", tmp_path / "new", tmp_path / "backup"
    in_old, in_new = ("--state-dir", old), ("--state-dir", new, "--yes")
    async with cluster_in(old) as cluster, connect(str(cluster.topology_path), settings=PATIENT) as graph:
        writer = Writer(graph)
        users_a, pairs_a = await writer.write(30)
        under_way = asyncio.create_task(writer.run())
        await on_first_master(cluster, *BEGUN_MOVES)
        status, made, errors = await tao("backup", "create", backup, *in_old)
        assert status == 0, errors
        assert {each["name"] for each in made["databases"]} == {"db-1", "db-2"}
        under_way.cancel()
        with suppress(asyncio.CancelledError):
            await under_way
        users_b, pairs_b = writer.users[30:], writer.pairs[30:]
        await on_first_master(cluster, *CONTINUED_MOVES)
        assert (await tao("backup", "binlogs", backup, *in_old))[0] == 0
        moment = await next_second()
        with graph.recording() as recording:
            users_c, _ = await writer.write(10)
        status, index, errors = await tao("backup", "binlogs", backup, *in_old)
        assert status == 0, errors
        assert {len(each["files"]) for each in index["copies"]} == {2}

    async with cluster_in(new, DATABASES_ONLY) as cluster:
        status, _, errors = await tao("backup", "restore", backup, *in_new)
        assert (status, "a backup is restored to empty servers only" in errors) == (2, True)
        await emptied(cluster)
        early = utc(made["begun_unix_ms"] / 1_000 - 60)
        status, _, errors = await tao("backup", "restore", backup, "--until", early, *in_new)
        assert (status, "--until is outside" in errors) == (2, True)
        status, done, errors = await tao("backup", "restore", backup, *in_new)
        assert status == 4, errors
        assert {*users_a, *users_b, *users_c} <= await stored_users(cluster)
        assert await on_first_master(cluster, "SHOW DATABASES LIKE 'tao\\_00003%%'") == []

        await emptied(cluster)
        status, done, errors = await tao("backup", "restore", backup, "--until", utc(moment), *in_new)
        assert status == 4, errors
        assert done["repair"]["error"]
        assert {each["version_epoch"] for each in done["databases"]} == {2003}
        # Above whatever the lost time can have reserved, in each shard, as its row is above every version of that time.
        ceilings = await on_masters(cluster, "SELECT reserved_unix_ms FROM {schema}.reserved_ids")
        assert len(ceilings) == SHAPE.shards
        assert min(int(each) for (each,) in ceilings) >= LostTimes.at(1_000 * moment).begin(0, lacks_epoch=True)
        epochs = await on_masters(cluster, "SELECT version_epoch FROM {schema}.shard")
        assert {int(each) for (each,) in epochs} == {2003}
        # As if the cut between the databases had left pairs half.
        await on_masters(cluster, "DELETE FROM {schema}.assocs WHERE id1 > id2")

    async with cluster_in(new) as cluster, connect(str(cluster.topology_path), settings=PATIENT) as graph:
        repair = await repaired(cluster)
        assert repair.complete, repair
        assert repair.pairs >= len(pairs_a)
        await assert_present(graph, users_a, pairs_a)
        await assert_present(graph, users_b, pairs_b)
        assert set(await graph.obj_get_many(users_c)) == {None}
        with pytest.raises(WriteLost):
            await graph.obj_get(users_c[-1], consistency=Consistency.at_least(recording.token))
        ids = await added(graph, 8)
        assert min(map(unix_ms_of, ids)) > max(map(unix_ms_of, writer.users))
        await assert_converges(cluster)


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    """Yield a master in the east and its replica in the west."""
    async with replication_rig(tmp_path, database_accounts) as rig:
        await rig.write(EAST, 1)
        yield rig


async def drop_shards(rig: ReplicationRig) -> None:
    """Make the servers like new ones."""
    async with rig.session(EAST) as session:
        for shard in range(SHARDS):
            await session.run(f"DROP DATABASE {schema_name(shard)}", deadline=statement_deadline())

    async def is_empty() -> bool:
        return not await rig.rows(WEST, "SHOW DATABASES LIKE 'tao\\_0%%'")

    await until(is_empty)


def nothing(_database: str, _done: str) -> None:
    """Show no progress."""


async def restored(rig: ReplicationRig, backup: Path, on_progress: OnProgress = nothing) -> RestoreResult:
    administrator = rig.accounts.administrator
    plan = plan_restore(
        read_manifest(backup), read_index(backup), rig.topology, await observe_targets(rig.topology, administrator)
    )
    return await restore_backup(backup, rig.topology_path, plan, administrator, on_progress)


async def test_a_replica_is_backed_up_with_what_was_acknowledged_and_replicas_follow_a_restore(
    rig: ReplicationRig, tmp_path: Path
) -> None:
    backup, administrator = tmp_path / "backup", rig.accounts.administrator
    async with rig.session(WEST) as session:
        # It applies again when the backup waits for it already.
        replica = "SLAVE" if session.dialect is Dialect.MARIADB else "REPLICA"
        await session.run(f"STOP {replica} SQL_THREAD", deadline=statement_deadline())
        await rig.write(EAST, 2)
        async with rig.session(EAST) as master:
            acknowledged = await executed_position(master, deadline=statement_deadline())
        making = asyncio.create_task(create_backup(backup, rig.topology, {}, administrator, on_progress=nothing))
        await session.run(f"START {replica} SQL_THREAD", deadline=statement_deadline())
        made = await making
    assert [(each.server, each.position) for each in made.databases] == [(WEST, acknowledged)]
    # The replica is also to receive what it has made itself, as a master.
    await rig.promoter().promote("db", PromotionRequest(WEST))
    await rig.write(WEST, 3)
    await rig.promoter().promote("db", PromotionRequest(EAST))

    async def present() -> Topology:
        return rig.topology

    await archive_binlogs(backup, present, administrator, on_progress=nothing)

    await drop_shards(rig)
    done = await restored(rig, backup)
    assert await rig.written(EAST) == {1, 2, 3}
    await until_arrived(rig, WEST, 3)
    epoch = done.databases[0].version_epoch
    assert epoch > made.databases[0].version_epoch
    assert rig.database.version_epoch == epoch
    for region in (EAST, WEST):
        rows = await rig.rows(region, f"SELECT master_server, version_epoch FROM {schema_name(0)}.shard")
        assert rows == [(EAST.encode(), epoch)]
    with pytest.raises(RestoreRefused, match="empty servers only"):
        await restored(rig, backup)


class Interrupted(Exception):
    """What ends a restore in the middle."""


async def test_an_interrupted_restore_keeps_services_out_and_begins_anew(rig: ReplicationRig, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    await create_backup(backup, rig.topology, {}, rig.accounts.administrator, on_progress=nothing)
    await drop_shards(rig)

    def interrupt(_database: str, _done: str) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        await restored(rig, backup, interrupt)
    with pytest.raises(TaoError, match="lock"):
        await rig.write(EAST, 2)
    await restored(rig, backup)
    assert await rig.written(EAST) == {1}
    await until_arrived(rig, WEST, 1)


async def test_a_database_without_shards_is_backed_up_and_restored_too(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    """Such a database is about to get shards, or has given all of them away."""
    backup, administrator = tmp_path / "backup", database_accounts.administrator
    async with move_rig(tmp_path, database_accounts) as rig:
        full, empty = rig.topology.databases
        databases = (full, msgspec.structs.replace(empty, shards=()))
        topology = msgspec.structs.replace(rig.topology, version=2, shards=16, databases=databases)
        rig.topology_path.write_text(dump_topology(topology))
        writer = RowWriter(rig.store(), 3)
        assert await writer.write_one()
        await drop_schemas(rig, "east-db-2")
        made = await create_backup(backup, topology, {}, administrator, on_progress=nothing)
        assert [each.statement_bytes > 0 for each in made.databases] == [True, False]
        await drop_schemas(rig, "east-db-1")
        targets = await observe_targets(topology, administrator)
        plan = plan_restore(made, read_index(backup), topology, targets)
        done = await restore_backup(backup, rig.topology_path, plan, administrator, nothing)
        assert [each.shards for each in done.databases] == [16, 0]
        assert await rig.written("east-db-1", 3) == writer.acknowledged


async def drop_schemas(rig: MoveRig, server: str) -> None:
    async with rig.session(server) as session:
        for name in (await read_contents(session, deadline=soon())).schemas:
            await session.run(f"DROP DATABASE {name}", deadline=soon())
