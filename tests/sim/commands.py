"""One run of an operator's command about databases, in a process of its own that may die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, cast

from tao.model.errors import TaoError
from tao.model.ports import TopologyStore
from tao.model.topology import Topology
from tao.replication.replication_set import SetAccounts
from tao.replication.shard_move import MoveSettings, ShardMoves
from tests.sim.loop import Process
from tests.sim.watchers import ACCOUNT
from tests.sim.world import World

_RUN_SECONDS: Final = 30.0
_DIED: Final = "died"
Late = tuple[float, float]
"""Seconds until a change of the topology is made, and until it is answered."""
Command = Callable[[ShardMoves], Awaitable[str]]
"""What a process does with the databases. It returns what it shows."""


class _LateStore:
    """A topology whose first change is made late, or answered late."""

    def __init__(self, world: World, late: Late) -> None:
        self._store: Final = world.open_topology()
        self._loop: Final = world.loop
        self.load: Final = self._store.load
        self._before, self._after = late

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        """Change the topology also when the caller has given up by then."""
        change = self._loop.create_task(self._change(expected_version, changed))
        change.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait any more
        await asyncio.wait([change])
        return change.result()

    async def _change(self, expected_version: int, changed: Topology) -> Topology:
        before, after, self._before, self._after = self._before, self._after, 0.0, 0.0
        await asyncio.sleep(before)
        stored = await self._store.change(expected_version, changed)
        await asyncio.sleep(after)
        return stored


class CommandRun:
    """A run of a command."""

    def __init__(self, world: World, process: Process, settings: MoveSettings, late: Late = (0.0, 0.0)) -> None:
        self.world: Final = world
        self.process: Final = process
        self.settings: Final = settings
        self._late: Final = late
        self._ended: Final = asyncio.Event()
        self.result = _DIED
        self.error: TaoError | None = None
        world.dead.append(process)

    @property
    def is_done(self) -> bool:
        """Whether the command has come to its end."""
        return self.error is None and self.result != _DIED

    async def do(self, command: Command, *, dies_after: float = 0.0, most_seconds: float = _RUN_SECONDS) -> None:
        """Run a command to its end, which may be the death of its process. ``dies_after``: in seconds; 0: never.
        ``most_seconds``: an operator ends a run that takes longer."""
        self.world.spawn(self._do(command), self.process)
        if dies_after:
            self.world.loop.call_later(dies_after, self.kill)
        try:
            async with asyncio.timeout(most_seconds):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
        self.world.trace.note("command", self.process.name, self.result)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if not self._ended.is_set():
            self.world.loop.kill(self.process)
            self.world.locks.release(self.process)
            self._ended.set()

    async def _do(self, command: Command) -> None:
        store = _LateStore(self.world, self._late) if any(self._late) else self.world.open_topology()
        locks = self.world.open_locks()
        moves = ShardMoves(cast(TopologyStore, store), locks, SetAccounts(ACCOUNT, ACCOUNT), self.settings)
        try:
            self.result = await command(moves)
        except TaoError as error:
            self.error = error
            self.result = f"{error.reason}: {error.message}"
        self._ended.set()
