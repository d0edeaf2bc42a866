"""Reading CSV: places to resume at, faults that cost one record and not the file."""

from __future__ import annotations

import io

import pytest

from tao.cli.loading.csv_source import MAX_CELL_CHARACTERS, CsvSource, Record
from tao.model.errors import OperatorError


def source_of(content: bytes, **options: object) -> CsvSource:
    return CsvSource(io.BytesIO(content), "pages.csv", size=len(content), **options)  # type: ignore[arg-type]


def read(content: bytes) -> list[Record]:
    source = source_of(content)
    return list(source.records(source.start))


def test_records_carry_the_line_where_they_begin() -> None:
    records = read(b'id,name\n1,a\n2,"two\nlines"\n\n3,c\n')
    assert [(record.line, record.cells) for record in records] == [
        (2, ["1", "a"]),
        (3, ["2", "two\nlines"]),
        (6, ["3", "c"]),
    ]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_reading_can_go_on_behind_any_record(newline: bytes) -> None:
    content = newline.join([b"id,name", b"1,\xc3\xa9", b'2,"x"', b'3,"a', b'b"', b"4,d", b""])
    whole = read(content)
    for index, record in enumerate(whole):
        resumed = source_of(content)
        assert list(resumed.records(record.end)) == whole[index + 1 :]


def test_a_byte_order_mark_is_no_part_of_the_first_column() -> None:
    source = source_of(b"\xef\xbb\xbfid,name\n1,a\n")
    assert source.columns == ["id", "name"]
    assert [record.cells for record in source.records(source.start)] == [["1", "a"]]


def test_what_is_not_utf8_costs_its_record_alone() -> None:
    records = read(b"id,name\n1,a\n2,\xff\xfe\n3,c\n")
    assert [record.fault for record in records] == ["", "is not UTF-8 text", ""]
    assert records[1].cells[1].encode(errors="surrogateescape") == b"\xff\xfe"


def test_a_record_of_another_width_is_a_fault() -> None:
    records = read(b"id,name\n1\n2,b,c\n3,c\n")
    assert [bool(record.fault) for record in records] == [True, True, False]


def test_a_quote_that_is_never_closed_ends_at_the_bound_of_a_cell() -> None:
    records = read(b'id,name\n1,"' + b"x\n" * (MAX_CELL_CHARACTERS // 2 + 10) + b"9,z\n")
    assert "is no CSV" in records[0].fault
    assert records[-1].cells == ["9", "z"]


def test_a_nul_byte_is_data() -> None:
    assert read(b"id,name\n1,a\x00b\n")[0].cells == ["1", "a\x00b"]


def test_a_file_without_a_header_is_refused() -> None:
    with pytest.raises(OperatorError, match="no header"):
        source_of(b"")


def test_a_column_that_stands_twice_is_refused() -> None:
    with pytest.raises(OperatorError, match="'id' twice"):
        source_of(b"id,name,id\n")


def test_a_column_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(OperatorError, match="it has id, name"):
        source_of(b"id,name\n").index_of("nmae")


def test_the_fingerprint_changes_with_content_time_and_options() -> None:
    prints = {
        source_of(b"id\n1\n").fingerprint(1, {"otype": "page"}),
        source_of(b"id\n2\n").fingerprint(1, {"otype": "page"}),
        source_of(b"id\n1\n").fingerprint(2, {"otype": "page"}),
        source_of(b"id\n1\n").fingerprint(1, {"otype": "user"}),
    }
    assert len(prints) == 4
    again = source_of(b"id\n1\n")
    assert again.fingerprint(1, {"otype": "page"}) in prints
    assert [record.cells for record in again.records(again.start)] == [["1"]]
