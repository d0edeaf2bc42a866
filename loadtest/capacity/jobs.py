"""The load processes of `capacity`: objects read at a given hit rate or by popularity, and the published mix.

For a given hit rate every key is either one of a few that stay in the cache, or the next of so many others that it has
been evicted by the time its turn comes again. By popularity the cache decides. A part of the published mix is spread
evenly over all keys. CPU time and counters of the servers are read before and after each turn, which gives a query's
cost at every process that it passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from math import inf
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any, Final, NamedTuple

import msgspec

from loadtest.client_process import StepReport
from loadtest.published.contestant import (
    NODE,
    Payloads,
    TaoContestant,
    read_ids,
    reserve_nodes,
    write_all,
    write_ids,
)
from loadtest.published.jobs import Subject
from loadtest.published.requests import RequestStream, WorkloadRequest
from loadtest.published.shapes import Popularity, Zipf
from loadtest.published.tier_watch import server_counts
from loadtest.published.workload import workload_named
from loadtest.rounds import percentile, settle_collector, since
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.layout import Role

_TIMEOUT_SECONDS: Final = 20.0
"""Timeout of a request; long, so that a busy machine shows as a latency and not as an error."""
_READ_AT_ONCE: Final = 500
SKEW: Final = 1.0
"""Zipf's exponent for reads by popularity."""
_EVEN: Final = Zipf(0.0)


class GrowJob(msgspec.Struct, frozen=True, kw_only=True):
    """Write objects until there are so many. The file holds the ids of those that exist; neighbours are on different
    shards, so that the first few lie on all servers."""

    topology_file: str
    ids_file: str
    objects: int
    object_bytes: int
    shards: int

    async def work(self, report: StepReport) -> int:
        """Return the number of objects. Raises a `TaoError`."""
        file, payloads = Path(self.ids_file), Payloads.drawn("capacity")
        ids = list(read_ids(file)) if await asyncio.to_thread(file.exists) else []
        async with connect(self.topology_file, settings=ClientSettings(timeout_seconds=60.0)) as graph:
            new = await reserve_nodes(graph, self.objects - len(ids), self.shards)
            rows = ((NODE, payloads.fields(self.object_bytes), None, each) for each in new)
            text = f"writing {self.objects:,} objects"
            await write_all(graph.obj_add_many, rows, lambda done: report(text, (len(ids) + done) / self.objects))
        write_ids(file, [*ids, *new])
        return self.objects


class LoadedServers(msgspec.Struct, frozen=True, kw_only=True):
    """The servers that are asked, and what a query costs there is read from."""

    topology_file: str
    tier: str
    admins: dict[Role, list[str]]
    """``host:port`` of each follower and leader."""
    pids: dict[Role, list[int]]
    """Process ids of followers, leaders and databases."""


class CapacityTurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one process for a turn. The servers' counts cover whole roles, and all clients."""

    queries: int
    elapsed: float
    p50_ms: float
    p99_ms: float
    client_cpu: float
    servers: dict[str, float]
    """See `loadtest.published.tier_watch.Counts`. The bytes of followers are requests, answers, fills and deliveries of
    the leader; those of leaders go to and from followers, databases and, few of them, to the spool."""


class _Requests(NamedTuple):
    """What is asked for, one after the other, and how. `Any`: as ``ask`` takes it."""

    ask: Callable[[Any], Awaitable[object]]
    each: Iterator[Any]


class _Load(NamedTuple):
    """The load of one turn: what warms the caches before it, and its requests, of ``batch`` queries each."""

    text: str
    warming: _Requests
    requests: _Requests
    batch: int = 1
    warm_seconds: float = inf
    warm_awaiters: int = 1


