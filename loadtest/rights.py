"""Scenario `rights`: what the access document costs a cached read, in CPU of the follower.

The cost is measured within one process (`loadtest.rights_path`): what the check of rights adds to the handling of a
batch, compared with the CPU of a whole follower for the same queries. That is what the aim is about.

The second measurement is of whole followers, and too rough for an aim. Two followers answer the same batches in turns.
At first neither has an access document; then one of them gets one that grants the types by name, so that each batch is
checked. Each pair of turns gives the ratio of their CPU per query. The ratio with the document is divided by the one
without, so each follower is its own control: two processes never cost quite the same. The intervals are bootstrapped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import msgspec

from loadtest import options
from loadtest.client_process import StepReport, run_job
from loadtest.dataset import ITEM, LINK, TOY, Dataset, DatasetSize, write_dataset
from loadtest.drivers import Batch, WrongAnswer, sessions
from loadtest.results import Aim, ScenarioResult, at_most
from loadtest.rights_path import BatchPath, PathCosts
from loadtest.rounds import MICRO, Comparison, Pace, Round, Trial, Turns, take_turns
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from loadtest.stream import MIX, checked
from loadtest.table import listing
from loadtest.tao_reads import open_graph, open_sessions
from loadtest.target import pids_of
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.ports import LOOPBACK
from tao.model.errors import PermissionDenied
from tao.runtime.admin_client import admin_get
from tao.topology.file_store import ACCESS_FILE_NAME
from tao.wire.session import Session
from tao.wire.v1 import session_pb2 as pb

_SHAPE: Final = Shape(tiers=2, followers=1, leaders=1, databases=1, shards=8)
_FREE, _RULED = "follower-1a", "follower-2a"
"""The follower that never has an access document, and the one that gets one."""
_OTHER_TYPE: Final = "peer"
"""A type that the document does not grant."""
_RULES: Final = f"""\
format: 1
version: 1
roles:
  reader:
    read: {{objects: [{ITEM}], associations: [{LINK}]}}
