"""The load processes' part of `peers`: load one graph into every store, check all contestants, let them take turns.

All contestants get the same requests (`loadtest.peers.arena`), and all caches are warmed with the same number of
requests (`loadtest.peers.warm_up`). The peers write to the same tables, and only the one that writes invalidates its
cache. The last check therefore skips what any of them has written.

In the shape with two load processes, the first one has the second (`PairJob`) prepare and take each turn with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, islice
from pathlib import Path
from typing import Final

import aiomcache
import glide
import memcachio.errors
import msgspec
import redis.exceptions

from loadtest.client_process import StepReport, run_job
from loadtest.drivers import at_rate, closed
from loadtest.peers.arena import CACHES, OBJECTS_OF_A_BATCH, PeerGraph, Prepared, Rivals
from loadtest.peers.contestants import TAO, Peer
from loadtest.peers.figures import BATCHES, MANY, ONE, OPEN, PAIR, PeerFigure, counts_of_tao, goals_of, peer_figures
from loadtest.peers.postgres_graph import POSTGRES_ERRORS
from loadtest.peers.resource_limits import AppliedLimits, ServerGroups
from loadtest.peers.sql_graph import SQL_ERRORS
from loadtest.peers.warm_up import WarmBounds, Warming, Window, ask_all, warmed
from loadtest.rounds import (
    Comparison,
    Counters,
    Counts,
    Drive,
    Pace,
    Source,
    Trial,
    TurnSamples,
    settle_collector,
    since,
    take_all_turns,
)
from loadtest.scenario import Silent
from tao.admin.server_stats import server_stats
from tao.devcluster.ports import LOOPBACK
from tao.model.errors import OperatorError, TaoError

FAILURES: Final = (
    TaoError, *SQL_ERRORS, *POSTGRES_ERRORS, redis.exceptions.RedisError, glide.GlideError, aiomcache.ClientException,
    memcachio.errors.MemcachedError, OSError, TimeoutError,
)  # fmt: skip
"""Errors with which a request may fail; any other is an error of the measurement."""
_OPEN_LOOP_STRETCH: Final = 3.0
"""Factor by which the rounds of the open loop are longer: a tail at a constant rate needs time more than requests."""
_WARM_DATABASE: Final = 50_000
"""The most requests that warm a database without a cache: its connections, and the pages of its buffer pool."""
_PROCESSES: Final = 2
"""Load processes of the shape that has several."""
_FIRST_STREAM: Final = 5
_SECOND_STREAM: Final = 101
_MAX_LINE_BYTES: Final = 64 << 20


class PeersResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all shapes, in order."""

    figures: list[PeerFigure]
    warming: Warming
    checked: int
    """The number of answers of each contestant that were compared."""
    limits: dict[str, AppliedLimits]
    """The limits of the databases, by database."""


class PeersFillJob(msgspec.Struct, frozen=True, kw_only=True):
    """Writes one graph into every contestant's database."""

    rivals: Rivals

    async def work(self, report: StepReport) -> int:
        """Return the number of nodes. Raises `TaoError`, or what a peer's client raises."""
        async with AsyncExitStack() as stack:
            arena = PeerGraph(self.rivals, stack, _FIRST_STREAM)
            await arena.fill(report)
        return arena.plan.nodes


