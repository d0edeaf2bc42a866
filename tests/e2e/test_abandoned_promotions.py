"""Promotions that are abandoned, on two real database servers: the old master continues and keeps all its data."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.model.errors import DeadlineExceeded
from tao.model.topology import Topology
from tao.replication.accounts import ServiceAccounts
from tao.replication.promotion import PromotionStep
from tao.replication.promotion_plan import MasterAnswers, PromotionRequest
from tao.replication.server_statements import MemberState, member_state, stop_receiving
from tao.topology import edits
from tao.topology.file_store import TopologyFile
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.replication_rig import (
    EAST,
    WEST,
    Killed,
    ReplicationRig,
    assert_is_master,
    replication_rig,
    statement_deadline,
)

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.waiting]


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


async def test_a_master_that_answers_again_keeps_its_place_and_nothing_is_lost(rig: ReplicationRig) -> None:
    pid = rig.servers[EAST].process.pid
    for number, at in ((100, None), (200, PromotionStep.COMPARE), (300, PromotionStep.DETACH)):
        async with rig.session(WEST) as session:
            await stop_receiving(session, deadline=statement_deadline())
        await rig.write(EAST, number)  # asynchronous: no other server has it
        if at is not None:
            os.kill(pid, signal.SIGSTOP)

        async def wake(step: PromotionStep, at: PromotionStep | None = at) -> None:
            if step is at:
                os.kill(pid, signal.SIGCONT)
                for _ in range(3):  # by then it has answered the promotion's questions, which are older
                    async with rig.session(EAST) as session:
                        await session.run("SELECT 1; ROLLBACK", deadline=statement_deadline())

        try:
            with pytest.raises(MasterAnswers):
                await rig.promoter(wake).promote("db", PromotionRequest(WEST, master_lost=True))
        finally:
            os.kill(pid, signal.SIGCONT)
        if at is None:
            assert await rig.open_servers() == {EAST}, "nothing was done"
            await rig.promoter().restore("db")
        await assert_is_master(rig, EAST, WEST)
        assert number in await rig.written(WEST)


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("it hangs"), OSError("no room"), asyncio.CancelledError()], ids=repr
)
async def test_a_promotion_that_fails_late_lets_the_old_master_go_on(rig: ReplicationRig, error: BaseException) -> None:
    for at in (PromotionStep.APPLY, PromotionStep.DETACH):

        async def fail(step: PromotionStep, at: PromotionStep = at) -> None:
            if step is at:
                raise error

        with pytest.raises(type(error)):
            await rig.promoter(fail).promote("db", PromotionRequest(WEST))
        await assert_is_master(rig, EAST, WEST)


async def test_an_interrupted_promotion_is_given_up_when_the_old_master_has_gone_on_without_its_server(
    rig: ReplicationRig,
) -> None:
    async def die(step: PromotionStep) -> None:
        if step is PromotionStep.TOPOLOGY:
            raise Killed

    async def take(region: str) -> None:
        async with rig.session(region) as session:
            await session.run("UPDATE tao_00000.shard SET owner = 'east-l'; COMMIT", deadline=statement_deadline())

    await take(EAST)
    with pytest.raises(Killed):
        await rig.promoter(die).promote("db", PromotionRequest(WEST))
    await rig.servers[WEST].kill()
    await rig.promoter().restore("db")
    await rig.write(EAST, 100)  # nobody else has it
    await rig.servers[WEST].start()
    done = await rig.promoter().restore("db")
    assert (done.master, [*done.left]) == (EAST, [WEST])
    assert await rig.open_servers() == {EAST}
    assert await rig.written(EAST) == {100}
    assert rig.database.version_epoch == done.version_epoch > 2, "above the epoch that the west was given"
    ((master, epoch),) = await rig.rows(EAST, "SELECT master_server, version_epoch FROM tao_00000.shard")
    assert (master.decode(), epoch) == (EAST, done.version_epoch)
    await rig.reseeder().seed(WEST)
    await assert_is_master(rig, EAST, WEST)


async def test_a_mark_set_during_a_promotion_does_not_restart_it(rig: ReplicationRig) -> None:
    class Busy(TopologyFile):
        """A topology file that another process changes first, once."""

        others = 1

        async def change(self, expected_version: int, changed: Topology) -> Topology:
            if self.others:
                self.others = 0
                before = await self.load()
                await super().change(before.version, edits.mark_server(before, "west-f", down=True))
            return await super().change(expected_version, changed)

    await rig.promoter(file=Busy).promote("db", PromotionRequest(WEST))
    assert rig.topology.regions[1].followers[0].servers[0].down
    await assert_is_master(rig, WEST, EAST)


async def test_a_replica_that_was_stopped_while_its_master_was_gone_still_reports_an_error_and_has_not_failed(
    rig: ReplicationRig,
) -> None:
    async def state() -> MemberState:
        async with rig.session(WEST) as session:
            return await member_state(session, deadline=statement_deadline())

    await rig.servers[EAST].kill()
    async with asyncio.timeout(PATIENT_SECONDS):
        while not ((found := (await state()).following) and found.error):  # noqa: ASYNC110 - the server reports it
            await asyncio.sleep(0.05)
    assert not found.receiving_stopped
    async with rig.session(WEST) as session:
        await stop_receiving(session, deadline=statement_deadline())
    stopped = (await state()).following
    assert stopped is not None
    assert (stopped.receiving_stopped, stopped.receiving_failed) == (True, False)
    assert stopped.error
