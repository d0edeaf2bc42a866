"""Parse a server's answers to statements from bytes into rows: MySQL's text protocol, without I/O.

The driver reads a result packet by packet, with two turns of a coroutine for each. A read of one row has nine packets,
which cost more than everything else about it. Here all bytes that have arrived are parsed in one go. The same statement
always has the same columns, so the packets that describe them are parsed once and then found by their bytes. The
driver's table of decoders turns bytes into values, and a test holds both to the same rows.

A server that follows the state of a session appends what has changed to the answer of a statement without rows. So the
answer to COMMIT names the transaction's GTID, without another statement: MySQL among its GTIDs, MariaDB as the value of
a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from struct import Struct
from typing import Any, Final, Protocol, TypeVar

import pymysql.err
from pymysql.connections import TEXT_TYPES
from pymysql.constants import CR, FIELD_TYPE, SERVER_STATUS
from pymysql.converters import through
from pymysql.protocol import FieldDescriptorPacket

from tao.storage.rows_python import Decoder, Row, parse_row

try:
    from tao.storage.rows_core import parse_done, parse_result, parse_results, parse_rows, skip_columns
except ImportError:  # built without a compiler
    from tao.storage.rows_python import parse_done, parse_result, parse_results, parse_rows, skip_columns

_HEADER_BYTES: Final = 4
"""Bytes of a packet's head: three of length, one of its number."""
_WHOLE: Final = 0xFFFFFF
"""A packet of this length is continued in the next one."""
_BINARY: Final = 63
"""The character set of columns that are bytes."""
_MAX_COLUMNS_KEPT: Final = 64
"""The number of kinds of results whose columns a connection remembers. A leader sends a few dozen statements; they take
1 KB each."""

_SMALL_BYTES: Final = 16 * 1024
"""Bytes of a result that is parsed in one go: some 300 rows without data."""

_OK: Final = 0x00
_LOCAL_FILE: Final = 0xFB
_END: Final = 0xFE
_END_BELOW: Final = 9
"""Longer packets that begin with `_END` are rows with a huge first value."""
_ERROR: Final = 0xFF
_NULL: Final = 251
_WIDTHS: Final = {252: 2, 253: 3, 254: 8}
"""Maps the first byte of a length to the bytes of the length proper; smaller first bytes are the length."""
_OK_BYTES: Final = 7
"""Bytes of a result without rows that says nothing but that."""
_STATE_CHANGED: Final = 0x4000
"""The bit of a status that says that changes of the session's state follow."""
_CHANGED_VARIABLES: Final = 0
_CHANGED_GTIDS: Final = 3
LAST_GTID: Final = "last_gtid"
"""The variable of a MariaDB session that has the GTID of its last transaction."""
_COMMAND: Final = Struct("<IB")
"""The head of a command's only packet: its length, the number zero in the fourth byte, and the command."""
_PREPARED: Final = Struct("<xIHH")
"""The answer to a statement that is prepared: its number, and how many columns and parameters it has."""

_RowT = TypeVar("_RowT")


class _ParseRows(Protocol[_RowT]):
    """Parses rows as `tao.storage.rows_python.parse_rows` does."""

    def __call__(
        self, data: bytes, at: int, number: int, rows: list[_RowT], limit: int, decoders: tuple[Decoder | None, ...], /
    ) -> tuple[int, int]: ...


