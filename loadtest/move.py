"""Scenario `move`: shards move to another database while a cluster serves, and while its processes and the mover die.

First one large shard moves while clients read and write it and the others, at a bounded pace; then it moves back on the
idle cluster, as fast as it can. After that many small shards move, three at a time, under the recorded load of
`chaos`, while servers are killed or paused, and the command that moves them is killed before each of its steps in turn.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

import msgspec

from loadtest import options
from loadtest.commands import TAO, run_command
from loadtest.conditions import together
from loadtest.faults.chaos import ZEROS, measured_of
from loadtest.faults.harness import FaultRun, Outcome, carry_out_in
from loadtest.faults.injection import FAULTS, Injector
from loadtest.faults.load import RecordedOptions, recorded_load
from loadtest.faults.plan import PlanStep, after
from loadtest.faults.record import RunRecord
from loadtest.peers.databases import REDO_MB, enlarge_redo, keep_binlog_open
from loadtest.region_cluster import RegionCluster, lossless_settings, region_cluster
from loadtest.results import Aim, Conditions, ScenarioResult, at_least, at_most, result_of
from loadtest.scenario import BenchSettings, PartOfProgress, Progress, Scenario
from tao.cli.frame import FAILED_STATUS
from tao.client import Graph, TaoError
from tao.devcluster.layout import Role, Shape
from tao.model.errors import OperatorError
from tao.model.ids import SEQUENCE_PER_MS, make_id
from tao.model.topology import Database
from tao.replication.shard_move_plan import MoveStep
from tao.storage.dialect import SessionSetup
from tao.storage.names import schema_name
from tao.storage.session import ServerAccount, open_session

_OBJECT_BYTES: Final = 8_192
_OBJECTS_PER_STATEMENT: Final = 200
_OLD_UNIX_MS: Final = 1_650_000_000_000
_STATEMENT_SECONDS: Final = 60.0
_BEFORE_SECONDS: Final = 30.0
_TOY_SECONDS: Final = 0.5
_AFTER_SECONDS: Final = 2.0
"""How long clients go on when the shard has moved, so that the first write at the target is seen."""
_READS_PER_SECOND: Final = 150.0
_WRITES_PER_SECOND: Final = 30.0
"""Writes a second of the moving shard, and as many of all others together."""
_KEYS: Final = 40
_MOVING_KEYS: Final = 10
_TIMEOUT_SECONDS: Final = 10.0
_COMMAND_SECONDS: Final = 1_800.0
_PACED_MB: Final = 8.5
"""Megabytes of rows a second, above the aim under load."""
_STOOD_SECONDS: Final = 1.5
_P99_TIMES: Final = 1.2
_LOADED_MB: Final = 8.0
_IDLE_MB: Final = 20.0
_MB: Final = 1_000_000
_ROLES: Final = (Role.FOLLOWER, Role.LEADER, Role.TAILER, Role.WATCHER)
_KINDS: Final = tuple(f"{role}_{how}" for role in _ROLES for how in ("kill", "stop"))
_TOY_KINDS: Final = ("follower_kill",)
_AWAY_SECONDS: Final = 2.0
_PEACE_SECONDS: Final = 6.0
_WELL_SECONDS: Final = 240.0
_AROUND_SECONDS: Final = 900.0
_SHARD_SECONDS: Final = 60.0
_KILLED_AT: Final = (
    *(MoveStep.SWITCH, MoveStep.COPY, MoveStep.FOLLOW, MoveStep.COMPARE, MoveStep.FENCE, MoveStep.CATCH_UP),
    *(MoveStep.RENAME, MoveStep.REPLICAS, MoveStep.CLEAR),
)
_MOVERS: Final = 3
"""Commands that move small shards at the same time. They meet at the locks of both databases."""
_ATTEMPTS: Final = 20
_AGAIN_SECONDS: Final = 1.0
_AGAIN: Final = "trying again in"
"""What the command says of an attempt that it repeats."""


@dataclass(frozen=True, kw_only=True)
class MoveOptions(RecordedOptions):
    """The options of `move`."""

    megabytes: int = options.MEGABYTES.default(2_000, toy=2)
    moved_shards: int = options.MOVED_SHARDS.default(64, toy=1)

    @property
    def large_shard(self) -> int:
        """The shard with much data: the last one, which is not among those that move under faults."""
        return 2 * self.moved_shards - 1


async def run(settings: BenchSettings, progress: Progress, wanted: MoveOptions) -> ScenarioResult:
    """Move shards, and judge. Raises `OperatorError` when the cluster does not start, or a command fails."""
    # Each of two databases has half of the shards. All shards of the first move; the large one is at the second.
    shape = Shape(
        tiers=2,
        followers=1 if settings.toy else 2,
        leaders=2,
        databases=2,
        shards=2 * wanted.moved_shards,
        watchers=1,
    )
    cluster = lossless_settings(settings.work_dir, shape, log_level="info")
    moves = ManyMoves(wanted.moved_shards)
    async with region_cluster(cluster, progress.step, logs=wanted.logs) as regions:
        settings.versions.update(regions.versions)
        for name in regions.named(Role.DATABASE):
            # As config/ has it. A redo log that is full, or a binlog file that is closed, stops all commits.
            await enlarge_redo(regions.cluster.database(name))
            await keep_binlog_open(regions.cluster.database(name))
        large = await _large_shard(settings, regions, PartOfProgress(progress, 0.0, 0.5), wanted)
        kinds = _TOY_KINDS if settings.toy else _KINDS
        faults = FaultRun(
            cluster=cluster,
            load=partial(recorded_load, wanted),
            plans=lambda injector, record, _: [_kills(injector, record, kinds)],
            beside=moves.run,
            seed=wanted.seed,
            well_seconds=_WELL_SECONDS,
        )
        outcome = await carry_out_in(regions, faults, PartOfProgress(progress, 0.5, 0.5))
    measured = {
        **large.measured(),
        "moved_shards": moves.done,
        "movers_killed": {step.value: moves.killed[step] for step in _KILLED_AT},
        **measured_of(outcome, wanted.seed),
    }
    conditions: Conditions = {
        "megabytes": wanted.megabytes,
        "moved_shards": wanted.moved_shards,
        "seed": wanted.seed,
        "copy pace": f"{_PACED_MB:g} MB of rows a second",
        "redo log": f"{REDO_MB} MB",
    }
    demands = [*large.demands(), *moves.demands(), *outcome.demands(measured, ZEROS)]
    aims = [*large.aims(), _failed_reads_aim(outcome)]
    return result_of(conditions, measured, demands, aims=aims, examples=[*large.failed[:5], *outcome.record.examples])


SCENARIO: Final = Scenario(
    name="move",
    summary="shards move to another database under load, and while servers and the mover are killed",
    run=run,
    options=MoveOptions,
    help="""Move a large shard to another database under load and back without, then many small ones under faults.

    No request may fail while the large shard moves. Nothing acknowledged may be lost, and nothing differ afterwards.
    The exit status is 1 when something does.""",
    in_bench=False,
    seconds_bound=lambda wanted: _AROUND_SECONDS + wanted.megabytes + _SHARD_SECONDS * wanted.moved_shards,
)


# ---- one large shard -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Latencies:
    """Latencies of the requests of other shards, and what the writers of the moving one met."""

    others: list[float] = field(default_factory=list)
    longest_write_gap: float = 0.0
    requests: int = 0

    @property
    def p99_ms(self) -> float:
        """The 99th percentile, in milliseconds."""
        return 1_000 * sorted(self.others)[int(len(self.others) * 0.99)] if self.others else 0.0


@dataclass(slots=True)
class MoveTimes:
    """What a move took. ``failed_attempts``: those that undid what they had done, and were repeated; ``stood_seconds``
    is of the last one."""

    copy_seconds: float = 0.0
    stood_seconds: float = 0.0
    whole_seconds: float = 0.0
    failed_attempts: int = 0


@dataclass(slots=True)
class LargeShard:
    """What the moves of the large shard showed."""

    megabytes: float
    before: _Latencies = field(default_factory=_Latencies)
    during: _Latencies = field(default_factory=_Latencies)
    failed: list[str] = field(default_factory=list)
    under_load: MoveTimes = field(default_factory=MoveTimes)
    idle: MoveTimes = field(default_factory=MoveTimes)

    def rate(self, move: MoveTimes) -> float:
        """Return the megabytes of data that a copy took a second."""
        return self.megabytes / max(0.001, move.copy_seconds)

    @property
    def stood_seconds(self) -> float:
        """How long writes of the shard stood still: what the command says, or what the writers met if that was
        longer."""
        return max(self.under_load.stood_seconds, self.during.longest_write_gap)

    def measured(self) -> dict[str, Any]:
        """Return the figures for the JSON. `Any`: nested values."""
        return {
            "requests_while_moving": self.during.requests,
            "failed_requests": len(self.failed),
            "writes_stood_seconds": self.under_load.stood_seconds,
            "longest_write_gap_seconds": round(self.during.longest_write_gap, 3),
            "p99_of_others_before_ms": round(self.before.p99_ms, 2),
            "p99_of_others_while_moving_ms": round(self.during.p99_ms, 2),
            "copy_under_load_mb_per_second": round(self.rate(self.under_load), 2),
            "copy_idle_mb_per_second": round(self.rate(self.idle), 2),
            "move_under_load": asdict(self.under_load),
            "move_idle": asdict(self.idle),
        }

    def demands(self) -> list[Aim]:
        """Return what has to hold on any machine."""
        return [at_most("no request fails while a shard moves", len(self.failed), 0)]

    def aims(self) -> list[Aim]:
        """Return what depends on the machine."""
        shape = f"{self.megabytes:,.0f} MB"
        ratio = self.during.p99_ms / max(0.001, self.before.p99_ms)
        loaded, idle = self.rate(self.under_load), self.rate(self.idle)
        return [
            at_most(
                f"writes of a moving shard stand still for {_STOOD_SECONDS:g} s at most",
                self.stood_seconds,
                _STOOD_SECONDS,
                shape,
            ),
            at_most(f"p99 of other shards is at most {_P99_TIMES:g} × that before the move", ratio, _P99_TIMES, shape),
            at_least(f"a copy under load takes {_LOADED_MB:g} MB of data a second or more", loaded, _LOADED_MB, shape),
            at_least(f"a copy on an idle cluster takes {_IDLE_MB:g} MB of data a second", idle, _IDLE_MB, shape),
        ]


async def _large_shard(
    settings: BenchSettings, regions: RegionCluster, progress: Progress, wanted: MoveOptions
) -> LargeShard:
    found, shard = LargeShard(float(wanted.megabytes)), wanted.large_shard
    seconds = _TOY_SECONDS if settings.toy else _BEFORE_SECONDS
    here, there = _databases_of(regions, shard)
    await _fill(regions, here, shard, wanted.megabytes, PartOfProgress(progress, 0.0, 0.2))
    async with _clients(regions, shard, found.before, found.failed):
        progress.step("measuring before the move", 0.2)
        await asyncio.sleep(seconds)

    def show(said: str) -> None:
        met = f"{found.during.requests:,} requests, {len(found.failed)} failed"
        progress.step(f"moving it under load: {said}; {met}", 0.3)

    async with _clients(regions, shard, found.during, found.failed):
        pace = () if settings.toy else ("--megabytes-per-second", str(_PACED_MB))
        found.under_load = await _move(_words(regions, shard, there.name, *pace), show)
        await asyncio.sleep(min(seconds, _AFTER_SECONDS))
    await _tao(regions, "database", "drop-moved", "--keep-hours", "0")
    back = _words(regions, shard, here.name)
    found.idle = await _move(back, lambda said: progress.step(f"moving it back on the idle cluster: {said}", 0.8))
    return found


def _databases_of(regions: RegionCluster, shard: int) -> tuple[Database, Database]:
    """Return the database that holds a shard, and another one."""
    here = regions.routes.database_of(shard)
    return here, next(each for each in regions.topology.databases if each.name != here.name)


async def _fill(regions: RegionCluster, database: Database, shard: int, megabytes: int, progress: Progress) -> None:
    """Put objects into the shard, past the caches and the binlog: nobody has read any of them."""
    master, account = database.servers[database.master_region], regions.accounts.administrator
    otype = next(each.number for each in regions.schema.objects if each.name == "user")
    login = ServerAccount(master.host, master.port, account.user, account.password, master.socket, tls=None)
    loop, chance = asyncio.get_running_loop(), Random(1)
    session = await open_session(
        login, master.name, SessionSetup(writes=True), deadline=loop.time() + _STATEMENT_SECONDS
    )
    try:
        await session.run("SET SESSION sql_log_bin = 0", deadline=loop.time() + _STATEMENT_SECONDS)
        count = megabytes * _MB // _OBJECT_BYTES
        for first in range(0, count, _OBJECTS_PER_STATEMENT):
            progress.step(f"filling a shard: {first * _OBJECT_BYTES // _MB:,} of {megabytes:,} MB", first / count)
            values: list[object] = []
            for number in range(first, min(count, first + _OBJECTS_PER_STATEMENT)):
                ms, sequence = divmod(number, SEQUENCE_PER_MS)
                text = chance.randbytes(_OBJECT_BYTES // 2).hex()
                data = msgspec.msgpack.encode({1: text})
                values += [make_id(shard, _OLD_UNIX_MS + ms, sequence), otype, 1 << 48 | 1, 0, data]
            rows = ", ".join(["(%s, %s, %s, %s, %s)"] * (len(values) // 5))
            sql = f"INSERT INTO {schema_name(shard)}.objects (id, otype, version, deleted, data) VALUES {rows}; COMMIT"  # noqa: S608 - a name made of a number
            await session.run(sql, values, deadline=loop.time() + _STATEMENT_SECONDS)
    finally:
        session.quit()


@asynccontextmanager
async def _clients(regions: RegionCluster, shard: int, latencies: _Latencies, failed: list[str]) -> AsyncIterator[None]:
    """Read and write all shards at a steady pace, until the context ends."""
    async with AsyncExitStack() as stack:
        shape = regions.cluster.record.shape
        places = [(region, tier) for region in shape.region_names for tier in shape.tier_names]
        graphs = [await regions.graph(*place, stack, _TIMEOUT_SECONDS) for place in places]
        moving, others = await _objects(graphs[0], shard, regions.routes.shards)
        load = _PacedLoad(graphs, latencies, failed)
        running = [
            asyncio.create_task(load.pace(_READS_PER_SECOND, partial(load.read, others))),
            asyncio.create_task(load.pace(_WRITES_PER_SECOND, partial(load.write, others))),
            asyncio.create_task(load.pace(_WRITES_PER_SECOND, partial(load.write_moving, moving))),
        ]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            for ended in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended


async def _objects(graph: Graph, shard: int, shards: int) -> tuple[list[int], list[int]]:
    """Return new objects of a shard, and of others."""
    near = [each for each in range(shards) if each != shard]
    chosen = Random(shard).sample(near, min(len(near), _KEYS))
    moving = await graph.reserve_ids(_MOVING_KEYS, shard=shard)
    others = [key for each in chosen for key in await graph.reserve_ids(_KEYS // len(chosen), shard=each)]
    await graph.obj_add_many([("user", {"name": "mover", "home": "0"}, None, key) for key in (*moving, *others)])
    return moving, others


class _PacedLoad:
    """Requests at a rate, whatever the answers take; those that fail are recorded with their reasons."""

    def __init__(self, graphs: Sequence[Graph], latencies: _Latencies, failed: list[str]) -> None:
        self._graphs: Final = graphs
        self._latencies: Final = latencies
        self._failed: Final = failed
        self._chance: Final = Random(7)
        self._written_at = time.perf_counter()

    async def pace(self, per_second: float, work: Callable[[], Any]) -> None:
        """Begin the work so often, until cancelled; what was begun is waited for. (`Any`: an awaitable of nothing.)"""
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        due = loop.time()
        try:
            while True:
                due += 1 / per_second
                await asyncio.sleep(max(0.0, due - loop.time()))
                task = asyncio.create_task(self._counted(work))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            await asyncio.gather(*tasks)

    async def _counted(self, work: Callable[[], Any]) -> None:
        self._latencies.requests += 1
        try:
            await work()
        except TaoError as error:
            self._failed.append(f"{error.reason}: {error.message}")

    async def read(self, keys: Sequence[int]) -> None:
        """Read an object of another shard."""
        began = time.perf_counter()
        await self._chance.choice(self._graphs).obj_get(self._chance.choice(keys))
        self._latencies.others.append(time.perf_counter() - began)

    async def write(self, keys: Sequence[int]) -> None:
        """Write an object of another shard."""
        began = time.perf_counter()
        await self._update(keys)
        self._latencies.others.append(time.perf_counter() - began)

    async def write_moving(self, keys: Sequence[int]) -> None:
        """Write an object of the shard that moves."""
        await self._update(keys)
        now = time.perf_counter()
        self._latencies.longest_write_gap = max(self._latencies.longest_write_gap, now - self._written_at)
        self._written_at = now

    async def _update(self, keys: Sequence[int]) -> None:
        fields = {"home": str(self._latencies.requests)}
        await self._chance.choice(self._graphs).obj_update(self._chance.choice(keys), fields, "user")


# ---- many small shards -----------------------------------------------------------------------------------------------


class ManyMoves:
    """The moves of all shards of the first database, some of them at the same time."""

    def __init__(self, count: int) -> None:
        self._count: Final = count
        self.done = 0
        self.killed: Final = Counter[MoveStep]()
        """Commands that were killed, by the step that they had begun."""
        self.left_behind = 0
        """Shards of which the source has noted afterwards that they have left."""

    async def run(self, regions: RegionCluster, record: RunRecord) -> None:
        """Move them; the command is killed at another step each time, and then repeated until it is done. Raises
        `OperatorError` for a shard that does not move."""
        waiting = iter(range(self._count))

        async def work() -> None:
            for shard in waiting:
                _, there = _databases_of(regions, shard)
                step = _KILLED_AT[shard % len(_KILLED_AT)]
                self.killed[step] += await _killed_before(regions, shard, there.name, step)
                await _finish(regions, shard, there.name)
                self.done += 1
                record.done = self.done / (self._count + 1)

        await together(work() for _ in range(_MOVERS))
        found = await _tao(regions, "database", "drop-moved", "--keep-hours", "0")
        self.left_behind = sum(each["shard"] < self._count for each in found["dropped"])
        record.done = 1.0  # which ends the plan of faults

    def demands(self) -> list[Aim]:
        """Return what has to hold on any machine."""
        fewest = min(self.killed[step] for step in _KILLED_AT[: self._count])
        return [
            at_least("all shards move", self.done, self._count),
            at_least("the mover is killed at each step", fewest, 1, f"{self.killed.total()} kills"),
            at_least("every finished move is cleared away", self.left_behind, self._count),
        ]


def _failed_reads_aim(outcome: Outcome) -> Aim:
    return at_most(
        "no read fails while shards move and servers are killed or paused", outcome.record.unexplained.total(), 0
    )


def _kills(injector: Injector, record: RunRecord, kinds: Sequence[str]) -> Iterator[Sequence[PlanStep]]:
    """Kill or pause one server after the other as long as shards move."""
    while record.done < 1:
        kind = injector.chance.choice(kinds)
        pause = injector.chance.uniform(0.3, 1.0) * _PEACE_SECONDS
        yield [PlanStep(kind, FAULTS[kind], after(pause), injector.chance.uniform(0.3, 1.0) * _AWAY_SECONDS)]


async def _killed_before(regions: RegionCluster, shard: int, target: str, step: MoveStep) -> bool:
    """Begin a move, and kill the command when it comes to a step. Returns whether it was killed, and did not end."""
    async with _running(_words(regions, shard, target)) as process:
        assert process.stderr is not None, "it is a pipe"
        async for line in process.stderr:
            if step.value in line.decode(errors="replace"):
                break
    return process.returncode != 0


async def _finish(regions: RegionCluster, shard: int, target: str) -> None:
    """Move a shard, unless the command that was killed has done it."""
    try:
        await _ended(_words(regions, shard, target, "--json"))
    except OperatorError as error:
        if f"{target} holds shard {shard} already" not in error.message:
            raise


# ---- commands --------------------------------------------------------------------------------------------------------


def _words(regions: RegionCluster, shard: int, target: str, *more: str) -> list[str]:
    folder = str(regions.cluster.topology_path.parent)
    where = ("--state-dir", folder, "--yes", "--steady-seconds", "0.2")
    return [*TAO, "database", "move", str(shard), "--to", target, *where, *more]


async def _move(words: Sequence[str], show: Callable[[str], None]) -> MoveTimes:
    """Run `tao database move`, and show what it says; repeat it as long as what it meets may pass. Raises
    `OperatorError` when it fails otherwise."""
    found, began = MoveTimes(), time.perf_counter()
    while True:
        said, last, copy_began = "", "", 0.0
        async with _running(words) as process:
            assert process.stderr is not None, "it is a pipe"
            assert process.stdout is not None, "it is a pipe"
            async for line in process.stderr:
                last, now = line.decode(errors="replace").strip(" …\n"), time.perf_counter()
                show(last)
                found.failed_attempts += _AGAIN in last
                if last == MoveStep.COPY:
                    copy_began = now
                elif copy_began and last == MoveStep.FOLLOW:
                    found.copy_seconds, copy_began = round(now - copy_began, 3), 0.0
            said = (await process.stdout.read()).decode()
            status = await process.wait()
        if not status:
            break
        if status != FAILED_STATUS or found.failed_attempts >= _ATTEMPTS:
            raise OperatorError(f"tao {' '.join(words[len(TAO) :])} ended with status {status}: {last}")
        found.failed_attempts += 1
        await asyncio.sleep(_AGAIN_SECONDS)
    stood = re.search(r"stood ([\d.]+) s", said)
    found.stood_seconds = float(stood[1]) if stood else 0.0
    found.whole_seconds = round(time.perf_counter() - began, 3)
    return found


@asynccontextmanager
async def _running(words: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command whose output is read, and kill it at the end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(_COMMAND_SECONDS):
            yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _tao(regions: RegionCluster, *words: str) -> dict[str, Any]:
    """Run a command that changes the cluster, and return what it prints. `Any`: a JSON document."""
    where = ("--state-dir", str(regions.cluster.topology_path.parent))
    output = await _ended([*TAO, *words, *where, "--yes", "--json"])
    return msgspec.json.decode(output, type=dict[str, Any])


async def _ended(words: Sequence[str]) -> str:
    """Run a command, and return what it prints; repeat it as long as what it meets may pass. Raises `OperatorError`
    when it fails otherwise."""
    for left in reversed(range(_ATTEMPTS)):
        ended = await run_command(*words, seconds=_COMMAND_SECONDS)
        if not ended.status:
            return ended.output
        if ended.status != FAILED_STATUS or not left:
            said = f"ended with status {ended.status}: {ended.errors[-500:]}"
            raise OperatorError(f"tao {' '.join(words[len(TAO) :])} {said}")
        await asyncio.sleep(_AGAIN_SECONDS)
    raise AssertionError("the last attempt returns or raises")
