"""A cluster of two regions with a watcher in each, semi-synchronous: masters are switched and lost under writes;
marks."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability, Flavour
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.processes import read_record
from tao.devcluster.state_folder import StateFolder
from tests.e2e.cluster_access import patient_stats
from tests.e2e.region_access import RTT_MS, until
from tests.e2e.steady_writers import assert_nothing_lost, command, regions_of, topology_of, writing
from tests.rigs.forked_programs import run_tao

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SHAPE = Shape(regions=2, tiers=1, followers=2, leaders=1, shards=4, watchers=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("watched") / ".tao-dev",
        shape=SHAPE,
        durability=Durability.RELAXED,
        semi_sync=True,
        rtt_ms=RTT_MS,
    )
    async with DevCluster(settings) as cluster:
        yield cluster


def marked(cluster: DevCluster) -> set[str]:
    topology = topology_of(cluster)
    caches = {
        server.name
        for region in topology.regions
        for tier in (region.leaders, *region.followers)
        for server in tier.servers
        if server.down
    }
    return caches | {each.name for database in topology.databases for each in database.servers.values() if each.down}


async def until_topology(cluster: DevCluster, condition: Callable[[], bool], what: str) -> None:
    async def holds() -> bool:
        return condition()

    await until(holds, what)


async def watchers(cluster: DevCluster) -> dict[str, dict[str, Any]]:
    names = [name for name, role in cluster.processes.items() if role is Role.WATCHER]
    return {name: await patient_stats(cluster.admin(name)) for name in names if name in cluster.running}


async def active(cluster: DevCluster) -> list[str]:
    return [name for name, stats in (await watchers(cluster)).items() if stats["active"]]


async def the_active_one(cluster: DevCluster) -> str:
    """Wait until just one watcher is active, and return it."""
    found: list[str] = []

    async def is_alone() -> bool:
        found[:] = await active(cluster)
        return len(found) == 1

    await until(is_alone, "not one watcher is active")
    return found[0]


async def commits_wait(cluster: DevCluster, expected: bool) -> bool:
    """Return whether both watchers and `tao status` say that commits wait for a replica, or that they do not."""
    by_watchers = [stats["waits_for_replica"] for stats in (await watchers(cluster)).values()]
    if by_watchers != [{"db-1": expected}] * 2:
        return False
    found = await state(cluster)
    (row,) = found["databases"]
    warns = any("semi_sync" in each for each in found["problems"])
    return row["waits_for_replica"] is expected and warns is not expected


async def test_a_planned_switch_under_writes_loses_nothing_and_caches_converge(cluster: DevCluster) -> None:
    async with writing(cluster, "east") as east, writing(cluster, "west") as west:
        status, done, errors = await command(cluster, "promote", "db-1", "--to", "west")
        assert status == 0, errors
        assert (done["master"], done["following"]) == ("west-db-1", ["east-db-1"])
        await east.go_on()
    # At once, or a moment later: the replica may take longer than a promotion waits for it.
    await until(lambda: commits_wait(cluster, True), "commits wait for no replica")
    for writers in (east, west):
        assert all(error.retryable or error.reason == "OUTCOME_UNKNOWN" for error in writers.errors)
        await assert_nothing_lost(cluster, writers)
    await regions_of(cluster).assert_converges()


async def test_one_watcher_is_active_and_the_other_takes_over_when_it_is_gone(cluster: DevCluster) -> None:
    first = await the_active_one(cluster)
    await cluster.kill(first)

    async def other_is_active() -> bool:
        return bool(await active(cluster))

    await until(other_is_active, "no watcher is active")
    await cluster.restart(first)
    assert first not in await active(cluster)
    # Either the master's lease was renewed throughout, or the master was reopened.
    async with writing(cluster, "west"):
        pass


async def test_a_hanging_watcher_is_replaced_at_once_and_does_nothing_when_it_resumes(cluster: DevCluster) -> None:
    hung = await the_active_one(cluster)
    (other,) = set(await watchers(cluster)) - {hung}
    identity = read_record(StateFolder(cluster.topology_path.parent).process_record(hung, Role.WATCHER))
    assert identity is not None

    async def other_is_active() -> bool:
        return bool((await patient_stats(cluster.admin(other)))["active"])

    async with writing(cluster, "west") as writers:
        identity.signal(signal.SIGSTOP)
        try:
            await until(other_is_active, "no watcher is active")
            await writers.go_on()
            # A watcher that hung during a renewal is replaced too: the lock of the database is also taken over.
            status, done, errors = await command(cluster, "promote", "db-1", "--to", "east")
            assert (status, done["master"]) == (0, "east-db-1"), errors
            await writers.go_on()
        finally:
            identity.signal(signal.SIGCONT)
        status, done, errors = await command(cluster, "promote", "db-1", "--to", "west")
        assert (status, done["master"]) == (0, "west-db-1"), errors
        await writers.go_on()
    assert await the_active_one(cluster) == other
    await assert_nothing_lost(cluster, writers)


async def test_a_follower_that_is_gone_is_marked_and_one_that_is_back_is_not(cluster: DevCluster) -> None:
    await cluster.kill("west-follower-1a")
    await until_topology(cluster, lambda: "west-follower-1a" in marked(cluster), "it is not marked")
    await cluster.restart("west-follower-1a")
    await until_topology(cluster, lambda: "west-follower-1a" not in marked(cluster), "it is still marked")


async def test_a_drain_without_an_undrain_is_a_problem_until_the_mark_goes_and_commits_wait_again(
    cluster: DevCluster,
) -> None:
    status, drained, errors = await command(cluster, "drain", "east-db-1")
    assert status == 0, errors
    assert drained["notes"] == ["commits of db-1 wait for no replica until tao undrain"]

    await until(lambda: commits_wait(cluster, False), "no watcher reports that commits wait for no replica")
    (problem,) = [each for each in (await state(cluster))["problems"] if "semi_sync" in each]
    assert "would be lost with west-db-1" in problem
    async with writing(cluster, "west"):
        pass
    # It is marked: it may be stopped any moment.
    await until(lambda: commits_wait(cluster, False), "commits wait again")
    # Mark the server up without `tao undrain`, which would make commits wait by itself.
    status, _, errors = await command(cluster, "topology", "mark-up", "east-db-1")
    assert status == 0, errors
    await until(lambda: commits_wait(cluster, True), "commits do not wait again")
    async with writing(cluster, "west"):
        pass


async def state(cluster: DevCluster) -> dict[str, Any]:
    """Return the state that `tao status` prints."""
    ended = await run_tao("status", "--json", folder=cluster.topology_path.parent.parent)
    found: dict[str, Any] = msgspec.json.decode(ended.output)
    return found


async def test_a_killed_master_is_replaced_without_an_operator_and_nothing_acknowledged_is_lost(
    cluster: DevCluster,
) -> None:
    assert topology_of(cluster).databases[0].master_region == "west"
    async with writing(cluster, "east") as writers:
        await cluster.kill("west-db-1")
        await until_topology(
            cluster, lambda: topology_of(cluster).databases[0].master_region == "east", "no server was promoted"
        )
        await writers.go_on()
    await assert_nothing_lost(cluster, writers)
    promotions: list[dict[str, Any]] = []

    async def is_over() -> bool:
        found = [stats["last_promotion"] for stats in (await watchers(cluster)).values()]
        promotions[:] = [each for each in found if each]
        return bool(promotions)

    await until(is_over, "no watcher reports its promotion")
    (done,) = promotions
    assert (done["master"], done["waits_for_replica"]) == ("east-db-1", False)
    await until_topology(cluster, lambda: "west-db-1" in marked(cluster), "the lost master is not marked")


async def test_the_old_master_rejoins_by_one_command_or_is_rejected_with_its_rebuild_command(
    cluster: DevCluster,
) -> None:
    await cluster.restart("west-db-1")
    regions = regions_of(cluster)
    status, _, errors = await command(cluster, "rejoin", "west-db-1")
    # It is rejected if it was killed with a commit in its binlog that no replica had, which was never acknowledged.
    if not status:
        await until_topology(cluster, lambda: "west-db-1" not in marked(cluster), "it is still marked")
        # Write on this server alone, although it is closed: from here on its data have diverged.
        mariadb = cluster.database("west-db-1").binary.flavour is Flavour.MARIADB
        alone = ("STOP SLAVE", "RESET SLAVE ALL") if mariadb else ("STOP REPLICA", "RESET REPLICA ALL")
        by_hand = () if mariadb else ("SET GLOBAL super_read_only = 0",)
        await regions.sql("west-db-1", *alone, *by_hand, "CREATE SCHEMA astray")
        status, _, errors = await command(cluster, "rejoin", "west-db-1")
    assert status == 2
    assert "which the master east-db-1 never had" in errors
    assert "tao reseed west-db-1" in errors
    await until_topology(cluster, lambda: "west-db-1" in marked(cluster), "reads still go there")
    status, done, errors = await command(cluster, "reseed", "west-db-1")
    assert status == 0, errors
    assert done["follows"] == "east-db-1"
    # A watcher with an outdated observation may mark the server once more, until it observes it again.
    await until_topology(cluster, lambda: "west-db-1" not in marked(cluster), "it is still marked")
    async with writing(cluster, "east") as writers:
        pass
    await assert_nothing_lost(cluster, writers)
