"""The measurements of the demonstration: reads cold and warm, writes between two tiers, and two regions.

* Everything is read once and compared with the files, with the server that answered and the latency. Many readers send
  single queries concurrently, as requests of a web server do; the SDK puts queries of one moment into one message.
* Writes through one tier are looked for in the other: how soon they are seen, at which ends, and by which message. The
  first one makes Erin a friend of Cathy, and so changes a page that was rendered before; more follow for a
  distribution.
* Two regions are a cluster of their own, with the development cluster's delay line between them: what a write costs in
  either region, how soon the other shows it, and which reads may be behind.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from tao.admin.access import Access, ReaderLogin, access_of
from tao.admin.cache_verification import verify_caches
from tao.admin.documents import read_schema
from tao.admin.replica_verification import compare_replicas
from tao.admin.replication import follow, hold, replicas
from tao.client import MEMORY, ClientSettings, Graph, connect
from tao.demonstration.checkin_page import Cast
from tao.demonstration.figures import DemonstrationFailed, Latency, PassFigures, RegionFigures, SpreadFigures
from tao.demonstration.graph_files import ATYPE, PageGraph
from tao.demonstration.stage import SHAPE, Stage, private_cluster, seconds_until
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import DEFAULT_RTT_MS, Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.graph import decode_count
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import counter_of
from tao.terminal import Counting
from tao.topology.document import parse_topology
from tao.wire.v1 import session_pb2 as pb

_READERS: Final = 32
_SEED: Final = 1

Check = Callable[[int], Awaitable[None]]


async def read_everything(stage: Stage, name: str, tier: str, expected: PageGraph) -> PassFigures:
    """Read objects, then lists, then counts of all pages through a tier, in the same shuffled order in each pass.

    Raises `DemonstrationFailed` at the first answer that differs from the files."""
    followers, leaders = stage.followers(tier), stage.leaders()
    order = list(expected.pages)
    random.Random(_SEED).shuffle(order)
    async with stage.graph(tier) as graph:
        checks = _Checks(graph, expected)
        before = await stage.hits_and_misses(followers), await stage.hits_and_misses(leaders)
        began = time.perf_counter()
        with Counting(f"answers compared ({name})") as counting:
            objects = await _read(order, checks.object, lambda done: counting.show("objects", done))
            lists = await _read(order, checks.list, lambda done: counting.show("lists", len(order) + done))
            counts = await _read(order, checks.count, lambda done: counting.show("counts", 2 * len(order) + done))
        seconds = time.perf_counter() - began
        after = await stage.hits_and_misses(followers), await stage.hits_and_misses(leaders)
    by_follower, missed = (now - then for now, then in zip(after[0], before[0], strict=True))
    # A miss that joins another fetch reaches no leader, so the leaders' share is computed from their own misses.
    by_database = after[1][1] - before[1][1]
    return PassFigures(
        name=name,
        tier=tier,
        queries=by_follower + missed,
        by_follower=by_follower,
        by_leader=missed - by_database,
        by_database=by_database,
        seconds=seconds,
        objects=Latency.of(objects),
        lists=Latency.of(lists),
        counts=Latency.of(counts),
    )


async def _read(order: Iterable[int], check: Check, on_progress: Callable[[int], None]) -> list[float]:
    """Check every page with many concurrent readers, and return the latencies in seconds."""
    waiting = iter(order)
    latencies: list[float] = []
    clock = time.perf_counter

    async def reader() -> None:
        for page in waiting:
            began = clock()
            await check(page)
            latencies.append(clock() - began)
            if not len(latencies) % 1000:
                on_progress(len(latencies))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_READERS):
                group.create_task(reader())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return latencies


class _Checks:
    def __init__(self, graph: Graph, expected: PageGraph) -> None:
        self._graph = graph
        self._expected = expected
        self._limit = graph.schema.atype(ATYPE).limit

    async def object(self, page: int) -> None:
        found = await self._graph.obj_get(page)
        fields = self._expected.pages[page]
        if found is None or dict(found.fields) != fields:
            raise DemonstrationFailed(f"page {page} is {found}, the file says {fields}")

    async def list(self, page: int) -> None:
        neighbours = self._expected.neighbours[page]
        found: list[int] = []
        # One edge more than expected is asked for, so that one too many is found; in parts, for the type's limit.
        while len(found) <= len(neighbours):
            wanted = min(self._limit, len(neighbours) + 1 - len(found))
            part = await self._graph.assoc_range(page, ATYPE, len(found), wanted)
            found += part.id2s
            if len(part) < wanted:
                break
        if len(found) != len(neighbours) or set(found) != neighbours:
            raise DemonstrationFailed(
                f"the list of page {page} has {len(found):,} edges, the file {len(neighbours):,}; "
                f"{len(neighbours.symmetric_difference(found)):,} differ"
            )

    async def count(self, page: int) -> None:
        found = await self._graph.assoc_count(page, ATYPE)
        if found != len(self._expected.neighbours[page]):
            raise DemonstrationFailed(
                f"the count of page {page} is {found:,}, the file has {len(self._expected.neighbours[page]):,} edges"
            )


_REPEATS: Final = 20
_CALL_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Side:
    """One end of the new edge, as a tier shows it."""

    edge: str
    tier: str
    found: bool
    answered_by: str


@dataclass(frozen=True, slots=True)
class CachedList:
    """A list as one server holds it: its version, which counts writes, and its count."""

    server: str
    writes_seen: int
    count: int


@dataclass(frozen=True, slots=True)
class NewFriendship:
    """The effects of the write. ``changed_in_place``: the far tier's server answered from memory all the time."""

    before: CachedList
    after: CachedList
    acknowledged_seconds: float
    seen_seconds: float
    changed_in_place: bool
    sides: list[Side]


