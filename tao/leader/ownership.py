"""Which shards this leader owns, and under which generation (DESIGN.md §6).

A shard's owner is named in the database, in the one row that every write transaction locks. A leader takes a shard by
raising the generation there, exclusively: whoever owned it before is refused from then on, whatever it believes. Until
it has taken a shard a leader writes and caches nothing of it, and when it finds the generation raised it gives the
shard up at once and drops what it cached: someone else may have written.

Reads need no ownership, only caching does: what the database says is true whoever may write there. So a leader answers
for every shard that the topology gives it, from the database alone until it has taken it. That may last: a takeover is
a commit, which a new master takes only when it is opened, and which waits for a replica to acknowledge it, while other
regions have nobody else to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from tao.model.errors import NotMine, TaoError
from tao.model.ports import WriteStore
from tao.model.rows import ShardRow
from tao.observability.logs import Logger


@dataclass(frozen=True, slots=True)
class OwnershipSettings:
    """How shards are taken and watched."""

    take_timeout_seconds: float = 5.0
    """For one shard's takeover: it waits for open write transactions, which are bounded at a few seconds."""

    parallel_takeovers: int = 8
    """Takeovers at once: each holds a connection of the write pool."""

    check_seconds: float = 1.0
    """Between two looks at the generations of all owned shards: how long a leader that lost a shard without noticing
    may answer from a cache that nobody keeps fresh."""

    retry_seconds: float = 0.5
    """Pause before a takeover that failed is tried again."""


class Ownership:
    """The shards owned now. ``opened`` and ``closed`` are called when one is taken and given up, synchronously, so
    that cache, publisher and allocator change together with it."""

    def __init__(
        self,
        name: str,
        store: WriteStore,
        settings: OwnershipSettings,
        log: Logger,
        *,
        opened: Callable[[ShardRow], None],
        closed: Callable[[int], None],
        topology_version: Callable[[], int],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._name: Final = name
        self._store: Final = store
        self._settings: Final = settings
        self._log: Final = log
        self._opened: Final = opened
        self._closed: Final = closed
        self._topology_version: Final = topology_version
        self._spawn: Final = spawn
        self._owned: dict[int, ShardRow] = {}
        self._wanted: frozenset[int] = frozenset()
        self._being_taken: set[int] = set()
        self._pauses = 0
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """Of this leader."""
        return self._name

    @property
    def owned(self) -> dict[int, ShardRow]:
        """The shards owned, each with its row as it was taken. Not to be changed."""
        return self._owned

    @property
    def complete(self) -> bool:
        """Everything wanted is owned."""
        return self._wanted <= self._owned.keys()

    def may_read(self, shard: int) -> bool:
        """Whether queries are answered: from the cache where the shard is owned, from the database alone until then."""
        return shard in self._wanted

    def row(self, shard: int) -> ShardRow:
        """The row of an owned shard. Raises `NotMine`."""
        row = self._owned.get(shard)
        if row is None:
            raise self.refusal(shard)
        return row

    def refusal(self, shard: int) -> NotMine:
        """The error that says that this leader does not own the shard."""
        return NotMine(f"leader {self._name} does not own shard {shard}", self._topology_version())

    def want(self, shards: Iterable[int]) -> None:
        """Own exactly these shards, from now on; `take` takes what is missing."""
        self._wanted = frozenset(shards)
        for shard in [shard for shard in self._owned if shard not in self._wanted]:
            self._give_up(shard, "moved by the topology")
        self._changed.set()

    def lost(self, shard: int) -> None:
        """A write found another owner, generation or master: give the shard up. It is taken again only when the
        topology still says that it is this leader's, after a pause, so that two leaders do not chase each other."""
        if shard in self._owned:
            self._give_up(shard, "owned by another, or under another generation")

    def retake(self, shard: int) -> None:
        """The outcome of a commit is unknown: cache nothing of the shard, and write nothing, until its row has been
        locked exclusively on another connection, when that commit has happened or never will."""
        if shard in self._owned:
            self._give_up(shard, "the outcome of a commit is unknown")
            self._changed.set()

    async def confirm(self, timeout_seconds: float) -> None:
        """After a pause: keep what the database says to be this leader's still, and take the rest anew, what it does
        not tell in time among it."""
        self._pauses += 1
        by_server = self._by_server()
        told = await asyncio.gather(
            *(self._check_server(server, shards, timeout_seconds) for server, shards in by_server.items())
        )
        for shards, was_told in zip(by_server.values(), told, strict=True):
            if not was_told:
                for shard in shards:
                    if shard in self._owned:
                        self._give_up(shard, "it is not known whether another has taken it")
                self._changed.set()

    async def take(self) -> None:
        """Take what is wanted, until cancelled."""
        while True:
            self._changed.clear()
            by_server: dict[str, list[int]] = {}
            for shard in sorted(self._wanted - self._owned.keys() - self._being_taken):
                by_server.setdefault(self._store.server_of(shard), []).append(shard)
            for server, shards in by_server.items():
                # Side by side: a database that hangs must not keep this leader from the shards of the others.
                self._spawn(self._take_of_server(server, shards))
                self._being_taken.update(shards)
            try:
                async with asyncio.timeout(self._settings.retry_seconds):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _take_of_server(self, server: str, shards: list[int]) -> None:
        limit = asyncio.Semaphore(self._settings.parallel_takeovers)

        async def take(shard: int) -> bool:
            async with limit:
                pauses = self._pauses
                try:
                    row = await self._store.take_ownership(
                        shard, self._name, timeout_seconds=self._settings.take_timeout_seconds
                    )
                except TaoError as error:
                    # Of whatever kind, an unknown outcome among them: the next attempt raises the generation again.
                    self._log.warning("takeover_failed", shard=shard, reason=error.message)
                    return False
                finally:
                    # Each by itself: one that hangs must not keep another from being taken again.
                    self._being_taken.discard(shard)
            # Taken before a pause and told after it, it may be somebody else's again: it is taken once more.
            if shard in self._wanted and pauses == self._pauses:
                self._owned[shard] = row
                self._opened(row)
            return True

        try:
            results = await asyncio.gather(*(take(shard) for shard in shards))
            taken = sum(results)
            self._log.info("shards_taken", database_server=server, taken=taken, failed=len(results) - taken)
        finally:
            self._being_taken.difference_update(shards)

    async def check(self) -> None:
        """Look now and then whether another leader has taken what is owned, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.check_seconds)
            await self._check()

    async def _check(self) -> None:
        """Give up what another leader has taken meanwhile."""
        seconds = self._settings.take_timeout_seconds
        # Each database by itself: one that is away must not hide what another has to say.
        await asyncio.gather(*(self._check_server(*each, seconds) for each in self._by_server().items()))

    def _by_server(self) -> dict[str, list[int]]:
        by_server: dict[str, list[int]] = {}
        for shard, row in self._owned.items():
            by_server.setdefault(row.master_server, []).append(shard)
        return by_server

    async def _check_server(self, server: str, shards: list[int], timeout_seconds: float) -> bool:
        """Whether the database has told."""
        try:
            rows = await self._store.read_ownership(shards, timeout_seconds=timeout_seconds)
        except TaoError as error:
            self._log.warning("ownership_unchecked", database_server=server, reason=error.message)
            return False
        for shard, row in rows.items():
            mine = self._owned.get(shard)
            if mine is not None and row.generation > mine.generation:
                self.lost(shard)
        return True

    def _give_up(self, shard: int, why: str) -> None:
        del self._owned[shard]
        self._closed(shard)
        self._log.warning("shard_given_up", shard=shard, reason=why)
