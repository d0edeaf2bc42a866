"""Operations on edges with states, on whole nodes, and jobs, which a fault run makes beside its recorded load.

Operations on an edge come from all clients at once, at once or by a follower's journal, each with a time of its own.
So no order of them is recorded: what must be there at the end is the join of all. An operation is repeated with its
time until it is acknowledged, since neither a repetition nor a delay changes the join. A journaled one is acknowledged
once it is applied.

Meanwhile a read of an edge's state, which comes from the master of the end that is written first, has to return an
operation that was begun, and none that is older than one acknowledged before.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Final, TypeVar

from loadtest.faults.history import ReadVerdict
from loadtest.faults.job_functions import MARK
from loadtest.faults.record import RunRecord
from loadtest.region_cluster import RegionCluster
from tao.client import Accepted, Consistency, Graph, TaoError
from tao.model.edge_states import NODE_STATES, State
from tao.model.errors import RequestError, RetryableError
from tao.model.jobs import NODE_STATE_KIND

NEAR_TYPE: Final = "subscribes"
FAR_TYPE: Final = "subscribers"
_ENDS_PER_SHARD: Final = 2
_OTHERS_PER_NODE: Final = 4
_LATE_US: Final = 20_000_000
"""The most by which operations are late: they overtake each other by more than any fault lasts."""
_PAUSE_SECONDS: Final = 0.5
_PATIENT_SECONDS: Final = 300.0
"""Time limit for one operation: longer than the longest fault and the time until all is well again."""
_JOBS_SECONDS: Final = 240.0
"""Time in which all jobs have to end after the last fault. The job of a killed worker waits for its lease to end."""
_LIST_EDGES: Final = 60
JOB_KINDS: Final = ("each_edge", NODE_STATE_KIND)

_Answer = TypeVar("_Answer")
_Operation = tuple[int, int]
"""The time of an operation in microseconds, and what it sets: of two, the larger one wins."""
_NONE: Final[_Operation] = (0, 0)


@dataclass(slots=True)
class _Edge:
    """The operations on one edge."""

    user: int
    page: int
    begun: set[_Operation] = field(default_factory=lambda: {_NONE})
    """Operations that set the state."""
    acknowledged: _Operation = _NONE
    """The newest acknowledged one of them."""
    payload: _Operation = _NONE
    """The newest operation that set the time of the edge."""


@dataclass(slots=True)
class _MarkJob:
    """A job that marks the edges of the owner's list."""

    id: int
    owner: int
    ends: list[int]


class _GivenUp(Exception):
    """An operation was refused for what it is, or was never acknowledged."""


