"""The evaluation of a set expression: pages, counts, and which of some ids are in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from tao.model.errors import TaoError
from tao.model.graph import MAX_TIME
from tao.sets.cursor import END, START, Place, make_cursor, read_cursor
from tao.sets.expression import Combination, Expression, ListTerm, SetOperator, UnionTerm, checksum_of, text_of
from tao.sets.merge import UnionStream
from tao.sets.steps import DEFAULT_LIMITS, Evaluator, FoundEdge, SetLimits, Steps
from tao.sets.streams import AndStream, ListStream, OperandNames, Stream, WithoutStream

MAX_PAGE: Final = 1_000
"""Edges of one page at most."""


class FoundPage(msgspec.Struct, frozen=True):
    """A page of a set. ``cursor`` is None after the last page. ``examined`` counts the edges that were read for it, and
    ``plan`` says in words how. ``cut_short``: the budget ended the page before it was full. ``missing`` has the lists
    of unions that could not be read and were left out."""

    edges: list[FoundEdge]
    cursor: str | None
    examined: int
    plan: str
    cut_short: bool
    missing: dict[ListTerm, TaoError]


class FoundCount(msgspec.Struct, frozen=True):
    """A number of edges; when it is not ``exact``, there are at least so many."""

    value: int
    exact: bool


class Evaluation:
    """Evaluates one expression, page after page. An operand that was read whole is kept from page to page."""

    def __init__(
        self,
        expression: Expression,
        seconds: Callable[[], float],
        *,
        cursor: str | None = None,
        limits: SetLimits = DEFAULT_LIMITS,
        describe: Callable[[int], str] = str,
    ) -> None:
        """Begin at the first edge, or after ``cursor``. ``seconds`` is a monotonic clock, and ``describe`` names an
        association type for the plan. Raises `InvalidArgument` for a cursor that is not one of this expression."""
        self._expression = expression
        self._checksum = checksum_of(expression)
        self._evaluator = Evaluator(limits, seconds, describe)
        self._examined = START if cursor is None else read_cursor(cursor, self._checksum)
        self._root = self._stream(expression, self._examined)
        self._left_over: list[FoundEdge] = []

    def page(self, limit: int) -> Steps[FoundPage]:
        """Return the next ``limit`` edges, fewer at the end and when the budget is spent. Raises the error of a list
        that cannot be read."""
        evaluator = self._evaluator
        evaluator.begin_page()
        edges: list[FoundEdge] = []
        has_begun = cut_short = False
        while len(edges) < limit:
            if not self._left_over:
                if self._examined == END:
                    break
                if has_begun and evaluator.is_spent:
                    cut_short = True
                    evaluator.note("stopped because the budget of the page was spent")
                    break
                has_begun = True
                chunk = yield from self._root.advance(min(limit - len(edges), MAX_PAGE))
                self._left_over, self._examined = chunk.edges, chunk.examined
            wanted = limit - len(edges)
            edges += self._left_over[:wanted]
            self._left_over = self._left_over[wanted:]
        place = Place(edges[-1].time, edges[-1].id2) if self._left_over else self._examined
        return FoundPage(
            edges=edges,
            cursor=None if place == END else make_cursor(self._checksum, place),
            examined=evaluator.examined,
            plan=evaluator.plan,
            cut_short=cut_short,
            missing=dict(evaluator.missing),
        )

    def count(self, limit: int) -> Steps[FoundCount]:
        """Return the number of edges: that of a whole list is exact, any other is counted up to ``limit`` or until the
        budget of one page is spent. It is not exact when a union left lists out. Raises as `page`."""
        expression = self._expression
        if isinstance(expression, ListTerm) and (expression.high, expression.low) == (MAX_TIME, 0):
            yield from self._root.measure()
            return FoundCount(self._root.size, exact=True)
        page = yield from self.page(limit)
        return FoundCount(len(page.edges), exact=page.cursor is None and not page.missing)

    def among(self, ids: Sequence[int]) -> Steps[dict[int, FoundEdge]]:
        """Return the edges to those of ``ids`` that are in the set, without those of lists that a union left out.
        Raises as `page`."""
        at_once = self._evaluator.ids_to_ask(self._root.lists)
        found: dict[int, FoundEdge] = {}
        for first in range(0, len(ids), at_once):
            found |= yield from self._root.probe(ids[first : first + at_once])
        return found

    def _stream(self, expression: Expression, after: Place) -> Stream:
        evaluator = self._evaluator
        if isinstance(expression, ListTerm):
            return ListStream(expression, after, evaluator)
        if isinstance(expression, UnionTerm):
            lists = [ListTerm(id1, expression.atype) for id1 in expression.id1s]
            skip = expression.skip_missing
            return UnionStream([ListStream(each, after, evaluator, skip) for each in lists], after, evaluator)
        return self._combined(expression, after)

    def _combined(self, expression: Combination, after: Place) -> Stream:
        evaluator = self._evaluator
        left = self._stream(expression.left, after)
        if expression.operator is SetOperator.OR:
            return UnionStream([left, self._stream(expression.right, after)], after, evaluator)
        right = self._stream(expression.right, START)
        names = OperandNames(*(text_of(each, evaluator.describe) for each in (expression.left, expression.right)))
        if expression.operator is SetOperator.AND:
            return AndStream(names, left, right, after, evaluator)
        return WithoutStream(names, left, right, evaluator)
