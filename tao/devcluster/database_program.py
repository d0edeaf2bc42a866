"""The database server program of this machine, MariaDB or MySQL, and the command lines that run it.

Both call their server ``mysqld`` (Debian's MariaDB keeps that name as a link), so the flavour is taken from
``--version`` and never from the file's name. Every option is given on the command line (``--no-defaults``): a machine's
own my.cnf must not change what a test or a demonstration measures. The log goes to standard error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tao.devcluster.ports import LOOPBACK
from tao.model.errors import OperatorError, SettingsError

ENVIRONMENT_VARIABLE = "TAO_MYSQLD"
_NAMES = ("mariadbd", "mysqld")
_SYSTEM_FOLDERS = (Path("/usr/sbin"), Path("/usr/local/sbin"), Path("/usr/local/bin"), Path("/usr/libexec"))
_VERSION_SECONDS = 30.0
_OLDEST = {"mariadb": (10, 11, 0), "mysql": (8, 0, 0)}
_VERSION_PATTERN = re.compile(r"\bVer (\d+)\.(\d+)\.(\d+)")


class Flavour(StrEnum):
    """The two families of servers that are supported."""

    MARIADB = "mariadb"
    MYSQL = "mysql"


class ServerBinaryMissing(OperatorError):
    """There is no usable database server on this machine; the message has the command that installs one."""

    reason = "SERVER_BINARY_MISSING"


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server program that can be started."""

    path: Path
    flavour: Flavour
    version: tuple[int, int, int]
    initializer: Path
    """The program that initialises a data directory: ``mariadb-install-db``, or MySQL's server itself."""

    @property
    def version_text(self) -> str:
        """The version as text: ``10.11.19``."""
        return ".".join(map(str, self.version))


def find_server_binary(env: Mapping[str, str]) -> ServerBinary:
    """Return the server that ``TAO_MYSQLD`` names, else ``mariadbd`` or ``mysqld`` from ``PATH`` or /usr/sbin.

    It is run once with ``--version``, which takes a few milliseconds. Raises `ServerBinaryMissing` when there is none,
    and `OperatorError` when it cannot be used.
    """
    path = _locate(env)
    flavour, version = parse_version(_ask_version(path), path)
    return ServerBinary(path, flavour, version, _initializer(path, env) if flavour is Flavour.MARIADB else path)


def parse_version(text: str, path: Path) -> tuple[Flavour, tuple[int, int, int]]:
    """Return flavour and version from the output of ``--version``. Raises `OperatorError` for an unsupported server."""
    match = _VERSION_PATTERN.search(text)
    if match is None:
        raise OperatorError(f"{path} --version prints no version: name a MariaDB or MySQL server")
    flavour = Flavour.MARIADB if "mariadb" in text.lower() else Flavour.MYSQL
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < _OLDEST[flavour]:
        oldest = ".".join(map(str, _OLDEST[flavour][:2]))
        raise OperatorError(f"{path} is {flavour} {'.'.join(map(str, version))}: {oldest} or later is needed")
    return flavour, version


def _locate(env: Mapping[str, str]) -> Path:
    named = env.get(ENVIRONMENT_VARIABLE)
    if named:
        found = shutil.which(named, path=env.get("PATH", ""))
        if found is None:
            raise ServerBinaryMissing(f"{ENVIRONMENT_VARIABLE}={named} is not a program: name a mariadbd or mysqld")
        return Path(found).absolute()
    for name in _NAMES:
        on_path = shutil.which(name, path=env.get("PATH", ""))
        candidates = [Path(on_path)] if on_path else []
        candidates += [folder / name for folder in _SYSTEM_FOLDERS if (folder / name).is_file()]
        if candidates:
            return candidates[0].absolute()
    install = "apt-get install mariadb-server-core mariadb-client-core"
    raise ServerBinaryMissing(
        f"no mariadbd or mysqld found: `{install}` installs one that starts no daemon, "
        f"or set {ENVIRONMENT_VARIABLE} to the program"
    )


