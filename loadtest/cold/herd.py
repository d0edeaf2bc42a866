"""Scenario `herd`: ten thousand clients miss one key at the same moment, in both tiers, when no cache has it.

A stampede costs a database statements. The database counts them: it logs every statement, and the run counts those that
name the key. A leader's single flight leaves one statement per region; each follower has a single flight of its own.
For a running cluster, whose databases' passwords are unknown here, the leaders' fetches are counted instead.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any, Final, Literal

import msgspec

from loadtest import options
from loadtest.client_process import StepReport, run_job
from loadtest.cold.counters import Counts, Statements, counts_of, increase
from loadtest.conditions import together, within
from loadtest.latencies import Latencies, LatencyRecording
from loadtest.published.contestant import LINK, NODE
from loadtest.published.run import SCHEMA
from loadtest.results import ScenarioResult, at_most, listings_of, missed
from loadtest.rounds import settle_collector
from loadtest.scenario import BenchSettings, Progress, ProgressListener, Scenario
from loadtest.target import Target, target_for
from tao.admin.connection import operator_links
from tao.admin.invalidation import invalidate, plan_invalidation, types_named
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
_TIMEOUT_SECONDS: Final = 30.0
"""Deadline of a read; long, so that a busy machine shows as a latency and not as an error."""
_KINDS: Final = ("object", "list")
_NOTES: Final = ["Database: statements that name the key, from its own log; latency counts from the common start."]
_OF_A_RUNNING_ONE: Final = (
    "What was asked for has been written into the running cluster, and stays there; of the types `node` and `link` its "
    "caches have dropped what they held in the shards of the keys. Queries and fetches are those of everybody."
)


@dataclass(frozen=True, kw_only=True)
class HerdOptions(options.Options):
    """The options of `herd`."""

    clients: int = options.CLIENTS.default(10_000, toy=200)
    processes: int = options.PROCESSES.default(4, toy=2)
    sessions: int = options.SESSIONS.default(16, toy=4)
    """Separate SDK clients of each process, each with connections of its own."""
    rounds: int = options.ROUNDS.default(5, toy=1)
    """Rounds of each kind; every round uses another key."""
    topology: Path | None = options.PUBLISHED_TOPOLOGY.default(None)
    seed: int = options.SEED.default(1)


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


@dataclass(frozen=True, slots=True)
class _Counted:
    """What one round has cost the servers; ``statements`` is None for a running cluster."""

    statements: int | None
    leaders: Counts
    followers: Counts


async def run(settings: BenchSettings, progress: Progress, herd: HerdOptions) -> ScenarioResult:
    """Let all clients ask for one key at once, round after round. Raises `OperatorError`."""
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
        counted, answers = await _rush(target, herd, known_id, rounds, settings.work_dir, progress)
    measured = _measured(herd, len(target.all_followers), rounds, counted, answers)
    bad = sum(sum(each["failed"].values()) + each["wrong"] for each in measured["herds"])
    fetches = "leaders fetch one key at most once for each follower"
    demands = [at_most("no read failed or wrong", bad, 0)]
    return ScenarioResult(
        conditions={"clients": herd.clients, "processes": herd.processes, "sessions_each": herd.sessions},
        listings=listings_of({**measured, "herds": [_flat(each) for each in measured["herds"]]}, lists=True),
        notes=[*_NOTES, *([_OF_A_RUNNING_ONE] if herd.topology else [])],
        aims=[
            *demands,
            *(at_most(fetches, measured["leader_fetches"][what], measured["followers"], what) for what in _KINDS),
        ],
        measured=measured,
        faults=missed(demands),
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


async def drop_everywhere(graph: Graph, ids: Iterable[int], types: Sequence[str]) -> None:
    """Make every leader and follower of all regions drop these types in the shards of these ids, as `tao invalidate`
    does.

    A cluster with a secret expects it in ``TAO_TOKEN``. Raises `OperatorError` naming the servers that failed, and why.
    """
    shards = sorted({each >> SHARD_SHIFT for each in ids})
    plan = plan_invalidation(Routes(graph.topology), shards, ())
    async with operator_links(graph.topology, os.environ.get("TAO_TOKEN", "")) as links:
        results = await invalidate(plan, links, types_named(graph.schema, types))
    failed = [f"{each.server} ({each.error})" for each in results if each.error]
    if failed:
        raise OperatorError(f"these caches did not drop the test's keys: {', '.join(failed)}")


async def _rush(
    target: Target, herd: HerdOptions, known_id: int, rounds: tuple[HerdRound, ...], folder: Path, progress: Progress
) -> tuple[list[_Counted], list[list[HerdAnswers]]]:
    """Run the load processes, and count what each round costs; returns that, and the answers of each process."""
    job = HerdJob(
        topology_file=target.topology_file,
        region=target.region,
        tiers=target.tiers,
        sessions=herd.sessions,
        awaiters=herd.clients // herd.processes,
        known_id=known_id,
        rounds=rounds,
        folder=str(folder),
    )
    seen = Counter[str]()
    heard = ProgressListener(progress, lambda text: seen.update([text]))
    counted: list[_Counted] = []

    async def reached(step: Callable[[int], str], number: int) -> None:
        async def all_have() -> bool:
            return seen[step(number)] == herd.processes

        await within(_STEP_SECONDS, all_have, _POLL_SECONDS, f"the load processes have not reported {step(number)!r}")

    async def count() -> list[HerdAnswers]:
        async with Statements.of(target) as statements:
            for number, each in enumerate(rounds):
                await reached(_ready, number)
                if statements is not None:
                    await statements.log_anew()
                leaders, followers = await counts_of(target.leaders), await counts_of(target.all_followers)
                _write_start(folder, number)
                await reached(_answered, number)
                counted.append(
                    _Counted(
                        None if statements is None else await statements.naming(each.id),
                        increase(leaders, await counts_of(target.leaders)),
                        increase(followers, await counts_of(target.all_followers)),
                    )
                )
        return []

    processes = [
        run_job(job, heard, folder / f"herd-{number}.log", list[HerdAnswers]) for number in range(herd.processes)
    ]
    *answers, _ = await together([*processes, count()])
    return counted, answers


def _measured(
    herd: HerdOptions,
    followers: int,
    rounds: tuple[HerdRound, ...],
    counted: list[_Counted],
    answers: list[list[HerdAnswers]],
) -> dict[str, Any]:
    """Return the figures as the JSON has them; `Any`: they differ in kind.

    ``database_queries`` are statements that name the key, None for a running cluster; ``leader_fetches`` those that
    leaders began at their databases for any client; beside the rounds both are the most of any round. The CPU time is
    that of the load processes per read."""
    herds, by_what = list[dict[str, Any]](), {what: Latencies() for what in _KINDS}
    for herd_round, counts, *processes in zip(rounds, counted, *answers, strict=True):
        merged = Latencies(*(each.recording for each in processes))
        by_what[herd_round.what].add(merged.recording())
        latencies = merged.summary(*merged.names())
        answered = latencies.count if latencies else 0
        herds.append(
            {
                "what": herd_round.what,
                "database_queries": counts.statements,
                "leader_fetches": counts.leaders.fetches,
                "leader_queries": counts.leaders.queries,
                "follower_queries": counts.followers.queries,
                "follower_fetches": counts.followers.fetches,
                "answered": answered,
                "failed": dict(merged.failed),
                "wrong": sum(each.wrong for each in processes),
                "latency_ms": msgspec.to_builtins(latencies),
                "client_cpu_us": round(1e6 * sum(each.client_cpu for each in processes) / max(1, answered), 1),
            }
        )

    def most(what: str, key: str) -> int | None:
        return max((each[key] for each in herds if each["what"] == what and each[key] is not None), default=None)

    return {
        "clients": herd.clients,
        "processes": herd.processes,
        "sessions": herd.sessions,
        "followers": followers,
        "herds": herds,
        "own_cluster": herd.topology is None,
        **{key: {what: most(what, key) for what in _KINDS} for key in ("database_queries", "leader_fetches")},
        "latency_ms": {what: msgspec.to_builtins(each.summary(*each.names())) for what, each in by_what.items()},
    }


def _flat(each: dict[str, Any]) -> dict[str, Any]:
    """Return a round as one row of the table. `Any`: the JSON's values."""
    latencies = each["latency_ms"] or {}
    shown = {key: value for key, value in each.items() if key not in ("failed", "wrong", "latency_ms")}
    return {**shown, **{f"{key}_ms": latencies.get(key) for key in ("p50", "p99", "max")}}


