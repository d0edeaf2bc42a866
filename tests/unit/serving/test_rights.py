"""What callers may do at followers and leaders, asked of the servers' own handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

import pytest

from tao.access.document import load_access
from tao.model.edge_block import decode_block
from tao.model.edge_states import State
from tao.model.errors import BudgetExceeded, PermissionDenied, TaoError, TooLarge
from tao.model.graph import EXISTS, decode_object, version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.writes import AssocAdd, AssocMerge, ObjAdd, ObjDelete, ObjUpdate, ReadState, Write
from tao.serving.audit import Denial
from tao.serving.configuration import Configuration
from tao.serving.request_scope import scope_of
from tao.wire.client_session import Waiter
from tao.wire.convert import error_from_pb, reached_versions, shard_messages_from_pb, write_to_pb
from tao.wire.session import Reply, RequestHandler, failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FOLLOWS, FRIEND, LIKES, NOTE, SCHEMA, USER, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.region_rig import RegionRig

CHECKIN = SCHEMA.otype("checkin").number
USER_ID, CHECKIN_ID, NOBODY = make_id(64), make_id(65), make_id(66)
OTHER = make_id(67)
RULES = """
format: 1
version: {version}
mode: {mode}
roles:
  reader:
    read: {{objects: [user], associations: [friend, likes, liked_by, comment]}}
    critical: {{objects: [user], associations: [friend]}}
    min_staleness_ms: 3000
  writer:
    write: {{objects: [user], associations: [friend, likes, note]}}
  subscriber:
    read: {{associations: [subscribes, subscribers]}}
    write: {{associations: [subscribes, subscribers]}}
    critical: {{associations: [subscribes, subscribers]}}
  watcher: {{watch: all}}
  everything: {{read: all, write: all, critical: all, watch: all, administer: all}}
  dropper: {{administer: {{objects: [user]}}}}
  batch: {{read: all, write: all, critical: all, budget: {{units_per_second: 10, units_under_way: 4}}}}
callers:
  reader: [reader]
  writer: [reader, writer]
  subscriber: [subscriber]
  root: [everything, watcher]
  batch: [batch]
  operator/ann: [dropper]
  operator/root: [everything]
anonymous: [watcher]
"""


def use_rules(*configurations: Configuration, mode: str = "enforce", version: int = 1) -> None:
    for configuration in configurations:
        configuration.access.use_document(load_access(RULES.format(mode=mode, version=version), "access.yaml"))


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    """A region with a user, a check-in, and an edge of some types from the user; nothing is cached at the follower."""
    rig = RegionRig()
    await rig.start()
    await rig.near.write(ObjAdd(USER_ID, USER, b"\x80", False), ObjAdd(CHECKIN_ID, CHECKIN, b"\x80", False))
    for atype in (FRIEND, LIKES, COMMENT, FOLLOWS, NOTE):
        await rig.near.write(AssocAdd(USER_ID, atype, CHECKIN_ID, 7, b""))
    for shard in range(4):
        rig.near.cache.close_shard(shard)
        rig.near.cache.open_shard(shard, 1)
    yield rig
    assert await rig.close() == []


async def ask(
    server: RequestHandler, request: pb.Request, caller: str = "", *, peer: str = "client", deadline_ms: int = 60_000
) -> pb.Answer:
    """Return the whole answer to a request of a caller. Raises the error of the whole request."""
    request.deadline_ms = deadline_ms
    waiter = Waiter(asyncio.get_running_loop())
    try:
        server.handle(request, MemoryReply(waiter.take, peer=peer, caller=caller))
    except TaoError as error:
        waiter.take(failure(error))
    return await waiter.answer()


def batch(**columns: object) -> pb.Request:
    return pb.Request(read=pb.ReadBatch(**columns))  # type: ignore[arg-type]  # columns by name


def counts_of(*atypes: int, critical: bool = False) -> pb.Request:
    return batch(count_id1s=[USER_ID] * len(atypes), count_atypes=atypes, critical=critical)


class Read(NamedTuple):
    """The parts of a read's answer, by slot: values, and reasons of failures."""

    values: dict[int, bytes]
    reasons: dict[int, str]


async def read(server: RequestHandler, request: pb.Request, caller: str) -> Read:
    answer = (await ask(server, request, caller)).read
    slots = answer.slots or range(len(answer.values))
    reasons = {slot: each.reason for slot, each in zip(answer.failed_slots, answer.errors, strict=True)}
    return Read(dict(zip(slots, answer.values, strict=True)), reasons)


async def errors_of(server: RequestHandler, caller: str, *writes: Write, peer: str = "client") -> list[str]:
    """Return the message of each write's error, "" for one that was done."""
    request = pb.Request(write=pb.WriteBatch(writes=[write_to_pb(write) for write in writes]))
    answer = (await ask(server, request, caller, peer=peer)).write
    slots = answer.slots or range(len(writes))
    found = {slot: result.error.message for slot, result in zip(slots, answer.results, strict=True)}
    return [found[slot] for slot in range(len(writes))]


