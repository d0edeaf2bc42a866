"""Background tasks of a server: held, bounded, logged when they fail, and cancelled when it closes.

A bare ``asyncio.create_task`` may be collected while it runs, and its exception is lost. `asyncio.TaskGroup` ends
everything when one task fails, which a server's independent jobs must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from tao.model.errors import Overloaded
from tao.observability.logs import Logger


class BackgroundTasks:
    """The tasks of one owner. A task that raises is logged as ``background task failed`` and is over."""

    def __init__(self, owner: str, log: Logger, *, limit: int = 1_024) -> None:
        """``limit`` bounds the tasks at a time. 1,024 is far above the handful of loops and the few hundred calls to
        other servers that a healthy server has under way."""
        self._owner = owner
        self._log = log
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.failed = 0
        """Return how many tasks have ended with an exception."""

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, job: Coroutine[object, object, None], name: str) -> Callable[[], bool]:
        """Run a coroutine in the background. Returns the task's cancel function. Raises `Overloaded`, with the
        coroutine closed, when the limit is reached or the owner is closing."""
        if self._closed or len(self._tasks) >= self._limit:
            job.close()
            why = "is closing" if self._closed else f"has its {self._limit} background tasks already"
            raise Overloaded(f"{self._owner} {why}: {name} was not started")
        task = asyncio.get_running_loop().create_task(job, name=f"{self._owner}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task.cancel

    def keep(
        self, loop: Callable[[], Coroutine[object, object, None]], name: str, *, pause_seconds: float = 1.0
    ) -> Callable[[], bool]:
        """Run an endless job. A job that ends, by whatever error, is logged, counted in `failed`, and started again
        after a pause: a server without its ownership check or its subscriptions looks healthy and is not."""
        return self.start(self._keep(loop, name, pause_seconds), name)

    async def _keep(self, loop: Callable[[], Coroutine[object, object, None]], name: str, pause_seconds: float) -> None:
        while True:
            try:
                await loop()
            except Exception as error:  # noqa: BLE001 - logged, and begun again
                self.failed += 1
                self._log.error("endless task failed", task=f"{self._owner}: {name}", exc_info=error)
            await asyncio.sleep(pause_seconds)

    async def close(self) -> None:
        """Cancel all tasks and wait until they are over. No task can be started afterwards."""
        self._closed = True
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(tuple(self._tasks))
            # Callbacks of done tasks run in the next turn of the loop.
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed += 1
            self._log.error("background task failed", task=task.get_name(), exc_info=error)
