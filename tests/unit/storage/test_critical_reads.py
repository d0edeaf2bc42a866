"""Critical reads of a server that refuses leases, tables or whole statements: what is asked, and who is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tao.model.errors import InternalError, MasterReadOnly, OperatorError, Overloaded, TaoError
from tao.model.ids import SHARD_SHIFT, make_id
from tao.model.queries import FillRead, ObjectQuery
from tao.model.rows import IntentRow
from tao.storage.names import schema_name
from tao.storage.pools import Pools
from tao.storage.reads import MySqlReadStore, ReadSettings
from tests.rigs.pacing import Gate

NOW = 1_700_000_000_000

Take = Callable[[list[Any]], None]


class Server:
    """An open master of all shards, whose objects are absent."""

    def __init__(self) -> None:
        self.refused_tables: list[str] = []
        """Statements that name one of these are refused."""
        self.empty_shards: list[int] = []
        """Shards whose row is missing."""
        self.moving_shards: list[int] = []
        """Shards whose row names the master of another database."""
        self.drops_checks = False
        """It answers the first statement of a message and leaves out the others."""
        self.state: tuple[int, int, int, bytes] = (1, 0, 0, b"db")
        """What the check says: version epoch, whether it is closed, whether its lease has ended, and its rows' master.
        """
        self.gate: Gate | None = None
        """Holds up the next read of intents."""
        self.lease_read: list[bool] = []
        """Whether each message asked for the lease, in order."""
        self.store = MySqlReadStore(lambda _: "db", lambda _: "db", cast(Pools, self), lambda _: "assocs")

    def of(self, _: str) -> Server:
        return self

    @asynccontextmanager
    async def session(self, **_: object) -> AsyncIterator[Server]:
        yield self

    async def stream(
        self, sql: str, values: Sequence[Any], on_rows: Take, *, on_check: Take | None = None, **_: object
    ) -> None:
        rows_sql, check_sql = sql.split("; ")
        self.lease_read.append("tao.lease" in check_sql)
        if any(table in sql for table in self.refused_tables):
            raise OperatorError("refused")
        parts = rows_sql.split(" UNION ALL ")
        numbers = [int(text.partition("SELECT ")[2].partition(",")[0]) for text in parts]
        shards = [int(text.partition("o.id IN (")[2].partition(")")[0]) >> SHARD_SHIFT for text in parts]
        assert list(values) == ["db"] * len(parts), "each part asks whether its shard's row names the server"
        found = zip(numbers, shards, strict=True)
        rows = [(number, shard) for number, shard in found if not self._lacks(shard)]
        on_rows([(number, int(shard not in self.moving_shards), *[None] * 5) for number, shard in rows])
        if on_check is not None and not self.drops_checks:
            shard = int(check_sql.partition("SELECT ")[2].partition(",")[0])
            on_check(self._answer_to_check(shard))

    async def run(self, sql: str, values: Sequence[Any], **_: object) -> list[list[Any]]:
        """Answer a read of the intents of a shard, which has one."""
        check_sql = sql.split("; ")[1]
        self.lease_read.append("tao.lease" in check_sql)
        gate, self.gate = self.gate, None
        if gate is not None:
            await gate.pass_through()
        if any(table in sql for table in self.refused_tables):
            raise OperatorError("refused")
        shard = int(check_sql.partition("SELECT ")[2].partition(",")[0])
        rows = [] if self._lacks(shard) else [(1, make_id(shard, NOW, 0), values[0], b"5,9", 3, 4)]
        return [rows] if self.drops_checks else [rows, self._answer_to_check(shard)]

    def _answer_to_check(self, shard: int) -> list[Any]:
        epoch, read_only, lease_ended, master = self.state
        if shard in self.moving_shards:
            master = b"other-db"
        return [] if self._lacks(shard) else [(shard, epoch, read_only, lease_ended, 0, 0, master)]

    def _lacks(self, shard: int) -> bool:
        return shard in self.empty_shards

    async def read(self, *shards: int) -> dict[int, TaoError | None]:
        """Read an object of each shard critically. Returns the error of each."""
        found: dict[int, TaoError | None] = {}

        def take(places: Sequence[int], read: FillRead | TaoError) -> None:
            for place in places:
                assert shards[place] not in found, "answered once"
                found[shards[place]] = read if isinstance(read, TaoError) else None

        queries = [ObjectQuery(make_id(shard, NOW, 0)) for shard in shards]
        await self.store.read_each(queries, critical=True, timeout_seconds=5, on_read=take)
        return found


async def test_the_lease_is_read_on_after_rows_were_refused() -> None:
    server = Server()
    server.refused_tables = [f"{schema_name(7)}."]
    found = await server.read(1, 7)
    assert found[1] is None
    assert isinstance(found[7], OperatorError)
    server.lease_read.clear()
    assert await server.read(1) == {1: None}
    assert server.lease_read == [True]


@pytest.mark.parametrize("shards", [(1, 7), (7, 1), (7,), (1, 7, 2)])
async def test_a_shard_that_moves_is_refused_alone_wherever_it_stands(shards: tuple[int, ...]) -> None:
    """The check behind the rows looks at one shard of a statement, which may be the one that moves, or another."""
    server = Server()
    server.moving_shards = [7]
    found = await server.read(*shards)
    assert isinstance(found.pop(7), MasterReadOnly)
    assert set(found.values()) <= {None}


async def test_a_lease_that_cannot_be_read_is_left_out_for_a_while() -> None:
    server = Server()
    server.refused_tables = ["tao.lease"]
    assert await server.read(1) == {1: None}
    assert server.lease_read == [True, False]
    assert await server.read(2) == {2: None}
    assert server.lease_read == [True, False, False]


async def test_rows_without_an_answer_to_the_check_are_refused() -> None:
    server = Server()
    server.drops_checks = True
    found = await server.read(1)
    assert isinstance(found[1], InternalError)


@pytest.mark.parametrize("shards", [(1, 7, 2), (7, 1, 2), (1, 2, 7)])
async def test_a_shard_without_its_row_fails_alone(shards: tuple[int, ...]) -> None:
    server = Server()
    server.empty_shards = [7]
    found = await server.read(*shards)
    assert isinstance(found.pop(7), InternalError)
    assert found == {1: None, 2: None}


async def intents(server: Server, shard: int = 1) -> list[IntentRow]:
    return await server.store.read_intents(shard, 2, limit=10, timeout_seconds=5)


async def test_intents_of_a_server_that_confirms_to_be_the_master_are_believed() -> None:
    server = Server()
    assert await intents(server) == [IntentRow(make_id(1, NOW, 0), 2 << SHARD_SHIFT, (5, 9), 3, 4)]
    assert server.lease_read == [True]


@pytest.mark.parametrize("state", [(2, 0, 0, b"db"), (1, 1, 0, b"db"), (1, 0, 1, b"db"), (1, 0, 0, b"other")])
async def test_intents_of_a_server_that_may_have_been_replaced_are_refused(state: tuple[int, int, int, bytes]) -> None:
    server = Server()
    server.state = state
    with pytest.raises(MasterReadOnly):
        await intents(server)


async def test_intents_are_checked_without_a_lease_that_cannot_be_read() -> None:
    server = Server()
    server.refused_tables = ["tao.lease"]
    for asked in ([True, False], [True, False, False]):
        assert await intents(server)
        assert server.lease_read == asked
    server.state = (1, 1, 0, b"db")
    with pytest.raises(MasterReadOnly):
        await intents(server)


async def test_intents_without_an_answer_to_the_check_or_without_the_shards_row_are_refused() -> None:
    server = Server()
    server.empty_shards = [7]
    with pytest.raises(InternalError, match="did not say whether it is the master"):
        await intents(server, 7)
    server.drops_checks = True
    with pytest.raises(InternalError, match="did not say whether it is the master"):
        await intents(server)


async def test_readers_of_the_intents_of_one_shard_leave_the_connections_to_others() -> None:
    server = Server()
    settings = ReadSettings(max_pending_per_shard=1, max_waiting_per_shard=1)
    server.store = MySqlReadStore(lambda _: "db", lambda _: "db", cast(Pools, server), lambda _: "assocs", settings)
    gate = server.gate = Gate()
    reading = [asyncio.ensure_future(intents(server)) for _ in range(2)]
    await gate.arrived.wait()
    with pytest.raises(Overloaded):
        await intents(server)
    assert await intents(server, 2)
    gate.open()
    assert all(await asyncio.gather(*reading))
    assert server.lease_read == [True] * 3
