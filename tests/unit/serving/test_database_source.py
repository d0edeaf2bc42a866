"""A leader's misses: each has its answer when its shard has, whatever becomes of those asked with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tao.model.errors import InternalError, InvalidArgument, Overloaded, StaleRead, TaoError
from tao.model.graph import encode_object
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import Fetched, FillRead, ObjectQuery, Query
from tao.serving.database_source import DatabaseSource, MissSettings
from tao.serving.fill_source import fetched
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
        return await fetched(source, ObjectQuery(make_id(64, shard)), 0, critical=False, timeout_seconds=5)

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


class StoreInTurn(ReadStore):
    """Each read ends when the test says so."""

    def __init__(self) -> None:
        self.reads: list[tuple[Sequence[Query], asyncio.Event]] = []

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        self.reads.append((queries, asyncio.Event()))
        await self.reads[-1][1].wait()
        on_read(range(len(queries)), FillRead([encode_object(1, USER, b"")] * len(queries), {0: 1, 1: 1}))

    @property
    def sizes(self) -> list[int]:
        return [len(queries) for queries, _ in self.reads]

    def end_all(self) -> None:
        for _, over in self.reads:
            over.set()


class Asking:
    """Reads of the shards 0 and 1, each of which has a database of its own, one a turn of the loop."""

    def __init__(self, *, gather_seconds: float = 60.0, max_gathered: int = 32) -> None:
        self.store, self.tasks = StoreInTurn(), Tasks()
        settings = MissSettings(max_batch_queries=8, gather_seconds=gather_seconds, max_gathered=max_gathered)
        self.source = DatabaseSource(self.store, str, self.tasks, settings)
        self.asked: list[asyncio.Future[Fetched]] = []

    async def ask(self, count: int = 1, *, shard: int = 0, at_once: bool = False, critical: bool = False) -> None:
        for _ in range(count):
            query = ObjectQuery(make_id(64 + len(self.asked), shard))
            fetching = fetched(self.source, query, 0, critical=critical, timeout_seconds=120)
            self.asked.append(asyncio.ensure_future(fetching))
            if not at_once:
                await quiet()
        await quiet()

    async def end(self) -> None:
        while not all(each.done() for each in self.asked):
            self.store.end_all()
            await quiet()
        await self.tasks.close()


async def test_misses_gather_while_a_read_is_under_way_and_go_together_when_it_has_ended() -> None:
    asking = Asking()
    await asking.ask(4)
    assert asking.store.sizes == [1]
    asking.store.end_all()
    await quiet()
    assert asking.store.sizes == [1, 3]
    await asking.ask(2)
    await asking.end()
    assert asking.store.sizes == [1, 3, 2]
    await asking.ask()
    assert asking.store.sizes[3:] == [1], "where nothing is under way nothing is waited for"
    await asking.end()


async def test_no_other_database_and_no_other_kind_of_read_is_waited_for() -> None:
    asking = Asking()
    await asking.ask(shard=0)
    await asking.ask(shard=1)
    await asking.ask(shard=0, critical=True)
    assert asking.store.sizes == [1, 1, 1]
    await asking.end()


async def test_a_read_that_takes_long_is_not_waited_for() -> None:
    asking = Asking(gather_seconds=0.01)
    await asking.ask(3)
    async with asyncio.timeout(60):
        while len(asking.store.reads) < 2:  # noqa: ASYNC110 - the store's state is the condition
            await asyncio.sleep(0.001)
    assert sum(asking.store.sizes) == 3
    await asking.end()


@pytest.mark.parametrize("at_once", [False, True])
async def test_many_that_have_gathered_go_beside_the_read_that_is_under_way(at_once: bool) -> None:
    asking = Asking(max_gathered=3)
    await asking.ask()
    await asking.ask(3, at_once=at_once)
    assert asking.store.sizes == [1, 3]
    await asking.ask()
    assert asking.store.sizes == [1, 3], "what is waited for is the read begun last"
    await asking.end()


async def test_no_read_has_more_queries_than_allowed_whatever_has_gathered() -> None:
    asking = Asking()
    await asking.ask(3)
    await asking.ask(17, at_once=True)
    await asking.end()
    assert sum(asking.store.sizes) == 20
    assert max(asking.store.sizes) <= 8


async def test_what_cannot_be_begun_fails_and_the_next_is_read() -> None:
    asking = Asking()
    asking.tasks.refuses = True
    with pytest.raises(Overloaded):
        await fetched(asking.source, ObjectQuery(make_id(64)), 0, critical=False, timeout_seconds=5)
    asking.tasks.refuses = False
    await asking.ask()
    assert asking.store.sizes == [1]
    await asking.end()


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
        reading = fetched(source, ObjectQuery(make_id(64)), make_version(1, 2), critical=True, timeout_seconds=5)
        if epoch == 1:
            with pytest.raises(StaleRead):
                await reading
        else:
            assert (await reading).version_epoch == 2
    await tasks.close()


async def test_a_read_that_lacks_an_epoch_fails_and_leaves_nobody_waiting() -> None:
    store, tasks = StoreByHand(), Tasks()
    source = DatabaseSource(store, lambda _: "db", tasks, MissSettings())
    reading = asyncio.ensure_future(fetched(source, ObjectQuery(make_id(64)), 0, critical=False, timeout_seconds=5))
    await quiet()
    with pytest.raises(KeyError):
        store.on_read([0], FillRead([encode_object(1, USER, b"")], {}))
    store.over.set()
    with pytest.raises(InternalError):
        await reading
    await tasks.close()


async def test_who_reads_again_of_a_shard_that_the_topology_has_lost_meanwhile_hears_of_it() -> None:
    found, tasks = ["db"], Tasks()

    def database_of(shard: int) -> str:
        if not found:
            raise InvalidArgument(f"no database holds shard {shard}")
        return found.pop()

    source = DatabaseSource(StoreAtEpoch(1), database_of, tasks, MissSettings(first_pause_seconds=0))
    with pytest.raises(InvalidArgument, match="shard 0"):
        await fetched(source, ObjectQuery(make_id(64)), make_version(1, 2), critical=False, timeout_seconds=5)
    await tasks.close()
