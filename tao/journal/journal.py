"""The wiring of a follower's journal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tao.journal.acceptor import Acceptor
from tao.journal.applier import Applier
from tao.journal.control import JournalControl, JournalParts
from tao.journal.copies import Copies
from tao.journal.held_copies import HeldCopies
from tao.journal.leader_clocks import LeaderClocks
from tao.journal.schedule import Schedule
from tao.journal.settings import JournalSettings
from tao.journal.store import JournalStore
from tao.model.edge_states import DEFAULT_KEEP_REMOVED_DAYS
from tao.model.errors import InvalidArgument, TaoError
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import ForwardPath

_PURGE_SECONDS: Final = 3_600.0
_DAY_MS: Final = 86_400_000


class Journal:
    """The parts of one journal. Its requests are handled once it is open."""

    def __init__(
        self,
        context: ServerContext,
        folder: Path,
        settings: JournalSettings,
        writes: ForwardPath,
        admit: Callable[[int], TaoError | None],
    ) -> None:
        """``writes`` makes what was accepted. ``admit`` returns why this follower does not serve a shard, or None."""
        routes = self._configuration = context.configuration
        self._clock: Final = context.clock

        def database_name(shard: int) -> str:
            try:
                return routes.routes.database_of(shard).name
            except InvalidArgument:
                return ""  # a damaged row; the others must be made

        self._store: Final = JournalStore(folder, settings, context.log)
        schedule = Schedule(settings, database_name, random.random)
        self.clocks: Final = LeaderClocks(context, settings)
        self._applier: Final = Applier(context, self._store, schedule, writes, settings)
        self.copies: Final = Copies(context, self._store, settings)
        self.held: Final = HeldCopies(context, self._store, self.copies, self._applier, settings)
        self.acceptor: Final = Acceptor(context, self._store, self._applier, self.copies, self.held, self.clocks, admit)
        parts = JournalParts(self._store, schedule, self._applier, self.acceptor, self.clocks, self.copies, self.held)
        self.control: Final = JournalControl(context, parts, settings)

    async def open(self) -> None:
        """Read what the disk holds, and begin to make it: later if it cannot be read now."""
        await self._store.open()
        await self.held.count()
        if self._store.id:
            self._applier.start()
        else:
            self.control.restart_applier()

    async def keep_purging(self) -> None:
        """Forget receipts of writes that were moved, and torn rows, once no operation of their age is accepted any
        more. Goes on until cancelled."""
        while True:
            kept = [each.keep_removed_days for each in self._configuration.schema.assocs if each.states]
            days = max(kept, default=DEFAULT_KEEP_REMOVED_DAYS)
            if self._store.id:
                self._store.purge(self._clock.unix_ms() - days * _DAY_MS)
            await asyncio.sleep(_PURGE_SECONDS)

    def stop(self) -> None:
        """Begin no further batch of accepted writes."""
        self._applier.close()

    async def close(self) -> None:
        """Finish what is on its way to the disk. Call it when nothing is accepted and no batch is under way."""
        self.stop()
        await self._store.close()
