"""The watcher reports and repairs a replica seed that was interrupted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tao.devcluster.ports import LOOPBACK
from tao.model.errors import OperatorError
from tao.observability.logs import logger
from tao.replication.accounts import ServiceAccounts
from tao.replication.replica_seed import SeedStep
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.runtime.admin_client import admin_get
from tao.topology import edits
from tao.topology.file_store import TopologyFile
from tao.watcher.server import WatcherServer
from tao.watcher.settings import ProbeSettings, WatcherSettings
from tests.e2e.cluster_access import patient_stats
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.ports import free_ports
from tests.rigs.replication_rig import (
    EAST,
    WEST,
    Killed,
    assert_is_master,
    replication_rig,
    until_arrived,
    waits_for_replica,
)

pytestmark = [pytest.mark.database, pytest.mark.e2e]


async def test_the_watcher_reports_and_repairs_what_an_interrupted_seed_leaves(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with replication_rig(tmp_path, database_accounts, semi_sync=True) as rig:
        (port,) = free_ports(1)
        admin = f"{LOOPBACK}:{port}"
        settings = WatcherSettings(
            name="watcher",
            region=EAST,
            topology_file=rig.topology_path,
            administrator_user="tao_admin",
            administrator_password=rig.accounts.administrator.password,
            replicator_password=rig.accounts.replicator.password,
            probes=ProbeSettings(interval_seconds=0.1),
            leases=False,
            admin=admin,
        )
        watcher = await WatcherServer(settings, logger("watcher")).start()
        try:
            # The topology says semi_sync, and the master has not been configured for it yet.
            await until_shown(admin, "1.0")
            assert await waits_for_replica(rig, EAST)

            async def killed(step: SeedStep) -> None:
                if step is SeedStep.FOLLOW:
                    raise Killed

            with pytest.raises(Killed):
                await rig.reseeder(killed).seed(WEST)
            await until_shown(admin, "0.0")
            await rig.write(EAST, 1)  # on no other server
            # Finish by hand instead of the command: the server follows its master, and its mark is removed.
            accounts = SetAccounts(rig.accounts.administrator, rig.accounts.replicator)
            await ReplicationSet(rig.database, accounts, seen_from="", statement_seconds=10).follow(WEST, EAST)
            await until_arrived(rig, WEST, 1)
            assert not await waits_for_replica(rig, EAST), "it is marked, as one that is about to be stopped"
            with pytest.raises(OperatorError, match="no replica in use"):  # also with a topology read before the mark
                await rig.promoter().wait_for_replicas("db")
            file = TopologyFile(rig.topology_path, on_error=lambda error: pytest.fail(error.message))
            unmarked = edits.mark_database_server(rig.topology, WEST, down=False)
            await file.change(rig.topology.version, unmarked)
            await until_shown(admin, "1.0")
            assert await waits_for_replica(rig, EAST)
            async with asyncio.timeout(PATIENT_SECONDS):
                # The master waits before the action that made it wait is over, and counted.
                while (await patient_stats(admin))["actions"]["wait"] < 2:  # noqa: ASYNC110 - the watcher does it
                    await asyncio.sleep(0.02)
            assert (await patient_stats(admin))["actions"]["wait"] == 2
            await assert_is_master(rig, EAST, WEST)
        finally:
            await watcher.close()


async def until_shown(admin: str, value: str) -> None:
    """Wait until the watcher's gauge shows the value."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while await shown(admin) != [value]:  # noqa: ASYNC110 - the watcher does it
            await asyncio.sleep(0.02)


async def shown(admin: str) -> list[str]:
    _, body = await admin_get(admin, "/metrics")
    return [
        line.rpartition(" ")[2] for line in body.decode().splitlines() if line.startswith("tao_waits_for_replica_info{")
    ]
