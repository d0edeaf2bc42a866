"""`ReadStore` over a region's databases: batches grouped by server, bounded per shard (DESIGN.md §3, §5).

A shard that is slow, refused or asked too much must hold up nobody else's keys: of a batch, the shards that have room
go out together, one statement for all, and each of the others by itself. What has an answer is told at once. When the
database refuses a statement for all, each shard is asked by itself, and the one that is wrong fails alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tao.model.errors import InternalError, OperatorError, Overloaded, SettingsError, TaoError
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import FillRead, Query
from tao.storage.dialect import SessionSetup
from tao.storage.failures import ConnectionLost
from tao.storage.names import EdgeTables, schema_name
from tao.storage.pools import Pools
from tao.storage.read_plan import COLUMNS, ReadPlan, shard_of_query
from tao.storage.turns import Turns

READ_SETUP: Final = SessionSetup(writes=False)


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Bounds of reads."""

    max_pending_per_shard: int = 4
    """Statements under way that touch one shard. More do not come back sooner, and a hot shard would take all
    connections from the others."""
    max_waiting_per_shard: int = 256
    """Batches in line for one shard; beyond that the answer is "overloaded" at once."""
    slow_seconds: float = 0.1
    """A shard with a statement under way for so long is asked by itself: its table may be locked, and a statement for
    many shards would wait for it. A read takes milliseconds, from a cold disk some tens."""

    def __post_init__(self) -> None:
        if self.max_pending_per_shard < 1 or self.max_waiting_per_shard < 0:
            raise SettingsError(f"a shard needs at least one pending statement: {self}")


class _Gate:
    """Since when statements are under way for a shard, oldest first, and how many wait."""

    __slots__ = ("_turns", "under_way", "waiting")

    def __init__(self, at_once: int) -> None:
        self._turns = Turns(at_once)
        self.under_way: list[float] = []
        self.waiting = 0

    def enter(self, now: float, slow_seconds: float) -> bool:
        """Unless it is full, or what is under way takes long."""
        under_way = self.under_way
        if (under_way and now - under_way[0] > slow_seconds) or not self._turns.take():
            return False
        under_way.append(now)
        return True

    async def enter_in_turn(self) -> float:
        """Returns the time, to be given back by `leave`."""
        await self._turns.wait()
        now = asyncio.get_running_loop().time()
        self.under_way.append(now)
        return now

    def leave(self, entered: float) -> None:
        self.under_way.remove(entered)
        self._turns.give_back()


