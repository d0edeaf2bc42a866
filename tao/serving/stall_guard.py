"""A server that was paused answers nothing until it knows what it has missed (DESIGN.md §9).

A process that is stopped, swapped out or frozen with its machine wakes up with the cache of the moment when it fell
asleep. Meanwhile others may have marked it down, taken its shards over and written; and the first thing that it finds
are requests. So each of them compares the clock with a mark that a small job pushes forward all the time: when the
mark lies behind, nothing has run here for longer than the bound, and the request is held until the server has looked
at what may have changed. The bound is below what it takes to be marked down, so whoever was may not go unnoticed.

A machine whose clock stands still while it is frozen hides the pause from everybody on it; then the checks that run
anyway (ownership, topology: a second) are what bounds it.
"""

from __future__ import annotations

import math
from asyncio import sleep
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tao.model.errors import InternalError, SettingsError, TaoError, Unavailable
from tao.model.ports import Clock
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.wire.session import Reply, RequestHandler, failure
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class StallSettings:
    """What counts as a pause."""

    stall_seconds: float = 1.5
    """Without a sign of life of its own for so long, a server takes itself for paused. Longer than a busy loop holds it
    up; shorter than it takes to be marked down, or it could be replaced without noticing."""

    tick_seconds: float = 0.25
    """Between two signs of life: several within the bound, each of which costs a microsecond."""

    look_seconds: float = 1.0
    """For looking at what has changed. What cannot be learnt in this time counts as changed."""

    max_held: int = 10_000
    """Requests that wait for that; more are refused, and can be tried elsewhere."""

    def __post_init__(self) -> None:
        if not 0 < self.tick_seconds < self.stall_seconds or not 0 < self.look_seconds < self.stall_seconds:
            raise SettingsError(f"tick_seconds and look_seconds have to be above 0 and below stall_seconds: {self}")


class StallGuard:
    """The `RequestHandler` in front of another one."""

    def __init__(
        self,
        inner: RequestHandler,
        kinds: frozenset[str],
        look: Callable[[float], Awaitable[None]],
        clock: Clock,
        settings: StallSettings,
        log: Logger,
    ) -> None:
        """``kinds``: the requests that are answered from what this server believes. ``look(seconds)`` finds out what
        has changed; after it nothing may be served that is not known to be right, whether it raised or not."""
        self._inner: Final = inner
        self._kinds: Final = kinds
        self._look: Final = look
        self._clock: Final = clock
        self._settings: Final = settings
        self._log: Final = log
        self._alive_until = math.inf
        self._held: list[tuple[pb.Request, Reply]] = []
        self.stalls = 0

    def register(self, metrics: Metrics) -> None:
        """Have pauses collected with each scrape."""
        metrics.gauge_family(
            "pauses_total",
            "Times that this process did not run for so long that it may have been replaced.",
            "event",
            lambda: {"noticed": self.stalls},
        )

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """As the inner handler, now or after the look. Raises `Unavailable` when too many wait."""
        if self._clock.monotonic() <= self._alive_until or request.WhichOneof("body") not in self._kinds:
            self._inner.handle(request, reply)
        elif len(self._held) < self._settings.max_held:
            self._held.append((request, reply))
        else:
            raise Unavailable("this server was paused and is looking at what it has missed; try again, or another one")

    async def keep(self) -> None:
        """Give signs of life, and look after pauses, until cancelled."""
        while True:
            await self.tick()
            await sleep(self._settings.tick_seconds)

    async def tick(self) -> None:
        """One sign of life; when the last one is too long ago, what has changed is looked at before."""
        while (now := self._clock.monotonic()) > self._alive_until:
            self.stalls += 1
            self._log.warning("server_was_paused", seconds=round(now - self._alive_until, 1), held=len(self._held))
            try:
                await self._look(self._settings.look_seconds)
            except TaoError as error:
                self._log.error("paused_server_looked_in_vain", reason=error.message)
            # Paused once more while it looked: what it saw may be old already.
            self._alive_until = now + self._settings.stall_seconds
        self._alive_until = self._clock.monotonic() + self._settings.stall_seconds
        self._answer_held()

    def _answer_held(self) -> None:
        held, self._held = self._held, []
        for request, reply in held:
            if reply.closed:
                continue
            try:
                self._inner.handle(request, reply)
            except TaoError as error:
                reply.send(failure(error))
            except Exception as error:  # noqa: BLE001 - as a transport does it: logged, answered, and on to the next
                self._log.error("request_failed", exc_info=error)
                reply.send(failure(InternalError(f"{type(error).__name__} in the server; its log says more")))
