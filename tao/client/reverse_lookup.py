"""Reverse look-up: `assoc_get` and `assoc_exists` of a long list answered by the inverse lists (paper §5.4).

Whether Alice likes a page with a million fans stands in two lists: that of the page, of which servers cache the newest
thousands, and that of Alice's likes, which is short, cached whole, and answers at once. For a type whose schema entry
says ``reverse_lookup``, the query goes to the inverse lists, one query for each id2 with the same bounds, and beside
them to the count of the list, which is always cached, because an answer contains the length of the list.

The client learns from answers how long lists are: each says it, and a list longer than its type's limit is remembered
as long. So the first query of a list goes to the list itself, and an id2 whose own list is long is looked up in reverse
once at most. The byte that answers `assoc_exists` says nothing of the length. So the count of a list that is not known
to be long is asked beside the first check, and again after some more.

An inverse edge carries the same time and data as its edge and is written with it, but not always in the same
transaction, so one end may be ahead of the other. This graph's own writes are seen all the same: a write returns the
versions that both lists have reached, and each query asks for the version of the list that it goes to. The list itself
is asked in these cases:

- a write has left its inverse edge to repair (`ClientStats.inverse_pending`);
- a token names the list, because it promises everything that the list held then;
- the read is critical or bounds staleness, because that is a demand on the list's own master.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from tao.client.consistency import Consistency
from tao.client.own_writes import CRITICAL, MinimumVersions, OwnWrites
from tao.client.request_builder import ListQuery
from tao.client.settings import ClientSettings
from tao.model.changes import sort_edges
from tao.model.edge_block import check_block, decode_block, encode_block, header
from tao.model.errors import ProtocolError, TaoError
from tao.model.graph import COUNT_VALUE_BYTES, MAX_TIME, Edge, decode_count
from tao.model.ids import SHARD_SHIFT
from tao.schema.registry import Schema
from tao.schema.types import AssocType
from tao.wire.read_batch import CountRow, EdgesRow, ExistsRow, RowKey

_CHECKS_BETWEEN_COUNTS: Final = 64
"""`assoc_exists` queries of a list of which one asks for its count as well."""


class ReversePlan(NamedTuple):
    """The queries that replace one `assoc_get`: ``parts``, one for each id2, and ``count_row``, for the length of the
    list itself."""

    parts: list[EdgesRow]
    count_row: CountRow


class ReverseLookup:
    """Chooses the queries that are looked up in reverse, and combines the answers. Remembers which lists are long."""

    def __init__(self, own_writes: OwnWrites, settings: ClientSettings) -> None:
        self._own_writes: Final = own_writes
        self._max_id2s: Final = settings.reverse_lookup_id2s or 0
        self._max_lists: Final = settings.long_lists
        self._long: Final[OrderedDict[RowKey, None]] = OrderedDict()
        self._checks_left: Final[OrderedDict[RowKey, int]] = OrderedDict()  # until the count is asked again

    def plan(self, row: EdgesRow, atype: AssocType, shards: int, consistency: Consistency) -> ReversePlan | None:
        """Return the queries that replace ``row``, or None when the list itself must be asked. ``shards`` is the number
        of shards of the graph."""
        id1, number, id2s, high, low = row
        if consistency.critical or consistency.max_staleness_ms is not None:
            return None
        inverse = atype.inverse
        if (id1, number) not in self._long or not 0 < len(id2s) <= self._max_id2s or inverse is None:
            return None
        self._long.move_to_end((id1, number))
        if (id1, number) in self._own_writes.inverse_pending or max(id2s) >> SHARD_SHIFT >= shards:
            return None
        if any((id2, inverse) in self._long for id2 in id2s):
            return None
        parts = [EdgesRow(id2, inverse, (id1,), high, low) for id2 in id2s]
        if consistency.token is not None:
            minimum_of = MinimumVersions(consistency.token, {}).of
            if minimum_of(row) or any(minimum_of(part) == CRITICAL for part in parts):
                return None
        return ReversePlan(parts, CountRow(id1, number))

    def plan_exists(self, row: ExistsRow, atype: AssocType, shards: int, consistency: Consistency) -> ExistsRow | None:
        """Return the query that replaces ``row``, or None when the list itself must be asked."""
        id1, number, id2 = row
        plan = self.plan(EdgesRow(id1, number, (id2,), MAX_TIME, 0), atype, shards, consistency)
        return None if plan is None else ExistsRow(id2, plan.parts[0].atype, id1)

    def should_measure(self, row: ExistsRow, consistency: Consistency) -> bool:
        """Return whether the count of the list is to be asked beside this check, which goes to the list itself."""
        key = row[:2]
        if key in self._long or not self._max_id2s or consistency.critical or consistency.max_staleness_ms is not None:
            return False
        left = self._checks_left.pop(key, 0)
        self._checks_left[key] = (left or _CHECKS_BETWEEN_COUNTS) - 1
        if len(self._checks_left) > self._max_lists:
            self._checks_left.popitem(last=False)
        return not left

    def record_count(self, row: CountRow, atype: AssocType, count: int) -> None:
        """Remember how long the list is, by its count."""
        self._record(row, count, atype.limit)

    def record_length(self, row: EdgesRow, atype: AssocType, block: bytes) -> None:
        """Remember how long the list is, by an answer of the list itself. Raises `ProtocolError` for bytes that are no
        edge block."""
        self._record(row[:2], header(check_block(block))[1], atype.limit)

    def combine(
        self,
        queries: Sequence[ListQuery[EdgesRow]],
        plans: Sequence[ReversePlan | None],
        values: Iterable[bytes | TaoError],
        counts: Iterable[bytes | TaoError],
        schema: Schema,
    ) -> list[bytes | TaoError]:
        """Return an answer for each query, as its list itself would give it.

        ``values`` are the answers of the lists, with those of the parts in the place of a list that has a plan;
        ``counts`` are the counts of the lists that have one. Raises `ProtocolError` for bytes that are no values."""
        answers: list[bytes | TaoError] = []
        next_value, next_count = iter(values), iter(counts)
        for (row, atype), plan in zip(queries, plans, strict=True):
            if plan is None:
                value = next(next_value)
                if atype.reverse_lookup and not isinstance(value, TaoError):
                    self.record_length(row, atype, value)
                answers.append(value)
                continue
            results = [*islice(next_value, len(plan.parts)), next(next_count)]
            found = [each for each in results if not isinstance(each, TaoError)]
            failed = [each for each in results if isinstance(each, TaoError)]
            answers.append(failed[0] if failed else self._combine_one(plan, found[:-1], found[-1], schema))
        return answers

    def _combine_one(self, plan: ReversePlan, blocks: Sequence[bytes], count_value: bytes, schema: Schema) -> bytes:
        if len(count_value) != COUNT_VALUE_BYTES:
            raise ProtocolError(f"a count value has {COUNT_VALUE_BYTES} bytes, this one {len(count_value)}")
        version, count = decode_count(count_value)
        self._record(plan.count_row, count, schema.atype(plan.count_row.atype).limit)
        edges: list[Edge] = []
        for part, block in zip(plan.parts, blocks, strict=True):
            self._record(part[:2], header(check_block(block))[1], schema.atype(part.atype).limit)
            edges.extend(Edge(part.id1, edge.time, edge.data) for edge in decode_block(block))
        # An inverse list that is ahead of the list may hold edges that are not counted yet.
        return encode_block(version, max(count, len(edges)), sort_edges(edges), 0)

    def _record(self, key: RowKey, count: int, limit: int) -> None:
        if count <= limit:
            self._long.pop(key, None)
            return
        self._long[key] = None
        self._long.move_to_end(key)
        if len(self._long) > self._max_lists:
            self._long.popitem(last=False)
