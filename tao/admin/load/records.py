"""Turns records of a CSV file into objects, edges and states of nodes: external keys into ids, cells into values."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tao.admin.field_text import value_of
from tao.admin.load.csv_files import CsvSource, Record
from tao.admin.load.key_map import KeyMap
from tao.admin.load.pipeline import Rejected, errors_in, results_of
from tao.client import AssocList, Consistency, EdgeWrite, Graph
from tao.model.edge_states import NODE_STATES, STATES_BY_LABEL
from tao.model.errors import InvalidArgument, InvalidField, OperatorError, TaoError, TooLarge
from tao.model.graph import MAX_TIME
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.schema.codec import encode_fields
from tao.schema.types import AssocType, Field, GraphType, ObjectType

_MAX_KEY_CHARACTERS = 512

SETTLE_SECONDS: Final = 15.0
"""How long a batch waits for its pending inverse edges. Leaders settle a pair within two seconds of the other end's
first answer, or, after a copy whose outcome is unknown, within ten."""
_SETTLE_PAUSE_SECONDS: Final = 0.25
"""Pause between two looks at pending inverse edges: that between two tries of a leader."""


def field_columns(source: CsvSource, graph_type: GraphType, renamed: Mapping[str, str]) -> list[tuple[int, Field]]:
    """Return the column of each field: the columns that ``renamed`` maps, then those with a field's name.

    Raises `OperatorError` for a column or a field that does not exist, and for two columns of one field.
    """
    fields = {field.name: field for field in graph_type.fields}
    found: dict[str, int] = {}
    for column, name in renamed.items():
        if name not in fields:
            raise OperatorError(f"type {graph_type.name!r} has no field {name!r}: it has {', '.join(fields) or 'none'}")
        if name in found:
            raise OperatorError(f"two columns are mapped to the field {name!r}")
        found[name] = source.index_of(column)
    for name in fields:
        if name not in found and name in source.columns and name not in renamed:
            found[name] = source.index_of(name)
    return [(index, fields[name]) for name, index in found.items()]


def fields_in(columns: Sequence[tuple[int, Field]], cells: Sequence[str]) -> dict[str, object]:
    """Return the fields of a record. Raises `InvalidField` for a cell that is not a value of its field's kind."""
    return {field.name: value_of(field, cells[index]) for index, field in columns if cells[index]}


