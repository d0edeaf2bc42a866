"""Decode row events from their packets, without the binlog's library.

The library reads a row value by value, with a call and a look-up of the column's type for each; that is three quarters
of what a tailer in another region computes. It still reads the definitions of tables, from which the columns are known
here, and the events of tables with columns of other types than integers and bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pymysqlreplication.constants import BINLOG, FIELD_TYPE

from tao.planning.row_events import RowEvent
from tao.tailer.row_images_python import BYTES, LARGEST_COUNT, SIGNED, broken_rows

try:
    from tao.tailer.row_images_core import row_images
except ImportError:  # built without a compiler
    from tao.tailer.row_images_python import row_images

_WRITES: Final = frozenset({BINLOG.WRITE_ROWS_EVENT_V1, BINLOG.WRITE_ROWS_EVENT_V2})
_UPDATES: Final = frozenset({BINLOG.UPDATE_ROWS_EVENT_V1, BINLOG.UPDATE_ROWS_EVENT_V2})
_DELETES: Final = frozenset({BINLOG.DELETE_ROWS_EVENT_V1, BINLOG.DELETE_ROWS_EVENT_V2})
ROW_EVENTS: Final = _WRITES | _UPDATES | _DELETES
"""The types of the row events that can be decoded here."""
_WITH_EXTRA_DATA: Final = frozenset(
    {BINLOG.WRITE_ROWS_EVENT_V2, BINLOG.UPDATE_ROWS_EVENT_V2, BINLOG.DELETE_ROWS_EVENT_V2}
)
_KIND: Final = 5
"""Offset of the type of an event in a packet: after the byte OK and a time."""
_ROWS_AT: Final = 28
"""Offset of the end of a row event's header: the byte OK, 19 bytes of header, 6 of the table's number, 2 of flags."""
_EXTRA_BYTES: Final = 2
"""Width of the length of the extra data that MySQL's events have there; the length counts itself."""
_HEADER_BYTES: Final = {kind: 8 + _EXTRA_BYTES * (kind in _WITH_EXTRA_DATA) for kind in ROW_EVENTS}
"""Length of the own header of a row event, which a binlog declares: another length is of a server unknown here."""
_CHECKSUM_BYTES: Final = 4
_INTEGERS: Final = {
    FIELD_TYPE.TINY: 1,
    FIELD_TYPE.SHORT: 2,
    FIELD_TYPE.INT24: 3,
    FIELD_TYPE.LONG: 4,
    FIELD_TYPE.LONGLONG: 8,
}
_BINARY: Final = "binary"
_LONGEST_IN_ONE_BYTE: Final = 255
_MAX_TABLES: Final = 100_000
"""Tables whose columns are kept before all are dropped, as many as the reader keeps definitions."""


class Columns(NamedTuple):
    """The columns of a table: names and forms (`tao.tailer.row_images_python`)."""

    names: tuple[str, ...]
    forms: bytes


def columns_of(table: Any) -> Columns | None:
    """Return the columns of a table as the library defines it; None when the library has to read its rows."""
    if len(table.columns) > LARGEST_COUNT:
        return None
    names: list[str] = []
    forms = bytearray()
    for column in table.columns:
        form = _form_of(column)
        if form is None or not column.name:
            return None
        names.append(sys.intern(column.name))  # found by identity, whichever table an image is of
        forms.append(form)
    return Columns(tuple(names), bytes(forms))


def _form_of(column: Any) -> int | None:
    width = _INTEGERS.get(column.type)
    if width is not None:
        return width if column.unsigned else width | SIGNED
    if column.character_set_name != _BINARY:
        return None
    if column.type == FIELD_TYPE.VARCHAR:
        return BYTES | (1 if column.max_length <= _LONGEST_IN_ONE_BYTE else 2)
    return BYTES | int(column.length_size) if column.type == FIELD_TYPE.BLOB else None


class PacketRows:
    """Decodes the packets of one stream whose rows can be read here. Any thread may use it."""

    def __init__(self, *, use_checksum: bool, header_lengths: Sequence[int] | None) -> None:
        """``header_lengths``: by type of event, as the binlog declares them; None when it declares none."""
        self._tail_bytes: Final = _CHECKSUM_BYTES if use_checksum else 0
        self._kinds: Final = frozenset(
            kind
            for kind, length in _HEADER_BYTES.items()
            if not header_lengths or kind > len(header_lengths) or header_lengths[kind - 1] == length
        )
        self._columns: Final[dict[int, tuple[Any, Columns | None]]] = {}

    def columns(self, data: bytes, table: Any) -> Columns | None:
        """Return the columns with which the packet of a row event can be decoded; None when the library has to.
        ``table``: the library's definition."""
        if data[_KIND] not in self._kinds:
            return None
        known = self._columns.get(table.table_id)
        if known is None or known[0] is not table:
            if len(self._columns) >= _MAX_TABLES:
                self._columns.clear()
            known = self._columns[table.table_id] = (table, columns_of(table))
        return known[1]

    def events(self, shard: int, data: bytes, table: str, columns: Columns) -> list[RowEvent]:
        """Return the rows in a packet. Raises `ValueError` when they cannot be read."""
        kind, at = data[_KIND], _ROWS_AT
        if kind in _WITH_EXTRA_DATA:
            extra_bytes = int.from_bytes(data[at : at + _EXTRA_BYTES], "little")
            if extra_bytes < _EXTRA_BYTES:
                raise broken_rows()
            at += extra_bytes
        stop = len(data) - self._tail_bytes
        if kind in _UPDATES:
            images = row_images(data, at, stop, columns.names, columns.forms, 2)
            return [
                RowEvent(shard, table, before, after) for before, after in zip(images[::2], images[1::2], strict=True)
            ]
        images = row_images(data, at, stop, columns.names, columns.forms, 1)
        if kind in _WRITES:
            return [RowEvent(shard, table, None, image) for image in images]
        return [RowEvent(shard, table, image, None) for image in images]
