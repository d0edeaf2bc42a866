"""Shows which processes of a state folder run, and stops them.

It uses only the records in the folder, so it works for a detached cluster, for one in the foreground of another
terminal, and for what a crash left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from tao.admin.replication import ReplicaState, replication_states
from tao.admin.server_stats import is_ready
from tao.devcluster.certificates import cluster_accounts
from tao.devcluster.layout import Member, Role
from tao.devcluster.line_control import AskStatus, LineStatus, ask_line
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.processes import ProcessIdentity, read_record, stop_process
from tao.devcluster.state_folder import ClusterRecord, StateFolder, read_topology
from tao.model.errors import TaoError

STOP_SECONDS = {
    Role.WATCHER: 10.0,
    Role.WORKER: 20.0,
    Role.FOLLOWER: 20.0,
    Role.TAILER: 20.0,
    Role.LEADER: 20.0,
    Role.DATABASE: 30.0,
    Role.LINE: 5.0,
    Role.ETCD: 10.0,
}
"""The time limit of a stop on SIGTERM, by role in stopping order. Watchers stop first: they would take the stopping
servers for an outage. Workers stop before those that they ask. The delay line stops late: a replica that loses its
master while it stops reports an error. So does etcd, which all ask."""
_OWNER_STOP_SECONDS = 90.0


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one process.

    ``state``: ready, starting (it runs and is not ready) or stopped. ``pid`` is 0 when it is stopped, ``region`` is
    empty for the delay line. ``replication``: the state of a running database, where a database has several servers."""

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
    """The state of a cluster.

    ``client``: an address for clients; ``clients``: one for each region. ``line`` is None while no delay line runs."""

    client: str
    clients: dict[str, str]
    topology: str
    schema: str
    state_dir: str
    running: bool
    processes: list[ProcessStatus]
    line: LineStatus | None = None
    certificates: str = ""
    """The folder of the certificates; empty without TLS."""


def client_address(record: ClusterRecord, region: str = "") -> str:
    """Return the gRPC address of the first follower of the first tier, in a region or in the first one."""
    ports = record.ports.get(record.shape.first_follower(region))
    return f"{LOOPBACK}:{ports['grpc']}" if ports else ""


async def cluster_status(state_dir: Path) -> ClusterStatus:
    """Return the state of a folder's cluster. Raises `OperatorError` when the folder has none."""
    folder = StateFolder(state_dir)
    record = folder.require()
    running = folder.running(record)
    line = await _line_status(folder) if any(record.shape.server_names[name] is Role.LINE for name in running) else None
    replication = await _replication(folder, record) if record.shape.replicates and running else {}

    async def one(member: Member) -> ProcessStatus:
        name, identity = member.name, running.get(member.name)
        # The delay line has dozens of ports; the topology explains them.
        ports = {} if member.role is Role.LINE else record.ports.get(name, {})
        admin = f"{LOOPBACK}:{ports['admin']}" if "admin" in ports else ""
        if member.role in (Role.DATABASE, Role.ETCD):
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
        topology=str(folder.place_of_topology()),
        schema=str(folder.place_of_schema()),
        state_dir=str(folder.path),
        running=bool(running),
        processes=processes,
        line=line,
        certificates=str(folder.path / "certificates") if record.options.tls else "",
    )


async def _line_status(folder: StateFolder) -> LineStatus | None:
    try:
        return await ask_line(folder.line_control, AskStatus())
    except TaoError:
        return None  # it runs and does not answer, as its state shows


async def _replication(folder: StateFolder, record: ClusterRecord) -> dict[str, ReplicaState]:
    try:
        topology = await read_topology(folder.place_of_topology())
    except (OSError, TaoError):
        return {}  # an interrupted start has not written it yet
    return await replication_states(topology, cluster_accounts(folder, record).administrator)


async def stop_cluster(state_dir: Path, on_progress: Callable[[str], None]) -> list[str]:
    """Stop every process of a folder, caches before databases, and kill what does not stop in time; data are kept.

    Returns the names of killed processes. Raises `OperatorError` when the folder has no cluster.
    """
    folder = StateFolder(state_dir)
    record = folder.require()
    owner = read_record(folder.owner)
    if owner is not None and owner.is_running():
        on_progress(f"stopping the cluster in the foreground of process {owner.pid}")
        await stop_process(owner, _OWNER_STOP_SECONDS)
    return await stop_recorded(folder, record, on_progress)


async def stop_recorded(folder: StateFolder, record: ClusterRecord, on_progress: Callable[[str], None]) -> list[str]:
    """Do what `stop_cluster` does, without stopping the process that runs the cluster in its foreground."""
    killed: list[str] = []

    async def stop(name: str, role: Role, identity: ProcessIdentity) -> None:
        if not await stop_process(identity, STOP_SECONDS[role]):
            killed.append(name)
        folder.process_record(name, role).unlink(missing_ok=True)

    running = folder.running(record)
    for role, names in ((role, [each.name for each in record.shape.select(role)]) for role in STOP_SECONDS):
        if found := [name for name in names if name in running]:
            on_progress(f"stopping {', '.join(found)}")
            await asyncio.gather(*(stop(name, role, running[name]) for name in found))
    return killed
