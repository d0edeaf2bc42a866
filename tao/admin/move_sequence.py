"""Makes moves of shards that were planned, one after the other, and repeats each that fails for a reason that may pass.

A server may be paused, be restarted, or get another master while a shard is copied for minutes. A failed run has undone
what could not stay (`tao.admin.shard_mover`), so the next one goes on with the copy. A command that moves one shard and
one that moves many are patient in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from tao.admin.shard_balance import MovePlan, PlannedMove, plan_balance, plan_split, why_no_balance, why_no_split
from tao.admin.shard_contents import ShardContents
from tao.admin.shard_mover import MoveResult, ShardMover
from tao.model.errors import RetryableError
from tao.replication.shard_move_plan import AlreadyMoved, CopyBehind, MovedElsewhere

_PAUSES_SECONDS: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before each further attempt: a minute in all, in which a server restarts and a lost master is replaced. An
attempt that meets a paused server takes some seconds as well."""

OnFailure = Callable[[RetryableError, float], None]
"""Called with the error of an attempt, and the seconds until the next one."""


async def plan_split_of(contents: ShardContents, source: str, target: str) -> MovePlan:
    """Plan to move half of a database's shards to another one, or what an interrupted run has left of that. Raises as
    `plan_split`."""
    topology = await contents.load_topology()
    sizes = await contents.in_bytes(topology)
    begun, left_behind = await contents.find_begun(topology), await contents.find_left_behind()
    moves = plan_split(topology, source, target, sizes.get(source, {}), begun, left_behind)
    return MovePlan(moves, "" if moves else why_no_split(topology, source, target, begun, left_behind))


async def plan_balance_of(contents: ShardContents, sample_seconds: float = 0.0) -> MovePlan:
    """Plan to make all databases equal in bytes, or with ``sample_seconds`` in the row changes that are counted for so
    long."""
    topology = await contents.load_topology()
    loads = await (contents.in_row_changes(topology, sample_seconds) if sample_seconds else contents.in_bytes(topology))
    left_behind = await contents.find_left_behind()
    moves = plan_balance(loads, left_behind, await contents.find_begun(topology))
    return MovePlan(moves, "" if moves else why_no_balance(loads, left_behind))


async def run_moves(
    mover: ShardMover, moves: Sequence[PlannedMove], on_failure: OnFailure = lambda *_: None
) -> AsyncIterator[MoveResult]:
    """Make the moves one after the other, and yield the result of each.

    A shard that another process has moved since the plan was made stays where it is, and has no result here: nobody was
    shown that move. Raises as `move_patiently`; the moves before are done then."""
    for move in moves:
        try:
            result = await move_patiently(mover, move, on_failure)
        except (AlreadyMoved, MovedElsewhere):
            continue
        yield result


async def move_patiently(mover: ShardMover, move: PlannedMove, on_failure: OnFailure = lambda *_: None) -> MoveResult:
    """Move a shard, and repeat that while it fails for a reason that may pass. Raises the last error, and at once what
    no repetition mends, as `ShardMover.move`."""
    has_failed = False
    for pause_seconds in (*_PAUSES_SECONDS, None):
        try:
            return await mover.move(move.shard, move.target, move.source)
        except CopyBehind:
            raise  # as long as so much is written, the next run would end so too, after up to an hour
        except AlreadyMoved:
            if not has_failed:
                raise
            break  # an attempt before, which then lost a server, or the process that held the lock has moved it
        except RetryableError as error:
            if pause_seconds is None:
                raise
            has_failed = True
            on_failure(error, pause_seconds)
            await asyncio.sleep(pause_seconds)
    version = (await mover.load_topology()).version
    return MoveResult(shard=move.shard, source=move.source, target=move.target, topology_version=version)