# ---- budgets -------------------------------------------------------------------------------------------------------


async def test_a_caller_that_has_spent_its_budget_is_refused_and_still_has_its_hits(region: RegionRig) -> None:
    server = region.near.service
    use_rules(region.near.configuration)
    denials = record_denials(region.near.configuration)
    cached = batch(obj_ids=[USER_ID])
    assert not (await read(server, cached, "batch")).reasons
    flood = batch(obj_ids=[make_id(1000 + number) for number in range(40)])
    assert not (await read(server, flood, "batch")).reasons, "what a batch costs is known when it is answered"
    missed = batch(obj_ids=[USER_ID, NOBODY])
    assert (await read(server, missed, "batch")).reasons == {1: "BUDGET_EXCEEDED"}
    with pytest.raises(BudgetExceeded, match=r"the role batch, which may cost this server 10 units .* again in \d"):
        await ask(server, batch(obj_ids=[USER_ID], critical=True), "batch")
    with pytest.raises(BudgetExceeded):
        await errors_of(server, "batch", ObjUpdate(USER_ID, USER, b"\x80"))
    assert not (await read(server, cached, "batch")).reasons
    assert not (await read(server, missed, "root")).reasons
    assert region.near.configuration.access.denied == {"budget": 3}
    assert [(each.caller, each.action, each.error.reason) for each in denials] == [
        ("batch", "budget", "BUDGET_EXCEEDED")
    ] * 3
    assert BudgetExceeded.retryable


async def test_the_rest_of_a_batch_is_refused_when_its_caller_has_spent_its_budget_meanwhile(
    region: RegionRig,
) -> None:
    server = region.near.service
    use_rules(region.near.configuration)
    large = batch(obj_ids=[make_id(1000 + number) for number in range(600)])
    reasons = (await read(server, large, "batch")).reasons
    assert reasons == dict.fromkeys(range(512, 600), "BUDGET_EXCEEDED")
    assert region.near.configuration.access.denied == {"budget": 1}


async def test_budgets_that_are_only_counted_refuse_nothing(region: RegionRig) -> None:
    server, access = region.near.service, region.near.configuration.access
    use_rules(region.near.configuration, mode="count")
    for first in (1000, 2000, 3000):
        flood = batch(obj_ids=[make_id(first + number) for number in range(40)])
        assert not (await read(server, flood, "batch")).reasons
    assert (access.denied, access.would_deny) == ({}, {"budget": 2})


async def test_a_leader_gives_a_follower_what_it_asks_for_in_the_share_of_a_caller(region: RegionRig) -> None:
    """The follower checks what it answers: here the caller may not read critically."""
    leader = region.leader
    use_rules(leader.configuration)
    for_fill = pb.ReadBatch(obj_ids=[USER_ID], critical=True, for_fill=True)
    answer = await ask(leader.service, pb.Request(read=for_fill, caller="writer-of-nothing"), peer="follower")
    assert [len(value) > 0 for value in answer.read.values] == [True]


# ---- reads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
async def test_queries_of_denied_types_fail_and_the_others_of_the_batch_are_answered(
    region: RegionRig, cached: bool
) -> None:
    server = region.near.service
    request = counts_of(FRIEND, FOLLOWS, COMMENT, NOTE, FOLLOWS)
    if cached:
        assert not (await read(server, request, "reader")).reasons
    use_rules(region.near.configuration)
    found = await read(server, request, "reader")
    assert set(found.values) == {0, 2}
    assert found.reasons == dict.fromkeys([1, 3, 4], "PERMISSION_DENIED")
    assert region.near.configuration.access.denied == {"read": 3}
    assert not (await read(server, request, "root")).reasons


@pytest.mark.parametrize("cached", [False, True])
async def test_every_operation_on_lists_is_checked(region: RegionRig, cached: bool) -> None:
    def request(atype: int) -> pb.Request:
        return batch(
            count_id1s=[USER_ID],
            count_atypes=[atype],
            range_id1s=[USER_ID],
            range_atypes=[atype],
            range_positions=[0],
            range_limits=[5],
            time_range_id1s=[USER_ID],
            time_range_atypes=[atype],
            time_range_highs=[9],
            time_range_lows=[0],
            time_range_limits=[5],
            get_id1s=[USER_ID],
            get_atypes=[atype],
            get_id2_counts=[1],
            get_id2s=[CHECKIN_ID],
            get_highs=[9],
            get_lows=[0],
            exist_id1s=[USER_ID],
            exist_atypes=[atype],
            exist_id2s=[CHECKIN_ID],
        )

    server = region.near.service
    if cached:
        assert not (await read(server, request(NOTE), "reader")).reasons
    use_rules(region.near.configuration)
    assert (await read(server, request(NOTE), "reader")).reasons == dict.fromkeys(range(5), "PERMISSION_DENIED")
    found = await read(server, request(COMMENT), "reader")
    assert not found.reasons
    assert [edge.id2 for edge in decode_block(found.values[1])] == [CHECKIN_ID]
    assert found.values[4] == EXISTS


