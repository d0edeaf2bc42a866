"""Operations begin at their time, whatever became of those before; latencies are of those that were answered."""

import asyncio
from time import perf_counter

import pytest

from loadtest.open_loop import Samples, sample_at_rate
from tao.model.errors import Overloaded


async def test_an_operation_that_is_not_answered_holds_up_no_other() -> None:
    later = asyncio.Event()
    order: list[str] = []

    async def waiting() -> None:
        await later.wait()
        order.append("waiting")

    async def opening() -> None:
        order.append("opening")
        later.set()

    samples = Samples()
    await sample_at_rate(1000, 0.002, [waiting, opening], samples)
    assert order == ["opening", "waiting"]
    assert len(samples.seconds) == 2


async def test_what_begins_early_is_none_the_quicker_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = asyncio.sleep

    async def too_early(_seconds: float) -> None:
        await turn(0)

    monkeypatch.setattr(asyncio, "sleep", too_early)
    took: list[float] = []

    async def operation() -> None:
        began = perf_counter()
        await turn(0)
        took.append(perf_counter() - began)

    samples = Samples()
    await sample_at_rate(10, 0.3, [operation], samples)
    assert all(seconds >= least for seconds, least in zip(samples.seconds, took, strict=True))
    assert samples.late_seconds >= 0


async def test_what_fails_is_counted_and_has_no_latency() -> None:
    async def refused() -> None:
        raise Overloaded("not now")

    async def answered() -> None:
        return

    samples = Samples()
    await sample_at_rate(1000, 0.01, [refused, answered], samples)
    assert (len(samples.seconds), samples.failed) == (5, 5)
    assert samples.elapsed == pytest.approx(0.01)


async def test_an_operation_held_up_by_a_stalled_loop_counts_from_when_it_should_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("loadtest.open_loop.perf_counter", lambda: now)

    async def stalls() -> None:
        nonlocal now
        now += 1.0

    samples = Samples()
    now_of_lead = 0.1  # the first operation is intended this much after the beginning
    monkeypatch.setattr("loadtest.open_loop._LEAD_SECONDS", -now_of_lead)
    await sample_at_rate(10, 0.2, [stalls], samples)
    first, second = sorted(samples.seconds)
    assert (first, second) == pytest.approx((1.1, 2.0))


def test_latencies_are_in_milliseconds_and_at_their_ranks() -> None:
    samples = Samples([number / 1000 for number in range(1, 101)], elapsed=2.0)
    found = samples.latencies()
    assert (found.avg, found.p50, found.p99, found.max) == (50.5, 51.0, 100.0, 100.0)
    assert (found.count, found.per_second) == (100, 50.0)
    assert Samples().latencies().count == 0
