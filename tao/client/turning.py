"""Asking an edge's other end: `assoc_get` of a long list turned to the inverse lists (DESIGN.md §10; paper §5.4).

Whether Alice likes a page with a million fans stands in two lists: the page's, of which servers cache the newest
thousands, and that of Alice's likes, which is short, cached whole, and answers at once. For a type whose schema entry
says ``turn_gets``, the query goes there, one for each id2, with the same bounds; and the page's count, which is always
cached, is asked beside it, because an answer tells the length of the list.

Degrees are learnt from answers: each tells how long its list is, and a list longer than its type's limit is remembered
as long. So the first query of a list goes to the list itself, and one whose id2 has a long list, too, is asked so but
once.

What makes it right, and when it is not done. An inverse carries the same time and data, and is written with its edge;
but not always in the same transaction, so one end may be ahead of the other. This graph's own writes are covered: they
say which versions both lists have reached, and a query asks for its own list's. Where a write has left its inverse to
repair (`ClientStats.inverse_pending`) the list is asked itself. So it is when a token names it, for a token promises
everything that the list had then; and for critical reads and a bound on staleness, which are about the list's own
master.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from tao.client.columns import Row
from tao.client.own_writes import CRITICAL, After, Minimums, OwnWrites
from tao.client.requests import ListQuery
from tao.client.settings import ClientSettings
from tao.model.changes import sort_edges
from tao.model.edge_block import check_block, decode_block, encode_block, header
from tao.model.errors import ProtocolError, TaoError
from tao.model.graph import COUNT_VALUE_BYTES, Edge, decode_count
from tao.model.ids import SHARD_SHIFT
from tao.schema.registry import Schema
from tao.schema.types import AssocType


class Turned(NamedTuple):
    """What is asked instead of one row: ``parts``, a row for each id2, and the ``length`` of the list."""

    parts: list[Row]
    length: Row


class Turning:
    """Decides where edges are asked for, and puts the answers together. Knows which lists are long."""

    def __init__(self, own_writes: OwnWrites, settings: ClientSettings) -> None:
        self._own_writes: Final = own_writes
        self._most_id2s: Final = settings.turned_id2s or 0
        self._most_lists: Final = settings.long_lists
        self._long: Final[OrderedDict[Row, None]] = OrderedDict()

    def turned(self, row: Row, atype: AssocType, shards: int, after: After) -> Turned | None:
        """``row``, an `assoc_get`, at its inverse lists; None: the list itself is to be asked."""
        id1, number, id2s, high, low = row
        inverse = atype.inverse
        if (id1, number) not in self._long or not 0 < len(id2s) <= self._most_id2s or inverse is None:
            return None
        self._long.move_to_end((id1, number))
        if (id1, number) in self._own_writes.unpaired or max(id2s) >> SHARD_SHIFT >= shards:
            return None
        if any((id2, inverse) in self._long for id2 in id2s):
            return None
        parts = [(id2, inverse, (id1,), high, low) for id2 in id2s]
        if after is not None:
            minimum_of = Minimums(after, {}).of
            if minimum_of(row) or any(minimum_of(part) == CRITICAL for part in parts):
                return None
        return Turned(parts, (id1, number))

    def learn(self, row: Row, atype: AssocType, block: bytes) -> None:
        """The answer of the list itself tells how long it is. Raises `ProtocolError` for bytes that are none."""
        self._note(row[:2], header(check_block(block))[1], atype.limit)

    def answers(
        self,
        queries: Sequence[ListQuery],
        ways: Sequence[Turned | None],
        values: Iterable[bytes | TaoError],
        lengths: Iterable[bytes | TaoError],
        schema: Schema,
    ) -> list[bytes | TaoError]:
        """One for each query, as its list itself would give it. ``values``: those of the lists, and of the parts in the
        place of a list; ``lengths``: those of the lists that were not asked. Raises `ProtocolError` for bytes that are
        none."""
        found: list[bytes | TaoError] = []
        value_of, length_of = iter(values), iter(lengths)
        for (row, atype), way in zip(queries, ways, strict=True):
            if way is None:
                value = next(value_of)
                if atype.turn_gets and not isinstance(value, TaoError):
                    self.learn(row, atype, value)
                found.append(value)
                continue
            asked = [*islice(value_of, len(way.parts)), next(length_of)]
            whole = [each for each in asked if not isinstance(each, TaoError)]
            failed = [each for each in asked if isinstance(each, TaoError)]
            found.append(failed[0] if failed else self._joined(way, whole[:-1], whole[-1], schema))
        return found

    def _joined(self, turned: Turned, blocks: Sequence[bytes], count_value: bytes, schema: Schema) -> bytes:
        if len(count_value) != COUNT_VALUE_BYTES:
            raise ProtocolError(f"a count value has {COUNT_VALUE_BYTES} bytes, this one {len(count_value)}")
        version, count = decode_count(count_value)
        self._note(turned.length, count, schema.atype(turned.length[1]).limit)
        edges: list[Edge] = []
        for part, block in zip(turned.parts, blocks, strict=True):
            id2, inverse, *_ = part
            self._note(part[:2], header(check_block(block))[1], schema.atype(inverse).limit)
            edges.extend(Edge(id2, edge.time, edge.data) for edge in decode_block(block))
        # An end that is ahead of the other may have edges that the count does not know yet.
        return encode_block(version, max(count, len(edges)), sort_edges(edges), 0)

    def _note(self, key: Row, count: int, limit: int) -> None:
        if count <= limit:
            self._long.pop(key, None)
            return
        self._long[key] = None
        self._long.move_to_end(key)
        if len(self._long) > self._most_lists:
            self._long.popitem(last=False)
