"""Each operation sends what its arguments say, and the graph follows newer topologies and schemas."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tao.client import (
    MEMORY,
    Accepted,
    AddedObject,
    ClientSettings,
    EdgeWrite,
    Graph,
    InvalidArgument,
    SomeFailed,
    TopologyError,
    Unavailable,
)
from tao.client import configuration as configuration_module
from tao.client.configuration import ClientConfiguration, read_target
from tao.model.errors import TaoError
from tao.model.graph import MAX_TIME, encode_object
from tao.model.queries import start_at
from tao.model.receipts import Receipt
from tao.model.topology import DatabaseServer, Region, Topology
from tao.schema.codec import decode_fields
from tao.schema.registry import load_schema
from tao.topology.document import dump_topology
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import quiet
from tests.unit.client.fakes import SCHEMA, FakeCluster, FakeLink, make_id, make_topology, tier, until


def last_write(cluster: FakeCluster) -> pb.Write:
    return cluster.batches()[-1].write.writes[0]


async def test_an_object_is_added_read_updated_and_deleted(graph: Graph, cluster: FakeCluster) -> None:
    alice = await graph.obj_add("user", {"name": "Alice"}, near=make_id(9, 3))
    assert last_write(cluster).obj_add.shard == 3
    found = await graph.obj_get(alice, "user")
    assert found is not None
    assert (found.id, found.otype, found.fields["name"]) == (alice, "user", "Alice")
    assert await graph.obj_update(alice, {"home": "Paris", "name": None}) is True
    update = last_write(cluster).obj_update
    assert (update.id, update.otype, update.patch) == (alice, 1, b"\x82\x01\xc0\x02\xa5Paris")
    assert await graph.obj_delete(alice) is True
    assert await graph.obj_delete(alice) is False
    assert await graph.obj_get(alice) is None


async def test_a_delete_sends_the_type_that_it_expects(graph: Graph, cluster: FakeCluster) -> None:
    await graph.obj_delete(5, "user")
    assert last_write(cluster).obj_delete == pb.ObjDelete(id=5, otype=1)
    await graph.obj_delete_many([5], otype="user")
    assert last_write(cluster).obj_delete == pb.ObjDelete(id=5, otype=1)
    await graph.obj_delete(5)
    assert last_write(cluster).obj_delete == pb.ObjDelete(id=5)


async def test_a_new_object_goes_to_any_shard_unless_near_names_one(graph: Graph, cluster: FakeCluster) -> None:
    await asyncio.gather(*(graph.obj_add("user") for _ in range(200)))
    shards = {write.obj_add.shard for sent in cluster.batches() for write in sent.write.writes}
    assert len(shards) > 8


@pytest.mark.parametrize("lists", [False, True], ids=["interval", "former version"])
async def test_a_reserved_id_is_used(graph: Graph, cluster: FakeCluster, lists: bool) -> None:
    cluster.lists_reserved_ids = lists
    first, second = await graph.reserve_ids(2, near=make_id(9, 5))
    assert await graph.obj_add_many([("user", {}, None, first), ("user", None, None, second)]) == [first, second]
    assert last_write(cluster).obj_add.id == first


async def test_an_added_object_says_whether_its_id_was_used_before(graph: Graph, cluster: FakeCluster) -> None:
    (reserved,) = await graph.reserve_ids(1)
    first, again = [await graph.obj_add("user", {}, id=reserved) for _ in range(2)]
    assert first == again == reserved
    assert [(each.is_new, each.existed) for each in (first, again)] == [(True, False), (False, True)]
    both = await graph.obj_add_many([("user",), ("user", {}, None, reserved)])
    assert [each.is_new for each in both] == [True, False]
    assert (json.dumps(first), f"{first}") == (str(reserved), str(reserved))
    assert await graph.obj_get(again) is not None, "it is an id"


async def test_an_update_without_a_type_asks_the_database_before_it_reports_no_object(
    graph: Graph, cluster: FakeCluster
) -> None:
    assert await graph.obj_update(5, {"name": "x"}) is False
    assert [sent.read.critical for sent in cluster.batches()] == [False, True]
    cluster.objects[6] = encode_object(1, 1, b"")
    assert await graph.obj_update_many([(5, {"name": "x"}), (6, {"name": "y"}), (7, {"name": "z"}, "user")]) == [
        False,
        True,
        True,
    ]
    assert [write.obj_update.id for write in cluster.batches()[-1].write.writes] == [6, 7]


async def test_an_edge_without_a_time_has_the_current_time(graph: Graph, cluster: FakeCluster) -> None:
    await graph.assoc_add(1, "friend", 2, fields={"since": 5})
    added = last_write(cluster).assoc_add
    assert (added.id1, added.atype, added.id2, added.time) == (1, 1, 2, 1_700_000_000)
    assert decode_fields(SCHEMA.atype("friend"), added.data) == {"since": 5}
    await graph.assoc_add(1, "friend", 2, 0)
    assert last_write(cluster).assoc_add.time == 0


async def test_an_edge_is_changed_and_deleted(graph: Graph, cluster: FakeCluster) -> None:
    assert await graph.assoc_change_type(1, "follows", 2, "likes") == EdgeWrite(existed=True)
    changed = last_write(cluster).assoc_change_type
    assert (changed.id1, changed.atype, changed.id2, changed.new_atype) == (1, 11, 2, 4)
    assert await graph.assoc_delete_many([(1, "likes", 2)]) == [EdgeWrite(existed=True)]
    assert last_write(cluster).assoc_delete.atype == 4
    assert await graph.assoc_change_type_many([(1, "likes", 2, "follows")]) == [EdgeWrite(existed=True)]


async def test_a_missing_time_bound_is_the_widest_bound(graph: Graph, cluster: FakeCluster) -> None:
    await asyncio.gather(graph.assoc_get(1, "friend", [2]), graph.assoc_time_range(1, "friend", None, None, 9))
    batch = cluster.batches()[0].read
    assert (batch.get_highs[0], batch.get_lows[0]) == (MAX_TIME, 0)
    assert (batch.time_range_highs[0], batch.time_range_lows[0]) == (MAX_TIME, 0)


async def test_many_forms_answer_in_the_order_asked(cluster: FakeCluster) -> None:
    cluster.topology = make_topology(near=("n1", "n2", "n3"))
    async with await cluster.connect() as graph:
        ids = [make_id(n, n % 16) for n in range(1, 60)]
        cluster.objects = {each: encode_object(1, 1, b"\x81\x01\xa1x") for each in ids[::2]}
        assert [found.id if found else None for found in await graph.obj_get_many(ids)] == [
            each if each in cluster.objects else None for each in ids
        ]
        edges = [(id1, "follows", 7, time) for time, id1 in enumerate(ids)]
        await graph.assoc_add_many(edges)
        assert [page[0].id1 for page in await graph.assoc_range_many([(each, "follows", 0, 1) for each in ids])] == ids
        assert await graph.assoc_count_many([(each, "follows") for each in ids]) == [1] * len(ids)
        assert [len(page) for page in await graph.assoc_get_many([(each, "follows", [7]) for each in ids])] == [1] * 59
        windows = await graph.assoc_time_range_many([(each, "follows", 9, 5, 1) for each in ids])
        assert [page.id1 for page in windows if page] == ids[5:10]


async def test_an_error_of_some_has_the_results_of_the_others_as_the_operation_returns_them(
    graph: Graph, cluster: FakeCluster
) -> None:
    receipt = Receipt("near-1", "journal", 1, b"x").encoded()
    refused = pb.WriteResult(error=error_to_pb(InvalidArgument("no")))

    def answer(done: pb.WriteResult) -> None:
        answered = pb.Answer(write=pb.WriteAnswer(results=[done, refused]))
        cluster.link("near-1").behaviour = lambda _, __, on_answer: on_answer(answered)

    async def result_of(operation: Awaitable[object]) -> object:
        with pytest.raises(SomeFailed) as caught:
            await operation
        assert isinstance(caught.value.results[1], InvalidArgument)
        return caught.value.results[0]

    edges: list[tuple[Any, ...]] = [(1, "follows", 2), (1, "follows", 3)]
    answer(pb.WriteResult(found=True, inverse_pending=True))
    pending = EdgeWrite(True, inverse_pending=True)
    assert await result_of(graph.assoc_add_many(edges)) == pending
    assert await result_of(graph.assoc_delete_many(edges)) == pending
    assert await result_of(graph.assoc_change_type_many([(*each, "likes") for each in edges])) == pending
    assert await result_of(graph.obj_delete_many([1, 2])) is True
    assert await result_of(graph.obj_update_many([(each, {"home": "Paris"}, "user") for each in (1, 2)])) is True
    answer(pb.WriteResult(id=5, found=True))
    added = await result_of(graph.obj_add_many([("user",), ("user",)]))
    assert isinstance(added, AddedObject)
    assert (added, added.is_new) == (5, False)
    answer(pb.WriteResult(accepted=receipt))
    assert isinstance(await result_of(graph.later.assoc_delete_many(edges)), Accepted)


async def test_a_time_range_may_begin_at_a_position_within_its_bounds(graph: Graph, cluster: FakeCluster) -> None:
    await graph.assoc_add_many([(1, "follows", 100 + time, time) for time in range(1, 9)])
    assert (await graph.assoc_time_range(1, "follows", 7, 3, 2, 1)).times == [6, 5]
    assert list(cluster.batches()[-1].read.time_range_starts) == [start_at(1)]
    queries = [(1, "follows", 7, 3, 2), (1, "follows", 7, 3, 2, 4), (1, "follows", None, None, 9, 8)]
    assert [page.times for page in await graph.assoc_time_range_many(queries)] == [[7, 6], [3], []]
    with graph.trace() as trace:
        await graph.assoc_time_range(1, "follows", 9, 1, 4, pos=5)
    assert [each.key for each in trace] == ["1 follows at 9…1 from 5, 4 at most"]


async def test_a_trace_says_which_tier_answered(graph: Graph, cluster: FakeCluster) -> None:
    def second_missed(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        part = pb.ReadAnswer(values=link.values(request.read), missed_slots=[1], served_by="leader")
        on_answer(pb.Answer(read=part))

    cluster.link("near-1").behaviour = second_missed
    with graph.trace() as trace:
        await asyncio.gather(graph.obj_get(1), graph.assoc_range(1, "friend", 0, 5))
        await graph.assoc_get(1, "friend", [2, 3])
        await graph.assoc_time_range(1, "friend", 9, 1, 4)
    await graph.obj_get(1)
    assert [(each.operation, each.key, each.answered_by) for each in trace] == [
        ("obj_get", "1", MEMORY),
        ("assoc_range", "1 friend 0+5", "leader"),
        ("assoc_get", "1 friend to 2 ids", MEMORY),
        ("assoc_time_range", "1 friend at 9…1, 4 at most", MEMORY),
    ]
    assert {(each.server, each.tier) for each in trace[:]} == {("near-1", "near")}


async def test_an_object_of_a_type_newer_than_our_schema_has_the_schema_fetched(
    graph: Graph, cluster: FakeCluster
) -> None:
    cluster.schema = load_schema("format: 1\nobjects:\n  album:\n    number: 77\n", "newer")
    cluster.objects[1] = encode_object(1, 77, b"")
    found = await graph.obj_get(1)
    assert found is not None
    assert found.otype == "album"
    assert [each.otype for each in await graph.obj_get_many([1]) if each] == ["album"]


async def test_the_watch_replaces_documents_and_skips_wrong_ones(graph: Graph, cluster: FakeCluster) -> None:
    watching = [link for link in cluster.links.values() if link.watchers]
    send = watching[0].watchers[0]
    newer = make_topology(version=5, near=("n9",))
    document = pb.TopologyDocument(version=5, json=dump_topology(newer).encode())
    send(pb.Answer(more=True, watch=pb.WatchEvent(topology=document)))
    await until(lambda: graph.topology.version == 5)
    assert "near-1" not in cluster.kept
    await graph.obj_get(1)
    assert len(cluster.batches("n9")) == 1
    for wrong in (
        pb.WatchEvent(topology=pb.TopologyDocument(version=6, json=b"{")),
        pb.WatchEvent(schema=pb.SchemaDocument(hash="x", json=b"{")),
        pb.WatchEvent(topology=pb.TopologyDocument(version=4, json=dump_topology(make_topology(4)).encode())),
    ):
        send(pb.Answer(more=True, watch=wrong))
    await quiet()
    assert (graph.topology.version, graph.schema) == (5, SCHEMA)
    schema = load_schema("format: 1\nobjects:\n  album:\n    number: 77\n", "newer")
    event = pb.WatchEvent(schema=pb.SchemaDocument(hash=schema.version_hash, json=schema.to_json().encode()))
    send(pb.Answer(more=True, watch=event))
    assert await graph.obj_add("album") > 0


def large_topology(version: int = 1) -> Topology:
    return make_topology(version, near=tuple(f"near-{number}" for number in range(500)))


async def test_a_large_document_is_decoded_and_routed_by_in_a_thread(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """9,000 servers held the loop of a web process for 4 s."""
    threads: dict[str, set[int]] = {"decode_topology": set(), "_routes_of": set()}

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(configuration_module, name)

        def work(*arguments: Any) -> Any:
            threads[name].add(threading.get_ident())
            return real(*arguments)

        return work

    for name in threads:
        monkeypatch.setattr(configuration_module, name, watched(name))
    cluster.topology = large_topology()
    async with await cluster.connect() as graph:
        await until(lambda: any(link.watchers for link in cluster.links.values()))
        send = next(link.watchers[0] for link in cluster.links.values() if link.watchers)
        for version in (2, 3, 4):
            document = pb.TopologyDocument(version=version, json=dump_topology(large_topology(version)).encode())
            send(pb.Answer(more=True, watch=pb.WatchEvent(topology=document)))
        await until(lambda: graph.topology.version == 4)
    assert all(threads.values())
    assert not any(threading.get_ident() in each for each in threads.values())


async def test_an_application_asks_for_its_region_s_part_of_the_topology(cluster: FakeCluster) -> None:
    async with await cluster.connect():
        await until(lambda: any(link.watchers for link in cluster.links.values()))
    sent = [request for link in cluster.links.values() for request in link.sent]
    assert [each.get_topology.region for each in sent if each.HasField("get_topology")] == ["east"]
    assert [each.watch.region for each in sent if each.HasField("watch")] == ["east"]
    await ClientConfiguration.fetch(await read_target("near-1:7000"), None, cluster, ClientSettings())
    (first,) = [each for each in cluster.links["near-1:7000"].sent if each.HasField("get_topology")]
    assert first.get_topology.HasField("region"), "that of the server which is asked"
    assert first.get_topology.region == ""


async def test_a_watch_that_breaks_is_opened_again(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(watch_retry_seconds=1e-6)):
        await until(lambda: any(link.watchers for link in cluster.links.values()))
        broken = next(link for link in cluster.links.values() if link.watchers)
        broken.watchers.pop()(pb.Answer(error=pb.Error(reason="UNAVAILABLE", message="gone")))
        await until(lambda: any(link.watchers for link in cluster.links.values()))


async def test_a_follower_that_is_down_is_not_watched(cluster: FakeCluster) -> None:
    """It may have left by a topology that only the others have."""
    cluster.link("near-1").is_down = True
    async with await cluster.connect(ClientSettings(watch_retry_seconds=1e-6)):
        for _ in range(20):
            await until(lambda: any(link.watchers for link in cluster.links.values()))
            assert not cluster.link("near-1").watchers
            cluster.link("far-1").watchers.pop()(pb.Answer(error=pb.Error(reason="UNAVAILABLE", message="gone")))


async def test_a_process_that_may_not_watch_fetches_the_documents_now_and_then(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(watch_retry_seconds=1e-6)) as graph:
        await until(lambda: any(link.watchers for link in cluster.links.values()))
        denying = next(link for link in cluster.links.values() if link.watchers)
        cluster.topology = replace(cluster.topology, version=cluster.topology.version + 1)
        denying.watchers.pop()(pb.Answer(error=pb.Error(reason="PERMISSION_DENIED", message="no")))
        await until(lambda: graph.topology.version == cluster.topology.version)
        await until(lambda: any(link.watchers for link in cluster.links.values()))


async def test_the_address_of_a_follower_decides_the_region(cluster: FakeCluster) -> None:
    west = Region(name="west", leaders=tier("w-leaders", "w0"), followers=(tier("w-near", "w1"), tier("w-far", "w2")))
    database = cluster.topology.databases[0]
    servers = {**database.servers, "west": DatabaseServer(name="db-west")}
    cluster.topology = replace(
        cluster.topology,
        regions=(west, *cluster.topology.regions),
        databases=(replace(database, servers=servers),),
    )
    settings = ClientSettings()

    async def region_by(target: str, wanted: str | None = None) -> str:
        return (await ClientConfiguration.fetch(await read_target(target), wanted, cluster, settings)).region

    assert await region_by("near-1:7000") == "east"
    assert await region_by("frames:w2:7001") == "west"
    assert await region_by("balancer:7000", "west") == "west"
    with pytest.raises(InvalidArgument, match="region= one of west, east"):
        await region_by("balancer:7000")
    with pytest.raises(TopologyError, match=r"no region 'north' in topology version \d+: its regions are west, east$"):
        await region_by("near-1:7000", "north")


async def test_the_next_follower_of_a_file_is_asked_when_one_does_not_answer(cluster: FakeCluster) -> None:
    async def away(request: pb.Request, timeout_seconds: float) -> pb.Answer:
        raise Unavailable("away")

    for _ in range(4):  # whichever follower is tried first
        cluster.links.clear()
        cluster.link("near-1").ask = away  # type: ignore[method-assign]
        async with await cluster.connect() as graph:
            assert graph.topology.version == 1
    cluster.link("far-1").ask = away  # type: ignore[method-assign]
    cluster.link("near-1").ask = away  # type: ignore[method-assign]
    with pytest.raises(TaoError, match="away"):
        await cluster.connect()


async def test_an_unknown_tier_is_named_in_the_error(cluster: FakeCluster) -> None:
    with pytest.raises(TopologyError, match="no follower tier 'mid'; it has near, far"):
        await cluster.connect(tier_name="mid")
