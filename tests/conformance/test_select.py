"""`Select` over gRPC: a follower evaluates set expressions as the SDK does, with the rights and freshness of its caller
at every list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest
from hypothesis import given, settings

from tao.follower.select_path import SelectPath
from tao.model.changes import sort_edges
from tao.model.errors import AnswerFull, PermissionDenied
from tao.model.graph import Edge
from tao.model.tokens import WriteToken
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tao.sets.expression import Expression, ListTerm, SetOperator, UnionTerm, combine, terms_of, union_of
from tao.sets.steps import DEFAULT_LIMITS, FoundEdge
from tao.wire.convert import error_to_pb
from tao.wire.grpc_server import GrpcServer
from tao.wire.select import expression_of, limits_of
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings
from tao.wire.v1 import graph_pb2_grpc
from tao.wire.v1 import session_pb2 as pb
from tests.properties.test_set_expressions import expressions
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.server_context import make_context
from tests.rigs.set_lists import SetLists
from tests.unit.client.fakes import SCHEMA, FakeCluster, make_id, make_topology, until

FRIEND = SCHEMA.atype("friend").number
A, B, C = make_id(1), make_id(2, shard=3), make_id(3, shard=5)
LISTS = {
    A: {n: n for n in range(1, 101)},
    B: {n: n + 7 for n in range(51, 151)},
    C: {n: n for n in range(91, 96)},
}
SIGNS = {SetOperator.AND: pb.SET_AND, SetOperator.OR: pb.SET_OR, SetOperator.WITHOUT: pb.SET_WITHOUT}


class Lists:
    """Answers unary reads from lists, in two parts, after a turn of the loop. Refuses the lists in ``hidden``."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        for id1, edges in LISTS.items():
            self.cluster.lists[id1, FRIEND] = sort_edges(Edge(id2, time) for id2, time in edges.items())
        self.hidden: set[int] = set()
        self.asked: list[tuple[pb.Request, Reply]] = []
        self.is_silent = False
        self.most_answers = 100
        """Values that one answer has room for."""

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.asked.append((request, reply))
        if not self.is_silent:
            asyncio.get_running_loop().call_soon(self._answer, request, reply)

    def _answer(self, request: pb.Request, reply: Reply) -> None:
        read = request.read
        ids = [*read.count_id1s, *read.time_range_id1s, *read.get_id1s]
        values = self.cluster.link("near-1").values(read)
        last = pb.Answer(read=pb.ReadAnswer())
        for slot, (id1, value) in enumerate(zip(ids, values, strict=True)):
            if id1 in self.hidden:
                last.read.failed_slots.append(slot)
                last.read.errors.append(error_to_pb(PermissionDenied("no right to read this list")))
            elif slot >= self.most_answers:
                last.read.failed_slots.append(slot)
                last.read.errors.append(error_to_pb(AnswerFull("no room")))
            elif slot:
                last.read.slots.append(slot)
                last.read.values.append(value)
        if ids[0] not in self.hidden:
            reply.send(pb.Answer(more=True, read=pb.ReadAnswer(slots=[0], values=values[:1])))
        reply.send(last)


class Follower:
    def __init__(self) -> None:
        self.lists = Lists()
        self.tasks: list[asyncio.Task[None]] = []
        configuration = Configuration(make_topology(), SCHEMA, logger("test"), self._load)
        context = make_context(configuration, FakeCluster(), self._spawn)  # the links are not used
        self.path = SelectPath(context, self.lists)

    async def _load(self) -> Any:
        return make_topology()

    def _spawn(self, job: Coroutine[Any, Any, None]) -> object:
        self.tasks.append(asyncio.get_running_loop().create_task(job))
        return self.tasks[-1]


@pytest.fixture
async def follower() -> Follower:
    return Follower()


@pytest.fixture
async def stub(follower: Follower) -> AsyncIterator[graph_pb2_grpc.GraphAsyncStub]:
    server = GrpcServer(
        follower.lists,
        ServingSettings(),
        name="srv",
        topology_version=lambda: 1,
        choose_shard=lambda: 0,
        unary_handler=follower.path,
    )
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield graph_pb2_grpc.GraphStub(channel)
    await server.close()


