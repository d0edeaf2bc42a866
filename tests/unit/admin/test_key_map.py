"""The key map keeps ids for good, keeps progress, and is open to one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.admin.load.key_map import KeyMap, LoadProgress
from tao.model.errors import OperatorError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pages.csv.keys.sqlite"


def test_ids_and_progress_survive_the_process(path: Path) -> None:
    progress = LoadProgress(fingerprint="f", started_unix=5, offset=10, lines=3, loaded=2, witness="1")
    with KeyMap(path) as keys:
        keys.note_ids("page", {"a": 1, "b": (1 << 63) - 1})
        keys.note_progress("objects pages.csv", progress)
    with KeyMap(path) as keys:
        assert keys.ids_of("page", ["a", "b", "c", "a"]) == {"a": 1, "b": (1 << 63) - 1}
        assert keys.progress("objects pages.csv") == progress
        assert keys.progress("edges pages.csv") is None


def test_equal_keys_of_different_types_have_different_ids(path: Path) -> None:
    with KeyMap(path) as keys:
        keys.note_ids("page", {"7": 1})
        keys.note_ids("user", {"7": 2})
        assert keys.ids_of("page", ["7"]) == {"7": 1}
        assert keys.otypes() == ["page", "user"]
        assert keys.keys_of([1, 2, 3]) == {1: "7", 2: "7"}


def test_more_keys_than_a_statement_takes_are_looked_up_in_parts(path: Path) -> None:
    ids = {f"k{number}": number + 1 for number in range(2345)}
    with KeyMap(path) as keys:
        keys.note_ids("page", ids)
        assert keys.ids_of("page", ids) == ids


def test_two_loads_with_one_map_at_once_are_refused(path: Path) -> None:
    with KeyMap(path), pytest.raises(OperatorError, match="in use by another load"):
        KeyMap(path)


def test_a_file_that_is_no_map_is_refused(path: Path) -> None:
    path.write_bytes(b"id,name\n" * 1000)
    with pytest.raises(OperatorError, match="is not a key map"):
        KeyMap(path)


def test_the_error_for_a_missing_map_says_how_to_make_one(path: Path) -> None:
    with pytest.raises(OperatorError, match="load the objects first"):
        KeyMap(path, must_exist=True)
