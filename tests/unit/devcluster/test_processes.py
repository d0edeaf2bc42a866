"""The end of a child process is noticed, no orphan remains, and no other process is signalled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tao.devcluster.processes import (
    ManagedProcess,
    ProcessIdentity,
    ProcessOptions,
    read_record,
    stop_process,
    write_record,
)
from tao.model.errors import OperatorError
from tests.rigs.pacing import PATIENT_SECONDS

Start = Callable[..., ManagedProcess]
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a shell script as a managed process; kills it at the end."""
    started: list[ManagedProcess] = []

    def start_script(script: str, **options: object) -> ManagedProcess:
        process = ManagedProcess(
            "script",
            ["sh", "-c", script],
            os.environ,
            tmp_path / "script.log",
            ProcessOptions(**options),  # type: ignore[arg-type]
        )
        started.append(process)
        return process

    yield start_script
    for process in started:
        await process.kill()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)


async def test_the_exit_status_is_that_of_the_program(start: Start) -> None:
    assert await start("exit 3").wait() == 3


async def test_an_end_by_signal_is_a_negative_status(start: Start) -> None:
    process = start("kill -USR1 $$")
    assert await process.wait() == -signal.SIGUSR1
    assert not process.is_running


async def test_output_goes_to_the_log_and_its_tail_is_of_this_run_only(start: Start) -> None:
    await start("echo first run").wait()
    second = start("echo one; echo two >&2; echo three")
    await second.wait()
    assert second.log_tail(2) == "two\nthree"
    assert second.log_tail() == "one\ntwo\nthree"
    assert second.log_path.read_text().startswith("first run\n")


async def test_a_log_that_has_grown_too_long_is_put_aside_at_the_next_start(start: Start) -> None:
    await start("echo a long line of words").wait()
    process = start("echo new", log_max_bytes=5)
    await process.wait()
    assert process.log_path.read_text() == "new\n"
    assert process.log_path.with_name("script.log.1").read_text() == "a long line of words\n"


async def test_stop_is_term_and_says_that_it_sufficed(start: Start) -> None:
    process = start("exec sleep 1000")
    assert await process.stop()
    assert await process.wait() == -signal.SIGTERM
    assert await process.stop()  # again is harmless


async def test_stop_kills_what_ignores_term(start: Start) -> None:
    process = start(STUBBORN, stop_seconds=0.1)
    await until(lambda: process.log_tail() == "ready")
    assert not await process.stop()
    assert await process.wait() == -signal.SIGKILL


async def test_a_program_that_does_not_exist_is_named_in_the_log(tmp_path: Path) -> None:
    process = ManagedProcess("ghost", ["/no/such/program"], {}, tmp_path / "ghost.log")
    assert await process.wait() == 127
    assert "/no/such/program: not found" in process.log_tail()


async def test_a_log_that_cannot_be_written_is_an_operators_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match="cannot start lost with the log"):
        ManagedProcess("lost", ["true"], {}, tmp_path / "file" / "lost.log")


async def test_the_record_stands_while_the_process_runs(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    process = start("exec sleep 1000", record_path=record)
    assert read_record(record) == process.identity
    assert process.identity.is_running()
    await process.stop()
    assert read_record(record) is None
    assert not process.identity.is_running()


async def test_the_record_of_a_successor_outlives_the_process(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "process.json"
    process = start("sleep 60", record_path=record)
    successor = ProcessIdentity.of(os.getpid())
    write_record(record, successor)
    await process.kill()
    assert read_record(record) == successor


def test_a_damaged_record_identifies_no_process(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"pid": 12')
    assert read_record(record) is None


async def test_a_successor_on_a_recycled_pid_is_neither_taken_for_the_process_nor_signalled(start: Start) -> None:
    successor = start("exec sleep 1000")
    identity = successor.identity
    for former in (
        ProcessIdentity(identity.pid, identity.start_ticks - 1, identity.boot_id),
        ProcessIdentity(identity.pid, identity.start_ticks, "another boot"),
    ):
        assert not former.is_running()
        assert not former.signal(signal.SIGKILL)
        assert await stop_process(former, term_seconds=0.1)
    assert successor.is_running


def test_an_identity_survives_its_record(tmp_path: Path) -> None:
    myself = ProcessIdentity.of(os.getpid())
    write_record(tmp_path / "me.json", myself)
    assert read_record(tmp_path / "me.json") == myself
    assert myself.is_running()


def run_parent(detached: bool, tmp_path: Path, last_act: str) -> subprocess.Popen[str]:
    """A process that starts a child which records itself, says so, and then does its last act."""
    program = f"""
        import asyncio, os, pathlib, sys
        from tao.devcluster.processes import ManagedProcess, ProcessOptions

        async def main():
            folder = pathlib.Path({str(tmp_path)!r})
            child = ManagedProcess("child", ["sleep", "1000"], os.environ, folder / "child.log",
                                   ProcessOptions(record_path=folder / "child.json",
                                                  detached={detached}))
            cmdline = pathlib.Path(f"/proc/{{child.pid}}/cmdline")
            while not cmdline.read_bytes().startswith(b"sleep"):
                await asyncio.sleep(0.01)
            print("started", flush=True)
            {last_act}

        asyncio.run(main())
    """
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


async def test_no_child_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    with run_parent(False, tmp_path, "await asyncio.Event().wait()") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        child = read_record(tmp_path / "child.json")
        assert child is not None
        assert child.is_running()
        parent.kill()
        await until(lambda: not child.is_running())
    assert not child.is_running()


async def test_a_detached_child_outlives_its_parent_and_can_be_stopped_by_its_record(tmp_path: Path) -> None:
    with run_parent(True, tmp_path, "child.release()") as parent:
        output, errors = parent.communicate()
    assert (output, errors, parent.returncode) == ("started\n", "", 0)
    child = read_record(tmp_path / "child.json")
    assert child is not None
    assert child.is_running()
    assert await stop_process(child, term_seconds=30)
    assert not child.is_running()
