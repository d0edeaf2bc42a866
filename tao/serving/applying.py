"""Taking changes of a shard into a cache: a write on its way back, news of another server, a new master's epoch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

from tao.cache import GraphCache
from tao.model.changes import ShardMessages
from tao.model.ports import Clock
from tao.model.versions import FIRST_EPOCH
from tao.routing.routes import Routes

_OWN_WRITE: Final = "a write on its way back"


def apply_messages(cache: GraphCache, clock: Clock, messages: ShardMessages, *, insert: bool) -> None:
    """``insert``: also cache what was not, because its writer will read it here; see `GraphCache.apply`."""
    now = clock.monotonic()
    with cache.witness.because(_OWN_WRITE) if insert else nullcontext():
        for message in messages.messages:
            cache.apply_message(message, messages.version_epoch, now, insert=insert)


class TopologyEpochs:
    """Tells a cache the version epochs that the topology states. A promotion raises that of a database, and every shard
    of it is void in every cache that hears of the new topology, whatever a lost master had told (DESIGN.md §6)."""

    def __init__(self, cache: GraphCache) -> None:
        self._cache: Final = cache
        self._known: Final[dict[str, int]] = {}

    def follow_routes(self, routes: Routes) -> None:
        """To be called with every newer topology's routes."""
        for database in routes.topology.databases:
            if database.version_epoch > self._known.get(database.name, FIRST_EPOCH):
                self._known[database.name] = database.version_epoch
                for first, last in database.shards:
                    for shard in range(first, last + 1):
                        if self._cache.is_open(shard):
                            self._cache.open_shard(shard, database.version_epoch)
