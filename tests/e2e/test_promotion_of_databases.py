"""Promotion on two real database servers: interrupted after each step, forced, rejected; leases; fences; rejoining."""

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
from tao.model.ids import RESERVED_AHEAD_MS, LostTimes
from tao.observability.logs import logger
from tao.replication.accounts import Account, ServiceAccounts
from tao.replication.lease import (
    EVENT_SECONDS,
    LeaseTerms,
    grant_lease,
    install_lease,
    lease_terms,
    remove_lease,
    renew_lease,
    revoke_lease,
    server_unix_ms,
)
from tao.replication.locks import LockTaken
from tao.replication.promotion import PromotionSettings, PromotionStep
from tao.replication.promotion_plan import PromotionRefused, PromotionRequest, ServerDiverged
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.replication.server_statements import acknowledging_replicas, detach, fence, server_processes, stop_receiving
from tao.topology import edits
from tao.topology.file_store import TopologyFile
from tao.watcher.server import WatcherServer
from tao.watcher.settings import LeaseSettings, ProbeSettings, WatcherSettings
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.replication_rig import (
    EAST,
    WEST,
    Killed,
    ReplicationRig,
    assert_is_master,
    replication_rig,
    statement_deadline,
    until_arrived,
    waits_for_replica,
)

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.waiting]


PLANNED_STEPS = [step for step in PromotionStep if step is not PromotionStep.OUTLAST]
"""Only the promotion after a loss has to outlast the old master."""


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


async def test_a_promotion_killed_before_any_step_is_finished_or_undone_by_the_next_run(rig: ReplicationRig) -> None:
    written = 0
    for step in PLANNED_STEPS:
        target = WEST if rig.database.master_region == EAST else EAST
        master = rig.database.master_region
        written += 1
        await rig.write(master, written)

        async def stop(at: PromotionStep, step: PromotionStep = step) -> None:
            if at is step:
                raise Killed

        with pytest.raises(Killed):
            await rig.promoter(stop).promote("db", PromotionRequest(target))
        assert len(await rig.open_servers()) <= 1, step
        await rig.promoter().restore("db")
        now = rig.database.master_region
        assert (now == target) is (
            list(PromotionStep).index(step) > list(PromotionStep).index(PromotionStep.RAISE_EPOCH)
        ), step
        await assert_is_master(rig, now, target if now == master else master)
        written += 1
        # The same command, run again, finishes the promotion.
        await rig.promoter().promote("db", PromotionRequest(target))
        await assert_is_master(rig, target, master)
        written = max(await rig.written(target))


async def test_writes_during_a_promotion_are_rejected_as_retryable(rig: ReplicationRig) -> None:
    refused: list[TaoError] = []

    async def write(step: PromotionStep) -> None:
        if step is not PromotionStep.FENCE:
            for region in (EAST, WEST):
                with pytest.raises(MasterReadOnly) as found:
                    await rig.write(region, 77)
                refused.append(found.value)

    done = await rig.promoter(write).promote("db", PromotionRequest(WEST))
    assert len(refused) == 2 * (len(PLANNED_STEPS) - 1)
    assert all(error.retryable for error in refused)
    assert (done.master, done.version_epoch, done.following, done.left) == (WEST, 2, [EAST], {})


async def test_a_transaction_that_was_open_at_the_fence_is_rolled_back(rig: ReplicationRig) -> None:
    async with rig.session(EAST, as_leader=True) as writer:
        await writer.run("INSERT INTO tao_00000.objects VALUES (9, 1, 1, 0, '')", deadline=statement_deadline())
        await rig.promoter().promote("db", PromotionRequest(WEST))
        with pytest.raises(MasterReadOnly):
            await writer.run("COMMIT", deadline=statement_deadline())
    assert await rig.written(EAST) == set()


async def test_a_lost_master_is_replaced_and_comes_back_by_one_command(rig: ReplicationRig) -> None:
    await rig.write(EAST, 1)
    await until_arrived(rig, WEST, 1)  # asynchronous: a kill before that would lose it
    await rig.servers[EAST].kill()
    with pytest.raises(PromotionRefused, match="--master-lost"):
        await rig.promoter().promote("db", PromotionRequest(WEST))
    await until_promoted(rig)
    assert await rig.written(WEST) == {1}
    assert rig.database.servers[EAST].down
    await rig.servers[EAST].start()
    assert await rig.open_servers() == {WEST}, "a server starts closed to writes"
    await rig.promoter().rejoin("db", EAST)
    assert not rig.database.servers[EAST].down
    await assert_is_master(rig, WEST, EAST)


