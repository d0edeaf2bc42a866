"""Scenario `grow`: a tier grows from two followers to six, one after the other, and back, under load.

Each added follower registers itself and takes its part of the ring in steps; then each is drained and stopped. No
request may fail, and a minute after each change began, the tier's hit rate may be at most two points below that of the
two followers before.

Objects are read by a Zipf law, and each cache holds a part of them, so that the hit rate shows what the caches lack:
more followers have room for more.
"""

from __future__ import annotations

import asyncio
from bisect import bisect
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from time import perf_counter
from typing import Any, Final

from loadtest import options
from loadtest.conditions import within
from loadtest.dataset import ITEM
from loadtest.options import Options
from loadtest.results import Aim, ScenarioResult, at_least, at_most, result_of
from loadtest.rounds import percentile
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from loadtest.target import OWN_TIER
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.model.errors import TaoError
from tao.topology.registration import placed

_SMALLEST: Final = 2
"""Followers of the tier before it grows."""
_SHAPE: Final = Shape(tiers=2, followers=_SMALLEST, leaders=2, databases=1, shards=64, watchers=1)
_TOY_SHAPE: Final = Shape(tiers=1, followers=_SMALLEST, leaders=1, databases=1, shards=16)
_OBJECTS: Final = 20_000
_TOY_OBJECTS: Final = 40
"""So few that each is read more than once a second: a follower that has got its share is warm when it is judged."""
_OBJECTS_AT_ONCE: Final = 500
"""Objects that are written together: a slow database takes them well within a request's time."""
_VALUE_BYTES: Final = 500
_CACHE_MB: Final = 3.0
"""A quarter of the objects. At toy size it is more than all."""
_SKEW: Final = 0.9
"""The exponent of the Zipf law."""
_STEP_SECONDS: Final = 5.0
_TOY_STEP_SECONDS: Final = 0.2
_WARM_SECONDS: Final = 60.0
_TOY_WARM_SECONDS: Final = 3.0
_SETTLE_SECONDS: Final = 15.0
"""Shortest time from the end of a change until the hit rate is judged. On a busy machine changes take longer, and what
moved last would be judged while it is cold."""
_TOY_SETTLE_SECONDS: Final = 2.0
_WINDOW_SECONDS: Final = 20.0
"""The time over which a hit rate is measured."""
_TOY_WINDOW_SECONDS: Final = 2.0
_SAMPLES_PER_WINDOW: Final = 4
_JOIN_SECONDS: Final = 120.0
_TICK_SECONDS: Final = 0.02
_TIMEOUT_SECONDS: Final = 30.0
"""A busy machine should show as a slow answer, not as a failed request."""
_MOST_PENDING: Final = 2_000
"""Requests under way; beyond that none is begun, and the run says so."""
_POINTS: Final = 2.0
"""What the hit rate may lose, in percent of all reads."""
_AROUND_SECONDS: Final = 400.0
_SEED: Final = 7


@dataclass(frozen=True, kw_only=True)
class GrowOptions(Options):
    """The options of `grow`."""

    followers: int = options.FOLLOWERS.default(6, toy=3, low=3, help="Followers of the tier when it is largest.")
    after_seconds: float = options.AFTER_SECONDS.default(
        60.0, toy=4.0, help="Seconds from the beginning of a change until the hit rate is judged."
    )
    reads: float = options.READS.default(800.0, toy=200.0)
    writes: float = options.WRITES.default(20.0, toy=10.0)


@dataclass(slots=True)
class Requests:
    """What the load has done so far, and the latencies of the present stage."""

    reads: int = 0
    writes: int = 0
    left_out: int = 0
    """Requests that were not begun, because too many were under way."""
    failed_reads: Counter[str] = field(default_factory=Counter)
    failed_writes: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


class ZipfLoad:
    """Reads and updates objects at a given pace, whatever the answers take."""

    def __init__(self, graphs: Sequence[Graph], ids: Sequence[int], wanted: GrowOptions) -> None:
        self._graphs: Final = graphs
        self._ids: Final = ids
        self._wanted: Final = wanted
        self._chance: Final = Random(_SEED)
        self._weights: Final = [*accumulate((rank + 1) ** -_SKEW for rank in range(len(ids)))]
        self._pending: Final[set[asyncio.Task[None]]] = set()
        self.done: Final = Requests()

    async def run(self) -> None:
        """Begin requests until cancelled; those under way end by themselves."""
        began, begun = perf_counter(), 0.0
        per_second = self._wanted.reads + self._wanted.writes
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            due = per_second * (perf_counter() - began)
            while begun + 1 <= due:
                begun += 1
                self._begin()

    async def settle(self) -> None:
        """Return when nothing is under way."""
        await asyncio.gather(*self._pending)

    def _begin(self) -> None:
        if len(self._pending) >= _MOST_PENDING:
            self.done.left_out += 1
            return
        share = self._wanted.writes / (self._wanted.reads + self._wanted.writes)
        graph, key = self._chance.choice(self._graphs), self._key()
        task = asyncio.create_task(self._write(graph, key) if self._chance.random() < share else self._read(graph, key))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def _key(self) -> int:
        return self._ids[bisect(self._weights, self._chance.random() * self._weights[-1])]

    async def _read(self, graph: Graph, key: int) -> None:
        began = perf_counter()
        self.done.reads += 1
        try:
            if await graph.obj_get(key) is None:
                self._failed(self.done.failed_reads, "missing", f"object {key} is not found")
        except TaoError as error:
            self._failed(self.done.failed_reads, error.reason, error.message)
        self.done.latencies.append(perf_counter() - began)

    async def _write(self, graph: Graph, key: int) -> None:
        self.done.writes += 1
        try:
            await graph.obj_update(key, {"value": self._chance.randbytes(_VALUE_BYTES)})
        except TaoError as error:
            self._failed(self.done.failed_writes, error.reason, error.message)

    def _failed(self, counter: Counter[str], reason: str, message: str) -> None:
        counter[reason] += 1
        if len(self.done.examples) < 5:
            self.done.examples.append(f"{reason}: {message}")


