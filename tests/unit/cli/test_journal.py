"""`tao journal parked` shows what the followers that answer have, and names those that do not; `status` their state."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from tao.admin.journal import Report
from tao.cli.commands import tao
from tao.model.errors import TaoError, Unavailable
from tao.model.topology import Topology

WRITE = {"number": 7, "priority": "normal", "attempts": 1, "reason": "INVALID_ARGUMENT", "message": "no", "write": {}}
LOST = Unavailable("cannot connect to host:1")


def call(
    monkeypatch: pytest.MonkeyPatch, command: str, reports: dict[str, Report | TaoError | None], *options: str
) -> Result:
    async def current_topology(_: object) -> Topology:
        return Topology(version=1, shards=1, regions=(), databases=())

    async def journal_reports(*_: object) -> dict[str, Report | TaoError | None]:
        return reports

    monkeypatch.setattr("tao.cli.journal.target_of", lambda: None)
    monkeypatch.setattr("tao.cli.journal.current_topology", current_topology)
    monkeypatch.setattr("tao.cli.journal.journal_reports", journal_reports)
    return CliRunner().invoke(tao, ["journal", command, *options], catch_exceptions=False)


def test_parked_writes_of_followers_that_answer_are_shown_and_the_others_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = call(monkeypatch, "parked", {"web-1": LOST, "web-2": {"writes": [WRITE]}, "web-3": None})
    assert found.exit_code == 1
    assert "web-2/7" in found.stdout
    assert found.stderr == "web-1 does not answer: cannot connect to host:1\n"


def test_json_has_the_parked_writes_of_followers_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = call(monkeypatch, "parked", {"web-1": LOST, "web-2": {"writes": [WRITE]}}, "--json")
    assert found.exit_code == 1
    assert [each["id"] for each in json.loads(found.stdout)] == ["web-2/7"]
    assert "web-1" in found.stderr


def test_nothing_parked_is_said_only_of_followers_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = call(monkeypatch, "parked", {"web-1": LOST, "web-2": {"writes": []}})
    assert (found.exit_code, found.stdout) == (1, "no write is parked at the followers that answer\n")
    found = call(monkeypatch, "parked", {"web-1": {"writes": []}, "web-2": {"writes": []}})
    assert (found.exit_code, found.stdout, found.stderr) == (0, "no write is parked\n", "")


def test_the_status_names_held_copies_as_its_json_does(monkeypatch: pytest.MonkeyPatch) -> None:
    report: Report = {
        "waiting": {"normal": 0}, "oldest_seconds": {"normal": 0.0}, "parked": {"normal": 0}, "bytes": 0,
        "copies": 2, "held_copies": 31, "trouble": "", "late": False, "set_aside_total": 0, "torn_rows": 0,
    }  # fmt: skip
    found = call(monkeypatch, "status", {"web-1": report})
    assert found.exit_code == 0
    heading, row = found.stdout.splitlines()
    assert "held copies" in heading
    assert "31" in row
    assert json.loads(call(monkeypatch, "status", {"web-1": report}, "--json").stdout)["web-1"]["held_copies"] == 31
