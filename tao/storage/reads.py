"""`ReadStore` over a region's databases: batches grouped by server, bounded per shard.

A shard that is slow, refused or overloaded must not delay the keys of others. The shards of a batch that have room go
out together in one statement, and each of the others by itself. Answers are reported as they arrive. When the database
refuses a joint statement, each shard is read by itself, so that only the faulty one fails.

Rows are held until the statement for them has ended, so a read takes a bounded number of rows at a time, and all reads
together hold a bounded number of bytes (`_HeldRows`).

A critical read is answered only by a server that proves, after the rows, to be the master (`tao.storage.master_check`).
The same holds for the intents that a settlement reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from tao.model.errors import InternalError, OperatorError, Overloaded, SettingsError, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import CountQuery, EdgesQuery, FillRead, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.model.rows import IntentRow
from tao.storage.dialect import SessionSetup
from tao.storage.failures import ConnectionLost, TablesMissing
from tao.storage.master_check import (
    LEASE_LASTS,
    TAKES_WRITES,
    MasterState,
    generations_there,
    master_check,
    master_refusal,
    master_states,
    missing_answer,
)
from tao.storage.names import EdgeTables, schema_name
from tao.storage.pools import Pool, Pools
from tao.storage.read_plan import COLUMNS, ReadPlan, Statement, shard_of_query
from tao.storage.result_packets import Row
from tao.storage.semaphore import Semaphore
from tao.storage.session import DatabaseSession
from tao.storage.write_statements import intent_row, read_intents

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
READ_SETUP: Final = SessionSetup(writes=False)

_LEASE_RETRY_SECONDS: Final = 10.0
"""How long a server whose lease cannot be read is taken for one that keeps none. A lease that is installed there counts
from then on; each attempt costs one read a second round trip."""


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Bounds of reads."""

    max_pending_per_shard: int = 4
    """Statements in progress that touch one shard. More would not return sooner, and a hot shard would take all
    connections from the others."""
    max_waiting_per_shard: int = 256
    """Batches that may wait for one shard. More are rejected as overloaded."""
    max_rows_at_once: int = 8_192
    """Rows that one read may bring before it answers what it has: those of one statement."""
    max_held_bytes: int = 256 << 20
    """Bytes of rows that all reads under way may hold, see `FillSettings.max_held_bytes`."""
    slow_seconds: float = 0.1
    """A shard with a statement in progress for this long is read by itself: its table may be locked, and a statement
    for many shards would wait for it. A read takes milliseconds, from a cold disk some tens."""

    def __post_init__(self) -> None:
        if self.max_pending_per_shard < 1 or self.max_waiting_per_shard < 0:
            raise SettingsError(f"a shard needs at least one pending statement: {self}")
        if self.max_rows_at_once < 1 or self.max_held_bytes < 1:
            raise SettingsError(f"a read needs room for rows: {self}")


class _ShardGate:
    """Bounds the statements of one shard. Keeps when each one in progress began, oldest first, and how many callers
    wait."""

    __slots__ = ("_semaphore", "under_way", "waiting")

    def __init__(self, at_once: int) -> None:
        self._semaphore = Semaphore(at_once)
        self.under_way: list[float] = []
        self.waiting = 0

    def enter(self, now: float, slow_seconds: float) -> bool:
        """Enter unless the shard is full or a statement in progress is slow. Returns whether it entered."""
        under_way = self.under_way
        if (under_way and now - under_way[0] > slow_seconds) or not self._semaphore.try_acquire():
            return False
        under_way.append(now)
        return True

    async def wait_to_enter(self) -> float:
        """Wait for room. Returns the time of entry, to be passed to `leave`."""
        await self._semaphore.acquire()
        now = asyncio.get_running_loop().time()
        self.under_way.append(now)
        return now

    def leave(self, entered: float) -> None:
        self.under_way.remove(entered)
        self._semaphore.release()


_ROW_BYTES: Final = 200
"""Bytes of a row in memory, beside its data: a tuple with five numbers."""


