"""Fetches from databases: the server of a shard, and an answer for each query independently of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest

from tao.model.errors import InternalError, InvalidArgument, Overloaded, StaleRead, TaoError, TopologyError
from tao.model.graph import encode_object
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import Fetched, FillRead, ObjectQuery, Query
from tao.model.topology import Database, DatabaseAddress, DatabaseServer
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tao.serving.sources import DatabaseReadSettings, Databases, DatabaseSource, fetch_and_wait
from tao.storage.session import ServerAccount
from tests.rigs.leader_rig import SCHEMA, SHARDS, USER, make_id, make_topology
from tests.rigs.pacing import PATIENT_SECONDS, Tasks, quiet
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

    def answer(self, place: int, error: TaoError | None = None) -> None:
        value = encode_object(1, USER, b"")
        self.on_read([place], error or FillRead([value], {place: 1}))


async def test_a_slow_or_failed_shard_neither_delays_nor_fails_others_of_the_same_read() -> None:
    store, tasks = StoreByHand(), Tasks()
    source = DatabaseSource(store, lambda _: "db", tasks, DatabaseReadSettings())

    async def fetch(shard: int) -> Fetched:
        return await fetch_and_wait(source, ObjectQuery(make_id(64, shard)), 0, critical=False, timeout_seconds=5)

    slow, refused, quick = (asyncio.ensure_future(fetch(shard)) for shard in range(3))
    await quiet()
    assert len(store.asked) == 3
    store.answer(2)
    store.answer(1, Overloaded("too much is asked of shard 1"))
    assert (await quick).version_epoch == 1
    with pytest.raises(Overloaded):
        await refused
    assert not slow.done()
    store.answer(0)
    store.over.set()
    await slow
    await tasks.close()


class StoreAtOnce(StoreByHand):
    """Begins each read at once, and answers it when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.on_end: Callable[[], None] = lambda: None
        self.again: list[Sequence[Query]] = []

    def read_at_once(
        self, queries: Sequence[Query], *, timeout_seconds: float, on_read: OnRead, on_end: Callable[[], None]
    ) -> bool:
        self.asked, self.on_read, self.on_end = queries, on_read, on_end
        return True

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        self.again.append(queries)
        await super().read_each(queries, critical=critical, timeout_seconds=timeout_seconds, on_read=on_read)


async def test_a_read_that_waits_for_nothing_needs_no_task_and_what_it_leaves_unanswered_is_read_again() -> None:
    store, tasks = StoreAtOnce(), Tasks()
    source = DatabaseSource(store, lambda _: "db", tasks, DatabaseReadSettings(gather_seconds=60))

    async def fetch(shard: int) -> Fetched:
        return await fetch_and_wait(source, ObjectQuery(make_id(64, shard)), 0, critical=False, timeout_seconds=5)

    answered, unanswered = asyncio.ensure_future(fetch(0)), asyncio.ensure_future(fetch(1))
    await quiet()
    store.answer(0)
    assert (await answered).version_epoch == 1
    gathered = asyncio.ensure_future(fetch(2))
    await quiet()
    assert not store.again
    store.on_end()
    await quiet()
    assert store.again == [[ObjectQuery(make_id(64, 1))]]
    store.on_read([0], FillRead([encode_object(1, USER, b"")], {1: 1}))
    assert (await unanswered).version_epoch == 1
    store.over.set()
    await quiet()
    assert store.asked == [ObjectQuery(make_id(64, 2))], "the next read begins when all of this one ended"
    store.on_read([0], FillRead([encode_object(1, USER, b"")], {2: 1}))
    store.on_end()
    await gathered
    await tasks.close()


