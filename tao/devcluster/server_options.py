"""The command line of a private database server: pure, so that what is started can be read and tested.

Every option stands on the command line (``--no-defaults``): a machine's own my.cnf must not change what a test or a
demo measures. Log and error output go to standard error, which the process's owner keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tao.devcluster.ports import LOOPBACK
from tao.devcluster.server_binary import Flavour, ServerBinary
from tao.model.errors import SettingsError

_SOCKET_PATH_BYTES = 107
_REDO_CAPACITY_SINCE = (8, 0, 30)
_REPLICA_NAMES_SINCE = (8, 0, 27)


class Durability(StrEnum):
    """What survives a crash of the machine."""

    FULL = "full"
    """Every acknowledged transaction: redo log and binlog are synced at each commit."""
    RELAXED = "relaxed"
    """For tests only: a crash of the *machine* loses the last second. A crash of the server process loses nothing."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How one private server runs; the same for its whole life, but for port and buffer pool."""

    server_id: int = 1
    """Replication's name for the server, 1 … 2³²−1: two servers that replicate from each other need different ones."""
    gtid_domain: int = 0
    """MariaDB: one domain per replication set, so that several masters can feed one server. MySQL has no such thing."""
    replicated: bool = False
    """One of several servers of a replication set, as master or replica: what a replica needs is ready."""
    read_only: bool = False
    """Closed to writes from the start: a replica must not be open for even the moment before somebody closes it."""
    semi_sync: bool = False
    """It can wait for replicas that acknowledge, and acknowledges as a replica. Whether it waits, as a master, is set
    when it is opened."""
    replica_threads: int = 4
    """Apply threads of a replica. Commits stay in the master's order, and several at once share a sync to disk."""
    replica_net_timeout_seconds: int = 5
    """A replica that hears nothing for so long connects anew; five heartbeats. The default of 60 s is an outage."""
    durability: Durability = Durability.FULL
    """Full, because a figure measured without syncing is not a figure."""
    buffer_pool_mb: int = 64
    """Enough to develop with, at 86 MB resident; benchmarks of writes want 512 or more, as data outgrow it."""
    redo_log_mb: int = 16
    """Small, because the template is copied with it; a bigger one helps only long bulk loads."""
    max_connections: int = 256
    """All leaders' and followers' pools of a machine's cluster, twice over; each costs the server a thread."""
    lock_wait_timeout_seconds: int = 2
    """Waiting for metadata locks. The defaults are a day and a year, which outlive any deadline (DESIGN.md §3)."""
    row_lock_wait_timeout_seconds: int = 2
    """Waiting for row locks, as a backstop: sessions that write set a shorter one themselves."""
    binlog_kept_seconds: int = 86_400
    """A day of binlog: what a stopped tailer can catch up with, and a bound on the folder."""
    max_binlog_mb: int = 64
    """Size of one binlog file; smaller files let old ones go sooner."""

    def __post_init__(self) -> None:
        for name in (
            "server_id", "buffer_pool_mb", "redo_log_mb", "max_connections", "lock_wait_timeout_seconds",
            "row_lock_wait_timeout_seconds", "binlog_kept_seconds", "max_binlog_mb", "replica_threads",
            "replica_net_timeout_seconds",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        if not 0 <= self.gtid_domain < 2**32 or self.server_id >= 2**32:
            raise SettingsError(f"gtid_domain {self.gtid_domain} and server_id {self.server_id} must fit in 32 bits")
        if self.buffer_pool_mb < 8 or self.redo_log_mb < 8:
            raise SettingsError("buffer_pool_mb and redo_log_mb must be at least 8: the servers accept no less")


@dataclass(frozen=True, slots=True)
class ServerFolder:
    """Where a private server keeps things."""

    path: Path

    def __post_init__(self) -> None:
        length = len(bytes(self.socket))
        if length > _SOCKET_PATH_BYTES:
            raise SettingsError(
                f"the folder {self.path} is {length - _SOCKET_PATH_BYTES} bytes too long for a Unix socket in it: "
                "choose a shorter one"
            )

    @property
    def data(self) -> Path:
        """The server's data directory."""
        return self.path / "data"

    @property
    def socket(self) -> Path:
        """The Unix socket, by which only this user's (and root's) processes come in."""
        return self.path / "db.sock"

    @property
    def pid_file(self) -> Path:
        """The pid file the server writes for itself; nobody here reads it."""
        return self.path / "db.pid"

    @property
    def record(self) -> Path:
        """Who serves this folder: pid, start time, boot."""
        return self.path / "process.json"

    @property
    def log(self) -> Path:
        """What the server says."""
        return self.path / "server.log"


def server_argv(
    binary: ServerBinary, folder: ServerFolder, port: int, options: ServerOptions, *, as_root: bool
) -> list[str]:
    """The command that starts the server on 127.0.0.1:``port`` and its Unix socket."""
    full = options.durability is Durability.FULL
    argv = [
        str(binary.path),
        "--no-defaults",
        f"--datadir={folder.data}",
        f"--socket={folder.socket}",
        f"--pid-file={folder.pid_file}",
        f"--port={port}",
        f"--bind-address={LOOPBACK}",
        # Without it 127.0.0.1 counts as localhost, and root, who has no password there, could come in by TCP.
        "--skip-name-resolve",
        "--local-infile=0",
        f"--max-connections={options.max_connections}",
        "--character-set-server=utf8mb4",
        "--collation-server=utf8mb4_bin",
        "--transaction-isolation=READ-COMMITTED",
        f"--lock-wait-timeout={options.lock_wait_timeout_seconds}",
        f"--innodb-lock-wait-timeout={options.row_lock_wait_timeout_seconds}",
        f"--innodb-buffer-pool-size={options.buffer_pool_mb}M",
        f"--innodb-flush-log-at-trx-commit={1 if full else 2}",
        f"--sync-binlog={1 if full else 0}",
        f"--server-id={options.server_id}",
        f"--log-bin={folder.data / 'binlog'}",
        "--binlog-row-image=FULL",
        "--binlog-row-metadata=FULL",
        f"--max-binlog-size={options.max_binlog_mb}M",
        f"--binlog-expire-logs-seconds={options.binlog_kept_seconds}",
        "--performance-schema=0",
        "--key-buffer-size=1M",
        # A master without a lease is closed by an event.
        "--event-scheduler=ON",
    ]
    if as_root:
        argv.append("--user=root")
    if binary.flavour is Flavour.MARIADB:
        argv += [
            f"--innodb-log-file-size={options.redo_log_mb}M",
            "--binlog-format=ROW",
            "--log-slave-updates=1",
            f"--gtid-domain-id={options.gtid_domain}",
            "--gtid-strict-mode=1",
            "--aria-pagecache-buffer-size=8M",
        ]
    else:
        redo = "redo-log-capacity" if binary.version >= _REDO_CAPACITY_SINCE else "log-file-size"
        # ROW and updates of replicas in the binlog are MySQL's defaults, and naming them is deprecated.
        argv += [
            f"--innodb-{redo}={options.redo_log_mb}M",
            "--gtid-mode=ON",
            "--enforce-gtid-consistency=ON",
            "--mysqlx=OFF",
            "--secure-file-priv=NULL",
        ]
    if options.replicated:
        argv += _replica_argv(binary, options)
    if options.semi_sync:
        if binary.flavour is Flavour.MARIADB:
            argv.append("--rpl-semi-sync-slave-enabled=1")
        else:
            argv += [
                "--plugin-load-add=semisync_source.so",
                "--plugin-load-add=semisync_replica.so",
                "--loose-rpl-semi-sync-replica-enabled=1",
            ]
    if options.read_only:
        argv.append("--read-only=1")
    return argv


def _replica_argv(binary: ServerBinary, options: ServerOptions) -> list[str]:
    if binary.flavour is Flavour.MARIADB:
        return [
            f"--slave-parallel-threads={options.replica_threads}",
            # Runs ahead optimistically, commits in the master's order always.
            "--slave-parallel-mode=optimistic",
            f"--slave-net-timeout={options.replica_net_timeout_seconds}",
            "--master-retry-count=0",
        ]
    # Before 8.0.27 one thread is the default, and keeps the order by itself.
    if binary.version < _REPLICA_NAMES_SINCE:
        return [f"--slave-net-timeout={options.replica_net_timeout_seconds}"]
    return [
        f"--replica-parallel-workers={options.replica_threads}",
        "--replica-preserve-commit-order=ON",
        f"--replica-net-timeout={options.replica_net_timeout_seconds}",
    ]


def initialize_argv(binary: ServerBinary, data: Path, redo_log_mb: int, *, as_root: bool) -> list[str]:
    """The command that makes an empty data directory whose root account has no password, by Unix socket only."""
    if binary.flavour is Flavour.MARIADB:
        argv = [
            str(binary.initializer),
            "--no-defaults",
            f"--datadir={data}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]
    else:
        redo = "redo-log-capacity" if binary.version >= _REDO_CAPACITY_SINCE else "log-file-size"
        argv = [
            str(binary.path),
            "--no-defaults",
            "--initialize-insecure",
            f"--datadir={data}",
            f"--innodb-{redo}={redo_log_mb}M",
            "--secure-file-priv=NULL",
        ]
    if as_root:
        argv.append("--user=root")
    return argv
