"""Makes one view of the whole cluster from what all servers report: the problems in words, then a row for each server.

A problem is something that an operator has to look into: a server that does not answer or is not ready, a binlog that
is not followed, a master that takes no writes, a region that is behind. `view_of` is pure; `cluster_view` asks the
servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tao.admin.journal import parked_in
from tao.admin.server_stats import admin_addresses, server_stats, unreadiness
from tao.model.errors import TaoError
from tao.model.topology import (
    CacheServer,
    Database,
    DatabaseServer,
    PlacedServer,
    Region,
    TailerProcess,
    Topology,
    WatcherProcess,
)
from tao.routing.routes import Routes
from tao.topology.registration import STEPS, eighths

UP: Final = "ready"
UNREACHABLE: Final = "does not answer"
MARKED_DOWN: Final = "marked down"
RECENT_SECONDS: Final = 3_600.0
"""An inconsistency in a cache stays a problem for so long after it was found."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one server's admin port.

    ``stats``: its figures, empty when it does not answer (`Any`: each role has its own figures). ``reason``: why it
    does not answer or is not ready; empty when it is ready."""

    stats: Mapping[str, Any]
    reason: str = ""

    @property
    def state(self) -> str:
        return UNREACHABLE if not self.stats else UP if not self.reason else "not ready"


class LeaderRow(msgspec.Struct, frozen=True, kw_only=True):
    """One leader.

    ``membership``: how far one that has registered itself has joined its tier or left it; see `membership_text`.
    ``staleness_seconds``: the age of the database that is furthest behind; None when it is unknown or not measured.
    ``consistency_looks``: entries of followers' caches that it has compared since its start; ``inconsistencies``: how
    many of these were wrong."""

    name: str
    region: str
    state: str
    membership: str = ""
    owned_shards: int | None = None
    hosted_shards: int | None = None
    subscribers: int | None = None
    consistency_looks: int | None = None
    inconsistencies: int | None = None
    staleness_seconds: float | None = None


class FollowerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One follower. ``membership``: as of a leader. ``hit_rate``: the share of reads answered from its memory, since
    its start."""

    name: str
    region: str
    tier: str
    state: str
    membership: str = ""
    hit_rate: float | None = None
    unsubscribed_shards: int | None = None
    staleness_seconds: float | None = None


class TailerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tailer. ``position``: the binlog position up to which changes are acknowledged."""

    name: str
    region: str
    database: str
    state: str
    lag_seconds: float | None = None
    position: str = ""


class DatabaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One database.

    ``servers``: each server's name and ``up``, ``not known``, ``marked down`` or its problem, as leaders (for the
    master) and tailers see it; of a standby ``standby, `` and its state, as watchers see it. ``semi_sync``: commits
    should wait for a replica, by the topology; ``waits_for_replica``: they do; None when that is unknown."""

    name: str
    master_region: str
    servers: dict[str, str]
    semi_sync: bool = False
    waits_for_replica: bool | None = None


class WatcherRow(msgspec.Struct, frozen=True, kw_only=True):
    """One watcher. ``acts``: it is the one that acts; None when it does not answer."""

    name: str
    region: str
    state: str
    acts: bool | None = None


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that has asked leaders for jobs, or reported, within the last minute: the topology lists none.
    ``asked_seconds_ago``: when it did either last, at any leader."""

    name: str
    asked_seconds_ago: float


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster."""

    topology_version: int
    problems: list[str]
    leaders: list[LeaderRow]
    followers: list[FollowerRow]
    tailers: list[TailerRow]
    watchers: list[WatcherRow]
    workers: list[WorkerRow]
    databases: list[DatabaseRow]


async def cluster_view(topology: Topology, max_staleness_seconds: float) -> View:
    """Ask every leader, follower, tailer and watcher on its admin port and return the view. It asks no database.

    A region that may be further behind its masters than ``max_staleness_seconds`` is a problem."""
    watchers = {watcher.name: watcher.admin for region in topology.regions for watcher in region.watchers}
    addresses = admin_addresses(topology) | watchers
    answers = await asyncio.gather(*map(_ask, addresses.values()))
    return view_of(topology, dict(zip(addresses, answers, strict=True)), max_staleness_seconds)


async def _ask(admin: str) -> Answer:
    if not admin:
        return Answer({}, "it has no admin address in the topology")
    try:
        stats = await server_stats(admin)
        return Answer(stats, await unreadiness(admin))
    except TaoError as error:
        return Answer({}, error.message)