def graph_id(text: str, shards: int, name: str) -> int:
    """Return the id of the graph in a cell. Raises `InvalidArgument` for another text."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_ID and int(text) >> SHARD_SHIFT < shards):
        raise InvalidArgument(f"{name} {text[:40]!r} is not an id of this graph")
    return int(text)


@dataclass(frozen=True, slots=True)
class NewObject:
    """The object that is written for one record."""

    id: int
    fields: dict[str, object]


class ObjectLoad:
    """Loads objects of one type; a `Load`. ``key_map`` None: the key column holds ids of the graph."""

    def __init__(
        self,
        graph: Graph,
        source: CsvSource,
        otype: ObjectType,
        key_column: str,
        renamed: Mapping[str, str],
        key_map: KeyMap | None,
    ) -> None:
        self._graph = graph
        self._otype = otype
        self._key_map = key_map
        self._key_index = source.index_of(key_column)
        self._columns = field_columns(source, otype, renamed)
        self.used_columns = frozenset({self._key_index, *(index for index, _ in self._columns)})
        self.fields = tuple(field.name for field in otype.fields)

    async def prepare(self, records: Sequence[Record]) -> list[NewObject | Rejected]:
        """Return the object of each record. Its id is in the key map, or is reserved and stored there now."""
        fields: list[dict[str, object] | Rejected] = []
        for record in records:
            key = record.cells[self._key_index]
            try:
                if not 0 < len(key) <= _MAX_KEY_CHARACTERS:
                    raise InvalidArgument(f"the key has {len(key)} characters: 1 to {_MAX_KEY_CHARACTERS} are allowed")
                if self._key_map is None:
                    graph_id(key, self._graph.topology.shards, "the key")
                values = fields_in(self._columns, record.cells)
                encode_fields(self._otype, values)
                fields.append(values)
            except (InvalidArgument, InvalidField, TooLarge) as error:
                fields.append(Rejected(f"{error.reason}: {error.message}"))
        keys = [record.cells[self._key_index] for record in records]
        usable = [key for key, values in zip(keys, fields, strict=True) if not isinstance(values, Rejected)]
        ids = await self._ids_of(usable)
        return [
            values if isinstance(values, Rejected) else NewObject(ids[key], values)
            for key, values in zip(keys, fields, strict=True)
        ]

    async def write(self, items: Sequence[NewObject]) -> list[TaoError | None]:
        """Add the objects under their ids. A repetition with the same content changes nothing."""
        name = self._otype.name
        objects = [(name, item.fields, None, item.id) for item in items]
        return errors_in(await results_of(self._graph.obj_add_many(objects)))

    def witness(self, item: NewObject) -> str:
        """Return the object's id as text."""
        return str(item.id)

    async def holds(self, witness: str) -> bool:
        """True when the object exists."""
        return await self._graph.obj_get(int(witness)) is not None

    async def _ids_of(self, keys: Sequence[str]) -> dict[str, int]:
        if self._key_map is None:
            return {key: int(key) for key in keys}
        known = self._key_map.ids_of(self._otype.name, keys)
        new = [key for key in dict.fromkeys(keys) if key not in known]
        if new:
            reserved = dict(zip(new, await self._reserve(len(new)), strict=True))
            self._key_map.note_ids(self._otype.name, reserved)
            known |= reserved
        return known

    async def _reserve(self, count: int) -> list[int]:
        """Reserve ids, spread evenly over the shards."""
        shards = self._graph.topology.shards
        share, rest = divmod(count, shards)
        counts = {shard: share for shard in range(shards) if share}
        for shard in random.sample(range(shards), rest):
            counts[shard] = share + 1
        reserved = await asyncio.gather(
            *(self._graph.reserve_ids(wanted, shard=shard) for shard, wanted in counts.items())
        )
        ids = [each for some in reserved for each in some]
        random.shuffle(ids)
        return ids


@dataclass(frozen=True, slots=True)
class NewEdge:
    """The edge that is written for one record."""

    id1: int
    id2: int
    time: int
    fields: dict[str, object]
    state: str | None = None
    """The state of an edge of a type with states; None: normal."""


@dataclass(frozen=True, slots=True)
class EndColumn:
    """The column of one end of the edges. ``otype``: the object type of its keys; None: it holds ids of the graph."""

    column: str
    otype: str | None


def end_otype(key_map: KeyMap, named: str | None, option: str) -> str:
    """Return the object type of the keys in a column: the one that is named, else the only one in the map.

    ``option``: the option that names it. Raises `OperatorError` when the type is ambiguous or unknown."""
    otypes = key_map.otypes()
    if named is not None:
        if named not in otypes:
            raise OperatorError(f"the key map has no keys of type {named!r}: it has {', '.join(otypes) or 'none'}")
        return named
    if len(otypes) != 1:
        state = f"has keys of {', '.join(otypes)}" if otypes else "is empty: load the objects first"
        raise OperatorError(f"the key map {state}" + (f"; name one with {option}" if otypes else ""))
    return otypes[0]


@dataclass(frozen=True, slots=True)
class EdgeColumns:
    """The columns of the edges.

    ``time``: one time for all edges, or the name of a column. ``state``: one state for all, or the name of a column;
    None for normal edges, and for types without states."""

    ends: tuple[EndColumn, EndColumn]
    time: int | str
    state: str | None = None


