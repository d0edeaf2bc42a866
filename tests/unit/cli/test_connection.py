"""A command asks the followers of the named region, else the address's own region, else the topology's first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tao.admin.connection import ClusterTarget, current_schema, current_topology, open_graph, region_of
from tao.cli.connection import on_graph, target_of
from tao.cli.options import region_options
from tao.etcd.client import EtcdUnavailable
from tao.model.errors import TaoError, TlsMismatch, TopologyError, Unavailable
from tao.topology.document import dump_topology
from tests.unit.leader.test_forwarded_writes import topology


@pytest.fixture
def document(tmp_path: Path) -> str:
    file = tmp_path / "topology.json"
    file.write_text(dump_topology(topology(shard_1_in="west")))
    return str(file)


def region_with(target: str, *arguments: str, environment: str | None = None) -> str:
    @click.command()
    @region_options
    def command() -> None:
        click.echo(asyncio.run(region_of(target_of())) or "its own")

    result = CliRunner().invoke(
        command, ["--connect", target, *arguments], env={"TAO_REGION": environment}, catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout.strip()


def test_a_server_that_cannot_be_reached_refers_to_the_command_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connected(_: ClusterTarget) -> AsyncIterator[None]:
        yield

    async def fail(_: object) -> None:
        raise Unavailable("follower-1a is down")

    monkeypatch.setattr("tao.cli.connection.open_graph", connected)

    @click.command()
    @region_options
    def command() -> None:
        on_graph(fail)

    result = CliRunner().invoke(command, ["--connect", "127.0.0.1:1"])
    assert isinstance(result.exception, Unavailable)
    assert result.exception.__notes__ == ["`tao status` names the servers that do not answer"]


def test_for_a_topology_file_it_is_the_first_region(document: str) -> None:
    assert region_with(document) == region_with(f"file:{document}") == "east"


def test_for_an_address_it_is_the_region_of_its_follower() -> None:
    assert region_with("127.0.0.1:7000") == "its own"


def test_a_named_region_wins_and_the_option_over_the_environment(document: str) -> None:
    assert region_with(document, environment="west") == "west"
    assert region_with(document, "--region", "north", environment="west") == "north"
    assert region_with("127.0.0.1:7000", "--region", "west") == "west"


async def test_outside_of_a_command_it_is_the_first_region(document: str) -> None:
    assert await region_of(ClusterTarget(document)) == "east"


async def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="cannot be read"):
        await region_of(ClusterTarget(str(tmp_path / "none.json")))


@pytest.mark.parametrize(("failure", "notes"), [(Unavailable("gone"), 1), (TlsMismatch("it speaks TLS"), 0)])
async def test_where_to_connect_is_said_unless_the_error_says_what_to_do(
    failure: TaoError, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("tao.admin.connection.connect", refused)
    with pytest.raises(TaoError) as failed:
        async with open_graph(ClusterTarget("127.0.0.1:1")):
            pass
    assert len(getattr(failed.value, "__notes__", ())) == notes


@pytest.mark.parametrize(("cause", "is_named"), [(EtcdUnavailable("silent"), True), (OSError("no such file"), False)])
async def test_where_etcd_does_not_answer_a_follower_is_named_as_the_way_around_it(
    cause: Exception, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreadable(_: str) -> None:
        raise TopologyError("the topology cannot be read") from cause

    for module in ("tao.admin.connection", "tao.client.graph"):
        monkeypatch.setattr(f"{module}.read_target", unreadable)
    for region in (None, "east"):
        target = ClusterTarget("etcd://127.0.0.1:1/tao", region)
        for asked in (current_topology(target), current_schema(target)):
            with pytest.raises(TopologyError) as failed:
                await asked
            assert ("--connect HOST:PORT" in failed.value.message) is is_named
