"""Settings files become frozen dataclasses, or one readable error."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tao.model.errors import SettingsError
from tao.model.settings import renamed
from tao.runtime.settings import load_settings, parse_settings


@dataclass(frozen=True, slots=True)
class Inner:
    port: int = 1
    paths: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    seconds: float = 2.0
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError("seconds must be above 0")


def load(tmp_path: Path, text: str) -> Outer:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return load_settings(path, Outer)


def test_what_the_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    assert load(tmp_path, "name: a\ninner: {port: 7, paths: [/x]}") == Outer("a", 2.0, Inner(7, (Path("/x"),)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"server.yaml: name: .*required"),
        ("name: a\nsecond: 3", r"server.yaml: second: there is no such setting; there are inner, name, seconds"),
        ("name: a\ninner: {prt: 3}", r"server.yaml: inner.prt: there is no such setting"),
        ("name: a\ninner: {port: many}", r"server.yaml: inner.port: .*integer"),
        ("name: a\nseconds: 0", r"seconds must be above 0"),
        ("- a", r"server\.yaml: must be settings with their names"),
        ("a: [", r"server\.yaml:1: not valid YAML: expected the node content"),
        ("a: 1\nb: 2: 3", r"server\.yaml:2: not valid YAML: mapping values are not allowed here$"),
        ("a: \x07", r"server\.yaml: not valid YAML: special characters are not allowed at position 3$"),
        ("name: a\nodd: 1\nseconds: x", r"(?s)odd: .*seconds: "),
    ],
)
def test_a_fault_is_named_with_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load(tmp_path, text)


def test_a_file_that_is_not_there_or_not_settings_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.yaml: cannot be read"):
        load_settings(tmp_path / "nothing.yaml", Outer)
    with pytest.raises(SettingsError, match="is it the right file"):
        load(tmp_path, "#" * ((1 << 20) + 1))


@dataclass(frozen=True)
class Renamed:
    """Settings of which two had another name before."""

    pause_detection: Inner = renamed(Inner(), formerly="stalls")
    max_fetches: int = renamed(8, formerly="max_flights")


def test_a_former_name_of_a_setting_still_works_and_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_settings({"stalls": {"port": 2}}, Renamed, "leader.yaml") == Renamed(Inner(port=2))
    warning = (
        "warning: leader.yaml: stalls is now called pause_detection; the former name works until the next release\n"
    )
    assert capsys.readouterr().err == warning
    assert parse_settings({"max_flights": 3}, Renamed, "leader.yaml") == Renamed(max_fetches=3)
    assert "max_flights is now called max_fetches" in capsys.readouterr().err


def test_a_setting_given_by_both_its_names_is_refused() -> None:
    with pytest.raises(SettingsError, match="stalls: there is no such setting; there are max_fetches, pause_detection"):
        parse_settings({"stalls": {}, "pause_detection": {}}, Renamed, "leader.yaml")
