"""Shards that this leader serves for its region while their master is in another (DESIGN.md §8: the slave leader).

Nobody owns such a shard here: its writes are ordered in the master region. This leader fills from the region's replica,
hears of every commit from the region's tailer, and tells its subscribers - so what the topology says is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tao.cache import GraphCache
from tao.delivery.publisher import Publisher
from tao.observability.logs import Logger
from tao.serving.applying import WriteThrough


@dataclass(frozen=True, slots=True)
class HostingSettings:
    """How hosted shards change hands."""

    settle_seconds: float = 2.0
    """After a topology that gives this leader a shard, before it caches it, at a start too: the tailer may go by the
    former document for a moment, and have told another leader of what this one has filled already."""

    write_answer_seconds: float = 60.0
    """After a hosted shard was begun anew, nothing is cached because a write made it: its answer may have been under
    way since before, and what followed it been told before, or to another leader. Longer than any write may take; no
    longer than floors are remembered, which see to it otherwise."""


class Hosting:
    """The hosted shards. Their streams are numbered from each opening on, so that a subscriber starts anew."""

    def __init__(
        self, cache: GraphCache, changes: WriteThrough, publisher: Publisher, settings: HostingSettings, log: Logger
    ) -> None:
        """``changes``: told when a shard is begun anew."""
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
    def hosted(self) -> frozenset[int]:
        """Shards served here without being owned."""
        return self._hosted

    @property
    def opened(self) -> int:
        """How many of them are cached by now."""
        return len(self._opened)

    def host(self, shards: Iterable[int], topology_version: int) -> None:
        """Host exactly these from now on, by the document of that version. By documents in between that were not seen
        here, others may have had them, and been told of their changes."""
        hosted = frozenset(shards)
        if topology_version > self._topology_version + 1:
            self._change(frozenset())
        if self._topology_version:  # not at a start
            for shard in hosted - self._hosted:
                self._changes.begin_anew(shard)
        self._topology_version = topology_version
        self._change(hosted)

    def begin_anew(self) -> None:
        """Drop all that is cached of them, and cache again when that is known to be kept fresh: while this process did
        not run, the region's tailer may have told another leader of changes."""
        hosted = self._hosted
        self._change(frozenset())
        self._change(hosted)

    def _change(self, hosted: frozenset[int]) -> None:
        for shard in self._opened - hosted:
            self._opened.discard(shard)
            self._cache.close_shard(shard)
            self._publisher.close_shard(shard)
            self._changes.begin_anew(shard)
        self._due = {shard: order for shard, order in self._due.items() if shard in hosted}
        added = hosted - self._hosted
        self._hosted = hosted
        if added:
            # Named, so that a shard that left and came back waits its own time.
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
            self._changes.opened(shard)
            # Below zero: a stream of the time when this leader owned the shard must not be taken for this one.
            self._publisher.open_shard(shard, -self._openings, 0)
        if opening:
            self._log.info("shards_hosted", hosted=len(self._opened))
