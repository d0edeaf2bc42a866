"""Answer the missed queries of one batch, as their values arrive.

What is ready within one tick of the loop goes into one message for each origin; the last message of the batch says that
it is the last. Messages are made when they are sent, of whole columns: a value that is put into a message by itself
costs as much as everything else here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tao.model.errors import AnswerFull, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import Fetched, ObjectQuery, Query
from tao.wire.convert import error_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

TOO_MANY_BYTES: Final = "the answer of this batch is full; repeat this query without those that were answered"


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Bounds of one read batch."""

    max_queries: int = 10_000
    """Ten times what the SDK puts into a message. They hold the loop for some 10 ms; more would delay every caller."""

    max_part_bytes: int = 4 << 20
    """Values in one message of the answer, in bytes: a quarter of the largest message, so that the copies made on the
    way stay small and the first values leave before the last are looked up."""

    max_answer_bytes: int = 32 << 20
    """Values in the whole answer, in all of its parts, in bytes: two messages of the largest size, half of what a peer
    may leave unread before it is disconnected."""

    max_misses_at_once: int = 512
    """Queries of one batch that are fetched at a time: as many as a follower asks its leader for in one message, so
    that its misses are all under way at once, and the misses of a client without measure are not."""


class MissAnswers:
    """Collects the answers that are ready within one tick of the loop into one message for each origin. The last
    message of the batch says that it is the last."""

    def __init__(self, reply: Reply, expected: int, for_fill: bool, settings: BatchSettings, room: int) -> None:
        """``room`` is how many bytes of values still fit the answer."""
        self._reply = reply
        self._open = expected
        self._for_fill = for_fill
        self._max_part_bytes = settings.max_part_bytes
        self._max_answer_bytes = settings.max_answer_bytes
        self.room = room
        """The bytes that still fit the answer. Nothing more does at 0 or below."""
        self._answered: set[int] = set()
        self._by_origin: dict[str, _Collected] = {}
        self._collected_bytes = 0
        self._is_scheduled = False

    def add(self, slot: int, query: Query, fetched: Fetched) -> None:
        """Answer a slot with a value. Raises `AnswerFull` when there is no room for it."""
        if slot in self._answered:
            return
        value = fetched.value
        size = len(value)
        # A single value always has room: sending it shows whether it fits a message at all.
        if size > self.room != self._max_answer_bytes:
            self.room = 0  # nothing more is fetched
            raise AnswerFull(TOO_MANY_BYTES)
        self.room -= size
        self._collected_bytes += size
        collected = self._by_origin.get(fetched.origin) or self._collected(fetched.origin)
        collected.slots.append(slot)
        collected.values.append(value)
        if self._for_fill:
            shard = (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT
            # The lowest epoch: it must have been in force no later than any of the answers was read.
            epoch, epochs = fetched.version_epoch, collected.epochs
            if epochs.setdefault(shard, epoch) > epoch:
                epochs[shard] = epoch
        self._answered.add(slot)
        self._open -= 1
        if not self._open or self._collected_bytes > self._max_part_bytes:
            self._flush()
        elif not self._is_scheduled:
            self._schedule()

    def fail(self, slot: int, error: TaoError) -> None:
        """Answer a slot with an error."""
        if slot in self._answered:
            return
        failed = self._by_origin.get("") or self._collected("")
        failed.failed_slots.append(slot)
        failed.errors.append(error)
        self._answered.add(slot)
        self._open -= 1
        if not self._open:
            self._flush()  # nothing more comes
        elif not self._is_scheduled:
            self._schedule()

    def fail_rest(self, slots: Sequence[int], error: TaoError) -> None:
        """Answer every slot that has no answer yet with the same error. Thousands of slots must not hold the loop."""
        unanswered = [slot for slot in slots if slot not in self._answered]
        if not unanswered:
            return
        failed = self._by_origin.get("") or self._collected("")
        failed.failed_slots.extend(unanswered)
        failed.errors.extend([error] * len(unanswered))
        self._answered.update(unanswered)
        self._open = 0
        self._flush()

    def _collected(self, origin: str) -> _Collected:
        collected = self._by_origin[origin] = _Collected()
        return collected

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._is_scheduled = False
        self._flush()

    def _flush(self) -> None:
        ready, self._by_origin = self._by_origin, {}
        self._collected_bytes = 0
        left = len(ready)
        for origin, collected in ready.items():
            left -= 1
            answer = pb.Answer()
            collected.write(answer.read, origin)
            if self._open or left:
                answer.more = True
            self._reply.send(answer)


class _Collected:
    """What is collected for one message: the answers that came from one tier, or failures. Protobuf takes whole columns
    at the cost of a few values."""

    __slots__ = ("epochs", "errors", "failed_slots", "slots", "values")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.values: list[bytes] = []
        self.epochs: dict[int, int] = {}  # of the shards of these slots
        self.failed_slots: list[int] = []
        self.errors: list[TaoError] = []

    def write(self, read: pb.ReadAnswer, origin: str) -> None:
        """Write it into an empty answer."""
        if self.slots:
            read.slots.extend(self.slots)
            read.values.extend(self.values)
            read.missed_slots.extend(self.slots)
            read.served_by = origin
            if self.epochs:
                read.epoch_shards.extend(self.epochs)
                read.version_epochs.extend(self.epochs.values())
        if self.failed_slots:
            read.failed_slots.extend(self.failed_slots)
            # All slots of a batch that is given up have one error.
            messages = {id(error): error_to_pb(error) for error in {id(each): each for each in self.errors}.values()}
            read.errors.extend([messages[id(error)] for error in self.errors])
