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
from tao.devcluster.layout import STOPPING_ORDER, Member, Role
from tao.devcluster.line_control import AskStatus, LineStatus, ask_line
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.readiness import is_ready
from tao.devcluster.replication_sets import ReplicaState, replication_states
from tao.devcluster.state_folder import ClusterRecord, StateFolder, service_accounts
from tao.model.errors import TaoError
from tao.topology.document import parse_topology

_STOP_SECONDS = {
    Role.WATCHER: 10.0,
    Role.FOLLOWER: 20.0,
    Role.TAILER: 20.0,
    Role.LEADER: 20.0,
    Role.DATABASE: 30.0,
    Role.LINE: 5.0,
}
_OWNER_STOP_SECONDS = 90.0


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``state``: ready, starting (it runs and is not ready) or stopped; ``pid`` is 0 when stopped.
    ``region`` is empty for the line; ``replication`` is that of a running database, where there are several regions."""

    name: str
    role: Role
    region: str
    state: str
    pid: int
    ports: dict[str, int]
    admin: str
    log: str
    replication: ReplicaState | None = None


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster of a folder. ``client``: an address that clients can be given; ``clients`` has one by region.
    ``line`` is None while no delay line runs."""

    client: str
    clients: dict[str, str]
    topology: str
    schema: str
    state_dir: str
    running: bool
    processes: list[ProcessStatus]
    line: LineStatus | None = None


def client_address(record: ClusterRecord, region: str = "") -> str:
    """gRPC address of the first follower of the nearest tier, in the first region where none is named."""
    shape = record.shape
    ports = record.ports.get(shape.followers_in(region or shape.region_names[0], shape.tier_names[0])[0])
    return f"{LOOPBACK}:{ports.grpc}" if ports else ""


async def cluster_status(state_dir: Path) -> ClusterStatus:
    """What runs. Raises `OperatorError` when the folder has no cluster."""
    folder = StateFolder(state_dir)
    record = folder.require()
    running = folder.running(record)
    line = await _line_status(folder) if any(record.shape.server_names[name] is Role.LINE for name in running) else None
    replication = await _replication(folder, record) if record.shape.is_distributed and running else {}

    async def one(member: Member) -> ProcessStatus:
        name, identity = member.name, running.get(member.name)
        ports, admin = _ports_of(member, record)
        if member.role is Role.DATABASE:
            serves = True
        elif member.role is Role.LINE:
            serves = line is not None
        else:
            serves = identity is not None and bool(admin) and await is_ready(admin)
        return ProcessStatus(
            name=name,
            role=member.role,
            region=member.region,
            state="stopped" if identity is None else "ready" if serves else "starting",
            pid=identity.pid if identity else 0,
            ports=ports,
            admin=admin,
            log=str(folder.log(name, member.role)),
            replication=replication.get(name) if identity else None,
        )

    processes = await asyncio.gather(*map(one, record.shape.members))
    return ClusterStatus(
        client=client_address(record),
        clients={region: client_address(record, region) for region in record.shape.region_names},
        topology=str(folder.topology),
        schema=str(folder.schema),
        state_dir=str(folder.path),
        running=bool(running),
        processes=processes,
        line=line,
    )


def _ports_of(member: Member, record: ClusterRecord) -> tuple[dict[str, int], str]:
    """Ports by what is spoken there, and the admin address."""
    if member.role is Role.DATABASE:
        port = record.database_ports.get(member.name, 0)
        return ({"mysql": port} if port else {}), ""
    if member.role is Role.LINE:
        return {}, ""  # dozens, of which only the topology makes sense
    if member.role in (Role.TAILER, Role.WATCHER):
        admins = record.tailer_ports if member.role is Role.TAILER else record.watcher_ports
        port = admins.get(member.name, 0)
        return ({"admin": port}, f"{LOOPBACK}:{port}") if port else ({}, "")
    taken = record.ports.get(member.name)
    return (msgspec.structs.asdict(taken), f"{LOOPBACK}:{taken.admin}") if taken else ({}, "")


async def _line_status(folder: StateFolder) -> LineStatus | None:
    try:
        return await ask_line(folder.line_control, AskStatus())
    except TaoError:
        return None  # it runs and does not answer, which its state says


async def _replication(folder: StateFolder, record: ClusterRecord) -> dict[str, ReplicaState]:
    try:
        topology = parse_topology(await asyncio.to_thread(folder.topology.read_bytes), str(folder.topology))
    except (OSError, TaoError):
        return {}  # a start that was cut short has written none yet
    return await replication_states(topology, service_accounts(record.passwords).administrator)


async def stop_cluster(state_dir: Path, on_progress: Callable[[str], None]) -> list[str]:
    """End whatever runs, caches before databases, each bounded and then by force; data are kept.

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
    for role in STOPPING_ORDER:
        names = [name for name in running if roles[name] is role]
        if not names:
            continue
        on_progress(f"stopping {', '.join(names)}")
        quietly = await asyncio.gather(*(stop_process(running[name], _STOP_SECONDS[role]) for name in names))
        killed += [name for name, went in zip(names, quietly, strict=True) if not went]
        for name in names:
            folder.process_record(name, role).unlink(missing_ok=True)
    return killed
