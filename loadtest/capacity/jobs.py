"""The load processes of `capacity`: objects read at a given hit rate or by popularity, and the published mix.

For a given hit rate every key is either one of a few that stay in the cache, or the next of so many others that it has
been evicted by the time its turn comes again. By popularity the cache decides. A part of the published mix is spread
evenly over all keys. CPU time and counters of the servers are read before and after each turn, which gives a query's
cost at every process that it passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Final

import msgspec

from loadtest.client_process import StepReport
from loadtest.published.contestant import NODE, Payloads, TaoContestant, read_ids, write_ids, written
from loadtest.published.jobs import Subject
from loadtest.published.requests import RequestStream
from loadtest.published.shapes import Popularity, Zipf
from loadtest.published.workload import workload_named
from loadtest.rounds import cpu_seconds, percentile, settle_collector
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect

_TIMEOUT_SECONDS: Final = 20.0
"""Timeout of a request; long, so that a busy machine shows as a latency and not as an error."""
_ADDED_OF_A_SHARD: Final = 100
_READ_AT_ONCE: Final = 500
_BLOCK_BYTES: Final = 1 << 20
SKEW: Final = 1.0
"""Zipf's exponent for reads by popularity."""
_EVEN: Final = Zipf(0.0)


class CapacityTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One period of load. ``resident`` is the share of reads that are for resident keys, or None for reads by
    popularity. ``batch`` is the number of objects that one awaiter asks for at once."""

    resident: float | None
    batch: int
    seconds: float


class GrowJob(msgspec.Struct, frozen=True, kw_only=True):
    """Write objects until there are so many. The file holds the ids of those that exist."""

    topology_file: str
    ids_file: str
    objects: int
    object_bytes: int
    shards: int

    async def work(self, report: StepReport) -> int:
        """Return the number of objects. Raises a `TaoError`."""
        file = Path(self.ids_file)
        ids = list(read_ids(file)) if await asyncio.to_thread(file.exists) else []
        payloads = Payloads(Random("capacity").randbytes(_BLOCK_BYTES))
        async with connect(self.topology_file, settings=ClientSettings(timeout_seconds=60.0)) as graph:
            while len(ids) < self.objects:
                # Neighbours are on different shards, so that the first few lie on all servers.
                by_shard = [await graph.reserve_ids(_ADDED_OF_A_SHARD, shard=shard) for shard in range(self.shards)]
                some = [*chain.from_iterable(zip(*by_shard, strict=True))][: self.objects - len(ids)]
                rows = [(NODE, {"payload": payloads.next(self.object_bytes)}, None, each) for each in some]
                await written(graph.obj_add_many, rows)
                ids += some
                report(f"writing {self.objects:,} objects", len(ids) / self.objects)
        write_ids(file, ids)
        return len(ids)


class CapacityJob(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one load process; ``number`` is its number among those that run side by side."""

    topology_file: str
    tier: str
    ids_file: str
    number: int
    residents: int
    """Number of keys that are to stay in the cache: the first ones."""
    warm_keys: int
    """Number of the most popular keys, which are read before reads by popularity. They stay cached for long, so no
    reads that should miss use them."""
    awaiters: int
    turns: tuple[CapacityTurn, ...]
    admins: dict[str, list[str]]
    """Role → ``host:port`` of each server: follower, leader."""
    pids: dict[str, list[int]]
    """Role → process ids: follower, leader, database."""

    async def work(self, report: StepReport) -> list[CapacityTurnResult]:
        """Return the result of each turn. Raises a `TaoError`."""
        ids = read_ids(Path(self.ids_file))
        chance = Random(f"capacity {self.number}")
        others = ids[max(self.residents, self.warm_keys) :]
        # Processes that run side by side begin at different places, or one would cache what the other asks for next.
        start = len(others) * self.number // 4
        cold = cycle([*others[start:], *others[:start]])
        popular = Popularity(range(len(ids)), Zipf(SKEW), chance)

        def keys(turn: CapacityTurn) -> Iterator[int]:
            share, resident = turn.resident, ids[: self.residents]
            while True:
                if share is None:
                    yield ids[popular.draw()]
                else:
                    yield chance.choice(resident) if chance.random() < share else next(cold)

        async with connect(
            self.topology_file, tier=self.tier, settings=ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        ) as graph:
            results = []
            for number, turn in enumerate(self.turns):
                done = number / len(self.turns)
                report("warming", done)
                # The most popular come last, so that they are cached at the end.
                await _read_all(graph, ids[: self.warm_keys if turn.resident is None else self.residents][::-1])
                share = "by popularity" if turn.resident is None else f"{turn.resident:.0%} of resident keys"
                report(f"reading, {share}, {turn.batch} at a time", done)
                results.append(await _turn(graph, self, turn, keys(turn)))
            return results


