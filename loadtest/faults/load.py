"""The load of a fault run: clients of every region and tier, paced reads and writes whose history is recorded.

Reads differ by what they demand; each knows its floor when it begins, and is judged when it is answered. Plain reads
must see what the same client has written (the SDK attaches its own writes); a token's reader what the token names; a
critical reader everything acknowledged before it asked; a reader that bounds staleness everything acknowledged that
long ago. Outside of failures a client's reads of one key never go back, and a client that attaches nothing still sees
its own writes in its tier.

Writes are made one at a time for each key, and never repeated. A key whose write has an unknown outcome rests until no
deadline allows the write to happen any more and the faults of the time are over; then a critical read finds the
outcome, and from then on the key is held to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Final

from loadtest.conditions import within
from loadtest.faults.history import ReadVerdict, RecordedOutcome, Register
from loadtest.faults.record import FailedRead, RunRecord, Whereabouts
from loadtest.scenario import Progress
from loadtest.two_regions import TwoRegions
from tao.client import ClientSettings, Graph, RetryableError, TaoError, connect
from tao.client.consistency import After
from tao.model.errors import OperatorError, RequestError
from tao.model.ids import SEQUENCE_PER_MS, SHARD_SHIFT, make_id
from tao.model.tokens import WriteToken
from tao.routing.routes import Routes
from tao.topology.document import parse_topology

HEAD: Final = 10
"""Edges of a list that are read: enough to see a hole."""
STALENESS_MS: Final = 3_000


class Demand(StrEnum):
    """What a read demands besides an answer."""

    PLAIN = "plain"
    CRITICAL = "critical"
    TOKEN = "token"  # noqa: S105 - a demand
    BOUNDED = "max_staleness"


DEMANDS: Final = (*[Demand.PLAIN] * 85, *[Demand.CRITICAL] * 4, *[Demand.TOKEN] * 7, *[Demand.BOUNDED] * 4)


class KeyKind(StrEnum):
    """The kinds of keys."""

    OBJECT = "object"
    EDGE = "edge"
    LIST = "list"


@dataclass(slots=True)
class Key:
    """One object, edge or list that is written and read."""

    kind: KeyKind
    id: int
    other: int
    """The other end of an edge."""
    register: Register
    ends: Sequence[int] = ()
    """The other ends of the edges that are added to a list in turn."""
    token: WriteToken = field(default_factory=WriteToken)
    """The token of the write numbered ``token_number``."""
    token_number: int = 0
    rests_until: float = 0.0
    """When a write of unknown outcome can be settled, in seconds of the run; 0 when none waits."""


@dataclass(slots=True)
class Reader:
    """One client: a graph of a region and tier. With ``attaches`` its reads carry its own writes' versions."""

    name: str
    region: str
    graph: Graph
    attaches: bool
    own: dict[int, int] = field(default_factory=dict)
    """Number of the last write that was acknowledged to this client, by the place of its key."""
    own_at: dict[int, float] = field(default_factory=dict)
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Number of the write seen last, and when, by the place of its key."""


class Reads:
    """Makes and judges the reads of many clients."""

    def __init__(
        self,
        keys: Sequence[Key],
        absent: Sequence[int],
        record: RunRecord,
        chance: Random,
        routes: Callable[[], Routes],
    ) -> None:
        """``absent`` are ids that nobody writes to, each read about once, so that the read misses; ``routes`` returns
        the current routes, since masters change."""
        self._keys: Final = keys
        self._absent: Final = absent
        self._record: Final = record
        self._chance: Final = chance
        self._routes: Final = routes
        self._next_absent = 0

    async def batch(self, reader: Reader, size: int) -> None:
        """Make so many reads at once, one in ten of an id that nobody has read before."""
        async with asyncio.TaskGroup() as group:
            for _ in range(size):
                if self._chance.random() < 0.1:
                    group.create_task(self._miss(reader))
                else:
                    place = self._chance.randrange(len(self._keys))
                    group.create_task(self.one(reader, place, self._chance.choice(DEMANDS)))

    async def one(self, reader: Reader, place: int, demand: Demand) -> None:
        """Make one read and judge its answer."""
        key, record = self._keys[place], self._record
        register, now, calm = key.register, record.now(), record.calm_since
        floor, after = reader.own.get(place, 0) if reader.attaches else 0, None
        if not reader.attaches and calm is not None and reader.own_at.get(place, -1.0) > calm:
            floor = reader.own[place]
        own_floor = floor
        if demand is Demand.CRITICAL:
            floor = register.acknowledged_before(now)
        elif demand is Demand.TOKEN:
            floor, after = max(floor, key.token_number), key.token
        elif demand is Demand.BOUNDED:
            floor = max(floor, register.acknowledged_before(now - STALENESS_MS / 1000))
        record.reads += 1
        try:
            verdict, number = await self._ask(reader.graph, key, demand, after, floor)
        except TaoError as error:
            where = self._where(reader, key.id)
            record.failed_read(FailedRead.of(error, now, key.kind, demand, reader.name, where, attached=own_floor > 0))
            return
        if verdict is not ReadVerdict.RIGHT:
            what = f"{reader.name} read write {number} of {key.kind} {key.id}, {demand}, which had to see {floor}"
            kind = demand if floor > own_floor or demand is Demand.CRITICAL else "own writes"
            record.violation(verdict, kind, what)
        elif demand is Demand.PLAIN and number >= 0:
            last, at = reader.seen.get(place, (0, -1.0))
            if number < last and calm is not None and at > calm and calm == record.calm_since:
                record.violation(
                    ReadVerdict.STALE, "monotone", f"{reader.name}: {key.kind} {key.id}, {last}, then {number}"
                )
            reader.seen[place] = (number, now)

    async def _ask(self, graph: Graph, key: Key, demand: Demand, after: After, floor: int) -> tuple[ReadVerdict, int]:
        """Return the verdict and the number of the write seen, -1 where the answer does not show it."""
        register, record = key.register, self._record
        critical = demand is Demand.CRITICAL
        staleness = STALENESS_MS if demand is Demand.BOUNDED else None
        if key.kind is KeyKind.OBJECT:
            found = await graph.obj_get(key.id, critical=critical, after=after, max_staleness_ms=staleness)
            value = None if found is None else int(str(found.fields["home"] or 0))
            return register.judge(value, floor, record.now()), register.number_of(value)
        if key.kind is KeyKind.EDGE:
            edges = await graph.assoc_get(
                key.id, "likes", [key.other], critical=critical, after=after, max_staleness_ms=staleness
            )
            value = edges[0].time if edges else None
            return register.judge(value, floor, record.now()), register.number_of(value)
        way = self._chance.random()
        if way < 0.3:
            count = await graph.assoc_count(
                key.id, "follows", critical=critical, after=after, max_staleness_ms=staleness
            )
            return register.judge_count(count, floor, record.now()), -1
        if way < 0.6:
            edges = await graph.assoc_time_range(
                key.id, "follows", None, 1, HEAD, critical=critical, after=after, max_staleness_ms=staleness
            )
        else:
            edges = await graph.assoc_range(
                key.id, "follows", 0, HEAD, critical=critical, after=after, max_staleness_ms=staleness
            )
        values = list(edges.times)
        return register.judge_head(values, floor, record.now()), register.number_of(values[0] if values else None)

    async def _miss(self, reader: Reader) -> None:
        """Read something that nobody has cached, so that the region's database is asked."""
        record, now = self._record, self._record.now()
        self._next_absent = (self._next_absent + 1) % len(self._absent)
        object_id = self._absent[self._next_absent]
        record.reads += 1
        try:
            found = await reader.graph.assoc_count(object_id, "follows")
        except TaoError as error:
            where = self._where(reader, object_id)
            record.failed_read(FailedRead.of(error, now, "miss", Demand.PLAIN, reader.name, where, attached=False))
            return
        if found:
            record.violation(ReadVerdict.WRONG, "plain", f"{reader.name}: {found} edges of {object_id}, which has none")

    def _where(self, reader: Reader, object_id: int) -> Whereabouts:
        database = self._routes().database_of(object_id >> SHARD_SHIFT)
        return Whereabouts(reader.region, database.name, database.master_region)


