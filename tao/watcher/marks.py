"""Which ``down`` marks the topology should carry, given how the servers do: a pure decision (DESIGN.md §9).

A mark is advice to everybody, so it is made with care. Nobody is marked on the word of a watcher that may itself be cut
off: of a region with a watcher of its own, that one has to agree, and where it is silent nothing changes. And the last
server of a tier that is not marked stays so: there would be nobody left to try, and callers find out for themselves.
Only marks that a watcher has set are taken away. And while the master of a database is being changed none of its
servers changes its mark: the next master follows nobody for a while, and is the only one who can be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tao.model.topology import Database, Tier, Topology
from tao.topology import edits


class Verdict(StrEnum):
    """How a server does, in a watcher's eyes."""

    UP = "up"
    DOWN = "down"
    UNSURE = "unsure"
    """Too early to say, or between the bounds: a mark stays as it is."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark to be set or taken away."""

    server: str
    down: bool


@dataclass(frozen=True, slots=True)
class View:
    """What one watcher sees. ``verdicts``: server → how it does."""

    region: str
    verdicts: Mapping[str, Verdict]


def wanted_marks(
    topology: Topology,
    own: View,
    peers: Mapping[str, View | None],
    in_change: Callable[[Iterable[str]], Collection[str]],
) -> list[Mark]:
    """The marks to change. ``peers``: region → the view of its own watcher, None when that does not answer; regions
    that have none are not named. ``in_change``: of these databases, those whose master is being changed."""
    marks: list[Mark] = []
    for region in topology.regions:
        for tier in (region.leaders, *region.followers):
            marks += _tier_marks(tier, region.name, own, peers)
    of_databases = {database.name: _database_marks(database, own, peers) for database in topology.databases}
    busy = in_change([name for name, wanted in of_databases.items() if wanted])
    for name, wanted in of_databases.items():
        if name not in busy:
            marks += wanted
    # A mark set by hand has a reason that no probe can see, such as a restart that is about to come.
    return [mark for mark in marks if mark.down or mark.server in topology.marked_by_watcher]


def with_marks(topology: Topology, marks: Sequence[Mark]) -> Topology:
    """The document with these marks, its version one higher. Raises `TopologyError` for a server that is gone."""
    version = topology.version + 1
    for mark in marks:
        topology = edits.mark_by_watcher(topology, mark.server, mark.down)
    return edits.as_version(topology, version)


def lag_verdict(lag_seconds: float | None, is_marked: bool, *, down_seconds: float, up_seconds: float) -> Verdict:
    """Of a replica that receives: down when it is too far behind, up again only when it is near."""
    if lag_seconds is None or lag_seconds >= down_seconds:
        return Verdict.DOWN
    if lag_seconds <= up_seconds or not is_marked:
        return Verdict.UP
    return Verdict.UNSURE


def steady_verdict(verdict: Verdict, is_marked: bool, good_looks: int, *, looks_until_up: int) -> Verdict:
    """Of a database server: one that is marked is up after several good looks in a row. While it is being seeded it
    follows and is behind by nothing for moments, before it has heard what there is to apply."""
    return Verdict.UNSURE if verdict is Verdict.UP and is_marked and good_looks < looks_until_up else verdict


def _tier_marks(tier: Tier, region: str, own: View, peers: Mapping[str, View | None]) -> list[Mark]:
    marks: list[Mark] = []
    up = sum(not server.down for server in tier.servers)
    for server in tier.servers:
        verdict = _agreed(server.name, region, own, peers)
        if verdict is Verdict.UP and server.down:
            marks.append(Mark(server.name, down=False))
        elif verdict is Verdict.DOWN and not server.down and up > 1:
            up -= 1
            marks.append(Mark(server.name, down=True))
    return marks


def _database_marks(database: Database, own: View, peers: Mapping[str, View | None]) -> list[Mark]:
    marks: list[Mark] = []
    for region, server in database.servers.items():
        verdict = _agreed(server.name, region, own, peers)
        if verdict is Verdict.UP and server.down:
            marks.append(Mark(server.name, down=False))
        # A master that is gone is replaced, not marked: there is nobody to ask instead.
        elif verdict is Verdict.DOWN and not server.down and region != database.master_region:
            marks.append(Mark(server.name, down=True))
    return marks


def _agreed(server: str, region: str, own: View, peers: Mapping[str, View | None]) -> Verdict:
    """The verdict of the watcher of the server's own region, where there is one."""
    seen_here = own.verdicts.get(server, Verdict.UNSURE)
    if region == own.region or region not in peers:
        return seen_here
    view = peers[region]
    if view is None:
        return Verdict.UNSURE
    return view.verdicts.get(server, Verdict.UNSURE)
