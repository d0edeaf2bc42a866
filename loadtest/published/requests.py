"""The endless stream of requests that a workload sends to its graph. Pure: the same seed gives the same requests.

Whether a request finds something is decided first, as the publications state it; then a key is chosen by popularity
among those that fit. Streams of one run share the graph and the popularity ranks and differ in everything else.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, repeat
from random import Random
from typing import Final, NamedTuple

from loadtest.published.graph_plan import FIRST_TIME, GraphPlan
from loadtest.published.shapes import Popularity, Skew
from loadtest.published.workload import LONG_LIST, Kind, Workload
from tao.model.graph import MAX_TIME

ADDED_BEFORE: Final = -1
"""The node of a request to delete an object: the oldest object that this stream has added."""

SMALL_LIMIT: Final = 50
LARGE_LIMIT: Final = 1000
_REMEMBERED_EDGES: Final = 10_000
"""Most edges that a stream has added and not deleted yet; beyond it, the oldest are never deleted."""
_KINDS_AT_A_TIME: Final = 1024
_MOST_REDRAWS: Final = 16
_BEYOND_EVERY_EDGE: Final = FIRST_TIME + 1_000_000_000
_ADDED_FROM: Final = FIRST_TIME + 100_000_000
"""First time of added edges: they are newer than the planned ones, whose times span fewer seconds than this."""


class WorkloadRequest(NamedTuple):
    """One request. ``others`` are the second ends of an edge or of an assoc_get, or the nodes of a read of many.

    ``time`` is that of an edge that is written; ``size`` is that of its payload or of the object in bytes; ``parts``
    are those of a write of many. Fields that a kind does not use are 0 or empty.
    """

    kind: Kind
    node: int = 0
    others: tuple[int, ...] = ()
    limit: int = 0
    high: int = 0
    low: int = 0
    time: int = 0
    size: int = 0
    parts: tuple[WorkloadRequest, ...] = ()


class RequestStream(Iterator[WorkloadRequest]):
    """The requests of one stream out of several. ``stream`` distinguishes it from the others of the run."""

    def __init__(self, workload: Workload, plan: GraphPlan, seed: int, stream: int, shards: int = 1) -> None:
        """Node ``n`` lies on shard ``n % shards``, which matters to workloads that skew shards.

        Raises `ValueError` when the graph is too small for the workload.
        """
        self._workload: Final = workload
        self._plan: Final = plan
        self._chance: Final = Random(f"requests {seed} {stream}")
        self._shards: Final = shards
        kinds, shares = list(workload.mix), list(workload.mix.values())
        self._kinds: Final = (
            kind for _ in repeat(None) for kind in self._chance.choices(kinds, shares, k=_KINDS_AT_A_TIME)
        )
        self._object: Final = self._chooser(plan.shuffled, workload.object_skew, workload.assumed.again)
        self._list: Final = self._reads_of(plan.shuffled)
        non_empty = [node for node in plan.shuffled if plan.degree(node)]
        empty = [node for node in plan.shuffled if not plan.degree(node)]
        longer = [node for node in non_empty if plan.degree(node) > 1]
        self._single: Final = self._reads_of([node for node in non_empty if plan.degree(node) == 1])
        self._longer: Final = self._reads_of(longer)
        self._empty: Final = self._reads_of(empty)
        most = max(map(plan.degree, plan.shuffled))
        self._longest: Final = self._reads_of([node for node in longer if plan.degree(node) >= min(most, LONG_LIST)])
        self._written: Final = self._chooser(plan.shuffled, workload.assumed.write_skew, 0.0)
        # Edges are added only to lists of more than one edge. So no popular empty list gets a first edge and no list of
        # one a second, and the shares of answers stay as published however long a run takes.
        self._extended: Final = self._chooser(longer, workload.assumed.write_skew, 0.0)
        self._overwritten: Final = self._chooser(non_empty, workload.assumed.write_skew, 0.0)
        self._added: Final[deque[WorkloadRequest]] = deque(maxlen=_REMEMBERED_EDGES)
        self._time = _ADDED_FROM + stream
        # Each kind of request is made by the method of its name.
        self._make: Final[dict[Kind, Callable[[], WorkloadRequest]]] = {
            kind: getattr(self, f"_{kind}") for kind in workload.mix
        }

    def __next__(self) -> WorkloadRequest:
        return self._make[next(self._kinds)]()

    def take(self, count: int) -> list[WorkloadRequest]:
        """Return the next ``count`` requests."""
        return list(islice(self, count))

    def _reads_of(self, nodes: Sequence[int]) -> Callable[[], int]:
        return self._chooser(nodes, self._workload.list_skew, self._workload.assumed.again)

    def _chooser(self, nodes: Sequence[int], skew: Skew, again: float) -> Callable[[], int]:
        busiest = self._workload.shard_skew[: self._shards]
        if not busiest or self._shards <= len(busiest):
            return Popularity(nodes, skew, self._chance, again=again).draw
        rest = (1 - sum(busiest)) / (self._shards - len(busiest))
        by_shard = defaultdict[int, list[int]](list)
        for node in nodes:
            by_shard[node % self._shards].append(node)
        shards = sorted(by_shard)
        draws = [Popularity(by_shard[shard], skew, self._chance, again=again).draw for shard in shards]
        shares = [busiest[shard] if shard < len(busiest) else rest for shard in shards]

        def draw() -> int:
            return self._chance.choices(draws, shares)[0]()

        return draw

    def _non_empty(self) -> int:
        # The length of the list is chosen first: a few lists take many of the requests, and with so few the shares of
        # lengths would depend on chance.
        return self._single() if self._chance.random() < self._workload.degrees.single_share else self._longer()

    def _list_for(self, kind: Kind) -> tuple[int, bool]:
        """Return a node chosen by the popularity of its list, and whether the request is to find something there."""
        share = self._workload.non_empty.get(kind)
        if share is None:
            node = self._list()
            return node, self._plan.degree(node) > 0
        finds = self._chance.random() < share
        return (self._non_empty() if finds else self._empty()), finds

    def _limit(self) -> int:
        chance, workload = self._chance, self._workload
        if chance.random() < workload.limit_one:
            return 1
        return LARGE_LIMIT if chance.random() < workload.large_limit else SMALL_LIMIT

    def _obj_get(self) -> WorkloadRequest:
        return WorkloadRequest(Kind.OBJ_GET, self._object())

    def _assoc_count(self) -> WorkloadRequest:
        node, finds = self._list_for(Kind.ASSOC_COUNT)
        if finds and self._workload.long_counts:
            if self._chance.random() < self._workload.long_counts:
                return WorkloadRequest(Kind.ASSOC_COUNT, self._longest())
            # A small graph has few long lists; one that is popular by chance would make up the tail by itself.
            for _ in range(_MOST_REDRAWS):
                if self._plan.degree(node) < LONG_LIST:
                    break
                node = self._non_empty()
        return WorkloadRequest(Kind.ASSOC_COUNT, node)

    def _assoc_range(self) -> WorkloadRequest:
        return WorkloadRequest(Kind.ASSOC_RANGE, self._list_for(Kind.ASSOC_RANGE)[0], limit=self._limit())

    def _assoc_time_range(self) -> WorkloadRequest:
        share = self._workload.non_empty.get(Kind.ASSOC_TIME_RANGE, 1.0)
        if self._chance.random() < share:
            return WorkloadRequest(Kind.ASSOC_TIME_RANGE, self._non_empty(), limit=self._limit(), high=MAX_TIME)
        # Such a query asks "anything new?": it may go to any list, and mostly there is nothing.
        node = self._list()
        return WorkloadRequest(Kind.ASSOC_TIME_RANGE, node, limit=self._limit(), high=MAX_TIME, low=_BEYOND_EVERY_EDGE)

    def _assoc_get(self) -> WorkloadRequest:
        plan, chance, workload = self._plan, self._chance, self._workload
        count = workload.ids_of_a_get.draw(chance)
        share = workload.non_empty.get(Kind.ASSOC_GET, 1.0)
        if chance.random() < share:
            node = self._non_empty()
            degree = plan.degree(node)
            return WorkloadRequest(Kind.ASSOC_GET, node, tuple(self._neighbours(node, 0, degree, count)))
        node = self._list()
        return WorkloadRequest(
            Kind.ASSOC_GET, node, tuple(self._neighbours(node, plan.degree(node), plan.nodes - 1, count))
        )

    def _neighbours(self, node: int, first: int, end: int, count: int) -> list[int]:
        indexes = {first + int(self._chance.random() * (end - first)) for _ in range(count)}
        return [self._plan.neighbour(node, index) for index in sorted(indexes)]

    def _read_many(self) -> WorkloadRequest:
        count = self._workload.read_many.draw(self._chance)
        return WorkloadRequest(Kind.READ_MANY, others=tuple({self._object(): None for _ in range(count)}))

    def _obj_add(self) -> WorkloadRequest:
        return WorkloadRequest(Kind.OBJ_ADD, size=self._plan.object_size(int(self._chance.random() * self._plan.nodes)))

    def _obj_delete(self) -> WorkloadRequest:
        return WorkloadRequest(Kind.OBJ_DELETE, ADDED_BEFORE)

    def _obj_update(self) -> WorkloadRequest:
        node = self._written()
        return WorkloadRequest(Kind.OBJ_UPDATE, node, size=self._plan.object_size(node + 1))

    def _assoc_add(self) -> WorkloadRequest:
        plan, node = self._plan, self._extended()
        self._time += 1
        (other,) = self._neighbours(node, plan.degree(node), plan.nodes - 1, 1)
        added = WorkloadRequest(Kind.ASSOC_ADD, node, (other,), time=self._time, size=plan.edge_size(node, self._time))
        self._added.append(added)
        return added

    def _assoc_overwrite(self) -> WorkloadRequest:
        plan, node = self._plan, self._overwritten()
        edge = plan.edge(node, int(self._chance.random() * plan.degree(node)))
        return WorkloadRequest(Kind.ASSOC_OVERWRITE, node, (edge.other,), time=edge.time, size=edge.size)

    def _added_before(self) -> WorkloadRequest:
        """Return the oldest edge that this stream added, or an edge that does not exist when it has added none."""
        if self._added:
            return self._added.popleft()
        node = self._extended()
        return WorkloadRequest(Kind.ASSOC_ADD, node, (self._plan.neighbour(node, self._plan.nodes - 2),))

    def _assoc_delete(self) -> WorkloadRequest:
        return self._added_before()._replace(kind=Kind.ASSOC_DELETE)

    def _assoc_change_type(self) -> WorkloadRequest:
        return self._added_before()._replace(kind=Kind.ASSOC_CHANGE_TYPE)

    def _write_many(self) -> WorkloadRequest:
        added = [self._assoc_add() for _ in range(self._workload.write_many.draw(self._chance))]
        parts = {(each.node, each.others): each for each in added}
        return WorkloadRequest(Kind.WRITE_MANY, parts=tuple(parts.values()))
