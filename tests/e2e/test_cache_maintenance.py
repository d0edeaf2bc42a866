"""Maintenance commands against caches that may be wrong, on real servers.

They are the history of a key, bulk invalidation by each selector, verification, repair of counts, and the checker in
leaders.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiomysql
import pytest
import pytest_asyncio
from click.testing import CliRunner

from tao.admin.access import ReaderLogin, access_of
from tao.cli.commands import tao
from tao.client import Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Shape
from tao.devcluster.state_folder import service_accounts
from tao.leader.consistency_checker import CheckerSettings, ConsistencyChecker
from tao.model.changes import ObjectChange, ShardMessages
from tao.model.ids import SHARD_SHIFT
from tao.observability.logs import logger
from tao.runtime.clock import LoopClock
from tao.schema.registry import load_schema
from tao.storage.names import schema_name
from tao.topology.document import parse_topology
from tests.e2e.cluster_access import PATIENT, patient_stats, running_cluster
from tests.e2e.region_access import until

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SHAPE = Shape(tiers=2, followers=1, leaders=2, databases=1, shards=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    async with running_cluster(tmp_path_factory.mktemp("cluster"), SHAPE) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), settings=PATIENT) as found:
        yield found


def login_of(cluster: DevCluster) -> ReaderLogin:
    reader = service_accounts(cluster.record.passwords).reader
    topology = parse_topology(cluster.topology_path.read_bytes(), "topology")
    schema = load_schema(cluster.schema_path.read_text(), str(cluster.schema_path))
    return ReaderLogin(topology, schema, reader.user, reader.password)


async def command(cluster: DevCluster, *arguments: str) -> tuple[int, Any]:
    """Run a command; return its exit status, and the JSON that it printed."""
    environment = {
        "TAO_CONNECT": str(cluster.topology_path),
        "TAO_READER_PASSWORD": service_accounts(cluster.record.passwords).reader.password,
    }
    result = await asyncio.to_thread(CliRunner().invoke, tao, [*arguments, "--json"], env=environment)
    assert result.exit_code in (0, 1), (result.output, result.exception)
    return result.exit_code, json.loads(result.stdout)


async def checked(cluster: DevCluster, *arguments: str) -> tuple[int, Any]:
    return await command(cluster, *arguments, "--schema", str(cluster.schema_path))


async def change_rows(cluster: DevCluster, shard: int, *statements: str, in_binlog: bool = False) -> None:
    """Change rows past the leaders; without ``in_binlog`` as restoring a part of a backup would."""
    (database,) = login_of(cluster).topology.databases
    (server,) = database.servers.values()
    admin = service_accounts(cluster.record.passwords).administrator
    connection = await aiomysql.connect(
        host=server.host,
        port=server.port,
        unix_socket=server.socket or None,
        user=admin.user,
        password=admin.password,
        db=schema_name(shard),
        autocommit=True,
    )
    try:
        async with connection.cursor() as cursor:
            await cursor.execute("SET sql_log_bin = %s", (int(in_binlog),))
            for statement in statements:
                await cursor.execute(statement)
    finally:
        connection.close()


def servers(cluster: DevCluster) -> list[str]:
    (region,) = login_of(cluster).topology.regions
    return [server.name for tier in (region.leaders, *region.followers) for server in tier.servers]


async def misses(cluster: DevCluster) -> int:
    """Return the misses of all servers together."""
    return sum([(await patient_stats(cluster.admin(name)))["misses"] for name in servers(cluster)])


async def test_each_selector_invalidates_what_it_names_and_no_more(cluster: DevCluster, graph: Graph) -> None:
    user = await graph.obj_add("user", {"name": "a"})
    page = await graph.obj_add("user", {"name": "p"}, near=user)
    await graph.assoc_add(user, "likes", page, 1)
    shard = user >> SHARD_SHIFT

    async def read() -> None:
        assert await graph.obj_get(user) is not None
        assert len(await graph.assoc_range(user, "likes", 0, 10)) == 1

    async def missed_after(*arguments: str) -> tuple[int, dict[str, int]]:
        status, report = await command(cluster, "invalidate", *arguments, "--yes")
        assert status == 0, report
        before = await misses(cluster)
        await read()
        return await misses(cluster) - before, {each["server"]: each["voided"] for each in report["servers"]}

    await read()
    # A key that has to be fetched is missed at the follower and at its leader.
    assert (await missed_after("--shard", str(shard)))[0] == 4
    assert (await missed_after("--shard", str((shard + 1) % 4)))[0] == 0
    assert (await missed_after("--range", "0-3", "--type", "likes"))[0] == 2
    assert (await missed_after("--type", "user"))[0] == 2
    tier_1 = login_of(cluster).topology.regions[0].followers[0].servers[0].name
    missed, invalidated = await missed_after("--server", tier_1, "--shard", str(shard))
    assert (missed, invalidated) == (2, {tier_1: 1})  # its leader still has both
    missed, invalidated = await missed_after("--range", "0-3")
    assert missed == 4
    leaders = [each.name for each in login_of(cluster).topology.regions[0].leaders.servers]
    assert sum(invalidated[name] for name in leaders) == 4
    assert [count for name, count in invalidated.items() if name not in leaders] == [4, 4]


async def test_the_history_of_a_key_explains_why_it_is_stale(cluster: DevCluster, graph: Graph) -> None:
    user = await graph.obj_add("user", {"name": "a"})
    # Cached by a read: for a minute after an invalidation, writes change what is cached and add nothing to it.
    assert await graph.obj_get(user) is not None
    await graph.obj_update(user, {"name": "b"})
    assert await graph.obj_get(user) is not None

    async def has_come_twice() -> bool:
        """Return whether the binlog's copy and the leader's own have come, in any order: the first is applied, the
        other ignored."""
        status, report = await command(cluster, "story", str(user))
        assert status == 0, report
        second = [(event["event"], event["cause"]) for event in report["events"] if event["version"] & 0xFFFF == 2]
        return {event for event, _ in second} >= {"applied", "ignored"} and (
            {cause for _, cause in second} >= {"committed here", "a write on its way back"}
        )

    await until(has_come_twice, "the story lacks the binlog's copy or the leader's own")

    await change_rows(cluster, user >> SHARD_SHIFT, f"UPDATE objects SET version = version + 1 WHERE id = {user}")
    status, report = await command(cluster, "story", str(user))
    assert status == 1
    holding = {each["server"]: each["cached_version"] for each in report["servers"]}
    assert set(report["stale_servers"]) == {name for name, version in holding.items() if version}
    assert report["stored_version"] & 0xFFFF == 3
    assert max(event["version"] & 0xFFFF for event in report["events"]) == 2  # no server received a message about it

    await command(cluster, "invalidate", "--shard", str(user >> SHARD_SHIFT), "--yes")
    assert await graph.obj_get(user) is not None
    status, report = await command(cluster, "story", str(user))
    assert (status, report["stale_servers"]) == (0, [])
    events = [event["event"] for event in report["events"]]
    assert events.index("voided") < events.index("stored")
    assert {event["cause"] for event in report["events"] if event["event"] == "stored"} <= {"leader", "database"}


async def test_a_change_that_only_the_binlog_brings_names_its_position(cluster: DevCluster, graph: Graph) -> None:
    user = await graph.obj_add("user", {"name": "a"})
    shard = user >> SHARD_SHIFT
    await change_rows(cluster, shard, f"UPDATE objects SET version = version + 1 WHERE id = {user}", in_binlog=True)

    async def changed_by_binlog() -> bool:
        _, report = await command(cluster, "story", str(user))
        causes = [event["cause"] for event in report["events"] if not event["of_shard"]]
        return any(cause.startswith("binlog of ") and cause.count("-") >= 2 for cause in causes)

    await until(changed_by_binlog, "the tailer's change is not in the story")


async def test_a_wrong_cache_entry_is_found_by_verify_and_by_the_checker(cluster: DevCluster, graph: Graph) -> None:
    user = await graph.obj_add("user", {"name": "a"})
    assert await graph.obj_get(user) is not None
    shard = user >> SHARD_SHIFT
    status, report = await checked(cluster, "verify")
    assert status == 0, report["findings"]
    assert report["consistency"]["looks"] > 0
    await change_rows(cluster, shard, f"UPDATE objects SET data = x'8101a26879' WHERE id = {user}")

    status, report = await checked(cluster, "verify", "--sample", "100%")
    assert status == 1
    assert {(found["id"], found["verdict"]) for found in report["findings"]} == {(user, "different")}
    assert 0 < report["consistency"]["nines"] < 3

    async with access_of(login_of(cluster), "") as access:
        (region,) = access.routes.topology.regions
        checker = ConsistencyChecker(
            access.store,
            lambda: access.routes,
            region.name,
            access.links,
            LoopClock(),
            CheckerSettings(first_look_seconds=0.001, second_look_seconds=0.002, last_look_seconds=0.003),
            logger("test"),
        )
        _, story = await command(cluster, "story", str(user))
        version = story["stored_version"]
        checker.note(ShardMessages(shard, 1, (ObjectChange(user, version - 1, version, 1, b""),)))
        while not checker.counts.looks:  # the second in which it was noted is not over
            await asyncio.sleep(0.004)
            await checker.look(0)
        for look in (1, 2):
            await asyncio.sleep(0.004)
            await checker.look(look)
        assert checker.counts.stale[-1] >= 1
        assert checker.counts.consistency.wrong == checker.counts.stale[-1]
    await command(cluster, "invalidate", "--shard", str(shard), "--yes")
    assert (await checked(cluster, "verify"))[0] == 0


async def test_leaders_follow_up_what_they_deliver(cluster: DevCluster, graph: Graph) -> None:
    user = await graph.obj_add("user", {"name": "a"})
    (region,) = login_of(cluster).topology.regions

    async def looked() -> bool:
        await asyncio.gather(*(graph.obj_update(user, {"name": str(number)}) for number in range(100)))
        stats = [await patient_stats(cluster.admin(each.name)) for each in region.leaders.servers]
        return any(each["consistency"]["looks"] for each in stats)

    await until(looked, "no leader has looked at its followers")
    for each in region.leaders.servers:
        assert (await patient_stats(cluster.admin(each.name)))["consistency"]["inconsistencies"] == 0


async def test_a_count_that_differs_from_its_list_is_found_and_repaired(cluster: DevCluster, graph: Graph) -> None:
    user = await graph.obj_add("user", {"name": "a"})
    pages = [await graph.obj_add("user", {"name": "p"}, near=user) for _ in range(3)]
    for page in pages:
        await graph.assoc_add(user, "likes", page, 1)
    likes, shard = graph.schema.atype("likes").number, user >> SHARD_SHIFT
    where = f"WHERE id1 = {user} AND atype = {likes}"
    await change_rows(cluster, shard, f"UPDATE assoc_lists SET count = 77 {where}")
    wrong = {"id1": user, "atype": "likes", "stored": 77, "counted": 3}
    status, report = await checked(cluster, "repair", "--dry-run")
    assert (status, report["wrong_counts"], report["recounted"]) == (1, [wrong], 0)
    status, report = await checked(cluster, "repair", "--yes")
    assert (status, report["wrong_counts"], report["recounted"], report["broken"]) == (0, [wrong], 1, [])
    assert (await checked(cluster, "repair", "--only", "counts"))[1]["wrong_counts"] == []
    assert await graph.assoc_count(user, "likes") == 3
    status, report = await checked(cluster, "verify")
    assert status == 0, report["findings"]


async def test_an_intent_that_its_leader_cannot_settle_is_shown(cluster: DevCluster, graph: Graph) -> None:
    low, high = sorted([await graph.obj_add("user", {"name": name}) for name in "ab"])
    shard, unknown = low >> SHARD_SHIFT, 60_000
    await change_rows(cluster, shard, f"INSERT INTO inverse_intents VALUES ({low}, {high}, '{unknown}', 1, 5)")
    expected = {"low_id": low, "high_id": high, "atypes": [str(unknown)], "created_unix_ms": 5}
    status, report = await checked(cluster, "repair", "--dry-run", "--only", "inverses")
    assert (status, report["old_intents"], report["settled"]) == (1, [expected], 0)
    status, report = await checked(cluster, "repair", "--yes", "--only", "inverses")
    assert (status, report["old_intents"], report["settled"]) == (1, [expected], 0)
    # This intent can be settled. Either the leader or this command settles it first, and it is gone.
    friend = graph.schema.atype("friend").number
    await change_rows(cluster, shard, f"UPDATE inverse_intents SET atypes = '{friend}'")

    async def settled() -> bool:
        return not (await checked(cluster, "repair", "--yes", "--only", "inverses"))[1]["old_intents"]

    await until(settled, "the intent still stands")


async def test_a_server_that_is_away_is_listed_and_the_rest_is_done(cluster: DevCluster, graph: Graph) -> None:
    away = login_of(cluster).topology.regions[0].followers[1].servers[0].name
    await cluster.kill(away)
    status, report = await command(cluster, "invalidate", "--shard", "0", "--yes")
    assert (status, report["unreachable"]) == (1, [away])
    assert sum(each["voided"] for each in report["servers"]) == 2  # its leader, the other tier's follower