_ParseRow = Callable[[bytes, int, int, tuple[Decoder | None, ...]], _RowT]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one result: their names, and the function that makes a value of each one's bytes (None: the bytes
    are the value)."""

    names: tuple[str, ...]
    decoders: tuple[Decoder | None, ...]


class ResultReader:
    """Parses a server's answer to one command, as far as it has arrived.

    Raises what the driver would: `pymysql.err.MySQLError` for a statement that the server rejects, after which the
    answer is at its end; an `InternalError` without a number for bytes that break the protocol, after which nothing can
    be read.
    """

    __slots__ = (
        "_at", "_chunks", "_columns", "_convert", "_data", "_encoding", "_expected", "_has_next", "_kept", "_number",
        "committed_gtid", "unread", "wanted",
    )  # fmt: skip

    def __init__(self, encoding: str, convert: Mapping[int, Callable[[Any], Any]]) -> None:
        """``encoding``: the connection's, by Python's name. ``convert``: the driver's table from field type to the
        function that makes a value of text (of bytes where the column is binary)."""
        self._encoding: Final = encoding
        self._convert: Final = convert
        self._kept: Final[dict[bytes, Columns]] = {}
        self._data = b""
        self._at = 0
        self._chunks: list[
            bytes
        ] = []  # chunks that follow _data; they are joined when needed, so that a large packet is joined once
        self._columns: Columns | None = None
        self._expected: Columns | None = None
        self._number = -1
        self._has_next = False
        self.unread = 0
        """Return the number of bytes that have arrived and were not read."""
        self.wanted = 0
        """The number of bytes that must be there before `read` gets any further."""
        self.committed_gtid = ""
        """The GTID of the transaction that the last command committed; empty where the server named none."""

    @property
    def columns(self) -> Columns | None:
        """Return the column names of the result that is being read. None: its head has not been read, or it has no
        columns."""
        return self._columns

    @property
    def has_next(self) -> bool:
        """Return whether another result follows the one that has been read to its end."""
        return self._has_next

    def begin(self, expected: Columns | None = None) -> None:
        """Prepare for the answer to a command. ``expected``: the columns of its results, where they are known. Their
        packets differ from schema to schema, and parsing them costs more than everything else about a row."""
        if self.unread or self._has_next or self._columns is not None:
            raise pymysql.err.InternalError("the last answer was not read to its end, or the server was not asked")
        self._number = -1
        self._expected = expected
        self.committed_gtid = ""
        self.wanted = 0  # what the last answer wanted may be more than this one has

    def feed(self, data: bytes) -> None:
        """Take bytes that have arrived."""
        if self.unread:
            self._chunks.append(data)
        else:
            self._data = data
            self._at = 0
        self.unread += len(data)

    def read_head(self) -> bool | None:
        """Begin with a result. Returns whether it has rows, or None when not enough of it has arrived."""
        self._join()
        before = self._number
        done = parse_done(self._data, self._at, before)
        if done is not None:
            stop, self._number, has_next = done
            self._take_state(self._at + _HEADER_BYTES, stop)
            self._end(stop, has_next)
            return False
        head = self._packet(self._at)
        place = head
        count = 0
        if head is not None and self._data[head[0]] not in (_OK, _LOCAL_FILE):
            first, stop = head
            small = self._data[first]
            count = small if small < _NULL else int.from_bytes(self._data[first + 1 : stop], "little")
            place = self._columns_end(stop, count)
        if head is None or place is None:
            self._number = before
            return None
        first, stop = head
        if self._data[first] == _OK:
            has_next = self._announces_next(first + 1, stop)
            self._take_state(first, stop)
            self._end(stop, has_next)
            return False
        if self._data[first] == _LOCAL_FILE:
            raise pymysql.err.InternalError("the server asks for a file of this machine")
        if self._data[place[0]] != _END:
            raise pymysql.err.InternalError("the columns of a result have no end")
        if self._expected is None:
            block = self._data[stop : place[0] - _HEADER_BYTES]
            self._columns = self._kept.get(block) or self._columns_of(block)
        elif count != len(self._expected.names):
            raise pymysql.err.InternalError(f"a result has {count} columns instead of {len(self._expected.names)}")
        else:
            self._columns = self._expected
        self._consume(place[1])
        return True

    def read_whole(self, rows: list[Row], limit: int) -> bool:
        """Append the rows of the next result and return True, if it has the expected columns, all of it has arrived,
        and it is small. Otherwise nothing is read: `read_head` begins with it."""
        if self._expected is None or self._columns is not None or self.unread > _SMALL_BYTES:
            return False
        self._join()
        done = parse_result(self._data, self._at, self._number, rows, limit, self._expected.decoders)
        if done is None:
            return False
        stop, self._number, has_next = done
        self._end(stop, has_next)
        return True

    def read_results(self, results: list[list[Row]]) -> bool:
        """Append the rows of each result that has arrived as a whole, and has no columns or the expected ones. Returns
        whether the answer is at its end; otherwise `read_head` goes on with the next result."""
        if self._columns is not None or self.unread > _SMALL_BYTES:
            return False
        self._join()
        decoders = () if self._expected is None else self._expected.decoders
        stop, number, has_next, changes = parse_results(self._data, self._at, self._number, results, decoders)
        if stop == self._at:
            return False
        for first, end in changes:
            self._take_state(first, end)
        self._number = number
        self._end(stop, has_next)
        return not has_next

    def read_prepared(self) -> int | None:
        """Read the answer to a statement that is prepared and returns no rows. Returns the server's number for it, or
        None when not enough has arrived."""
        self._join()
        before = self._number
        place = head = self._packet(self._at)
        statement = 0
        if head is not None:
            statement, _, parameters = _PREPARED.unpack_from(self._data, head[0])
            place = self._columns_end(head[1], parameters) if parameters else head
        if place is None:
            self._number = before
            return None
        self._end(place[1], has_next=False)
        return int(statement)

    def read_rows(self, rows: list[Row], limit: int) -> bool | None:
        """Append rows until there are ``limit`` of them (returns False) or the result is at its end (returns True).
        Returns None when not enough of it has arrived."""
        return self._read(rows, limit, parse_rows, parse_row)

    def read_packed(self, rows: list[bytes], limit: int) -> bool | None:
        """Do as `read_rows`, and leave the rows as the server has packed them."""
        return self._read(rows, limit, _packed_rows, _packed_row)

    def _read(
        self, rows: list[_RowT], limit: int, parse_all: _ParseRows[_RowT], parse_one: _ParseRow[_RowT]
    ) -> bool | None:
        self._join()
        assert self._columns is not None
        decoders = self._columns.decoders
        data, arrived = self._data, len(self._data)
        at, number = parse_all(data, self._at, self._number, rows, limit, decoders)
        while len(rows) < limit:
            first = at + _HEADER_BYTES
            if first > arrived:
                self.wanted = _HEADER_BYTES
                break
            length = data[at] | data[at + 1] << 8 | data[at + 2] << 16
            stop = first + length
            if stop > arrived:
                self.wanted = stop - at
                break
            number = (number + 1) & 0xFF
            if data[at + 3] != number:
                raise _out_of_order(data[at + 3], number)
            kind = data[first] if length else _OK
            if kind == _ERROR:
                self._refused(first, stop)
            if kind == _END and length < _END_BELOW:
                self._number = number
                status = int.from_bytes(data[first + 3 : first + 5], "little")
                self._end(stop, bool(status & SERVER_STATUS.SERVER_MORE_RESULTS_EXISTS))
                return True
            if length == _WHOLE:
                whole = self._whole(at)
                if whole is None:
                    number = (number - 1) & 0xFF
                    break
                payload, stop, number = whole
                rows.append(parse_one(payload, 0, len(payload), decoders))
            else:
                rows.append(parse_one(data, first, stop, decoders))
            at, number = parse_all(data, stop, number, rows, limit, decoders)
        self._number = number
        self._consume(at)
        return False if len(rows) >= limit else None

    def _columns_end(self, at: int, count: int) -> tuple[int, int] | None:
        """Return what `_packet` returns, for the packet that comes after this many columns."""
        at, self._number, count = skip_columns(self._data, at, self._number, count)
        # A packet that is not the whole packet of a column in its turn is parsed in full.
        place = self._packet(at)
        for _ in range(count):
            place = self._packet(place[1]) if place is not None else None
        return place

    def _packet(self, at: int) -> tuple[int, int] | None:
        """Return where the content of a packet of the head begins and ends. None, with `wanted` set: it has not
        arrived."""
        data = self._data
        first = at + _HEADER_BYTES
        stop = first
        if first <= len(data):
            stop += data[at] | data[at + 1] << 8 | data[at + 2] << 16
        if first > len(data) or stop > len(data):
            self.wanted = stop - self._at
            return None
        got = data[at + 3]
        # Any number but zero may start an answer: a long command was sent in several packets, and the server counts on.
        number = (self._number + 1) & 0xFF if self._number >= 0 else got or 1
        if got != number:
            raise _out_of_order(got, number)
        if not 0 < stop - first < _WHOLE:
            raise pymysql.err.InternalError(f"a packet of {stop - first} bytes, where none can be")
        if data[first] == _ERROR:
            self._refused(first, stop)
        self._number = number
        return first, stop

    def _announces_next(self, at: int, stop: int) -> bool:
        """Parse a result without rows: rows affected, last id and status, as far as they are needed."""
        data = self._data
        for _ in range(2):
            at += 1 + (_WIDTHS.get(data[at], stop) if data[at] >= _NULL else 0) if at < stop else 0
        if at + 2 > stop:
            raise pymysql.err.InternalError("a result without rows ends before its status")
        return bool(data[at] & SERVER_STATUS.SERVER_MORE_RESULTS_EXISTS)

    def _take_state(self, first: int, stop: int) -> None:
        """Keep the GTID that a result without rows names, if it does."""
        if stop - first > _OK_BYTES:
            self.committed_gtid = gtid_named(self._data[first:stop]) or self.committed_gtid

    def _whole(self, at: int) -> tuple[bytes, int, int] | None:
        """Return the content of a row of several packets, its end, and the number of its last packet. None, with
        `wanted` set: it has not all arrived."""
        data, start, number, pieces = self._data, at, self._data[at + 3], []
        while True:
            first = at + _HEADER_BYTES
            stop = first + (int.from_bytes(data[at : at + 3], "little") if first <= len(data) else 0)
            if stop > len(data):
                self.wanted = stop - start
                return None
            if data[at + 3] != number:
                raise _out_of_order(data[at + 3], number)
            pieces.append(data[first:stop])
            if stop - first < _WHOLE:
                return b"".join(pieces), stop, number
            at, number = stop, (number + 1) & 0xFF

    def _join(self) -> None:
        if self._chunks:
            self._data = b"".join((self._data[self._at :], *self._chunks))
            self._at = 0
            self._chunks.clear()

    def _consume(self, stop: int) -> None:
        self.unread -= stop - self._at
        self._at = stop
        if not self.unread:
            self._data, self._at = b"", 0  # an idle connection holds no large answer

    def _end(self, stop: int, has_next: bool) -> None:
        self._consume(stop)
        self._columns = None
        self._has_next = has_next
        self.wanted = _HEADER_BYTES  # of the next result, of which nothing is known

    def _refused(self, first: int, stop: int) -> None:
        """Raise the error of an error packet."""
        error = self._data[first:stop]
        self._end(stop, has_next=False)
        pymysql.err.raise_mysql_exception(error)

    def _columns_of(self, block: bytes) -> Columns:
        fields: list[Any] = []  # types-PyMySQL knows no attributes
        at = 0
        while at < len(block):
            stop = at + _HEADER_BYTES + int.from_bytes(block[at : at + 3], "little")
            fields.append(FieldDescriptorPacket(block[at + _HEADER_BYTES : stop], self._encoding))
            at = stop
        columns = Columns(tuple(field.name for field in fields), tuple(map(self._decoder, fields)))
        if len(self._kept) >= _MAX_COLUMNS_KEPT:
            self._kept.clear()
        self._kept[block] = columns
        return columns

    def _decoder(self, field: Any) -> Decoder | None:
        """Decode as the driver does: JSON and text in the connection's encoding; the rest, numbers and times, in
        ASCII."""
        if field.type_code == FIELD_TYPE.JSON:
            encoding: str | None = self._encoding
        elif field.type_code in TEXT_TYPES:
            encoding = None if field.charsetnr == _BINARY else self._encoding
        else:
            encoding = "ascii"
        convert = self._convert.get(field.type_code)
        if convert is int:
            return int  # int() reads ASCII digits out of bytes as well
        if convert is None or convert is through:
            return None if encoding is None else methodcaller("decode", encoding)
        if encoding is None:
            return convert
        return _decoded(convert, encoding)


def gtid_named(packet: bytes) -> str:
    """Return the GTID that the packet of a result without rows names among the changes of the session's state; empty
    when it names none. The packet's status has been read, so it is there."""
    _, at = _number_at(packet, 1)  # rows affected
    _, at = _number_at(packet, at)  # last id
    if not int.from_bytes(packet[at : at + 2], "little") & _STATE_CHANGED:
        return ""
    _, at = _text_at(packet, at + 4)  # behind the count of warnings: what the server has to say
    changes, _ = _text_at(packet, at)
    gtid, at = b"", 0
    while at < len(changes):
        kind = changes[at]
        change, at = _text_at(changes, at + 1)
        if kind == _CHANGED_GTIDS:
            gtid, _ = _text_at(change, 1)  # behind the byte that says how it is written
        elif kind == _CHANGED_VARIABLES:
            gtid = _variable_in(change, LAST_GTID.encode()) or gtid
    return gtid.decode()


