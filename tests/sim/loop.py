"""An event loop with virtual time, and processes that can be paused and killed.

When nothing is ready the clock jumps to the next timer, so a minute of waiting costs nothing. Everything that a
simulated process starts carries the process in its context. That is how a killed process is silenced in the middle of
its work, with no chance to clean up, and how a paused process later finds everything that arrived meanwhile.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Literal, TypeVar

Result = TypeVar("Result")
State = Literal["runs", "paused", "killed", "swept"]
_MOST_AT_ONCE: Final = 100_000
"""Most callbacks in one moment; more are taken for an endless cycle."""


class SimulationStuck(RuntimeError):
    """Time no longer advances: every task waits for what can never come, or a cycle never ends."""


class Process:
    """One simulated operating-system process: all that runs in its context belongs to it."""

    def __init__(self, name: str, region: str) -> None:
        self.name: Final = name
        self.region: Final = region
        self.state: State = "runs"
        self.is_motionless = False
        """True when the process is paused or killed."""
        self.context: Final = copy_context()
        self.context.run(CURRENT.set, self)
        self.tasks: list[asyncio.Task[Any]] = []
        self._kept_tasks = 64
        self.held: deque[SimHandle] = deque()
        self.on_pause: list[Callable[[], None]] = []
        """Called when the process is paused, outside of its context."""

    def __repr__(self) -> str:
        return f"<{self.name} {self.state}>"

    def add(self, task: asyncio.Task[Any]) -> None:
        """Keep the task: the tasks of a killed process must live, motionless, until the simulation ends."""
        self.tasks.append(task)
        if len(self.tasks) > self._kept_tasks:
            self.tasks = [each for each in self.tasks if not each.done()]
            self._kept_tasks = 2 * len(self.tasks) + 64


CURRENT: ContextVar[Process | None] = ContextVar("simulated process", default=None)


class SimHandle:
    """A callback with the process that it belongs to.

    Replaces `asyncio.TimerHandle`, which does more for each of millions of callbacks than a simulation needs.
    """

    __slots__ = ("_when", "args", "callback", "context", "process")

    def __init__(self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self._when = when
        self.callback: Callable[..., object] | None = callback
        """None once the handle is cancelled."""
        self.args = args
        self.context = context
        self.process = context.get(CURRENT)

    def __repr__(self) -> str:
        return f"<{self.callback!r} of {self.process!r}>"

    def cancel(self) -> None:
        """Cancel as `asyncio.Handle.cancel` does; the handle leaves the loop when its time has come."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Answer as `asyncio.Handle.cancelled` does."""
        return self.callback is None

    def when(self) -> float:
        """Answer as `asyncio.TimerHandle.when` does."""
        return self._when


class SimLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time. ``steps`` counts the callbacks that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.errors: list[str] = []
        self._queue: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._timers_set = 0
        self._moment = 0.0
        self._stopping: bool
        self._still = 0
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        return self.now

    get_debug = staticmethod(bool)
    """Debug mode is off. Every future asks for it: a function in C is four times as fast as one in Python."""

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> SimHandle:  # type: ignore[override]
        handle = SimHandle(0.0, callback, args, copy_context() if context is None else context)
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(when, callback, args, copy_context() if context is None else context)
        # Numbered, so that timers of one moment fire in the order in which they were set.
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Result], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Result]:
        context = copy_context() if context is None else context
        task: asyncio.Task[Result] = asyncio.Task(coro, loop=self, name=name, context=context)
        process = context.get(CURRENT)
        if process is not None:
            process.add(task)
        return task

    async def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Result], *args: Any
    ) -> Result:
        """Run the work of a thread after a moment, without a thread."""
        await asyncio.sleep(0.0005)
        return func(*args)

    def pause(self, process: Process) -> None:
        """Hold back the callbacks of a process, as after SIGSTOP."""
        if process.state == "runs":
            process.state, process.is_motionless = "paused", True
            for notice in process.on_pause:
                notice()

    def resume(self, process: Process) -> None:
        """Run everything that was held back, in its order."""
        if process.state == "paused":
            process.state, process.is_motionless = "runs", False
            self._queue.extend(process.held)
            process.held.clear()

    def kill(self, process: Process) -> None:
        """Run nothing of the process any more, until it is swept."""
        process.state, process.is_motionless = "killed", True

    def sweep(self, process: Process) -> None:
        """Let the tasks of a process end at the end of a simulation, so that nothing is left over."""
        process.state, process.is_motionless = "swept", False
        for task in process.tasks:
            if not task.done():
                task.cancel()
        # Include what was held back, such as the wake-ups of tasks whose wait is over.
        self._queue.extend(process.held)
        process.held.clear()

    def _run_once(self) -> None:
        """Run turns until the loop is to stop. Each turn runs what was ready when it began, as in asyncio."""
        queue, timers, pop = self._queue, self._timers, heapq.heappop
        while True:
            while timers and timers[0][2].callback is None:
                pop(timers)
            if not queue and not self._stopping:
                if not timers:
                    raise SimulationStuck("nothing is ready and no timer is set")
                self.now = max(self.now, timers[0][0])
            now = self.now
            self._still = 0 if now > self._moment else self._still + len(queue)
            self._moment = now
            if self._still > _MOST_AT_ONCE:
                what = f"{_MOST_AT_ONCE} callbacks and the time is still {now}; the next is {queue[0]!r}"
                raise SimulationStuck(what)
            while timers and timers[0][0] <= now:
                handle = pop(timers)[2]
                if handle.callback is not None:
                    queue.append(handle)
            for _ in range(len(queue)):
                handle = queue.popleft()
                callback = handle.callback
                if callback is None:
                    continue
                process = handle.process
                if process is not None and process.is_motionless:
                    process.held.append(handle)
                    continue
                self.steps += 1
                try:
                    handle.context.run(callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as in asyncio: report it and go on with the next
                    self.call_exception_handler({"message": f"a callback of {process!r}", "exception": error})
            if self._stopping:
                return

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there is no I/O outside the loop."""

    def _write_to_self(self) -> None:
        """Do nothing: there are no threads that wake the loop."""

    def _note_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")
