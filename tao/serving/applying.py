"""Taking changes of a shard into a cache: a write on its way back, news of another server, a new master's epoch."""

from __future__ import annotations

from typing import Final

from tao.cache import GraphCache
from tao.model.changes import ShardInvalidation, ShardMessages
from tao.model.ports import Clock
from tao.model.versions import FIRST_EPOCH
from tao.routing.routes import Routes

_OWN_WRITE: Final = "a write on its way back"


def apply_messages(cache: GraphCache, clock: Clock, messages: ShardMessages, *, insert: bool) -> None:
    """``insert``: also cache what was not, because its writer will read it here; see `GraphCache.apply`."""
    now = clock.monotonic()
    for message in messages.messages:
        cache.apply_message(message, messages.version_epoch, now, insert=insert)


class WriteThrough:
    """Changes into a cache of shards that another server writes: messages, and what a write of this tier brings back.

    A message changes what is cached. A write adds to it besides, because its writer will read it here; but its answer
    may be late. What followed the write may then have been told before this cache began the shard anew, or to another
    server, and nothing would correct what is added. So for a time after that, writes add nothing: they change what is
    there, raise floors, and are read from further up."""

    def __init__(self, cache: GraphCache, clock: Clock, write_answer_seconds: float) -> None:
        """``write_answer_seconds``: longer than the answer to a write can take."""
        self._cache: Final = cache
        self._clock: Final = clock
        self._write_answer_seconds: Final = write_answer_seconds
        self._begun_anew: Final[dict[int, float]] = {}

    def begin_anew(self, shard: int) -> None:
        """What has been told of the shard so far is not known here, or not any more."""
        self._begun_anew[shard] = self._clock.monotonic()

    def opened(self, shard: int) -> None:
        """From now on it is; of a shard that was never begun anew, nothing was under way before."""
        if shard in self._begun_anew:
            self.begin_anew(shard)

    def hear(self, messages: ShardMessages) -> None:
        """A message. One that voids the shard may stand for others that nobody has any more."""
        apply_messages(self._cache, self._clock, messages, insert=False)
        if any(isinstance(message, ShardInvalidation) for message in messages.messages):
            self.begin_anew(messages.shard)

    def take_back(self, messages: ShardMessages) -> None:
        """What a write has changed."""
        begun = self._begun_anew.get(messages.shard)
        insert = begun is None or self._clock.monotonic() - begun > self._write_answer_seconds
        with self._cache.witness.because(_OWN_WRITE):
            apply_messages(self._cache, self._clock, messages, insert=insert)


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
