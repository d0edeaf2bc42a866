"""The detection of pauses, without its ticks.

A sign of life of every server four times a second would be most of what happens in a quiet minute. While a process runs
nothing in it takes time, so its signs of life come when they should and carry no information. They matter from the
moment at which the process is paused: the last sign counts from then on, and the next one is scheduled for when it
would have come, or comes when the process resumes. A pause has the same consequences as with ticks, at the same times.
"""

from __future__ import annotations

import asyncio
import math

from tao.serving.requests import PauseDetector
from tests.sim.loop import CURRENT


class SimPauseDetector(PauseDetector):
    """Replaces `tao.serving.requests.PauseDetector` in a simulated process."""

    async def keep(self) -> None:
        """Detect pauses as `PauseDetector.keep` does."""
        process, loop, every = CURRENT.get(), asyncio.get_running_loop(), self._settings.tick_seconds
        assert process is not None, "only simulated processes are paused"
        due = asyncio.Event()
        began = loop.time()

        def last_sign() -> float:
            now = loop.time()
            return now - (now - began) % every

        def paused() -> None:
            # otherwise it was paused a moment ago, and the next sign has not come yet
            if self._alive_until == math.inf:
                self._alive_until = last_sign() + self._settings.pause_seconds
                loop.call_at(last_sign() + every, due.set, context=process.context.copy())

        await self.tick()
        began, self._alive_until = loop.time(), math.inf
        process.on_pause.append(paused)
        try:
            while True:
                await due.wait()
                due.clear()
                await self.tick()
                began, self._alive_until = loop.time(), math.inf
        finally:
            process.on_pause.remove(paused)
            self._alive_until = min(self._alive_until, last_sign() + self._settings.pause_seconds)