class PeersJob(msgspec.Struct, frozen=True, kw_only=True):
    """Runs all contestants, over the graph that was loaded, in every shape of load."""

    rivals: Rivals
    server_pids: dict[str, dict[str, int]]
    """Each contestant's servers, including the database's, with their process ids."""
    admins: tuple[str, str]
    """Admin addresses of tao's follower and leader."""
    shapes: tuple[str, ...]
    awaiters: int
    warm: WarmBounds
    pace: Pace
    rate: float
    """Requests per second of the open loop, the same for all contestants."""
    groups: dict[str, ServerGroups]
    """The control groups of the databases that are limited once the caches are warm, by database."""
    operations_per_second: int
    """The limit of disk operations of each of them."""

    async def work(self, report: StepReport) -> PeersResult:
        """Return the figures of all contestants. Raises `TaoError`, or what a peer's client raises."""
        async with AsyncExitStack() as stack:
            arena = PeerGraph(self.rivals, stack, _FIRST_STREAM)
            await arena.enter()
            checked = 0
            for again in ("", " again, out of the caches"):
                report(f"checking every contestant's answers{again}", 0.0)
                checked += await arena.check()
            warming = await warmed({name: self._window(arena, name) for name in arena.peers}, self.warm, report)
            second = await stack.enter_async_context(_second_process(self)) if PAIR in self.shapes else None
            limits = {
                name: await asyncio.to_thread(each.limit, self.operations_per_second)
                for name, each in self.groups.items()
            }
            comparisons = {kind: self._comparison(kind, arena, second) for kind in self.shapes}
            alone = [each for kind, each in comparisons.items() if kind != PAIR]
            turns = await take_all_turns(alone, self.pace, report)
            report("checking every contestant's answers once more", 1.0)
            checked += await arena.check()  # before the second process writes what this one does not know
            if PAIR in comparisons:
                turns += await take_all_turns([comparisons[PAIR]], self.pace, report)
        return PeersResult(
            figures=[
                figure
                for (kind, comparison), taken in zip(comparisons.items(), turns, strict=True)
                for figure in peer_figures(kind, comparison, taken)
            ],
            warming=warming,
            checked=checked,
            limits=limits,
        )

    def _comparison(self, kind: str, arena: PeerGraph, second: SecondProcess | None) -> Comparison:
        each = max(1, self.awaiters // _PROCESSES)
        text = {
            MANY: f"{self.awaiters} awaiters of single queries",
            OPEN: f"open loop of {self.rate:,.0f} a second",
            ONE: "1 awaiter",
            BATCHES: f"objects, {OBJECTS_OF_A_BATCH} in one call, {self.awaiters} awaiters",
            PAIR: f"{_PROCESSES} client processes of {each} awaiters each",
        }[kind]
        awaiters = {ONE: 1, PAIR: each}.get(kind, self.awaiters)

        def trial(name: str, peer: Peer) -> Trial:
            requests = arena.batches(name) if kind == BATCHES else arena.stream(name)
            drive = sampled(peer, closed(peer.ask, [requests] * awaiters, FAILURES))
            if kind == OPEN:
                drive = sampled(peer, at_rate(peer.ask, requests, self.rate, FAILURES))
            plain = Trial(
                name,
                drive,
                self.server_pids[name],
                OBJECTS_OF_A_BATCH if kind == BATCHES else 1,
                self._counters(arena, name, requests, knows_all=kind != PAIR),
                requests.prepare,
            )
            return plain if kind != PAIR or second is None else second.trial(plain, peer)

        trials = tuple(trial(name, peer) for name, peer in arena.peers.items())
        return Comparison(
            f"{self.rivals.subject.workload}, {text}",
            trials,
            aims=goals_of(kind, arena.peers, self.rivals.subject.workload, data_exceeds_pool=bool(self.groups)),
            stretch=_OPEN_LOOP_STRETCH if kind == OPEN else 1.0,
        )

    def _counters(self, arena: PeerGraph, name: str, requests: Prepared, *, knows_all: bool) -> Counters:
        """Return what a contestant's counters are read by. ``knows_all``: whether this process has asked for every key
        that the contestant was asked for."""
        peer, first_reads = arena.peers[name], arena.first_reads(name)

        async def read() -> Counts:
            requests.settle()
            counts = {"touched": float(peer.touched)}
            if knows_all:
                counts["first_reads"] = first_reads.first_time
            return counts | (await self._tao_counters() if name == TAO else {})

        return read

    async def _tao_counters(self) -> dict[str, float]:
        follower, leader = [await server_stats(admin) for admin in self.admins]
        return {
            "hits": follower["hits"],
            "misses": follower["misses"],
            "joined": follower["fills"]["joined"],
            "leader_misses": leader["misses"],
        }

    def _window(self, arena: PeerGraph, name: str) -> Window:
        peer, stream, windows = arena.peers[name], arena.stream(name), count()

        async def ask(requests: int) -> float | None:
            if name not in CACHES:
                # It keeps nothing but pages. Its stream goes on with the others'.
                asked = min(requests, _WARM_DATABASE if next(windows) == 0 else 0)
                await ask_all(peer, stream, asked)
                for _ in islice(stream, requests - asked):
                    pass
                return None
            before = await self._tao_counters() if name == TAO else {}
            hows = await ask_all(peer, stream, requests)
            if name == TAO:
                return counts_of_tao(since(before, await self._tao_counters())).hit_rate
            reads = sum(how is not Source.UNKNOWN for how in hows)
            return hows.count(Source.HIT) / max(1, reads)

        return ask


def sampled(peer: Peer, drive: Drive) -> Drive:
    """Return the load, during which the sources of a contestant's answers are sampled."""

    async def drive_sampled(until: float, samples: TurnSamples) -> None:
        with peer.sampled():
            await drive(until, samples)

    return drive_sampled


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """Prepare a turn of so many seconds of a contestant, or take it."""

    contestant: str
    seconds: float = 0.0
    until: float | None = None
    """The clock's time, which all processes of a machine share, at which a turn ends; None to prepare one."""


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """The second process's part of a turn."""

    pid: int
    by_source: list[list[float]] = []
    failed: dict[str, int] = {}
    touched: int = 0


class PairJob(msgspec.Struct, frozen=True, kw_only=True):
    """The second load process: follows the orders of the first until it closes the connection."""

    rivals: Rivals
    awaiters: int
    port: int
    """The port at which the first process waits."""

    async def work(self, report: StepReport) -> int:
        """Return the number of orders. Raises `TaoError`, or what a peer's client raises."""
        orders = 0
        async with AsyncExitStack() as stack:
            arena = PeerGraph(self.rivals, stack, _SECOND_STREAM)
            await arena.enter()
            drives = {
                name: sampled(peer, closed(peer.ask, [arena.stream(name)] * self.awaiters, FAILURES))
                for name, peer in arena.peers.items()
            }
            reader, writer = await asyncio.open_connection(LOOPBACK, self.port)
            _send(writer, _Report(pid=os.getpid()))
            while line := await reader.readline():
                order, samples = msgspec.json.decode(line, type=_Order), TurnSamples()
                peer, stream = arena.peers[order.contestant], arena.stream(order.contestant)
                touched = peer.touched
                if order.until is None:
                    await stream.prepare(order.seconds)
                    settle_collector()
                else:
                    await drives[order.contestant](order.until, samples)
                by_source, failed = samples.by_source, dict(samples.failed)
                touched = peer.touched - touched
                _send(writer, _Report(pid=os.getpid(), by_source=by_source, failed=failed, touched=touched))
                orders += 1
            writer.close()
        return orders


class SecondProcess:
    """The second load process, as the first one uses it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader: Final = reader
        self._writer: Final = writer
        self._pid: Final = pid

    def trial(self, first: Trial, peer: Peer) -> Trial:
        """Return the trial in which both processes take each turn, with half of the awaiters each."""
        name = first.contestant

        async def prepare(seconds: float) -> None:
            await asyncio.gather(first.prepare(seconds), self._ordered(_Order(contestant=name, seconds=seconds)))

        async def drive(until: float, samples: TurnSamples) -> None:
            ordered = asyncio.ensure_future(self._ordered(_Order(contestant=name, until=until)))
            await first.drive(until, samples)
            theirs = await ordered
            for mine, more in zip(samples.by_source, theirs.by_source, strict=True):
                mine += more
            samples.failed.update(theirs.failed)
            peer.touched += theirs.touched

        return Trial(name, drive, first.server_pids, first.queries_per_operation, first.counters, prepare, (self._pid,))

    async def _ordered(self, order: _Order) -> _Report:
        _send(self._writer, order)
        line = await self._reader.readline()
        if not line:
            raise OperatorError("the second load process has ended before its turns were over")
        return msgspec.json.decode(line, type=_Report)


def _send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(msgspec.json.encode(message) + b"\n")


@asynccontextmanager
async def _second_process(job: PeersJob) -> AsyncIterator[SecondProcess]:
    """Run the second load process until the end of this context. Raises `OperatorError` when it does not start."""
    connected = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda reader, writer: connected.set_result((reader, writer)), LOOPBACK, 0, limit=_MAX_LINE_BYTES
    )
    async with server:
        pair = PairJob(
            rivals=job.rivals,
            awaiters=max(1, job.awaiters // _PROCESSES),
            port=server.sockets[0].getsockname()[1],
        )
        log = Path(job.rivals.subject.ids_file).with_name("pair.log")
        running = asyncio.ensure_future(run_job(pair, Silent(), log, int))
        try:
            await asyncio.wait({running, connected}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            reader, writer = connected.result()
            started = msgspec.json.decode(await reader.readline(), type=_Report)
            yield SecondProcess(reader, writer, started.pid)
            writer.close()
            await running
        finally:
            if connected.done():
                connected.result()[1].close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
