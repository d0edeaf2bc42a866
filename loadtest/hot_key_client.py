"""The load process' part of `hot_key`: several clients, each with its own connections, half of whose reads are for one
object. With and without a cache in the client they take turns, and each follower's work in a turn is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import cycle
from random import Random
from time import perf_counter, process_time
from typing import Final

import msgspec

from loadtest.collector import settle_collector
from loadtest.jobs import HotKeyJob
from loadtest.rounds import cpu_seconds
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.readiness import server_stats

_TIMEOUT_SECONDS: Final = 30.0
_WARM_SECONDS: Final = 1.0
"""Until followers know what is hot, and clients have heard."""
_PREPARED: Final = 400
"""Keys of each awaiter, asked for again and again."""
_SEED: Final = 5
_NAMES: Final = {
    (False, False): "neither",
    (False, True): "client cache",
    (True, False): "clones",
    (True, True): "clones and client cache",
}


class HotKeyTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. ``queries`` and ``cpu_seconds``: of each follower."""

    contestant: str
    seconds: float
    reads: int
    p50_ms: float
    p99_ms: float
    queries: dict[str, float]
    cpu_seconds: dict[str, float]
    client_cpu_seconds: float
    faults: list[str] = []


async def run_hot_key(job: HotKeyJob, tell: Callable[[str, float], None]) -> list[HotKeyTurn]:
    """All turns. Raises `TaoError`."""
    turns: list[HotKeyTurn] = []
    async with AsyncExitStack() as stack:
        graphs: dict[bool, list[Graph]] = {}
        for keeps in (False, True):
            settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS, keep_hot_items=keeps)
            graphs[keeps] = [
                await stack.enter_async_context(connect(job.topology_file, settings=settings))
                for _ in range(job.clients)
            ]
        await graphs[False][0].obj_get_many(job.ids)
        count = 2 * job.pace.rounds
        for number in range(count):
            keeps = bool(number % 2)
            name = _NAMES[job.cloned, keeps]
            tell(f"{name}, round {number // 2 + 1} of {job.pace.rounds}", number / count)
            await _drive(graphs[keeps], job, min(_WARM_SECONDS, 2 * job.pace.round_seconds))
            turns.append(await _turn(name, graphs[keeps], job))
    return turns


async def _turn(name: str, graphs: list[Graph], job: HotKeyJob) -> HotKeyTurn:
    settle_collector()
    queries, cpu = await _queries(job), _cpu(job)
    began, client_cpu = perf_counter(), process_time()
    latencies, faults = await _drive(graphs, job, job.pace.round_seconds)
    seconds, client_cpu = perf_counter() - began, process_time() - client_cpu
    queries_after, cpu_after = await _queries(job), _cpu(job)
    latencies.sort()
    return HotKeyTurn(
        contestant=name,
        seconds=seconds,
        reads=len(latencies),
        p50_ms=1e3 * latencies[len(latencies) // 2],
        p99_ms=1e3 * latencies[len(latencies) * 99 // 100],
        queries={server: after - queries[server] for server, after in queries_after.items()},
        client_cpu_seconds=client_cpu,
        cpu_seconds={server: after - cpu[server] for server, after in cpu_after.items()},
        faults=faults,
    )


async def _drive(graphs: list[Graph], job: HotKeyJob, seconds: float) -> tuple[list[float], list[str]]:
    until = perf_counter() + seconds
    latencies: list[float] = []
    faults: list[str] = []
    chance = Random(_SEED)

    async def ask(graph: Graph, keys: list[int]) -> None:
        for key in cycle(keys):
            began = perf_counter()
            found = await graph.obj_get(key)
            ended = perf_counter()
            latencies.append(ended - began)
            if found is None or found.id != key:
                faults.append(f"object {key} is not found")
                return
            # Afterwards: of a turn that the machine slept through there is one answer each.
            if ended >= until:
                return

    askers = []
    for graph in graphs:
        for _ in range(job.awaiters):
            keys = [job.ids[0] if chance.random() < 0.5 else chance.choice(job.ids) for _ in range(_PREPARED)]
            askers.append(ask(graph, keys))
    await asyncio.gather(*askers)
    return latencies, faults


async def _queries(job: HotKeyJob) -> dict[str, float]:
    stats = await asyncio.gather(*map(server_stats, job.admins.values()))
    return {name: each["hits"] + each["misses"] for name, each in zip(job.admins, stats, strict=True)}


def _cpu(job: HotKeyJob) -> dict[str, float]:
    return {name: cpu_seconds(pid) for name, pid in job.pids.items()}
