"""A forked program behaves as if it had been executed by the process that asked for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tao.devcluster.fork_server import ForkServer
from tao.devcluster.processes import ManagedProcess, ProcessIdentity, ProcessOptions, read_record, stop_process
from tao.model.errors import OperatorError
from tests.unit.devcluster.test_processes import until

PROGRAM = """
import asyncio, json, os, signal, sys
from pathlib import Path

IMPORTED_BY = os.getpid()


def preload():
    pass


def preload_with_thread():
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def is_inherited(descriptor):
    # That of the listing is closed by now. libffi keeps one of its own file, from release 3.8 on.
    path = "/proc/self/fd/" + descriptor
    return os.path.lexists(path) and ".so." not in os.path.realpath(path)


async def fork_another():
    from tao.devcluster.fork_server import tao_fork_server
    from tao.devcluster.processes import ManagedProcess, ProcessOptions

    server = await tao_fork_server().ready()
    argv = [sys.executable, "-P", "-m", "program", "show"]
    process = ManagedProcess("another", argv, os.environ, Path("another.log"), ProcessOptions(fork_server=server))
    await process.wait()
    shown = {"server": server._process._pid, "imported_by": sys.modules["program"].IMPORTED_BY}
    print(json.dumps(shown | {"another": json.loads(process.log_tail())}), flush=True)
    signal.pause()


