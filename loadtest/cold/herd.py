"""Scenario `herd`: ten thousand clients miss one key at the same moment, in both tiers, when no cache has it.

A stampede costs a database statements. The database counts them: it logs every statement, and the run counts those that
name the key. A leader's single flight leaves one statement per region; each follower has a single flight of its own.
For a running cluster, whose databases' passwords are unknown here, the leaders' fetches are counted instead.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Final, Literal

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.cold.statements import Statements
from loadtest.conditions import together, within
from loadtest.options import CLIENTS, PROCESSES, PUBLISHED_TOPOLOGY, ROUNDS, SEED, SESSIONS, Options
from loadtest.published.contestant import LINK, NODE
from loadtest.published.latencies import LatencyRecorder, LatencyRecording, LatencySummary, MergedLatencies
from loadtest.published.run import SCHEMA
from loadtest.results import Aim, Listing, ScenarioResult, at_most
from loadtest.rounds import settle_collector
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.target import Target, target_for
from tao.admin.connection import operator_links
from tao.admin.invalidation import invalidate, plan_invalidation, types_named
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.errors import OperatorError, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.routing.routes import Routes

_SHAPE: Final = Shape(tiers=2, followers=2, leaders=2, databases=1, shards=8)
_EDGES: Final = 50
_OBJECT_BYTES: Final = 673
"""The mean size of the paper's objects."""
_LEAD_SECONDS: Final = 0.3
_STEP_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.02
_NOTES: Final = ["Database: statements that name the key, from its own log; latency counts from the common start."]
_OF_A_RUNNING_ONE: Final = (
    "What was asked for has been written into the running cluster, and stays there; of the types `node` and `link` its "
    "caches have dropped what they held in the shards of the keys. Queries and fetches are those of everybody."
)


@dataclass(frozen=True, kw_only=True)
class HerdOptions(Options):
    """The options of `herd`."""

    clients: int = CLIENTS.default(10_000)
    processes: int = PROCESSES.default(4)
    sessions: int = SESSIONS.default(16)
    """Separate SDK clients of each process, each with connections of its own."""
    rounds: int = ROUNDS.default(5)
    """Rounds of each kind; every round uses another key."""
    topology: Path | None = PUBLISHED_TOPOLOGY.default(None)
    seed: int = SEED.default(1)


class Herd(msgspec.Struct, frozen=True, kw_only=True):
    """One round: all clients ask for one key."""

    what: str
    database_queries: int | None
    """Statements that name the key; None for a running cluster, whose databases cannot be queried."""
    leader_fetches: int
    """Fetches that leaders began at their databases, for any client."""
    leader_queries: int
    follower_queries: int
    """Queries that the SDK's sessions sent, including those of their own bookkeeping."""
    follower_fetches: int
    answered: int
    failed: dict[str, int]
    wrong: int
    latency_ms: LatencySummary | None
    client_cpu_us: float
    """CPU of the load processes per read."""


class HerdFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as its JSON has it."""

    clients: int
    processes: int
    sessions: int
    followers: int
    herds: list[Herd]
    own_cluster: bool
    database_queries: dict[str, int | None]
    """The most statements of all rounds, by ``object`` and ``list``."""
    leader_fetches: dict[str, int]
    """The most fetches that leaders began at their databases, by ``object`` and ``list``."""
    latency_ms: dict[str, LatencySummary | None]
    """Latencies over all rounds."""


async def run(settings: BenchSettings, progress: Progress, herd: HerdOptions) -> ScenarioResult:
    """Let all clients ask for one key at once, round after round. Raises `OperatorError`."""
    if settings.toy:
        herd = replace(herd, clients=200, processes=2, sessions=4, rounds=1)
    own = ClusterSettings(
        state_dir=settings.work_dir / "herd",
        shape=msgspec.structs.replace(_SHAPE, followers=1, leaders=1) if settings.toy else _SHAPE,
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
        log_level="warning",
    )
    async with target_for(herd.topology, own, progress) as target:
        settings.versions.update(target.versions)
        progress.step("writing what is asked for, and having it dropped everywhere", 0.2)
        known_id, rounds = await _fill(target, herd)
        jobs = [
            HerdJob(
                topology_file=target.topology_file,
                region=target.region,
                tiers=target.tiers,
                sessions=herd.sessions,
                awaiters=herd.clients // herd.processes,
                known_id=known_id,
                rounds=rounds,
                folder=str(settings.work_dir),
                number=number,
            )
            for number in range(herd.processes)
        ]
        counted: list[_Counts] = []
        async with _statements_of(target) as statements:

            async def count() -> list[HerdAnswers]:
                for number, each in enumerate(rounds):
                    counted.append(await _counted(target, statements, settings.work_dir, number, each, len(jobs)))
                return []

            *answers, _ = await together(
                [
                    *(
                        run_job(job, progress, settings.work_dir / f"herd-{job.number}.log", list[HerdAnswers])
                        for job in jobs
                    ),
                    count(),
                ]
            )
    measured = _measured(herd, len(target.all_followers), rounds, counted, answers)
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions={"clients": herd.clients, "processes": herd.processes, "sessions_each": herd.sessions},
        listings=[_listing(measured)],
        notes=[*_NOTES, *([_OF_A_RUNNING_ONE] if herd.topology else [])],
        aims=_aims(measured),
        measured=msgspec.to_builtins(measured),
        faults=[
            f"a herd for one {each.what}: {sum(each.failed.values())} failed, {each.wrong} wrong"
            for each in measured.herds
            if each.failed or each.wrong
        ],
    )


SCENARIO: Final = Scenario(
    name="herd",
    summary="10,000 clients miss one key at once: what reaches the database, and how long they wait",
    run=run,
    options=HerdOptions,
    help="""Let many clients miss one key at once: what reaches the database, and how long they wait.

    The scenario makes the caches of a running cluster drop the types of the test in the shards of the keys. The exit
    status is 1 when a read fails or is wrong.""",
    has_plot=True,
)


def _aims(measured: HerdFigures) -> list[Aim]:
    bad = sum(sum(each.failed.values()) + each.wrong for each in measured.herds)
    fetches = "leaders fetch one key at most once for each follower"
    return [
        at_most("no read failed or wrong", bad, 0),
        *(at_most(fetches, count, measured.followers, what) for what, count in measured.leader_fetches.items()),
    ]


@asynccontextmanager
async def _statements_of(target: Target) -> AsyncIterator[Statements | None]:
    """Log all statements from now on; yields None for a running cluster, whose databases cannot be queried."""
    if target.database is None:
        yield None
        return
    async with Statements.of(target.database) as statements:
        await statements.log_all()
        yield statements


async def _fill(target: Target, herd: HerdOptions) -> tuple[int, tuple[HerdRound, ...]]:
    chance = Random(herd.seed)
    async with connect(target.topology_file, region=target.region) as graph:
        row = (NODE, {"payload": chance.randbytes(_OBJECT_BYTES)})
        known_id, *ids = await graph.obj_add_many([row] * (1 + 2 * herd.rounds + _EDGES))
        others, keys = ids[:_EDGES], ids[_EDGES:]
        edges = [(id1, LINK, id2, time_) for id1 in keys[herd.rounds :] for time_, id2 in enumerate(others)]
        await graph.assoc_add_many(edges)
        await drop_everywhere(graph, keys, (NODE, LINK))
    objects = [HerdRound("object", each) for each in keys[: herd.rounds]]
    return known_id, (*objects, *(HerdRound("list", each, _EDGES) for each in keys[herd.rounds :]))


@dataclass(frozen=True, slots=True)
class _Counts:
    database: int | None = None
    leaders: int = 0
    leader_fetches: int = 0
    followers: int = 0
    fetches: int = 0


async def _counted(
    target: Target, statements: Statements | None, folder: Path, number: int, herd_round: HerdRound, processes: int
) -> _Counts:
    async def ready() -> bool:
        return all(ready_file(folder, number, each).exists() for each in range(processes))

    async def done() -> bool:
        return all(done_file(folder, number, each).exists() for each in range(processes))

    await within(_STEP_SECONDS, ready, _POLL_SECONDS, "the load processes were not ready")
    if statements is not None:
        await statements.forget()
    before = await _asked(target)
    half_written = folder / f"starting-{number}"
    half_written.write_text(repr(time.time() + _LEAD_SECONDS))
    half_written.rename(go_file(folder, number))
    await within(_STEP_SECONDS, done, _POLL_SECONDS, "the load processes had no answers")
    after = await _asked(target)
    return _Counts(
        None if statements is None else await statements.naming(herd_round.id),
        after.leaders - before.leaders,
        after.leader_fetches - before.leader_fetches,
        after.followers - before.followers,
        after.fetches - before.fetches,
    )


async def _asked(target: Target) -> _Counts:
    leaders = [await server_stats(admin) for admin in target.leaders.values()]
    followers = [await server_stats(admin) for admin in target.all_followers.values()]
    return _Counts(
        None,
        sum(each["hits"] + each["misses"] for each in leaders),
        sum(each["fills"]["started"] for each in leaders),
        sum(each["hits"] + each["misses"] for each in followers),
        sum(each["fills"]["started"] for each in followers),
    )


def _measured(
    herd: HerdOptions,
    followers: int,
    rounds: tuple[HerdRound, ...],
    counted: list[_Counts],
    answers: list[list[HerdAnswers]],
) -> HerdFigures:
    herds, by_what = list[Herd](), {"object": MergedLatencies(), "list": MergedLatencies()}
    for number, (herd_round, counts) in enumerate(zip(rounds, counted, strict=True)):
        merged = MergedLatencies()
        for process in answers:
            merged.add(process[number].recording)
            by_what[herd_round.what].add(process[number].recording)
        latencies = merged.summary(*merged.names())
        herds.append(
            Herd(
                what=herd_round.what,
                database_queries=counts.database,
                leader_fetches=counts.leader_fetches,
                leader_queries=counts.leaders,
                follower_queries=counts.followers,
                follower_fetches=counts.fetches,
                answered=latencies.count if latencies else 0,
                failed=dict(merged.failed),
                wrong=sum(process[number].wrong for process in answers),
                latency_ms=latencies,
                client_cpu_us=round(
                    1e6 * sum(process[number].client_cpu for process in answers) / max(1, latencies.count), 1
                )
                if latencies
                else 0.0,
            )
        )
    return HerdFigures(
        clients=herd.clients,
        processes=herd.processes,
        sessions=herd.sessions,
        followers=followers,
        herds=herds,
        own_cluster=herd.topology is None,
        database_queries={
            what: _most(each.database_queries for each in herds if each.what == what) for what in by_what
        },
        leader_fetches={what: max(each.leader_fetches for each in herds if each.what == what) for what in by_what},
        latency_ms={what: merged.summary(*merged.names()) for what, merged in by_what.items()},
    )


def _most(counts: Iterable[int | None]) -> int | None:
    return max((each for each in counts if each is not None), default=None)


def _listing(measured: HerdFigures) -> Listing:
    rows: list[tuple[str, ...]] = []
    for each in measured.herds:
        found = each.latency_ms
        rows.append(
            (
                each.what,
                f"{each.answered:,}",
                f"{each.follower_queries:,}",
                f"{each.follower_fetches:,}",
                f"{each.leader_queries:,}",
                f"{each.leader_fetches:,}",
                "" if each.database_queries is None else f"{each.database_queries:,}",
                *(f"{value:.0f}" for value in ((found.p50, found.p99, found.max) if found else ())),
                f"{each.client_cpu_us:.0f}",
            )
        )
    columns = (
        "a herd for one", "answered", "follower queries", "fetches", "leader queries", "fetches", "database", "p50 ms",
        "p99 ms", "max ms", "client µs",
    )  # fmt: skip
    return Listing(title="", columns=columns, rows=rows)


ANSWERED: Final = "answered"
_TIMEOUT_SECONDS: Final = 30.0
"""Deadline of a read; long, so that a busy machine shows as a latency and not as an error."""


class HerdRound(msgspec.Struct, frozen=True):
    """The key that all clients ask for: an object, or the first page of its list of so many edges."""

    what: Literal["object", "list"]
    id: int
    edges: int = 0


class HerdAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of one process in one round."""

    recording: LatencyRecording
    wrong: int
    client_cpu: float
    """CPU seconds of this process, from the start to its last answer."""


