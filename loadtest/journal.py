"""Scenario `journal`: writes accepted on a follower's disk, and how soon they are made after an outage.

First nothing is made of what is accepted, so that only acceptance is measured: by one caller, by 64 and by 1,024. Then,
with the usual tasks, how long an idle journal takes from acceptance to a write that is made. At last the database is
killed for a minute while writes go on being accepted at a steady rate. All that is done twice: with what is accepted on
the disk of one follower, and of two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from loadtest.results import Aim, Conditions, ScenarioResult, at_least, at_most, result_of
from loadtest.rounds import percentile
from loadtest.scenario import BenchSettings, PartOfProgress, Progress, Scenario
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, TaoError, connect
from tao.client.graph import PendingGraph
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape

_SHARDS: Final = 16
_FOLLOWER_NAMES: Final = ("follower-1a", "follower-1b")
_TYPE: Final = "subscribes"
_ACCEPT_P50_MS: Final = 5.0
_APPLIED_P50_MS: Final = 10.0
_RATES: Final = {64: 6_000.0, 1_024: 12_000.0}
_APPLIED_WITHIN_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Size:
    accept_seconds: float = 5.0
    idle_writes: int = 200
    accepts_per_second: int = 500
    before_seconds: float = 5.0
    outage_seconds: float = 60.0


_TOY: Final = _Size(0.3, 5, 50, 0.3, 1.0)


@dataclass(slots=True)
class _Outage:
    """What was seen of the database's absence."""

    accepted: int = 0
    failures: list[str] = field(default_factory=list)
    most_waiting: int = 0
    applied_seconds: float = 0.0
    """Time from the restart of the database until nothing waited."""
    lost: int = 0
    """Accepted edges that are not in the database at the end."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured of journals that keep so many copies."""

    copies: int
    p50_ms: float
    """The median of an acceptance that one caller waits for."""
    rates: dict[int, float]
    """Acceptances a second by the number of callers."""
    applied_ms: float
    outage: _Outage

    def aims(self) -> list[Aim]:
        kept = f"{self.copies} {'copy' if self.copies == 1 else 'copies'}"
        seconds = self.outage.applied_seconds
        return [
            at_most("accept, p50 of one caller in ms", self.p50_ms, _ACCEPT_P50_MS, kept),
            *(
                at_least("accepts a second", self.rates[callers], rate, f"{callers:,} waiting, {kept}")
                for callers, rate in _RATES.items()
            ),
            at_most("idle, accept → applied, p50 in ms", self.applied_ms, _APPLIED_P50_MS, kept),
            at_most("database back → all applied, in seconds", seconds, _APPLIED_WITHIN_SECONDS, kept),
        ]

    def demands(self) -> list[Aim]:
        return [
            at_most("accepts that failed while the database was away", len(self.outage.failures), 0),
            at_most("accepted edges that were lost", self.outage.lost, 0),
        ]

    def figures(self) -> dict[str, object]:
        return {
            "accept_p50_ms": self.p50_ms,
            "accepts_per_second": {f"{each:,} waiting": rate for each, rate in self.rates.items()},
            "accept_to_applied_p50_ms": self.applied_ms,
            "accepted_in_outage": self.outage.accepted,
            "most_waiting": self.outage.most_waiting,
            "applied_seconds_after_outage": self.outage.applied_seconds,
        }


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure journals that keep one copy of what they accept, and journals that keep two. Raises `OperatorError`."""
    size = _TOY if settings.toy else _Size()
    found = [
        await _measure(settings, size, copies, PartOfProgress(progress, (copies - 1) / 2, 0.5)) for copies in (1, 2)
    ]
    conditions: Conditions = {
        "shards": _SHARDS,
        "followers": len(_FOLLOWER_NAMES),
        "durability": "full",
        "outage_seconds": size.outage_seconds,
        "accepts_per_second": size.accepts_per_second,
    }
    return result_of(
        conditions,
        {f"copies_{each.copies}": each.figures() for each in found},
        [demand for each in found for demand in each.demands()],
        aims=[aim for each in found for aim in each.aims()],
        examples=[failure for each in found for failure in each.outage.failures[:5]],
    )


async def _measure(settings: BenchSettings, size: _Size, copies: int, progress: Progress) -> _Measured:
    """Measure acceptance, then the idle journal, then the outage."""
    rates, p50_ms = await _acceptance(settings, size, copies, progress)
    journal = {"copies": copies}
    async with (
        _cluster(settings, f"journal-made-{copies}", journal, progress) as cluster,
        _graph(cluster) as graph,
    ):
        progress.step("accept → applied, idle", 0.4)
        applied_ms = await _idle(graph, size)
        progress.step("database away", 0.5)
        return _Measured(copies, p50_ms, rates, applied_ms, await _outage(cluster, graph, size))


SCENARIO: Final = Scenario(
    name="journal",
    summary="writes accepted by a follower's journal, also while the database is away for a minute",
    run=run,
)


def _cluster(settings: BenchSettings, name: str, journal: dict[str, Any], progress: Progress) -> DevCluster:
    folder = settings.work_dir / name

    def settings_of(follower: str) -> dict[str, Any]:
        return {"journal": {"folder": str(folder / follower), **journal}}

    return DevCluster(
        ClusterSettings(
            state_dir=folder,
            shape=Shape(tiers=1, followers=len(_FOLLOWER_NAMES), leaders=1, databases=1, shards=_SHARDS),
            durability=Durability.FULL,
            server_settings={each: settings_of(each) for each in _FOLLOWER_NAMES},
        ),
        progress.step,
    )


def _graph(cluster: DevCluster) -> PendingGraph:
    return connect(str(cluster.topology_path), settings=ClientSettings(timeout_seconds=30.0))


async def _acceptance(
    settings: BenchSettings, size: _Size, copies: int, progress: Progress
) -> tuple[dict[int, float], float]:
    """Return the accepts a second by the number of callers, and the median of a single caller in milliseconds."""
    held: dict[str, Any] = {"copies": copies, "high_tasks": 0, "normal_tasks": 0, "low_tasks": 0}
    rates: dict[int, float] = {}
    p50_ms = 0.0
    async with (
        _cluster(settings, f"journal-held-{copies}", held, progress) as cluster,
        _graph(cluster) as graph,
    ):
        edges = await _edges(graph)
        for callers in (1, *_RATES):
            progress.step(f"accept, {callers:,} waiting", 0.1)
            seconds: list[float] = []
            until = time.perf_counter() + size.accept_seconds

            async def call(until: float = until, seconds: list[float] = seconds) -> None:
                while (begun := time.perf_counter()) < until:
                    await graph.later.assoc_add(*next(edges))
                    seconds.append(time.perf_counter() - begun)

            begun = time.perf_counter()
            await asyncio.gather(*(call() for _ in range(callers)))
            rates[callers] = len(seconds) / (time.perf_counter() - begun)
            if callers == 1:
                p50_ms = 1_000 * percentile(sorted(seconds), 0.5)
    return rates, p50_ms


async def _edges(graph: Graph) -> Iterator[tuple[int, str, int, int]]:
    """Return edges without end, over all shards."""
    ends = [await graph.reserve_ids(500, shard=shard) for shard in range(_SHARDS)]
    numbers = count()
    return (
        (
            ends[number % _SHARDS][number // _SHARDS % 500],
            _TYPE,
            ends[(number * 7 + 3) % _SHARDS][number // 11 % 500],
            number,
        )
        for number in numbers
    )


async def _idle(graph: Graph, size: _Size) -> float:
    edges = await _edges(graph)
    seconds: list[float] = []
    for _ in range(size.idle_writes):
        begun = time.perf_counter()
        await (await graph.later.assoc_add(*next(edges))).applied()
        seconds.append(time.perf_counter() - begun)
    return 1_000 * percentile(sorted(seconds), 0.5)


async def _outage(cluster: DevCluster, graph: Graph, size: _Size) -> _Outage:
    """Accept writes at a steady rate, with the database away in between."""
    outage = _Outage()
    users = [await graph.reserve_ids(1_000, shard=shard) for shard in range(_SHARDS)]
    written: dict[int, list[int]] = {}
    stopped = asyncio.Event()

    async def one(number: int) -> None:
        user = users[number % _SHARDS][number // _SHARDS % 1_000]
        page = users[(number + 5) % _SHARDS][number // _SHARDS // 1_000]
        try:
            await graph.later.assoc_add(user, _TYPE, page, number)
            outage.accepted += 1
            written.setdefault(user, []).append(page)
        except TaoError as error:
            outage.failures.append(f"{error.reason}: {error.message}")

    async def at_rate() -> None:
        begun, numbers = time.perf_counter(), count()
        async with asyncio.TaskGroup() as group:
            while not stopped.is_set():
                due = int((time.perf_counter() - begun) * size.accepts_per_second)
                for number in numbers:
                    group.create_task(one(number))
                    if number >= due:
                        break
                await asyncio.sleep(0.01)

    writing = asyncio.create_task(at_rate())
    await asyncio.sleep(size.before_seconds)
    await cluster.kill("db-1")
    await asyncio.sleep(size.outage_seconds)
    outage.most_waiting = await _waiting(cluster)
    await cluster.restart("db-1")
    back = time.perf_counter()
    stopped.set()
    await writing
    while await _waiting(cluster) and time.perf_counter() - back < 3 * _APPLIED_WITHIN_SECONDS:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)
    outage.applied_seconds = time.perf_counter() - back
    for user, pages in written.items():
        found = await graph.assoc_get(user, _TYPE, sorted(set(pages)), critical=True)
        outage.lost += len(set(pages)) - len(found)
    return outage


async def _waiting(cluster: DevCluster) -> int:
    stats = [await server_stats(cluster.admin(name)) for name in _FOLLOWER_NAMES]
    return int(sum(sum(each["journal"]["waiting"].values()) for each in stats))
