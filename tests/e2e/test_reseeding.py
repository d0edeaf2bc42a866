"""`tao reseed` on two real database servers: diverged, interrupted before each step, or empty; also by the command."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tao.model.errors import OperatorError, TaoError
from tao.replication.accounts import ServiceAccounts
from tao.replication.locks import LockTaken
from tao.replication.promotion import PromotionSettings
from tao.replication.promotion_plan import PromotionRefused, PromotionRequest, ServerDiverged, ServerSeeding
from tao.replication.replica_seed import Reseeder, SeedingRefused, SeedStep
from tao.replication.replication_set import SetAccounts
from tao.replication.server_statements import stop_receiving
from tao.storage.dialect import Dialect, SessionSetup
from tao.storage.names import schema_name
from tao.storage.session import DatabaseSession, ServerAccount, open_session
from tests.rigs.forked_programs import Ended, run_tao
from tests.rigs.move_rig import TARGET, Writer, move_rig, soon
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.replication_rig import EAST, SHARDS, WEST, ReplicationRig, replication_rig, statement_deadline

SHARD_SCHEMAS = "SHOW DATABASES LIKE 'tao\\_%%'"

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.waiting]

ALL_BYTES = bytes(range(256))


class Killed(BaseException):
    """The effect of SIGKILL on code: nothing is cleaned up except what the kernel takes back."""


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    """Yield servers of which west is the master, and east, the former master, has a write that west never received."""
    async with replication_rig(tmp_path, database_accounts) as rig:
        async with rig.session(WEST) as session:
            await stop_receiving(session, deadline=statement_deadline())
        await rig.write(EAST, 1)  # asynchronous: only the client has the acknowledgement
        await rig.servers[EAST].kill()

        async with asyncio.timeout(PATIENT_SECONDS):
            while any(member.receives for member in await rig.promoter().observe("db")):  # noqa: ASYNC110 - the replica does it
                await asyncio.sleep(0.02)
        await rig.promoter().promote("db", PromotionRequest(WEST, master_lost=True))
        await rig.servers[EAST].start()
        async with rig.session(WEST, as_leader=True) as session:
            insert = "INSERT INTO tao_00001.objects VALUES (%s, 1, 1, 0, %s); COMMIT"
            await session.run(insert, (2, ALL_BYTES), deadline=statement_deadline())
        yield rig


async def assert_follows_and_equals(rig: ReplicationRig) -> None:
    assert not rig.database.servers[EAST].down
    number = 100 + max(await rig.written(WEST), default=0)
    await rig.write(WEST, number)

    async with asyncio.timeout(PATIENT_SECONDS):
        while number not in await rig.written(EAST):  # noqa: ASYNC110 - the replica does it
            await asyncio.sleep(0.01)
    assert await rig.rows(EAST, "SELECT data FROM tao_00001.objects WHERE id = 2") == [(ALL_BYTES,)]
    for shard in range(SHARDS):
        tables = [name for (name,) in await rig.rows(WEST, f"SHOW TABLES IN tao_{shard:05d}")]
        assert tables
        sums = f"CHECKSUM TABLE {', '.join(f'tao_{shard:05d}.{name}' for name in tables)}"
        assert await rig.rows(EAST, sums) == await rig.rows(WEST, sums)
    assert await can_read(rig)


async def can_read(rig: ReplicationRig) -> bool:
    """Return whether the cluster's accounts can log in, to read or to write."""
    for account in (rig.accounts.reader, rig.accounts.leader):
        login = ServerAccount("127.0.0.1", rig.servers[EAST].port, account.user, account.password, socket="", tls=None)
        try:
            session = await open_session(login, EAST, SessionSetup(writes=False), deadline=statement_deadline())
        except TaoError:
            return False
        session.abort()
    return True


async def answers(session: DatabaseSession) -> bool:
    try:
        await session.run("SELECT id FROM tao_00000.objects", deadline=statement_deadline())
    except TaoError:
        return False
    return True


async def tao(rig: ReplicationRig, *words: str, **environment: str) -> Ended:
    """Run a command as an operator does; return its exit status, output and errors."""
    passwords = {
        "TAO_ADMIN_PASSWORD": rig.accounts.administrator.password,
        "TAO_REPLICATOR_PASSWORD": rig.accounts.replicator.password,
    }
    topology = rig.topology_path
    return await run_tao(*words, "--topology", topology, folder=topology.parent, env={**passwords, **environment})


async def test_a_diverged_master_is_rejected_with_its_rebuild_command_however_often_that_is_killed(
    rig: ReplicationRig,
) -> None:
    with pytest.raises(ServerDiverged, match="tao reseed east"):
        await rig.promoter().rejoin("db", EAST)
    plan = await rig.reseeder().plan(EAST)
    assert plan.discards
    assert (plan.drops, plan.copies, plan.half_seeded) == (SHARDS, SHARDS, False)
    login = ServerAccount(
        "127.0.0.1", rig.servers[EAST].port, "tao_reader", rig.accounts.reader.password, socket="", tls=None
    )
    reader = await open_session(login, EAST, SessionSetup(writes=False), deadline=statement_deadline())
    try:
        for step in SeedStep:

            async def stop(at: SeedStep, step: SeedStep = step) -> None:
                if at is step:
                    raise Killed

            with pytest.raises(Killed):
                await rig.reseeder(stop).seed(EAST)
            assert await rig.open_servers() == {WEST}, step
            if step in (SeedStep.MARK, SeedStep.CLOSE):
                assert await can_read(rig), step
                continue
            assert rig.database.servers[EAST].down, step
            assert not await answers(reader), "who was connected is cut off"
            if step is SeedStep.FOLLOW:
                assert await can_read(rig)
                continue
            # A server with a part of the data must not be read, attached, or promoted.
            assert not await can_read(rig), step
            with pytest.raises(ServerSeeding, match="tao reseed east"):
                await rig.promoter().rejoin("db", EAST)
            assert "tao reseed east" in (await rig.promoter().restore("db")).left[EAST]
            with pytest.raises(PromotionRefused, match="half"):
                await rig.promoter().promote("db", PromotionRequest(EAST))
            assert (await rig.reseeder().plan(EAST)).half_seeded
    finally:
        reader.abort()
    done = await rig.reseeder().seed(EAST)
    assert (done.follows, done.shards) == (WEST, SHARDS)
    await assert_follows_and_equals(rig)
    # The server has exactly the transactions that it records, so it may become master again.
    await rig.promoter().promote("db", PromotionRequest(EAST))
    with pytest.raises(SeedingRefused, match="is the master"):
        await rig.reseeder().seed(EAST)


