"""Writes through a follower go to the right leader, and are repeated only where nothing was written."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    Fenced,
    InvalidArgument,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    ShardBlocked,
    TaoError,
    Unavailable,
)
from tao.model.writes import AssocAdd, ObjAdd
from tao.routing.fair_shares import ShareSettings
from tao.serving.forward_path import ForwardSettings
from tao.topology import edits
from tao.wire.convert import error_to_pb, write_to_pb
from tao.wire.session import NO_DEADLINE_MS, AnswerHandler
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FRIEND, USER, make_id, make_topology
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import PATIENT_SECONDS, quiet, until
from tests.rigs.region_rig import FollowerRig, RegionRig
from tests.rigs.server_context import SilentTopology

A, B, FAR = make_id(64), make_id(128), make_id(64, 1)


def add(time: int = 1, id2: int = B, atype: int = COMMENT) -> AssocAdd:
    return AssocAdd(A, atype, id2, time, b"")


def asked(region: RegionRig, leader: str) -> int:
    return sum(sent.HasField("write") for sent in region.near.links[leader].sent)


@pytest.mark.parametrize("error", [NotMine("no", 1), Fenced("no"), Unavailable("no"), ShardBlocked("locked", 1)])
async def test_a_write_that_certainly_was_not_done_is_repeated(region: RegionRig, error: TaoError) -> None:
    region.near.links["leader-1"].faults["write"] = [error] * 3
    await region.near.write(add())
    assert asked(region, "leader-1") == 4


async def test_a_forwarded_write_names_the_caller_on_whose_behalf_it_is_sent(region: RegionRig) -> None:
    await region.near.write(add())
    sent = [each for each in region.near.links["leader-1"].sent if each.HasField("write")]
    assert [(each.HasField("caller"), each.caller, each.operator) for each in sent] == [(True, "", "")]


@pytest.mark.parametrize("kind", ["write", "settle_pairs"])
async def test_what_an_operator_has_changed_through_a_follower_names_it_and_nobody_else_can_claim_that(
    region: RegionRig, kind: str
) -> None:
    bodies: dict[str, Any] = {
        "write": pb.WriteBatch(writes=[write_to_pb(add())]),
        "settle_pairs": pb.SettlePairs(pairs=[pb.Pair(low_id=A, high_id=B, atypes=[COMMENT])]),
    }
    for peer, caller in (("operator", "operator/ann"), ("client", "app")):
        request = pb.Request(deadline_ms=60_000, operator="operator/root", **{kind: bodies[kind]})
        region.near.service.handle(request, MemoryReply(lambda _: None, peer=peer, caller=caller))
    sent = [each for each in region.near.links["leader-1"].sent if each.WhichOneof("body") == kind]
    assert [(each.HasField("caller"), each.operator) for each in sent] == [(False, "operator/ann"), (True, "")]


async def test_a_write_is_repeated_until_its_deadline(region: RegionRig) -> None:
    """A takeover of many shards takes longer than any fixed number of attempts."""
    region.near.links["leader-1"].faults["write"] = [NotMine("no", 1)] * 7
    await region.near.write(add())
    assert asked(region, "leader-1") == 8


async def test_a_reservation_is_passed_on_again_while_another_leader_takes_the_shard_over(region: RegionRig) -> None:
    link = region.near.links["leader-1"]
    link.faults["reserve_ids"] = [Unavailable("down"), NotMine("no", 1), Fenced("no")]
    answer = await region.near.ask(pb.Request(reserve_ids=pb.ReserveIds(shard=0, count=3)))
    assert answer.reserved_ids.count == 3
    assert sum(sent.HasField("reserve_ids") for sent in link.sent) == 4


@pytest.mark.parametrize(
    ("error", "deadline_ms", "tries"),
    [(OutcomeUnknown("it may be"), 5_000, 1), (Unavailable("down"), 60, None), (DatabaseDown("gone"), 5_000, 1)],
)
async def test_a_request_that_is_passed_on_in_vain_is_answered_with_the_leader_s_error(
    region: RegionRig, error: TaoError, deadline_ms: int, tries: int | None
) -> None:
    link = region.near.links["leader-1"]
    link.faults["reserve_ids"] = [error] * 1000
    request = pb.Request(deadline_ms=deadline_ms, reserve_ids=pb.ReserveIds(shard=0, count=3))
    with pytest.raises(type(error), match=error.message):
        await region.near.ask(request)
    sent = sum(each.HasField("reserve_ids") for each in link.sent)
    assert sent == tries if tries else sent > 1


async def test_a_write_without_a_deadline_is_repeated_for_a_bounded_time() -> None:
    settings = ForwardSettings(first_pause_seconds=0.001, max_pause_seconds=0.001, max_wait_seconds=0.02)
    rig = FollowerRig("near-1", make_topology(), forwarding=settings)
    rig.subscriptions.follow_routes(rig.configuration.routes)
    rig.links["leader-1"].faults["write"] = [Unavailable("no")] * 1000
    batch = pb.WriteBatch(writes=[write_to_pb(add())])
    answer = await rig.ask(pb.Request(deadline_ms=NO_DEADLINE_MS, write=batch))
    assert answer.write.results[0].error.reason == Unavailable.reason


@pytest.mark.parametrize("error", [OutcomeUnknown("?"), Overloaded("full"), InvalidArgument("")])
async def test_other_errors_are_returned_to_the_client(region: RegionRig, error: TaoError) -> None:
    region.near.links["leader-1"].faults["write"] = [error]
    with pytest.raises(type(error)):
        await region.near.write(add())
    assert asked(region, "leader-1") == 1


async def test_one_write_of_a_batch_is_repeated_while_the_others_are_answered(region: RegionRig) -> None:
    answers: list[pb.Answer] = []
    near = region.near
    near.links["leader-2"].faults["write"] = [Unavailable("no")]
    far_write = AssocAdd(A, COMMENT, B, 1, b""), ObjAdd(make_id(900, 0), USER, b"", allocated=False)
    request = pb.Request(deadline_ms=5_000, write=pb.WriteBatch(writes=[write_to_pb(each) for each in far_write]))
    near.service.handle(request, MemoryReply(answers.append))
    await until(lambda: answers and not answers[-1].more)
    assert sorted(slot for answer in answers for slot in answer.write.slots) == [0, 1]


async def test_a_pair_goes_to_the_leader_of_the_smaller_id_whichever_way_it_is_named(region: RegionRig) -> None:
    await region.far.write(AssocAdd(FAR, FRIEND, A, 1, b""))
    assert sum(sent.HasField("write") for sent in region.far.links["leader-1"].sent) == 1
    assert await region.near.times(A, FRIEND) == await region.far.times(FAR, FRIEND) == [1]


async def test_a_write_of_a_shard_of_another_follower_is_refused(region: RegionRig) -> None:
    with pytest.raises(NotMine):
        await region.near.write(AssocAdd(FAR, COMMENT, A, 1, b""))


@pytest.mark.parametrize(("is_late", "reason"), [(True, DeadlineExceeded.reason), (False, Unavailable.reason)])
async def test_a_write_that_no_leader_takes_ends_with_its_deadline_or_the_budget_and_not_with_the_leader_s_refusal(
    region: RegionRig, is_late: bool, reason: str
) -> None:
    """A client asks another server at no cost when one is not the right one, and the follower is."""
    near = region.near
    near.links["leader-1"].faults["write"] = [NotMine("no such shard here", 1)] * 9
    if not is_late:
        while near.budget.spend(1e9):  # a time to come, so that none until then pays for a repeat
            pass
    batch = pb.WriteBatch(writes=[write_to_pb(add())])
    answer = await near.ask(pb.Request(deadline_ms=20 if is_late else 5_000, write=batch))
    assert answer.write.results[0].error.reason == reason
    assert "no such shard here" in answer.write.results[0].error.message


@pytest.mark.parametrize("is_late", [True, False])
async def test_a_write_that_times_out_on_a_locked_shard_reports_the_lock(region: RegionRig, is_late: bool) -> None:
    """If it reported a missing leader, an operator would look for one, and a client ask in another tier."""
    near = region.near
    near.links["leader-1"].faults["write"] = [ShardBlocked("locked", 1)] * 9
    if not is_late:
        while near.budget.spend(1e9):  # a time to come, so that none until then pays for a repeat
            pass
    batch = pb.WriteBatch(writes=[write_to_pb(add())])
    answer = await near.ask(pb.Request(deadline_ms=20 if is_late else 5_000, write=batch))
    assert answer.write.results[0].error.reason == ShardBlocked.reason
    assert asked(region, "leader-1") < 9


async def test_the_leader_gets_less_time_than_the_follower_so_that_its_answer_comes_in_time(region: RegionRig) -> None:
    near = region.near
    batch = pb.WriteBatch(writes=[write_to_pb(add())])
    await near.ask(pb.Request(deadline_ms=1_000, write=batch))
    passed_on = [sent.deadline_ms for sent in near.links["leader-1"].sent if sent.HasField("write")]
    assert len(passed_on) == 1
    assert 0 < passed_on[0] <= 950


@pytest.mark.parametrize(
    ("left_seconds", "sent_ms"), [(-0.01, 1), (0.0004, 1), (2.0, 2_000), (math.inf, NO_DEADLINE_MS)]
)
async def test_a_request_in_memory_says_of_its_time_what_one_on_a_wire_does(
    region: RegionRig, left_seconds: float, sent_ms: int
) -> None:
    link = region.near.links["leader-1"]
    link.send(pb.Request(write=pb.WriteBatch()), left_seconds, lambda _: None)
    assert link.sent[-1].deadline_ms == sent_ms


async def test_a_write_without_time_for_it_is_refused_with_nothing_sent(region: RegionRig) -> None:
    batch = pb.WriteBatch(writes=[write_to_pb(add())])
    with pytest.raises(DeadlineExceeded):
        await region.near.ask(pb.Request(deadline_ms=5, write=batch))
    assert asked(region, "leader-1") == 0


async def test_a_write_fails_when_no_task_can_be_started_for_its_repeat(region: RegionRig) -> None:
    near = region.near
    link = near.links["leader-1"]
    link.faults["write"] = [Unavailable("no")]
    writing = asyncio.ensure_future(near.write(add()))
    near.tasks.refuses = True
    with pytest.raises(Overloaded):
        await writing
    near.tasks.refuses = False


async def test_a_leader_whose_tasks_are_full_fails_the_writes_it_could_not_begin(region: RegionRig) -> None:
    region.leader.tasks.refuses = True
    with pytest.raises(Overloaded):
        await region.near.write(add(), add(2))
    region.leader.tasks.refuses = False


async def test_an_empty_batch_is_answered(region: RegionRig) -> None:
    assert await region.near.write() == []


async def test_the_writer_s_own_cache_has_the_new_object_and_list_without_a_read(region: RegionRig) -> None:
    near = region.near
    (result,) = await near.write(ObjAdd(make_id(900), USER, b"", allocated=False))
    await near.write(add(5))
    assert near.cache.object(result.id) is not None
    assert await near.times(A, COMMENT) == [5]
    assert region.store.reads == []


async def test_an_edge_to_a_shard_that_does_not_exist_is_refused_with_nothing_written(region: RegionRig) -> None:
    with pytest.raises(InvalidArgument):
        await region.near.write(AssocAdd(A, FRIEND, make_id(64, 900), 1, b""))
    await quiet()
    assert region.store.edges(A, FRIEND) == []
    assert region.store.rows.intents == {}


async def test_a_writer_does_not_wait_for_a_sibling_that_is_marked_down(region: RegionRig) -> None:
    near = region.near
    sibling = near.links["near-2"]
    near.configuration.use_topology(edits.mark_server(near.configuration.routes.topology, "near-2", True))
    sibling.hold_requests.add("apply")
    await near.write(AssocAdd(A, FRIEND, FAR, 1, b""))
    assert not sibling.sent
    assert near.writes.siblings_missed == 0


async def test_a_topology_that_cannot_be_read_takes_no_write_its_time(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent etcd must not keep a write from a leader that is back, and is not asked again and again."""
    silent = SilentTopology()
    monkeypatch.setattr(region.near.configuration, "_load", silent)
    region.near.links["leader-1"].faults["write"] = [Unavailable("restarting"), NotMine("not yet")]
    await region.near.write(add())
    assert (asked(region, "leader-1"), silent.reads) == (3, 1)


