"""Plays the requests of `run` against the cache itself: what can be had without a network, and in seconds.

`python -m loadtest.research.replay` asks one follower's cache what a load process of `run` would ask, and puts what it
misses into it as a fill would; a leader's cache of the same size is asked for what the follower missed. A scan walks
beside it with `--scan`. Hit rates are of the users' reads after the warming.
"""

from __future__ import annotations

from collections import Counter
from struct import Struct
from typing import Final

import click

from loadtest.memory_process import OneArena
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import RequestStream, WorkloadRequest
from loadtest.published.workload import READS, Kind, tao_atc13
from tao.cache import CacheSettings, GraphCache
from tao.model.changes import GoneEdge, ListChange, ObjectChange, sort_edges
from tao.model.edge_block import PREFIX, encode_block
from tao.model.graph import Edge, encode_count, encode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import next_version

_SHARDS: Final = 16
_ATYPE: Final = 1
_SCAN_ONE_IN: Final = 5
_LEAST_PREFIX_EDGES: Final = 128
"""The value that servers use."""
_WORD: Final = Struct("<Q")
_FRAMING_BYTES: Final = 4
"""The framing of a payload's field."""


class Truth:
    """The graph as a database stores it."""

    def __init__(self, plan: GraphPlan) -> None:
        self._plan: Final = plan
        # In the form that a message's decoder gives them: see `loadtest.memory_process.key_of`.
        places = ((node % _SHARDS << SHARD_SHIFT) + (node // _SHARDS + 1) * 64 for node in range(plan.nodes))
        self.ids: Final[list[int]] = [_WORD.unpack(_WORD.pack(each))[0] for each in places]
        first = next_version(0, 1)
        self._objects: Final = {node: (first, _data(plan.object_size(node))) for node in range(plan.nodes)}
        self._lists: Final[dict[int, tuple[int, list[Edge]]]] = {}
        self._first: Final = first

    def object(self, node: int) -> tuple[int, bytes]:
        return self._objects[node]

    def list(self, node: int) -> tuple[int, list[Edge]]:
        if node not in self._lists:
            edges = [Edge(self.ids[edge.other], edge.time, _data(edge.size)) for edge in self._plan.list_of(node)]
            self._lists[node] = self._first, edges
        return self._lists[node]

    def write(self, request: WorkloadRequest) -> ObjectChange | ListChange | None:
        """Apply a write; returns the change, or None when nothing that is read here changes."""
        node = request.node
        if request.kind is Kind.OBJ_UPDATE:
            before, _ = self._objects[node]
            self._objects[node] = before + 1, _data(request.size)
            return ObjectChange(self.ids[node], before, before + 1, 1, self._objects[node][1])
        if request.kind not in (Kind.ASSOC_ADD, Kind.ASSOC_DELETE):
            return None
        before, edges = self.list(node)
        id2 = self.ids[request.others[0]]
        gone = tuple(GoneEdge(edge.id2, edge.time) for edge in edges if edge.id2 == id2)
        put = (Edge(id2, request.time, _data(request.size)),) if request.kind is Kind.ASSOC_ADD else ()
        left = sort_edges([edge for edge in edges if edge.id2 != id2] + list(put))
        self._lists[node] = before + 1, left
        return ListChange(self.ids[node], _ATYPE, before, before + 1, len(left), gone, put)


class ReplayedCache:
    """A cache, which is filled with what it misses, and the next cache behind it or none."""

    def __init__(self, truth: Truth, cache: GraphCache, behind: ReplayedCache | None) -> None:
        self._truth: Final = truth
        self._behind: Final = behind
        self.cache: Final = cache
        self.counted: Counter[str] = Counter()
        """Hits, as ``hit``, and misses by operation."""

    def ask(self, request: WorkloadRequest) -> None:
        """Answer a read, and fill the cache when it misses."""
        cache, id1 = self.cache, self._truth.ids[request.node]
        match request.kind:
            case Kind.OBJ_GET:
                found = cache.object(id1)
            case Kind.ASSOC_COUNT:
                found = cache.count(id1, _ATYPE)
            case Kind.ASSOC_RANGE:
                found = cache.range(id1, _ATYPE, 0, request.limit)
            case Kind.ASSOC_TIME_RANGE:
                found = cache.time_range(id1, _ATYPE, request.high, request.low, request.limit)
            case _:
                found = cache.edge(id1, _ATYPE, self._truth.ids[request.others[0]])
        if found is not None:
            self.counted["hit"] += 1
            return
        self.counted[request.kind] += 1
        if self._behind is not None:
            self._behind.ask(request)
        self._fill(request)

    def _fill(self, request: WorkloadRequest) -> None:
        cache, node, id1 = self.cache, request.node, self._truth.ids[request.node]
        if request.kind is Kind.OBJ_GET:
            version, data = self._truth.object(node)
            cache.store_object(cache.object_ticket(id1, 0.0), encode_object(version, 1, data), 1, 0.0)
            return
        version, edges = self._truth.list(node)
        ticket = cache.list_ticket(id1, _ATYPE, 0.0)
        if request.kind is Kind.ASSOC_COUNT:
            cache.store_count(ticket, encode_count(version, len(edges)), 1, 0.0)
            return
        wanted = max(request.limit, _LEAST_PREFIX_EDGES) + 1
        cache.store_list(ticket, encode_block(version, len(edges), edges[:wanted], PREFIX), 1, 0.0)

    @property
    def hit_rate(self) -> float:
        """The hit rate since counting began."""
        return self.counted["hit"] / max(1, self.counted.total())


def _opened(cache_bytes: int) -> GraphCache:
    cache = GraphCache(CacheSettings(arena_bytes={"default": cache_bytes}), OneArena())
    for shard in range(_SHARDS):
        cache.open_shard(shard, 1)
    return cache


def _data(size: int) -> bytes:
    return bytes(size + _FRAMING_BYTES) if size else b""


@click.command()
@click.option("--nodes", default=20_000, show_default=True)
@click.option("--cache-share", default=0.2, show_default=True, help="Of the payload bytes.")
@click.option("--warm", default=1_200_000, show_default=True, help="Requests.")
@click.option("--requests", default=700_000, show_default=True, help="Counted after them.")
@click.option("--scan", is_flag=True, help="Somebody walks through everything, one request in five.")
@click.option("--seed", default=1, show_default=True)
def main(nodes: int, cache_share: float, warm: int, requests: int, scan: bool, seed: int) -> None:
    """Print the hit rate of a follower's cache, its misses by operation, and what a leader's had of them."""
    workload = tao_atc13()
    plan = GraphPlan(workload, nodes, seed)
    stream, truth = RequestStream(workload, plan, seed, 0, _SHARDS), Truth(plan)
    budget = int(plan.payload_bytes * cache_share)
    leader = ReplayedCache(truth, _opened(budget), None)
    follower = ReplayedCache(truth, _opened(budget), leader)
    walker = ReplayedCache(truth, follower.cache, None)
    for turn in range(warm + requests):
        if turn == warm:
            follower.counted.clear()
            leader.counted.clear()
        request = next(stream)
        if request.kind in READS:
            follower.ask(request)
        elif (change := truth.write(request)) is not None:
            leader.cache.apply(change, 1, 0.0)
            follower.cache.apply(change, 1, 0.0)
        if scan and turn % _SCAN_ONE_IN == 0:
            walked = turn // _SCAN_ONE_IN * 7_919 % (2 * nodes)
            kind = Kind.ASSOC_RANGE if walked % 2 else Kind.OBJ_GET
            walker.ask(WorkloadRequest(kind, walked // 2, limit=1_000))
    (arena,) = follower.cache.arenas()
    counted = follower.counted
    missed = (f"{kind} {count / counted.total():.2%}" for kind, count in counted.most_common() if kind != "hit")
    click.echo(f"follower: {follower.hit_rate:.2%} hits; leader: {leader.hit_rate:.2%} of the follower's misses")
    click.echo("missed: " + ", ".join(missed))
    click.echo(f"{arena.objects:,} objects, {arena.lists:,} lists, {arena.counts:,} counts in {arena.bytes:,} bytes")


if __name__ == "__main__":
    main()
