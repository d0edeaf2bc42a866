"""`tao shard` shows its plan and asks, adds up the rates of all servers, and refuses mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tao.admin.server_stats import merge_traffic
from tao.cli.commands import tao
from tao.cli.shard import hot_lines
from tao.model.errors import TaoError, Unavailable
from tao.model.ids import SHARD_SHIFT
from tao.topology import edits
from tao.topology.clones import hosts_of
from tao.topology.document import dump_topology, parse_topology
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import make_topology


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "topology.json"
    path.write_text(dump_topology(make_topology(near=("n-1", "n-2", "n-3"))))
    return path


def call(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(tao, ["shard", *arguments, "--topology", str(file)], catch_exceptions=False)


def hosts(file: Path) -> tuple[str, ...]:
    return hosts_of(parse_topology(file.read_bytes(), str(file)).regions[0].followers[0], 3)


def mark_all_down(file: Path) -> None:
    """So that nobody is waited for."""
    topology = parse_topology(file.read_bytes(), str(file))
    for name in ("n-1", "n-2", "n-3"):
        topology = edits.mark_server(topology, name, down=True)
    file.write_text(dump_topology(topology))


def test_the_plan_is_shown_and_nothing_is_stored_without_a_yes(file: Path) -> None:
    before = file.read_bytes()
    result = call(file, "clone", "3", "--tier", "near", "--copies", "2")
    assert (result.exit_code, "there is no input to ask for confirmation: repeat with --yes" in result.stderr) == (
        2,
        True,
    )
    assert all(name in result.stdout for name in ("n-1", "n-2", "n-3", "home", "clone", "serves"))
    assert file.read_bytes() == before


def test_servers_that_do_not_get_the_change_are_named_and_no_clone_serves(file: Path) -> None:
    home = hosts(file)
    result = call(file, "clone", "3", "--tier", "near", "--yes", "--wait-seconds", "0.2")
    assert (result.exit_code, "n-1, n-2, n-3 did not hear of topology version 2" in result.stderr) == (3, True)
    assert hosts(file) == home


def test_a_command_that_changes_nothing_says_so(file: Path) -> None:
    result = call(file, "unclone", "3", "--tier", "east/near", "--yes", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["version"], found["before"]) == (1, found["after"])
    assert "nothing to change" in call(file, "unclone", "3", "--tier", "near", "--yes").stdout


def test_fewer_clones_are_made_by_unclone_only(file: Path) -> None:
    (home,) = hosts(file)
    topology = parse_topology(file.read_bytes(), str(file))
    others = [name for name in ("n-1", "n-2", "n-3") if name != home]
    file.write_text(dump_topology(edits.move_shard(topology, "east", "near", 3, home, *others)))
    result = call(file, "clone", "3", "--tier", "near", "--yes")
    assert (result.exit_code, "shard 3 has 2 copies: `tao shard unclone` makes them 1" in result.stderr) == (2, True)
    mark_all_down(file)
    assert call(file, "unclone", "3", "--tier", "near", "--yes").exit_code == 0
    assert hosts(file) == (home,)


def test_an_impossible_clone_is_refused_with_the_reason(file: Path) -> None:
    for arguments, text in (
        (("clone", "3", "--tier", "near", "--copies", "3"), "servers for 2 copies of shard 3"),
        (("clone", "99", "--tier", "near"), "there is no shard 99"),
        (("clone", "3", "--tier", "leaders"), "only followers' shards have clones"),
    ):
        result = call(file, *arguments, "--yes")
        assert (result.exit_code, text in result.stderr) == (2, True), result.stderr


def test_rates_of_a_tiers_servers_are_added_and_a_silent_server_is_named() -> None:
    key = 3 << SHARD_SHIFT | 1
    answers: dict[tuple[str, str], pb.Traffic | TaoError] = {
        ("east/near", "n-1"): pb.Traffic(
            shards=[3, 4], shard_rates=[300, 50], key_ids=[key], key_atypes=[0], key_rates=[250], read_rate=400
        ),
        ("east/near", "n-2"): pb.Traffic(
            shards=[3], shard_rates=[100], key_ids=[key], key_atypes=[0], key_rates=[50], read_rate=100
        ),
        ("east/far", "far-1"): Unavailable("away"),
    }
    found = merge_traffic(make_topology(), answers, 1)
    assert found["shards"] == [
        {
            "tier": "east/near",
            "shard": 3,
            "reads_per_second": 400.0,
            "share": 0.8,
            "servers": ["n-1", "n-2"],
            "busiest": "n-1",
        }
    ]
    (hottest,) = found["keys"]
    assert (hottest["id"], hottest["shard"], hottest["reads_per_second"], hottest["share"]) == (key, 3, 300.0, 0.6)
    assert found["silent"] == {"far-1": "away"}


def traffic(*shards: tuple[int, float], total: float = 0.0, key_rate: float = 0.0) -> dict[tuple[str, str], pb.Traffic]:
    key = [shards[0][0] << SHARD_SHIFT | 1] if key_rate else []
    found = pb.Traffic(
        read_rate=total,
        shards=[shard for shard, _ in shards],
        shard_rates=[rate for _, rate in shards],
        key_ids=key,
        key_atypes=[0] * len(key),
        key_rates=[key_rate] * len(key),
    )
    return {("east/near", "n-1"): found}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (traffic(), "nothing is hot: no shard was read"),
        (
            traffic((3, 1.2), (4, 0.8), total=2.0, key_rate=1.2),
            (
                "nothing is hot: the busiest shard, 3 of east/near, has 1.2 reads/s (60% of its tier's); "
                "a clone pays off from 20,000 reads/s at one server"
            ),
        ),
        (
            traffic((3, 25_000), total=50_000),
            (
                "shard 3 of east/near is hot: 25,000.0 reads/s at 1 server; "
                "`tao shard clone 3 --tier east/near --copies 1` adds one"
            ),
        ),
        (
            traffic((3, 2_000), total=4_000, key_rate=1_500),
            (
                "keys are hot, with up to 1,500.0 reads/s: SDKs keep a key from 1,000 reads/s at one server, "
                "and ask for it less"
            ),
        ),
    ],
)
def test_what_the_rates_mean_is_said_however_low_they_are(
    answers: dict[tuple[str, str], pb.Traffic | TaoError], said: str
) -> None:
    total, *lines = hot_lines(merge_traffic(make_topology(), answers, 20))
    assert total.startswith("reads a second over about the last ten seconds: ")
    assert lines == [said]


def test_without_an_answer_nothing_is_said_of_rates() -> None:
    silent: dict[tuple[str, str], pb.Traffic | TaoError] = {("east/near", "n-1"): Unavailable("away")}
    assert hot_lines(merge_traffic(make_topology(), silent, 20)) == [
        "no follower has answered: nothing is known of what is read"
    ]
