"""Whether a cluster is well again after a fault, so that the next one is a single failure."""

from __future__ import annotations

import asyncio
from typing import Final

from loadtest.chaos.rejoining import bring_back
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Role
from tao.devcluster.readiness import server_stats
from tao.devcluster.replication_sets import replication_states
from tao.devcluster.state_folder import service_accounts
from tao.model.errors import OperatorError, TaoError
from tao.runtime.admin_client import admin_get
from tao.storage.dialect import SessionSetup
from tao.storage.promotion import member_state
from tao.storage.semi_sync import acknowledging_replicas
from tao.storage.session import ServerAccount, open_session
from tao.topology.document import parse_topology

_LOOK_SECONDS: Final = 0.2
_STATEMENT_SECONDS: Final = 5.0
_HTTP_OK: Final = 200


async def until_well(cluster: DevCluster, seconds: float) -> None:
    """Return when nothing ails the cluster any more. What no server does by itself, an operator does: he has former
    masters rejoin. Raises `OperatorError` saying what still ails."""
    try:
        async with asyncio.timeout(seconds):
            while await ailments(cluster):
                for name in await _astray(cluster):
                    await bring_back(cluster, name)
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        found = await ailments(cluster)
        raise OperatorError(f"not well {seconds:g} s after it was mended: {'; '.join(found)}") from None


async def ailments(cluster: DevCluster) -> list[str]:
    """Processes that do not run or are not ready, marks, replicas that do not follow, masters that would not wait for
    one, and the lack of a watcher that acts."""
    missing = [f"{name} does not run" for name in cluster.processes if name not in cluster.running]
    if missing:
        return missing
    try:
        topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    except (OSError, OperatorError) as error:
        return [str(error)]
    marked = [
        server.name
        for region in topology.regions
        for tier in (region.leaders, *region.followers)
        for server in tier.servers
        if server.down
    ]
    marked += [server.name for each in topology.databases for server in each.servers.values() if server.down]
    found = [f"{name} is marked" for name in marked]
    administrator = service_accounts(cluster.record.passwords).administrator
    states = await replication_states(topology, administrator)
    for each in topology.databases:
        for region, server in each.servers.items():
            state = states[server.name]
            if region == each.master_region:
                if state.part != "master":
                    found.append(f"{server.name} should be master and is {state.part} {state.error}")
                elif each.semi_sync:
                    account = ServerAccount(
                        server.host, server.port, administrator.user, administrator.password, server.socket
                    )
                    found += await _not_waited_for(server.name, account)
            elif state.part != "replica" or not (state.receiving and state.applying) or state.lag_seconds:
                found.append(f"{server.name} does not follow: {state}")
    roles = (Role.LEADER, Role.FOLLOWER, Role.TAILER, Role.WATCHER)
    names = [name for name, role in cluster.processes.items() if role in roles]
    return found + [ail for ail in await asyncio.gather(*(_unready(cluster, name) for name in names)) if ail]


async def _astray(cluster: DevCluster) -> list[str]:
    """Servers that should follow, answer, and follow nobody."""
    topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    states = await replication_states(topology, service_accounts(cluster.record.passwords).administrator)
    return [
        server.name
        for each in topology.databases
        for region, server in each.servers.items()
        if region != each.master_region and states[server.name].part == "master"
    ]


async def _not_waited_for(name: str, account: ServerAccount) -> list[str]:
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
            await session.quit()
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
