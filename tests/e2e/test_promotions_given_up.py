"""Promotions that are given up, on two real database servers: the old master goes on with all that it has."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.model.errors import DeadlineExceeded
from tao.model.topology import Topology
from tao.storage.accounts import ServiceAccounts
from tao.storage.promotion import stop_receiving
from tao.topology import edits
from tao.topology.file_store import TopologyFile
from tao.watcher.promotion import Step
from tao.watcher.promotion_plan import MasterAnswers, Wish
from tests.rigs.replication_rig import EAST, WEST, ReplicationRig, assert_is_master, replication_rig, soon

pytestmark = [pytest.mark.database, pytest.mark.e2e]


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


async def test_a_master_that_answers_again_keeps_its_place_and_nothing_is_lost(rig: ReplicationRig) -> None:
    pid = rig.servers[EAST].process.pid
    for number, at in ((100, None), (200, Step.COMPARE), (300, Step.DETACH)):
        async with rig.session(WEST) as session:
            await stop_receiving(session, deadline=soon())
        await rig.write(EAST, number)  # asynchronous: nobody else has it
        if at is not None:
            os.kill(pid, signal.SIGSTOP)

        async def wake(step: Step, at: Step | None = at) -> None:
            if step is at:
                os.kill(pid, signal.SIGCONT)

        try:
            with pytest.raises(MasterAnswers):
                await rig.promoter(wake).promote("db", Wish(WEST, master_lost=True))
        finally:
            os.kill(pid, signal.SIGCONT)
        if at is None:
            assert await rig.open_servers() == {EAST}, "nothing was done"
            await rig.promoter().restore("db")
        await assert_is_master(rig, EAST, WEST)
        assert number in await rig.written(WEST)


async def test_a_promotion_that_fails_late_lets_the_old_master_go_on(rig: ReplicationRig) -> None:
    for at in (Step.APPLY, Step.DETACH):

        async def fail(step: Step, at: Step = at) -> None:
            if step is at:
                raise DeadlineExceeded("it hangs")

        with pytest.raises(DeadlineExceeded):
            await rig.promoter(fail).promote("db", Wish(WEST))
        await assert_is_master(rig, EAST, WEST)


async def test_a_mark_that_is_set_meanwhile_is_no_reason_to_begin_anew(rig: ReplicationRig) -> None:
    class Busy(TopologyFile):
        """Somebody is faster, once."""

        others = 1

        async def change(self, expected_version: int, changed: Topology) -> Topology:
            if self.others:
                self.others = 0
                before = await self.load()
                await super().change(before.version, edits.mark_server(before, "west-f", down=True))
            return await super().change(expected_version, changed)

    await rig.promoter(file=Busy).promote("db", Wish(WEST))
    assert rig.topology.regions[1].followers[0].servers[0].down
    await assert_is_master(rig, WEST, EAST)
