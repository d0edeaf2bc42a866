"""Hit rates of a policy over drawn traces."""

from loadtest.published.graph_plan import GraphPlan
from loadtest.published.workload import tao_atc13
from loadtest.research.locality import CACHE_SHARES, LocalityOptions, entry_sizes, hit_rates, trace
from loadtest.research.policies import Priced, hit_rate

SMALL = LocalityOptions(nodes=300, requests=4_000)
PLAN = GraphPlan(tao_atc13(), SMALL.nodes, SMALL.seed)


def rates(skew: float | None, again: float) -> list[float]:
    found = hit_rates(trace(SMALL, skew, again), entry_sizes(PLAN), PLAN.payload_bytes, skew, again)
    return [each.hit_rate for each in found]


def test_more_cache_more_skew_and_more_repetition_hit_more() -> None:
    plain = rates(0.6, 0.0)
    assert plain == sorted(plain)
    assert all(skewed > each for skewed, each in zip(rates(1.2, 0.0), plain, strict=True))
    assert all(repeated > each for repeated, each in zip(rates(0.6, 0.8), plain, strict=True))


def test_the_skew_that_was_measured_hits_more_than_that_of_the_database_below() -> None:
    assert all(measured > zipf for measured, zipf in zip(rates(None, 0.0), rates(0.8, 0.0), strict=True))


def test_what_is_asked_for_the_first_time_is_no_hit() -> None:
    for each in hit_rates(trace(SMALL, 0.6, 0.0), entry_sizes(PLAN), PLAN.payload_bytes, 0.6, 0.0):
        assert each.hit_rate + each.first_time_share <= 1


def test_a_share_of_the_data_is_one_of_its_payload_bytes() -> None:
    keys, sizes = trace(SMALL, None, 0.6), entry_sizes(PLAN)
    assert sum(sizes) > 1.1 * PLAN.payload_bytes
    found = hit_rates(keys, sizes, PLAN.payload_bytes, None, 0.6)
    budgets = [int(PLAN.payload_bytes * share) for share in CACHE_SHARES]
    assert [each.hit_rate for each in found] == [
        hit_rate(Priced(budget), keys, sizes, len(keys) // 2)[0] for budget in budgets
    ]
