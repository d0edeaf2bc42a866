"""Streams: what a list, an intersection and a difference do to find their edges in order, and to say which ids they
have. `tao.sets.merge` has unions.

A stream moves down its order. Each `advance` returns the edges between the place it had reached and a new one, perhaps
none. `probe` is independent of that place. All sizes are upper bounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from tao.model.edge_block import (
    LIMIT_CUT,
    check_block,
    checked_header,
    columns_of,
    empty_block,
    id2_column,
    time_column,
)
from tao.model.errors import AnswerFull, ProtocolError, TaoError, TooLarge
from tao.model.graph import COUNT_VALUE_BYTES, MAX_ID2_SET, decode_count
from tao.model.queries import CountQuery, EdgesQuery, TimeRangeQuery
from tao.sets.cursor import END, START, Place
from tao.sets.expression import ListTerm
from tao.sets.steps import Answer, Evaluator, FoundEdge, Steps, both

MIN_PAGE_EDGES: Final = 128
MAX_PAGE_EDGES: Final = 4_000
_FIRST_SHARE: Final = 10
"""An intersection first expects that one edge in so many is in the other operand, as FlockDB does."""
_TOO_LARGE: Final = (TooLarge, AnswerFull)
"""What servers answer where edges with much data are more than a message or an answer holds: less is asked then."""

_new = tuple.__new__  # makes a named tuple in half the time of its constructor


class OperandNames(NamedTuple):
    """What the plan calls the operands."""

    left: str
    right: str


class Chunk(NamedTuple):
    """The edges of a stream down to the place ``examined``; `END` when nothing follows."""

    edges: list[FoundEdge]
    examined: Place


class Among(NamedTuple):
    """How many edges a stream has moved on by, and those of them that were kept."""

    examined: int
    kept: Chunk


FindIds = Callable[[Sequence[int]], Steps[Container[int]]]
"""Returns those of some ids that an operand has."""


class Stream(ABC):
    """An operand during an evaluation. ``edges`` is the number of results that the reader still wants."""

    size: int
    """At least as many edges as the operand has. Known after `measure` and after `prepare`."""

    beside: int = 1
    """How many streams, with this one, move on side by side and share what is left of the page's budget."""

    lists: int = 1
    """How many lists a `probe` asks."""

    is_in_hand: bool = False
    """Whether `prepare` has brought all that follows."""

    starts_with_all: bool = False
    """Whether no edge of the operand comes before the place at which the stream started, as far as it knows."""

    @abstractmethod
    def measure(self) -> Steps[None]:
        """Ask for what `size` needs."""

    @abstractmethod
    def prepare(self, edges: int) -> Steps[None]:
        """Ask for what the first `advance` needs first, and for what `size` needs."""

    @abstractmethod
    def advance(self, edges: int) -> Steps[Chunk]:
        """Move on by about as many edges. Makes progress, unless the stream is at its end."""

    def advance_among(self, edges: int, find: FindIds, *, keep_found: bool) -> Steps[Among]:
        """Do `advance`, and keep those edges whose ids ``find`` returns, or without ``keep_found`` those others."""
        chunk = yield from self.advance(edges)
        found = yield from find([edge.id2 for edge in chunk.edges])
        kept = [edge for edge in chunk.edges if (edge.id2 in found) is keep_found]
        return Among(len(chunk.edges), Chunk(kept, chunk.examined))

    @abstractmethod
    def probe(self, ids: Sequence[int], low: int = 0) -> Steps[dict[int, FoundEdge]]:
        """Return the edges to those of ``ids`` that the operand has, of those with ``time >= low``."""


class _BlockPage(NamedTuple):
    """Edges of a list as the server has sent them, and the place after them."""

    block: bytes
    examined: Place


_NO_PAGE: Final = _BlockPage(empty_block(0), END)


