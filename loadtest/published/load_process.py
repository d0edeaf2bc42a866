"""What a load process is told of a published workload, and what it does with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loadtest.published.contestant import Payloads, TaoContestant, load_graph, read_ids, write_ids
from loadtest.published.driver import PROBERS, Load, LoadResult, put_load
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import RequestStream
from loadtest.published.workload import workload_named
from tao.client import ClientSettings, connect

_TIMEOUT_SECONDS: Final = 10.0
"""A busy machine should show as a high latency, not as an error."""
_BLOCK_BYTES: Final = 1 << 20
MEASURING: Final = "measuring"
"""The step that says that warming is over."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Which graph of which workload."""

    workload: str
    nodes: int
    seed: int
    shards: int
    ids_file: str

    def plan(self) -> GraphPlan:
        """The graph."""
        return GraphPlan(workload_named(self.workload), self.nodes, self.seed)


class FillJob(msgspec.Struct, frozen=True, kw_only=True, tag="fill"):
    """Write the graph."""

    topology_file: str
    subject: Subject
    region: str | None = None
    """Of the clients; None: the only one there is."""


class AskJob(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """One load process of a run. ``stream``: its number among them."""

    topology_file: str
    tier: str
    subject: Subject
    stream: int
    load: Load
    region: str | None = None
    """As of `FillJob`."""


async def fill(job: FillJob, tell: Callable[[str, float], None]) -> int:
    """Returns how many nodes there are. Raises a `TaoError`."""
    subject = job.subject
    settings = ClientSettings(timeout_seconds=60.0)
    async with connect(job.topology_file, region=job.region, settings=settings) as graph:
        ids = await load_graph(graph, subject.plan(), _payloads(subject.seed, 0), subject.shards, tell)
    write_ids(Path(subject.ids_file), ids)
    return len(ids)


async def ask(job: AskJob, tell: Callable[[str, float], None]) -> LoadResult:
    """Raises a `TaoError` when the cluster cannot be reached."""
    subject, settings = job.subject, ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
    workload, plan = workload_named(subject.workload), subject.plan()
    ids = read_ids(Path(subject.ids_file))
    async with AsyncExitStack() as stack:

        async def contestant(number: int) -> TaoContestant:
            graph = await stack.enter_async_context(
                connect(job.topology_file, region=job.region, tier=job.tier, settings=settings)
            )
            return TaoContestant(graph, ids, _payloads(subject.seed, number))

        def stream(number: int) -> RequestStream:
            return RequestStream(workload, plan, subject.seed, number, subject.shards)

        tell("warming", 0.0)
        return await put_load(
            job.load,
            stream(2 * job.stream),
            await contestant(2 * job.stream),
            [await contestant(2 * job.stream + 1) for _ in range(PROBERS)],
            stream(2 * job.stream + 1),
            lambda: tell(MEASURING, 0.5),
        )


def _payloads(seed: int, number: int) -> Payloads:
    return Payloads(Random(f"payloads {seed} {number}").randbytes(_BLOCK_BYTES))
