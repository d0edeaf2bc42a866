"""The folder with the topology document disappears, as a mount does: no process can take a lock or see its holder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tao.devcluster.ports import LOOPBACK
from tao.observability.logs import logger
from tao.replication.accounts import ServiceAccounts
from tao.topology.document import parse_topology
from tao.watcher.server import WatcherServer
from tao.watcher.settings import LeaseSettings, ProbeSettings, WatcherSettings
from tests.e2e.cluster_access import patient_stats
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.ports import free_ports
from tests.rigs.replication_rig import EAST, WEST, replication_rig

pytestmark = [pytest.mark.database, pytest.mark.e2e]


async def test_masters_close_themselves_while_the_folder_is_missing_and_reopen_when_it_returns(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    shared, away = tmp_path / "shared", tmp_path / "away"
    file = shared / "topology.json"
    shared.mkdir()
    async with replication_rig(tmp_path, database_accounts) as rig:
        rig.topology_path.rename(file)
        (port,) = free_ports(1)
        admin = f"{LOOPBACK}:{port}"
        settings = WatcherSettings(
            name="watcher",
            region=EAST,
            topology_file=file,
            administrator_user="tao_admin",
            administrator_password=rig.accounts.administrator.password,
            replicator_password=rig.accounts.replicator.password,
            probes=ProbeSettings(interval_seconds=0.2),
            lease=LeaseSettings(seconds=3.0),
            admin=admin,
        )

        async def acts_and_renews() -> bool:
            stats = await patient_stats(admin)
            return bool(stats["active"] and stats["renewed_leases"])

        async def is_closed() -> bool:
            return EAST not in await rig.open_servers()

        async def is_open() -> bool:
            return not await is_closed()

        async def is_marked() -> bool:
            return parse_topology(file.read_bytes(), "topology").databases[0].servers[WEST].down

        watcher = await WatcherServer(settings, logger("watcher")).start()
        try:
            with capture_logs() as logs:
                await until(acts_and_renews)
                await rig.write(EAST, 1)
                shared.rename(away)
                await rig.servers[WEST].kill()  # a condition for which it would set a mark
                del rig.servers[WEST]
                await until(is_closed)
                assert not (await patient_stats(admin))["active"]
                assert await rig.written(EAST) == {1}, "reads must continue"
                away.rename(shared)
                await until(is_open)
                await rig.write(EAST, 2)
                await until(is_marked)
        finally:
            await watcher.close()
        assert not [each for each in logs if "task failed" in each["event"]]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while not await holds():  # noqa: ASYNC110 - servers do it
            await asyncio.sleep(0.05)
