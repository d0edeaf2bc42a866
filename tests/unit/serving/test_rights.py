"""What callers may do at followers and leaders, asked of the servers' own handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.access.document import load_access
from tao.model.edge_block import decode_block
from tao.model.edge_states import State
from tao.model.errors import BudgetExceeded, PermissionDenied, TooLarge
from tao.model.graph import EXISTS, decode_object, version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.writes import AssocAdd, AssocMerge, ObjAdd, ObjDelete, ObjUpdate, ReadState, Write
from tao.serving.forward_path import MAX_WRITES_PER_BATCH
from tao.wire.convert import write_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FOLLOWS, FRIEND, LIKES, NOTE, SCHEMA, USER, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.region_rig import RegionRig
from tests.rigs.rights_rig import (
    CHECKIN,
    CHECKIN_ID,
    NOBODY,
    OTHER,
    USER_ID,
    ask,
    batch,
    counts_of,
    errors_of,
    read,
    record_denials,
    region_with_edges,
    use_rules,
)


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    async with region_with_edges() as rig:
        yield rig


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


async def test_a_batch_with_more_writes_than_one_may_have_spends_no_budget(region: RegionRig) -> None:
    server = region.near.service
    use_rules(region.near.configuration)
    with pytest.raises(TooLarge):
        await errors_of(server, "batch", *[ObjUpdate(USER_ID, USER, b"\x80")] * (MAX_WRITES_PER_BATCH + 1))
    assert not (await read(server, batch(obj_ids=[NOBODY]), "batch")).reasons


async def test_budgets_that_are_only_counted_refuse_nothing(region: RegionRig) -> None:
    server, access = region.near.service, region.near.configuration.access
    use_rules(region.near.configuration, mode="count")
    for first in (1000, 2000, 3000):
        flood = batch(obj_ids=[make_id(first + number) for number in range(40)])
        assert not (await read(server, flood, "batch")).reasons
    assert (access.denied, access.would_deny) == ({}, {"budget": 2})


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
    assert region.near.configuration.access.denied == {"critical": 2, "read": 1}
    assert region.leader.configuration.access.denied == {"read": 1}, "of the object that it hides, before the follower"


async def test_a_bound_on_staleness_below_that_of_the_roles_is_refused(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    server = region.near.service
    request = counts_of(FRIEND)
    request.read.max_staleness_ms = 2_999
    with pytest.raises(PermissionDenied, match="allow 3000 or more"):
        await ask(server, request, "reader")
    request.read.max_staleness_ms = 3_000
    assert not (await read(server, request, "reader")).reasons


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
