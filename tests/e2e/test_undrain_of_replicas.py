"""A replica is put back into use only after it has caught up, and the wait for that is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.admin.documents import mark_in_file, topology_file
from tao.admin.drain import undrain_replica
from tao.replication.accounts import Account, ServiceAccounts
from tao.replication.locks import FileLocks
from tao.replication.promotion import Promoter, PromotionSettings
from tao.replication.replication_set import SetAccounts
from tao.replication.server_statements import detach
from tests.rigs.replication_rig import EAST, WEST, ReplicationRig, replication_rig, statement_deadline

pytestmark = [pytest.mark.database, pytest.mark.e2e]


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        yield rig


def promoter(file: Path, accounts: SetAccounts, catch_up_seconds: float) -> Promoter:
    settings = PromotionSettings(catch_up_seconds=catch_up_seconds)
    return Promoter(topology_file(file), FileLocks(file), accounts, settings)


async def test_a_replica_that_has_not_caught_up_in_time_stays_marked_and_is_reported_as_awaited(
    rig: ReplicationRig,
) -> None:
    file = rig.topology_path
    accounts = SetAccounts(rig.accounts.administrator, rig.accounts.replicator)
    await mark_in_file(file, WEST, down=True)
    async with rig.session(WEST) as session:
        await detach(session, deadline=statement_deadline())
    await rig.write(EAST, 1)
    # It cannot log in at its master, so it never receives what it lacks.
    wrong = SetAccounts(rig.accounts.administrator, Account("tao_replicator", "not-its-password"))
    found = await undrain_replica(file, promoter(file, wrong, 0.2), WEST)
    assert (found.waiting_for, found.marked) == ([f"{WEST} to catch up with its master"], True)
    assert rig.database.servers[WEST].down
    found = await undrain_replica(file, promoter(file, accounts, 60.0), WEST)
    assert (found.waiting_for, found.marked) == ([], False)
    assert not rig.database.servers[WEST].down
