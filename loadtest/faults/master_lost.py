"""Scenario `master_lost`: a master database is killed under writes, again and again, and the watcher replaces it.

Between two regions with semi-synchronous replication and without, and in one region whose database has a standby; with
semi-synchronous replication the master also hangs (`SIGSTOP`), so that it refuses nothing, and vanishes: then nothing
answers a new connection either, as where a machine is gone or its network drops all packets. The figures are the times
(until the watcher is sure, until the new master is open, until the first write and until every writer is served), and
how many acknowledged writes are lost: none may be under semi-synchronous replication; without it they are the loss
window. The kinds take turns.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Final

import msgspec

from loadtest import options
from loadtest.conditions import within
from loadtest.faults.injection import Injector
from loadtest.faults.recovery import last_promotion
from loadtest.options import Options
from loadtest.region_cluster import MASTER, REMOTE, RegionCluster, region_cluster
from loadtest.results import Conditions, ScenarioResult, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.admin.replication import masters
from tao.admin.server_stats import server_stats
from tao.client import Graph
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Role, Shape
from tao.devcluster.line_control import Cut, Heal, ask_line
from tao.model.errors import OperatorError, TaoError
from tao.model.topology import DatabaseServer

_TWO_REGIONS: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, shards=4, watchers=1)
_STANDBY: Final = Shape(tiers=1, followers=1, leaders=1, shards=4, watchers=1, standby=True)
_WRITERS: Final = 32
_TIMEOUT_SECONDS: Final = 20.0
_PATIENCE_SECONDS: Final = 90.0
_PAUSE_SECONDS: Final = 0.02
_WRITES_FIRST: Final = 20
_FIRST_WRITE_SECONDS: Final = 4.0
"""The aim under semi-synchronous replication, for a standby in the region as for a replica in another one."""


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What a round loses a master of."""

    name: str
    shape: Shape
    semi_sync: bool
    hangs: bool = False
    """It is stopped, not killed, and its link is not cut."""
    vanishes: bool = False
    """It is stopped, and its machine does not complete connections either."""


_NEAR: Final = _Kind(name="standby in the region", shape=_STANDBY, semi_sync=True)
_FAR: Final = _Kind(name="two regions", shape=_TWO_REGIONS, semi_sync=True)
_FAR_ASYNCHRONOUS: Final = _Kind(name="two regions, asynchronous", shape=_TWO_REGIONS, semi_sync=False)
_NEAR_HANGS: Final = _Kind(name="standby in the region, hanging", shape=_STANDBY, semi_sync=True, hangs=True)
_FAR_HANGS: Final = _Kind(name="two regions, hanging", shape=_TWO_REGIONS, semi_sync=True, hangs=True)
_NEAR_VANISHES: Final = _Kind(name="standby in the region, vanishing", shape=_STANDBY, semi_sync=True, vanishes=True)
_FAR_VANISHES: Final = _Kind(name="two regions, vanishing", shape=_TWO_REGIONS, semi_sync=True, vanishes=True)
_KINDS: Final = {
    each.name: each for each in (_FAR, _FAR_ASYNCHRONOUS, _NEAR, _FAR_HANGS, _NEAR_HANGS, _FAR_VANISHES, _NEAR_VANISHES)
}
_UNANSWERED_SECONDS: Final = 0.2
"""A connection that is not completed in this time is not completed at all: here it takes a tenth of a millisecond."""
_MOST_CONNECTIONS: Final = 10_000
"""More than any server of the project keeps waiting until it accepts them."""


@dataclass(frozen=True, kw_only=True)
class MasterLostOptions(Options):
    """The options of `master_lost`."""

    kinds: tuple[str, ...] = options.SHAPE.default(
        (),
        toy=(_FAR.name, _NEAR_VANISHES.name),
        choices=tuple(_KINDS),
        help="Lose a master only in this way; may be repeated.",
    )
    rounds: int = options.REPETITIONS.default(3, toy=1, help="Losses of each kind.")


class _Writers:
    """Writers that count upwards, each on an object of its own."""

    def __init__(self, graph: Graph) -> None:
        self.acknowledged: Final[dict[int, int]] = {}
        """The last acknowledged number of each object."""
        self._graph: Final = graph

    async def write(self, object_id: int, *, once: bool = False) -> None:
        """Write number after number; ``once``: until one is acknowledged."""
        for number in count(1):
            with suppress(TaoError):
                await self._graph.obj_update(object_id, {"home": str(number)})
                self.acknowledged[object_id] = number
                if once:
                    return


async def run(settings: BenchSettings, progress: Progress, wanted: MasterLostOptions) -> ScenarioResult:
    """Run some rounds of each kind, at toy size one with a master that is killed and one with a master that vanishes,
    which is to hang and more. Raises `OperatorError`.

    An acknowledged write that is lost under semi-synchronous replication is a fault."""
    kinds = [_KINDS[name] for name in wanted.kinds or _KINDS] * wanted.rounds
    rtt_ms = 10.0 if settings.toy else DEFAULT_RTT_MS
    rounds: list[dict[str, Any]] = []  # Any: the JSON's values
    for number, kind in enumerate(kinds):
        progress.step(f"losing a master: {kind.name}", number / len(kinds))
        cluster_settings = ClusterSettings(
            state_dir=settings.work_dir / f"lost{number}",
            shape=kind.shape,
            rtt_ms=rtt_ms,
            durability=Durability.RELAXED,
            semi_sync=kind.semi_sync,
            log_level="warning",
        )
        async with region_cluster(cluster_settings, lambda _: None) as regions:
            rounds.append(
                {"shape": kind.name, "semi_sync": kind.semi_sync, **await _lose_master(regions, kind)},
            )
    lost = sum(each["lost"] for each in rounds if each["semi_sync"])
    aims = [
        at_most(
            "seconds from the loss to the first write",
            max(each["first_write_seconds"] for each in rounds if each["shape"] == kind.name),
            _FIRST_WRITE_SECONDS,
            kind.name,
        )
        for kind in dict.fromkeys(kinds)
        if kind.semi_sync
    ]
    conditions: Conditions = {
        "writers": _WRITERS,
        "rtt_ms": rtt_ms,
        "rounds_of_each_kind": wanted.rounds,
        "durability": "relaxed",
    }
    return result_of(
        conditions,
        {"rounds": rounds},
        [at_most("no acknowledged write lost with semi-synchronous replication", lost, 0)],
        aims=aims,
        lists=True,
    )


