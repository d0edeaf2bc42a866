"""Keep a server that was paused from answering before it knows what it has missed.

A process that is stopped, swapped out or frozen with its machine wakes up with the cache of the moment when it was
paused. Meanwhile other servers may have marked it down, taken over its shards and written; and the first events that it
finds are requests. So each request compares the clock with a mark that a background job advances all the time: when the
mark is in the past, nothing has run here for longer than the bound, and the request is held until the server has
checked what may have changed. The bound is shorter than the time after which a server is marked down, so that a server
which was marked down notices it.

A clock that stands still while the machine is frozen hides the pause from every process on it; then the regular checks
of ownership and topology, one a second, bound the damage.
"""

from __future__ import annotations

import math
from asyncio import sleep
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tao.model.errors import InternalError, SettingsError, TaoError, Unavailable
from tao.model.ports import Clock
from tao.model.settings import renamed
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.wire.session import Reply, RequestHandler, failure
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class PauseSettings:
    """The durations that define a pause, and the bound on held requests."""

    pause_seconds: float = renamed(1.5, formerly="stall_seconds")
    """A server that has not run for this long considers itself paused. Longer than a busy loop delays it; shorter than
    the time until it is marked down, or it could be replaced without noticing."""

    tick_seconds: float = 0.25
    """Interval between two advances of the mark: several within the bound, each of which costs a microsecond."""

    check_seconds: float = renamed(1.0, formerly="look_seconds")
    """Longest time of the check for changes. Whatever is not confirmed in this time counts as changed."""

    max_held: int = 10_000
    """Most requests held during the check; further ones are refused, and can be sent to another server."""

    def __post_init__(self) -> None:
        if not 0 < self.tick_seconds < self.pause_seconds or not 0 < self.check_seconds < self.pause_seconds:
            raise SettingsError(f"tick_seconds and check_seconds have to be above 0 and below pause_seconds: {self}")


class PauseDetector:
    """A `RequestHandler` in front of another one, which holds requests after a pause."""

    def __init__(
        self,
        inner: RequestHandler,
        kinds: frozenset[str],
        look: Callable[[float], Awaitable[None]],
        clock: Clock,
        settings: PauseSettings,
        log: Logger,
    ) -> None:
        """``kinds`` are the requests that are answered from what this server believes. ``look(seconds)`` checks what
        has changed; after it, whether it raised or not, the server must serve nothing that is not known to be right."""
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
        """Register the number of pauses."""
        metrics.gauge_family(
            "pauses_total",
            "Pauses of this process that were long enough for it to have been replaced.",
            "event",
            lambda: {"noticed": self.stalls},
        )

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Pass the request to the inner handler, now or after the check. Raises `Unavailable` when too many are
        held."""
        if self._clock.monotonic() <= self._alive_until or request.WhichOneof("body") not in self._kinds:
            self._inner.handle(request, reply)
        elif len(self._held) < self._settings.max_held:
            self._held.append((request, reply))
        else:
            raise Unavailable("this server was paused and is checking what it has missed; try again, or another one")

    async def keep(self) -> None:
        """Advance the mark, and check for changes after a pause, until cancelled."""
        while True:
            await self.tick()
            await sleep(self._settings.tick_seconds)

    async def tick(self) -> None:
        """Advance the mark once. When the last advance is too long ago, check first what has changed."""
        while (now := self._clock.monotonic()) > self._alive_until:
            self.stalls += 1
            self._log.warning("server_was_paused", seconds=round(now - self._alive_until, 1), held=len(self._held))
            try:
                await self._look(self._settings.check_seconds)
            except TaoError as error:
                self._log.error("pause_check_failed", reason=error.message)
            # The process may be paused again during the check: what it saw may be out of date already.
            self._alive_until = now + self._settings.pause_seconds
        self._alive_until = self._clock.monotonic() + self._settings.pause_seconds
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
            except Exception as error:  # noqa: BLE001 - as a transport does: log, answer, go on
                self._log.error("request_failed", exc_info=error)
                reply.send(failure(InternalError(f"{type(error).__name__} in the server; its log says more")))
