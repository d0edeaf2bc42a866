"""Read pages of all edges of a type for the pair filters of followers.

A page is of one snapshot of the region's database, which may be behind what this leader knows: it may be a replica, and
a message may arrive before a statement can see its row. A follower that subscribed meanwhile is not sent those messages
any more. So the answer also names the highest versions that this leader knows of the lists in the page's range, rows or
not; the follower denies nothing of a list whose page is older (`tao.cache.pair_filters`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from tao.cache import GraphCache
from tao.model.errors import InternalError, InvalidArgument, Overloaded, TaoError, Unavailable
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.ports import Clock, PairReads
from tao.model.queries import PairsQuery
from tao.routing.budgets import work_seconds
from tao.serving.configuration import Spawn
from tao.wire.convert import error_to_pb, pair_page_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

_MAX_EDGES: Final = 10_000
"""Edges of one page, and rows that are read for it: tens of milliseconds of the database, and 80 kB."""
_MAX_UNDER_WAY: Final = 2
"""Pages read at a time. Filters can wait: misses and writes come first at the database."""


class PairScans:
    """Serves the requests ``scan_pairs``."""

    def __init__(
        self,
        scans: PairReads,
        cache: GraphCache,
        admit: Callable[[int], TaoError | None],
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        """``admit`` returns why this leader does not serve a shard, or None."""
        self._scans: Final = scans
        self._cache: Final = cache
        self._admit: Final = admit
        self._clock: Final = clock
        self._spawn: Final = spawn
        self._under_way = 0

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Answer with a page. Raises `NotMine`, `InvalidArgument` or `Overloaded`."""
        asked = request.scan_pairs
        refusal = self._admit(asked.shard)
        if refusal is not None:
            raise refusal
        if not 0 < asked.limit <= _MAX_EDGES:
            raise InvalidArgument(f"a page of {asked.limit} edges; ask for 1 to {_MAX_EDGES}")
        if self._under_way >= _MAX_UNDER_WAY:
            raise Overloaded(f"{self._under_way} pages of edges are being read, which is the bound; try again later")
        query = PairsQuery(
            asked.shard, asked.atype, asked.after_id1, asked.after_id2, asked.last_id1 or MAX_ID, asked.limit
        )
        self._under_way += 1
        try:
            self._spawn(self._answer(query, work_seconds(request.deadline_ms), reply))
        except TaoError:
            self._under_way -= 1
            raise

    async def _answer(self, query: PairsQuery, timeout_seconds: float, reply: Reply) -> None:
        try:
            answer = pb.Answer(scanned_pairs=await self._page(query, timeout_seconds))
        except TaoError as error:
            answer = pb.Answer(error=error_to_pb(error))
        except Exception as error:
            reply.send(pb.Answer(error=error_to_pb(InternalError(f"{type(error).__name__} while scanning edges"))))
            raise
        finally:
            self._under_way -= 1
        reply.send(answer)

    async def _page(self, query: PairsQuery, timeout_seconds: float) -> pb.ScannedPairs:
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        page = await self._scans.read_pairs(query, deadline=deadline)
        # What is known is looked up after the read: a message that came meanwhile is known, too.
        refusal = self._admit(query.shard)
        if refusal is not None:
            raise refusal
        shard = self._cache.filter_shard(query.shard)
        if shard is None or shard.floors.is_overflowed(self._clock.monotonic()):
            raise Unavailable(f"too much of shard {query.shard} is changing to scan its edges; try again later")
        first = query.after_id1 or query.shard << SHARD_SHIFT
        last = page.after_id1 or query.last_id1
        known = shard.known_versions(query.atype, first, last, page.id1s)
        for id1, version in zip(page.id1s, page.versions, strict=True):
            if known[id1] <= version:
                del known[id1]
        return pair_page_to_pb(
            msgspec.structs.replace(page, known_id1s=list(known), known_versions=list(known.values()))
        )