def main():
    word = sys.argv[1]
    if word == "show":
        with open("/proc/self/cmdline", "rb") as file:
            command = file.read().rstrip(b"\\0").decode().split("\\0")
        print(json.dumps({
            "argv": sys.argv[1:], "command": command, "variable": os.environ.get("VARIABLE"), "folder": os.getcwd(),
            "parent": os.getppid(), "session": os.getsid(0), "imported_by": sys.modules["program"].IMPORTED_BY,
            "path": sys.path,
            "descriptors": sorted(filter(is_inherited, os.listdir("/proc/self/fd")), key=int),
        }))
    elif word == "fork":
        asyncio.run(fork_another())
    elif word == "exit":
        sys.exit(int(sys.argv[2]))
    elif word == "raise":
        raise ValueError("of the program")
    else:
        print("waiting", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
"""
Run = Callable[..., ManagedProcess]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the program importable, and returns the folder that its processes use."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
async def run(program: Path) -> AsyncIterator[Run]:
    """Runs the program in a fork; kills it at the end."""
    server = await ForkServer.start("program:preload").ready()
    started: list[ManagedProcess] = []

    def fork(*words: str, starts_servers: bool = False, **environment: str) -> ManagedProcess:
        argv = [sys.executable, "-P", "-m", "program", *words]
        record = program / "record.json"
        options = ProcessOptions(fork_server=server, starts_servers=starts_servers, record_path=record)
        started.append(ManagedProcess("forked", argv, os.environ | environment, program / "logs" / "log", options))
        return started[-1]

    yield fork
    for process in started:
        await process.kill()
    server.close()


async def test_the_program_finds_what_it_would_find_if_it_had_been_executed(run: Run) -> None:
    process = run("show", "a word", VARIABLE="value")
    assert await process.wait() == 0
    shown = json.loads(process.log_tail())
    assert shown["argv"] == ["show", "a word"]
    assert shown["command"] == [sys.executable, "-P", "-m", "program", "show", "a word"]
    assert (shown["variable"], shown["folder"]) == ("value", str(process.log_path.parent))
    assert (shown["parent"], shown["session"]) == (os.getpid(), process.pid)
    assert shown["descriptors"] == ["0", "1", "2"]


async def test_folders_of_the_programs_python_path_are_searched_first(run: Run, program: Path) -> None:
    process = run("show", PYTHONPATH=f"/added{os.pathsep}{program}")
    assert await process.wait() == 0
    path = json.loads(process.log_tail())["path"]
    assert path[0] == "/added"
    assert path.count(str(program)) == 1


async def test_the_modules_are_those_of_the_fork_server(run: Run) -> None:
    first, second = run("show"), run("show")
    await first.wait()
    await second.wait()
    shown = [json.loads(line) for line in first.log_path.read_text().splitlines()]
    assert shown[0]["imported_by"] == shown[1]["imported_by"] not in (first.pid, second.pid, os.getpid())


async def test_a_program_that_starts_servers_finds_a_fork_server_with_the_same_modules(run: Run) -> None:
    process = run("fork", starts_servers=True)
    await until(lambda: bool(process.log_tail()))
    shown = json.loads(process.log_tail())
    another, server = shown["another"], ProcessIdentity.of(shown["server"])
    assert (another["parent"], another["imported_by"]) == (process.pid, shown["imported_by"])
    assert another["descriptors"] == ["0", "1", "2"]
    assert server.is_running()
    await process.kill()
    await until(lambda: not server.is_running())


@pytest.mark.parametrize("words", [("exit", "3"), ("exit", "0")])
async def test_the_exit_status_is_that_of_the_program(run: Run, words: tuple[str, str]) -> None:
    assert await run(*words).wait() == int(words[1])


async def test_an_error_is_in_the_log(run: Run) -> None:
    process = run("raise")
    assert await process.wait() == 1
    assert process.log_tail(1) == "ValueError: of the program"


async def test_a_signal_ends_the_program_and_its_record(run: Run, program: Path) -> None:
    process = run("wait")
    await until(lambda: process.log_tail() == "waiting")
    assert read_record(program / "record.json") == process.identity
    assert await process.stop()
    assert await process.wait() == -signal.SIGTERM
    assert read_record(program / "record.json") is None
    assert not process.is_running


async def test_a_process_with_a_second_thread_is_not_forked(program: Path) -> None:
    server = await ForkServer.start("program:preload_with_thread").ready()
    argv = [sys.executable, "-P", "-m", "program", "show"]
    try:
        with pytest.raises(OperatorError, match="cannot start forked"):
            ManagedProcess("forked", argv, os.environ, program / "log", ProcessOptions(fork_server=server))
        await until(lambda: not server.is_running)
    finally:
        server.close()


async def test_modules_that_cannot_be_imported_are_named(program: Path) -> None:
    server = ForkServer.start("no_such_program:preload")
    with pytest.raises(OperatorError, match="No module named 'no_such_program'"):
        await server.ready()
    server.close()


def run_parent(detached: bool, folder: Path) -> subprocess.Popen[str]:
    """A process that has the program forked, says so when it runs, and waits for its end."""
    text = f"""
        import asyncio, os, pathlib, sys
        from tao.devcluster.fork_server import ForkServer
        from tao.devcluster.processes import ManagedProcess, ProcessOptions

        async def main():
            folder = pathlib.Path({str(folder)!r})
            child = ManagedProcess("child", [sys.executable, "-P", "-m", "program", "wait"], os.environ,
                                   folder / "child.log",
                                   ProcessOptions(record_path=folder / "child.json", detached={detached},
                                                  fork_server=await ForkServer.start("program:preload").ready()))
            while child.log_tail() != "waiting":
                await asyncio.sleep(0.01)
            print("started", flush=True)
            sys.stdin.read()
            child.release()

        asyncio.run(main())
    """
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


async def test_no_forked_process_outlives_a_parent_that_was_killed(program: Path) -> None:
    with run_parent(False, program) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        child = read_record(program / "child.json")
        assert child is not None
        assert child.is_running()
        parent.kill()
        await until(lambda: not child.is_running())


async def test_a_detached_one_outlives_its_parent_and_the_fork_server(program: Path) -> None:
    with run_parent(True, program) as parent:
        output, errors = parent.communicate("")
    assert (output, errors, parent.returncode) == ("started\n", "", 0)
    child = read_record(program / "child.json")
    assert child is not None
    assert child.is_running()
    assert await stop_process(child, term_seconds=30)
