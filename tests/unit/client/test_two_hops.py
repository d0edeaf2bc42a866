"""Two hops: counts, caps, exclusions, partial answers and kept lists."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from tao.client import Graph, InvalidArgument, PermissionDenied, UnknownType, two_hops
from tao.client.two_hops import _in_ranking
from tao.model.edge_block import id2_column
from tao.model.graph import Edge
from tao.model.ids import SHARD_SHIFT
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SCHEMA, FakeCluster, FakeLink, make_id, make_topology, until
from tests.unit.client.test_edge_sets import failing_for
from tests.unit.client.test_sync_graph import sync_graph

ME = make_id(1)
FRIEND, NOTE = (SCHEMA.atype(each).number for each in ("friend", "note"))
FIRST = [make_id(n, shard=n % 4) for n in range(10, 30)]


def fill(cluster: FakeCluster, seed: int = 1, people: int = 60) -> dict[int, list[int]]:
    """Give every neighbour of `ME` a random list, and return the lists."""
    random = Random(seed)
    pool = [*FIRST, ME, *(make_id(n, shard=n % 4) for n in range(1_000, 1_000 + people))]
    chosen = {ME: FIRST} | {each: random.sample(pool, 25) for each in FIRST}
    for id1, id2s in chosen.items():
        cluster.lists[id1, FRIEND] = [Edge(id2, 1_000 - place) for place, id2 in enumerate(id2s)]
    return chosen


@pytest.fixture
def chosen(cluster: FakeCluster) -> dict[int, list[int]]:
    return fill(cluster)


async def test_candidates_match_the_model_counts(graph: Graph, chosen: dict[int, list[int]]) -> None:
    counts = Counter(id2 for each in FIRST for id2 in chosen[each] if id2 not in (ME, *FIRST))
    expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for limit in (1, 7, 1_000):
        found = await graph.two_hop(ME, "friend", limit=limit)
        assert [(each.id, each.mutual) for each in found.candidates] == expected[:limit]
        assert (found.visited, found.missing) == (20 + 20 * 25, [])
        for candidate in found.candidates:
            assert candidate.via == [each for each in FIRST if candidate.id in chosen[each]][:3]
            assert candidate.score == candidate.mutual


async def test_each_level_is_one_message_for_each_follower_with_as_many_lists_and_edges_as_by_default(
    cluster: FakeCluster,
) -> None:
    cluster.topology = make_topology(near=("near-1", "near-2", "near-3"))
    friends = [make_id(n, shard=n % 16) for n in range(500)]
    cluster.lists[ME, FRIEND] = [Edge(id2, 1_000 - place) for place, id2 in enumerate(friends)]
    async with await cluster.connect(tier_name="near") as graph:
        assert (await graph.two_hop(ME, "friend")).visited == 500
    sent = {name: len(cluster.batches(name)) for name in cluster.links if cluster.batches(name)}
    assert sorted(sent.values()) == [1, 1, 2], "one follower has the list of the first level, too"


async def test_five_hundred_lists_of_five_hundred_at_one_follower_are_one_message(
    graph: Graph, cluster: FakeCluster
) -> None:
    friends = [make_id(n, shard=n % 16) for n in range(500)]
    cluster.lists[ME, FRIEND] = [Edge(id2, 1_000 - place) for place, id2 in enumerate(friends)]
    await graph.two_hop(ME, "friend")
    assert len(cluster.batches()) == 2


async def test_the_ids_of_a_follower_are_counted_while_another_one_has_not_answered(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[bytes] = []

    def counting_column(block: bytes) -> memoryview:
        counted.append(block)
        return id2_column(block)

    monkeypatch.setattr(two_hops, "id2_column", counting_column)
    cluster.topology = make_topology(near=("near-1", "near-2"))
    chosen = fill(cluster)
    async with await cluster.connect(tier_name="near") as graph:
        names = {each: graph._router.reader(each >> SHARD_SHIFT) for each in FIRST}
        slow = next(queue for queue in names.values() if queue is not graph._router.reader(ME >> SHARD_SHIFT))
        held: list[Callable[[], None]] = []

        def hold(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
            held.append(lambda: on_answer(link.answer(request)))

        cluster.link(slow.server.name).behaviour = hold
        asking = asyncio.create_task(graph.two_hop(ME, "friend", limit=1_000))
        await until(lambda: held and len(counted) == 1 + sum(queue is not slow for queue in names.values()))
        held[0]()
        found = await asking
    counts = Counter(id2 for each in FIRST for id2 in chosen[each] if id2 not in (ME, *FIRST))
    assert {each.id: each.mutual for each in found.candidates} == counts
    for candidate in found.candidates:
        assert candidate.via == [each for each in FIRST if candidate.id in chosen[each]][:3]


async def test_hub_contributes_its_newest_five_hundred(graph: Graph, cluster: FakeCluster) -> None:
    hub = FIRST[0]
    cluster.lists[ME, FRIEND] = [Edge(hub, 1)]
    ids = [make_id(n) for n in range(100, 3_100)]
    cluster.lists[hub, FRIEND] = [Edge(id2, 10_000 - place) for place, id2 in enumerate(ids)]
    found = await graph.two_hop(ME, "friend", limit=1_000)
    assert [each.id for each in found.candidates] == ids[:500]


async def test_nobody_is_a_candidate_for_themselves_or_their_friends(graph: Graph, cluster: FakeCluster) -> None:
    """A friend beyond the cap of the first hop is no candidate either."""
    fill(cluster)
    old_friend = make_id(1_001, shard=1)
    cluster.lists[ME, FRIEND].append(Edge(old_friend, 1))
    found = await graph.two_hop(ME, "friend", limit=1_000, fan_out=20)
    ids = {each.id for each in found.candidates}
    assert ids
    assert ids.isdisjoint({ME, old_friend, *FIRST})


@pytest.mark.parametrize("limit", [1, 10, 1_000])
async def test_blocked_user_is_never_a_candidate_however_many_are_requested(
    graph: Graph, cluster: FakeCluster, limit: int
) -> None:
    fill(cluster)
    everyone = [each.id for each in (await graph.two_hop(ME, "friend", limit=1_000)).candidates]
    blocked = everyone[:30]
    cluster.lists[ME, NOTE] = [Edge(id2, 1) for id2 in sorted(blocked, reverse=True)]
    found = await graph.two_hop(ME, "friend", limit=limit, exclude=graph.edge_set(ME, "note"))
    assert [each.id for each in found.candidates] == everyone[30:][:limit]


async def test_an_exclusion_that_cannot_be_read_fails_the_call(graph: Graph, cluster: FakeCluster) -> None:
    fill(cluster)
    other = make_id(500, shard=9)
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(other)
    with pytest.raises(PermissionDenied, match="refused"):
        await graph.two_hop(ME, "friend", exclude=graph.edge_set(other, "note"))


async def test_unavailable_follower_makes_the_answer_partial_and_says_so(graph: Graph, cluster: FakeCluster) -> None:
    chosen = fill(cluster)
    refused = FIRST[0]
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(refused)
    found = await graph.two_hop(ME, "friend", limit=1_000)
    assert [(each.id1, each.atype, each.error.reason) for each in found.missing] == [
        (refused, "friend", "PERMISSION_DENIED")
    ]
    counts = Counter(id2 for each in FIRST[1:] for id2 in chosen[each] if id2 not in (ME, *FIRST))
    assert {each.id: each.mutual for each in found.candidates} == counts


async def test_a_first_list_that_cannot_be_read_is_named(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(ME)
    found = await graph.two_hop(ME, "friend")
    assert (found.candidates, [each.id1 for each in found.missing]) == ([], [ME])


async def test_weights_replace_the_count_and_order_the_candidates(graph: Graph, cluster: FakeCluster) -> None:
    chosen = fill(cluster)
    heavy = FIRST[5]
    found = await graph.two_hop(
        ME, "friend", limit=25, weigh=lambda each, length: 100.0 if each == heavy else 1 / length
    )
    leading = {each.id for each in found.candidates if each.score >= 100}
    assert leading == set(chosen[heavy]) - {ME, *FIRST}
    scores = [each.score for each in found.candidates]
    assert scores == sorted(scores, reverse=True)


async def test_the_two_hops_may_be_of_two_types(graph: Graph, cluster: FakeCluster) -> None:
    cluster.lists[ME, NOTE] = [Edge(FIRST[0], 1)]
    cluster.lists[FIRST[0], FRIEND] = [Edge(77, 1)]
    found = await graph.two_hop(ME, ["note", "friend"])
    assert [(each.id, each.via) for each in found.candidates] == [(77, [FIRST[0]])]


async def test_kept_list_is_ordered_by_mutual_friends(graph: Graph, cluster: FakeCluster) -> None:
    fill(cluster)
    found = await graph.two_hop(ME, "friend", limit=30)
    kept = await graph.keep_two_hop(ME, "friend", into="note", limit=30)
    assert (kept.added, kept.removed) == (30, 0)
    edges = await graph.assoc_range(ME, "note", 0, 100)
    assert list(zip(edges.id2s, edges.times, strict=True)) == sorted(
        ((each.id, each.mutual) for each in found.candidates), key=lambda pair: (-pair[1], -pair[0])
    )
    assert (await graph.keep_two_hop(ME, "friend", into="note", limit=30)).added == 0


async def test_a_partial_answer_lowers_no_kept_number(graph: Graph, cluster: FakeCluster) -> None:
    fill(cluster)
    found = await graph.two_hop(ME, "friend", limit=1_000)
    numbers = {each.id: each.mutual for each in found.candidates}
    raised, lost, *_ = numbers
    kept = {**numbers, raised: 1}
    del kept[lost]
    cluster.lists[ME, NOTE] = [Edge(id2, kept[id2]) for id2 in sorted(kept, key=lambda each: (-kept[each], -each))]
    before = len(cluster.batches())
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(FIRST[0])
    partial = {each.id: each.mutual for each in (await graph.two_hop(ME, "friend", limit=1_000)).candidates}
    assert any(partial[each] < numbers[each] for each in partial)
    done = await graph.keep_two_hop(ME, "friend", into="note", limit=1_000)
    assert (done.added, done.removed, [each.id1 for each in done.missing]) == (2, 0, [FIRST[0]])
    writes = [sent.write for sent in cluster.batches()[before:] if sent.WhichOneof("body") == "write"]
    assert {each.assoc_add.id2 for write in writes for each in write.writes} == {raised, lost}


async def test_wrong_arguments_are_refused_before_anything_is_sent(graph: Graph, cluster: FakeCluster) -> None:
    for message, call in (
        ("one type for both hops, or a pair", graph.two_hop(ME, ["friend"])),
        ("one type for both hops, or a pair", graph.two_hop(ME, ["friend", "friend", "friend"])),
        ("limit is 0", graph.two_hop(ME, "friend", limit=0)),
        ("limit is 1001", graph.two_hop(ME, "friend", limit=1_001)),
        ("fan_out is 0", graph.two_hop(ME, "friend", fan_out=0)),
        ("fan_out is 1001", graph.two_hop(ME, "friend", fan_out=1_001)),
        ("made by graph.edge_set", graph.two_hop(ME, "friend", exclude=[7])),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match=message):
            await call
    with pytest.raises(UnknownType):
        await graph.two_hop(ME, "freind")
    with pytest.raises(UnknownType):
        await graph.keep_two_hop(ME, "friend", into="freind")
    assert cluster.batches() == []


def test_the_synchronous_graph_has_both(cluster: FakeCluster) -> None:
    fill(cluster)
    with sync_graph(cluster) as graph:
        found = graph.two_hop(ME, "friend", limit=3, exclude=graph.edge_set(ME, "note"))
        assert len(found.candidates) == 3
        assert graph.keep_two_hop(ME, "friend", into="note", limit=3, exclude=graph.edge_set(ME, "friend")).added == 3


def test_the_ranking_comes_in_batches_that_grow() -> None:
    random = Random(5)
    scores = {each: random.randrange(6) / 2 for each in range(1, 200)}
    expected = sorted(scores, key=lambda each: (-scores[each], each))
    for size in (1, 7, 50, 500):
        batches = list(_in_ranking(scores, size))
        assert [each for batch in batches for each in batch] == expected
        assert all(len(batch) <= size << place for place, batch in enumerate(batches))
    assert list(_in_ranking({}, 4)) == []
    assert max(map(len, _in_ranking(dict.fromkeys(range(1, 20_000), 1), 1))) == 6_000


async def test_few_rounds_go_over_all_candidates_when_all_are_excluded(graph: Graph, cluster: FakeCluster) -> None:
    cluster.lists[ME, FRIEND] = [Edge(id2, 1) for id2 in reversed(FIRST)]
    for place, each in enumerate(FIRST):
        ids = range(10_000 + 500 * place, 10_500 + 500 * place)
        cluster.lists[each, FRIEND] = [Edge(id2, 1) for id2 in reversed(ids)]
    cluster.lists[ME, NOTE] = [Edge(id2, 1) for id2 in reversed(range(10_000, 20_000))]
    found = await graph.two_hop(ME, "friend", limit=1, exclude=graph.edge_set(ME, "note"))
    assert found.candidates == []
    assert len(cluster.batches()) <= 2 + 8
