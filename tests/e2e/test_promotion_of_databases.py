"""Promotion on two real database servers: interrupted after each step, forced, refused; leases; fences; rejoining."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from tao.model.errors import DeadlineExceeded, MasterReadOnly, TaoError
from tao.observability.logs import logger
from tao.storage.accounts import Account, ServiceAccounts
from tao.storage.lease import (
    EVENT_SECONDS,
    grant_lease,
    install_lease,
    lease_seconds,
    remove_lease,
    renew_lease,
    revoke_lease,
    server_unix_ms,
)
from tao.storage.processes import server_processes
from tao.storage.promotion import fence, stop_receiving
from tao.storage.replication import detach
from tao.storage.semi_sync import acknowledging_replicas
from tao.topology import edits
from tao.watcher.locks import LockTaken
from tao.watcher.promotion import Step
from tao.watcher.promotion_plan import PromotionRefused, ServerDiverged, Wish
from tao.watcher.replication_set import ReplicationSet, SetAccounts
from tao.watcher.server import WatcherServer
from tao.watcher.settings import LeaseSettings, ProbeSettings, PromotionSettings, WatcherSettings
from tests.rigs.replication_rig import (
    EAST,
    WEST,
    Killed,
    ReplicationRig,
    assert_is_master,
    replication_rig,
    soon,
    until_arrived,
    waits_for_replica,
)

pytestmark = [pytest.mark.database, pytest.mark.e2e]


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


async def test_a_promotion_killed_before_any_step_is_finished_or_undone_by_the_next_run(rig: ReplicationRig) -> None:
    written = 0
    for step in Step:
        target = WEST if rig.database.master_region == EAST else EAST
        master = rig.database.master_region
        written += 1
        await rig.write(master, written)

        async def stop(at: Step, step: Step = step) -> None:
            if at is step:
                raise Killed

        with pytest.raises(Killed):
            await rig.promoter(stop).promote("db", Wish(target))
        assert len(await rig.open_servers()) <= 1, step
        await rig.promoter().restore("db")
        now = rig.database.master_region
        assert (now == target) is (list(Step).index(step) > list(Step).index(Step.RAISE_EPOCH)), step
        await assert_is_master(rig, now, target if now == master else master)
        written += 1
        # The same command again does what it was to do in the first place.
        await rig.promoter().promote("db", Wish(target))
        await assert_is_master(rig, target, master)
        written = max(await rig.written(target))


async def test_writes_meanwhile_are_refused_in_a_way_that_can_be_repeated(rig: ReplicationRig) -> None:
    refused: list[TaoError] = []

    async def write(step: Step) -> None:
        if step is not Step.FENCE:
            for region in (EAST, WEST):
                with pytest.raises(MasterReadOnly) as found:
                    await rig.write(region, 77)
                refused.append(found.value)

    done = await rig.promoter(write).promote("db", Wish(WEST))
    assert len(refused) == 2 * (len(Step) - 1)
    assert all(error.retryable for error in refused)
    assert (done.master, done.version_epoch, done.following, done.left) == (WEST, 2, [EAST], {})


async def test_a_transaction_that_was_open_at_the_fence_is_rolled_back(rig: ReplicationRig) -> None:
    async with rig.session(EAST, as_leader=True) as writer:
        await writer.run("INSERT INTO tao_00000.objects VALUES (9, 1, 1, 0, '')", deadline=soon())
        await rig.promoter().promote("db", Wish(WEST))
        with pytest.raises(MasterReadOnly):
            await writer.run("COMMIT", deadline=soon())
    assert await rig.written(EAST) == set()


async def test_a_lost_master_is_replaced_and_comes_back_by_one_command(rig: ReplicationRig) -> None:
    await rig.write(EAST, 1)
    await until_arrived(rig, WEST, 1)  # asynchronous: a kill before that would lose it
    await rig.servers[EAST].kill()
    with pytest.raises(PromotionRefused, match="--master-lost"):
        await rig.promoter().promote("db", Wish(WEST))
    await until_promoted(rig)
    assert await rig.written(WEST) == {1}
    assert rig.database.servers[EAST].down
    await rig.servers[EAST].start()
    assert await rig.open_servers() == {WEST}, "a server starts closed to writes"
    await rig.promoter().rejoin("db", EAST)
    assert not rig.database.servers[EAST].down
    await assert_is_master(rig, WEST, EAST)


async def test_a_master_that_stands_still_is_replaced_by_a_watcher_and_is_closed_when_it_wakes(
    rig: ReplicationRig,
) -> None:
    settings = WatcherSettings(
        name="watcher",
        region=WEST,
        topology_file=rig.topology_path,
        administrator_password=rig.accounts.administrator.password,
        replicator_password=rig.accounts.replicator.password,
        probes=ProbeSettings(interval_seconds=0.2, master_gone_seconds=2.0),
        lease=LeaseSettings(seconds=3.0),
        promotion=PromotionSettings(settle_seconds=0.0),
    )
    watcher = await WatcherServer(settings, logger("watcher")).start()
    try:
        async with asyncio.timeout(30), rig.session(EAST) as session:
            while await lease_seconds(session, deadline=soon()) != settings.lease.seconds:  # noqa: ASYNC110 - the watcher
                await asyncio.sleep(0.05)
        await rig.write(EAST, 1)
        await until_arrived(rig, WEST, 1)
        os.kill(rig.servers[EAST].process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                while rig.database.master_region != WEST or not await is_open(rig, WEST):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.05)
            await rig.write(WEST, 2)
        finally:
            os.kill(rig.servers[EAST].process.pid, signal.SIGCONT)
        assert rig.database.servers[EAST].down
        async with asyncio.timeout(30):
            while await is_open(rig, EAST):  # noqa: ASYNC110 - its lease is over, and its own event closes it
                await asyncio.sleep(0.05)
    finally:
        await watcher.close()
    await rig.promoter().rejoin("db", EAST)
    await assert_is_master(rig, WEST, EAST)


async def is_open(rig: ReplicationRig, region: str) -> bool:
    return not (await rig.rows(region, "SELECT @@GLOBAL.read_only"))[0][0]


async def until_promoted(rig: ReplicationRig) -> None:
    """The replica notices the end of its connection in its own time, and until then it vetoes."""
    async with asyncio.timeout(30):
        while any(member.receives for member in await rig.promoter().look("db")):  # noqa: ASYNC110 - the replica does it
            await asyncio.sleep(0.02)
    await rig.promoter().promote("db", Wish(WEST, master_lost=True))


async def test_a_former_master_with_writes_of_its_own_is_refused_with_their_names(rig: ReplicationRig) -> None:
    async with rig.session(WEST) as session:
        await stop_receiving(session, deadline=soon())
    await rig.write(EAST, 1)  # asynchronous: nobody has heard of it but the client
    await rig.servers[EAST].kill()
    await until_promoted(rig)
    await rig.write(WEST, 2)
    await rig.servers[EAST].start()
    with pytest.raises(ServerDiverged, match="which the master west never had"):
        await rig.promoter().rejoin("db", EAST)
    assert await rig.open_servers() == {WEST}
    assert await rig.written(WEST) == {2}
    assert (await rig.promoter().restore("db")).left.keys() == {EAST}


async def test_only_one_hand_is_at_a_mastership(rig: ReplicationRig) -> None:
    async def other(step: Step) -> None:
        with pytest.raises(LockTaken):
            await rig.promoter().restore("db")

    await rig.promoter(other).promote("db", Wish(WEST))


async def test_a_server_closes_itself_when_its_lease_ends_and_no_renewal_revives_it(rig: ReplicationRig) -> None:
    async with rig.session(EAST) as session:
        positions = await rig.rows(EAST, "SHOW MASTER STATUS") if await is_mariadb(rig) else []
        await install_lease(session, 3 * EVENT_SECONDS, deadline=soon())
        assert await lease_seconds(session, deadline=soon()) == 3 * EVENT_SECONDS
        now = await server_unix_ms(session, deadline=soon())
        assert await renew_lease(session, now, deadline=soon()), "an open server is given a first lease"
        await rig.write(EAST, 1)
        # By the server's own event: nobody tells it.
        async with asyncio.timeout(30):
            while EAST in await rig.open_servers():  # noqa: ASYNC110 - the server does it
                await asyncio.sleep(0.05)
        with pytest.raises(MasterReadOnly):
            await rig.write(EAST, 2)
        now = await server_unix_ms(session, deadline=soon())
        assert not await renew_lease(session, now, deadline=soon())
        await rig.promoter().restore("db")
        assert await rig.open_servers() == {EAST}
        await revoke_lease(session, deadline=soon())
        assert not await renew_lease(session, now + 60_000, deadline=soon())
        await rig.close(EAST)
        await grant_lease(session, await server_unix_ms(session, deadline=soon()), deadline=soon())
        assert await rig.open_servers() == set(), "a lease does not open a server"
        await remove_lease(session, deadline=soon())
        assert await lease_seconds(session, deadline=soon()) == 0
        if positions:
            # Nothing of it is in the binlog, where the replica would take it over.
            assert await rig.rows(WEST, "SELECT 1 FROM information_schema.schemata WHERE schema_name = 'tao'") == []


async def is_mariadb(rig: ReplicationRig) -> bool:
    return "mariadb" in str((await rig.rows(EAST, "SELECT VERSION()"))[0][0]).lower()


async def test_under_semi_sync_what_no_replica_has_is_acknowledged_to_nobody(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        done = await rig.promoter().promote("db", Wish(WEST))
        assert done.waits_for_replica
        await rig.write(WEST, 1)
        # Received and not applied is acknowledged all the same, so only receiving may be stopped by a promotion.
        async with rig.session(EAST) as session:
            await stop_receiving(session, deadline=soon())
        writing = asyncio.create_task(rig.write(WEST, 2))
        async with rig.session(WEST) as session:
            async with asyncio.timeout(30):
                while await waiting_for_replica(rig, WEST) == 0:  # noqa: ASYNC110 - the server does it
                    await asyncio.sleep(0.01)
            assert not writing.done()
            # The fence ends it, and its client hears of no success.
            async with rig.session(WEST) as other:
                assert await fence(session, other, deadline=soon()) == 1
        with pytest.raises(TaoError) as found:
            await writing
        assert not isinstance(found.value, DeadlineExceeded)
        with suppress(PromotionRefused):  # the planned way: east cannot catch up with what is not sent
            await rig.promoter().restore("db")
        async with rig.session(WEST) as session:
            assert await acknowledging_replicas(session, deadline=soon()) == 1
        await assert_is_master(rig, WEST, EAST)


async def waiting_for_replica(rig: ReplicationRig, region: str) -> int:
    rows = await rig.rows(region, "SHOW FULL PROCESSLIST")
    return sum("semi-sync ACK" in str(row[6]) for row in rows)


async def test_a_master_that_closes_itself_while_a_commit_waits_for_a_replica_is_fenced_all_the_same(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        assert (await rig.promoter().promote("db", Wish(WEST))).waits_for_replica
        async with rig.session(EAST) as session:
            await stop_receiving(session, deadline=soon())
        async with rig.session(WEST) as session:
            await install_lease(session, EVENT_SECONDS, deadline=soon())
        writing = asyncio.create_task(rig.write(WEST, 1))
        async with asyncio.timeout(30):
            # The lease is over, and the event that closes the server waits for that commit, as everything does then.
            while not await waiting_to_close(rig):  # noqa: ASYNC110 - the server does it
                await asyncio.sleep(0.05)
        accounts = SetAccounts(rig.accounts.administrator, rig.accounts.replicator)
        await ReplicationSet(rig.database, accounts, seen_from="", statement_seconds=10).close(WEST)
        assert await rig.open_servers() == set()
        with pytest.raises(TaoError):
            await writing


async def waiting_to_close(rig: ReplicationRig) -> bool:
    rows = await rig.rows(WEST, "SHOW FULL PROCESSLIST")
    waits = any("semi-sync ACK" in str(row[6]) for row in rows)
    return waits and any(
        "read_only" in str(row[7]).lower() and "processlist" not in str(row[7]).lower() for row in rows
    )


async def test_a_server_that_rejoins_holds_up_no_commit_before_it_has_what_it_lacks(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        async with rig.session(WEST) as session:
            await detach(session, deadline=soon())
        await rig.write(EAST, 1)
        # It does not come in at its master, so it never has what it lacks.
        wrong = dataclasses.replace(rig.accounts, replicator=Account("tao_replicator", "not-its-password"))
        rejoining = asyncio.create_task(dataclasses.replace(rig, accounts=wrong).promoter().rejoin("db", WEST))
        async with asyncio.timeout(30):
            while not any(member.state and member.state.following for member in await rig.promoter().look("db")):  # noqa: ASYNC110 - the rejoin
                await asyncio.sleep(0.01)
        await rig.write(EAST, 2)
        rejoining.cancel()
        await asyncio.wait((rejoining,))
        assert not await waits_for_replica(rig, EAST)
        await rig.promoter().rejoin("db", WEST)
        assert await waits_for_replica(rig, EAST)
        await assert_is_master(rig, EAST, WEST)


async def test_a_restored_master_keeps_the_replica_that_acknowledges_already(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        await rig.promoter().restore("db")
        before = await sends_by(rig, EAST)
        assert len(before) == 1
        assert (await rig.promoter().restore("db")).following == [WEST]
        assert await sends_by(rig, EAST) == before
        assert await waits_for_replica(rig, EAST)


async def test_a_replica_that_stood_still_acknowledges_again_at_a_master_that_was_fenced_and_is_restored(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    """By the connection that it had, though the fence ended a commit that waited for it."""
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        await rig.promoter().restore("db")
        before = await sends_by(rig, EAST)
        pid = rig.servers[WEST].process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            writing = asyncio.create_task(rig.write(EAST, 1))
            async with asyncio.timeout(30):
                while await waiting_for_replica(rig, EAST) == 0:  # noqa: ASYNC110 - the server does it
                    await asyncio.sleep(0.01)
            await rig.close(EAST)
            with pytest.raises(TaoError):
                await writing
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await rig.promoter().restore("db")).waits_for_replica
        assert await sends_by(rig, EAST) == before
        await assert_is_master(rig, EAST, WEST)


async def sends_by(rig: ReplicationRig, region: str) -> list[int]:
    """The connections by which a server sends its binlog."""
    async with rig.session(region) as session:
        processes = await server_processes(session, deadline=soon())
    return [each.thread for each in processes if each.command.startswith("Binlog Dump")]


async def test_a_master_that_is_opened_waits_for_no_replica_that_is_marked(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        store, *_ = rig._parts()
        for down in (True, False):
            topology = await store.load()
            await store.change(topology.version, edits.mark_database_server(topology, WEST, down=down))
            done = await rig.promoter().restore("db")
            assert done.following == [WEST]
            assert done.waits_for_replica is not down
            assert await waits_for_replica(rig, EAST) is not down
