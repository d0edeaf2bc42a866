"""The active watcher's work on moves of shards: let leaders write again where a move was interrupted behind its fence.

Until the topology is changed, a shard that is fenced takes no writes at all. So nobody may have to wait for the next
run of the move. What else an interrupted move leaves (its copy) costs room alone, and the next run goes on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tao.model.errors import TaoError
from tao.model.topology import Database, Topology
from tao.replication.locks import LockTaken
from tao.replication.shard_move import ShardMoves
from tao.watcher.probes import WatcherContext


class InterruptedMoves:
    """Looks for moves whose process is gone, and releases their shards."""

    def __init__(
        self,
        moves: ShardMoves,
        topology: Callable[[], Topology],
        is_active: Callable[[], bool],
        check_seconds: float,
        context: WatcherContext,
        *,
        dry_run: bool,
    ) -> None:
        """``check_seconds``: the interval between two looks at the masters of all databases."""
        self._moves: Final = moves
        self._topology: Final = topology
        self._is_active: Final = is_active
        self._check_seconds: Final = check_seconds
        self._log: Final = context.log
        self._audit: Final = context.audit
        self._dry_run: Final = dry_run
        self._reported: Final[dict[str, str]] = {}
        self.released = 0
        """Shards that leaders could write again because of this watcher."""

    async def run(self) -> None:
        """Look regularly, until cancelled."""
        while True:
            await asyncio.sleep(self._check_seconds)
            if self._is_active() and len(self._topology().databases) > 1:
                for database in self._topology().databases:
                    await self._look(database)

    async def _look(self, source: Database) -> None:
        """Release the shards that were on their way from a database."""
        try:
            for shard in await self._moves.fenced(source):
                if not self._dry_run and await self._moves.release(shard):
                    self.released += 1
                    self._log.warning("interrupted_move_released", shard=shard, source=source.name)
                    self._audit.acted("interrupted_move_released", shard=shard, source=source.name)
        except LockTaken:
            return  # a move is under way, or a master is being changed
        except TaoError as error:
            if self._reported.get(source.name) != error.message:  # log each different reason once
                self._reported[source.name] = error.message
                self._log.warning("interrupted_moves_not_seen", database=source.name, reason=error.message)
            return
        self._reported.pop(source.name, None)