def _ask_version(path: Path) -> str:
    try:
        answer = subprocess.run(
            [path, "--no-defaults", "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"{path} cannot be run: {error}") from error
    if answer.returncode != 0:
        raise OperatorError(f"{path} --version failed: {answer.stderr.strip() or answer.returncode}")
    return answer.stdout


def _initializer(server: Path, env: Mapping[str, str]) -> Path:
    """Return the initialiser that belongs to this server: the one beside it first, so that installations do not mix."""
    install_folder = server.resolve().parent.parent
    for folder in (install_folder / "bin", install_folder / "scripts"):
        for name in ("mariadb-install-db", "mysql_install_db"):
            if (folder / name).is_file():
                return folder / name
    for name in ("mariadb-install-db", "mysql_install_db"):
        found = shutil.which(name, path=env.get("PATH", ""))
        if found:
            return Path(found)
    raise ServerBinaryMissing(f"{server} has no mariadb-install-db: `apt-get install mariadb-server-core` brings it")


_SOCKET_PATH_BYTES = 107
_REDO_CAPACITY_SINCE = (8, 0, 30)
_REPLICA_NAMES_SINCE = (8, 0, 27)


class Durability(StrEnum):
    """Which transactions survive a crash of the machine."""

    FULL = "full"
    """Every acknowledged transaction survives: redo log and binlog are synced at each commit."""
    RELAXED = "relaxed"
    """For tests only: a crash of the machine loses the last second. A crash of the server process loses nothing."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of one private server. Only port and buffer pool may change between its starts."""

    server_id: int = 1
    """The server's number in replication, 1 … 2³²−1. Servers that replicate from each other need different numbers."""
    gtid_domain: int = 0
    """MariaDB only: the GTID domain, one for each database, so that several masters can feed one server."""
    replicated: bool = False
    """True for a server of a database with several servers, so that it is ready to be a replica."""
    read_only: bool = False
    """True when it starts closed to writes: a replica must not accept a write even for a moment."""
    semi_sync: bool = False
    """True when it acknowledges as a replica, and can wait for acknowledgements as a master. Whether it waits is set
    when it is opened to writes."""
    replica_threads: int = 4
    """The apply threads of a replica. Commits stay in the master's order, and several share one sync to disk."""
    replica_net_timeout_seconds: int = 5
    """A replica that receives nothing for so long connects again: five heartbeats. The default of 60 s is an outage."""
    durability: Durability = Durability.FULL
    """Full, because a figure that was measured without syncing is meaningless."""
    buffer_pool_mb: int = 64
    """The buffer pool in MiB: enough for development, at 86 MB resident; benchmarks of writes need 512 or more."""
    redo_log_mb: int = 16
    """The redo log in MiB: small, because the template is copied with it; a larger one helps only long bulk loads."""
    max_connections: int = 256
    """Twice the connections of all pools of a cluster on one machine; each costs the server a thread."""
    lock_wait_timeout_seconds: int = 2
    """The time limit for metadata locks. The defaults, a day and a year, are longer than any deadline."""
    row_lock_wait_timeout_seconds: int = 2
    """The time limit for row locks of sessions that set none themselves; those that write set a shorter one."""
    binlog_kept_seconds: int = 86_400
    """How long the binlog is kept: a tailer that was stopped for longer cannot catch up."""
    max_binlog_mb: int = 64
    """The size of one binlog file in MiB; smaller files are removed sooner."""

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
    """The paths of a private server's files."""

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
    def temporary(self) -> Path:
        """The folder of temporary tables. A server that starts deletes all of them in its folder, so none is shared."""
        return self.path / "tmp"

    @property
    def socket(self) -> Path:
        """The Unix socket, which only processes of this user and of root can open."""
        return self.path / "db.sock"

    @property
    def pid_file(self) -> Path:
        """The pid file that the server writes; it is not used here."""
        return self.path / "db.pid"

    @property
    def record(self) -> Path:
        """The record of the process that runs on this folder: pid, start time, boot."""
        return self.path / "process.json"

    @property
    def log(self) -> Path:
        """The log of the server."""
        return self.path / "server.log"


def server_argv(
    binary: ServerBinary, folder: ServerFolder, port: int, options: ServerOptions, *, as_root: bool
) -> list[str]:
    """Return the command that starts the server on 127.0.0.1:``port`` and its Unix socket."""
    full = options.durability is Durability.FULL
    argv = [
        str(binary.path),
        "--no-defaults",
        f"--datadir={folder.data}",
        f"--tmpdir={folder.temporary}",
        f"--socket={folder.socket}",
        f"--pid-file={folder.pid_file}",
        f"--port={port}",
        f"--bind-address={LOOPBACK}",
        # Without it 127.0.0.1 counts as localhost, where root has no password, so root could connect by TCP.
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
        # An event closes a master whose lease has ended.
        "--event-scheduler=ON",
    ]
    if as_root:
        argv.append("--user=root")
    argv += _flavour_argv(binary, options)
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


def _flavour_argv(binary: ServerBinary, options: ServerOptions) -> list[str]:
    """Return the options that only one flavour has, or that both spell differently."""
    if binary.flavour is Flavour.MARIADB:
        return [
            _redo_log_option(binary, options.redo_log_mb),
            "--binlog-format=ROW",
            "--log-slave-updates=1",
            f"--gtid-domain-id={options.gtid_domain}",
            "--gtid-strict-mode=1",
            "--aria-pagecache-buffer-size=8M",
        ]
    # Row format and replicated updates in the binlog are MySQL's defaults; naming these options is deprecated.
    return [
        _redo_log_option(binary, options.redo_log_mb),
        "--gtid-mode=ON",
        "--enforce-gtid-consistency=ON",
        "--mysqlx=OFF",
        "--secure-file-priv=NULL",
    ]


def _redo_log_option(binary: ServerBinary, redo_log_mb: int) -> str:
    has_capacity = binary.flavour is Flavour.MYSQL and binary.version >= _REDO_CAPACITY_SINCE
    return f"--innodb-{'redo-log-capacity' if has_capacity else 'log-file-size'}={redo_log_mb}M"


def _replica_argv(binary: ServerBinary, options: ServerOptions) -> list[str]:
    if binary.flavour is Flavour.MARIADB:
        return [
            f"--slave-parallel-threads={options.replica_threads}",
            # Transactions run in parallel optimistically, and commit in the master's order.
            "--slave-parallel-mode=optimistic",
            f"--slave-net-timeout={options.replica_net_timeout_seconds}",
            "--master-retry-count=0",
        ]
    # Before 8.0.27 one thread is the default, which keeps the order by itself.
    if binary.version < _REPLICA_NAMES_SINCE:
        return [f"--slave-net-timeout={options.replica_net_timeout_seconds}"]
    return [
        f"--replica-parallel-workers={options.replica_threads}",
        "--replica-preserve-commit-order=ON",
        f"--replica-net-timeout={options.replica_net_timeout_seconds}",
    ]


def initialize_argv(binary: ServerBinary, data: Path, redo_log_mb: int, *, as_root: bool) -> list[str]:
    """Return the command that makes an empty data directory, where root has no password and connects by Unix socket."""
    if binary.flavour is Flavour.MARIADB:
        argv = [
            str(binary.initializer),
            "--no-defaults",
            f"--datadir={data}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]
    else:
        argv = [
            str(binary.path),
            "--no-defaults",
            "--initialize-insecure",
            f"--datadir={data}",
            _redo_log_option(binary, redo_log_mb),
            "--secure-file-priv=NULL",
        ]
    if as_root:
        argv.append("--user=root")
    return argv
