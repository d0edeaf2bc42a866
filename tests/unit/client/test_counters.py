"""Counters in the SDK: what a call sends, what of one tick travels together, and which calls are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tao.client import (
    ClientSettings,
    Consistency,
    Counter,
    DeadlineExceeded,
    Graph,
    InvalidArgument,
    NotCommutative,
    NotMine,
    PermissionDenied,
    SomeFailed,
    TaoError,
    Unavailable,
    UnknownType,
    WriteToken,
)
from tao.model.counters import MAX_BY
from tao.model.errors import AnswerFull
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster, FakeLink, failing, make_id, make_topology, until

VIEWS = 401
POST, OTHER, FAR = make_id(1, 0), make_id(2, 0), make_id(1, 1)


def additions(cluster: FakeCluster) -> list[list[tuple[int, int]]]:
    """Return what each batch of writes adds."""
    batches = [request.write.writes for request in cluster.batches() if request.HasField("write")]
    return [[(write.counter_add.id, write.counter_add.by) for write in batch] for batch in batches]


async def test_additions_of_a_tick_to_one_counter_are_one(graph: Graph, cluster: FakeCluster) -> None:
    adds = [graph.counter_add(POST, "views") for _ in range(10)]
    await asyncio.gather(*adds, graph.counter_add(POST, "page.views", by=-3), graph.counter_add(OTHER, "views", 2))
    assert additions(cluster) == [[(POST, 7), (OTHER, 2)]]
    await graph.counter_add(POST, "views")
    assert cluster.counters == {(POST, VIEWS): 8, (OTHER, VIEWS): 2}


async def test_additions_that_cancel_out_and_by_zero_send_nothing(graph: Graph, cluster: FakeCluster) -> None:
    await graph.counter_add(POST, "views", by=0)
    await asyncio.gather(graph.counter_add(POST, "views"), graph.counter_add(POST, "views", by=-1))
    assert additions(cluster) == []


async def test_additions_beyond_what_one_may_carry_travel_apart(graph: Graph, cluster: FakeCluster) -> None:
    await asyncio.gather(graph.counter_add(POST, "views", MAX_BY), graph.counter_add(POST, "views", 1))
    assert sorted(by for batch in additions(cluster) for _, by in batch) == [1, MAX_BY]


async def test_a_caller_that_gives_up_takes_nothing_from_the_others(graph: Graph, cluster: FakeCluster) -> None:
    hasty, patient = (asyncio.ensure_future(graph.counter_add(POST, "views")) for _ in range(2))
    await asyncio.sleep(0)
    hasty.cancel()
    await patient
    assert cluster.counters == {(POST, VIEWS): 2}


async def test_the_error_of_an_addition_whose_caller_has_given_up_is_no_fault(
    graph: Graph, cluster: FakeCluster
) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    cluster.link("near-1").behaviour = failing(PermissionDenied("not yours"))
    hasty, patient = (asyncio.ensure_future(graph.counter_add(POST, "views")) for _ in range(2))
    await asyncio.sleep(0)
    hasty.cancel()
    with pytest.raises(PermissionDenied):
        await patient
    assert faults == []


async def test_an_addition_in_a_journaled_block_is_refused(graph: Graph, cluster: FakeCluster) -> None:
    with graph.journaled(), pytest.raises(NotCommutative, match=r"outside of journaled\(\)"):
        await graph.counter_add(POST, "views")
    assert additions(cluster) == []


async def test_reads_of_a_tick_travel_together(graph: Graph, cluster: FakeCluster) -> None:
    cluster.counters = {(POST, VIEWS): 5, (OTHER, VIEWS): -2}
    one, many = await asyncio.gather(
        graph.counter_get(POST, "views"), graph.counter_get_many([(OTHER, "views"), (POST, "impressions")])
    )
    assert one == Counter(5, 1100)
    assert [each.value for each in many] == [-2, 0]
    (asked,) = [request.get_counters for request in cluster.batches() if request.HasField("get_counters")]
    assert list(asked.ids) == [POST, OTHER, POST]
    await graph.counter_get(POST, "views", critical=True)
    await graph.counter_get(POST, "views", max_staleness_ms=500)
    fresh = [request.get_counters for request in cluster.batches() if request.HasField("get_counters")][-2:]
    assert [(each.critical, each.max_staleness_ms) for each in fresh] == [(True, 0), (False, 500)]
    assert await graph.counter_get_many([]) == []


def failing_once(slot: int, error: TaoError, times: int) -> Callable[[FakeLink, pb.Request, AnswerHandler], None]:
    left = times

    def answer(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        nonlocal left
        found = link.answer(request)
        if left and request.HasField("get_counters"):
            left -= 1
            found.counter_values.failed_slots.append(slot)
            found.counter_values.errors.append(error_to_pb(error))
        on_answer(found)

    return answer


async def test_a_counter_that_its_server_does_not_serve_is_asked_for_again(graph: Graph, cluster: FakeCluster) -> None:
    cluster.counters = {(POST, VIEWS): 5, (OTHER, VIEWS): 6}
    cluster.link("near-1").behaviour = failing_once(1, NotMine("moved", 1), 1)
    found = await graph.counter_get_many([(POST, "views"), (OTHER, "views")])
    assert [each.value for each in found] == [5, 6]


async def test_the_error_of_one_counter_leaves_the_others(graph: Graph, cluster: FakeCluster) -> None:
    cluster.counters = {(POST, VIEWS): 5}
    cluster.link("near-1").behaviour = failing_once(1, PermissionDenied("no"), 2)
    with pytest.raises(SomeFailed) as failed:
        await graph.counter_get_many([(POST, "views"), (OTHER, "views")])
    assert failed.value.results[0] == Counter(5, 1100)
    assert isinstance(failed.value.errors[1], PermissionDenied)
    cluster.link("near-1").behaviour = failing_once(0, PermissionDenied("no"), 1)
    with pytest.raises(PermissionDenied):
        await graph.counter_get(POST, "views")


async def test_progress_is_no_failed_attempt(graph: Graph, cluster: FakeCluster) -> None:
    keys = [make_id(number, 0) for number in range(1, 21)]
    cluster.counters = {(key, VIEWS): number for number, key in enumerate(keys)}

    def two_at_a_time(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        found = link.answer(request)
        for slot in range(2, len(request.get_counters.ids)):
            found.counter_values.failed_slots.append(slot)
            found.counter_values.errors.append(error_to_pb(AnswerFull("ask for fewer")))
        on_answer(found)

    cluster.link("near-1").behaviour = two_at_a_time
    found = await graph.counter_get_many([(key, "views") for key in keys])
    assert [each.value for each in found] == list(range(20))


async def test_a_server_that_hangs_delays_nothing_that_another_one_is_asked_for_again() -> None:
    cluster = FakeCluster(make_topology(near=("near-1", "near-2"), moved={0: ("near-1",), 1: ("near-2",)}))
    cluster.counters = {(POST, VIEWS): 5, (FAR, VIEWS): 6}
    unanswered: list[Callable[[], None]] = []
    cluster.link("near-1").behaviour = failing_once(0, NotMine("moved", 1), 1)
    cluster.link("near-2").behaviour = lambda link, request, on_answer: unanswered.append(
        lambda: on_answer(link.answer(request))
    )
    async with await cluster.connect() as graph:
        far = asyncio.ensure_future(graph.counter_get(FAR, "views"))
        assert (await graph.counter_get(POST, "views")).value == 5
        assert not far.done()
        for answer in unanswered:
            answer()
        assert (await far).value == 6


async def test_a_counter_of_a_shard_that_no_server_has_fails(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph._router, "shards", 0)
    with pytest.raises(InvalidArgument, match="there is no shard"):
        await graph.counter_get(POST, "views")


async def test_attempts_that_answer_nothing_end(graph: Graph, cluster: FakeCluster) -> None:
    cluster.link("near-1").behaviour = failing_once(0, AnswerFull("ask for fewer"), 1_000)
    with pytest.raises(AnswerFull):
        await graph.counter_get(POST, "views")
    assert len(cluster.batches()) == 4


async def test_all_attempts_have_the_time_of_one_operation(cluster: FakeCluster) -> None:
    async with await cluster.connect(ClientSettings(timeout_seconds=0.03)) as graph:
        cluster.link("near-1").behaviour = failing_once(0, NotMine("moved", 1), 1_000)
        with pytest.raises((NotMine, DeadlineExceeded)):
            await graph.counter_get(POST, "views")
    assert len(cluster.batches()) < 4, "a pause of 80 ms does not fit"


async def test_close_ends_reads_that_nobody_answers(
    graph: Graph, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def never(*_: object) -> pb.Answer:
        asked.set()
        return await asyncio.Future()

    monkeypatch.setattr(cluster.link("near-1"), "ask", never)
    reading = asyncio.ensure_future(graph.counter_get(POST, "views"))
    await asked.wait()
    late = asyncio.ensure_future(graph.counter_get(OTHER, "views"))
    await until(lambda: graph._counters_asked)
    await graph.close()
    for each in (reading, late):
        with pytest.raises(Unavailable, match="the graph was closed"):
            await each


async def test_a_fault_of_a_read_reaches_its_caller(
    graph: Graph, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> pb.Answer:
        raise ZeroDivisionError

    monkeypatch.setattr(cluster.link("near-1"), "ask", broken)
    with pytest.raises(ZeroDivisionError):
        await graph.counter_get(POST, "views")


Call = Callable[[Graph], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (lambda g: g.counter_add(POST, "stars"), UnknownType, r"has page\.views, page\.impressions"),
        (lambda g: g.counter_add(POST, "friend"), UnknownType, "unknown counter 'friend'"),
        (lambda g: g.counter_add(POST, 401), InvalidArgument, "must be the name of a counter"),
        (lambda g: g.counter_add(0, "views"), InvalidArgument, "id is 0"),
        (lambda g: g.counter_add(POST, "views", by=MAX_BY + 1), InvalidArgument, "by is"),
        (lambda g: g.counter_add(POST, "views", by=-MAX_BY - 1), InvalidArgument, "by is"),
        (lambda g: g.counter_add(POST, "views", by=True), InvalidArgument, "by must be an int"),
        (lambda g: g.counter_add(POST, "views", by=1.5), InvalidArgument, "by must be an int"),
        (lambda g: g.counter_get(1 << 60, "views"), InvalidArgument, "this graph has shards"),
        (lambda g: g.counter_get_many([(POST,)]), InvalidArgument, "item 0"),
        (
            lambda g: g.counter_get(POST, "views", consistency=Consistency(token=WriteToken())),
            InvalidArgument,
            "not read after a token",
        ),
    ],
)
async def test_a_wrong_call_is_refused_and_nothing_is_sent(
    graph: Graph, cluster: FakeCluster, call: Call, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        await call(graph)
    assert cluster.batches() == []
