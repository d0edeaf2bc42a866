"""What reads of databases hold in memory: counted exactly, bounded in bytes, and given up statement by statement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tao.model.errors import Overloaded, TaoError
from tao.model.ids import make_id
from tao.model.queries import FillRead, ObjectQuery, Query, RangeQuery
from tao.storage.pools import Pools
from tao.storage.reads import MySqlReadStore, ReadSettings
from tests.rigs.pacing import Gate, quiet

NOW = 1_700_000_000_000
KIB = 1024


class Server:
    """Answers statements about objects and lists. ``gate`` holds the next statement up after half of its rows."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytes(size_bytes)
        self.statements = 0
        self.gate: Gate | None = None
        self.store = MySqlReadStore(
            lambda _: "db", lambda _: "db", cast(Pools, self), lambda _: "assocs", ReadSettings(max_held_bytes=64 * KIB)
        )

    def of(self, _: str) -> Server:
        return self

    @asynccontextmanager
    async def session(self, **_: object) -> AsyncIterator[Server]:
        yield self

    async def stream(self, sql: str, values: Sequence[Any], on_rows: Callable[[list[Any]], None], **_: object) -> None:
        self.statements += 1
        gate, self.gate = self.gate, None
        parts: list[list[Any]] = []
        for part, text in enumerate(sql.split(" UNION ALL ")):
            number = int(text.partition("SELECT ")[2].partition(",")[0])
            assert number >= part
            if "objects" in text:
                ids = text.partition("o.id IN (")[2].partition(")")[0].split(",")
                parts.append([(number, 1, int(each), 1, 1, 1, self.data) for each in ids])
            else:
                parts.append([(number, 1, 5, 7, 1, 1, self.data)])
        rows = [row for part in parts for row in part]
        on_rows(rows[: len(rows) // 2])
        if gate is not None:
            await gate.pass_through()
        on_rows(rows[len(rows) // 2 :])

    async def read(self, queries: Sequence[Query]) -> list[int | TaoError]:
        """Return the bytes of each answer, or its error."""
        found: list[int | TaoError | None] = [None] * len(queries)

        def take(places: Sequence[int], read: FillRead | TaoError) -> None:
            for at, place in enumerate(places):
                assert found[place] is None, "answered once"
                found[place] = read if isinstance(read, TaoError) else len(read.values[at])

        await self.store.read_each(queries, critical=False, timeout_seconds=5, on_read=take)
        return cast(list[int | TaoError], found)


def objects(count: int, first: int = 0) -> list[Query]:
    return [ObjectQuery(make_id(0, NOW, first + number)) for number in range(count)]


async def test_rows_are_counted_until_their_read_has_answered() -> None:
    server, gate = Server(10 * KIB), Gate()
    server.gate = gate
    reading = asyncio.ensure_future(server.read(objects(4)))
    await gate.arrived.wait()
    assert 20 * KIB < server.store.held_bytes < 21 * KIB
    gate.open()
    assert [size for size in await reading if isinstance(size, int) and size > 10 * KIB] == await reading
    assert server.store.held_bytes == 0


async def test_a_read_beyond_the_bound_is_refused_as_overload_and_the_one_that_holds_the_rows_goes_on() -> None:
    server, gate = Server(15 * KIB), Gate()
    server.gate = gate
    holding = asyncio.ensure_future(server.read(objects(8)))
    await gate.arrived.wait()
    held = server.store.held_bytes
    assert 60 * KIB < held < 64 * KIB
    (refused,) = await server.read(objects(1, first=8))
    assert isinstance(refused, Overloaded)
    assert server.store.held_bytes == held, "what was refused is given up"
    gate.open()
    assert not [each for each in await holding if isinstance(each, TaoError)]
    assert server.store.held_bytes == 0


async def test_what_is_too_much_together_is_read_one_by_one() -> None:
    server = Server(30 * KIB)
    found = await server.read(objects(4))
    assert not [each for each in found if isinstance(each, TaoError)]
    assert server.statements == 1 + 4
    assert server.store.held_bytes == 0


async def test_a_single_answer_beyond_the_bound_is_refused() -> None:
    server = Server(65 * KIB)
    (refused,) = await server.read(objects(1))
    assert isinstance(refused, Overloaded)
    assert server.store.held_bytes == 0


@pytest.mark.parametrize("cancelled", [1, 2])
async def test_cancelled_reads_hold_nothing(cancelled: int) -> None:
    server, gates, readings = Server(10 * KIB), [Gate(), Gate()], []
    for gate in gates:
        server.gate = gate
        readings.append(asyncio.ensure_future(server.read(objects(2))))
        await gate.arrived.wait()
    both = server.store.held_bytes
    for reading in readings[:cancelled]:
        reading.cancel()
    await asyncio.gather(*readings[:cancelled], return_exceptions=True)
    assert server.store.held_bytes == both * (2 - cancelled) // 2
    for gate in gates:
        gate.open()
    await asyncio.gather(*readings, return_exceptions=True)
    assert server.store.held_bytes == 0


async def test_long_lists_are_answered_and_given_up_statement_by_statement() -> None:
    server, gate = Server(KIB), Gate()
    queries = [RangeQuery(make_id(0, NOW, number), 5, 0, 1_000) for number in range(20)]
    answered: list[int] = []
    server.gate = gate
    reading = asyncio.ensure_future(
        server.store.read_each(
            queries, critical=False, timeout_seconds=5, on_read=lambda places, _: answered.extend(places)
        )
    )
    await gate.arrived.wait()
    assert answered == []
    second = Gate()
    server.gate = second
    gate.open()
    await second.arrived.wait()
    await quiet()
    assert answered == list(range(8)), "those of the first statement"
    second.open()
    await reading
    assert answered == list(range(20))
    assert server.store.held_bytes == 0
