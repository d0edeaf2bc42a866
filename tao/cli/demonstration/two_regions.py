"""Two regions with an ocean between them: what a write costs in either, how soon the other shows it, and what a read
may still not know.

A cluster of its own, because a region is a whole set of databases and servers. The ocean is the development cluster's
delay line.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Final

from tao.cli.checking.access import access_of
from tao.cli.checking.caches import verify_caches
from tao.cli.checking.replicas import compare_replicas
from tao.cli.demonstration.figures import DemonstrationFailed, Latency, RegionFigures
from tao.cli.demonstration.private_cluster import private_cluster
from tao.cli.demonstration.seeing import seconds_until
from tao.cli.export_scan import ReaderLogin
from tao.client import MEMORY, ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import DEFAULT_RTT_MS, Shape
from tao.devcluster.replication_sets import follow, hold, replicas
from tao.devcluster.schema_copy import read_schema
from tao.devcluster.state_folder import service_accounts
from tao.topology.document import parse_topology

SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, shards=4)
_TIMEOUT_SECONDS: Final = 20.0
_REPEATS: Final = 20


async def measure_regions() -> RegionFigures:
    """Start two regions, write and read in both, hold replication and let it go on, compare everything, and stop.

    Raises `DemonstrationFailed` when something is not as it should be, `OperatorError` for a cluster that cannot be
    started, and what the SDK raises."""
    async with private_cluster(SHAPE, rtt_ms=DEFAULT_RTT_MS) as (cluster, _), AsyncExitStack() as stack:
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        east, west = [
            await stack.enter_async_context(
                connect(str(cluster.topology_path), region=region, tier=SHAPE.tier_names[0], settings=settings)
            )
            for region in SHAPE.region_names
        ]
        alice, post = await east.obj_add("user", {"name": "Alice"}), await east.obj_add("checkin", {"text": "Hello"})
        await seconds_until(lambda: _exist(west, alice, post), "what the first region wrote", "region")
        # The same like over and over: the other region's cache holds it, and has to be told of each change.
        here, seen = await _write(east, west, alice, post, 0)
        # The master region's followers know of these before their writer does.
        there, _ = await _write(west, east, alice, post, _REPEATS)
        behind, by_token, critical, caught_up = await _hold_replication(cluster, east, west, alice, post)
        compared, wrong = await _compare(cluster)
    return RegionFigures(
        rtt_ms=DEFAULT_RTT_MS,
        acknowledged_in_master_region=Latency.of(here),
        acknowledged_elsewhere=Latency.of(there),
        seen_p50_ms=Latency.of(seen).p50_ms,
        seen_max_ms=1000 * max(seen),
        behind_ms=1000 * behind,
        by_token_ms=1000 * by_token,
        critical_ms=1000 * critical,
        caught_up_ms=1000 * caught_up,
        compared=compared,
        wrong=wrong,
    )


async def _exist(graph: Graph, *ids: int) -> bool:
    return None not in await graph.obj_get_many(ids)


async def _write(near: Graph, far: Graph, user: int, post: int, start: int) -> tuple[list[float], list[float]]:
    """Write through one region; seconds until the answer, and from then until the other region shows it."""
    acknowledged, seen = [], []
    for number in range(start, start + _REPEATS):

        async def arrived(number: int = number) -> bool:
            return [edge.time for edge in await far.assoc_range(post, "liked_by", 0, 1)] == [number]

        began = time.perf_counter()
        await near.assoc_add(user, "likes", post, number)
        acknowledged.append(time.perf_counter() - began)
        with near.trace() as trace:
            own = await near.assoc_get(post, "liked_by", [user])
        if [edge.time for edge in own] != [number] or trace[-1].answered_by != MEMORY:
            raise DemonstrationFailed("a follower does not hold what was just written through it")
        seen.append(await seconds_until(arrived, "a like of the other region", "region"))
    return acknowledged, seen


async def _hold_replication(
    cluster: DevCluster, east: Graph, west: Graph, user: int, post: int
) -> tuple[float, float, float, float]:
    """While the second region's database stands still: seconds of a read there, which is behind, and of two that are
    not, with the token of the write and critical; then until all reads know, once replication goes on."""
    topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    accounts = service_accounts(cluster.record.passwords)
    before = await west.assoc_count(user, "likes")
    for replica in replicas(topology):
        await hold(replica, accounts.administrator)
    try:
        with east.recording() as recording:
            await east.assoc_delete(user, "likes", post)
        began = time.perf_counter()
        held = await west.assoc_count(user, "likes")
        behind = time.perf_counter() - began
        began = time.perf_counter()
        told = await west.assoc_count(user, "likes", after=recording.token.text())
        by_token = time.perf_counter() - began
        began = time.perf_counter()
        known = await west.assoc_get(user, "likes", [post], critical=True)
        critical = time.perf_counter() - began
    finally:
        for replica in replicas(topology):
            await follow(replica, accounts.administrator, accounts.replicator)
    if held != before or told != before - 1 or known:
        raise DemonstrationFailed(
            f"while replication stands still, reads say {held} likes, with the token {told}, critically {known}"
        )

    async def caught_up() -> bool:
        return await west.assoc_count(post, "liked_by") == 0

    return (
        behind,
        by_token,
        critical,
        await seconds_until(caught_up, "what was written while replication stood still", "region"),
    )


async def _compare(cluster: DevCluster) -> tuple[int, int]:
    """Cache entries and rows compared, and those that are wrong."""
    reader = service_accounts(cluster.record.passwords).reader
    schema = read_schema(cluster.schema_path)[0]
    topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    async with access_of(ReaderLogin(topology, schema, reader.user, reader.password), token="") as access:
        caches = await verify_caches(access.routes, access.links, access.store)
        databases = await compare_replicas(access.routes, schema, access.scans, access.scans_in)
    if not (caches.clean and databases.clean):
        raise DemonstrationFailed(f"the regions differ: {[*caches.findings, *databases.findings][:1]}")
    compared = sum(line.entries for line in caches.servers) + sum(line.rows for line in databases.servers)
    return compared, len(caches.findings) + len(databases.findings)
