"""`tao arenas` shows every server's arenas and proposes budgets for the servers of a tier together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tao.cli.commands import tao
from tao.model.errors import Unavailable
from tao.model.topology import CacheServer, Region, Tier, Topology

MB = 1_000_000
ANSWERING = ("follower-1a", "follower-1b")


def arena(name: str, budget: int, **seen: Any) -> dict[str, Any]:
    return {
        "name": name,
        "bytes": budget,
        "budget_bytes": budget,
        "objects": 5,
        "lists": 4,
        "counts": 3,
        "evictions": 0,
        "eviction_age_seconds": None,
        "kept": 0,
        "returns": [0, 0, 0, 0],
        "packed_bytes": 0,
        **seen,
    }


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*ANSWERING, "follower-1c")
    tier = Tier(name="t", servers=tuple(CacheServer(name=name, grpc=f"{name}:1", admin=f"{name}:2") for name in names))
    region = Region(name="east", leaders=Tier(name="leaders", servers=()), followers=(tier,))

    async def current_topology(_: object) -> Topology:
        return Topology(version=1, shards=1, regions=(region,), databases=())

    async def server_stats(admin: str) -> dict[str, Any]:
        if admin.removesuffix(":2") not in ANSWERING:
            raise Unavailable("nobody there")
        full = arena("default", 80 * MB, evictions=9_000, eviction_age_seconds=12.0, returns=[1_000, 1, 0, 0])
        return {"arenas": [full, arena("idle", 80 * MB, bytes=8 * MB)]}

    monkeypatch.setattr("tao.cli.stats.target_of", lambda: None)
    monkeypatch.setattr("tao.cli.stats.current_topology", current_topology)
    monkeypatch.setattr("tao.admin.server_stats.server_stats", server_stats)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(tao, ["arenas", *arguments], catch_exceptions=False)


def test_every_arena_of_every_server_has_a_line_and_a_silent_server_is_named() -> None:
    done = call()
    lines = done.stdout.splitlines()
    assert done.exit_code == 1
    assert "follower-1c: nobody there" in done.stderr
    assert [line.split()[:2] for line in lines[1:]] == [[s, a] for s in ANSWERING for a in ("default", "idle")]
    assert lines[1].split()[2:] == ["80.0", "80.0", "5", "4", "3", "9,000", "12.0", "1,001"]


def test_budgets_are_proposed_for_the_servers_of_a_tier_together() -> None:
    proposed = json.loads(call("--suggest", "--json").stdout)
    assert proposed["east/t"]["idle"]["proposed_bytes"] == 10 * MB
    assert proposed["east/t"]["default"]["proposed_bytes"] == 150 * MB
    assert "150.0" in call("--suggest").stdout