def view_of(topology: Topology, answers: Mapping[str, Answer], max_staleness_seconds: float) -> View:
    """Return the view. ``answers``: by name, for every leader, follower, tailer and watcher of the topology."""
    servers = topology.cache_servers
    return View(
        topology_version=topology.version,
        problems=list(_problems(topology, answers, max_staleness_seconds)),
        leaders=[_leader(each, answers[each.server.name]) for each in servers if each.place.role == "leader"],
        followers=[_follower(each, answers[each.server.name]) for each in servers if each.place.role == "follower"],
        tailers=[
            _tailer(region.name, tailer, answers[tailer.name])
            for region in topology.regions
            for tailer in region.tailers
        ],
        watchers=[
            _watcher(region.name, watcher, answers[watcher.name])
            for region in topology.regions
            for watcher in region.watchers
        ],
        workers=_workers(answers.values()),
        databases=[_database(database, topology, answers, max_staleness_seconds) for database in topology.databases],
    )


def _leader(placed: PlacedServer, answer: Answer) -> LeaderRow:
    stats = answer.stats
    return LeaderRow(
        name=placed.server.name,
        region=placed.place.region.name,
        state=_state(placed.server, answer),
        membership=membership_text(placed.server),
        owned_shards=stats.get("owned_shards"),
        hosted_shards=stats.get("hosted_shards"),
        subscribers=stats.get("delivery", {}).get("subscribers"),
        consistency_looks=stats.get("consistency", {}).get("looks"),
        inconsistencies=stats.get("consistency", {}).get("inconsistencies"),
        staleness_seconds=_worst(stats),
    )


def _follower(placed: PlacedServer, answer: Answer) -> FollowerRow:
    return FollowerRow(
        name=placed.server.name,
        region=placed.place.region.name,
        tier=placed.place.tier.name,
        state=_state(placed.server, answer),
        membership=membership_text(placed.server),
        hit_rate=answer.stats.get("hit_rate"),
        unsubscribed_shards=answer.stats.get("unsubscribed_shards"),
        staleness_seconds=_worst(answer.stats),
    )


def _tailer(region: str, tailer: TailerProcess, answer: Answer) -> TailerRow:
    return TailerRow(
        name=tailer.name,
        region=region,
        database=tailer.database,
        state=_state(tailer, answer),
        lag_seconds=answer.stats.get("lag_seconds"),
        position=answer.stats.get("position", ""),
    )


def _watcher(region: str, watcher: WatcherProcess, answer: Answer) -> WatcherRow:
    return WatcherRow(name=watcher.name, region=region, state=answer.state, acts=answer.stats.get("active"))


def _workers(answers: Iterable[Answer]) -> list[WorkerRow]:
    ages: dict[str, float] = {}
    for answer in answers:
        for name, age in answer.stats.get("jobs", {}).get("workers", {}).items():
            ages[name] = min(age, ages.get(name, age))
    return [WorkerRow(name=name, asked_seconds_ago=age) for name, age in sorted(ages.items())]


def _state(server: CacheServer | TailerProcess, answer: Answer) -> str:
    return f"{answer.state}, {MARKED_DOWN}" if server.down else answer.state


def membership_text(server: CacheServer) -> str:
    """Return how far a server that has registered itself has come: ``joining 3/8`` of its share, ``leaving 3/8`` of it
    left, ``joined``, or since when it is gone; empty for a server that an operator has added."""
    registration = server.registration
    if not registration:
        return ""
    if registration.gone_unix_ms:
        return f"gone since {datetime.fromtimestamp(registration.gone_unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if registration.leaving:
        return f"leaving {eighths(server)}/{STEPS}"
    return "joined" if server.weight == registration.share else f"joining {eighths(server)}/{STEPS}"


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
    servers |= {
        standby.name: f"standby, {_standby_state(standby, region, topology, answers)}"
        for region, standby in database.standbys.items()
    }
    return DatabaseRow(
        name=database.name,
        master_region=database.master_region,
        servers=servers,
        semi_sync=database.semi_sync,
        waits_for_replica=_waits(database, topology, answers),
    )


def _standby_state(standby: DatabaseServer, region: str, topology: Topology, answers: Mapping[str, Answer]) -> str:
    """Return the state of a standby: only watchers ask it, and those of its own region know best."""
    if standby.down:
        return MARKED_DOWN
    regions = sorted(topology.regions, key=lambda each: each.name != region)
    watchers = [watcher.name for each in regions for watcher in each.watchers]
    verdicts = [answers[name].stats.get("verdicts", {}).get(standby.name) for name in watchers]
    return next((verdict for verdict in verdicts if verdict is not None), "not known")


