"""The state folder of a development cluster: its files, its lock, and the record that survives a crash.

``cluster.json`` is written before the first process starts, so that `tao dev status` and `tao dev down` find every
process whatever happens afterwards. It never says whether a process runs: each process has a record with its identity,
which is compared with the kernel's (`tao.devcluster.processes`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

import msgspec

from tao.admin.documents import example_schema_file, read_schema
from tao.devcluster.layout import DEFAULT_RTT_MS, LINE, Role, Shape
from tao.devcluster.processes import ProcessIdentity, read_record, write_record
from tao.model.errors import OperatorError, SchemaError
from tao.model.versions import FIRST_EPOCH
from tao.replication.accounts import Account, ServiceAccounts
from tao.schema.compatibility import compare
from tao.schema.registry import Schema

_FORMAT = 1
_PASSWORD_BYTES = 24


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``cluster.json``.

    ``ports``: see `tao.devcluster.layout.Ports`. ``ready``: the start was completed, so processes that run are in use.
    The last four fields are ports as a record of the former release has them; `with_all_ports` moves them."""

    format: int = _FORMAT
    shape: Shape
    ports: dict[str, dict[str, int]] = {}
    rtt_ms: float = DEFAULT_RTT_MS
    passwords: dict[str, str] = {}
    topology_version: int = 0
    ready: bool = False
    database_ports: dict[str, int] = {}
    tailer_ports: dict[str, int] = {}
    watcher_ports: dict[str, int] = {}
    line_ports: dict[str, int] = {}

    def with_all_ports(self) -> ClusterRecord:
        """Return the record with the ports of every process in ``ports``."""
        ports = {
            **self.ports,
            **{name: {"mysql": port} for name, port in self.database_ports.items()},
            **{name: {"admin": port} for name, port in (*self.tailer_ports.items(), *self.watcher_ports.items())},
        }
        if self.line_ports:
            ports[LINE] = self.line_ports
        return msgspec.structs.replace(
            self, ports=ports, database_ports={}, tailer_ports={}, watcher_ports={}, line_ports={}
        )


def new_passwords() -> dict[str, str]:
    """Return a new random password for each service account."""
    return {
        role: secrets.token_urlsafe(_PASSWORD_BYTES) for role in ("administrator", "leader", "reader", "replicator")
    }


def service_accounts(passwords: dict[str, str]) -> ServiceAccounts:
    """Return the accounts of the cluster's databases."""
    return ServiceAccounts(
        administrator=Account("tao_admin", passwords["administrator"]),
        leader=Account("tao_leader", passwords["leader"]),
        reader=Account("tao_reader", passwords["reader"]),
        replicator=Account("tao_replicator", passwords["replicator"]),
    )


class _DatabaseOutline(msgspec.Struct, frozen=True):
    name: str
    master_region: str
    version_epoch: int = FIRST_EPOCH


class _TopologyOutline(msgspec.Struct, frozen=True):
    """The fields of a topology document that are needed to start the cluster again."""

    version: int = 0
    databases: tuple[_DatabaseOutline, ...] = ()


