"""The state folder of a development cluster: its files, its lock, and the record that survives a crash.

``cluster.json`` is written before the first process starts, so that `tao dev status` and `tao dev down` find every
process whatever happens afterwards. It never says whether a process runs: each process has a record with its identity,
which is compared with the kernel's (`tao.devcluster.processes`).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path

import msgspec

from tao.admin.documents import example_schema_file, read_schema
from tao.devcluster.layout import DEFAULT_RTT_MS, LINE, Role, Shape, StartOptions, dev_command
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.processes import ProcessIdentity, read_record
from tao.etcd.location import EtcdLocation, EtcdSettings, Location
from tao.model.errors import OperatorError, SchemaError, unreadable, unwritable
from tao.model.topology import Topology
from tao.model.versions import FIRST_EPOCH
from tao.replication.accounts import Account, ServiceAccounts
from tao.schema.compatibility import compare
from tao.schema.registry import Schema
from tao.topology.stores import EtcdConnections, open_topology

_FORMAT = 1
_PASSWORD_BYTES = 24


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``cluster.json``.

    ``ports``: see `tao.devcluster.layout.Ports`. ``options``: those of the latest start. ``ready``: the start was
    completed, so processes that run are in use.
    """

    format: int = _FORMAT
    shape: Shape
    ports: dict[str, dict[str, int]] = {}
    rtt_ms: float = DEFAULT_RTT_MS
    passwords: dict[str, str] = {}
    topology_version: int = 0
    options: StartOptions = StartOptions()
    ready: bool = False


def etcd_location(record: ClusterRecord, region: str = "") -> EtcdLocation | None:
    """Return where the documents are in the cluster's etcd, seen from a region or from the outside; None without
    one."""
    members = record.shape.select(Role.ETCD)
    if not members:
        return None
    (member,) = members
    port = record.ports[member.name]["client"]
    if region not in ("", member.region):
        port = record.ports[LINE][f"{region}>{member.name}/client"]
    return EtcdLocation((f"{LOOPBACK}:{port}",), "/tao")


async def read_topology(place: Location) -> Topology:
    """Return the topology of a cluster. Raises `TopologyError`."""
    etcd = EtcdConnections(EtcdSettings())
    try:
        return await open_topology(place, etcd, lambda error: None).load()
    finally:
        await etcd.close()


def new_passwords() -> dict[str, str]:
    """Return a new random password for each service account."""
    return {
        role: secrets.token_urlsafe(_PASSWORD_BYTES)
        for role in ("administrator", "leader", "reader", "replicator", "watcher")
    }


def service_accounts(passwords: dict[str, str]) -> ServiceAccounts:
    """Return the accounts of the cluster's databases."""
    return ServiceAccounts(
        administrator=Account("tao_admin", passwords["administrator"]),
        leader=Account("tao_leader", passwords["leader"]),
        reader=Account("tao_reader", passwords["reader"]),
        replicator=Account("tao_replicator", passwords["replicator"]),
        # Folders of earlier versions have none.
        watcher=Account("tao_watcher", passwords["watcher"]) if "watcher" in passwords else None,
    )


class _ServerOutline(msgspec.Struct, frozen=True):
    name: str


class _DatabaseOutline(msgspec.Struct, frozen=True):
    name: str
    master_region: str
    version_epoch: int = FIRST_EPOCH
    shards: tuple[tuple[int, int], ...] = ()
    standbys: dict[str, _ServerOutline] = {}


