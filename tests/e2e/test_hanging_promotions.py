"""A process hangs in the middle of a change of mastership, on two real database servers."""

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

from tao.replication.accounts import ServiceAccounts
from tao.replication.locks import MASTERSHIP, FileLocks
from tao.replication.promotion import Promoter, PromotionSettings, PromotionStep
from tao.replication.promotion_plan import PromotionRequest
from tao.replication.replication_set import SetAccounts
from tao.topology.file_store import TopologyFile
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.replication_rig import EAST, WEST, ReplicationRig, assert_is_master, replication_rig

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.waiting]

PROMOTING = """
import os, runpy, signal, sys
from tao.replication.promotion import Promoter

begin, stops_at = Promoter._begin, sys.argv.pop(1)

async def begin_and_hang(self, replicas, step):
    await begin(self, replicas, step)
    if step.name == stops_at:
        os.kill(os.getpid(), signal.SIGSTOP)

Promoter._begin = begin_and_hang
runpy.run_module("tao.cli", run_name="__main__")
"""
"""The command, which stops itself: a step takes less time than it takes to stop it from outside."""

RENEWING = """
import asyncio, os, signal, sys
from pathlib import Path
from tao.replication.locks import FileLocks, mastership_lock

async def renew():
    async with FileLocks(Path(sys.argv[1])).held(mastership_lock("db"), exclusive=False):
        os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(renew())
"""


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


def patient(rig: ReplicationRig) -> Promoter:
    """Return a promoter that waits, as an operator or another watcher does, until a lock can be taken over."""
    file = TopologyFile(rig.topology_path, on_error=lambda error: pytest.fail(error.message))
    accounts = SetAccounts(rig.accounts.administrator, rig.accounts.replicator)
    settings = dataclasses.replace(PromotionSettings(), lock_seconds=4 * MASTERSHIP.takeover_seconds)
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
    async with asyncio.timeout(PATIENT_SECONDS):
        while not is_stopped(running.pid):  # noqa: ASYNC110 - the kernel does it
            await asyncio.sleep(0.01)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(
    "step", [PromotionStep.CATCH_UP, PromotionStep.DETACH, PromotionStep.TOPOLOGY, PromotionStep.OPEN]
)
async def test_a_hanging_promotion_is_finished_by_another_process_and_does_nothing_when_it_resumes(
    rig: ReplicationRig, step: PromotionStep
) -> None:
    await rig.write(EAST, 1)
    command = ("promote", "db", "--to", WEST, "--topology", str(rig.topology_path), "--yes")
    async with process(rig, "-c", PROMOTING, step.name, *command) as hung:
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


async def test_a_hanging_renewal_blocks_no_other(rig: ReplicationRig) -> None:
    async with process(rig, "-c", RENEWING, str(rig.topology_path)) as hung:
        await until_stopped(hung)
        await patient(rig).promote("db", PromotionRequest(WEST))
        await assert_is_master(rig, WEST, EAST)