def _waits(database: Database, topology: Topology, answers: Mapping[str, Answer]) -> bool | None:
    """True when commits wait for a replica, by the newest report of the leaders in the master's region."""
    region = next(region for region in topology.regions if region.name == database.master_region)
    beats = [answers[server.name].stats.get("heartbeats", {}).get(database.name) for server in region.leaders.servers]
    known = [beat for beat in beats if beat and beat["age_seconds"] is not None]
    known = [beat for beat in known if beat.get("waits_for_replica") is not None]  # the others wrote no row lately
    return min(known, key=lambda beat: beat["age_seconds"])["waits_for_replica"] if known else None


def _master_trouble(
    database: Database, region: Region, answers: Mapping[str, Answer], max_staleness_seconds: float
) -> str:
    """Return why the master takes no writes, as its region's leaders report, or an empty text."""
    troubles: list[str] = []
    full = _full_disk(database, region, answers)
    if full:
        return full
    for server in region.leaders.servers:
        beat = answers[server.name].stats.get("heartbeats", {}).get(database.name)
        if beat is None:
            continue  # it owns nothing there
        age, trouble = beat["age_seconds"], beat["trouble"]
        if not trouble and age is not None and age <= max_staleness_seconds:
            return ""
        troubles.append(trouble or "no heartbeat has been written recently")
    if troubles:
        return troubles[0]
    any_answers = any(answers[server.name].stats for server in region.leaders.servers)
    return "no leader has written a heartbeat" if any_answers else "no leader of its region answers"


def _full_disk(database: Database, region: Region, answers: Mapping[str, Answer]) -> str:
    """Return what the leaders of the master's region say of a full disk of the master, or an empty text."""
    master = database.servers[database.master_region].name
    for server in region.leaders.servers:
        found = answers[server.name].stats.get("databases", {}).get("write", {}).get(master, {}).get("full", "")
        if found:
            return str(found)
    return ""


def _problems(topology: Topology, answers: Mapping[str, Answer], max_staleness_seconds: float) -> Iterator[str]:
    """Yield the problems, the worst first: stopped writes, then stopped servers, then regions that are behind."""
    regions = {region.name: region for region in topology.regions}
    watchers = [watcher.name for region in topology.regions for watcher in region.watchers]
    lost = {name for watcher in watchers for name in answers[watcher].stats.get("lost_databases", ())}
    for database in topology.databases:
        region = regions[database.master_region]
        trouble = _master_trouble(database, region, answers, max_staleness_seconds)
        if _full_disk(database, region, answers):
            yield f"{region.name}: writes of {database.name} fail: {trouble}"
        elif trouble:
            alone = ". It has no second server that could be promoted" if database.name in lost else ""
            yield f"{region.name}: the master of {database.name} takes no writes: {trouble}{alone}"
        elif database.semi_sync and _waits(database, topology, answers) is False:
            master = database.servers[database.master_region].name
            yield (
                f"{region.name}: commits of {database.name} wait for no replica, though the topology says semi_sync: "
                f"writes acknowledged now would be lost with {master}. Finish what was begun (tao undrain, tao reseed, "
                "tao rejoin); a watcher has them wait as soon as a replica that is not marked down acknowledges"
            )
    yield from _watcher_problems(topology, answers)
    for placed in topology.cache_servers:
        answer = answers[placed.server.name]
        yield from _cache_server_problems(placed, answer, topology.version, _lost_with(placed, topology, answer))
    for region in topology.regions:
        for tailer in region.tailers:
            yield from _tailer_problems(region.name, tailer, answers[tailer.name])
        for database in topology.databases:
            yield from _staleness_problems(region, database, topology, answers, max_staleness_seconds)
    for each in topology.database_servers:
        if each.server.down:
            yield f"{each.region}: the database server {each.server.name} is marked down in the topology"