def request(expression: Expression, limit: int = 10, **fields: Any) -> pb.SelectRequest:
    asked = pb.SelectRequest(limit=limit, **fields)
    for term in terms_of(expression):
        if isinstance(term, SetOperator):
            asked.terms.add(operator=SIGNS[term])
        elif isinstance(term, UnionTerm):
            asked.terms.add(union=pb.UnionTerm(id1s=term.id1s, atype=term.atype))
        else:
            asked.terms.add(list=pb.ListTerm(id1=term.id1, atype=term.atype, high=term.high, low=term.low))
    return asked


def of(*id1s: int) -> list[Expression]:
    return [ListTerm(each, FRIEND) for each in id1s]


@settings(deadline=None)
@given(expressions)
def test_the_terms_of_a_request_are_the_expression(expression: Expression) -> None:
    assert expression_of(request(expression)) == expression


async def test_pages_over_grpc_match_python_sets(stub: graph_pb2_grpc.GraphAsyncStub) -> None:
    mine, theirs, few = of(A, B, C)
    store = SetLists(LISTS)
    for expression in (
        combine(SetOperator.AND, mine, theirs),
        combine(SetOperator.WITHOUT, combine(SetOperator.OR, mine, theirs), few),
        combine(SetOperator.AND, mine, few),
        union_of([A, B, C], FRIEND),
    ):
        found, cursor = [], ""
        while True:
            page = await stub.Select(request(expression, 17, cursor=cursor), timeout=PATIENT_SECONDS)
            found += [FoundEdge(each.time, each.id2, each.id1, 1, each.data) for each in page.edges]
            assert page.examined > 0
            assert page.plan
            cursor = page.cursor
            if not cursor:
                break
        assert found == store.expected(expression)


async def test_lists_for_which_an_answer_had_no_room_are_asked_again(
    follower: Follower, stub: graph_pb2_grpc.GraphAsyncStub
) -> None:
    follower.lists.most_answers = 1
    ids = [make_id(number, shard=7) for number in range(1, 6)]
    for id1 in ids:
        follower.lists.cluster.lists[id1, FRIEND] = [Edge(id1 + 1_000, id1)]
    page = await stub.Select(request(union_of(ids, FRIEND)), timeout=PATIENT_SECONDS)
    assert [edge.id1 for edge in page.edges] == ids[::-1]


async def test_counts_say_whether_they_are_exact(stub: graph_pb2_grpc.GraphAsyncStub) -> None:
    both = combine(SetOperator.AND, *of(A, B))
    for limit, expected in ((20, (20, False)), (2_000, (50, True))):
        counted = await stub.Select(request(both, limit, count_only=True), timeout=PATIENT_SECONDS)
        assert (counted.count, counted.exact) == expected


async def test_rights_are_checked_at_every_list_for_the_caller_of_the_set(follower: Follower) -> None:
    follower.lists.hidden = {C}
    expression = combine(SetOperator.WITHOUT, *of(A, C))
    answers: list[pb.Answer] = []
    call = MemoryReply(answers.append, peer="web-1", caller="app/web")
    follower.path.handle(pb.Request(deadline_ms=9_000, select=request(expression)), call)
    await until(lambda: answers)
    assert answers[0].error.reason == "PERMISSION_DENIED"
    assert {reply.peer.caller for _, reply in follower.lists.asked} == {"app/web"}


