"""`tao promote`, `rejoin` and `reseed` as an operator or a script runs them: their questions, output and exit
status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tao.cli.commands import tao
from tao.replication.accounts import ServiceAccounts
from tests.rigs.replication_rig import EAST, WEST, ReplicationRig, replication_rig

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.waiting]

PROMOTE = ("promote", "db", "--to", WEST)
REJOIN = ("rejoin", WEST)
RESEED = ("reseed", WEST)


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


async def call(rig: ReplicationRig, *words: str, typed: str = "") -> Result:
    """Run a command with ``typed`` as the input of a person; by default there is none."""
    passwords = {
        "TAO_ADMIN_PASSWORD": rig.accounts.administrator.password,
        "TAO_REPLICATOR_PASSWORD": rig.accounts.replicator.password,
    }
    argv = [*words, "--topology", str(rig.topology_path)]
    return await asyncio.to_thread(CliRunner().invoke, tao, argv, input=typed, env=passwords, catch_exceptions=False)


async def done(rig: ReplicationRig, *words: str, status: int = 0) -> dict[str, Any]:
    """Return the one JSON document that a script reads, after asserting that standard error is empty."""
    result = await call(rig, *words, "--yes", "--json")
    assert (result.exit_code, result.stderr) == (status, "")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


async def test_without_confirmation_nothing_is_changed(rig: ReplicationRig) -> None:
    before = rig.topology
    for words in (PROMOTE, REJOIN, RESEED):
        for options in ((), ("--json",)):
            for typed, status, said in (("n\n", 1, "nothing was changed"), ("", 2, "--yes")):
                result = await call(rig, *words, *options, typed=typed)
                assert (result.exit_code, said in result.stderr) == (status, True), (words, options, result.stderr)
                assert not (options and result.stdout), "a script that did nothing gets nothing"
    assert rig.topology == before
    assert await rig.open_servers() == {EAST}


async def test_each_command_reports_its_steps_and_ends_with_what_is_left_to_do(rig: ReplicationRig) -> None:
    promoted = await done(rig, *PROMOTE)
    assert (promoted["database"], promoted["master"], promoted["region"]) == ("db", WEST, WEST)
    assert (promoted["following"], promoted["left"], promoted["waits_for_replica"]) == ([EAST], {}, False)
    assert (promoted["version_epoch"], promoted["topology_version"]) == (2, rig.topology.version)
    assert await done(rig, "rejoin", EAST) == {"server": EAST, "follows": WEST}
    reseeded = await done(rig, "reseed", EAST)
    assert (reseeded["server"], reseeded["follows"], reseeded["shards"]) == (EAST, WEST, 2)
    await rig.servers[WEST].kill()
    left = await done(rig, "promote", "db", "--to", EAST, "--master-lost", status=4)
    assert (left["master"], left["following"], list(left["left"])) == (EAST, [], [WEST])


async def test_a_rejected_promotion_prints_one_line_and_exits_with_status_2(rig: ReplicationRig) -> None:
    await rig.servers[EAST].kill()
    for options in ((), ("--json",)):
        result = await call(rig, *PROMOTE, "--yes", *options)
        assert result.exit_code == 2
        assert "--master-lost" in result.stderr
