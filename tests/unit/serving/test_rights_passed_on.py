"""What a follower passes on to a leader, and what the leader checks again by the caller that the follower names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tao.model.errors import PermissionDenied, TooLarge
from tao.model.writes import AssocAdd
from tao.wire.convert import error_from_pb, reached_versions, shard_messages_from_pb, write_to_pb
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import FOLLOWS, LIKES, NOTE
from tests.rigs.region_rig import RegionRig
from tests.rigs.rights_rig import (
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


async def test_a_leader_gives_a_follower_what_it_asks_for_in_the_share_of_a_caller(region: RegionRig) -> None:
    """The follower checks what it answers: here the caller may not read critically."""
    leader = region.leader
    use_rules(leader.configuration)
    for_fill = pb.ReadBatch(obj_ids=[USER_ID], critical=True, for_fill=True)
    answer = await ask(leader.service, pb.Request(read=for_fill, caller="writer-of-nothing"), peer="follower")
    assert [len(value) > 0 for value in answer.read.values] == [True]


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
