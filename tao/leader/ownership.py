"""Take, watch and give up the shards that this leader owns.

The database names a shard's owner in the one row that every write transaction locks. A leader takes a shard by raising
the generation in that row, under an exclusive lock: from then on the former owner is rejected, whatever it believes. A
leader writes and caches nothing of a shard before it has taken it. When it finds the generation raised, it gives the
shard up at once and drops what it cached, because another leader may have written.

Only caching needs ownership, reading does not: what the database says is true, whichever leader may write there. So a
leader answers queries for every shard that the topology assigns to it, from the database alone until it has taken the
shard. That may last: a takeover is a commit, which a new master accepts only once it is opened, and which waits for
a replica to acknowledge it. Meanwhile other regions have no other leader to ask."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

from tao.model.errors import (
    DatabaseFull,
    DeadlineExceeded,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    ShardBlocked,
    TaoError,
    Unavailable,
)
from tao.model.ports import WriteStore
from tao.model.rows import ShardRow
from tao.serving.configuration import ServerContext


def concerns_the_server(error: TaoError) -> bool:
    """Return whether the error of a transaction says nothing about single shards, so that they are tried together
    again."""
    kinds = (Unavailable, DeadlineExceeded, OutcomeUnknown, Overloaded)
    return isinstance(error, kinds) and not isinstance(error, ShardBlocked)


@dataclass(frozen=True, slots=True)
class OwnershipSettings:
    """How shards are taken and watched."""

    take_timeout_seconds: float = 5.0
    """Time limit for a transaction that takes shards. It waits for open writes of the shards, which are bounded at a
    few seconds."""

    shards_per_takeover: int = 64
    """Most shards taken in one transaction. Commits that wait for a replica far away take a round trip each."""

    parallel_takeovers: int = 8
    """Transactions that take shards of one database at a time. Each uses a connection of the write pool."""

    check_seconds: float = 1.0
    """Interval between two checks of the generations of owned shards. A leader that lost a shard without noticing may
    answer for this long from a cache that no message corrects."""

    shards_per_check: int = 128
    """Most shards checked with one statement. The statements of one database are spread over ``check_seconds``."""

    retry_seconds: float = 0.5
    """Pause before a failed takeover is tried again."""

    max_waiting_per_shard: int = 2000
    """Most writes that wait until one shard is taken. Each holds a task of the server."""


class Ownership:
    """The shards that this leader owns now.

    ``on_taken`` and ``on_given_up`` are called synchronously when a shard is taken or given up, so that cache,
    publisher and allocator change together with the ownership."""

    def __init__(
        self,
        context: ServerContext,
        settings: OwnershipSettings,
        store: WriteStore,
        *,
        on_taken: Callable[[ShardRow], None],
        on_given_up: Callable[[int], None],
    ) -> None:
        self._name: Final = context.name
        self._store: Final = store
        self._settings: Final = settings
        self._log: Final = context.log
        self._on_taken: Final = on_taken
        self._on_given_up: Final = on_given_up
        self._configuration: Final = context.configuration
        self._spawn: Final = context.spawn_as("takeover")
        self._owned: dict[int, ShardRow] = {}
        self._wanted: frozenset[int] = frozenset()
        self._being_taken: dict[int, str] = {}  # shard → the server where it is
        self._full: dict[int, DatabaseFull] = {}  # why a wanted shard could not be taken: its database's disk is full
        self._awaited: dict[int, asyncio.Future[None]] = {}
        """For each wanted shard whose writers wait: done when it was taken, cannot be, or is not wanted any more."""
        self._waiting: Counter[int] = Counter()  # writers, by shard
        self._pauses = 0
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """Return the name of this leader."""
        return self._name

    @property
    def owned(self) -> dict[int, ShardRow]:
        """Return the owned shards, each with its row as it was taken. Callers must not change the dictionary."""
        return self._owned

    @property
    def complete(self) -> bool:
        """Return whether every wanted shard is owned. No other is ever owned."""
        return len(self._owned) >= len(self._wanted)

    def may_read(self, shard: int) -> bool:
        """Return whether queries are answered: from the cache if the shard is owned, from the database alone before."""
        return shard in self._wanted

    def row(self, shard: int) -> ShardRow:
        """Return the row of an owned shard. Raises `NotMine`, or `DatabaseFull` when it cannot be taken for that."""
        row = self._owned.get(shard)
        if row is None:
            raise self._full.get(shard) or self.not_owned(shard)
        return row

    async def wait_taken(self, shard: int, timeout_seconds: float) -> None:
        """Return once the shard is owned, while this leader is about to take it.

        Raises `Overloaded` when too many wait, and what `row` does: at once for a shard that is not this leader's or
        cannot be taken, else after ``timeout_seconds``. So writers wait for a takeover as long as they can, and cost
        nothing meanwhile."""
        if self._waiting[shard] >= self._settings.max_waiting_per_shard:
            raise Overloaded(f"{self._waiting[shard]} writes wait until shard {shard} is taken; try again later")
        end = asyncio.get_running_loop().time() + timeout_seconds
        self._waiting[shard] += 1
        try:
            while shard in self._wanted and shard not in self._owned and shard not in self._full:
                awaited = self._awaited.get(shard)
                if awaited is None:
                    awaited = self._awaited[shard] = asyncio.get_running_loop().create_future()
                async with asyncio.timeout_at(end):
                    await asyncio.wait([awaited])
        except TimeoutError:
            pass
        finally:
            self._waiting[shard] -= 1
            if not self._waiting[shard]:
                del self._waiting[shard]
        self.row(shard)

    def not_owned(self, shard: int) -> NotMine:
        """Return the error that this leader does not own the shard."""
        return NotMine(f"leader {self._name} does not own shard {shard}", self._configuration.routes.version)

    def want(self, shards: Iterable[int]) -> None:
        """Own exactly these shards from now on. `take` takes the missing ones."""
        self._wanted = frozenset(shards)
        self._full = {shard: error for shard, error in self._full.items() if shard in self._wanted}
        for shard, row in list(self._owned.items()):
            if shard not in self._wanted:
                self._give_up(shard, "the topology assigns it to another leader")
            elif row.master_server != self._store.server_of(shard):
                # The former master may hang, and would not say so: a check of its row waits for an answer.
                self._give_up(shard, "the topology names another master of it")
        for shard in self._awaited.keys() - self._wanted:
            self._end_wait(shard)
        self._changed.set()

    def lost(self, shard: int) -> None:
        """Give up a shard of which a write found another owner, generation or master.

        It is taken again only when the topology still assigns it to this leader, and after a pause, so that two
        leaders do not take it from each other in turn."""
        if shard in self._owned:
            self._give_up(shard, "it has another owner, generation or master")

    def confirm_locked(self, shard: int, row: ShardRow | None, server: str) -> bool:
        """Return whether the locked row on a database server names the ownership that this leader believes it has.
        Give the shard up when the row names another one or is missing: this fences off the writes of a former owner."""
        mine = self._owned.get(shard)
        if mine is None:
            return False
        if row is not None and (row.owner, row.generation, row.master_server) == (mine.owner, mine.generation, server):
            return True
        self.lost(shard)
        return False

    def retake(self, shard: int) -> None:
        """Give up and take again a shard with a commit of unknown outcome.

        Nothing of the shard is cached or written until its row has been locked exclusively on another connection. By
        then that commit has happened or never will."""
        if shard in self._owned:
            self._give_up(shard, "the outcome of a commit is unknown")
            self._changed.set()

    async def confirm(self, timeout_seconds: float) -> None:
        """Confirm the ownership of all shards after the process was paused.

        Shards that the database still assigns to this leader are kept. The others are taken again, as are those that
        the database does not confirm in time."""
        self._pauses += 1
        by_server = self._by_server()
        checked = await asyncio.gather(
            *(self._check_shards(server, shards, timeout_seconds) for server, shards in by_server.items())
        )
        for shards, error in zip(by_server.values(), checked, strict=True):
            if error is not None:
                for shard in shards:
                    if shard in self._owned:
                        self._give_up(shard, "the database did not confirm the ownership")
                self._changed.set()

    async def take(self) -> None:
        """Take the wanted shards, until cancelled."""
        while True:
            self._changed.clear()
            by_server: dict[str, list[int]] = {}
            for shard in sorted(self._wanted - self._owned.keys()):
                server = self._store.server_of(shard)
                # A former master that hangs must not keep a shard from being taken at its successor.
                if self._being_taken.get(shard) != server:
                    by_server.setdefault(server, []).append(shard)
            for server, shards in by_server.items():
                # Databases are handled concurrently: one that hangs must not delay the shards of the others.
                self._spawn(self._take_of_server(server, shards))
                self._being_taken.update(dict.fromkeys(shards, server))
            try:
                async with asyncio.timeout(self._settings.retry_seconds):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _take_of_server(self, server: str, shards: list[int]) -> None:
        """Take these shards of one database server: many in one transaction, and those that others hold locked, or
        that were in a transaction which the server rejected, each in its own."""
        limit = asyncio.Semaphore(self._settings.parallel_takeovers)
        size = self._settings.shards_per_takeover
        try:
            several = [shards[start : start + size] for start in range(0, len(shards), size)]
            alone = chain.from_iterable(await asyncio.gather(*(self._take(server, each, limit) for each in several)))
            await asyncio.gather(*(self._take(server, [shard], limit) for shard in alone))
            taken = sum(shard in self._owned for shard in shards)
            self._log.info("shards_taken", database_server=server, taken=taken, failed=len(shards) - taken)
        finally:
            self._release(server, shards)

    def _release(self, server: str, shards: Iterable[int]) -> None:
        """Let these shards be taken again at a server."""
        for shard in [shard for shard in shards if self._being_taken.get(shard) == server]:
            del self._being_taken[shard]

    async def _take(self, server: str, shards: list[int], limit: asyncio.Semaphore) -> list[int]:
        """Take these shards in one transaction. Return the shards that are to be taken alone."""
        alone: list[int] = []
        try:
            async with limit:
                # Another takeover has begun at the new master of any other shard.
                shards = [shard for shard in shards if self._store.server_of(shard) == server]
                if not shards:
                    return alone
                pauses = self._pauses
                rows = await self._store.take_ownership(
                    shards, self._name, timeout_seconds=self._settings.take_timeout_seconds
                )
            alone = [shard for shard in shards if shard not in rows]
        except TaoError as error:
            # Any failure, even one of unknown outcome, is safe: the next attempt raises the generation again.
            self._log.warning("takeover_failed", shards=shards, reason=error.message)
            if isinstance(error, DatabaseFull):
                for shard in self._wanted.intersection(shards):
                    self._full[shard] = error
                    self._end_wait(shard)
            elif len(shards) > 1 and not concerns_the_server(error):
                alone = shards
            return alone
        finally:
            # Released as they end: a takeover that hangs must not keep another shard from being taken again.
            self._release(server, set(shards).difference(alone))
        for shard, row in rows.items():
            self._full.pop(shard, None)
            # A takeover before a pause whose answer came after it may be outdated: then the shard is taken once more.
            if shard in self._wanted and pauses == self._pauses and server == self._store.server_of(shard):
                self._owned[shard] = row
                self._on_taken(row)
                self._end_wait(shard)
        return alone

    def _end_wait(self, shard: int) -> None:
        awaited = self._awaited.pop(shard, None)
        if awaited is not None:
            awaited.set_result(None)

    async def check(self) -> None:
        """Check regularly whether another leader has taken an owned shard, and give such shards up, until cancelled."""
        while True:
            # Databases are checked concurrently: one that is unavailable must not hide the answer of another.
            checks = (self._check_in_turn(server, shards) for server, shards in self._by_server().items())
            await asyncio.gather(asyncio.sleep(self._settings.check_seconds), *checks)

    async def _check_in_turn(self, server: str, shards: list[int]) -> None:
        """Check this database's shards once, a bounded number at a time, over the time between two checks."""
        size = self._settings.shards_per_check
        chunks = [shards[start : start + size] for start in range(0, len(shards), size)]
        for chunk in chunks:
            await asyncio.sleep(self._settings.check_seconds / len(chunks))
            error = await self._check_shards(server, chunk, self._settings.take_timeout_seconds)
            if error is not None and concerns_the_server(error):
                return

    def _by_server(self) -> dict[str, list[int]]:
        by_server: dict[str, list[int]] = {}
        for shard, row in self._owned.items():
            by_server.setdefault(row.master_server, []).append(shard)
        return by_server

    async def _check_shards(self, server: str, shards: list[int], timeout_seconds: float) -> TaoError | None:
        """Give up these shards of one database that another leader has taken; return why they could not be checked."""
        try:
            rows = await self._store.read_ownership(shards, timeout_seconds=timeout_seconds)
        except TaoError as error:
            self._log.warning("ownership_check_failed", database_server=server, reason=error.message)
            return error
        for shard, row in rows.items():
            mine = self._owned.get(shard)
            if mine is not None and row.generation > mine.generation:
                self.lost(shard)
        return None

    def _give_up(self, shard: int, why: str) -> None:
        del self._owned[shard]
        self._on_given_up(shard)
        self._log.warning("shard_given_up", shard=shard, reason=why)
