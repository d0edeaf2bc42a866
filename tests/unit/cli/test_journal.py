"""`tao journal parked` shows what the followers that answer have, and names those that do not."""

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


def parked(monkeypatch: pytest.MonkeyPatch, reports: dict[str, Report | TaoError | None], *options: str) -> Result:
    async def current_topology(_: object) -> Topology:
        return Topology(version=1, shards=1, regions=(), databases=())

    async def journal_reports(*_: object) -> dict[str, Report | TaoError | None]:
        return reports

    monkeypatch.setattr("tao.cli.journal.target_of", lambda: None)
    monkeypatch.setattr("tao.cli.journal.current_topology", current_topology)
    monkeypatch.setattr("tao.cli.journal.journal_reports", journal_reports)
    return CliRunner().invoke(tao, ["journal", "parked", *options], catch_exceptions=False)


def test_parked_writes_of_followers_that_answer_are_shown_and_the_others_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parked(monkeypatch, {"web-1": LOST, "web-2": {"writes": [WRITE]}, "web-3": None})
    assert found.exit_code == 1
    assert "web-2/7" in found.stdout
    assert found.stderr == "web-1 does not answer: cannot connect to host:1\n"


def test_json_has_the_parked_writes_of_followers_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parked(monkeypatch, {"web-1": LOST, "web-2": {"writes": [WRITE]}}, "--json")
    assert found.exit_code == 1
    assert [each["id"] for each in json.loads(found.stdout)] == ["web-2/7"]
    assert "web-1" in found.stderr


def test_nothing_parked_is_said_only_of_followers_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parked(monkeypatch, {"web-1": LOST, "web-2": {"writes": []}})
    assert (found.exit_code, found.stdout) == (1, "no write is parked at the followers that answer\n")
    found = parked(monkeypatch, {"web-1": {"writes": []}, "web-2": {"writes": []}})
    assert (found.exit_code, found.stdout, found.stderr) == (0, "no write is parked\n", "")
