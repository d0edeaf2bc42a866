"""A database with a standby in its master's region loses its master under writes: the standby goes on, in a cluster of
one region and in one of two."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.model.topology import Database
from tests.e2e.cluster_access import patient_stats
from tests.e2e.region_access import RTT_MS, until
from tests.e2e.steady_writers import assert_nothing_lost, command, regions_of, topology_of, writing
from tests.rigs.forked_programs import run_tao

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

ONE_REGION = Shape(tiers=1, followers=1, leaders=1, shards=4, watchers=1, standby=True)
TWO_REGIONS = Shape(regions=2, tiers=1, followers=1, leaders=1, shards=4, watchers=1, standby=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[ONE_REGION, TWO_REGIONS], ids=["one", "several"])
async def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("standby") / ".tao-dev",
        shape=request.param,
        durability=Durability.RELAXED,
        semi_sync=True,
        rtt_ms=RTT_MS,
    )
    async with DevCluster(settings) as cluster:
        yield cluster


def database_of(cluster: DevCluster) -> Database:
    (database,) = topology_of(cluster).databases
    return database


def master_and_standby(cluster: DevCluster) -> tuple[str, str]:
    database = database_of(cluster)
    return database.servers[database.master_region].name, database.standbys[database.master_region].name


async def verified(cluster: DevCluster) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit status of `tao verify` and what it found at each replica."""
    ended = await run_tao("verify", "--all-regions", "--json", folder=cluster.topology_path.parent.parent)
    return ended.status, msgspec.json.decode(ended.output)["replicas"]["servers"]


async def commits_wait(cluster: DevCluster) -> bool:
    """Return whether every watcher says that commits wait for a replica."""
    names = [name for name, role in cluster.processes.items() if role is Role.WATCHER]
    stats = [await patient_stats(cluster.admin(name)) for name in names]
    return [each["waits_for_replica"] for each in stats] == [{"db-1": True}] * len(names)


async def until_marked(cluster: DevCluster, name: str, *, down: bool) -> None:
    async def is_so() -> bool:
        return any(each.name == name and each.down is down for each in database_of(cluster).places.values())

    await until(is_so, f"{name} is {'not ' if down else 'still '}marked down")


async def test_a_killed_master_is_replaced_by_its_standby_and_nothing_acknowledged_is_lost(
    cluster: DevCluster,
) -> None:
    master, standby = master_and_standby(cluster)
    before = database_of(cluster)

    async def is_exchanged() -> bool:
        return master_and_standby(cluster) == (standby, master)

    async with writing(cluster, before.master_region) as writers:
        await cluster.kill(master)
        await until(is_exchanged, "the standby was not promoted")
        await writers.go_on()
    after = database_of(cluster)
    assert (after.master_region, after.version_epoch) == (before.master_region, before.version_epoch + 1)
    assert after.standbys[after.master_region].down
    await assert_nothing_lost(cluster, writers)


async def test_the_lost_master_is_unchecked_until_it_is_back_and_then_it_is_the_standby(cluster: DevCluster) -> None:
    promoted, lost = master_and_standby(cluster)
    status, replicas = await verified(cluster)
    assert status == 1
    assert {line["server"] for line in replicas if line["error"]} == {lost}
    await cluster.restart(lost)
    assert (await cluster.status()).processes[0].replication is not None
    status, _, errors = await command(cluster, "rejoin", lost)
    if status:
        # It was killed with a commit in its binlog that no replica had, which was never acknowledged.
        assert f"which the master {promoted} never had" in errors
        status, _, errors = await command(cluster, "reseed", lost)
    assert status == 0, errors
    await until_marked(cluster, lost, down=False)
    assert master_and_standby(cluster) == (promoted, lost)
    async with writing(cluster, database_of(cluster).master_region) as writers:
        pass
    await assert_nothing_lost(cluster, writers)
    await regions_of(cluster).assert_converges()
    status, replicas = await verified(cluster)
    assert status == 0
    (line,) = [line for line in replicas if line["server"] == lost]
    assert line["region"] == f"{database_of(cluster).master_region}/standby"
    assert line["rows"] > 0


async def test_a_planned_switch_exchanges_the_two_and_loses_nothing(cluster: DevCluster) -> None:
    master, standby = master_and_standby(cluster)
    region = database_of(cluster).master_region
    async with writing(cluster, region) as writers:
        status, done, errors = await command(cluster, "promote", "db-1", "--to", f"{region}/standby")
        assert status == 0, errors
        assert done["master"] == standby
        assert master in done["following"]
        await writers.go_on()
    # At once, or a moment later: the replica may take longer than a promotion waits for it.
    await until(lambda: commits_wait(cluster), "commits wait for no replica")
    assert master_and_standby(cluster) == (standby, master)
    await assert_nothing_lost(cluster, writers)
    await regions_of(cluster).assert_converges()


async def test_a_cluster_that_is_stopped_starts_again_with_the_server_as_master_that_was_promoted(
    cluster: DevCluster,
) -> None:
    before = master_and_standby(cluster)
    async with writing(cluster, database_of(cluster).master_region) as writers:
        pass
    await cluster.stop()
    await cluster.start()
    assert master_and_standby(cluster) == before
    await assert_nothing_lost(cluster, writers)
    async with writing(cluster, database_of(cluster).master_region):
        pass
