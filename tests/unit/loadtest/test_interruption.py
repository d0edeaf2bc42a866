"""Signals end a run, and no signal ends its clean-up."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.__main__ import main
from loadtest.results import ScenarioResult
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.devcluster.processes import to_the_end

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_stops_a_run_and_those_after_it_leave_the_clean_up_alone(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    events: list[str] = []

    async def endless(settings: BenchSettings, progress: Progress, options: object) -> ScenarioResult:
        (settings.work_dir / "data").touch()
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            for again in SIGNALS:
                os.kill(os.getpid(), again)
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            events.append("cleaned up")
        raise AssertionError("not stopped")

    async def never(settings: BenchSettings, progress: Progress, options: object) -> ScenarioResult:
        raise AssertionError("the run was over")

    both = [Scenario(name="first", summary="", run=endless), Scenario(name="second", summary="", run=never)]
    monkeypatch.setattr("loadtest.__main__.bench_scenarios", lambda: {each.name: each for each in both})
    before = [signal.getsignal(each) for each in SIGNALS]
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup
        signal.signal(number, signal.SIG_DFL)
    try:
        outcome = CliRunner().invoke(main, ["bench"])
        afterwards = [signal.getsignal(each) for each in SIGNALS]
    finally:
        for each, handler in zip(SIGNALS, before, strict=True):
            signal.signal(each, handler)
    assert outcome.exit_code == 130, outcome.output
    assert events == ["cleaned up"]
    assert list(tmp_path.iterdir()) == []
    assert afterwards == [signal.SIG_IGN] * len(SIGNALS)


async def test_what_ends_something_is_not_cut_short_and_who_was_cancelled_hears_of_it_afterwards() -> None:
    may_end, ended = asyncio.Event(), False

    async def end() -> None:
        nonlocal ended
        await may_end.wait()
        ended = True

    task = asyncio.ensure_future(to_the_end(end()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_what_went_wrong_while_something_ended_is_raised() -> None:
    async def end() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await to_the_end(end())