class TopologyOutline(msgspec.Struct, frozen=True):
    """The fields of a topology document that are needed to start the cluster again."""

    version: int = 0
    shards: int = 0
    databases: tuple[_DatabaseOutline, ...] = ()

    def master_regions(self, shape: Shape) -> dict[str, str]:
        """Return the master region of each database: that of the document, which a promotion may have changed, else
        that of the shape."""
        found = {database.name: database.master_region for database in self.databases}
        regions = shape.region_names
        return {name: found[name] if found.get(name) in regions else at for name, at in shape.master_regions.items()}

    def shard_ranges(self, shape: Shape) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return the shards of each database: those of the document, where shards may have moved or been added, else
        those of the shape."""
        found = {database.name: database.shards for database in self.databases}
        if self.shards and found.keys() == shape.shard_ranges.keys():
            return found
        return {name: (shards,) for name, shards in shape.shard_ranges.items()}

    def standbys(self) -> set[str]:
        """Return the names of the database servers that are standbys: a promotion exchanges one with its master."""
        return {standby.name for database in self.databases for standby in database.standbys.values()}

    def version_epochs(self) -> dict[str, int]:
        """Return the version epoch of each database that the document names."""
        return {database.name: database.version_epoch for database in self.databases}


def outline_of(topology: Topology) -> TopologyOutline:
    """Return the outline of a whole document."""
    databases = (
        _DatabaseOutline(
            each.name,
            each.master_region,
            each.version_epoch,
            each.shards,
            {region: _ServerOutline(server.name) for region, server in each.standbys.items()},
        )
        for each in topology.databases
    )
    return TopologyOutline(topology.version, topology.shards, tuple(databases))


class StateFolder:
    """The paths, the record and the lock of one folder. Nothing is created before `create` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._given = path
        # The topology document that the servers watch.
        self.topology = self.path / "topology.json"
        # The cluster's own copy of the schema file; edit it to change the schema of the running cluster.
        self.schema = self.path / "schema.yaml"
        # Which caller may do what; without it every caller may do everything.
        self.access = self.path / "access.yaml"
        # The record of the process that runs the cluster in its foreground.
        self.owner = self.path / "owner.json"
        # The delay line's Unix socket.
        self.line_control = self.path / "line.sock"
        self._record = self.path / "cluster.json"
        self._lock = -1

    def command(self, name: str) -> str:
        """Return `tao dev NAME` for this folder, as hints show it."""
        return dev_command(name, self._given)

    def place_of_topology(self) -> Location:
        """Return where the servers' topology is: the file of this folder, or the cluster's own etcd."""
        return self._etcd() or self.topology

    def place_of_schema(self) -> Location:
        """Return where the servers' schema is."""
        return self._etcd() or self.schema

    def _etcd(self) -> EtcdLocation | None:
        record = self.read()
        return None if record is None else etcd_location(record)

    def settings_file(self, name: str) -> Path:
        """Return the path of a server's settings file."""
        return self.path / "servers" / f"{name}.yaml"

    def log(self, name: str, role: Role) -> Path:
        """Return the path of a process's log."""
        return self.database(name) / "server.log" if role is Role.DATABASE else self.path / "servers" / f"{name}.log"

    def process_record(self, name: str, role: Role) -> Path:
        """Return the path of the record of a process, which exists while it runs."""
        if role is Role.DATABASE:
            return self.database(name) / "process.json"
        return self.path / "servers" / f"{name}.process.json"

    def database(self, name: str) -> Path:
        """Return the folder of a database server."""
        return self.path / name

    def create(self) -> None:
        """Create the folder, readable by this user alone because it holds passwords. Raises `OperatorError`."""
        try:
            (self.path / "servers").mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            (self.path / ".gitignore").write_text("*\n")
        except OSError as error:
            raise OperatorError(
                f"cannot use the state folder {self.path}: {error.strerror}; choose another with --state-dir"
            ) from error

    def lock(self) -> None:
        """Keep other processes from starting a cluster here until `unlock`, or the end of this process.

        Raises `OperatorError` when another process holds the lock."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OperatorError(f"cannot use the state folder {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OperatorError(
                f"a cluster is running in {self.path}, or being started: {self.command('status')} shows it, "
                f"{self.command('down')} stops it, --state-dir chooses another folder"
            ) from None
        self._lock = descriptor

    def unlock(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def read(self) -> ClusterRecord | None:
        """Return the record; None when there is none. Raises `OperatorError` when it cannot be read."""
        try:
            record = msgspec.json.decode(self._record.read_bytes(), type=ClusterRecord)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OperatorError(unreadable(self._record, error)) from error
        except msgspec.MsgspecError as error:
            raise OperatorError(f"{self._record} is damaged ({error}): remove {self.path} to start afresh") from error
        if record.format != _FORMAT:
            raise OperatorError(
                f"{self._record} has format {record.format}, this program writes {_FORMAT}: remove the folder"
            )
        return record

    def require(self) -> ClusterRecord:
        """Return the record. Raises `OperatorError` when the folder has no cluster."""
        record = self.read()
        if record is None:
            raise OperatorError(f"there is no cluster in {self.path}: start one with {self.command('up')}")
        return record

    def former_topology(self) -> TopologyOutline:
        """Return what the topology file says, or an empty outline when it does not exist or cannot be read."""
        try:
            return msgspec.json.decode(self.topology.read_bytes(), type=TopologyOutline)
        except (OSError, msgspec.MsgspecError):
            # A mistake in the file must not keep the cluster from starting, which writes the file anew.
            return TopologyOutline()

    def write(self, record: ClusterRecord) -> None:
        """Replace the record, atomically. Raises `OperatorError`."""
        self.write_file(self._record, msgspec.json.format(msgspec.json.encode(record)))

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file of this folder atomically, readable by this user alone. Raises `OperatorError`."""
        draft = path.with_name(f".{path.name}.draft")
        try:
            draft.touch(0o600)
            draft.write_bytes(content)
            draft.replace(path)
        except OSError as error:
            raise OperatorError(unwritable(path, error)) from error

    def write_owner(self) -> None:
        """Record this process as the one that runs the cluster in its foreground. Raises `OperatorError`."""
        self.write_file(self.owner, msgspec.json.encode(ProcessIdentity.of(os.getpid())))

    @property
    def is_orphaned(self) -> bool:
        """True when the process that ran the cluster in its foreground was killed: what still runs is to be ended."""
        owner = read_record(self.owner)
        return owner is not None and not owner.is_running()

    def remove_data(self, record: ClusterRecord) -> None:
        """Remove the databases and what servers wrote beside them: spools and positions in the binlog. Logs of servers,
        ports, passwords and the schema are kept. Raises `OperatorError`."""
        for member in record.shape.members:
            path = self.database(member.name) if member.role is Role.DATABASE else self.path / "servers" / member.name
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise OperatorError(f"cannot remove {error.filename or path}: {error.strerror}") from error

    def running(self, record: ClusterRecord) -> dict[str, ProcessIdentity]:
        """Return the recorded processes that run now, by name, in starting order."""
        found = {name: read_record(self.process_record(name, role)) for name, role in record.shape.server_names.items()}
        return {name: identity for name, identity in found.items() if identity is not None and identity.is_running()}


def choose_schema(folder: StateFolder, wanted: Path | None) -> tuple[Schema, str]:
    """Return the schema of the file that is wanted, or else that of the folder's copy or the example, and its text.

    Raises `SchemaError` when it is wrong, or when it contradicts the schema of the data in the folder.
    """
    own = folder.schema
    if not own.exists():
        return read_schema(wanted or example_schema_file())
    kept = read_schema(own)
    if wanted is None:
        return kept
    chosen = read_schema(wanted)
    broken = [change for change in compare(kept[0], chosen[0]) if not change.compatible]
    if broken:
        raise SchemaError(
            f"{wanted} contradicts the data in {folder.path}: {broken[0].path}: {broken[0].why}; "
            f"`tao schema check {own} {wanted}` lists everything"
        )
    return chosen
