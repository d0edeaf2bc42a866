"""Programs of this repository, run to their end in forks of a process that has imported their modules already.

To execute `tao` or `loadtest` takes half a second or more of a core, nearly all of it for imports, and the suite runs
hundreds. A fork finds what it would have found if it had been executed (`tao.devcluster.fork_server`).
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tao.devcluster.fork_server import ForkServer, tao_fork_server
from tao.devcluster.processes import ManagedProcess, ProcessOptions

ROOT: Final = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """How a program ended: its exit status, and what it printed."""

    status: int
    output: str
    errors: str


async def run_tao(*words: object, folder: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command of `tao` in a folder; it is killed when this is cancelled. ``env`` is added to the environment."""
    options = ProcessOptions(folder=folder, fork_server=await tao_fork_server().ready())
    async with _forked(options, ("tao.cli", *map(str, words)), env or {}) as found:
        process, output, errors = found
        status = await process.wait()
        return Ended(status, output.read_text(), errors.read_text())


@asynccontextmanager
async def forked_scenario(*words: str, env: Mapping[str, str] | None = None) -> AsyncIterator[ScenarioProcess]:
    """Yield a run of `python -m loadtest`, and kill it at the end."""
    server = await loadtest_fork_server().ready()
    # Nearly all of them start clusters, whose servers they would otherwise import once more.
    options = ProcessOptions(folder=ROOT, fork_server=server, starts_servers=True)
    async with _forked(options, ("loadtest", *words), env or {}) as found:
        yield ScenarioProcess(*found)


class ScenarioProcess(NamedTuple):
    """A scenario under way, and the files of what it prints."""

    process: ManagedProcess
    output: Path
    errors: Path

    async def ended(self) -> Ended:
        """Wait until it ends."""
        status = await self.process.wait()
        return Ended(status, self.output.read_text(), self.errors.read_text())

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C would, unless it has ended."""
        self.process.identity.signal(signal.SIGINT)


@functools.cache
def loadtest_fork_server() -> ForkServer:
    """Return what scenarios are forked from. The first call starts it, and must not meet another."""
    return ForkServer.start("tao.cli:import_servers", "loadtest.catalogue:every_scenario")


@asynccontextmanager
async def _forked(
    options: ProcessOptions, words: tuple[str, ...], env: Mapping[str, str]
) -> AsyncIterator[tuple[ManagedProcess, Path, Path]]:
    with tempfile.TemporaryDirectory() as kept:
        output, errors = Path(kept) / "output", Path(kept) / "errors"
        argv = [sys.executable, "-P", "-m", __name__, str(errors), *words]
        process = ManagedProcess(words[0], argv, {**os.environ, **env}, output, options)
        try:
            yield process, output, errors
        finally:
            await process.kill()


def _main() -> None:
    """Run a module as a program whose errors are kept apart from its output, as pipes would do."""
    errors, module, *sys.argv[1:] = sys.argv[1:]
    with Path(errors).open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
