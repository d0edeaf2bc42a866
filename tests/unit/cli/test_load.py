"""`tao load` shows its progress on any kind of output, and says where it stopped and how to go on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from tao.admin.load.key_map import LoadProgress
from tao.admin.load.session import OnProgress
from tao.cli import load as load_module
from tao.cli.commands import tao
from tao.model.errors import Unavailable
from tao.terminal import LoadDisplay


def progress(lines: int, *, rejected: int = 0) -> LoadProgress:
    return LoadProgress(
        fingerprint="f", started_unix=1, offset=10 * lines, lines=lines, loaded=lines - 1 - rejected, rejected=rejected
    )


def run_with(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None], *reached: LoadProgress, file: str) -> Result:
    """Run a load that makes this progress, and then calls ``then`` and hangs."""

    async def loads(*arguments: object) -> NoReturn:
        on_progress: OnProgress = arguments[-1]  # type: ignore[assignment]
        for each in reached:
            on_progress(each, 0)
        then()
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    monkeypatch.setattr(load_module, "load_objects", loads)
    named = ["--name", "people", "--otype", "user", "--key", "id", "--connect", "127.0.0.1:1"]
    return CliRunner().invoke(tao, ["load", "objects", file, *named], catch_exceptions=False)


def test_nodes_have_no_fields_and_so_no_option_that_maps_a_column_to_one() -> None:
    nodes = ["load", "nodes", "nodes.csv", "--atype", "subscribes", "--key", "id"]
    result = CliRunner().invoke(tao, [*nodes, "--map", "why=name"])
    assert (result.exit_code, "No such option '--map'" in result.stderr) == (2, True)
    assert "--map" not in CliRunner().invoke(tao, [*nodes, "--help"]).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_load_with_the_place_and_the_way_on(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "people.csv").write_text("id\n")
    before = signal.getsignal(signal.SIGTERM)
    for file, reached, said in (
        ("people.csv", (), "interrupted before anything was loaded: repeat the same command"),
        (
            "people.csv",
            (progress(900), progress(1_201, rejected=3)),
            "interrupted after line 1,201 (1,197 loaded, 3 rejected): repeat the same command to continue from there",
        ),
        (
            "-",
            (progress(51),),
            (
                "interrupted after line 51 (50 loaded): repeat the same command with the whole input; what is loaded "
                "already stays as it is"
            ),
        ),
    ):
        path = file if file == "-" else str(tmp_path / file)
        result = run_with(monkeypatch, lambda: os.kill(os.getpid(), number), *reached, file=path)
        assert (result.exit_code, result.stderr) == (130, f"tao: {said}\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_load_that_fails_says_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("id\n")

    def fail() -> None:
        raise Unavailable("follower-1a is away")

    result = run_with(monkeypatch, fail, progress(51), file=str(tmp_path / "people.csv"))
    assert (result.exit_code, result.stderr) == (
        3,
        (
            "tao: UNAVAILABLE: follower-1a is away; the load stopped after line 51 (50 loaded): repeat the same "
            "command to continue from there when `tao status` names no server that does not answer\n"
        ),
    )


def test_without_a_terminal_a_line_now_and_then_shows_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("tao.terminal.time.monotonic", lambda: now)
    with LoadDisplay() as display:
        for seconds, lines, rejected in (
            (0.0, 0, 0),
            (2.0, 400, 0),
            (5.0, 1_001, 0),
            (14.9, 2_990, 1),
            (15.0, 3_001, 1),
        ):
            now = 100.0 + seconds
            display.show(progress(lines, rejected=rejected), 40_000)
        display.show(progress(4_000), 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "[  5.0 s] 1,001 lines, 25 %, 200/s\n[ 15.0 s] 3,001 lines, 1 rejected, 75 %, 200/s\n"
    assert display.progress == progress(4_000)
