"""The position on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.model.errors import OperatorError
from tao.tailer.checkpoint import Checkpoint


def test_a_position_is_found_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "state", "db1-east")
    assert checkpoint.load() is None
    checkpoint.store("0-1-7", 1)
    checkpoint.store("0-1-8", 2)
    assert Checkpoint(tmp_path / "state", "db1-east").load() == "0-1-8"
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["db1-east.position.json"]


def test_an_empty_position_is_a_position(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "a")
    checkpoint.store("", 1)
    assert checkpoint.load() == ""


@pytest.mark.parametrize(
    "text", ["", "{", '{"server": "b", "position": "0-1-7", "written_unix_ms": 1}', '{"server": 1}']
)
def test_a_file_that_is_broken_or_anothers_is_no_position(tmp_path: Path, text: str) -> None:
    checkpoint = Checkpoint(tmp_path, "a")
    checkpoint.path.write_text(text)
    assert checkpoint.load() is None


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match="cannot be stored"):
        Checkpoint(tmp_path / "file", "a").store("0-1-7", 1)
    Checkpoint(tmp_path, "b").path.mkdir()
    with pytest.raises(OperatorError, match="cannot be read"):
        Checkpoint(tmp_path, "b").load()
    with pytest.raises(OperatorError, match="cannot be stored"):
        Checkpoint(tmp_path, "b").store("0-1-7", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.position.json", "file"]
