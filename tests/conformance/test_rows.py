"""Both parsers of result rows, compiled and in Python, make the same of the same bytes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, Final

import pymysql.err
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tao.storage.rows_python import Decoder, Row
from tao.storage.rows_python import parse_rows as specified

COMPILED: Final = "tao.storage.rows_core"
needs_compiled = pytest.mark.skipif(importlib.util.find_spec(COMPILED) is None, reason="no compiled core here")

ParseRows = Callable[[bytes, int, int, list[Row], int, tuple[Decoder | None, ...]], tuple[int, int]]
_DECODERS: Final[tuple[Decoder | None, ...]] = (int, None, methodcaller("decode", "utf-8"))
_MORE_THAN_ALL: Final = 1_000
_WHOLE: Final = 0xFFFFFF


@pytest.fixture(params=["tao.storage.rows_python", pytest.param(COMPILED, marks=needs_compiled)])
def parse_rows(request: pytest.FixtureRequest) -> ParseRows:
    parse: ParseRows = importlib.import_module(request.param).parse_rows
    return parse


def value(content: bytes | None) -> bytes:
    """Return a value as a row contains it."""
    if content is None:
        return b"\xfb"
    for first, width, below in ((b"", 1, 251), (b"\xfc", 2, 1 << 16), (b"\xfd", 3, 1 << 24)):
        if len(content) < below:
            return first + len(content).to_bytes(width, "little") + content
    return b"\xfe" + len(content).to_bytes(8, "little") + content


def packet(number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "little") + bytes([number & 0xFF]) + payload


def packets(rows: Sequence[Sequence[bytes | None]], first: int = 1) -> bytes:
    return b"".join(packet(first + index, b"".join(map(value, row))) for index, row in enumerate(rows))


def outcome(parse: ParseRows, data: bytes, number: int, limit: int, decoders: tuple[Decoder | None, ...]) -> Any:
    """Return all that a caller learns of a call: `Any`, as rows are."""
    rows: list[Row] = []
    try:
        return parse(data, 0, number, rows, limit, decoders), rows
    except (pymysql.err.InternalError, ValueError) as error:
        return type(error), str(error), rows


def test_rows_up_to_the_end_of_the_result_are_decoded(parse_rows: ParseRows) -> None:
    rows: list[Row] = [(0, b"", "")]
    end = packet(4, b"\xfe\x00\x00\x02\x00")
    data = packets([(b"7", b"\x00\xff", b"\xc3\xa4"), (b"-12", None, None), (None, bytes(300), bytes(70_000))])
    assert parse_rows(data + end, 0, 0, rows, _MORE_THAN_ALL, _DECODERS) == (len(data), 3)
    assert rows == [(0, b"", ""), (7, b"\x00\xff", "ä"), (-12, None, None), (None, bytes(300), "\0" * 70_000)]


@pytest.mark.parametrize("number", [0, 1, 2**63 - 1, -(2**63), 2**64 - 1, 10**30, 999_999_999_999_999_999])
def test_numbers_of_any_size_are_decoded(parse_rows: ParseRows, number: int) -> None:
    rows: list[Row] = []
    parse_rows(packets([(str(number).encode(),)]), 0, 0, rows, _MORE_THAN_ALL, (int,))
    assert rows == [(number,)]


def test_parsing_stops_at_the_limit_and_goes_on_there(parse_rows: ParseRows) -> None:
    rows: list[Row] = []
    data = packets([(str(number).encode(),) for number in range(10)], first=250)
    at, number = parse_rows(data, 0, 249, rows, 6, (int,))
    assert (len(rows), number) == (6, 255)
    assert parse_rows(data, at, number, rows, _MORE_THAN_ALL, (int,)) == (len(data), 3)
    assert rows == [(number,) for number in range(10)]


@pytest.mark.parametrize(
    "following",
    [
        packet(3, b"\x011"),  # out of order
        packet(2, b""),
        packet(2, b"\xff\x00\x00#HY000refused"),
        packet(2, b"\xfe" + bytes(8)),
        _WHOLE.to_bytes(3, "little") + b"\x02" + bytes(_WHOLE),
    ],
)
def test_parsing_stops_before_what_is_no_whole_row(parse_rows: ParseRows, following: bytes) -> None:
    rows: list[Row] = []
    data = packets([(b"1",)])
    assert parse_rows(data + following, 0, 0, rows, _MORE_THAN_ALL, (int,)) == (len(data), 1)
    assert rows == [(1,)]


@pytest.mark.parametrize(
    "payload", [b"\x021", b"\x0112", b"\xfc\x01", b"\xfd\x01\x00", b"\xfe" + b"\xff" * 8, b"\xff1", b"\x011\x01"]
)
def test_a_row_that_does_not_end_with_its_packet_is_a_fault(parse_rows: ParseRows, payload: bytes) -> None:
    data = packet(1, b"\x011" + payload) + bytes(600)
    with pytest.raises(pymysql.err.InternalError, match="does not end with its packet"):
        parse_rows(data, 0, 0, [], _MORE_THAN_ALL, (int, None))


_VALUES: Final = st.one_of(
    st.none(), st.integers(-(2**65), 2**65).map(lambda number: str(number).encode()), st.binary(max_size=300)
)


@needs_compiled
@given(
    st.lists(st.lists(_VALUES, min_size=1, max_size=4), max_size=6),
    st.integers(0, 255),
    st.integers(0, 8),
    st.lists(st.sampled_from(_DECODERS), min_size=1, max_size=4).map(tuple),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=2),
    st.integers(0, 10_000),
)
@example([[b" 12_3 "]], 0, 8, (int,), [], 10_000)
@example([[b"-"]], 0, 8, (int,), [], 10_000)
def test_both_parsers_agree_on_any_bytes(
    rows: list[list[bytes | None]],
    number: int,
    limit: int,
    decoders: tuple[Decoder | None, ...],
    damage: list[tuple[int, int]],
    arrived: int,
) -> None:
    data = bytearray(packets(rows, number + 1))
    for place, byte in damage:
        if data:
            data[place % len(data)] = byte
    compiled = importlib.import_module(COMPILED).parse_rows
    seen = bytes(data[:arrived])
    assert outcome(compiled, seen, number, limit, decoders) == outcome(specified, seen, number, limit, decoders)


_OK: Final = b"\x00\x01\xfc\x00\x01\x0a\x00\x00\x00"
"""A result without rows: one row affected, last id 256, and another result follows."""


def core(name: str) -> Any:
    """Return both implementations of a function, where there are two: `Any`, as they differ in type."""
    names = ["tao.storage.rows_python", *([COMPILED] if importlib.util.find_spec(COMPILED) else [])]
    return [getattr(importlib.import_module(each), name) for each in names]


@pytest.mark.parametrize("parse_done", core("parse_done"))
def test_a_result_without_rows_says_what_follows(parse_done: Callable[[bytes, int, int], Any]) -> None:
    data = b"x" + packet(9, _OK) + packet(10, b"\x00\x00\x00\x02\x00")
    assert parse_done(data, 1, 8) == (1 + 4 + len(_OK), 9, True)
    assert parse_done(data, 1 + 4 + len(_OK), 9) == (len(data), 10, False)
    assert parse_done(packet(1, _OK), 0, -1) == (4 + len(_OK), 1, True)


@pytest.mark.parametrize("parse_done", core("parse_done"))
@pytest.mark.parametrize(
    "data",
    [
        packet(3, _OK),
        packet(2, b"\x01"),
        packet(2, b""),
        packet(2, b"\x00\xff\x00\x00\x00"),
        packet(2, b"\x00\x00\x00"),
    ],
)
def test_what_is_no_whole_result_without_rows_is_left(
    parse_done: Callable[[bytes, int, int], Any], data: bytes
) -> None:
    assert parse_done(data, 0, 1) is None
    assert all(parse_done(packet(2, _OK)[:end], 0, 1) is None for end in range(4 + len(_OK)))


@needs_compiled
@given(st.binary(max_size=12), st.integers(-1, 256), st.integers(0, 3), st.integers(0, 60))
def test_both_agree_on_columns_and_ends(content: bytes, number: int, count: int, arrived: int) -> None:
    columns = packet(number + 1, content) + packet(number + 2, content) + packet(number + 3, _OK)
    for data in (columns[:arrived], packet(number + 1, b"\x00" + content)[:arrived]):
        of_python, of_core = core("parse_done")
        assert of_core(data, 0, number) == of_python(data, 0, number)
        of_python, of_core = core("skip_columns")
        assert of_core(data, 0, number, count) == of_python(data, 0, number, count)


_END: Final = b"\xfe\x00\x00\x02\x00"
_MORE: Final = b"\xfe\x00\x00\x0a\x00"

ParseResult = Callable[[bytes, int, int, list[Row], int, tuple[Decoder | None, ...]], tuple[int, int, bool] | None]


def result(rows: int, first: int = 1, end: bytes = _END) -> bytes:
    """Return a whole result of two columns."""
    parts = [b"\x02", b"\x03def", b"\x03def", b"\xfe\x00\x00\x22\x00", *[b"\x015\x01a"] * rows, end]
    return b"".join(packet(first + index, part) for index, part in enumerate(parts))


@pytest.mark.parametrize("parse_result", core("parse_result"))
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_a_whole_result_is_parsed_in_one_go(parse_result: ParseResult, rows: int) -> None:
    found: list[Row] = [()]
    data = b"x" + result(rows) + result(1)
    last = (rows + 5) & 0xFF
    assert parse_result(data, 1, -1, found, rows, (int, None)) == (1 + len(result(rows)), last, False)
    assert found == [(), *[(5, b"a")] * rows]
    data = result(rows, first=251, end=_MORE)
    assert parse_result(data, 0, 250, [], rows, (int, None)) == (len(data), (rows + 255) & 0xFF, True)


@pytest.mark.parametrize("parse_result", core("parse_result"))
@pytest.mark.parametrize(
    "data",
    [
        *(result(2)[:end] for end in range(len(result(2)))),
        result(3),
        result(2, end=b"\xff\x00\x00\x02\x00"),
        result(2, end=_END + bytes(4)),
        result(2, first=2),
        packet(1, b"\x01") + result(2)[5:],
        packet(1, b"\x02\x00") + result(2)[5:],
        packet(1, b"\x00\x00\x00\x02\x00"),
    ],
)
def test_what_is_no_whole_result_is_left(parse_result: ParseResult, data: bytes) -> None:
    found: list[Row] = []
    assert parse_result(data, 0, -1, found, 2, (int, None)) is None
    assert not found


@needs_compiled
@given(st.lists(st.tuples(st.integers(0, len(result(2)) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 3))
def test_both_agree_on_results_of_any_bytes(changes: list[tuple[int, int]], limit: int) -> None:
    data = bytearray(result(2))
    for place, byte in changes:
        data[place] = byte
    of_python, of_core = core("parse_result")
    # From the number before the first packet, which `outcome` cannot give.
    assert outcome(partial(after_nothing, of_core), bytes(data), 0, limit, (int, None)) == outcome(
        partial(after_nothing, of_python), bytes(data), 0, limit, (int, None)
    )


def after_nothing(parse: ParseResult, data: bytes, at: int, _: int, *rest: Any) -> Any:
    return parse(data, at, -1, *rest)


_CHANGED: Final = b"\x00\x01\x00\x02\x40\x00\x00\x00\x00"
"""A result without rows, the last one, which names changes of the session's state."""

