"""Results are read as the driver reads them: the same bytes, cut anywhere, give the same rows and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import aiomysql
import pymysql.err
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pymysql.constants import CLIENT, FIELD_TYPE
from pymysql.converters import decoders

from tao.storage.failures import ConnectionLost, translate
from tao.storage.result_packets import LAST_GTID, Columns, ResultReader, Row

_UTF8: Final = 45
_BINARY: Final = 63
_MORE_RESULTS: Final = 8
_AUTOCOMMIT: Final = 2
_LIMIT: Final = 3


@dataclass(frozen=True)
class Column:
    name: str
    kind: int
    charset: int


@dataclass(frozen=True)
class Result:
    """A server's result. ``error``: the server fails after the rows; without columns the error is the whole result."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[bytes | None]]
    error: int = 0


def _length(number: int) -> bytes:
    if number < 251:
        return bytes([number])
    for first, width in ((252, 2), (253, 3), (254, 8)):
        if number < 1 << 8 * width:
            return bytes([first]) + number.to_bytes(width, "little")
    raise ValueError(number)


def _text(value: bytes | None) -> bytes:
    return b"\xfb" if value is None else _length(len(value)) + value


def _payloads(results: Sequence[Result]) -> Iterator[bytes]:
    for index, result in enumerate(results):
        status = (_AUTOCOMMIT | (_MORE_RESULTS if index + 1 < len(results) else 0)).to_bytes(2, "little")
        error = b"\xff" + result.error.to_bytes(2, "little") + b"#HY000refused"
        if not result.columns:
            yield error if result.error else b"\x00\x01\x00" + status + b"\x00\x00"
        else:
            yield _length(len(result.columns))
            for column in result.columns:
                fixed = b"\x0c" + column.charset.to_bytes(2, "little") + b"\x14\x00\x00\x00"
                fixed += bytes([column.kind]) + b"\x00\x00\x00\x00\x00"
                parts = (b"def", b"", b"", b"t", column.name.encode(), column.name.encode())
                yield b"".join(map(_text, parts)) + fixed
            yield b"\xfe\x00\x00" + status
            for row in result.rows:
                yield b"".join(map(_text, row))
            yield error if result.error else b"\xfe\x02\x00" + status
        if result.error:
            return


def encode(results: Sequence[Result], first_number: int = 1) -> bytes:
    """Return the packets as a server sends them."""
    packets, number = bytearray(), first_number
    for payload in _payloads(results):
        left = payload
        while True:
            piece, left = left[:0xFFFFFF], left[0xFFFFFF:]
            packets += len(piece).to_bytes(3, "little") + bytes([number & 0xFF]) + piece
            number += 1
            if len(piece) < 0xFFFFFF:
                break
    return bytes(packets)


Outcome = tuple[list[tuple[tuple[str, ...], list[Row]]], Exception | None]


async def read_by_driver(data: bytes) -> Outcome:
    connection: Any = aiomysql.Connection(charset="utf8mb4")
    connection._reader = asyncio.StreamReader()
    connection._reader.feed_data(data)
    connection._reader.feed_eof()
    connection._next_seq_id = 1
    results: list[tuple[tuple[str, ...], list[Row]]] = []
    has_next = True
    try:
        while has_next:
            await connection._read_query_result()
            read = connection._result
            results.append((tuple(each[0] for each in read.description or ()), list(read.rows or ())))
            has_next = read.has_next
    except Exception as error:  # noqa: BLE001 - which one is what is compared
        return results, error
    return results, None


def read_by_us(data: bytes, cuts: Sequence[int], expected: Columns | None = None) -> Outcome:
    reader = ResultReader("utf8", decoders)
    reader.begin(expected)
    results: list[tuple[tuple[str, ...], list[Row]]] = []
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    chunks = [data[start:stop] for start, stop in pairwise(places)]
    is_in_rows = False
    try:
        while True:
            state: bool | None = None
            if not is_in_rows:
                state = reader.read_head()
                if state is not None:
                    names = reader.columns.names if reader.columns is not None else ()
                    results.append((names, []))
                    is_in_rows = state
            else:
                some: list[Row] = []
                state = reader.read_rows(some, _LIMIT)
                results[-1][1].extend(some)
                is_in_rows = state is not True
            if state is None:
                assert reader.wanted > reader.unread, "it says what it waits for"
                while chunks and reader.unread < reader.wanted:
                    reader.feed(chunks.pop(0))
                if reader.unread < reader.wanted:
                    raise pymysql.err.OperationalError(2013, "Lost connection to MySQL server during query")
            elif not is_in_rows and not reader.has_next:
                assert not chunks
                assert not reader.unread
                reader.begin()
                return results, None
    except Exception as error:  # noqa: BLE001 - which one is what is compared
        if is_in_rows:
            results.pop()  # the driver gives no rows of a result that was not read to its end
        return results, error


