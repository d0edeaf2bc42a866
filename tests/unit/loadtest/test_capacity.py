"""The model of a deployment follows its measurements and its assumptions, and nothing else."""

import pytest

from loadtest.capacity.capacity_client import Turn, TurnResult
from loadtest.capacity.model import Assumptions, Costs, Point, deployment, fit, fitted_line
from loadtest.capacity.scenario import CapacitySettings, cost_of
from tao.model.errors import OperatorError


def point(hit_rate: float) -> Point:
    """Of a follower whose hits cost 10 and misses 50, a leader that misses half of what it is asked."""
    missed = 1 - hit_rate
    return Point(
        hit_rate=hit_rate,
        follower_us=10 * hit_rate + 50 * missed,
        leader_us=40 * missed,
        database_us=100 * missed / 2,
        leader_misses=missed / 2,
        bytes_per_query=1000 * hit_rate + 3000 * missed,
    )


def test_costs_are_found_again_in_what_they_made() -> None:
    costs = fit([point(rate) for rate in (0.5, 0.8, 0.95, 1.0)])
    assert (costs.hit_us, costs.miss_us) == pytest.approx((10, 50))
    assert (costs.leader_us, costs.database_us) == pytest.approx((40, 100))
    assert (costs.hit_bytes, costs.miss_bytes) == pytest.approx((1000, 3000))


def test_one_hit_rate_fits_no_line() -> None:
    with pytest.raises(ValueError, match="two hit rates"):
        fitted_line([(0.9, 1.0), (0.9, 2.0)])


COSTS = Costs(hit_us=10, miss_us=50, leader_us=40, database_us=100, hit_bytes=100, miss_bytes=300)
ASSUMED = Assumptions(
    reads_per_second=1e6, hit_rate=0.9, leader_hit_rate=0.5, write_share=0.0, cores=10, utilisation=0.5, network_gbit=10
)


def test_a_deployment_adds_up() -> None:
    found = deployment(COSTS, ASSUMED)
    assert found.follower_cores == pytest.approx(0.9 * 10 + 0.1 * 50)
    assert found.follower_servers == 3  # 14 cores, 5 of a server used
    assert found.leader_cores == pytest.approx(4.0)
    assert found.database_cores == pytest.approx(5.0)
    assert found.follower_network_gbit == pytest.approx((0.9 * 100 + 0.1 * 300) * 8 * 1e6 / 1e9)


def test_the_network_asks_for_servers_where_the_cores_do_not() -> None:
    thin = deployment(COSTS, Assumptions(reads_per_second=1e6, network_gbit=0.1, utilisation=0.5))
    assert thin.follower_servers == thin.follower_servers_for_network > 3


def test_a_better_hit_rate_never_takes_more_servers() -> None:
    rates = (0.5, 0.9, 0.964, 1.0)
    found = [deployment(COSTS, Assumptions(hit_rate=rate)) for rate in rates]
    for name in ("follower_servers", "leader_servers", "database_servers"):
        values = [getattr(each, name) for each in found]
        assert values == sorted(values, reverse=True)


def result(queries: int) -> TurnResult:
    return TurnResult(
        queries=queries,
        elapsed=2.0,
        p50_ms=1.0,
        p99_ms=2.0,
        client_cpu=1.0,
        cpu={"follower": 2.0, "leader": 0.4, "database": 0.2},
        hits={"follower": 1800, "leader": 50},
        misses={"follower": 200, "leader": 150},
        socket_bytes=2_000_000,
    )


def test_servers_work_is_shared_by_the_queries_of_all_load_processes() -> None:
    # Each of the two saw all 2,000 queries' worth of the servers' work and asked half of them.
    cost = cost_of(Turn(resident=0.9, batch=1, seconds=2.0), [result(1000), result(1000)])
    assert cost.throughput_qps == 1000.0
    assert cost.follower_us == pytest.approx(1000.0)
    assert cost.client_us == pytest.approx(1000.0)
    assert cost.hit_rate == 0.9
    assert cost.leader_hit_rate == 0.25
    assert cost.bytes_per_query == 1000.0
    assert cost.leader_misses_per_query == pytest.approx(0.075)


def test_a_capacity_out_of_bounds_is_told() -> None:
    with pytest.raises(OperatorError, match="--followers"):
        CapacitySettings(followers=(0,))