class TurnsJob(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one load process."""

    servers: LoadedServers
    awaiters: int
    seconds: float
    """Seconds of each turn."""

    def loads(self, graph: Graph) -> Iterator[_Load]:
        """Yield the load of each turn."""
        raise NotImplementedError

    async def work(self, report: StepReport) -> list[CapacityTurnResult]:
        """Return the result of each turn. Raises a `TaoError`."""
        servers, settings = self.servers, ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        results = []
        async with connect(servers.topology_file, tier=servers.tier, settings=settings) as graph:
            for number, load in enumerate(loads := [*self.loads(graph)]):
                report("warming", number / len(loads))
                await _drive(load.warming, load.warm_awaiters, load.warm_seconds)
                report(load.text, number / len(loads))
                settle_collector()
                before = await server_counts(servers.admins, servers.pids)
                cpu_before, began = process_time(), perf_counter()
                latencies = await _drive(load.requests, self.awaiters, self.seconds)
                elapsed, client_cpu = perf_counter() - began, process_time() - cpu_before
                counted = since(before, await server_counts(servers.admins, servers.pids))
                results.append(
                    CapacityTurnResult(
                        queries=len(latencies) * load.batch,
                        elapsed=elapsed,
                        p50_ms=round(1000 * percentile(latencies, 0.5), 3),
                        p99_ms=round(1000 * percentile(latencies, 0.99), 3),
                        client_cpu=client_cpu,
                        servers=dict(counted),
                    )
                )
        return results


class CapacityTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One period of reads of objects. ``resident`` is the share of reads that are for resident keys, or None for reads
    by popularity. ``batch`` is the number of objects that one awaiter asks for at once."""

    resident: float | None
    batch: int


class CapacityJob(TurnsJob, frozen=True, kw_only=True):
    """Reads of objects; ``number`` is the process's number among those that run side by side."""

    ids_file: str
    number: int
    residents: int
    """Number of keys that are to stay in the cache: the first ones."""
    warm_keys: int
    """Number of the most popular keys, which are read before reads by popularity. They stay cached for long, so no
    reads that should miss use them."""
    turns: tuple[CapacityTurn, ...]

    def loads(self, graph: Graph) -> Iterator[_Load]:
        ids, chance = read_ids(Path(self.ids_file)), Random(f"capacity {self.number}")
        others = ids[max(self.residents, self.warm_keys) :]
        # Processes that run side by side begin at different places, or one would cache what the other asks for next.
        start = len(others) * self.number // 4
        cold = cycle([*others[start:], *others[:start]])
        popular, residents = Popularity(ids, Zipf(SKEW), chance), ids[: self.residents]

        def keys(share: float | None) -> Iterator[int]:
            while True:
                if share is None:
                    yield popular.draw()
                else:
                    yield chance.choice(residents) if chance.random() < share else next(cold)

        def batches(some: Iterator[int], size: int) -> Iterator[list[int]]:
            while batch := list(islice(some, size)):
                yield batch

        for turn in self.turns:
            # The most popular come last, so that they are cached at the end.
            warm = ids[: self.warm_keys if turn.resident is None else self.residents][::-1]
            some = keys(turn.resident)
            share = "by popularity" if turn.resident is None else f"{turn.resident:.0%} of resident keys"
            one_by_one = _Requests(graph.obj_get, some)
            yield _Load(
                text=f"reading, {share}, {turn.batch} at a time",
                warming=_Requests(graph.obj_get_many, batches(iter(warm), _READ_AT_ONCE)),
                requests=one_by_one if turn.batch == 1 else _Requests(graph.obj_get_many, batches(some, turn.batch)),
                batch=turn.batch,
            )


class MixJob(TurnsJob, frozen=True, kw_only=True):
    """A published workload, a share of which is spread evenly over all keys. Each turn but the first is preceded by
    half as many seconds of warming."""

    subject: Subject
    even_shares: tuple[float, ...]
    """One turn for each share of the requests whose keys are drawn evenly from all, and which therefore miss more."""
    warm_seconds: float
    """Seconds of warming before the first turn."""

    def loads(self, graph: Graph) -> Iterator[_Load]:
        subject, plan = self.subject, self.subject.plan()
        workload, chance = workload_named(subject.workload), Random(f"mix {subject.seed}")
        evenly = replace(workload, object_skew=_EVEN, list_skew=_EVEN, assumed=replace(workload.assumed, again=0.0))
        popular, even = (RequestStream(each, plan, subject.seed, 0, subject.shards) for each in (workload, evenly))

        def requests(share: float) -> Iterator[WorkloadRequest]:
            while True:
                yield next(even if chance.random() < share else popular)

        contestant = TaoContestant(graph, read_ids(Path(subject.ids_file)), Payloads.drawn("mix"))
        for number, share in enumerate(self.even_shares):
            sent = _Requests(contestant.ask, requests(share))
            yield _Load(
                text=f"the published mix, {share:.0%} of it spread evenly",
                warming=sent,
                warm_seconds=self.seconds / 2 if number else self.warm_seconds,
                warm_awaiters=self.awaiters,
                requests=sent,
            )


async def _drive(requests: _Requests, awaiters: int, seconds: float) -> list[float]:
    """Send requests until there are no more or the time is over, and return the seconds that each took."""
    latencies: list[float] = []
    until, ask = perf_counter() + seconds, requests.ask

    async def one() -> None:
        for each in requests.each:
            asked = perf_counter()
            await ask(each)
            answered = perf_counter()
            latencies.append(answered - asked)
            # The check comes after the query: even a turn through which the machine slept has one answer of each.
            if answered >= until:
                return

    await asyncio.gather(*(one() for _ in range(awaiters)))
    return latencies