def agree(data: bytes, cuts: Sequence[int] = ()) -> Outcome:
    ours, theirs = read_by_us(data, cuts), asyncio.run(read_by_driver(data))
    assert ours[0] == theirs[0]
    assert [list(map(type, row)) for _, rows in ours[0] for row in rows] == [
        list(map(type, row)) for _, rows in theirs[0] for row in rows
    ]
    assert _meaning(ours[1]) == _meaning(theirs[1])
    return ours


def _meaning(error: Exception | None) -> object:
    if error is None:
        return None
    return type(translate(error, "one", locking=False)), type(error), error.args


_WIDE = st.sampled_from([250, 251, 252, 255, 256, 65_535, 65_536]).map(lambda size: b"\xfe" * size)
_VALUES = {
    (FIELD_TYPE.LONGLONG, _BINARY): st.integers(-(1 << 63), (1 << 64) - 1).map(lambda n: b"%d" % n),
    (FIELD_TYPE.NEWDECIMAL, _BINARY): st.decimals(allow_nan=False, allow_infinity=False).map(lambda n: str(n).encode()),
    (FIELD_TYPE.DOUBLE, _BINARY): st.floats(allow_nan=False, allow_infinity=False).map(lambda n: repr(n).encode()),
    (FIELD_TYPE.DATETIME, _BINARY): st.datetimes().map(lambda at: at.isoformat(" ").encode()),
    (FIELD_TYPE.TIME, _BINARY): st.times().map(lambda at: at.isoformat().encode()),
    (FIELD_TYPE.BIT, _BINARY): st.binary(max_size=8),
    (FIELD_TYPE.BLOB, _BINARY): st.one_of(st.binary(), _WIDE),
    (FIELD_TYPE.VAR_STRING, _BINARY): st.one_of(st.binary(), _WIDE),
    (FIELD_TYPE.BLOB, _UTF8): st.text().map(str.encode),
    (FIELD_TYPE.VAR_STRING, _UTF8): st.one_of(st.text().map(str.encode), st.binary()),  # also invalid text
    (FIELD_TYPE.JSON, _BINARY): st.text().map(str.encode),
    (FIELD_TYPE.ENUM, _UTF8): st.sampled_from([b"", b"a", b"bc"]),
    (FIELD_TYPE.NULL, _BINARY): st.none(),
}


@st.composite
def some_results(draw: st.DrawFn) -> list[Result]:
    results: list[Result] = []
    for _ in range(draw(st.integers(1, 3))):
        kinds = draw(st.lists(st.sampled_from(sorted(_VALUES)), max_size=5))
        columns = [Column(draw(st.text(max_size=5)), *kind) for kind in kinds]
        rows = draw(st.lists(st.tuples(*(st.none() | _VALUES[kind] for kind in kinds)), max_size=5 if kinds else 0))
        error = draw(st.sampled_from([0, 0, 0, 1205, 1969, 1146, 1053]))
        results.append(Result(columns, rows, error))
    return results


@given(some_results(), st.lists(st.integers(0, 1 << 20), max_size=8), st.integers(0, 600))
@example([Result([Column("a", FIELD_TYPE.LONGLONG, _BINARY)], [(b"1",)] * 300)], [], 0)
def test_answers_are_read_as_the_driver_reads_them(results: list[Result], cuts: list[int], missing: int) -> None:
    data = encode(results)
    agree(data, cuts)
    agree(data[: max(0, len(data) - missing - 1)], cuts)


@given(some_results(), st.integers(0, 1 << 20), st.integers(0, 255))
def test_a_packet_out_of_order_is_a_lost_connection_to_both(results: list[Result], where: int, number: int) -> None:
    data = bytearray(encode(results))
    headers, at = [], 0
    while at < len(data):
        headers.append(at)
        at += 4 + int.from_bytes(data[at : at + 3], "little")
    place = headers[1 + where % (len(headers) - 1)] if len(headers) > 1 else -1
    if place < 0 or data[place + 3] == number:
        return
    data[place + 3] = number
    ours, theirs = read_by_us(bytes(data), ()), asyncio.run(read_by_driver(bytes(data)))
    assert ours[0] == theirs[0]
    assert ours[1] is not None
    assert theirs[1] is not None
    assert type(translate(ours[1], "one", locking=False)) is type(translate(theirs[1], "one", locking=False))


