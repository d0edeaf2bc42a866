"""Sets of edges in the SDK: operators, pages, counts, membership, own writes, failures and wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tao.client import (
    Consistency,
    EdgeSet,
    Graph,
    InvalidArgument,
    PermissionDenied,
    TooLarge,
    Unavailable,
    UnknownType,
)
from tao.model.edge_states import State
from tao.model.graph import Edge
from tao.sets.cursor import Place
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SCHEMA, FakeCluster, FakeLink, make_id
from tests.unit.client.test_sync_graph import sync_graph

A, B, C = make_id(1), make_id(2, shard=3), make_id(3, shard=5)
FRIEND = SCHEMA.atype("friend").number


def newest_first(ids: range, shift: int = 0) -> list[Edge]:
    return [Edge(id2, id2 + shift) for id2 in reversed(ids)]


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster()
    cluster.lists[A, FRIEND] = newest_first(range(1, 101))
    cluster.lists[B, FRIEND] = newest_first(range(51, 151), shift=7)
    cluster.lists[C, FRIEND] = newest_first(range(91, 96))
    return cluster


async def ids_in(edges: EdgeSet) -> list[int]:
    return [edge.id2 async for edge in edges]


async def test_a_set_is_a_description_and_sends_nothing(graph: Graph, cluster: FakeCluster) -> None:
    graph.edge_set(A, "friend") & graph.edge_set(B, "friend") | graph.edge_union([A, B], "friend")
    assert cluster.batches() == []


async def test_the_operators_follow_the_left_operand(graph: Graph) -> None:
    mine, theirs, hidden = (graph.edge_set(each, "friend") for each in (A, B, C))
    both = mine & theirs - hidden
    assert await ids_in(both) == [*range(100, 95, -1), *range(90, 50, -1)]
    page = await both.page(3)
    assert [(edge.id1, edge.atype, edge.id2, edge.time) for edge in page.edges] == [
        (A, "friend", id2, id2) for id2 in (100, 99, 98)
    ]
    assert [edge.id1 for edge in (await (theirs & mine).page(2)).edges] == [B, B]
    union = (await (mine | theirs).page(1_000)).edges
    assert [(edge.id2, edge.time) for edge in union] == [
        *((id2, id2 + 7) for id2 in range(150, 50, -1)),
        *((id2, id2) for id2 in range(50, 0, -1)),
    ]


async def test_pages_continue_by_cursor_until_there_is_none(graph: Graph) -> None:
    both = graph.edge_set(A, "friend") & graph.edge_set(B, "friend")
    found, cursor = [], None
    while True:
        page = await both.page(7, cursor)
        found += [edge.id2 for edge in page.edges]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == list(range(100, 50, -1))


async def test_pages_read_one_by_one_use_what_was_read_before(graph: Graph, cluster: FakeCluster) -> None:
    union = graph.edge_union([A, B], "friend")
    pages = union.pages()
    found = (await pages.next(10)).edges
    sent = len(cluster.batches())
    found += (await pages.next(1)).edges
    assert len(cluster.batches()) == sent, "the first page left an edge, so nothing is sent for the second one"
    last = await pages.next(1_000)
    found += last.edges
    assert last.cursor is None
    assert [edge.id2 for edge in found] == await ids_in(union)
    with pytest.raises(InvalidArgument, match="limit is 0"):
        await pages.next(0)


async def test_a_set_can_be_continued_from_any_place(graph: Graph) -> None:
    mine = graph.edge_set(A, "friend")
    page = await mine.page(3, mine.cursor_after(Place(60, 1_000)))
    assert [edge.id2 for edge in page.edges] == [60, 59, 58]
    assert page.cursor is not None
    assert mine.place_of(page.cursor) == (58, 58)


async def test_a_page_says_in_words_what_was_done(graph: Graph) -> None:
    page = await (graph.edge_set(A, "friend") & graph.edge_set(C, "friend")).page(10)
    assert page.plan == f"read {C}.friend whole (5 edges), and {A}.friend page by page"
    assert not page.cut_short
    assert page.examined == 105


async def test_bounds_on_time_are_part_of_an_operand(graph: Graph) -> None:
    assert await ids_in(graph.edge_set(A, "friend", high=10, low=8)) == [10, 9, 8]
    assert await ids_in(graph.edge_set(B, "friend") - graph.edge_set(A, "friend", low=60)) == [
        *range(150, 100, -1),
        *range(59, 50, -1),
    ]


async def test_an_operand_may_be_the_list_of_a_state(graph: Graph, cluster: FakeCluster) -> None:
    numbers = SCHEMA.atype("subscribes").states
    normal, archived = numbers[State.NORMAL], numbers[State.ARCHIVED]
    cluster.lists[A, normal] = newest_first(range(1, 4))
    cluster.lists[A, archived] = newest_first(range(4, 6))
    cluster.lists[B, archived] = newest_first(range(5, 8))
    shown, hidden = graph.edge_set(A, "subscribes"), graph.edge_set(A, "subscribes", state="archived")
    page = await (shown | hidden).page(9)
    assert [(edge.atype, edge.id2) for edge in page.edges] == [("subscribes", id2) for id2 in (5, 4, 3, 2, 1)]
    assert f"{A}.subscribes (archived)" in (await (shown & hidden).page(9)).plan
    assert await ids_in(graph.edge_set(A, "subscribes", state="archived", high=4)) == [4]
    assert await ids_in(graph.edge_union([A, B], "subscribes", state="archived")) == [7, 6, 5, 4]
    assert (await hidden.count(9)).value == 2
    cursor = (await hidden.page(1)).cursor
    with pytest.raises(InvalidArgument, match="another set expression"):
        await shown.page(1, cursor)


async def test_counts_membership_and_mutual(graph: Graph) -> None:
    both = graph.edge_set(A, "friend") & graph.edge_set(B, "friend")
    assert (await graph.edge_set(A, "friend").count(1)).value == 100
    assert ((await both.count(20)).value, (await both.count(20)).exact) == (20, False)
    assert ((await both.count(1_000)).value, (await both.count(1_000)).exact) == (50, True)
    found = await both.among([60, 1, 60, 149])
    assert {id2: edge.time for id2, edge in found.items()} == {60: 60}
    first = await graph.mutual(A, B, "friend", limit=2)
    assert [edge.id2 for edge in first.edges] == [100, 99]
    assert [edge.id2 for edge in (await graph.mutual(A, B, "friend", 2, first.cursor)).edges] == [98, 97]


async def test_the_queries_of_one_step_are_one_message_for_each_server(graph: Graph, cluster: FakeCluster) -> None:
    ids = [make_id(n, shard=n % 8) for n in range(100, 400)]
    for each in ids:
        cluster.lists[each, FRIEND] = [Edge(each + 1_000, each)]
    page = await graph.edge_union(ids, "friend").page(50)
    assert [edge.id1 for edge in page.edges] == sorted(ids, reverse=True)[:50]
    assert len(cluster.batches()) == 1


async def test_every_operand_includes_own_writes(graph: Graph, cluster: FakeCluster) -> None:
    await graph.assoc_add(A, "friend", 7_000, time=900)
    await graph.assoc_add(B, "friend", 7_000, time=1)
    sent = len(cluster.batches())
    page = await (graph.edge_set(A, "friend") & graph.edge_set(B, "friend")).page(1)
    assert [edge.id2 for edge in page.edges] == [7_000]
    reads = [request.read for request in cluster.batches()[sent:]]
    assert all(read.minimum_versions for read in reads), "each list is asked for the version of the own write"


async def test_read_options_hold_for_every_list(graph: Graph, cluster: FakeCluster) -> None:
    both = graph.edge_set(A, "friend") & graph.edge_set(B, "friend")
    await both.page(5, critical=True)
    await both.count(5, consistency=Consistency.master())
    await both.among([60], critical=True)
    _ = [edge async for edge in both.walk(critical=True)]
    assert all(request.read.critical for request in cluster.batches())
    with pytest.raises(InvalidArgument, match="max_staleness_ms"):
        await both.page(5, max_staleness_ms=0)


def failing_for(*id1s: int) -> Callable[[FakeLink, pb.Request, AnswerHandler], None]:
    """Refuse the queries on these lists, and answer the others of their batch, and writes."""

    def behaviour(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        if request.HasField("write"):
            on_answer(link.answer(request))
            return
        read = request.read
        asked = [*read.obj_ids, *read.count_id1s, *read.range_id1s, *read.time_range_id1s, *read.get_id1s]
        failed = [slot for slot, id1 in enumerate(asked) if id1 in id1s]
        values = {slot: value for slot, value in enumerate(link.values(read)) if slot not in failed}
        answer = pb.ReadAnswer(slots=values, values=values.values(), failed_slots=failed)
        answer.errors.extend([error_to_pb(PermissionDenied("this list is refused"))] * len(failed))
        on_answer(pb.Answer(read=answer))

    return behaviour


async def test_unreadable_list_fails_the_page_and_is_not_treated_as_empty(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(C)
    visible = graph.edge_set(A, "friend") - graph.edge_set(C, "friend")
    for read in (visible.page(5), visible.count(5), visible.among([1]), graph.edge_union([A, C], "friend").page(5)):
        with pytest.raises(PermissionDenied, match="refused"):
            await read


async def test_a_union_may_leave_out_lists_and_names_them(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(C)
    page = await graph.edge_union([A, C], "friend", missing="skip").page(3)
    assert [edge.id2 for edge in page.edges] == [100, 99, 98]
    assert [(each.id1, each.atype, each.error.reason) for each in page.missing] == [(C, "friend", "PERMISSION_DENIED")]


async def test_wrong_arguments_are_refused_before_anything_is_sent(graph: Graph, cluster: FakeCluster) -> None:
    mine = graph.edge_set(A, "friend")
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (InvalidArgument, "at least one list", lambda: graph.edge_union([], "friend")),
        (TooLarge, "at most 10000 lists", lambda: graph.edge_union(range(1, 10_002), "friend")),
        (InvalidArgument, "missing is 'ignore'", lambda: graph.edge_union([A], "friend", missing="ignore")),
        (InvalidArgument, r"ids\[1\] is 0", lambda: graph.edge_union([A, 0], "friend")),
        (InvalidArgument, "of shard", lambda: graph.edge_union([make_id(1, shard=99)], "friend")),
        (UnknownType, "freind", lambda: graph.edge_set(A, "freind")),
        (UnknownType, "freind", lambda: graph.edge_union([A], "freind")),
        (InvalidArgument, "id1 is 0", lambda: graph.edge_set(0, "friend")),
        (InvalidArgument, "low is -1", lambda: graph.edge_set(A, "friend", low=-1)),
        (InvalidArgument, "has no states", lambda: graph.edge_set(A, "friend", state="archived")),
        (InvalidArgument, "has no states", lambda: graph.edge_union([A], "friend", state="archived")),
        (InvalidArgument, "state must be one of", lambda: graph.edge_set(A, "subscribes", state="gone")),
    ]
    for kind, message, make in wrong:
        with pytest.raises(kind, match=message):
            make()
    many = mine
    for _ in range(15):
        many = many | mine
    with pytest.raises(InvalidArgument, match="at most 16 terms"):
        many | mine
    with pytest.raises(TypeError):
        mine & 7  # type: ignore[operator]
    other = await (mine - mine).page(1)
    assert other.cursor is None
    cursor = (await mine.page(1)).cursor
    sent = len(cluster.batches())
    for refused, read in (
        ("limit is 0", mine.page(0)),
        ("limit is 1001", mine.page(1_001)),
        ("another set expression", (mine | mine).page(1, cursor)),
        ("not valid", mine.page(1, "x" + str(cursor))),
        ("limit is 0", mine.count(0)),
        (r"ids\[0\] is -1", mine.among([-1])),
    ):
        with pytest.raises(InvalidArgument, match=refused):
            await read
    assert len(cluster.batches()) == sent


async def test_a_set_of_another_graph_is_refused(graph: Graph) -> None:
    async with await FakeCluster().connect() as other:
        with pytest.raises(InvalidArgument, match="another graph"):
            graph.edge_set(A, "friend") & other.edge_set(A, "friend")
        with pytest.raises(InvalidArgument, match="another graph"):
            await graph.two_hop(A, "friend", exclude=other.edge_set(A, "friend"))


def test_the_synchronous_sets_have_the_same_methods(cluster: FakeCluster) -> None:
    with sync_graph(cluster) as graph, sync_graph(cluster) as other:
        both = graph.edge_set(A, "friend") & graph.edge_set(B, "friend")
        assert [edge.id2 for edge in both] == list(range(100, 50, -1))
        assert [edge.id2 for edge in both.walk(page=9)] == list(range(100, 50, -1))
        page = both.page(2)
        assert [edge.id2 for edge in both.page(2, page.cursor).edges] == [98, 97]
        assert both.count(10).value == 10
        assert list(both.among([60, 1])) == [60]
        assert [edge.id2 for edge in graph.edge_union([A, C], "friend").page(1).edges] == [100]
        assert [edge.id2 for edge in graph.mutual(A, B, "friend", limit=1).edges] == [100]
        cluster.lists[A, SCHEMA.atype("subscribes").states[State.ARCHIVED]] = [Edge(8, 5)]
        assert list(graph.edge_set(A, "subscribes", state="archived").among([7, 8])) == [8]
        assert [edge.id2 for edge in graph.edge_union([A], "subscribes", state="archived")] == [8]
        with pytest.raises(InvalidArgument, match="another graph"):
            both | other.edge_set(A, "friend")


async def test_a_set_of_a_closed_graph_fails_and_is_not_empty(cluster: FakeCluster) -> None:
    graph = await cluster.connect()
    mine = graph.edge_set(A, "friend")
    await graph.close()
    with pytest.raises(Unavailable):
        await mine.page(1)