class ListStream(Stream):
    """The edges of one list."""

    def __init__(self, term: ListTerm, after: Place, evaluator: Evaluator, skip_missing: bool = False) -> None:
        self.size = 0
        self._term = term
        self._examined = after
        self._evaluator = evaluator
        self._skip_missing = skip_missing
        self._is_measured = False
        self._prepared: _BlockPage | None = None

    def measure(self) -> Steps[None]:
        if self._is_measured:
            return
        (answer,) = yield [CountQuery(self._term.id1, self._term.atype)]
        value = self._read(answer)
        if value is not None:
            if len(value) < COUNT_VALUE_BYTES:
                raise ProtocolError(f"a count value has {COUNT_VALUE_BYTES} bytes, this one {len(value)}")
            self._learn_size(decode_count(value)[1])

    def prepare(self, edges: int) -> Steps[None]:
        if self._prepared is None:
            self._prepared = yield from self._next(edges)
            self.is_in_hand = self._prepared.examined == END

    def advance(self, edges: int) -> Steps[Chunk]:
        page = yield from self._taken(edges)
        return Chunk(self._edges(page.block), page.examined)

    def advance_among(self, edges: int, find: FindIds, *, keep_found: bool) -> Steps[Among]:
        # Most edges of an intersection's page are not kept: only those that are become tuples.
        page = yield from self._taken(edges)
        id2s, times, data = columns_of(page.block)
        found = yield from find(id2s)
        rows = zip(id2s, times, data, strict=False)
        id1, atype = self._term.id1, self._term.atype
        kept = [FoundEdge(time, id2, id1, atype, fields) for id2, time, fields in rows if (id2 in found) is keep_found]
        return Among(len(id2s), Chunk(kept, page.examined))

    def probe(self, ids: Sequence[int], low: int = 0) -> Steps[dict[int, FoundEdge]]:
        term = self._term
        lowest = max(low, term.low)
        if not ids or lowest > term.high:
            return {}
        self._evaluator.probes += len(ids)
        waiting = [tuple(ids[first : first + MAX_ID2_SET]) for first in range(0, len(ids), MAX_ID2_SET)]
        found: dict[int, FoundEdge] = {}
        while waiting:
            answers = yield [EdgesQuery(term.id1, term.atype, each, term.high, lowest) for each in waiting]
            smaller: list[tuple[int, ...]] = []
            for part, answer in zip(waiting, answers, strict=True):
                if len(part) > MIN_PAGE_EDGES and isinstance(answer, _TOO_LARGE):
                    smaller += [part[: len(part) // 2], part[len(part) // 2 :]]
                elif (value := self._read(answer)) is not None:
                    found.update((edge.id2, edge) for edge in self._edges(check_block(value)))
            waiting = smaller
        return found

    def _taken(self, edges: int) -> Steps[_BlockPage]:
        page, self._prepared = self._prepared, None
        if page is None:
            page = yield from self._next(edges)
        return page

    def _next(self, edges: int) -> Steps[_BlockPage]:
        term, place = self._term, self._examined
        high, start = (place.time, place.id2) if place.time <= term.high and place != START else (term.high, 0)
        if place == END or high < term.low:
            self._examined = END
            return _NO_PAGE
        (answer,) = yield [TimeRangeQuery(term.id1, term.atype, high, term.low, edges, start)]
        while edges > MIN_PAGE_EDGES and isinstance(answer, _TOO_LARGE):
            edges = max(MIN_PAGE_EDGES, edges // 2)
            (answer,) = yield [TimeRangeQuery(term.id1, term.atype, high, term.low, edges, start)]
        value = self._read(answer)
        if value is None:
            self._examined = END
            return _NO_PAGE
        _, count, length, flags = checked_header(value)
        self._learn_size(count)
        self._evaluator.examined += length
        # The server may cut to the type's limit, so a short page is the last one only when it was not cut.
        is_whole = length == count
        if is_whole:
            self.starts_with_all = True
        if not length or is_whole or (length < edges and not flags & LIMIT_CUT):
            self._examined = END
        else:
            self._examined = Place(time_column(value)[-1], id2_column(value)[-1])
        return _BlockPage(value, self._examined)

    def _learn_size(self, count: int) -> None:
        self._is_measured = True
        self.size = count

    def _read(self, answer: Answer) -> bytes | None:
        """Return a value, or None for a list that may be left out. Raises the error of any other list: a list that
        cannot be read is never taken for empty, because a difference would then show what it should hide."""
        if not isinstance(answer, TaoError):
            return answer
        if not self._skip_missing:
            raise answer
        self._evaluator.missing[self._term] = answer
        return None

    def _edges(self, block: bytes) -> list[FoundEdge]:
        id2s, times, data = columns_of(block)
        rows = zip(times, id2s, repeat(self._term.id1), repeat(self._term.atype), data, strict=False)
        return list(map(_new, repeat(FoundEdge), rows))


def read_whole(stream: Stream, most: int, most_bytes: int) -> Steps[list[FoundEdge] | None]:
    """Return all edges of a stream from its start, or None when there are more than ``most``, because it has grown, or
    their fields have more than ``most_bytes``."""
    edges: list[FoundEdge] = []
    size_bytes = 0
    while True:
        chunk = yield from stream.advance(most)
        edges += chunk.edges
        size_bytes += sum([len(edge.data) for edge in chunk.edges])
        if len(edges) > most or size_bytes > most_bytes:
            return None
        if chunk.examined == END:
            return edges


class _PageSize:
    """How many edges of the left operand to read for a number of results, by the share that was kept so far; a quarter
    more, because one page in two would fall short by a few results otherwise, and these cost two more round trips."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._examined = 0
        self._kept = 0

    def of(self, edges: int) -> int:
        if not self._examined:
            wanted = edges * self._share * 5 // 4
        elif self._kept:
            wanted = edges * self._examined * 5 // (4 * self._kept) + 1
        else:
            wanted = 4 * self._examined
        return min(MAX_PAGE_EDGES, max(MIN_PAGE_EDGES, wanted))

    def count(self, examined: int, kept: int) -> None:
        self._examined += examined
        self._kept += kept


class _TwoOperands(Stream):
    """What an intersection and a difference have in common: both read the left operand in pages."""

    def __init__(
        self, names: OperandNames, left: Stream, right: Stream, evaluator: Evaluator, page_size: _PageSize
    ) -> None:
        self._names = names
        self._left = left
        self._right = right
        self._evaluator = evaluator
        self._page_size = page_size
        self._begun = False
        self.lists = left.lists + right.lists

    def measure(self) -> Steps[None]:
        yield from both(self._left.measure(), self._right.measure())

    def prepare(self, edges: int) -> Steps[None]:
        page, right = self._page(edges), self._right.measure()
        if self._right.lists == 1:
            # Most lists are no longer than this page, and are read whole by it. Of many lists it would be too much.
            self._left.beside = 2 * self.beside
            page = max(MIN_PAGE_EDGES, min(page, self._evaluator.edges_left // self._left.beside))
            right = self._right.prepare(page)
        yield from both(self._left.prepare(page), right)

    def _page(self, edges: int) -> int:
        """Return how many edges of the left operand to read: the right one is asked for the id of each."""
        evaluator = self._evaluator
        left = max(MIN_PAGE_EDGES, evaluator.edges_left // self.beside)
        return min(self._page_size.of(edges), evaluator.ids_to_ask(self._right.lists), left)

    def _advance_left(self, edges: int, find: FindIds, *, keep_found: bool) -> Steps[Chunk]:
        """Read a page of the left operand, sized by the share that was kept so far, and return what is kept."""
        self._left.beside = self.beside
        examined, kept = yield from self._left.advance_among(self._page(edges), find, keep_found=keep_found)
        self._page_size.count(examined, len(kept.edges))
        return kept


class AndStream(_TwoOperands):
    """The edges of the left operand whose ids the right one has.

    A right operand that is short and shorter than the left one is read whole, and the left one is asked which of its
    ids it has: two round trips when the first page holds all of the right one, else three, however long the left one
    is. Otherwise the left operand is read page by page, and the right one is asked for the ids of each page, unless the
    first page holds all of it. So two short lists take one round trip."""

    def __init__(self, names: OperandNames, left: Stream, right: Stream, after: Place, evaluator: Evaluator) -> None:
        super().__init__(names, left, right, evaluator, _PageSize(_FIRST_SHARE))
        self._after = after
        self._whole_right: frozenset[int] | None = None

    @property
    def size(self) -> int:  # type: ignore[override]  # follows the operands'
        return min(self._left.size, self._right.size)

    def advance(self, edges: int) -> Steps[Chunk]:
        if not self._begun:
            self._begun = True
            yield from self.prepare(edges)
            if not self.size:
                self._evaluator.note(f"one operand is empty: {self._names.left}, or {self._names.right}")
                return Chunk([], END)
            evaluator = self._evaluator
            most = min(evaluator.limits.materialize_edges, evaluator.ids_to_ask(self._left.lists))
            is_shorter = self._right.size < self._left.size and not self._left.is_in_hand
            whole = None
            if self._right.size <= most and (is_shorter or self._right.is_in_hand):
                whole = yield from read_whole(self._right, most, evaluator.limits.materialize_bytes)
            if whole is None:
                self._evaluator.note(f"read {self._names.left} page by page and asked {self._names.right} for the ids")
            elif is_shorter:
                return (yield from self._ask_left(whole))
            else:
                self._whole_right = frozenset(edge.id2 for edge in whole)
                names = self._names
                self._evaluator.note(f"read {names.right} whole ({len(whole)} edges), and {names.left} page by page")
        return (yield from self._advance_left(edges, self._find_common, keep_found=True))

    def _find_common(self, ids: Sequence[int]) -> Steps[Container[int]]:
        return self._whole_right if self._whole_right is not None else (yield from self._right.probe(ids))

    def _ask_left(self, whole: list[FoundEdge]) -> Steps[Chunk]:
        self._evaluator.note(
            f"read {self._names.right} whole ({len(whole)} edges) and asked {self._names.left} for the ids"
        )
        found = yield from self._left.probe([edge.id2 for edge in whole])
        later = [edge for edge in found.values() if edge[:2] < self._after]
        later.sort(reverse=True)
        return Chunk(later, END)

    def probe(self, ids: Sequence[int], low: int = 0) -> Steps[dict[int, FoundEdge]]:
        left, right = yield from both(self._left.probe(ids, low), self._right.probe(ids))
        return {id2: edge for id2, edge in left.items() if id2 in right}


class WithoutStream(_TwoOperands):
    """The edges of the left operand whose ids the right one does not have. A short right operand is read once, a long
    one is asked for the ids of each page."""

    def __init__(self, names: OperandNames, left: Stream, right: Stream, evaluator: Evaluator) -> None:
        super().__init__(names, left, right, evaluator, _PageSize(1))
        self._excluded: frozenset[int] | None = None

    @property
    def size(self) -> int:  # type: ignore[override]  # follows the left operand's
        return self._left.size

    def advance(self, edges: int) -> Steps[Chunk]:
        if not self._begun:
            self._begun = True
            yield from self.prepare(edges)
            limits = self._evaluator.limits
            most, most_bytes = limits.materialize_edges, limits.materialize_bytes
            if self._right.size <= most:
                whole = (yield from read_whole(self._right, most, most_bytes)) if self._right.size else []
                if whole is not None:
                    self._excluded = frozenset(edge.id2 for edge in whole)
                    self._evaluator.note(f"read {self._names.right} whole ({len(whole)} edges) to leave it out")
            if self._excluded is None:
                self._evaluator.note(f"asked {self._names.right} for the ids of each page, to leave them out")
        return (yield from self._advance_left(edges, self._find_excluded, keep_found=False))

    def _find_excluded(self, ids: Sequence[int]) -> Steps[Container[int]]:
        return self._excluded if self._excluded is not None else (yield from self._right.probe(ids))

    def probe(self, ids: Sequence[int], low: int = 0) -> Steps[dict[int, FoundEdge]]:
        left, right = yield from both(self._left.probe(ids, low), self._right.probe(ids))
        return {id2: edge for id2, edge in left.items() if id2 not in right}
