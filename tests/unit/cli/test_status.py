"""`tao status` shows problems and rows, and never a traceback, when no server answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tao.cli.commands import tao
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, TailerProcess, Tier, Topology
from tao.topology.document import dump_topology


@pytest.fixture
def topology_file(tmp_path: Path) -> Path:
    """One region whose servers do not run; its leader has no admin port."""
    with reserve_port() as taken:
        nobody = f"{LOOPBACK}:{taken.port}"
    region = Region(
        name="east",
        leaders=Tier(name="leaders", servers=(CacheServer(name="leader-1", grpc=nobody),)),
        followers=(Tier(name="web", servers=(CacheServer(name="web-1", grpc=nobody, admin=nobody),)),),
        tailers=(TailerProcess(name="tailer-1", database="db-1", admin=nobody),),
    )
    database = Database(
        name="db-1", master_region="east", servers={"east": DatabaseServer(name="east-db-1")}, shards=((0, 3),)
    )
    file = tmp_path / "topology.json"
    file.write_text(dump_topology(Topology(version=7, shards=4, regions=(region,), databases=(database,))))
    return file


def call(*arguments: str) -> Result:
    return CliRunner().invoke(tao, ["status", *arguments], catch_exceptions=False)


def test_a_cluster_that_is_down_is_shown_from_its_topology_file(topology_file: Path) -> None:
    result = call("--connect", str(topology_file))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "topology 7",
        "4 problems:",
        "  east: the master of db-1 takes no writes: no leader of its region answers",
    ]
    assert lines[3] == "  east: leader leader-1 does not answer: it has no admin address in the topology"
    assert "follower web-1 does not answer" in lines[4]
    assert "tailer tailer-1 of db-1 does not answer" in lines[5]
    assert result.stderr == ""


def test_the_same_as_json(topology_file: Path) -> None:
    result = call("--connect", str(topology_file), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["topology_version"] == 7
    assert len(found["problems"]) == 4
    assert [row["state"] for kind in ("leaders", "followers", "tailers") for row in found[kind]] == [
        "does not answer"
    ] * 3


def test_the_staleness_limit_must_be_above_zero(topology_file: Path) -> None:
    assert call("--connect", str(topology_file), "--max-staleness", "0").exit_code == 2
