"""The staleness of a region: how far it is behind its masters.

It is known while nothing happens, grows while replication stands still, is respected by reads with a bound, and is
shown by `tao status`. Further tests pause a tailer, or make critical reads without leaders.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiomysql
import pytest
import pytest_asyncio

from tao.client import DeadlineExceeded, Graph, SomeFailed, StaleRead, Unavailable, connect
from tao.devcluster.layout import Shape
from tao.devcluster.state_folder import service_accounts
from tao.model.ids import SHARD_SHIFT
from tao.observability.logs import logger
from tao.storage.names import schema_name
from tao.topology.document import parse_topology
from tao.watcher.server import WatcherServer
from tao.watcher.settings import ProbeSettings, WatcherSettings
from tests.e2e.cluster_access import PATIENT, patient_stats
from tests.e2e.region_access import Regions, running_regions, until
from tests.rigs.forked_programs import run_tao

pytestmark = [pytest.mark.e2e, pytest.mark.database]

SMALL_SECONDS = 4.0
"""Three heartbeats are a second apart at most, on a machine that does other things too."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    shape = Shape(regions=2, tiers=2, followers=1, leaders=1, databases=1, shards=4)
    async with running_regions(tmp_path_factory.mktemp("cluster"), shape) as running:
        yield running


@pytest.fixture
async def east(regions: Regions) -> AsyncIterator[Graph]:
    async with connect(regions.target, region="east", settings=PATIENT) as graph:
        yield graph


@pytest.fixture
async def west(regions: Regions) -> AsyncIterator[Graph]:
    async with connect(regions.target, region="west", settings=PATIENT) as graph:
        yield graph


async def ages(regions: Regions, region: str) -> list[float | None]:
    """Return the age of the region's database according to each cache server of the region."""
    names = [
        server.name
        for each in regions.topology.regions
        if each.name == region
        for tier in (each.leaders, *each.followers)
        for server in tier.servers
    ]
    stats = [await patient_stats(regions.cluster.admin(name)) for name in names]
    return [age for each in stats for age in each["staleness_seconds"].values()]


async def is_fresh(regions: Regions, region: str) -> bool:
    return all(age is not None and age < SMALL_SECONDS for age in await ages(regions, region))


async def is_older(regions: Regions, region: str, seconds: float) -> bool:
    return all(age is not None and age > seconds for age in await ages(regions, region))


async def status(regions: Regions, *arguments: str) -> tuple[int, str]:
    ended = await run_tao("status", "--connect", regions.target, *arguments, folder=Path(regions.target).parent)
    assert ended.errors == ""
    return ended.status, ended.output


async def nothing_is_wrong(regions: Regions) -> bool:
    return (await status(regions))[0] == 0


async def name_of(graph: Graph, user: int, **options: Any) -> str:
    found = await graph.obj_get(user, **options)
    assert found is not None
    return str(found.fields["name"])


