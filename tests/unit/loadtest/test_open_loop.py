"""Operations begin at their time, whatever the outcome of those before; latencies are of those that were answered."""

import asyncio
from time import perf_counter

import pytest

from loadtest.latencies import Latencies, summary_of
from loadtest.open_loop import LATE, sample_at_rate
from tao.model.errors import Overloaded


def count(latencies: Latencies, name: str) -> int:
    found = latencies.summary(name)
    return found.count if found else 0


async def test_an_operation_that_is_not_answered_holds_up_no_other() -> None:
    later = asyncio.Event()
    order: list[str] = []

    async def waiting() -> None:
        await later.wait()
        order.append("waiting")

    async def opening() -> None:
        order.append("opening")
        later.set()

    latencies = Latencies()
    await sample_at_rate(1000, 0.002, [waiting, opening], latencies, "it")
    assert order == ["opening", "waiting"]
    assert count(latencies, "it") == 2


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

    recorded: list[float] = []
    latencies = Latencies()
    monkeypatch.setattr(latencies, "answered", lambda name, seconds, at: recorded.append(seconds))
    await sample_at_rate(10, 0.3, [operation], latencies, "it")
    assert all(seconds >= least for seconds, least in zip(recorded, took, strict=True))
    assert count(latencies, LATE + "it") == 3


async def test_what_fails_is_counted_and_has_no_latency() -> None:
    async def refused() -> None:
        raise Overloaded("not now")

    async def answered() -> None:
        return

    latencies = Latencies()
    await sample_at_rate(1000, 0.01, [refused, answered], latencies, "it")
    assert (count(latencies, "it"), latencies.failed) == (5, {"it": 5})


async def test_an_operation_held_up_by_a_stalled_loop_counts_from_when_it_should_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("loadtest.open_loop.perf_counter", lambda: now)

    async def stalls() -> None:
        nonlocal now
        now += 1.0

    latencies = Latencies()
    now_of_lead = 0.1  # the first operation is intended this much after the beginning
    monkeypatch.setattr("loadtest.open_loop._LEAD_SECONDS", -now_of_lead)
    await sample_at_rate(10, 0.2, [stalls], latencies, "it")
    found = latencies.summary("it")
    assert found is not None
    assert (found.count, found.avg, found.max) == pytest.approx((2, 1550, 2000), rel=1e-3)


def test_latencies_are_in_milliseconds_and_at_their_ranks() -> None:
    found = summary_of(number / 1000 for number in range(1, 101))
    assert found is not None
    assert (found.avg, found.p50, found.p99, found.max) == pytest.approx((50.5, 50, 99, 100), rel=1e-3)
    assert found.count == 100
    assert summary_of([]) is None
