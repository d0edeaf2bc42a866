"""Scenario `herd`: ten thousand clients miss one key at the same moment, in both tiers, where no cache has it.

What a stampede does to a database is a number of statements; it is counted by the database, which logs every one and is
asked for those that name the key. One a region is what a leader's single flight leaves; each follower has its own.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.cold.herd_client import HerdAnswers, HerdJob, HerdRound, done_file, go_file, ready_file
from loadtest.cold.statements import Statements
from loadtest.published.contestant import LINK, NODE
from loadtest.published.recording import Merged, Summary
from loadtest.published.run import SCHEMA
from loadtest.results import Listing, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.waiting import together, within
from tao.client import connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.readiness import server_stats
from tao.devcluster.server_options import Durability

SUMMARY: Final = "10,000 clients miss one key at once: what reaches the database, and how long they wait"
_SHAPE: Final = Shape(tiers=2, followers=2, leaders=2, databases=1, shards=8)
_DATABASE: Final = "db-1"
_EDGES: Final = 50
_OBJECT_BYTES: Final = 673
"""The mean of the paper's objects."""
_LEAD_SECONDS: Final = 0.3
_STEP_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class HerdSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    clients: int = 10_000
    processes: int = 4
    sessions: int = 16
    """Of each process: separate SDK clients, each with connections of its own."""
    rounds: int = 5
    """Herds for an object, and as many for a list; every one for another key."""
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
    database_queries: int
    leader_queries: int
    follower_queries: int
    """What the SDK's sessions sent, and what they ask of themselves meanwhile."""
    follower_fetches: int
    answered: int
    failed: dict[str, int]
    wrong: int
    latency_ms: Summary | None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, as the JSON has it."""

    clients: int
    processes: int
    sessions: int
    followers: int
    herds: list[Herd]
    database_queries: dict[str, int]
    """Of one herd, the most of all rounds: ``object``, ``list``."""
    latency_ms: dict[str, Summary | None]
    """Over all rounds."""


async def run(settings: BenchSettings, progress: Progress, wanted: HerdSettings | None = None) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    herd = wanted or HerdSettings()
    if settings.toy:
        herd = HerdSettings(clients=200, processes=2, sessions=4, rounds=1, seed=herd.seed)
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "herd",
        shape=msgspec.structs.replace(_SHAPE, followers=1, leaders=1) if settings.toy else _SHAPE,
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
        log_level="warning",
    )
    async with DevCluster(cluster_settings, progress.step) as cluster:
        known_id, rounds = await _fill(cluster, herd)
        progress.step("restarting every cache", 0.2)
        cold = [name for name, role in cluster.processes.items() if role in (Role.LEADER, Role.FOLLOWER)]
        await asyncio.gather(*(cluster.restart(name) for name in cold))
        database = cluster.database(_DATABASE)
        settings.versions[database.binary.flavour] = database.binary.version_text
        jobs = [
            HerdJob(
                topology_file=str(cluster.topology_path),
                tiers=tuple(cluster.record.shape.tier_names),
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
        async with Statements.of(database) as statements:
            await statements.log_all()

            async def count() -> list[HerdAnswers]:
                for number, each in enumerate(rounds):
                    counted.append(await _counted(cluster, statements, settings.work_dir, number, each, len(jobs)))
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
    measured = _measured(herd, cluster.record.shape.tiers * cluster.record.shape.followers, rounds, counted, answers)
    return ScenarioResult(
        summary=SUMMARY,
        conditions={"clients": herd.clients, "processes": herd.processes, "sessions_each": herd.sessions},
        listings=[_listing(measured)],
        notes=["Statements that name the key, from the database's own log; latency counts from the common start."],
        measured=msgspec.to_builtins(measured),
        faults=[
            f"a herd for one {each.what}: {sum(each.failed.values())} failed, {each.wrong} wrong"
            for each in measured.herds
            if each.failed or each.wrong
        ],
    )


async def _fill(cluster: DevCluster, herd: HerdSettings) -> tuple[int, tuple[HerdRound, ...]]:
    chance = Random(herd.seed)
    async with connect(str(cluster.topology_path)) as graph:
        row = (NODE, {"payload": chance.randbytes(_OBJECT_BYTES)})
        known_id, *ids = await graph.obj_add_many([row] * (1 + 2 * herd.rounds + _EDGES))
        others, keys = ids[:_EDGES], ids[_EDGES:]
        edges = [(id1, LINK, id2, time_) for id1 in keys[herd.rounds :] for time_, id2 in enumerate(others)]
        await graph.assoc_add_many(edges)
    objects = [HerdRound("object", each) for each in keys[: herd.rounds]]
    return known_id, (*objects, *(HerdRound("list", each, _EDGES) for each in keys[herd.rounds :]))


@dataclass(frozen=True, slots=True)
class _Counts:
    database: int = 0
    leaders: int = 0
    followers: int = 0
    fetches: int = 0


async def _counted(
    cluster: DevCluster, statements: Statements, folder: Path, number: int, herd_round: HerdRound, processes: int
) -> _Counts:
    async def ready() -> bool:
        return all(ready_file(folder, number, each).exists() for each in range(processes))

    async def done() -> bool:
        return all(done_file(folder, number, each).exists() for each in range(processes))

    await within(_STEP_SECONDS, ready, _POLL_SECONDS, "the load processes were not ready")
    await statements.forget()
    before = await _asked(cluster)
    half_written = folder / f"starting-{number}"
    half_written.write_text(repr(time.time() + _LEAD_SECONDS))
    half_written.rename(go_file(folder, number))
    await within(_STEP_SECONDS, done, _POLL_SECONDS, "the load processes had no answers")
    after = await _asked(cluster)
    return _Counts(
        await statements.naming(herd_round.id),
        after.leaders - before.leaders,
        after.followers - before.followers,
        after.fetches - before.fetches,
    )


async def _asked(cluster: DevCluster) -> _Counts:
    leaders = followers = fetches = 0
    for name, role in cluster.processes.items():
        if role is Role.LEADER:
            stats = await server_stats(cluster.admin(name))
            leaders += stats["hits"] + stats["misses"]
        elif role is Role.FOLLOWER:
            stats = await server_stats(cluster.admin(name))
            followers += stats["hits"] + stats["misses"]
            fetches += stats["fills"]["started"]
    return _Counts(0, leaders, followers, fetches)


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
                leader_queries=counts.leaders,
                follower_queries=counts.followers,
                follower_fetches=counts.fetches,
                answered=latencies.count if latencies else 0,
                failed=dict(merged.failed),
                wrong=sum(process[number].wrong for process in answers),
                latency_ms=latencies,
            )
        )
    return Measured(
        clients=herd.clients,
        processes=herd.processes,
        sessions=herd.sessions,
        followers=followers,
        herds=herds,
        database_queries={what: max(each.database_queries for each in herds if each.what == what) for what in together},
        latency_ms={what: merged.summary(*merged.names()) for what, merged in together.items()},
    )


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
                f"{each.database_queries:,}",
                *(f"{value:.0f}" for value in ((found.p50, found.p99, found.max) if found else ())),
            )
        )
    columns = ("a herd for one", "answered", "follower queries", "fetches", "leader queries", "database", "p50 ms")
    return Listing(title="", columns=(*columns, "p99 ms", "max ms"), rows=rows)