async def befriend(near: Graph, far: Graph, access: Access, cast: Cast, far_tier: str) -> NewFriendship:
    """Make Erin a friend of Cathy through ``near`` and wait until ``far`` shows it.

    Raises `DemonstrationFailed` when it does not, or when one end of the edge is missing."""
    await far.assoc_range(cast.cathy, "friend", 0, 10)  # so that its memory holds the list that changes
    before = await _cached(far, access, far_tier, cast.cathy)
    began = time.perf_counter()
    await near.assoc_add(cast.erin, "friend", cast.cathy)
    acknowledged = time.perf_counter() - began

    async def seen() -> bool:
        return bool(await far.assoc_get(cast.cathy, "friend", [cast.erin]))

    with far.trace() as trace:
        delay = await seconds_until(seen, "Erin's friendship with Cathy", "tier")
    in_place = all(served.answered_by == MEMORY for served in trace)
    after = await _cached(far, access, far_tier, cast.cathy)
    sides = [
        await _side(graph, tier, names, id1, id2)
        for graph, tier in ((near, SHAPE.tier_names[0]), (far, far_tier))
        for names, id1, id2 in (("Erin -> Cathy", cast.erin, cast.cathy), ("Cathy -> Erin", cast.cathy, cast.erin))
    ]
    missing = [f"{side.edge} in {side.tier}" for side in sides if not side.found]
    if missing:
        raise DemonstrationFailed(f"the new friendship has not the edge {', '.join(missing)}")
    if after.writes_seen != before.writes_seen + 1 or after.count != before.count + 1:
        raise DemonstrationFailed(f"one write turned {before} into {after}")
    return NewFriendship(before, after, acknowledged, delay, in_place, sides)


