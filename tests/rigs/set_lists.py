"""Association lists in memory that answer the queries of a set evaluation, and a driver for its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tao.model.edge_block import LIMIT_CUT, pack_columns
from tao.model.errors import TaoError, TooLarge
from tao.model.graph import encode_count
from tao.model.queries import CountQuery, EdgesQuery
from tao.sets.cursor import Place
from tao.sets.evaluation import Evaluation, FoundPage
from tao.sets.expression import Combination, Expression, ListTerm, SetOperator
from tao.sets.steps import Answer, Done, FoundEdge, ListQuery, SetLimits, Steps

ListContents = Mapping[int, int]
"""A list: the time of each id2."""


class SetLists:
    """Lists of one association type, by id1. ``limit`` is the type's limit. ``before_batch`` is called before each
    batch of queries is answered, and may change the lists."""

    def __init__(self, lists: Mapping[int, ListContents], limit: int = 6_000) -> None:
        self.lists = {id1: dict(edges) for id1, edges in lists.items()}
        self.limit = limit
        self.most_edges = 6_000
        """Edges that fit into one answer: more are TOO_LARGE."""
        self.data = b""
        """The fields of each edge."""
        self.failing: dict[int, TaoError] = {}
        self.batches: list[Sequence[ListQuery]] = []
        self.before_batch: Callable[[], None] = lambda: None
        self.now = 0.0

    def run(self, steps: Steps[Done]) -> Done:
        """Answer an evaluation until it is done."""
        try:
            batch = next(steps)
            while True:
                self.before_batch()
                self.batches.append(batch)
                batch = steps.send([self.answer(query) for query in batch])
        except StopIteration as stop:
            value: Done = stop.value
            return value

    def answer(self, query: ListQuery) -> Answer:
        if query.id1 in self.failing:
            return self.failing[query.id1]
        edges = self.lists.get(query.id1, {})
        if isinstance(query, CountQuery):
            return encode_count(1, len(edges))
        if isinstance(query, EdgesQuery):
            assert 0 < len(set(query.id2s)) == len(query.id2s) <= 6_000
            asked = ((edges[id2], id2) for id2 in query.id2s if id2 in edges)
            return self._block(edges, sorted([each for each in asked if query.high >= each[0] >= query.low])[::-1], 0)
        assert query.limit > 0
        last = (query.high, query.below_id2) if query.below_id2 else (query.high + 1, 0)
        found = sorted([each for each in zip(edges.values(), edges, strict=True) if last > each >= (query.low, 0)])
        flags = LIMIT_CUT if query.limit > self.limit else 0
        return self._block(edges, found[: -min(query.limit, self.limit) - 1 : -1], flags)

    def _block(self, edges: ListContents, chosen: Sequence[tuple[int, int]], flags: int) -> Answer:
        if len(chosen) > self.most_edges:
            return TooLarge(f"{len(chosen)} edges are more than fit into an answer")
        times, id2s = [time for time, _ in chosen], [id2 for _, id2 in chosen]
        return pack_columns(1, len(edges), flags, id2s, times, [self.data] * len(chosen))

    def evaluate(
        self, expression: Expression, cursor: str | None = None, limits: SetLimits | None = None
    ) -> Evaluation:
        return Evaluation(expression, lambda: self.now, cursor=cursor, limits=limits or SetLimits())

    def page(
        self, expression: Expression, limit: int, cursor: str | None = None, limits: SetLimits | None = None
    ) -> FoundPage:
        """Return one page, evaluated by itself as a web page's is."""
        return self.run(self.evaluate(expression, cursor, limits).page(limit))

    def walk(self, expression: Expression, limit: int, limits: SetLimits | None = None) -> list[FoundPage]:
        """Return all pages, each evaluated by itself."""
        pages = [self.page(expression, limit, None, limits)]
        while pages[-1].cursor is not None:
            pages.append(self.page(expression, limit, pages[-1].cursor, limits))
        return pages

    def expected(self, expression: Expression) -> list[FoundEdge]:
        """Return the edges of a set in order, by Python's own sets."""
        edges = [FoundEdge(time, id2, id1, 1, b"") for id2, (time, id1) in self._denoted(expression).items()]
        return sorted(edges, key=lambda edge: edge[:2], reverse=True)

    def _denoted(self, expression: Expression) -> dict[int, tuple[int, int]]:
        if isinstance(expression, ListTerm):
            edges = self.lists.get(expression.id1, {})
            return {
                id2: (time, expression.id1) for id2, time in edges.items() if expression.high >= time >= expression.low
            }
        if not isinstance(expression, Combination):
            together: dict[int, tuple[int, int]] = {}
            for id1 in expression.id1s:
                together = _newest(together, self._denoted(ListTerm(id1, expression.atype)))
            return together
        left, right = self._denoted(expression.left), self._denoted(expression.right)
        if expression.operator is SetOperator.OR:
            return _newest(left, right)
        kept = set(left) & set(right) if expression.operator is SetOperator.AND else set(left) - set(right)
        return {id2: left[id2] for id2 in kept}


def _newest(first: dict[int, tuple[int, int]], second: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    newer = {id2: edge for id2, edge in second.items() if id2 not in first or edge[0] > first[id2][0]}
    return {**first, **newer}


def places(edges: Sequence[FoundEdge]) -> list[Place]:
    return [Place(edge.time, edge.id2) for edge in edges]