async def test_an_idle_cluster_reports_almost_no_lag(regions: Regions) -> None:
    for region in ("east", "west"):
        await until(partial(is_fresh, regions, region), f"{region} is never fresh")
    await until(lambda: nothing_is_wrong(regions), "something is always wrong")
    code, text = await status(regions, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["problems"] == []
    assert {row["name"]: row["state"] for row in found["tailers"]} != {}
    (database,) = found["databases"]
    assert database["master_region"] == "east"
    assert set(database["servers"].values()) == {"up"}


async def test_while_replication_stands_still_reads_that_ask_for_fresh_data_have_them_from_the_master_region(
    regions: Regions, east: Graph, west: Graph
) -> None:
    user = await east.obj_add("user", {"name": "old"})
    await until(lambda: is_known(west, user), "the object never came")
    await until(lambda: is_fresh(regions, "west"))
    async with regions.replication_held():
        await east.obj_update(user, {"name": "new"})
        await until(lambda: is_older(regions, "west", 2.0), "west does not grow older")
        assert await name_of(west, user) == "old"
        assert await name_of(west, user, max_staleness_ms=600_000) == "old"
        assert await name_of(west, user, max_staleness_ms=1_500) == "new"
        (many,) = await west.obj_get_many([user], max_staleness_ms=1_500)
        assert many is not None
        assert many.fields["name"] == "new"
        code, text = await status(regions, "--max-staleness", "2")
        assert code == 1
        assert "west: the data served of db-1 may be up to" in text
        await until(lambda: is_fresh(regions, "east"), "east is behind itself")
    await until(lambda: is_fresh(regions, "west"), "west never catches up")
    await until(lambda: nothing_is_wrong(regions), "something stays wrong")
    assert await name_of(west, user, max_staleness_ms=600_000) == "new"


async def is_known(graph: Graph, user: int) -> bool:
    return await graph.obj_get(user) is not None


@asynccontextmanager
async def watched(regions: Regions, region: str) -> AsyncIterator[None]:
    """Run a watcher that marks lagging replicas soon, and does not touch masters."""
    accounts = service_accounts(regions.cluster.record.passwords)
    settings = WatcherSettings(
        name=f"{region}-watcher",
        region=region,
        topology_file=regions.cluster.topology_path,
        administrator_user="tao_admin",
        administrator_password=accounts.administrator.password,
        replicator_password=accounts.replicator.password,
        leases=False,
        auto_promote=False,
        probes=ProbeSettings(lag_down_seconds=2.0, lag_up_seconds=1.0),
    )
    watcher = await WatcherServer(settings, logger("watcher")).start()
    try:
        yield
    finally:
        await watcher.close()


@asynccontextmanager
async def held_up(regions: Regions, server: str, shard: int) -> AsyncIterator[None]:
    """A reader's lock keeps the replica from applying what it receives."""
    database = regions.cluster.database(server)
    account = database.accounts.administrator
    connection = await aiomysql.connect(
        host=database.host, port=database.port, user=account.user, password=account.password
    )
    try:
        async with connection.cursor() as cursor:
            await cursor.execute(f"LOCK TABLES {schema_name(shard)}.objects READ")
        yield
    finally:
        connection.close()


async def test_a_lagging_replica_is_marked_and_avoided_until_it_has_caught_up(
    regions: Regions, east: Graph, west: Graph
) -> None:
    user = await east.obj_add("user", {"name": "old"})
    await until(lambda: is_known(west, user), "the object never came")

    async def is_marked() -> bool:
        topology = parse_topology(regions.cluster.topology_path.read_bytes(), "topology")
        return topology.databases[0].servers["west"].down

    async def is_not_marked() -> bool:
        return not await is_marked()

    async def missed_in(region: str) -> bool:
        """Return whether a miss of west was answered in ``region``."""
        before = (await regions.stats_of_leader("west", user))["reads_sent_to_master_region"]
        await regions.invalidate_shards_of("west", user)
        await name_of(west, user)
        sent = (await regions.stats_of_leader("west", user))["reads_sent_to_master_region"] - before
        return bool(sent) is (region == "east")

    async with watched(regions, "west"):
        async with held_up(regions, "west-db-1", user >> SHARD_SHIFT):
            await east.obj_update(user, {"name": "new"})
            await until(is_marked, "the lagging replica is not marked")
            await until(partial(missed_in, "east"), "misses still go to the replica")
            assert await name_of(west, user) == "new"
        await until(is_not_marked, "it is near again, and still marked")
        await until(partial(missed_in, "west"), "misses still cross the ocean")
        assert await name_of(west, user) == "new"


async def test_a_region_that_is_cut_off_serves_what_it_has_and_rejects_reads_that_ask_for_more(
    regions: Regions, east: Graph, west: Graph
) -> None:
    user = await east.obj_add("user", {"name": "known"})
    await until(lambda: is_known(west, user), "the object never came")
    # Wait before the cut: a region that has received nothing since its last change of source has no known age.
    await until(lambda: is_fresh(regions, "west"), "west is never fresh")
    await regions.cut()
    try:
        await until(lambda: is_older(regions, "west", 2.0), "west does not grow older")
        assert await name_of(west, user) == "known"
        with pytest.raises((StaleRead, Unavailable, DeadlineExceeded, SomeFailed)):
            await name_of(west, user, max_staleness_ms=1_500)
        code, text = await status(regions, "--max-staleness", "2", "--json")
        assert code == 1
        assert [problem for problem in json.loads(text)["problems"] if problem.startswith("west: the data served")]
    finally:
        await regions.heal()
    await until(lambda: is_fresh(regions, "west"), "west never catches up")
    assert await name_of(west, user, max_staleness_ms=600_000) == "known"


async def test_a_region_with_a_paused_tailer_reports_its_age_and_catches_up_when_it_resumes(
    regions: Regions, east: Graph, west: Graph
) -> None:
    (name,) = regions.tailers("west")
    (pid,) = [process.pid for process in (await regions.cluster.status()).processes if process.name == name]
    assert pid is not None
    async with connect(regions.target, region="west", tier="tier-2", settings=PATIENT) as far:
        users = [await east.obj_add("user", {"name": "old"}) for _ in range(6)]
        first, *_, witness = users

        async def show(wanted: str, edges: int) -> bool:
            """Return whether both tiers show the name, and ``edges`` edges of the first user to the second."""
            for graph in (west, far):
                found = await graph.obj_get_many(users)
                if {user and user.fields["name"] for user in found} != {wanted}:
                    return False
                if await graph.assoc_count(first, "follows") != edges:
                    return False
            return True

        await until(lambda: show("old", 0), "the objects never came")
        await until(lambda: is_fresh(regions, "west"), "west is never fresh")
        os.kill(pid, signal.SIGSTOP)
        try:
            for user in users:
                for number in range(10):
                    await east.obj_update(user, {"name": f"name {number}"})
            await east.assoc_add(first, "follows", users[1], 1)
            await until(lambda: is_older(regions, "west", 2.0), "west does not grow older")
            assert await show("old", 0), "another source delivered the change, so the test proves nothing"
            await until(lambda: is_fresh(regions, "east"), "east is behind itself")
            assert await name_of(west, witness, max_staleness_ms=1_500) == "name 9"
            await east.assoc_add(first, "follows", users[2], 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: show("name 9", 2), "writes made meanwhile are never delivered")
        await until(lambda: is_fresh(regions, "west"), "west never catches up")
    await regions.assert_converges()


@pytest.mark.asyncio(loop_scope="module")  # of the cluster, whose processes are killed and started
@pytest.mark.parametrize("region", ["east", "west"])
async def test_a_critical_read_without_the_leader_of_a_region_is_answered_with_what_the_master_has(
    regions: Regions, region: str
) -> None:
    async with (
        connect(regions.target, region="east", settings=PATIENT) as east,
        connect(regions.target, region="west", settings=PATIENT) as west,
    ):
        user = await east.obj_add("user", {"name": "old"})
        await until(lambda: is_known(west, user), "the object never came")
        assert await name_of(east, user) == "old"
        leader = f"{region}-leader-1"
        await regions.cluster.kill(leader)
        try:
            async with regions.replication_held():
                # Caches without a leader in their region or the master's cannot receive this change, nor can west's
                # database.
                await regions.sql(
                    "east-db-1",
                    f"UPDATE objects SET data = x'8101a36e6577', version = version + 1 WHERE id = {user}",  # {1: "new"}
                    shard=user >> SHARD_SHIFT,
                )
                # Caches whose leader runs receive the change through the binlog.
                for graph in (east, west) if region == "east" else (west,):
                    assert await name_of(graph, user) == "old"
                    assert await name_of(graph, user, critical=True) == "new"
        finally:
            await regions.cluster.restart(leader)
    await regions.assert_converges()
