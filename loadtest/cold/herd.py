"""Scenario `herd`: ten thousand clients miss one key at the same moment, in both tiers, where no cache has it.

What a stampede does to a database is a number of statements; it is counted by the database, which logs every one and is
asked for those that name the key. One a region is what a leader's single flight leaves; each follower has its own. Of a
running cluster, whose databases' passwords nobody knows here, the leaders' fetches are counted in their place.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.cold.herd_client import HerdAnswers, HerdJob, HerdRound, done_file, go_file, ready_file
from loadtest.cold.statements import Statements
from loadtest.cold.voiding import drop_everywhere
from loadtest.published.contestant import LINK, NODE
from loadtest.published.recording import Merged, Summary
from loadtest.published.run import SCHEMA
from loadtest.results import Listing, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.target import Target, target_for
from loadtest.waiting import together, within
from tao.client import connect
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.server_options import Durability

SUMMARY: Final = "10,000 clients miss one key at once: what reaches the database, and how long they wait"
_SHAPE: Final = Shape(tiers=2, followers=2, leaders=2, databases=1, shards=8)
_EDGES: Final = 50
_OBJECT_BYTES: Final = 673
"""The mean of the paper's objects."""
_LEAD_SECONDS: Final = 0.3
_STEP_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.02
_NOTES: Final = ["Database: statements that name the key, from its own log; latency counts from the common start."]
_OF_A_RUNNING_ONE: Final = (
    "What was asked for has been written into the running cluster, and stays there; of the types `node` and `link` its "
    "caches have dropped what they held in the shards of the keys. Queries and fetches are those of everybody."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HerdSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    clients: int = 10_000
    processes: int = 4
    sessions: int = 16
    """Of each process: separate SDK clients, each with connections of its own."""
    rounds: int = 5
    """Herds for an object, and as many for a list; every one for another key."""
    topology: Path | None = None
    """Of a running cluster, which is asked instead of one of its own; its schema has the types of `SCHEMA`."""
    seed: int = 1

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--clients": (self.clients, 10, 200_000),
                "--processes": (self.processes, 1, 32),
                "--sessions": (self.sessions, 1, 1_000),
                "--rounds": (self.rounds, 1, 50),
            }
        )


class Herd(msgspec.Struct, frozen=True, kw_only=True):
    """One rush for one key."""

    what: str
    database_queries: int | None
    """Statements that name the key; None: of databases that are not this scenario's to ask."""
    leader_fetches: int
    """That leaders began at their databases, whoever had asked."""
    leader_queries: int
    follower_queries: int
    """What the SDK's sessions sent, and what they ask of themselves meanwhile."""
    follower_fetches: int
    answered: int
    failed: dict[str, int]
    wrong: int
    latency_ms: Summary | None
    client_cpu_us: float
    """Of the load processes, a read."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, as the JSON has it."""

    clients: int
    processes: int
    sessions: int
    followers: int
    herds: list[Herd]
    own_cluster: bool
    database_queries: dict[str, int | None]
    """Of one herd, the most of all rounds: ``object``, ``list``."""
    leader_fetches: dict[str, int]
    """The same of what leaders began at their databases."""
    latency_ms: dict[str, Summary | None]
    """Over all rounds."""


async def run(settings: BenchSettings, progress: Progress, wanted: HerdSettings | None = None) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    herd = wanted or HerdSettings()
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
        summary=SUMMARY,
        conditions={"clients": herd.clients, "processes": herd.processes, "sessions_each": herd.sessions},
        listings=[_listing(measured)],
        notes=[*_NOTES, *([_OF_A_RUNNING_ONE] if herd.topology else [])],
        measured=msgspec.to_builtins(measured),
        faults=[
            f"a herd for one {each.what}: {sum(each.failed.values())} failed, {each.wrong} wrong"
            for each in measured.herds
            if each.failed or each.wrong
        ],
    )


@asynccontextmanager
async def _statements_of(target: Target) -> AsyncIterator[Statements | None]:
    """Logged from now on; None of databases that are not ours."""
    if target.database is None:
        yield None
        return
    async with Statements.of(target.database) as statements:
        await statements.log_all()
        yield statements


async def _fill(target: Target, herd: HerdSettings) -> tuple[int, tuple[HerdRound, ...]]:
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
    herd: HerdSettings,
    followers: int,
    rounds: tuple[HerdRound, ...],
    counted: list[_Counts],
    answers: list[list[HerdAnswers]],
) -> Measured:
    herds, together = list[Herd](), {"object": Merged(), "list": Merged()}
    for number, (herd_round, counts) in enumerate(zip(rounds, counted, strict=True)):
        merged = Merged()
        for process in answers:
            merged.add(process[number].recording)
            together[herd_round.what].add(process[number].recording)
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
    return Measured(
        clients=herd.clients,
        processes=herd.processes,
        sessions=herd.sessions,
        followers=followers,
        herds=herds,
        own_cluster=herd.topology is None,
        database_queries={
            what: _most(each.database_queries for each in herds if each.what == what) for what in together
        },
        leader_fetches={what: max(each.leader_fetches for each in herds if each.what == what) for what in together},
        latency_ms={what: merged.summary(*merged.names()) for what, merged in together.items()},
    )


def _most(counts: Iterable[int | None]) -> int | None:
    return max((each for each in counts if each is not None), default=None)


def _listing(measured: Measured) -> Listing:
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
