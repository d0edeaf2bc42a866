"""The chapter of two regions: a cluster of its own, with the development cluster's delay line between the regions.

It shows what a write costs in either region, how soon the other shows it, and which reads may be behind.
"""

from __future__ import annotations

from typing import Final

from tao.admin.cache_verification import verify_caches
from tao.admin.replica_verification import compare_replicas
from tao.admin.replication import follow, hold, replicas
from tao.client import MEMORY, Graph
from tao.demonstration.narration import Figures, chapter, check, ms, percentiles, say, table
from tao.demonstration.stage import Stage, open_stage, seconds_until, timed
from tao.devcluster.layout import DEFAULT_RTT_MS, Shape

_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, shards=4)
_REPEATS: Final = 20


async def show_two_regions() -> Figures:
    """Start two regions, write and read in both, stop and restart replication, compare everything, and stop."""
    chapter(5, "two regions")
    say(
        """A second cluster has two regions with databases, leaders and followers of their own. East has the master
        database, west a replica; west's leaders pass writes on to east. The round trip is that of the paper."""
    )
    (tier,) = _SHAPE.tier_names
    async with (
        open_stage(_SHAPE, rtt_ms=DEFAULT_RTT_MS) as stage,
        stage.graph(tier, "east") as east,
        stage.graph(tier, "west") as west,
    ):
        found = await _measure(stage, east, west)
    rows = [
        ("round trip between the regions", found["rtt_ms"]),
        ("half of the writes in east, acknowledged within", found["acknowledged_in_master_region"]["p50_ms"]),
        ("and then seen in west within", found["seen_p50_ms"]),
        ("half of the writes in west, acknowledged within", found["acknowledged_elsewhere"]["p50_ms"]),
        ("a read in west while replication stands still (behind)", found["behind_ms"]),
        ("one with the token of the write (up to date)", found["by_token_ms"]),
        ("a critical read at the same time (up to date)", found["critical_ms"]),
        ("replication goes on: west knows within", found["caught_up_ms"]),
    ]
    table(("", "time"), [(label, ms(value)) for label, value in rows], right=("time",))
    say(
        f"""A write in west pays for one round trip, and its writer sees it at once. A critical read always pays for the
        round trip, one with the token of a write only while west has not got that write; neither is ever behind.
        {found["compared"]:,} cache entries and rows of both regions compared: zero differences."""
    )
    return found


async def _measure(stage: Stage, east: Graph, west: Graph) -> Figures:
    alice, post = await east.obj_add("user", {"name": "Alice"}), await east.obj_add("checkin", {"text": "Hello"})

    async def exist() -> bool:
        return None not in await west.obj_get_many([alice, post])

    await seconds_until(exist, "what the first region wrote", "region")
    # The same edge is written again and again: the other region's cache holds it and needs each change.
    here, seen = await _write(east, west, alice, post, range(_REPEATS))
    # The master region's followers have these writes before they are acknowledged here.
    there, _ = await _write(west, east, alice, post, range(_REPEATS, 2 * _REPEATS))
    return {
        "rtt_ms": DEFAULT_RTT_MS,
        "acknowledged_in_master_region": percentiles(here),
        "acknowledged_elsewhere": percentiles(there),
        # From the acknowledgement of a write in the first region until the second shows it.
        "seen_p50_ms": percentiles(seen)["p50_ms"],
        "seen_max_ms": 1000 * max(seen),
        **await _hold_replication(stage, east, west, alice, post),
        "compared": await _compare(stage),
        "wrong": 0,
    }


async def _write(near: Graph, far: Graph, user: int, post: int, times: range) -> tuple[list[float], list[float]]:
    """Write through one region. Return the seconds until each answer, and from then until the other region shows it."""
    acknowledged, seen = [], []
    for number in times:

        async def arrived(number: int = number) -> bool:
            return [edge.time for edge in await far.assoc_range(post, "liked_by", 0, 1)] == [number]

        acknowledged.append((await timed(near.assoc_add(user, "likes", post, number)))[0])
        with near.trace() as trace:
            own = await near.assoc_get(post, "liked_by", [user])
        check(
            [edge.time for edge in own] == [number] and trace[-1].answered_by == MEMORY,
            "a follower does not hold what was just written through it",
        )
        seen.append(await seconds_until(arrived, "a like of the other region", "region"))
    return acknowledged, seen


async def _hold_replication(stage: Stage, east: Graph, west: Graph, user: int, post: int) -> Figures:
    """Stop replication, write, and return the latency of three reads in the second region: a plain one, which is
    behind, one with the token of the write, and a critical one; then the time until it has caught up after the
    restart."""
    accounts, followed = stage.accounts, replicas(stage.topology)
    before = await west.assoc_count(user, "likes")
    for replica in followed:
        await hold(replica, accounts.administrator)
    try:
        with east.recording() as recording:
            await east.assoc_delete(user, "likes", post)
        behind, held = await timed(west.assoc_count(user, "likes"))
        by_token, by_token_count = await timed(west.assoc_count(user, "likes", after=recording.token.text()))
        critical, known = await timed(west.assoc_get(user, "likes", [post], critical=True))
    finally:
        for replica in followed:
            await follow(replica, accounts.administrator, accounts.replicator)
    check(
        held == before and by_token_count == before - 1 and not known,
        f"while replication is stopped, reads return {held} likes, with the token {by_token_count}, critical ones "
        f"{known}",
    )

    async def knows() -> bool:
        return await west.assoc_count(post, "liked_by") == 0

    caught_up = await seconds_until(knows, "what was written while replication was stopped", "region")
    return {
        "behind_ms": 1000 * behind,
        "by_token_ms": 1000 * by_token,
        "critical_ms": 1000 * critical,
        "caught_up_ms": 1000 * caught_up,
    }


async def _compare(stage: Stage) -> int:
    """Compare caches and replicas; return how many entries and rows were compared."""
    async with stage.access() as access:
        caches = await verify_caches(access.routes, access.links, access.store)
        databases = await compare_replicas(access.routes, stage.schema, access.scans, access.scans_at)
    check(
        caches.clean and databases.clean,
        f"the regions differ: {[*caches.findings, *databases.findings][:1]}",
    )
    return sum(line.entries for line in caches.servers) + sum(line.rows for line in databases.servers)
