"""Make rows of the packets of a result in MySQL's text protocol. `tao.storage.rows_core` is the compiled twin.

A row takes 2 to 6 µs here, and a sixth of that compiled: most of what a server computes for a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pymysql.err

Row: TypeAlias = tuple[Any, ...]
"""A row as the driver decodes it: int, bytes, str or None by column, which no type checker can know."""

Decoder: TypeAlias = Callable[[bytes], Any]

_HEADER_BYTES: Final = 4
_WHOLE: Final = 0xFFFFFF
_END: Final = 0xFE
_NULL: Final = 251
_WIDTHS: Final = {252: 2, 253: 3, 254: 8}
"""Maps the first byte of a length to the bytes of the length proper; smaller first bytes are the length."""


def parse_rows(
    data: bytes, at: int, number: int, rows: list[Row], limit: int, decoders: tuple[Decoder | None, ...]
) -> tuple[int, int]:
    """Append the rows of the packets that begin at ``at``, until there are ``limit`` rows.

    Stops before a packet that has not all arrived, and before one that is not a whole row: the end of the result, an
    error, a packet that is continued in the next one, or one with another number than the next after ``number``.
    ``decoders``: the function that makes a value of each column's bytes (None: the bytes are the value). Returns where
    it stopped, and the number of the last packet. Raises what `broken_row` returns, and what a decoder does."""
    arrived = len(data)
    while len(rows) < limit:
        first = at + _HEADER_BYTES
        if first > arrived:
            break
        length = data[at] | data[at + 1] << 8 | data[at + 2] << 16
        stop = first + length
        if not 0 < length < _WHOLE or stop > arrived:
            break
        if data[at + 3] != (number + 1) & 0xFF or data[first] >= _END:
            break
        rows.append(parse_row(data, first, stop, decoders))
        number = data[at + 3]
        at = stop
    return at, number


def parse_row(data: bytes, at: int, stop: int, decoders: tuple[Decoder | None, ...]) -> Row:
    """Return the row between two places. Raises what `broken_row` returns, and what a decoder does."""
    values: list[Any] = []
    for decode in decoders:
        if at >= stop:
            raise broken_row()
        length = data[at]
        at += 1
        if length >= _NULL:
            if length == _NULL:
                values.append(None)
                continue
            width = _WIDTHS.get(length, stop)
            if at + width > stop:
                raise broken_row()
            length = int.from_bytes(data[at : at + width], "little")
            at += width
        end = at + length
        if end > stop:
            raise broken_row()
        values.append(data[at:end] if decode is None else decode(data[at:end]))
        at = end
    if at != stop:
        raise broken_row()
    return tuple(values)


def broken_row() -> pymysql.err.MySQLError:
    """Return the error of a row whose values do not end where its packet does."""
    return pymysql.err.InternalError("a row does not end with its packet")