@pytest.mark.parametrize("cached", [False, True])
async def test_an_object_of_a_denied_type_is_answered_as_one_that_never_was(region: RegionRig, cached: bool) -> None:
    server = region.near.service
    request = batch(obj_ids=[USER_ID, CHECKIN_ID, NOBODY])
    if cached:
        await read(server, request, "reader")
    use_rules(region.near.configuration)
    found = (await read(server, request, "reader")).values
    assert decode_object(found[0])[1] == USER
    assert found[1] == found[2]
    assert region.near.configuration.access.denied == {"read": 1}
    assert decode_object((await read(server, request, "root")).values[1])[1] == CHECKIN


async def test_a_denied_object_that_the_caller_holds_is_not_confirmed(region: RegionRig) -> None:
    server = region.near.service
    version = decode_object((await read(server, batch(obj_ids=[CHECKIN_ID]), "reader")).values[0])[0]
    known = batch(obj_ids=[CHECKIN_ID], minimum_slots=[0], minimum_versions=[version], known_slots=[0])
    assert (await read(server, known, "reader")).values == {0: b""}
    use_rules(region.near.configuration)
    assert await read(server, known, "reader") == ({}, {0: "STALE_READ"})


@pytest.mark.parametrize("cached", [False, True])
async def test_a_deleted_object_of_a_denied_type_is_answered_as_one_that_never_was(
    region: RegionRig, cached: bool
) -> None:
    server = region.near.service
    assert await errors_of(server, "root", ObjDelete(CHECKIN_ID), ObjDelete(USER_ID)) == ["", ""]
    request = batch(obj_ids=[USER_ID, CHECKIN_ID, NOBODY])
    if not cached:
        region.near.cache.invalidate_types(USER_ID >> SHARD_SHIFT, [USER, CHECKIN], [])
    of_user, of_checkin, _ = [version_of((await read(server, request, "root")).values[each]) for each in range(3)]
    assert min(of_user, of_checkin) > 0
    use_rules(region.near.configuration)
    found = (await read(server, request, "reader")).values
    assert found[1] == found[2]
    assert version_of(found[0]) == of_user, "tokens of a deletion ask for it"
    for minimum in (1, of_checkin):
        of_both = batch(obj_ids=[CHECKIN_ID, NOBODY], minimum_slots=[0, 1], minimum_versions=[minimum] * 2)
        hidden, never = (await ask(server, of_both, "reader")).read.errors
        assert (hidden.reason, hidden.message) == (never.reason, never.message)
    assert version_of((await read(server, request, "root")).values[1]) == of_checkin


@pytest.mark.parametrize("cached", [False, True])
async def test_a_minimum_reveals_nothing_of_a_denied_object(region: RegionRig, cached: bool) -> None:
    server = region.near.service
    request = batch(obj_ids=[CHECKIN_ID, NOBODY], minimum_slots=[0, 1], minimum_versions=[1, 1])
    if cached:
        assert (await read(server, request, "reader")).reasons == {1: "WRITE_LOST"}
    version = version_of((await read(server, batch(obj_ids=[CHECKIN_ID]), "reader")).values[0])
    use_rules(region.near.configuration)
    assert await read(server, request, "reader") == ({}, {0: "WRITE_LOST", 1: "WRITE_LOST"})
    newer = batch(obj_ids=[CHECKIN_ID, NOBODY], minimum_slots=[0, 1], minimum_versions=[version] * 2)
    assert await read(server, newer, "reader") == ({}, {0: "STALE_READ", 1: "STALE_READ"})


async def test_denied_queries_are_no_hot_items_and_make_none(region: RegionRig) -> None:
    rates = region.near.reads.traffic.rates
    rates.fade(asyncio.get_running_loop().time() + 3_600)  # it would replace what is hot, every half a second
    rates.hot.update({(CHECKIN_ID, 0): 9e8, (USER_ID, NOTE): 9e8, (USER_ID, FRIEND): 9e8})
    request = batch(obj_ids=[CHECKIN_ID], count_id1s=[USER_ID] * 2, count_atypes=[NOTE, FRIEND])
    for rules, hot in ((False, [0, 1, 2]), (True, [2])):
        if rules:
            use_rules(region.near.configuration)
        else:
            await read(region.near.service, request, "reader")
        assert (await ask(region.near.service, request, "reader")).read.hot_slots == hot
    for atype in (FOLLOWS, COMMENT):
        region.near.reads.traffic.left = 1
        await read(region.near.service, counts_of(atype), "reader")
    counted = region.near.reads.traffic.most_read(9).key_atypes
    assert COMMENT in counted
    assert FOLLOWS not in counted


