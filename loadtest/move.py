"""Scenario `move`: shards move to another database while a cluster serves, and while its processes and the mover die.

First one large shard moves while clients read and write it and the others, at a bounded pace; then it moves back on the
idle cluster, as fast as it can. After that many small shards move one after the other under the recorded load of
`chaos`, while servers are killed, and the command that moves them is killed before each of its steps in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

import msgspec

from loadtest import options
from loadtest.commands import TAO, run_command
from loadtest.faults.harness import FaultRun, Outcome, carry_out_run
from loadtest.faults.injection import FAULTS, Injector
from loadtest.faults.load import RecordedOptions, recorded_load
from loadtest.faults.plan import PlanStep, after, at_once
from loadtest.faults.record import RunRecord
from loadtest.region_cluster import RegionCluster, lossless_settings, region_cluster
from loadtest.results import Aim, Conditions, ScenarioResult, at_least, at_most, result_of
from loadtest.scenario import BenchSettings, PartOfProgress, Progress, Scenario
from tao.client import Graph, TaoError
from tao.devcluster.layout import Shape
from tao.model.errors import OperatorError
from tao.model.ids import SEQUENCE_PER_MS, SHARD_SHIFT, make_id
from tao.model.topology import Database
from tao.replication.shard_move_plan import MoveStep
from tao.storage.dialect import SessionSetup
from tao.storage.names import schema_name
from tao.storage.session import ServerAccount, open_session

_SHAPE: Final = Shape(tiers=2, followers=1, leaders=2, databases=2, shards=16, watchers=1)
_SHARD: Final = 1
_OBJECT_BYTES: Final = 8_192
_OBJECTS_PER_STATEMENT: Final = 200
_OLD_UNIX_MS: Final = 1_650_000_000_000
_BEFORE_SECONDS: Final = 30.0
_TOY_SECONDS: Final = 2.0
_READS_PER_SECOND: Final = 150.0
_WRITES_PER_SECOND: Final = 30.0
_KEYS: Final = 40
_TIMEOUT_SECONDS: Final = 10.0
_COMMAND_SECONDS: Final = 1_800.0
_PACED_MB: Final = 20.0
"""Statements of a copy: binary values are written in two digits a byte, so about half as much of data."""
_STOOD_SECONDS: Final = 1.5
_P99_TIMES: Final = 1.2
_LOADED_MB: Final = 8.0
_IDLE_MB: Final = 20.0
_MB: Final = 1_000_000
_KINDS: Final = ("follower_kill", "leader_kill", "tailer_kill", "watcher_kill")
_TOY_KINDS: Final = ("follower_kill",)
_AWAY_SECONDS: Final = 2.0
_PEACE_SECONDS: Final = 8.0
_WELL_SECONDS: Final = 240.0
_KILLED_AT: Final = (
    *(MoveStep.COPY, MoveStep.FOLLOW, MoveStep.COMPARE, MoveStep.FENCE, MoveStep.CATCH_UP),
    *(MoveStep.RENAME, MoveStep.REPLICAS, MoveStep.SWITCH, MoveStep.CLEAR),
)
_ATTEMPTS: Final = 20
_ZEROS: Final = (
    *("acked_writes_lost", "stale_after_quiescence", "ryw_violations", "token_violations"),
    *("critical_violations", "monotone_violations", "inverse_violations"),
)


@dataclass(frozen=True, kw_only=True)
class MoveOptions(RecordedOptions):
    """The options of `move`."""

    megabytes: int = options.MEGABYTES.default(2_000, toy=2)
    moved_shards: int = options.MOVED_SHARDS.default(64, toy=2)


async def run(settings: BenchSettings, progress: Progress, wanted: MoveOptions) -> ScenarioResult:
    """Move shards, and judge. Raises `OperatorError` when a cluster does not start, or a command fails."""
    large = await _large_shard(settings, PartOfProgress(progress, 0.0, 0.5), wanted)
    outcome = await _many_shards(settings, PartOfProgress(progress, 0.5, 0.5), wanted)
    record = outcome.record
    measured = {
        **large.measured(),
        "moved_shards": wanted.moved_shards,
        "acked_writes": record.acknowledged,
        "acked_writes_lost": record.lost,
        "stale_after_quiescence": outcome.stale,
        "ryw_violations": record.violations_of("own writes"),
        "token_violations": record.violations_of("token"),
        "critical_violations": record.violations_of("critical"),
        "monotone_violations": record.violations_of("monotone"),
        "inverse_violations": record.violations_of("inverse"),
        "faults": {
            kind: sum(fault.kind == kind for fault in record.faults) for kind in {f.kind for f in record.faults}
        },
        "differences": outcome.differences,
        "compared": outcome.compared,
    }
    conditions: Conditions = {
        "megabytes": wanted.megabytes,
        "moved_shards": wanted.moved_shards,
        "seed": wanted.seed,
        "copy pace": f"{_PACED_MB:g} MB of statements a second",
    }
    demands = [*large.demands(), *outcome.demands(measured, _ZEROS)]
    return result_of(conditions, measured, demands, aims=large.aims(), examples=[*large.failed[:5], *record.examples])


SCENARIO: Final = Scenario(
    name="move",
    summary="shards move to another database under load, and while servers and the mover are killed",
    run=run,
    options=MoveOptions,
    help="""Move a large shard to another database under load and back without, then many small ones under faults.

    No request may fail, nothing acknowledged may be lost, and nothing differ afterwards. The exit status is 1 when
    something does.""",
    in_bench=False,
    seconds_bound=lambda wanted: 1_800.0 + wanted.megabytes + 60.0 * wanted.moved_shards,
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
class _LargeShard:
    """What the moves of the large shard showed."""

    megabytes: float
    before: _Latencies = field(default_factory=_Latencies)
    during: _Latencies = field(default_factory=_Latencies)
    failed: list[str] = field(default_factory=list)
    under_load: dict[str, Any] = field(default_factory=dict)
    idle: dict[str, Any] = field(default_factory=dict)

    def rate(self, move: dict[str, Any]) -> float:
        """Return the megabytes of data that a copy took a second."""
        return self.megabytes / max(0.001, float(move["copy_seconds"]))

    def measured(self) -> dict[str, Any]:
        """Return the figures for the JSON. `Any`: nested values."""
        return {
            "requests_while_moving": self.during.requests,
            "failed_requests": len(self.failed),
            "writes_stood_seconds": self.under_load["writes_stood_seconds"],
            "longest_write_gap_seconds": round(self.during.longest_write_gap, 3),
            "p99_of_others_before_ms": round(self.before.p99_ms, 2),
            "p99_of_others_while_moving_ms": round(self.during.p99_ms, 2),
            "copy_under_load_mb_per_second": round(self.rate(self.under_load), 2),
            "copy_idle_mb_per_second": round(self.rate(self.idle), 2),
            "move_under_load": self.under_load,
            "move_idle": self.idle,
        }

    def demands(self) -> list[Aim]:
        """Return what has to hold on any machine."""
        return [at_most("no request fails while a shard moves", len(self.failed), 0)]

    def aims(self) -> list[Aim]:
        """Return what depends on the machine."""
        shape = f"{self.megabytes:,.0f} MB"
        stood = self.under_load["writes_stood_seconds"]
        return [
            at_most(
                f"writes of a moving shard stand still for {_STOOD_SECONDS:g} s at most",
                max(stood or 0.0, self.during.longest_write_gap),
                _STOOD_SECONDS,
                shape,
            ),
            at_most(
                f"p99 of other shards is at most {_P99_TIMES:g} × that before the move",
                self.during.p99_ms / max(0.001, self.before.p99_ms),
                _P99_TIMES,
                shape,
            ),
            at_least(
                f"a copy under load takes {_LOADED_MB:g} MB of data a second or more",
                self.rate(self.under_load),
                _LOADED_MB,
                shape,
            ),
            at_least(
                f"a copy on an idle cluster takes {_IDLE_MB:g} MB of data a second or more",
                self.rate(self.idle),
                _IDLE_MB,
                shape,
            ),
        ]


async def _large_shard(settings: BenchSettings, progress: Progress, wanted: MoveOptions) -> _LargeShard:
    found = _LargeShard(float(wanted.megabytes))
    seconds = _TOY_SECONDS if settings.toy else _BEFORE_SECONDS
    cluster = lossless_settings(settings.work_dir / "large", _SHAPE, log_level="info")
    async with region_cluster(cluster, progress.step, logs=None) as regions:
        settings.versions.update(regions.versions)
        progress.step(f"filling a shard with {wanted.megabytes:,} MB", 0.1)
        here, there = _databases_of(regions, _SHARD)
        await _fill(regions, here, wanted.megabytes)
        progress.step("measuring before the move", 0.4)
        async with _clients(regions, found.before, found.failed):
            await asyncio.sleep(seconds)
        progress.step("moving it under load", 0.5)
        async with _clients(regions, found.during, found.failed):
            pace = () if settings.toy else ("--megabytes-per-second", str(_PACED_MB))
            found.under_load = await _move(regions, _SHARD, there.name, *pace)
            await asyncio.sleep(min(seconds, 2.0))
        await _tao(regions, "database", "drop-moved", "--keep-hours", "0")
        progress.step("moving it back on the idle cluster", 0.8)
        found.idle = await _move(regions, _SHARD, here.name)
    return found


def _databases_of(regions: RegionCluster, shard: int) -> tuple[Database, Database]:
    """Return the database that holds a shard, and another one."""
    here = regions.routes.database_of(shard)
    return here, next(each for each in regions.topology.databases if each.name != here.name)


async def _fill(regions: RegionCluster, database: Database, megabytes: int) -> None:
    """Put objects into the shard, past the caches and the binlog: nobody has read any of them."""
    master, account = database.servers[database.master_region], regions.accounts.administrator
    otype = next(each.number for each in regions.schema.objects if each.name == "user")
    login = ServerAccount(master.host, master.port, account.user, account.password, socket="", tls=None)
    loop, chance = asyncio.get_running_loop(), Random(1)
    session = await open_session(login, master.name, SessionSetup(writes=True), deadline=loop.time() + 30)
    try:
        await session.run("SET SESSION sql_log_bin = 0", deadline=loop.time() + 30)
        count = megabytes * _MB // _OBJECT_BYTES
        for first in range(0, count, _OBJECTS_PER_STATEMENT):
            values: list[object] = []
            for number in range(first, min(count, first + _OBJECTS_PER_STATEMENT)):
                ms, sequence = divmod(number, SEQUENCE_PER_MS)
                text = chance.randbytes(_OBJECT_BYTES // 2).hex()
                data = msgspec.msgpack.encode({1: text})
                values += [make_id(_SHARD, _OLD_UNIX_MS + ms, sequence), otype, 1 << 48 | 1, 0, data]
            rows = ", ".join(["(%s, %s, %s, %s, %s)"] * (len(values) // 5))
            sql = f"INSERT INTO {schema_name(_SHARD)}.objects (id, otype, version, deleted, data) VALUES {rows}; COMMIT"  # noqa: S608 - a name made of a number
            await session.run(sql, values, deadline=loop.time() + 60)
    finally:
        session.quit()


@asynccontextmanager
async def _clients(regions: RegionCluster, latencies: _Latencies, failed: list[str]) -> AsyncIterator[None]:
    """Read and write all shards at a steady pace, until the context ends."""
    async with AsyncExitStack() as stack:
        shape = regions.cluster.record.shape
        places = [(region, tier) for region in shape.region_names for tier in shape.tier_names]
        graphs = [await regions.graph(*place, stack, _TIMEOUT_SECONDS) for place in places]
        moving, others = await _objects(graphs[0], regions.routes.shards)
        load = _PacedLoad(graphs, latencies, failed)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(load.pace(_READS_PER_SECOND, partial(load.read, others))),
                tasks.create_task(load.pace(_WRITES_PER_SECOND, partial(load.write, others))),
                tasks.create_task(load.pace(_WRITES_PER_SECOND, partial(load.write_moving, moving))),
            ]
            yield
            for task in running:
                task.cancel()


async def _objects(graph: Graph, shards: int) -> tuple[list[int], list[int]]:
    """Return new objects of the moving shard, and of the others."""
    moving: list[int] = []
    others: list[int] = []
    while len(moving) < _KEYS // 4 or len(others) < _KEYS:
        key = await graph.obj_add("user", {"name": "mover", "home": "0"})
        (moving if key >> SHARD_SHIFT == _SHARD or shards == 1 else others).append(key)
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
        """Begin the work so often, until cancelled."""
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
        fields = {"home": str(self._latencies.requests)}
        await self._chance.choice(self._graphs).obj_update(self._chance.choice(keys), fields, "user")
        self._latencies.others.append(time.perf_counter() - began)

    async def write_moving(self, keys: Sequence[int]) -> None:
        """Write an object of the shard that moves."""
        fields = {"home": str(self._latencies.requests)}
        await self._chance.choice(self._graphs).obj_update(self._chance.choice(keys), fields, "user")
        now = time.perf_counter()
        self._latencies.longest_write_gap = max(self._latencies.longest_write_gap, now - self._written_at)
        self._written_at = now


# ---- many small shards -----------------------------------------------------------------------------------------------


async def _many_shards(settings: BenchSettings, progress: Progress, wanted: MoveOptions) -> Outcome:
    shards = 2 * wanted.moved_shards
    shape = Shape(tiers=2, followers=1 if settings.toy else 2, leaders=2, databases=2, shards=shards, watchers=1)
    kinds = _TOY_KINDS if settings.toy else _KINDS
    fault_run = FaultRun(
        cluster=lossless_settings(settings.work_dir / "many", shape, log_level="info"),
        load=partial(recorded_load, wanted),
        plans=lambda injector, record, _: [
            _moves(injector, record, wanted.moved_shards),
            _kills(injector, record, kinds),
        ],
        seed=wanted.seed,
        well_seconds=_WELL_SECONDS,
        logs=wanted.logs,
    )
    return await carry_out_run(fault_run, settings.versions, progress)


def _moves(injector: Injector, record: RunRecord, count: int) -> Iterator[Sequence[PlanStep]]:
    """Move the shards of the first database one after the other; the mover is killed before another step each time."""
    for number in range(count):
        step = _KILLED_AT[number % len(_KILLED_AT)]
        yield [PlanStep("shard_move", partial(_moved, shard=number, step=step), at_once)]
        record.done = (number + 1) / count


def _kills(injector: Injector, record: RunRecord, kinds: Sequence[str]) -> Iterator[Sequence[PlanStep]]:
    """Kill one server after the other as long as shards move."""
    while record.done < 1:
        kind = injector.chance.choice(kinds)
        pause = injector.chance.uniform(0.3, 1.0) * _PEACE_SECONDS
        yield [PlanStep(kind, FAULTS[kind], after(pause), injector.chance.uniform(0.3, 1.0) * _AWAY_SECONDS)]


@asynccontextmanager
async def _moved(injector: Injector, *, shard: int, step: MoveStep) -> AsyncIterator[str]:
    """Move a shard, killing the command once before a step, and again and again until it is done."""
    regions = injector.regions
    _, there = _databases_of(regions, shard)
    await _kill_before(regions, shard, there.name, step)
    for left in reversed(range(_ATTEMPTS)):
        if regions.routes.database_of(shard).name == there.name:
            break
        ended = await run_command(*_words(regions, shard, there.name), seconds=_COMMAND_SECONDS)
        if ended.status and not left:
            raise OperatorError(f"shard {shard} does not move: {ended.errors[-500:]}")
        if ended.status:
            await asyncio.sleep(1.0)
    yield f"shard {shard}"


async def _kill_before(regions: RegionCluster, shard: int, target: str, step: MoveStep) -> None:
    """Begin a move, and kill the command when it comes to a step, or let it end."""
    process = await asyncio.create_subprocess_exec(
        *_words(regions, shard, target)[:-1],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None, "it is a pipe"
    try:
        while line := await process.stderr.readline():
            if step.value in line.decode(errors="replace"):
                break
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# ---- commands --------------------------------------------------------------------------------------------------------


def _words(regions: RegionCluster, shard: int, target: str, *more: str) -> list[str]:
    folder = str(regions.cluster.topology_path.parent)
    where = ("--state-dir", folder, "--yes", "--steady-seconds", "0.2")
    return [*TAO, "database", "move", str(shard), "--to", target, *where, *more, "--json"]


async def _move(regions: RegionCluster, shard: int, target: str, *more: str) -> dict[str, Any]:
    """Run `tao database move`, and return what it prints. `Any`: a JSON document."""
    ended = await run_command(*_words(regions, shard, target, *more), seconds=_COMMAND_SECONDS)
    if ended.status:
        raise OperatorError(f"tao database move ended with status {ended.status}: {ended.errors[-500:]}")
    return msgspec.json.decode(ended.output, type=dict[str, Any])


async def _tao(regions: RegionCluster, *words: str) -> None:
    folder = str(regions.cluster.topology_path.parent)
    ended = await run_command(*TAO, *words, "--state-dir", folder, "--yes", "--json", seconds=_COMMAND_SECONDS)
    if ended.status:
        raise OperatorError(f"tao {' '.join(words)} ended with status {ended.status}: {ended.errors[-500:]}")
