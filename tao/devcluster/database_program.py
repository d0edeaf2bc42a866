"""The database server program of this machine, MariaDB or MySQL, and the command lines that run it.

Both call their server ``mysqld`` (Debian's MariaDB keeps that name as a link), so the flavour is taken from
``--version`` and never from the file's name. Every option is given on the command line (``--no-defaults``): a machine's
own my.cnf must not change what a test or a demonstration measures. The log goes to standard error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tao.devcluster.ports import LOOPBACK
from tao.model.errors import OperatorError, SettingsError
from tao.replication.database_tools import SERVER_VARIABLE
from tao.wire.tls import TlsFiles

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
    path, named = env.get("PATH", ""), env.get(SERVER_VARIABLE)
    found = _search((named,), path) if named else _search(_NAMES, path, *_SYSTEM_FOLDERS)
    if found is not None:
        return found
    if named:
        raise ServerBinaryMissing(f"{SERVER_VARIABLE}={named} is not a program: name a mariadbd or mysqld")
    install = "apt-get install mariadb-server-core mariadb-client-core"
    raise ServerBinaryMissing(
        f"no mariadbd or mysqld found: `{install}` installs one that starts no daemon, "
        f"or set {SERVER_VARIABLE} to the program"
    )


def _search(names: Iterable[str], *places: str | Path) -> Path | None:
    """Return the first program of these names in the places, folders or search paths."""
    found = (shutil.which(name, path=os.pathsep.join(str(place) for place in places if place)) for name in names)
    return next((Path(path).absolute() for path in found if path is not None), None)


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
    installed = server.resolve().parent.parent
    places = (installed / "bin", installed / "scripts", env.get("PATH", ""))
    found = _search(("mariadb-install-db", "mysql_install_db"), *places)
    if found is None:
        raise ServerBinaryMissing(
            f"{server} has no mariadb-install-db: `apt-get install mariadb-server-core` brings it"
        )
    return found


_SOCKET_PATH_BYTES = 107
_REDO_CAPACITY_SINCE = (8, 0, 30)
_REPLICA_NAMES_SINCE = (8, 0, 27)
REDO_LOG_MB = 16
"""The size of the redo log: small, because a template is copied with it; a larger one helps only long bulk loads."""


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
    durability: Durability = Durability.FULL
    """Full, because a figure that was measured without syncing is meaningless."""
    buffer_pool_mb: int = 64
    """The buffer pool in MiB: enough for development, at 86 MB resident; benchmarks of writes need 512 or more."""

    tls: TlsFiles | None = None
    """The certificate that the server shows, to its own master too, and whose certificates it takes; None: none."""

    def __post_init__(self) -> None:
        if not 1 <= self.server_id < 2**32 or not 0 <= self.gtid_domain < 2**32:
            raise SettingsError(
                f"server_id {self.server_id} and gtid_domain {self.gtid_domain} must fit in 32 bits, and server_id "
                "must be at least 1"
            )
        if self.buffer_pool_mb < 8:
            raise SettingsError(f"buffer_pool_mb {self.buffer_pool_mb}: the servers accept no less than 8")


class ServerFolder:
    """The paths of a private server's files. Raises `SettingsError` when the folder is too deep for a Unix socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        # The server deletes all temporary tables in this folder when it starts, so that no two servers may share it.
        self.temporary = path / "tmp"
        # Only processes of this user and of root can open it.
        self.socket = path / "db.sock"
        self.pid_file = path / "db.pid"
        self.record = path / "process.json"
        self.log = path / "server.log"
        length = len(bytes(self.socket))
        if length > _SOCKET_PATH_BYTES:
            raise SettingsError(
                f"the folder {self.path} is {length - _SOCKET_PATH_BYTES} bytes too long for a Unix socket in it: "
                "choose a shorter one"
            )


