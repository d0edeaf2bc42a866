"""The clocks of leaders, as an acceptor of writes knows them.

A leader stamps the operations that it makes at once, and an acceptor those that it makes later; the newest wins. So
both must go by one clock, which is the leader's. The acceptor asks for it twice a minute, and as soon as a leader is up
whose clock it does not know, and counts on from there by its own *monotonic* clock; its time of day is never used,
however wrong it may be. It asks the leaders of its region themselves, and one of these for the clocks of leaders in
other regions: those stamp what is made at once where the master is there.

A stamp is an upper bound of the leader's time: the leader's answer, plus all that has passed since it was asked. So an
accepted operation is newer than whatever its leader has stamped before. What is stamped after it at the leader is newer
again, unless it follows within the round trip of the measurement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from tao.journal.settings import JournalSettings
from tao.model.errors import TaoError, Unavailable
from tao.model.topology import CacheServer
from tao.routing.routes import Routes, TierRoutes
from tao.serving.configuration import ServerContext
from tao.wire.v1 import session_pb2 as pb

_ANSWER_SECONDS: Final = 1.0
"""Longest round trip of a measurement."""
_RETRY_SECONDS: Final = 1.0
"""Pause while the clock of a leader has not been measured yet."""
_BEST_SECONDS: Final = 600.0
"""Time for which a measurement that gives the lower bound is preferred to a newer one; quartz drifts by 60 ms in that
time."""
_RESOLUTION_US: Final = 1_000
"""Leaders stamp in whole milliseconds."""
_STEP_US: Final = 1_000_000
"""The most that a leader's clock may step back while its stamps grow. A larger step is followed: stamps of the old
time would be refused as too far ahead."""


class _Measured(NamedTuple):
    asked_at: float
    unix_us: int

    def bound_us(self, now: float) -> int:
        """Return the upper bound of the leader's time at ``now``."""
        return self.unix_us + _RESOLUTION_US + round((now - self.asked_at) * 1e6)


class LeaderClocks:
    """The measured clocks of leaders, by server name."""

    def __init__(self, context: ServerContext, settings: JournalSettings) -> None:
        self._context: Final = context
        self._settings: Final = settings
        self._monotonic: Final[Callable[[], float]] = context.clock.monotonic
        self._measured: Final[dict[str, _Measured]] = {}
        self._last_us: Final[dict[str, int]] = {}
        self._lacking: Final = asyncio.Event()
        context.configuration.on_routes(self._notice)

    def stamp(self, leader: str) -> int:
        """Return the time of an operation that is accepted now, in microseconds since 1970: later than that of any
        operation which this leader has made, and than the stamp before. Raises `Unavailable` when the leader's clock
        was not measured within ``clock_age_seconds``."""
        measured, now = self._known(leader), self._monotonic()
        if measured is None:
            raise Unavailable(
                f"the clock of {leader} was not measured within {self._settings.clock_age_seconds:.0f} s, so the write "
                "cannot be given a time, and is not accepted: try again once the leader can be reached"
            )
        unix_us = measured.bound_us(now)
        last = self._last_us.get(leader, 0)
        if last - _STEP_US < unix_us <= last:
            unix_us = last + 1
        self._last_us[leader] = unix_us
        return unix_us

    async def keep(self) -> None:
        """Measure the clocks of leaders, until cancelled."""
        while True:
            self._lacking.clear()
            await self.measure()
            seconds = self._settings.clock_seconds
            pause = min(_RETRY_SECONDS, seconds) if self._lacks_some() else seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._lacking.wait()

    def _notice(self, _: Routes) -> None:
        """Have a leader measured that has come, or come back: until then no write to its shards is accepted."""
        if self._lacks_some():
            self._lacking.set()

    def _lacks_some(self) -> bool:
        """Return whether the clock of a leader that is up is not known."""
        leaders = (leader for tier in (self._own(), *self._others()) for leader in tier.up)
        return any(self._known(leader.name) is None for leader in leaders)

    def _known(self, leader: str) -> _Measured | None:
        """Return the measurement by which a leader's time may be told now."""
        measured = self._measured.get(leader)
        is_too_old = measured is None or self._monotonic() - measured.asked_at > self._settings.clock_age_seconds
        return None if is_too_old else measured

    async def measure(self) -> None:
        """Measure the clocks of leaders once."""
        own, others = self._own(), self._others()
        for name in self._measured.keys() - {leader.name for tier in (own, *others) for leader in tier.servers}:
            del self._measured[name]
        measurements = [self._measure(leader, leader.name) for leader in own.up]
        links = self._context.links
        relay = next((leader for leader in own.up if not links.is_down(leader)), None)
        if relay is not None:
            measurements += [self._measure(relay, leader.name) for tier in others for leader in tier.up]
        await asyncio.gather(*measurements)

    def note(self, leader: str, asked_at: float, unix_us: int) -> None:
        """Take a leader's time that was asked for at ``asked_at`` and has just come."""
        now = self._monotonic()
        found, known = _Measured(asked_at, unix_us), self._measured.get(leader)
        # A bound that the leader's clock has passed already is none: the clock was set forward.
        holds = known is not None and known.bound_us(now) >= unix_us and now - known.asked_at < _BEST_SECONDS
        if known is None or not holds or found.bound_us(now) <= known.bound_us(now):
            self._measured[leader] = found

    def ages(self) -> dict[str, float]:
        """Return the age of each measurement in seconds."""
        now = self._monotonic()
        return {leader: now - measured.asked_at for leader, measured in self._measured.items()}

    def stamping(self, shard: int) -> str:
        """Return the leader that stamps what is made at once for a shard: in the region of the shard's master. Raises
        `InvalidArgument` for an unknown shard."""
        routes = self._context.configuration.routes
        return routes.leaders(routes.master_region(shard)).home(shard).name

    def _own(self) -> TierRoutes:
        """Return the leaders of this region."""
        return self._context.configuration.routes.leaders(self._context.region)

    def _others(self) -> list[TierRoutes]:
        """Return the leaders of each other region. Also of one without masters: writes are accepted at once when a
        master is promoted there."""
        routes = self._context.configuration.routes
        return [routes.leaders(each.name) for each in routes.topology.regions if each.name != self._context.region]

    async def _measure(self, asked: CacheServer, leader: str) -> None:
        """Measure the clock of a leader: of the one that is asked, or of another one through it."""
        relayed = "" if asked.name == leader else leader
        asked_at = self._monotonic()
        try:
            request = pb.Request(get_clock=pb.GetClock(leader=relayed))
            answer = await self._context.links.to(asked).ask(request, _ANSWER_SECONDS)
        except TaoError:
            return  # the measurement before is good for an hour
        if answer.clock.leader == relayed:  # one of an earlier version answers with its own clock
            self.note(leader, asked_at, answer.clock.unix_us)
