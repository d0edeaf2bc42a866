"""Moves of shards between databases in the simulation: an operator runs `tao database move`, and the mover has trouble.

The mover is the product's own, above the statements of `tests.sim.shard_copies`: it copies the shard, follows its
changes in the binlog while clients write, compares, fences, renames and switches. Each run is a process of its own. It
dies at a step or at any moment, hangs, or has its change of the topology made late or answered late. The operator runs
the command again until the shard has moved, or undoes the move. Meanwhile a watcher lets leaders write again.

Two rules are checked. When the topology gives a shard to another database, that has all that was committed
(`World.change_topology`). And a copy is found wrong only where a row was lost on the way into it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, cast

from tao.admin.shard_contents import ShardContents
from tao.admin.shard_mover import MoverAccounts, ShardMover
from tao.model.errors import TaoError
from tao.observability.logs import Logger
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.replication.shard_move_plan import CopySpoiled, MoveRefused, MoveStep, holder_of, master_of
from tests.sim.checks import Violation
from tests.sim.clients import Client
from tests.sim.commands import CommandRun, Late
from tests.sim.loop import Process
from tests.sim.plans import KEYS, Fault
from tests.sim.topologies import REGIONS
from tests.sim.watchers import ACCOUNT
from tests.sim.world import ProcessLog, World

SETTINGS: Final = MoveSettings(
    switch_seconds=3.0,
    takeover_seconds=1.0,
    drop_seconds=5.0,
    stall_seconds=5.0,
    compare_seconds=5.0,
    rows_per_range=16,
    least_rows_per_range=4,
    steady_seconds=1.0,
    catch_up_seconds=20.0,
)
"""Those of the product where writers wait, and shorter ones where a real shard takes long. A range has few rows, and
the copy takes seconds."""
_PACED: Final = replace(SETTINGS, megabytes_per_second=1.0)
"""Those of every second run, which also rests while it compares."""
STEPS: Final = tuple(
    step
    for step in MoveStep
    if step not in (MoveStep.UNFENCE, MoveStep.RENAME_BACK, MoveStep.DROP_COPY, MoveStep.NOTHING)
)
_ABOUT_SECONDS: Final = 10.0
"""About how long a run takes."""
_AGAIN_SECONDS: Final = 4.0
"""From the end of a run until the operator runs the next command."""
_MOST_RUNS: Final = 3
"""Runs after which an operator undoes the move."""
_WRITE_SECONDS: Final = 0.06
"""From the writes of one client to those of the next, when a copy or a fence begins."""
_LATE_SECONDS: Final = (1.0, 2.9, 3.1, 4.0)
"""Delays of a change of the topology: some are longer than the time that a switch may take, or its undoing."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    """The trouble of one run. ``dies_at``, ``hangs_at``: the step that it does not begin, or begins after
    ``seconds``. ``dies_after``: seconds until it dies wherever it is. ``late``: seconds until its change of the
    topology is made, and until it is answered. ``loses_row``: a row gets lost on the way into the copy."""

    dies_at: MoveStep | None = None
    hangs_at: MoveStep | None = None
    seconds: float = 0.0
    dies_after: float = 0.0
    late: Late = (0.0, 0.0)
    loses_row: bool = False


Masters = list[tuple[str, int]]
"""The master of each database, and its version epoch."""
Attempt = Callable[[int, str, _Trouble], Awaitable[bool]]
"""A run of a command about a shard and a target, which returns whether nothing is left to do."""


class _Run(CommandRun):
    """A run of `tao database move`, which may be interrupted at a step."""

    def __init__(self, world: World, number: int, shard: int, trouble: _Trouble) -> None:
        process = Process(f"mover-{number}", REGIONS[number // 2 % world.shape.regions])
        super().__init__(world, process, (SETTINGS, _PACED)[number % 2], trouble.late)
        self._shard: Final = shard
        self._trouble: Final = trouble
        self._has_hung = False

    async def on_step(self, step: MoveStep) -> None:
        """See `ShardMover`."""
        world, trouble = self.world, self._trouble
        world.trace.note("step", self.process.name, step.name)
        if step in (MoveStep.COPY, MoveStep.FENCE):
            for index, client in enumerate(world.clients):
                world.loop.call_later(index * _WRITE_SECONDS, self._write, client, context=Context())
        if step is trouble.dies_at:
            self.kill()
            await asyncio.Event().wait()
        if step is trouble.hangs_at and not self._has_hung:
            self._has_hung = True
            world.loop.pause(self.process)
            world.loop.call_later(trouble.seconds, world.loop.resume, self.process, context=Context())
            await asyncio.sleep(0.0)

    def _write(self, client: Client) -> None:
        """Have a client write objects of the shard."""
        keys = range(self._shard, KEYS, self.world.shape.shards)
        if client.graph is not None:
            self.world.spawn(client.write_all_at_once(keys), client.process)


class Moves:
    """An operator's moves of shards between the databases of one world."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._numbers: Final = count(1)
        self._wrong: Final[set[int]] = set()
        """Shards of whose copy a row may be lost."""
        self.moved: Final[set[int]] = set()
        """Shards that were moved, or were to be moved, one by one so far."""

    def move(self, fault: Fault) -> None:
        """Move a shard to the other database. The mover may hang, the topology be slow, and a row get lost."""
        seconds = _LATE_SECONDS[fault.other // 8 % len(_LATE_SECONDS)]
        trouble = _Trouble(
            hangs_at=STEPS[fault.pick % len(STEPS)] if fault.other % 4 == 3 else None,
            seconds=3.0 * seconds,
            late=((seconds, 0.0), (0.0, seconds))[fault.other // 4 % 2] if fault.other % 4 == 2 else (0.0, 0.0),
            loses_row=fault.pick // self._world.shape.shards % 4 == 0,
        )
        self._begin(fault, trouble, self._move)

    def die(self, fault: Fault) -> None:
        """Begin a move whose first run dies. The operator repeats or undoes it."""
        if fault.other % 2:
            trouble = _Trouble(dies_at=STEPS[fault.other // 2 % len(STEPS)])
        else:
            trouble = _Trouble(dies_after=0.1 + fault.other / 1000 * _ABOUT_SECONDS)
        self._begin(fault, trouble, self._undo if fault.pick // self._world.shape.shards % 3 == 0 else self._move)

    def _begin(self, fault: Fault, trouble: _Trouble, then: Attempt) -> None:
        world = self._world
        shard = fault.pick % world.topology.shards
        source = holder_of(world.topology, shard).name
        target = next(each.name for each in world.topology.databases if each.name != source)
        world.spawn(self._operate(shard, target, trouble, then), world.operator)

    async def _operate(self, shard: int, target: str, trouble: _Trouble, then: Attempt) -> None:
        """Move a shard, with trouble at first, and repeat or undo that until nothing is left to do."""
        self.moved.add(shard)
        if trouble.loses_row:
            self._wrong.add(shard)
            self._world.rows_to_lose.add(shard)
        is_done, attempts = await self._move(shard, target, trouble), 0
        while not is_done:
            await asyncio.sleep(_AGAIN_SECONDS)
            attempts += 1
            is_done = await (then if attempts < _MOST_RUNS else self._undo)(shard, target, _Trouble())
        self._world.rows_to_lose.discard(shard)
        self._wrong.discard(shard)
        self._world.checks.calmer()

    async def _move(self, shard: int, target: str, trouble: _Trouble) -> bool:
        """Run `tao database move`, and `tao database drop-moved` where the shard has been before. Return whether
        nothing is left to do."""
        world = self._world
        before, run = masters_of(world), self._new_run(shard, trouble)

        async def move(moves: ShardMoves) -> str:
            log = cast(Logger, ProcessLog("mover", world.trace.note, lambda _: None))
            contents = ShardContents(moves, run.settings, ACCOUNT, log)
            await contents.drop(each for each in (await contents.find_moved([shard], 0))[0] if each.database == target)
            mover = ShardMover(moves, run.settings, MoverAccounts(ACCOUNT, ACCOUNT), log, on_step=run.on_step)
            return str(await mover.move(shard, target))

        await run.do(move, dies_after=trouble.dies_after)
        if isinstance(run.error, CopySpoiled) and shard not in self._wrong and masters_of(world) == before:
            world.found(Violation("copy", f"the copy of shard {shard} is wrong: {run.error.message}"))
        if isinstance(run.error, MoveRefused):
            return holder_of(world.topology, shard).name == target
        return run.is_done

    async def _undo(self, shard: int, target: str, trouble: _Trouble) -> bool:
        """Run `tao database move --undo`. Return whether nothing is left to do."""

        run = self._new_run(shard, trouble)

        async def undo(moves: ShardMoves) -> str:
            return "; ".join(await moves.undo(shard, target))

        await run.do(undo)
        if isinstance(run.error, MoveRefused):
            return await self._move(shard, target, trouble)  # it was switched
        return run.is_done

    def is_wrong(self, error: TaoError, before: Masters) -> bool:
        """Return whether an error says that a copy is wrong although no row was lost, and no master replaced since."""
        return isinstance(error, CopySpoiled) and not self._wrong and masters_of(self._world) == before

    def _new_run(self, shard: int, trouble: _Trouble) -> _Run:
        self._world.trace.note("move", shard, str(trouble))
        return _Run(self._world, next(self._numbers), shard, trouble)


def masters_of(world: World) -> Masters:
    """Return the master of each database, and its version epoch."""
    return [(master_of(each), each.version_epoch) for each in world.topology.databases]
