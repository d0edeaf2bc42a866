"""Where a leader's misses go when the shard is mastered in another region (DESIGN.md §8).

To the region's replica first: a read must not cross an ocean. But a cache may have heard of a version that the replica
does not have yet - from a write forwarded through here, from a message, from a reader's token - and then the replica's
answer would take a value back in time. What is known decides, and the master region is asked instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tao.model.errors import DeadlineExceeded, RetryableError, StaleRead, Unavailable
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import Fetched, ObjectQuery, Query
from tao.serving.database_source import DatabaseSource
from tao.serving.remote_source import RemoteSource


class RegionSource:
    """The `FillSource` of a leader, whatever the shard's master region is."""

    def __init__(
        self,
        master: DatabaseSource,
        replica: DatabaseSource,
        master_region: RemoteSource,
        is_mastered_here: Callable[[int], bool],
    ) -> None:
        """``master`` waits for rows that are about to become visible; ``replica``, which may be behind for seconds,
        only for as long as that commonly takes."""
        self._master: Final = master
        self._replica: Final = replica
        self._master_region: Final = master_region
        self._is_mastered_here: Final = is_mastered_here
        self.sent_away = 0

    async def fetch(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        """As `tao.serving.fills.FillSource`. A critical read goes to the master region's leader, which reads the master
        database after this call."""
        shard = (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT
        if self._is_mastered_here(shard):
            return await self._master.fetch(query, minimum, critical=critical, timeout_seconds=timeout_seconds)
        if not critical:
            try:
                return await self._replica.fetch(query, minimum, critical=False, timeout_seconds=timeout_seconds)
            except (StaleRead, Unavailable):
                # Behind what is known here, or away: the master region has it.
                self.sent_away += 1
        try:
            return await self._master_region.fetch(query, minimum, critical=critical, timeout_seconds=timeout_seconds)
        except (Unavailable, DeadlineExceeded) as cut:
            if critical:
                raise
            # The way there is cut; by now the replica may have what it lacked a moment ago.
            try:
                return await self._replica.fetch(query, minimum, critical=False, timeout_seconds=timeout_seconds)
            except RetryableError:
                raise cut from None
