"""Rights on a real cluster, whose peers name no caller: what the document gives to `anonymous` is what they may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tao.client import Consistency, Graph, PermissionDenied, StaleRead, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Shape
from tao.schema.registry import Schema
from tao.wire.v1 import graph_pb2_grpc
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.cluster_access import PATIENT, bystander_of, patient_stats, replace_text, running_cluster
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

SERVERS = ("leader-1", "follower-1a", "follower-1b")
ALL = "{read: all, write: all, critical: all, watch: all}"
SOME = """
    read: {objects: [user], associations: [friend, likes, liked_by]}
    critical: {associations: [friend]}
    write: {objects: [user], associations: [friend, likes]}
    watch: all
    min_staleness_ms: 5000
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    shape = Shape(tiers=1, followers=2, leaders=1, databases=1, shards=4)
    async with running_cluster(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def graph(cluster: DevCluster) -> AsyncIterator[Graph]:
    async with connect(cluster.client_address, settings=PATIENT) as graph:
        yield graph


async def access_of(cluster: DevCluster) -> list[dict[str, Any]]:
    return [(await patient_stats(cluster.admin(name)))["access"] for name in SERVERS]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENT_SECONDS
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, "the servers do not follow the document"
        await asyncio.sleep(0.05)


async def use_rules(cluster: DevCluster, role: str, mode: str = "enforce") -> None:
    """Give the role to everybody, and wait until every server knows."""
    version = max(each["version"] for each in await access_of(cluster)) + 1
    text = f"format: 1\nversion: {version}\nmode: {mode}\nroles:\n  it: {role}\nanonymous: [it]\n"
    write_document(cluster, text)

    async def known() -> bool:
        return all(each["version"] == version for each in await access_of(cluster))

    await until(known)


def write_document(cluster: DevCluster, text: str) -> None:
    replace_text(cluster.topology_path.with_name("access.yaml"), text)


async def total(cluster: DevCluster, what: str) -> int:
    return sum([each[what] for each in await access_of(cluster)])


async def denied(request: Awaitable[object]) -> bool:
    (outcome,) = await asyncio.gather(request, return_exceptions=True)
    if isinstance(outcome, PermissionDenied):
        assert "tao access explain --operation" in outcome.message or "allow 5000 or more" in outcome.message
        return True
    assert not isinstance(outcome, BaseException), outcome
    return False


async def denied_to_select(cluster: DevCluster, id1: int, schema: Schema, *atypes: str) -> bool:
    """Ask every follower for the first list without the second."""
    terms = [pb.SelectTerm(list=pb.ListTerm(id1=id1, atype=schema.atype(atype).number)) for atype in atypes]
    asked = pb.SelectRequest(terms=[*terms, pb.SelectTerm(operator=pb.SET_WITHOUT)], limit=5)
    outcomes: set[grpc.StatusCode] = set()
    for server in ("follower-1a", "follower-1b"):
        port = cluster.record.ports[server]["grpc"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: graph_pb2_grpc.GraphAsyncStub = graph_pb2_grpc.GraphStub(channel)
            call = stub.Select(asked, timeout=PATIENT_SECONDS)
            outcomes.add(await call.code())
    (code,) = outcomes
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED)
    return code is grpc.StatusCode.PERMISSION_DENIED


async def test_without_a_document_everything_is_allowed(cluster: DevCluster, graph: Graph) -> None:
    assert {each["mode"] for each in await access_of(cluster)} == {"none"}
    page = await graph.obj_add("page", {"name": "before"})
    assert await graph.obj_get(page, consistency=Consistency.master()) is not None


async def test_what_is_granted_is_done_and_the_rest_is_denied(cluster: DevCluster, graph: Graph) -> None:
    await use_rules(cluster, ALL)
    user, other = [await graph.obj_add("user", {"name": name}) for name in ("one", "two")]
    page = await graph.obj_add("page", {"name": "page"})
    await graph.assoc_add(user, "follows", page, 1)
    await graph.assoc_add(user, "likes", page, 1)
    await use_rules(cluster, SOME)
    master, fresh, old = Consistency.master(), Consistency.max_staleness(3_000), Consistency.max_staleness(60_000)
    likes, friends, follows = (graph.edge_set(user, atype) for atype in ("likes", "friend", "follows"))
    table: dict[str, tuple[Awaitable[object], bool]] = {
        "set": ((likes | friends).page(5), False),
        "set without a list of another type": ((likes - follows).page(5), True),
        "object": (graph.obj_get(user), False),
        "list": (graph.assoc_range(user, "likes", 0, 5), False),
        "list of another type": (graph.assoc_range(user, "follows", 0, 5), True),
        "count of another type": (graph.assoc_count(user, "follows"), True),
        "critical list": (graph.assoc_range(user, "friend", 0, 5, consistency=master), False),
        "critical list of another type": (graph.assoc_range(user, "likes", 0, 5, consistency=master), True),
        "critical object": (graph.obj_get(user, consistency=master), True),
        "stale read": (graph.assoc_count(user, "likes", consistency=old), False),
        "fresher read than granted": (graph.assoc_count(user, "likes", consistency=fresh), True),
        "update": (graph.obj_update(user, {"home": "x"}), False),
        "new object of another type": (graph.obj_add("page", {"name": "new"}), True),
        "edge": (graph.assoc_add(user, "friend", other, 1), False),
        "edge whose inverse is denied": (graph.assoc_add(user, "likes", other, 1), True),
        "deletion of an edge whose inverse is denied": (graph.assoc_delete(user, "likes", page), True),
        "edge of another type": (graph.assoc_add(user, "follows", other, 1), True),
    }
    assert {what: await denied(request) for what, (request, _) in table.items()} == {
        what: expected for what, (_, expected) in table.items()
    }
    assert await denied_to_select(cluster, user, graph.schema, "likes", "friend") is False
    assert await denied_to_select(cluster, user, graph.schema, "likes", "follows") is True
    with pytest.raises(StaleRead):  # the graph asks for the version of its own write, which an absent object lacks
        await graph.obj_get(page)
    async with connect(cluster.client_address, settings=PATIENT) as another:
        assert await another.obj_get(page) is None
    assert await graph.obj_delete(page) is False
    await use_rules(cluster, ALL)
    assert await graph.obj_get(page) is not None
    assert (await graph.assoc_range(user, "likes", 0, 5)).id2s == [page]


async def test_in_the_counting_mode_everything_is_done(cluster: DevCluster, graph: Graph) -> None:
    await use_rules(cluster, SOME, mode="count")
    before = await total(cluster, "would_deny"), await total(cluster, "denied")
    page = await graph.obj_add("page", {"name": "counted"})
    assert await graph.obj_get(page) is not None
    assert await graph.assoc_count(page, "followed_by", consistency=Consistency.master()) == 0
    assert await total(cluster, "would_deny") >= before[0] + 3
    assert await total(cluster, "denied") == before[1]


async def test_a_wrong_document_is_reported_and_the_last_good_one_stays(cluster: DevCluster, graph: Graph) -> None:
    await use_rules(cluster, SOME)
    versions = [each["version"] for each in await access_of(cluster)]
    refused = await total(cluster, "refused_documents")
    write_document(cluster, "format: 1\nversion: 1000\nroles: {it: {reed: all}}\n")

    async def reported() -> bool:
        return await total(cluster, "refused_documents") == refused + len(SERVERS)

    await until(reported)
    assert [each["version"] for each in await access_of(cluster)] == versions
    assert await denied(graph.obj_add("page", {"name": "new"}))
    await use_rules(cluster, ALL)
    assert not await denied(graph.obj_add("page", {"name": "new"}))


async def test_a_leader_denies_a_critical_read_that_a_follower_with_an_older_document_allows(
    cluster: DevCluster, graph: Graph
) -> None:
    await use_rules(cluster, ALL)
    user = await graph.obj_add("user", {"name": "critical"})
    master = Consistency.master()
    own = cluster.topology_path.with_name("access-of-leader.yaml")
    replace_text(own, f"format: 1\nversion: 1000\nroles:\n  it: {SOME}\nanonymous: [it]\n")
    settings = cluster.topology_path.with_name("servers") / "leader-1.yaml"
    before = settings.read_text()
    settings.write_text(f"{before}\naccess_file: {own}\n")
    _, *followers = [each["denied"] for each in await access_of(cluster)]
    try:
        await cluster.restart("leader-1")

        async def leader_is_asked() -> bool:
            """Until the followers know that it is back, they read the database themselves."""
            return await denied(graph.assoc_count(user, "likes", consistency=master))

        await until(leader_is_asked)
        assert await graph.assoc_count(user, "friend", consistency=master) == 0
        assert await graph.assoc_count(user, "likes") == 0, "a fill, which serves everybody"
        assert [each["denied"] for each in await access_of(cluster)] == [1, *followers], "the leader has denied it"
    finally:
        settings.write_text(before)
        await cluster.restart("leader-1")


async def test_a_document_changes_under_load_without_a_failed_request(cluster: DevCluster) -> None:
    enough = "{read: {objects: [user], associations: [friend]}, write: {objects: [user], associations: [friend]}}"
    await use_rules(cluster, ALL)
    async with bystander_of(cluster) as bystander:
        for role in (enough, ALL, enough, ALL):
            await use_rules(cluster, role)
            await bystander.more_rounds(5)
        assert bystander.errors == []