class _HeldRows:
    """The rows that one read holds until it has answered, counted in a sum over all reads."""

    __slots__ = ("_store", "size_bytes")

    def __init__(self, store: MySqlReadStore) -> None:
        self._store = store
        self.size_bytes = 0

    def add(self, rows: list[Row]) -> None:
        """Count rows that have arrived. Raises `Overloaded` when all reads hold more than they may."""
        size_bytes = sum([_ROW_BYTES + len(row[-1] or b"") for row in rows])
        self.size_bytes += size_bytes
        self._store.held_bytes += size_bytes
        most = self._store.max_held_bytes
        if self._store.held_bytes > most:
            raise Overloaded(
                f"the reads under way hold {self._store.held_bytes} bytes of rows, and may hold {most}: try again "
                "later, or ask for less at a time"
            )

    @property
    def is_most(self) -> bool:
        """Return whether these rows are at least half of what all reads may hold."""
        return self.size_bytes >= self._store.max_held_bytes // 2

    def release(self) -> None:
        """Forget the rows."""
        self._store.held_bytes -= self.size_bytes
        self.size_bytes = 0


class MySqlReadStore(ReadStore):
    """See `tao.model.ports.ReadStore`."""

    def __init__(
        self,
        local_of: Callable[[int], str],
        master_of: Callable[[int], str],
        pools: Pools,
        edge_tables: EdgeTables,
        settings: ReadSettings | None = None,
        *,
        keeps_lease: Callable[[int], bool] = lambda _: True,
        is_elsewhere: Callable[[int, str], bool] = lambda *_: False,
    ) -> None:
        """``local_of``, ``master_of``: shard → name of the region's server, of the master server. ``pools`` are those
        of the reader's (or leader's) account, set up with `READ_SETUP`. ``keeps_lease``: shard → whether the lease of
        its master counts, if there is one. ``is_elsewhere``: shard and server → whether the server belongs to another
        database than the shard's, which a move may take it to."""
        self._local_of = local_of
        self._master_of = master_of
        self._pools = pools
        self.edge_tables: Final = edge_tables
        self._settings = settings or ReadSettings()
        self.max_held_bytes: Final = self._settings.max_held_bytes
        self.held_bytes = 0
        """Bytes of rows that the reads under way hold."""
        self._keeps_lease = keeps_lease
        self._is_elsewhere = is_elsewhere
        self._lease_unreadable_until: dict[str, float] = {}
        self._gates: dict[int, _ShardGate] = {}  # at most one per shard

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        """See the port. Raises `Overloaded` when no room or connection came free in time, `DeadlineExceeded` without an
        answer."""
        now = asyncio.get_running_loop().time()
        by_shard: dict[int, list[int]] = {}
        for place, query in enumerate(queries):
            by_shard.setdefault(shard_of_query(query), []).append(place)
        job = _ReadJob(queries, by_shard, critical, now + timeout_seconds, on_read)
        together: dict[str, list[int]] = {}  # server → shards that have room
        # Also released at the end: a task that is cancelled before its first step never reaches its own ``finally``.
        entered: dict[int, float] = {}
        alone: list[tuple[str, int]] = []
        for shard in by_shard:
            try:
                server = self._master_of(shard) if critical else self._local_of(shard)
            except TaoError as error:
                job.report((shard,), error)
                continue
            if self._gate(shard).enter(now, self._settings.slow_seconds):
                entered[shard] = now
                together.setdefault(server, []).append(shard)
            else:
                alone.append((server, shard))

        async def fetch_together(server: str, shards: Sequence[int]) -> None:
            try:
                await self._fetch(job, server, shards)
            finally:
                self.leave(entered, shards)

        try:
            if len(together) == 1 and not alone:
                # Most reads have one group. Each coroutine that is left out saves them a microsecond.
                (group,) = together.items()
                await self._fetch(job, *group)
            else:
                fetches: list[Coroutine[None, None, None]] = [fetch_together(*group) for group in together.items()]
                fetches.extend(self._fetch_when_admitted(job, server, shard) for server, shard in alone)
                await _run_all(fetches)
        finally:
            self.leave(entered, tuple(entered))

    def read_at_once(
        self, queries: Sequence[Query], *, timeout_seconds: float, on_read: OnRead, on_end: Callable[[], None]
    ) -> bool:
        """See the port: for queries of one server whose rows one statement may bring, when each shard has room and a
        connection is idle."""
        now = asyncio.get_running_loop().time()
        if len(queries) > 1:
            rows = [1 if isinstance(query, ObjectQuery | CountQuery) else _rows_of(query) for query in queries]
            if sum(rows) > self._settings.max_rows_at_once:
                return False
        reading = _ReadAtOnce(self, queries, now + timeout_seconds, on_read, on_end)
        has_begun = False
        try:
            for query in queries:
                shard = (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT
                if shard in reading.entered:
                    continue
                local = self._local_of(shard)
                if local != (reading.server or local) or not self._gate(shard).enter(now, self._settings.slow_seconds):
                    break
                reading.server = local
                reading.entered[shard] = now
            else:
                has_begun = reading.begin(self._pools.of(reading.server))
        except TaoError:  # `read_each` reports it where it belongs
            pass
        finally:
            if not has_begun:
                self.leave(reading.entered, tuple(reading.entered))
        return has_begun

    async def read_intents(self, shard: int, far_shard: int, *, limit: int, timeout_seconds: float) -> list[IntentRow]:
        """See `tao.model.ports.IntentReads`. Raises what `read_each` answers critical reads with."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        server = self._master_of(shard)
        intents = read_intents(shard, far_shard, limit)

        async def read(session: DatabaseSession, with_lease: bool) -> list[list[Row]]:
            sql = "; ".join([*intents.parts, master_check(shard, with_lease=with_lease)])
            return await session.run(sql, intents.values, deadline=deadline)

        entered = {shard: await self._wait(shard, deadline)}
        try:
            rows, *checks = await self._ask(server, read, deadline, checked_shard=shard)
        finally:
            self.leave(entered, (shard,))
        state = master_states(checks[0]).get(shard) if checks else None
        if state is None or not rows:
            raise missing_answer(server)
        refusal = master_refusal(server, shard, state, rows[0][0])
        if refusal is not None:
            raise refusal
        return [intent_row(row[1:]) for row in rows if row[1] is not None]  # without intents, one row of NULLs

    def _gate(self, shard: int) -> _ShardGate:
        gate = self._gates.get(shard)
        if gate is None:
            gate = self._gates[shard] = _ShardGate(self._settings.max_pending_per_shard)
        return gate

    def leave(self, entered: dict[int, float], shards: Iterable[int]) -> None:
        """Give the room of shards back, once for each that was entered."""
        for shard in shards:
            since = entered.pop(shard, None)
            if since is not None:
                self._gates[shard].leave(since)

    async def _fetch_when_admitted(self, job: _ReadJob, server: str, shard: int) -> None:
        try:
            entered = {shard: await self._wait(shard, job.deadline)}
        except TaoError as error:
            job.report((shard,), error)
            return
        try:
            await self._fetch(job, server, (shard,))
        finally:
            self.leave(entered, (shard,))

    async def _fetch(self, job: _ReadJob, server: str, shards: Sequence[int]) -> None:
        """Read these shards' queries with few statements, and report the answers, some rows at a time."""
        for places in job.runs_of(shards, self._settings.max_rows_at_once):
            await self._fetch_at_once(job, server, places)

    async def _fetch_at_once(self, job: _ReadJob, server: str, places: Sequence[int]) -> None:
        held = _HeldRows(self)
        try:
            plan = await self._run(server, [job.queries[place] for place in places], job, held)
        except OperatorError as error:
            apart = job.by_shard_of(places)  # one of the shards was refused
            if len(apart) == 1:
                job.on_read(places, error)
                return
        except Overloaded as error:
            if len(places) == 1 or not held.is_most:
                job.on_read(places, error)
                return
            apart = [[place] for place in places]  # together they are too many bytes, whatever other reads hold
        except TaoError as error:
            job.on_read(places, error)
            return
        else:
            # The row of a shard is missing, or it names another master: that says nothing about the others.
            apart = job.by_shard_of(places) if plan.is_unconfirmed or plan.names_other_master else []
            if len(apart) < 2:
                untouched = await self._untouched_elsewhere(server, plan, job.deadline) if job.critical else ()
                job.report_answers(server, places, plan, untouched)
                return
        finally:
            held.release()
        for some in apart:
            await self._fetch_at_once(job, server, some)

    async def _untouched_elsewhere(self, server: str, plan: ReadPlan, deadline: float) -> list[int]:
        """Return the shards that are on their way to another database, and that nobody has written there when this
        looks, after their rows were read here."""
        found: list[int] = []
        for shard, state in plan.master_states.items():
            if not state.is_moving_away(server) or not self._is_elsewhere(shard, state.master):
                continue
            with suppress(TaoError):  # the read is refused then
                if await self._is_untouched_at(state.master, shard, state, deadline):
                    found.append(shard)
        return found

    async def _is_untouched_at(self, server: str, shard: int, state: MasterState, deadline: float) -> bool:
        """Return whether the server, the master of another database, confirms that nobody has written the shard there.
        Raises `TaoError`."""

        async def read(session: DatabaseSession, _: bool) -> bool:
            generations: list[int] = []
            for statement in generations_there(shard):
                with suppress(TablesMissing):
                    (rows,) = await session.run(statement, deadline=deadline)
                    generations += (int(generation) for (generation,) in rows)
            confirmed = [*await session.run(TAKES_WRITES, deadline=deadline)]
            with suppress(TablesMissing):  # it has never kept a lease
                confirmed += await session.run(LEASE_LASTS, deadline=deadline)
            return state.is_untouched(generations) and all(holds for ((holds,),) in confirmed)

        return await self._ask(server, read, deadline, checked_shard=None)

    def _run(self, server: str, queries: Sequence[Query], job: _ReadJob, held: _HeldRows) -> Awaitable[ReadPlan]:
        async def read(session: DatabaseSession, with_lease: bool) -> ReadPlan:
            plan = ReadPlan(queries, self.edge_tables, master=server if job.critical else "")
            held.release()
            receive = _counted(plan, held)
            while plan.statements:
                for one in plan.statements:
                    sql, on_check = one.sql, None
                    if job.critical:
                        sql, on_check = plan.checked_sql(one, with_lease=with_lease), plan.receive_check
                    await session.stream(
                        sql, one.values, receive, deadline=job.deadline, columns=COLUMNS, on_check=on_check
                    )
                plan.go_on()
            return plan

        checked_shard = shard_of_query(queries[0]) if job.critical else None
        return self._ask(server, read, job.deadline, checked_shard=checked_shard)

    async def _ask(
        self,
        server: str,
        ask: Callable[[DatabaseSession, bool], Awaitable[_Result]],
        deadline: float,
        *,
        checked_shard: int | None,
    ) -> _Result:
        """Return what ``ask(session, with_lease)`` reads; the second argument says whether to look at the lease. It is
        called again when a pooled connection turns out to be dead, and without the lease when that cannot be read.
        ``checked_shard``: a shard of the server, whose master is checked, or None for reads without a check."""
        pool = self._pools.of(server)
        fresh = refused = False
        with_lease = checked_shard is not None and self._may_read_lease(server, checked_shard)
        while True:
            try:
                async with pool.session(deadline=deadline, fresh=fresh) as session:
                    result = await ask(session, with_lease)
            except ConnectionLost:
                if fresh:
                    raise
                # A pooled connection died while idle. Reading everything again on a new one is harmless.
                fresh = True
            except OperatorError:
                if not with_lease:
                    raise
                # No lease was ever installed at the server, or the account is from before it may read leases. If it is
                # the rows that are refused, they are refused again.
                with_lease, refused = False, True
            else:
                if refused:
                    self._lease_unreadable_until[server] = asyncio.get_running_loop().time() + _LEASE_RETRY_SECONDS
                return result

    def _may_read_lease(self, server: str, shard: int) -> bool:
        now = asyncio.get_running_loop().time()
        return self._keeps_lease(shard) and now >= self._lease_unreadable_until.get(server, now)

    async def _wait(self, shard: int, deadline: float) -> float:
        gate = self._gate(shard)
        if gate.waiting >= self._settings.max_waiting_per_shard:
            raise Overloaded(f"{gate.waiting} batches wait for shard {shard}")
        gate.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await gate.wait_to_enter()
        except TimeoutError as error:
            raise Overloaded(f"shard {shard} had no turn in time") from error
        finally:
            gate.waiting -= 1


class _ReadJob(NamedTuple):
    """The queries of one read, and the callback that receives each shard's answers."""

    queries: Sequence[Query]
    by_shard: Mapping[int, Sequence[int]]
    critical: bool
    deadline: float
    on_read: OnRead

    def places(self, shards: Iterable[int]) -> list[int]:
        return [place for shard in shards for place in self.by_shard[shard]]

    def report(self, shards: Iterable[int], error: TaoError) -> None:
        self.on_read(self.places(shards), error)

    def by_shard_of(self, places: Sequence[int]) -> list[list[int]]:
        """Return the places of each shard."""
        by_shard: dict[int, list[int]] = {}
        for place in places:
            by_shard.setdefault(shard_of_query(self.queries[place]), []).append(place)
        return list(by_shard.values())

    def runs_of(self, shards: Iterable[int], max_rows: int) -> list[list[int]]:
        """Return the places of these shards in runs, each of which brings at most that many rows, or has one query."""
        if len(self.queries) == 1:
            return [[0]]
        runs: list[list[int]] = []
        left = 0
        for place in self.places(shards):
            rows = _rows_of(self.queries[place])
            if rows > left or not runs:
                runs.append([])
                left = max_rows
            runs[-1].append(place)
            left -= rows
        return runs

    def report_answers(self, server: str, places: Sequence[int], plan: ReadPlan, untouched: Sequence[int] = ()) -> None:
        """Report what the plan has read. ``untouched``: shards that move and have not been written anywhere since."""
        epochs, values = plan.version_epochs, list(plan.answers())
        for shard, state in plan.master_states.items():
            if shard in untouched:
                epochs[shard] = state.version_epoch
                continue
            refusal = master_refusal(server, shard, state, epochs.get(shard, 0))
            if refusal is not None:
                self.on_read(places, refusal)
                return
        if plan.is_unconfirmed:
            self.on_read(places, missing_answer(server))
            return
        lacking = {shard for place in places if (shard := shard_of_query(self.queries[place])) not in epochs}
        if not lacking:
            self.on_read(places, FillRead(values, epochs))
            return
        answered = [at for at, place in enumerate(places) if shard_of_query(self.queries[place]) not in lacking]
        self.on_read([places[at] for at in answered], FillRead([values[at] for at in answered], epochs))
        for refused in self.by_shard_of(places):
            if (shard := shard_of_query(self.queries[refused[0]])) in lacking:
                name = schema_name(shard)
                self.on_read(refused, InternalError(f"table {name}.shard is empty: run the shard's migrations"))


class _ReadAtOnce:
    """A read of one server that has its session and waits for nothing else: by callbacks, which cost half of what a
    task does with its coroutines. Most reads of a server that is not busy serve one miss, and are read so."""

    __slots__ = (
        "_deadline",
        "_held",
        "_on_end",
        "_on_read",
        "_plan",
        "_pool",
        "_queries",
        "_session",
        "_statements",
        "_store",
        "entered",
        "server",
    )

    def __init__(
        self,
        store: MySqlReadStore,
        queries: Sequence[Query],
        deadline: float,
        on_read: OnRead,
        on_end: Callable[[], None],
    ) -> None:
        """``on_end`` is called once after `begin` has returned True, when all else is done."""
        self._store: Final = store
        self._queries: Final = queries
        self._deadline: Final = deadline
        self._on_read: Final = on_read
        self._on_end: Final = on_end
        self._held: Final = _HeldRows(store)
        self._plan: ReadPlan
        self._pool: Pool
        self._session: DatabaseSession
        self._statements: Iterator[Statement]
        self.server = ""
        self.entered: Final[dict[int, float]] = {}
        """The shards that have given room, and when."""

    def begin(self, pool: Pool) -> bool:
        """Begin to read. Returns False, with nothing begun, when there is no idle connection, or the queries have no
        statements: those of an unknown type, or a bug, which `read_each` reports. Raises `TaoError`."""
        session = pool.lend_at_once()
        if session is None:
            return False
        try:
            self._plan = ReadPlan(self._queries, self._store.edge_tables)
        except Exception:  # noqa: BLE001 - see above
            pool.take_back(session, None)
            return False
        self._pool, self._session = pool, session
        self._statements = iter(self._plan.statements)
        self._go_on(None)
        return True

    def _go_on(self, error: TaoError | None) -> None:
        """Send the next statement, or end after the last one."""
        if error is None:
            try:
                statement = self._next_statement()
                if statement is not None:
                    self._session.begin_stream(
                        statement.sql,
                        statement.values,
                        self._receive,
                        self._go_on,
                        deadline=self._deadline,
                        columns=COLUMNS,
                    )
                    return
            except TaoError as failure:  # the schema may have changed between two statements
                error = failure
            except Exception as bug:
                _logger.exception("a statement of a read could not be made")
                error = InternalError(f"a statement could not be made: {bug}")
        self._end(error)

    def _receive(self, rows: list[Row]) -> None:
        self._held.add(rows)
        self._plan.receive(rows)

    def _next_statement(self) -> Statement | None:
        statement = next(self._statements, None)
        if statement is None:
            self._plan.go_on()
            self._statements = iter(self._plan.statements)
            statement = next(self._statements, None)
        return statement

    def _end(self, error: TaoError | None) -> None:
        places = range(len(self._queries))
        try:
            if error is None:
                epochs = self._plan.version_epochs
                if len(epochs) == len(self.entered):
                    self._on_read(places, FillRead(list(self._plan.answers()), epochs))
                else:
                    self._job().report_answers(self.server, places, self._plan)
            elif not self._may_mend(error):
                self._on_read(places, error)
        except Exception:
            _logger.exception("the answers of a read could not be delivered")
        finally:
            self._held.release()
            self._pool.take_back(self._session, error)
            self._store.leave(self.entered, tuple(self.entered))
            self._on_end()

    def _job(self) -> _ReadJob:
        by_shard: dict[int, list[int]] = {}
        for place, query in enumerate(self._queries):
            by_shard.setdefault(shard_of_query(query), []).append(place)
        return _ReadJob(self._queries, by_shard, False, self._deadline, self._on_read)

    def _may_mend(self, error: TaoError) -> bool:
        """Return whether the queries of a read that has failed may be answered on another connection, or one by one."""
        if isinstance(error, OperatorError):
            return len(self.entered) > 1
        if isinstance(error, Overloaded):
            return len(self._queries) > 1 and self._held.is_most
        return isinstance(error, ConnectionLost)


def _counted(plan: ReadPlan, held: _HeldRows) -> Callable[[list[Row]], None]:
    """Return the function that takes the rows of a plan, and counts them first."""

    def receive(rows: list[Row]) -> None:
        held.add(rows)
        plan.receive(rows)

    return receive


def _rows_of(query: Query) -> int:
    """Return the most rows that a query brings, or about so many."""
    if isinstance(query, RangeQuery | TimeRangeQuery):
        return query.limit + 1
    return len(query.id2s) + 1 if isinstance(query, EdgesQuery) else 1


async def _run_all(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Run the jobs concurrently. An exception, which is a caller's error or a bug and not a database's answer, ends
    them all."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
