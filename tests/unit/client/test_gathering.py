"""A batch gathers what is asked within two turns of the loop, while several queries are unanswered; the reads of a lone
caller gather nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.client import Graph
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster, FakeLink, until

ABSENT = bytes(12)
UNANSWERED = 12
ALONE = 3


class HeldAnswers:
    """The queries of some callers that wait, all in one message, and the handler of their answers."""

    def __init__(self, on_answer: AnswerHandler) -> None:
        self._on_answer = on_answer

    def give(self, slot: int) -> None:
        self._on_answer(pb.Answer(more=True, read=pb.ReadAnswer(slots=[slot], values=[ABSENT])))


def hold_answers(cluster: FakeCluster, server: str) -> list[AnswerHandler]:
    """Have a server answer nothing; return the handlers of what it is asked."""
    handlers: list[AnswerHandler] = []

    def keep(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        handlers.append(on_answer)

    cluster.link(server).behaviour = keep
    return handlers


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def asked(cluster: FakeCluster, server: str) -> list[list[int]]:
    return [list(sent.read.obj_ids) for sent in cluster.batches(server)]


@pytest.fixture
async def waiting(graph: Graph, cluster: FakeCluster) -> AsyncIterator[HeldAnswers]:
    """Some callers, each of which asks again once it is answered."""

    async def ask_twice(number: int) -> None:
        await graph.obj_get(number)
        await graph.obj_get(100 + number)

    handlers = hold_answers(cluster, "near-1")
    callers = [asyncio.ensure_future(ask_twice(1 + number)) for number in range(UNANSWERED)]
    await until(lambda: handlers)
    yield HeldAnswers(handlers[0])
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)


async def test_what_is_asked_upon_answers_of_the_next_turn_travels_along(
    waiting: HeldAnswers, cluster: FakeCluster
) -> None:
    waiting.give(0)
    await turns(2)  # the first caller has asked again
    waiting.give(1)
    await until(lambda: len(cluster.batches()) == 2)
    assert asked(cluster, "near-1")[1] == [101, 102]


async def test_a_batch_does_not_wait_for_answers_that_do_not_come(waiting: HeldAnswers, cluster: FakeCluster) -> None:
    waiting.give(0)
    await turns(6)
    assert asked(cluster, "near-1")[1:] == [[101]]


async def test_a_long_turn_is_the_last_one_for_which_a_batch_gathers(
    waiting: HeldAnswers, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    time, passed_seconds = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: time() + passed_seconds)
    waiting.give(0)
    await turns(2)
    passed_seconds = 0.02  # as if a task had taken so long in this turn
    waiting.give(1)
    await until(lambda: len(cluster.batches()) == 3)
    assert asked(cluster, "near-1")[1:] == [[101], [102]]


async def test_the_queries_of_few_callers_are_sent_at_the_end_of_their_tick(graph: Graph, cluster: FakeCluster) -> None:
    hold_answers(cluster, "near-1")
    first = asyncio.ensure_future(graph.obj_get(1))
    await until(cluster.batches)
    second = asyncio.ensure_future(graph.obj_get(2))
    await turns(2)
    assert asked(cluster, "near-1") == [[1], [2]]
    for caller in (first, second):
        caller.cancel()
    await asyncio.wait([first, second])


async def ask_alone(graph: Graph) -> None:
    """Ask as a caller that is alone, for long enough to be taken for one."""
    for number in range(1, 1 + ALONE):
        await graph.obj_get(number)


async def test_the_read_of_a_caller_that_has_been_alone_is_sent_at_once(graph: Graph, cluster: FakeCluster) -> None:
    await ask_alone(graph)
    again = asyncio.ensure_future(graph.obj_get(9))
    await turns(1)
    assert asked(cluster, "near-1")[-1] == [9]
    await again


async def test_the_first_reads_of_a_caller_wait_for_the_end_of_their_tick(graph: Graph, cluster: FakeCluster) -> None:
    for number in range(1, 1 + ALONE):
        caller = asyncio.ensure_future(graph.obj_get(number))
        await turns(1)
        assert len(cluster.batches()) == number - 1
        await caller


async def test_reads_beside_one_that_was_sent_at_once_travel_together_and_so_do_the_next_ones(
    graph: Graph, cluster: FakeCluster
) -> None:
    await ask_alone(graph)
    for first in (10, 20):
        await asyncio.gather(*(graph.obj_get(first + number) for number in range(4)))
    assert asked(cluster, "near-1")[ALONE:] == [[10], [11, 12, 13], [20, 21, 22, 23]]


async def test_a_caller_beside_an_unanswered_one_is_not_alone(graph: Graph, cluster: FakeCluster) -> None:
    await ask_alone(graph)
    hold_answers(cluster, "near-1")
    callers = [asyncio.ensure_future(graph.obj_get(9))]
    await turns(1)
    callers.append(asyncio.ensure_future(graph.obj_get(10)))
    await turns(1)
    assert asked(cluster, "near-1")[ALONE:] == [[9]]
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)


async def test_the_read_of_a_lone_caller_does_not_overtake_its_write_of_the_same_tick(
    graph: Graph, cluster: FakeCluster
) -> None:
    await ask_alone(graph)
    await asyncio.gather(graph.obj_delete(9), graph.obj_get(10))
    assert [sent.WhichOneof("body") for sent in cluster.batches()[ALONE:]] == ["write", "read"]
