"""Sets of edges: `Graph.edge_set` and its operators, pages, counts and membership.

An `EdgeSet` is a description and sends nothing. `tao.sets` evaluates it; here its queries go through the reads of the
graph, so that they share messages with everything else that is asked in the same tick, include the graph's own writes,
and meet any demand on freshness, list by list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final, Self, TypeVar, Unpack, cast

import msgspec

from tao.client.consistency import Consistency, Freshness, from_keywords
from tao.client.validation import check_bounds, check_ids, check_number, shard_in
from tao.client.values import Assoc
from tao.client.writes import WriteOperations
from tao.model.errors import InvalidArgument, TaoError
from tao.model.queries import CountQuery, EdgesQuery, TimeRangeQuery
from tao.sets.cursor import Place, make_cursor, read_cursor
from tao.sets.evaluation import MAX_PAGE, Evaluation, FoundPage
from tao.sets.expression import Expression, ListTerm, SetOperator, checksum_of, combine, union_of
from tao.sets.steps import Answer, FoundEdge, ListQuery, Steps
from tao.wire.read_batch import COUNT, EDGES, TIME_RANGE, CountRow, EdgesRow, TimeRangeRow

MAX_COUNT: Final = 1_000_000
"""The largest ``limit`` of `EdgeSet.count`."""

_MISSING: Final = ("fail", "skip")
Done = TypeVar("Done")


class UnreadList(msgspec.Struct, frozen=True):
    """A list that could not be read, and why."""

    id1: int
    atype: str
    error: TaoError


class SetPage(msgspec.Struct, frozen=True):
    """Some ``edges`` of a set, in order, and the ``cursor`` of the next page, None after the last page. A page may be
    short or empty and have a cursor.

    ``examined`` is the number of edges that were read for it, and ``plan`` says in words how, for people.
    ``cut_short``: the page ended before it was full, because it had used its budget (20,000 edges, 100 ms). ``missing``
    names the lists that were left out, which only `Graph.edge_union` with ``missing="skip"`` allows."""

    edges: list[Assoc]
    cursor: str | None
    examined: int
    plan: str
    cut_short: bool
    missing: list[UnreadList]


class EdgeCount(msgspec.Struct, frozen=True):
    """The number of edges of a set: ``value`` of them when it is ``exact``, else at least so many."""

    value: int
    exact: bool


class SetDescription:
    """A set of edges of one graph, and the operators that make new ones. Sends nothing.

    ``a & b`` has the ids in both, with the edges of ``a``; ``a - b`` the edges of ``a`` whose ids are not in ``b``;
    ``a | b`` all ids, for an id in both the newer edge. Each comes in the order of its own edges: newest first. Raises
    `InvalidArgument` for a set of another graph, for more than 16 terms, and for more than 8 levels."""

    __slots__ = ("_expression", "_graph")

    def __init__(self, graph: object, expression: Expression) -> None:
        self._graph = graph
        self._expression = expression

    def __and__(self, other: Self) -> Self:
        return self._combined(SetOperator.AND, other)

    def __or__(self, other: Self) -> Self:
        return self._combined(SetOperator.OR, other)

    def __sub__(self, other: Self) -> Self:
        return self._combined(SetOperator.WITHOUT, other)

    def _combined(self, operator: SetOperator, other: Self) -> Self:
        if not isinstance(other, SetDescription):
            return NotImplemented
        return type(self)(self._graph, combine(operator, self._expression, expression_in(self._graph, other)))

    def cursor_after(self, place: Place) -> str:
        """Return the cursor of a page that ended at this place, which need not be that of an edge of the set."""
        return make_cursor(checksum_of(self._expression), place)

    def place_of(self, cursor: str) -> Place:
        """Return the place at which the page with this cursor ended. Raises `InvalidArgument`."""
        return read_cursor(cursor, checksum_of(self._expression))


def expression_in(graph: object, described: SetDescription) -> Expression:
    """Return the expression of a set of this graph. Raises `InvalidArgument` for anything else."""
    if not isinstance(described, SetDescription):
        raise InvalidArgument(f"a set of edges is made by graph.edge_set or graph.edge_union, not {described!r}")
    if described._graph is not graph:
        raise InvalidArgument("the set is of another graph: both operands are made by the same graph")
    return described._expression


class EdgeSet(SetDescription):
    """A set of edges, made by `Graph.edge_set` and `Graph.edge_union`, and combined by ``&``, ``|`` and ``-``.

    The reads take the same keywords as those of `Graph` (`Consistency`), which hold for every list. A list that cannot
    be read fails the read, and is never taken for empty. The answer of each list is of one version of that list; the
    set is not of one moment."""

    __slots__ = ()
    _graph: SetOperations

    async def page(self, limit: int, cursor: str | None = None, **freshness: Unpack[Freshness]) -> SetPage:
        """Return the first ``limit`` edges (1 to 1,000), or those after the page that returned ``cursor``. Raises
        `InvalidArgument` for a damaged cursor and for that of another expression.

        An edge that is in the set throughout comes exactly once, whatever is written between pages; only in a set with
        ``|`` may an id come again, at its older place, when its newer edge is deleted meanwhile."""
        return await self.pages(cursor, **freshness).next(limit)

    def pages(self, cursor: str | None = None, **freshness: Unpack[Freshness]) -> SetPages:
        """Return the pages after the one that returned ``cursor``, or all of them, to be read one by one. Sends
        nothing. Raises as `page`."""
        consistency = from_keywords(**freshness) if freshness else None
        return SetPages(self._graph, self._graph._evaluation(self._expression, cursor), consistency)

    async def count(self, limit: int, **freshness: Unpack[Freshness]) -> EdgeCount:
        """Count the edges up to ``limit`` (1 to 1,000,000). A whole list is counted at once, whatever its length. Any
        other set is counted within the budget of one page (20,000 edges, 100 ms), which may end the count before
        ``limit``; it is not exact then, nor when a union left lists out."""
        consistency = from_keywords(**freshness) if freshness else None
        check_number(limit, "limit", 1, MAX_COUNT)
        evaluation = self._graph._evaluation(self._expression)
        found = await self._graph._evaluate(evaluation.count(limit), consistency)
        return EdgeCount(found.value, found.exact)

    async def among(self, ids: Iterable[int], **freshness: Unpack[Freshness]) -> dict[int, Assoc]:
        """Return the edges to those of ``ids`` that are in the set, by id. A union with ``missing="skip"`` leaves lists
        out here too, and only pages name them."""
        consistency = from_keywords(**freshness) if freshness else None
        checked = list(dict.fromkeys(check_ids(ids, "ids")))
        evaluation = self._graph._evaluation(self._expression)
        found = await self._graph._evaluate(evaluation.among(checked), consistency)
        return {id2: self._graph._assoc(edge) for id2, edge in found.items()}

    async def walk(self, *, page: int = MAX_PAGE, **freshness: Unpack[Freshness]) -> AsyncIterator[Assoc]:
        """Iterate over all edges, ``page`` at a time; ``async for edge in edge_set`` does the same. A short operand is
        read once for the whole walk. Only pages name lists that a union leaves out. Raises as `page`."""
        pages = self.pages(**freshness)
        check_number(page, "page", 1, MAX_PAGE)
        while True:
            found = await pages.next(page)
            for edge in found.edges:
                yield edge
            if found.cursor is None:
                return

    def __aiter__(self) -> AsyncIterator[Assoc]:
        return self.walk()


class SetPages:
    """The pages of a set, one after another. What was read for a page and not needed is kept for the next one, so a
    page is read at less cost than by a cursor. Made by `EdgeSet.pages`."""

    __slots__ = ("_consistency", "_evaluation", "_graph")

    def __init__(self, graph: SetOperations, evaluation: Evaluation, consistency: Consistency | None) -> None:
        self._graph = graph
        self._evaluation = evaluation
        self._consistency = consistency

    async def next(self, limit: int) -> SetPage:
        """Return the next ``limit`` edges (1 to 1,000). Raises as `EdgeSet.page`."""
        check_number(limit, "limit", 1, MAX_PAGE)
        return await self._graph._page_of(self._evaluation, limit, self._consistency)


class SetOperations(WriteOperations):
    """Sets of edges of a graph."""

    def edge_set(
        self, id1: int, atype: str, *, high: int | None = None, low: int | None = None, state: str | None = None
    ) -> EdgeSet:
        """Describe the edges of a list with ``high >= time >= low``, as a set; of a type with states, those in one
        state. Sends nothing. Raises `InvalidArgument` and `UnknownType`."""
        return EdgeSet(self, self._list_term(id1, atype, high, low, state))

    def edge_union(self, ids: Iterable[int], atype: str, *, missing: str = "fail", state: str | None = None) -> EdgeSet:
        """Describe the union of the lists of up to 10,000 ids, as a set; of a type with states, of those in one state.
        Sends nothing.

        ``missing="skip"`` leaves out lists that cannot be read, and names them in `SetPage.missing`; `EdgeSet.among`
        and `EdgeSet.walk` leave them out without a word. Do not skip lists of a set that hides something.
        Raises `InvalidArgument`, also for no id, `TooLarge` and `UnknownType`."""
        return EdgeSet(self, self._union_term(ids, atype, missing, state))

    async def mutual(
        self,
        id1: int,
        other: int,
        atype: str,
        limit: int = 50,
        cursor: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> SetPage:
        """Return a page of the ids in the lists of this type of both, with the edges of ``id1``. Short for
        ``(graph.edge_set(id1, atype) & graph.edge_set(other, atype)).page(limit, cursor)``."""
        return await (self.edge_set(id1, atype) & self.edge_set(other, atype)).page(limit, cursor, **freshness)

    def _list_term(self, id1: int, atype: str, high: int | None, low: int | None, state: str | None) -> ListTerm:
        row, _ = self._builder.count(id1, atype, state)
        return ListTerm(*row, *check_bounds(high, low))

    def _union_term(self, ids: Iterable[int], atype: str, missing: str, state: str | None) -> Expression:
        checked = check_ids(ids, "ids")
        number = self._builder.list_type(atype, state).number
        if missing not in _MISSING:
            raise InvalidArgument(f"missing is {missing!r}; it must be 'fail' or 'skip'")
        if checked:
            shard_in(self._builder.shards, max(checked), "ids")  # the highest id has the highest shard
        return union_of(checked, number, skip_missing=missing == "skip")

    def _evaluation(self, expression: Expression, cursor: str | None = None) -> Evaluation:
        return Evaluation(expression, self._loop.time, cursor=cursor, describe=self._atype_name)

    async def _page_of(self, evaluation: Evaluation, limit: int, consistency: Consistency | None) -> SetPage:
        found: FoundPage = await self._evaluate(evaluation.page(limit), consistency)
        return SetPage(
            edges=[self._assoc(edge) for edge in found.edges],
            cursor=found.cursor,
            examined=found.examined,
            plan=found.plan,
            cut_short=found.cut_short,
            missing=[UnreadList(key.id1, self._atype_name(key.atype), error) for key, error in found.missing.items()],
        )

    def _assoc(self, edge: FoundEdge) -> Assoc:
        return Assoc(edge.id1, self.schema.atype(edge.atype), edge.id2, edge.time, edge.data)

    async def _evaluate(self, steps: Steps[Done], consistency: Consistency | None) -> Done:
        """Answer the queries of an evaluation by the reads of this graph until it is done."""
        try:
            batch = next(steps)
            while True:
                batch = steps.send(await self._answers(batch, consistency))
        except StopIteration as stop:
            done: Done = stop.value
            return done

    async def _answers(self, batch: Sequence[ListQuery], consistency: Consistency | None) -> list[Answer]:
        """Ask the queries of a batch in one tick, and return the answers in order."""
        by_kind: dict[type, list[int]] = {}
        for place, query in enumerate(batch):
            by_kind.setdefault(type(query), []).append(place)
        asking = [self._ask([batch[place] for place in places], consistency) for places in by_kind.values()]
        found = [await asking[0]] if len(asking) == 1 else await asyncio.gather(*asking)
        answers: list[Answer] = [b""] * len(batch)
        for places, values in zip(by_kind.values(), found, strict=True):
            for place, value in zip(places, values, strict=True):
                answers[place] = value
        return answers

    async def _ask(self, queries: Sequence[ListQuery], consistency: Consistency | None) -> list[Answer]:
        """Ask queries of one kind. Ids are asked of the list itself, also where the type has ``reverse_lookup``: in an
        inverse list an edge may be missing that another process has just added, and ``a - b`` would show it."""
        if isinstance(queries[0], CountQuery):
            return await self._read_many(COUNT, [CountRow(each.id1, each.atype) for each in queries], consistency)
        if isinstance(queries[0], TimeRangeQuery):
            pages = cast("Sequence[TimeRangeQuery]", queries)
            rows = [TimeRangeRow(each.id1, each.atype, each.high, each.low, each.limit, each.start) for each in pages]
            return await self._read_many(TIME_RANGE, rows, consistency)
        probes = cast("Sequence[EdgesQuery]", queries)
        asked = [EdgesRow(each.id1, each.atype, each.id2s, each.high, each.low) for each in probes]
        return await self._read_many(EDGES, asked, consistency)
