"""A server that gave up its lease is distinguished from one that keeps a lease, and from one that never did."""

from __future__ import annotations

import asyncio

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.replication.lease import LeaseTerms, has_abandoned_lease, install_lease, remove_lease
from tao.storage.session import ServerAccount, open_session
from tao.storage.writes import WRITE_SETUP
from tests.conformance.store.stores import SERVER
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = pytest.mark.database


async def test_a_lease_without_its_event_is_abandoned_until_its_row_is_cleared(
    database_server: DatabaseInstance,
) -> None:
    user = database_server.accounts.administrator
    account = ServerAccount("127.0.0.1", database_server.port, user.user, user.password, socket="", tls=None)
    deadline = asyncio.get_running_loop().time() + PATIENT_SECONDS
    session = await open_session(account, SERVER, WRITE_SETUP, deadline=deadline)
    try:
        assert not await has_abandoned_lease(session, deadline=deadline)
        await install_lease(session, LeaseTerms(3_600), deadline=deadline)
        assert not await has_abandoned_lease(session, deadline=deadline)
        await session.run("DROP EVENT tao.close_without_lease", deadline=deadline)
        assert await has_abandoned_lease(session, deadline=deadline)
        await remove_lease(session, deadline=deadline)
        assert not await has_abandoned_lease(session, deadline=deadline)
    finally:
        await session.run("DROP SCHEMA tao", deadline=deadline)
        session.quit()
