"""Writes objects and edges from the databases as CSV: page by page, shard by shard, with the read-only account.

Pages are read at different moments: the export of a graph that is being written is not a snapshot.
"""

from __future__ import annotations

import csv
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from tao.admin.access import Access, ReaderLogin, access_of
from tao.admin.field_text import text_of_value
from tao.admin.load.key_map import KeyMap
from tao.model.edge_states import State
from tao.model.errors import OperatorError
from tao.model.graph import ListKey
from tao.schema.codec import decode_fields
from tao.schema.types import AssocType, GraphType
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.storage.scans import FIRST_EDGE

_PAGE_ROWS: Final = 2000


async def export_objects(file: TextIO, login: ReaderLogin, otype: str, key_column: str, keys: Path | None) -> int:
    """Write all objects of a type to ``file`` and return their number.

    ``keys``: a key map whose external keys are written instead of ids. Raises `OperatorError` for an id without one."""
    found = login.schema.otype(otype)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([key_column, *(each.name for each in found.fields)])
    count = 0
    with _naming(keys) as naming:
        async with access_of(login, token="") as access:
            for shard in range(login.topology.shards):
                last = 0
                while page := await access.scans.scan_objects(shard, last, _PAGE_ROWS):
                    last = page[-1].id
                    rows = [row for row in page if row.otype == found.number and not row.deleted]
                    names = naming.names_of(row.id for row in rows)
                    writer.writerows([names[row.id], *_cells(found, row.data)] for row in rows)
                    count += len(rows)
    return count


async def export_edges(
    file: TextIO, login: ReaderLogin, atype: str, columns: tuple[str, str], keys: Path | None
) -> int:
    """Write all edges of a type to ``file`` and return their number. A symmetric type has each pair written once. Those
    of a type with states have a column ``state``: the edge's own state, whatever the states of its nodes are
    (`export_nodes`). Edges that are removed by themselves are left out.

    ``columns``: names of the columns of ``id1`` and ``id2``. ``keys``: as in `export_objects`."""
    found = login.schema.atype(atype)
    symmetric = found.inverse == found.number
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*columns, "time", *(["state"] if found.states else []), *(each.name for each in found.fields)])
    count = 0
    with _naming(keys) as naming:
        async with access_of(login, token="") as access:
            for shard in range(login.topology.shards):
                async for page in (
                    _pages_with_states(access, shard, found) if found.states else _pages(access, shard, found)
                ):
                    rows = [each for each in page if not (symmetric and each.id1 > each.id2)]
                    names = naming.names_of(end for each in rows for end in (each.id1, each.id2))
                    writer.writerows(
                        [names[each.id1], names[each.id2], each.time, *each.state, *_cells(found, each.data)]
                        for each in rows
                    )
                    count += len(rows)
    return count


async def export_nodes(file: TextIO, login: ReaderLogin, atype: str, column: str, keys: Path | None) -> int:
    """Write the nodes that are not normal for edges of a type with states to ``file``, each with its state, and return
    their number. ``column``: name of the column of the nodes. ``keys``: as in `export_objects`. Raises `OperatorError`
    for a type without states."""
    found = login.schema.atype(atype)
    if not found.states:
        raise OperatorError(f"type {atype!r} has no states, so its nodes have none")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column, "state"])
    count = 0
    with _naming(keys) as naming:
        async with access_of(login, token="") as access:
            for shard in range(login.topology.shards):
                last = ListKey(0, 0)
                while page := await access.scans.scan_node_states(shard, last, _PAGE_ROWS):
                    last = page[-1][0]
                    rows = [(key.id1, node.state) for key, node in page if key.atype == found.number and node.state]
                    names = naming.names_of(node for node, _ in rows)
                    writer.writerows([names[node], State(state).label] for node, state in rows)
                    count += len(rows)
    return count


class _Row(NamedTuple):
    """An edge to be written. ``state`` is its one cell for the state, none of a type without states."""

    id1: int
    id2: int
    time: int
    state: tuple[str, ...]
    data: bytes


async def _pages(access: Access, shard: int, atype: AssocType) -> AsyncIterator[list[_Row]]:
    """Yield the edges of a type without states on a shard."""
    last = FIRST_EDGE
    while page := await access.scans.scan_edges(shard, atype.table or DEFAULT_EDGE_TABLE, last, _PAGE_ROWS):
        last = page[-1][0]
        yield [_Row(key.id1, key.id2, edge.time, (), edge.data) for key, edge in page if key.atype == atype.number]


async def _pages_with_states(access: Access, shard: int, atype: AssocType) -> AsyncIterator[list[_Row]]:
    """Yield the edges of a type with states on a shard, but for those that are removed by themselves or were never
    added. A row without operations, which a foreign writer has put, is in the state of its list."""
    places = {number: state for state, number in zip(State, atype.states, strict=True) if number}
    last = FIRST_EDGE
    while page := await access.scans.scan_registers(shard, last, _PAGE_ROWS):
        last = page[-1][0]
        rows: list[_Row] = []
        for key, registers in page:
            if key.atype not in places:
                continue
            state = State(registers.own_state) if registers.has_operation else places[key.atype]
            if state is State.REMOVED or (registers.has_operation and not registers.payload_us):
                continue
            rows.append(_Row(key.id1, key.id2, registers.time, (state.label,), registers.data))
        yield rows


def _cells(graph_type: GraphType, data: bytes) -> list[str]:
    if not graph_type.fields:
        return []
    values = decode_fields(graph_type, data)
    return [text_of_value(each, values[each.name]) for each in graph_type.fields]


class _Naming:
    """Translates ids to what is written for them: external keys, or the ids themselves."""

    def __init__(self, key_map: KeyMap | None) -> None:
        self._key_map = key_map

    def names_of(self, ids: Iterable[int]) -> dict[int, str]:
        wanted = list(ids)
        names = {each: str(each) for each in wanted}
        if self._key_map is not None:
            keys = self._key_map.keys_of(wanted)
            missing = next((each for each in wanted if each not in keys), None)
            if missing is not None:
                raise OperatorError(f"object {missing} has no key in the key map: leave --keys out to write ids")
            names = keys
        return names


@contextmanager
def _naming(keys: Path | None) -> Iterator[_Naming]:
    if keys is None:
        yield _Naming(None)
        return
    with KeyMap(keys, must_exist=True) as key_map:
        yield _Naming(key_map)
