"""Pure decision: which ``down`` marks the topology should carry, given the state of the servers.

Every server acts on a mark, so marks are set with care. A watcher may itself be cut off, so the watcher of a server's
own region has to agree where there is one, and nothing changes while that one is silent. The last unmarked server of a
tier that has a weight stays unmarked: nothing would be left to try, and callers detect failures themselves. A tailer's
mark only informs operators. Only marks that a watcher set are taken away. While the master of a database is being
changed, none of its servers changes its mark: the next master follows no server for a while, and is the only one that
can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tao.model.topology import Database, Region, Tier, Topology, region_of_place
from tao.topology import edits


class ServerVerdict(StrEnum):
    """The state of a server, as a watcher judges it."""

    UP = "up"
    DOWN = "down"
    UNSURE = "unsure"
    """Too early to decide, or between the bounds. A mark stays as it is."""
    DEAD = "dead"
    """Nothing listens at the address of a master. Masters are not marked."""
    REFUSED = "refused"
    """It answers, and refuses this watcher, or this watcher refuses it, for what the other shows: a certificate, token
    or password is wrong, or a name is not in the topology. That says nothing of its health, so a mark stays as it is.
    """


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark to set or to take away."""

    server: str
    down: bool


@dataclass(frozen=True, slots=True)
class WatcherReport:
    """What one watcher sees. ``verdicts``: server → how it does."""

    region: str
    verdicts: Mapping[str, ServerVerdict]


def wanted_marks(topology: Topology, own: WatcherReport, peers: Mapping[str, WatcherReport | None]) -> list[Mark]:
    """Return the marks to change, while no master is being changed. ``peers``: region → the report of its watcher, or
    None while that does not answer; regions without a watcher are missing."""
    marks: list[Mark] = []
    for region in topology.regions:
        for tier in (region.leaders, *region.followers):
            marks += _tier_marks(tier, region.name, own, peers)
        marks += _tailer_marks(region, own, peers)
    for database in topology.databases:
        marks += _database_marks(database, own, peers)
    # An operator sets a mark for reasons that no probe can see, such as a restart that is about to come.
    return [mark for mark in marks if mark.down or mark.server in topology.marked_by_watcher]


def marks_by_database(topology: Topology, marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    """Return database → those of the marks that concern its servers, for databases with any: they wait while the
    database's master is being changed."""
    found: dict[str, list[Mark]] = {}
    names = {each.server.name: each.database.name for each in topology.database_servers}
    for mark in marks:
        if mark.server in names:
            found.setdefault(names[mark.server], []).append(mark)
    return found


def with_marks(topology: Topology, marks: Sequence[Mark]) -> Topology:
    """Return the document with these marks and the next version; the same document without any. Raises `TopologyError`
    for a server that is gone."""
    if not marks:
        return topology
    version = topology.version + 1
    for mark in marks:
        topology = edits.mark_by_watcher(topology, mark.server, mark.down)
    return edits.as_version(topology, version)


def lag_verdict(lag_seconds: float | None, is_marked: bool, *, down_seconds: float, up_seconds: float) -> ServerVerdict:
    """Judge a replica by its lag: down when it is too far behind, up again only when it is close."""
    if lag_seconds is None or lag_seconds >= down_seconds:
        return ServerVerdict.DOWN
    if lag_seconds <= up_seconds or not is_marked:
        return ServerVerdict.UP
    return ServerVerdict.UNSURE


def steady_verdict(verdict: ServerVerdict, is_marked: bool, good_probes: int, *, probes_until_up: int) -> ServerVerdict:
    """Require several good probes in a row before a marked database server is up. While a server is being seeded it
    follows and briefly reports no lag, before it has received what there is to apply."""
    return (
        ServerVerdict.UNSURE if verdict is ServerVerdict.UP and is_marked and good_probes < probes_until_up else verdict
    )


def _tier_marks(tier: Tier, region: str, own: WatcherReport, peers: Mapping[str, WatcherReport | None]) -> list[Mark]:
    marks: list[Mark] = []
    up = sum(server.takes_shards for server in tier.servers)
    for server in tier.servers:
        verdict = _agreed(server.name, region, own, peers)
        if verdict is ServerVerdict.UP and server.down:
            marks.append(Mark(server.name, down=False))
        elif verdict is ServerVerdict.DOWN and not server.down and up > server.takes_shards:
            up -= server.takes_shards
            marks.append(Mark(server.name, down=True))
    return marks


def _tailer_marks(region: Region, own: WatcherReport, peers: Mapping[str, WatcherReport | None]) -> list[Mark]:
    """Return the marks of a region's tailers. The last one is marked too: no server acts on the mark."""
    wanted = {ServerVerdict.UP: False, ServerVerdict.DOWN: True}
    verdicts = {tailer: _agreed(tailer.name, region.name, own, peers) for tailer in region.tailers}
    return [
        Mark(tailer.name, down=wanted[verdict])
        for tailer, verdict in verdicts.items()
        if verdict in wanted and tailer.down is not wanted[verdict]
    ]


def _database_marks(database: Database, own: WatcherReport, peers: Mapping[str, WatcherReport | None]) -> list[Mark]:
    marks: list[Mark] = []
    for place, server in database.places.items():
        verdict = _agreed(server.name, region_of_place(place), own, peers)
        if verdict is ServerVerdict.UP and server.down:
            marks.append(Mark(server.name, down=False))
        # A master that is gone is replaced and not marked: no other server could take its reads.
        elif verdict is ServerVerdict.DOWN and not server.down and place != database.master_region:
            marks.append(Mark(server.name, down=True))
    return marks


def _agreed(server: str, region: str, own: WatcherReport, peers: Mapping[str, WatcherReport | None]) -> ServerVerdict:
    """Return the verdict of the watcher of the server's own region, where there is one, else the own verdict."""
    seen_here = own.verdicts.get(server, ServerVerdict.UNSURE)
    if region == own.region or region not in peers:
        return seen_here
    report = peers[region]
    if report is None:
        return ServerVerdict.UNSURE
    return report.verdicts.get(server, ServerVerdict.UNSURE)
