"""Hit rates of a policy over drawn traces."""

from loadtest.locality import LocalitySettings, entry_sizes, hit_rates, trace

SMALL = LocalitySettings(nodes=300, requests=4_000)


def rates(skew: float | None, again: float) -> list[float]:
    sizes = entry_sizes(SMALL.nodes, SMALL.seed)
    return [each.hit_rate for each in hit_rates(trace(SMALL, skew, again), sizes, skew, again)]


def test_more_cache_more_skew_and_more_repetition_hit_more() -> None:
    plain = rates(0.6, 0.0)
    assert plain == sorted(plain)
    assert all(skewed > each for skewed, each in zip(rates(1.2, 0.0), plain, strict=True))
    assert all(repeated > each for repeated, each in zip(rates(0.6, 0.8), plain, strict=True))


def test_the_skew_that_was_measured_hits_more_than_that_of_the_database_below() -> None:
    assert all(measured > zipf for measured, zipf in zip(rates(None, 0.0), rates(0.8, 0.0), strict=True))


def test_what_is_asked_for_the_first_time_is_no_hit() -> None:
    sizes = entry_sizes(SMALL.nodes, SMALL.seed)
    for each in hit_rates(trace(SMALL, 0.6, 0.0), sizes, 0.6, 0.0):
        assert each.hit_rate + each.first_time_share <= 1
