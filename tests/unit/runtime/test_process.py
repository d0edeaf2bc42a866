"""A server process from start to end, by signals (real processes, because signals and exit statuses are)."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from tests.rigs.pacing import PATIENT_SECONDS

PROGRAM = """
import asyncio, sys
from tao.model.errors import SettingsError, TopologyError
from tao.observability.logs import configure_logs, logger
from tao.runtime.process import ProcessSettings, run_server

configure_logs("test", "t-1", "info", "json", sys.stderr)
mode = sys.argv[1]

class Server:
    async def drain(self):
        print("drain", flush=True)
        if mode == "stuck":
            await asyncio.Event().wait()
    async def close(self):
        print("close", flush=True)
        if mode == "broken close":
            raise RuntimeError("cannot close")
    async def reload(self):
        print("reload", flush=True)
        if mode == "bad reload":
            raise TopologyError("bad file")

async def build():
    if mode == "operator":
        raise SettingsError("server.yaml: port: is taken")
    if mode == "os":
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")
    if mode == "fault":
        raise RuntimeError("a bug")
    if mode == "slow start":
        print("starting", flush=True)
        await asyncio.Event().wait()
    print("serving", flush=True)
    return Server()

seconds = 0.2 if mode == "stuck" and len(sys.argv) > 2 else 60
sys.exit(run_server(build, log=logger("test"), settings=ProcessSettings(drain_seconds=seconds)))
"""


class Program:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=PATIENT_SECONDS)
        return self.process.returncode, output, errors


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        if program.process.poll() is None:
            program.process.kill()
            program.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_closes_and_ends_with_0(programs: list[Program], number: signal.Signals) -> None:
    programs.append(program := Program("plain"))
    program.expect("serving")
    program.process.send_signal(number)
    assert program.end()[:2] == (0, "drain\nclose\n")


def test_hangup_reloads_and_a_reload_that_fails_leaves_the_server_serving(programs: list[Program]) -> None:
    programs.append(program := Program("bad reload"))
    program.expect("serving")
    for _ in range(2):
        program.process.send_signal(signal.SIGHUP)
        program.expect("reload")
    program.process.send_signal(signal.SIGTERM)
    status, _, errors = program.end()
    assert status == 0
    assert errors.count("bad file") == 2


def test_a_drain_that_takes_too_long_is_ended_and_the_server_closes(programs: list[Program]) -> None:
    programs.append(program := Program("stuck", "short"))
    program.expect("serving")
    program.process.send_signal(signal.SIGTERM)
    status, output, errors = program.end()
    assert (status, output) == (0, "drain\nclose\n")
    assert "took too long" in errors


def test_a_second_signal_forces_the_end(programs: list[Program]) -> None:
    programs.append(program := Program("stuck"))
    program.expect("serving")
    program.process.send_signal(signal.SIGTERM)
    program.expect("drain")
    program.process.send_signal(signal.SIGINT)
    assert program.end()[0] == 128 + signal.SIGINT


@pytest.mark.parametrize(("mode", "message"), [("operator", "port: is taken"), ("os", "/nowhere")])
def test_an_operators_mistake_is_one_line_and_status_2(programs: list[Program], mode: str, message: str) -> None:
    programs.append(program := Program(mode))
    status, output, errors = program.end()
    assert (status, output, len(errors.splitlines())) == (2, "", 1)
    assert message in errors


def test_a_fault_at_the_start_is_logged_with_its_traceback_and_status_1(programs: list[Program]) -> None:
    programs.append(program := Program("fault"))
    status, _, errors = program.end()
    assert status == 1
    assert "Traceback" in errors


def test_a_close_that_fails_is_logged_and_status_1(programs: list[Program]) -> None:
    programs.append(program := Program("broken close"))
    program.expect("serving")
    program.process.send_signal(signal.SIGTERM)
    status, _, errors = program.end()
    assert status == 1
    assert "cannot close" in errors


def test_a_signal_while_starting_ends_the_start(programs: list[Program]) -> None:
    programs.append(program := Program("slow start"))
    program.expect("starting")
    program.process.send_signal(signal.SIGTERM)
    assert program.end()[0] == 0
