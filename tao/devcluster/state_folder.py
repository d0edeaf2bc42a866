"""The state folder of a development cluster: what lies where, who may use it now, and what survives a crash.

`cluster.json` is written before the first process starts, so whatever happens afterwards, `status` and `down` know
what to look for. Whether a process runs is never written there: each has a record with its identity, which is compared
with the kernel's (`tao.devcluster.identity`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

import msgspec

from tao.devcluster.cluster_topology import Addresses
from tao.devcluster.identity import ProcessIdentity, read_record, write_record
from tao.devcluster.layout import DEFAULT_RTT_MS, CachePorts, Role, Shape
from tao.model.errors import OperatorError
from tao.model.versions import FIRST_EPOCH
from tao.storage.accounts import Account, ServiceAccounts

_FORMAT = 1
_PASSWORD_BYTES = 24


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `cluster.json` holds. ``ready``: the start came to its end, so processes that run belong to somebody."""

    format: int = _FORMAT
    shape: Shape
    ports: dict[str, CachePorts] = {}
    database_ports: dict[str, int] = {}
    tailer_ports: dict[str, int] = {}
    watcher_ports: dict[str, int] = {}
    line_ports: dict[str, int] = {}
    rtt_ms: float = DEFAULT_RTT_MS
    passwords: dict[str, str] = {}
    topology_version: int = 0
    ready: bool = False

    @property
    def addresses(self) -> Addresses:
        """All ports, as the topology wants them."""
        return Addresses(
            caches=self.ports, databases=self.database_ports, tailers=self.tailer_ports, line=self.line_ports
        )


def new_passwords() -> dict[str, str]:
    """A password for each service account."""
    return {
        role: secrets.token_urlsafe(_PASSWORD_BYTES) for role in ("administrator", "leader", "reader", "replicator")
    }


def service_accounts(passwords: dict[str, str]) -> ServiceAccounts:
    """The accounts of the cluster's databases."""
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
    """The fields of a topology document that are wanted here."""

    version: int = 0
    databases: tuple[_DatabaseOutline, ...] = ()


class StateFolder:
    """Paths, the record, and the lock of one folder. Makes nothing until `create`."""

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
        """The cluster's own copy of the schema file: editing it is how a running cluster's schema changes."""
        return self.path / "schema.yaml"

    @property
    def owner(self) -> Path:
        """Record of the process in whose foreground the cluster runs."""
        return self.path / "owner.json"

    @property
    def line_control(self) -> Path:
        """The delay line's Unix socket."""
        return self.path / "line.sock"

    def settings_file(self, name: str) -> Path:
        """The settings file of a leader or follower."""
        return self.path / "servers" / f"{name}.yaml"

    def log(self, name: str, role: Role) -> Path:
        """The log of a process."""
        return self.database(name) / "server.log" if role is Role.DATABASE else self.path / "servers" / f"{name}.log"

    def process_record(self, name: str, role: Role) -> Path:
        """The identity of a process, while it is believed to run."""
        if role is Role.DATABASE:
            return self.database(name) / "process.json"
        return self.path / "servers" / f"{name}.process.json"

    def database(self, name: str) -> Path:
        """The folder of a private database instance."""
        return self.path / name

    def create(self) -> None:
        """Make the folder, for this user alone: it holds passwords. Raises `OperatorError`."""
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
        """Undo `create`, unless a cluster has been recorded: a start that was refused leaves nothing. To be called
        while the lock is held. Raises `OperatorError`."""
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
        """Keep others from starting a cluster here until `unlock`, or the end of this process.

        Raises `OperatorError` when somebody else does so now."""
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
        """Let others in. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def read(self) -> ClusterRecord | None:
        """The record; None when there is none. Raises `OperatorError` when it cannot be read."""
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
        return record

    def require(self) -> ClusterRecord:
        """The record. Raises `OperatorError` when there is no cluster here."""
        record = self.read()
        if record is None:
            raise OperatorError(f"there is no cluster in {self.path}: `tao dev up` makes one")
        return record

    def topology_version(self) -> int:
        """The version of the topology file; 0 when there is none that can be read."""
        return self._topology_as_it_is().version

    def master_regions(self, shape: Shape) -> dict[str, str]:
        """Database → master region: the topology file's, which a promotion may have changed since the cluster was made,
        else that of the shape."""
        found = {database.name: database.master_region for database in self._topology_as_it_is().databases}
        regions = shape.region_names
        return {name: found[name] if found.get(name) in regions else at for name, at in shape.master_regions.items()}

    def version_epochs(self) -> dict[str, int]:
        """Database → version epoch, of those that the topology file names."""
        return {database.name: database.version_epoch for database in self._topology_as_it_is().databases}

    def _topology_as_it_is(self) -> _TopologyOutline:
        try:
            return msgspec.json.decode(self.topology.read_bytes(), type=_TopologyOutline)
        except (OSError, msgspec.MsgspecError):
            # An operator's slip in the file must not keep the cluster from being started, which writes it anew.
            return _TopologyOutline()

    def write(self, record: ClusterRecord) -> None:
        """Replace the record, atomically. Raises `OperatorError`."""
        self.write_file(self.path / "cluster.json", msgspec.json.format(msgspec.json.encode(record)))

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file of this folder whole or not at all, readable by this user alone. Raises `OperatorError`."""
        draft = path.with_name(f".{path.name}.draft")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            draft.replace(path)
        except OSError as error:
            raise OperatorError(f"cannot write {path}: {error.strerror}") from error

    def write_owner(self) -> None:
        """Record this process as the one in whose foreground the cluster runs. Raises `OperatorError`."""
        try:
            write_record(self.owner, ProcessIdentity.of(os.getpid()))
        except OSError as error:
            raise OperatorError(f"cannot write {self.owner}: {error.strerror}") from error

    def running(self, record: ClusterRecord) -> dict[str, ProcessIdentity]:
        """The recorded processes that run now, by name, in starting order."""
        found = {name: read_record(self.process_record(name, role)) for name, role in record.shape.server_names.items()}
        return {name: identity for name, identity in found.items() if identity is not None and identity.is_running()}
