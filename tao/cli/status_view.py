"""What all servers say of themselves, as one view of the cluster: the problems in words, then everybody in a row.

Pure: the answers are given. A problem is what an operator would get up for, or look into in the morning: a server that
does not answer or is not ready, a binlog that is not followed, a master that takes no writes, a region that is behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tao.model.topology import CacheServer, Database, Region, TailerProcess, Topology

UP: Final = "ready"
UNREACHABLE: Final = "does not answer"
MARKED_DOWN: Final = "marked down"
RECENT_SECONDS: Final = 3_600.0
"""An inconsistency in a cache is a problem for so long after it was found; caches forget, and nothing takes it back."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one server's admin port said. ``stats``: its figures, empty when it does not answer; ``reason``: why it does
    not, or why it is not ready; empty when all is well with it. (Any: which figures there are is each role's affair.)
    """

    stats: Mapping[str, Any]
    reason: str = ""

    @property
    def state(self) -> str:
        return UNREACHABLE if not self.stats else UP if not self.reason else "not ready"


class LeaderRow(msgspec.Struct, frozen=True, kw_only=True):
    """``staleness_seconds``: of the database that is furthest behind; None: not known, or not measured.
    ``consistency_looks``: into followers' caches since its start, and how many of them found an inconsistency."""

    name: str
    region: str
    state: str
    owned_shards: int | None = None
    hosted_shards: int | None = None
    subscribers: int | None = None
    consistency_looks: int | None = None
    inconsistencies: int | None = None
    staleness_seconds: float | None = None


class FollowerRow(msgspec.Struct, frozen=True, kw_only=True):
    """``hit_rate``: since its start."""

    name: str
    region: str
    tier: str
    state: str
    hit_rate: float | None = None
    unsubscribed_shards: int | None = None
    staleness_seconds: float | None = None


class TailerRow(msgspec.Struct, frozen=True, kw_only=True):
    """``position``: acknowledged up to there."""

    name: str
    region: str
    database: str
    state: str
    lag_seconds: float | None = None
    position: str = ""


class DatabaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """``servers``: name → ``up``, ``not known``, ``marked down``, or what is wrong with it, as leaders (the master) and
    tailers find it. ``semi_sync``: by the topology; ``waits_for_replica``: do commits; None when nobody knows."""

    name: str
    master_region: str
    servers: dict[str, str]
    semi_sync: bool = False
    waits_for_replica: bool | None = None


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster."""

    topology_version: int
    problems: list[str]
    leaders: list[LeaderRow]
    followers: list[FollowerRow]
    tailers: list[TailerRow]
    databases: list[DatabaseRow]


def view_of(topology: Topology, answers: Mapping[str, Answer], max_staleness_seconds: float) -> View:
    """``answers``: by name, of every leader, follower and tailer of the topology."""
    regions = topology.regions
    return View(
        topology_version=topology.version,
        problems=list(_problems(topology, answers, max_staleness_seconds)),
        leaders=[
            _leader(region.name, server, answers[server.name])
            for region in regions
            for server in region.leaders.servers
        ],
        followers=[
            _follower(region.name, tier.name, server, answers[server.name])
            for region in regions
            for tier in region.followers
            for server in tier.servers
        ],
        tailers=[_tailer(region.name, tailer, answers[tailer.name]) for region in regions for tailer in region.tailers],
        databases=[_database(database, topology, answers, max_staleness_seconds) for database in topology.databases],
    )


def _leader(region: str, server: CacheServer, answer: Answer) -> LeaderRow:
    stats = answer.stats
    return LeaderRow(
        name=server.name,
        region=region,
        state=_state(server, answer),
        owned_shards=stats.get("owned_shards"),
        hosted_shards=stats.get("hosted_shards"),
        subscribers=stats.get("delivery", {}).get("subscribers"),
        consistency_looks=stats.get("consistency", {}).get("looks"),
        inconsistencies=stats.get("consistency", {}).get("inconsistencies"),
        staleness_seconds=_worst(stats),
    )


def _follower(region: str, tier: str, server: CacheServer, answer: Answer) -> FollowerRow:
    stats = answer.stats
    return FollowerRow(
        name=server.name,
        region=region,
        tier=tier,
        state=_state(server, answer),
        hit_rate=stats.get("hit_rate"),
        unsubscribed_shards=stats.get("unsubscribed_shards"),
        staleness_seconds=_worst(stats),
    )


def _tailer(region: str, tailer: TailerProcess, answer: Answer) -> TailerRow:
    return TailerRow(
        name=tailer.name,
        region=region,
        database=tailer.database,
        state=answer.state,
        lag_seconds=answer.stats.get("lag_seconds"),
        position=answer.stats.get("position", ""),
    )


def _state(server: CacheServer, answer: Answer) -> str:
    return f"{answer.state}, {MARKED_DOWN}" if server.down else answer.state


def _worst(stats: Mapping[str, Any]) -> float | None:
    ages: list[float | None] = list(stats.get("staleness_seconds", {}).values())
    known = [age for age in ages if age is not None]
    return max(known) if known and len(known) == len(ages) else None


def _database(
    database: Database, topology: Topology, answers: Mapping[str, Answer], max_staleness_seconds: float
) -> DatabaseRow:
    servers: dict[str, str] = {}
    for region in topology.regions:
        server = database.servers.get(region.name)
        if server is None:
            continue
        if server.down:
            servers[server.name] = MARKED_DOWN
        elif region.name == database.master_region:
            servers[server.name] = _master_trouble(database, region, answers, max_staleness_seconds) or "up"
        else:
            tails = [answers[tailer.name] for tailer in region.tailers if tailer.database == database.name]
            known = [answer.stats for answer in tails if answer.stats]
            connected = any(stats.get("connected") for stats in known)
            servers[server.name] = "up" if connected else "its binlog cannot be read" if known else "not known"
    return DatabaseRow(
        name=database.name,
        master_region=database.master_region,
        servers=servers,
        semi_sync=database.semi_sync,
        waits_for_replica=_waits(database, topology, answers),
    )


def _waits(database: Database, topology: Topology, answers: Mapping[str, Answer]) -> bool | None:
    """Whether commits wait for a replica, by the freshest word of the leaders in the master's region."""
    region = next(region for region in topology.regions if region.name == database.master_region)
    beats = [answers[server.name].stats.get("heartbeats", {}).get(database.name) for server in region.leaders.servers]
    known = [beat for beat in beats if beat and beat["age_seconds"] is not None and "waits_for_replica" in beat]
    return min(known, key=lambda beat: beat["age_seconds"])["waits_for_replica"] if known else None


def _master_trouble(
    database: Database, region: Region, answers: Mapping[str, Answer], max_staleness_seconds: float
) -> str:
    """Why the master takes no writes, as its region's leaders say, or empty."""
    troubles: list[str] = []
    for server in region.leaders.servers:
        beat = answers[server.name].stats.get("heartbeats", {}).get(database.name)
        if beat is None:
            continue  # it owns nothing there
        age, trouble = beat["age_seconds"], beat["trouble"]
        if not trouble and age is not None and age <= max_staleness_seconds:
            return ""
        troubles.append(trouble or "no heartbeat has been written for a while")
    if troubles:
        return troubles[0]
    anybody = any(answers[server.name].stats for server in region.leaders.servers)
    return "no leader has written a heartbeat" if anybody else "no leader of its region answers"


def _problems(topology: Topology, answers: Mapping[str, Answer], max_staleness_seconds: float) -> Iterator[str]:
    """The worst first: what stops writes, what stops a server, what makes a region old."""
    regions = {region.name: region for region in topology.regions}
    for database in topology.databases:
        region = regions[database.master_region]
        trouble = _master_trouble(database, region, answers, max_staleness_seconds)
        if trouble:
            yield f"{region.name}: the master of {database.name} takes no writes: {trouble}"
        elif database.semi_sync and _waits(database, topology, answers) is False:
            master = database.servers[database.master_region].name
            yield (
                f"{region.name}: commits of {database.name} wait for no replica, though the topology says semi_sync: "
                f"what is acknowledged now would be lost with {master}. End what was begun (tao undrain, tao reseed, "
                "tao rejoin); a watcher has them wait as soon as a replica that is not marked down acknowledges"
            )
    for region in topology.regions:
        for role, server in _cache_servers(region):
            yield from _of_cache_server(region.name, role, server, answers[server.name], topology.version)
    for region in topology.regions:
        for tailer in region.tailers:
            yield from _of_tailer(region.name, tailer, answers[tailer.name])
        for database in topology.databases:
            yield from _of_age(region, database, topology, answers, max_staleness_seconds)
    for database in topology.databases:
        for server_region, database_server in database.servers.items():
            if database_server.down:
                yield f"{server_region}: the database server {database_server.name} is marked down in the topology"


def _cache_servers(region: Region) -> Iterator[tuple[str, CacheServer]]:
    for server in region.leaders.servers:
        yield "leader", server
    for tier in region.followers:
        for server in tier.servers:
            yield "follower", server


def _of_cache_server(region: str, role: str, server: CacheServer, answer: Answer, version: int) -> Iterator[str]:
    who = f"{region}: {role} {server.name}"
    marked = ", and is marked down in the topology" if server.down else ""
    if answer.state == UNREACHABLE:
        yield f"{who} does not answer{marked}: {answer.reason}"
        return
    if answer.reason:
        yield f"{who} is not ready{marked}: {answer.reason}"
    elif marked:
        yield f"{who} is ready, but marked down in the topology"
    theirs = answer.stats.get("topology_version", version)
    if theirs != version:
        yield f"{who} goes by topology {theirs}, not {version}"
    found = answer.stats.get("consistency", {})
    since = found.get("seconds_since_inconsistency")
    if since is not None and since <= RECENT_SECONDS:
        number = found["inconsistencies"]
        yield f"{who} found {number} inconsistencies in followers' caches: see its log, and tao verify"


def _of_tailer(region: str, tailer: TailerProcess, answer: Answer) -> Iterator[str]:
    who = f"{region}: tailer {tailer.name} of {tailer.database}"
    if answer.state == UNREACHABLE:
        yield f"{who} does not answer: {answer.reason}"
    elif answer.reason:
        yield f"{who} does not follow the binlog: {answer.reason}"


def _of_age(
    region: Region,
    database: Database,
    topology: Topology,
    answers: Mapping[str, Answer],
    max_staleness_seconds: float,
) -> Iterator[str]:
    """Whether what the region serves of a database is behind."""
    has_tailer = any(tailer.database == database.name for tailer in region.tailers)
    if not has_tailer:
        if len(topology.regions) > 1:
            yield f"{region.name}: the topology names no tailer that reads {database.name}: nothing tells how old it is"
        return  # one region without tailers measures nothing, and its leaders tell of every write but foreign ones
    behind: dict[str, float | None] = {}
    for _, server in _cache_servers(region):
        ages = answers[server.name].stats.get("staleness_seconds", {})
        if database.name in ages:
            behind[server.name] = ages[database.name]
    late = {name: age for name, age in behind.items() if age is None or age > max_staleness_seconds}
    if not late:
        return
    known = [age for age in late.values() if age is not None]
    how = f"up to {max(known):.1f} s behind its master" if known else "behind its master, nobody knows how far"
    yield f"{region.name}: what is served of {database.name} may be {how} ({', '.join(late)})"