class StateFolder:
    """The paths, the record and the lock of one folder. Nothing is created before `create` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock = -1
        self._made: list[Path] = []
        self._former_mode: int | None = None

    @property
    def topology(self) -> Path:
        """The topology document that the servers watch."""
        return self.path / "topology.json"

    @property
    def schema(self) -> Path:
        """The cluster's own copy of the schema file; edit it to change the schema of the running cluster."""
        return self.path / "schema.yaml"

    @property
    def owner(self) -> Path:
        """The record of the process that runs the cluster in its foreground."""
        return self.path / "owner.json"

    @property
    def line_control(self) -> Path:
        """The delay line's Unix socket."""
        return self.path / "line.sock"

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
        files = [self.path / name for name in (".gitignore", "lock", self.schema.name)]
        folders = [self.path / "servers", self.path, *self.path.parents]
        self._made = [path for path in (*files, *folders) if not path.exists()]
        try:
            self._former_mode = None if self.path in self._made else stat.S_IMODE(self.path.stat().st_mode)
            (self.path / "servers").mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            if files[0] in self._made:
                files[0].write_text("*\n")
        except OSError as error:
            raise OperatorError(
                f"cannot use the state folder {self.path}: {error.strerror}; choose another with --state-dir"
            ) from error

    def discard(self) -> None:
        """Undo `create`, unless a cluster has been recorded, so that a refused start leaves nothing.

        Call it while the lock is held. Raises `OperatorError`."""
        if (self.path / "cluster.json").exists():
            return
        for path in self._made:
            try:
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise OperatorError(f"cannot remove {path}: {error.strerror}") from error
        if self._former_mode is not None:
            self.path.chmod(self._former_mode)

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
                f"a cluster is running in {self.path}, or being started: `tao dev status` shows it, `tao dev down` "
                "stops it, --state-dir chooses another folder"
            ) from None
        self._lock = descriptor

    def unlock(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def read(self) -> ClusterRecord | None:
        """Return the record; None when there is none. Raises `OperatorError` when it cannot be read."""
        path = self.path / "cluster.json"
        try:
            record = msgspec.json.decode(path.read_bytes(), type=ClusterRecord)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OperatorError(f"cannot read {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise OperatorError(f"{path} is damaged ({error}): remove {self.path} to start afresh") from error
        if record.format != _FORMAT:
            raise OperatorError(f"{path} has format {record.format}, this program writes {_FORMAT}: remove the folder")
        return record.with_all_ports()

    def require(self) -> ClusterRecord:
        """Return the record. Raises `OperatorError` when the folder has no cluster."""
        record = self.read()
        if record is None:
            raise OperatorError(f"there is no cluster in {self.path}: start one with `tao dev up`")
        return record

    def topology_version(self) -> int:
        """Return the version of the topology file; 0 when it does not exist or cannot be read."""
        return self._topology_as_it_is().version

    def master_regions(self, shape: Shape) -> dict[str, str]:
        """Return the master region of each database: that of the topology file, which a promotion may have changed,
        else that of the shape."""
        found = {database.name: database.master_region for database in self._topology_as_it_is().databases}
        regions = shape.region_names
        return {name: found[name] if found.get(name) in regions else at for name, at in shape.master_regions.items()}

    def version_epochs(self) -> dict[str, int]:
        """Return the version epoch of each database that the topology file names."""
        return {database.name: database.version_epoch for database in self._topology_as_it_is().databases}

    def _topology_as_it_is(self) -> _TopologyOutline:
        try:
            return msgspec.json.decode(self.topology.read_bytes(), type=_TopologyOutline)
        except (OSError, msgspec.MsgspecError):
            # A mistake in the file must not keep the cluster from starting, which writes the file anew.
            return _TopologyOutline()

    def write(self, record: ClusterRecord) -> None:
        """Replace the record, atomically. Raises `OperatorError`."""
        self.write_file(self.path / "cluster.json", msgspec.json.format(msgspec.json.encode(record)))

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file of this folder atomically, readable by this user alone. Raises `OperatorError`."""
        draft = path.with_name(f".{path.name}.draft")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            draft.replace(path)
        except OSError as error:
            raise OperatorError(f"cannot write {path}: {error.strerror}") from error

    def write_owner(self) -> None:
        """Record this process as the one that runs the cluster in its foreground. Raises `OperatorError`."""
        try:
            write_record(self.owner, ProcessIdentity.of(os.getpid()))
        except OSError as error:
            raise OperatorError(f"cannot write {self.owner}: {error.strerror}") from error

    def running(self, record: ClusterRecord) -> dict[str, ProcessIdentity]:
        """Return the recorded processes that run now, by name, in starting order."""
        found = {name: read_record(self.process_record(name, role)) for name, role in record.shape.server_names.items()}
        return {name: identity for name, identity in found.items() if identity is not None and identity.is_running()}


def place_schema(folder: StateFolder, wanted: Path | None) -> Schema:
    """Copy the schema into the folder and return it; without ``wanted`` the folder's own copy stays, if there is one.

    Raises `SchemaError` when it is wrong, or when it contradicts the schema of the data in the folder.
    """
    own = folder.schema
    if wanted is None and own.exists():
        return read_schema(own)[0]
    schema, text = read_schema(wanted or example_schema_file())
    if own.exists():
        broken = [change for change in compare(read_schema(own)[0], schema) if not change.compatible]
        if broken:
            raise SchemaError(
                f"{wanted} contradicts the data in {folder.path}: {broken[0].path}: {broken[0].why}; "
                f"`tao schema check {own} {wanted}` lists everything"
            )
    folder.write_file(own, text.encode())
    return schema
