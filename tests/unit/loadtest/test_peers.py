"""What `peers` is judged by: turns, answers in full, and aims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import pytest

from loadtest.drivers import WrongAnswer, at_rate
from loadtest.peer_servers import VALKEY_SERVER
from loadtest.peers.arena import CONTESTANTS, Prepared, check
from loadtest.peers.caches import LOOKASIDES, MEMCACHED, REDIS, VALKEY
from loadtest.peers.contestants import MYSQL, POSTGRES, TAO, Answer
from loadtest.peers.figures import (
    CacheCounts,
    PeerFigure,
    counts_of_tao,
    goals_of,
    listings,
    nothing_wrong,
    of_contestants,
    peer_figures,
    peers_win,
)
from loadtest.peers.jobs import FAILURES
from loadtest.peers.scenario import PeersOptions, without_absent
from loadtest.peers.staleness import StaleReads
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import WorkloadRequest
from loadtest.published.workload import Kind, workload_named
from loadtest.rounds import Comparison, Counts, Drive, Pace, Source, Trial, TurnSamples, take_turns
from tao.model.errors import OperatorError


class OfThePlan:
    """Answers as the graph was planned, but for one edit."""

    def __init__(self, plan: GraphPlan, edit: Any = lambda answer: answer) -> None:
        self._plan = plan
        self._edit = edit
        self.touched = 0
        self.asked = 0

    async def ask(self, request: WorkloadRequest) -> Source:
        self.asked += 1
        self.touched += 7
        if request.limit == 13:
            raise TimeoutError
        return Source.MISS if self.asked % 4 == 0 else Source.HIT

    def sampled(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def put_node(self, object_id: int, payload: bytes) -> None:
        raise NotImplementedError

    async def put_link(self, id1: int, id2: int, at: int) -> None:
        raise NotImplementedError

    async def answer(self, request: WorkloadRequest) -> Answer:
        plan, node = self._plan, request.node
        if request.kind is Kind.OBJ_GET:
            answer: Answer = b"x" * plan.object_size(node)
        elif request.kind is Kind.ASSOC_COUNT:
            answer = plan.degree(node)
        else:
            edges = [(1000 + edge.other, edge.time, b"x" * edge.size) for edge in plan.list_of(node)]
            answer = edges[: request.limit]
        found: Answer = self._edit(answer)
        return found


PLAN = GraphPlan(workload_named("linkbench"), 100, 1)
IDS = range(1000, 1100)
LONG = max(range(100), key=PLAN.degree)
REQUESTS = [
    WorkloadRequest(Kind.OBJ_GET, 5),
    WorkloadRequest(Kind.ASSOC_COUNT, LONG),
    WorkloadRequest(Kind.ASSOC_RANGE, LONG, limit=3),
]


async def test_answers_of_all_are_compared_in_full_and_what_was_written_is_left_out() -> None:
    peers = {name: OfThePlan(PLAN) for name in CONTESTANTS}
    assert await check(peers, PLAN, IDS, REQUESTS) == 3
    assert await check(peers, PLAN, IDS, REQUESTS, {LONG}) == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda answer: answer[:-1] if isinstance(answer, bytes) else answer,
        lambda answer: answer + 1 if isinstance(answer, int) else answer,
        lambda answer: [(id2, at + 1, data) for id2, at, data in answer] if isinstance(answer, list) else answer,
        lambda answer: [(2099 - id2, at, data) for id2, at, data in answer] if isinstance(answer, list) else answer,
        lambda answer: answer[::-1] if isinstance(answer, list) else answer,
        lambda answer: b"y" * len(answer) if isinstance(answer, bytes) else answer,
    ],
    ids=["size", "count", "time", "id", "order", "bytes"],
)
async def test_one_wrong_answer_ends_the_measurement(edit: Any) -> None:
    peers = {TAO: OfThePlan(PLAN), REDIS: OfThePlan(PLAN, edit)}
    with pytest.raises(WrongAnswer, match=REDIS):
        await check(peers, PLAN, IDS, REQUESTS)


async def figured(name: str, drive: Drive, counts: Counts | None = None, rounds: int = 3) -> PeerFigure:
    """The figure of turns whose counters grow by ``counts`` each."""
    turns = count()

    async def counters() -> Counts:
        number = next(turns)
        return {name: value * number for name, value in ({"touched": 0.0} | dict(counts or {})).items()}

    comparison = Comparison("shape", (Trial(name, drive, {}, counters=counters),))
    (found,) = peer_figures("many", comparison, await take_turns(comparison, Pace(rounds, 0.0), lambda _: None))
    return found


async def test_percentiles_are_the_medians_of_the_rounds() -> None:
    turns = iter([0.1, 0.001, 0.5, 0.003])

    async def drive(until: float, samples: TurnSamples) -> None:
        samples.by_source[Source.UNKNOWN] += [next(turns)] * 9

    figure = await figured(REDIS, drive)
    assert figure.operations == 27
    assert figure.rounds_p99_us == pytest.approx([1000, 500_000, 3000])
    assert (figure.p50_us, figure.p99_us) == pytest.approx((3000, 3000))
    assert figure.quantiles_ms["99"] == pytest.approx(500)


async def test_requests_are_drawn_before_a_turn_as_many_as_the_best_one_asked_and_noted_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loadtest.peers.arena._AT_A_TIME", 5)
    drawn, noted = list[int](), list[int]()

    def numbered() -> Iterator[WorkloadRequest]:
        for number in count():
            drawn.append(number)
            yield WorkloadRequest(Kind.OBJ_GET, number)

    requests = Prepared(numbered(), lambda request: noted.append(request.node))
    await requests.prepare(2.0)
    assert drawn == [], "nobody knows yet how many a turn needs"
    assert len(list(islice(requests, 7))) == 7
    await requests.prepare(4.0)
    assert noted == list(range(7))
    assert len(drawn) - 7 == int(7 / 2.0 * 4.0 * 1.5)
    assert [request.node for request in islice(requests, 3)] == [7, 8, 9]
    await requests.prepare(2.0)
    assert len(drawn) - 7 == 21, "a slower turn needs no more than were drawn for it"


def test_who_asks_for_more_than_was_drawn_is_given_the_next() -> None:
    noted = list[int]()
    requests = Prepared(
        (WorkloadRequest(Kind.OBJ_GET, number) for number in count()), lambda asked: noted.append(asked.node)
    )
    assert [request.node for request in islice(requests, 2_500)] == list(range(2_500))
    requests.settle()
    requests.settle()
    assert noted == list(range(2_500))
    assert next(requests).node == 2_500


def test_of_tao_too_who_joins_a_fetch_has_not_hit() -> None:
    grown = {"hits": 90.0, "misses": 20.0, "joined": 3.0, "leader_misses": 12.0}
    found = counts_of_tao(grown)
    assert found == CacheCounts(hits=95, joined=3, misses=12, in_follower=90)
    assert found.hit_rate == 95 / 110
    # More than the leader spared: those joined what went to the database.
    assert counts_of_tao({**grown, "joined": 50.0}) == CacheCounts(hits=90, joined=8, misses=12, in_follower=90)


async def test_a_turn_counts_hits_misses_failures_and_what_was_looked_at() -> None:
    async def drive(until: float, samples: TurnSamples) -> None:
        samples.by_source[Source.HIT] += [0.001] * 6
        samples.by_source[Source.MISS] += [0.009] * 2
        samples.failed["TimeoutError"] += 1

    figure = await figured(REDIS, drive, {"touched": 80.0, "first_reads": 1.0}, rounds=2)
    assert (figure.operations, figure.hits, figure.misses, figure.joined) == (16, 12, 4, 0)
    assert (figure.hit_rate, figure.joined_share) == (0.75, 0)
    assert (figure.first_read_share, figure.follower_hit_rate) == (0.5, None)
    assert figure.rounds_hit_rate == [0.75, 0.75]
    assert len(figure.rounds_per_second) == 2
    assert (figure.quantiles_ms["50"], figure.quantiles_ms["99.9"]) == pytest.approx((1, 9))
    assert figure.hit_ms is not None
    assert figure.miss_ms is not None
    assert (figure.hit_ms.count, figure.hit_ms.p99, figure.miss_ms.avg) == pytest.approx((12, 1.0, 9.0), rel=1e-3)
    assert (figure.p50_us, figure.p99_us) == pytest.approx((1000, 9000))
    assert figure.failed == {"TimeoutError": 2}
    assert figure.touched_bytes == 10
    assert figure.total_cpu_us == figure.server_cpu_us + figure.client_cpu_us


async def test_first_reads_are_unknown_where_another_process_asks_too() -> None:
    async def drive(until: float, samples: TurnSamples) -> None:
        samples.by_source[Source.MISS] += [0.001]

    assert (await figured(REDIS, drive)).first_read_share is None
    assert (await figured(MYSQL, drive, {"first_reads": 1.0})).first_read_share is None


async def test_at_a_constant_rate_a_request_that_fails_has_no_latency_and_is_counted() -> None:
    def requests() -> Iterator[WorkloadRequest]:
        while True:
            yield REQUESTS[0]
            yield WorkloadRequest(Kind.ASSOC_RANGE, LONG, limit=13)

    samples, peer = TurnSamples(), OfThePlan(PLAN)
    # Time enough for one request at least, whenever this begins.
    await at_rate(peer.ask, requests(), 1_000.0, FAILURES)(0.0, samples)
    failing = repeat(WorkloadRequest(Kind.ASSOC_RANGE, LONG, limit=13))
    await at_rate(peer.ask, failing, 1_000.0, FAILURES)(0.0, samples)
    assert samples.answered == 1
    assert samples.failed == {"TimeoutError": 1}


def figure(kind: str, name: str, per_second: float, p99_us: float, **more: Any) -> PeerFigure:
    return PeerFigure(
        shape=kind, kind=kind, contestant=name, queries_per_operation=1, operations=10, per_second=per_second,
        rounds_per_second=[per_second], rounds_hit_rate=[0.9], p50_us=100.0, p99_us=p99_us,
        rounds_p99_us=[p99_us], quantiles_ms={}, server_cpu_us=1.0, client_cpu_us=1.0, total_cpu_us=2.0,
        cpu_us_by_server={},
        failed=more.get("failed", {}), touched_bytes=1.0,
        hits=9, joined=0, misses=1,
        hit_rate=0.9, joined_share=0.0, follower_hit_rate=None, first_read_share=None, hit_ms=None, miss_ms=None,
    )  # fmt: skip


def shape(kind: str, ours: float, contestants: tuple[str, ...] = CONTESTANTS) -> dict[str, PeerFigure]:
    return {
        each: figure(kind, each, 310.0 if each == TAO else 100.0, ours if each == TAO else 1_000.0)
        for each in contestants
    }


def test_aims_are_throughput_and_tails_beside_each_contestant_and_nothing_wrong() -> None:
    def texts(kind: str, *names: str, workload: str = "tao_atc13", exceeds: bool = False) -> list[str]:
        goals = goals_of(kind, names, workload, data_exceeds_pool=exceeds)
        return [goal.describe() for goal in goals.get(TAO, ())]

    tails = [f"≤ 1 × {name}" for name in CONTESTANTS if name != TAO]
    assert texts("many", *CONTESTANTS) == [
        "≥ 4.5 × redis_lookaside", "≥ 1.6 × memcached_lookaside", "≥ 1.6 × memcached_memcachio", "≥ 4 × mysql", *tails,
    ]  # fmt: skip
    assert texts("many", *CONTESTANTS, exceeds=True) == ["≥ 5 × mysql", *tails]
    assert texts("many", *CONTESTANTS, workload="linkbench") == ["≥ 2 × mysql", "≥ 1 × postgres", *tails]
    assert texts("many", *CONTESTANTS, workload="taobench_a") == tails
    assert texts("open", TAO, MYSQL) == ["≤ 1 × mysql"]
    assert texts("one", *CONTESTANTS) == ["≤ 1 × redis_lookaside"]
    assert texts("one", TAO, MYSQL) == texts("batches", *CONTESTANTS) == texts("many", MYSQL) == []
    shapes = {"many": shape("many", 900.0), "one": shape("one", 500.0)}
    stale = [
        StaleReads(reads=10, stale=0, within="one tier", stale_by_kind={}),
        StaleReads(reads=10, stale=3, within="two tiers", stale_by_kind={}),
    ]
    assert [each.met for each in nothing_wrong(shapes, stale)] == [True, True]
    shapes["one"][TAO] = figure("one", TAO, 310.0, 500.0, failed={"TimeoutError": 2})
    (aim,) = nothing_wrong(shapes, [])
    assert (aim.aim, aim.value, aim.met) == ("no failed request of tao", 2, False)


def test_a_peer_that_wins_is_named_in_any_shape() -> None:
    shapes = {"many": shape("many", 900.0), "open": shape("open", 2_000.0), "one": shape("one", 500.0)}
    shapes["one"][MEMCACHED] = figure("one", MEMCACHED, 400.0, 1_000.0)
    wins = peers_win(shapes)
    assert [each for each in wins if each.startswith("one")] == [
        "one: memcached_lookaside is better in throughput (0.78 ×)"
    ]
    assert len([each for each in wins if each.startswith("open")]) == len(CONTESTANTS) - 1


def test_of_some_contestants_and_shapes_what_can_be_compared_is() -> None:
    found = of_contestants({"open": shape("open", 500.0, (TAO, MYSQL))}, {}, {})
    assert list(found) == [TAO, MYSQL]
    assert (found[MYSQL]["ratio"]["throughput"], found[MYSQL]["stale_reads"]) == (3.1, None)
    without = {"many": shape("many", 500.0, (MYSQL,))}
    assert (list(nothing_wrong(without, [])), peers_win(without)) == ([], [])
    assert of_contestants(without, {}, {})[MYSQL]["ratio"] == {}


def test_contestants_and_shapes_are_chosen_in_their_order() -> None:
    chosen = PeersOptions(only=("mysql", "tao"), shapes=("pair", "many"))
    assert (chosen.contestants, chosen.kinds) == (("tao", "mysql"), ("many", "pair"))
    assert chosen.at_toy_size().contestants == chosen.contestants
    with pytest.raises(OperatorError, match="--only oracle"):
        PeersOptions(only=("oracle",))


def test_a_peer_whose_server_is_absent_is_skipped_with_a_reason_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("loadtest.peers.postgres_server._DEBIAN", tmp_path)
    found, reasons = without_absent(PeersOptions())
    assert found.contestants == ("tao", "mysql", "mysql_asyncmy")
    assert [reason.partition(":")[0] for reason in reasons] == [*LOOKASIDES, POSTGRES]
    assert all(": skipped, no " in reason for reason in reasons)
    asked = PeersOptions(only=("tao", REDIS))
    assert without_absent(asked) == (asked, [])


def test_redis_serves_valkeys_client_where_there_is_no_valkey(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("redis-server", "valkey-server"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'server v=8.1.1 sha=0'\n")
        program.chmod(0o755)
        assert VALKEY_SERVER.used_name() == name
        assert VALKEY not in "".join(without_absent(PeersOptions())[1])
    assert VALKEY_SERVER.version() == "8.1.1"


def test_tables_have_what_was_measured_and_leave_the_rest_empty() -> None:
    to_peers, shapes = listings({"many": shape("many", 900.0, (TAO, MYSQL))}, {}, {})
    assert [row[:2] for row in to_peers.rows] == [(MYSQL, "3.10 ×")]
    assert [row[2] for row in shapes.rows] == ["", "3.10"]
    assert [row[shapes.columns.index("first reads")] for row in shapes.rows] == ["", ""]
