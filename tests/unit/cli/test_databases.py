"""`tao accounts`, `tao migrate` and `tao ready`: a bare database server becomes one that leaders can use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tao.admin.documents import example_schema_file
from tao.cli import databases
from tao.cli.commands import tao
from tao.devcluster.database import DatabaseInstance
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.storage.dialect import SessionSetup
from tao.storage.session import ServerAccount, open_session
from tao.topology.document import dump_topology

SHARDS = 3


def call(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(tao, list(arguments), env=environment, catch_exceptions=False)


def topology_of(server: DatabaseServer) -> str:
    tier = Tier(name="tier", servers=(CacheServer(name="follower", grpc="127.0.0.1:7000"),))
    leaders = Tier(name="leaders", servers=(CacheServer(name="leader", grpc="127.0.0.1:7003"),))
    return dump_topology(
        Topology(
            version=1,
            shards=SHARDS,
            regions=(Region(name="here", leaders=leaders, followers=(tier,)),),
            databases=(Database(name="db", master_region="here", servers={"here": server}, shards=((0, SHARDS - 1),)),),
        )
    )


@pytest.fixture
def topology(tmp_path: Path) -> str:
    path = tmp_path / "topology.json"
    path.write_text(topology_of(DatabaseServer(name="db-here", port=1)))
    return str(path)


def test_passwords_are_taken_from_the_environment(topology: str) -> None:
    schema = str(example_schema_file())
    for command, said in (
        (
            ("accounts",),
            "TAO_ADMIN_PASSWORD, TAO_LEADER_PASSWORD, TAO_READER_PASSWORD, TAO_REPLICATOR_PASSWORD are not",
        ),
        (("replicate",), "TAO_ADMIN_PASSWORD, TAO_REPLICATOR_PASSWORD are not set"),
        (("migrate", "--schema", schema), "TAO_ADMIN_PASSWORD is not set"),
    ):
        result = call(*command, "--topology", topology, "--yes")
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
        assert "--state-dir" not in result.stderr, "these commands do not have it"


def test_nothing_is_migrated_at_a_master_that_was_replaced_since_the_question(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def promote(_question: str) -> None:
        Path(topology).write_text(topology_of(DatabaseServer(name="db-there", port=1)))

    monkeypatch.setattr(databases, "ask", promote)
    schema = str(example_schema_file())
    result = call("migrate", "--topology", topology, "--schema", schema, TAO_ADMIN_PASSWORD="x")
    assert (result.exit_code, "a master was replaced since the question" in result.stderr) == (2, True)


def test_nothing_is_done_without_a_yes(topology: str) -> None:
    schema = str(example_schema_file())
    result = call("migrate", "--topology", topology, "--schema", schema, TAO_ADMIN_PASSWORD="x")
    assert (result.exit_code, "there is no input to ask for confirmation: repeat with --yes" in result.stderr) == (
        2,
        True,
    )
    assert "Bring 3 shards on db-here up to date?" in result.stderr


def test_a_database_server_that_does_not_answer_is_named(topology: str) -> None:
    schema = str(example_schema_file())
    result = call("migrate", "--topology", topology, "--schema", schema, "--yes", TAO_ADMIN_PASSWORD="x")
    assert result.exit_code == 3
    assert "127.0.0.1:1" in result.stderr


def test_a_server_that_is_not_there_is_not_ready() -> None:
    result = call("ready", "--admin", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stderr


@pytest.mark.parametrize("address", ["foo", "host:", "host:port", "unix:/s"])
def test_an_admin_address_of_another_form_is_refused(address: str) -> None:
    result = call("ready", "--admin", address)
    assert result.exit_code == 2
    assert f"{address!r} is not HOST:PORT" in result.stderr


@pytest.fixture
def private_shards(database_server: DatabaseInstance, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A topology file for the suite's database server, and the environment of an operator; shards go at the end."""
    accounts = database_server.accounts
    path = tmp_path / "topology.json"
    path.write_text(topology_of(DatabaseServer(name="db-here", port=database_server.port)))
    login = ServerAccount(
        "127.0.0.1",
        database_server.port,
        accounts.administrator.user,
        accounts.administrator.password,
        socket="",
        tls=None,
    )
    environment = {
        "TAO_ADMIN_PASSWORD": accounts.administrator.password,
        "TAO_LEADER_PASSWORD": accounts.leader.password,
        "TAO_READER_PASSWORD": accounts.reader.password,
        "TAO_REPLICATOR_PASSWORD": accounts.replicator.password,
        "TAO_WATCHER_PASSWORD": accounts.watcher.password if accounts.watcher is not None else "",
    }
    by_socket = tmp_path / "by-socket.json"
    by_socket.write_text(topology_of(DatabaseServer(name="db-here", socket=str(database_server.socket_path))))
    yield {"topology": str(path), "by_socket": str(by_socket), "environment": environment, "login": login}

    async def drop() -> None:
        deadline = asyncio.get_running_loop().time() + 10
        session = await open_session(login, "db", SessionSetup(writes=True), deadline=deadline)
        for shard in range(SHARDS):
            await session.run(f"DROP DATABASE IF EXISTS tao_{shard:05d}", deadline=deadline)
        session.quit()

    asyncio.run(drop())


