"""Scenarios ask a cluster that somebody else runs, at toy size, and leave it running."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from loadtest.published.run import SCHEMA
from loadtest.scenario import SCHEMA as PLAIN_SCHEMA
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tests.rigs.forked_programs import forked_scenario

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("running") / "dev",
        shape=Shape(tiers=2, followers=1, leaders=1, databases=1, shards=4),
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
        cache_mb=0.5,
    )
    async with DevCluster(settings) as cluster:
        yield cluster


async def toy(*arguments: str) -> tuple[int, str]:
    """Exit status and what was printed."""
    async with forked_scenario(*arguments, "--toy") as scenario:
        ended = await scenario.ended()
    return ended.status, ended.output + ended.errors


async def test_a_cluster_that_runs_is_asked_and_goes_on_running(cluster: DevCluster, tmp_path: Path) -> None:
    time_to_restart = tmp_path / "time-to-restart"

    async def asked(name: str, *arguments: str) -> Any:
        json_file = tmp_path / f"{name}.json"
        where = ("--topology", str(cluster.topology_path), "--json", str(json_file))
        status, printed = await toy(name, *where, *arguments)
        assert status == 0, printed
        assert cluster.running == list(cluster.processes)
        return msgspec.json.decode(json_file.read_bytes())

    async def operator() -> None:
        while not time_to_restart.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.05)
        await cluster.restart("follower-1a")

    run = await asked("run")
    herd = await asked("herd")
    restarting = asyncio.create_task(operator())
    storm = await asked("storm", "--restart-command", f"touch {time_to_restart}")
    await restarting
    assert (run["settings"]["own_cluster"], run["server_cpu_us_per_query"]) == (False, None)
    assert run["cache_bytes"] == 1 << 19
    assert 0 < run["hit_rate"] <= 1
    assert run["wrong_answers"] == 0
    assert (herd["own_cluster"], herd["database_queries"]) == (False, {"object": None, "list": None})
    for each in herd["herds"]:
        assert (each["answered"], each["failed"], each["wrong"]) == (herd["clients"], {}, 0)
        # Nobody had it: one fetch of the leader's, or what each follower wanted of it.
        assert 1 <= each["leader_fetches"] <= herd["followers"]
    assert (storm["own_cluster"], storm["failed"], storm["database_selects_before"]) == (False, {}, None)
    assert storm["tier_away_seconds"] > 0


async def test_a_tier_that_is_not_restarted_is_reported(cluster: DevCluster) -> None:
    where = ("storm", "--topology", str(cluster.topology_path), "--after-seconds", "2")
    status, printed = await toy(*where)
    assert status == 1
    assert "follower-1a of tier tier-1 had not been restarted when the load ended" in " ".join(printed.split())
    status, printed = await toy(*where, "--restart-command", "ls /nowhere")
    assert status == 1
    assert "--restart-command ended with status 2" in " ".join(printed.split())


async def test_two_regions_that_run_are_measured_as_far_apart_as_they_are(tmp_path: Path) -> None:
    settings = ClusterSettings(
        state_dir=tmp_path / "dev",
        shape=Shape(regions=2, tiers=1, followers=1, leaders=1, databases=1, shards=4),
        schema_file=PLAIN_SCHEMA,
        rtt_ms=10.0,
        durability=Durability.RELAXED,
    )
    options: dict[str, tuple[str, ...]] = {"geo": ("--rtt-ms", "10"), "whale": ()}
    async with DevCluster(settings) as cluster:
        for name, chosen in options.items():
            where = ("--topology", str(cluster.topology_path), "--json", str(tmp_path / f"{name}.json"))
            status, printed = await toy(name, *where, *chosen)
            assert status == 0, printed
        assert cluster.running == list(cluster.processes)
    found = msgspec.json.decode((tmp_path / "geo.json").read_bytes())
    assert set(found["read_ms"]) == {"remote_region", "remote_region_misses"}
    assert found["write_ms"]["remote_region"]["p50"] >= found["rtt_ms"] == 10
    whale = msgspec.json.decode((tmp_path / "whale.json").read_bytes())
    assert whale["wrong_answers"] == 0
    assert whale["after_without_database:ratio"] > 0.9
