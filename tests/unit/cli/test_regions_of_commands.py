"""Which region's followers a command asks: the one named, else the address's own, else the topology's first."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tao.cli.connecting import region_of_command
from tao.cli.frame import region_option
from tao.model.errors import TopologyError
from tao.topology.document import dump_topology
from tests.unit.leader.test_elsewhere import topology


@pytest.fixture
def document(tmp_path: Path) -> str:
    file = tmp_path / "topology.json"
    file.write_text(dump_topology(topology(shard_1_in="west")))
    return str(file)


def region_with(target: str, *arguments: str, environment: str | None = None) -> str:
    @click.command()
    @region_option
    def command() -> None:
        click.echo(region_of_command(target) or "its own")

    result = CliRunner().invoke(command, list(arguments), env={"TAO_REGION": environment}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.strip()


def test_of_a_topology_file_it_is_the_first(document: str) -> None:
    assert region_with(document) == region_with(f"file:{document}") == "east"


def test_an_address_says_itself_where_it_is() -> None:
    assert region_with("127.0.0.1:7000") == "its own"


def test_the_one_that_is_named_wins_and_the_option_over_the_environment(document: str) -> None:
    assert region_with(document, environment="west") == "west"
    assert region_with(document, "--region", "north", environment="west") == "north"
    assert region_with("127.0.0.1:7000", "--region", "west") == "west"


def test_outside_of_a_command_it_is_the_first(document: str) -> None:
    assert region_of_command(document) == "east"


def test_a_file_that_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="cannot be read"):
        region_of_command(str(tmp_path / "none.json"))
