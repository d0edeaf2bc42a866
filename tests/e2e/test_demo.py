"""The demonstration at toy size: it runs to its end, reports a failure, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.unhurried]

SMALL = ("--nodes", "100", "--edges-count", "300")
SECONDS = 110.0
INTERRUPTED = 130
WIDTH = 100  # what a CI log shows without folding


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Run the command as a CI job does: without a terminal, with temporary files where the test can see them."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "tao.cli", "demo", *arguments],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(tmp_path: Path) -> list[str]:
    """Return the files of the demonstration, and the processes that were started with one of its paths."""
    processes = []
    for found in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = found.read_bytes()
        except OSError:
            continue
        if str(tmp_path / "t").encode() in command:
            processes.append(command.decode(errors="replace"))
    return [str(path) for path in (tmp_path / "t").iterdir()] + processes


def test_the_demonstration_shows_each_step_and_ends_with_ok(tmp_path: Path) -> None:
    with start(tmp_path, *SMALL, "--json") as demo:
        figures_text, output = demo.communicate(timeout=SECONDS)
    assert demo.returncode == 0, output
    lines = output.splitlines()
    assert lines[-1] == "demo: ok"
    assert [line for line in lines if len(line) > WIDTH] == []
    assert [line for line in lines if line.startswith("Chapter")] == [
        "Chapter 1: one page, two viewers",
        "Chapter 2: a whole social graph",
        "Chapter 3: a write in one tier is seen in the other",
        "Chapter 4: are the caches right?",
        "Chapter 5: two regions",
    ]
    assert any("(this comment is for friends of its writer)" in line for line in lines)
    assert any("Cathy: “What a view!" in line for line in lines)
    assert any(line.endswith("zero differences.") for line in lines)
    assert "\x1b" not in output, "no colours where there is no terminal"

    figures = json.loads(figures_text)
    assert (figures["load"]["objects"], figures["load"]["edges"], figures["load"]["directed_edges"]) == (
        100,
        300,
        600,
    )
    cold, other_tier, warm = figures["passes"]
    assert [each["queries"] for each in figures["passes"]] == [300, 300, 300]
    assert cold["by_database"] == 200
    assert other_tier["by_database"] == 0
    assert warm["by_follower"] == 300
    assert figures["mutual"]["pairs"] > 50
    assert figures["mutual"]["visited"] > 0
    assert figures["feed"]["posts"] > figures["feed"]["pages"]
    assert figures["spread"]["version_after"] == figures["spread"]["version_before"] + 1
    assert figures["check"]["compared"] > 300
    assert figures["check"]["wrong"] == 0
    regions = figures["regions"]
    # An answer that comes sooner cannot have been in the master region.
    assert regions["acknowledged_elsewhere"]["p50_ms"] >= regions["rtt_ms"]
    assert regions["critical_ms"] >= regions["rtt_ms"]
    assert regions["by_token_ms"] >= regions["rtt_ms"]
    assert regions["compared"] > 0
    assert regions["wrong"] == 0
    assert left_behind(tmp_path) == []


def test_a_line_that_cannot_be_loaded_fails_the_demonstration_by_name(tmp_path: Path) -> None:
    pages, edges = tmp_path / "pages.csv", tmp_path / "edges.csv"
    pages.write_text(f"id,facebook_id,page_name,page_type\n1,{2**70},One,tvshow\n2,22,Two,tvshow\n")
    edges.write_text("id_1,id_2\n1,2\n")
    with start(tmp_path, "--edges", str(edges), "--objects", str(pages)) as demo:
        output, errors = demo.communicate(timeout=SECONDS)
    assert demo.returncode == 1
    assert "DEMONSTRATION_FAILED: 1 lines of" in errors.splitlines()[-1]
    assert "demo: ok" not in output
    assert left_behind(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv", "pages.csv", "t"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demonstration_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path, *SMALL) as demo:
        assert demo.stdout is not None
        while "Chapter 1" not in demo.stdout.readline():
            assert demo.poll() is None
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=SECONDS)
    assert demo.returncode == INTERRUPTED
    assert "interrupted; nothing is left running" in errors
    assert left_behind(tmp_path) == []


def test_edges_without_objects_are_rejected_before_anything_is_started(tmp_path: Path) -> None:
    edges = tmp_path / "edges.csv"
    edges.write_text("id_1,id_2\n1,2\n")
    with start(tmp_path, "--edges", str(edges)) as demo:
        output, errors = demo.communicate(timeout=SECONDS)
    assert demo.returncode == 2
    assert output == ""
    assert "--edges and --objects belong together" in errors
