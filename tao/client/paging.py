"""Walking an association list of any length, page by page (DESIGN.md §2, §12).

A page begins after the last edge of the one before, by that edge's time and id2, not after so many edges: positions
move with every write, and a page asked for by position would repeat what newer edges have pushed down, or skip what
moved up. An edge that is in the list, at its time, from the first page to the last comes exactly once, whatever is
written meanwhile and whichever server answers which page. One that comes or goes meanwhile may be seen or not; one
whose time is changed is another edge to the walk.

The place is a *cursor*, a short text that a web page can hand out and take back. It holds no secret and is not signed:
whoever may read the list may start anywhere in it.
"""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from binascii import crc32
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from tao.client.columns import TIME_RANGE
from tao.client.own_writes import After
from tao.client.reads import ReadOperations
from tao.client.validation import MAX_LIMIT, check_number
from tao.client.values import Assoc, AssocList
from tao.model.errors import InvalidArgument
from tao.model.graph import MAX_TIME
from tao.model.ids import MAX_ID

PAGE_EDGES: Final = 1_000
"""Edges that an iterator asks for at a time: 16 KB without data, so that the round trip is small beside the edges."""

_FORMAT: Final = 1
_CURSOR: Final = struct.Struct("<BIQQ")  # format, checksum of the list's key, time and id2 of the last edge
_LIST: Final = struct.Struct("<QI")


class AssocPage(msgspec.Struct, frozen=True):
    """Some edges of a list, and where the next page begins; None: there is no more. A page may be empty when what
    followed the one before has been deleted."""

    edges: AssocList
    cursor: str | None


class PagingOperations(ReadOperations):
    """Lists in pages. Read options as of every read; they hold for each page."""

    async def assoc_page(
        self,
        id1: int,
        atype: str,
        limit: int,
        cursor: str | None = None,
        high: int | None = None,
        low: int | None = None,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocPage:
        """At most ``limit`` edges (and at most the type's limit) with ``high >= time >= low``, newest first: the first
        of them, or those after the page that gave ``cursor``, with the same bounds. Raises `InvalidArgument` for a
        cursor that is none, or is of another list."""
        check_number(limit, "limit", 1, MAX_LIMIT)
        (_, number, upper, lower, _, _), found = self._requests.time_range(id1, atype, high, low, limit)
        asked = min(limit, found.limit)
        below_id2 = 0
        if cursor is not None:
            time, id2 = _place(cursor, id1, number)
            if time <= upper:
                upper, below_id2 = time, id2
        row = (id1, number, upper, lower, asked, below_id2)
        edges = AssocList(id1, found, await self._read(TIME_RANGE, row, critical, after, max_staleness_ms))
        # By a schema newer than ours the limit may have been lower still.
        is_last = not edges or (len(edges) < asked and not edges.limit_cut)
        return AssocPage(edges, None if is_last else _cursor(id1, number, edges.times[-1], edges.id2s[-1]))

    async def assoc_iter(
        self,
        id1: int,
        atype: str,
        *,
        high: int | None = None,
        low: int | None = None,
        page: int = PAGE_EDGES,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AsyncIterator[Assoc]:
        """All edges with ``high >= time >= low``, newest first, however many there are: ``async for edge in …``.
        ``page`` are asked for at a time. What an edge may be sure of while the list is written to stands at the head of
        `tao.client.paging`. Raises what `assoc_page` does, at the first step for a mistake."""
        cursor: str | None = None
        while True:
            found = await self.assoc_page(
                id1, atype, page, cursor, high, low, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
            for edge in found.edges:
                yield edge
            cursor = found.cursor
            if cursor is None:
                return


def _cursor(id1: int, atype: int, time: int, id2: int) -> str:
    packed = _CURSOR.pack(_FORMAT, crc32(_LIST.pack(id1, atype)), time, id2)
    return urlsafe_b64encode(packed).decode()


def _place(cursor: str, id1: int, atype: int) -> tuple[int, int]:
    """Time and id2 of the last edge of the page that gave the cursor. Raises `InvalidArgument`."""
    try:
        packed = urlsafe_b64decode(cursor.encode("ascii"))
        kind, of_list, time, id2 = _CURSOR.unpack(packed)
    except (AttributeError, TypeError, UnicodeEncodeError, NotBase64, struct.error) as error:
        raise InvalidArgument(f"cursor {cursor!r} is none: give the cursor of an assoc_page, as it was") from error
    if kind != _FORMAT or time > MAX_TIME or not 0 < id2 <= MAX_ID:
        raise InvalidArgument(f"cursor {cursor!r} is none: give the cursor of an assoc_page, as it was")
    if of_list != crc32(_LIST.pack(id1, atype)):
        raise InvalidArgument(f"cursor {cursor!r} is of another list than that of id1 {id1}")
    return time, id2
