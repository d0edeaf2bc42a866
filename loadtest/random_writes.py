"""Random writes in two regions at once, made to collide: few hot objects, both ends of pairs, all kinds of operations.

What fails is counted by reason and given up, never tried again: a write that is refused or lost on its way may leave
nothing behind that differs. Reads go on between the writes, since only what is cached can be wrong.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tao.client import Graph, TaoError
from tao.model.ids import SEQUENCE_PER_MS, make_id

_PAIRED: Final = ("friend", "likes", "liked_by", "follows", "followed_by", "page_likes")
_SINGLE: Final = ("comment", "note")
_MOVABLE: Final = ("friend", "likes", "page_likes")
"""Types without fields that differ: an edge may move between them, whatever was written with it."""
_RECENT: Final = 500
_COLD_IDS_PER_SHARD: Final = 250
_COLD_UNIX_MS: Final = 1_650_000_000_000
_FAILURE_PAUSE_SECONDS: Final = 0.2
"""On average: a cut line refuses writes faster than it could take them, and should not use up the run."""


@dataclass(slots=True)
class Tally:
    """What became of the writes of one run. ``kept``: objects whose addition was acknowledged and whose deletion
    nobody asked for: all of them must be there at the end."""

    to_issue: int
    issued: int = 0
    acknowledged: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    failed_reads: Counter[str] = field(default_factory=Counter)
    kept: set[int] = field(default_factory=set)

    def take(self) -> bool:
        """Whether one more write is to be issued; it counts as issued then."""
        if self.issued >= self.to_issue:
            return False
        self.issued += 1
        return True

    def close(self) -> None:
        """Issue no more."""
        self.to_issue = self.issued


@dataclass(frozen=True, slots=True)
class Playground:
    """What all writers of both regions write to."""

    hot: Sequence[int]
    cold: Sequence[int]
    """Ends of edges that are nobody's objects: an edge's ends are not looked up."""
    edges: deque[tuple[int, str, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Some that were added of late."""
    objects: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))


async def prepare(graph: Graph, shards: int, hot_per_shard: int) -> Playground:
    """Create the hot objects, the same number on every shard, so that each region is master of as many."""
    ids = [await graph.reserve_ids(hot_per_shard, shard=shard) for shard in range(shards)]
    hot = [object_id for of_shard in ids for object_id in of_shard]
    await graph.obj_add_many([("user", {"name": "hot"}, None, object_id) for object_id in hot])
    cold = [
        make_id(shard, _COLD_UNIX_MS + number // SEQUENCE_PER_MS, number % SEQUENCE_PER_MS)
        for shard in range(shards)
        for number in range(_COLD_IDS_PER_SHARD)
    ]
    return Playground(hot, cold)


class Writer:
    """One of many, in one region: a write, perhaps a read, the next write."""

    def __init__(
        self, graph: Graph, reading: Sequence[Graph], ground: Playground, tally: Tally, chance: Random
    ) -> None:
        """``reading``: of the same region, one graph a tier."""
        self._graph: Final = graph
        self._reading: Final = reading
        self._ground: Final = ground
        self._tally: Final = tally
        self._chance: Final = chance

    async def run(self) -> None:
        """Until all are issued."""
        tally = self._tally
        while tally.take():
            try:
                await self._write(tally.issued)
                tally.acknowledged += 1
            except TaoError as error:
                tally.failed[error.reason] += 1
                await asyncio.sleep(2 * _FAILURE_PAUSE_SECONDS * self._chance.random())
            if self._chance.random() < 0.5:
                await self._read()

    async def _write(self, number: int) -> None:
        chance, graph, ground = self._chance, self._graph, self._ground
        kind = chance.random()
        if kind < 0.45:
            edge = self._any_edge()
            fields = {"text": f"n{number}"} if edge[1] == "note" else None
            await graph.assoc_add(*edge, number, fields)
            ground.edges.append(edge)
        elif kind < 0.60:
            await graph.assoc_delete(*self._known_edge())
        elif kind < 0.68:
            id1, atype, id2 = self._known_edge()
            if atype not in _MOVABLE:
                atype = chance.choice(_MOVABLE)
            await graph.assoc_change_type(id1, atype, id2, chance.choice(_MOVABLE))
        elif kind < 0.83:
            await graph.obj_update(chance.choice(ground.hot), {"home": f"h{number}"}, "user")
        elif kind < 0.88 and ground.objects:
            await graph.obj_update(chance.choice(ground.objects), {"home": f"h{number}"}, "user")
        elif kind < 0.92 and ground.objects:
            doomed = chance.choice(ground.objects)
            self._tally.kept.discard(doomed)  # also when the deletion's outcome is unknown
            ground.objects.remove(doomed)
            await graph.obj_delete(doomed)
        else:
            added = await graph.obj_add("user", {"name": f"u{number}"})
            ground.objects.append(added)
            self._tally.kept.add(added)

    async def _read(self) -> None:
        chance, graph = self._chance, self._chance.choice(self._reading)
        id1, atype, id2 = self._known_edge()
        try:
            await asyncio.gather(
                graph.assoc_range(id1, atype, 0, chance.choice((1, 50))),
                graph.assoc_count(id2, chance.choice(_PAIRED)),
                graph.assoc_get(id1, atype, [id2]),
                graph.obj_get(chance.choice(self._ground.hot)),
            )
            self._tally.reads += 4
        except TaoError as error:
            self._tally.failed_reads[error.reason] += 1

    def _any_edge(self) -> tuple[int, str, int]:
        chance, ground = self._chance, self._ground
        id1 = chance.choice(ground.hot if chance.random() < 0.7 else ground.cold)
        id2 = chance.choice(ground.hot if chance.random() < 0.5 else ground.cold)
        return id1, chance.choice(_SINGLE if chance.random() < 0.1 else _PAIRED), id2

    def _known_edge(self) -> tuple[int, str, int]:
        edges = self._ground.edges
        return self._chance.choice(edges) if edges and self._chance.random() < 0.7 else self._any_edge()


async def missing(graph: Graph, kept: set[int]) -> int:
    """How many acknowledged objects the databases do not have."""
    found = await graph.obj_get_many(sorted(kept), critical=True)
    return found.count(None)