async def test_a_stale_shard_is_read_from_the_master_for_those_who_may(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    server = region.near.service
    request = batch(obj_ids=[USER_ID], count_id1s=[USER_ID] * 2, count_atypes=[FRIEND, COMMENT], max_staleness_ms=3_000)
    found = await read(server, request, "reader")
    assert (set(found.values), found.reasons) == ({0, 1}, {2: "STALE_READ"})


async def test_critical_reads_need_a_right_of_their_own(region: RegionRig) -> None:
    use_rules(region.near.configuration, region.leader.configuration)
    server = region.near.service
    found = await read(server, counts_of(FRIEND, COMMENT, NOTE, critical=True), "reader")
    assert (set(found.values), found.reasons) == ({0}, dict.fromkeys([1, 2], "PERMISSION_DENIED"))
    objects = await read(server, batch(obj_ids=[USER_ID, CHECKIN_ID], critical=True), "reader")
    assert [decode_object(objects.values[slot])[1] for slot in (0, 1)] == [USER, 0]
    assert (await read(server, batch(obj_ids=[USER_ID], critical=True), "")).reasons == {0: "PERMISSION_DENIED"}
    assert region.near.configuration.access.denied == {"critical": 2, "read": 2}


async def test_a_bound_on_staleness_below_that_of_the_roles_is_refused(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    server = region.near.service
    request = counts_of(FRIEND)
    request.read.max_staleness_ms = 2_999
    with pytest.raises(PermissionDenied, match="allow 3000 or more"):
        await ask(server, request, "reader")
    request.read.max_staleness_ms = 3_000
    assert not (await read(server, request, "reader")).reasons


async def test_the_fills_of_servers_are_not_checked(region: RegionRig) -> None:
    use_rules(region.leader.configuration)
    answer = await ask(region.leader.service, counts_of(NOTE), peer="near-1")
    assert len(answer.read.values) == 1


async def test_all_that_a_follower_reads_at_a_leader_is_a_fill_which_the_leader_does_not_check(
    region: RegionRig,
) -> None:
    """So one caller's denial is never the answer to another one who waits for the same fetch, nor cached."""
    use_rules(region.leader.configuration)
    server, link = region.near.service, region.near.links["leader-1"]
    for request in (counts_of(NOTE), counts_of(NOTE, critical=True), batch(obj_ids=[CHECKIN_ID], critical=True)):
        found = await read(server, request, "reader")
        assert (set(found.values), found.reasons) == ({0}, {})
    reads = [each for each in link.sent if each.HasField("read") and each.read.ByteSize()]
    assert [each.read.for_fill for each in reads] == [True] * len(reads)
    assert sum(each.read.critical and each.caller == "reader" for each in reads) == 2
    assert not region.leader.configuration.access.denied


# ---- writes --------------------------------------------------------------------------------------------------------


async def test_writes_of_denied_types_fail_alone_and_say_what_is_missing(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    errors = await errors_of(
        region.near.service,
        "writer",
        ObjAdd(OTHER, USER, b"\x80", False),
        ObjAdd(NOBODY, CHECKIN, b"\x80", False),
        AssocAdd(USER_ID, FRIEND, OTHER, 1, b""),
        AssocAdd(USER_ID, LIKES, OTHER, 1, b""),
        AssocAdd(USER_ID, NOTE, OTHER, 1, b""),
    )
    assert errors[0] == errors[2] == errors[4] == ""
    assert "none of its roles grants write of the object type 'checkin'" in errors[1]
    assert "tao access explain --caller writer --operation write --type checkin" in errors[1]
    assert "none of its roles grants write of 'liked_by', the inverse type of 'likes'" in errors[3]
    assert region.near.configuration.access.denied == {"write": 2}


async def test_the_right_on_a_type_covers_the_lists_of_all_its_states(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    server = region.near.service
    subscribes = SCHEMA.atype("subscribes")
    archive = AssocMerge(USER_ID, subscribes.number, OTHER, State.ARCHIVED)
    state = ReadState(USER_ID, subscribes.number, OTHER)
    assert await errors_of(server, "subscriber", archive, state) == ["", ""]
    denied = await errors_of(server, "writer", archive, state)
    assert "grants write of the association type 'subscribes'" in denied[0]
    assert "grants critical of the association type 'subscribes'" in denied[1]
    for caller, errors in (("subscriber", 0), ("writer", 1)):
        answer = await ask(server, counts_of(subscribes.states[State.ARCHIVED]), caller)
        assert len(answer.read.errors) == errors
    assert region.near.configuration.access.denied == {"write": 1, "critical": 1, "read": 1}


async def test_a_change_of_type_needs_the_right_on_both_types(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    moves = [
        pb.Write(assoc_change_type=pb.AssocChangeType(id1=USER_ID, atype=old, id2=OTHER, new_atype=new))
        for old, new in ((NOTE, COMMENT), (COMMENT, NOTE))
    ]
    answer = await ask(region.near.service, pb.Request(write=pb.WriteBatch(writes=moves)), "writer")
    assert [result.error.reason for result in answer.write.results] == ["PERMISSION_DENIED"] * 2


async def test_an_object_is_written_without_naming_its_type_only_if_that_may_be_written(region: RegionRig) -> None:
    use_rules(region.near.configuration, region.leader.configuration)
    server = region.near.service
    assert await errors_of(server, "writer", ObjUpdate(USER_ID, 0, b"\x80")) == [""]
    for write in (ObjUpdate(CHECKIN_ID, 0, b"\x80"), ObjDelete(CHECKIN_ID), ObjDelete(CHECKIN_ID, USER)):
        request = pb.Request(write=pb.WriteBatch(writes=[write_to_pb(write)]))
        (hidden,) = (await ask(server, request, "writer")).write.results
        assert (hidden.found, hidden.HasField("error"), list(hidden.changed_versions)) == (False, False, [])
    assert region.leader.configuration.access.denied == {"write": 3}
    found = await read(server, batch(obj_ids=[CHECKIN_ID]), "root")
    assert decode_object(found.values[0])[1] == CHECKIN
    (error,) = await errors_of(server, "reader", ObjDelete(USER_ID))
    assert "any object type" in error


async def test_an_object_that_may_be_read_and_not_written_is_denied_by_name(region: RegionRig) -> None:
    rules = """
format: 1
version: 1
roles:
  mixed: {read: all, write: {objects: [user]}}
callers: {mixed: [mixed]}
"""
    region.leader.configuration.access.use_document(load_access(rules, "access.yaml"))
    (error,) = await errors_of(region.near.service, "mixed", ObjDelete(CHECKIN_ID))
    assert "none of its roles grants write of the object type 'checkin'" in error


def writing(*writes: Write, caller: str | None = None) -> pb.Request:
    batch_ = pb.WriteBatch(writes=[write_to_pb(write) for write in writes], want_changes=True)
    return pb.Request(write=batch_, caller=caller)


async def test_changes_are_sent_to_servers_only(region: RegionRig) -> None:
    use_rules(region.near.configuration, region.leader.configuration)
    edge = AssocAdd(USER_ID, NOTE, OTHER, 1, b"")
    assert not (await ask(region.near.service, writing(edge), "writer")).write.changes
    assert not (await ask(region.near.service, writing(edge), peer="operator")).write.changes
    edge = AssocAdd(USER_ID, NOTE, OTHER, 2, b"")
    assert (await ask(region.near.service, writing(edge, caller="writer"), peer="near-2")).write.changes


async def test_a_write_that_is_left_alone_returns_no_changes_of_the_writes_committed_with_it(region: RegionRig) -> None:
    use_rules(region.leader.configuration)
    left_alone, other = await asyncio.gather(
        ask(region.leader.service, writing(ObjDelete(CHECKIN_ID), caller="writer"), peer="near-1"),
        ask(region.leader.service, writing(AssocAdd(USER_ID, NOTE, OTHER, 1, b""), caller="root"), peer="near-1"),
    )
    assert other.write.changes
    assert not left_alone.write.changes


# ---- the way to the leader -----------------------------------------------------------------------------------------


async def test_a_leader_checks_again_by_the_caller_that_a_follower_passes_on(region: RegionRig) -> None:
    use_rules(region.leader.configuration)
    server, edge = region.near.service, AssocAdd(USER_ID, NOTE, OTHER, 1, b"")
    assert await errors_of(server, "writer", edge) == [""]
    for caller in ("reader", "somebody", ""):
        (error,) = await errors_of(server, caller, edge)
        assert "none of its roles grants write" in error
    assert region.leader.configuration.access.denied == {"write": 3}
    assert not region.near.configuration.access.denied
    passed = [each.caller for each in region.near.links["leader-1"].sent if each.HasField("caller")]
    assert passed[-4:] == ["writer", "reader", "somebody", ""]


async def test_ids_are_reserved_for_callers_who_may_write_objects(region: RegionRig) -> None:
    use_rules(region.leader.configuration)
    reserve = pb.Request(reserve_ids=pb.ReserveIds(shard=0, count=1))
    assert (await ask(region.near.service, reserve, "writer")).reserved_ids.count == 1
    with pytest.raises(PermissionDenied, match="may write no type of object"):
        await ask(region.near.service, reserve, "reader")


async def test_nobody_but_a_server_is_believed_to_pass_on_a_caller(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    write = write_to_pb(AssocAdd(USER_ID, NOTE, OTHER, 1, b""))
    claimed = pb.Request(write=pb.WriteBatch(writes=[write]), caller="root")
    (result,) = (await ask(region.near.service, claimed, "reader")).write.results
    assert error_from_pb(result.error).reason == "PERMISSION_DENIED"
    (result,) = (await ask(region.near.service, claimed, peer="near-2")).write.results
    assert not result.HasField("error")
    request = counts_of(NOTE)
    request.caller = "reader"
    assert (await ask(region.near.service, request, peer="near-2")).read.failed_slots == [0]


def settling(*atypes: int) -> pb.Request:
    return pb.Request(settle_pairs=pb.SettlePairs(pairs=[pb.Pair(low_id=USER_ID, high_id=CHECKIN_ID, atypes=atypes)]))


async def test_pairs_are_settled_for_those_who_may_read_both_ends(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    assert (await ask(region.near.service, settling(LIKES), "reader")).settled_pairs.settled
    for atypes in ((FOLLOWS,), (LIKES, FOLLOWS)):
        with pytest.raises(PermissionDenied, match="read of the association type 'follow"):
            await ask(region.near.service, settling(*atypes), "reader")
    assert region.near.configuration.access.denied == {"read": 2}


async def test_an_application_has_no_more_pairs_settled_at_once_than_a_token_names(region: RegionRig) -> None:
    pair = pb.Pair(low_id=USER_ID, high_id=CHECKIN_ID, atypes=[LIKES])
    request = pb.Request(settle_pairs=pb.SettlePairs(pairs=[pair] * 305))
    with pytest.raises(TooLarge, match="send at most 304"):
        await ask(region.near.service, request, "reader")


async def test_who_has_pairs_settled_learns_the_versions_of_lists_that_it_may_read_and_no_edges(
    region: RegionRig,
) -> None:
    change = pb.Message(list_change=pb.ListChange(id1=OTHER, atype=LIKES, before=1, after=2, put_id2s=[1]))
    hidden = pb.Message(list_change=pb.ListChange(id1=OTHER, atype=NOTE, before=1, after=2, put_id2s=[1]))
    changes = [pb.ShardMessages(shard=1, messages=[change, hidden])]

    class Leader:
        def handle(self, _: pb.Request, reply: Reply) -> None:
            reply.send(pb.Answer(settled_pairs=pb.SettledPairs(settled=1, changes=changes)))

    region.near.links["leader-1"].handler = Leader()
    request = pb.Request(settle_pairs=pb.SettlePairs(shards=[pb.ShardPair(low_shard=0, high_shard=1)]))
    for rules, atypes in ((False, {LIKES, NOTE}), (True, {LIKES})):
        if rules:
            use_rules(region.near.configuration)
        (settled,) = (await ask(region.near.service, request, "reader")).settled_pairs.changes
        assert reached_versions([shard_messages_from_pb(settled)]) == {(OTHER, atype): 2 for atype in atypes}
        assert {message.WhichOneof("kind") for message in settled.messages} == {"list_invalidation"}


# ---- what the audit log hears --------------------------------------------------------------------------------------


def record_denials(*configurations: Configuration) -> list[Denial]:
    denials: list[Denial] = []
    for configuration in configurations:
        configuration.access.on_denied = denials.append
    return denials


def heard(denials: list[Denial]) -> list[tuple[str, str, set[str], set[int], int]]:
    """Return caller, operation, types, shards and number of each, and forget them."""
    found = [
        (each.caller, each.action, set(map(str, scope.types)), set(scope.shards), each.times)
        for each in denials
        for scope in [scope_of(each.what)]
    ]
    assert all(each.peer.role for each in denials)
    denials.clear()
    return found


def object_type(otype: int) -> set[str]:
    return {f"object {otype}"}


def list_type(*atypes: int) -> set[str]:
    return {f"association {each}" for each in atypes}


@pytest.mark.parametrize("cached", [False, True])
async def test_denied_reads_are_reported_with_their_types_and_shards(region: RegionRig, cached: bool) -> None:
    server = region.near.service
    far = make_id(1, shard=3)
    request = batch(obj_ids=[CHECKIN_ID, USER_ID], count_id1s=[USER_ID, far], count_atypes=[FOLLOWS, NOTE])
    if cached:
        await read(server, request, "root")
    use_rules(region.near.configuration)
    denials = record_denials(region.near.configuration)
    await read(server, request, "reader")
    found = heard(denials)
    assert sorted(found, key=str) == sorted(
        [
            ("reader", "read", object_type(CHECKIN), {0}, 1),
            ("reader", "read", list_type(FOLLOWS), {0}, 1),
            ("reader", "read", list_type(NOTE), {3}, 1),
        ],
        key=str,
    )
    await read(server, batch(obj_ids=[USER_ID], count_id1s=[USER_ID], count_atypes=[COMMENT], critical=True), "reader")
    assert heard(denials) == [("reader", "critical", list_type(COMMENT), {0}, 1)]
    await read(server, batch(obj_ids=[USER_ID], critical=True), "subscriber")
    assert heard(denials) == [("subscriber", "critical", set(), {0}, 1)]
    stale = counts_of(FRIEND)
    stale.read.max_staleness_ms = 1
    with pytest.raises(PermissionDenied):
        await ask(server, stale, "reader")
    assert heard(denials) == [("reader", "read", list_type(FRIEND), {0}, 1)]


async def test_denied_writes_are_reported_with_their_types_and_shards_by_whom_they_are_denied(
    region: RegionRig,
) -> None:
    use_rules(region.near.configuration, region.leader.configuration)
    server = region.near.service
    denials = record_denials(region.near.configuration, region.leader.configuration)
    far = make_id(1, shard=3)
    await errors_of(server, "writer", AssocAdd(USER_ID, LIKES, far, 1, b""), ObjAdd(far, CHECKIN, b"\x80", False))
    assert heard(denials) == [
        ("writer", "write", list_type(LIKES), {0, 3}, 1),
        ("writer", "write", object_type(CHECKIN), {3}, 1),
    ]
    assert await errors_of(server, "writer", ObjDelete(CHECKIN_ID)) == [""], "it finds nothing"
    assert denials[0].peer.name == "near-1"
    assert heard(denials) == [("writer", "write", object_type(CHECKIN), {0}, 1)]


async def test_nothing_of_what_is_denied_is_read_when_nobody_records_it(
    region: RegionRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_rules(region.near.configuration)
    monkeypatch.setattr("tao.serving.request_scope._ScopeReader", None)
    (error,) = await errors_of(region.near.service, "writer", AssocAdd(USER_ID, LIKES, OTHER, 1, b""))
    assert error


async def test_denied_requests_are_reported_with_all_that_they_name(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    server = region.near.service
    denials = record_denials(region.near.configuration)
    for request, caller, peer in (
        (settling(LIKES, FOLLOWS), "reader", "client"),
        (INVALIDATE_NOTES, "operator/ann", "operator"),
        (pb.Request(reserve_ids=pb.ReserveIds(shard=2, count=1)), "reader", "client"),
    ):
        copied = pb.Request()
        copied.CopyFrom(request)
        with suppress(PermissionDenied):
            await ask(server, copied, caller, peer=peer)
    assert heard(denials) == [
        ("reader", "read", list_type(LIKES, FOLLOWS), {0}, 1),
        ("operator/ann", "administer", object_type(USER) | list_type(NOTE), {0}, 1),
        ("reader", "write", set(), {2}, 1),
    ]


async def test_a_refusal_for_a_spent_budget_is_reported_with_what_was_asked_for(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    server = region.near.service
    denials = record_denials(region.near.configuration)
    await read(server, batch(obj_ids=[make_id(1000 + number) for number in range(40)]), "batch")
    far = make_id(1, shard=3)
    with pytest.raises(BudgetExceeded):
        await errors_of(server, "batch", AssocAdd(USER_ID, NOTE, far, 1, b""))
    assert heard(denials) == [("batch", "budget", list_type(NOTE), {0, 3}, 1)]


async def test_hidden_objects_of_one_batch_are_one_report(region: RegionRig) -> None:
    server = region.near.service
    request = batch(obj_ids=[CHECKIN_ID] * 40)
    await read(server, request, "root")
    use_rules(region.near.configuration)
    denials = record_denials(region.near.configuration)
    await read(server, request, "reader")
    assert heard(denials) == [("reader", "read", object_type(CHECKIN), {0}, 40)]


async def test_what_is_only_counted_is_not_reported_as_denied(region: RegionRig) -> None:
    use_rules(region.near.configuration, mode="count")
    denials = record_denials(region.near.configuration)
    await read(region.near.service, batch(obj_ids=[CHECKIN_ID], count_id1s=[USER_ID], count_atypes=[NOTE]), "reader")
    assert region.near.configuration.access.would_deny == {"read": 2}
    assert denials == []


# ---- the mode, and changes of the document and the schema ----------------------------------------------------------


async def test_in_the_counting_mode_everything_is_done_and_counted(region: RegionRig) -> None:
    use_rules(region.near.configuration, region.leader.configuration, mode="count")
    server, access = region.near.service, region.near.configuration.access
    for _ in ("missed", "cached"):
        found = await read(server, counts_of(FRIEND, NOTE), "reader")
        assert (len(found.values), found.reasons) == (2, {})
        objects = await read(server, batch(obj_ids=[CHECKIN_ID]), "reader")
        assert decode_object(objects.values[0])[1] == CHECKIN
    assert access.would_deny == {"read": 4}
    await read(server, counts_of(COMMENT, critical=True), "reader")
    assert access.would_deny == {"read": 4, "critical": 1}
    assert await errors_of(server, "writer", AssocAdd(USER_ID, LIKES, OTHER, 1, b"")) == [""]
    assert access.would_deny["write"] == 1
    request = pb.Request(write=pb.WriteBatch(writes=[write_to_pb(ObjDelete(CHECKIN_ID))]))
    (done,) = (await ask(server, request, "writer")).write.results
    assert done.found
    assert region.leader.configuration.access.would_deny["write"] == 2
    assert not access.denied + region.leader.configuration.access.denied


async def test_a_document_is_replaced_by_one_of_a_higher_version_only(region: RegionRig) -> None:
    configuration = region.near.configuration
    use_rules(configuration, version=5)
    for version, mode, errors, in_force in (
        (5, "enforce", 0, 5),
        (5, "count", 1, 5),
        (4, "count", 2, 5),
        (6, "count", 2, 6),
    ):
        use_rules(configuration, version=version, mode=mode)
        policy = configuration.access.policy
        assert policy is not None
        assert (configuration.access.document_errors, policy.version) == (errors, in_force)


async def test_a_server_warns_when_it_has_no_document(region: RegionRig, capsys: pytest.CaptureFixture[str]) -> None:
    access = region.near.configuration.access
    access.warn_if_open()
    assert "every caller may do everything" in capsys.readouterr().out
    use_rules(region.near.configuration)
    access.warn_if_open()
    assert "every caller may do everything" not in capsys.readouterr().out


async def test_a_type_that_the_schema_gets_is_granted_from_then_on(region: RegionRig) -> None:
    configuration = region.near.configuration
    text = "format: 1\nversion: 1\nroles: {one: {read: {objects: [planet]}}}\nothers: [one]\n"
    configuration.access.use_document(load_access(text, "access.yaml"))
    policy = configuration.access.policy
    assert policy is not None
    assert policy.rights("x").read.objects == 0
    schema = (
        "format: 1\nobjects: {planet: {number: 77}}\nreserved:\n"
        f"  objects: {[each.number for each in SCHEMA.objects]}\n"
        f"  associations: {[each.number for each in SCHEMA.assocs]}\n"
    )
    assert configuration.use_schema_text(schema, "schema.yaml")
    policy = configuration.access.policy
    assert policy is not None
    assert policy.rights("x").read.objects == 1 << 77


# ---- requests that name no types -----------------------------------------------------------------------------------

INVALIDATE = pb.Request(invalidate=pb.Invalidate(shards=[0]))
INVALIDATE_USERS = pb.Request(invalidate=pb.Invalidate(shards=[0], otypes=[USER]))
INVALIDATE_NOTES = pb.Request(invalidate=pb.Invalidate(shards=[0], otypes=[USER], atypes=[NOTE]))
INSPECT = pb.Request(inspect=pb.Inspect(obj_ids=[USER_ID]))
TOPOLOGY = pb.Request(get_topology=pb.GetTopology())
SETTLE = pb.Request(settle_pairs=pb.SettlePairs(pairs=[pb.Pair(low_id=USER_ID, high_id=OTHER, atypes=[FRIEND])]))


@pytest.mark.parametrize(
    ("peer", "caller", "request_", "allowed"),
    [
        ("client", "", TOPOLOGY, True),
        ("client", "reader", TOPOLOGY, True),
        ("client", "reader", SETTLE, True),
        ("client", "", SETTLE, False),
        ("operator", "operator/ann", TOPOLOGY, True),
        ("operator", "operator/ann", INVALIDATE_USERS, True),
        ("operator", "operator/ann", INVALIDATE_NOTES, False),
        ("operator", "operator/ann", INVALIDATE, False),
        ("operator", "operator/ann", INSPECT, False),
        ("operator", "operator/ann", counts_of(FRIEND), False),
        ("operator", "operator/root", INSPECT, True),
        ("operator", "operator/root", counts_of(FRIEND), True),
        ("operator", "operator/unnamed", INSPECT, True),
        ("operator", "operator/unnamed", INVALIDATE, True),
        ("operator", "", INSPECT, True),
        ("near-2", "follower/near-2", INVALIDATE, True),
        ("near-2", "follower/near-2", counts_of(NOTE), True),
    ],
)
async def test_a_request_without_types_needs_the_right_on_all_of_them(
    region: RegionRig, peer: str, caller: str, request_: pb.Request, allowed: bool
) -> None:
    use_rules(region.near.configuration)
    request = pb.Request()
    request.CopyFrom(request_)
    if allowed:
        await ask(region.near.service, request, caller, peer=peer)
    else:
        with pytest.raises(PermissionDenied):
            await ask(region.near.service, request, caller, peer=peer)


async def test_a_series_of_changes_needs_the_right_to_watch(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    server = region.near.service
    for caller, allowed in (("", True), ("root", True), ("reader", False), ("somebody", False)):
        reply = MemoryReply(lambda _: None, caller=caller)
        request = pb.Request(watch=pb.Watch(), deadline_ms=60_000)
        if allowed:
            server.handle(request, reply)
            reply.close()
        else:
            with pytest.raises(PermissionDenied, match="watch is denied"):
                server.handle(request, reply)
