"""What needs real databases: a development cluster of two regions, a database of many shards, and 70 ms a commit.

Commits wait for the other region's replica (semi-synchronous replication), so the round trip is the time of a commit.
The cluster has two leaders in each region, of which one is lost on the way: what one leader and two leaders send shows
how proofs of freshness grow with the leaders.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiomysql
import msgspec

from loadtest.conditions import until, within
from loadtest.faults.recovery import last_promotion
from loadtest.latencies import Latencies
from loadtest.open_loop import sample_at_rate
from loadtest.region_cluster import MASTER, RegionCluster, region_cluster
from loadtest.rounds import cpu_seconds
from loadtest.scale.processes import resident_mb
from loadtest.target import pids_of
from tao.admin.server_stats import server_stats
from tao.client import Graph
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.line_control import SetRoundTrip, ask_line
from tao.model.errors import OperatorError, TaoError, Unavailable
from tao.runtime.admin_client import admin_get

_RTT_MS: Final = 70.0
_START_RTT_MS: Final = 0.1
"""The round trip until all tables are made: each of them is a commit."""
_TAILER: Final = f"{MASTER}-tailer-1"
_KEPT: Final = f"{MASTER}-leader-1"
_LOST: Final = f"{MASTER}-leader-2"
_DATABASE: Final = f"{MASTER}-db-1"
_MEASURED: Final = (_KEPT, f"{MASTER}-follower-1a", _TAILER, f"{MASTER}-watcher-1", _DATABASE)
_ACKNOWLEDGED: Final = re.compile(r'^\w*relays_total\{[^}]*outcome="acknowledged"[^}]*\} (\S+)$', re.MULTILINE)
_OBJECTS: Final = 2_000
_WRITES: Final = "writes"
_STATEMENT_SECONDS: Final = 2.5
"""Long enough for whatever a leader asks of its database each second."""
_LOOK_SECONDS: Final = 0.02
_PATIENCE_SECONDS: Final = 90.0
_START_SECONDS: Final = 600.0
"""A replica makes eleven thousand tables, one after the other."""
_TIMEOUT_SECONDS: Final = 20.0


class ServerUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a real server uses. Shares are of a core."""

    resident_mb: float
    idle_share: float
    writing_share: float


class ClusterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on the cluster of real servers."""

    shards: int
    use: dict[str, ServerUse]
    writes_per_second: float
    """Acknowledged ones."""
    failed_writes: int
    relays_with_one_leader: float
    """Relays of an idle database's tailer to one leader, each second; ``relays_with_two_leaders`` likewise."""
    relays_with_two_leaders: float
    idle_statements: int
    """Statements of the only leader, while idle, that were looked at: all but commits, which wait for the other
    region."""
    longest_statement_bytes: int
    """The size of the longest of ``idle_statements``."""
    slowest_statement_ms: float
    lost_leader_detected_seconds: float
    taken_of_lost_leader: int
    taken_of_lost_leader_seconds: float
    """Time from the mark until the other leader owned its shards."""
    takeover_seconds: float
    """Time from the start of the only leader until it owned all shards."""
    promotion_detected_seconds: float
    promotion_seconds: float
    writes_again_seconds: float
    """Time from the loss of the master until a write was acknowledged."""

    def relays_per_leader(self, leaders: int) -> float:
        """Return how many relays a second a leader gets of an idle database, if they grow as from one to two."""
        more = max(0.0, self.relays_with_two_leaders - self.relays_with_one_leader)
        return self.relays_with_one_leader + more * (leaders - 1)


async def measure_cluster(
    folder: Path, shards: int, seconds: float, writes_per_second: float, step: Callable[[str], None]
) -> ClusterFigures:
    """Run the cluster and measure. Raises `OperatorError`."""
    shape = Shape(regions=2, tiers=1, followers=1, leaders=2, watchers=1, shards=shards)
    settings = ClusterSettings(
        state_dir=folder / "cluster",
        shape=shape,
        rtt_ms=_START_RTT_MS,
        durability=Durability.RELAXED,
        semi_sync=True,
        log_level="warning",
        start_seconds=_START_SECONDS,
    )
    async with AsyncExitStack() as stack:
        regions = await stack.enter_async_context(region_cluster(settings, step))
        await ask_line(regions.cluster.line_control, SetRoundTrip(_RTT_MS))
        graph = await regions.graph(MASTER, "tier-1", stack, _TIMEOUT_SECONDS)
        return await _Cluster(regions, graph, seconds, step).measured(shards, writes_per_second)


