"""Scenario `counters`: one counter that two followers count under load: writes, CPU and the value.

Each of two followers, in two tiers, gets half of the additions, in batches of which each addition is one: the SDK would
make one of all additions of a tick. Their flushes are counted meanwhile, and their CPU, less what idle ones take. Then
the load ends, and both are asked for the value. Other counters are added to at one follower and read at the other until
the addition is there. In the end the slots are made as old as those of a counter at rest, whose lives can write no
more, and folded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

import aiomysql

from loadtest.conditions import within
from loadtest.drivers import WrongAnswer
from loadtest.results import ScenarioResult, at_most, result_of
from loadtest.rounds import cpu_seconds, percentile
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from loadtest.target import pids_of
from tao.admin.server_stats import server_stats
from tao.client import Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.counters import LIFE_HORIZON_SECONDS
from tao.model.errors import OperatorError
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb

COUNTER: Final = "views"
_LIST: Final = "item.views"
_SHARDS: Final = 4
_TIERS: Final = ("tier-1", "tier-2")
_HOT: Final = 1 << 40
_BATCH: Final = 250
_AGED_SECONDS: Final = 2 * LIFE_HORIZON_SECONDS
_PATIENT_SECONDS: Final = 60.0
_ASK_SECONDS: Final = 10.0
_SERVER_SETTINGS: Final[dict[str, dict[str, object]]] = {
    Role.FOLLOWER: {"counters": {"life_seconds": 5}},
    Role.LEADER: {"jobs": {"care_seconds": 0.5, "fold_every_seconds": 1, "fold_after_seconds": 0.0}},
    Role.WORKER: {"runner": {"poll_seconds": 0.1}},
}
"""Lives end soon and folds come at once, so that the scenario does not wait for them."""


@dataclass(frozen=True, slots=True)
class _Size:
    adds_per_second: int = 50_000
    seconds: float = 20.0
    idle_seconds: float = 5.0
    samples: int = 200
    samples_at_once: int = 20


_TOY: Final = _Size(2_000, 1.5, 0.5, 4, 2)


@dataclass(frozen=True, slots=True)
class _Followers:
    """The two followers, and a graph for each of their tiers."""

    cluster: DevCluster
    servers: tuple[CacheServer, ...]
    graphs: tuple[Graph, ...]

    async def stats(self) -> list[dict[str, Any]]:
        """Return what the followers say of their counters. `Any`: JSON."""
        found = await asyncio.gather(*(server_stats(server.admin) for server in self.servers))
        return [each["counters"] for each in found]

    async def cpu(self) -> float:
        """Return the CPU seconds of both so far."""
        pids = await pids_of(self.cluster)
        return sum(cpu_seconds(pids[server.name]) for server in self.servers)


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure a hot counter, then what others see, then a counter at rest. Raises `OperatorError`."""
    size = _TOY if settings.toy else _Size()
    async with _cluster(settings, progress) as followers:
        progress.step("a hot counter", 0.3)
        hot = await _hot(followers, size)
        progress.step("additions seen at another follower", 0.6)
        seen = await _seen(followers, size)
        progress.step("a counter at rest", 0.8)
        rest = await _at_rest(followers, hot["value"])
    return result_of(
        {
            "adds_per_second": size.adds_per_second,
            "followers": len(_TIERS),
            "batch": _BATCH,
            "seconds": size.seconds,
            "samples": size.samples,
        },
        {"hot": hot, "seen": seen, "rest": rest},
        aims=[
            at_most("database writes a second of each follower", hot["writes_per_second"], 2),
            at_most("error of the value after quiet", hot["error"], 0),
            at_most("CPU of a follower for an addition in a batch, µs", hot["cpu_us"], 2),
            at_most("p99 until an addition is seen at another follower, ms", seen["p99_ms"], 2_000),
            at_most("rows of a counter at rest", rest["rows"], 1),
        ],
        notes=[
            f"Load: {size.adds_per_second:,} additions a second to one counter, {hot['adds_per_second']:,.0f} counted."
        ],
    )


SCENARIO: Final = Scenario(
    name="counters", summary="one counter under load through two followers: writes, value, delay and rows", run=run
)


@asynccontextmanager
async def _cluster(settings: BenchSettings, progress: Progress) -> AsyncIterator[_Followers]:
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "counters",
        shape=Shape(tiers=2, followers=1, leaders=1, databases=1, shards=_SHARDS, workers=1),
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
        server_settings=_SERVER_SETTINGS,
    )
    async with DevCluster(cluster_settings, progress.step) as cluster:
        path = str(cluster.topology_path)
        first, second = (connect(path, tier=tier) for tier in _TIERS)
        async with first as near, second as far:
            (region,) = near.topology.regions
            servers = tuple(server for tier in region.followers for server in tier.servers)
            yield _Followers(cluster, servers, (near, far))


