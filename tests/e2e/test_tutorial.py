"""The programs and commands of docs/tutorial run in order as they stand on the page, against a development cluster, and
print what the page shows."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.unhurried]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tutorial/index.md").read_text()
BLOCK = re.compile(r'^```(sh|python|text)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
ELLIPSIS = "…"
"""A line that stands for any number of lines."""
MARK = "@@ commands"
"""Printed before each block of commands, so that its output can be separated from that of the others."""
NOT_RUN = ("sudo ", "make ", "source ", "tao dev ")
"""Commands that the test leaves out, because the environment exists and the fixture starts and stops the cluster."""

VISIT = """
import re, sys
from app import app

page, browser = f"/user/{sys.argv[1]}", app.test_client()
before = browser.get(page)
assert before.status_code == 200, before.status
assert "Golden Gate Bridge: 2 likes" in before.text, before.text
assert "Tea garden: 0 likes" in before.text, before.text
(action,) = re.findall(r'action="(.*)">\\s*Golden', before.text)
answer = browser.post(action)
assert "tao_after=" in answer.headers["Set-Cookie"]
after = browser.get(answer.location).text
assert re.search(r"Golden Gate Bridge: 3 likes\\s*\\(you, too\\)", after), after
assert browser.get("/user/1").status_code == 404
"""


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """Yield a folder in which `tao dev up` has been run, with the repository's example files."""
    (tmp_path / "config").symlink_to(ROOT / "config")
    settings = ClusterSettings(
        state_dir=tmp_path / ".tao-dev", shape=Shape(databases=1, shards=4), durability=Durability.RELAXED
    )
    async with DevCluster(settings):
        yield tmp_path


def steps(folder: Path) -> Iterator[str]:
    """Write the page's files in the page's order, and yield its commands as lines for a shell."""
    for language, name, text in BLOCK.findall(PAGE):
        if language == "python":
            (folder / name).write_text(text)
        if language != "sh":
            continue
        yield f"echo '{MARK}'"
        for line in text.splitlines():
            if line.startswith("flask "):
                (folder / "visit.py").write_text(VISIT)
                yield "python visit.py $ALICE"
            elif not line.startswith(NOT_RUN):
                yield line


def shown() -> Iterator[tuple[int, list[str]]]:
    """Yield each output that the page shows, with the number of the block of commands before it."""
    blocks = 0
    for language, _, text in BLOCK.findall(PAGE):
        blocks += language == "sh"
        if language == "text":
            yield blocks, text.splitlines()


def masked(line: str) -> str:
    """Return a line without what differs between runs: numbers, times, the width of columns, which server of a tier it
    was, and what was the first to bring a change."""
    without_causes = re.sub(r"\(.*?\)", "()", " ".join(line.split()))
    return re.sub(r"[-\d.,:]*\d[ab]?\b", "0", without_causes)


async def test_the_tutorial_runs_from_its_first_line_to_its_last_and_prints_what_it_shows(folder: Path) -> None:
    script = "\n".join(["set -eu", *steps(folder)])
    assert script.count("tao ") > 8
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", script, cwd=folder, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    printed = [part.splitlines() for part in out.decode().split(MARK)]
    expected = list(shown())
    assert [lines[0].split()[0] for _, lines in expected] == ["tier", "In"]
    for block, lines in expected:
        found = iter(map(masked, printed[block]))
        missing = [line for line in lines if line.strip() not in ("", ELLIPSIS) and masked(line) not in found]
        assert missing == [], "\n".join(printed[block])
