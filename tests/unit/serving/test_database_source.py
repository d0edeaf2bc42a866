"""A leader's misses: each has its answer when its shard has, whatever becomes of those asked with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tao.model.errors import Overloaded, StaleRead, TaoError
from tao.model.graph import encode_object
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import Fetched, FillRead, ObjectQuery, Query
from tao.serving.database_source import DatabaseSource, MissSettings
from tests.rigs.leader_rig import USER, make_id
from tests.rigs.pacing import Tasks, quiet
from tests.rigs.versions import make_version


class StoreByHand(ReadStore):
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: Sequence[Query] = ()
        self.on_read: OnRead = lambda places, read: None
        self.over = asyncio.Event()

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        self.asked, self.on_read = queries, on_read
        await self.over.wait()

    def tell(self, place: int, error: TaoError | None = None) -> None:
        value = encode_object(1, USER, b"")
        self.on_read([place], error or FillRead([value], {place: 1}))


async def test_a_slow_or_failed_shard_holds_up_and_fails_no_other_that_was_asked_with_it() -> None:
    store, tasks = StoreByHand(), Tasks()
    source = DatabaseSource(store, lambda _: "db", tasks, MissSettings())

    async def fetch(shard: int) -> Fetched:
        return await source.fetch(ObjectQuery(make_id(64, shard)), 0, critical=False, timeout_seconds=5)

    slow, refused, quick = (asyncio.ensure_future(fetch(shard)) for shard in range(3))
    await quiet()
    assert len(store.asked) == 3
    store.tell(2)
    store.tell(1, Overloaded("too much is asked of shard 1"))
    assert (await quick).version_epoch == 1
    with pytest.raises(Overloaded):
        await refused
    assert not slow.done()
    store.tell(0)
    store.over.set()
    await slow
    await tasks.close()


class StoreAtEpoch(ReadStore):
    """One object at version 1 of the first version epoch, read under ``epoch``."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        on_read(range(len(queries)), FillRead([encode_object(make_version(1, 1), USER, b"")], {0: self.epoch}))


async def test_what_is_left_of_an_older_epoch_meets_its_minimums_once_a_later_one_is_read() -> None:
    tasks = Tasks()
    for epoch in (1, 2):
        source = DatabaseSource(
            StoreAtEpoch(epoch), lambda _: "db", tasks, MissSettings(max_rereads=2, first_pause_seconds=0)
        )
        reading = source.fetch(ObjectQuery(make_id(64)), make_version(1, 2), critical=True, timeout_seconds=5)
        if epoch == 1:
            with pytest.raises(StaleRead):
                await reading
        else:
            assert (await reading).version_epoch == 2
    await tasks.close()
