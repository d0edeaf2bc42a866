"""Plans of several moves: half of a database's shards to another one, or as many as make all databases equal.

A plan is shown before anything moves (`tao.admin.move_sequence`). After an interruption the same plan is made anew: the
topology and the databases say which shards have moved already. What an interrupted run has begun comes first, because
nothing else would finish it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from tao.model.errors import TopologyError
from tao.model.topology import Topology
from tao.replication.replication_set import find_database
from tao.topology.edits import shards_of

_ENOUGH: Final = 0.05
"""Databases whose loads differ by less than this part of the mean are equal enough."""
MAX_MOVES: Final = 4_096
"""Most moves of one plan. Repeat the command for more."""


class PlannedMove(NamedTuple):
    """One move of a sequence. ``load``: what moves with the shard, in bytes or row changes a second."""

    shard: int
    source: str
    target: str
    load: float = 0.0


class MovePlan(NamedTuple):
    """The moves of a plan, and why there are none: empty when there are some."""

    moves: list[PlannedMove]
    why_none: str = ""


def plan_split(
    topology: Topology,
    source: str,
    target: str,
    loads: Mapping[int, float],
    begun: Sequence[PlannedMove] = (),
    left_behind: Collection[tuple[int, str]] = (),
) -> list[PlannedMove]:
    """Plan to move half of a database's shards to another: every second one by load, so that both get alike halves.

    ``loads``: of each shard of the source. ``begun``: the moves that were begun and not finished, of which those
    between the two come first; a shard on its way to a third database stays out of the plan. ``left_behind``: the
    shards that have left databases which still keep what they were, each with such a database. Those that went from the
    source to the target count as a part of the half, so that a split that was interrupted is finished, and does not
    halve again what is left; and no shard moves to a database that keeps what it was. Raises `TopologyError` for an
    unknown database or one and the same."""
    present = shards_of(find_database(topology, source))
    arrived = shards_of(find_database(topology, target))
    if source == target:
        raise TopologyError(f"{source} cannot be split into itself: name another database")
    first = [move for move in begun if (move.source, move.target) == (source, target)]
    gone = {shard for shard, database in left_behind if database == source} & arrived
    taken = {move.shard for move in first}
    free = {shard for shard in present - {move.shard for move in begun} if (shard, target) not in left_behind}
    left = sorted(free, key=lambda shard: (-loads.get(shard, 0.0), shard))
    wanted = min(len(left), (len(present) + len(gone)) // 2 - len(gone) - len(taken & present))
    chosen = sorted(left[(2 * at + 1) * len(left) // (2 * wanted)] for at in range(wanted))
    moves = [*first, *(PlannedMove(shard, source, target) for shard in chosen)]
    return [move._replace(load=loads.get(move.shard, 0.0)) for move in moves][:MAX_MOVES]


def why_no_split(
    topology: Topology,
    source: str,
    target: str,
    begun: Sequence[PlannedMove] = (),
    left_behind: Collection[tuple[int, str]] = (),
) -> str:
    """Return why `plan_split` plans no move with these arguments, and what to do."""
    present, arrived = shards_of(find_database(topology, source)), shards_of(find_database(topology, target))
    gone = {shard for shard, database in left_behind if database == source} & arrived
    had = len(present) + len(gone)
    if had < 2:
        return f"{source} has {'one shard' if present else 'no shard'}, of which there is no half"
    if len(gone) >= had // 2:
        return (
            f"{len(gone)} of the {had} shards that {source} had are at {target} already; to split what is left, first "
            "drop what they have left behind (`tao database drop-moved`)"
        )
    on_their_way = present & {move.shard for move in begun}
    kept = {shard for shard in present - on_their_way if (shard, target) in left_behind}
    reasons = []
    if kept:
        reasons.append(f"{target} keeps former copies of {len(kept)} of them: `tao database drop-moved` drops these")
    if on_their_way:
        reasons.append(
            f"moves of {len(on_their_way)} of them were begun and are not finished: finish these (`tao database move "
            "SHARD --to DATABASE`), or undo them (--undo)"
        )
    return f"none of the shards of {source} can move: {'; '.join(reasons)}"


def plan_balance(
    loads: Mapping[str, Mapping[int, float]],
    left_behind: Collection[tuple[int, str]] = (),
    begun: Sequence[PlannedMove] = (),
) -> list[PlannedMove]:
    """Plan the moves that make the loads of all databases about equal. ``loads``: by database, those of its shards.
    ``left_behind``: the shards that cannot move to a database, each with it, because what they were stands there.
    ``begun``: the moves that were begun and not finished, which come first.

    Each move takes a shard from the database with the most to the one with the least, namely the shard that brings the
    two closest together. No shard moves twice: of several moves that were begun with one shard, the plan has the one
    that the topology knows of already, or else the first; another run finds what is left of the others."""
    left = {name: dict(shards) for name, shards in loads.items()}
    totals = {name: sum(shards.values()) for name, shards in left.items()}
    enough = _ENOUGH * sum(totals.values()) / max(1, len(totals))
    moves: list[PlannedMove] = []

    def take(shard: int, source: str, target: str) -> None:
        load = left[source].get(shard, 0.0)
        for shards in left.values():
            shards.pop(shard, None)  # it may have arrived already, and is not moved on
        totals[source] -= load
        totals[target] += load
        moves.append(PlannedMove(shard, source, target, load))

    unfinished: dict[int, PlannedMove] = {}
    for move in begun:
        if move.shard not in unfinished or move.shard in loads[move.target]:
            unfinished[move.shard] = move
    for move in unfinished.values():
        take(move.shard, move.source, move.target)
    while len(moves) < MAX_MOVES:
        most = max(sorted(totals), key=totals.__getitem__, default="")
        least = min(sorted(totals), key=totals.__getitem__, default="")
        gap = totals[most] - totals[least] if most else 0.0
        fitting = [
            (abs(gap / 2 - load), shard)
            for shard, load in left.get(most, {}).items()
            if 0 < load < gap and (shard, least) not in left_behind
        ]
        if gap <= enough or not fitting:
            break
        take(min(fitting)[1], most, least)
    return moves


def why_no_balance(loads: Mapping[str, Mapping[int, float]], left_behind: Collection[tuple[int, str]] = ()) -> str:
    """Return why `plan_balance` plans no move with these arguments, and what to do."""
    totals = {name: sum(shards.values()) for name, shards in loads.items()}
    if len(totals) < 2:
        return "there is only one database"
    mean = sum(totals.values()) / len(totals)
    if not mean:
        return "the shards have no load that could be made equal; row changes are counted for --sample-seconds"
    most, least = (choose(sorted(totals), key=totals.__getitem__) for choose in (max, min))
    gap = totals[most] - totals[least]
    if gap <= _ENOUGH * mean:
        return f"the databases are equal to within {gap / mean:.1%} of their mean, and {_ENOUGH:.0%} is enough"
    fitting = [shard for shard, load in loads[most].items() if 0 < load < gap]
    if fitting:
        return (
            f"{most} has more than {least}, which keeps former copies of the shards that could move there: `tao "
            "database drop-moved` drops these"
        )
    return f"{most} has more than {least}, but no shard so small that the two were closer once it had moved"
