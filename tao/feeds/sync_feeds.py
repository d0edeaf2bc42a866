"""`SyncFeeds`: the feeds of a `SyncGraph`, for programs without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Unpack, cast

from tao.client import Assoc, EdgeCount, EdgeWrite, Graph, Object, SyncAccepted, SyncGraph
from tao.client.consistency import Freshness
from tao.client.sync_graph import run_on
from tao.feeds.feeds import FeedPage, Feeds, Rule
from tao.model.errors import InvalidArgument

BlockingRule = Callable[[Object, Assoc], bool]
"""A `Rule` that may use the `SyncGraph`: it runs in a thread of its own."""


class SyncFeeds:
    """The methods of `Feeds`, blocking; `Feeds` documents them."""

    def __init__(
        self, graph: SyncGraph, *, follows: str = "follows", posted: str = "posted", own_posts: bool = True
    ) -> None:
        self._graph = graph
        self._types = {"follows": follows, "posted": posted}
        self._own_posts = own_posts

    def post(self, author: int, post: int, time: int | None = None) -> EdgeWrite[SyncAccepted]:
        posted = run_on(self._graph, lambda graph: self._of(graph).post(author, post, time))
        return cast(EdgeWrite[SyncAccepted], posted)  # the graph of a `SyncGraph` makes receipts that block

    def page(
        self,
        reader: int,
        limit: int = 50,
        cursor: str | None = None,
        *,
        visible: BlockingRule | None = None,
        **freshness: Unpack[Freshness],
    ) -> FeedPage:
        rule = _in_thread(visible)
        return run_on(self._graph, lambda graph: self._of(graph).page(reader, limit, cursor, visible=rule, **freshness))

    def new_since(
        self,
        reader: int,
        newest: str | None,
        limit: int = 100,
        *,
        visible: BlockingRule | None = None,
        **freshness: Unpack[Freshness],
    ) -> EdgeCount:
        rule = _in_thread(visible)
        return run_on(
            self._graph, lambda graph: self._of(graph).new_since(reader, newest, limit, visible=rule, **freshness)
        )

    def _of(self, graph: Graph) -> Feeds:
        return Feeds(graph, **self._types, own_posts=self._own_posts)


def _in_thread(visible: BlockingRule | None) -> Rule | None:
    """Return the rule as one that the graph's loop awaits, so that it may block on reads of that graph."""
    if visible is None:
        return None
    if not callable(visible):
        raise InvalidArgument(f"visible is {visible!r}; it must be a function of a post and its edge")
    rule = visible
    return lambda post, edge: asyncio.to_thread(rule, post, edge)
