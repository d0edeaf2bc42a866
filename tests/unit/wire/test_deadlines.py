"""The wheel reports every deadline once, not early and at most a tick late, whatever lies between."""

import asyncio
import random
from collections.abc import Callable
from typing import cast

from tao.wire.deadlines import SLOTS, DeadlineWheel

TICK = 0.02


class HandDrivenLoop:
    """The part of a loop that the wheel uses; the test moves its time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.timers.append((when, callback))
        return cast("asyncio.TimerHandle", self)

    def cancel(self) -> None:
        self.timers.clear()

    def run_until(self, end: float) -> None:
        while self.timers and min(self.timers)[0] <= end:
            self.timers.sort(key=lambda timer: timer[0])
            when, callback = self.timers.pop(0)
            self.now = max(self.now, when)
            callback()
        self.now = end


def wheel_on(loop: HandDrivenLoop, on_expired: Callable[[int], None]) -> DeadlineWheel:
    return DeadlineWheel(cast("asyncio.AbstractEventLoop", loop), TICK, on_expired)


def test_every_deadline_is_reported_once_and_in_its_tick() -> None:
    loop, chance = HandDrivenLoop(), random.Random(7)
    reported: dict[int, float] = {}
    wheel = wheel_on(loop, lambda key: reported.update({key: loop.now}))
    deadlines = {key: loop.now + chance.uniform(0.001, 3 * SLOTS * TICK) for key in range(500)}
    for key, deadline in deadlines.items():
        wheel.add(key, deadline - loop.now)
    loop.run_until(loop.now + 4 * SLOTS * TICK)
    assert reported.keys() == deadlines.keys()
    assert all(deadlines[key] <= at <= deadlines[key] + TICK + 1e-6 for key, at in reported.items())


def test_what_is_discarded_is_not_reported_and_an_idle_wheel_sets_no_timer() -> None:
    loop = HandDrivenLoop()
    reported: list[int] = []
    wheel = wheel_on(loop, reported.append)
    wheel.discard(1, wheel.add(1, 0.1))
    loop.run_until(loop.now + 1)
    assert reported == []
    assert loop.timers == []


def test_after_a_long_stall_of_the_loop_everything_due_is_reported() -> None:
    loop = HandDrivenLoop()
    reported: list[int] = []
    wheel = wheel_on(loop, reported.append)
    for key in range(100):
        wheel.add(key, 0.05 * key + 0.01)
    loop.now += 10 * SLOTS * TICK
    loop.run_until(loop.now + TICK)
    assert sorted(reported) == list(range(100))


def test_a_deadline_set_while_another_is_reported_is_kept() -> None:
    loop = HandDrivenLoop()
    reported: list[int] = []

    def on_expired(key: int) -> None:
        reported.append(key)
        if key < 3:
            wheel.add(key + 1, 0.05)

    wheel = wheel_on(loop, on_expired)
    wheel.add(0, 0.05)
    loop.run_until(loop.now + 1)
    assert reported == [0, 1, 2, 3]


def test_deadlines_that_are_met_do_not_wake_the_loop() -> None:
    loop = HandDrivenLoop()
    reported: list[int] = []
    wheel = wheel_on(loop, reported.append)
    woken = 0
    for key in range(1_000):
        wheel.discard(key, wheel.add(key, 5.0))
        before = len(loop.timers), loop.timers[0]
        loop.run_until(loop.now + TICK)
        woken += (len(loop.timers), loop.timers[:1]) != (before[0], [before[1]])
    assert woken < 10
    assert not reported


def test_an_earlier_deadline_is_not_late_for_a_later_one_set_before_or_while_another_is_reported() -> None:
    loop = HandDrivenLoop()
    reported: dict[int, float] = {}

    def on_expired(key: int) -> None:
        reported[key] = loop.now
        if key == 0:
            wheel.add(3, 2.0)

    wheel = wheel_on(loop, on_expired)
    began = loop.now
    wheel.add(2, 1.0)
    wheel.add(0, 0.1)
    wheel.add(1, 0.5)
    loop.run_until(loop.now + 4)
    assert {key: round(at - began, 1) for key, at in reported.items()} == {0: 0.1, 1: 0.5, 2: 1.0, 3: 2.1}


def test_a_deadline_that_passes_while_another_is_reported_is_not_late_for_one_set_then() -> None:
    loop = HandDrivenLoop()
    reported: dict[int, float] = {}

    def on_expired(key: int) -> None:
        reported[key] = loop.now
        if key == 0:
            loop.now += 3 * TICK
            wheel.add(2, 1.0)

    wheel = wheel_on(loop, on_expired)
    began = loop.now
    wheel.add(0, 0.1)
    wheel.add(1, 0.1 + 1.5 * TICK)
    loop.run_until(began + 2)
    assert reported.keys() == {0, 1, 2}
    assert reported[1] <= reported[0] + 4 * TICK
