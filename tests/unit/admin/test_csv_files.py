"""CSV files are read with places to resume at, and a fault affects one record and not the file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tao.admin.load.csv_files import MAX_CELL_CHARACTERS, CsvSource, Place, Record, RejectFile
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
def test_reading_can_resume_behind_any_record(newline: bytes) -> None:
    content = newline.join([b"id,name", b"1,\xc3\xa9", b'2,"x"', b'3,"a', b'b"', b"4,d", b""])
    whole = read(content)
    for index, record in enumerate(whole):
        resumed = source_of(content)
        assert list(resumed.records(record.end)) == whole[index + 1 :]


def test_a_byte_order_mark_is_no_part_of_the_first_column() -> None:
    source = source_of(b"\xef\xbb\xbfid,name\n1,a\n")
    assert source.columns == ["id", "name"]
    assert [record.cells for record in source.records(source.start)] == [["1", "a"]]


def test_text_that_is_not_utf8_affects_only_its_record() -> None:
    records = read(b"id,name\n1,a\n2,\xff\xfe\n3,c\n")
    assert [record.fault for record in records] == ["", "is not UTF-8 text", ""]
    assert records[1].cells[1].encode(errors="surrogateescape") == b"\xff\xfe"


def test_a_record_of_another_width_is_a_fault() -> None:
    records = read(b"id,name\n1\n2,b,c\n3,c\n")
    assert [record.fault for record in records] == ["has 1 cell, the header 2", "has 3 cells, the header 2", ""]


def test_a_record_of_another_width_over_several_lines_asks_for_its_quote() -> None:
    (record,) = read(b'id,name,home\n1,"a,b\n2,c,d\n')
    assert record.fault.endswith("; a cell in quotes goes on for 2 lines: is a quote not closed?")


def test_a_quote_that_is_never_closed_ends_at_the_bound_of_a_cell() -> None:
    records = read(b'id,name\n1,"' + b"x\n" * (MAX_CELL_CHARACTERS // 2 + 10) + b"9,z\n")
    assert "is not CSV" in records[0].fault
    assert records[-1].cells == ["9", "z"]


def test_a_nul_byte_is_data() -> None:
    assert read(b"id,name\n1,a\x00b\n")[0].cells == ["1", "a\x00b"]


def test_a_file_without_a_header_is_refused() -> None:
    with pytest.raises(OperatorError, match="no header line that names its columns: it is empty"):
        source_of(b"")
    with pytest.raises(OperatorError, match=r"no header line .*: its first line is not UTF-8 text"):
        source_of(b"\x89PNG\n")


def test_a_duplicate_column_is_refused() -> None:
    with pytest.raises(OperatorError, match="'id' twice"):
        source_of(b"id,name,id\n")


def test_a_missing_column_is_refused_with_the_columns_there_are() -> None:
    with pytest.raises(OperatorError, match="it has id, name"):
        source_of(b"id,name\n").index_of("nmae")
    with pytest.raises(OperatorError, match="it has one column, 'id;name'; is --delimiter ',' right"):
        source_of(b"id;name\n").index_of("id")


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


COLUMNS = ["id", "name"]
END = Place(0, 0)


def test_a_load_without_rejected_lines_leaves_no_file_not_even_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x.rejected.csv"
    path.write_text("old")
    RejectFile(path, COLUMNS)
    assert not path.exists()


def test_the_file_can_be_loaded_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.rejected.csv"
    RejectFile(path, COLUMNS).add([(Record(7, END, ["1", "a,b"]), "no such type")])
    with path.open("rb") as file:
        source = CsvSource(file, "rejected")
        (record,) = source.records(source.start)
        assert source.columns == ["line", "reason", "id", "name"]
    assert record.cells == ["7", "no such type", "1", "a,b"]
    second = tmp_path / "y.rejected.csv"
    RejectFile(second, source.columns).add([(record, "still none")])
    assert second.read_text().splitlines() == ["line,reason,id,name", '2,still none,1,"a,b"']


def test_lines_that_an_interrupted_run_wrote_beyond_its_progress_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.rejected.csv"
    first = RejectFile(path, COLUMNS)
    first.add([(Record(2, END, ["1", "a"]), "why")])
    noted = first.size
    first.add([(Record(3, END, ["2", "b"]), "why")])
    resumed = RejectFile(path, COLUMNS, size=noted)
    resumed.add([(Record(3, END, ["2", "b"]), "again")])
    assert path.read_text().splitlines() == ["line,reason,id,name", "2,why,1,a", "3,again,2,b"]


def test_bytes_that_are_not_text_are_written_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "x.rejected.csv"
    RejectFile(path, COLUMNS).add([(Record(2, END, ["1", b"\xff".decode(errors="surrogateescape")]), "is not UTF-8")])
    assert b"1,\xff\n" in path.read_bytes()
