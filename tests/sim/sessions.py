"""Sessions at simulated database servers, as administrators and movers of shards have them.

A statement is a function of the server. It travels to it, is carried out there, and its answer travels back. A session
ends with the server's process, and when it has been idle for longer than the server allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from tao.model.errors import OperatorError
from tao.storage.dialect import Dialect
from tao.storage.failures import ConnectionLost, TablesMissing
from tao.storage.names import shard_of_incoming_schema
from tests.sim.database import SimDatabase
from tests.sim.rows import CopiedRows, Rows
from tests.sim.stores import check_writable, run_at
from tests.sim.world import World

_STATEMENT_SECONDS: Final = 1.0
PACKED_ROW_BYTES: Final = 16 << 10
"""Size that a row has on its way into a copy: so large that a shard of the simulation takes many statements."""
Result = TypeVar("Result")


class PackedRow(bytes):
    """A row as its server packs it, which nobody parses on the way."""

    key: tuple[object, ...]
    row: object

    @classmethod
    def of(cls, key: tuple[object, ...], row: object) -> PackedRow:
        """Return a row under its primary key."""
        packed = cls(PACKED_ROW_BYTES)
        packed.key, packed.row = key, row
        return packed


class SimSession:
    """Replaces `tao.storage.session.DatabaseSession`."""

    dialect: Final = Dialect.MARIADB

    def __init__(self, world: World, server: SimDatabase, idle_seconds: float = 0.0) -> None:
        """``idle_seconds``: how long it may be idle; 0: for ever."""
        self._world: Final = world
        self.server: Final = server
        self._idle_seconds: Final = idle_seconds
        self._restarts: Final = server.restarts
        self._used_at = world.loop.now
        self.snapshot: dict[int, CopiedRows] = {}
        """What the session sees of each shard."""
        self.reading: list[PackedRow] = []
        """The rows that were selected and not taken yet."""

    async def run(self, statement: Callable[[SimDatabase], Result], deadline: float | None = None) -> Result:
        """Run a function of the server there, and return its result. Raises `TaoError`."""

        async def work() -> Result:
            return statement(self.server)

        return await self.do(work, deadline)

    async def do(self, work: Callable[[], Awaitable[Result]], deadline: float | None = None) -> Result:
        """Do something at the server, and return its result. Raises `TaoError`."""
        now = self._world.loop.now

        async def work_there() -> Result:
            there = self._world.loop.now
            if self.server.restarts != self._restarts or 0 < self._idle_seconds < there - self._used_at:
                raise ConnectionLost(f"{self.server.name}: the connection broke")
            self._used_at = there
            return await work()

        limit = _STATEMENT_SECONDS if deadline is None else max(0.0, deadline - now)
        return await run_at(self._world, self.server, work_there, limit)

    def quit(self) -> None:
        """Do nothing: no session is kept."""

    def abort(self) -> None:
        """Do nothing: what is under way at the server goes on."""

    async def take_packed(self, limit: int, *, deadline: float) -> tuple[list[PackedRow], bool]:
        """See `DatabaseSession.take_packed`."""

        def take(_: SimDatabase) -> tuple[list[PackedRow], bool]:
            taken = self.reading[:limit]
            del self.reading[:limit]
            return taken, not self.reading

        return await self.run(take, deadline)

    async def prepare_insert(self, table: str, columns: Sequence[str], rows: int, *, deadline: float) -> Any:
        """See `DatabaseSession.prepare_insert`: the table is all that there is to prepare."""
        await asyncio.sleep(0.0)
        return table

    async def insert_packed(self, insert: str, rows: Sequence[PackedRow], *, deadline: float) -> None:
        """See `DatabaseSession.insert_packed`."""
        schema, _, table = insert.partition(".")
        shard = shard_of_incoming_schema(schema)
        assert shard is not None, "rows are inserted into copies only"
        lost = self._world.rows_to_lose
        some = {row.key: row.row for row in rows[1 if shard in lost else 0 :]}
        lost.discard(shard)

        def write(rows: Rows) -> None:
            rows.incoming[shard].tables.setdefault(table, {}).update(some)

        async def work() -> None:
            check_writable(self.server)  # the account is the leaders'
            copy = self.server.truth.incoming.get(shard)
            if copy is None or copy.is_renamed:
                raise TablesMissing(f"{self.server.name} has no {insert}")
            if copy.tables.get(table, {}).keys() & some.keys():
                raise OperatorError(f"{insert} has some of the rows already")
            await self.server.execute(write)

        await self.do(work, deadline)