_COMMON_OPTIONS = (
    f"bind-address={LOOPBACK}",
    # Without it 127.0.0.1 counts as localhost, where root has no password, so root could connect by TCP.
    "skip-name-resolve",
    "local-infile=0",
    # Twice the connections of all pools of a cluster on one machine; each costs the server a thread.
    "max-connections=256",
    "character-set-server=utf8mb4",
    "collation-server=utf8mb4_bin",
    "transaction-isolation=READ-COMMITTED",
    # Seconds to wait for a metadata lock. The defaults, a day and a year, are longer than any deadline.
    "lock-wait-timeout=2",
    # Seconds to wait for a row lock in sessions that set no limit; those that write set a shorter one.
    "innodb-lock-wait-timeout=2",
    "binlog-row-image=FULL",
    "binlog-row-metadata=FULL",
    # Smaller files are removed sooner. A tailer that was stopped for longer than a day cannot catch up.
    "max-binlog-size=64M",
    "binlog-expire-logs-seconds=86400",
    "performance-schema=0",
    "key-buffer-size=1M",
    # An event closes a master whose lease has ended.
    "event-scheduler=ON",
)
_FLAVOUR_OPTIONS = {
    Flavour.MARIADB: (
        "binlog-format=ROW",
        # Without the text of statements, which is as long as the rows.
        "binlog-annotate-row-events=0",
        "log-slave-updates=1",
        "gtid-strict-mode=1",
        "aria-pagecache-buffer-size=8M",
    ),
    # Row format and replicated updates in the binlog are MySQL's defaults; naming these options is deprecated.
    Flavour.MYSQL: ("gtid-mode=ON", "enforce-gtid-consistency=ON", "mysqlx=OFF", "secure-file-priv=NULL"),
}
# A replica that receives nothing for five heartbeats connects again; the default of 60 s is an outage. Transactions run
# in parallel, and commit in the master's order: several share one sync to disk.
_REPLICA_OPTIONS = {
    Flavour.MARIADB: (
        "slave-parallel-threads=4",
        "slave-parallel-mode=optimistic",
        "slave-net-timeout=5",
        "master-retry-count=0",
    ),
    Flavour.MYSQL: ("replica-parallel-workers=4", "replica-preserve-commit-order=ON", "replica-net-timeout=5"),
}
_OLD_REPLICA_OPTIONS = ("slave-net-timeout=5",)  # one thread is the default, which keeps the order by itself
_SEMI_SYNC_OPTIONS = {
    Flavour.MARIADB: ("rpl-semi-sync-slave-enabled=1",),
    Flavour.MYSQL: (
        "plugin-load-add=semisync_source.so",
        "plugin-load-add=semisync_replica.so",
        "loose-rpl-semi-sync-replica-enabled=1",
    ),
}


def server_argv(
    binary: ServerBinary, folder: ServerFolder, port: int, options: ServerOptions, *, as_root: bool
) -> list[str]:
    """Return the command that starts the server on 127.0.0.1:``port`` and its Unix socket."""
    flavour, full = binary.flavour, options.durability is Durability.FULL
    chosen = [
        f"datadir={folder.data}",
        f"tmpdir={folder.temporary}",
        f"socket={folder.socket}",
        f"pid-file={folder.pid_file}",
        f"port={port}",
        f"innodb-buffer-pool-size={options.buffer_pool_mb}M",
        f"innodb-flush-log-at-trx-commit={1 if full else 2}",
        f"sync-binlog={1 if full else 0}",
        f"server-id={options.server_id}",
        f"log-bin={folder.data / 'binlog'}",
        _redo_log_option(binary),
        *_COMMON_OPTIONS,
        *_FLAVOUR_OPTIONS[flavour],
    ]
    if flavour is Flavour.MARIADB:
        chosen.append(f"gtid-domain-id={options.gtid_domain}")
    if options.replicated:
        has_new_names = flavour is Flavour.MARIADB or binary.version >= _REPLICA_NAMES_SINCE
        chosen += _REPLICA_OPTIONS[flavour] if has_new_names else _OLD_REPLICA_OPTIONS
    if options.semi_sync:
        chosen += _SEMI_SYNC_OPTIONS[flavour]
    if options.read_only:
        chosen.append("read-only=1")
    if options.tls is not None:
        tls = options.tls
        chosen += [f"ssl-ca={tls.authorities}", f"ssl-cert={tls.certificate}", f"ssl-key={tls.private_key}"]
    return _argv(binary.path, chosen, as_root)


def initialize_argv(binary: ServerBinary, data: Path, *, as_root: bool) -> list[str]:
    """Return the command that makes an empty data directory, where root has no password and connects by Unix socket."""
    by_flavour = {
        Flavour.MARIADB: ("auth-root-authentication-method=normal", "skip-test-db"),
        Flavour.MYSQL: ("initialize-insecure", "secure-file-priv=NULL"),
    }
    chosen = [f"datadir={data}", _redo_log_option(binary), *by_flavour[binary.flavour]]
    return _argv(binary.initializer, chosen, as_root)


def _redo_log_option(binary: ServerBinary) -> str:
    has_capacity = binary.flavour is Flavour.MYSQL and binary.version >= _REDO_CAPACITY_SINCE
    return f"innodb-{'redo-log-capacity' if has_capacity else 'log-file-size'}={REDO_LOG_MB}M"


def _argv(program: Path, options: Iterable[str], as_root: bool) -> list[str]:
    return [str(program), "--no-defaults", *(f"--{option}" for option in options), *(["--user=root"] * as_root)]
