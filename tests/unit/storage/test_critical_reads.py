"""Critical reads of a server that refuses leases, tables or whole statements: what is asked, and who is answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tao.model.errors import InternalError, OperatorError, TaoError
from tao.model.ids import SHARD_SHIFT, make_id
from tao.model.queries import FillRead, ObjectQuery
from tao.storage.names import schema_name
from tao.storage.pools import Pools
from tao.storage.reads import MySqlReadStore

NOW = 1_700_000_000_000

Take = Callable[[list[Any]], None]


class Server:
    """An open master of all shards, whose objects are absent."""

    def __init__(self) -> None:
        self.refused_tables: list[str] = []
        """Statements that name one of these are refused."""
        self.empty_shards: list[int] = []
        """Shards whose row is missing."""
        self.drops_checks = False
        """It answers the first statement of a message and leaves out the others."""
        self.lease_read: list[bool] = []
        """For each message, whether it asked for the lease."""
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
        numbers = [int(text.partition("SELECT ")[2].partition(",")[0]) for text in rows_sql.split(" UNION ALL ")]
        shards = [ids[0] >> SHARD_SHIFT for ids in values]
        found = zip(numbers, shards, strict=True)
        on_rows([(number, 1, None, None, None, None, None) for number, shard in found if not self._lacks(shard)])
        if on_check is not None and not self.drops_checks:
            shard = int(check_sql.partition("SELECT ")[2].partition(",")[0])
            on_check([] if self._lacks(shard) else [(shard, 1, 0, 0, 0, 0, b"db")])

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