async def test_an_empty_server_is_rebuilt_by_the_command(rig: ReplicationRig, tmp_path: Path) -> None:
    await rig.servers[EAST].stop()
    shutil.rmtree(tmp_path / EAST / "data")
    await rig.servers[EAST].start()

    async def another(step: SeedStep) -> None:
        with pytest.raises(LockTaken):
            await rig.reseeder().seed(EAST)
        raise Killed

    with pytest.raises(Killed):
        await rig.reseeder(another).seed(EAST)
    status, said, errors = await tao(rig, "reseed", EAST, "--dry-run", "--json")
    assert (status, json.loads(said)["drops"], json.loads(said)["copies"]) == (0, 0, SHARDS), errors
    status, said, errors = await tao(rig, "reseed", EAST)
    assert (status, said.splitlines()[0]) == (2, "server    east (east), of db"), errors
    assert "there is no input to ask" in errors
    status, said, errors = await tao(rig, "reseed", EAST, "--yes", "--json")
    assert status == 0, errors
    assert json.loads(said)["follows"] == WEST
    await assert_follows_and_equals(rig)
    status, _, errors = await tao(rig, "reseed", EAST, "--yes", PATH="", TAO_MYSQLD="")
    assert status == 2
    assert "apt-get install" in errors
    assert not rig.database.servers[EAST].down, "nothing was changed"


async def test_a_server_is_passed_over_as_one_without_a_promotion_under_way_only_when_it_has_no_tables(
    rig: ReplicationRig,
) -> None:
    async with rig.session(EAST) as session:
        if session.dialect is Dialect.MYSQL:
            await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=statement_deadline())
        await session.run("SET SESSION sql_log_bin = 0", deadline=statement_deadline())
        hide = "ALTER TABLE tao_00001.shard RENAME COLUMN version_epoch TO hidden"
        await session.run(hide, deadline=statement_deadline())
        with pytest.raises(OperatorError, match="version_epoch"):
            await rig.promoter().restore("db")
        with pytest.raises(OperatorError, match="version_epoch"):
            await rig.reseeder().plan(EAST)
        await session.run("DROP DATABASE tao_00001", deadline=statement_deadline())
    restored = await rig.promoter().restore("db")
    assert restored.without_tables.keys() == {EAST}
    assert "tao_00001" in restored.without_tables[EAST]
    _, _, errors = await tao(rig, "promote", "db", "--to", WEST, "--yes")
    assert "east has no tables" in errors


async def test_a_replica_of_a_database_without_shards_is_rebuilt_and_gets_those_that_move_there(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    """A database is added to a topology without shards, and gets them by moves."""
    async with move_rig(tmp_path, database_accounts, regions=(EAST, WEST)) as rig:
        moves, before, replica = rig.moves(), rig.topology, f"{WEST}-{TARGET}"
        settings = PromotionSettings(lock_seconds=5.0, settle_seconds=0.0)
        accounts = SetAccounts(rig.accounts.administrator, rig.accounts.replicator)
        reseeder = Reseeder(moves.store, moves.locks, accounts, settings, rig.promoter())
        ((first, last),) = before.databases[1].shards
        async with rig.session(f"{EAST}-{TARGET}") as session:
            for shard in range(first, last + 1):
                await session.run(f"DROP DATABASE {schema_name(shard)}", deadline=soon())
        with pytest.raises(SeedingRefused, match="has no shard"):
            await reseeder.plan(replica)
        databases = (before.databases[0], replace(before.databases[1], shards=()))
        await moves.store.change(before.version, replace(before, version=2, shards=first, databases=databases))
        async with asyncio.timeout(PATIENT_SECONDS):  # for the replica to drop them, too
            while await rig.rows(replica, SHARD_SCHEMAS):  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.05)
        async with rig.session(replica) as session:  # it diverges
            await session.run("SET GLOBAL read_only = 0; CREATE SCHEMA tao_00000", deadline=soon())
        plan = await reseeder.plan(replica)
        assert (plan.drops, plan.copies) == (1, 0)
        assert plan.discards
        result = await reseeder.seed(replica)
        assert (result.follows, result.shards) == (f"{EAST}-{TARGET}", 0)
        assert await rig.rows(replica, SHARD_SCHEMAS) == []

        writer = Writer(rig.store(), 0)
        assert await writer.write_one()
        await rig.mover().move(0, TARGET)  # waits until the replica has the copy
        assert await rig.written(replica, 0) == writer.acknowledged