@pytest.mark.parametrize("size", [0xFFFFFF - 5, 0xFFFFFF - 4, 0xFFFFFF + 1, 2 * 0xFFFFFF - 9, 2 * 0xFFFFFF])
def test_a_row_in_several_packets_is_one(size: int) -> None:
    """The sizes are around those at which a packet is full, and an empty one says that it was the last."""
    columns = [Column("n", FIELD_TYPE.LONGLONG, _BINARY), Column("data", FIELD_TYPE.BLOB, _BINARY)]
    large = bytes(range(256)) * (size // 256) + bytes(size % 256)
    rows = [(b"1", b"small"), (b"2", large), (b"3", b"small")]
    results, _ = agree(encode([Result(columns, rows)]), [200, 70_000, 0xFFFFFF, 0xFFFFFF + 100, size + 150])
    assert [row[0] for row in results[0][1]] == [1, 2, 3]


def test_an_answer_to_a_command_of_several_packets_counts_on() -> None:
    answer = [Result([Column("n", FIELD_TYPE.LONGLONG, _BINARY)], [(b"7",)])]
    assert read_by_us(encode(answer, first_number=3), ()) == ([(("n",), [(7,)])], None)


@given(st.integers(1, 300), st.lists(st.integers(0, 1 << 20), max_size=4))
def test_only_the_number_of_known_columns_is_checked(count: int, cuts: list[int]) -> None:
    """The packets of columns name the schema: with hundreds of shards hardly any would be recognised by its bytes."""
    expected = Columns(("n",) * count, (int,) * count)
    column = Column("tao_00001", FIELD_TYPE.VAR_STRING, _UTF8)
    answer = [Result([column] * count, [(b"7",) * count])]
    assert read_by_us(encode(answer), cuts, expected) == ([(expected.names, [(7,) * count])], None)
    _, error = read_by_us(encode([Result([column] * (count + 1), [])]), cuts, expected)
    assert error is not None
    assert type(translate(error, "one", locking=False)) is ConnectionLost


def test_an_unsolicited_packet_of_the_server_is_not_taken_for_an_answer() -> None:
    reader = ResultReader("utf8", decoders)
    reader.feed(encode([Result([], [])]))
    with pytest.raises(pymysql.err.InternalError):
        reader.begin()


_NO_ROWS: Final = encode([Result([Column("n", FIELD_TYPE.LONGLONG, _BINARY)], [])])


@pytest.mark.parametrize(
    "data",
    [b"\x05\x00\x00\x01\xfbfile", b"\x00\x00\x00\x01", _NO_ROWS.replace(b"\xfe\x00\x00", b"\x01\x00\x00", 1)],
    ids=["a file of this machine is asked for", "nothing", "columns without an end"],
)
def test_bytes_outside_the_protocol_are_a_lost_connection(data: bytes) -> None:
    error = read_by_us(data, ())[1]
    assert error is not None
    assert type(translate(error, "one", locking=False)) is ConnectionLost


def test_the_driver_asks_for_ends_of_columns_which_are_read_here() -> None:
    """Without this capability a result has an end after its columns, and one after its rows."""
    assert not CLIENT.CAPABILITIES & CLIENT.DEPRECATE_EOF


def fed(data: bytes, cuts: Sequence[int]) -> Iterator[ResultReader]:
    """Yield a reader each time that more of an answer has arrived."""
    reader = ResultReader("utf8", decoders)
    reader.begin()
    for start, stop in pairwise(sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})):
        reader.feed(data[start:stop])
        yield reader


@given(st.lists(st.tuples(st.binary(), st.none() | _WIDE)), st.lists(st.integers(0, 1 << 20), max_size=8))
def test_packed_rows_are_what_the_server_has_packed(rows: list[tuple[bytes, bytes | None]], cuts: list[int]) -> None:
    columns = [Column("a", FIELD_TYPE.BLOB, _BINARY), Column("b", FIELD_TYPE.BLOB, _BINARY)]
    packed: list[bytes] = []
    has_begun = is_at_end = False
    for reader in fed(encode([Result(columns, rows)]), cuts):
        has_begun = has_begun or reader.read_head() is True
        while has_begun and not is_at_end:
            some: list[bytes] = []
            state = reader.read_packed(some, _LIMIT)
            packed += some
            is_at_end = state is True
            if state is None:
                break
    assert is_at_end
    assert packed == [b"".join(map(_text, row)) for row in rows]


