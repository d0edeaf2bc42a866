"""What a worker asks of leaders: jobs, to take its reports, and pages of the rows of a shard."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from tao.model.errors import TaoError
from tao.model.graph import EdgeKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobRow
from tao.model.topology import CacheServer
from tao.model.writes import ReportJob
from tao.routing.routes import Routes
from tao.wire.convert import error_from_pb, job_from_pb
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb

FIRST_ROW: Final = EdgeKey(0, 0, 0)
"""A key before every row."""


class ScannedEdge(NamedTuple):
    """An edge of a page."""

    id1: int
    id2: int
    time: int


class ShardPage(NamedTuple):
    """A page of a shard's rows. ``last``: the last row that was examined, also of those that were not looked for."""

    edges: Sequence[ScannedEdge]
    objects: Sequence[int]
    last: EdgeKey
    done: bool


class RoutinePage(NamedTuple):
    """A page of the purge of a shard, or of the fold of its counters: how many edges or slots have changed, and the
    last row that was examined."""

    changed: int
    last: EdgeKey
    done: bool


class JobLeaders(Protocol):
    """The leaders of the worker's region. Everything raises `TaoError` when it is not done, or not known to be."""

    async def lease(self, kinds: Sequence[str], limits: Sequence[int], lease_ms: int) -> list[JobRow]:
        """Lease jobs that are due: of each priority, from high to low, at most so many. Leaders that do not answer are
        left out; raises the error of the last one if none does."""

    async def report(self, report: ReportJob) -> JobRow | None:
        """Report to the leader of the job's shard. Return the job after that, None when its lease is lost."""

    async def scan(self, shard: int, atype: int, otype: int, after: EdgeKey, limit: int) -> ShardPage:
        """Return a page of the edges of a type, or with ``atype`` 0 of the objects of a type (0: of any)."""

    async def purge(self, shard: int, after: EdgeKey, limit: int) -> RoutinePage:
        """Purge a page of the removed edges of a shard."""

    async def fold(self, shard: int, after: EdgeKey, limit: int) -> RoutinePage:
        """Fold a page of the slots of counters of a shard."""


class LinkedLeaders:
    """See `JobLeaders`: over links."""

    def __init__(self, links: Links, routes: Callable[[], Routes], region: str, timeout_seconds: float) -> None:
        self._links: Final = links
        self._routes: Final = routes
        self._region: Final = region
        self._timeout_seconds: Final = timeout_seconds

    async def lease(self, kinds: Sequence[str], limits: Sequence[int], lease_ms: int) -> list[JobRow]:
        """See the port. The jobs that are wanted are dealt out to the leaders, in an order that differs each time, and
        these are asked at once, so that no more are leased than there is room for. What is left of a priority is dealt
        to those that may have more of it. All of that takes a quarter of a lease at most, even if leaders hang."""
        loop = asyncio.get_running_loop()
        seconds = min(self._timeout_seconds, lease_ms / 1000 / 6)
        last_round_at = loop.time() + seconds / 2
        left = list(limits)
        leased: list[JobRow] = []
        failure: TaoError | None = None
        answered = False
        up = list(self._routes().leaders(self._region).up)
        may_have = [random.sample(up, len(up)) for _ in limits]
        while (shares := _deal(left, may_have)) and loop.time() <= last_round_at:
            asks = (self._lease_from(leader, kinds, share, lease_ms, seconds) for leader, share in shares)
            for (leader, share), rows in zip(shares, await asyncio.gather(*asks), strict=True):
                given: Counter[int] = Counter()
                if isinstance(rows, TaoError):
                    failure = rows
                else:
                    answered = True
                    leased += rows
                    given.update(row.priority for row in rows)
                for priority, wanted in enumerate(share):
                    left[priority] = max(0, left[priority] - given[priority])
                    # One that did not answer is not asked again, for whatever it was not asked for either.
                    if leader in may_have[priority] and (rows is failure or given[priority] < wanted):
                        may_have[priority].remove(leader)
        if failure is not None and not answered:
            raise failure
        return leased

    async def _lease_from(
        self, leader: CacheServer, kinds: Sequence[str], limits: Sequence[int], lease_ms: int, seconds: float
    ) -> list[JobRow] | TaoError:
        asked = pb.LeaseJobs(kinds=kinds, limits=limits, lease_ms=lease_ms)
        try:
            answer = await self._ask(leader, pb.Request(lease_jobs=asked), seconds)
        except TaoError as error:
            return error
        return list(map(job_from_pb, answer.jobs.jobs))

    async def report(self, report: ReportJob) -> JobRow | None:
        """See the port."""
        message = pb.JobReport(**{name: getattr(report, name) for name in report.__struct_fields__})
        request = pb.Request(report_jobs=pb.ReportJobs(reports=[message]))
        answer = await self._ask(self._leader_of(report.id >> SHARD_SHIFT), request)
        (result,) = answer.reported_jobs.results
        if result.HasField("error"):
            raise error_from_pb(result.error)
        return job_from_pb(result.job) if result.accepted else None

    async def scan(self, shard: int, atype: int, otype: int, after: EdgeKey, limit: int) -> ShardPage:
        """See the port."""
        asked = pb.ScanShard(shard=shard, atype=atype, otype=otype, after=_to_pb(after), limit=limit)
        found = (await self._ask(self._leader_of(shard), pb.Request(scan_shard=asked))).shard_scan
        edges = list(map(ScannedEdge, found.id1s, found.id2s, found.times)) if atype else []
        return ShardPage(edges, () if atype else list(found.id1s), _from_pb(found.last), found.done)

    async def purge(self, shard: int, after: EdgeKey, limit: int) -> RoutinePage:
        """See the port."""
        asked = pb.PurgeRemoved(shard=shard, after=_to_pb(after), limit=limit)
        found = (await self._ask(self._leader_of(shard), pb.Request(purge_removed=asked))).purged_edges
        return RoutinePage(found.purged, _from_pb(found.last), found.done)

    async def fold(self, shard: int, after: EdgeKey, limit: int) -> RoutinePage:
        """See the port."""
        asked = pb.FoldCounters(shard=shard, after=_to_pb(after), limit=limit)
        found = (await self._ask(self._leader_of(shard), pb.Request(fold_counters=asked))).folded_counters
        return RoutinePage(found.folded, _from_pb(found.last), found.done)

    def _leader_of(self, shard: int) -> CacheServer:
        return self._routes().leaders(self._region).home(shard)

    async def _ask(self, leader: CacheServer, request: pb.Request, seconds: float = 0.0) -> pb.Answer:
        """Ask a leader. ``seconds``: the timeout; 0: that of all requests."""
        request.topology_version = self._routes().version
        answer = await self._links.to(leader).ask(request, seconds or self._timeout_seconds)
        if answer.HasField("error"):
            raise error_from_pb(answer.error)
        return answer


def _deal(limits: Sequence[int], leaders: Sequence[Sequence[CacheServer]]) -> list[tuple[CacheServer, list[int]]]:
    """Deal jobs of each priority out to its leaders one by one. Return the share of each leader that gets any."""
    shares: dict[CacheServer, list[int]] = {}
    for priority, limit in enumerate(limits):
        for leader in itertools.islice(itertools.cycle(leaders[priority]), limit):
            shares.setdefault(leader, [0] * len(limits))[priority] += 1
    return list(shares.items())


def _to_pb(key: EdgeKey) -> pb.RowKey:
    return pb.RowKey(id1=key.id1, atype=key.atype, id2=key.id2)


def _from_pb(key: pb.RowKey) -> EdgeKey:
    return EdgeKey(key.id1, key.atype, key.id2)
