"""Two regions with one master: forwarded writes, fills from the replica, the tailer, and faults between the regions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import cycle
from typing import TypeVar

import grpc
import pytest
import pytest_asyncio

from tao.client import AssocPage, ClientSettings, Graph, SetPage, TaoError, connect
from tao.devcluster.layout import Shape
from tao.model.ids import SHARD_SHIFT
from tao.wire.v1 import graph_pb2_grpc
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.cluster_access import PATIENT, patient_stats
from tests.e2e.region_access import RTT_MS, Regions, plain, running_regions, until
from tests.rigs.forked_programs import Ended, run_tao
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

IMPATIENT = ClientSettings(timeout_seconds=1.0, connect_timeout_seconds=PATIENT_SECONDS)
"""The settings of a client whose requests cannot be answered, so that they need not wait long."""
Place = TypeVar("Place")
SHAPE = Shape(regions=2, tiers=2, followers=2, leaders=2, shards=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    async with running_regions(tmp_path_factory.mktemp("regions"), SHAPE) as found:
        yield found


@asynccontextmanager
async def client(regions: Regions, region: str, tier: str = "tier-1") -> AsyncIterator[Graph]:
    """Yield a client without the write tokens of other clients, which would hide what a cache holds."""
    async with connect(regions.target, region=region, tier=tier, settings=PATIENT) as graph:
        yield graph


@pytest_asyncio.fixture(loop_scope="module")
async def east(regions: Regions) -> AsyncIterator[Graph]:
    async with client(regions, "east") as graph:
        yield graph


@pytest_asyncio.fixture(loop_scope="module")
async def west(regions: Regions) -> AsyncIterator[Graph]:
    async with client(regions, "west") as graph:
        yield graph


async def two_users(graph: Graph) -> tuple[int, int]:
    """Create users on two shards, so that an edge and its inverse concern different servers."""
    a = await graph.obj_add("user", {"name": "a"})
    while True:
        b = await graph.obj_add("user", {"name": "b"})
        if b >> SHARD_SHIFT != a >> SHARD_SHIFT:
            return a, b


async def shown(graph: Graph, a: int, atype: str, edges: list[tuple[int, int]]) -> None:
    async def same() -> bool:
        return plain(await graph.assoc_range(a, atype, 0, 50)) == edges

    await until(same, f"{a} {atype} never became {edges}")


async def test_a_write_of_the_remote_region_takes_the_round_trip_and_is_read_there_at_once(
    regions: Regions, west: Graph
) -> None:
    loop = asyncio.get_running_loop()
    a, b = await two_users(west)
    async with client(regions, "west") as reader:
        assert plain(await reader.assoc_range(a, "likes", 0, 5)) == []
        assert plain(await reader.assoc_range(b, "liked_by", 0, 5)) == []
        for time in range(20):
            began = loop.time()
            await west.assoc_add(a, "likes", b, time)
            # An answer that comes sooner cannot have been in the master region, however fast the machine is.
            assert loop.time() - began >= RTT_MS / 1000
            assert plain(await reader.assoc_range(a, "likes", 0, 5)) == [(b, time)]
            assert plain(await reader.assoc_range(b, "liked_by", 0, 5)) == [(a, time)]
        await west.obj_update(a, {"home": "Rome"})
        found = await reader.obj_get(a)
        assert found is not None
        assert found.fields["home"] == "Rome"


async def test_what_one_region_writes_reaches_the_followers_of_the_other_in_every_tier(
    regions: Regions, east: Graph, west: Graph
) -> None:
    a, b = await two_users(east)
    for writer, other in ((east, "west"), (west, "east")):
        async with client(regions, other, "tier-1") as near, client(regions, other, "tier-2") as far:
            for graph in (near, far):
                await graph.assoc_range(a, "follows", 0, 5)
                await graph.assoc_count(b, "followed_by")
            await writer.assoc_add(a, "follows", b, 7 if other == "west" else 8)
            expected = (await writer.assoc_range(a, "follows", 0, 5))[0].time
            for graph in (near, far):
                await shown(graph, a, "follows", [(b, expected)])
                await shown(graph, b, "followed_by", [(a, expected)])


async def test_a_critical_read_sees_writes_that_replication_has_not_brought(regions: Regions, east: Graph) -> None:
    a, b = await two_users(east)
    async with client(regions, "west") as reader:
        await until(lambda: reader.obj_get(b))
        await shown(reader, a, "likes", [])
        async with regions.replication_held():
            await east.assoc_add(a, "likes", b, 3)
            await east.obj_update(b, {"home": "Oslo"})
            assert plain(await reader.assoc_range(a, "likes", 0, 5, critical=True)) == [(b, 3)]
            assert plain(await reader.assoc_get(b, "liked_by", [a], critical=True)) == [(a, 3)]
            assert await reader.assoc_count(a, "likes", critical=True) == 1
            found = await reader.obj_get(b, critical=True)
            assert found is not None
            assert found.fields["home"] == "Oslo"
            # No later critical read answers less than an earlier one.
            assert plain(await reader.assoc_range(a, "likes", 0, 5)) == [(b, 3)]


async def test_a_value_does_not_go_back_in_time_when_its_entry_is_lost_while_the_replica_is_behind(
    regions: Regions, west: Graph
) -> None:
    """The race of the paper's §4.5: a remote write is in the caches before it is in the replica. An entry that is
    dropped in between must not be filled from the replica."""
    a, b = await two_users(west)
    await west.assoc_add(a, "likes", b, 1)
    async with client(regions, "west") as reader, client(regions, "west", "tier-2") as other_tier:
        for graph in (reader, other_tier):
            await shown(graph, a, "likes", [(b, 1)])
            await shown(graph, b, "liked_by", [(a, 1)])
        async with regions.replication_held():
            sent_away = (await regions.stats_of_leader("west", a))["reads_sent_to_master_region"]
            for time in range(2, 8):
                await west.assoc_add(a, "likes", b, time)
                await west.obj_update(a, {"home": f"home {time}"})
                await regions.invalidate_shards_of("west", a, b)
                for graph in (reader, other_tier):
                    assert plain(await graph.assoc_range(a, "likes", 0, 5)) == [(b, time)]
                    assert plain(await graph.assoc_range(b, "liked_by", 0, 5)) == [(a, time)]
                    assert await graph.assoc_count(a, "likes") == 1
                    found = await graph.obj_get(a)
                    assert found is not None
                    assert found.fields["home"] == f"home {time}"
            assert (await regions.stats_of_leader("west", a))["reads_sent_to_master_region"] > sent_away
    await regions.assert_converges()


async def test_a_token_of_one_region_is_satisfied_in_the_other_at_once_or_rejected(
    regions: Regions, east: Graph
) -> None:
    a, b = await two_users(east)
    async with client(regions, "west") as reader:
        await until(lambda: reader.obj_get(b))
        await shown(reader, a, "likes", [])
        await shown(reader, b, "liked_by", [])
        async with regions.replication_held():
            with east.recording() as recording:
                await east.assoc_add(a, "likes", b, 3)
                await east.obj_update(b, {"home": "Oslo"})
            token = recording.token
            await regions.cut()
            try:
                with pytest.raises(TaoError):
                    await reader.assoc_range(a, "likes", 0, 5, after=token)
                assert plain(await reader.assoc_range(a, "likes", 0, 5)) == []
            finally:
                await regions.heal()

            async def met() -> bool:
                with suppress(TaoError):
                    assert plain(await reader.assoc_range(a, "likes", 0, 5, after=token)) == [(b, 3)]
                    return True
                return False

            await until(met, "the master region is not reached again")
            assert await reader.assoc_count(a, "likes", after=token) == 1
            assert plain(await reader.assoc_get(b, "liked_by", [a], after=token)) == [(a, 3)]
            found = await reader.obj_get(b, after=token)
            assert found is not None
            assert found.fields["home"] == "Oslo"

            async def stays() -> bool:
                await reader.assoc_range(a, "likes", 0, 5, after=token)
                return plain(await reader.assoc_range(a, "likes", 0, 5)) == [(b, 3)]

            # The value that the token brought stays in that cache, also for reads without a token, although replicas do
            # not have it yet. Read with the token again: a client that has found this tier slow during the cut uses the
            # other tier for a moment, whose cache does not have the value.
            await until(stays, "what a token brings is not kept")


async def test_sql_by_hand_on_the_master_reaches_the_caches_of_both_regions(
    regions: Regions, east: Graph, west: Graph
) -> None:
    a, b = await two_users(east)
    await east.assoc_add(a, "likes", b, 5)
    for graph in (east, west):
        await until(lambda graph=graph: graph.obj_get(a))  # type: ignore[misc]
        await shown(graph, a, "likes", [(b, 5)])
    likes = east.schema.atype("likes").number
    await regions.sql(
        "east-db-1",
        f"UPDATE assocs SET time = 99 WHERE id1 = {a} AND atype = {likes} AND id2 = {b}",
        f"UPDATE objects SET data = x'8101a26879' WHERE id = {a}",  # {1: "hy"}
        shard=a >> SHARD_SHIFT,
    )
    for region in ("east", "west"):
        for tier in ("tier-1", "tier-2"):
            async with client(regions, region, tier) as graph:
                await shown(graph, a, "likes", [(b, 99)])

                async def renamed(graph: Graph = graph) -> bool:
                    found = await graph.obj_get(a)
                    return found is not None and found.fields["name"] == "hy"

                await until(renamed, f"{region} {tier} does not show the new name")
    # Only one direction was changed by hand: make both ends agree again.
    await east.assoc_add(a, "likes", b, 100)
    await shown(west, b, "liked_by", [(a, 100)])


async def test_commits_made_while_a_tailer_was_dead_are_delivered_when_it_is_back(
    regions: Regions, east: Graph, west: Graph
) -> None:
    a, b = await two_users(east)
    await until(lambda: west.obj_get(b))
    await shown(west, a, "likes", [])
    (tailer,) = regions.tailers("west")
    await regions.cluster.kill(tailer)
    await east.assoc_add(a, "likes", b, 5)
    await east.obj_update(a, {"home": "Lima"})
    # A region whose tailer is away may keep what it has; a reader that needs the current value reads critically. It may
    # also lose the value: a shard changed by hand is invalidated again a moment later, and reads are then answered from
    # the replica.
    assert plain(await west.assoc_range(a, "likes", 0, 5)) in ([], [(b, 5)])
    assert plain(await west.assoc_range(a, "likes", 0, 5, critical=True)) == [(b, 5)]
    await regions.cluster.restart(tailer)
    await shown(west, a, "likes", [(b, 5)])
    await shown(west, b, "liked_by", [(a, 5)])
    await regions.assert_converges()


async def test_a_region_with_a_dead_replica_reads_in_the_master_region_and_receives_commits_from_it(
    regions: Regions, east: Graph, west: Graph
) -> None:
    a, b = await two_users(east)
    await until(lambda: west.obj_get(b))
    await shown(west, a, "likes", [])
    database = regions.topology.databases[0]
    master, replica = database.servers["east"].name, database.servers["west"].name
    (tailer,) = regions.tailers("west")

    async def follows(server: str) -> bool:
        stats = await patient_stats(regions.cluster.admin(tailer))
        return stats["reads_from"] == server and stats["connected"] and not stats["trouble"]

    lost = (await patient_stats(regions.cluster.admin(tailer)))["lost_binlogs"]
    await regions.cluster.kill(replica)
    try:
        # The outage is not detected yet: misses of the region are answered by the master region.
        await regions.invalidate_shards_of("west", a, b)
        assert await west.obj_get(a) is not None
        assert plain(await west.assoc_range(a, "likes", 0, 5)) == []
        await regions.mark_database_server(replica, down=True)
        await until(lambda: follows(master), "the tailer does not read the master's binlog")
        await east.assoc_add(a, "likes", b, 7)
        await shown(west, a, "likes", [(b, 7)])
        await shown(west, b, "liked_by", [(a, 7)])
        await regions.invalidate_shards_of("west", a, b)
        assert plain(await west.assoc_range(a, "likes", 0, 5)) == [(b, 7)]
    finally:
        await regions.cluster.restart(replica)
        await regions.mark_database_server(replica, down=False)
    await until(lambda: follows(replica), "the tailer does not come back to the replica's binlog")
    await east.assoc_add(a, "likes", b, 8)
    await shown(west, a, "likes", [(b, 8)])
    await shown(west, b, "liked_by", [(a, 8)])
    assert (await patient_stats(regions.cluster.admin(tailer)))["lost_binlogs"] == lost, (
        "one history, from whichever server it is read"
    )
    await regions.assert_converges()


@pytest.mark.parametrize("silent", [False, True], ids=["refusing", "silent"])
async def test_a_region_that_is_cut_off_serves_reads_rejects_writes_and_catches_up(
    regions: Regions, east: Graph, west: Graph, silent: bool
) -> None:
    a, b = await two_users(east)
    await until(lambda: west.obj_get(b))
    await shown(west, a, "likes", [])
    await regions.cut(silent=silent)
    try:
        await east.assoc_add(a, "likes", b, 1)
        await regions.invalidate_shards_of("west", a, b)
        assert await west.obj_get(b) is not None
        assert plain(await west.assoc_range(a, "likes", 0, 5)) == []
        async with connect(regions.target, region="west", settings=IMPATIENT) as impatient:
            with pytest.raises(TaoError):
                await impatient.assoc_add(a, "likes", b, 2)
            with pytest.raises(TaoError):
                await impatient.obj_get(a, critical=True)
    finally:
        await regions.heal()

    async def written() -> bool:
        with suppress(TaoError):
            await west.assoc_add(b, "likes", a, 3)
            return True
        return False

    await until(written, "no write comes through again")
    await shown(east, b, "likes", [(a, 3)])
    async with client(regions, "west") as reader:
        # The write that was rejected while the line was silent may have been sent already; no other value is possible.
        async def caught_up() -> bool:
            found = plain(await reader.assoc_range(a, "likes", 0, 5))
            return found in ([(b, 1)], [(b, 2)])

        await until(caught_up, "west never saw what east wrote")
    await regions.assert_converges()


async def command(regions: Regions, *arguments: str) -> Ended:
    async with asyncio.timeout(2 * PATIENT_SECONDS):
        return await run_tao(*arguments, folder=regions.cluster.topology_path.parent.parent)


async def test_commands_ask_the_first_region_or_the_one_that_is_named(
    regions: Regions, east: Graph, west: Graph
) -> None:
    a, b = await two_users(west)
    await west.assoc_add(a, "likes", b, 5)
    await until(lambda: east.obj_get(a))
    for where in ((), ("--region", "west"), ("--region", "east")):
        code, out, err = await command(regions, "get", str(a), "--json", *where)
        assert (code, err) == (0, "")
        assert json.loads(out)["fields"]["name"] == "a"
        code, out, err = await command(regions, "list", str(a), "likes", "--json", *where)
        assert (code, err, json.loads(out)["count"]) == (0, "", 1)
    code, _, err = await command(regions, "get", str(a), "--region", "north")
    assert code != 0
    assert "no region 'north'" in err
    code, out, err = await command(regions, "stats", "--json")
    assert (code, err) == (0, "")
    assert {name.partition("-")[0] for name in json.loads(out)} == {"east", "west"}
    code, out, err = await command(regions, "repair", "--dry-run", "--json")
    assert (code, json.loads(out)["broken"]) == (0, []), err


async def test_verify_of_all_regions_finds_a_row_that_only_one_region_has(regions: Regions, west: Graph) -> None:
    a = await west.obj_add("user", {"name": "a"})
    await regions.assert_converges()
    code, out, err = await command(regions, "verify", "--all-regions", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["clean"]
    assert found["replicas"]["clean"]
    assert [line["region"] for line in found["replicas"]["servers"]] == ["west"]
    assert all(line["rows"] > 0 for line in found["replicas"]["servers"])
    shard = a >> SHARD_SHIFT
    unlogged = "INSERT INTO assoc_lists (id1, atype, count, version) VALUES (1, 1, 0, 1)"
    await regions.sql_astray("west-db-1", unlogged, shard)
    try:
        code, out, _ = await command(regions, "verify", "--all-regions", "--json")
        assert code == 1
        (finding,) = json.loads(out)["replicas"]["findings"]
        assert (finding["server"], finding["table"], finding["key"]) == ("west-db-1", "assoc_lists", [1, 1])
        assert (finding["at_master"], finding["at_replica"]) == (False, True)
        code, out, _ = await command(regions, "verify", "--all-regions")
        assert code == 1
        assert f"west-db-1: assoc_lists (1, 1) of shard {shard} is missing at the master" in out
    finally:
        await regions.sql_astray("west-db-1", "DELETE FROM assoc_lists WHERE id1 = 1", shard)


async def test_at_the_end_every_cache_equals_its_database_and_the_regions_databases_each_other(
    regions: Regions,
) -> None:
    await regions.assert_converges()


async def test_pages_of_sets_and_lists_continue_at_any_server_tier_and_region(regions: Regions, east: Graph) -> None:
    (a, b), ids = await two_users(east), await east.reserve_ids(12, shard=1)
    with east.recording() as recording:
        await east.assoc_add_many([(user, "likes", id2, time) for user in (a, b) for time, id2 in enumerate(ids)])
    token, expected = recording.token, [(id2, time) for time, id2 in enumerate(ids)][::-1]
    async with AsyncExitStack() as stack:
        places = [(region, tier) for region in ("east", "west") for tier in ("tier-1", "tier-2")]
        graphs = [await stack.enter_async_context(client(regions, *place)) for place in places]

        def page_of_set(graph: Graph, cursor: str | None) -> Awaitable[SetPage]:
            both = graph.edge_set(a, "likes") & graph.edge_set(b, "likes")
            return both.page(2, cursor, after=token)

        def page_of_list(graph: Graph, cursor: str | None) -> Awaitable[AssocPage]:
            return graph.assoc_page(a, "likes", 2, cursor, after=token)

        assert await walked(graphs, page_of_set) == expected
        assert await walked(graphs, page_of_list) == expected
        servers = [
            server
            for region in ("east", "west")
            for tier in regions.routes.follower_tiers(region)
            for server in tier.servers
        ]
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(str(server.grpc))) for server in servers]
        terms = [
            *(pb.SelectTerm(list=pb.ListTerm(id1=each, atype=east.schema.atype("likes").number)) for each in (a, b)),
            pb.SelectTerm(operator=pb.SET_AND),
        ]

        def selected(channel: grpc.aio.Channel, cursor: str | None) -> Awaitable[pb.SelectReply]:
            asked = pb.SelectRequest(terms=terms, limit=2, cursor=cursor or "", after=token.text())
            return graph_pb2_grpc.GraphStub(channel).Select(asked, timeout=PATIENT_SECONDS)

        assert await walked(channels, selected) == expected
        # A page of the SDK goes on at a server that evaluates the set itself, and the other way about.
        first = await page_of_set(graphs[0], None)
        second = await selected(channels[-1], first.cursor)
        third = await page_of_set(graphs[1], second.cursor)
        assert [(edge.id2, edge.time) for page in (first, second, third) for edge in page.edges] == expected[:6]


async def walked(
    places: Sequence[Place], read: Callable[[Place, str | None], Awaitable[SetPage | AssocPage | pb.SelectReply]]
) -> list[tuple[int, int]]:
    """Return the ``(id2, time)`` of all pages, each of which is read at the next place with the cursor of the page
    before."""
    found: list[tuple[int, int]] = []
    cursor: str | None = None
    for place in cycle(places):
        page = await read(place, cursor)
        found += [(edge.id2, edge.time) for edge in page.edges]
        cursor = page.cursor
        if not cursor:
            break
    return found
