"""A load process' part of `capacity`: objects read at a hit rate that is asked for, or by their popularity; and the
published mix, of which more or less is spread evenly over all keys.

At an asked hit rate every key is one of a few that stay in the cache, or the next of so many others that none of them
is there any more when its turn comes again. By popularity the cache decides. CPU time and counters of the servers are
read before and after each turn, so that a query's cost is known at every process it passes.
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

from loadtest.collector import settle_collector
from loadtest.published.contestant import NODE, Payloads, TaoContestant, read_ids, write_ids, written
from loadtest.published.load_process import Subject
from loadtest.published.requests import RequestStream
from loadtest.published.shapes import Popularity, Zipf
from loadtest.published.workload import workload_named
from loadtest.rounds import cpu_seconds, percentile
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.readiness import server_stats

_TIMEOUT_SECONDS: Final = 20.0
"""A busy machine should show as a latency, not as an error."""
_ADDED_OF_A_SHARD: Final = 100
_READ_AT_ONCE: Final = 500
_BLOCK_BYTES: Final = 1 << 20
SKEW: Final = 1.0
"""Zipf's exponent, of reads by popularity."""
_EVEN: Final = Zipf(0.0)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of load. ``resident``: the share of reads that are for resident keys; None: by popularity.
    ``batch``: objects that one awaiter asks for at once."""

    resident: float | None
    batch: int
    seconds: float


class GrowJob(msgspec.Struct, frozen=True, kw_only=True, tag="grow"):
    """Write objects until there are so many; the ids of those there are stand in the file."""

    topology_file: str
    ids_file: str
    objects: int
    object_bytes: int
    shards: int


class CapacityJob(msgspec.Struct, frozen=True, kw_only=True, tag="capacity"):
    """The turns of one load process. ``number``: which of those that run side by side."""

    topology_file: str
    tier: str
    ids_file: str
    number: int
    residents: int
    """Keys that are to stay in the cache: the first ones."""
    warm_keys: int
    """The most popular, which are read before reads by popularity; they stay for long, and are no keys that miss."""
    awaiters: int
    turns: tuple[Turn, ...]
    admins: dict[str, list[str]]
    """Role → ``host:port`` of each server: follower, leader."""
    pids: dict[str, list[int]]
    """Role → processes: follower, leader, database."""


class MixJob(msgspec.Struct, frozen=True, kw_only=True, tag="mix"):
    """The turns of a load process that asks a published workload, of which a share is spread evenly over all keys."""

    topology_file: str
    tier: str
    subject: Subject
    awaiters: int
    even_shares: tuple[float, ...]
    """One turn each: the share of the requests that is for any key as likely as for another, and so misses more."""
    warm_seconds: float
    """Before the first turn."""
    seconds: float
    """Of each turn; half as long is warmed up before it."""
    admins: dict[str, list[str]]
    pids: dict[str, list[int]]


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one process saw of a turn; CPU seconds and counters are those of whole roles, whoever asked."""

    queries: int
    elapsed: float
    p50_ms: float
    p99_ms: float
    client_cpu: float
    cpu: dict[str, float]
    hits: dict[str, int]
    misses: dict[str, int]
    socket_bytes: int
    """Read and written by the followers: requests, answers, fills and what the leader tells."""
    leader_bytes: int
    """Read and written by the leaders: with followers, databases and, little here, the spool."""


async def run_grow(job: GrowJob, tell: Callable[[str, float], None]) -> int:
    """How many there are now. Raises a `TaoError`."""
    file = Path(job.ids_file)
    ids = list(read_ids(file)) if await asyncio.to_thread(file.exists) else []
    payloads = Payloads(Random("capacity").randbytes(_BLOCK_BYTES))
    async with connect(job.topology_file, settings=ClientSettings(timeout_seconds=60.0)) as graph:
        while len(ids) < job.objects:
            # Neighbours on different shards, so that the first few lie on all servers.
            by_shard = [await graph.reserve_ids(_ADDED_OF_A_SHARD, shard=shard) for shard in range(job.shards)]
            some = [*chain.from_iterable(zip(*by_shard, strict=True))][: job.objects - len(ids)]
            rows = [(NODE, {"payload": payloads.next(job.object_bytes)}, None, each) for each in some]
            await written(graph.obj_add_many, rows)
            ids += some
            tell(f"writing {job.objects:,} objects", len(ids) / job.objects)
    write_ids(file, ids)
    return len(ids)


