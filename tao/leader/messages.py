"""The changes of a transaction as messages, by shard (DESIGN.md §7)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tao.model.changes import Message, ObjectChange, ShardMessages
from tao.model.rows import ShardRow


def by_shard(
    messages: Iterable[Message], rows: dict[int, ShardRow], inline_object_bytes: int
) -> Iterable[ShardMessages]:
    """One batch per shard, in order, under the version epoch of its locked row. An object above
    ``inline_object_bytes`` is told of without its data."""
    grouped: dict[int, list[Message]] = {}
    for message in messages:
        if isinstance(message, ObjectChange) and message.data is not None and len(message.data) > inline_object_bytes:
            message = msgspec.structs.replace(message, data=None)
        grouped.setdefault(message.shard, []).append(message)
    return (ShardMessages(shard, rows[shard].version_epoch, tuple(batch)) for shard, batch in grouped.items())
