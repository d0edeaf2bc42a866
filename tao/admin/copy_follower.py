"""Keeps the copy of a shard up to date from the binlog of its source, and compares the two while both change.

The comparison is done range by range with checksums, then row by row where they differ. The source may be ahead of the
copy, so a row that differs is either one that has changed since the comparison began, which the follower notes and
which is compared again later, or one that was copied wrongly. What is left to compare behind the fence, when nothing
changes any more, is little.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Final

from tao.model.errors import DeadlineExceeded, TaoError
from tao.replication.gtid import GtidPosition
from tao.replication.move_statements import (
    Advance,
    CopiedTable,
    KeyRange,
    PrimaryKey,
    apply_rows,
    binlog_position,
    checksums_in_range,
    checksums_of,
    copied_tables,
    net_rows,
    next_range,
    range_checksum,
)
from tao.replication.shard_move import MoveSettings
from tao.replication.shard_move_plan import CopyBehind, CopySpoiled, MoveAborted
from tao.storage.names import incoming_schema_name, schema_name
from tao.storage.session import DatabaseSession
from tao.tailer.binlog import BinlogSource, BinlogTransaction

Sessions = Callable[[], AbstractAsyncContextManager[DatabaseSession]]
"""Opens an administrator's session at the master of one database."""
ChangedRows = dict[str, set[PrimaryKey]]
"""By table, the primary keys of rows that have changed."""

_KEYS_PER_CHECK: Final = 2_000
_IDLE_SECONDS: Final = 1.0
"""Sessions that were idle for so long are opened anew, because servers close them after some seconds."""


