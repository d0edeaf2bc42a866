"""Parse the usual packets of results in MySQL's text protocol. `tao.storage.rows_core` is the compiled twin.

A row takes 2 to 6 µs here, and a sixth of that compiled: most of what a server computes for a result. Whatever is
unusual is left to `tao.storage.result_packets.ResultReader`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pymysql.err

Row: TypeAlias = tuple[Any, ...]
"""A row as the driver decodes it: int, bytes, str or None by column, which no type checker can know."""

Decoder: TypeAlias = Callable[[bytes], Any]

_HEADER_BYTES: Final = 4
_WHOLE: Final = 0xFFFFFF
_OK: Final = 0x00
_END: Final = 0xFE
_ERROR: Final = 0xFF
_END_BELOW: Final = 9
"""Longer packets that begin with `_END` are rows with a huge first value."""
_MORE_RESULTS: Final = 0x08
_STATE_CHANGED: Final = 0x40
"""The bit of a status's second byte that says that changes of the session's state follow."""
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


def skip_columns(data: bytes, at: int, number: int, count: int) -> tuple[int, int, int]:
    """Skip the packets of this many columns that begin at ``at``.

    Stops before a packet that has not all arrived, and before one that is not a column's in its turn. Returns where it
    stopped, the number of the last packet, and how many columns are left."""
    arrived = len(data)
    while count:
        first = at + _HEADER_BYTES
        if first >= arrived or data[at + 3] != (number + 1) & 0xFF or data[first] == _ERROR or data[at + 2]:
            break
        stop = first + (data[at] | data[at + 1] << 8)
        if stop == first or stop > arrived:
            break
        number = data[at + 3]
        count -= 1
        at = stop
    return at, number, count


def parse_done(data: bytes, at: int, number: int) -> tuple[int, int, bool] | None:
    """Return what follows a result without rows whose only packet begins at ``at``: where the next packet begins, the
    number of this one, and whether another result follows. None: it has not all arrived, or is no such packet in its
    turn. ``number``: of the last packet, -1 before the first."""
    first = at + _HEADER_BYTES
    if first >= len(data) or data[first] != _OK or data[at + 2]:
        return None
    stop = first + (data[at] | data[at + 1] << 8)
    if stop > len(data) or data[at + 3] != (number + 1 if number >= 0 else 1) & 0xFF:
        return None
    place = first + 1
    for _ in range(2):  # rows affected and last id
        if place >= stop or (data[place] >= _NULL and data[place] not in _WIDTHS):
            return None
        place += 1 + _WIDTHS.get(data[place], 0)
    return None if place + 2 > stop else (stop, data[at + 3], bool(data[place] & _MORE_RESULTS))


def parse_result(
    data: bytes, at: int, number: int, rows: list[Row], limit: int, decoders: tuple[Decoder | None, ...]
) -> tuple[int, int, bool] | None:
    """Append the rows of a whole result that begins at ``at`` and has a column for each decoder.

    Returns what `parse_done` does; None, and no row is appended, when it has not all arrived, has more than ``limit``
    rows, or has a packet that is anything else. ``number``: of the last packet, -1 before the first."""
    first = at + _HEADER_BYTES
    columns = len(decoders)
    if first >= len(data) or data[at : at + 3] != b"\x01\x00\x00" or data[first] != columns or columns >= _NULL:
        return None
    if data[at + 3] != (number + 1 if number >= 0 else 1) & 0xFF:
        return None
    at, number, left = skip_columns(data, first + 1, data[at + 3], columns)
    head = None if left else _end_at(data, at, number)
    if head is None:
        return None
    found: list[Row] = []
    at, number = parse_rows(data, head[0], head[1], found, limit, decoders)
    end = _end_at(data, at, number)
    if end is not None:
        rows.extend(found)
    return end


def parse_results(
    data: bytes, at: int, number: int, results: list[list[Row]], decoders: tuple[Decoder | None, ...]
) -> tuple[int, int, bool, list[tuple[int, int]]]:
    """Append the rows of each result that begins at ``at`` or behind it, up to the last one of the answer.

    Stops before a result that has not all arrived, and before one that is neither without rows nor has a column for
    each decoder. Returns where it stopped, the number of the last packet, whether another result follows, and where the
    contents of packets without rows begin and end that name changes of the session's state. ``number``: of the last
    packet, -1 before the first."""
    changes: list[tuple[int, int]] = []
    more = True
    while more:
        done = parse_done(data, at, number)
        rows: list[Row] = []
        if done is None:
            done = parse_result(data, at, number, rows, sys.maxsize, decoders)
        elif _names_changes(data, at + _HEADER_BYTES):
            changes.append((at + _HEADER_BYTES, done[0]))
        if done is None:
            break
        results.append(rows)
        at, number, more = done
    return at, number, more, changes


def _names_changes(data: bytes, first: int) -> bool:
    """Return whether the packet of `parse_done` whose content begins there names changes of the session's state."""
    place = first + 1
    for _ in range(2):  # rows affected and last id
        place += 1 + _WIDTHS.get(data[place], 0)
    return bool(data[place + 1] & _STATE_CHANGED)


def _end_at(data: bytes, at: int, number: int) -> tuple[int, int, bool] | None:
    """Return what `parse_done` does, for the packet that ends columns or rows."""
    first = at + _HEADER_BYTES
    if first + 5 > len(data) or data[first] != _END or data[at + 1] or data[at + 2]:
        return None
    stop = first + data[at]
    if not first + 5 <= stop < first + _END_BELOW or stop > len(data) or data[at + 3] != (number + 1) & 0xFF:
        return None
    return stop, data[at + 3], bool(data[first + 3] & _MORE_RESULTS)


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
