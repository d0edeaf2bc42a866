"""A replica that has a transaction, and whose acknowledgement is lost together with its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tao.model.topology import DatabaseAddress
from tao.replication.accounts import ServiceAccounts
from tao.replication.server_statements import (
    acknowledge_as_replica,
    acknowledging_replicas,
    member_state,
    set_semi_sync,
    stop_receiving,
    waiting_statements,
)
from tao.topology.document import dump_topology
from tests.rigs.cuts import Cut
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.replication_rig import (
    EAST,
    WEST,
    ReplicationRig,
    replication_rig,
    statement_deadline,
    until_arrived,
)

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.waiting]


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[ReplicationRig]:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        async with rig.session(WEST) as west:
            await acknowledge_as_replica(west, deadline=statement_deadline())
        yield rig


async def receive_by(rig: ReplicationRig, port: int) -> None:
    """Have west receive by this way to east, which the topology names, and east wait for its acknowledgements."""
    address = DatabaseAddress(host="127.0.0.1", port=port)
    master = replace(rig.database.servers[EAST], reached_from={WEST: address})
    database = replace(rig.database, servers={**rig.database.servers, EAST: master})
    rig.topology_path.write_text(dump_topology(replace(rig.topology, databases=(database,))))
    async with rig.session(WEST) as west:
        for sql in ("STOP SLAVE", f"CHANGE MASTER TO MASTER_PORT={port}, MASTER_CONNECT_RETRY=1", "START SLAVE"):
            await west.run(sql, deadline=statement_deadline())
    await until_acknowledged(rig)
    async with rig.session(EAST) as east:
        await set_semi_sync(east, waits=True, deadline=statement_deadline())


async def until_acknowledged(rig: ReplicationRig) -> None:
    """Wait until west is connected to east, and acknowledges."""
    async with rig.session(EAST) as east, asyncio.timeout(PATIENT_SECONDS):
        # The server calls nobody.
        while not await acknowledging_replicas(east, deadline=statement_deadline()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def until_waiting(rig: ReplicationRig, executed: str = "") -> str:
    """Wait until a commit of east waits for an acknowledgement, and more is in its binlog than ``executed``. Returns
    what is."""
    async with rig.session(EAST) as east, asyncio.timeout(PATIENT_SECONDS):
        while True:
            state = await member_state(east, deadline=statement_deadline())
            if state.waiting_commits and str(state.executed) != executed:
                return str(state.executed)
            await asyncio.sleep(0.05)


async def test_commits_whose_acknowledgements_were_lost_succeed(rig: ReplicationRig) -> None:
    way = Cut(rig.servers[EAST].port)
    await way.heal()
    await receive_by(rig, way.port)
    await rig.write(EAST, 1)
    way.loses_requests = True
    writes = [asyncio.ensure_future(rig.write(EAST, 2))]
    await until_arrived(rig, WEST, 2)
    first = await until_waiting(rig)
    # The next group is written to the binlog, and arrives, behind the one that waits.
    writes += [asyncio.ensure_future(rig.write(EAST, number)) for number in range(3, 6)]
    await until_waiting(rig, first)
    await way.cut()
    way.loses_requests = False
    await way.heal()
    await until_acknowledged(rig)
    async with asyncio.timeout(PATIENT_SECONDS):
        while not all(write.done() for write in writes):
            await rig.promoter().end_lost_waits("db")
            await asyncio.sleep(0.05)
    await asyncio.gather(*writes)
    await until_arrived(rig, WEST, 5)
    assert await rig.written(WEST) == {1, 2, 3, 4, 5}
    await rig.write(EAST, 6)
    await way.cut()


async def test_a_commit_that_no_replica_has_received_goes_on_to_wait(rig: ReplicationRig) -> None:
    await receive_by(rig, rig.servers[EAST].port)
    async with rig.session(WEST) as west:
        await stop_receiving(west, deadline=statement_deadline())
    write = asyncio.ensure_future(rig.write(EAST, 1))
    await until_waiting(rig)
    await rig.promoter().end_lost_waits("db")
    async with rig.session(EAST) as east:
        assert len(await waiting_statements(east, deadline=statement_deadline())) == 1
    assert not write.done()
    async with rig.session(WEST) as west:
        await west.run("START SLAVE", deadline=statement_deadline())
    await write
