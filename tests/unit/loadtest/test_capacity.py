"""The model of a deployment follows its measurements and its assumptions, and nothing else."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadtest.capacity.costs import cost_of
from loadtest.capacity.jobs import CapacityJob, CapacityTurn, CapacityTurnResult, LoadedServers
from loadtest.capacity.model import Cost, Costs, DeploymentAssumptions, deployment, fit, fitted_parts
from loadtest.capacity.scenario import CapacityOptions
from loadtest.published.contestant import write_ids
from tao.model.errors import OperatorError


def point(hit_rate: float) -> Cost:
    """Return the cost of a follower whose hits cost 10 and misses 50, and a leader with the same hit rate whose hits
    cost 20 and misses 60."""
    missed = 1 - hit_rate
    return Cost(
        batch=1,
        hit_rate=hit_rate,
        leader_hit_rate=hit_rate,
        throughput_qps=1.0,
        p50_ms=1.0,
        p99_ms=1.0,
        follower_us=10 * hit_rate + 50 * missed,
        leader_us=20 * missed * (1 - missed) + 60 * missed * missed,
        database_us=100 * missed * missed,
        client_us=1.0,
        leader_hits_per_query=missed * (1 - missed),
        leader_misses_per_query=missed * missed,
        bytes_per_query=1000 * hit_rate + 3000 * missed,
        leader_bytes_per_query=2000 * missed + 700 * missed * missed,
        follower_limit_qps=1.0,
    )


def test_costs_are_found_again_in_what_they_made() -> None:
    costs = fit([point(rate) for rate in (0.5, 0.8, 0.95, 1.0)])
    assert (costs.hit_us, costs.miss_us) == pytest.approx((10, 50))
    assert (costs.leader_hit_us, costs.leader_miss_us, costs.database_us) == pytest.approx((20, 60, 100))
    assert (costs.hit_bytes, costs.miss_bytes, costs.database_bytes) == pytest.approx((1000, 3000, 700))


def test_a_leaders_miss_is_never_cheaper_than_its_hit() -> None:
    # Few hits, and work that has nothing to do with either.
    few = [
        replace(
            point(rate),
            leader_hits_per_query=0.002,
            leader_misses_per_query=1 - rate,
            leader_us=60 * (1 - rate) + 4,
        )
        for rate in (0.5, 0.7, 0.9)
    ]
    costs = fit(few)
    assert 0 < costs.leader_hit_us <= costs.leader_miss_us < 80


def test_what_always_went_together_costs_the_same_and_nothing_costs_less_than_nothing() -> None:
    assert fitted_parts([(1.0, 2.0, 30.0), (2.0, 4.0, 60.0)]) == pytest.approx((10, 10))
    assert fitted_parts([(1.0, 0.0, -5.0), (0.0, 1.0, 10.0), (1.0, 1.0, 5.0)]) == pytest.approx((0, 7.5))
    assert fitted_parts([(0.0, 0.0, 0.0)]) == (0, 0)


def test_one_hit_rate_fits_no_line() -> None:
    with pytest.raises(ValueError, match="two hit rates"):
        fit([point(0.9), point(0.9)])


COSTS = Costs(
    hit_us=10,
    miss_us=50,
    leader_hit_us=30,
    leader_miss_us=50,
    database_us=100,
    hit_bytes=100,
    miss_bytes=300,
    database_bytes=400,
)
ASSUMED = DeploymentAssumptions(
    reads_per_second=1e6, hit_rate=0.9, leader_hit_rate=0.5, write_share=0.0, cores=10, utilisation=0.5, network_gbit=10
)


def test_a_deployment_adds_up() -> None:
    found = deployment(COSTS, ASSUMED)
    assert found.follower.cores == pytest.approx(0.9 * 10 + 0.1 * 50)
    assert found.follower.servers == found.follower.for_cpu == 3  # 14 cores, 5 of a server used
    assert found.leader.cores == pytest.approx(0.05 * 30 + 0.05 * 50)
    assert found.database.cores == pytest.approx(5.0)
    assert found.follower.network_gbit == pytest.approx((0.9 * 100 + 0.1 * 300) * 8 * 1e6 / 1e9)
    assert found.leader.network_gbit == pytest.approx((0.1 * 200 + 0.05 * 400) * 8 * 1e6 / 1e9)
    assert found.database.network_gbit == pytest.approx(0.05 * 400 * 8 * 1e6 / 1e9)


def test_the_network_asks_for_servers_where_the_cores_do_not() -> None:
    thin = deployment(COSTS, DeploymentAssumptions(reads_per_second=1e6, network_gbit=0.1, utilisation=0.5))
    assert thin.follower.servers == thin.follower.for_network > thin.follower.for_cpu


def test_a_better_hit_rate_never_takes_more_servers() -> None:
    rates = (0.5, 0.9, 0.964, 1.0)
    found = [deployment(COSTS, DeploymentAssumptions(hit_rate=rate)) for rate in rates]
    for role in ("follower", "leader", "database"):
        values = [getattr(each, role).servers for each in found]
        assert values == sorted(values, reverse=True)


def result(queries: int) -> CapacityTurnResult:
    return CapacityTurnResult(
        queries=queries,
        elapsed=2.0,
        p50_ms=1.0,
        p99_ms=2.0,
        client_cpu=1.0,
        servers={
            "follower_cpu": 2.0,
            "leader_cpu": 0.4,
            "database_cpu": 0.2,
            "follower_hits": 1800,
            "leader_hits": 50,
            "follower_misses": 200,
            "leader_misses": 150,
            "follower_io_bytes": 2_000_000,
            "leader_io_bytes": 1_000_000,
        },
    )


def test_servers_work_is_shared_by_the_queries_of_all_load_processes() -> None:
    # Each of the two saw all 2,000 queries' worth of the servers' work and asked half of them.
    cost = cost_of(1, 0.9, [result(1000), result(1000)])
    assert cost.throughput_qps == 1000.0
    assert cost.follower_us == pytest.approx(1000.0)
    assert cost.client_us == pytest.approx(1000.0)
    assert cost.hit_rate == 0.9
    assert cost.leader_hit_rate == 0.25
    assert cost.bytes_per_query == 1000.0
    assert (cost.leader_hits_per_query, cost.leader_misses_per_query) == pytest.approx((0.025, 0.075))
    assert cost.leader_bytes_per_query == 500.0


def test_a_capacity_out_of_bounds_is_reported() -> None:
    with pytest.raises(OperatorError, match="--followers"):
        CapacityOptions(followers=(0,))


class CountingGraph:
    """Counts the objects that are asked for, by the number asked for at once."""

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    async def obj_get(self, id1: int) -> None:
        await self.obj_get_many([id1])

    async def obj_get_many(self, ids: Sequence[int]) -> None:
        await asyncio.sleep(0)
        self.asked[len(ids)] += len(ids)


async def test_a_turn_is_warmed_and_its_counts_are_without_the_warming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = CountingGraph()

    @asynccontextmanager
    async def connect(*_: object, **__: object) -> AsyncIterator[CountingGraph]:
        yield graph

    async def counts(*_: object) -> Mapping[str, float]:
        return {"follower_hits": graph.asked.total()}

    monkeypatch.setattr("loadtest.capacity.jobs.connect", connect)
    monkeypatch.setattr("loadtest.capacity.jobs.server_counts", counts)
    write_ids(tmp_path / "ids", range(5_000))
    job = CapacityJob(
        servers=LoadedServers(topology_file="", tier="", admins={}, pids={}),
        ids_file=str(tmp_path / "ids"),
        number=1,
        residents=1_000,
        warm_keys=1_500,
        awaiters=4,
        turns=(CapacityTurn(resident=None, batch=1), CapacityTurn(resident=0.5, batch=20)),
        seconds=0.01,
    )
    steps = list[str]()
    single, batches = await job.work(lambda step, done: steps.append(step))
    assert steps[::2] == ["warming", "warming"]
    assert graph.asked[500] == 1_500 + 1_000
    assert single.servers["follower_hits"] == single.queries == graph.asked[1] > 0
    assert batches.servers["follower_hits"] == batches.queries == graph.asked[20] > 0
    assert batches.queries % 20 == 0
