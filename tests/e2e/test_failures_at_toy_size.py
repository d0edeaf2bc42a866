"""The scenarios that break things, at toy size: a fault or a restart of each kind that takes little time. What is
judged has to be right, and no read may fail that nothing explains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.database, pytest.mark.timeout(180)]


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    json_file = tmp_path / "found.json"
    outcome = subprocess.run(
        [sys.executable, "-m", "loadtest", *arguments, "--toy", "--json", str(json_file)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert list(tmp_path.glob("tao-bench-*")) == []
    found: dict[str, Any] = msgspec.json.decode(json_file.read_bytes())
    return found


def test_while_servers_are_killed_nothing_acknowledged_is_lost_and_no_read_is_wrong(tmp_path: Path) -> None:
    found = run(
        tmp_path, "chaos", "--fault", "follower_kill", "--fault", "tailer_kill", "--logs", str(tmp_path / "logs")
    )
    assert set(found["faults"]) <= {"follower_kill", "tailer_kill"}
    assert sum(found["faults"].values()) == len(found["fault_log"]) > 0
    assert found["acked_writes"] > 0
    assert found["reads"] > 0
    assert found["compared"]["cached entries"] > 0
    zeros = ("acked_writes_lost", "stale_after_quiescence", "failed_reads_unexplained", "wrong_answers")
    violations = [key for key in found if key.endswith("_violations")]
    assert len(violations) == 5
    assert {key: found[key] for key in (*zeros, *violations) if found[key]} == {}
    assert (tmp_path / "logs" / "topology.json").exists()


def test_a_follower_and_a_leader_are_drained_and_restarted_and_no_request_fails(tmp_path: Path) -> None:
    found = run(tmp_path, "rolling", "--role", "follower", "--role", "leader")
    assert list(found["seconds"]) == ["east-follower-1a", "east-leader-1"]
    assert (found["failed_reads"], found["failed_writes"], found["acked_writes_lost"]) == (0, 0, 0)
    assert found["reads"] > found["acked_writes"] > 0
