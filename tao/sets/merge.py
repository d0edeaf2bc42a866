"""The union of streams: a merge that asks for no more of an operand than the best edges need (a threshold merge)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tao.sets.cursor import END, START, Place
from tao.sets.steps import Evaluator, FoundEdge, Steps, together
from tao.sets.streams import Chunk, Stream

_MAX_SEEN: Final = 100_000
"""Ids whose place in a union is remembered. Beyond, the operands are asked for newer edges instead."""

_MIN_SHARE: Final = 3
"""Edges that a round asks of each operand at least."""

_new = tuple.__new__  # makes a named tuple in half the time of its constructor


class _Candidate(NamedTuple):
    """An edge of one operand. Greater is better: newer, and of equal places that of the earlier operand."""

    time: int
    id2: int
    precedence: int
    edge: FoundEdge


class UnionStream(Stream):
    """The ids of all operands, each with its newest edge, of equally new ones that of the first operand.

    Edges are known to be in order down to the *threshold*: the newest place that some operand has reached. To find the
    best so many, only operands that stand before the last of the best candidates are asked for more.

    An id in several operands comes at its newest place. The stream remembers the ids that it has passed. Of ids before
    its start it knows nothing, so it asks the operands whether they have a newer edge there."""

    def __init__(self, operands: Sequence[Stream], after: Place, evaluator: Evaluator) -> None:
        self._operands = operands
        self._evaluator = evaluator
        self._start = after
        self._has_moved_start = False
        self._examined = [after] * len(operands)
        self._candidates: list[_Candidate] = []
        self._seen: set[int] = set()
        self._rounds = 0
        self.lists = sum(each.lists for each in operands)

    @property
    def size(self) -> int:  # type: ignore[override]  # follows the operands'
        return sum(each.size for each in self._operands)

    def measure(self) -> Steps[None]:
        yield from together([each.measure() for each in self._operands])

    def prepare(self, edges: int) -> Steps[None]:
        share = self._share(edges)
        for each in self._operands:
            each.beside = self.beside * len(self._operands)
        yield from together([each.prepare(share) for each in self._operands])

    def advance(self, edges: int) -> Steps[Chunk]:
        if self._start != START:
            edges = min(edges, self._evaluator.ids_to_ask(self.lists))  # each of them is asked of every list
        known = yield from self._collect(edges)
        examined = max(self._examined)
        if known > edges:
            known = edges
            worst = self._candidates[known - 1]
            examined = Place(worst.time, worst.id2)
        taken, self._candidates = self._candidates[:known], self._candidates[known:]
        fresh = []
        for each in taken:
            if each.id2 not in self._seen:
                self._seen.add(each.id2)
                fresh.append(each)
        if fresh and self._start != START:
            fresh = yield from self._without_newer(fresh)
        if len(self._seen) > _MAX_SEEN:
            self._seen.clear()
            self._start = examined
            self._has_moved_start = True
        return Chunk([each.edge for each in fresh], examined)

    def _collect(self, edges: int) -> Steps[int]:
        """Ask operands until so many edges are known to be the next ones, or the budget is spent; return how many of
        the candidates are. Makes progress in any case."""
        rounds = 0
        self._evaluator.note(f"merged {len(self._operands)} operands in order")
        while True:
            threshold = max(self._examined)
            known = _count_from(self._candidates, threshold)
            if known >= edges or threshold == END or (rounds and self._evaluator.is_spent):
                return known
            last = END
            if len(self._candidates) >= edges:
                worst = self._candidates[edges - 1]
                last = Place(worst.time, worst.id2)
            behind = [index for index, place in enumerate(self._examined) if place > last]
            beside = self.beside * len(behind)
            share = min(self._share(edges), max(_MIN_SHARE, self._evaluator.edges_left // beside))
            for index in behind:
                self._operands[index].beside = beside
            chunks = yield from together([self._operands[index].advance(share) for index in behind])
            for index, chunk in zip(behind, chunks, strict=True):
                self._examined[index] = chunk.examined
                self._candidates += [_new(_Candidate, (edge[0], edge[1], -index, edge)) for edge in chunk.edges]
            self._candidates.sort(reverse=True)
            rounds += 1
            self._rounds += 1

    def _share(self, edges: int) -> int:
        """Return how many edges to ask of each operand: an even share first, more of those that have more to give."""
        share = -(-edges // len(self._operands)) + _MIN_SHARE - 1
        return min(share << 2 * min(self._rounds, 8), max(edges, share))

    def _without_newer(self, fresh: list[_Candidate]) -> Steps[list[_Candidate]]:
        """Leave out the ids that have an edge before the start of the stream: an earlier page had them."""
        start = self._start
        asked = [each for each in self._operands if self._has_moved_start or not each.starts_with_all]
        ids = [each.id2 for each in fresh]
        found = yield from together([operand.probe(ids, start.time) for operand in asked])
        passed = {id2 for edges in found for id2, edge in edges.items() if edge[:2] >= start}
        return [each for each in fresh if each.id2 not in passed]

    def probe(self, ids: Sequence[int], low: int = 0) -> Steps[dict[int, FoundEdge]]:
        found = yield from together([each.probe(ids, low) for each in self._operands])
        newest: dict[int, FoundEdge] = {}
        for edges in found:
            for id2, edge in edges.items():
                known = newest.get(id2)
                if known is None or edge.time > known.time:
                    newest[id2] = edge
        return newest


def _count_from(candidates: Sequence[_Candidate], place: Place) -> int:
    """Return how many candidates, which are in order, are at the place or before it."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if candidates[middle][:2] >= place:
            low = middle + 1
        else:
            high = middle
    return low
