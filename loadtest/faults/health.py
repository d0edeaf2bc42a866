"""Whether a cluster is healthy after a fault, so that the next fault is a single failure; and what an operator does to
make it so."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Final

from loadtest.commands import TAO, run_command
from loadtest.region_cluster import RegionCluster
from tao.admin.replication import replicas, replication_states
from tao.admin.server_stats import server_stats
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Role
from tao.model.errors import OperatorError, TaoError
from tao.model.topology import DatabaseServer
from tao.replication.accounts import Account
from tao.replication.server_statements import acknowledging_replicas, member_state
from tao.runtime.admin_client import admin_get
from tao.storage.dialect import SessionSetup
from tao.storage.session import ServerAccount, open_session

_LOOK_SECONDS: Final = 0.2
_STATEMENT_SECONDS: Final = 5.0
_HTTP_OK: Final = 200


async def until_well(regions: RegionCluster, seconds: float) -> None:
    """Return when the cluster is healthy. Former masters rejoin by the operator's command, as no server does by itself.

    Raises `OperatorError` with what is still wrong."""
    found: list[str] = []
    try:
        async with asyncio.timeout(seconds):
            while found := await problems(regions):
                for name in await _former_masters(regions):
                    await bring_back(regions, name)
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise OperatorError(f"not well {seconds:g} s after it was mended: {'; '.join(found)}") from None


async def problems(regions: RegionCluster) -> list[str]:
    """List what is wrong: processes that do not run or are not ready, servers marked down, replicas that do not follow,
    and masters whose commits would not wait for a replica."""
    cluster = regions.cluster
    missing = [f"{name} does not run" for name in cluster.processes if name not in cluster.running]
    if missing:
        return missing
    try:
        topology = regions.topology
    except (OSError, OperatorError) as error:
        return [str(error)]
    tiers = [tier for region in topology.regions for tier in (region.leaders, *region.followers)]
    found = [f"{server.name} is marked" for tier in tiers for server in tier.servers if server.down]
    found += [
        f"{server.name} is marked" for each in topology.databases for server in each.servers.values() if server.down
    ]
    states = await replication_states(topology, regions.accounts.administrator)
    for each in topology.databases:
        master = each.servers[each.master_region]
        if states[master.name].part != "master":
            found.append(f"{master.name} should be master and is {states[master.name]}")
        elif each.semi_sync:
            found += await _semi_sync_problems(master, regions.accounts.administrator)
    for name, state in ((replica.server.name, states[replica.server.name]) for replica in replicas(topology)):
        if state.part != "replica" or not (state.receiving and state.applying) or state.lag_seconds:
            found.append(f"{name} does not follow: {state}")
    roles = (Role.LEADER, Role.FOLLOWER, Role.TAILER, Role.WATCHER, Role.WORKER)
    names = [name for name, role in cluster.processes.items() if role in roles]
    return found + [each for each in await asyncio.gather(*(_unready(cluster, name) for name in names)) if each]


async def _former_masters(regions: RegionCluster) -> list[str]:
    """List the servers that should be replicas and follow nobody."""
    topology = regions.topology
    states = await replication_states(topology, regions.accounts.administrator)
    return [each.server.name for each in replicas(topology) if states[each.server.name].part == "master"]


async def _semi_sync_problems(master: DatabaseServer, administrator: Account) -> list[str]:
    name = master.name
    account = ServerAccount(
        master.host, master.port, administrator.user, administrator.password, master.socket, tls=None
    )
    deadline = asyncio.get_running_loop().time() + _STATEMENT_SECONDS
    try:
        session = await open_session(account, name, SessionSetup(writes=True), deadline=deadline)
        try:
            state = await member_state(session, deadline=deadline)
            if state.read_only:
                return [f"{name} is closed to writes"]
            if not state.waits_for_replica:
                return [f"commits of {name} wait for no replica"]
            return [] if await acknowledging_replicas(session, deadline=deadline) else [f"{name} has no replica"]
        finally:
            session.quit()
    except TaoError as error:
        return [f"{name}: {error.message}"]


async def _unready(cluster: DevCluster, name: str) -> str:
    try:
        status, body = await admin_get(cluster.admin(name), "/ready")
        if status != _HTTP_OK:
            return f"{name}: {body.decode(errors='replace').strip()}"
        if cluster.processes[name] is Role.TAILER:
            trouble = (await server_stats(cluster.admin(name)))["trouble"]
            return f"{name}: {trouble}" if trouble else ""
    except TaoError as error:
        return f"{name}: {error.message}"
    return ""


_COMMAND_SECONDS: Final = 120.0
_REJOIN_SECONDS: Final = 180.0
_REJOIN_PAUSE_SECONDS: Final = 1.0
"""The watcher may still be at work on a server that has just come back."""


async def bring_back(regions: RegionCluster, name: str) -> str:
    """Have a former master rejoin, or seed it anew when it is refused for transactions that it alone has.

    Returns "rejoined" or "seeded". Raises `OperatorError`."""
    said = ""
    with suppress(TimeoutError):
        async with asyncio.timeout(_REJOIN_SECONDS):
            while True:
                status, said = await operator_command(regions, "rejoin", name)
                if status == 0:
                    return "rejoined"
                if "tao reseed" in said:
                    status, said = await operator_command(regions, "reseed", name)
                    if status == 0:
                        return "seeded"
                await asyncio.sleep(_REJOIN_PAUSE_SECONDS)
    raise OperatorError(f"{name} does not rejoin: {said}")


async def operator_command(regions: RegionCluster, *words: str) -> tuple[int, str]:
    """Run a command of `tao` as an operator would; returns its exit status and standard error."""
    passwords = {
        "TAO_ADMIN_PASSWORD": regions.accounts.administrator.password,
        "TAO_REPLICATOR_PASSWORD": regions.accounts.replicator.password,
    }
    where = ("--topology", str(regions.cluster.topology_place))
    ended = await run_command(
        *TAO, *words, *where, "--yes", "--json", seconds=_COMMAND_SECONDS, env={**os.environ, **passwords}
    )
    return ended.status, ended.errors
