"""Questions to a master that is being replaced because it is lost: is it back?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from tao.replication.locks import LockLost
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet

_logger: Final = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.05
_ANSWER_SECONDS: Final = 10.0
"""Time limit for an answer, longer than most promotions: a master that is slow answers late, one that hangs never."""
_AGAIN_SECONDS: Final = 1.0
"""Interval at which a master that leaves questions unanswered is asked again: the way there may be mended."""
MAX_QUESTIONS: Final = 4
"""Most questions to a master under way at a time. Each has a connection, and a server has few for administrators."""
SILENT_SECONDS: Final = 0.5
"""A master that has not answered a question for so long hangs. A session between distant regions is opened in 0.3 s,
and a question has mostly been under way for as long as the other steps of the promotion take."""


class Questions:
    """The questions to one master that are under way: tasks that return its state.

    The oldest ones are kept, because a master that is slow answers those first. At the bound the newest one is
    withdrawn for another one: a new connection may find a way that is mended."""

    def __init__(self) -> None:
        self._under_way: Final = dict[asyncio.Task[SetMember], None]()

    def ask(self, question: Coroutine[Any, Any, SetMember], name: str) -> asyncio.Task[SetMember]:
        """Start a question as a task of this name."""
        if len(self._under_way) >= MAX_QUESTIONS:
            newest, _ = self._under_way.popitem()
            newest.cancel()
        task = asyncio.create_task(question, name=name)
        self._under_way[task] = None
        task.add_done_callback(self._forget)
        return task

    def withdraw(self) -> list[asyncio.Task[SetMember]]:
        """Cancel all questions, and return them."""
        withdrawn = [*self._under_way]
        for each in withdrawn:
            each.cancel()
        return withdrawn

    def _forget(self, task: asyncio.Task[SetMember]) -> None:
        self._under_way.pop(task, None)
        failure = failure_of(task)
        if failure is not None:
            _logger.error("the question failed: %s", task.get_name(), exc_info=failure)


def failure_of(question: asyncio.Task[SetMember]) -> BaseException | None:
    """Return the error with which a question ended, or None if it was answered or withdrawn, or ended because the lock
    was lost: the promotion checks its lock before each step."""
    failure = None if question.cancelled() else question.exception()
    return None if isinstance(failure, LockLost) else failure


class LostMaster:
    """Asks a lost master all the time, from the beginning of its replacement until the last moment at which that can be
    undone.

    A dead process refuses each question at once. One that hangs leaves it unanswered until it resumes. So nothing waits
    for an answer that does not come, and one that comes is known at once. One that refuses this process is there, too.
    """

    def __init__(self, replicas: ReplicationSet) -> None:
        self._replicas: Final = replicas
        self.answered: Final = asyncio.Event()
        name, region = replicas.master.name, replicas.database.master_region
        self._found = SetMember(name, region, None, "it has not answered", is_master=True)
        self._asking: asyncio.Task[None] | None = None
        self._silent_since: float | None = None
        """When the first question was sent of those since when none has been answered or refused."""
        self._refused_since = float("-inf")
        """When the last question was sent that was refused, or whose connection broke."""
        self._failure: BaseException | None = None
        """The error of a question that nobody expects: what the master has answered is not known."""

    @property
    def found(self) -> SetMember:
        """What the last question has brought."""
        return self._found

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[None]:
        """Ask within the context."""
        asking = self._asking = asyncio.create_task(self._ask(), name=f"is {self._found.name} back")
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def until_certain(self) -> SetMember:
        """Return the state of the master as it is now: at once if a question has been unanswered for a while. Raises
        the error of a question, also of a late one: the master may have answered it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not (
            self.answered.is_set()
            or self._failure is not None
            or (self._silent_since is not None and loop.time() - self._silent_since >= SILENT_SECONDS)
            or self._refused_since >= began
        ):
            self._replicas.check_hold()
            await asyncio.sleep(_PAUSE_SECONDS)
        if self._asking is not None and self._asking.done() and not self._asking.cancelled():
            self._asking.result()  # one that is not asked any more is silent, too
        if self._failure is not None and not self.answered.is_set():
            raise self._failure
        return self._found

    async def _ask(self) -> None:
        loop, questions = asyncio.get_running_loop(), Questions()
        try:
            with suppress(LockLost):  # the promotion finds out before its next step
                while not self.answered.is_set():
                    began = loop.time()
                    if self._silent_since is None:
                        self._silent_since = began
                    asked = self._replicas.member(self._replicas.database.master_region, _ANSWER_SECONDS)
                    question = questions.ask(asked, f"does {self._found.name} answer")
                    question.add_done_callback(self._note)
                    await asyncio.wait((question,), timeout=_AGAIN_SECONDS)
                    if question.done():
                        question.result()
                        if loop.time() - began < SILENT_SECONDS:
                            self._silent_since, self._refused_since = None, began
                            await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            await asyncio.gather(*questions.withdraw(), return_exceptions=True)

    def _note(self, question: asyncio.Task[SetMember]) -> None:
        if question.cancelled() or question.exception() is not None or self.answered.is_set():
            self._failure = self._failure or failure_of(question)
            return
        self._found = question.result()
        if self._found.state is not None or self._found.refuses:
            self.answered.set()