ParseResults = Callable[
    [bytes, int, int, list[list[Row]], tuple[Decoder | None, ...]], tuple[int, int, bool, list[tuple[int, int]]]
]


@pytest.mark.parametrize("parse_results", core("parse_results"))
def test_all_results_of_an_answer_are_parsed_in_one_go(parse_results: ParseResults) -> None:
    found: list[list[Row]] = [[()]]
    rows = result(2, first=2, end=_MORE)
    data = b"x" + packet(1, _OK) + rows + packet(9, _OK) + packet(10, _CHANGED)
    changed = len(data) - len(_CHANGED), len(data)
    assert parse_results(data, 1, -1, found, (int, None)) == (len(data), 10, False, [changed])
    assert found == [[()], [], [(5, b"a")] * 2, [], []]


@pytest.mark.parametrize("parse_results", core("parse_results"))
@pytest.mark.parametrize(
    "rest",
    [
        *(result(2, first=2)[:end] for end in range(len(result(2)))),
        result(2, first=3),
        result(2, first=2, end=b"\xff\x00\x00\x02\x00"),
        packet(2, b"\xff\x00\x00refused"),
        packet(2, b"\x03") + result(2, first=3),
    ],
)
def test_results_are_parsed_up_to_the_first_that_is_not_whole(parse_results: ParseResults, rest: bytes) -> None:
    found: list[list[Row]] = []
    first = packet(1, _OK)
    assert parse_results(first + rest, 0, -1, found, (int, None)) == (len(first), 1, True, [])
    assert found == [[]]


@needs_compiled
@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 255)), max_size=4), st.integers(0, 90))
def test_both_agree_on_answers_of_any_bytes(damage: list[tuple[int, int]], arrived: int) -> None:
    data = bytearray(packet(1, _OK) + result(2, first=2, end=_MORE) + packet(9, _CHANGED))
    for place, byte in damage:
        data[place % len(data)] = byte
    seen = bytes(data[:arrived])

    def parsed(parse: ParseResults) -> Any:
        found: list[list[Row]] = []
        try:
            return parse(seen, 0, -1, found, (int, None)), found
        except (pymysql.err.InternalError, ValueError) as error:
            return type(error), str(error), found

    of_python, of_core = core("parse_results")
    assert parsed(of_core) == parsed(of_python)