class CopyFollower:
    """Applies what is written to a shard at its source to the copy at the target."""

    def __init__(
        self,
        binlog: BinlogSource,
        shard: int,
        tables: Mapping[str, CopiedTable],
        target: Sessions,
        position: str,
        settings: MoveSettings,
    ) -> None:
        """``position``: what the copy has already. ``tables``: those of the copy."""
        self._binlog: Final = binlog
        self._shard: Final = shard
        self._tables: Final = tables
        self._target: Final = target
        self._settings: Final = settings
        self._stored = position
        self._reached: GtidPosition | None = None
        self._advanced: Final = asyncio.Condition()
        self._waiters = 0
        self._is_awaited: Final = asyncio.Event()
        self._failure: TaoError | None = None
        self._changed: ChangedRows = {}
        self.rows = 0
        """Rows applied, by their last state in each batch."""

    @asynccontextmanager
    async def following(self) -> AsyncIterator[CopyFollower]:
        """Follow until the context ends."""
        await self._binlog.current_position()  # also finds out which notation the server uses
        self._reached = self._binlog.position(self._stored)
        task = asyncio.create_task(self._follow(), name="copy follower")
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def until(self, position: str, timeout_seconds: float) -> None:
        """Wait until the copy has everything of the source up to a position. Raises `DeadlineExceeded`, or the error
        that ended the follower."""
        self._waiters += 1
        self._is_awaited.set()
        try:
            async with asyncio.timeout(timeout_seconds), self._advanced:
                await self._advanced.wait_for(lambda: self._failure is not None or self._has(position))
        except TimeoutError:
            raise DeadlineExceeded(
                f"the copy of shard {self._shard} has not reached {position} in {timeout_seconds:g} s"
            ) from None
        finally:
            self._waiters -= 1
            if not self._waiters:
                self._is_awaited.clear()
        if self._failure is not None:
            raise self._failure

    @property
    def changed_rows(self) -> int:
        """How many rows have changed since `take_changed`."""
        return sum(map(len, self._changed.values()))

    def changed(self, table: str) -> set[PrimaryKey]:
        """Return the rows of a table that have changed since `take_changed`."""
        return self._changed.setdefault(table, set())

    def take_changed(self) -> ChangedRows:
        """Return the rows that have changed since the last call, and forget them."""
        taken, self._changed = self._changed, {}
        return taken

    def _has(self, position: str) -> bool:
        return self._reached is not None and self._reached.has(position)

    async def _follow(self) -> None:
        try:
            async with aclosing(self._binlog.batches(self._stored)) as batches:
                async for batch in batches:
                    await self._apply(batch)
                    async with self._advanced:
                        self._advanced.notify_all()
                    if self._settings.is_paced:
                        await self._gather()
        except TaoError as error:
            await self._fail(error)
        except Exception as error:  # noqa: BLE001 - waiters for the copy would otherwise wait for ever
            await self._fail(MoveAborted(f"the changes of shard {self._shard} cannot be followed: {error!r}"))
        else:
            await self._fail(MoveAborted(f"the binlog that shard {self._shard} is followed in has ended"))

    async def _gather(self) -> None:
        """Let changes gather, so that they cost one commit at the target, unless somebody waits for them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.paced_gather_seconds):
                await self._is_awaited.wait()

    async def _fail(self, error: TaoError) -> None:
        async with self._advanced:
            self._failure = error
            self._advanced.notify_all()

    async def _apply(self, batch: Sequence[BinlogTransaction]) -> None:
        reached = self._reached
        assert reached is not None, "set before the task begins"
        if any(each.all_invalid or self._shard in each.invalid_shards for each in batch):
            raise CopySpoiled(
                f"shard {self._shard} was changed by a statement or a transaction that the binlog does not describe "
                "row by row"
            )
        net = net_rows((event for each in batch for event in each.events), self._shard, self._tables)
        position = self._binlog.position(str(reached))
        for each in batch:
            if each.gtid:
                position.advance(each.gtid)
        if net:
            deadline = asyncio.get_running_loop().time() + self._settings.compare_seconds
            async with self._target() as session:
                advance = Advance(self._stored, str(position))
                await apply_rows(session, self._shard, net, self._tables, advance, deadline=deadline)
            self._stored = advance.after
            for table, rows in net.items():
                self._changed.setdefault(table, set()).update(rows)
                self.rows += len(rows)
            if self.changed_rows > self._settings.max_changed_rows:
                raise CopyBehind(
                    f"more than {self._settings.max_changed_rows} rows of shard {self._shard} have changed while its "
                    "copy was compared: move it when less is written"
                )
        self._reached = position


def rows_of_next_range(rows: int, seconds: float, settings: MoveSettings) -> int:
    """Return how many rows to compare with the next statement, by how long it took with so many."""
    limit = settings.paced_range_seconds if settings.is_paced else settings.range_seconds
    if seconds > limit:
        return max(settings.least_rows_per_range, rows // 2)
    if seconds > limit / 4:
        return rows
    return max(settings.least_rows_per_range, min(settings.rows_per_range, 2 * rows))


class CopyComparison:
    """Compares a copy with its source."""

    def __init__(
        self,
        source: Sessions,
        target: Sessions,
        shard: int,
        tables: Mapping[str, CopiedTable],
        follower: CopyFollower,
        settings: MoveSettings,
    ) -> None:
        self._source: Final = source
        self._target: Final = target
        self._shard: Final = shard
        self._all_tables: Final = dict(tables)
        self._tables: Final = {name: each for name, each in tables.items() if each.is_compared}
        self._follower: Final = follower
        self._settings: Final = settings
        self._rows = max(settings.least_rows_per_range, settings.rows_per_range // 8)
        self._range_seconds = 0.0  # that the servers worked for the last range
        self.compared_rows = 0

    async def compare_all(self) -> None:
        """Compare all rows. Those that change meanwhile are left to `compare_changed`. Raises `CopySpoiled` when the
        copy is wrong."""
        self._follower.take_changed()
        for table in self._tables.values():
            low: int | None = 0
            while low is not None:
                async with self._source() as here, self._target() as there:
                    low = await self._compare_ranges(here, there, table, low)

    async def compare_changed(self) -> int:
        """Compare the rows that have changed since they were compared. Returns how many have changed since."""
        for name, keys in self._follower.take_changed().items():
            if name in self._tables:
                for some in _parts(keys):
                    await self._settle(self._tables[name], await self._differing(self._tables[name], some))
        return self._follower.changed_rows

    async def compare_fenced(self) -> None:
        """Compare the rest, and the columns of the tables, when nothing changes any more. Raises `CopySpoiled`."""
        async with self._source() as session:
            tables = await copied_tables(session, schema_name(self._shard), deadline=self._deadline())
        if tables != self._all_tables:
            raise CopySpoiled("the tables of the shard were changed since they were copied")
        for name, keys in self._follower.take_changed().items():
            if name in self._tables:
                for some in _parts(keys):
                    if differing := await self._differing(self._tables[name], some):
                        raise self._wrong(name, differing)

    async def _compare_ranges(
        self, here: DatabaseSession, there: DatabaseSession, table: CopiedTable, low: int
    ) -> int | None:
        """Compare ranges from a key on. Returns the key to go on with when the sessions have been idle for long, and
        None after the last range."""
        loop, settings = asyncio.get_running_loop(), self._settings
        while True:
            keys, differing = await self._compare_range(here, there, table, low)
            idle_since = loop.time()
            await self._settle(table, differing)
            if keys.is_last:
                return None
            low = keys.high + 1
            if settings.is_paced:
                await asyncio.sleep(self._range_seconds * (1 / settings.paced_share - 1))
            if loop.time() - idle_since > _IDLE_SECONDS:
                return low

    async def _compare_range(
        self, here: DatabaseSession, there: DatabaseSession, table: CopiedTable, low: int
    ) -> tuple[KeyRange, set[PrimaryKey]]:
        """Compare the next range. Returns it, and its rows that differ."""
        source, target = schema_name(self._shard), incoming_schema_name(self._shard)
        began = asyncio.get_running_loop().time()
        keys = await next_range(here, source, table, low, self._rows, deadline=self._deadline())
        at_source = partial(range_checksum, here, source, table, keys)
        at_target = partial(range_checksum, there, target, table, keys)
        if self._settings.is_paced:
            ours, theirs = await at_source(deadline=self._deadline()), await at_target(deadline=self._deadline())
        else:
            ours, theirs = await asyncio.gather(
                at_source(deadline=self._deadline()), at_target(deadline=self._deadline())
            )
        self._range_seconds = asyncio.get_running_loop().time() - began
        self._rows = rows_of_next_range(self._rows, self._range_seconds, self._settings)
        self.compared_rows += ours[0]
        if ours == theirs:
            return keys, set()
        mine, copied = await asyncio.gather(
            checksums_in_range(here, source, table, keys, deadline=self._deadline()),
            checksums_in_range(there, target, table, keys, deadline=self._deadline()),
        )
        return keys, _unequal(mine, copied)

    async def _differing(self, table: CopiedTable, keys: Sequence[PrimaryKey]) -> set[PrimaryKey]:
        source, target = schema_name(self._shard), incoming_schema_name(self._shard)
        async with self._source() as here, self._target() as there:
            mine, copied = await asyncio.gather(
                checksums_of(here, source, table, keys, deadline=self._deadline()),
                checksums_of(there, target, table, keys, deadline=self._deadline()),
            )
        self.compared_rows += len(keys)
        return _unequal(mine, copied)

    async def _settle(self, table: CopiedTable, differing: set[PrimaryKey]) -> None:
        """Raise `CopySpoiled` unless all of these rows, which were found different, have changed since.

        Everything that the source had when they were read has been applied, and so noted, when this compares."""
        if not differing:
            return
        async with self._source() as session:
            position = await binlog_position(session, deadline=self._deadline())
        await self._follower.until(position, self._settings.compare_seconds)
        if wrong := differing - self._follower.changed(table.name):
            raise self._wrong(table.name, wrong)

    def _wrong(self, table: str, keys: set[PrimaryKey]) -> CopySpoiled:
        shown = ", ".join(map(str, sorted(keys, key=str)[:3]))
        return CopySpoiled(f"the copy of {schema_name(self._shard)}.{table} is wrong in {len(keys)} rows ({shown})")

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.compare_seconds


def _unequal(one: Mapping[PrimaryKey, int], other: Mapping[PrimaryKey, int]) -> set[PrimaryKey]:
    return {key for key in {**one, **other} if one.get(key) != other.get(key)}


def _parts(keys: Iterable[PrimaryKey]) -> list[list[PrimaryKey]]:
    ordered = list(keys)
    return [ordered[at : at + _KEYS_PER_CHECK] for at in range(0, len(ordered), _KEYS_PER_CHECK)]