class MySqlReadStore(ReadStore):
    """See `tao.model.ports.ReadStore`."""

    def __init__(
        self,
        local_of: Callable[[int], str],
        master_of: Callable[[int], str],
        pools: Pools,
        edge_tables: EdgeTables,
        settings: ReadSettings | None = None,
    ) -> None:
        """``local_of``, ``master_of``: shard → name of the region's server, of the master server. ``pools`` are those
        of the reader's (or leader's) account, set up with `READ_SETUP`."""
        self._local_of = local_of
        self._master_of = master_of
        self._pools = pools
        self._edge_tables = edge_tables
        self._settings = settings or ReadSettings()
        self._gates: dict[int, _Gate] = {}  # at most one per shard

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        """See the port. `Overloaded`: no turn or no connection was had in time; `DeadlineExceeded`: no answer."""
        now = asyncio.get_running_loop().time()
        by_shard: dict[int, list[int]] = {}
        for place, query in enumerate(queries):
            by_shard.setdefault(shard_of_query(query), []).append(place)
        job = _ReadJob(queries, by_shard, now + timeout_seconds, on_read)
        together: dict[str, list[int]] = {}  # server → shards that have room
        # Left below, too: a task that is cancelled before its first step gets to no ``finally`` of its own.
        entered: dict[int, float] = {}
        alone: list[tuple[str, int]] = []
        for shard in by_shard:
            try:
                server = self._master_of(shard) if critical else self._local_of(shard)
            except TaoError as error:
                job.tell((shard,), error)
                continue
            gate = self._gates.get(shard)
            if gate is None:
                gate = self._gates[shard] = _Gate(self._settings.max_pending_per_shard)
            if gate.enter(now, self._settings.slow_seconds):
                entered[shard] = now
                together.setdefault(server, []).append(shard)
            else:
                alone.append((server, shard))

        async def fetch_together(server: str, shards: Sequence[int]) -> None:
            try:
                await self._fetch(job, server, shards)
            finally:
                self._leave(entered, shards)

        fetches: list[Coroutine[None, None, None]] = [fetch_together(*group) for group in together.items()]
        fetches.extend(self._fetch_in_turn(job, server, shard) for server, shard in alone)
        try:
            await _all(fetches)
        finally:
            self._leave(entered, tuple(entered))

    def _leave(self, entered: dict[int, float], shards: Iterable[int]) -> None:
        for shard in shards:
            since = entered.pop(shard, None)
            if since is not None:
                self._gates[shard].leave(since)

    async def _fetch_in_turn(self, job: _ReadJob, server: str, shard: int) -> None:
        try:
            entered = {shard: await self._wait(shard, job.deadline)}
        except TaoError as error:
            job.tell((shard,), error)
            return
        try:
            await self._fetch(job, server, (shard,))
        finally:
            self._leave(entered, (shard,))

    async def _fetch(self, job: _ReadJob, server: str, shards: Sequence[int]) -> None:
        """Read these shards' queries by few statements, and tell."""
        places = job.places(shards)
        try:
            plan = await self._run(server, [job.queries[place] for place in places], job.deadline)
        except OperatorError as error:
            if len(shards) == 1:
                job.tell(shards, error)
                return
        except TaoError as error:
            job.tell(shards, error)
            return
        else:
            job.tell_answers(shards, places, plan)
            return
        for shard in shards:  # one of them was refused
            await self._fetch(job, server, (shard,))

    async def _run(self, server: str, queries: Sequence[Query], deadline: float) -> ReadPlan:
        pool = self._pools.of(server)
        fresh = False
        while True:
            plan = ReadPlan(queries, self._edge_tables)
            try:
                async with pool.session(deadline=deadline, fresh=fresh) as session:
                    while plan.statements:
                        for one in plan.statements:
                            await session.stream(one.sql, one.values, plan.receive, deadline=deadline, columns=COLUMNS)
                        plan.go_on()
            except ConnectionLost:
                if fresh:
                    raise
                # A pooled connection that died while idle: reading once more, all of it, on a new one harms nobody.
                fresh = True
            else:
                return plan

    async def _wait(self, shard: int, deadline: float) -> float:
        gate = self._gates[shard]
        if gate.waiting >= self._settings.max_waiting_per_shard:
            raise Overloaded(f"{gate.waiting} batches wait for shard {shard}")
        gate.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await gate.enter_in_turn()
        except TimeoutError as error:
            raise Overloaded(f"shard {shard} had no turn in time") from error
        finally:
            gate.waiting -= 1


@dataclass(frozen=True, slots=True)
class _ReadJob:
    """The queries of one read, and whom to tell of each shard."""

    queries: Sequence[Query]
    by_shard: Mapping[int, Sequence[int]]
    deadline: float
    on_read: OnRead

    def places(self, shards: Iterable[int]) -> list[int]:
        return [place for shard in shards for place in self.by_shard[shard]]

    def tell(self, shards: Iterable[int], error: TaoError) -> None:
        self.on_read(self.places(shards), error)

    def tell_answers(self, shards: Iterable[int], places: Sequence[int], plan: ReadPlan) -> None:
        epochs, values = plan.version_epochs, list(plan.answers())
        empty = [shard for shard in shards if shard not in epochs]
        if empty:
            known = [at for at, place in enumerate(places) if shard_of_query(self.queries[place]) in epochs]
            places, values = [places[at] for at in known], [values[at] for at in known]
        self.on_read(places, FillRead(values, epochs))
        for shard in empty:
            self.tell((shard,), InternalError(f"table {schema_name(shard)}.shard is empty: run the shard's migrations"))


async def _all(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run side by side; an error, which is no answer of the database but the caller's or a bug, ends them all."""
    if len(jobs) == 1:
        await jobs[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
