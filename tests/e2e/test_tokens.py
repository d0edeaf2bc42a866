"""A token from one region, used at once in the other, gets the new value, or an error that says why not.

It never gets the old value. Replication is held all the while, so that the other region's database does not have the
write and its tailer has nothing to deliver: a new value there came because the token asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiomysql
import grpc
import pytest
import pytest_asyncio

from tao.client import ClientSettings, DeadlineExceeded, Graph, SomeFailed, StaleRead, Unavailable, WriteToken, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability, Flavour
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.line_control import Cut, Heal, ask_line
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import MAX_KEYS
from tao.wire.v1 import graph_pb2 as graph_pb
from tao.wire.v1.graph_pb2_grpc import GraphStub
from tests.e2e.cluster_access import PATIENT, patient_stats
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.database]

REPLICA = "west-db-1"
SHARDS = 4
EAST_WEST = ("east", "west")
IMPATIENT = ClientSettings(timeout_seconds=2.0, connect_timeout_seconds=PATIENT_SECONDS)
"""The settings of a client whose requests cannot be answered, so that they need not wait long."""
NOT_NOW = (DeadlineExceeded, StaleRead, Unavailable, SomeFailed)

Read = Callable[[WriteToken | None], Coroutine[Any, Any, Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("cluster"),
        shape=Shape(regions=2, tiers=2, followers=1, leaders=1, databases=1, shards=SHARDS),
        rtt_ms=20.0,
        durability=Durability.RELAXED,
        log_level="warning",
    )
    async with DevCluster(settings) as running:
        await tailers_have_begun(running)
        yield running


async def tailers_have_begun(cluster: DevCluster) -> None:
    """Wait until both tailers have started. A tailer without a position invalidates its region twice: at once, and when
    all rows are visible. Versions seen before may be forgotten, which is not the subject of these tests."""
    async with asyncio.timeout(PATIENT_SECONDS):
        for leader in ("east-leader-1", "west-leader-1"):
            while (await patient_stats(cluster.admin(leader)))["voided_shards"] < 2 * SHARDS:  # noqa: ASYNC110 - a leader
                await asyncio.sleep(0.05)


@pytest.fixture
async def east(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), region="east", settings=PATIENT) as graph:
        yield graph


@pytest.fixture
async def west(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(str(cluster.topology_path), region="west", settings=PATIENT) as graph:
        yield graph


async def on_replica(cluster: DevCluster, name: str, what: str) -> None:
    """START or STOP the part of replication that applies received transactions."""
    instance = cluster.database(name)
    administrator = instance.accounts.administrator
    connection = await aiomysql.connect(
        host=instance.host, port=instance.port, user=administrator.user, password=administrator.password
    )
    replica = "SLAVE" if instance.binary.flavour is Flavour.MARIADB else "REPLICA"
    try:
        async with connection.cursor() as cursor:
            await cursor.execute(f"{what} {replica} SQL_THREAD")
    finally:
        connection.close()


@asynccontextmanager
async def replication_held(cluster: DevCluster, *replicas: str) -> AsyncIterator[None]:
    for name in replicas or (REPLICA,):
        await on_replica(cluster, name, "STOP")
    try:
        yield
    finally:
        for name in replicas or (REPLICA,):
            await on_replica(cluster, name, "START")


async def arrives(read: Read, expected: Any) -> None:
    """Wait until a read without a token answers ``expected``."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while await read(None) != expected:  # noqa: ASYNC110 - a follower sends no notification
            await asyncio.sleep(0.01)


def reads_of(graph: Graph, alice: int, bob: int) -> list[Read]:
    """Return reads, one for each operation, of the values that the tests' write changes."""

    async def home(after: WriteToken | None) -> object:
        found = await graph.obj_get(alice, after=after)
        return found and found.fields["home"]

    async def homes(after: WriteToken | None) -> object:
        return [found and found.fields["home"] for found in await graph.obj_get_many([alice], after=after)]

    async def count(after: WriteToken | None) -> object:
        return await graph.assoc_count(alice, "friend", after=after)

    async def among(after: WriteToken | None) -> object:
        return (await graph.assoc_get(alice, "friend", [bob], after=after)).id2s

    async def newest(after: WriteToken | None) -> object:
        return (await graph.assoc_range(alice, "friend", 0, 5, after=after)).id2s

    async def in_time(after: WriteToken | None) -> object:
        return (await graph.assoc_time_range(alice, "friend", 9, 1, 5, after=after)).id2s

    async def inverse(after: WriteToken | None) -> object:
        return [found.id2s for found in await graph.assoc_range_many([(bob, "friend", 0, 5)], after=after)]

    return [home, homes, count, among, newest, in_time, inverse]


async def people(graph: Graph) -> tuple[int, int]:
    """Create two users, on the first shard and on the last, without edges."""
    (place,), (other,) = await graph.reserve_ids(1, shard=0), await graph.reserve_ids(1, shard=SHARDS - 1)
    return (
        await graph.obj_add("user", {"name": "Alice", "home": "old"}, id=place),
        await graph.obj_add("user", {"name": "Bob", "home": "old"}, id=other),
    )


async def answers(reads: list[Read], after: WriteToken | None) -> list[Any]:
    return [await read(after) for read in reads]


def before(alice: int, bob: int) -> list[Any]:
    return ["old", ["old"], 0, [], [], [], [[]]]


def afterwards(alice: int, bob: int) -> list[Any]:
    return ["new", ["new"], 1, [bob], [bob], [bob], [[alice]]]