def _cache_server_problems(placed: PlacedServer, answer: Answer, version: int, stopped: str) -> Iterator[str]:
    """Yield the problems of a cache server. ``stopped``: what fails because it is down."""
    place, server = placed
    who = f"{place.region.name}: {place.role} {server.name}"
    marked = ", and is marked down in the topology" if server.down else ""
    if answer.state == UNREACHABLE:
        yield f"{who} does not answer{marked}: {answer.reason}{stopped}"
        return
    if answer.reason:
        yield f"{who} is not ready{marked}: {answer.reason}{stopped}"
    elif marked:
        yield f"{who} is ready, but marked down in the topology{stopped}"
    theirs = answer.stats.get("topology_version", version)
    if theirs != version:
        yield f"{who} uses topology {theirs}, not {version}"
    trouble = answer.stats.get("audit", {}).get("trouble", "")
    if trouble:
        yield f"{who} cannot write its audit log: {trouble}"
    parked = parked_in(answer.stats["journal"]) if answer.stats.get("journal") else 0
    if parked:
        yield (
            f"{who} has given up accepted writes, which are parked ({parked}): see tao journal parked; then "
            "tao journal inject or discard each"
        )
    found = answer.stats.get("consistency", {})
    since = found.get("seconds_since_inconsistency")
    if since is not None and since <= RECENT_SECONDS:
        number = found["inconsistencies"]
        yield f"{who} found {number} inconsistencies in followers' caches: see its log, and tao verify"


def _lost_with(placed: PlacedServer, topology: Topology, answer: Answer) -> str:
    """Return what fails because a server is down, and what to do; empty when others serve all its shards.

    Leaders take over each other's shards; followers do not. A follower that is silent but not marked down may still
    answer its clients."""
    place, server = placed
    silent = answer.state == UNREACHABLE
    if place.role == "leader" or not (server.down or (silent and server.admin)):
        return ""
    alone = len(Routes(topology).shards_without(server.name))
    if not alone:
        return ""
    what = "Reads and writes" if server.down else "If it is down, reads and writes"
    start = "Start it" if silent else f"Run tao undrain {server.name}"
    return (
        f". {what} of {alone} of its shards fail, because no other follower of the region serves them. {start}, or "
        "give the region another tier"
    )


def _tailer_problems(region: str, tailer: TailerProcess, answer: Answer) -> Iterator[str]:
    who = f"{region}: tailer {tailer.name} of {tailer.database}"
    marked = ", and is marked down in the topology" if tailer.down else ""
    if answer.state == UNREACHABLE:
        yield f"{who} does not answer{marked}: {answer.reason}"
    elif answer.reason:
        yield f"{who} does not follow the binlog{marked}: {answer.reason}"


def _watcher_problems(topology: Topology, answers: Mapping[str, Answer]) -> Iterator[str]:
    """Yield the problems of the watchers that the topology lists."""
    listed = [(region.name, watcher.name) for region in topology.regions for watcher in region.watchers]
    if listed and not any(answers[name].stats.get("active") for _, name in listed):
        running = [name for _, name in listed if not answers[name].reason]
        # Those that run still renew the leases of masters whose commits a replica acknowledges, while etcd is away.
        leased = [each.name for each in topology.databases if each.keeps_lease and not (running and each.semi_sync)]
        closes = f", and the masters of {', '.join(leased)} take no writes once their leases are over" if leased else ""
        start = f"Start a watcher: {listed[0][1]}"
        if running:
            start = f"{running[0]} runs, so it cannot take its lock: look whether etcd answers, and at its log"
        yield f"no watcher acts: nobody marks down or replaces what fails{closes}. {start}"
    for region, name in listed:
        answer = answers[name]
        if answer.reason:
            yield f"{region}: watcher {name} does not answer: {answer.reason}"
        for other, reason in sorted(answer.stats.get("refusals", {}).items()):
            yield f"{region}: watcher {name} cannot judge {other}: one of them refuses the other: {reason}"


def _staleness_problems(
    region: Region,
    database: Database,
    topology: Topology,
    answers: Mapping[str, Answer],
    max_staleness_seconds: float,
) -> Iterator[str]:
    """Yield the problem when the region's copy of a database is behind its master."""
    has_tailer = any(tailer.database == database.name for tailer in region.tailers)
    if not has_tailer:
        if len(topology.regions) > 1:
            yield f"{region.name}: the topology names no tailer that reads {database.name}: its staleness is unknown"
        return  # one region without tailers measures nothing; its leaders report every write but foreign ones
    behind: dict[str, float | None] = {}
    for server in (server for tier in region.tiers for server in tier.servers):
        ages = answers[server.name].stats.get("staleness_seconds", {})
        if database.name in ages:
            behind[server.name] = ages[database.name]
    late = {name: age for name, age in behind.items() if age is None or age > max_staleness_seconds}
    if not late:
        return
    known = [age for age in late.values() if age is not None]
    how = f"up to {max(known):.1f} s behind its master" if known else "behind its master, by an unknown time"
    yield f"{region.name}: the data served of {database.name} may be {how} ({', '.join(late)})"
