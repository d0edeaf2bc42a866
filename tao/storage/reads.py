"""`ReadStore` over a region's databases: batches grouped by server, bounded per shard (DESIGN.md §3, §5).

A shard that is slow or asked too much must hold up nobody else's keys: of a batch, the shards that have room go out
together, one statement for all; each of the others waits by itself for its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tao.model.errors import InternalError, Overloaded, SettingsError
from tao.model.queries import FillRead, Query
from tao.storage.dialect import SessionSetup
from tao.storage.failures import ConnectionLost
from tao.storage.names import EdgeTables, schema_name
from tao.storage.pools import Pools
from tao.storage.read_plan import ReadPlan, shard_of_query
from tao.storage.session import Session

READ_SETUP: Final = SessionSetup(writes=False)


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Bounds of reads."""

    max_pending_per_shard: int = 4
    """Statements under way that touch one shard. More do not come back sooner, and a hot shard would take all
    connections from the others."""
    max_waiting_per_shard: int = 256
    """Batches in line for one shard; beyond that the answer is "overloaded" at once."""

    def __post_init__(self) -> None:
        if self.max_pending_per_shard < 1 or self.max_waiting_per_shard < 0:
            raise SettingsError(f"a shard needs at least one pending statement: {self}")


class _Gate:
    """How many statements are under way for a shard, and how many wait."""

    __slots__ = ("slots", "waiting")

    def __init__(self, slots: int) -> None:
        self.slots = asyncio.Semaphore(slots)
        self.waiting = 0


class MySqlReadStore:
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

    async def read(self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float) -> FillRead:
        """See the port. `Overloaded`: no turn or no connection was had in time; `DeadlineExceeded`: no answer."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        server_of = self._master_of if critical else self._local_of
        by_shard: dict[int, list[int]] = {}
        for index, query in enumerate(queries):
            by_shard.setdefault(shard_of_query(query), []).append(index)
        together: dict[str, list[int]] = {}  # server → shards that have room
        jobs: list[Coroutine[None, None, None]] = []
        values: list[bytes] = [b""] * len(queries)
        epochs: dict[int, int] = {}

        taken: set[int] = set()  # a job that is cancelled before its first step does not get to its own ``finally``

        def release(shards: Iterable[int]) -> None:
            for shard in taken.intersection(shards):
                taken.discard(shard)
                self._gates[shard].slots.release()

        async def fetch(server: str, shards: Sequence[int]) -> None:
            indexes = [index for shard in shards for index in by_shard[shard]]
            plan = await self._run(server, [queries[index] for index in indexes], deadline)
            for index, value in zip(indexes, plan.answers(), strict=True):
                values[index] = value
            for shard in shards:
                if shard not in plan.version_epochs:
                    raise InternalError(f"table {schema_name(shard)}.shard is empty: run the shard's migrations")
            epochs.update(plan.version_epochs)

        async def fetch_together(server: str, shards: Sequence[int]) -> None:
            try:
                await fetch(server, shards)
            finally:
                release(shards)

        async def fetch_in_turn(server: str, shard: int) -> None:
            await self._wait(shard, deadline)
            try:
                await fetch(server, (shard,))
            finally:
                self._gates[shard].slots.release()

        servers = {shard: server_of(shard) for shard in by_shard}  # may raise: before anything is taken
        for shard, server in servers.items():
            gate = self._gates.get(shard)
            if gate is None:
                gate = self._gates[shard] = _Gate(self._settings.max_pending_per_shard)
            if gate.slots.locked():
                jobs.append(fetch_in_turn(server, shard))
            else:
                await gate.slots.acquire()  # does not suspend: it is not locked
                taken.add(shard)
                together.setdefault(server, []).append(shard)
        jobs.extend(fetch_together(server, shards) for server, shards in together.items())
        try:
            await _all(jobs)
        finally:
            release(tuple(taken))
        return FillRead(values, epochs)

    async def _run(self, server: str, queries: Sequence[Query], deadline: float) -> ReadPlan:
        pool = self._pools.of(server)
        try:
            async with pool.session(deadline=deadline) as session:
                return await self._stream(session, queries, deadline)
        except ConnectionLost:
            # A pooled connection that died while idle: reading once more, all of it, on a new one harms nobody.
            async with pool.session(deadline=deadline, fresh=True) as session:
                return await self._stream(session, queries, deadline)

    async def _stream(self, session: Session, queries: Sequence[Query], deadline: float) -> ReadPlan:
        plan = ReadPlan(queries, self._edge_tables)
        for statement in plan.statements:
            await session.stream(statement.sql, statement.values, plan.receive, deadline=deadline)
        return plan

    async def _wait(self, shard: int, deadline: float) -> None:
        gate = self._gates[shard]
        if gate.waiting >= self._settings.max_waiting_per_shard:
            raise Overloaded(f"{gate.waiting} batches wait for shard {shard}")
        gate.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await gate.slots.acquire()
        except TimeoutError as error:
            raise Overloaded(f"shard {shard} had no turn in time") from error
        finally:
            gate.waiting -= 1


async def _all(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run side by side; the first error ends them all."""
    if len(jobs) == 1:
        await jobs[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