async def test_a_former_master_that_has_not_rejoined_takes_its_place_again_only_when_an_operator_vouches_for_it(
    rig: ReplicationRig,
) -> None:
    """It has nothing of what its successor has acknowledged alone."""
    await rig.servers[EAST].kill()
    await until_promoted(rig)
    await rig.write(WEST, 2)
    await rig.servers[EAST].start()
    await rig.servers[WEST].kill()
    for region in (None, EAST):
        with pytest.raises(PromotionRefused, match="east was master earlier"):
            await rig.promoter().promote("db", PromotionRequest(region, master_lost=True))
    assert rig.database.master_region == WEST
    assert not await rig.rows(EAST, "SELECT 1 FROM DUAL WHERE @@GLOBAL.read_only = 0")
    vouched = PromotionRequest(EAST, master_lost=True, without=frozenset((WEST,)))
    done = await rig.promoter().promote("db", vouched)
    assert (done.master, done.region) == (EAST, EAST)
    await rig.write(EAST, 3)


async def test_a_paused_master_is_replaced_by_a_watcher_and_is_closed_when_it_resumes(
    rig: ReplicationRig,
) -> None:
    assert rig.accounts.watcher is not None
    settings = WatcherSettings(
        name="watcher",
        region=WEST,
        topology_file=rig.topology_path,
        administrator_user=rig.accounts.watcher.user,
        administrator_password=rig.accounts.watcher.password,
        replicator_password=rig.accounts.replicator.password,
        probes=ProbeSettings(interval_seconds=0.2, master_gone_seconds=2.0),
        lease=LeaseSettings(seconds=3.0),
        promotion=PromotionSettings(settle_seconds=0.0),
    )
    watcher = await WatcherServer(settings, logger("watcher")).start()
    try:
        async with asyncio.timeout(PATIENT_SECONDS), rig.session(EAST) as session:
            while await lease_terms(session, deadline=statement_deadline()) != settings.lease.terms(semi_sync=False):  # noqa: ASYNC110 - the watcher
                await asyncio.sleep(0.05)
        await rig.write(EAST, 1)
        await until_arrived(rig, WEST, 1)
        os.kill(rig.servers[EAST].process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(PATIENT_SECONDS):
                while rig.database.master_region != WEST or not await is_open(rig, WEST):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.05)
            await rig.write(WEST, 2)
        finally:
            os.kill(rig.servers[EAST].process.pid, signal.SIGCONT)
        assert rig.database.servers[EAST].down
        async with asyncio.timeout(PATIENT_SECONDS):
            while await is_open(rig, EAST):  # noqa: ASYNC110 - its lease is over, and its own event closes it
                await asyncio.sleep(0.05)
    finally:
        await watcher.close()
    await rig.promoter().rejoin("db", EAST)
    await assert_is_master(rig, WEST, EAST)


async def test_a_planned_switch_keeps_the_reserved_times_of_ids(rig: ReplicationRig) -> None:
    await reserve(rig, EAST, 1_900_000_000_000)
    await rig.promoter().promote("db", PromotionRequest(WEST))
    assert await reserved(rig, WEST) == {0: 1_900_000_000_000}


@pytest.mark.parametrize(
    ("stored", "lacks_epoch"), [(1_700_000_000_000, False), (1_700_000_000_000, True), (4_000_000_000_000, False)]
)
async def test_a_new_master_begins_above_the_ids_that_the_lost_one_can_have_reserved(
    rig: ReplicationRig, stored: int, lacks_epoch: bool
) -> None:
    await reserve(rig, EAST, stored)
    async with asyncio.timeout(PATIENT_SECONDS):
        while not await reserved(rig, WEST):  # noqa: ASYNC110 - the replica does it
            await asyncio.sleep(0.02)
    await rig.servers[EAST].kill()
    if lacks_epoch:
        raised = edits.raise_epochs(rig.topology, {"db": rig.database.version_epoch + 1})
        store = TopologyFile(rig.topology_path, on_error=lambda _: None)
        await store.change(rig.topology.version, raised)
    begun = (await rig.rows(WEST, "SELECT CAST(UNIX_TIMESTAMP() * 1000 AS UNSIGNED)"))[0][0]
    await until_promoted(rig)
    least = LostTimes.at(begun)
    found = await reserved(rig, WEST)
    least_known = max(least.begin(stored, lacks_epoch=lacks_epoch), stored + RESERVED_AHEAD_MS)
    assert found[0] >= least_known, "a shard whose last reservation is known"
    assert found[1] >= least.begin(0, lacks_epoch=lacks_epoch), "a shard without one"
    await rig.promoter().restore("db")
    assert await reserved(rig, WEST) == found, "what is up to date is left alone"


