"""The messages of a leader's own commits, kept until the tailer comes to them in the binlog.

The tailer need not decode what its leader has committed. It names the transaction, and the leader takes the messages
from here. A transaction is named by its source and number, which no other transaction ever has
(`tao.replication.gtid.source_position`). So the messages that are found are the right ones, even if another leader
owned the shard in between. The tailer decodes a transaction that is not found: after a restart, after a commit whose
outcome is unknown, for the commit of another leader, and when its messages had to make room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from tao.delivery.message_log import estimated_bytes
from tao.delivery.settings import DeliverySettings
from tao.model.changes import ShardMessages

_LARGE_SHARE: Final = 16
"""Messages of a transaction that would take more than this part of all room are not kept: they are few, and to decode
them takes little of what their commit took."""


class _Kept(NamedTuple):
    """The messages of one transaction in one shard, their estimated size, and when they were kept."""

    messages: ShardMessages
    size_bytes: int
    kept_at: float


class CommittedMessages:
    """Bounded by bytes and age; the oldest make room. Times are those of the leader's clock, in seconds."""

    def __init__(self, settings: DeliverySettings) -> None:
        self._settings: Final = settings
        self._kept: Final[OrderedDict[tuple[str, int, int], _Kept]] = OrderedDict()
        self._databases: Final[set[str]] = set()
        self._commits: Final[dict[str, dict[asyncio.Event, bool]]] = {}
        # Database → what is set when a commit under way ends, and whether a relay has waited for it in vain.
        self.bytes = 0
        """Estimated size of the messages here."""
        self.entered = 0
        """Transactions of a shard whose messages were taken from here."""
        self.missing = 0
        """Transactions of a shard that were asked for and are not here."""

    @contextmanager
    def committing(self, database: str) -> Iterator[None]:
        """Mark a commit that is under way; its messages are kept before the block ends."""
        commits, ended = self._commits.setdefault(database, {}), asyncio.Event()
        commits[ended] = False
        try:
            yield
        finally:
            del commits[ended]
            ended.set()

    def commits(self, database: str) -> list[asyncio.Event]:
        """Return the commits to a database that are under way and that no relay has waited for in vain."""
        return [ended for ended, is_late in self._commits.get(database, {}).items() if not is_late]

    async def commits_end(self, database: str) -> None:
        """Wait for the commits to a database that are under way now, for `DeliverySettings.commit_seconds` at most: the
        tailer may read a transaction before its commit is answered. A commit that takes longer is not waited for again:
        it may hang for as long as a replica is away, and each relay would take that much longer."""
        waited = self.commits(database)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.commit_seconds):
                for ended in waited:
                    await ended.wait()
        commits = self._commits.get(database, {})
        commits.update((ended, True) for ended in waited if ended in commits)

    def has_of(self, database: str) -> bool:
        """Return whether messages of a database have been kept in this life of the leader."""
        return database in self._databases

    def keep(self, source: str, number: int, batches: Iterable[ShardMessages], now: float) -> None:
        """Keep what transaction ``number`` of ``source`` has changed, one batch for each shard."""
        self._databases.add(source.rpartition("@")[0])
        for batch in batches:
            self.release(source, number, batch.shard)
            size = estimated_bytes(batch.messages)
            if size <= self._settings.committed_bytes // _LARGE_SHARE:
                self._kept[source, number, batch.shard] = _Kept(batch, size, now)
                self.bytes += size
        self.expire(now)

    def expire(self, now: float) -> None:
        """Drop what is too old, and the oldest of what is too much."""
        oldest_at = now - self._settings.committed_seconds
        while self._kept:
            first = next(iter(self._kept.values()))
            if self.bytes <= self._settings.committed_bytes and first.kept_at >= oldest_at:
                break
            self.release(*next(iter(self._kept)))

    def find(self, source: str, number: int, shard: int) -> ShardMessages | None:
        """Return what a transaction has changed in a shard; None when it is not known here."""
        kept = self._kept.get((source, number, shard))
        return None if kept is None else kept.messages

    def release(self, source: str, number: int, shard: int) -> None:
        """Drop what a transaction has changed in a shard, if it is here."""
        kept = self._kept.pop((source, number, shard), None)
        if kept is not None:
            self.bytes -= kept.size_bytes
