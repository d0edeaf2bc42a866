"""A cluster seen from outside: which processes of a state folder run, and how to end them.

Works on the records alone, so it serves a detached cluster, one that runs in another terminal's foreground, and what a
crash left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from tao.devcluster.identity import read_record, stop_process
from tao.devcluster.layout import Role
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.readiness import is_ready
from tao.devcluster.state_folder import ClusterRecord, StateFolder

_STOP_SECONDS = {Role.FOLLOWER: 20.0, Role.LEADER: 20.0, Role.DATABASE: 30.0}
_OWNER_STOP_SECONDS = 90.0


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``state``: ready, starting (it runs and is not ready) or stopped; ``pid`` is 0 when stopped."""

    name: str
    role: Role
    state: str
    pid: int
    ports: dict[str, int]
    admin: str
    log: str


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster of a folder. ``client``: an address that clients can be given."""

    client: str
    topology: str
    schema: str
    state_dir: str
    running: bool
    processes: list[ProcessStatus]


def client_address(record: ClusterRecord) -> str:
    """gRPC address of the first follower of the nearest tier."""
    first = record.shape.follower_names(record.shape.tier_names[0])[0]
    ports = record.ports.get(first)
    return f"{LOOPBACK}:{ports.grpc}" if ports else ""


async def cluster_status(state_dir: Path) -> ClusterStatus:
    """What runs. Raises `OperatorError` when the folder has no cluster."""
    folder = StateFolder(state_dir)
    record = folder.require()
    running = folder.running(record)

    async def one(name: str, role: Role) -> ProcessStatus:
        identity = running.get(name)
        if role is Role.DATABASE:
            port = record.database_ports.get(name, 0)
            ports, admin = ({"mysql": port} if port else {}), ""
            serves = True
        else:
            taken = record.ports.get(name)
            ports = msgspec.structs.asdict(taken) if taken else {}
            admin = f"{LOOPBACK}:{taken.admin}" if taken else ""
            serves = identity is not None and bool(admin) and await is_ready(admin)
        return ProcessStatus(
            name=name,
            role=role,
            state="stopped" if identity is None else "ready" if serves else "starting",
            pid=identity.pid if identity else 0,
            ports=ports,
            admin=admin,
            log=str(folder.log(name, role)),
        )

    processes = await asyncio.gather(*(one(name, role) for name, role in record.shape.server_names.items()))
    return ClusterStatus(
        client=client_address(record),
        topology=str(folder.topology),
        schema=str(folder.schema),
        state_dir=str(folder.path),
        running=bool(running),
        processes=processes,
    )


async def stop_cluster(state_dir: Path, on_progress: Callable[[str], None]) -> list[str]:
    """End whatever runs: followers, then leaders, then databases, each bounded and then by force; data are kept.

    Returns the names that had to be killed. Raises `OperatorError` when the folder has no cluster.
    """
    folder = StateFolder(state_dir)
    record = folder.require()
    owner = read_record(folder.owner)
    if owner is not None and owner.is_running():
        on_progress(f"stopping the cluster in the foreground of process {owner.pid}")
        await stop_process(owner, _OWNER_STOP_SECONDS)
    return await stop_recorded(folder, record, on_progress)


async def stop_recorded(folder: StateFolder, record: ClusterRecord, on_progress: Callable[[str], None]) -> list[str]:
    """As `stop_cluster`, without asking who started the processes."""
    running = folder.running(record)
    roles = record.shape.server_names
    killed: list[str] = []
    for role in (Role.FOLLOWER, Role.LEADER, Role.DATABASE):
        names = [name for name in running if roles[name] is role]
        if not names:
            continue
        on_progress(f"stopping {', '.join(names)}")
        quietly = await asyncio.gather(*(stop_process(running[name], _STOP_SECONDS[role]) for name in names))
        killed += [name for name, went in zip(names, quietly, strict=True) if not went]
        for name in names:
            folder.process_record(name, role).unlink(missing_ok=True)
    return killed
