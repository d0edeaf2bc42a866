"""Writes objects and edges from the databases as CSV: page by page, shard by shard, with the read-only account.

Pages are read at different moments: the export of a graph that is being written is not a snapshot.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from tao.admin.access import ReaderLogin, access_of
from tao.admin.field_text import text_of_value
from tao.admin.load.key_map import KeyMap
from tao.model.errors import OperatorError
from tao.schema.codec import decode_fields
from tao.schema.types import GraphType
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
    """Write all edges of a type to ``file`` and return their number. A symmetric type has each pair written once.

    ``columns``: names of the columns of ``id1`` and ``id2``. ``keys``: as in `export_objects`."""
    found = login.schema.atype(atype)
    symmetric = found.inverse == found.number
    table = found.table or DEFAULT_EDGE_TABLE
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*columns, "time", *(each.name for each in found.fields)])
    count = 0
    with _naming(keys) as naming:
        async with access_of(login, token="") as access:
            for shard in range(login.topology.shards):
                last = FIRST_EDGE
                while page := await access.scans.scan_edges(shard, table, last, _PAGE_ROWS):
                    last = page[-1][0]
                    rows = [
                        (key, edge)
                        for key, edge in page
                        if key.atype == found.number and not (symmetric and key.id1 > key.id2)
                    ]
                    names = naming.names_of(each for key, _ in rows for each in (key.id1, key.id2))
                    writer.writerows(
                        [names[key.id1], names[key.id2], edge.time, *_cells(found, edge.data)] for key, edge in rows
                    )
                    count += len(rows)
    return count


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
