"""The frame of commands asks for confirmation and ends with the documented exit statuses."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tao.cli.dev import at_first_signal
from tao.cli.frame import TaoGroup, ask, interrupt_quietly, run
from tao.cli.options import yes_option
from tao.model.errors import error_from_reason
from tao.terminal import Counting
from tests.rigs.pacing import PATIENT_SECONDS


@click.group(cls=TaoGroup)
def program() -> None:
    """A program of one command that asks."""


@program.command()
@yes_option
def change() -> None:
    """Ask, and say that it was done."""
    ask("Change it?")
    click.echo("done")


@program.command()
@click.argument("reason")
def request(reason: str) -> None:
    """A request that fails for that reason."""

    async def work() -> None:
        logging.getLogger("tao.wire.links").warning("follower-1a cannot be reached")
        raise error_from_reason(reason, "what happened")

    run(work())


@program.command()
def stop() -> None:
    """Work that Ctrl-C ends halfway."""

    async def work() -> None:
        raise KeyboardInterrupt

    run(work(), if_interrupted="repeat the command")


def test_ctrl_c_in_the_middle_says_what_to_do_with_what_is_half_done() -> None:
    result = CliRunner().invoke(program, ["stop"])
    assert (result.exit_code, result.stderr) == (130, "\ntao: interrupted; repeat the command\n")


async def _work_of_connections() -> None:
    """Say when a Ctrl-C is awaited, and end after none: the first one begins something that takes long."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(await reader.readexactly(1))

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for moment in ("first", "second"):
        print(moment, flush=True)  # noqa: T201 - what the test waits for
        with suppress(asyncio.CancelledError):
            while True:
                writer.write(b"x")
                await reader.readexactly(1)


async def _with_signals_of_its_own() -> None:
    task = asyncio.current_task()
    assert task is not None
    at_first_signal(task.cancel)
    await _work_of_connections()


@program.command()
@click.option("--own-signals", is_flag=True)
def serve(own_signals: bool) -> None:
    """Work with connections that a first Ctrl-C does not end."""
    run(_with_signals_of_its_own() if own_signals else _work_of_connections(), if_interrupted="repeat the command")


@pytest.mark.parametrize("own_signals", [[], ["--own-signals"]])
def test_a_second_ctrl_c_ends_a_command_with_one_line(own_signals: list[str]) -> None:
    code = f"from {__name__} import program; program.main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", *own_signals],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        for moment in ("first", "second"):
            assert child.stdout.readline() == f"{moment}\n"
            child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENT_SECONDS)
    assert (child.returncode, errors) == (130, "\ntao: interrupted; repeat the command\n")


def test_a_ctrl_c_that_a_connection_takes_for_an_error_of_its_own_ends_the_command_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    async def work() -> None:
        interrupt_quietly(signal.default_int_handler)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            broken = {"message": "Fatal error on transport TCPTransport", "exception": error}
            asyncio.get_running_loop().call_exception_handler(broken)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run(work())


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("UNKNOWN_TYPE", 2),
        ("UNAUTHORIZED", 2),
        ("TOPOLOGY_ERROR", 2),
        ("UNAVAILABLE", 3),
        ("OUTCOME_UNKNOWN", 3),
        ("INTERNAL", 3),
    ],
)
def test_the_exit_status_distinguishes_a_callers_mistake_from_a_failed_request(
    reason: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    result = CliRunner().invoke(program, ["request", reason], catch_exceptions=False)
    assert (result.exit_code, result.stderr.count("\n")) == (status, 1)
    assert "what happened" in result.stderr
    assert not caplog.records
    assert logging.getLogger("tao.wire.links").isEnabledFor(logging.WARNING)


def call(*arguments: str, given: str = "") -> Result:
    return CliRunner().invoke(program, ["change", *arguments], input=given, catch_exceptions=False)


@pytest.mark.parametrize("answer", ["y\n", "Yes\n"])
def test_after_a_yes_it_is_done(answer: str) -> None:
    result = call(given=answer)
    assert (result.exit_code, result.stdout) == (0, "done\n")


@pytest.mark.parametrize("answer", ["n\n", "\n", "certainly not\n"])
def test_after_anything_else_nothing_was_changed(answer: str) -> None:
    result = call(given=answer)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("tao: nothing was changed\n")


def test_without_input_to_confirm_it_says_to_repeat_with_yes() -> None:
    result = call()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("tao: there is no input to ask for confirmation: repeat with --yes\n")


def test_with_yes_it_does_not_ask() -> None:
    result = call("--yes")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "done\n", "")


def test_ctrl_c_at_the_question_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def readline(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    with pytest.raises(SystemExit) as exited:
        program.main(["change"], prog_name="program")
    assert (exited.value.code, "tao: interrupted" in capsys.readouterr().err) == (130, True)


def test_a_folder_that_is_gone_is_a_callers_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = CliRunner().invoke(program, ["change", "--yes"], catch_exceptions=False)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "the current folder does not exist any more" in result.stderr


def test_a_long_pass_writes_ever_fewer_lines_to_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("tao.terminal.time.monotonic", lambda: now)
    with Counting("edges loaded") as counting:
        for second in range(300):
            now = float(second)
            counting.show(f"{second // 3} % of the file", 1_000 * second)
    lines = capsys.readouterr().err.splitlines()
    assert [line[1:].split()[0] for line in lines] == ["5.0", "15.0", "35.0", "75.0", "135.0", "195.0", "255.0"]
    assert lines[0] == "[  5.0 s] 5,000 edges loaded (1 % of the file)"
