"""The shard of a unary call, and the servers that are asked when the first one does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tao.access.document import load_access
from tao.follower.service import UnaryPath, UnarySettings, home_shard
from tao.model.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    TaoError,
    Unavailable,
)
from tao.model.ids import make_id
from tao.model.tokens import ANY_SHARD
from tao.model.topology import CacheServer, Topology
from tao.observability.logs import logger
from tao.routing.fair_shares import ShareSettings
from tao.routing.routes import Routes
from tao.serving.configuration import Configuration
from tao.serving.shares import WorkShares
from tao.wire.convert import error_to_pb
from tao.wire.identity import PeerIdentity
from tao.wire.links import Links
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import LIKES, SCHEMA, make_topology
from tests.rigs.pacing import PATIENT_SECONDS, until
from tests.rigs.server_context import make_context

ID = make_id(3, 1_700_000_000_000, 0)
READ = pb.Request(deadline_ms=4000, read=pb.ReadBatch(obj_ids=[ID]))
WRITE = pb.Request(deadline_ms=4000, write=pb.WriteBatch(writes=[pb.Write(obj_delete=pb.ObjDelete(id=ID))]))
FOUND = pb.Answer(read=pb.ReadAnswer(values=[b"v"]))


@pytest.mark.parametrize(
    ("request_", "shard"),
    [
        (READ, 3),
        (WRITE, 3),
        (pb.Request(read=pb.ReadBatch(get_id1s=[ID], get_atypes=[1])), 3),
        (pb.Request(read=pb.ReadBatch(exist_id1s=[ID], exist_atypes=[1], exist_id2s=[2])), 3),
        (pb.Request(read=pb.ReadBatch(count_id1s=[(1 << 64) - 1], count_atypes=[1])), (1 << 17) - 1),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(obj_add=pb.ObjAdd(shard=5))])), 5),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(obj_add=pb.ObjAdd(id=ID, shard=5))])), 3),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(assoc_add=pb.AssocAdd(id1=ID, id2=1))])), 3),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(read_state=pb.ReadState(id1=ID, id2=1))])), 3),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(node_set_state=pb.NodeSetState(id=ID))])), 3),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(add_job=pb.AddJob(id=ID, shard=5))])), 3),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(add_job=pb.AddJob(shard=5))])), 5),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(read_job=pb.ReadJob(id=ID))])), 3),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write(cancel_job=pb.CancelJob(id=ID))])), 3),
        (pb.Request(write=pb.WriteBatch(writes=[pb.Write()])), None),
        (pb.Request(get_schema=pb.GetSchema()), None),
        (pb.Request(reserve_ids=pb.ReserveIds(shard=3)), None),
    ],
)
def test_a_call_belongs_to_the_shard_of_its_one_query_or_write(request_: pb.Request, shard: int | None) -> None:
    assert home_shard(request_) == shard


class FakeReply:
    def __init__(self, caller: str = "", role: str = "client") -> None:
        self.answers: list[pb.Answer] = []
        self.peer = PeerIdentity("", role, caller=caller)

    def send(self, answer: pb.Answer) -> None:
        self.answers.append(answer)

    def on_close(self, callback: Callable[[], None]) -> None:
        self.close = callback


class Stage:
    """A follower in front of servers ``a`` (same tier) and ``b`` (the next), whose answers a test sets."""

    def __init__(self, limit: int = 10) -> None:
        self.answers: dict[str, pb.Answer | TaoError] = {}
        self.asked: list[tuple[str, float]] = []
        self.served_here = 0
        self.hosted: frozenset[int] = frozenset()
        self.down = False
        self.found_down: set[str] = set()
        self.on_load: Callable[[], None] = lambda: None
        self.can_load = asyncio.Event()
        self.can_load.set()
        tiers = [SimpleNamespace(tier=name, hosts=self.hosts) for name in ("t2", "t1")]
        leaders = SimpleNamespace(home=lambda _: CacheServer(name="leader", grpc=""))
        routes = self.routes = SimpleNamespace(
            shards=8, version=4, follower_tiers=lambda _: tiers, leaders=lambda _: leaders
        )
        self.requests: list[pb.Request] = []
        configuration = Configuration(make_topology(), SCHEMA, logger("test"), self.load)
        configuration.routes = cast(Routes, routes)
        self.access = configuration.access
        for tier in tiers:
            tier.hosts = lambda _, name=tier.tier: self.hosts(name)
        self.tasks: list[asyncio.Task[None]] = []
        self.shares = WorkShares(ShareSettings(write_cost=4, max_under_way_per_caller=16))
        self.path = UnaryPath(
            make_context(
                configuration,
                cast(Links, SimpleNamespace(to=self.link, is_down=lambda server: server.name in self.found_down)),
                self.spawn,
                region="r",
                tier="t1",
            ),
            self,
            lambda *_: None,
            self.shares,
            lambda: self.hosted,
            UnarySettings(max_relayed=limit),
        )

    async def load(self) -> Topology:
        await self.can_load.wait()
        self.on_load()
        return make_topology()

    def hosts(self, tier: str) -> tuple[CacheServer, ...]:
        name = "a" if tier == "t1" else "b"
        return (CacheServer(name=name, grpc="", down=self.down and name == "a"),)

    def link(self, server: CacheServer) -> SimpleNamespace:
        async def ask(request: pb.Request, seconds: float) -> pb.Answer:
            self.asked.append((server.name, seconds))
            self.requests.append(request)
            answer = self.answers.get(server.name)
            if answer is None:
                await asyncio.Event().wait()
            if isinstance(answer, TaoError):
                raise answer
            assert answer is not None
            return answer

        return SimpleNamespace(ask=ask)

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.served_here += 1

    def spawn(self, job: Coroutine[Any, Any, None]) -> object:
        self.tasks.append(asyncio.get_running_loop().create_task(job))
        return self.tasks[-1]

    async def call(self, request: pb.Request, caller: str = "", role: str = "client") -> pb.Answer:
        reply = FakeReply(caller, role)
        self.path.handle(request, reply)  # type: ignore[arg-type]  # it has what is used of it
        await asyncio.gather(*self.tasks)
        (answer,) = reply.answers
        return answer


@pytest.mark.parametrize("caller", ["web", ""])
async def test_the_caller_of_a_call_is_passed_on_and_not_the_one_that_it_claims(caller: str) -> None:
    for request in (READ, WRITE):
        stage = Stage()
        stage.answers["a"] = FOUND
        claimed = pb.Request(caller="root", operator="operator/root")
        claimed.MergeFrom(request)
        await stage.call(claimed, caller)
        (asked,) = stage.requests
        assert (asked.HasField("caller"), asked.caller, asked.operator) == (True, caller, "")


async def test_an_operator_is_passed_on_as_one_and_not_as_a_caller() -> None:
    for request in (READ, WRITE):
        stage = Stage()
        stage.answers["a"] = FOUND
        await stage.call(request, "operator/ann", "operator")
        (asked,) = stage.requests
        assert (asked.HasField("caller"), asked.operator) == (False, "operator/ann")


async def test_calls_for_hosted_or_unknown_shards_are_served_here() -> None:
    stage = Stage()
    stage.hosted = frozenset({3})
    beyond = pb.Request(deadline_ms=4000, read=pb.ReadBatch(obj_ids=[9 << 47 | 1]))
    for request in (READ, WRITE, beyond, pb.Request(get_topology=pb.GetTopology())):
        stage.path.handle(request, FakeReply())  # type: ignore[arg-type]
    assert (stage.served_here, stage.asked) == (4, [])


async def test_the_home_server_is_asked_first_and_a_read_leaves_time_for_another() -> None:
    stage = Stage()
    stage.answers["a"] = FOUND
    assert await stage.call(READ) == FOUND
    ((name, seconds),) = stage.asked
    assert name == "a"
    assert seconds <= 2.0
    stage.asked.clear()
    stage.answers["a"] = pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(found=True)]))
    await stage.call(WRITE)
    assert 2.0 < stage.asked[0][1] <= 4.0


@pytest.mark.parametrize("error", [Unavailable("gone"), NotMine("moved", 9), DeadlineExceeded("slow")])
async def test_a_read_that_its_home_does_not_answer_is_asked_in_the_next_tier(error: TaoError) -> None:
    for answer in (error, pb.Answer(read=pb.ReadAnswer(failed_slots=[0], errors=[error_to_pb(error)]))):
        stage = Stage()
        stage.answers = {"a": answer, "b": FOUND}
        assert await stage.call(READ) == FOUND


@pytest.mark.parametrize(
    "error", [OutcomeUnknown("?"), DeadlineExceeded("slow"), InvalidArgument("no"), Overloaded("full")]
)
async def test_a_write_that_may_have_been_done_or_was_rejected_is_not_repeated(error: TaoError) -> None:
    stage = Stage()
    stage.answers = {"a": error, "b": FOUND}
    assert (await stage.call(WRITE)).error.reason == error.reason
    assert [name for name, _ in stage.asked] == ["a"]


@pytest.mark.parametrize("request_", [READ, WRITE])
async def test_a_call_that_servers_with_an_older_topology_refuse_is_sent_again(request_: pb.Request) -> None:
    """Servers ``a`` and ``b`` read the newer document because they are asked by it."""
    stage = Stage()
    stage.answers = {"a": NotMine("not yet", 3), "b": Unavailable("gone")}
    calling = asyncio.ensure_future(stage.call(request_))
    await until(lambda: [name for name, _ in stage.asked].count("a") > 2)
    stage.answers["a"] = FOUND
    assert await calling == FOUND
    assert {sent.topology_version for sent in stage.requests} == {4}


async def test_a_call_that_a_server_with_a_newer_topology_refuses_follows_it() -> None:
    stage = Stage()
    stage.answers = {"a": NotMine("moved here", 5), "b": NotMine("moved", 5)}

    def newer() -> None:
        stage.routes.version = 5
        stage.hosted = frozenset({3})

    stage.on_load = newer
    stage.path.handle(READ, FakeReply())  # type: ignore[arg-type]  # it has what is used of it
    await until(lambda: stage.served_here)


async def test_a_call_does_not_outlive_its_deadline_while_the_newer_document_cannot_be_read() -> None:
    stage = Stage()
    stage.can_load.clear()
    stage.answers = {"a": NotMine("moved here", 5), "b": NotMine("moved", 5)}
    answer = await asyncio.wait_for(stage.call(pb.Request(deadline_ms=200, read=READ.read)), PATIENT_SECONDS)
    assert answer.error.reason == "NOT_MINE"
    assert all(seconds > 0 for _, seconds in stage.asked), "nobody is asked when there is no time"


async def test_a_call_that_a_server_refuses_by_the_same_topology_is_not_sent_again() -> None:
    stage = Stage()
    stage.answers = {"a": NotMine("nobody's", 4), "b": NotMine("nobody's", 4)}
    assert (await stage.call(READ)).error.reason == "NOT_MINE"
    assert [name for name, _ in stage.asked] == ["a", "b"]


async def test_a_server_marked_down_is_asked_last() -> None:
    stage = Stage()
    stage.down = True
    stage.answers["b"] = FOUND
    await stage.call(READ)
    assert [name for name, _ in stage.asked] == ["b"]


async def test_a_server_that_has_been_found_down_is_asked_last() -> None:
    stage = Stage()
    stage.found_down.add("a")
    stage.answers["b"] = FOUND
    await stage.call(READ)
    assert [name for name, _ in stage.asked] == ["b"]


@pytest.mark.parametrize(("low_shard", "asked"), [(1, [1]), (ANY_SHARD, [0, 1, 2, 3])])
async def test_what_a_token_cannot_name_is_settled_before_the_master_is_read(low_shard: int, asked: list[int]) -> None:
    stage = Stage()
    between = pb.ShardPair(low_shard=low_shard, high_shard=3)
    read = pb.Request(deadline_ms=4000, read=pb.ReadBatch(count_id1s=[ID], count_atypes=[1]))
    read.settle_shards_first.append(between)
    stage.answers = {"leader": pb.Answer(settled_pairs=pb.SettledPairs(settled=1)), "a": FOUND}
    stage.path.handle(read, reply := FakeReply())  # type: ignore[arg-type]
    await until(lambda: reply.answers)
    assert reply.answers == [FOUND]
    *settles, last = stage.requests
    assert [each.low_shard for request in settles for each in request.settle_pairs.shards] == asked
    assert last.read.critical
    stage.answers["leader"] = pb.Answer(settled_pairs=pb.SettledPairs())
    read.settle_shards_first.append(between)
    stage.path.handle(read, reply := FakeReply())  # type: ignore[arg-type]
    await until(lambda: reply.answers)
    assert reply.answers[0].error.reason == "STALE_READ"


RULES = """
format: 1
version: 1
roles: {reader: {read: {associations: [likes, liked_by]}}}
callers: {web: [reader]}
"""


async def test_a_call_that_settles_is_checked_first_and_reads_the_version_that_was_settled() -> None:
    stage = Stage()
    stage.access.use_document(load_access(RULES, "access.yaml"))
    change = pb.Message(list_change=pb.ListChange(id1=ID, atype=LIKES, before=1, after=7))
    stage.answers["a"] = FOUND

    async def call(caller: str, *changes: pb.Message) -> pb.Answer:
        settled = pb.SettledPairs(settled=1, changes=[pb.ShardMessages(shard=3, messages=changes)])
        stage.answers["leader"] = pb.Answer(settled_pairs=settled)
        read = pb.Request(deadline_ms=4000, read=pb.ReadBatch(count_id1s=[ID], count_atypes=[LIKES]))
        read.settle_first.add(id1=ID, atype=LIKES, coordinator_id=1)
        return await stage.call(read, caller)

    assert (await call("other")).error.reason == "PERMISSION_DENIED"
    assert not stage.requests
    assert await call("web", change) == FOUND
    settle, read = stage.requests
    assert settle.caller == read.caller == "web"
    assert (read.read.minimum_slots[:], read.read.minimum_versions[:], read.read.critical) == ([0], [7], False)
    assert (await call("web")).error.reason == "STALE_READ"


async def test_pairs_are_settled_in_the_share_of_their_caller_and_no_more_than_a_token_names() -> None:
    stage = Stage()
    read = pb.Request(deadline_ms=60_000, read=pb.ReadBatch(count_id1s=[ID], count_atypes=[LIKES]))
    read.settle_shards_first.add(low_shard=1, high_shard=3)
    replies = [FakeReply(caller) for caller in ["hog"] * 9 + ["web"]]
    for reply in replies:
        stage.path.handle(pb.Request.FromString(read.SerializeToString()), reply)  # type: ignore[arg-type]
    await until(lambda: any(request.caller == "web" for request in stage.requests))
    assert sum(request.caller == "hog" for request in stage.requests) == 4
    for reply in replies:
        reply.close()
    await asyncio.wait(stage.tasks)
    stage.tasks.clear()
    read.settle_shards_first.extend([pb.ShardPair(low_shard=ANY_SHARD, high_shard=255)] * 2)
    assert (await stage.call(read)).error.reason == "TOO_LARGE"


async def test_relayed_calls_are_bounded_and_end_with_their_callers() -> None:
    stage = Stage(limit=1)
    reply = FakeReply()
    stage.path.handle(READ, reply)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        stage.path.handle(READ, FakeReply())  # type: ignore[arg-type]
    reply.close()
    await asyncio.wait(stage.tasks)
    stage.path.handle(READ, FakeReply())  # type: ignore[arg-type]
    stage.tasks[-1].cancel()


async def test_a_caller_leaves_others_room_for_their_relayed_calls() -> None:
    stage = Stage(limit=12)

    async def begun(caller: str) -> int:
        for number in range(20):
            try:
                stage.path.handle(READ, FakeReply(caller))  # type: ignore[arg-type]
            except Overloaded:
                return number
            await asyncio.sleep(0)
        return 20

    assert await begun("hog") == 6, "alone it has half"
    assert await begun("second hog") == 3, "beside it half of the rest"
    assert await begun("web") > 0
    for task in stage.tasks:
        task.cancel()
    await asyncio.wait(stage.tasks)
    assert await begun("web") == 6
    for task in stage.tasks:
        task.cancel()


@pytest.mark.parametrize("settles", [False, True])
async def test_a_call_without_time_for_another_server_is_refused_before_a_task_exists_that_nobody_hears(
    settles: bool,
) -> None:
    stage = Stage()
    request = pb.Request(deadline_ms=5, read=READ.read)
    if settles:
        request.settle_first.add(id1=ID, atype=1, coordinator_id=ID)
    with pytest.raises(DeadlineExceeded, match="5 ms"):
        stage.path.handle(request, cast(Reply, FakeReply()))
    assert not stage.tasks
