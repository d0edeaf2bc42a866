"""What a follower passes on to a leader, and what the leader checks again by the caller that the follower names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.model.errors import PermissionDenied, TooLarge
from tao.model.graph import decode_object, version_of
from tao.model.writes import AssocAdd
from tao.wire.convert import error_from_pb, reached_versions, shard_messages_from_pb, write_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FOLLOWS, FRIEND, LIKES, NOTE, USER
from tests.rigs.region_rig import RegionRig
from tests.rigs.rights_rig import (
    CHECKIN,
    CHECKIN_ID,
    OTHER,
    USER_ID,
    ask,
    batch,
    counts_of,
    errors_of,
    read,
    region_with_edges,
    settling,
    use_rules,
)


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    async with region_with_edges() as rig:
        yield rig


async def test_fills_are_shared_and_checked_by_the_follower_alone(region: RegionRig) -> None:
    """So one caller's denial is never the answer to another one who waits for the same fetch, nor cached."""
    use_rules(region.leader.configuration)
    server, link = region.near.service, region.near.links["leader-1"]
    for request in (counts_of(NOTE), batch(obj_ids=[CHECKIN_ID])):
        both = await asyncio.gather(*(read(server, request, caller) for caller in ("reader", "root")))
        assert [(set(each.values), each.reasons) for each in both] == [({0}, {})] * 2
    fills = [each for each in link.sent if each.HasField("read") and each.read.ByteSize()]
    assert [(each.read.for_fill, each.read.critical, each.HasField("caller")) for each in fills] == [
        (True, False, False)
    ] * 2, "one each"
    assert not region.leader.configuration.access.denied


async def test_a_leader_checks_critical_reads_again_by_the_caller_that_a_follower_passes_on(region: RegionRig) -> None:
    """The follower has no rules yet, or older ones. What one caller is denied, another one gets who asks meanwhile."""
    use_rules(region.leader.configuration)
    server = region.near.service
    lists = counts_of(FRIEND, COMMENT, NOTE, critical=True)
    objects = batch(obj_ids=[USER_ID, CHECKIN_ID], critical=True)
    asked = [(request, caller) for request in (lists, objects) for caller in ("reader", "root", "")]
    found = await asyncio.gather(*(read(server, *each) for each in asked))
    denied, types = PermissionDenied.reason, {0: USER, 1: CHECKIN}
    assert [each.reasons for each in found[:3]] == [{1: denied, 2: denied}, {}, dict.fromkeys(range(3), denied)]
    assert [each.reasons for each in found[3:]] == [{}, {}, dict.fromkeys(range(2), denied)]
    seen = [{slot: decode_object(value)[1] for slot, value in each.values.items()} for each in found[3:]]
    assert seen == [types | {1: 0}, types, {}]
    assert region.leader.configuration.access.denied == {"critical": 3, "read": 5}
    assert not region.near.configuration.access.denied
    kept = await read(server, batch(obj_ids=[CHECKIN_ID]), "reader")
    assert decode_object(kept.values[0])[1] == CHECKIN, "nothing of what was hidden is cached"


async def test_a_stale_shard_is_not_read_from_the_master_for_those_whom_its_leader_denies_it(region: RegionRig) -> None:
    use_rules(region.leader.configuration)
    request = batch(obj_ids=[USER_ID], count_id1s=[USER_ID] * 2, count_atypes=[FRIEND, COMMENT], max_staleness_ms=3_000)
    found = await read(region.near.service, request, "reader")
    assert (set(found.values), found.reasons) == ({0, 1}, {2: "STALE_READ"})


async def test_what_is_read_at_the_master_because_no_copy_is_new_enough_needs_no_right_to_read_critically(
    region: RegionRig,
) -> None:
    use_rules(region.near.configuration, region.leader.configuration)
    near, committed = region.near, await read(region.near.service, counts_of(COMMENT), "reader")
    near.cache.raise_list_floor(USER_ID, COMMENT, version_of(committed.values[0]) + 1, 1e6)
    assert await read(near.service, counts_of(COMMENT), "reader") == committed
    assert near.reads.misses.read_past_floors == 1


async def test_a_server_is_answered_what_it_asks_for_itself(region: RegionRig) -> None:
    use_rules(region.leader.configuration)
    for critical in (False, True):
        fill = counts_of(NOTE, critical=critical)
        fill.read.for_fill = True
        assert len((await ask(region.leader.service, fill, peer="near-1")).read.values) == 1


async def test_a_leader_checks_writes_again_by_the_caller_that_a_follower_passes_on(region: RegionRig) -> None:
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
