"""Records → edges: the two ends by external key (or id), time, fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tao.cli.loading.csv_source import CsvSource, Record
from tao.cli.loading.key_map import KeyMap
from tao.cli.loading.objects import field_columns, fields_in, graph_id
from tao.cli.loading.pipeline import Rejected, errors_of
from tao.client import Graph
from tao.model.errors import InvalidArgument, InvalidField, OperatorError, TaoError, TooLarge
from tao.model.graph import MAX_TIME
from tao.schema.codec import encode_fields
from tao.schema.types import AssocType


@dataclass(frozen=True, slots=True)
class NewEdge:
    """What is written for one record."""

    id1: int
    id2: int
    time: int
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class EndColumn:
    """One end of the edges: its column, and the object type whose keys the column holds (None: ids of the graph)."""

    column: str
    otype: str | None


def end_otype(key_map: KeyMap, named: str | None, option: str) -> str:
    """The object type whose keys a column holds: the one named, else the only one in the map.

    Raises `OperatorError` when that decides nothing."""
    otypes = key_map.otypes()
    if named is not None:
        if named not in otypes:
            raise OperatorError(f"the key map has no keys of type {named!r}: it has {', '.join(otypes) or 'none'}")
        return named
    if len(otypes) != 1:
        told = f"has keys of {', '.join(otypes)}" if otypes else "is empty: load the objects first"
        raise OperatorError(f"the key map {told}" + (f"; say which with {option}" if otypes else ""))
    return otypes[0]


class EdgeLoad:
    """The `Load` of edges of one type. ``time``: the number for all, or the name of a column."""

    def __init__(
        self,
        graph: Graph,
        source: CsvSource,
        atype: AssocType,
        ends: tuple[EndColumn, EndColumn],
        time: int | str,
        renamed: Mapping[str, str],
        key_map: KeyMap,
    ) -> None:
        self._graph = graph
        self._atype = atype
        self._ends = [(source.index_of(end.column), end) for end in ends]
        self._constant_time = time if isinstance(time, int) else -1
        self._time_index = source.index_of(time) if isinstance(time, str) else -1
        self._columns = field_columns(source, atype, renamed)
        self._key_map = key_map

    async def prepare(self, records: Sequence[Record]) -> list[NewEdge | Rejected]:
        """Ids of both ends, time and fields of each record."""
        ids: dict[str | None, dict[str, int]] = {}
        for otype in {end.otype for _, end in self._ends if end.otype is not None}:
            keys = [record.cells[index] for record in records for index, end in self._ends if end.otype == otype]
            ids[otype] = self._key_map.ids_of(otype, keys)
        return [self._prepare_one(record.cells, ids) for record in records]

    async def write(self, items: Sequence[NewEdge]) -> list[TaoError | None]:
        """Add the edges; one that exists is overwritten with the same."""
        name = self._atype.name
        return await errors_of(
            self._graph.assoc_add_many([(item.id1, name, item.id2, item.time, item.fields) for item in items]),
            len(items),
        )

    def witness(self, item: NewEdge) -> str:
        """Both ids."""
        return f"{item.id1} {item.id2}"

    async def holds(self, witness: str) -> bool:
        """Whether the edge exists."""
        id1, id2 = map(int, witness.split())
        return len(await self._graph.assoc_get(id1, self._atype.name, [id2])) == 1

    def _prepare_one(self, cells: Sequence[str], ids: Mapping[str | None, Mapping[str, int]]) -> NewEdge | Rejected:
        try:
            id1, id2 = (self._id_of(cells[index], end, ids) for index, end in self._ends)
            fields = fields_in(self._columns, cells) if self._columns else {}
            if fields:
                encode_fields(self._atype, fields)
            return NewEdge(id1, id2, self._time_of(cells), fields)
        except (InvalidArgument, InvalidField, TooLarge) as error:
            return Rejected(f"{error.reason}: {error.message}")

    def _id_of(self, text: str, end: EndColumn, ids: Mapping[str | None, Mapping[str, int]]) -> int:
        if end.otype is None:
            return graph_id(text, self._graph.topology.shards, end.column)
        found = ids[end.otype].get(text)
        if found is None:
            raise InvalidArgument(f"{end.column} {text[:40]!r} is no key of a loaded {end.otype}")
        return found

    def _time_of(self, cells: Sequence[str]) -> int:
        if self._time_index < 0:
            return self._constant_time
        text = cells[self._time_index]
        if not (text.isascii() and text.isdigit() and int(text) <= MAX_TIME):
            raise InvalidArgument(f"time {text[:40]!r} is no number from 0 to 2^63 - 1")
        return int(text)
