"""The load of a fault run: clients of every region and tier, paced reads and writes whose history is recorded.

Reads differ by what they demand; each knows its floor when it begins, and is judged when it is answered. Plain reads
must see what the same client has written (the SDK attaches its own writes); a token's reader what the token names, both
at either end of an edge, also while the inverse of the write is pending; a
critical reader everything acknowledged before it asked; a reader that bounds staleness everything acknowledged that
long ago. Outside of failures a client's reads of one key never go back, and a client that attaches nothing still sees
its own writes in its tier.

Writes are made one at a time for each key, and never repeated. A key whose write has an unknown outcome rests until no
deadline allows the write to happen any more and the faults of the time are over; then a critical read finds the
outcome, and from then on the key is held to it. Nor is a key written whose inverse is pending, until that is settled.

A cut line leaves inverses pending of the commits in the last moment before it: with semi-synchronous replication no
other commit is acknowledged while the regions are cut off from each other. So just before a cut, edges between
databases of both regions are written by several clients at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import yaml

from loadtest import options
from loadtest.conditions import until, within
from loadtest.faults.harness import Beside, ClientLoad, FaultRun, Outcome, carry_out_run
from loadtest.faults.history import ReadVerdict, RecordedOutcome, RecordedWrite, Register
from loadtest.faults.injection import LINE_CUT, Injector
from loadtest.faults.job_functions import functions_installed
from loadtest.faults.merged_edges import MergedEdges
from loadtest.faults.plan import Plan
from loadtest.faults.record import MESSAGE_CHARACTERS, FailedRead, Fault, PendingInverse, RunRecord, Whereabouts
from loadtest.region_cluster import RegionCluster, lossless_settings
from loadtest.scenario import BenchSettings, Progress
from tao.admin.documents import example_schema_file
from tao.client import ClientSettings, Consistency, Graph, RetryableError, TaoError
from tao.devcluster.layout import Role, Shape
from tao.model.errors import OperatorError, RequestError
from tao.model.ids import SEQUENCE_PER_MS, SHARD_SHIFT, make_id
from tao.model.tokens import WriteToken
from tao.routing.routes import Routes

SHAPE: Final = Shape(
    regions=2, tiers=2, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=16, watchers=1
)
_TOY_SHAPE: Final = Shape(regions=2, tiers=2, followers=1, leaders=2, databases=1, shards=4, watchers=1)
_ONE_REGION: Final = Shape(tiers=2, followers=2, leaders=2, databases=2, shards=16, watchers=2)
_TOY_ONE_REGION: Final = Shape(tiers=2, followers=1, leaders=2, databases=1, shards=4, watchers=1)
HEAD: Final = 10
"""Edges of a list that are read: enough to see a hole."""
STALENESS_MS: Final = 3_000
_FROM_MASTER: Final = Consistency.master()
_OWN_WRITES_SECONDS: Final = ClientSettings().own_writes_seconds
_OLD_UNIX_MS: Final = 1_650_000_000_000
"""No object has an id of that time."""
REST_SECONDS: Final = 12.0
"""Longer than the deadlines of a write on all hops together."""
_FAILURE_PAUSE_SECONDS: Final = 0.3
"""The mean pause of a client whose write failed: a fault refuses writes faster than a healthy cluster takes them."""
_LIST_WRITES: Final = 2_000
"""The most writes to one list: its edges stay far below what caches hold of a list."""
_KEYS_PER_SHARD: Final = 8
_ABSENT_IDS: Final = 200_000
_TIMEOUT_SECONDS: Final = 5.0
_SETTLE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.5
_SETTLED_LOOK_SECONDS: Final = 0.1
_SETTLED_READ_SECONDS: Final = 0.5
"""Time limit for one look: a read that waits for its deadline would find the inverse seconds late."""
_PAIR_WRITERS: Final = 8
"""Edges between regions that are written just before a cut, each by a writer of its own. A writer spends half of its
time between the commits of both ends."""
_PAIRS_DRAWN: Final = 1_000
"""Pairs of ends that are drawn: a quarter are such an edge, and none when all masters are in one region."""
_PAIR_SECONDS: Final = 5.0
"""The most that each of them gets for its first write before the line is cut."""
_ROOM_SECONDS: Final = 30.0
"""Time in which writes of all shards have to go on after a fault that has stopped them."""
_ALL_EDGES: Final = 6_000
"""More edges than any list here has."""
_BATCH: Final = 12
"""Reads that one client sends at a time."""
_FILTERED: Final = ("likes", "follows")
"""Types with pair filters in followers, so that a filter which denies an edge is noticed."""
_RUNNER: Final = {"lease_seconds": 6.0, "page_edges": 20}
"""Settings of the workers: a job takes several pages, and that of a killed worker is due again within a fault."""
_MOST_PENDING: Final = 40
"""Pending batches and writes of one client."""


class Demand(StrEnum):
    """What a read demands besides an answer."""

    PLAIN = "plain"
    CRITICAL = "critical"
    TOKEN = "token"  # noqa: S105 - a demand
    BOUNDED = "max_staleness"


_OF_EITHER_END: Final = (Demand.PLAIN, Demand.TOKEN)
"""Demands that are made at the far end of an edge, too. Without a token, critical reads and reads with a bound on
staleness return the list's own rows, in which a pending inverse is missing."""
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
    pending_number: int = 0
    """The number of the last write that was acknowledged with its inverse pending, until that is settled."""
    rests_until: float = 0.0
    """The time at which a write of unknown outcome can be settled, in seconds of the run; 0 when none waits."""

    @property
    def rests(self) -> bool:
        """Whether nothing is to be written: the last write or its inverse is pending, or not settled."""
        return self.register.busy or self.pending_number > 0


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
    pending_at: dict[int, float] = field(default_factory=dict)
    """Place of a key → the time at which a write of this client last had an inverse pending."""

    def reads_master(self, place: int, now: float) -> bool:
        """Return whether the graph reads the key's far end from its master: it knows that its own write was pending
        there, and not the version of the list that has it."""
        return self.attaches and now - self.pending_at.get(place, -math.inf) < _OWN_WRITES_SECONDS


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(options.Options):
    """The options of a fault run with this load."""

    seed: int = options.SEED.default(1)
    reads: float = options.READS.default(800.0, toy=200.0)
    writes: float = options.WRITES.default(60.0, toy=20.0)
    operations: float = 0.0
    """Operations on edges with states, nodes and jobs, a second. With 0 there are none of these, and no workers."""
    logs: Path | None = options.LOGS.default(None)