class MixJob(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of a load process that sends a published workload, a share of which is spread evenly over all keys."""

    topology_file: str
    tier: str
    subject: Subject
    awaiters: int
    even_shares: tuple[float, ...]
    """One turn for each share of the requests whose keys are drawn evenly from all, and which therefore miss more."""
    warm_seconds: float
    """Seconds of warming before the first turn."""
    seconds: float
    """Seconds of each turn; it is preceded by half as many seconds of warming."""
    admins: dict[str, list[str]]
    pids: dict[str, list[int]]

    async def work(self, report: StepReport) -> list[CapacityTurnResult]:
        """Return the result of each turn. Raises a `TaoError`."""
        subject, plan = self.subject, self.subject.plan()
        workload = workload_named(subject.workload)
        evenly = replace(workload, object_skew=_EVEN, list_skew=_EVEN, assumed=replace(workload.assumed, again=0.0))
        payloads, chance = Payloads(Random("mix").randbytes(_BLOCK_BYTES)), Random(f"mix {subject.seed}")
        popular, even = (RequestStream(each, plan, subject.seed, 0, subject.shards) for each in (workload, evenly))
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with connect(self.topology_file, tier=self.tier, settings=settings) as graph:
            contestant = TaoContestant(graph, read_ids(Path(subject.ids_file)), payloads)
            results = []
            for number, share in enumerate(self.even_shares):

                async def ask(share: float = share) -> None:
                    await contestant.ask(next(even if chance.random() < share else popular))

                done = number / len(self.even_shares)
                report("warming", done)
                await _measured(self, self.seconds / 2 if number else self.warm_seconds, 1, ask)
                report(f"the published mix, {share:.0%} of it spread evenly", done)
                results.append(await _measured(self, self.seconds, 1, ask))
            return results


class CapacityTurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one process for a turn. CPU seconds and counters cover whole roles, and all clients."""

    queries: int
    elapsed: float
    p50_ms: float
    p99_ms: float
    client_cpu: float
    cpu: dict[str, float]
    hits: dict[str, int]
    misses: dict[str, int]
    socket_bytes: int
    """Bytes that the followers read and wrote: requests, answers, fills and deliveries of the leader."""
    leader_bytes: int
    """Bytes that the leaders read and wrote: with followers, with databases, and (few of them here) to the spool."""


async def _read_all(graph: Graph, ids: Sequence[int]) -> None:
    for first in range(0, len(ids), _READ_AT_ONCE):
        await graph.obj_get_many(ids[first : first + _READ_AT_ONCE])


async def _turn(graph: Graph, job: CapacityJob, turn: CapacityTurn, keys: Iterator[int]) -> CapacityTurnResult:
    async def ask() -> None:
        if turn.batch == 1:
            await graph.obj_get(next(keys))
        else:
            await graph.obj_get_many([next(keys) for _ in range(turn.batch)])

    return await _measured(job, turn.seconds, turn.batch, ask)


async def _measured(
    job: CapacityJob | MixJob, seconds: float, batch: int, ask_once: Callable[[], Awaitable[None]]
) -> CapacityTurnResult:
    """Measure awaiters that send ``batch`` queries at once, again and again."""
    latencies: list[float] = []
    settle_collector()
    before = await _servers(job)
    cpu_before, began = process_time(), perf_counter()
    until = began + seconds

    async def ask() -> None:
        answered = 0.0
        # The check comes after the query: even a turn through which the machine slept has one answer of each awaiter.
        while answered < until:
            asked = perf_counter()
            await ask_once()
            answered = perf_counter()
            latencies.append(answered - asked)

    await asyncio.gather(*(ask() for _ in range(job.awaiters)))
    elapsed, client_cpu = perf_counter() - began, process_time() - cpu_before
    after = await _servers(job)
    return CapacityTurnResult(
        queries=len(latencies) * batch,
        elapsed=elapsed,
        p50_ms=round(1000 * percentile(latencies, 0.5), 3),
        p99_ms=round(1000 * percentile(latencies, 0.99), 3),
        client_cpu=client_cpu,
        cpu={role: after.cpu[role] - before.cpu[role] for role in after.cpu},
        hits={role: after.hits[role] - before.hits[role] for role in after.hits},
        misses={role: after.misses[role] - before.misses[role] for role in after.misses},
        socket_bytes=after.io_bytes["follower"] - before.io_bytes["follower"],
        leader_bytes=after.io_bytes["leader"] - before.io_bytes["leader"],
    )


class _Servers(msgspec.Struct, frozen=True, kw_only=True):
    cpu: dict[str, float]
    hits: dict[str, int]
    misses: dict[str, int]
    io_bytes: dict[str, int]


async def _servers(job: CapacityJob | MixJob) -> _Servers:
    hits, misses = {}, {}
    for role, addresses in job.admins.items():
        stats = [await server_stats(address) for address in addresses]
        hits[role] = sum(each["hits"] for each in stats)
        misses[role] = sum(each["misses"] for each in stats)
    return _Servers(
        cpu={role: sum(map(cpu_seconds, pids)) for role, pids in job.pids.items()},
        hits=hits,
        misses=misses,
        io_bytes={role: sum(map(_io_bytes, job.pids[role])) for role in job.admins},
    )


def _io_bytes(pid: int) -> int:
    """Return the bytes of all reads and writes of a process. A follower only uses sockets, and a leader little else."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])
