"""Whether a cluster is healthy after a fault, so that the next fault is a single failure; and what an operator does to
make it so."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Final

from tao.admin.replication import replication_states
from tao.admin.server_stats import server_stats
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Role
from tao.devcluster.state_folder import service_accounts
from tao.model.errors import OperatorError, TaoError
from tao.replication.server_statements import acknowledging_replicas, member_state
from tao.runtime.admin_client import admin_get
from tao.storage.dialect import SessionSetup
from tao.storage.session import ServerAccount, open_session
from tao.topology.document import parse_topology

_LOOK_SECONDS: Final = 0.2
_STATEMENT_SECONDS: Final = 5.0
_HTTP_OK: Final = 200


async def until_well(cluster: DevCluster, seconds: float) -> None:
    """Return when the cluster is healthy. Former masters rejoin by the operator's command, as no server does by itself.

    Raises `OperatorError` with what is still wrong."""
    try:
        async with asyncio.timeout(seconds):
            while await problems(cluster):
                for name in await _former_masters(cluster):
                    await bring_back(cluster, name)
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        found = await problems(cluster)
        raise OperatorError(f"not well {seconds:g} s after it was mended: {'; '.join(found)}") from None


async def problems(cluster: DevCluster) -> list[str]:
    """List what is wrong: processes that do not run or are not ready, servers marked down, replicas that do not follow,
    and masters whose commits would not wait for a replica."""
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
                    found += await _semi_sync_problems(server.name, account)
            elif state.part != "replica" or not (state.receiving and state.applying) or state.lag_seconds:
                found.append(f"{server.name} does not follow: {state}")
    roles = (Role.LEADER, Role.FOLLOWER, Role.TAILER, Role.WATCHER)
    names = [name for name, role in cluster.processes.items() if role in roles]
    return found + [each for each in await asyncio.gather(*(_unready(cluster, name) for name in names)) if each]


async def _former_masters(cluster: DevCluster) -> list[str]:
    """List the servers that should be replicas and follow nobody."""
    topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    states = await replication_states(topology, service_accounts(cluster.record.passwords).administrator)
    return [
        server.name
        for each in topology.databases
        for region, server in each.servers.items()
        if region != each.master_region and states[server.name].part == "master"
    ]


async def _semi_sync_problems(name: str, account: ServerAccount) -> list[str]:
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


_COMMAND_SECONDS: Final = 120.0
_REJOIN_SECONDS: Final = 180.0
_REJOIN_PAUSE_SECONDS: Final = 1.0
"""The watcher may still be at work on a server that has just come back."""


async def bring_back(cluster: DevCluster, name: str) -> str:
    """Have a former master rejoin, or seed it anew when it is refused for transactions that it alone has.

    Returns "rejoined" or "seeded". Raises `OperatorError`."""
    said = ""
    with suppress(TimeoutError):
        async with asyncio.timeout(_REJOIN_SECONDS):
            while True:
                status, said = await operator_command(cluster, "rejoin", name)
                if status == 0:
                    return "rejoined"
                if "tao reseed" in said:
                    status, said = await operator_command(cluster, "reseed", name)
                    if status == 0:
                        return "seeded"
                await asyncio.sleep(_REJOIN_PAUSE_SECONDS)
    raise OperatorError(f"{name} does not rejoin: {said}")


async def operator_command(cluster: DevCluster, *words: str) -> tuple[int, str]:
    """Run a command of `tao` as an operator would; returns its exit status and standard error."""
    accounts = service_accounts(cluster.record.passwords)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tao.cli", *words, "--topology", str(cluster.topology_path), "--yes", "--json"),
        env={
            **os.environ,
            "TAO_ADMIN_PASSWORD": accounts.administrator.password,
            "TAO_REPLICATOR_PASSWORD": accounts.replicator.password,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_COMMAND_SECONDS):
            _, errors = await process.communicate()
    except TimeoutError:
        raise OperatorError(f"tao {' '.join(words)} does not end within {_COMMAND_SECONDS:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return process.returncode or 0, errors.decode(errors="replace").strip()
