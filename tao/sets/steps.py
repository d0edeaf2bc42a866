"""The steps of an evaluation: generators that yield batches of queries and are sent their answers; what they share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec

from tao.model.errors import TaoError
from tao.model.queries import CountQuery, EdgesQuery, TimeRangeQuery
from tao.sets.expression import ListTerm

ListQuery = CountQuery | TimeRangeQuery | EdgesQuery
"""What an evaluation asks of a list."""

Answer = bytes | TaoError
"""A count value for a `CountQuery`, an edge block for the others, or the error that stands for it."""

Done = TypeVar("Done")
Steps = Generator[Sequence[ListQuery], Sequence[Answer], Done]
"""Yields batches of queries, is sent the answers to each batch in order, and returns its result."""


class FoundEdge(NamedTuple):
    """An edge of a set, with the list that it is from. Edges compare as their places do."""

    time: int
    id2: int
    id1: int
    atype: int
    data: bytes


class SetLimits(msgspec.Struct, frozen=True):
    """What the evaluation of one page may cost."""

    materialize_edges: int = 6_000
    """An operand with at most so many edges is read whole."""
    materialize_bytes: int = 4 << 20
    """Bytes of fields of an operand that is read whole. One that turns out to have more is asked for ids instead, as a
    long one is. A single answer of a server may exceed it."""
    max_examined: int = 20_000
    """Edges read for one page; the page ends short with a cursor then. A union asks each list for three edges at least,
    and each operand of another kind for 128, so one round may exceed this by as much."""
    max_probes: int = 200_000
    """Ids asked for one page, counted for each list that is asked; the page ends short with a cursor then."""
    max_ms: int = 100
    """Milliseconds from the page's first query to its last; the page ends short with a cursor then."""


DEFAULT_LIMITS: Final = SetLimits()


class Evaluator:
    """What all parts of one evaluation share: its budget, what it did, and the lists that it left out."""

    def __init__(self, limits: SetLimits, seconds: Callable[[], float], describe: Callable[[int], str]) -> None:
        """``seconds`` is a monotonic clock; ``describe`` names an association type, for the plan."""
        self.limits = limits
        self.describe = describe
        self.examined = 0
        self.probes = 0
        self.missing: dict[ListTerm, TaoError] = {}
        self._seconds = seconds
        self._deadline = 0.0
        self._done: dict[str, None] = {}

    def begin_page(self) -> None:
        """Start the budget of a page."""
        self.examined = self.probes = 0
        self._deadline = self._seconds() + self.limits.max_ms / 1000

    @property
    def is_spent(self) -> bool:
        """Return whether the page has used its budget."""
        limits = self.limits
        return (
            self.examined >= limits.max_examined
            or self.probes >= limits.max_probes
            or self._seconds() >= self._deadline
        )

    @property
    def edges_left(self) -> int:
        """Return how many edges the page may still examine."""
        return max(0, self.limits.max_examined - self.examined)

    def ids_to_ask(self, lists: int) -> int:
        """Return how many ids one step may ask of so many lists, at least one."""
        return max(1, self.limits.max_probes // lists)

    def note(self, what: str) -> None:
        """Add a sentence to the plan, once."""
        self._done[what] = None

    @property
    def plan(self) -> str:
        """Return what was done, in words."""
        return "; ".join(self._done)


def together(parts: Iterable[Steps[Done]]) -> Steps[list[Done]]:
    """Take the steps of all parts side by side, each round in one batch, and return their results in order."""
    results: list[Done | None] = []
    waiting: list[tuple[int, Steps[Done], Sequence[ListQuery]]] = []
    for index, part in enumerate(parts):
        results.append(None)
        try:
            waiting.append((index, part, next(part)))
        except StopIteration as stop:
            results[index] = stop.value
    while waiting:
        answers = yield [query for _, _, queries in waiting for query in queries]
        first, continuing = 0, []
        for index, part, queries in waiting:
            end = first + len(queries)
            try:
                continuing.append((index, part, part.send(answers[first:end])))
            except StopIteration as stop:
                results[index] = stop.value
            first = end
        waiting = continuing
    return cast("list[Done]", results)


def both(first: Steps[Any], second: Steps[Any]) -> Steps[list[Any]]:
    """Do `together` for two parts whose results differ in type."""
    return together((first, second))
