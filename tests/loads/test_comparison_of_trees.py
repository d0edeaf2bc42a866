"""`compare` builds an earlier commit and runs both trees in turns; here on a small repository made for the test."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.compare.scenario import CompareOptions, compare_trees
from loadtest.scenario import BenchSettings, Silent
from tao.model.errors import OperatorError

pytestmark = [pytest.mark.e2e]
_WAIT_SECONDS = 120.0
_MAKEFILE = """\
env:
	mkdir -p .venv/bin
	ln -s $(PYTHON) .venv/bin/python
	echo built >> "$(NOTES)/builds"
	$(BLOCK)
	touch .venv/.installed-1
"""
_PROGRAM = """\
import json, os, pathlib, signal, sys

TIME_US, NAMES = {time_us}, {names}
notes = pathlib.Path(os.environ["NOTES"])
if sys.argv[1] == "list":
    print("\\n".join(name + "  a scenario" for name in NAMES))
    sys.exit()
given = dict(zip(sys.argv, sys.argv[1:]))
name = given["--only"]
with (notes / "files").open("a") as file:
    file.write(f"{{given.get('--objects')}} {{given.get('--edges')}}\\n")
with (notes / "order").open("a") as file:
    file.write(f"{{name}} {{TIME_US}} {{'--toy' in sys.argv}}\\n")
if name == "endless":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    (notes / "started").touch()
    signal.sigwait([signal.SIGTERM])
    (notes / "cleaned").touch()
    sys.exit(130)
measured = {{"reads": {{"p50_us": TIME_US, **({{"new_us": 1}} if TIME_US > 100 else {{}})}}}}
if name != "broken":
    pathlib.Path(given["--json"]).write_text(json.dumps({{"scenarios": {{name: {{"measured": measured}}}}}}))
"""


class Repository:
    """A repository of two commits: the first is twice as fast, and has fewer scenarios."""

    def __init__(self, folder: Path, notes: Path) -> None:
        self.folder, self.notes = folder, notes
        (folder / "loadtest").mkdir(parents=True)
        notes.mkdir()
        # Without it the package of this project, which is on the path as well, would be found in its place.
        (folder / "loadtest/__init__.py").touch()
        (folder / "Makefile").write_text(_MAKEFILE)
        (folder / ".gitignore").write_text("build/\n.venv/\n__pycache__/\n")
        self.git("init", "--quiet")
        self.first = self._commit(100, ["toy", "broken", "endless"])
        self._commit(200, ["toy", "broken", "endless", "newer"])

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", "-C", self.folder, *who, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def _commit(self, time_us: int, names: list[str]) -> str:
        (self.folder / "loadtest/__main__.py").write_text(_PROGRAM.format(time_us=time_us, names=names))
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", "Change the speed")
        return self.git("rev-parse", "HEAD")

    def read(self, name: str) -> list[str]:
        return (self.notes / name).read_text().splitlines()

    @property
    def worktrees(self) -> int:
        return len(self.git("worktree", "list").splitlines())


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return Repository(tmp_path / "repository", tmp_path / "notes")


@pytest.fixture
def settings(tmp_path: Path) -> BenchSettings:
    (tmp_path / "work").mkdir()
    return BenchSettings(tmp_path / "work", toy=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.02)


async def test_both_trees_run_in_turns_and_the_slower_one_is_seen(
    repository: Repository, settings: BenchSettings
) -> None:
    asked = CompareOptions(base=repository.first, only=("toy", "newer"), pairs=2)
    found = await compare_trees(repository.folder, settings, Silent(), asked)
    assert repository.read("order") == [f"toy {time_us} True" for time_us in (100, 200, 200, 100)]
    (slower,) = found.measured["slowdowns"]["toy"]
    assert (slower["base"], slower["present"], slower["ratio"]) == (100, 200, 2)
    (aim,) = found.aims
    assert (aim.aim, aim.value, aim.bound, aim.met) == ("toy: p50_us at most 3 % slower", 2, 1.03, False)
    assert found.faults == []  # the exit status does not depend on speed
    notes = " ".join(found.notes)
    assert "newer: skipped" in notes
    assert "reads: new_us" in notes


async def test_both_trees_are_given_the_same_files_by_their_full_paths(
    repository: Repository, settings: BenchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.notes)
    asked = CompareOptions(
        base=repository.first, only=("toy",), pairs=2, objects=Path("pages.csv"), edges=Path("likes.csv")
    )
    await compare_trees(repository.folder, settings, Silent(), asked)
    assert set(repository.read("files")) == {f"{repository.notes}/pages.csv {repository.notes}/likes.csv"}


async def test_a_commit_is_built_once(repository: Repository, settings: BenchSettings) -> None:
    asked = CompareOptions(base="HEAD~1", only=("toy",), pairs=2)
    for _ in range(2):
        await compare_trees(repository.folder, settings, Silent(), asked)
    assert repository.read("builds") == ["built"]


async def test_what_is_missing_is_reported(repository: Repository, settings: BenchSettings) -> None:
    async def error(**asked: object) -> str:
        with pytest.raises(OperatorError) as raised:
            await compare_trees(repository.folder, settings, Silent(), CompareOptions(pairs=2, **asked))  # type: ignore[arg-type]
        return raised.value.message

    assert "has no such commit" in await error(base="no-such-branch")
    assert "there is no scenario unknown" in await error(only=("unknown",))
    assert "no result" in await error(only=("broken",))


async def test_an_interrupted_run_ends_the_scenario_that_runs_and_waits_for_its_clean_up(
    repository: Repository, settings: BenchSettings
) -> None:
    asked = CompareOptions(base="HEAD~1", only=("endless",), pairs=2)
    task = asyncio.create_task(compare_trees(repository.folder, settings, Silent(), asked))
    await until((repository.notes / "started").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (repository.notes / "cleaned").exists()


async def test_an_interrupted_build_leaves_no_tree_and_is_made_anew(
    repository: Repository, settings: BenchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = CompareOptions(base="HEAD~1", only=("toy",), pairs=2)
    monkeypatch.setenv("BLOCK", f"echo $$$$ > {repository.notes}/pid; exec tail -f /dev/null")
    task = asyncio.create_task(compare_trees(repository.folder, settings, Silent(), asked))
    pid_file = repository.notes / "pid"
    await until(lambda: pid_file.exists() and pid_file.read_text().strip() != "")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pid = int(pid_file.read_text())
    await until(lambda: not is_running(pid))
    assert repository.worktrees == 1
    assert list((repository.folder / "build/compare").iterdir()) == []
    monkeypatch.delenv("BLOCK")
    await compare_trees(repository.folder, settings, Silent(), asked)
    assert repository.worktrees == 2


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
