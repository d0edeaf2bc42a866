"""Feeds by pull: order, walks under writes, full pages, partial answers, new posts and wrong arguments."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

import pytest

from tao.client import (
    Assoc,
    Consistency,
    Graph,
    InvalidArgument,
    Object,
    PermissionDenied,
    TooLarge,
    UnknownType,
)
from tao.feeds import MAX_SOURCES, FeedPage, Feeds, SyncFeeds
from tao.model.graph import Edge, encode_object
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import SCHEMA, FakeCluster, FakeLink, make_id
from tests.unit.client.test_edge_sets import failing_for
from tests.unit.client.test_sync_graph import sync_graph

ME = make_id(1)
AUTHORS = [make_id(n, shard=n % 8) for n in range(10, 30)]
POSTS_EACH = 30
MONTH = 30 * 86_400
FOLLOWS, POSTED = (SCHEMA.atype(each).number for each in ("follows", "posted"))
CHECKIN = SCHEMA.otype("checkin").number


def post_id(author: int, number: int) -> int:
    return author + 100 * (number + 1)


def add_posts(cluster: FakeCluster, author: int, times: Iterable[int]) -> list[int]:
    """Add posts of an author, and return their ids, the newest first."""
    edges = cluster.lists.setdefault((author, POSTED), [])
    for time in times:
        edges.append(Edge(post_id(author, len(edges)), time))
        cluster.objects[edges[-1].id2] = encode_object(1, CHECKIN, b"")
    edges.sort(key=lambda each: (each.time, each.id2), reverse=True)
    return [each.id2 for each in edges]


def follow(cluster: FakeCluster, authors: Iterable[int], reader: int = ME) -> None:
    cluster.lists[reader, FOLLOWS] = [Edge(each, 1) for each in sorted(authors, reverse=True)]


def expected(cluster: FakeCluster, authors: Iterable[int]) -> list[int]:
    """Return the ids of the posts of some authors that exist, in the order of a feed."""
    edges = sorted(((each.time, each.id2) for id1 in authors for each in cluster.lists[id1, POSTED]), reverse=True)
    return [id2 for _, id2 in edges if id2 in cluster.objects]


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster()
    follow(cluster, AUTHORS)
    for place, author in enumerate(AUTHORS):
        add_posts(cluster, author, range(1_000 + place, 1_000 + place + POSTS_EACH * 7, 7))
    return cluster


@pytest.fixture
def feeds(graph: Graph) -> Feeds:
    return Feeds(graph)


def ids(page: FeedPage) -> list[int]:
    return [each.id for each in page.posts]


async def walk(feeds: Feeds, limit: int, **options: Any) -> AsyncIterator[FeedPage]:
    cursor: str | None = None
    while True:
        page = await feeds.page(ME, limit, cursor, **options)
        yield page
        cursor = page.cursor
        if cursor is None:
            return


async def test_a_page_has_the_newest_posts_as_objects_with_author_and_time(feeds: Feeds, cluster: FakeCluster) -> None:
    page = await feeds.page(ME, 50)
    assert ids(page) == expected(cluster, AUTHORS)[:50]
    assert all(each.otype == "checkin" for each in page.posts)
    assert [edge.id2 for edge in page.edges] == ids(page)
    assert all(edge.id2 in {each.id2 for each in cluster.lists[edge.id1, POSTED]} for edge in page.edges)
    assert [edge.time for edge in page.edges] == sorted((edge.time for edge in page.edges), reverse=True)
    assert (page.missing, page.unread) == ([], {})


async def test_a_page_is_a_message_for_each_of_three_steps(feeds: Feeds, cluster: FakeCluster) -> None:
    await feeds.page(ME, 10)
    assert len(cluster.batches()) == 3


async def test_a_walk_over_pages_ends_where_the_lists_of_the_authors_end(feeds: Feeds, cluster: FakeCluster) -> None:
    pages = [page async for page in walk(feeds, 64)]
    assert [each for page in pages for each in ids(page)] == expected(cluster, AUTHORS)
    assert [len(page.posts) for page in pages[:-1]] == [64] * (len(pages) - 1)


async def test_own_post_appears_at_once(feeds: Feeds, graph: Graph) -> None:
    post = await graph.obj_add("checkin", {"text": "here"}, near=ME)
    await feeds.post(ME, post, 5_000)
    page = await feeds.page(ME, 1)
    assert [(each.id, each.fields["text"]) for each in page.posts] == [(post, "here")]
    assert post not in ids(await Feeds(graph, own_posts=False).page(ME, 1))


async def test_unfollowed_author_disappears_at_once(feeds: Feeds, graph: Graph, cluster: FakeCluster) -> None:
    first = await feeds.page(ME, 10)
    gone = first.edges[-1].id1
    await graph.assoc_delete(ME, "follows", gone)
    again = await feeds.page(ME, 1_000)
    assert gone not in {edge.id1 for edge in again.edges}
    following = await feeds.page(ME, 1_000, first.cursor)
    assert ids(following) == [
        each for each in expected(cluster, set(AUTHORS) - {gone}) if each not in {edge.id2 for edge in first.edges}
    ]


async def test_author_who_is_followed_during_a_walk_joins_below_the_cursor(
    feeds: Feeds, graph: Graph, cluster: FakeCluster
) -> None:
    new = make_id(99, shard=2)
    add_posts(cluster, new, [1, 1_100, 9_000])
    first = await feeds.page(ME, 10)
    await graph.assoc_add(ME, "follows", new)
    rest = ids(await feeds.page(ME, 1_000, first.cursor))
    assert [each in rest for each in (post_id(new, 0), post_id(new, 1), post_id(new, 2))] == [True, True, False]


async def test_cursor_is_stable_while_authors_post(feeds: Feeds, cluster: FakeCluster) -> None:
    before = expected(cluster, AUTHORS)
    seen: list[int] = []
    async for page in walk(feeds, 37):
        seen += ids(page)
        for author in AUTHORS[:5]:
            add_posts(cluster, author, [10_000 + len(seen)])
    assert seen == before


async def test_reader_who_was_away_for_a_month_has_a_feed(feeds: Feeds, cluster: FakeCluster) -> None:
    """Nothing is kept for a reader, so nothing is dropped, and nothing has to be rebuilt."""
    left = await feeds.page(ME, 20)
    for author in AUTHORS:
        add_posts(cluster, author, range(MONTH, 2 * MONTH, 86_400))
    page = await feeds.page(ME, 50)
    assert ids(page) == expected(cluster, AUTHORS)[:50]
    assert (await feeds.new_since(ME, left.newest, 1_000)).value == 600
    assert len([each async for page in walk(feeds, 200) for each in ids(page)]) == 20 * (POSTS_EACH + 30)


async def test_reader_who_follows_nobody_has_an_empty_feed(graph: Graph) -> None:
    stranger = make_id(500)
    for feeds in (Feeds(graph), Feeds(graph, own_posts=False)):
        page = await feeds.page(stranger)
        assert (page.posts, page.cursor, page.newest) == ([], None, None)
        assert (await feeds.new_since(stranger, None)).value == 0


async def test_page_with_a_tenth_of_its_posts_deleted_is_full(feeds: Feeds, cluster: FakeCluster) -> None:
    for deleted in expected(cluster, AUTHORS)[::10]:
        del cluster.objects[deleted]
    pages = [page async for page in walk(feeds, 50)]
    assert [len(page.posts) for page in pages[:-1]] == [50] * (len(pages) - 1)
    assert [each for page in pages for each in ids(page)] == expected(cluster, AUTHORS)


async def test_hidden_posts_are_replaced_by_older_ones(feeds: Feeds, cluster: FakeCluster) -> None:
    muted = AUTHORS[3]
    everything = expected(cluster, AUTHORS)

    def rule(post: Object, edge: Assoc) -> bool:
        return edge.id1 != muted and post.id % 3 != 0

    pages = [page async for page in walk(feeds, 40, visible=rule)]
    mutes = {each.id2 for each in cluster.lists[muted, POSTED]}
    assert [each for page in pages for each in ids(page)] == [
        each for each in everything if each not in mutes and each % 3 != 0
    ]
    assert [len(page.posts) for page in pages[:-1]] == [40] * (len(pages) - 1)


async def test_rule_that_reads_the_graph_travels_in_one_message(
    feeds: Feeds, graph: Graph, cluster: FakeCluster
) -> None:
    hidden = AUTHORS[4]
    await graph.assoc_add(ME, "blocks", hidden)

    async def rule(_: Object, edge: Assoc) -> bool:
        return not await graph.assoc_exists(ME, "blocks", edge.id1)

    sent = len(cluster.batches())
    page = await feeds.page(ME, 10, visible=rule)
    assert hidden not in {edge.id1 for edge in page.edges}
    assert len(page.posts) == 10
    asked = [request.read for request in cluster.batches()[sent:] if request.read.exist_id1s]
    assert len(asked) <= 2, "one message for the first round, and one for the posts that replace hidden ones"


async def test_page_that_finds_nothing_to_show_stops_and_can_be_continued(feeds: Feeds, cluster: FakeCluster) -> None:
    everything = expected(cluster, AUTHORS)
    last = everything[-1]
    pages = [page async for page in walk(feeds, 10, visible=lambda post, _: post.id == last)]
    assert [ids(page) for page in pages if page.posts] == [[last]]
    assert len(pages) == len(everything) / 50
    assert all(page.cursor for page in pages[:-1])


async def test_post_of_two_authors_comes_once_at_its_newest_time(feeds: Feeds, cluster: FakeCluster) -> None:
    shared = make_id(7_000)
    cluster.objects[shared] = encode_object(1, CHECKIN, b"")
    cluster.lists[AUTHORS[0], POSTED].insert(0, Edge(shared, 8_000))
    cluster.lists[AUTHORS[1], POSTED].append(Edge(shared, 1))
    seen = [(edge.id2, edge.id1) async for page in walk(feeds, 33) for edge in page.edges if edge.id2 == shared]
    assert seen == [(shared, AUTHORS[0])]


async def test_author_whose_list_cannot_be_read_is_named_and_the_others_are_shown(
    feeds: Feeds, cluster: FakeCluster
) -> None:
    refused = AUTHORS[2]
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(refused)
    page = await feeds.page(ME, 1_000)
    assert [(each.id1, each.atype, each.error.reason) for each in page.missing] == [
        (refused, "posted", "PERMISSION_DENIED")
    ]
    assert ids(page) == expected(cluster, set(AUTHORS) - {refused})


async def test_a_feed_of_which_nothing_can_be_read_fails_and_is_not_empty(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(*AUTHORS)
    with pytest.raises(PermissionDenied):
        await Feeds(graph, own_posts=False).page(ME)
    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = failing_for(ME)
    with pytest.raises(PermissionDenied):
        await Feeds(graph).page(ME)


async def test_post_that_cannot_be_read_is_named_and_replaced(feeds: Feeds, cluster: FakeCluster) -> None:
    everything = expected(cluster, AUTHORS)
    refused = everything[3]

    def behaviour(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        slots = [slot for slot, each in enumerate(request.read.obj_ids) if each == refused]
        values = {slot: value for slot, value in enumerate(link.values(request.read)) if slot not in slots}
        answer = pb.ReadAnswer(slots=values, values=values.values(), failed_slots=slots)
        answer.errors.extend([error_to_pb(PermissionDenied("this post is refused"))] * len(slots))
        on_answer(pb.Answer(read=answer))

    cluster.link("near-1").behaviour = cluster.link("far-1").behaviour = behaviour
    page = await feeds.page(ME, 10)
    assert ids(page) == [*everything[:3], *everything[4:11]]
    assert {each: error.reason for each, error in page.unread.items()} == {refused: "PERMISSION_DENIED"}


async def test_new_posts_above_a_page_are_counted_as_far_as_they_may_be_seen(
    feeds: Feeds, cluster: FakeCluster
) -> None:
    page = await feeds.page(ME, 10)
    assert ((await feeds.new_since(ME, page.newest)).value, (await feeds.new_since(ME, page.newest)).exact) == (0, True)
    new = add_posts(cluster, AUTHORS[0], range(20_000, 20_007))[:7]
    assert (await feeds.new_since(ME, page.newest)).value == 7
    del cluster.objects[new[0]]
    count = await feeds.new_since(ME, page.newest, visible=lambda post, _: post.id != new[1])
    assert (count.value, count.exact) == (5, True)
    assert ids(await feeds.page(ME, 5, visible=lambda post, _: post.id != new[1])) == new[2:]
    some = await feeds.new_since(ME, page.newest, 4)
    assert (some.value, some.exact) == (4, False)
    everything = await feeds.new_since(ME, None, 1_000)
    assert everything.value == len(expected(cluster, AUTHORS))


async def test_deleted_newest_post_is_not_counted_as_new(feeds: Feeds, cluster: FakeCluster) -> None:
    for deleted in expected(cluster, AUTHORS)[:3]:
        del cluster.objects[deleted]
    page = await feeds.page(ME, 5)
    assert (await feeds.new_since(ME, page.newest)).value == 0


async def test_reader_of_more_authors_than_one_union_holds_has_a_feed(graph: Graph, cluster: FakeCluster) -> None:
    many = [make_id(n, shard=n % 8) for n in range(100_000, 110_050)]
    follow(cluster, [*many, *AUTHORS])
    newest = [add_posts(cluster, author, [50_000 + place])[0] for place, author in enumerate(many[::500])]
    page = await Feeds(graph).page(ME, 10)
    assert ids(page) == newest[::-1][:10]
    following = await Feeds(graph).page(ME, 20, page.cursor)
    assert ids(following) == expected(cluster, [*many[::500], *AUTHORS])[10:30]


async def test_reader_who_follows_too_many_is_refused_by_name(
    graph: Graph, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_SOURCES == 50_000
    monkeypatch.setattr("tao.feeds.feeds.MAX_SOURCES", len(AUTHORS))
    assert (await Feeds(graph).page(ME, 10)).posts, "the reader's own list does not count"
    follow(cluster, [*AUTHORS, make_id(99)])
    with pytest.raises(TooLarge, match=f"{ME} follows 21; .* at most 20"):
        await Feeds(graph).page(ME)


async def test_read_options_hold_for_every_list_and_post(feeds: Feeds, cluster: FakeCluster) -> None:
    await feeds.page(ME, 5, critical=True)
    await feeds.new_since(ME, None, consistency=Consistency.master())
    assert all(request.read.critical for request in cluster.batches())


async def test_cursor_of_another_reader_is_refused(feeds: Feeds, graph: Graph, cluster: FakeCluster) -> None:
    page = await feeds.page(ME, 5)
    other = make_id(2)
    follow(cluster, AUTHORS, other)
    of_set = (await graph.edge_union(AUTHORS, "posted").page(5)).cursor
    sent = len(cluster.batches())
    refused: list[tuple[str, Coroutine[Any, Any, object]]] = [
        ("another feed", feeds.page(other, 5, page.cursor)),
        ("another feed", feeds.new_since(other, page.newest)),
        ("another feed", Feeds(graph, posted="authored").page(ME, 5, page.cursor)),
        ("another feed", feeds.page(ME, 5, of_set)),
        ("not valid", feeds.page(ME, 5, f"x{page.cursor}")),
        ("not valid", feeds.page(ME, 5, "")),
        ("not valid", feeds.page(ME, 5, 7)),  # type: ignore[arg-type]
    ]
    for message, reading in refused:
        with pytest.raises(InvalidArgument, match=message):
            await reading
    assert len(cluster.batches()) == sent


async def test_wrong_arguments_are_refused_before_anything_is_sent(graph: Graph, cluster: FakeCluster) -> None:
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (UnknownType, "folows", lambda: Feeds(graph, follows="folows")),
        (UnknownType, "postd", lambda: Feeds(graph, posted="postd")),
        (InvalidArgument, "posted must be the name", lambda: Feeds(graph, posted=7)),  # type: ignore[arg-type]
    ]
    for kind, message, make in wrong:
        with pytest.raises(kind, match=message):
            make()
    feeds = Feeds(graph)
    refused: list[tuple[str, Coroutine[Any, Any, object]]] = [
        ("reader is 0", feeds.page(0)),
        ("limit is 0", feeds.page(ME, 0)),
        ("limit is 1001", feeds.page(ME, 1_001)),
        ("limit is 0", feeds.new_since(ME, None, 0)),
        ("visible is 7", feeds.page(ME, visible=7)),  # type: ignore[arg-type]
        ("max_staleness_ms", feeds.page(ME, max_staleness_ms=0)),
        ("of shard", feeds.page(make_id(1, shard=99))),
        ("id1 is 0", feeds.post(0, ME)),
        ("time is -1", feeds.post(ME, AUTHORS[0], -1)),
    ]
    for message, reading in refused:
        with pytest.raises(InvalidArgument, match=message):
            await reading
    assert cluster.batches() == []


async def test_error_of_a_rule_fails_the_page(feeds: Feeds) -> None:
    def rule(post: Object, _: Assoc) -> bool:
        raise LookupError(post.id)

    with pytest.raises(LookupError):
        await feeds.page(ME, visible=rule)


def test_the_synchronous_feeds_have_the_same_methods(cluster: FakeCluster) -> None:
    with sync_graph(cluster) as graph:
        feeds = SyncFeeds(graph)
        page = feeds.page(ME, 5)
        assert ids(page) == expected(cluster, AUTHORS)[:5]
        assert ids(feeds.page(ME, 5, page.cursor)) == expected(cluster, AUTHORS)[5:10]
        post = graph.obj_add("checkin", {"text": "here"}, near=ME)
        assert feeds.post(ME, post, 90_000).is_new is not None
        assert feeds.new_since(ME, page.newest).value == 1
        with pytest.raises(InvalidArgument, match="visible is 7"):
            feeds.page(ME, visible=7)  # type: ignore[arg-type]


def test_a_synchronous_rule_may_use_the_graph(cluster: FakeCluster) -> None:
    hidden = AUTHORS[4]
    with sync_graph(cluster) as graph:
        graph.assoc_add(ME, "blocks", hidden)
        threads = set()

        def rule(_: Object, edge: Assoc) -> bool:
            threads.add(threading.current_thread().name)
            return not graph.assoc_exists(ME, "blocks", edge.id1)

        page = SyncFeeds(graph).page(ME, 30, visible=rule)
        assert hidden not in {edge.id1 for edge in page.edges}
        assert len(page.posts) == 30
        assert "tao-client" not in threads