async def measure_spread(near: Graph, far: Graph, cast: Cast, first: NewFriendship) -> SpreadFigures:
    """Let David like the post and take it back, several times. Raises what `befriend` raises."""
    acknowledged, seen = [first.acknowledged_seconds], [first.seen_seconds]
    for number in range(_REPEATS):
        wanted = 1 - number % 2

        async def arrived(wanted: int = wanted) -> bool:
            return await far.assoc_count(cast.checkin, "liked_by") == wanted

        await far.assoc_count(cast.checkin, "liked_by")
        began = time.perf_counter()
        if wanted:
            await near.assoc_add(cast.david, "likes", cast.checkin)
        else:
            await near.assoc_delete(cast.david, "likes", cast.checkin)
        acknowledged.append(time.perf_counter() - began)
        seen.append(await seconds_until(arrived, "David's like", "tier"))
    return SpreadFigures(
        writes=len(seen),
        acknowledged=Latency.of(acknowledged),
        seen_p50_ms=Latency.of(seen).p50_ms,
        seen_max_ms=1000 * max(seen),
        version_before=first.before.writes_seen,
        version_after=first.after.writes_seen,
    )


async def _side(graph: Graph, tier: str, edge: str, id1: int, id2: int) -> Side:
    with graph.trace() as trace:
        found = await graph.assoc_get(id1, "friend", [id2])
    return Side(edge, tier, bool(found), trace[-1].answered_by)


async def _cached(graph: Graph, access: Access, tier: str, user: int) -> CachedList:
    """Return the friend list of a user in the memory of its server in a tier."""
    server = access.routes.tier(graph.region, tier).home(user >> SHARD_SHIFT)
    friend = graph.schema.atype("friend").number
    request = pb.Request(inspect=pb.Inspect(list_id1s=[user], list_atypes=[friend]))
    answer = await access.links.to(server).ask(request, _CALL_SECONDS)
    value = next((entry.value for entry in answer.inspection.entries if entry.value), b"")
    if not value:
        raise DemonstrationFailed(f"{server.name} does not hold the friend list that was read from it a moment ago")
    version, count = decode_count(value)
    return CachedList(server.name, counter_of(version), count)


_REGIONS_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, shards=4)
_TIMEOUT_SECONDS: Final = 20.0


async def measure_regions() -> RegionFigures:
    """Start two regions, write and read in both, stop and restart replication, compare everything, and stop.

    Raises `DemonstrationFailed` when a check fails, `OperatorError` when the cluster cannot be started, and what the
    SDK raises."""
    async with private_cluster(_REGIONS_SHAPE, rtt_ms=DEFAULT_RTT_MS) as (cluster, _), AsyncExitStack() as stack:
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        east, west = [
            await stack.enter_async_context(
                connect(str(cluster.topology_path), region=region, tier=_REGIONS_SHAPE.tier_names[0], settings=settings)
            )
            for region in _REGIONS_SHAPE.region_names
        ]
        alice, post = await east.obj_add("user", {"name": "Alice"}), await east.obj_add("checkin", {"text": "Hello"})
        await seconds_until(lambda: _exist(west, alice, post), "what the first region wrote", "region")
        # The same edge is written again and again: the other region's cache holds it and needs each change.
        here, seen = await _write(east, west, alice, post, 0)
        # The master region's followers have these writes before they are acknowledged here.
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
    """Write through one region. Return the seconds until each answer, and from then until the other region shows it."""
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
    """Stop replication, write, and return the seconds of three reads in the second region: a plain one, which is
    behind, one with the token of the write, and a critical one; then the seconds until it has caught up after the
    restart."""
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
        by_token_count = await west.assoc_count(user, "likes", after=recording.token.text())
        by_token = time.perf_counter() - began
        began = time.perf_counter()
        known = await west.assoc_get(user, "likes", [post], critical=True)
        critical = time.perf_counter() - began
    finally:
        for replica in replicas(topology):
            await follow(replica, accounts.administrator, accounts.replicator)
    if held != before or by_token_count != before - 1 or known:
        raise DemonstrationFailed(
            f"while replication is stopped, reads return {held} likes, with the token {by_token_count}, critical ones "
            f"{known}"
        )

    async def caught_up() -> bool:
        return await west.assoc_count(post, "liked_by") == 0

    return (
        behind,
        by_token,
        critical,
        await seconds_until(caught_up, "what was written while replication was stopped", "region"),
    )


async def _compare(cluster: DevCluster) -> tuple[int, int]:
    """Compare caches and replicas; return how many entries and rows were compared, and how many are wrong."""
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