async def test_a_sibling_that_a_change_cannot_be_sent_to_holds_up_no_writer(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the writer of the change, which would wait for ever, nor those whose changes are for other siblings."""
    near, link = region.near, region.near.links["near-2"]
    send = link.send

    def refuse_changes(request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> int:
        if request.HasField("apply"):
            raise ValueError("a bug")
        return send(request, timeout_seconds, on_answer)

    monkeypatch.setattr(link, "send", refuse_changes)
    async with asyncio.timeout(PATIENT_SECONDS):
        await near.write(AssocAdd(A, FRIEND, FAR, 1, b""))
    assert near.writes.siblings_missed == 1
    await until(lambda: near.sibling_invalidation.dropped)


# ---- what pauses before another attempt keeps no place in its caller's share ----------------------------------------

LONG_PAUSES = ForwardSettings(first_pause_seconds=600.0, max_pause_seconds=600.0, max_wait_seconds=3_600.0)
TWO_WRITES = ShareSettings(max_under_way_per_caller=8, max_under_way_beside_others=8)
WRITE = pb.Request(deadline_ms=NO_DEADLINE_MS, write=pb.WriteBatch(writes=[write_to_pb(add())]))
RESERVATION = pb.Request(deadline_ms=NO_DEADLINE_MS, reserve_ids=pb.ReserveIds(shard=0, count=3))
SETTLEMENT = pb.Request(
    deadline_ms=NO_DEADLINE_MS, settle_pairs=pb.SettlePairs(pairs=[pb.Pair(low_id=A, high_id=B, atypes=[COMMENT])])
)


def paused_rig() -> FollowerRig:
    """A follower of which a caller may have two writes under way, and whose pauses do not end within a test."""
    rig = FollowerRig("near-1", make_topology(), forwarding=LONG_PAUSES, shares=TWO_WRITES)
    rig.subscriptions.follow_routes(rig.configuration.routes)
    return rig


def send(rig: FollowerRig, request: pb.Request) -> list[pb.Answer]:
    answers: list[pb.Answer] = []
    copy = pb.Request.FromString(request.SerializeToString())
    rig.service.handle(copy, MemoryReply(answers.append, caller="app"))
    return answers


@pytest.mark.parametrize("request_", [WRITE, RESERVATION, SETTLEMENT], ids=["write", "reserve_ids", "settle_pairs"])
async def test_requests_that_are_sent_again_leave_their_places_to_others_and_are_as_many_as_may_be_under_way(
    request_: pb.Request,
) -> None:
    rig = paused_rig()
    link, kind = rig.links["leader-1"], str(request_.WhichOneof("body"))
    link.faults[kind] = [Unavailable("away")] * 4
    answers = [send(rig, request_) for _ in range(4)]

    def sent() -> int:
        return sum(each.HasField(kind) for each in link.sent)  # type: ignore[arg-type]

    await until(lambda: sent() == 4 and sum(map(len, answers)) == 2)
    assert [len(each) for each in answers] == [0, 0, 1, 1]
    for (failed,) in answers[2:]:
        error = failed.write.results[0].error if kind == "write" else failed.error
        assert (error.reason, "away" in error.message) == (Unavailable.reason, True)
    assert rig.reads.shares._shares.set_aside == 8
    assert rig.reads.shares._shares.under_way == 0


async def test_a_miss_is_answered_while_as_many_writes_of_its_caller_pause_as_it_may_have_under_way(
    region: RegionRig,
) -> None:
    rig = paused_rig()
    link = rig.links["leader-1"]
    link.handler = region.leader.service
    link.faults["write"] = [Unavailable("away")] * 2
    writes = [send(rig, WRITE) for _ in range(2)]
    missed = send(rig, pb.Request(deadline_ms=NO_DEADLINE_MS, read=pb.ReadBatch(obj_ids=[A])))
    await until(lambda: missed and not missed[-1].more)
    assert [len(each.read.values) for each in missed] == [1]
    assert writes == [[], []]


async def test_a_batch_keeps_its_place_while_a_leader_works_on_a_part_of_it() -> None:
    rig = paused_rig()
    attempts: list[AnswerHandler] = []

    def keep(request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> int:
        attempts.append(on_answer)
        return 1

    rig.links["leader-1"].send = keep  # type: ignore[method-assign]
    shares = rig.reads.shares._shares
    write = write_to_pb(add())
    answers = send(rig, pb.Request(deadline_ms=NO_DEADLINE_MS, write=pb.WriteBatch(writes=[write, write])))
    (attempt,) = attempts
    away, done = pb.WriteResult(error=error_to_pb(Unavailable("away"))), pb.WriteResult()
    attempt(pb.Answer(more=True, write=pb.WriteAnswer(slots=[0], results=[away])))
    assert (shares.under_way, shares.set_aside) == (8, 0)
    attempt(pb.Answer(write=pb.WriteAnswer(slots=[1], results=[done])))
    assert (shares.under_way, shares.set_aside) == (0, 8)
    await until(lambda: answers)
    assert [list(each.write.slots) for each in answers] == [[1]]
