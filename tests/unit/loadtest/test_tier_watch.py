"""What a run counts of the tier that it asks, and where it asks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from loadtest.geo import running_regions
from loadtest.published.conformity import FirstReads
from loadtest.published.driver import RequestLoad, put_load
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.jobs import MEASURING
from loadtest.published.requests import RequestStream, WorkloadRequest
from loadtest.published.run import (
    RunOptions,
    generated_listing,
    latency_listing,
    measured_of,
    misses_by_cause,
    quantities,
    seconds_of,
)
from loadtest.published.tier_watch import TierWatch
from loadtest.published.workload import READS, Kind, tao_atc13
from loadtest.rounds import since
from loadtest.scenario import Silent
from loadtest.target import running_target
from tao.model.errors import OperatorError, Overloaded
from tao.serving.server import arena_budgets

EXAMPLE = Path(__file__).resolve().parents[3] / "config" / "topology.example.json"
COUNTS = {
    "follower_hits": 900,
    "follower_misses": 100,
    "follower_joined": 20,
    "follower_incomplete": 10,
    "follower_came_back": 40,
    "follower_too_large": 3,
    "follower_not_kept": 5,
    "follower_dropped": 4,
    "follower_cpu": 1.0,
    "at": 1.0,
}


def test_seconds_are_differences() -> None:
    later = {**COUNTS, "follower_hits": 990, "follower_misses": 110, "follower_joined": 25, "at": 2.0}
    first, silent = seconds_of([COUNTS, later, {**later, "at": 3.0}])
    assert (first.at, first.hits, first.misses, first.joined) == (1.0, 90, 10, 5)
    assert (silent.at, silent.hits, silent.misses, silent.joined) == (2.0, 0, 0, 0)


def test_misses_have_one_cause_each_and_add_up() -> None:
    found = misses_by_cause(COUNTS, first_time=15)
    assert (found.joined, found.first_time, found.incomplete, found.came_back) == (0.02, 0.015, 0.01, 0.04)
    assert (found.too_large, found.not_kept, found.dropped) == (0.003, 0.002, 0.004)
    assert found.left_long_ago == pytest.approx(0.006)
    crowded = misses_by_cause({**COUNTS, "follower_joined": 90, "follower_came_back": 500}, first_time=15)
    assert (crowded.joined, crowded.first_time, crowded.incomplete, crowded.came_back) == (0.09, 0.01, 0, 0)
    assert crowded.left_long_ago == 0


def test_a_count_is_asked_for_the_first_time_before_its_list_and_never_after_it() -> None:
    asked = FirstReads()

    def new(kind: Kind, node: int, *others: int) -> int:
        before = asked.first_time
        asked.note(WorkloadRequest(kind, node, others))
        return asked.first_time - before

    assert [new(Kind.ASSOC_COUNT, 1), new(Kind.ASSOC_RANGE, 1), new(Kind.ASSOC_GET, 1)] == [1, 1, 0]
    assert [new(Kind.ASSOC_TIME_RANGE, 2), new(Kind.ASSOC_COUNT, 2)] == [1, 0]
    assert [new(Kind.OBJ_GET, 1), new(Kind.READ_MANY, 0, 1, 5, 6), new(Kind.OBJ_GET, 6)] == [1, 2, 0]
    assert new(Kind.OBJ_UPDATE, 9) == 0


def test_where_counts_are_kept_apart_from_lists_each_is_asked_for_the_first_time() -> None:
    asked = FirstReads(counts_apart=True)
    for kind in (Kind.ASSOC_RANGE, Kind.ASSOC_COUNT, Kind.ASSOC_COUNT):
        asked.note(WorkloadRequest(kind, 1))
    assert asked.first_time == 2


def test_a_running_cluster_is_asked_by_its_topology(tmp_path: Path) -> None:
    target = running_target(EXAMPLE)
    assert target.tiers[0] == target.tier
    assert set(target.followers) <= set(target.all_followers)
    assert target.pids == {}
    assert (target.region, target.cluster, target.database, target.versions) == ("east", None, None, {})
    with pytest.raises(OperatorError, match="no tier 'nowhere'"):
        running_target(EXAMPLE, "nowhere")
    with pytest.raises(OperatorError, match="cannot be read"):
        running_target(tmp_path / "nothing.json")
    document = json.loads(EXAMPLE.read_text())
    for server in document["regions"][0]["leaders"]["servers"]:
        server.pop("admin", None)
    (tmp_path / "topology.json").write_text(json.dumps(document))
    with pytest.raises(OperatorError, match="no admin port"):
        running_target(tmp_path / "topology.json")


def test_geo_is_measured_between_regions_of_which_one_has_all_masters(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"all masters in one region, .* masters in east, west"):
        running_regions(EXAMPLE)
    document = json.loads(EXAMPLE.read_text())
    for database in document["databases"]:
        database["master_region"] = "west"
    (tmp_path / "topology.json").write_text(json.dumps(document))
    found = running_regions(tmp_path / "topology.json")
    assert (found.master, found.remote, found.line) == ("west", "east", None)


def test_the_topology_of_a_running_cluster_survives_toy_size() -> None:
    assert RunOptions(topology=EXAMPLE).at_toy_size().topology == EXAMPLE


def test_a_cache_may_have_parts_of_a_mebibyte() -> None:
    assert arena_budgets(2.5, {"pages": 1}) == {"default": 2_621_440, "pages": 1 << 20}


class Answering:
    """A contestant that answers everything at once, and one request in three with an error: less than its awaiters
    ask in their first turn, however slow the machine is."""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, request: WorkloadRequest) -> int:
        await asyncio.sleep(0)
        self.asked += 1
        if self.asked % 3 == 0:
            raise Overloaded("too much")
        return 1

    async def traced(self, request: WorkloadRequest) -> tuple[int, bool]:
        assert request.kind in READS
        return await self.ask(request), self.asked % 2 == 0


@pytest.mark.parametrize("rate", [0.0, 500.0])
async def test_a_load_is_counted_with_its_failures_apart_from_those_of_its_warming(rate: float) -> None:
    workload = tao_atc13()
    plan = GraphPlan(workload, 500, 1)
    stream, probed = (RequestStream(workload, plan, 1, number) for number in (0, 1))
    contestant, measuring = Answering(), list[bool]()
    load = RequestLoad(awaiters=4, rate=rate, warm_seconds=0.1, seconds=0.3)
    probers = [Answering() for _ in range(3)]
    result = await put_load(load, stream, contestant, probers, probed, lambda: measuring.append(True))
    assert measuring == [True]
    assert set(result.failed_warming) == {Overloaded.reason}
    assert result.recording.failed[Overloaded.reason] > 0
    assert result.tally.answered > 0
    assert result.first_time > 0
    assert all(prober.asked > 0 for prober in probers)
    samples = [dict.fromkeys(COUNTS, 0.0), COUNTS]
    measured = measured_of({"workload": workload.name}, plan, 1000, [result, result], samples)
    assert measured.failed_warming == {reason: 2 * count for reason, count in result.failed_warming.items()}
    assert measured.warm_requests_per_node == round(2 * result.warmed / 500, 2) > 0
    assert measured.server_cpu_us_per_query is not None
    assert measured.database_cpu_us_per_query is None
    assert measured.hit_rate_with_joined == pytest.approx(0.92)
    assert any(name.startswith("miss ") for name in result.recording.latencies)
    assert {each.name for each in quantities(measured)} >= {"throughput", "missed: joined", "follower CPU"}
    assert generated_listing(measured.generated).rows
    assert latency_listing(measured).rows
    assert msgspec.json.decode(msgspec.json.encode(measured))["by_second"][0]["hits"] == 900


async def test_a_watch_counts_from_when_measuring_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def stats(admin: str) -> dict[str, object]:
        nonlocal asked
        asked += 1
        fills = {"joined": asked, "incomplete": 0, "too_large": 0, "not_kept": 0, "dropped": asked}
        return {"hits": 10 * asked, "misses": asked, "fills": fills, "arenas": [{"returns": [0, asked]}]}

    monkeypatch.setattr("loadtest.published.tier_watch.server_stats", stats)
    watch = TierWatch(running_target(EXAMPLE))
    with pytest.raises(OperatorError, match="measuring"):
        await watch.used()
    heard = watch.hear(Silent())
    heard.step("warming")
    assert asked == 0
    heard.step(MEASURING)
    heard.step(MEASURING)
    while asked < len(watch_followers()):  # noqa: ASYNC110 - the watch notifies nobody when it has looked
        await asyncio.sleep(0)
    used = await watch.used()
    whole = since(used[0], used[-1])
    assert whole["follower_hits"] == sum(second.hits for second in seconds_of(used)) > 0
    assert "follower_cpu" not in whole


def watch_followers() -> dict[str, str]:
    return running_target(EXAMPLE).followers