async def reserve(rig: ReplicationRig, region: str, until: int) -> None:
    """Reserve a time of shard 0, as its owner does."""
    async with rig.session(region, as_leader=True) as session:
        insert = "INSERT INTO tao_00000.reserved_ids VALUES (1, %s); COMMIT"
        await session.run(insert, (until,), deadline=statement_deadline())


async def reserved(rig: ReplicationRig, region: str) -> dict[int, int]:
    """Return the reserved time of each shard that has one."""
    found = [await rig.rows(region, f"SELECT * FROM tao_0000{shard}.reserved_ids") for shard in (0, 1)]
    return {shard: rows[0][1] for shard, rows in enumerate(found) if rows}


async def is_open(rig: ReplicationRig, region: str) -> bool:
    return not (await rig.rows(region, "SELECT @@GLOBAL.read_only"))[0][0]


async def until_promoted(rig: ReplicationRig) -> None:
    """Promote west once the replica has noticed the end of its connection; until then it prevents the promotion."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while any(member.receives for member in await rig.promoter().observe("db")):  # noqa: ASYNC110 - the replica does it
            await asyncio.sleep(0.02)
    await rig.promoter().promote("db", PromotionRequest(WEST, master_lost=True))


async def test_a_former_master_with_writes_of_its_own_is_rejected_with_their_transaction_ids(
    rig: ReplicationRig,
) -> None:
    async with rig.session(WEST) as session:
        await stop_receiving(session, deadline=statement_deadline())
    await rig.write(EAST, 1)  # asynchronous: only the client has the acknowledgement
    await rig.servers[EAST].kill()
    await until_promoted(rig)
    await rig.write(WEST, 2)
    await rig.servers[EAST].start()
    with pytest.raises(ServerDiverged, match="which the master west never had"):
        await rig.promoter().rejoin("db", EAST)
    assert await rig.open_servers() == {WEST}
    assert await rig.written(WEST) == {2}
    assert (await rig.promoter().restore("db")).left.keys() == {EAST}


async def test_only_one_process_changes_a_mastership_at_a_time(rig: ReplicationRig) -> None:
    async def other(step: PromotionStep) -> None:
        with pytest.raises(LockTaken):
            await rig.promoter().restore("db")

    await rig.promoter(other).promote("db", PromotionRequest(WEST))


async def test_a_server_closes_itself_when_its_lease_ends_and_no_renewal_revives_it(rig: ReplicationRig) -> None:
    terms = LeaseTerms(5 * EVENT_SECONDS, EVENT_SECONDS)  # what is done under it takes a slow machine seconds
    async with rig.session(EAST) as session:
        positions = await rig.rows(EAST, "SHOW MASTER STATUS") if await is_mariadb(rig) else []
        await install_lease(session, terms, deadline=statement_deadline())
        assert await lease_terms(session, deadline=statement_deadline()) == terms
        now = await server_unix_ms(session, deadline=statement_deadline())
        assert await renew_lease(session, now, terms, deadline=statement_deadline()), (
            "an open server is given a first lease"
        )
        await rig.write(EAST, 1)
        # The server's own event closes it, without a request.
        async with asyncio.timeout(PATIENT_SECONDS):
            while EAST in await rig.open_servers():  # noqa: ASYNC110 - the server does it
                await asyncio.sleep(0.05)
        with pytest.raises(MasterReadOnly):
            await rig.write(EAST, 2)
        now = await server_unix_ms(session, deadline=statement_deadline())
        assert not await renew_lease(session, now, terms, deadline=statement_deadline())
        await rig.promoter().restore("db")
        assert await rig.open_servers() == {EAST}
        await revoke_lease(session, deadline=statement_deadline())
        assert not await renew_lease(session, now + 60_000, terms, deadline=statement_deadline())
        await rig.close(EAST)
        await grant_lease(
            session, await server_unix_ms(session, deadline=statement_deadline()), deadline=statement_deadline()
        )
        assert await rig.open_servers() == set(), "a lease does not open a server"
        await remove_lease(session, deadline=statement_deadline())
        assert await lease_terms(session, deadline=statement_deadline()) == LeaseTerms()
        if positions:
            # The binlog has no trace of it, so the replica does not apply it.
            assert await rig.rows(WEST, "SELECT 1 FROM information_schema.schemata WHERE schema_name = 'tao'") == []


async def is_mariadb(rig: ReplicationRig) -> bool:
    return "mariadb" in str((await rig.rows(EAST, "SELECT VERSION()"))[0][0]).lower()


async def test_under_semi_sync_no_write_is_acknowledged_before_a_replica_has_it(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        done = await rig.promoter().promote("db", PromotionRequest(WEST))
        assert done.waits_for_replica
        await rig.write(WEST, 1)
        # A replica acknowledges what it has received, applied or not, so a promotion may stop only receiving.
        async with rig.session(EAST) as session:
            await stop_receiving(session, deadline=statement_deadline())
        writing = asyncio.create_task(rig.write(WEST, 2))
        async with rig.session(WEST) as session:
            async with asyncio.timeout(PATIENT_SECONDS):
                while await waiting_for_replica(rig, WEST) == 0:  # noqa: ASYNC110 - the server does it
                    await asyncio.sleep(0.01)
            assert not writing.done()
            # The fence ends the commit, and its client gets no acknowledgement.
            async with rig.session(WEST) as other:
                assert await fence(session, other, deadline=statement_deadline()) == 1
        with pytest.raises(TaoError) as found:
            await writing
        assert not isinstance(found.value, DeadlineExceeded)
        with suppress(PromotionRefused):  # the planned way: east cannot catch up with what is not sent
            await rig.promoter().restore("db")
        async with rig.session(WEST) as session:
            assert await acknowledging_replicas(session, deadline=statement_deadline()) == 1
        await assert_is_master(rig, WEST, EAST)


async def waiting_for_replica(rig: ReplicationRig, region: str) -> int:
    rows = await rig.rows(region, "SHOW FULL PROCESSLIST")
    return sum("semi-sync ACK" in str(row[6]) for row in rows)


async def test_a_master_that_closes_itself_while_a_commit_waits_for_a_replica_is_fenced_all_the_same(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        assert (await rig.promoter().promote("db", PromotionRequest(WEST))).waits_for_replica
        async with rig.session(EAST) as session:
            await stop_receiving(session, deadline=statement_deadline())
        async with rig.session(WEST) as session:
            await install_lease(session, LeaseTerms(EVENT_SECONDS), deadline=statement_deadline())
        writing = asyncio.create_task(rig.write(WEST, 1))
        async with asyncio.timeout(PATIENT_SECONDS):
            # The lease is over. The event that closes the server waits for that commit, as everything does then.
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
            await detach(session, deadline=statement_deadline())
        await rig.write(EAST, 1)
        # It cannot log in at its master, so it never receives what it lacks.
        wrong = dataclasses.replace(rig.accounts, replicator=Account("tao_replicator", "not-its-password"))
        rejoining = asyncio.create_task(dataclasses.replace(rig, accounts=wrong).promoter().rejoin("db", WEST))
        async with asyncio.timeout(PATIENT_SECONDS):
            while not any(member.state and member.state.following for member in await rig.promoter().observe("db")):  # noqa: ASYNC110 - the rejoin
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
    """The replica keeps its connection, although the fence ended a commit that waited for it."""
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        await rig.promoter().restore("db")
        before = await sends_by(rig, EAST)
        pid = rig.servers[WEST].process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            writing = asyncio.create_task(rig.write(EAST, 1))
            async with asyncio.timeout(PATIENT_SECONDS):
                while await waiting_for_replica(rig, EAST) == 0:
                    if writing.done():  # it was acknowledged before the replica stood still
                        await writing
                        writing = asyncio.create_task(rig.write(EAST, 2))
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
    """Return the ids of the connections by which a server sends its binlog."""
    async with rig.session(region) as session:
        processes = await server_processes(session, deadline=statement_deadline())
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