async def run_capacity(job: CapacityJob, tell: Callable[[str, float], None]) -> list[TurnResult]:
    """One result a turn. Raises a `TaoError`."""
    ids = read_ids(Path(job.ids_file))
    chance = Random(f"capacity {job.number}")
    others = ids[max(job.residents, job.warm_keys) :]
    # Processes that run side by side begin at different places, or one would bring in what the other asks for next.
    start = len(others) * job.number // 4
    cold = cycle([*others[start:], *others[:start]])
    popular = Popularity(range(len(ids)), Zipf(SKEW), chance)

    def keys(turn: Turn) -> Iterator[int]:
        share, resident = turn.resident, ids[: job.residents]
        while True:
            if share is None:
                yield ids[popular.draw()]
            else:
                yield chance.choice(resident) if chance.random() < share else next(cold)

    async with connect(
        job.topology_file, tier=job.tier, settings=ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
    ) as graph:
        results = []
        for number, turn in enumerate(job.turns):
            done = number / len(job.turns)
            tell("warming", done)
            # The most popular last: those are to be there.
            await _read_all(graph, ids[: job.warm_keys if turn.resident is None else job.residents][::-1])
            share = "by popularity" if turn.resident is None else f"{turn.resident:.0%} of resident keys"
            tell(f"reading, {share}, {turn.batch} at a time", done)
            results.append(await _turn(graph, job, turn, keys(turn)))
        return results


async def _read_all(graph: Graph, ids: Sequence[int]) -> None:
    for first in range(0, len(ids), _READ_AT_ONCE):
        await graph.obj_get_many(ids[first : first + _READ_AT_ONCE])


async def _turn(graph: Graph, job: CapacityJob, turn: Turn, keys: Iterator[int]) -> TurnResult:
    async def ask() -> None:
        if turn.batch == 1:
            await graph.obj_get(next(keys))
        else:
            await graph.obj_get_many([next(keys) for _ in range(turn.batch)])

    return await _measured(job, turn.seconds, turn.batch, ask)


async def run_mix(job: MixJob, tell: Callable[[str, float], None]) -> list[TurnResult]:
    """One result a turn. Raises a `TaoError`."""
    subject, plan = job.subject, job.subject.plan()
    workload = workload_named(subject.workload)
    evenly = replace(workload, object_skew=_EVEN, list_skew=_EVEN, assumed=replace(workload.assumed, again=0.0))
    payloads, chance = Payloads(Random("mix").randbytes(_BLOCK_BYTES)), Random(f"mix {subject.seed}")
    popular, even = (RequestStream(each, plan, subject.seed, 0, subject.shards) for each in (workload, evenly))
    settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
    async with connect(job.topology_file, tier=job.tier, settings=settings) as graph:
        contestant = TaoContestant(graph, read_ids(Path(subject.ids_file)), payloads)
        results = []
        for number, share in enumerate(job.even_shares):

            async def ask(share: float = share) -> None:
                await contestant.ask(next(even if chance.random() < share else popular))

            done = number / len(job.even_shares)
            tell("warming", done)
            await _measured(job, job.seconds / 2 if number else job.warm_seconds, 1, ask)
            tell(f"the published mix, {share:.0%} of it spread evenly", done)
            results.append(await _measured(job, job.seconds, 1, ask))
        return results


async def _measured(
    job: CapacityJob | MixJob, seconds: float, batch: int, ask_once: Callable[[], Awaitable[None]]
) -> TurnResult:
    """Of awaiters that ask ``batch`` queries at once, again and again."""
    latencies: list[float] = []
    settle_collector()
    before = await _servers(job)
    cpu_before, began = process_time(), perf_counter()
    until = began + seconds

    async def ask() -> None:
        answered = 0.0
        # Afterwards: of a turn that the machine slept through there is one answer each.
        while answered < until:
            asked = perf_counter()
            await ask_once()
            answered = perf_counter()
            latencies.append(answered - asked)

    await asyncio.gather(*(ask() for _ in range(job.awaiters)))
    elapsed, client_cpu = perf_counter() - began, process_time() - cpu_before
    after = await _servers(job)
    return TurnResult(
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
    """Bytes of all reads and writes of a process; a follower has sockets only, and a leader little else."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])
