"""Moves of shards between databases in the simulation, in the steps of `tao.replication.shard_move` and in their order.

The rows of the shard are the product's own (`tao.replication.shard_move_plan`), and so is the change of the topology.
The copy takes no time: it is what the source has at the position that is read behind the fence. An operator moves
shards. Some of the runs die between two steps, and leave a shard that nobody may write. A watcher lets leaders write
again, or, where none does, the operator's next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from tao.model.errors import TaoError, Unavailable
from tao.model.rows import RowChanges, ShardRow
from tao.model.topology import Database
from tao.replication.locks import FileLocks, LockHold, Locks, hold_exclusively, mastership_lock
from tao.replication.shard_move import ShardMoves, move_lock
from tao.replication.shard_move_plan import arrived_row, fenced_row, master_of, unfenced_row
from tao.topology import edits
from tests.sim.database import SimDatabase
from tests.sim.plans import Fault
from tests.sim.stores import check_writable, run_at
from tests.sim.substitutes import Substitution
from tests.sim.watchers import SimReplicationSet
from tests.sim.world import World

_STATEMENT_SECONDS: Final = 1.0
_LOCK_SECONDS: Final = 10.0
_SWITCH_SECONDS: Final = 3.0
_AGAIN_SECONDS: Final = 4.0
"""From the end of a run until the operator looks whether the shard has to be released."""
_STEPS: Final = ("fence", "apply", "rename", "switch")
_Result = TypeVar("_Result")


class _Died(BaseException):
    """The mover's process ends here, and cleans nothing up."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a move, and the step that it does not come to, if there is one."""

    shard: int
    source: Database
    target: Database
    dies_at: str

    def begin(self, step: str) -> None:
        if self.dies_at == step:
            raise _Died


