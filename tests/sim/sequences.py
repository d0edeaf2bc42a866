"""Sequences of moves in the simulation: an operator runs `tao database split` or `balance`, and some runs die.

The plans, and what makes their moves one after the other and repeats those that fail, are the product's own, above the
statements of `tests.sim.shard_copies`. The operator runs the command again until it has come to its end, while others
move single shards, and clients write.

Three rules are checked when a sequence has ended, as far as nobody else has moved these shards. It was never refused a
move that it has planned. A split has moved half of the shards, however often it was interrupted. And no copy is left at
a target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, cast

from tao.admin.move_sequence import plan_balance_of, plan_split_of, run_moves
from tao.admin.shard_balance import MovePlan, PlannedMove
from tao.admin.shard_contents import ShardContents
from tao.admin.shard_mover import MoverAccounts, ShardMover
from tao.model.errors import RetryableError
from tao.observability.logs import Logger
from tao.replication.replication_set import find_database
from tao.replication.shard_move import ShardMoves
from tao.replication.shard_move_plan import MoveRefused, MoveStep
from tao.topology.edits import shards_of
from tests.sim.checks import Violation
from tests.sim.commands import CommandRun
from tests.sim.loop import Process
from tests.sim.moves import SETTINGS, Moves, masters_of
from tests.sim.plans import Fault
from tests.sim.topologies import REGIONS
from tests.sim.watchers import ACCOUNT
from tests.sim.world import ProcessLog, World

_ABOUT_SECONDS: Final = 20.0
"""About how long a run takes."""
_MOST_SECONDS: Final = 60.0
"""The operator ends a run that takes longer."""
_AGAIN_SECONDS: Final = 2.0
_MOST_RUNS: Final = 6

Planner = Callable[[ShardContents], Awaitable[MovePlan]]
"""Plans the moves of a sequence."""


@dataclass(slots=True)
class _Progress:
    """One sequence. ``source``, ``target``: of a split. ``planned``: by its first run that has made a plan;
    ``source_shards``: those that the source had then."""

    source: str = ""
    target: str = ""
    planned: list[PlannedMove] = field(default_factory=list)
    source_shards: frozenset[int] = frozenset()


class Sequences:
    """An operator's sequences of moves in one world."""

    def __init__(self, world: World, moves: Moves) -> None:
        """``moves``: the single moves beside them."""
        self._world: Final = world
        self._moves: Final = moves
        self._numbers: Final = count(1)
        self._is_under_way = False

    def split(self, fault: Fault) -> None:
        """Move half of a database's shards to the other one. The first run dies in two of three cases."""
        names = [each.name for each in self._world.topology.databases]
        source, target = names[fault.pick % 2], names[1 - fault.pick % 2]
        self._begin(fault, lambda contents: plan_split_of(contents, source, target), _Progress(source, target))

    def balance(self, fault: Fault) -> None:
        """Make the databases equal in bytes. The first run dies in two of three cases."""
        self._begin(fault, plan_balance_of, _Progress())

    def _begin(self, fault: Fault, planner: Planner, progress: _Progress) -> None:
        if not self._is_under_way:
            self._is_under_way = True
            dies_after = 0.1 + fault.other / 1_000 * _ABOUT_SECONDS if fault.other % 3 else 0.0
            self._world.spawn(self._operate(planner, progress, dies_after), self._world.operator)

    async def _operate(self, planner: Planner, progress: _Progress, dies_after: float) -> None:
        """Run a sequence, and again until it has come to its end."""
        world = self._world
        for attempt in range(_MOST_RUNS):
            run = await self._run(planner, progress, dies_after if not attempt else 0.0)
            if run.is_done:
                self._check(progress)
                break
            await asyncio.sleep(_AGAIN_SECONDS)
        self._is_under_way = False
        world.checks.calmer()

    async def _run(self, planner: Planner, progress: _Progress, dies_after: float) -> CommandRun:
        world, number = self._world, next(self._numbers)
        process = Process(f"sequence-{number}", REGIONS[number % world.shape.regions])
        run = CommandRun(world, process, SETTINGS)
        before = masters_of(world)

        def on_failure(error: RetryableError, _: float) -> None:
            world.trace.note("attempt", process.name, error.reason, error.message)
            if self._moves.is_wrong(error, before):
                world.found(Violation("copy", f"a copy is wrong: {error.message}"))

        async def on_step(step: MoveStep) -> None:
            world.trace.note("step", process.name, step.name)

        async def work(moves: ShardMoves) -> str:
            log = cast(Logger, ProcessLog("mover", world.trace.note, lambda _: None))
            planned = (await planner(ShardContents(moves, SETTINGS, ACCOUNT, log))).moves
            world.trace.note("planned", process.name, str([(move.shard, move.target) for move in planned]))
            if progress.source and not progress.source_shards:
                progress.planned = planned
                progress.source_shards = frozenset(shards_of(find_database(world.topology, progress.source)))
            mover = ShardMover(moves, SETTINGS, MoverAccounts(ACCOUNT, ACCOUNT), log, on_step=on_step)
            return f"{len([each async for each in run_moves(mover, planned, on_failure)])} of {len(planned)} moved"

        await run.do(work, dies_after=dies_after, most_seconds=_MOST_SECONDS)
        if isinstance(run.error, MoveRefused) and not self._moves.moved:
            world.found(Violation("sequence", f"a move that was planned is refused: {run.error}"))
        return run

    def _check(self, progress: _Progress) -> None:
        """Check a sequence that has come to its end."""
        world, others = self._world, self._moves.moved
        for database in world.topology.databases:
            server = world.databases[database.servers[database.master_region].name]
            left = set(server.truth.incoming) - others
            if left:
                world.found(Violation("sequence", f"{database.name} still has copies of shards {sorted(left)}"))
        if progress.source and not others:
            arrived = progress.source_shards & shards_of(find_database(world.topology, progress.target))
            wanted = {move.shard for move in progress.planned} & progress.source_shards
            if len(arrived) != len(wanted):
                world.found(Violation("sequence", f"{len(arrived)} shards were moved in place of {len(wanted)}"))
