"""The file of rejected lines."""

from __future__ import annotations

from pathlib import Path

from tao.cli.loading.csv_source import CsvSource, Place, Record
from tao.cli.loading.rejects import RejectFile

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


def test_what_a_cut_run_wrote_beyond_its_progress_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.rejected.csv"
    first = RejectFile(path, COLUMNS)
    first.add([(Record(2, END, ["1", "a"]), "why")])
    noted = first.size
    first.add([(Record(3, END, ["2", "b"]), "why")])
    resumed = RejectFile(path, COLUMNS, size=noted)
    resumed.add([(Record(3, END, ["2", "b"]), "again")])
    assert path.read_text().splitlines() == ["line,reason,id,name", "2,why,1,a", "3,again,2,b"]


def test_bytes_that_are_no_text_come_out_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "x.rejected.csv"
    RejectFile(path, COLUMNS).add([(Record(2, END, ["1", b"\xff".decode(errors="surrogateescape")]), "is not UTF-8")])
    assert b"1,\xff\n" in path.read_bytes()
