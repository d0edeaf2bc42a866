"""A replica is put back into use: not before it has caught up, and not without end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.cli.draining import marked
from tao.cli.draining_databases import undrain_replica
from tao.cli.promote import promoter_of
from tao.storage.accounts import Account, ServiceAccounts
from tao.storage.replication import detach
from tao.watcher.replication_set import SetAccounts
from tests.rigs.replication_rig import EAST, WEST, ReplicationRig, replication_rig, soon

pytestmark = [pytest.mark.database, pytest.mark.e2e]


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


async def test_a_replica_that_has_not_caught_up_in_time_stays_marked_and_is_said_to_be_waited_for(
    rig: ReplicationRig,
) -> None:
    file = rig.topology_path
    accounts = SetAccounts(rig.accounts.administrator, rig.accounts.replicator)
    await marked(file, WEST, down=True)
    async with rig.session(WEST) as session:
        await detach(session, deadline=soon())
    await rig.write(EAST, 1)
    # It does not come in at its master, so it never has what it lacks.
    wrong = SetAccounts(rig.accounts.administrator, Account("tao_replicator", "not-its-password"))
    found = await undrain_replica(file, promoter_of(file, wrong, True, catch_up_seconds=0.2), WEST)
    assert (found.waiting_for, found.marked) == ([f"{WEST} to catch up with its master"], True)
    assert rig.database.servers[WEST].down
    found = await undrain_replica(file, promoter_of(file, accounts, True, catch_up_seconds=60.0), WEST)
    assert (found.waiting_for, found.marked) == ([], False)
    assert not rig.database.servers[WEST].down