class EdgeLoad:
    """Loads edges of one type; a `Load`.

    ``inverse_pending`` counts the edges whose inverse was still pending when the load stopped waiting for it."""

    def __init__(
        self,
        graph: Graph,
        source: CsvSource,
        atype: AssocType,
        columns: EdgeColumns,
        renamed: Mapping[str, str],
        key_map: KeyMap,
    ) -> None:
        self._graph = graph
        self._atype = atype
        self._ends = [(source.index_of(end.column), end) for end in columns.ends]
        time, state = columns.time, columns.state
        self._constant_time = time if isinstance(time, int) else -1
        self._time_index = source.index_of(time) if isinstance(time, str) else -1
        if state is not None and not atype.states:
            raise OperatorError(f"type {atype.name!r} has no states: leave --state out")
        is_column = state is not None and state not in STATES_BY_LABEL
        self._constant_state = None if is_column else state
        self._state_index = source.index_of(state) if state is not None and is_column else -1
        self._columns = field_columns(source, atype, renamed)
        named = {*(index for index, _ in self._ends), self._time_index, self._state_index}
        self.used_columns = frozenset(named.union(index for index, _ in self._columns))
        self.fields = tuple(field.name for field in atype.fields)
        self._key_map = key_map
        self.inverse_pending = 0

    async def prepare(self, records: Sequence[Record]) -> list[NewEdge | Rejected]:
        """Return the edge of each record: the ids of both ends, the time and the fields."""
        ids: dict[str | None, dict[str, int]] = {}
        for otype in {end.otype for _, end in self._ends if end.otype is not None}:
            keys = [record.cells[index] for record in records for index, end in self._ends if end.otype == otype]
            ids[otype] = self._key_map.ids_of(otype, keys)
        return [self._prepare_one(record.cells, ids) for record in records]

    async def write(self, items: Sequence[NewEdge]) -> list[TaoError | None]:
        """Add the edges, and wait for inverse edges that are pending. An edge that exists is overwritten with the same
        content."""
        name = self._atype.name
        if self._constant_state is None and self._state_index < 0:
            edges = [(item.id1, name, item.id2, item.time, item.fields) for item in items]
            results = await results_of(self._graph.assoc_add_many(edges))
        else:
            states = [(item.id1, name, item.id2, item.state, None, item.time, item.fields) for item in items]
            results = await results_of(self._graph.assoc_set_state_many(states))
        pending = [
            item
            for item, result in zip(items, results, strict=True)
            if isinstance(result, EdgeWrite) and result.inverse_pending
        ]
        if pending:
            self.inverse_pending += await self._wait_for_inverses(pending)
        return errors_in(results)

    def witness(self, item: NewEdge) -> str:
        """Return both ids as text."""
        return f"{item.id1} {item.id2}"

    async def holds(self, witness: str) -> bool:
        """True when the edge exists, in whichever state."""
        id1, id2 = map(int, witness.split()[:2])
        if self._atype.states:
            return await self._graph.assoc_state(id1, self._atype.name, id2) is not None
        return len(await self._graph.assoc_get(id1, self._atype.name, [id2])) == 1

    async def _wait_for_inverses(self, edges: Sequence[NewEdge]) -> int:
        """Wait until the leaders have written the pending inverses of these edges. Return how many are still pending
        when the time for it is over."""
        inverse = self._graph.schema.inverse_of(self._atype)
        if inverse is None:
            return 0
        missing: defaultdict[tuple[int, str | None], set[int]] = defaultdict(set)
        for edge in edges:
            missing[edge.id2, edge.state].add(edge.id1)
        clock = asyncio.get_running_loop().time
        until = clock() + SETTLE_SECONDS
        while missing and clock() < until:
            await asyncio.sleep(_SETTLE_PAUSE_SECONDS)
            # Only the database knows: a cache of the far list may be behind it.
            keys = list(missing)
            queries = [
                (id2, inverse.name, missing[id2, state], *([None, None, state] if state else [])) for id2, state in keys
            ]
            lists = await results_of(self._graph.assoc_get_many(queries, consistency=Consistency.master()))
            for key, found in zip(keys, lists, strict=True):
                if isinstance(found, AssocList):
                    missing[key].difference_update(found.id2s)
                    if not missing[key]:
                        del missing[key]
        return sum(map(len, missing.values()))

    def _prepare_one(self, cells: Sequence[str], ids: Mapping[str | None, Mapping[str, int]]) -> NewEdge | Rejected:
        try:
            id1, id2 = (self._id_of(cells[index], end, ids) for index, end in self._ends)
            fields = fields_in(self._columns, cells) if self._columns else {}
            if fields:
                encode_fields(self._atype, fields)
            return NewEdge(id1, id2, self._time_of(cells), fields, self._state_of(cells))
        except (InvalidArgument, InvalidField, TooLarge) as error:
            return Rejected(f"{error.reason}: {error.message}")

    def _id_of(self, text: str, end: EndColumn, ids: Mapping[str | None, Mapping[str, int]]) -> int:
        if end.otype is None:
            return graph_id(text, self._graph.topology.shards, end.column)
        found = ids[end.otype].get(text)
        if found is None:
            raise InvalidArgument(f"{end.column} {text[:40]!r} is not the key of a loaded {end.otype}")
        return found

    def _state_of(self, cells: Sequence[str]) -> str | None:
        if self._state_index < 0:
            return self._constant_state
        state = cells[self._state_index]
        if state not in STATES_BY_LABEL:
            raise InvalidArgument(f"state {state[:40]!r} is none of {', '.join(STATES_BY_LABEL)}")
        return state

    def _time_of(self, cells: Sequence[str]) -> int:
        if self._time_index < 0:
            return self._constant_time
        text = cells[self._time_index]
        if not (text.isascii() and text.isdigit() and int(text) <= MAX_TIME):
            raise InvalidArgument(f"time {text[:40]!r} is not a number from 0 to 2^63 - 1")
        return int(text)


