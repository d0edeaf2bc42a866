"""Scenario `scale`: measure the parts of a large installation, and find what grows faster than linearly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.options import FOLLOWERS_PER_LEADER, MODEL_PART, SECONDS, Options
from loadtest.results import ScenarioResult, listings_of
from loadtest.scale.cluster import measure_cluster
from loadtest.scale.figures import DIMENSIONS, ScaleFigures
from loadtest.scale.in_process import ClientJob, ColdStartJob, Measured, ParseJob
from loadtest.scale.installation import (
    FOLLOWER,
    LEADER,
    REGION,
    UNRELATED,
    Addresses,
    InstallationShape,
    store,
    topology_of,
)
from loadtest.scale.processes import reserved_addresses, running
from loadtest.scale.roles import WRITES_PER_SECOND, Bench, measure_follower, measure_leader
from loadtest.scale.slow_leader import measure_slow_leader
from loadtest.scale.stubs import StubFollower
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from tao.devcluster.ports import LOOPBACK
from tao.model.errors import TaoError
from tao.schema.registry import load_schema
from tao.topology.document import dump_topology
from tao.wire.frames_server import FrameServer
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb

_PARTS: Final = ("parse", "cold start", "follower", "leader", "tailer", "cluster")
_CLUSTER_SHARDS: Final = 1_000
_REPETITIONS: Final = 5
"""Repetitions of parsing and of cold starts; the best is reported, since other work on the machine only adds to it."""
_MOST_SECONDS: Final = 1_500.0
_TOY_SHAPE: Final = InstallationShape(shards=120, leaders=4, databases=4)


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(Options):
    """The options of `scale`."""

    seconds: float = SECONDS.default(5.0, toy=0.3, help="Measured seconds of each load.")
    followers_per_leader: int = FOLLOWERS_PER_LEADER.default(100, toy=6)
    parts: tuple[str, ...] = MODEL_PART.default((), choices=_PARTS)


async def run(settings: BenchSettings, progress: Progress, wanted: ScaleOptions) -> ScenarioResult:
    """Measure the parts. A part that fails is a fault of the run, and costs the others nothing."""
    shape = msgspec.structs.replace(
        _TOY_SHAPE if settings.toy else InstallationShape(), followers_per_leader=wanted.followers_per_leader
    )
    found = ScaleFigures(shape)
    faults: list[str] = []
    model = _Model(settings, progress, wanted.seconds, found)
    for number, part in enumerate(chosen := wanted.parts or _PARTS):
        progress.step(part, number / len(chosen))
        try:
            await model.measure(part)
        except TaoError as error:
            faults.append(f"{part}: {error.message}")
    report = found.report()
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions={**msgspec.structs.asdict(shape), "servers": shape.servers, "seconds": wanted.seconds},
        listings=listings_of(report),
        notes=[*_NOTES, *(f"Faster than linear: {each}." for each in found.faster_than_linear())],
        aims=list(found.aims()),
        measured=report,
        faults=faults,
    )


_NOTES: Final = [
    "One server of each role is real; its neighbours are stubs that speak its protocol and do no work.",
    "Idle shares: the measured cost of one proof, times the proofs of the whole installation, and the rest.",
    "A block is CPU time of the event loop's thread between two turns.",
]


SCENARIO: Final = Scenario(
    name="scale",
    summary="a model of a large installation: what each role uses, what changes cost, and how both grow",
    run=run,
    options=ScaleOptions,
    help="""Measure one real server of each role in a model of a large installation, and how its costs grow.

    The model has 10,000 shards, 30 leaders and 3,000 followers in each of 3 regions, and 30 databases.""",
    in_bench=False,
    seconds_bound=lambda _: _MOST_SECONDS,
)


class _Model:
    """Measures one part after the other."""

    def __init__(self, settings: BenchSettings, progress: Progress, seconds: float, found: ScaleFigures) -> None:
        self._settings: Final = settings
        self._folder: Final = settings.work_dir
        self._progress: Final = progress
        self._seconds: Final = seconds
        self._shape: Final = found.shape
        self._found: Final = found

    async def measure(self, part: str) -> None:
        """Measure one part. Raises `OperatorError`."""
        found = self._found
        match part:
            case "parse":
                shapes = dict(self._shapes("shards", "servers"))
                job = ParseJob(shapes=[*shapes.values()], repetitions=_REPETITIONS)
                parsed = await run_job(job, self._progress, self._folder / "parse.log", list[Measured])
                found.parse = dict(zip(shapes, parsed, strict=True))
                found.client = await self._client()
            case "cold start":
                for dimension, shape in self._shapes("shards"):
                    found.cold_start[dimension] = await self._cold_start(shape)
            case "follower":
                for dimension, shape in self._shapes(*DIMENSIONS):
                    found.follower[dimension] = await measure_follower(self._bench(shape))
            case "leader":
                unrelated = found.follower[""].changes[UNRELATED.name] if "" in found.follower else None
                again = unrelated is not None and unrelated.touched > unrelated.moved
                for dimension, shape in self._shapes(*DIMENSIONS):
                    found.leader[dimension] = await measure_leader(self._bench(shape), all_subscribe_again=again)
            case "tailer":
                found.slow_leader = await measure_slow_leader(self._folder, 3 * self._seconds, self._settings.versions)
            case "cluster":
                toy = self._settings.toy
                shards, writes = (16, 50) if toy else (_CLUSTER_SHARDS, WRITES_PER_SECOND)
                found.cluster = await measure_cluster(self._folder, shards, self._seconds, writes, self._progress.step)

    def _shapes(self, *dimensions: str) -> Iterator[tuple[str, InstallationShape]]:
        yield "", self._shape
        for dimension in () if self._settings.toy else dimensions:
            self._progress.step(f"half of the {dimension}")
            yield dimension, self._shape.halved(dimension)

    def _bench(self, shape: InstallationShape) -> Bench:
        return Bench(self._folder, SCHEMA, self._seconds, shape, whole=shape == self._shape)

    async def _client(self) -> list[Measured]:
        schema = load_schema(SCHEMA.read_text(), str(SCHEMA))
        schema_document = pb.SchemaDocument(hash=schema.version_hash, json=schema.to_json().encode())
        documents = [pb.TopologyDocument(), pb.TopologyDocument()]
        handler = StubFollower(documents[0], documents[1], schema_document)
        patient = ServingSettings(silence_timeout_seconds=_MOST_SECONDS, blocked_timeout_seconds=_MOST_SECONDS)
        server = FrameServer(handler, patient, name=FOLLOWER, topology_version=lambda: 1)
        follower = await server.start(f"{LOOPBACK}:0")
        everywhere = {name: Addresses(frames=follower) for name in self._follower_names()}
        for version, document in enumerate(documents, 1):
            document.version = version
            document.json = dump_topology(topology_of(self._shape, everywhere, version)).encode()
        try:
            job = ClientJob(address=follower, region=REGION, next_version=2)
            return await run_job(job, self._progress, self._folder / "client.log", list[Measured])
        finally:
            await server.close()

    def _follower_names(self) -> list[str]:
        region = topology_of(self._shape, {}).regions[0]
        return [server.name for tier in region.followers for server in tier.servers]

    async def _cold_start(self, shape: InstallationShape) -> Measured:
        """Start the follower at one real leader, which delivers all shards. Returns the best of some starts."""
        shape = msgspec.structs.replace(shape, leaders=1, followers_per_leader=1, tiers=1)
        bench = self._bench(shape)
        async with AsyncExitStack() as stack:
            addresses = {name: await stack.enter_async_context(reserved_addresses()) for name in (LEADER, FOLLOWER)}
            store(topology_of(shape, addresses), bench.topology_file)
            await stack.enter_async_context(
                running("leader", bench.leader_settings(), addresses[LEADER].admin, self._folder)
            )
            job = ColdStartJob(
                topology_file=str(bench.topology_file),
                schema_file=str(SCHEMA),
                repetitions=_REPETITIONS,
            )
            starts = await run_job(job, self._progress, self._folder / "cold.log", list[Measured])
        return min(starts, key=lambda start: start.cpu_seconds)
