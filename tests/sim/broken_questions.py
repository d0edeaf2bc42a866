"""Questions over several lists, broken on purpose: see `tests.sim.variants`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from tao.client import Assoc, EdgeSet, TwoHops
from tao.client.two_hops import TwoHopOperations
from tao.feeds import FeedPage, Feeds
from tao.feeds.feeds import _Found
from tao.model.errors import TaoError
from tao.sets.cursor import Place
from tao.sets.steps import Answer
from tao.sets.streams import ListStream


@contextmanager
def unread_list_is_empty() -> Iterator[None]:
    """Let a set take a list that cannot be read for an empty one."""

    def read(_: ListStream, answer: Answer) -> bytes | None:
        return None if isinstance(answer, TaoError) else answer

    with patch.multiple(ListStream, _read=read):
        yield


@contextmanager
def feed_cursor_of_last_found() -> Iterator[None]:
    """Let the cursor of a feed name the last post shown, not the last edge examined; a page without a post has none."""
    collect = Feeds._collect

    async def broken(feeds: Feeds, *asked: Any) -> _Found:
        found = await collect(feeds, *asked)
        if found.place is not None:
            edge = found.posts[-1][1] if found.posts else None
            found.place = None if edge is None else Place(edge.time, edge.id2)
        return found

    with patch.multiple(Feeds, _collect=broken):
        yield


@contextmanager
def feed_without_missing_authors() -> Iterator[None]:
    """Let a feed skip an author whose list cannot be read without naming the list."""
    page = Feeds.page

    async def broken(feeds: Feeds, *asked: Any, **how: Any) -> FeedPage:
        return msgspec.structs.replace(await page(feeds, *asked, **how), missing=[])

    with patch.multiple(Feeds, page=broken):
        yield


@contextmanager
def two_hops_without_missing_lists() -> Iterator[None]:
    """Let two hops go without a list that cannot be read, and not name it."""
    two_hop = TwoHopOperations.two_hop

    async def broken(graph: TwoHopOperations, *asked: Any, **how: Any) -> TwoHops:
        return msgspec.structs.replace(await two_hop(graph, *asked, **how), missing=[])

    with patch.multiple(TwoHopOperations, two_hop=broken):
        yield


@contextmanager
def unread_exclusion_excludes_nobody() -> Iterator[None]:
    """Let two hops go without an exclusion that cannot be read."""
    among = EdgeSet.among

    async def broken(edges: EdgeSet, ids: Iterable[int], **how: Any) -> dict[int, Assoc]:
        try:
            return await among(edges, ids, **how)
        except TaoError:
            return {}

    with patch.multiple(EdgeSet, among=broken):
        yield
