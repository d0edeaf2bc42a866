"""Send copies of edges to other leaders: those of one turn of the event loop, for one leader, in one message.

A write of a pair whose far side belongs to another leader has its edges copied there. The writes of one transaction
have their copies sent together: a message of its own for each would cost both leaders more than the copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tao.model.changes import ListChange, ListInvalidation, ShardMessages
from tao.model.errors import InternalError, ProtocolError, TaoError
from tao.model.graph import ListKey
from tao.model.topology import CacheServer
from tao.model.writes import Coordinator, SettleEdge
from tao.serving.configuration import ServerContext
from tao.serving.sources import TickBatcher
from tao.wire.convert import error_from_pb, error_to_pb, shard_messages_from_pb, write_to_pb
from tao.wire.links import LinksPort
from tao.wire.v1 import session_pb2 as pb

_MAX_WRITERS: Final = 64
"""Most writers whose copies share a message: with the largest data, a quarter of the largest message."""

_DEADLINES_PER_SECOND: Final = 10
"""Copies share a message, and the earliest of their deadlines, if these are less than a tenth of a second apart.
Nearly all have the two seconds of one attempt."""

_LEAST_SHARED_SECONDS: Final = 0.5
"""Copies with less time are sent alone: they would lose more than a fifth of it to an earlier deadline, or all."""


class CopyResults:
    """The results of the copies of one writer, in their order, and the changes of their lists for caches."""

    __slots__ = ("changes", "done", "missing", "results", "settles", "timeout_seconds", "writes")

    def __init__(
        self,
        settles: Sequence[SettleEdge],
        writes: Sequence[pb.Write],
        timeout_seconds: float,
        done: asyncio.Future[None],
    ) -> None:
        """``writes`` are the encoded ``settles``."""
        self.settles: Final = settles
        self.writes: Final = writes
        self.timeout_seconds: Final = timeout_seconds
        self.done: Final = done
        self.results: Final[list[pb.WriteResult]] = [pb.WriteResult()] * len(settles)
        self.changes: Final[list[ShardMessages]] = []
        self.missing = len(settles)

    def fail(self, error: Exception) -> None:
        """End the wait of the writer, unless it has gone. It gets an error of its own: each raise adds a traceback."""
        if self.done.done():
            return
        if isinstance(error, TaoError):
            self.done.set_exception(error_from_pb(error_to_pb(error)))
        else:
            self.done.set_exception(InternalError(f"{type(error).__name__} in a copy to another leader; see the log"))

    def add(self, place: int, result: pb.WriteResult) -> None:
        """Put one result, and end the wait of the writer with the last."""
        self.results[place] = result
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(None)


class _Route(NamedTuple):
    """What copies that share a message have in common."""

    leader: CacheServer
    coordinator: Coordinator
    background: bool
    deadline: int


class CopySender:
    """Sends copies of edges to other leaders. See `tao.leader.copies_to_leaders`."""

    def __init__(self, context: ServerContext) -> None:
        self._configuration: Final = context.configuration
        self._links: Final[LinksPort] = context.links
        self._loop: Final = asyncio.get_running_loop()
        self._batches: Final[TickBatcher[_Route, CopyResults]] = TickBatcher(
            self._send_batch, _fail_batch, _MAX_WRITERS
        )

    async def send(
        self,
        leader: CacheServer,
        settles: Sequence[SettleEdge],
        coordinator: Coordinator,
        timeout_seconds: float,
        *,
        background: bool,
    ) -> CopyResults:
        """Have the leader write these edges on behalf of ``coordinator``. Raises the `TaoError` of the message; the
        error of a copy is in its result."""
        # One that cannot be encoded fails here, and not with the message for the copies of other writers.
        writes = [write_to_pb(settle) for settle in settles]
        copies = CopyResults(settles, writes, timeout_seconds, self._loop.create_future())
        if not settles:
            return copies  # all types of an intent have left the schema, or have no inverse any more
        if len(settles) == 1 and settles[0].registers is None and timeout_seconds >= _LEAST_SHARED_SECONDS:
            deadline = int(timeout_seconds * _DEADLINES_PER_SECOND)
            self._batches.add(_Route(leader, coordinator, background, deadline), copies)
        else:
            # Among them edges with states: the other leader joins those of one message, and they fail together.
            self._batches.send_now(_Route(leader, coordinator, background, 0), [copies])
        await copies.done
        return copies

    def _send_batch(self, route: _Route, batch: list[CopyResults]) -> None:
        batch = [copies for copies in batch if not copies.done.done()]  # without those whose writers have gone
        if not batch:
            return
        coordinator = pb.Coordinator(shard=route.coordinator.shard, generation=route.coordinator.generation)
        message = pb.WriteBatch(
            writes=[write for copies in batch for write in copies.writes],
            want_changes=True,
            coordinator=coordinator,
            background=route.background,
        )
        request = pb.Request(topology_version=self._configuration.routes.version, write=message)
        timeout_seconds = min([copies.timeout_seconds for copies in batch])
        self._links.to(route.leader).send(request, timeout_seconds, _Answers(batch).take)


def _fail_batch(_: _Route, batch: list[CopyResults], error: Exception) -> None:
    """Raise the error of a message that could not be sent in each of its writers."""
    for copies in batch:
        copies.fail(error)


class _Answers:
    """The answers to one message."""

    def __init__(self, batch: Sequence[CopyResults]) -> None:
        self._batch: Final = batch
        self._waiting: Final = dict(
            enumerate((copies, place) for copies in batch for place in range(len(copies.settles)))
        )
        """The copies without a result, by the slot in the message: those of a writer, and the place among them."""

    def take(self, answer: pb.Answer) -> None:
        """Take one answer; an `AnswerHandler`. Each writer gets a result or an error, whatever the answer is like:
        nothing else ends its wait."""
        try:
            if answer.HasField("error"):
                self._fail(error_from_pb(answer.error))
            else:
                self._take(answer.write)
            if not answer.more:
                self._fail(InternalError("the leader's answer lacks a result for the copy"))
        except ProtocolError as error:
            self._fail(error)
        except Exception as error:
            self._fail(error)
            raise  # to the session, which logs it

    def _take(self, answer: pb.WriteAnswer) -> None:
        changes = [shard_messages_from_pb(messages) for messages in answer.changes]
        if len(self._batch) == 1:
            self._batch[0].changes.extend(changes)
        by_list = {} if len(self._batch) == 1 else _by_list(changes)
        for slot, result in zip(answer.slots, answer.results, strict=False):
            if slot not in self._waiting:
                continue  # it failed with a part of the answer that could not be sent
            copies, place = self._waiting.pop(slot)
            settle = copies.settles[place]
            copies.changes.extend(by_list.get(ListKey(settle.id1, settle.atype), ()))
            copies.add(place, result)

    def _fail(self, error: Exception) -> None:
        """Fail the copies without a result."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for copies, _ in waiting:
            copies.fail(error)


def _by_list(changes: Iterable[ShardMessages]) -> Mapping[ListKey, Sequence[ShardMessages]]:
    """Return the changes of each list. Those that write the same list share them."""
    found: dict[ListKey, list[ShardMessages]] = {}
    for batch in changes:
        for message in batch.messages:
            if isinstance(message, ListChange | ListInvalidation):
                alone = ShardMessages(batch.shard, batch.version_epoch, (message,))
                found.setdefault(ListKey(message.id1, message.atype), []).append(alone)
    return found