class HerdJob(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for one key with many awaiters at one moment, round after round; ``number`` is that of the load process.

    Files in one folder keep the processes in step: each process reports that it is ready for a round, and begins at the
    time that the runner writes once all are ready.
    """

    topology_file: str
    region: str
    tiers: tuple[str, ...]
    """The home tiers of the sessions, in turn."""
    sessions: int
    awaiters: int
    """Awaiters of all sessions together."""
    known_id: int
    """An object that each session reads before the rounds begin, so that its connections are open."""
    rounds: tuple[HerdRound, ...]
    folder: str
    number: int

    async def work(self, report: StepReport) -> list[HerdAnswers]:
        """Return the answers of each round. Raises a `TaoError` when the cluster or the runner does not answer."""
        folder, settings = Path(self.folder), ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with AsyncExitStack() as stack:
            graphs = [
                await stack.enter_async_context(
                    connect(
                        self.topology_file,
                        region=self.region,
                        tier=self.tiers[index % len(self.tiers)],
                        settings=settings,
                    )
                )
                for index in range(self.sessions)
            ]
            answers = []
            for number, herd_round in enumerate(self.rounds):
                for graph in graphs:
                    await graph.obj_get(self.known_id)
                settle_collector()
                ready_file(folder, number, self.number).touch()
                starts = await _start(go_file(folder, number))
                report(f"round {number + 1} of {len(self.rounds)}", number / len(self.rounds))
                answers.append(await _rush(graphs, herd_round, self.awaiters, starts))
                done_file(folder, number, self.number).touch()
            return answers


def ready_file(folder: Path, number: int, process: int) -> Path:
    """Return the file that a process writes when it is ready for a round."""
    return folder / f"ready-{number}-{process}"


def go_file(folder: Path, number: int) -> Path:
    """Return the file in which the runner writes when a round begins, in Unix seconds."""
    return folder / f"go-{number}"


def done_file(folder: Path, number: int, process: int) -> Path:
    """Return the file that a process writes when it has all answers of a round."""
    return folder / f"done-{number}-{process}"


async def _start(file: Path) -> float:
    async def is_there() -> bool:
        return await asyncio.to_thread(file.exists)

    await within(_STEP_SECONDS, is_there, _POLL_SECONDS, f"{file.name} was not written")
    return float(await asyncio.to_thread(file.read_text))


async def _rush(graphs: list[Graph], herd_round: HerdRound, awaiters: int, starts: float) -> HerdAnswers:
    recorder, wrong = LatencyRecorder(), 0
    await asyncio.sleep(max(0.0, starts - time.time()))
    began, cpu = perf_counter(), process_time()

    async def one(graph: Graph) -> None:
        nonlocal wrong
        try:
            if herd_round.what == "object":
                wrong += await graph.obj_get(herd_round.id) is None
            else:
                wrong += len(await graph.assoc_range(herd_round.id, LINK, 0, herd_round.edges)) != herd_round.edges
        except TaoError as error:
            recorder.failed(error.reason)
            return
        now = perf_counter()
        recorder.answered(ANSWERED, now - began, now - began)

    await asyncio.gather(*(one(graphs[index % len(graphs)]) for index in range(awaiters)))
    cpu = process_time() - cpu
    return HerdAnswers(recording=recorder.recording(), wrong=wrong, client_cpu=cpu)


async def drop_everywhere(graph: Graph, ids: Iterable[int], types: Sequence[str]) -> None:
    """Make every leader and follower of all regions drop these types in the shards of these ids, as `tao invalidate`
    does.

    A cluster with a secret expects it in ``TAO_TOKEN``. Raises `OperatorError` naming the servers that failed, and why.
    """
    shards = sorted({each >> SHARD_SHIFT for each in ids})
    plan = plan_invalidation(Routes(graph.topology), shards, ())
    async with operator_links(os.environ.get("TAO_TOKEN", "")) as links:
        results = await invalidate(plan, links, types_named(graph.schema, types))
    failed = [f"{each.server} ({each.error})" for each in results if each.error]
    if failed:
        raise OperatorError(f"these caches did not drop the test's keys: {', '.join(failed)}")
