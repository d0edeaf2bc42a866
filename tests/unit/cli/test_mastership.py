"""`tao rejoin` names what has to be started before anything is asked or changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tao.cli.commands import tao
from tao.cli.mastership import check_answers
from tao.model.errors import OperatorError
from tao.model.topology import DatabaseServer
from tao.replication.gtid import GtidSet
from tao.replication.promotion_plan import SetMember
from tao.replication.server_statements import MemberState
from tao.storage.dialect import Dialect
from tests.unit.cli.test_databases import topology_of

NOTHING = GtidSet(Dialect.MARIADB, "")
RUNS = MemberState(read_only=True, following=None, executed=NOTHING, received=NOTHING)
MASTER = SetMember("east", "east", RUNS, is_master=True)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[click.Context]:
    with click.Context(click.Command("rejoin")) as context:
        context.meta.update({"tao.file": tmp_path / "topology.json", "tao.state_dir": tmp_path / "dev"})
        yield context


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("members", "said"),
    [
        (
            [MASTER, SetMember("west", "west", None, "error 2003", is_refused=True)],
            "west does not run: nothing listens at its address. Start it first, closed to writes, and repeat this.",
        ),
        (
            [MASTER, SetMember("west", "west", None, "timed out", is_silent=True)],
            "west does not answer. Start it first, closed to writes, and repeat this. (timed out)",
        ),
        (
            [SetMember("east", "east", None, "error 2003", is_master=True), SetMember("west", "west", RUNS)],
            "east, the master of db, does not answer, so nothing can follow it. Start it, or replace it with `tao ",
        ),
    ],
)
def test_a_server_that_does_not_answer_is_to_be_started_first(members: list[SetMember], said: str) -> None:
    with pytest.raises(OperatorError) as failed:
        check_answers(members, "west", "db")
    assert failed.value.message.startswith(said)


def test_a_server_of_a_development_cluster_is_started_with_its_command(command: click.Context, tmp_path: Path) -> None:
    command.meta["tao.file"] = None
    with pytest.raises(OperatorError, match=f"Start it first, with `tao dev restart west --state-dir {tmp_path}/dev`"):
        check_answers([MASTER, SetMember("west", "west", None, "error 2003", is_refused=True)], "west", "db")


@pytest.mark.usefixtures("command")
def test_others_that_do_not_answer_and_a_refused_login_are_not_taken_for_it() -> None:
    check_answers([MASTER, SetMember("west", "west", RUNS), SetMember("north", "north", None, "gone")], "west", "db")
    check_answers([MASTER, SetMember("west", "west", None, "access denied", refuses=True)], "west", "db")


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("db-here", "db-here is the master of db by the topology and follows nobody; `tao promote db` makes another"),
        ("nowhere", "there is no database server 'nowhere'; there are db-here"),
    ],
)
def test_what_cannot_rejoin_is_refused_before_anything_is_asked(server: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(topology_of(DatabaseServer(name="db-here", port=1)))
    passwords = {"TAO_ADMIN_PASSWORD": "secret", "TAO_REPLICATOR_PASSWORD": "secret"}
    result = CliRunner().invoke(tao, ["rejoin", server, "--topology", str(path)], env=passwords, catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"tao: {said}")