_OLD_UNIX_MS: Final = 1_650_000_000_000
"""No object has an id of that time."""
REST_SECONDS: Final = 12.0
"""Longer than the deadlines of a write on all hops together."""
_FAILURE_PAUSE_SECONDS: Final = 0.3
"""The mean pause of a client whose write failed: a fault refuses writes faster than a healthy cluster takes them."""
_LIST_WRITES: Final = 2_000
"""The most writes to one list: its edges stay far below what caches hold of a list."""


def absent_ids(shards: int, count: int, chance: Random) -> list[int]:
    """Return ids of no object, of all shards in turn; the ends of an edge are not looked up."""
    first = chance.randrange(1 << 24)
    return [
        make_id(number % shards, _OLD_UNIX_MS + first + number // SEQUENCE_PER_MS, number % SEQUENCE_PER_MS)
        for number in range(count)
    ]


async def make_keys(graph: Graph, shards: int, per_shard: int, chance: Random, record: RunRecord) -> list[Key]:
    """Add objects on every shard; each is also the first end of an edge and of a list."""
    ids = [await graph.reserve_ids(per_shard, shard=shard) for shard in range(shards)]
    objects = [object_id for of_shard in ids for object_id in of_shard]
    await graph.obj_add_many([("user", {"name": "chaos", "home": "0"}, None, object_id) for object_id in objects])
    record.acknowledged += len(objects)
    keys = [Key(KeyKind.OBJECT, object_id, 0, Register(0)) for object_id in objects]
    for object_id in objects:
        ends = absent_ids(shards, 1 + _LIST_WRITES, chance)
        keys.append(Key(KeyKind.EDGE, object_id, ends[0], Register(None)))
        keys.append(Key(KeyKind.LIST, object_id, 0, Register(None), ends=ends[1:]))
    return keys


class Writes:
    """Makes the writes of many clients, and settles those of unknown outcome."""

    def __init__(self, keys: list[Key], record: RunRecord, chance: Random) -> None:
        self._keys: Final = keys
        self._record: Final = record
        self._chance: Final = chance

    async def one(self, writer: Reader) -> None:
        """Write to a key chosen at random, unless its last write is pending or not settled."""
        place = self._chance.randrange(len(self._keys))
        key = self._keys[place]
        if key.register.busy or (key.kind is KeyKind.LIST and len(key.register.writes) > len(key.ends)):
            return
        record, register = self._record, key.register
        number = len(register.writes)
        removes = key.kind is KeyKind.EDGE and register.last.value is not None and self._chance.random() < 0.5
        write = register.begin(None if removes else number, record.now())
        try:
            with writer.graph.recording() as recording:
                await self._write(writer.graph, key, number, removes)
        except TaoError as error:
            unknown = not isinstance(error, RetryableError | RequestError)
            record.failed_write(error, write.began, f"{writer.name}, {key.kind} {key.id}", unknown=unknown)
            if not unknown:
                register.end(write, RecordedOutcome.REFUSED, record.now())
            else:
                register.end(write, RecordedOutcome.UNKNOWN, record.now())
                key.rests_until = record.now() + REST_SECONDS
            await asyncio.sleep(2 * _FAILURE_PAUSE_SECONDS * self._chance.random())
            return
        now = record.now()
        register.end(write, RecordedOutcome.ACKNOWLEDGED, now)
        record.acknowledged += 1
        key.token, key.token_number = recording.token, write.number
        writer.own[place], writer.own_at[place] = write.number, write.began

    async def _write(self, graph: Graph, key: Key, number: int, removes: bool) -> None:
        if key.kind is KeyKind.OBJECT:
            await graph.obj_update(key.id, {"home": str(number)}, "user")
        elif key.kind is KeyKind.LIST:
            await graph.assoc_add(key.id, "follows", key.ends[number - 1], number)
        elif not removes:
            await graph.assoc_add(key.id, "likes", key.other, number)
        elif self._chance.random() < 0.5:
            await graph.assoc_delete(key.id, "likes", key.other)
        else:
            await graph.assoc_change_type(key.id, "likes", key.other, "page_likes")

    async def settle(self, graphs: Sequence[Graph]) -> None:
        """Find the outcomes of writes that have rested long enough, while the cluster is healthy."""
        record = self._record
        for key in self._keys:
            calm = record.calm_since is not None and record.calm_since + REST_SECONDS < record.now()
            if not calm:
                return
            if key.rests_until and key.rests_until < record.now():
                try:
                    found = await newest(self._chance.choice(graphs), key)
                except TaoError:
                    continue  # another time
                key.rests_until = 0.0
                if key.register.settle(found, record.now()) is not ReadVerdict.RIGHT:
                    record.lose(f"{key.kind} {key.id}: {found} after {key.register.last}")


async def newest(graph: Graph, key: Key, *, critical: bool = True) -> int | None:
    """Return the newest value of a key, from the master database or from a cache."""
    if key.kind is KeyKind.OBJECT:
        found = await graph.obj_get(key.id, critical=critical)
        return None if found is None else int(str(found.fields["home"]))
    if key.kind is KeyKind.EDGE:
        edges = await graph.assoc_get(key.id, "likes", [key.other], critical=critical)
    else:
        edges = await graph.assoc_range(key.id, "follows", 0, HEAD, critical=critical)
    return edges.times[0] if edges else None


_KEYS_PER_SHARD: Final = 8
_ABSENT_IDS: Final = 200_000
_TIMEOUT_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 120.0
_SETTLE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5
_ALL_EDGES: Final = 6_000
"""More edges than any list here has."""
_BATCH: Final = 12
"""Reads that one client sends at a time."""
_MOST_PENDING: Final = 40
"""Pending batches and writes of one client: one that waits for a fault to pass holds up no other."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Reads and writes per second of all clients together."""

    reads: float = 800.0
    writes: float = 60.0


class FaultLoad:
    """The running clients. At the end call `stop`, then `settle_all` and `stale`."""

    def __init__(
        self, regions: TwoRegions, record: RunRecord, chance: Random, readers: list[Reader], keys: list[Key]
    ) -> None:
        self._regions: Final = regions
        self._record: Final = record
        self._chance: Final = chance
        self._readers: Final = readers
        self._keys: Final = keys
        self._graphs: Final = [reader.graph for reader in readers]
        absent = absent_ids(regions.routes.shards, _ABSENT_IDS, chance)
        self._reads: Final = Reads(keys, absent, record, chance, self._routes_now)
        self._writes: Final = Writes(keys, record, chance)
        self._routes: Routes = regions.routes
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, rates: Rates) -> None:
        """Read and write until `stop`."""
        reads, writes = rates.reads / len(self._readers) / _BATCH, rates.writes / len(self._readers)
        for reader in self._readers:

            def read(reader: Reader = reader) -> Awaitable[None]:
                return self._reads.batch(reader, _BATCH)

            def write(reader: Reader = reader) -> Awaitable[None]:
                return self._writes.one(reader)

            self._tasks += [
                asyncio.create_task(self._paced(reads, read)),
                asyncio.create_task(self._paced(writes, write)),
            ]
        self._tasks.append(asyncio.create_task(self._settle()))

    async def while_running(self, work: Awaitable[None]) -> None:
        """Do something while the load goes on. An error of the load itself cancels the work and is raised."""
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait((*self._tasks, doing), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                await next(task for task in self._tasks if task.done())
            await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def stop(self) -> None:
        """Begin nothing more, and wait for what is pending."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """Cancel everything."""
        for task in self._tasks:
            task.cancel()

    async def settle_all(self) -> None:
        """Find the outcomes of all writes of unknown outcome. Raises `OperatorError` when one cannot be read."""

        async def settled() -> bool:
            await self._writes.settle(self._graphs)
            return not any(key.rests_until for key in self._keys)

        await within(_SETTLE_SECONDS + REST_SECONDS, settled, _LOOK_SECONDS, "not every write's outcome could be read")

    async def stale(self, progress: Progress) -> tuple[int, dict[str, int], dict[str, int]]:
        """Wait until all is quiet, and compare; acknowledged writes that are missing are recorded as lost.

        Returns how much differs in all, how much of it `tao verify` and `tao repair` find by kind, and how much they
        have compared by kind."""
        path = self._regions.cluster.topology_path
        topology = parse_topology(path.read_bytes(), str(path))  # masters have changed meanwhile
        regions = replace(self._regions, topology=topology, routes=Routes(topology))
        await regions.quiet(_QUIET_SECONDS)
        record, stale = self._record, 0
        for key in self._keys:
            register, end = key.register, record.now()
            found = await newest(self._graphs[0], key)
            if register.judge(found, register.acknowledged_before(end), end) is not ReadVerdict.RIGHT:
                record.lose(f"{key.kind} {key.id}: {found}, acknowledged {register.last}")
            if key.kind is KeyKind.LIST:
                times = set((await self._graphs[0].assoc_range(key.id, "follows", 0, _ALL_EDGES, critical=True)).times)
                missing, unwanted = register.misplaced(times)
                for write in missing:
                    record.lose(f"{key.kind} {key.id}: {write}")
                for write in unwanted:
                    record.violation(ReadVerdict.WRONG, "refused", f"{key.kind} {key.id} has {write}")
            for reader in self._readers:
                cached = await newest(reader.graph, key, critical=False)
                if cached != found:
                    stale += 1
                    record.example(f"{reader.name}: {key.kind} {key.id}: {cached}, not {found}")
        differences = await regions.differences(lambda server, count: progress.step(f"{server}: {count:,}", 0.95))
        if differences.kinds:
            for example in differences.examples:
                record.example(example)
        return stale + sum(differences.kinds.values()), differences.kinds, differences.compared

    def _routes_now(self) -> Routes:
        """Return the routes of the document, or of its last version when it is gone."""
        path = self._regions.cluster.topology_path
        with suppress(OSError, OperatorError):
            self._routes = Routes(parse_topology(path.read_bytes(), str(path)))
        return self._routes

    async def _paced(self, per_second: float, begin: Callable[[], Awaitable[None]]) -> None:
        pending = set[asyncio.Future[None]]()
        try:
            while not self._stopping:
                await asyncio.sleep(self._chance.uniform(0.5, 1.5) / per_second)
                for task in [each for each in pending if each.done()]:
                    pending.discard(task)
                    task.result()
                if len(pending) < _MOST_PENDING:
                    pending.add(asyncio.ensure_future(begin()))
            await asyncio.gather(*pending)
        finally:
            for task in pending:
                task.cancel()

    async def _settle(self) -> None:
        while not self._stopping:
            await asyncio.sleep(1.0)
            await self._writes.settle(self._graphs)


@asynccontextmanager
async def load_on(regions: TwoRegions, record: RunRecord, chance: Random) -> AsyncIterator[FaultLoad]:
    """Connect clients of every tier, and in each region one that attaches nothing of its own writes; add the keys."""
    shape = regions.cluster.record.shape
    places = [(region, tier, True) for region in shape.region_names for tier in shape.tier_names]
    places += [(region, shape.tier_names[0], False) for region in shape.region_names]
    async with AsyncExitStack() as stack:
        readers: list[Reader] = []
        for region, tier, attaches in places:
            settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS, attach_own_writes=attaches)
            target = str(regions.cluster.topology_path)
            graph = await stack.enter_async_context(connect(target, region=region, tier=tier, settings=settings))
            readers.append(
                Reader(f"{region}/{tier}{'' if attaches else ', attaching nothing'}", region, graph, attaches)
            )
        keys = await make_keys(readers[0].graph, regions.routes.shards, _KEYS_PER_SHARD, chance, record)
        record.begin()
        load = FaultLoad(regions, record, chance, readers, keys)
        try:
            yield load
        finally:
            load.cancel()
