"""Serve shards from the region's replica while their master is in another region (the paper's slave leader).

No leader owns such a shard in this region: the master region orders its writes. This leader fills from the region's
replica, gets every commit from the region's tailer, and publishes it to its subscribers. So the topology alone
decides which leader serves the shard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tao.cache import GraphCache
from tao.delivery.publisher import Publisher
from tao.observability.logs import Logger
from tao.serving.forward_path import WriteThrough


@dataclass(frozen=True, slots=True)
class ReplicaShardSettings:
    """How replica shards change hands."""

    settle_seconds: float = 2.0
    """Delay between the topology that gives this leader a shard and caching it, at a start too. For a moment the
    tailer may still follow the former topology, and send another leader the changes of keys that this one has
    filled."""

    write_answer_seconds: float = 60.0
    """After a replica shard was opened or reset, writes through other leaders add nothing to its cache for this long.
    An answer may have been in progress since before the reset, and the changes that followed it may have been delivered
    before, or to another leader. Longer than any write may take, and not longer than version floors are remembered,
    which protect the cache from such answers otherwise."""


class ReplicaShards:
    """The replica shards of one leader. Each opening numbers its stream anew, so that a subscriber starts over."""

    def __init__(
        self,
        cache: GraphCache,
        changes: WriteThrough,
        publisher: Publisher,
        settings: ReplicaShardSettings,
        log: Logger,
    ) -> None:
        """``changes``: notified when a shard is reset."""
        self._cache: Final = cache
        self._changes: Final = changes
        self._publisher: Final = publisher
        self._settings: Final = settings
        self._log: Final = log
        self._hosted: frozenset[int] = frozenset()
        self._opened: set[int] = set()
        self._openings = 0
        self._topology_version = 0
        self._due: dict[int, object] = {}

    @property
    def shards(self) -> frozenset[int]:
        """Return the shards served here without being owned."""
        return self._hosted

    @property
    def open_count(self) -> int:
        """Return how many of them are cached by now."""
        return len(self._opened)

    def serve(self, shards: Iterable[int], topology_version: int) -> None:
        """Serve exactly these shards from now on, as the topology of this version says.

        By topologies in between that this leader has not seen, other leaders may have served the shards and received
        their changes. So a gap in the versions resets all shards."""
        hosted = frozenset(shards)
        if topology_version > self._topology_version + 1:
            self._change(frozenset())
        self._topology_version = topology_version
        self._change(hosted)

    def reset(self) -> None:
        """Drop everything cached of these shards, and cache again once it is kept fresh.

        While this process was paused, the region's tailer may have sent changes to another leader."""
        hosted = self._hosted
        self._change(frozenset())
        self._change(hosted)

    def _change(self, hosted: frozenset[int]) -> None:
        for shard in self._opened - hosted:
            self._opened.discard(shard)
            self._cache.close_shard(shard)
            self._publisher.close_shard(shard)
        self._due = {shard: order for shard, order in self._due.items() if shard in hosted}
        added = hosted - self._hosted
        self._hosted = hosted
        if added:
            # The order has an identity, so that a shard that left and came back waits its own time.
            order = object()
            self._due.update(dict.fromkeys(added, order))
            asyncio.get_running_loop().call_later(self._settings.settle_seconds, self._open, added, order)

    def _open(self, shards: frozenset[int], order: object) -> None:
        opening = [shard for shard in sorted(shards & self._hosted) if self._due.get(shard) is order]
        for shard in opening:
            self._openings += 1
            self._opened.add(shard)
            del self._due[shard]
            self._cache.open_shard(shard)
            self._changes.note_begun(shard)
            # Negative, so that a subscriber never confuses this stream with one from when this leader owned the shard.
            self._publisher.open_shard(shard, -self._openings, 0)
        if opening:
            self._log.info("replica_shards_opened", opened=len(self._opened))