SCENARIO: Final = Scenario(
    name="master_lost",
    summary="a master is killed under writes and replaced: how long it takes, and what is lost",
    run=run,
    options=MasterLostOptions,
    help="""Lose a master under writes, and measure the time until writes succeed again.

    The exit status is 1 when an acknowledged write is lost with semi-synchronous replication.""",
)


async def _lose_master(regions: RegionCluster, kind: _Kind) -> dict[str, Any]:
    """Return the figures of one round; the times of the loss and of the promotion are the watcher's.

    ``first_write_seconds`` and ``writes_again_seconds`` are the times from the kill until one writer, and every writer,
    had a write acknowledged."""
    cluster = regions.cluster
    region = cluster.record.shape.region_names[0]
    async with AsyncExitStack() as stack:
        # Lost writes are counted here; a client that attached its own writes would get an error for them.
        graph = await regions.graph(region, "tier-1", stack, _TIMEOUT_SECONDS, attaches=False)
        ids = await graph.obj_add_many([("user", {"name": "writer"})] * 2 * _WRITERS)
        writers = _Writers(graph)
        tasks = [asyncio.create_task(writers.write(each)) for each in ids[:_WRITERS]]

        async def watched() -> bool:
            stats = [await server_stats(cluster.admin(name)) for name in regions.named(Role.WATCHER)]
            return max(int(each["renewed_leases"]) for each in stats) > 1

        async def are_writing() -> bool:
            found = writers.acknowledged.values()
            return len(found) == _WRITERS and min(found) >= _WRITES_FIRST

        try:
            await within(_PATIENCE_SECONDS, watched, _PAUSE_SECONDS, "the master's lease was not renewed")
            await within(_PATIENCE_SECONDS, are_writing, _PAUSE_SECONDS, "the writers did not begin")
            killed_at = await _lose(regions, kind, stack)
        finally:
            # So that no later write hides a lost one.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        acknowledged = dict(writers.acknowledged)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            served = [asyncio.create_task(writers.write(each, once=True)) for each in ids[_WRITERS:]]
            await asyncio.wait(served, return_when=asyncio.FIRST_COMPLETED)
            first = time.monotonic() - killed_at
            await asyncio.gather(*served)
        again = time.monotonic() - killed_at
        found = await graph.obj_get_many(list(acknowledged), critical=True)
        stored = [0 if each is None else int(str(each.fields.get("home") or 0)) for each in found]
    promotion = await last_promotion(regions)
    return {
        "acknowledged": sum(acknowledged.values()),
        "lost": sum(max(0, number - have) for number, have in zip(acknowledged.values(), stored, strict=True)),
        **{key: promotion[key] for key in ("detected_after_seconds", "promoted_within_seconds")},
        "first_write_seconds": round(first, 3),
        "writes_again_seconds": round(again, 3),
    }


async def _lose(regions: RegionCluster, kind: _Kind, stack: AsyncExitStack) -> float:
    """Kill the master with its machine, or stop it until the stack is closed. Return the time of the loss."""
    master = masters(regions.topology)[0]
    if kind.hangs or kind.vanishes:
        lost_at = time.monotonic()
        stack.push_async_callback(await Injector(regions, Random(0)).stop_process(master.name, pause=True))
        if kind.vanishes:
            await _fill_backlog(master, stack)
        return lost_at
    async with _machine_lost(regions):
        lost_at = time.monotonic()
        await regions.cluster.kill(master.name)
    return lost_at


async def _fill_backlog(server: DatabaseServer, stack: AsyncExitStack) -> None:
    """Connect to a server that is stopped until no more connections wait for it, until the stack is closed.

    The kernel completes connections for a stopped process, up to a bound; beyond that it drops their first packets, and
    only acknowledges what arrives on earlier ones, to which nobody answers. Raises `OperatorError`."""
    loop = asyncio.get_running_loop()
    for _ in range(_MOST_CONNECTIONS):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        try:
            async with asyncio.timeout(_UNANSWERED_SECONDS):
                await loop.sock_connect(waiting, (server.host, server.port))
        except TimeoutError:
            return
    raise OperatorError(f"{server.name} is stopped, and {_MOST_CONNECTIONS} connections to it were completed")


@asynccontextmanager
async def _machine_lost(regions: RegionCluster) -> AsyncIterator[None]:
    """Cut the link between regions meanwhile, as when the master's machine is lost: what it has sent and the other
    region has not received is lost, too."""
    line = regions.cluster.line_control
    if regions.cluster.record.shape.is_distributed:
        await ask_line(line, Cut((MASTER, REMOTE)))
    try:
        yield
    finally:
        if regions.cluster.record.shape.is_distributed:
            await ask_line(line, Heal())