async def write(east: Graph, alice: int, bob: int) -> WriteToken:
    with east.recording() as recording:
        await east.obj_update(alice, {"home": "new"}, "user")
        await east.assoc_add(alice, "friend", bob, 5)
    return recording.token


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "not cached"])
async def test_a_token_brings_the_new_value_to_the_other_region_at_once(
    cluster: DevCluster, east: Graph, west: Graph, is_cached: bool
) -> None:
    alice, bob = await people(east)
    reads = reads_of(west, alice, bob)
    await arrives(reads[0], "old")
    if is_cached:
        assert await answers(reads, None) == before(alice, bob)
    async with replication_held(cluster):
        token = await write(east, alice, bob)
        if is_cached:
            assert await answers(reads, None) == before(alice, bob)
        assert await answers(reads, WriteToken.from_text(token.text())) == afterwards(alice, bob)
        # A value that was seen once stays for every reader, although the replica still has the old one.
        assert await answers(reads, None) == afterwards(alice, bob)


async def test_a_token_is_good_in_every_tier(cluster: DevCluster, east: Graph) -> None:
    alice, bob = await people(east)
    async with replication_held(cluster):
        token = await write(east, alice, bob)
        for region in east.topology.regions:
            for tier in region.followers:
                async with connect(
                    str(cluster.topology_path), region=region.name, tier=tier.name, settings=PATIENT
                ) as graph:
                    assert await answers(reads_of(graph, alice, bob), token) == afterwards(alice, bob)


async def test_more_writes_than_a_token_names_are_seen_all_the_same(
    cluster: DevCluster, east: Graph, west: Graph
) -> None:
    first = await east.obj_add("user", {"name": "1", "home": "old"})
    more = await east.obj_add_many([("user", {"name": "n", "home": "old"}, first)] * MAX_KEYS)
    all_users = [first, *more]

    async def homes(after: WriteToken | None) -> list[Any]:
        return [found and found.fields["home"] for found in await west.obj_get_many(all_users, after=after)]

    await arrives(homes, ["old"] * len(all_users))
    async with replication_held(cluster):
        with east.recording() as recording:
            await east.obj_update_many([(each, {"home": "new"}, "user") for each in all_users])
        assert recording.token.is_critical(first >> SHARD_SHIFT)
        assert await homes(recording.token) == ["new"] * len(all_users)


async def test_without_the_master_region_a_token_is_rejected_and_never_answered_with_the_old_value(
    cluster: DevCluster, east: Graph, west: Graph
) -> None:
    alice, bob = await people(east)
    reads = reads_of(west, alice, bob)
    await arrives(reads[0], "old")
    assert await answers(reads, None) == before(alice, bob)
    async with (
        connect(str(cluster.topology_path), region="west", settings=IMPATIENT) as impatient,
        replication_held(cluster),
    ):
        token = await write(east, alice, bob)
        await ask_line(cluster.line_control, Cut(EAST_WEST, silent=True))
        try:
            refused = reads_of(impatient, alice, bob)
            outcomes = await asyncio.gather(*(read(token) for read in refused), return_exceptions=True)
            assert all(isinstance(outcome, NOT_NOW) for outcome in outcomes), outcomes
            # Reads without a token are still served.
            assert await answers(reads, None) == before(alice, bob)
        finally:
            await ask_line(cluster.line_control, Heal(EAST_WEST))
        async with asyncio.timeout(PATIENT_SECONDS):
            while True:
                try:
                    found = await answers(reads, token)
                    break
                except NOT_NOW:
                    continue  # the line has just been healed
        assert found == afterwards(alice, bob)


async def test_a_write_from_the_other_region_has_a_token_too(cluster: DevCluster, east: Graph, west: Graph) -> None:
    alice, bob = await people(east)
    reads = reads_of(east, alice, bob)
    token = await write(west, alice, bob)
    assert len(token.text()) < 200
    assert await answers(reads, token) == afterwards(alice, bob)


async def test_any_language_can_carry_a_token(cluster: DevCluster, east: Graph) -> None:
    alice, bob = await people(east)
    async with (
        replication_held(cluster),
        grpc.aio.insecure_channel(cluster.client_address_in("east")) as near,
        grpc.aio.insecure_channel(cluster.client_address_in("west")) as far,
    ):
        friend = east.schema.atype("friend").number
        asked = graph_pb.AssocAddRequest(id1=alice, atype=friend, id2=bob, time=5)
        reply = await GraphStub(near).AssocAdd(asked, timeout=PATIENT_SECONDS)
        for id1, other in ((alice, bob), (bob, alice)):
            request = graph_pb.AssocRangeRequest(id1=id1, atype=friend, limit=5, after=reply.token)
            found = await GraphStub(far).AssocRange(request, timeout=PATIENT_SECONDS)
            assert [edge.id2 for edge in found.edges] == [other]


async def test_the_inverse_that_another_region_is_master_of_is_in_the_token(tmp_path: Path) -> None:
    settings = ClusterSettings(
        state_dir=tmp_path / "s",
        shape=Shape(regions=2, databases=2, mixed_mastership=True, tiers=1, followers=1, leaders=2, shards=SHARDS),
        rtt_ms=20.0,
        durability=Durability.RELAXED,
        log_level="warning",
    )
    async with (
        DevCluster(settings) as cluster,
        connect(str(cluster.topology_path), region="east", settings=PATIENT) as east,
        connect(str(cluster.topology_path), region="west", settings=PATIENT) as west,
    ):
        for near, far in ((east, west), (west, east)):
            alice, bob = await people(near)
            reads = reads_of(far, alice, bob)
            await arrives(reads[0], "old")
            assert await answers(reads, None) == before(alice, bob)
            async with replication_held(cluster, "west-db-1", "east-db-2"):
                token = await write(near, alice, bob)
                assert await answers(reads, token) == afterwards(alice, bob)
