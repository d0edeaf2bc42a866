"""Health of a database server, from the traffic of its pool and from probes.

A server that refuses connections is down at once. A silent one is only suspected until a connection of its own gets no
answer either: its statements may wait for a lock, and other tables must not suffer for that. The same holds for a
server that delays a new connection while it answers on others: statements in progress may be in COMMIT, and would be
cut off. No request is sent to a server that is down. Probes, one at a time, detect when it is back.

Slow statements do not count against a server. They depend on what was asked, a lock or a cold disk, and moving reads
away would slow down another region's database. Each miss is given up individually (`tao.leader.miss_path`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from tao.model.errors import DatabaseDown, TaoError
from tao.routing.failure_detector import DetectorSettings, DetectorState, FailureDetector
from tao.storage.failures import ConnectionLost

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Bounds for the health of one database server."""

    silence_seconds: float = 1.0
    """The server is probed when statements are in progress and none was answered for this long. A page waits no
    longer."""

    detector: DetectorSettings = field(
        default_factory=lambda: DetectorSettings(failures_until_down=1, max_probe_seconds=1.0)
    )
    """One refused connection, or one probe without an answer, is enough: statements have failed before it."""


class ServerHealth:
    """Tracks the health of the server of one pool. Belongs to the running loop."""

    def __init__(
        self,
        server: str,
        settings: HealthSettings,
        probe: Callable[[float], Awaitable[None]],
        went_down: Callable[[], None],
    ) -> None:
        """``probe``: ask for next to nothing until the loop's time given; raises `ConnectionLost` without an answer.
        ``went_down`` is called when the server has just been found to be down."""
        self._server: Final = server
        self._settings: Final = settings
        self._probe: Final = probe
        self._went_down: Final = went_down
        self._loop: Final = asyncio.get_running_loop()
        self._detector: Final = FailureDetector(settings.detector, self._loop.time(), random.random)
        self._under_way = 0
        self._heard_at = 0.0
        self._answered_at = float("-inf")
        self._look_timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None

    @property
    def state(self) -> DetectorState:
        """The failure detector's view of the server."""
        return self._detector.state()

    def check(self) -> None:
        """Raise `DatabaseDown` while the server is down."""
        if self._detector.is_down:
            raise DatabaseDown(f"database server {self._server} is down: {self._detector.state().reason}")

    def began(self) -> float:
        """Note that statements are about to be sent on one more connection. Returns the time."""
        now = self._loop.time()
        if not self._under_way:
            self._heard_at = now
        self._under_way += 1
        if self._look_timer is None:
            self._look_timer = self._loop.call_later(self._settings.silence_seconds, self._look)
        return now

    def ended(self) -> None:
        """Note that a connection is idle or closed."""
        self._under_way -= 1

    def answered(self) -> float:
        """Note that the server has answered, whatever the answer. Returns the time."""
        self._heard_at = self._answered_at = now = self._loop.time()
        self._detector.answered(0.0, now)  # slowness does not count: see the module's docstring
        return now

    def refused(self, reason: str) -> None:
        """Note that a connection was refused, or broke while it was being made."""
        was_down = self._detector.is_down
        self._detector.failed(self._loop.time(), reason)
        self._follow(was_down)

    def not_connected(self, reason: str) -> None:
        """Note that a connection was not made in time. Two lost packets cause that as well, so a server that has just
        answered on other connections is only probed."""
        if self._loop.time() - self._answered_at >= self._settings.silence_seconds:
            self.refused(reason)
        else:
            self._detector.suspect(self._loop.time(), reason)
            self._follow(self._detector.is_down)

    async def close(self) -> None:
        """Stop probing."""
        if self._look_timer is not None:
            self._look_timer.cancel()
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])

    def _look(self) -> None:
        self._look_timer = None
        if not self._under_way:
            return
        now = self._loop.time()
        silent_seconds = now - self._heard_at
        if silent_seconds >= self._settings.silence_seconds:
            was_down = self._detector.is_down
            self._detector.suspect(now, f"no statement was answered for {silent_seconds:.1f} s")
            self._follow(was_down)
        self._look_timer = self._loop.call_later(self._settings.silence_seconds, self._look)

    def _follow(self, was_down: bool) -> None:
        if self._detector.is_down and not was_down:
            _logger.warning("database server %s is down: %s", self._server, self._detector.state().reason)
            self._went_down()
        if self._detector.is_suspect and self._probing is None:
            self._probing = self._loop.create_task(self._probe_until_well())

    async def _probe_until_well(self) -> None:
        detector = self._detector
        try:
            while detector.is_suspect:
                now = self._loop.time()
                if detector.begin_probe(now):
                    await self._probe_once(now)
                else:
                    await asyncio.sleep(max(detector.probe_at - now, 0.001))
        finally:
            self._probing = None

    async def _probe_once(self, began: float) -> None:
        detector = self._detector
        was_down = detector.is_down
        try:
            await self._probe(began + self._settings.detector.probe_timeout_seconds)
        except ConnectionLost as error:
            detector.probe_failed(self._loop.time(), error.message)
        except TaoError:
            self._well_answered(began)  # it refuses us, but it answers
        else:
            self._well_answered(began)
        if was_down and not detector.is_down:
            _logger.warning("database server %s answers again", self._server)
        self._follow(was_down)

    def _well_answered(self, began: float) -> None:
        now = self._loop.time()
        self._heard_at = now
        self._detector.probe_answered(now - began, now)