class RecordedLoad(ClientLoad):
    """Paced reads and writes of many clients, each operation recorded and judged."""

    def __init__(
        self,
        regions: RegionCluster,
        record: RunRecord,
        chance: Random,
        wanted: RecordedOptions,
        readers: list[Reader],
        keys: list[Key],
        merged: MergedEdges | None = None,
    ) -> None:
        """``merged``: other edges, which these clients operate on beside the keys; None: they do not."""
        super().__init__()
        self._regions: Final = regions
        self._record: Final = record
        self._chance: Final = chance
        self._readers: Final = readers
        self._keys: Final = keys
        self._merged: Final = merged
        self._absent: Final = cycle(absent_ids(regions.routes.shards, _ABSENT_IDS, chance))
        self._routes: Routes = regions.routes
        self._stopping = False
        per_reader = (wanted.reads / len(readers) / _BATCH, wanted.writes / len(readers))
        for reader in readers:
            self.begin(self._paced(per_reader[0], partial(self._read_batch, reader, _BATCH)))
            self.begin(self._paced(per_reader[1], partial(self._write_anything, reader)))
            if merged is not None:
                self.begin(self._paced(wanted.operations / len(readers), partial(merged.operate, reader.graph)))
        self.begin(self._settle_paced())

    def describe(self) -> tuple[str, float]:
        """See `ClientLoad`."""
        record = self._record
        active = ", ".join(f"{fault.kind} {fault.victim}" for fault in record.active)
        text = f"{record.reads:,} reads, {record.failed_reads} failed; {record.acknowledged:,} writes"
        wrong = record.lost + sum(record.violations.values())
        return f"{text}; {wrong} wrong; {active}", record.done

    async def before_fault(self, kind: str) -> None:
        """Have edges between regions under way when the line is cut. They are new ones: the outcomes of earlier cuts
        may not be settled yet."""
        pairs = list(self._new_pairs()) if kind in LINE_CUT else []
        for pair in pairs:
            self.begin(self._write_until_cut(self._add_key(pair), len(self._record.cuts)))

        async def are_under_way() -> bool:
            return all(len(pair.register.writes) > 2 or pair.rests for pair in pairs)

        with suppress(TimeoutError):
            async with asyncio.timeout(_PAIR_SECONDS):
                await until(are_under_way, _SETTLED_LOOK_SECONDS)

    async def after_fault(self, fault: Fault) -> None:
        """Write to all shards whose writes are waited for. Their other keys may rest."""
        deadline = self._record.now() + _ROOM_SECONDS
        await asyncio.gather(*(self._write_shard(shard, fault, deadline) for shard in sorted(fault.unwritten)))

    async def _write_shard(self, shard: int, fault: Fault, deadline: float) -> None:
        """Write edges within a shard, until it has been written or the time is over."""
        ids = [key.id for key in self._keys if key.kind is KeyKind.OBJECT and key.id >> SHARD_SHIFT == shard]
        while shard in fault.unwritten and self._record.now() < deadline and not self._stopping:
            far = next(other for other in self._absent if other >> SHARD_SHIFT == shard)
            key = Key(KeyKind.EDGE, self._chance.choice(ids), far, Register(None))
            await self._write(self._chance.choice(self._readers), self._add_key(key))

    def _add_key(self, key: Key) -> int:
        """Add a key that is written and read from now on; returns its place."""
        self._keys.append(key)
        return len(self._keys) - 1

    def _new_pairs(self) -> Iterator[Key]:
        """Yield edges whose inverse a cut line can leave pending: the writer names the end that is written first, that
        of the smaller id, and the master of the other end is in another region."""
        routes, ids = self._routes_now(), [key.id for key in self._keys if key.kind is KeyKind.OBJECT]
        drawn = ((self._chance.choice(ids), next(self._absent)) for _ in range(_PAIRS_DRAWN))
        pairs = (
            Key(KeyKind.EDGE, near, far, Register(None))
            for near, far in drawn
            if near < far and _region_of(routes, near) != _region_of(routes, far)
        )
        yield from islice(pairs, _PAIR_WRITERS)

    async def _write_until_cut(self, place: int, cuts: int) -> None:
        """Write an edge again and again, until the line has been cut more than ``cuts`` times."""
        key = self._keys[place]
        region = _region_of(self._routes, key.id)
        writer = self._chance.choice([each for each in self._readers if each.region == region])
        while not self._stopping and len(self._record.cuts) == cuts and not key.rests:
            await self._write(writer, place)

    async def stop(self) -> None:
        """Begin nothing more, and wait for what is pending; then find the outcomes of all writes of unknown outcome.

        Raises `OperatorError` when one cannot be read."""
        self._stopping = True
        await super().stop()

        async def settled() -> bool:
            await self._settle()
            return not any(key.rests_until for key in self._keys)

        await within(_SETTLE_SECONDS + REST_SECONDS, settled, _LOOK_SECONDS, "not every write's outcome could be read")
        if self._merged is not None:
            await self._merged.jobs_ended()

    async def differences(self) -> int:
        """Compare every key with its history, and every client's cache with the master's value; acknowledged writes
        that are missing are recorded as lost. Returns how many caches differ."""
        record, stale = self._record, await self._merged.differences() if self._merged is not None else 0
        for key in self._keys:
            register, end = key.register, record.now()
            found = await value_of(self._readers[0].graph, key, _FROM_MASTER)
            if register.judge(found, register.acknowledged_before(end), end) is not ReadVerdict.RIGHT:
                record.lose(f"{key.kind} {key.id}: {found}, acknowledged {register.last}")
            if key.kind is KeyKind.LIST:
                times = set(
                    (await self._readers[0].graph.assoc_range(key.id, "follows", 0, _ALL_EDGES, critical=True)).times
                )
                missing, unwanted = register.misplaced(times)
                for write in missing:
                    record.lose(f"{key.kind} {key.id}: {write}")
                for write in unwanted:
                    record.violation(ReadVerdict.WRONG, "refused", f"{key.kind} {key.id} has {write}")
            for reader in self._readers:
                cached = await value_of(reader.graph, key, Consistency.cached())
                if cached != found:
                    stale += 1
                    record.example(f"{reader.name}: {key.kind} {key.id}: {cached}, not {found}")
        return stale

    def _routes_now(self) -> Routes:
        """Return the routes of the document, or of its last version when it is gone."""
        with suppress(OSError, OperatorError):
            self._routes = self._regions.routes
        return self._routes

    async def _paced(self, per_second: float, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        # One that waits for a fault to pass holds up no other.
        async with asyncio.TaskGroup() as group:
            pending = set[asyncio.Task[None]]()
            while not self._stopping:
                await asyncio.sleep(self._chance.uniform(0.5, 1.5) / per_second)
                if len(pending) < _MOST_PENDING:
                    task = group.create_task(begin())
                    pending.add(task)
                    task.add_done_callback(pending.discard)

    async def _settle_paced(self) -> None:
        while not self._stopping:
            await asyncio.sleep(1.0)
            await self._settle()

    async def _read_batch(self, reader: Reader, size: int) -> None:
        """Make so many reads at once, one in ten of an id that nobody has read before."""
        async with asyncio.TaskGroup() as group:
            for _ in range(size):
                if self._chance.random() < 0.1:
                    group.create_task(self._miss(reader))
                else:
                    place, demand = self._chance.randrange(len(self._keys)), self._chance.choice(DEMANDS)
                    is_edge = self._keys[place].kind is KeyKind.EDGE
                    far_end = is_edge and demand in _OF_EITHER_END and self._chance.random() < 0.5
                    group.create_task(self._read(reader, place, demand, far_end=far_end))

    async def _read(self, reader: Reader, place: int, demand: Demand, *, far_end: bool) -> None:
        """Make one read and judge its answer; with ``far_end`` of an edge, in the list of its other end."""
        key, record = self._keys[place], self._record
        register, now, calm = key.register, record.now(), record.calm_since
        floor, demanded = reader.own.get(place, 0) if reader.attaches else 0, Consistency.cached()
        if not reader.attaches and calm is not None and reader.own_at.get(place, -1.0) > calm:
            floor = 0 if far_end and key.pending_number else reader.own[place]
        own_floor = floor
        if demand is Demand.CRITICAL:
            floor, demanded = register.acknowledged_before(now), _FROM_MASTER
        elif demand is Demand.TOKEN:
            floor, demanded = max(floor, key.token_number), Consistency.at_least(key.token)
        elif demand is Demand.BOUNDED:
            floor = max(floor, register.acknowledged_before(now - STALENESS_MS / 1000))
            demanded = Consistency.max_staleness(STALENESS_MS)
        pending = far_end and 0 < key.pending_number <= floor
        record.reads += 1
        if far_end:
            record.far_end_read(pending=pending)
        try:
            verdict, number = await self._ask(reader.graph, key, demanded, floor, far_end=far_end)
        except TaoError as error:
            object_id, attached = key.other if far_end else key.id, own_floor > 0
            # The graph knows its own writes a moment before the load does: it may have attached one that was answered
            # while this read began.
            own = reader.own.get(place, 0) if reader.attaches else 0
            pending = pending or (far_end and 0 < key.pending_number <= own)
            of_master = far_end and reader.reads_master(place, now)
            self._failed(
                error,
                now,
                reader,
                key.kind,
                object_id,
                Demand.CRITICAL if of_master and demand is Demand.PLAIN else demand,
                attached=attached,
                inverse_pending=pending,
            )
            return
        only_own = floor == own_floor and not reader.attaches and demand is not Demand.CRITICAL
        if verdict is ReadVerdict.STALE and only_own and calm != record.calm_since:
            return  # a fault has come meanwhile, and another tier may have answered, which has the write later
        if verdict is not ReadVerdict.RIGHT:
            what = f"{reader.name} read write {number} of {key.kind} {key.id}, {demand}, which had to see {floor}"
            kind = demand if floor > own_floor or demand is Demand.CRITICAL else "own writes"
            record.violation(verdict, "inverse" if far_end else kind, what)
        elif demand is Demand.PLAIN and number >= 0 and not far_end:
            last, at = reader.seen.get(place, (0, -1.0))
            if number < last and calm is not None and at > calm and calm == record.calm_since:
                record.violation(
                    ReadVerdict.STALE, "monotone", f"{reader.name}: {key.kind} {key.id}, {last}, then {number}"
                )
            reader.seen[place] = (number, now)

    async def _ask(
        self, graph: Graph, key: Key, demanded: Consistency, floor: int, *, far_end: bool
    ) -> tuple[ReadVerdict, int]:
        """Return the verdict and the number of the write seen, -1 where the answer does not show it. An edge is looked
        for in the list of its other end with ``far_end``."""
        register, record = key.register, self._record
        way, is_list = self._chance.random(), key.kind is KeyKind.LIST
        if way < 0.2 and key.kind is not KeyKind.OBJECT:
            return await self._ask_existence(graph, key, demanded, floor, far_end=far_end), -1
        if way < 0.4 and is_list:
            count = await graph.assoc_count(key.id, "follows", consistency=demanded)
            return register.judge_count(count, floor, record.now()), -1
        if way < 0.6 and is_list:
            edges = await graph.assoc_time_range(key.id, "follows", None, 1, HEAD, consistency=demanded)
            values = list(edges.times)
        elif way < 0.7 and is_list:
            mine = graph.edge_set(key.id, "follows")
            page = await (mine & mine).page(HEAD, consistency=demanded)
            if page.cut_short:  # its time was over: the newest edges may be on a later page
                return ReadVerdict.RIGHT, -1
            record.answers["set"] += 1
            values = [edge.time for edge in page.edges]
        elif far_end:
            values = list((await graph.assoc_range(key.other, "liked_by", 0, HEAD, consistency=demanded)).times)
        else:
            values = await newest(graph, key, demanded)
        seen = values[0] if values else None
        if key.kind is KeyKind.LIST:
            return register.judge_head(values, floor, record.now()), register.number_of(seen)
        return register.judge(seen, floor, record.now()), register.number_of(seen)

    async def _ask_existence(
        self, graph: Graph, key: Key, demanded: Consistency, floor: int, *, far_end: bool
    ) -> ReadVerdict:
        """Return the verdict on whether an edge exists: of a list, a drawn one of those that were ever added, or one
        that never was."""
        register, record = key.register, self._record
        if key.kind is KeyKind.EDGE:
            row = (key.other, "liked_by", key.id) if far_end else (key.id, "likes", key.other)
            found = await graph.assoc_exists(*row, consistency=demanded)
            verdict = register.judge_existence(found, floor, record.now())
        elif number := self._chance.randrange(len(register.writes)):
            found = await graph.assoc_exists(key.id, "follows", key.ends[number - 1], consistency=demanded)
            verdict = register.judge_member(number, found, floor, record.now())
        else:
            found = await graph.assoc_exists(key.id, "follows", next(self._absent), consistency=demanded)
            verdict = ReadVerdict.WRONG if found else ReadVerdict.RIGHT
        record.answers["existence"] += 1
        return verdict

    async def _miss(self, reader: Reader) -> None:
        """Read something that nobody has cached, so that the region's database is asked."""
        record, now = self._record, self._record.now()
        object_id = next(self._absent)
        record.reads += 1
        try:
            found = await reader.graph.assoc_count(object_id, "follows")
        except TaoError as error:
            self._failed(error, now, reader, "miss", object_id, Demand.PLAIN, attached=False)
            return
        if found:
            record.violation(ReadVerdict.WRONG, "plain", f"{reader.name}: {found} edges of {object_id}, which has none")

    def _failed(
        self,
        error: TaoError,
        began: float,
        reader: Reader,
        what: str,
        object_id: int,
        demand: Demand,
        *,
        attached: bool,
        inverse_pending: bool = False,
    ) -> None:
        database = self._routes_now().database_of(object_id >> SHARD_SHIFT)
        self._record.failed_read(
            FailedRead(
                seconds=round(began, 3),
                what=what,
                demand=demand,
                client=reader.name,
                where=Whereabouts(reader.region, database.name, database.master_region),
                attached=attached,
                inverse_pending=inverse_pending,
                reason=error.reason,
                message=error.message[:MESSAGE_CHARACTERS],
            )
        )

    async def _write_anything(self, writer: Reader) -> None:
        await self._write(writer, self._chance.randrange(len(self._keys)))

    async def _write(self, writer: Reader, place: int) -> None:
        """Write to a key that does not rest."""
        key = self._keys[place]
        if key.rests or (key.kind is KeyKind.LIST and len(key.register.writes) > len(key.ends)):
            return
        record, register = self._record, key.register
        number = len(register.writes)
        removes = key.kind is KeyKind.EDGE and register.last.value is not None and self._chance.random() < 0.5
        write = register.begin(None if removes else number, record.now())
        try:
            with writer.graph.recording() as recording:
                inverse_pending = await self._write_key(writer.graph, key, number, removes)
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
        record.acknowledge(key.id >> SHARD_SHIFT, write.began)
        key.token, key.token_number = recording.token, write.number
        writer.own[place], writer.own_at[place] = write.number, write.began
        if inverse_pending:
            await self._pending(writer, place, write)

    async def _pending(self, writer: Reader, place: int, write: RecordedWrite) -> None:
        """Find out when the inverse of a write is settled. Of every other edge, all clients read the far end at once:
        few would come across it by chance. Such reads settle the pair themselves, as soon as they can."""
        key, record = self._keys[place], self._record
        pending = PendingInverse(acknowledged=record.now())
        record.pending.append(pending)
        key.pending_number = write.number
        writer.pending_at[place] = record.now()
        since = record.active[-1].struck if record.active else 0.0
        reads: list[Coroutine[Any, Any, None]] = []
        if key.kind is KeyKind.EDGE and sum(each.acknowledged >= since for each in record.pending) % 2:
            reads = [self._read(each, place, Demand.TOKEN, far_end=True) for each in self._readers]
            reads.append(self._read(writer, place, Demand.PLAIN, far_end=True))
        await asyncio.gather(self._settled(writer, key, write, pending), *reads)
        writer.pending_at[place] = record.now()

    async def _settled(self, writer: Reader, key: Key, write: RecordedWrite, pending: PendingInverse) -> None:
        """Read the far end's own rows until they show the write, which no other follows meanwhile. Then the writer
        reads it with the token, and both forget that it was pending: later faults must not fail their reads."""
        far, atype = (
            (key.other, "liked_by") if key.kind is KeyKind.EDGE else (key.ends[write.number - 1], "followed_by")
        )
        # A client that attaches its own writes would have the pair settled first, so it does not read here.
        readers = [each for each in self._readers if not each.attaches]

        async def value(reader: Reader, demanded: Consistency) -> int | None:
            async with asyncio.timeout(_SETTLED_READ_SECONDS):
                found = await reader.graph.assoc_get(far, atype, [key.id], consistency=demanded)
            return next(iter(found.times), None)

        async def is_settled() -> bool:
            region = _region_of(self._routes_now(), far)
            reader = next((each for each in readers if each.region == region), readers[0])
            with suppress(TaoError, TimeoutError):
                return self._stopping or await value(reader, _FROM_MASTER) == write.value
            return False

        async def is_forgotten() -> bool:
            with suppress(TaoError, TimeoutError), writer.graph.recording() as recording:
                await value(writer, Consistency.at_least(key.token))
                key.token = recording.renewed(key.token)
                return True
            return self._stopping

        await until(is_settled, _SETTLED_LOOK_SECONDS)
        if not self._stopping:
            pending.settled = self._record.now()
        await until(is_forgotten, _SETTLED_LOOK_SECONDS)
        key.pending_number = 0

    async def _write_key(self, graph: Graph, key: Key, number: int, removes: bool) -> bool:
        """Write to a key; returns whether the inverse of the write is pending."""
        if key.kind is KeyKind.OBJECT:
            await graph.obj_update(key.id, {"home": str(number)}, "user")
            return False
        if key.kind is KeyKind.LIST:
            written = await graph.assoc_add(key.id, "follows", key.ends[number - 1], number)
        elif not removes:
            written = await graph.assoc_add(key.id, "likes", key.other, number)
        elif self._chance.random() < 0.5:
            written = await graph.assoc_delete(key.id, "likes", key.other)
        else:
            written = await graph.assoc_change_type(key.id, "likes", key.other, "page_likes")
        return written.inverse_pending

    async def _settle(self) -> None:
        """Find the outcomes of writes that have rested long enough, while the cluster is healthy."""
        record = self._record
        for key in self._keys:
            calm = record.calm_since is not None and record.calm_since + REST_SECONDS < record.now()
            if not calm:
                return
            if key.rests_until and key.rests_until < record.now():
                try:
                    found = await value_of(self._chance.choice(self._readers).graph, key, _FROM_MASTER)
                except TaoError:
                    continue  # another time
                key.rests_until = 0.0
                if key.register.settle(found, record.now()) is not ReadVerdict.RIGHT:
                    record.lose(f"{key.kind} {key.id}: {found} after {key.register.last}")


def _region_of(routes: Routes, object_id: int) -> str:
    """Return the region of the master that has the rows of an object."""
    return routes.database_of(object_id >> SHARD_SHIFT).master_region


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
        ends = absent_ids(shards, _LIST_WRITES, chance)
        # Drawn, since which end coordinates a write depends on the shards of both.
        keys.append(Key(KeyKind.EDGE, object_id, chance.choice(ends), Register(None)))
        keys.append(Key(KeyKind.LIST, object_id, 0, Register(None), ends=ends))
    return keys


async def newest(graph: Graph, key: Key, demanded: Consistency) -> list[int]:
    """Return the value of a key, the newest ones of a list; nothing when there is none."""
    if key.kind is KeyKind.OBJECT:
        found = await graph.obj_get(key.id, consistency=demanded)
        return [] if found is None else [int(str(found.fields["home"] or 0))]
    if key.kind is KeyKind.EDGE:
        return list((await graph.assoc_get(key.id, "likes", [key.other], consistency=demanded)).times)
    return list((await graph.assoc_range(key.id, "follows", 0, HEAD, consistency=demanded)).times)


async def value_of(graph: Graph, key: Key, demanded: Consistency) -> int | None:
    """Return the newest value of a key."""
    return next(iter(await newest(graph, key, demanded)), None)


def _schema_with_filters() -> str:
    """Return the example's schema with pair filters."""
    document = yaml.safe_load(example_schema_file().read_text())
    for name in _FILTERED:
        document["associations"][name]["exists_filter"] = True
    return yaml.safe_dump(document)


@asynccontextmanager
async def recorded_load(
    wanted: RecordedOptions, regions: RegionCluster, record: RunRecord, chance: Random
) -> AsyncIterator[RecordedLoad]:
    """Connect clients of every tier, and in each region one that attaches nothing of its own writes; add the keys, and
    begin."""
    shape = regions.cluster.record.shape
    places = [(region, tier, True) for region in shape.region_names for tier in shape.tier_names]
    places += [(region, shape.tier_names[0], False) for region in shape.region_names]
    async with AsyncExitStack() as stack:
        readers = [
            Reader(
                f"{region}/{tier}{'' if attaches else ', attaching nothing'}",
                region,
                await regions.graph(region, tier, stack, _TIMEOUT_SECONDS, attaches=attaches),
                attaches,
            )
            for region, tier, attaches in places
        ]
        keys = await make_keys(readers[0].graph, regions.routes.shards, _KEYS_PER_SHARD, chance, record)
        merged = None
        if wanted.operations:
            merged = MergedEdges(regions, record, chance, [reader.graph for reader in readers])
            await merged.prepare()
        record.begin()
        yield RecordedLoad(regions, record, chance, wanted, readers, keys, merged)


async def run_recorded(
    settings: BenchSettings,
    progress: Progress,
    wanted: RecordedOptions,
    plan: Callable[[Injector, RunRecord], Plan],
    well_seconds: float,
    *,
    one_region: bool = False,
    etcd: bool = False,
    beside: Beside | None = None,
) -> Outcome:
    """Run this load while a plan is carried out. ``etcd``: with the topology there. ``beside``: looks at the cluster
    meanwhile. Raises what `carry_out_run` raises."""
    whole, toy = (_ONE_REGION, _TOY_ONE_REGION) if one_region else (SHAPE, _TOY_SHAPE)
    shape = msgspec.structs.replace(toy if settings.toy else whole, etcd=etcd, workers=int(wanted.operations > 0))
    schema_file = settings.work_dir / "filtered.yaml"
    schema_file.write_text(_schema_with_filters())
    run = FaultRun(
        cluster=replace(
            lossless_settings(settings.work_dir, shape, log_level="info"),
            schema_file=schema_file,
            server_settings={Role.WORKER: {"runner": _RUNNER}},
        ),
        beside=beside,
        load=partial(recorded_load, wanted),
        plans=lambda injector, record, _: [plan(injector, record)],
        seed=wanted.seed,
        well_seconds=well_seconds,
        logs=wanted.logs,
    )
    with functions_installed(settings.work_dir / "functions"):
        return await carry_out_run(run, settings.versions, progress)