anonymous: [reader]
"""
_BOUND_PERCENT: Final = 2.0
_PREPARED_BATCHES: Final = 100
_TIMEOUT_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.05
_SAMPLES: Final = 2_000
_SEED: Final = 7
_QUADRUPLES_PER_PAIR: Final = 20
_PATH_COLUMNS: Final = {
    "cached reads": "{name}",
    "batch path µs": "{path_us:.3f}",
    "rights add µs": "{added_us:+.4f}",
    "of the path %": "{path_percent:+.2f}",
    "from": "{path_percent_low:+.2f}",
    "to": "{path_percent_high:+.2f}",
    "of a follower %": "{follower_percent:+.2f}",
    "from ": "{follower_percent_low:+.2f}",
    "to ": "{follower_percent_high:+.2f}",
}
_COLUMNS: Final = {
    "cached reads": "{name}",
    "without µs": "{without_us:.3f}",
    "with µs": "{with_us:.3f}",
    "ratio": "{ratio:.4f}",
    "from": "{ratio_low:.4f}",
    "to": "{ratio_high:.4f}",
    "ratio before": "{ratio_before:.4f}",
    "cost %": "{cost_percent:+.2f}",
    "from ": "{cost_percent_low:+.2f}",
    "to ": "{cost_percent_high:+.2f}",
}
_NOTES: Final = [
    (
        "First table: CPU of a query within one process, in slices without and with rights that alternate; medians. "
        "*of a follower*: what rights add, divided by a follower's CPU without them."
    ),
    "Second table: CPU of a follower for a query. The ratio, with the document to without, is the median of all pairs.",
    "*before*: the same ratio while neither follower has a document. The cost is the quotient of the two.",
    f"The intervals hold 95 % of {_SAMPLES:,} bootstrapped values.",
]


@dataclass(frozen=True, kw_only=True)
class RightsOptions(options.Options):
    """The options of the scenario."""

    pairs: int = options.PAIRS.default(20, toy=3)
    seconds: float = options.SECONDS.default(1.0, toy=0.05, help="Measured seconds of one follower in one pair.")


class _Load(NamedTuple):
    """One shape of load: so many connections, each with one batch of so many queries under way."""

    connections: int
    batch: int

    @property
    def name(self) -> str:
        """The name in tables and in the JSON."""
        return f"{MIX}, batches of {self.batch}, {self.connections} connections"


_LOADS: Final = (_Load(4, 100), _Load(32, 1))


async def run(settings: BenchSettings, progress: Progress, asked: RightsOptions) -> ScenarioResult:
    """Measure both followers before and after one of them has an access document. Raises `OperatorError`."""
    state_dir, ruled = settings.work_dir / "rights", settings.work_dir / "ruled"
    ruled.mkdir()
    # A server looks for an access document beside the topology file that it was given.
    topology_link = ruled / "topology.json"
    topology_link.symlink_to(state_dir / topology_link.name)
    cluster_settings = ClusterSettings(
        state_dir=state_dir,
        shape=_SHAPE,
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
        server_settings={_RULED: {"topology_file": str(topology_link)}},
    )
    size = TOY if settings.toy else DatasetSize()
    async with DevCluster(cluster_settings, progress.step) as cluster:
        pids, ports = await pids_of(cluster), cluster.record.ports
        job = RightsJob(
            topology_file=str(cluster.topology_path),
            topology_version=cluster.record.topology_version,
            frames={name: f"{LOOPBACK}:{ports[name]['frames']}" for name in (_FREE, _RULED)},
            pids={name: pids[name] for name in (_FREE, _RULED)},
            admin=cluster.admin(_RULED),
            access_file=str(ruled / ACCESS_FILE_NAME),
            size=size,
            pace=Pace(asked.pairs, asked.seconds),
        )
        log = settings.work_dir / "rights.log"
        costs = await run_job(job, progress, log, dict[str, RightsCosts])
    pairs = {name: each.followers for name, each in costs.items()}
    measured = {name: each.figures() for name, each in pairs.items()}
    paths = {name: each.path.figures(measured[name]["without_us"]) for name, each in costs.items()}
    return ScenarioResult(
        conditions={"objects": size.objects, "pairs": asked.pairs, "turn_seconds": asked.seconds},
        listings=[
            listing(columns, ({"name": name, **found} for name, found in each.items()))
            for columns, each in ((_PATH_COLUMNS, paths), (_COLUMNS, measured))
        ],
        notes=_NOTES,
        aims=[_aim(name, found) for name, found in paths.items()],
        measured={
            **{name: {**found, **paths[name]} for name, found in measured.items()},
            "pairs": {name: msgspec.to_builtins(each) for name, each in pairs.items()},
        },
    )


def _aim(name: str, found: dict[str, float]) -> Aim:
    return at_most(
        f"rights cost a cached read at most {_BOUND_PERCENT:g} % of the follower's CPU",
        found["follower_percent"],
        _BOUND_PERCENT,
        f"{name}, 95 % interval {found['follower_percent_low']:+.2f} to {found['follower_percent_high']:+.2f} %",
    )


SCENARIO: Final = Scenario(
    name="rights",
    summary="what the access document costs a cached read, in CPU of a follower: interleaved pairs",
    run=run,
    options=RightsOptions,
    help=__doc__ or "",
)


class PairedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """CPU of both followers for a query in microseconds, a pair in each place: ``[without rights, with]``; ``before``
    are the pairs in which neither follower had an access document."""

    before: list[tuple[float, float]]
    after: list[tuple[float, float]]

    def figures(self) -> dict[str, float]:
        """Return the medians, the ratios, and the cost of rights in percent with its interval."""
        before, after = ([ruled / free for free, ruled in pairs] for pairs in (self.before, self.after))
        chance = Random(_SEED)
        ratios, costs = list[float](), list[float]()
        for _ in range(_SAMPLES):
            drawn = statistics.median(chance.choices(after, k=len(after)))
            ratios.append(drawn)
            costs.append(_percent(drawn / statistics.median(chance.choices(before, k=len(before)))))
        found = {
            "without_us": statistics.median(free for free, _ in self.after),
            "with_us": statistics.median(ruled for _, ruled in self.after),
            "ratio": statistics.median(after),
            **_interval("ratio", ratios),
            "ratio_before": statistics.median(before),
            "cost_percent": _percent(statistics.median(after) / statistics.median(before)),
            **_interval("cost_percent", costs),
        }
        return {name: round(value, 4) for name, value in found.items()}


class RightsCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What rights cost one shape of load."""

    path: PathCosts
    followers: PairedCosts


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def _interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the bounds of the middle 95 % of the values."""
    cuts = statistics.quantiles(values, n=40, method="inclusive")
    return {f"{name}_low": cuts[0], f"{name}_high": cuts[-1]}


class RightsJob(msgspec.Struct, frozen=True, kw_only=True):
    """Ask both followers in turns, before and after one of them has an access document."""

    topology_file: str
    topology_version: int
    frames: dict[str, str]
    """The addresses of the followers, ``host:port``."""
    pids: dict[str, int]
    admin: str
    """The admin address of the follower that gets the document."""
    access_file: str
    size: DatasetSize
    pace: Pace

    async def work(self, report: StepReport) -> dict[str, RightsCosts]:
        """Return the costs of each shape of load. Raises `TaoError`."""
        async with AsyncExitStack() as stack:
            graph = await open_graph(self.topology_file, "frames", stack)
            report("writing the graph", 0.0)
            data = await write_dataset(graph, self.size)
            atypes = graph.schema.atype(LINK).number, graph.schema.atype(_OTHER_TYPE).number
            most = max(load.connections for load in _LOADS)
            opened = {name: await open_sessions(each, "frames", most, stack) for name, each in self.frames.items()}
            report("checking every answer, which warms the caches", 0.0)
            batches = {load: await self._checked(load, data, opened, atypes[0]) for load in _LOADS}
            report("measuring the batch path alone", 0.0)
            path = BatchPath(data, graph.schema, atypes[0], _RULES)
            quadruples = _QUADRUPLES_PER_PAIR * self.pace.rounds
            paths = {
                # In a thread: the sessions to the followers have to be kept alive meanwhile.
                load: await asyncio.to_thread(path.measure, batches[load], load.batch, quadruples)
                for load in _LOADS
            }
            comparisons = [self._comparison(load, batches[load], opened) for load in _LOADS]
            before = await self._measure(comparisons, report, 0.0)
            await self._give_rules(opened[_RULED][0], atypes[1])
            for load in _LOADS:
                await self._checked(load, data, opened, atypes[0])
            after = await self._measure(comparisons, report, 0.5)
        return {
            load.name: RightsCosts(
                path=paths[load], followers=PairedCosts(before=_pairs(first, load), after=_pairs(second, load))
            )
            for load, first, second in zip(_LOADS, before, after, strict=True)
        }

    async def _checked(self, load: _Load, data: Dataset, opened: dict[str, list[Session]], atype: int) -> list[Batch]:
        """Return batches that both followers have answered rightly, and so from now on without a miss."""
        found: list[Batch] = []
        for sessions_of in opened.values():
            endless = itertools.cycle(data.mix)
            drawn = (list(itertools.islice(endless, load.batch)) for _ in range(_PREPARED_BATCHES))
            found = await checked(sessions_of[0].ask, drawn, atype, self.topology_version)
        return found

    def _comparison(self, load: _Load, batches: list[Batch], opened: dict[str, list[Session]]) -> Comparison:
        trials = (
            Trial(
                name,
                sessions(opened[name][: load.connections], batches, self.topology_version),
                {name: self.pids[name]},
                load.batch,
            )
            for name in (_FREE, _RULED)
        )
        return Comparison(load.name, tuple(trials))

    async def _measure(self, comparisons: list[Comparison], report: StepReport, done: float) -> list[Turns]:
        return [await take_turns(each, self.pace, lambda text: report(text, done)) for each in comparisons]

    async def _give_rules(self, session: Session, other_atype: int) -> None:
        """Write the access document, and wait until the follower goes by it. Raises `WrongAnswer` when it answers what
        the document does not grant."""
        await asyncio.to_thread(Path(self.access_file).write_text, _RULES)
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            while True:
                _, stats = await admin_get(self.admin, "/stats")
                if json.loads(stats)["access"]["version"]:
                    break
                await asyncio.sleep(_LOOK_SECONDS)
        denied = pb.ReadBatch(count_id1s=[1], count_atypes=[other_atype])
        answer = await session.ask(pb.Request(topology_version=self.topology_version, read=denied), _TIMEOUT_SECONDS)
        if [error.reason for error in answer.read.errors] != [PermissionDenied.reason]:
            raise WrongAnswer(f"{_RULED} does not go by its access document: {answer}")


def _pairs(turns: Turns, load: _Load) -> list[tuple[float, float]]:
    return list(zip(*(_costs(turns[name], load) for name in (_FREE, _RULED)), strict=True))


def _costs(rounds: Sequence[Round], load: _Load) -> Iterator[float]:
    for each in rounds:
        yield MICRO * sum(each.server_cpu.values()) / (each.samples.answered * load.batch)
