"""The jobs of the load processes of a published workload: write the graph, and send requests."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from loadtest.client_process import StepReport
from loadtest.published.contestant import Payloads, TaoContestant, load_graph, read_ids, write_ids
from loadtest.published.driver import PROBERS, LoadResult, RequestLoad, put_load
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import RequestStream
from loadtest.published.workload import workload_named
from tao.client import ClientSettings, connect

_TIMEOUT_SECONDS: Final = 10.0
"""Timeout of a request; long, so that a busy machine shows as a high latency and not as an error."""
MEASURING: Final = "measuring"
"""The step that reports the end of warming."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A graph of a workload."""

    workload: str
    nodes: int
    seed: int
    shards: int
    ids_file: str

    def plan(self) -> GraphPlan:
        """Return the plan of the graph."""
        return GraphPlan(workload_named(self.workload), self.nodes, self.seed)


class FillJob(msgspec.Struct, frozen=True, kw_only=True):
    """Write the graph, and the ids of its nodes into the subject's file."""

    topology_file: str
    subject: Subject
    region: str | None = None
    """The region of the clients; None for a cluster of one region."""

    async def work(self, report: StepReport) -> int:
        """Return the number of nodes. Raises a `TaoError`."""
        subject = self.subject
        settings = ClientSettings(timeout_seconds=60.0)
        async with connect(self.topology_file, region=self.region, settings=settings) as graph:
            ids = await load_graph(
                graph, subject.plan(), Payloads.drawn(f"payloads {subject.seed} 0"), subject.shards, report
            )
        write_ids(Path(subject.ids_file), ids)
        return len(ids)


class AskJob(msgspec.Struct, frozen=True, kw_only=True):
    """Send the requests of one stream; ``stream`` is the number of the load process."""

    topology_file: str
    tier: str
    subject: Subject
    stream: int
    load: RequestLoad
    region: str | None = None

    async def work(self, report: StepReport) -> LoadResult:
        """Return what was measured. Raises a `TaoError` when the cluster cannot be reached."""
        subject, settings = self.subject, ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        workload, plan = workload_named(subject.workload), subject.plan()
        ids = read_ids(Path(subject.ids_file))
        async with AsyncExitStack() as stack:

            async def contestant(number: int) -> TaoContestant:
                graph = await stack.enter_async_context(
                    connect(self.topology_file, region=self.region, tier=self.tier, settings=settings)
                )
                return TaoContestant(graph, ids, Payloads.drawn(f"payloads {subject.seed} {number}"))

            def stream(number: int) -> RequestStream:
                return RequestStream(workload, plan, subject.seed, number, subject.shards)

            report("warming", 0.0)
            return await put_load(
                self.load,
                stream(2 * self.stream),
                await contestant(2 * self.stream),
                [await contestant(2 * self.stream + 1) for _ in range(PROBERS)],
                stream(2 * self.stream + 1),
                lambda: report(MEASURING, 0.5),
            )