async def test_a_fault_of_a_read_at_once_leaves_the_queries_to_a_task(caplog: pytest.LogCaptureFixture) -> None:
    class FaultyStore(StoreAtOnce):
        def read_at_once(self, *_: object, **__: object) -> bool:
            raise LookupError("a bug in the store")

    store, tasks = FaultyStore(), Tasks()
    source = DatabaseSource(store, lambda _: "db", tasks, DatabaseReadSettings())
    query = ObjectQuery(make_id(64, 0))
    fetching = asyncio.ensure_future(fetch_and_wait(source, query, 0, critical=False, timeout_seconds=5))
    await quiet()
    assert store.again == [[query]]
    assert "could not be begun" in caplog.text
    store.answer(0)
    assert (await fetching).version_epoch == 1
    store.over.set()
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
        settings = DatabaseReadSettings(max_batch_queries=8, gather_seconds=gather_seconds, max_gathered=max_gathered)
        self.source = DatabaseSource(self.store, str, self.tasks, settings)
        self.asked: list[asyncio.Future[Fetched]] = []

    async def ask(self, count: int = 1, *, shard: int = 0, at_once: bool = False, critical: bool = False) -> None:
        for _ in range(count):
            query = ObjectQuery(make_id(64 + len(self.asked), shard))
            fetching = fetch_and_wait(self.source, query, 0, critical=critical, timeout_seconds=120)
            self.asked.append(asyncio.ensure_future(fetching))
            if not at_once:
                await quiet()
        await quiet()

    async def end(self) -> None:
        while not all(each.done() for each in self.asked):
            self.store.end_all()
            await quiet()
        await self.tasks.close()


async def test_misses_are_collected_while_a_read_is_under_way_and_sent_together_after_it() -> None:
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


async def test_a_read_waits_neither_for_another_database_nor_for_another_kind_of_read() -> None:
    asking = Asking()
    await asking.ask(shard=0)
    await asking.ask(shard=1)
    await asking.ask(shard=0, critical=True)
    assert asking.store.sizes == [1, 1, 1]
    await asking.end()


async def test_misses_do_not_wait_for_a_read_that_takes_long() -> None:
    asking = Asking(gather_seconds=0.01)
    await asking.ask(3)
    async with asyncio.timeout(PATIENT_SECONDS):
        while sum(asking.store.sizes) < 3:  # noqa: ASYNC110 - the store's state is the condition
            await asyncio.sleep(0.001)
    assert len(asking.store.sizes) > 1
    await asking.end()


@pytest.mark.parametrize("at_once", [False, True])
async def test_many_collected_misses_are_read_beside_the_read_under_way(at_once: bool) -> None:
    asking = Asking(max_gathered=3)
    await asking.ask()
    await asking.ask(3, at_once=at_once)
    assert asking.store.sizes == [1, 3]
    await asking.ask()
    assert asking.store.sizes == [1, 3], "what is waited for is the read begun last"
    await asking.end()


async def test_no_read_has_more_queries_than_allowed_however_many_are_collected() -> None:
    asking = Asking()
    await asking.ask(3)
    await asking.ask(17, at_once=True)
    await asking.end()
    assert sum(asking.store.sizes) == 20
    assert max(asking.store.sizes) <= 8


async def test_a_read_that_cannot_be_started_fails_and_the_next_one_succeeds() -> None:
    asking = Asking()
    asking.tasks.refuses = True
    with pytest.raises(Overloaded):
        await fetch_and_wait(asking.source, ObjectQuery(make_id(64)), 0, critical=False, timeout_seconds=5)
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


async def test_a_row_read_under_a_later_epoch_meets_minimums_of_an_older_one() -> None:
    tasks = Tasks()
    for epoch in (1, 2):
        source = DatabaseSource(
            StoreAtEpoch(epoch), lambda _: "db", tasks, DatabaseReadSettings(max_rereads=2, first_pause_seconds=0)
        )
        reading = fetch_and_wait(source, ObjectQuery(make_id(64)), make_version(1, 2), critical=True, timeout_seconds=5)
        if epoch == 1:
            with pytest.raises(StaleRead):
                await reading
        else:
            assert (await reading).version_epoch == 2
    await tasks.close()


async def test_a_read_without_an_epoch_fails_all_of_its_queries() -> None:
    store, tasks = StoreByHand(), Tasks()
    source = DatabaseSource(store, lambda _: "db", tasks, DatabaseReadSettings())
    reading = asyncio.ensure_future(
        fetch_and_wait(source, ObjectQuery(make_id(64)), 0, critical=False, timeout_seconds=5)
    )
    await quiet()
    with pytest.raises(KeyError):
        store.on_read([0], FillRead([encode_object(1, USER, b"")], {}))
    store.over.set()
    with pytest.raises(InternalError):
        await reading
    await tasks.close()


