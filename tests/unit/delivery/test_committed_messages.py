"""Messages of own commits: kept for the tailer under the name of their transaction, within bounds."""

from __future__ import annotations

import asyncio

import pytest

from tao.delivery.committed_messages import CommittedMessages
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ObjectChange, ShardMessages
from tests.rigs.leader_rig import make_id

SOURCE = "db@1:0-1"
NOW = 1_000.0


def batch(shard: int, number: int, size: int = 0) -> ShardMessages:
    return ShardMessages(shard, 1, (ObjectChange(make_id(1, shard), number - 1, number, 1, bytes(size)),))


def test_messages_are_found_by_source_number_and_shard_until_they_are_released() -> None:
    committed = CommittedMessages(DeliverySettings())
    committed.keep(SOURCE, 7, [batch(0, 7), batch(1, 7)], NOW)
    assert committed.find(SOURCE, 7, 1) == batch(1, 7)
    for source, number, shard in (("db@2:0-1", 7, 1), (SOURCE, 8, 1), (SOURCE, 7, 2)):
        assert committed.find(source, number, shard) is None
    committed.release(SOURCE, 7, 1)
    committed.release(SOURCE, 7, 1)
    assert committed.find(SOURCE, 7, 1) is None
    assert committed.find(SOURCE, 7, 0) == batch(0, 7)
    committed.release(SOURCE, 7, 0)
    assert committed.bytes == 0
    assert committed.has_of("db")
    assert not committed.has_of("db2")


def test_the_oldest_messages_make_room() -> None:
    committed = CommittedMessages(DeliverySettings(committed_bytes=64_000))
    for number in range(1, 101):
        committed.keep(SOURCE, number, [batch(0, number, 1_000)], NOW)
        assert committed.bytes <= 64_000
    kept = [number for number in range(1, 101) if committed.find(SOURCE, number, 0)]
    assert kept == list(range(101 - len(kept), 101))
    assert len(kept) > 40


def test_a_commit_that_would_take_much_of_the_room_is_not_kept() -> None:
    committed = CommittedMessages(DeliverySettings(committed_bytes=64_000))
    committed.keep(SOURCE, 1, [batch(0, 1, 5_000), batch(1, 1)], NOW)
    assert committed.find(SOURCE, 1, 0) is None
    assert committed.find(SOURCE, 1, 1) == batch(1, 1)


def test_old_messages_make_room_for_later_ones() -> None:
    committed = CommittedMessages(DeliverySettings(committed_seconds=30.0))
    committed.keep(SOURCE, 1, [batch(0, 1)], NOW)
    committed.keep(SOURCE, 2, [batch(0, 2)], NOW + 20)
    committed.keep(SOURCE, 3, [batch(0, 3)], NOW + 31)
    assert [committed.find(SOURCE, number, 0) is not None for number in (1, 2, 3)] == [False, True, True]


def test_messages_that_are_kept_twice_are_counted_once() -> None:
    committed = CommittedMessages(DeliverySettings())
    for number in (7, 8):
        committed.keep(SOURCE, 7, [batch(0, number)], NOW)
    assert committed.find(SOURCE, 7, 0) == batch(0, 8)
    committed.release(SOURCE, 7, 0)
    assert committed.bytes == 0


async def test_commits_under_way_are_awaited_but_not_those_that_begin_later() -> None:
    committed = CommittedMessages(DeliverySettings())
    release = asyncio.Event()

    async def commit() -> None:
        with committed.committing("db"):
            await release.wait()

    first = asyncio.create_task(commit())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(committed.commits_end("db"))
    await asyncio.sleep(0)
    with committed.committing("db"):
        assert len(committed.commits("db")) == 2
        assert not waiting.done()
        release.set()
        await waiting
    await first
    assert not committed.commits("db")


async def test_a_commit_that_hangs_is_awaited_once_and_not_for_ever() -> None:
    committed = CommittedMessages(DeliverySettings(commit_seconds=0.0))
    with committed.committing("db"):
        await committed.commits_end("db")
        assert not committed.commits("db")
        with committed.committing("db"):
            assert len(committed.commits("db")) == 1
    assert not committed.commits("db")


async def test_commits_to_another_database_are_not_awaited() -> None:
    committed = CommittedMessages(DeliverySettings())
    with committed.committing("db"):
        assert not committed.commits("db2")
        await committed.commits_end("db2")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_commit_has_ended_even_when_it_failed(fails: bool) -> None:
    committed = CommittedMessages(DeliverySettings())
    try:
        with committed.committing("db"):
            if fails:
                raise RuntimeError
    except RuntimeError:
        pass
    assert not committed.commits("db")
