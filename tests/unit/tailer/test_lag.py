"""How far behind a region is."""

from __future__ import annotations

from tao.planning.row_events import Heartbeat
from tao.tailer.lag import Lag


def test_lag_is_the_age_of_the_newest_proof() -> None:
    now = 10_000
    lag = Lag(lambda: now)
    assert lag.seconds() == float("inf")
    lag.committed(7_000)
    assert lag.seconds() == 3.0
    assert lag.heard([Heartbeat("a", 9_000), Heartbeat("b", 9_500)])
    assert (lag.seconds(), lag.heartbeat_delay_seconds) == (0.5, 0.5)
    now = 12_000
    assert not lag.heard([Heartbeat("a", 9_400)])
    assert not lag.heard([])
    assert (lag.seconds(), lag.heartbeat_delay_seconds) == (2.5, 0.5)


def test_a_masters_clock_a_little_ahead_of_ours_is_no_negative_lag() -> None:
    lag = Lag(lambda: 1_000)
    assert lag.heard([Heartbeat("a", 1_900)])
    assert (lag.seconds(), lag.heartbeat_delay_seconds) == (0, 0)


def test_what_is_dated_far_ahead_proves_nothing_and_hides_nothing() -> None:
    now = 10_000
    lag = Lag(lambda: now)
    lag.committed(3_600_000)
    assert not lag.heard([Heartbeat("an hour ahead", 3_610_000)])
    assert lag.seconds() == float("inf")
    assert lag.heard([Heartbeat("an hour ahead", 3_611_000), Heartbeat("right", 9_000)])
    assert (lag.heartbeat_unix_ms, lag.from_the_future) == (9_000, 2)
    now = 40_000
    assert lag.seconds() == 31.0
