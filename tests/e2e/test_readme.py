"""The examples of README.md and docs/ run as they stand there, against a cluster."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
from collections.abc import AsyncIterator
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape

pytestmark = [
    pytest.mark.database,
    pytest.mark.e2e,
    pytest.mark.unhurried,
    pytest.mark.asyncio(loop_scope="module"),
]

ROOT = Path(__file__).resolve().parents[2]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """Yield a folder in which `tao dev up` has been run."""
    path = tmp_path_factory.mktemp("readme")
    shape = Shape(tiers=2, followers=1, leaders=1, databases=1, shards=4, workers=1)
    async with DevCluster(ClusterSettings(state_dir=path / ".tao-dev", shape=shape, durability=Durability.RELAXED)):
        yield path


async def test_the_program_in_the_readme_prints_what_the_readme_says(folder: Path) -> None:
    (program,) = python_blocks("README.md")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"Bob 1\n")
    assert "It prints `Bob 1`." in (ROOT / "README.md").read_text()


async def run_session(name: str) -> None:
    """Run the Python blocks of a page one after another, as an interactive session."""
    names: dict[str, Any] = {}
    for number, block in enumerate(python_blocks(name), start=1):
        code = compile(block, f"{name}, block {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if isawaitable(result):
            await result


async def test_the_program_of_the_follow_check_runs_from_end_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    await run_session("docs/how-to/follow-check.md")


async def test_the_session_in_the_sdk_guide_runs_from_end_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    await run_session("docs/reference/sdk.md")
    said = capsys.readouterr().out
    assert "INVALID_FIELD" in said
    assert "obj_get" in said


@pytest.mark.parametrize(
    "page",
    [
        *("mutual-friends", "people-you-may-know", "feed", "states", "counters", "suspend-an-account"),
        *("survive-a-database-outage", "replay-yesterday"),
    ],
)
async def test_the_session_in_a_how_to_guide_runs_from_end_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.chdir(folder)
    await run_session(f"docs/how-to/{page}.md")
