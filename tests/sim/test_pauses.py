"""The detector of pauses without ticks does what the product's does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tao.observability.logs import logger
from tao.serving.requests import PauseDetector, PauseSettings
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.sim.loop import Process, SimLoop
from tests.sim.pauses import SimPauseDetector

_ASLEEP = (0.1, 0.3, 1.2, 1.3, 1.45, 1.6, 7.0)
_REQUEST_SECONDS = 0.03


def _story(kind: type[PauseDetector], first_at: float, again_after: float) -> list[tuple[str, float]]:
    """Return when requests were answered and checks made, around two pauses of each length."""
    loop, process = SimLoop(), Process("server", "east")
    story: list[tuple[str, float]] = []

    def handle(request: pb.Request, _: Reply) -> None:
        story.append((f"request {request.number}", round(loop.now, 6)))

    async def look(seconds: float) -> None:
        story.append(("look", round(loop.now, 6)))
        await asyncio.sleep(0.4 * seconds)

    async def play() -> None:
        clock = SimpleNamespace(monotonic=loop.time, unix_ms=int)
        inner = cast(Any, SimpleNamespace(handle=handle))
        guard = kind(inner, frozenset({"read"}), look, clock, PauseSettings(), logger("test"))
        keeping = loop.create_task(guard.keep(), context=process.context.copy())

        def ask(number: int) -> None:
            loop.call_later(_REQUEST_SECONDS, ask, number + 1)
            guard.handle(
                pb.Request(number=number, read=pb.ReadBatch(obj_ids=[1])), cast(Reply, SimpleNamespace(closed=False))
            )

        loop.call_later(_REQUEST_SECONDS, ask, 1, context=process.context.copy())
        await asyncio.sleep(first_at)
        for asleep in _ASLEEP:
            for _ in range(2):
                loop.pause(process)
                await asyncio.sleep(asleep)
                loop.resume(process)
                await asyncio.sleep(again_after)
        loop.sweep(process)
        keeping.cancel()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play())
    return story


@pytest.mark.parametrize("first_at", [0.11, 0.2, 1.99])
@pytest.mark.parametrize("again_after", [0.017, 0.21, 0.55, 3.3])
def test_a_pause_has_the_consequences_that_it_has_with_ticks(first_at: float, again_after: float) -> None:
    with_ticks = _story(PauseDetector, first_at, again_after)
    assert any(what == "look" for what, _ in with_ticks)
    assert _story(SimPauseDetector, first_at, again_after) == with_ticks


def test_a_quiet_hour_has_no_ticks() -> None:
    loop, process = SimLoop(), Process("server", "east")

    async def play() -> None:
        clock = SimpleNamespace(monotonic=loop.time, unix_ms=int)
        guard = SimPauseDetector(cast(Any, None), frozenset(), cast(Any, None), clock, PauseSettings(), logger("test"))
        keeping = loop.create_task(guard.keep(), context=process.context.copy())
        await asyncio.sleep(3600.0)
        keeping.cancel()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play())
    assert loop.steps < 20
