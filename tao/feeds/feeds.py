"""`Feeds`: pages of the posts of those whom a reader follows, and how many are new.

A page takes three rounds of reads: the list of whom the reader follows, the newest edges of their lists in one tick,
and the posts as objects in one tick. Posts that are deleted, hidden or unreadable are replaced by older ones, from
edges that are mostly read already.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import reduce
from inspect import isawaitable
from operator import or_
from typing import Final, NamedTuple, Unpack
from zlib import crc32

import msgspec

from tao.client import (
    Assoc,
    Consistency,
    EdgeCount,
    EdgeSet,
    EdgeWrite,
    Graph,
    Object,
    SetPages,
    SomeFailed,
    UnreadList,
)
from tao.client.consistency import Freshness, from_keywords
from tao.client.validation import check_atype, check_id, check_number
from tao.model.errors import InvalidArgument, TaoError, TooLarge
from tao.sets.cursor import Place, make_cursor, read_cursor
from tao.sets.evaluation import MAX_PAGE
from tao.sets.expression import MAX_UNION_LISTS

MAX_SOURCES: Final = 50_000
"""Lists that one feed merges at most."""

FETCH_FACTOR: Final = 5
"""A page examines at most so many times as many edges as it may have posts."""

_FEED: Final = struct.Struct("<QII")  # reader, and the numbers of both types: what a cursor belongs to
_CURSOR_OF: Final = "feed"

Rule = Callable[[Object, Assoc], bool | Awaitable[bool]]
"""Says whether the reader may see a post, from the post and the edge that put it into the feed (``edge.id1`` is the
author). A rule may await reads of the graph; those for the posts of one page travel together."""


class FeedPage(msgspec.Struct, frozen=True):
    """Some ``posts`` of a feed, newest first, and the ``cursor`` of the next page, None after the last page.

    ``edges`` has the edge of each post: ``id1`` is its author, ``time`` its time. ``newest`` is the cursor for
    `Feeds.new_since`, None when the page is empty. ``missing`` names the lists of authors that could not be read, and
    ``unread`` the posts; the page is without them. A page that is shorter than its limit and has a cursor examined so
    many deleted, hidden or unread posts that it stopped (five times the limit)."""

    posts: list[Object]
    edges: list[Assoc]
    cursor: str | None
    newest: str | None
    missing: list[UnreadList]
    unread: dict[int, TaoError]


class Feeds:
    """Feeds of one graph, by the types of its lists. Keeps nothing itself, so it may be made anew for every request."""

    def __init__(
        self, graph: Graph, *, follows: str = "follows", posted: str = "posted", own_posts: bool = True
    ) -> None:
        """Describe feeds: ``follows`` leads from a reader to authors, ``posted`` from an author to posts. ``own_posts``
        says whether readers see their own posts in their feeds. Raises `InvalidArgument` and `UnknownType`."""
        check_atype(graph.schema, follows, "follows")
        check_atype(graph.schema, posted, "posted")
        self._graph = graph
        self._follows = follows
        self._posted = posted
        self._own_posts = own_posts

    async def post(self, author: int, post: int, time: int | None = None) -> EdgeWrite:
        """Put an object into the feeds of those who follow ``author``: adds the edge from the author to it. ``time``
        orders the feeds; the default is now, in Unix seconds. Raises as `Graph.assoc_add`."""
        return await self._graph.assoc_add(author, self._posted, post, time)

    async def page(
        self,
        reader: int,
        limit: int = 50,
        cursor: str | None = None,
        *,
        visible: Rule | None = None,
        **freshness: Unpack[Freshness],
    ) -> FeedPage:
        """Return the newest ``limit`` posts (1 to 1,000) that ``reader`` may see by the rule ``visible``, or those
        after the page that returned ``cursor``.

        A post that stays in the feed comes exactly once in a walk over pages, whatever is posted, followed and
        unfollowed meanwhile; a post of several authors comes at its newest time. The page is full while there are posts
        to see, unless more than four of five are deleted or hidden. An author whose list cannot be read is named in
        `FeedPage.missing`. Raises `InvalidArgument` for a damaged cursor and for that of another reader, `TooLarge` for
        a reader who follows more than `MAX_SOURCES`, the error of the list of whom the reader follows, that of the
        authors' lists when none of them could be read, and what the rule raises."""
        check_number(limit, "limit", 1, MAX_PAGE)
        feed = self._feed_of(reader, visible, freshness)
        place = None if cursor is None else feed.place_of(cursor)
        union = await self._merged(reader, feed.consistency)
        if union is None:
            return FeedPage(posts=[], edges=[], cursor=None, newest=None, missing=[], unread={})
        pages = union.edges.pages(
            None if place is None else union.edges.cursor_after(place), consistency=feed.consistency
        )
        found = await self._collect(feed, union, pages, limit, None)
        return FeedPage(
            posts=[post for post, _ in found.posts],
            edges=[edge for _, edge in found.posts],
            cursor=None if found.place is None else feed.cursor_of(found.place),
            newest=None if found.first is None else feed.cursor_of(found.first),
            missing=found.missing,
            unread=found.unread,
        )

    async def new_since(
        self,
        reader: int,
        newest: str | None,
        limit: int = 100,
        *,
        visible: Rule | None = None,
        **freshness: Unpack[Freshness],
    ) -> EdgeCount:
        """Count the posts above a page, up to ``limit`` (1 to 1,000): those that a new first page would show before it.
        ``newest`` is that of the page, None for a page that was empty. Raises as `page`."""
        check_number(limit, "limit", 1, MAX_PAGE)
        feed = self._feed_of(reader, visible, freshness)
        above = None if newest is None else feed.place_of(newest)
        union = await self._merged(reader, feed.consistency)
        if union is None:
            return EdgeCount(0, exact=True)
        found = await self._collect(feed, union, union.edges.pages(consistency=feed.consistency), limit, above)
        return EdgeCount(len(found.posts), exact=found.place is None)

    def _feed_of(self, reader: int, visible: Rule | None, freshness: Freshness) -> _Feed:
        """Return the checked arguments of a read."""
        check_id(reader, "reader")
        if visible is not None and not callable(visible):
            raise InvalidArgument(f"visible is {visible!r}; it must be a function of a post and its edge")
        schema = self._graph.schema
        types = schema.atype(self._follows).number, schema.atype(self._posted).number
        return _Feed(crc32(_FEED.pack(reader, *types)), visible, from_keywords(**freshness) if freshness else None)

    async def _merged(self, reader: int, consistency: Consistency | None) -> _Union | None:
        """Return the union of the lists of those whom the reader follows, None when there are none."""
        sources: list[int] = []
        cursor: str | None = None
        while True:
            page = await self._graph.assoc_page(reader, self._follows, MAX_SOURCES, cursor, consistency=consistency)
            sources += page.edges.id2s
            followed = max(page.edges.list_count, len(sources))
            if followed > MAX_SOURCES:
                raise TooLarge(f"{reader} follows {followed}; a feed merges the lists of at most {MAX_SOURCES}")
            cursor = page.cursor
            if cursor is None:
                break
        if self._own_posts:
            sources.append(reader)
        unions = [
            self._graph.edge_union(sources[first : first + MAX_UNION_LISTS], self._posted, missing="skip")
            for first in range(0, len(sources), MAX_UNION_LISTS)
        ]
        return _Union(reduce(or_, unions), len(set(sources))) if unions else None

    async def _collect(self, feed: _Feed, union: _Union, pages: SetPages, limit: int, above: Place | None) -> _Found:
        """Read pages until ``limit`` posts are found that may be seen, the edges end or reach the place ``above``, or
        five times as many edges are examined.

        What is found is cut to the limit, and the place is that of the last edge that counts, so the next page begins
        with the first edge that this one left."""
        found = _Found()
        examined, size = 0, limit
        while len(found.posts) < limit and examined < FETCH_FACTOR * limit:
            page = await pages.next(min(size, MAX_PAGE, FETCH_FACTOR * limit - examined))
            if len(page.missing) == union.sources:
                raise page.missing[0].error
            edges = page.edges if above is None else [each for each in page.edges if _place(each) > above]
            if edges and found.first is None:
                found.first = _place(edges[0])
            seen = await self._visible(feed, edges, found.unread)
            kept = seen[: limit - len(found.posts)]
            found.posts += kept
            found.missing = page.missing
            examined += len(page.edges)
            is_end = page.cursor is None or len(edges) < len(page.edges)
            found.place = _place(kept[-1][1]) if len(kept) < len(seen) else None
            if found.place is None and not is_end and page.cursor is not None:
                found.place = union.edges.place_of(page.cursor)
            if is_end:
                break
            # Behind a stretch without a post to see there are often more of them.
            size = limit - len(found.posts) if kept or not edges else 2 * size
        return found

    async def _visible(
        self, feed: _Feed, edges: Sequence[Assoc], unread: dict[int, TaoError]
    ) -> list[tuple[Object, Assoc]]:
        """Return the posts that exist and may be seen, each with its edge. Adds the unreadable ones to ``unread``."""
        ids = [edge.id2 for edge in edges]
        if not ids:
            return []
        results: Sequence[object]
        try:
            results = await self._graph.obj_get_many(ids, consistency=feed.consistency)
        except SomeFailed as error:
            results = error.results
            unread.update({ids[index]: each for index, each in error.errors.items()})
        posts = [(post, edge) for post, edge in zip(results, edges, strict=True) if isinstance(post, Object)]
        rule = feed.visible
        if rule is None:
            return posts
        said = [rule(post, edge) for post, edge in posts]
        waiting = {index: each for index, each in enumerate(said) if isawaitable(each)}
        answers = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
        return [each for index, each in enumerate(posts) if answers.get(index, said[index])]


class _Feed(NamedTuple):
    """What a read of a feed is asked for. ``checksum`` is of the reader and the types, by which a cursor knows them. It
    is not of whom the reader follows, so that following somebody ends no walk."""

    checksum: int
    visible: Rule | None
    consistency: Consistency | None

    def cursor_of(self, place: Place) -> str:
        return make_cursor(self.checksum, place)

    def place_of(self, cursor: str) -> Place:
        return read_cursor(cursor, self.checksum, _CURSOR_OF)


class _Union(NamedTuple):
    """The edges of all authors, and how many lists they are of."""

    edges: EdgeSet
    sources: int


class _Found(msgspec.Struct):
    """What was found so far: posts that may be seen, the place of the first edge, and the one after which the next page
    begins, None at the end."""

    posts: list[tuple[Object, Assoc]] = []
    first: Place | None = None
    place: Place | None = None
    missing: list[UnreadList] = []
    unread: dict[int, TaoError] = {}


def _place(edge: Assoc) -> Place:
    return Place(edge.time, edge.id2)
