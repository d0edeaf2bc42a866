"""`tao database split` and `balance` say why they have nothing to move, and JSON keeps its shape."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tao.admin.shard_balance import MovePlan
from tao.cli import database
from tao.cli.commands import tao


@pytest.mark.parametrize("command", [("split", "one", "--into", "two"), ("balance",)])
def test_a_plan_without_moves_says_why(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    async def plan(*_: object) -> MovePlan:
        return MovePlan([], "the databases are equal")

    monkeypatch.setattr(database, "_tools", lambda *_: (None, None, None))
    monkeypatch.setattr(database, f"plan_{command[0]}_of", plan)
    text = CliRunner().invoke(tao, ["database", *command], catch_exceptions=False)
    assert (text.exit_code, text.stdout) == (0, "0 shards moved: the databases are equal\n")
    document = CliRunner().invoke(tao, ["database", *command, "--json"], catch_exceptions=False)
    assert json.loads(document.stdout) == {"moves": []}