class HerdJob(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for one key with many awaiters at one moment, round after round.

    The processes are kept in step: each reports that it is ready for a round, and begins at the time that the runner
    writes into a file of ``folder`` once all are ready.
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

    async def work(self, report: StepReport) -> list[HerdAnswers]:
        """Return the answers of each round. Raises a `TaoError` when the cluster or the runner does not answer."""
        settings, answers = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS), []
        async with AsyncExitStack() as stack:
            graphs = []
            for index in range(self.sessions):
                tier = self.tiers[index % len(self.tiers)]
                pending = connect(self.topology_file, region=self.region, tier=tier, settings=settings)
                graphs.append(await stack.enter_async_context(pending))
            for number, herd_round in enumerate(self.rounds):
                for graph in graphs:
                    await graph.obj_get(self.known_id)
                settle_collector()
                report(_ready(number), number / len(self.rounds))
                starts = await _start(_start_file(Path(self.folder), number))
                answers.append(await _ask_at(starts, graphs, herd_round, self.awaiters))
                report(_answered(number), (number + 1) / len(self.rounds))
        return answers


def _ready(number: int) -> str:
    return f"round {number + 1}: ready"


def _answered(number: int) -> str:
    return f"round {number + 1}: answered"


def _start_file(folder: Path, number: int) -> Path:
    return folder / f"start-{number}"


def _write_start(folder: Path, number: int) -> None:
    """Write when a round begins, in Unix seconds; the file is there when all of it is."""
    half_written = folder / f"starting-{number}"
    half_written.write_text(repr(time.time() + _LEAD_SECONDS))
    half_written.rename(_start_file(folder, number))


async def _start(file: Path) -> float:
    async def is_there() -> bool:
        return await asyncio.to_thread(file.exists)

    await within(_STEP_SECONDS, is_there, _POLL_SECONDS, f"{file.name} was not written")
    return float(await asyncio.to_thread(file.read_text))


async def _ask_at(starts: float, graphs: list[Graph], herd_round: HerdRound, awaiters: int) -> HerdAnswers:
    recorded, wrong = Latencies(), 0
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
            recorded.failed[error.reason] += 1
            return
        now = perf_counter()
        recorded.answered("answered", now - began, now - began)

    await asyncio.gather(*(one(graphs[index % len(graphs)]) for index in range(awaiters)))
    return HerdAnswers(recording=recorded.recording(), wrong=wrong, client_cpu=process_time() - cpu)
