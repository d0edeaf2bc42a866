"""Whether a database server answers: fed by what goes on at a pool, and by probes of its own (DESIGN.md §9).

A server that refuses connections is down at once. One that is silent is only suspected - its statements may wait for a
lock, and other tables' must not suffer for that - until a connection of its own is not answered either. So is one that
lets a connection wait while it answers on others: what is under way there may be in COMMIT, and would be cut. While it
is down nobody is sent to it; probes, one at a time, find out when it is back.

How long statements take is not held against a server: that tells of what was asked, a lock or a cold disk, and another
region's database would be slowed down by all that this one's should have done. Each miss is given up by itself
(`tao.leader.miss_path`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from tao.model.errors import DatabaseDown, TaoError
from tao.routing.failure_detector import DetectorSettings, FailureDetector, Standing
from tao.storage.failures import ConnectionLost

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Of one database server."""

    silence_seconds: float = 1.0
    """Statements are under way and none was answered for so long: the server is probed. A page waits no longer."""

    detector: DetectorSettings = field(
        default_factory=lambda: DetectorSettings(failures_until_down=1, max_probe_seconds=1.0)
    )
    """One refused connection, or one probe without an answer, is enough: statements have failed before it."""


class ServerHealth:
    """Of one pool. Belongs to the running loop."""

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
    def standing(self) -> Standing:
        """The detector's."""
        return self._detector.standing()

    def check(self) -> None:
        """Raises `DatabaseDown` while the server is down."""
        if self._detector.is_down:
            raise DatabaseDown(f"database server {self._server} is down: {self._detector.standing().reason}")

    def began(self) -> float:
        """Statements are about to be sent on one more connection; returns the time."""
        now = self._loop.time()
        if not self._under_way:
            self._heard_at = now
        self._under_way += 1
        if self._look_timer is None:
            self._look_timer = self._loop.call_later(self._settings.silence_seconds, self._look)
        return now

    def ended(self) -> None:
        """A connection is at rest, or closed."""
        self._under_way -= 1

    def answered(self) -> float:
        """The server has answered, whatever it has said; returns the time."""
        self._heard_at = self._answered_at = now = self._loop.time()
        self._detector.answered(0.0, now)  # no brown-outs: see above
        return now

    def refused(self, reason: str) -> None:
        """A connection was refused, or broke while it was made."""
        was_down = self._detector.is_down
        self._detector.failed(self._loop.time(), reason)
        self._follow(was_down)

    def not_connected(self, reason: str) -> None:
        """A connection was not made in time. Two lost packets do that, too: of a server that has just answered others
        it is no word yet, and a probe asks."""
        if self._loop.time() - self._answered_at >= self._settings.silence_seconds:
            self.refused(reason)
        else:
            self._detector.suspect(self._loop.time(), reason)
            self._follow(self._detector.is_down)

    async def close(self) -> None:
        """Ask no more."""
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
            self._detector.suspect(now, f"no statement was answered for {silent_seconds:.1f} s")
            self._follow(was_down=False)
        self._look_timer = self._loop.call_later(self._settings.silence_seconds, self._look)

    def _follow(self, was_down: bool) -> None:
        if self._detector.is_down and not was_down:
            _logger.warning("database server %s is down: %s", self._server, self._detector.standing().reason)
            self._went_down()
        if self._detector.is_troubled and self._probing is None:
            self._probing = self._loop.create_task(self._probe_until_well())

    async def _probe_until_well(self) -> None:
        detector = self._detector
        try:
            while detector.is_troubled:
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
            self._well_answered(began)  # it will not have us, but it is there
        else:
            self._well_answered(began)
        if was_down and not detector.is_down:
            _logger.warning("database server %s answers again", self._server)
        self._follow(was_down)

    def _well_answered(self, began: float) -> None:
        now = self._loop.time()
        self._heard_at = now
        self._detector.probe_answered(now - began, now)