@dataclass(frozen=True, slots=True)
class NodeStateRow:
    """The state that is set for one record."""

    id: int
    state: str


class NodeLoad:
    """Sets the states of nodes for edges of one type; a `Load`. Each state that is set is a new operation."""

    def __init__(
        self, graph: Graph, source: CsvSource, atype: AssocType, columns: tuple[EndColumn, str], key_map: KeyMap
    ) -> None:
        """``columns``: those of the nodes and of their states. Raises `OperatorError` for a type without states."""
        if not atype.states:
            raise OperatorError(f"type {atype.name!r} has no states, so its nodes have none")
        self._graph = graph
        self._atype = atype
        self._node, state_column = columns
        self._node_index, self._state_index = source.index_of(self._node.column), source.index_of(state_column)
        self.used_columns = frozenset({self._node_index, self._state_index})
        self.fields: tuple[str, ...] = ()
        self._labels = [state.label for state in NODE_STATES if atype.states[state]]
        self._key_map = key_map

    async def prepare(self, records: Sequence[Record]) -> list[NodeStateRow | Rejected]:
        """Return the node of each record, and its state."""
        keys = [record.cells[self._node_index] for record in records]
        ids = {} if self._node.otype is None else self._key_map.ids_of(self._node.otype, keys)
        return [self._prepare_one(record.cells, ids) for record in records]

    async def write(self, items: Sequence[NodeStateRow]) -> list[TaoError | None]:
        """Set the states. Jobs move the edges that are there."""
        types = [self._atype.name]
        results = await asyncio.gather(
            *(self._graph.node_set_state(item.id, item.state, types) for item in items), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, TaoError):
                raise result
        return errors_in(results)

    def witness(self, item: NodeStateRow) -> str:
        """Return the node's id as text."""
        return str(item.id)

    async def holds(self, witness: str) -> bool:
        """Return False: the SDK reads no states of nodes, and setting them again changes nothing."""
        return False

    def _prepare_one(self, cells: Sequence[str], ids: Mapping[str, int]) -> NodeStateRow | Rejected:
        key, state = cells[self._node_index], cells[self._state_index]
        if state not in self._labels:
            return Rejected(f"{InvalidArgument.reason}: state {state[:40]!r} is none of {', '.join(self._labels)}")
        if self._node.otype is not None:
            found = ids.get(key)
            if found is None:
                why = f"{self._node.column} {key[:40]!r} is not the key of a loaded {self._node.otype}"
                return Rejected(f"{InvalidArgument.reason}: {why}")
            return NodeStateRow(found, state)
        try:
            return NodeStateRow(graph_id(key, self._graph.topology.shards, self._node.column), state)
        except InvalidArgument as error:
            return Rejected(f"{error.reason}: {error.message}")
