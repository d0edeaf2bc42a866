"""`tao doctor` says of each check what was looked at, and why nothing was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tao.admin.diagnosis import DatabaseFacts, Facts, ServerFacts, diagnose
from tao.cli.doctor import _print


def test_a_check_of_databases_names_those_that_do_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    kept = DatabaseFacts("db-a", "db-1", flavour="mariadb", version=(10, 11, 19))
    lost = DatabaseFacts("db-b", "db-1", error="refused")
    for databases, said in (
        ((lost,), "not checked: db-b does not answer"),
        ((lost, replace(lost, name="db-c")), "not checked: db-b, db-c do not answer"),
        ((kept, lost), "ok (1 looked at; db-b does not answer)"),
        ((), "not checked, see --help"),
    ):
        _print(diagnose(Facts(3, (ServerFacts("a", "leader"),), databases)))
        lines = capsys.readouterr().out.splitlines()
        assert f"options of databases: {said}" in lines
        assert "ports of servers accept connections: ok (1 looked at)" in lines
