"""Records → objects: external keys to reserved ids, cells to fields."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tao.cli.field_text import value_of
from tao.cli.loading.csv_source import CsvSource, Record
from tao.cli.loading.key_map import KeyMap
from tao.cli.loading.pipeline import Rejected, errors_of
from tao.client import Graph
from tao.model.errors import InvalidArgument, InvalidField, OperatorError, TaoError, TooLarge
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.schema.codec import encode_fields
from tao.schema.types import Field, GraphType, ObjectType

_MAX_KEY_CHARACTERS = 512


def field_columns(source: CsvSource, graph_type: GraphType, renamed: Mapping[str, str]) -> list[tuple[int, Field]]:
    """Which column holds which field: those that ``renamed`` maps, then those named like a field.

    Raises `OperatorError` for a column that is not there, a field that the type has not got, or one field twice.
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
    """The fields of a record. Raises `InvalidField` for a cell that is no value of its field's kind."""
    return {field.name: value_of(field, cells[index]) for index, field in columns if cells[index]}


def graph_id(text: str, shards: int, name: str) -> int:
    """An id of the graph from a cell. Raises `InvalidArgument`."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_ID and int(text) >> SHARD_SHIFT < shards):
        raise InvalidArgument(f"{name} {text[:40]!r} is no id of this graph")
    return int(text)


@dataclass(frozen=True, slots=True)
class NewObject:
    """What is written for one record."""

    id: int
    fields: dict[str, object]


class ObjectLoad:
    """The `Load` of objects of one type. ``key_map`` None: the key column holds ids of the graph."""

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

    async def prepare(self, records: Sequence[Record]) -> list[NewObject | Rejected]:
        """Fields of each record, and its id: noted before, or reserved and noted now."""
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
        """Add the objects under their ids: a repetition with the same content changes nothing."""
        name = self._otype.name
        return await errors_of(
            self._graph.obj_add_many([(name, item.fields, None, item.id) for item in items]), len(items)
        )

    def witness(self, item: NewObject) -> str:
        """Its id."""
        return str(item.id)

    async def holds(self, witness: str) -> bool:
        """Whether the object exists."""
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
        """Ids spread evenly over the shards, whatever the count."""
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