@given(st.integers(0, 1 << 32 - 1), st.integers(0, 300), st.lists(st.integers(0, 1 << 20), max_size=8))
def test_a_prepared_statement_is_known_by_its_number_once_its_parameters_are_read(
    statement: int, parameters: int, cuts: list[int]
) -> None:
    head = b"\0" + statement.to_bytes(4, "little") + b"\0\0" + parameters.to_bytes(2, "little") + b"\0\0\0"
    described = [b"".join(map(_text, (b"def", b"", b"", b"", b"?", b""))) + b"\x0c" + bytes(12)] * parameters
    payloads = [head, *described, *([b"\xfe\0\0\2\0"] if parameters else [])]
    packets = [
        len(each).to_bytes(3, "little") + bytes([number & 0xFF]) + each for number, each in enumerate(payloads, start=1)
    ]
    numbers = [reader.read_prepared() for reader in fed(b"".join(packets), cuts)]
    assert numbers == [None] * (len(numbers) - 1) + [statement]


def _change(kind: int, content: bytes) -> bytes:
    return bytes([kind]) + _text(content)


_VARIABLE, _SCHEMA, _GTIDS = 0, 1, 3
_CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just(_SCHEMA), st.binary(max_size=300).map(_text)),
        st.tuples(st.just(_VARIABLE), st.just(_text(b"autocommit") + _text(b"OFF"))),
        st.tuples(st.integers(4, 9), st.binary(max_size=40)),
    ),
    max_size=4,
)


def _of_mariadb(gtid: bytes) -> tuple[int, bytes]:
    return _VARIABLE, b"".join(map(_text, (b"autocommit", b"OFF", LAST_GTID.encode(), gtid)))


def _of_mysql(gtid: bytes) -> tuple[int, bytes]:
    return _GTIDS, b"\0" + _text(gtid)


def _answer(info: bytes, changes: bytes | None, number: int, has_next: bool = False) -> bytes:
    """Return the packet of a result without rows."""
    status = _AUTOCOMMIT | (_MORE_RESULTS if has_next else 0) | (0 if changes is None else 0x4000)
    payload = b"\x00" + _length(300) + _length(70_000) + status.to_bytes(2, "little") + b"\0\0" + _text(info)
    payload += b"" if changes is None else _text(changes)
    return len(payload).to_bytes(3, "little") + bytes([number]) + payload


@given(
    st.sampled_from([_of_mariadb, _of_mysql]), st.sampled_from([b"0-1-77", b"3e11fa47-71ca-11e1-9e33-c80aa9429562:5"]),
    _CHANGES, _CHANGES, st.binary(max_size=300), st.lists(st.integers(0, 1 << 20), max_size=4),
)  # fmt: skip
def test_the_answer_to_a_commit_names_its_gtid_among_other_changes(
    form: Callable[[bytes], tuple[int, bytes]],
    gtid: bytes,
    before: list[tuple[int, bytes]],
    after: list[tuple[int, bytes]],
    info: bytes,
    cuts: list[int],
) -> None:
    changes = b"".join(_change(*each) for each in (*before, form(gtid), *after))
    data = _answer(info, None, 1, has_next=True) + _answer(info, changes, 2)
    heads = 0
    for reader in fed(data, cuts):
        while heads < 2 and reader.read_head() is not None:
            heads += 1
    assert heads == 2
    assert reader.committed_gtid == gtid.decode()
    assert not reader.has_next
    reader.begin()
    assert reader.committed_gtid == "", "the next command has committed nothing"


@given(_CHANGES, st.binary(max_size=300), st.data())
def test_torn_changes_of_a_session_name_no_gtid(
    changes: list[tuple[int, bytes]], info: bytes, data: st.DataObject
) -> None:
    whole = b"".join(_change(*each) for each in (*changes, _of_mysql(b"0-1-77")))
    answer = _answer(info, whole[: data.draw(st.integers(0, len(whole) - 1))], 1)
    for reader in fed(answer, ()):
        with suppress(pymysql.err.InternalError):  # the connection is lost then, see the test above
            reader.read_head()
        assert reader.committed_gtid == ""