class _Cluster:
    """The steps, of which each changes the cluster for the next ones."""

    def __init__(self, regions: RegionCluster, graph: Graph, seconds: float, step: Callable[[str], None]) -> None:
        self._regions: Final = regions
        self._cluster: Final = regions.cluster
        self._graph: Final = graph
        self._seconds: Final = seconds
        self._step: Final = step

    async def measured(self, shards: int, writes_per_second: float) -> ClusterFigures:
        pids = await pids_of(self._cluster)
        ids = await self._graph.obj_add_many([("user", {"name": "of many"})] * min(_OBJECTS, 4 * shards))
        await self._regions.quiet(_PATIENCE_SECONDS)
        self._step("idle")
        idle, two_leaders = await self._used(pids, asyncio.sleep(self._seconds))
        self._step(f"{writes_per_second:g} writes a second")
        latencies, count = Latencies(), 0

        async def write() -> None:
            nonlocal count
            count += 1
            await self._graph.obj_update(ids[count % len(ids)], {"home": str(count)})

        writing, _ = await self._used(
            pids, sample_at_rate(writes_per_second, self._seconds, [write], latencies, _WRITES)
        )
        written = latencies.summary(_WRITES)
        use = {
            name: ServerUse(
                resident_mb=resident_mb(pids[name]), idle_share=idle[name], writing_share=writing[name] - idle[name]
            )
            for name in _MEASURED
        }
        lost = await self._lose_leader(shards)
        await asyncio.sleep(self._seconds)  # the tailer says where the shards continue that have moved
        _, one_leader = await self._used(pids, asyncio.sleep(self._seconds))
        takeover, statements = await self._start_again(shards)
        promotion: dict[str, Any] = await self._lose_master(ids[0])
        return ClusterFigures(
            shards=shards,
            use=use,
            writes_per_second=written.count / self._seconds if written is not None else 0.0,
            failed_writes=latencies.failed[_WRITES],
            relays_with_one_leader=one_leader,
            relays_with_two_leaders=two_leaders / 2,
            **statements,
            **lost,
            takeover_seconds=takeover,
            **promotion,
        )

    async def _used(self, pids: dict[str, int], work: Any) -> tuple[dict[str, float], float]:
        """Return the share of a core of each server during the work, and the tailer's relays a second to all leaders.

        `Any`: an awaitable of anything."""
        began, relays = time.monotonic(), await self._relays()
        before = {name: cpu_seconds(pids[name]) for name in _MEASURED}
        await work
        elapsed = time.monotonic() - began
        shares = {name: (cpu_seconds(pids[name]) - used) / elapsed for name, used in before.items()}
        return shares, (await self._relays() - relays) / elapsed

    async def _relays(self) -> float:
        _, text = await admin_get(self._cluster.admin(_TAILER), "/metrics")
        found = _ACKNOWLEDGED.search(text.decode())
        if found is None:
            raise OperatorError("the tailer's metrics do not say how many relays were acknowledged")
        return float(found[1])

    async def _start_again(self, shards: int) -> tuple[float, dict[str, Any]]:
        """Start the only leader again. Returns how long it takes until it owns all shards, and the figures of its
        statements while it is idle then."""
        database = self._cluster.database(_DATABASE)
        account = database.accounts.administrator
        connection = await aiomysql.connect(
            host=database.host, port=database.port, user=account.user, password=account.password, autocommit=True
        )
        try:
            async with connection.cursor() as cursor:
                # A connection keeps the settings that it began with, so they are made before the leader connects.
                for setting in ("log_output = 'TABLE'", "long_query_time = 0", "slow_query_log = 1"):
                    await cursor.execute(f"SET GLOBAL {setting}")
                takeover = await self._taken_after_start(shards)
                self._step("the statements of an idle leader")
                await cursor.execute("TRUNCATE TABLE mysql.slow_log")
                await asyncio.sleep(max(_STATEMENT_SECONDS, self._seconds))
                await cursor.execute("SET GLOBAL slow_query_log = 0")
                await cursor.execute(
                    "SELECT COUNT(*), MAX(LENGTH(sql_text)), MAX(TIME_TO_SEC(query_time)) FROM mysql.slow_log "
                    "WHERE user_host LIKE %s AND sql_text NOT LIKE %s",
                    (f"%{database.accounts.leader.user}%", "COMMIT%"),
                )
                ((count, length, slowest),) = await cursor.fetchall()
        finally:
            await connection.ensure_closed()
        return takeover, {
            "idle_statements": int(count),
            "longest_statement_bytes": int(length or 0),
            "slowest_statement_ms": 1000 * float(slowest or 0.0),
        }

    async def _owned(self) -> int:
        try:
            return int((await server_stats(self._cluster.admin(_KEPT)))["owned_shards"])
        except Unavailable:
            return -1

    async def _lose_leader(self, shards: int) -> dict[str, Any]:
        self._step("losing a leader")
        owned, began = await self._owned(), time.monotonic()
        await self._cluster.kill(_LOST)

        async def marked() -> bool:
            leaders = self._regions.routes.leaders(MASTER).servers
            return any(server.name == _LOST and server.down for server in leaders)

        async def all_taken() -> bool:
            return await self._owned() == shards

        await within(_PATIENCE_SECONDS, marked, _LOOK_SECONDS, f"{_LOST} was not marked")
        detected = time.monotonic()
        await within(_PATIENCE_SECONDS, all_taken, _LOOK_SECONDS, f"{_KEPT} has not taken all shards")
        return {
            "lost_leader_detected_seconds": detected - began,
            "taken_of_lost_leader": shards - owned,
            "taken_of_lost_leader_seconds": time.monotonic() - detected,
        }

    async def _taken_after_start(self, shards: int) -> float:
        self._step("starting the only leader again")
        await self._cluster.kill(_KEPT)
        starting = asyncio.create_task(self._cluster.restart(_KEPT))
        began = 0.0
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while (owned := await self._owned()) < shards:
                    began = began or (time.monotonic() if owned >= 0 else 0.0)
                    await asyncio.sleep(_LOOK_SECONDS)
            return time.monotonic() - began
        finally:
            await starting

    async def _lose_master(self, key: int) -> dict[str, float]:
        self._step("losing the master")

        async def writes() -> bool:
            try:
                await self._graph.obj_update(key, {"home": "again"})
            except TaoError:
                return False
            return True

        async with asyncio.timeout(_PATIENCE_SECONDS):
            await until(writes, _LOOK_SECONDS)
        began = time.monotonic()
        await self._cluster.kill(_DATABASE)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await until(writes, _LOOK_SECONDS)
        again, promotion = time.monotonic() - began, await last_promotion(self._regions)
        return {
            "promotion_detected_seconds": promotion["detected_after_seconds"],
            "promotion_seconds": promotion["promoted_within_seconds"],
            "writes_again_seconds": again,
        }
