"""Edges of a long list, asked for at either end (DESIGN.md §10 "High degree"; paper §5.4): a part of scenario `whale`.

Asked is after edges that exist and lie far behind the part of the list that is cached, each of them several times: at
the list itself, where a membership filter is no help, and as the SDK turns it for a type that says ``turn_gets``, to
lists of one edge. Told is how many of the questions reached the database.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from statistics import median
from typing import Final

from loadtest.target import Target
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.readiness import server_stats

LoadList = Callable[[int, str, int], Awaitable[list[int]]]
"""Make a list of an id1 and type with so many edges; its id2s, newest first."""

FANS: Final = "fans"
_EDGES: Final = 50_000
_TOY_EDGES: Final = 10_000
_ASKED: Final = 2_000
_TOY_ASKED: Final = 200
_AT_ONCE: Final = 100
_ROUNDS: Final = 4


async def measure_fans(
    target: Target, graph: Graph, load: LoadList, id1: int, settings: ClientSettings, *, toy: bool
) -> tuple[dict[str, float], int]:
    """Figures by name, and how many answers were wrong. ``graph`` turns queries; ``settings`` are for one that does
    not; ``load`` makes the list."""
    ids = await load(id1, FANS, _TOY_EDGES if toy else _EDGES)
    limit = graph.schema.atype(FANS).limit
    some = Random(1).sample(ids[limit:], _TOY_ASKED if toy else _ASKED)
    asking = _Asking(list(target.leaders.values()), id1, some)
    async with connect(target.topology_file, region=target.region, settings=settings) as direct:
        await direct.assoc_range(id1, FANS, 0, limit)  # what can be cached of it
        found = await asking.rounds("there_direct", direct, _ROUNDS)
    await graph.assoc_get(id1, FANS, some[:1])  # of which it learns how long the list is
    found |= await asking.rounds("there_turned_first", graph, 1)
    found |= await asking.rounds("there_turned", graph, _ROUNDS)
    return found, asking.wrong


class _Asking:
    def __init__(self, leaders: Sequence[str], id1: int, some: Sequence[int]) -> None:
        self._leaders = leaders
        self._id1 = id1
        self._some = some
        self.wrong = 0

    async def rounds(self, phase: str, graph: Graph, rounds: int) -> dict[str, float]:
        """The part of the questions that the leader answered from memory, if it was asked at all, and milliseconds of a
        batch."""
        before = await self._misses()
        took: list[float] = []
        for number in range(rounds):
            order = Random(number).sample(self._some, len(self._some))
            for start in range(0, len(order), _AT_ONCE):
                batch = order[start : start + _AT_ONCE]
                started = time.perf_counter()
                answers = await graph.assoc_get_many([(self._id1, FANS, [id2]) for id2 in batch])
                took.append(1000 * (time.perf_counter() - started))
                self.wrong += sum(answer.id2s != [id2] for answer, id2 in zip(answers, batch, strict=True))
        misses = await self._misses() - before
        asked = rounds * len(self._some)
        return {f"{phase}_without_database:ratio": 1 - misses / asked, f"{phase}:ms": median(took)}

    async def _misses(self) -> int:
        return sum([(await server_stats(leader))["misses"] for leader in self._leaders])
