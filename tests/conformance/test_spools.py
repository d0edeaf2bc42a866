"""Every spool, SQLite's and the models', keeps what it was given, in order, and reports when it could not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tao.delivery.settings import SpoolSettings
from tao.delivery.spool import SqliteSpool
from tao.model.changes import ListChange, ObjectChange, ObjectInvalidation, ShardMessages
from tao.model.delivery import SpoolMark, SpoolRow
from tao.model.graph import Edge
from tao.model.ports import Spool
from tao.observability.logs import logger
from tests.rigs.memory_spool import MemorySpool, SpoolDisk

PAST = 1 << 62
Reopen = Callable[[], Awaitable[Spool]]


@pytest.fixture(params=["sqlite", "memory"])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Reopen]:
    """Opens the spool, the second time after a crash."""
    disk = SpoolDisk()
    async with contextlib.AsyncExitStack() as stack:

        async def again() -> Spool:
            if request.param == "memory":
                return MemorySpool(disk, asyncio.get_running_loop().call_soon)
            spool = SqliteSpool(tmp_path, SpoolSettings(), logger("test"))
            await spool.open()
            stack.push_async_callback(spool.close)
            return spool

        yield again


def row(shard: int, number: int, source: str = "h") -> SpoolRow:
    return SpoolRow(source, number, ShardMessages(shard, 1, (ObjectInvalidation(shard << 47 | 1, number),)))


def mark(shard: int, after: int, head: int, *, linked: bool = True, source: str = "h") -> SpoolMark:
    return SpoolMark(shard, source, after, head, linked)


async def append(spool: Spool, rows: list[SpoolRow], marks: list[SpoolMark]) -> None:
    stored = asyncio.Event()
    spool.append(rows, marks, stored.set)
    await stored.wait()
    if isinstance(spool, MemorySpool):
        spool.sync()


async def read(spool: Spool, shard: int, after: int, max_bytes: int = 1 << 20) -> list[SpoolRow]:
    answer: asyncio.Future[list[SpoolRow]] = asyncio.get_running_loop().create_future()
    spool.read(shard, "h", (after, PAST), max_bytes, lambda rows: answer.set_result(list(rows or ())))
    return await answer


async def test_rows_are_read_by_shard_after_a_position_in_their_order(reopen: Reopen) -> None:
    spool = await reopen()
    await append(spool, [row(1, 5), row(2, 6), row(1, 7), row(1, 7), row(1, 9, "other")], [mark(1, 4, 7)])
    assert [each.number for each in await read(spool, 1, 4)] == [5, 7, 7]
    assert [each.number for each in await read(spool, 1, 5)] == [7, 7]
    assert await read(spool, 1, 7) == []
    assert [each.messages for each in await read(spool, 2, 0)] == [row(2, 6).messages]


async def test_an_interrupted_read_continues_after_its_last_row(reopen: Reopen) -> None:
    spool = await reopen()
    await append(spool, [row(1, 7) for _ in range(3)], [mark(1, 6, 7)])
    first = await read(spool, 1, 6, 1)
    assert len(first) == 1
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    place = (first[-1].number, first[-1].place)
    spool.read(1, "h", place, 1 << 20, lambda rows: answer.set_result(len(rows or ())))
    assert await answer == 2


async def test_every_kind_of_message_comes_back_as_it_was(reopen: Reopen) -> None:
    spool = await reopen()
    change = ObjectChange(1 << 47 | 1, 1, 2, 3, b"\x00data")
    edges = ListChange(1 << 47 | 1, 4, 1, 2, 9, put=(Edge(2, 3, b"x"), Edge(1 << 62, 0)))
    messages = ShardMessages(1, 7, (change, edges))
    await append(spool, [SpoolRow("h", 1, messages)], [mark(1, 0, 1)])
    assert [each.messages for each in await read(spool, 1, 0)] == [messages]


async def test_after_a_crash_all_that_was_stored_is_there_and_marks_are_not_linked(reopen: Reopen) -> None:
    spool = await reopen()
    await append(spool, [row(1, 5)], [mark(1, 4, 5), mark(2, 3, 3, linked=False)])
    spool.prove("h", 9)
    await append(spool, [], [])
    again = await reopen()
    assert list(again.marks()) == [mark(1, 4, 9, linked=False), mark(2, 3, 3, linked=False)]
    assert [each.number for each in await read(again, 1, 4)] == [5]


async def test_a_proof_after_a_crash_says_nothing_of_a_shard_until_it_is_marked_again(reopen: Reopen) -> None:
    spool = await reopen()
    await append(spool, [row(1, 5)], [mark(1, 4, 5)])
    second = await reopen()
    second.prove("h", 99)
    await append(second, [], [])
    assert list((await reopen()).marks()) == [mark(1, 4, 5, linked=False)]