async def test_a_reread_of_a_shard_that_left_the_topology_fails() -> None:
    found, tasks = ["db"], Tasks()

    def database_of(shard: int) -> str:
        if not found:
            raise InvalidArgument(f"no database holds shard {shard}")
        return found.pop()

    source = DatabaseSource(StoreAtEpoch(1), database_of, tasks, DatabaseReadSettings(first_pause_seconds=0))
    with pytest.raises(InvalidArgument, match="shard 0"):
        await fetch_and_wait(source, ObjectQuery(make_id(64)), make_version(1, 2), critical=False, timeout_seconds=5)
    await tasks.close()


@pytest.fixture
def configuration() -> Configuration:
    servers = {
        "east": DatabaseServer(name="db-east", port=3307),
        "west": DatabaseServer(name="db-west", reached_from={"east": DatabaseAddress(host="gateway", port=3400)}),
    }
    database = Database(name="db", master_region="west", servers=servers, shards=((0, SHARDS - 1),))
    return Configuration(msgspec.structs.replace(make_topology(), databases=(database,)), SCHEMA, logger("test"))


def test_a_region_reads_its_own_server_and_writes_the_masters(configuration: Configuration) -> None:
    east = Databases("east", configuration)
    assert (east.database_of(0), east.local(0), east.master(0)) == ("db", "db-east", "db-west")
    assert not east.is_mastered_here(0)
    assert Databases("west", configuration).is_mastered_here(0)


def test_a_down_mark_counts_in_the_region_of_its_server(configuration: Configuration) -> None:
    east, west = Databases("east", configuration), Databases("west", configuration)
    assert not east.local_is_down(0)
    topology = configuration.routes.topology
    (database,) = topology.databases
    servers = database.servers | {"east": msgspec.structs.replace(database.servers["east"], down=True)}
    database = msgspec.structs.replace(database, servers=servers)
    configuration.use_topology(msgspec.structs.replace(topology, version=2, databases=(database,)))
    assert east.local_is_down(0)
    assert not west.local_is_down(0)


def test_a_replica_marked_down_is_asked_when_there_is_no_other(configuration: Configuration) -> None:
    west = Databases("west", configuration)
    assert Databases("east", configuration).other_region(0) == "west", "the master's"
    topology = configuration.routes.topology
    (database,) = topology.databases
    alone = {"west": database.servers["west"]}
    marked = database.servers | {"east": msgspec.structs.replace(database.servers["east"], down=True)}
    choices = ((alone, None), (marked, "east"), (marked | {"north": DatabaseServer(name="db-north")}, "north"))
    for version, (servers, other) in enumerate(choices, 2):
        changed = msgspec.structs.replace(database, servers=servers)
        configuration.use_topology(msgspec.structs.replace(topology, version=version, databases=(changed,)))
        assert west.other_region(0) == other


def test_a_server_of_another_database_is_one_that_a_move_may_take_the_shard_to(configuration: Configuration) -> None:
    topology = configuration.routes.topology
    (database,) = topology.databases
    one = msgspec.structs.replace(database, shards=((0, SHARDS - 2),))
    two = Database(
        name="two", master_region="west", servers={"west": DatabaseServer(name="two-west")}, shards=((SHARDS - 1,) * 2,)
    )
    configuration.use_topology(msgspec.structs.replace(topology, version=2, databases=(one, two)))
    east = Databases("east", configuration)
    assert east.is_elsewhere(0, "two-west")
    assert not east.is_elsewhere(0, "db-west"), "a successor in its own database"
    assert not east.is_elsewhere(0, "unknown")
    assert east.is_elsewhere(SHARDS - 1, "db-west")


def test_servers_are_reached_at_the_address_for_the_region(configuration: Configuration) -> None:
    login = Databases("east", configuration).login("tao_reader", "secret", None)
    assert login("db-east") == ServerAccount("127.0.0.1", 3307, "tao_reader", "secret", socket="", tls=None)
    assert login("db-west") == ServerAccount("gateway", 3400, "tao_reader", "secret", socket="", tls=None)
    with pytest.raises(TopologyError, match="nowhere"):
        login("nowhere")