class HitRate:
    """The hit rate of the tier since the last call. A follower that has not answered before has counted from its
    start, and one that did not answer the last call, as on a busy machine, from the call before."""

    def __init__(self, cluster: DevCluster) -> None:
        self._cluster: Final = cluster
        self._before: dict[str, tuple[int, int]] = {}

    async def since(self) -> float:
        """Return the percentage of hits among the reads since the last call."""
        found: dict[str, tuple[int, int]] = {}
        for name in _followers(self._cluster):
            with suppress(TaoError):  # it starts, or has stopped
                stats = await server_stats(self._cluster.admin(name))
                found[name] = (stats["hits"], stats["misses"])
        hits, misses = (
            sum(now[at] - self._before.get(name, (0, 0))[at] for name, now in found.items()) for at in (0, 1)
        )
        self._before |= found
        return 100.0 * hits / max(1, hits + misses)


@dataclass(slots=True)
class Stage:
    """What was measured of one size of the tier."""

    followers: int
    change: str
    seconds: float
    """Time from the beginning of the change until the follower has its share, or has left."""
    hit_rate: float
    """The hit rate after a minute, in percent."""
    lowest_hit_rate: float
    """The lowest of the shorter times since the change began."""
    p50_ms: float
    p99_ms: float


async def run(settings: BenchSettings, progress: Progress, wanted: GrowOptions) -> ScenarioResult:
    """Let the tier grow and shrink, and judge. Raises `OperatorError` when a follower does not join or leave."""
    toy = settings.toy
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "grow",
        shape=_TOY_SHAPE if toy else _SHAPE,
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
        cache_mb=_CACHE_MB,
        step_seconds=_TOY_STEP_SECONDS if toy else _STEP_SECONDS,
    )
    async with DevCluster(cluster_settings, progress.step) as cluster, _loaded(cluster, wanted, toy=toy) as load:
        growth = Growth(
            cluster,
            load,
            wanted,
            window_seconds=_TOY_WINDOW_SECONDS if toy else _WINDOW_SECONDS,
            settle_seconds=_TOY_SETTLE_SECONDS if toy else _SETTLE_SECONDS,
        )
        progress.step("warming two followers", 0.05)
        await asyncio.sleep(_TOY_WARM_SECONDS if toy else _WARM_SECONDS)
        stages = [await growth.measured("before")]
        changes = [True] * (wanted.followers - _SMALLEST) + [False] * (wanted.followers - _SMALLEST)
        for number, grows in enumerate(changes):
            progress.step(
                f"{stages[-1].followers} followers, {stages[-1].hit_rate:.1f} %", 0.1 + 0.9 * number / len(changes)
            )
            stages.append(await growth.changed(grows=grows))
        listed = len((await cluster.topology()).regions[0].followers[0].servers)
    return _result(wanted, load.done, stages, listed)


