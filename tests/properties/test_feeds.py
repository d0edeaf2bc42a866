"""A feed is the ordered merge of its authors' lists, page by page, and misses no post that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.client import Assoc, Object
from tao.feeds import FeedPage, Feeds
from tao.model.graph import Edge, encode_object
from tests.rigs.effort import examples
from tests.unit.client.fakes import SCHEMA, FakeCluster, make_id

ME = make_id(1)
AUTHORS = [make_id(10 + n, shard=n) for n in range(6)]
POSTS = range(101, 131)
FOLLOWS, POSTED = (SCHEMA.atype(each).number for each in ("follows", "posted"))
CHECKIN = SCHEMA.otype("checkin").number

Posted = Mapping[int, Mapping[int, int]]
"""The time of each post, by author."""

lists = st.fixed_dictionaries(
    dict.fromkeys(AUTHORS, st.dictionaries(st.sampled_from(POSTS), st.integers(0, 12), max_size=25))
)
some_posts = st.sets(st.sampled_from(POSTS), max_size=30)
some_authors = st.sets(st.sampled_from(AUTHORS))


def cluster_of(posted: Posted, followed: set[int], deleted: set[int]) -> FakeCluster:
    cluster = FakeCluster()
    cluster.lists[ME, FOLLOWS] = [Edge(each, 1) for each in sorted(followed, reverse=True)]
    for author, posts in posted.items():
        edges = [Edge(id2, time) for id2, time in posts.items()]
        cluster.lists[author, POSTED] = sorted(edges, key=lambda each: (each.time, each.id2), reverse=True)
    cluster.objects = {each: encode_object(1, CHECKIN, b"") for each in POSTS if each not in deleted}
    return cluster


def merged(posted: Posted, followed: set[int]) -> list[int]:
    """Return the posts of some authors, each at its newest time, newest first."""
    newest: dict[int, int] = {}
    for author in followed:
        for id2, time in posted[author].items():
            newest[id2] = max(time, newest.get(id2, 0))
    return [id2 for time, id2 in sorted(((time, id2) for id2, time in newest.items()), reverse=True)]


@settings(max_examples=examples(300), deadline=None)
@given(lists, some_authors, some_posts, some_posts, st.integers(1, 12))
def test_feed_is_the_ordered_merge_of_its_authors(
    posted: Posted, followed: set[int], deleted: set[int], hidden: set[int], limit: int
) -> None:
    expected = [each for each in merged(posted, followed) if each not in deleted | hidden]

    def rule(post: Object, _: Assoc) -> bool:
        return post.id not in hidden

    async def read() -> list[FeedPage]:
        async with await cluster_of(posted, followed, deleted).connect() as graph:
            feeds, pages = Feeds(graph), list[FeedPage]()
            while not pages or pages[-1].cursor is not None:
                pages.append(await feeds.page(ME, limit, pages[-1].cursor if pages else None, visible=rule))
            assert (await feeds.new_since(ME, None, 1_000, visible=rule)).value == len(expected)
            newest = pages[0].newest
            if newest is not None:
                assert (await feeds.new_since(ME, newest, visible=rule)).value == 0
        return pages

    pages = asyncio.run(read())
    assert [each.id for page in pages for each in page.posts] == expected
    assert all(len(page.posts) <= limit for page in pages)
    invisible = len(merged(posted, followed)) - len(expected)
    assert sum(len(page.posts) < limit for page in pages[:-1]) <= invisible / (4 * limit)


@settings(max_examples=examples(200), deadline=None)
@given(lists, some_authors, some_posts, st.integers(1, 7), st.data())
def test_post_that_stands_still_appears_once_while_others_come_and_go(
    posted: Posted, followed: set[int], coming: set[int], limit: int, data: st.DataObject
) -> None:
    """Posts above 130 come and go in every list, and authors without a post that stands still are followed and
    unfollowed."""
    expected = merged(posted, followed)
    unsettled = [make_id(50 + n, shard=n) for n in range(3)]

    async def read() -> list[int]:
        cluster = cluster_of(posted, followed, set())
        seen: list[int] = []
        async with await cluster.connect() as graph:
            feeds, cursor = Feeds(graph), None
            while True:
                page = await feeds.page(ME, limit, cursor)
                seen += [each.id for each in page.posts]
                cursor = page.cursor
                if cursor is None:
                    return seen
                _disturb(cluster, [*followed, *unsettled], coming, data)
                followed_now = [*followed, *data.draw(st.sets(st.sampled_from(unsettled)))]
                cluster.lists[ME, FOLLOWS] = [Edge(each, 1) for each in sorted(followed_now, reverse=True)]

    seen = asyncio.run(read())
    assert [each for each in seen if each in POSTS] == expected


def _disturb(cluster: FakeCluster, authors: list[int], coming: set[int], data: st.DataObject) -> None:
    """Replace the posts of every author that do not stand still."""
    for place, author in enumerate(authors):
        edges = [each for each in cluster.lists.get((author, POSTED), []) if each.id2 in POSTS]
        for each in coming:
            cluster.objects[each + 100 * (place + 1)] = encode_object(1, CHECKIN, b"")
            edges.append(Edge(each + 100 * (place + 1), data.draw(st.integers(0, 12))))
        cluster.lists[author, POSTED] = sorted(edges, key=lambda each: (each.time, each.id2), reverse=True)
