"""Apply changes of a shard to a cache: the changes of a write that is answered through this server, and messages from
the leader."""

from __future__ import annotations

from math import inf
from typing import Final

from tao.cache import GraphCache
from tao.model.changes import ShardInvalidation, ShardMessages
from tao.model.ports import Clock

_OWN_WRITE: Final = "a write on its way back"


def apply_messages(cache: GraphCache, clock: Clock, messages: ShardMessages, *, insert: bool) -> None:
    """Apply messages to the cache. ``insert``: also cache an entry that was not cached, because its writer will read it
    here. See `GraphCache.apply`."""
    now = clock.monotonic()
    for message in messages.messages:
        cache.apply_message(message, messages.version_epoch, now, insert=insert)


class WriteThrough:
    """Applies changes to the cache of a server that does not own the shards: messages, and writes of this tier.

    A message changes only what is cached. A write also inserts what was not cached, because its writer will read it
    here; but its answer may be late. The changes that followed the write may then have been sent before this cache
    began to receive the shard's messages, or to another server, and nothing would correct the inserted entry. So a
    write inserts only if it was sent after the shard began or began anew here, also at the start of the server; where
    that is not known, only a time after the beginning. Any other write changes what is cached and raises version
    floors, and the entry is fetched when it is read.
    """

    def __init__(self, cache: GraphCache, clock: Clock, write_answer_seconds: float) -> None:
        """``write_answer_seconds`` must exceed the time that the answer to a write can take."""
        self._cache: Final = cache
        self._clock: Final = clock
        self._write_answer_seconds: Final = write_answer_seconds
        self._begun_at: Final[dict[int, float]] = {}

    def note_begun(self, shard: int) -> None:
        """Note that this cache knows nothing of what has been sent about the shard before now."""
        self._begun_at[shard] = self._clock.monotonic()

    def apply(self, messages: ShardMessages) -> None:
        """Apply messages. A message that invalidates the shard may stand for others that are kept nowhere any more."""
        apply_messages(self._cache, self._clock, messages, insert=False)
        if any(isinstance(message, ShardInvalidation) for message in messages.messages):
            self.note_begun(messages.shard)

    def apply_write(self, messages: ShardMessages, sent_at: float = -inf) -> None:
        """Apply the changes of a write that is answered through this server, or through a server of its tier.

        ``sent_at``: the monotonic time at which this server sent the write, if it did."""
        begun_at = self._begun_at.get(messages.shard, inf)
        insert = sent_at > begun_at or self._clock.monotonic() - begun_at > self._write_answer_seconds
        with self._cache.recorder.caused_by(_OWN_WRITE):
            apply_messages(self._cache, self._clock, messages, insert=insert)