@pytest.mark.database
def test_migrating_again_finds_nothing_to_do(private_shards: dict[str, Any]) -> None:
    command = ("migrate", "--topology", private_shards["topology"], "--schema", str(example_schema_file()), "--yes")
    found = [json.loads(call(*command, "--json", **private_shards["environment"]).stdout) for _ in range(2)]
    assert found == [{"shards": SHARDS, "changed": {"db": SHARDS}}, {"shards": SHARDS, "changed": {"db": 0}}]


@pytest.mark.database
def test_accounts_may_be_made_again_and_for_other_hosts(private_shards: dict[str, Any]) -> None:
    command = ("accounts", "--topology", private_shards["by_socket"], "--from", "localhost", "--from", "10.9.%")
    for _ in range(2):
        result = call(*command, "--yes", "--json", **private_shards["environment"])
        assert (result.exit_code, result.stderr) == (0, "")
        assert json.loads(result.stdout) == {"servers": ["db-here"], "hosts": ["localhost", "10.9.%"]}

    async def whence() -> set[str]:
        deadline = asyncio.get_running_loop().time() + 10
        session = await open_session(private_shards["login"], "db", SessionSetup(writes=True), deadline=deadline)
        (rows,) = await session.run("SELECT host FROM mysql.user WHERE user = 'tao_reader'", deadline=deadline)
        session.quit()
        return {str(host) for (host,) in rows}

    assert {"localhost", "10.9.%"} <= asyncio.run(whence())


@pytest.mark.database
def test_accounts_demand_certificates_until_they_are_said_not_to(private_shards: dict[str, Any]) -> None:
    command = ("accounts", "--topology", private_shards["by_socket"], "--from", "10.8.%", "--yes")

    async def demanded() -> str:
        deadline = asyncio.get_running_loop().time() + 10
        session = await open_session(private_shards["login"], "db", SessionSetup(writes=True), deadline=deadline)
        query = "SELECT ssl_type FROM mysql.user WHERE user = 'tao_reader' AND host = '10.8.%%'"
        (((kind,),),) = await session.run(query, deadline=deadline)
        session.quit()
        return kind.decode() if isinstance(kind, bytes) else str(kind)

    found = []
    for require in ((), ("--require", "x509"), (), ("--require", "ssl"), ("--require", "none")):
        assert call(*command, *require, **private_shards["environment"]).exit_code == 0
        found.append(asyncio.run(demanded()))
    assert found == ["", "X509", "X509", "ANY", ""]


@pytest.mark.database
def test_an_account_without_the_right_to_create_accounts_is_refused(private_shards: dict[str, Any]) -> None:
    environment = private_shards["environment"]
    result = call(
        *("accounts", "--topology", private_shards["topology"], "--as-user", "tao_reader", "--yes"),
        **{**environment, "TAO_ROOT_PASSWORD": environment["TAO_READER_PASSWORD"]},
    )
    assert result.exit_code == 2
    assert "db-here" in result.stderr
    assert "Traceback" not in result.stderr
