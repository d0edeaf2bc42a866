"""Sequences of moves: half of a database's shards to another one, or as many as make all databases equal.

Both are planned first, and shown before anything moves. A sequence that is interrupted is planned anew: the topology
says which shards have moved already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from tao.admin.shard_mover import MoveResult, ShardMover
from tao.model.errors import RetryableError, TopologyError
from tao.model.topology import Topology
from tao.replication.locks import LockTaken
from tao.replication.replication_set import find_database

_ATTEMPTS: Final = 5
_PAUSE_SECONDS: Final = 2.0
_ENOUGH: Final = 0.05
"""Databases whose loads differ by less than this part of the mean are equal enough."""
MAX_MOVES: Final = 4_096
"""Most moves of one plan. Repeat the command for more."""


class PlannedMove(NamedTuple):
    """One move of a sequence. ``load``: what moves with the shard, in bytes or row changes a second."""

    shard: int
    source: str
    target: str
    load: float


def plan_split(topology: Topology, source: str, target: str, loads: Mapping[int, float]) -> list[PlannedMove]:
    """Plan to move half of a database's shards to another: every second one by load, so that both get alike halves.

    ``loads``: of each shard of the source. Raises `TopologyError` for an unknown database or one and the same."""
    found = find_database(topology, source)
    find_database(topology, target)
    if source == target:
        raise TopologyError(f"{source} cannot be split into itself: name another database")
    shards = sorted(
        (shard for first, last in found.shards for shard in range(first, last + 1)),
        key=lambda shard: (-loads.get(shard, 0.0), shard),
    )
    return [PlannedMove(shard, source, target, loads.get(shard, 0.0)) for shard in sorted(shards[1::2])][:MAX_MOVES]


def plan_balance(
    loads: Mapping[str, Mapping[int, float]], left_behind: Collection[tuple[int, str]] = ()
) -> list[PlannedMove]:
    """Plan the moves that make the loads of all databases about equal. ``loads``: by database, those of its shards.
    ``left_behind``: the shards that cannot move to a database, each with it, because what they were stands there.

    Each move takes a shard from the database with the most to the one with the least, namely the shard that brings the
    two closest together. No shard moves twice."""
    left = {name: dict(shards) for name, shards in loads.items()}
    totals = {name: sum(shards.values()) for name, shards in left.items()}
    enough = _ENOUGH * sum(totals.values()) / max(1, len(totals))
    moves: list[PlannedMove] = []
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
            return moves
        shard = min(fitting)[1]
        load = left[most].pop(shard)
        totals[most] -= load
        totals[least] += load
        moves.append(PlannedMove(shard, most, least, load))
    return moves


async def run_moves(mover: ShardMover, moves: Sequence[PlannedMove]) -> AsyncIterator[MoveResult]:
    """Do the moves one after the other, and yield the result of each.

    A move that fails with an error that may pass is tried a few times. Raises the last error; the moves before it are
    done."""
    for move in moves:
        yield await _move_patiently(mover, move)


async def _move_patiently(mover: ShardMover, move: PlannedMove) -> MoveResult:
    left = _ATTEMPTS
    while True:
        left -= 1
        try:
            return await mover.move(move.shard, move.target)
        except RetryableError as error:
            if not left or isinstance(error, LockTaken):  # another process moves the shard
                raise
            await asyncio.sleep(_PAUSE_SECONDS)
