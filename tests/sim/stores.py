"""The store ports over the simulated databases: how long a server's statements take, and how they fail.

Every statement travels to its database and runs there, and its answer travels back; a process that dies or is cut off
in between learns nothing, and a commit on its way happens nevertheless.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

from tao.model.errors import DeadlineExceeded, MasterReadOnly, OutcomeUnknown, ShardBlocked, TaoError, Unavailable
from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobCount, JobQuery, JobRow, PausedKind
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import FillRead, ObjectQuery, PairPage, PairsQuery, Query
from tao.model.rows import (
    EdgePage,
    ExistingRows,
    IntentRow,
    ListRow,
    OldestEdges,
    RowChanges,
    ShardRow,
    StateRows,
    WriteKeys,
)
from tao.schema.registry import Schema
from tao.storage.failures import TablesMissing
from tao.storage.master_check import MasterState, master_refusal
from tests.rigs.job_rows import count_jobs, select_jobs
from tests.rigs.pair_pages import page_of_rows
from tests.sim.database import SimDatabase
from tests.sim.loop import CURRENT, Process, SimLoop
from tests.sim.network import Network

Result = TypeVar("Result")
LOCK_WAIT_SECONDS: Final = 0.3
"""The bound of `tao.storage.writes`."""


class Databases(Protocol):
    """The part of the world that the stores need."""

    @property
    def loop(self) -> SimLoop: ...

    @property
    def network(self) -> Network: ...

    @property
    def schema(self) -> Schema: ...

    @property
    def random(self) -> random.Random: ...

    @property
    def databases(self) -> dict[str, SimDatabase]: ...

    def committing(self, writer: Process, changes: RowChanges) -> None:
        """Note a commit of a leader."""


async def run_at(
    world: Databases, server: SimDatabase, work: Callable[[], Awaitable[Result]], timeout_seconds: float
) -> Result:
    """Run something on the server. Raises what it raises, `Unavailable`, or `DeadlineExceeded`."""
    here = CURRENT.get()
    assert here is not None, "only simulated processes have databases"
    loop, network, there = world.loop, world.network, server.process
    if server.down:
        await asyncio.sleep(network.delay(here, there))
        raise Unavailable(f"{server.name} refuses connections")
    answer: asyncio.Future[Result] = loop.create_future()

    async def do() -> None:
        try:
            if server.down:
                raise Unavailable(f"{server.name} closed the connection")
            result: Result | TaoError = await work()
        except TaoError as error:
            result = error
        if not network.is_blocked(there, here):
            loop.call_later(network.delay(there, here), take, result)

    def take(result: Result | TaoError) -> None:
        if answer.done():
            return
        if isinstance(result, TaoError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    if not network.is_blocked(here, there):
        loop.call_later(network.delay(here, there), lambda: loop.create_task(do()), context=there.context.copy())
    try:
        async with asyncio.timeout(timeout_seconds):
            return await answer
    except TimeoutError:
        raise DeadlineExceeded(f"{server.name} has not answered in time") from None


class SimReadStore(ReadStore):
    """Replaces `tao.storage.reads.MySqlReadStore`."""

    def __init__(
        self,
        world: Databases,
        local_of: Callable[[int], str],
        master_of: Callable[[int], str],
        _pools: object,
        _tables: object,
        *_: object,
        is_elsewhere: Callable[[int, str], bool] = lambda *_: False,
        **__: object,
    ) -> None:
        self.held_bytes = 0
        self._is_elsewhere: Final = is_elsewhere
        self._world: Final = world
        self._local_of: Final = local_of
        self._master_of: Final = master_of
        self._at_once: Final[set[asyncio.Task[None]]] = set()

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        """See the port."""
        server_of = self._master_of if critical else self._local_of
        by_server: dict[str, list[int]] = {}
        for place, query in enumerate(queries):
            by_server.setdefault(server_of(_shard(query)), []).append(place)

        async def read(name: str, places: list[int]) -> None:
            server = self._world.databases[name]
            asked = [queries[place] for place in places]
            refused: list[TaoError] = []
            states: list[MasterState] = []
            shards = {_shard(query): None for query in asked}
            if critical and len(shards) > 1 and any(_moves(server, shard) for shard in shards):
                # As in the product: the row of a shard that moves says nothing about the others.
                apart = [[place for place in places if _shard(queries[place]) == shard] for shard in shards]
                await asyncio.gather(*(read(name, some) for some in apart))
                return

            async def look() -> FillRead:
                epochs = {
                    shard: 0 if critical and _moves(server, shard) else _row(server, shard).version_epoch
                    for shard in shards
                }
                found = FillRead([server.rows.value(query) for query in asked], epochs)
                await self._be_late(server)
                if critical:  # as in the product, after the rows
                    refused.extend(_refusals(server, epochs))
                    states.extend(_state(server, shard) for shard in shards)
                return found

            try:
                found = await run_at(self._world, server, look, timeout_seconds)
            except TaoError as error:
                on_read(places, error)
                return
            if refused and len(shards) == 1:
                ((shard, state),) = zip(shards, states, strict=True)
                with suppress(TaoError):
                    if await self._is_untouched_elsewhere(server.name, shard, state, timeout_seconds):
                        refused.clear()
                        found = FillRead(found.values, {shard: state.version_epoch})
            on_read(places, refused[0] if refused else found)

        await asyncio.gather(*(read(*each) for each in by_server.items()))

    def read_at_once(
        self, queries: Sequence[Query], *, timeout_seconds: float, on_read: OnRead, on_end: Callable[[], None]
    ) -> bool:
        """See the port. As in the product, only for one server, and what a lost connection leaves unanswered is read
        again."""
        try:
            if len({self._local_of(_shard(query)) for query in queries}) != 1:
                return False
        except TaoError:
            return False

        def take(places: Sequence[int], read: FillRead | TaoError) -> None:
            if not isinstance(read, Unavailable):
                on_read(places, read)

        def end(reading: asyncio.Task[None]) -> None:
            self._at_once.discard(reading)
            if not reading.cancelled():
                on_end()

        reading = asyncio.get_running_loop().create_task(
            self.read_each(queries, critical=False, timeout_seconds=timeout_seconds, on_read=take)
        )
        self._at_once.add(reading)
        reading.add_done_callback(end)
        return True

    async def read_intents(self, shard: int, far_shard: int, *, limit: int, timeout_seconds: float) -> list[IntentRow]:
        """See the port."""
        server, ends = self._world.databases[self._master_of(shard)], (shard, far_shard)

        async def look() -> list[IntentRow]:
            read_epoch = _row(server, shard).version_epoch
            intents = server.rows.intents.values()
            found = [row for row in intents if (row.low_id >> SHARD_SHIFT, row.high_id >> SHARD_SHIFT) == ends]
            await self._be_late(server)
            for refusal in _refusals(server, {shard: read_epoch}):  # as in the product, behind the rows
                raise refusal
            return sorted(found, key=lambda row: (row.low_id, row.high_id))[:limit]

        return await run_at(self._world, server, look, timeout_seconds)

    async def _is_untouched_elsewhere(self, name: str, shard: int, state: MasterState, timeout_seconds: float) -> bool:
        """Ask the server that the row of a shard names, as the product does."""
        if not state.is_moving_away(name) or not self._is_elsewhere(shard, state.master):
            return False
        there = self._world.databases[state.master]

        async def look() -> bool:
            row = there.rows.shards.get(shard)
            # Before it arrives, the copy has the generation that it was fenced in.
            is_untouched = state.is_untouched([state.generation if row is None else row.generation])
            return is_untouched and not there.read_only and not _lease_ended(there)

        return await run_at(self._world, there, look, timeout_seconds)

    async def _be_late(self, server: SimDatabase) -> None:
        """Hold an answer back after its rows have been read."""
        least, most = server.answers_after
        if most:
            await asyncio.sleep(least + self._world.random.random() * (most - least))


class SimMemberScans:
    """Replaces `tao.storage.scans.MySqlMemberScans`, for pair filters."""

    def __init__(self, world: Databases, local_of: Callable[[int], str], _pools: object, _tables: object) -> None:
        self._world: Final = world
        self._local_of: Final = local_of

    async def read_pairs(self, query: PairsQuery, *, deadline: float) -> PairPage:
        """See the port."""
        server = self._world.databases[self._local_of(query.shard)]

        async def look() -> PairPage:
            rows = server.rows
            versions = {key: row.version for key, row in rows.lists.items()}
            edges = [EdgeKey(key.id1, key.atype, id2) for key, held in rows.edges.items() for id2 in held]
            return page_of_rows(_row(server, query.shard).version_epoch, query, versions, edges)

        left = deadline - asyncio.get_running_loop().time()
        return await run_at(self._world, server, look, left)


def _row(server: SimDatabase, shard: int) -> ShardRow:
    """Return the row of a shard that a reader sees. Raises `TablesMissing`."""
    row = server.rows.shards.get(shard)
    if row is None:
        raise TablesMissing(f"{server.name} has no tables of shard {shard}")
    return row


def _moves(server: SimDatabase, shard: int) -> bool:
    """Return whether the row of a shard names another master than the server."""
    return _row(server, shard).master_server != server.name


def _lease_ended(server: SimDatabase) -> bool:
    return bool(server.lease_seconds) and server.lease_is_over()


def _state(server: SimDatabase, shard: int) -> MasterState:
    """Return what the server says of itself and of a shard."""
    row = _row(server, shard)
    return MasterState(server.read_only, _lease_ended(server), row.master_server, row.version_epoch, row.generation)


def _refusals(server: SimDatabase, read_epochs: dict[int, int]) -> list[TaoError]:
    """Return why the server does not answer critical reads now, if it does not."""
    # The shard that moves, if there is one: it is read alone, unless its move has begun since.
    shard, read_epoch = min(read_epochs.items(), key=lambda each: each[1])
    refusal = master_refusal(server.name, shard, _state(server, shard), read_epoch)
    return [] if refusal is None else [refusal]


def _shard(query: Query) -> int:
    return (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT


class SimWriteStore:
    """Replaces `tao.storage.writes.MySqlWriteStore`."""

    def __init__(self, world: Databases, master_of: Callable[[int], str], _pools: object, _tables: object) -> None:
        self._world: Final = world
        self._master_of: Final = master_of

    def server_of(self, shard: int) -> str:
        return self._master_of(shard)

    def transaction(self, server: str, *, timeout_seconds: float) -> SimTransaction:
        return SimTransaction(self._world, self._world.databases[server], timeout_seconds)

    async def take_ownership(self, shards: Sequence[int], owner: str, *, timeout_seconds: float) -> dict[int, ShardRow]:
        """See the port."""
        server = self._world.databases[self._master_of(shards[0])]

        async def take() -> dict[int, ShardRow]:
            if len(shards) > 1:
                locked = [shard for shard in shards if server.locks.exclude_if_free(shard)]
            else:
                locked = list(shards)
                try:
                    async with asyncio.timeout(LOCK_WAIT_SECONDS):
                        await server.locks.exclude(locked[0])
                except TimeoutError:
                    raise ShardBlocked(f"the lock of shard {shards[0]} was not had", shards[0]) from None
            try:
                check_writable(server)
                found = [_row(server, shard) for shard in locked]
                rows = {row.shard: row.taken_by(owner) for row in found if row.master_server == server.name}
                if len(shards) == 1 and not rows:
                    raise MasterReadOnly(f"shard {shards[0]} moves to another database")
                await asyncio.sleep(server.log(RowChanges(), self._world.schema, rows))
                server.show(RowChanges(), rows)
            finally:
                for shard in locked:
                    server.locks.free_exclusive(shard)
            return rows

        return await run_at(self._world, server, take, timeout_seconds)

    async def read_ownership(self, shards: Sequence[int], *, timeout_seconds: float) -> dict[int, ShardRow]:
        """See the port."""
        found: dict[int, ShardRow] = {}
        by_server: dict[str, list[int]] = {}  # as they are now: a promotion may change masters while this asks
        for shard in shards:
            by_server.setdefault(self._master_of(shard), []).append(shard)
        for name, of_server in by_server.items():
            server = self._world.databases[name]

            async def look(server: SimDatabase = server, of_server: list[int] = of_server) -> dict[int, ShardRow]:
                return {shard: _row(server, shard) for shard in of_server}

            found |= await run_at(self._world, server, look, timeout_seconds)
        return found

    async def write_heartbeat(self, shard: int, writer: str, unix_ms: int, *, timeout_seconds: float) -> bool:
        """See the port."""
        server = self._world.databases[self._master_of(shard)]

        async def write() -> None:
            check_writable(server)
            await asyncio.sleep(server.log(RowChanges(), self._world.schema, heartbeat=(shard, writer, unix_ms)))

        await run_at(self._world, server, write, timeout_seconds)
        return False

    async def old_intents(
        self,
        shards: Sequence[int],
        *,
        before_unix_ms: int,
        limit: int,
        timeout_seconds: float = 5.0,
    ) -> list[IntentRow]:
        """See the port."""
        found: list[IntentRow] = []
        for name in dict.fromkeys(map(self._master_of, shards)):
            server = self._world.databases[name]

            async def look(server: SimDatabase = server) -> list[IntentRow]:
                rows = [row for row in server.rows.intents.values() if row.low_id >> SHARD_SHIFT in shards]
                return [row for row in rows if row.created_unix_ms < before_unix_ms]

            found += await run_at(self._world, server, look, timeout_seconds)
        return sorted(found, key=lambda row: (row.created_unix_ms, row.low_id, row.high_id))[:limit]

    async def read_jobs(self, shards: Sequence[int], query: JobQuery, *, timeout_seconds: float) -> list[JobRow]:
        """See the port."""
        found: list[JobRow] = []
        for name in dict.fromkeys(map(self._master_of, shards)):
            server = self._world.databases[name]

            async def look(server: SimDatabase = server) -> list[JobRow]:
                rows = server.rows
                return select_jobs(rows.jobs.values(), shards, query, lambda key: rows.paused_jobs.get(key, False))

            found += await run_at(self._world, server, look, timeout_seconds)
        return found

    async def count_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[JobCount]:
        """See the port."""
        found: list[JobCount] = []
        for name in dict.fromkeys(map(self._master_of, shards)):
            server = self._world.databases[name]

            async def look(server: SimDatabase = server) -> list[JobCount]:
                return count_jobs(server.rows.jobs.values(), shards)

            found += await run_at(self._world, server, look, timeout_seconds)
        return found

    async def paused_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[PausedKind]:
        """See the port."""
        found: list[PausedKind] = []
        for name in dict.fromkeys(map(self._master_of, shards)):
            server = self._world.databases[name]

            async def look(server: SimDatabase = server) -> list[PausedKind]:
                return [key for key, paused in server.rows.paused_jobs.items() if paused and key.shard in shards]

            found += await run_at(self._world, server, look, timeout_seconds)
        return found


class SimTransaction:
    """A simulated `tao.model.ports.Transaction`."""

    def __init__(self, world: Databases, server: SimDatabase, timeout_seconds: float) -> None:
        self._world: Final = world
        self._server: Final = server
        self._deadline: Final = world.loop.now + timeout_seconds
        self._locked: list[int] = []
        self._changes = RowChanges()
        self._committing = False

    async def __aenter__(self) -> Self:
        process = CURRENT.get()
        assert process is not None, "only simulated processes write"
        self._server.transactions[self] = process
        # The server ends transactions that are idle for too long, as `tao.storage` configures it: the client may be
        # paused.
        context = self._server.process.context.copy()
        self._world.loop.call_at(self._deadline + 1.0, self.roll_back, context=context)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committing:
            self.roll_back()

    def roll_back(self) -> None:
        """Roll back at the server; a commit that has begun goes on."""
        if self._server.transactions.pop(self, None) is not None:
            self._server.locks.free(self._locked)

    async def lock_and_read(self, shards: Sequence[int], keys: WriteKeys) -> tuple[dict[int, ShardRow], ExistingRows]:
        """See the port."""
        server = self._server

        async def lock() -> tuple[dict[int, ShardRow], ExistingRows]:
            for shard in shards:
                try:
                    async with asyncio.timeout(LOCK_WAIT_SECONDS):
                        await server.locks.share(shard)
                except TimeoutError:
                    self.roll_back()
                    raise ShardBlocked(f"the lock of shard {shard} was not had", shard) from None
                if self not in server.transactions:  # its process has died meanwhile
                    server.locks.free((shard,))
                    raise Unavailable("the transaction was rolled back")
                self._locked.append(shard)
            rows = server.rows
            lists = sorted(keys.lists | keys.recounts)
            recounts = sorted(keys.recounts)
            edges = [(key, rows.edge(key)) for key in sorted(keys.rows_of_edges())]
            return {shard: _row(server, shard) for shard in shards}, ExistingRows(
                {key: rows.objects[key] for key in sorted(keys.objects) if key in rows.objects},
                {key: rows.lists[key] for key in lists if key in rows.lists},
                {key: edge for key, edge in edges if edge is not None},
                {key: rows.intents[key] for key in sorted(keys.intents) if key in rows.intents},
                {key: ListRow(len(rows.edges[key]), 0) for key in recounts if rows.edges.get(key)},
                {shard: rows.reserved_times[shard] for shard in keys.reserved_times if shard in rows.reserved_times},
                registers={key: rows.registers[key] for key, _ in edges if key in rows.registers},
                nodes={key: rows.nodes[key] for key in sorted(keys.nodes) if key in rows.nodes},
                jobs={key: rows.jobs[key] for key in sorted(keys.jobs) if key in rows.jobs},
                paused_jobs={key for key in keys.paused_jobs if rows.paused_jobs.get(key)},
            )

        return await self._do(lock)

    async def lock_oldest(self, lists: Mapping[ListKey, int]) -> dict[ListKey, OldestEdges]:
        """See the port."""

        async def read() -> dict[ListKey, OldestEdges]:
            edges = {key: tuple(reversed(self._server.rows.sorted_edges(key))) for key in lists}
            return {key: OldestEdges(edges[key][:limit], len(edges[key]) < limit) for key, limit in lists.items()}

        return await self._do(read)

    async def lock_lists(self, lists: AbstractSet[ListKey]) -> dict[ListKey, ListRow]:
        """See the port."""

        async def read() -> dict[ListKey, ListRow]:
            rows = self._server.rows.lists
            return {key: rows[key] for key in sorted(lists) if key in rows}

        return await self._do(read)

    async def lock_page(self, page: EdgePage) -> StateRows:
        """See the port."""

        async def read() -> StateRows:
            return self._server.rows.page(page)

        return await self._do(read)

    async def apply(self, rows: RowChanges) -> None:
        """See the port."""

        async def apply() -> None:
            check_writable(self._server)
            if self not in self._server.transactions:
                raise Unavailable("the transaction was rolled back")

        self._changes = rows
        await self._do(apply)

    async def commit(self) -> str:
        """See the port."""
        self._committing = True
        try:
            return await self._do(self._commit)
        except MasterReadOnly:
            raise
        except TaoError as error:
            raise OutcomeUnknown(f"in COMMIT: {error.message}") from error
        finally:
            # Unless it has ended: the connection is closed, and the server notices that.
            context = self._server.process.context.copy()
            self._world.loop.call_later(0.01, self.roll_back, context=context)

    async def _commit(self) -> str:
        server, gtid = self._server, ""
        if self not in server.transactions:
            raise Unavailable("the transaction was rolled back")
        if server.read_only:
            self.roll_back()
        check_writable(server)
        fault = server.commit_faults.pop(0) if server.commit_faults else ""
        if fault in ("aborted", "lost before"):
            self.roll_back()
        else:
            # Once it is in the binlog nothing stops it, not even the death of its writer.
            self._world.committing(server.transactions.pop(self), self._changes)
            visible_after = server.log(self._changes, self._world.schema)
            gtid = server.position
            if visible_after:
                await asyncio.sleep(visible_after)
            server.show(self._changes)
            server.locks.free(self._locked)
        if fault == "aborted":
            raise Unavailable("the database has rolled the transaction back")
        if fault:
            await asyncio.sleep(self._deadline - self._world.loop.now)
            raise Unavailable("the connection was lost in COMMIT")
        return gtid

    async def _do(self, work: Callable[[], Awaitable[Result]]) -> Result:
        return await run_at(self._world, self._server, work, max(0.0, self._deadline - self._world.loop.now))


def check_writable(server: SimDatabase) -> None:
    """Raise the error of a write, unless the server takes writes."""
    if server.down:
        raise Unavailable(f"{server.name} closed the connection")
    if server.read_only:
        raise MasterReadOnly(f"{server.name} is read-only")


def roll_back_all_of(server: SimDatabase, process: Process | None) -> None:
    """Roll back the open transactions of a process that is gone (None: of all, because the server was restarted)."""
    for transaction, owner in list(server.transactions.items()):
        if process is None or owner is process:
            assert isinstance(transaction, SimTransaction)
            transaction.roll_back()