def _variable_in(change: bytes, name: bytes) -> bytes:
    """Return the value of a variable among those that have changed, or nothing."""
    value, at = b"", 0
    while at < len(change):
        changed, at = _text_at(change, at)
        text, at = _text_at(change, at)
        if changed == name:
            value = text
    return value


def _text_at(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the bytes at a place, which begin with their length, and the place behind them."""
    if at < len(data) and data[at] < _NULL:  # as nearly always
        length, at = data[at], at + 1
    else:
        length, at = _number_at(data, at)
    if at + length > len(data):
        raise _torn_state()
    return data[at : at + length], at + length


def _number_at(data: bytes, at: int) -> tuple[int, int]:
    """Return the number of variable length at a place, and the place behind it."""
    if at >= len(data):
        raise _torn_state()
    width = _WIDTHS.get(data[at], 0)
    number = int.from_bytes(data[at + 1 : at + 1 + width], "little") if width else data[at]
    return number, at + 1 + width


def _torn_state() -> pymysql.err.InternalError:
    return pymysql.err.InternalError("the changes of a session's state end too early")


def _packed_rows(
    data: bytes, at: int, number: int, rows: list[bytes], limit: int, _: tuple[Decoder | None, ...]
) -> tuple[int, int]:
    """Do as `parse_rows`, and leave the rows as they are."""
    arrived = len(data)
    while len(rows) < limit:
        first = at + _HEADER_BYTES
        if first > arrived:
            break
        stop = first + (data[at] | data[at + 1] << 8 | data[at + 2] << 16)
        if not 0 < stop - first < _WHOLE or stop > arrived:
            break
        if data[at + 3] != (number + 1) & 0xFF or data[first] >= _END:
            break
        rows.append(data[first:stop])
        number = data[at + 3]
        at = stop
    return at, number


def _packed_row(data: bytes, at: int, stop: int, _: tuple[Decoder | None, ...]) -> bytes:
    return data[at:stop]


def command_packets(command: int, content: bytes) -> bytes:
    """Return a command as it is sent: in several packets when it is larger than one."""
    length = len(content) + 1
    if length < _WHOLE:
        return b"".join((_COMMAND.pack(length, command), content))
    left = bytes([command]) + content
    packets = bytearray()
    for number, at in enumerate(range(0, len(left) + 1, _WHOLE)):
        piece = left[at : at + _WHOLE]
        packets += len(piece).to_bytes(3, "little") + bytes([number & 0xFF]) + piece
    return bytes(packets)


def _decoded(convert: Callable[[Any], Any], encoding: str) -> Decoder:
    return lambda value: convert(value.decode(encoding))


def _out_of_order(got: int, expected: int) -> pymysql.err.MySQLError:
    if not got:  # the number of MySQL's message that it is shutting down
        return pymysql.err.OperationalError(CR.CR_SERVER_LOST, "Lost connection to MySQL server during query")
    return pymysql.err.InternalError(f"a packet has the number {got} in place of {expected & 0xFF}")


__all__ = ["Columns", "Decoder", "ResultReader", "Row", "command_packets"]