class MergedEdges:
    """Edges, nodes and jobs, and what they must be at the end."""

    def __init__(self, regions: RegionCluster, record: RunRecord, chance: Random, graphs: Sequence[Graph]) -> None:
        self._regions: Final = regions
        self._shards: Final = regions.routes.shards  # the file may be gone when it is asked for later
        self._record: Final = record
        self._chance: Final = chance
        self._graphs: Final = graphs
        self._edges: Final[list[_Edge]] = []
        self._nodes: Final[dict[int, _Operation]] = {}
        """The newest operation on each node."""
        self._types: Final[dict[int, str]] = {}
        """The type of each node's edges."""
        self._jobs: Final[list[_MarkJob]] = []
        self._times: Final = count(1)

    async def prepare(self) -> None:
        """Choose the edges: nodes on every shard, with ends of both orders."""
        graph = self._graphs[0]
        shards = range(self._shards)
        users = [each for shard in shards for each in await graph.reserve_ids(_ENDS_PER_SHARD, shard=shard)]
        pages = [each for shard in shards for each in await graph.reserve_ids(_ENDS_PER_SHARD, shard=shard)]
        for user in users:
            self._edges.extend(_Edge(user, page) for page in self._chance.sample(pages, _OTHERS_PER_NODE))
        self._types.update({**dict.fromkeys(users, NEAR_TYPE), **dict.fromkeys(pages, FAR_TYPE)})
        self._nodes.update(dict.fromkeys(self._types, _NONE))

    async def operate(self, graph: Graph) -> None:
        """Make one operation, and return once it is acknowledged; or add a job, or read."""
        way = self._chance.random()
        try:
            if way < 0.04:
                await self._add_job(graph)
            elif way < 0.14:
                await self._set_node(graph)
            elif way < 0.75:
                await self._set_edge(graph)
            else:
                await self._read(graph)
        except _GivenUp as given_up:
            self._record.lose(str(given_up))

    async def jobs_ended(self) -> None:
        """Wait until all jobs have ended. Raises `OperatorError`."""
        await self._regions.jobs_ended(JOB_KINDS, _JOBS_SECONDS)

    async def differences(self) -> int:
        """Compare every list of every state, its count, and what jobs have done; acknowledged operations that are
        missing are recorded as lost. Returns how many caches differ from the master."""
        stale = 0
        for (node, atype, state), expected in self._expected().items():
            what = f"{node} {atype} {state}"
            found = await _edges_of(self._graphs[0], node, atype, state, Consistency.master())
            if found != (sorted(expected), len(expected)):
                self._record.lose(f"{what}: {found} is not the join of all operations, {sorted(expected)}")
            for graph in self._graphs:
                cached = await _edges_of(graph, node, atype, state, Consistency.cached())
                if cached != found:
                    stale += 1
                    self._record.example(f"{what}: {cached} is cached, not {found}")
        for job in self._jobs:
            await self._judge_job(job)
        return stale

    def _expected(self) -> dict[tuple[int, str, str], list[tuple[int, int]]]:
        """Return the edges of all lists of both types, as ``(id2, time)``, by node, type and state."""
        lists: defaultdict[tuple[int, str, str], list[tuple[int, int]]] = defaultdict(list)
        for edge in self._edges:
            if max(edge.begun) == _NONE:
                continue
            own = edge.acknowledged[1]
            shown = max(own, self._nodes[edge.user][1], self._nodes[edge.page][1])
            state = State(shown if edge.payload != _NONE else State.REMOVED).label
            for name in (each.label for each in State):  # an edge is in one list only
                near, far = lists[edge.user, NEAR_TYPE, name], lists[edge.page, FAR_TYPE, name]
                if name == state:
                    near.append((edge.page, edge.payload[1]))
                    far.append((edge.user, edge.payload[1]))
        return lists

    async def _judge_job(self, job: _MarkJob) -> None:
        graph = self._graphs[0]
        found = await graph.job(job.id).refresh()
        marked = sorted((await graph.assoc_range(job.owner, "blocks", 0, 2 * _LIST_EDGES, critical=True)).id2s)
        if (found.state, found.edges, marked) != ("done", len(job.ends), sorted(job.ends)):
            self._record.lose(f"job {job.id}: {found}, of {len(job.ends)} edges {len(marked)} are marked")

    async def _set_edge(self, graph: Graph) -> None:
        edge = self._chance.choice(self._edges)
        state = self._chance.choice([*State, State.NORMAL])
        time_of_edge = next(self._times) if self._chance.random() < 0.5 and state <= State.NEGATIVE else None
        at = self._drawn_time()
        operation = (at, int(state))
        edge.begun.add(operation)
        row = (edge.user, NEAR_TYPE, edge.page, state.label, at, time_of_edge)
        await self._made(
            "edge",
            f"{NEAR_TYPE} {edge.user} {edge.page}",
            lambda: graph.assoc_set_state(*row),
            lambda: graph.later.assoc_set_state(*row),
        )
        edge.acknowledged = max(edge.acknowledged, operation)
        if time_of_edge is not None:
            edge.payload = max(edge.payload, (at, time_of_edge))

    async def _set_node(self, graph: Graph) -> None:
        node, state, at = self._chance.choice(list(self._nodes)), self._chance.choice(NODE_STATES), self._drawn_time()
        row = (node, state.label, [self._types[node]], at)
        await self._made(
            "node", f"node {node}", lambda: graph.node_set_state(*row), lambda: graph.later.node_set_state(*row)
        )
        self._nodes[node] = max(self._nodes[node], (at, int(state)))

    async def _add_job(self, graph: Graph) -> None:
        """Make a list of edges that nothing else writes, and add the job that marks them."""
        shard = self._chance.randrange(self._shards)
        job_id, owner, *ends = await self._repeated("ids", lambda: graph.reserve_ids(_LIST_EDGES + 2, shard=shard))
        edges = [(owner, "follows", end, number) for number, end in enumerate(ends, 1)]
        await self._repeated("edges for a job", lambda: graph.assoc_add_many(edges))
        body = {"function": MARK, "atype": "follows", "id1": owner}
        await self._made(
            "job",
            f"job {job_id}",
            lambda: graph.add_job("each_edge", body, near=owner, id=job_id),
            lambda: graph.later.add_job("each_edge", body, near=owner, id=job_id),
        )
        self._jobs.append(_MarkJob(job_id, owner, ends))

    async def _read(self, graph: Graph) -> None:
        """Read the state of an edge at the end that is written first. The read waits for locks as a write does, and
        fails as one; only answers are judged."""
        edge = self._chance.choice(self._edges)
        floor = edge.acknowledged
        ends = (edge.user, NEAR_TYPE, edge.page) if edge.user < edge.page else (edge.page, FAR_TYPE, edge.user)
        try:
            answer = await graph.assoc_state(*ends)
        except TaoError:
            return
        found = _NONE if answer is None else (answer.state_us, int(State[answer.own.upper()]))
        if found not in edge.begun:
            self._record.violation(ReadVerdict.WRONG, "state", f"{ends} has {found}, which nothing wrote")
        elif found < floor:
            self._record.violation(ReadVerdict.STALE, "state", f"{ends} has {found}, acknowledged was {floor}")

    async def _made(
        self, kind: str, what: str, at_once: Callable[[], Awaitable[object]], later: Callable[[], Awaitable[Accepted]]
    ) -> None:
        """Make an operation one way or the other, and return when it is acknowledged."""
        if self._chance.random() < 0.5:
            await self._repeated(what, at_once)
            self._record.operations[kind] += 1
        else:
            receipt = await self._repeated(what, later)
            await self._repeated(f"{what}, journaled", lambda: receipt.applied(_PATIENT_SECONDS))
            self._record.operations[f"{kind}, journaled"] += 1

    async def _repeated(self, what: str, attempt: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Repeat an attempt until it succeeds. Raises `_GivenUp` when it is refused for what it is, or never
        succeeds."""
        record, begun = self._record, self._record.now()
        while True:
            began = record.now()
            try:
                return await attempt()
            except TaoError as error:
                record.failed_write(error, began, what, unknown=not isinstance(error, RetryableError))
                if isinstance(error, RequestError) or record.now() > begun + _PATIENT_SECONDS:
                    raise _GivenUp(f"{what}: {error.reason}: {error.message}") from error
            await asyncio.sleep(_PAUSE_SECONDS)

    def _drawn_time(self) -> int:
        return time.time_ns() // 1_000 - self._chance.randrange(_LATE_US)


async def _edges_of(
    graph: Graph, node: int, atype: str, state: str, demanded: Consistency
) -> tuple[list[tuple[int, int]], int]:
    """Return the edges of a list as ``(id2, time)``, in order, and the list's count."""
    edges = await graph.assoc_range(node, atype, 0, 1_000, state, consistency=demanded)
    counted = await graph.assoc_count(node, atype, state, consistency=demanded)
    return sorted(zip(edges.id2s, edges.times, strict=True)), counted
