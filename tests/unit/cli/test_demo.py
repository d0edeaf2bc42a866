"""`tao demo --json` prints JSON and nothing else, as every command does; the text is then on standard error."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tao.cli.commands import tao
from tao.demonstration import chapters
from tao.demonstration.narration import DemonstrationFailed, Figures, say


@pytest.fixture
def demonstrated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def demonstrate(_: object) -> Figures:
        say("A cache for a social graph.")
        return {"seconds": 3.2}

    monkeypatch.setattr(chapters, "demonstrate", demonstrate)


@pytest.mark.usefixtures("demonstrated")
@pytest.mark.parametrize("argv", [["demo", "--json"], ["--json", "demo"]])
def test_the_figures_are_all_of_the_output_with_json(argv: list[str]) -> None:
    result = CliRunner().invoke(tao, argv)
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"seconds": 3.2})
    assert result.stderr.splitlines()[0] == "A cache for a social graph."
    assert result.stderr.splitlines()[-1] == "demo: ok"


@pytest.mark.usefixtures("demonstrated")
def test_the_text_is_the_output_without_json() -> None:
    result = CliRunner().invoke(tao, ["demo"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0] == "A cache for a social graph."
    assert result.stdout.splitlines()[-1] == "demo: ok"


def test_a_check_that_fails_leaves_the_output_empty_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    async def demonstrate(_: object) -> Figures:
        raise DemonstrationFailed("an edge is missing")

    monkeypatch.setattr(chapters, "demonstrate", demonstrate)
    result = CliRunner().invoke(tao, ["demo", "--json"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "tao: DEMONSTRATION_FAILED: an edge is missing\n"
