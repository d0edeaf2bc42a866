"""Taking changes of a shard into a cache: of a write on its way back, or from another server of the tier."""

from __future__ import annotations

from tao.cache import GraphCache
from tao.model.changes import ShardMessages
from tao.model.ports import Clock


def apply_messages(cache: GraphCache, clock: Clock, messages: ShardMessages, *, insert: bool) -> None:
    """``insert``: also cache what was not, because its writer will read it here."""
    now = clock.monotonic()
    for message in messages.messages:
        cache.apply_message(message, messages.version_epoch, now, insert=insert)