async def _hot(followers: _Followers, size: _Size) -> dict[str, float]:
    """Return what a counter under load costs, and how far its value is off when the load has ended."""
    links = Links(LinkSettings(), Credentials("loadtest", "client"))
    number = followers.graphs[0].schema.counter(COUNTER).number
    add = pb.Write(counter_add=pb.CounterAdd(id=_HOT, atype=number, by=1))
    version = followers.graphs[0].topology.version

    async def load(server: CacheServer) -> int:
        link, added = links.to(server), 0
        pause = len(followers.servers) * _BATCH / size.adds_per_second
        began = time.perf_counter()
        while (now := time.perf_counter() - began) < size.seconds:
            request = pb.Request(topology_version=version, write=pb.WriteBatch(writes=[add] * _BATCH))
            answer = await link.ask(request, _ASK_SECONDS)
            if not answer.write.all_counted:
                raise WrongAnswer(f"{server.name} has not counted a batch")
            added += _BATCH
            await asyncio.sleep(max(0.0, added / _BATCH * pause - now))
        return added

    try:
        await asyncio.gather(*(links.to(server).ask(_probe(), _ASK_SECONDS) for server in followers.servers))
        idle = await followers.cpu()
        await asyncio.sleep(size.idle_seconds)
        idle = (await followers.cpu() - idle) / size.idle_seconds
        before, cpu, began = await followers.stats(), await followers.cpu(), time.perf_counter()
        added = sum(await asyncio.gather(*map(load, followers.servers)))
        seconds = time.perf_counter() - began
        cpu = await followers.cpu() - cpu - idle * seconds
        after = await followers.stats()
    finally:
        await links.close()
    settled = await _settled(followers)
    flushes = [now["flushed"] - then["flushed"] for then, now in zip(before, after, strict=True)]
    return {
        "adds_per_second": round(added / seconds),
        "writes_per_second": round(max(flushes) / seconds, 2),
        "cpu_us": round(cpu / added * 1e6, 2),
        "value": added,
        "error": abs(settled - added),
    }


def _probe() -> pb.Request:
    return pb.Request(read=pb.ReadBatch())


async def _settled(followers: _Followers) -> int:
    """Return the value of the hot counter once nothing is left to write and all that can be asked say the same. Raises
    `OperatorError` when that takes too long."""

    async def is_written() -> bool:
        return not any(each["queued"] or each["batches_under_way"] for each in await followers.stats())

    await within(_PATIENT_SECONDS, is_written, 0.1, "the followers have not written what they counted")
    # Each follower knows its own additions before the other one's are delivered to it: two that miss as much of each
    # other agree on a value that lacks it. The database's has everything by now.
    values = [0, 1]

    async def is_agreed() -> bool:
        reads = [graph.counter_get(_HOT, COUNTER) for graph in followers.graphs]
        reads.append(followers.graphs[0].counter_get(_HOT, COUNTER, critical=True))
        values[:] = [found.value for found in await asyncio.gather(*reads)]
        return len({*values}) == 1

    try:
        await within(_PATIENT_SECONDS, is_agreed, 0.1, "the followers and the database do not agree on the value")
    except OperatorError as failure:
        raise OperatorError(f"{failure}: {values}") from None
    return values[0]


async def _seen(followers: _Followers, size: _Size) -> dict[str, float]:
    """Return how long an addition at one follower takes until the other one has it."""
    near, far = followers.graphs
    random, delays = Random(11), list[float]()
    numbers = iter(range(size.samples))

    async def is_seen(counted_id: int) -> bool:
        return (await far.counter_get(counted_id, COUNTER)).value > 0

    async def sampler() -> None:
        for number in numbers:
            counted_id = (number % _SHARDS) << SHARD_SHIFT | (1 << 40) + 1 + number
            await far.counter_get(counted_id, COUNTER)
            await asyncio.sleep(random.random())
            began = time.perf_counter()
            await near.counter_add(counted_id, COUNTER)
            await within(_PATIENT_SECONDS, partial(is_seen, counted_id), 0.005, "an addition is not seen")
            delays.append(time.perf_counter() - began)

    await asyncio.gather(*(sampler() for _ in range(size.samples_at_once)))
    in_ms = [1000 * each for each in delays]
    return {"p50_ms": round(percentile(in_ms, 0.5)), "p99_ms": round(percentile(in_ms, 0.99))}


async def _at_rest(followers: _Followers, value: float) -> dict[str, float]:
    """Return how many rows a counter has when its lives have been over for a day, and check its value."""
    graph = followers.graphs[0]

    async def are_forgotten() -> bool:
        return not any(each["held"] for each in await followers.stats())

    await within(_PATIENT_SECONDS, are_forgotten, 0.2, "the followers still hold counters")
    slots = await graph.assoc_count(_HOT, _LIST, critical=True)
    await _age(followers.cluster, graph, (_HOT,))

    async def is_folded() -> bool:
        return await graph.assoc_count(_HOT, _LIST, critical=True) <= 1

    await within(_PATIENT_SECONDS, is_folded, 0.2, "no worker has folded the counter")
    found = (await graph.counter_get(_HOT, COUNTER, critical=True)).value
    if found != value:
        raise WrongAnswer(f"the counter was {value:.0f} and is {found} after it was folded")
    return {"rows_before": slots, "rows": await graph.assoc_count(_HOT, _LIST, critical=True)}


async def _age(cluster: DevCluster, graph: Graph, ids: Sequence[int]) -> None:
    """Make the slots of counters look as if their lives had begun days ago. Nobody may add to them afterwards."""
    account = service_accounts(cluster.record.passwords).administrator
    (database,) = graph.topology.databases
    server = database.servers[database.master_region]
    connection = await aiomysql.connect(
        host=server.host, port=server.port, user=account.user, password=account.password, autocommit=True
    )
    try:
        async with connection.cursor() as cursor:
            for each in ids:
                table = f"tao_{each >> SHARD_SHIFT:05d}.assocs_states"
                values = _AGED_SECONDS << 32, each, graph.schema.counter(COUNTER).number
                where = "WHERE id1 = %s AND atype = %s AND id2 > 0"
                await cursor.execute(f"UPDATE {table} SET id2 = id2 - %s {where}", values)  # noqa: S608 - a number
    finally:
        await connection.ensure_closed()