async def test_freshness_and_token_are_those_of_every_list(follower: Follower) -> None:
    token = WriteToken([(B, FRIEND, 9)])
    answers: list[pb.Answer] = []
    both = combine(SetOperator.AND, *of(A, B))
    for fields in ({"critical": True}, {"max_staleness_ms": 77}, {"after": token.text()}):
        asked = request(both, 1, **fields)
        follower.path.handle(pb.Request(deadline_ms=9_000, select=asked), MemoryReply(answers.append))
        await until(lambda: len(answers) == 1)
        assert answers.pop().selected.edges
        reads = [each.read for each, _ in follower.lists.asked]
        follower.lists.asked.clear()
        if "after" not in fields:
            assert all((read.critical, read.max_staleness_ms) in ((True, 0), (False, 77)) for read in reads)
            continue
        minimums = {
            id1: list(read.minimum_versions)
            for read in reads
            for id1 in [*read.count_id1s, *read.time_range_id1s, *read.get_id1s]
        }
        assert minimums == {A: [], B: [9]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda asked: asked.ClearField("terms"), "leave 0 sets"),
        (lambda asked: asked.terms.pop(), "leave 2 sets"),
        (lambda asked: asked.terms.add(operator=pb.SET_AND), "needs two sets before it"),
        (lambda asked: asked.terms.add(operator=pb.SET_NONE), "a term is a list, a union, or one of the operators"),
        (lambda asked: asked.terms.add(), "a term is a list, a union, or one of the operators"),
        (lambda asked: asked.terms.extend(asked.terms[:1] * 40), "at most 16 sets"),
        (lambda asked: asked.terms.add(union=pb.UnionTerm(atype=1)), "at least one list"),
        (lambda asked: setattr(asked.terms[0].list, "id1", 0), "0 is not an object id"),
        (lambda asked: setattr(asked.terms[0].list, "high", 1 << 63), "above 2^63-1"),
        (lambda asked: setattr(asked, "limit", 0), "limit is 0"),
        (lambda asked: setattr(asked, "limit", 1_001), "limit is 1001"),
        (lambda asked: setattr(asked, "cursor", "abc"), "not valid"),
        (lambda asked: asked.MergeFrom(pb.SelectRequest(cursor="abc", count_only=True)), "leave cursor out"),
        (lambda asked: setattr(asked, "after", "abc"), "token"),
    ],
)
async def test_a_wrong_request_is_an_invalid_argument(
    stub: graph_pb2_grpc.GraphAsyncStub, change: Callable[[pb.SelectRequest], object], message: str
) -> None:
    asked = request(combine(SetOperator.AND, *of(A, B)))
    change(asked)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Select(asked, timeout=PATIENT_SECONDS)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")


async def test_a_budget_ends_a_page_with_a_cursor(stub: graph_pb2_grpc.GraphAsyncStub) -> None:
    disjoint = combine(SetOperator.WITHOUT, *of(B, B))
    page = await stub.Select(request(disjoint, budget_edges=100), timeout=PATIENT_SECONDS)
    assert (len(page.edges), page.cursor, page.cut_short) == (0, "", False)  # the list ends first
    either = combine(SetOperator.OR, *of(A, B))
    page = await stub.Select(request(either, 100, budget_edges=1), timeout=PATIENT_SECONDS)
    assert page.cut_short
    assert page.cursor


def test_a_caller_may_ask_for_less_than_the_budget_and_not_for_more() -> None:
    less, more = pb.SelectRequest(budget_edges=7, budget_ms=5), pb.SelectRequest(budget_edges=10**6, budget_ms=10**6)
    assert (limits_of(less).max_examined, limits_of(less).max_ms) == (7, 5)
    for asked in (more, pb.SelectRequest()):
        assert limits_of(asked) == DEFAULT_LIMITS


async def test_reads_stop_when_the_caller_has_gone(follower: Follower) -> None:
    follower.lists.is_silent = True
    call = MemoryReply(lambda _: None)
    follower.path.handle(pb.Request(deadline_ms=9_000, select=request(of(A)[0])), call)
    await until(lambda: follower.lists.asked)
    call.close()
    await until(follower.tasks[0].done)
    assert follower.lists.asked[0][1].closed


async def test_one_caller_may_have_as_many_sets_under_way_as_are_free(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tao.follower.select_path.MAX_UNDER_WAY", 5)
    follower.lists.is_silent = True
    answers: list[pb.Answer] = []

    def begin(caller: str) -> None:
        reply = MemoryReply(answers.append, peer="web", caller=caller)
        follower.path.handle(pb.Request(deadline_ms=9_000, select=request(of(A)[0])), reply)

    for _ in range(3):
        begin("app/one")
    with pytest.raises(Exception, match="send less at a time"):
        begin("app/one")
    begin("app/other")
    for task in follower.tasks:
        task.cancel()
