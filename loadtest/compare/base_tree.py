"""The tree of an earlier commit: a git worktree under `build/`, with an environment of its own from its own `make env`.

Trees are kept by commit, so a commit is built once. A tree whose environment is not complete is made anew.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtest.commands import run_command
from loadtest.scenario import Progress
from tao.devcluster.processes import ManagedProcess, ProcessOptions, to_the_end
from tao.model.errors import OperatorError

_FOLDER: Final = Path("build/compare")
_STOP_SECONDS: Final = 60.0
_GIT_SECONDS: Final = 120.0
_ENVIRONMENT: Final = ".venv/.installed-*"
"""What `make env` leaves when it is done."""
_OF_MAKE: Final = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of the project that can be run."""

    name: str
    folder: Path
    python: str
    """The interpreter of its environment."""

    async def scenarios(self) -> list[str]:
        """Return the names of the scenarios of its `bench`. Raises `OperatorError`."""
        ended = await run_command(self.python, "-m", "loadtest", "list", seconds=_GIT_SECONDS, folder=self.folder)
        if ended.status:
            raise OperatorError(f"{self.name}: `python -m loadtest list` failed: {ended.errors}")
        return [line.split()[0] for line in ended.output.splitlines() if line]


async def commit_of(root: Path, revision: str) -> str:
    """Return the full name of a commit. Raises `OperatorError` when there is none."""
    try:
        return await _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except OperatorError:
        raise OperatorError(f"--base {revision}: {root} has no such commit") from None


async def present_tree(root: Path) -> Tree:
    """Return the tree as it lies there, changed files included."""
    return Tree(await _git(root, "describe", "--always", "--dirty"), root, sys.executable)


async def base_tree(root: Path, commit: str, progress: Progress, log: Path) -> Tree:
    """Return the tree of a commit, built unless it has been. A build that fails or is interrupted leaves nothing.

    Raises `OperatorError` with the end of ``log``."""
    folder = root / _FOLDER / commit
    tree = Tree(commit[:12], folder, str(folder / ".venv/bin/python"))
    if any(folder.glob(_ENVIRONMENT)):
        return tree
    try:
        await to_the_end(_remove(root, folder))
        progress.step(f"checking out {tree.name}")
        await _git(root, "worktree", "add", "--quiet", "--detach", str(folder), commit)
        progress.step(f"building the environment of {tree.name}, which takes minutes the first time")
        # The same interpreter, whatever `python3` is here: its version would outweigh every change of the project.
        version = ".".join(map(str, sys.version_info[:2]))
        make = ["make", "env", f"PYTHON={sys.base_prefix}/bin/python{version}"]
        status, tail = await run_program(make, folder, log)
        if status:
            raise OperatorError(f"`make env` of {tree.name} ended with status {status}:\n{tail}")
    except BaseException:
        await to_the_end(_remove(root, folder))
        raise
    return tree


async def run_program(words: Sequence[str], folder: Path, log: Path) -> tuple[int, str]:
    """Run a program to its end. When this is cancelled, the program and what it started get SIGTERM, and time to clean
    up. Returns the exit status and the end of its output."""
    env = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
    process = ManagedProcess(words[0], words, env, log, ProcessOptions(folder=folder, stop_seconds=_STOP_SECONDS))
    try:
        return await process.wait(), process.log_tail()
    finally:
        if process.is_running:
            # It leads a session. A shell that is ended by a signal does not pass it on to the program that it runs.
            os.killpg(process.pid, signal.SIGTERM)
        await to_the_end(process.stop())


async def _remove(root: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    await _git(root, "worktree", "prune")


async def _git(root: Path, *words: str) -> str:
    ended = await run_command("git", "-C", str(root), *words, seconds=_GIT_SECONDS)
    if ended.status:
        raise OperatorError(f"`git {' '.join(words)}` failed: {ended.errors}")
    return ended.output
