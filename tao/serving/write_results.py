"""Results of a batch of writes, sent as they come: what is ready in one tick of the loop leaves together.

How many writes a batch may have is bounded here, where followers and leaders alike begin with one: each takes a task, a
message of the largest size holds hundreds of thousands, and one client must not take all the tasks of a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from tao.model.changes import ListChange, ObjectChange, ShardMessages
from tao.model.errors import TaoError, TooLarge
from tao.wire.convert import error_to_pb, shard_messages_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

MAX_WRITES_PER_BATCH: Final = 6000
"""As many as an id2 set may have, so that a set that was read can be written; a sixteenth of the tasks of a server."""


FLUSH_BYTES: Final = 4 << 20
"""Changes in one answer, about; well below the largest message."""

EDGE_BYTES: Final = 32
"""Of an edge in a change, without its data."""


class WriteResults:
    """Collects the results of ``expected`` writes; the answer with the last of them says so."""

    def __init__(self, reply: Reply, expected: int, *, want_changes: bool) -> None:
        """Raises `TooLarge` for more than `MAX_WRITES_PER_BATCH`, of which none has begun then."""
        if expected > MAX_WRITES_PER_BATCH:
            raise TooLarge(f"{expected} writes in one batch; send at most {MAX_WRITES_PER_BATCH} at a time")
        self._reply: Final = reply
        self._want_changes: Final = want_changes
        self._open = expected
        self._answer = pb.Answer()
        self._told: dict[int, ShardMessages] = {}
        self._told_bytes = 0
        self._scheduled = False

    def add(self, slot: int, result: pb.WriteResult, messages: Iterable[ShardMessages] = ()) -> None:
        """One write is done; ``messages`` are what its writer's caches have to know."""
        answer = self._answer.write
        answer.slots.append(slot)
        answer.results.append(result)
        if self._want_changes:
            # By identity: writes committed together share the changes that they made together.
            for each in messages:
                if id(each) not in self._told:
                    self._told[id(each)] = each
                    self._told_bytes += _size(each)
        self._open -= 1
        if self._told_bytes >= FLUSH_BYTES or not self._open:
            # Not all that a turn of the loop brings fits one message: what is committed must never be too large to say.
            # And with the last result there is nothing to wait for.
            self._send()
            return
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def fail(self, slot: int, error: TaoError, messages: Iterable[ShardMessages] = ()) -> None:
        """One write has failed, and wrote nothing unless the error says that this is unknown; ``messages``: what it has
        written all the same."""
        self.add(slot, pb.WriteResult(error=error_to_pb(error)), messages)

    def _flush(self) -> None:
        self._scheduled = False
        if self._answer.write.slots:
            self._send()

    def _send(self) -> None:
        answer, self._answer = self._answer, pb.Answer()
        answer.more = self._open > 0
        if self._told:
            told, self._told, self._told_bytes = self._told, {}, 0
            answer.write.changes.extend(map(shard_messages_to_pb, told.values()))
        self._reply.send(answer)


def _size(messages: ShardMessages) -> int:
    """About what the messages take on the wire."""
    size = 0
    for message in messages.messages:
        if isinstance(message, ObjectChange):
            size += EDGE_BYTES + len(message.data or b"")
        elif isinstance(message, ListChange):
            size += EDGE_BYTES * (1 + len(message.gone) + len(message.put))
            size += sum(len(edge.data) for edge in message.put)
    return size
