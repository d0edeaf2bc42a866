"""Finds the usual mistakes of an installation in facts that were gathered from its servers, databases and files.

`CHECKS` is a table of pure functions over `Facts`; `diagnose` runs them all. `tao.admin.diagnosis_facts` gathers.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

MAX_CLOCK_SECONDS: Final = 1.0
"""Clocks that differ by more make leases, heartbeats and the times of edges misleading."""
MIN_FREE_MB: Final = 1024
"""A spool, a tailer's state and a topology draft must still fit on the disk when a database is away for hours."""
OLDEST_DATABASES: Final = {"mariadb": (10, 11), "mysql": (8, 0)}

_REQUIRED: Final = {
    "log_bin": ("ON",),
    "binlog_format": ("ROW",),
    "binlog_row_image": ("FULL",),
    "binlog_row_metadata": ("FULL",),
    "log_slave_updates": ("ON",),
    "innodb_flush_log_at_trx_commit": ("1",),
    "sync_binlog": ("1",),
    "event_scheduler": ("ON",),
}
REQUIRED_OPTIONS: Final = {
    "mariadb": _REQUIRED,
    "mysql": {
        **{name: values for name, values in _REQUIRED.items() if name != "log_slave_updates"},
        "gtid_mode": ("ON",),
        "enforce_gtid_consistency": ("ON",),
    },
}
"""The values of global variables that every database server needs, by flavour; the reasons stand in config/*.cnf."""


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """The state of a follower's journal, as its admin port reports it."""

    oldest_seconds: float = 0.0
    """Age of the oldest accepted write that is not made."""
    is_late: bool = False
    """Whether ``oldest_seconds`` is above the follower's ``journal.alarm_seconds``."""
    parked: int = 0
    lost: int = 0
    """Rows and files that could not be read, and are set aside."""
    trouble: str = ""
    """Why nothing can be accepted now."""
    uncopied: str = ""
    """Why the last write was refused although the disk is well: no other follower has taken the copy that it needs."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What one leader, follower, tailer or watcher says on its admin port. None: it does not say."""

    name: str
    role: str
    silent_ports: tuple[str, ...] = ()
    """The ports that accept no connection, each as its kind and address with the error."""
    topology_version: int | None = None
    schema_hash: str | None = None
    version: str | None = None
    clock_ahead_seconds: float | None = None
    """How far its clock is ahead of the clock of this machine."""
    journal: JournalFacts | None = None
    """The journal of a follower that keeps one."""
    is_heard: bool = True
    """The topology says where watchers ask it. False for a watcher without an address of frames."""


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """What one database server says. ``error``: why it could not be asked."""

    name: str
    database: str
    error: str = ""
    flavour: str = ""
    version: tuple[int, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    clock_ahead_seconds: float | None = None
    has_abandoned_lease: bool = False


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file or a folder of this machine that a settings file names.

    ``kind``: secret (only its owner and group may read it), document (only its owner may write it) or folder (room is
    needed)."""

    path: str
    kind: str
    error: str = ""
    mode: int = 0
    free_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is checked."""

    topology_version: int
    servers: tuple[ServerFacts, ...] = ()
    databases: tuple[DatabaseFacts, ...] = ()
    files: tuple[FileFacts, ...] = ()


class Problem(msgspec.Struct, frozen=True):
    """What is wrong with one server, database or file, and what to do."""

    subject: str
    problem: str
    remedy: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. ``examined``: the number of things looked at; with 0 nothing was checked.
    ``unanswered``: the databases that would have been looked at, and do not answer."""

    check: str
    examined: int
    problems: list[Problem]
    unanswered: list[str] = []


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, what it looks at, and how it finds problems there. ``asks_databases``: it looks at what
    databases answer."""

    name: str
    examined: Callable[[Facts], int]
    problems: Callable[[Facts], Iterator[Problem]]
    asks_databases: bool = False


def diagnose(facts: Facts) -> list[Finding]:
    """Run all checks, in the order of `CHECKS`."""
    silent = [each.name for each in facts.databases if each.error]
    return [
        Finding(
            check=check.name,
            examined=check.examined(facts),
            problems=list(check.problems(facts)),
            unanswered=silent if check.asks_databases else [],
        )
        for check in CHECKS
    ]


def _ports(facts: Facts) -> Iterator[Problem]:
    remedy = "start the server, or correct its address in the topology and the firewall between here and there"
    for server in facts.servers:
        for port in server.silent_ports:
            yield Problem(server.name, f"the {port}", remedy)


def _databases_answer(facts: Facts) -> Iterator[Problem]:
    for each in facts.databases:
        if each.error:
            yield Problem(
                each.name,
                f"it cannot be asked: {each.error}",
                "start it, or create its accounts with `tao accounts`; the password is taken from TAO_ADMIN_PASSWORD",
            )


def _clocks(facts: Facts) -> Iterator[Problem]:
    known = _known_clocks(facts)
    if not known:
        return
    middle = sorted(known.values())[len(known) // 2]
    for name, ahead in known.items():
        if abs(ahead - middle) > MAX_CLOCK_SECONDS:
            way = "ahead of" if ahead > middle else "behind"
            yield Problem(
                name,
                f"its clock is {abs(ahead - middle):.1f} s {way} the others'",
                "run chrony or another NTP client on its machine (`chronyc tracking`, `timedatectl`)",
            )


def _known_clocks(facts: Facts) -> dict[str, float]:
    found = {server.name: server.clock_ahead_seconds for server in facts.servers}
    found |= {database.name: database.clock_ahead_seconds for database in facts.databases}
    return {name: ahead for name, ahead in found.items() if ahead is not None}


def _versions(facts: Facts) -> Iterator[Problem]:
    known = {server.name: server.version for server in facts.servers if server.version is not None}
    usual = _most_frequent(known)
    for name, version in known.items():
        if version != usual:
            yield Problem(
                name,
                f"it runs version {version}, most servers {usual}",
                "finish the upgrade: docs/how-to/rolling-restart.md",
            )


def _topologies(facts: Facts) -> Iterator[Problem]:
    for server in facts.servers:
        found = server.topology_version
        if found is not None and found != facts.topology_version:
            yield Problem(
                server.name,
                f"it uses topology {found}, not {facts.topology_version}",
                "copy the topology file to its machine; its log says why a document was rejected",
            )


def _schemas(facts: Facts) -> Iterator[Problem]:
    known = {server.name: server.schema_hash for server in facts.servers if server.schema_hash is not None}
    usual = _most_frequent(known)
    for name, found in known.items():
        if found != usual:
            yield Problem(
                name,
                f"it uses schema {found[:12]}, most servers {(usual or '')[:12]}",
                "copy the schema file to its machine; its log says why a schema was rejected",
            )


def _most_frequent(known: dict[str, str]) -> str | None:
    return Counter(known.values()).most_common(1)[0][0] if known else None


def _watchers(facts: Facts) -> list[ServerFacts]:
    return [each for each in facts.servers if each.role == "watcher"]


def _unheard_watchers(facts: Facts) -> Iterator[Problem]:
    watchers = _watchers(facts)
    for watcher in watchers:
        if not watcher.is_heard and len(watchers) > 1:  # a single one has nobody to be asked by
            yield Problem(
                watcher.name,
                "it has no frames address, so others cannot ask when it renewed a lease: they wait for a whole lease "
                "before they replace a master of its region",
                "add its frames address to the topology, and restart it",
            )


def _database_versions(facts: Facts) -> Iterator[Problem]:
    for each in facts.databases:
        oldest = OLDEST_DATABASES.get(each.flavour)
        if oldest is not None and each.version < oldest:
            version, needed = (".".join(map(str, numbers)) for numbers in (each.version, oldest))
            yield Problem(each.name, f"it is {each.flavour} {version}", f"upgrade it to {needed} or newer")
    for database in dict.fromkeys(each.database for each in facts.databases):
        members = [each for each in facts.databases if each.database == database and each.flavour]
        if len({each.flavour for each in members}) > 1:
            kinds = ", ".join(f"{each.name} is {each.flavour}" for each in members)
            yield Problem(database, f"its servers differ: {kinds}", "use one flavour in each replication set")


def _database_options(facts: Facts) -> Iterator[Problem]:
    for each in facts.databases:
        options = dict(each.options)
        for name, accepted in REQUIRED_OPTIONS.get(each.flavour, {}).items():
            found = options.get(name)
            if found is not None and found.upper() not in accepted:
                yield Problem(
                    each.name,
                    f"{name} is {found}, not {accepted[0]}",
                    f"take {name} from config/{each.flavour}.cnf and restart it",
                )


def _leases(facts: Facts) -> Iterator[Problem]:
    servers = Counter(each.database for each in facts.databases)
    for each in facts.databases:
        if each.has_abandoned_lease and servers[each.database] > 1:  # that of a single server counts for nobody
            yield Problem(
                each.name,
                "it keeps no lease, but has the row of one: critical reads are refused there once that has ended",
                "with sql_log_bin = 0, run UPDATE tao.lease SET lasts_ms = 0; COMMIT",
            )


def _server_ids(facts: Facts) -> Iterator[Problem]:
    ids = {each.name: dict(each.options)["server_id"] for each in facts.databases if "server_id" in dict(each.options)}
    for number, times in Counter(ids.values()).items():
        if times > 1:
            names = ", ".join(name for name, found in ids.items() if found == number)
            yield Problem(names, f"they share server_id {number}", "give each database server a server_id of its own")


def _journals(facts: Facts) -> Iterator[Problem]:
    for server in facts.servers:
        journal = server.journal
        if journal is None:
            continue
        if journal.trouble:
            yield Problem(
                server.name,
                f"it accepts no writes: {journal.trouble}",
                "mend the disk of journal.folder, or start the version that reads its file",
            )
        if journal.uncopied:
            yield Problem(
                server.name,
                f"it accepts no writes, since no other follower takes their copies: {journal.uncopied}",
                "have another follower of the tier run, with a journal that has room",
            )
        if journal.is_late:
            yield Problem(
                server.name,
                f"an accepted write waits for {journal.oldest_seconds:.0f} s already",
                "look for the shard or database that does not answer: tao status, tao journal status",
            )
        if journal.parked:
            yield Problem(
                server.name,
                f"{journal.parked} accepted writes were given up and are parked",
                "tao journal parked; then tao journal inject or discard each",
            )
        if journal.lost:
            yield Problem(
                server.name,
                f"{journal.lost} rows or files of its journal could not be read, and are set aside",
                "look for journal_row_torn and journal_unreadable in its log: the writes in them are not made",
            )


def _answering(facts: Facts) -> int:
    return sum(not each.error for each in facts.databases)


def _files(facts: Facts) -> Iterator[Problem]:
    for file in facts.files:
        if file.error:
            yield Problem(file.path, file.error, "create it, or correct its path in the settings file")
        elif file.kind == "secret" and file.mode & (stat.S_IWGRP | stat.S_IRWXO):
            yield Problem(
                file.path,
                f"others than its owner and its readers' group may use it (mode {file.mode:03o})",
                f"chmod g-w,o= {file.path}",
            )
        elif file.mode & stat.S_IWOTH and not file.mode & stat.S_ISVTX:
            yield Problem(file.path, f"everybody may change it (mode {file.mode:03o})", f"chmod o-w {file.path}")


def _disks(facts: Facts) -> Iterator[Problem]:
    for file in facts.files:
        if file.free_mb is not None and file.free_mb < MIN_FREE_MB:
            yield Problem(
                file.path, f"{file.free_mb} MB of disk are free", f"make room for {MIN_FREE_MB} MB or move the folder"
            )


CHECKS: Final = (
    Check("ports of servers accept connections", lambda facts: len(facts.servers), _ports),
    Check("databases answer", lambda facts: len(facts.databases), _databases_answer),
    Check("clocks agree", lambda facts: len(_known_clocks(facts)), _clocks),
    Check("servers run one version", lambda facts: sum(each.version is not None for each in facts.servers), _versions),
    Check(
        "servers use one topology",
        lambda facts: sum(each.topology_version is not None for each in facts.servers),
        _topologies,
    ),
    Check(
        "servers use one schema", lambda facts: sum(each.schema_hash is not None for each in facts.servers), _schemas
    ),
    Check("watchers can be asked", lambda facts: len(_watchers(facts)), _unheard_watchers),
    Check("journals of followers", lambda facts: sum(each.journal is not None for each in facts.servers), _journals),
    Check("versions of databases", _answering, _database_versions, asks_databases=True),
    Check("options of databases", _answering, _database_options, asks_databases=True),
    Check("leases of databases", _answering, _leases, asks_databases=True),
    Check("server ids of databases", _answering, _server_ids, asks_databases=True),
    Check("rights of files", lambda facts: len(facts.files), _files),
    Check("room on disks", lambda facts: sum(each.free_mb is not None for each in facts.files), _disks),
)
"""All checks, the most basic ones first."""
