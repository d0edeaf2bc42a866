"""Answers to the misses of a batch, as they come: whatever is ready in one tick of the loop goes together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from tao.model.errors import AnswerFull, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import Fetched, ObjectQuery, Query
from tao.serving.batch_settings import BatchSettings
from tao.wire.convert import error_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

TOO_MANY_BYTES: Final = "the answer of this batch is full; this query, asked again without those answered, has room"


class LateAnswers:
    """Collects what is ready within one tick of the loop into one answer per origin; the last one says so."""

    def __init__(self, reply: Reply, expected: int, for_fill: bool, settings: BatchSettings, room: int) -> None:
        """``room``: bytes of values that still go into the answer."""
        self._reply = reply
        self._open = expected
        self._for_fill = for_fill
        self._max_part_bytes = settings.max_part_bytes
        # A single value always has a place: whether it fits a message at all is seen when it is sent.
        self._nothing_sent = room == settings.max_answer_bytes
        self._room = room
        self._answered: set[int] = set()
        self._by_origin: dict[str, _Collected] = {}
        self._collected_bytes = 0
        self._scheduled = False

    @property
    def is_full(self) -> bool:
        """Nothing more goes into the answer."""
        return self._room <= 0

    def value(self, slot: int, query: Query, fetched: Fetched) -> None:
        """Raises `AnswerFull` when there is no room for it."""
        if slot in self._answered:
            return
        size = len(fetched.value)
        if size > self._room and not self._nothing_sent:
            self._room = 0  # nothing more is fetched
            raise AnswerFull(TOO_MANY_BYTES)
        self._nothing_sent = False
        self._room -= size
        self._collected_bytes += size
        collected = self._of_origin(fetched.origin)
        read = collected.answer.read
        read.slots.append(slot)
        read.values.append(fetched.value)
        read.missed_slots.append(slot)
        read.served_by = fetched.origin
        if self._for_fill:
            shard = (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT
            # The lowest: it must have held no later than any of the answers was read.
            collected.epochs[shard] = min(fetched.version_epoch, collected.epochs.get(shard, fetched.version_epoch))
        self._one_less(slot)
        if self._collected_bytes > self._max_part_bytes:
            self._flush()

    def error(self, slot: int, error: TaoError) -> None:
        if slot in self._answered:
            return
        answer = self._of_origin("").answer.read
        answer.failed_slots.append(slot)
        answer.errors.append(error_to_pb(error))
        self._one_less(slot)

    def error_rest(self, slots: Sequence[int], error: TaoError) -> None:
        """The same error for every slot not answered yet."""
        for slot in slots:
            self.error(slot, error)

    def _of_origin(self, origin: str) -> _Collected:
        collected = self._by_origin.get(origin)
        if collected is None:
            collected = self._by_origin[origin] = _Collected(pb.Answer(), {})
        return collected

    def _one_less(self, slot: int) -> None:
        self._answered.add(slot)
        self._open -= 1
        if not self._open:
            self._flush()  # nothing more comes
        elif not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send_collected)

    def _send_collected(self) -> None:
        self._scheduled = False
        self._flush()

    def _flush(self) -> None:
        ready, self._by_origin = list(self._by_origin.values()), {}
        self._collected_bytes = 0
        for index, (answer, epochs) in enumerate(ready, 1):
            answer.more = self._open > 0 or index < len(ready)
            if epochs:
                answer.read.epoch_shards.extend(epochs)
                answer.read.version_epochs.extend(epochs.values())
            self._reply.send(answer)


class _Collected(NamedTuple):
    """An answer being put together, and the version epochs that go with it, by shard."""

    answer: pb.Answer
    epochs: dict[int, int]
