"""A process that stands still in the middle of a change of mastership, on two real database servers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tao.storage.accounts import ServiceAccounts
from tao.topology.file_store import TopologyFile
from tao.watcher.locks import MASTERSHIP, FileLocks
from tao.watcher.promotion import Promoter, Step
from tao.watcher.promotion_plan import Wish
from tao.watcher.replication_set import SetAccounts
from tao.watcher.settings import PromotionSettings
from tests.rigs.replication_rig import EAST, WEST, ReplicationRig, assert_is_master, replication_rig

pytestmark = [pytest.mark.database, pytest.mark.e2e]

RENEWING = """
import os, signal, sys
from pathlib import Path
from tao.watcher.locks import FileLocks, mastership_lock
with FileLocks(Path(sys.argv[1])).held(mastership_lock("db"), alone=False):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


def patient(rig: ReplicationRig) -> Promoter:
    """As an operator or another watcher: waits until a lock can be taken over."""
    file = TopologyFile(rig.topology_path, on_error=lambda error: pytest.fail(error.message))
    accounts = SetAccounts(rig.accounts.administrator, rig.accounts.replicator)
    settings = dataclasses.replace(PromotionSettings(), lock_seconds=4 * MASTERSHIP.hung_seconds)
    return Promoter(file, FileLocks(rig.topology_path), accounts, settings)


@asynccontextmanager
async def process(rig: ReplicationRig, *words: str) -> AsyncIterator[Process]:
    passwords = {
        "TAO_ADMIN_PASSWORD": rig.accounts.administrator.password,
        "TAO_REPLICATOR_PASSWORD": rig.accounts.replicator.password,
    }
    running = await asyncio.create_subprocess_exec(sys.executable, *words, env=os.environ | passwords, stderr=PIPE)
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
            running.send_signal(signal.SIGCONT)
            await running.wait()


async def until_stopped(running: Process) -> None:
    async with asyncio.timeout(30):
        while not is_stopped(running.pid):  # noqa: ASYNC110 - the kernel does it
            await asyncio.sleep(0.01)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("step", [Step.CATCH_UP, Step.DETACH, Step.TOPOLOGY, Step.OPEN])
async def test_a_promotion_that_hangs_is_ended_by_another_hand_and_does_nothing_more_when_it_wakes(
    rig: ReplicationRig, step: Step
) -> None:
    await rig.write(EAST, 1)
    command = ("-m", "tao.cli", "promote", "db", "--to", WEST, "--topology", str(rig.topology_path), "--yes")
    async with process(rig, *command) as hung:
        assert hung.stderr is not None
        async with asyncio.timeout(60):
            while step.value not in (line := (await hung.stderr.readline()).decode()):
                assert line, "it ended"
        hung.send_signal(signal.SIGSTOP)
        await until_stopped(hung)
        await patient(rig).restore("db")
        master, other = (WEST, EAST) if rig.database.master_region == WEST else (EAST, WEST)
        await assert_is_master(rig, master, other)
        version = rig.topology.version
        hung.send_signal(signal.SIGCONT)
        _, errors = await hung.communicate()
        assert hung.returncode
        assert b"stood still" in errors
    assert rig.topology.version == version
    await assert_is_master(rig, master, other)


async def test_a_renewal_that_hangs_is_in_nobody_s_way(rig: ReplicationRig) -> None:
    async with process(rig, "-c", RENEWING, str(rig.topology_path)) as hung:
        await until_stopped(hung)
        await patient(rig).promote("db", Wish(WEST))
        await assert_is_master(rig, WEST, EAST)