class Growth:
    """Changes the number of followers of the loaded tier, one at a time."""

    def __init__(
        self,
        cluster: DevCluster,
        load: ZipfLoad,
        wanted: GrowOptions,
        *,
        window_seconds: float,
        settle_seconds: float,
    ) -> None:
        self._cluster: Final = cluster
        self._load: Final = load
        self._wanted: Final = wanted
        self._window_seconds: Final = window_seconds
        self._settle_seconds: Final = settle_seconds

    async def changed(self, *, grows: bool) -> Stage:
        """Add a follower, or remove one, and measure."""
        began, lowest = perf_counter(), [100.0]
        sampling = asyncio.create_task(self._sample(lowest))
        try:
            if grows:
                name = await self._cluster.add_follower()
                await within(_JOIN_SECONDS, lambda: self._has_share(name), 0.1, f"{name} did not get its share")
            else:
                name = await self._cluster.remove_follower(_JOIN_SECONDS)
            seconds = perf_counter() - began
            await asyncio.sleep(max(self._settle_seconds, self._wanted.after_seconds - seconds))
            return await self.measured(f"{'+' if grows else '−'} {name}", seconds, lowest)
        finally:
            sampling.cancel()

    async def measured(self, change: str, seconds: float = 0.0, lowest: Sequence[float] = (100.0,)) -> Stage:
        """Measure the tier as it is."""
        rate, latencies = HitRate(self._cluster), self._load.done.latencies
        await rate.since()
        latencies.clear()
        await asyncio.sleep(self._window_seconds)
        hit_rate, ordered = await rate.since(), sorted(latencies)
        return Stage(
            followers=len(_followers(self._cluster)),
            change=change,
            seconds=round(seconds, 1),
            hit_rate=round(hit_rate, 2),
            lowest_hit_rate=round(min(*lowest, hit_rate), 2),
            p50_ms=round(1e3 * percentile(ordered, 0.5), 2),
            p99_ms=round(1e3 * percentile(ordered, 0.99), 2),
        )

    async def _sample(self, lowest: list[float]) -> None:
        rate = HitRate(self._cluster)
        await rate.since()
        while True:
            await asyncio.sleep(self._window_seconds / _SAMPLES_PER_WINDOW)
            lowest[0] = min(lowest[0], await rate.since())

    async def _has_share(self, name: str) -> bool:
        found = placed(await self._cluster.topology(), name)
        return found is not None and found.server.weight == 1.0


@asynccontextmanager
async def _loaded(cluster: DevCluster, wanted: GrowOptions, *, toy: bool) -> AsyncIterator[ZipfLoad]:
    """Write the objects, and load the cluster through clients that know it by its file and by the address of a
    follower."""
    async with AsyncExitStack() as stack:
        patient = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        graphs = [
            await stack.enter_async_context(connect(place, tier=OWN_TIER, settings=patient))
            for place in (str(cluster.topology_path), cluster.client_address)
        ]
        left, ids = _TOY_OBJECTS if toy else _OBJECTS, list[int]()
        while left:
            some = min(left, _OBJECTS_AT_ONCE)
            ids += await graphs[0].obj_add_many([(ITEM, {"value": bytes(_VALUE_BYTES)})] * some)
            left -= some
        load = ZipfLoad(graphs, ids, wanted)
        async with _running(load.run()):
            yield load
        await load.settle()


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run something until the end of the block. (`Any`: as in `Coroutine`.)"""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _followers(cluster: DevCluster) -> list[str]:
    return [member.name for member in cluster.record.shape.select(Role.FOLLOWER, tier=OWN_TIER)]


def _result(wanted: GrowOptions, done: Requests, stages: Sequence[Stage], listed: int) -> ScenarioResult:
    before, *changed = stages
    demands: list[Aim] = [
        at_most("no failed reads", done.failed_reads.total(), 0),
        at_most("no failed writes", done.failed_writes.total(), 0),
        at_most("every request is begun", done.left_out, 0),
        at_least("the tier reaches its size", max(each.followers for each in stages), wanted.followers),
        at_most("the topology lists those of the beginning alone", listed, _SMALLEST),
        *(
            at_most(
                f"the hit rate is at most {_POINTS:g} points below before, {wanted.after_seconds:g} s after the change",
                round(before.hit_rate - each.hit_rate, 2),
                _POINTS,
                f"{each.followers} followers ({each.change})",
            )
            for each in changed
        ),
    ]
    measured: dict[str, Any] = {  # Any: nested values
        "reads": done.reads,
        "writes": done.writes,
        "failed_reads": done.failed_reads.total(),
        "failed_writes": done.failed_writes.total(),
        "stages": {
            f"{each.followers} followers, {each.change}": {
                "seconds": each.seconds,
                "hit_rate_percent": each.hit_rate,
                "lowest_hit_rate_percent": each.lowest_hit_rate,
                "p50_ms": each.p50_ms,
                "p99_ms": each.p99_ms,
            }
            for each in stages
        },
    }
    conditions = {
        "reads_per_second": wanted.reads,
        "writes_per_second": wanted.writes,
        "value_bytes": _VALUE_BYTES,
        "cache_mb": _CACHE_MB,
        "zipf": _SKEW,
    }
    return result_of({**conditions}, measured, demands, examples=done.examples)


SCENARIO: Final = Scenario(
    name="grow",
    summary="a tier grows from two followers to six and back, under load: no request may fail",
    run=run,
    options=GrowOptions,
    help="""Let a tier of two followers grow to six, one at a time, and back, under load.

    Followers register themselves, take their part of the ring in steps, and leave it the same way. The exit status is 1
    when a request fails, or when the hit rate is more than two points below that of before a minute after a change.""",
    in_bench=False,
    seconds_bound=lambda wanted: 2 * (wanted.followers - _SMALLEST) * (wanted.after_seconds + 120.0) + _AROUND_SECONDS,
)
