"""Contestants take turns; figures are medians of rounds; aims are judged, never asserted."""

import gc
import os
from collections.abc import Iterator

import pytest

from loadtest.drivers import Call, WrongAnswer, awaiters, closed
from loadtest.results import Figure, Goal, Measure
from loadtest.rounds import (
    Comparison,
    Drive,
    Pace,
    Source,
    Trial,
    TurnSamples,
    compare_all,
    cpu_seconds,
    percentile,
    settle_collector,
    take_turns,
)
from tao.runtime.process import ProcessSettings


def recording(name: str, turns: list[str], latency: float) -> Drive:
    async def drive(until: float, samples: TurnSamples) -> None:
        turns.append(name)
        samples.by_source[Source.UNKNOWN].extend([latency] * 10)

    return drive


ME = {"me": os.getpid()}


async def compare(comparison: Comparison, rounds: int = 1, seconds: float = 0.01) -> list[Figure]:
    return await compare_all([comparison], Pace(rounds, seconds), lambda _text, _done: None)


async def test_contestants_take_turns_after_one_warming_turn_each_and_every_round_begins_with_another() -> None:
    turns: list[str] = []
    progress: list[float] = []
    trials = tuple(Trial(name, recording(name, turns, 0.001), ME) for name in "ab")
    figures = await compare_all(
        [Comparison("shape", trials, "b")], Pace(2, 0.01), lambda _, done: progress.append(done)
    )
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert progress == [number / 6 for number in range(6)]
    assert [(figure.contestant, figure.operations) for figure in figures] == [("a", 20), ("b", 20)]


async def test_a_figure_has_its_ratio_to_the_yardstick_and_a_verdict_on_each_aim() -> None:
    trials = (
        Trial("slow", recording("slow", [], 0.002), ME, queries_per_operation=5),
        Trial("quick", recording("quick", [], 0.001), ME),
    )
    aims = {
        "slow": (
            Goal(measure=Measure.P50, bound=1.2, against="quick"),
            Goal(measure=Measure.P50, bound=3_000),
            Goal(measure=Measure.RATE, bound=1e12),
        )
    }
    slow, quick = await compare(Comparison("shape", trials, "quick", aims))
    assert slow.p50_ratio == pytest.approx(2.0)
    assert slow.p50_us == pytest.approx(2000.0)
    assert slow.rate_ratio == pytest.approx(slow.per_second / quick.per_second)
    assert quick.yardstick is None
    assert quick.rate_ratio is None
    assert [verdict.met for verdict in slow.verdicts] == [False, True, False]
    assert slow.verdicts[0].aim.describe() == "≤ 1.2 × quick"


async def test_a_round_without_a_single_answer_says_what_to_do() -> None:
    async def silent(until: float, samples: TurnSamples) -> None:
        return

    with pytest.raises(ValueError, match="--seconds"):
        await compare(Comparison("shape", (Trial("a", silent, ME),)))


async def test_a_round_that_was_slept_through_goes_on_until_something_was_answered() -> None:
    turns: list[float] = []

    async def drive(until: float, samples: TurnSamples) -> None:
        turns.append(until)
        # Every round, and the warming, is found to be over when it begins.
        samples.by_source[Source.UNKNOWN].extend([0.001] * (len(turns) % 3 == 0))

    (figure,) = await compare(Comparison("shape", (Trial("a", drive, ME),)), 2, 1000.0)
    assert (figure.operations, len(turns)) == (2, 9)
    assert sorted(turns) != turns, "what comes after a round is short"


async def test_an_answer_of_another_size_ends_the_measurement() -> None:
    async def echo(text: str) -> str:
        return text

    with pytest.raises(ExceptionGroup) as caught:
        await awaiters(2, [Call(echo, ("abc",), len, 4)])(float("inf"), TurnSamples())
    assert caught.group_contains(WrongAnswer, match="answered 3, not 4")


async def test_awaiters_share_a_stream_until_it_ends_and_failures_are_counted() -> None:
    asked: list[int] = []

    async def ask(number: int) -> Source:
        asked.append(number)
        if number == 2:
            raise TimeoutError
        return Source.HIT if number % 2 else Source.MISS

    samples = TurnSamples()
    await closed(ask, [iter(range(6))] * 2, (TimeoutError,))(float("inf"), samples)
    assert sorted(asked) == list(range(6))
    assert [len(each) for each in samples.by_source] == [3, 0, 2, 0]
    assert (samples.answered, samples.failed) == (5, {"TimeoutError": 1})


async def test_a_round_has_what_its_counters_grew_by_and_what_was_prepared_is_not_measured() -> None:
    events: list[str] = []

    async def counters() -> dict[str, float]:
        events.append("counters")
        return {"asked": len(events) ** 2}

    async def prepare(seconds: float) -> None:
        events.append(f"prepare {seconds}")

    trial = Trial("a", recording("drive", events, 0.001), ME, counters=counters, prepare=prepare)
    turns = await take_turns(Comparison("shape", (trial,), stretch=2.0), Pace(1, 4.0), lambda _: None)
    assert events == ["prepare 2.0", "counters", "drive", "counters", "prepare 8.0", "counters", "drive", "counters"]
    assert turns["a"][0].counts == {"asked": 64 - 36}
    assert turns["a"][0].server_cpu.keys() == {"me"}


@pytest.mark.parametrize(("part", "expected"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.99, 4), (1.0, 4)])
def test_a_percentile_is_one_of_the_values(part: float, expected: int) -> None:
    assert percentile([4, 2, 1, 3], part) == expected


def test_cpu_time_of_a_process_grows_and_that_of_a_missing_one_is_an_error() -> None:
    assert cpu_seconds(os.getpid()) > 0
    with pytest.raises(ProcessLookupError):
        cpu_seconds(2**22 + 1)


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_what_is_there_is_not_looked_at_again_and_what_comes_as_rarely_as_in_a_server() -> None:
    kept: list[object] = []
    settle_collector()
    servers = ProcessSettings()
    assert gc.get_threshold() == (servers.gc_allocations, servers.gc_generation_ratio, servers.gc_generation_ratio)
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())
