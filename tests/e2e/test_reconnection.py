"""A replica that has lost its connection to its master, and is made to connect again before its own next attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from tao.model.topology import DatabaseAddress
from tao.replication.accounts import ServiceAccounts
from tao.replication.locks import FileLocks, LockTaken, hold_exclusively, mastership_lock
from tao.replication.server_statements import ReplicationStatus, replication_status, stop_receiving
from tao.topology.document import dump_topology
from tests.rigs.cuts import Cut
from tests.rigs.replication_rig import EAST, WEST, ReplicationRig, replication_rig, statement_deadline, until_arrived

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.waiting]

RETRY_SECONDS = 3_600
"""Longer than any test: the replica never connects again by itself."""


@dataclass
class CutOff:
    """West follows east by a way that can be cut."""

    rig: ReplicationRig
    way: Cut

    async def status(self) -> ReplicationStatus:
        async with self.rig.session(WEST) as west:
            status = await replication_status(west, deadline=statement_deadline())
        assert status is not None
        return status

    async def until_receiving(self, receiving: bool) -> None:
        async with asyncio.timeout(60):
            # The server calls nobody.
            while (await self.status()).receiving is not receiving:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.fixture
async def cut_off(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[CutOff]:
    async with replication_rig(tmp_path, database_accounts) as rig:
        way = Cut(rig.servers[EAST].port)
        await way.heal()
        address = DatabaseAddress(host="127.0.0.1", port=way.port)
        master = replace(rig.database.servers[EAST], reached_from={WEST: address})
        database = replace(rig.database, servers={**rig.database.servers, EAST: master})
        rig.topology_path.write_text(dump_topology(replace(rig.topology, databases=(database,))))
        async with rig.session(WEST) as west:
            change = f"CHANGE MASTER TO MASTER_PORT={way.port}, MASTER_CONNECT_RETRY={RETRY_SECONDS}"
            for sql in ("STOP SLAVE", change, "START SLAVE"):
                await west.run(sql, deadline=statement_deadline())
        found = CutOff(rig, way)
        await found.until_receiving(True)
        await way.cut()
        await found.until_receiving(False)
        yield found
        await way.cut()


async def test_a_replica_connects_again_before_its_next_attempt_is_due(cut_off: CutOff) -> None:
    rig = cut_off.rig
    await rig.write(EAST, 1)
    await cut_off.way.heal()
    assert await rig.promoter().connect_again("db", WEST)
    await cut_off.until_receiving(True)
    await until_arrived(rig, WEST, 1)
    assert not await rig.promoter().connect_again("db", WEST), "it receives"


async def test_a_replica_that_was_stopped_stays_stopped(cut_off: CutOff) -> None:
    """A promotion stops the server that it chooses: what that received later, other servers would lack."""
    async with cut_off.rig.session(WEST) as west:
        await stop_receiving(west, deadline=statement_deadline())
    await cut_off.way.heal()
    assert not await cut_off.rig.promoter().connect_again("db", WEST)
    assert (await cut_off.status()).stopped


async def test_nobody_connects_a_replica_while_its_master_is_being_changed(cut_off: CutOff) -> None:
    locks = FileLocks(cut_off.rig.topology_path)
    async with hold_exclusively(locks, mastership_lock("db"), 10.0):
        with pytest.raises(LockTaken):
            await cut_off.rig.promoter().connect_again("db", WEST)
