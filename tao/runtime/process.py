"""The life of a server process: build, announce, serve until a signal, drain, close.

It is the same for every role. SIGTERM or SIGINT drains and closes, each within its bound; a second signal forces the
end; SIGHUP reloads.

Exit status: 0 stopped on request, 1 a fault of the program, 2 an operator's mistake (one line on standard error), 128 +
signal when forced.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import uvloop

from tao.model.errors import OperatorError, TaoError
from tao.observability.logs import Logger

EXIT_FAULT: Final = 1
EXIT_OPERATOR: Final = 2
EXIT_SIGNALLED: Final = 128

Result = TypeVar("Result")


class RunningServer(Protocol):
    """A server of some role while it serves."""

    async def drain(self) -> None:
        """Accept no new work, send callers to other servers, and return when the requests under way are done."""

    async def close(self) -> None:
        """Release everything, finished or not. Called exactly once, after `drain` or instead of it."""

    async def reload(self) -> None:
        """Read again what can be changed while serving (schema, topology). Raises `TaoError` and keeps the old
        state."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Bounds of a process's end, and its garbage collector."""

    drain_seconds: float = 10.0
    """Longest wait for requests under way: above the longest deadline of a request (5 s), below the 30 s after which
    service managers kill."""
    close_seconds: float = 5.0
    """Longest wait for connections and files to close: they are local operations."""
    gc_allocations: int = 2_000
    """New containers between two collections of the youngest generation, which bounds the length of each. Cached
    entries are bytes, which the collector does not look at, and reference counting frees what requests make; but each
    unary call leaves gRPC's own cycles, eight containers. At 50,000 a collection of garbage stopped the loop for 27 to
    88 ms."""
    gc_generation_ratio: int = 20
    """Collections of one generation before the next is collected too. Full collections become rarer; each of them stops
    the loop for as long as it takes to look at everything made since the start."""


def run_server(
    build: Callable[[], Awaitable[RunningServer]], *, log: Logger, settings: ProcessSettings | None = None
) -> int:
    """Run one server in this process on uvloop until a signal stops it. Returns the exit status.

    ``build`` starts everything and returns when the server serves; it is cancelled when the signal comes first.
    """
    life = _Life(build, log, settings or ProcessSettings())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(life.live())


class _Life:
    def __init__(self, build: Callable[[], Awaitable[RunningServer]], log: Logger, settings: ProcessSettings) -> None:
        self._build = build
        self._log = log
        self._settings = settings
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._reload = asyncio.Event()
        self._signal = 0

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        try:
            return await self._serve()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _on_stop(self, number: signal.Signals) -> None:
        self._signal = number
        (self._force if self._stop.is_set() else self._stop).set()

    async def _serve(self) -> int:
        starting = asyncio.ensure_future(self._build())
        if not await _before(starting, self._stop):
            return await self._give_up(starting)
        try:
            server = starting.result()
        except (OperatorError, OSError) as error:
            # An OSError while starting is a taken port, a missing file, or a folder that may not be written.
            sys.stderr.write(f"tao: {error}\n")
            return EXIT_OPERATOR
        except Exception:  # noqa: BLE001 - the end of the process; the log is where the traceback is read
            self._log.exception("start failed")
            return EXIT_FAULT
        self._settle_garbage_collector()
        reloading = asyncio.create_task(self._reload_on_signal(server), name="reload on SIGHUP")
        try:
            await self._stop.wait()
        finally:
            reloading.cancel()
            await asyncio.wait((reloading,))
        return await self._end(server)

    async def _give_up(self, starting: asyncio.Future[RunningServer]) -> int:
        self._log.info("stopped while starting", signal=self._signal)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await self._close(await starting)  # it may have finished in the same moment
        return 0

    async def _end(self, server: RunningServer) -> int:
        self._log.info("draining", signal=self._signal)
        await self._within("drain", server.drain(), self._settings.drain_seconds)
        closed = await self._close(server)
        if self._force.is_set():
            return EXIT_SIGNALLED + self._signal
        return 0 if closed else EXIT_FAULT

    async def _close(self, server: RunningServer) -> bool:
        return await self._within("close", server.close(), self._settings.close_seconds)

    async def _within(self, step: str, job: Awaitable[None], seconds: float) -> bool:
        """Run one step of the end. The step may fail, take too long or be cut short by a second signal; the end goes
        on."""
        doing = asyncio.ensure_future(job)
        try:
            async with asyncio.timeout(seconds):
                if await _before(doing, self._force):
                    await doing
                    return True
            self._log.warning("cut short by a second signal", step=step)
        except TimeoutError:
            self._log.warning("took too long", step=step, seconds=seconds)
        except Exception:  # noqa: BLE001 - the next step still has to be done
            self._log.exception("failed", step=step)
        doing.cancel()
        await asyncio.wait((doing,), timeout=1.0)  # lets its cleanup run; a task that refuses to end is left behind
        return False

    async def _reload_on_signal(self, server: RunningServer) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            try:
                await server.reload()
                self._log.info("reloaded")
            except TaoError as error:
                self._log.error("not reloaded; the former settings stay", error=str(error))
            except Exception:  # noqa: BLE001 - a fault in reloading must not end a server that serves
                self._log.exception("reload failed; the former settings stay")

    def _settle_garbage_collector(self) -> None:
        gc.collect()
        gc.freeze()  # modules, schema and routes live as long as the process: no collection looks at them again
        ratio = self._settings.gc_generation_ratio
        gc.set_threshold(self._settings.gc_allocations, ratio, ratio)


async def _before(job: asyncio.Future[Result], event: asyncio.Event) -> bool:
    """Return whether the job is over, and not the event set first."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((job, waiting), return_when=asyncio.FIRST_COMPLETED)
        return job.done()
    finally:
        waiting.cancel()