class Moves:
    """An operator's moves of shards between the databases of one world."""

    def __init__(self, world: World) -> None:
        self._world: Final = world

    def move(self, fault: Fault) -> None:
        """Move a shard to the other database."""
        self._world.spawn(self._move_or_release(fault.pick % self._world.shape.shards, ""), self._world.operator)

    def die(self, fault: Fault) -> None:
        """Begin a move that ends before one of its steps."""
        step = _STEPS[fault.other % len(_STEPS)]
        self._world.spawn(self._move_or_release(fault.pick % self._world.shape.shards, step), self._world.operator)

    async def _move_or_release(self, shard: int, dies_at: str) -> None:
        world, locks = self._world, _locks(self._world)
        source, target = databases_of(world, shard)
        try:
            async with locks.held(move_lock(shard), exclusive=True):
                await self._move(_Run(shard, source, target, dies_at), locks)
            result = "done"
        except _Died:
            result = f"died before {dies_at}"
        except TaoError as error:
            result = f"{error.reason}: {error.message}"
        world.trace.note("move", shard, target.name, result)
        await asyncio.sleep(_AGAIN_SECONDS)
        while True:
            try:
                await release(world, locks, shard)
            except TaoError:
                await asyncio.sleep(1.0)
            else:
                break
        world.checks.calmer()

    async def _move(self, run: _Run, locks: Locks) -> None:
        world = self._world
        async with both_locked(locks, run.source, run.target) as hold:
            if databases_of(world, run.shard) != (run.source, run.target):
                return  # a promotion, or another change, has come first
            try:
                async with asyncio.timeout(_SWITCH_SECONDS):
                    await self._switch(run, hold)
            except (TaoError, TimeoutError) as error:
                await _unfence(world, hold, run.shard)
                raise Unavailable(f"undone: {error!r}") from error

    async def _switch(self, run: _Run, hold: LockHold) -> None:
        world, shard = self._world, run.shard
        source, target = (world.databases[master_of(each)] for each in (run.source, run.target))
        run.begin("fence")
        fenced, copy = await _at(world, source, partial(_fence, world, source, shard, target.name))
        run.begin("apply")
        await asyncio.sleep(world.random.choice((0.02, 0.2, 0.6)))
        run.begin("rename")
        row = arrived_row(fenced, run.target.version_epoch)
        await _at(world, target, partial(_receive, world, target, row, copy))
        while any(not each.down and each.rows.shards.get(shard) != row for each in target.replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        run.begin("switch")
        hold.check()
        source.past.hand_over(target.past, shard)
        world.change_topology(edits.move_to_database(world.topology, shard, run.target.name))


async def release(world: World, locks: Locks, shard: int) -> bool:
    """Let leaders write a shard again that a run has fenced and left. Returns whether it was so."""
    source, _ = databases_of(world, shard)
    if not _is_fenced(world, source, shard):
        return False
    async with hold_exclusively(locks, mastership_lock(source.name), _LOCK_SECONDS) as hold:
        return databases_of(world, shard)[0].name == source.name and await _unfence(world, hold, shard)


@asynccontextmanager
async def both_locked(locks: Locks, one: Database, other: Database) -> AsyncIterator[LockHold]:
    """Lock the masterships of both databases, as `ShardMoves.exclusively` does; the first lock stands for both."""
    names = [mastership_lock(name) for name in sorted((one.name, other.name))]
    for name in names:
        async with hold_exclusively(locks, name, _LOCK_SECONDS):
            pass
    async with AsyncExitStack() as stack:
        holds = [await stack.enter_async_context(hold_exclusively(locks, name, 1.0)) for name in names]
        yield holds[0]


def databases_of(world: World, shard: int) -> tuple[Database, Database]:
    """Return the database that holds a shard, and the other one."""
    one, other = world.topology.databases
    return (one, other) if any(first <= shard <= last for first, last in one.shards) else (other, one)


def _is_fenced(world: World, source: Database, shard: int) -> bool:
    return world.databases[master_of(source)].truth.shards[shard].master_server != master_of(source)


async def _fence(world: World, server: SimDatabase, shard: int, target_master: str) -> tuple[ShardRow, RowChanges]:
    """Fence the shard, and return its row and everything that was ever written here."""
    async with asyncio.timeout(_STATEMENT_SECONDS):
        await server.locks.exclude(shard)
    try:
        check_writable(server)
        row = server.truth.shards[shard]
        if row.master_server != server.name:
            raise Unavailable("another run has fenced it")
        fenced = fenced_row(row, target_master)
        await asyncio.sleep(server.log(RowChanges(), world.schema, {shard: fenced}))
        server.show(RowChanges(), {shard: fenced})
        return fenced, server.truth.of_shard(shard)
    finally:
        server.locks.free_exclusive(shard)


async def _receive(world: World, server: SimDatabase, row: ShardRow, copy: RowChanges) -> None:
    check_writable(server)
    await asyncio.sleep(server.log(copy, world.schema, {row.shard: row}, arrived=row.shard))
    server.show(copy, {row.shard: row}, arrived=row.shard)


async def _unfence(world: World, hold: LockHold, shard: int) -> bool:
    source, _ = databases_of(world, shard)
    if not _is_fenced(world, source, shard):
        return False
    hold.check()
    world.change_topology(world.topology)
    server = world.databases[master_of(source)]

    async def unfence() -> None:
        check_writable(server)
        row = {shard: unfenced_row(server.truth.shards[shard], server.name, source.version_epoch)}
        await asyncio.sleep(server.log(RowChanges(), world.schema, row))
        server.show(RowChanges(), row)

    await _at(world, server, unfence)
    world.trace.note("released", shard)
    return True


async def _at(world: World, server: SimDatabase, work: Callable[[], Awaitable[_Result]]) -> _Result:
    return await run_at(world, server, work, 2 * _STATEMENT_SECONDS)


def _locks(world: World) -> FileLocks:
    return FileLocks(Path("simulated"), clock=world.loop.time)


class SimShardMoves:
    """Replaces `tao.replication.shard_move.ShardMoves` for watchers."""

    def __init__(self, world: World, _: object, locks: Locks, *__: object, **___: object) -> None:
        self._world: Final = world
        self._locks: Final = locks

    async def fenced(self, database: Database) -> list[int]:
        """See `ShardMoves.fenced`."""
        other_servers = {
            each.server.name for each in self._world.topology.database_servers if each.database.name != database.name
        }
        shards = sorted(edits.shards_of(database))

        def look(server: SimDatabase) -> list[int]:
            return [shard for shard in shards if server.truth.shards[shard].master_server in other_servers]

        async with SimReplicationSet(self._world, database).session(database.master_region) as session:
            found: list[int] = await session.run(look)
            return found

    async def release(self, shard: int) -> bool:
        """See `ShardMoves.release`."""
        return await release(self._world, self._locks, shard)


def move_substitutes(world: World) -> list[Substitution]:
    """Return the substitutes beneath what watchers do about moves."""
    return [Substitution(ShardMoves, partial(SimShardMoves, world))]
