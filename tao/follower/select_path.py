"""Unary calls of `Select`: a follower evaluates a set expression as the SDK does, over unary reads.

Each batch of an evaluation becomes reads, one for each shard, which pass the same way as a unary read of the same
caller: they are served here or relayed, its rights are checked for every list, and pending inverses that its token
names are written first. So nothing about a list is decided here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from tao.model.errors import AnswerFull, DeadlineExceeded, InternalError, Overloaded, TaoError, UnknownType
from tao.routing.budgets import work_seconds
from tao.serving.configuration import ServerContext
from tao.serving.shares import sharer_of
from tao.sets.evaluation import Evaluation
from tao.sets.steps import Answer, Done, ListQuery, Steps
from tao.wire.convert import join_answers
from tao.wire.identity import PeerIdentity
from tao.wire.select import ListReads, answers_of, count_to_pb, expression_of, limits_of, page_to_pb, reads_of
from tao.wire.session import Reply, RequestHandler, failure
from tao.wire.v1 import session_pb2 as pb

MAX_UNDER_WAY: Final = 1_000
"""Most evaluations at a time. One caller may have as many as are free then."""


class SelectPath:
    """A `RequestHandler` in front of that of unary calls, which serves `Select` by reads of the other."""

    def __init__(self, context: ServerContext, reads: RequestHandler) -> None:
        self._reads: Final = reads
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("select")
        self._under_way: Final = Counter[str]()

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Evaluate a set, or pass another call on. Raises `InvalidArgument` and `TooLarge` for an expression or cursor
        that is wrong, `DeadlineExceeded`, and `Overloaded` when too many evaluations are under way."""
        if not request.HasField("select"):
            self._reads.handle(request, reply)
            return
        asked = request.select
        evaluation = Evaluation(
            expression_of(asked),
            self._clock.monotonic,
            cursor=asked.cursor or None,
            limits=limits_of(asked),
            describe=self._type_name,
        )
        until = self._clock.monotonic() + work_seconds(request.deadline_ms)
        caller = sharer_of(request, reply.peer) or ""
        own, free = self._under_way[caller], MAX_UNDER_WAY - self._under_way.total()
        if own >= free:
            raise Overloaded(f"{own} sets of this caller are being evaluated, and {free} are free: send less at a time")
        self._under_way[caller] += 1
        self._spawn(self._evaluate(evaluation, asked, reply, until, caller))

    async def _evaluate(
        self, evaluation: Evaluation, asked: pb.SelectRequest, reply: Reply, until: float, caller: str
    ) -> None:
        task = asyncio.current_task()
        assert task is not None, "run by the spawner, as a task"
        reply.on_close(lambda: _stop(task))
        try:
            if asked.count_only:
                count = await self._run(evaluation.count(asked.limit), asked, reply.peer, until)
                answer = pb.Answer(selected=count_to_pb(count))
            else:
                page = await self._run(evaluation.page(asked.limit), asked, reply.peer, until)
                answer = pb.Answer(selected=page_to_pb(page))
        except TaoError as error:
            answer = failure(error)
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]
        reply.send(answer)

    async def _run(self, steps: Steps[Done], asked: pb.SelectRequest, peer: PeerIdentity, until: float) -> Done:
        try:
            batch = next(steps)
            while True:
                batch = steps.send(await self._answers(batch, asked, peer, until))
        except StopIteration as stop:
            done: Done = stop.value
            return done

    async def _answers(
        self, batch: Sequence[ListQuery], asked: pb.SelectRequest, peer: PeerIdentity, until: float
    ) -> list[Answer]:
        """Answer the queries of a batch. Those for which an answer had no room are asked again without the others, as
        the SDK does."""
        answers: list[Answer] = [InternalError("a query of a set was not asked")] * len(batch)
        waiting: Sequence[int] = range(len(batch))
        while waiting:
            left_ms = round((until - self._clock.monotonic()) * 1000)
            if left_ms < 1:
                raise DeadlineExceeded(
                    "the set was not evaluated within the time of the call: ask for a smaller budget_ms"
                )
            reads = reads_of([batch[place] for place in waiting], asked)
            found = await asyncio.gather(*(self._ask(each, peer, left_ms) for each in reads))
            rest: list[int] = []
            for read, values in zip(reads, found, strict=True):
                places = [waiting[index] for index in read.places]
                full = [place for place, value in zip(places, values, strict=True) if isinstance(value, AnswerFull)]
                if len(full) < len(places):  # otherwise the same would come again
                    rest += full
                for place, value in zip(places, values, strict=True):
                    answers[place] = value
            waiting = sorted(rest)
        return answers

    async def _ask(self, read: ListReads, peer: PeerIdentity, left_ms: int) -> list[Answer]:
        part = _PartOfCall(peer)
        read.request.deadline_ms = left_ms
        try:
            self._reads.handle(read.request, part)
            return answers_of(await part.answer(), len(read.places))
        except TaoError as error:
            return [error] * len(read.places)
        finally:
            part.close()

    def _type_name(self, number: int) -> str:
        try:
            return self._configuration.schema.atype(number).name
        except UnknownType:
            return f"type {number}"


class _PartOfCall:
    """The `Reply` of one read, for the peer of the call that it is a part of."""

    def __init__(self, peer: PeerIdentity) -> None:
        self.peer: Final = peer
        self.closed = False
        self._parts: list[pb.Answer] = []
        self._answered: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        self._on_close: list[Callable[[], None]] = []

    def send(self, answer: pb.Answer) -> None:
        part = pb.Answer()
        part.CopyFrom(answer)  # the sender may change and reuse the message
        self._parts.append(part)
        if not answer.more and not self._answered.done():
            self._answered.set_result(None)

    def on_close(self, callback: Callable[[], None]) -> None:
        self._on_close.append(callback)

    async def answer(self) -> pb.Answer:
        """Wait for all parts of the answer, and return it as one."""
        await self._answered
        return join_answers(self._parts)

    def close(self) -> None:
        """Stop the work for a read that nobody waits for any more. A wait that was cancelled has cancelled the
        future."""
        if self._answered.cancelled() or not self._answered.done():
            self.closed = True
            for callback in self._on_close:
                callback()


def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
