"""Invalid and hostile requests to a running cluster: each gets a typed error, writes nothing in part, and affects no
other request.

The requests are made with the SDK, where most mistakes are raised before the network, and without it, over sessions and
bare sockets, as a program in another language or an attacker would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest

from tao.client import ClientSettings, Graph, Object, SomeFailed, connect
from tao.devcluster.layout import Role
from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    InvalidArgument,
    InvalidField,
    OutcomeUnknown,
    Overloaded,
    RequestError,
    TaoError,
    TooLarge,
    UnknownType,
    WrongType,
)
from tao.wire import framing
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.hostile_rig import (
    CHECKIN,
    COMMENT,
    HOSTILE_TEXTS,
    LIKES,
    MEGABYTE,
    NOTE,
    SHARDS,
    TOO_HIGH,
    USER,
    Rig,
    answer_from,
    bare_connection,
    greet,
    new_user,
    reading_of,
    resident_mb,
    result_of,
)
from tests.e2e.region_access import until
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="package"),
]


async def test_wrong_use_of_the_sdk_fails_before_the_network_and_names_what_is_wrong(graph: Graph) -> None:
    user = await new_user(graph)
    sent = graph.stats.writes + graph.stats.queries
    huge = "x" * (MEGABYTE + 1)
    wrong: list[tuple[Callable[[], Awaitable[object]], type[TaoError], str]] = [
        (lambda: graph.obj_add("usr"), UnknownType, "user"),
        (lambda: graph.obj_add("user", {"nme": "x"}), InvalidField, "name"),
        (lambda: graph.obj_add("user", {"name": 7}), InvalidField, "name"),
        (lambda: graph.obj_add("user", {"name": "\ud800"}), InvalidField, "name"),
        (lambda: graph.obj_add("user", {"name": huge}), TooLarge, "user"),
        (lambda: graph.obj_update(user, {"name": 7}, "user"), InvalidField, "name"),
        (lambda: graph.obj_get(0), InvalidArgument, "id"),
        (lambda: graph.obj_get(TOO_HIGH), InvalidArgument, "id"),
        (lambda: graph.obj_get(-1), InvalidArgument, "id"),
        (lambda: graph.obj_get((SHARDS << 47) + 1), InvalidArgument, "shard"),
        (lambda: graph.assoc_add(user, "lkes", user), UnknownType, "likes"),
        (lambda: graph.assoc_add(user, "likes", user, -1), InvalidArgument, "time"),
        (lambda: graph.assoc_add(user, "likes", user, TOO_HIGH), InvalidArgument, "time"),
        (lambda: graph.assoc_add(user, "likes", (SHARDS << 47) + 1), InvalidArgument, "id2"),
        (lambda: graph.assoc_add(user, "follows", user, 1, {"notify": 3}), InvalidField, "notify"),
        (lambda: graph.assoc_add(user, "note", user, 1, {"text": "x" * 17_000}), TooLarge, "note"),
        (lambda: graph.assoc_range(user, "likes", -1, 5), InvalidArgument, "pos"),
        (lambda: graph.assoc_range(user, "likes", 0, -5), InvalidArgument, "limit"),
        (lambda: graph.assoc_range(user, "likes", 0, 1 << 40), InvalidArgument, "limit"),
        (lambda: graph.assoc_time_range(user, "likes", TOO_HIGH, 0, 5), InvalidArgument, "high"),
        (lambda: graph.assoc_time_range(user, "likes", 9, 0, 5, -1), InvalidArgument, "pos"),
        (lambda: graph.assoc_time_range(user, "likes", 9, 0, 5, TOO_HIGH), InvalidArgument, "pos"),
        (lambda: graph.assoc_get(user, "likes", range(1, 6002)), TooLarge, "6000"),
        (lambda: graph.assoc_get(user, "likes", [0]), InvalidArgument, "id2s[0]"),
    ]
    for call, kind, named in wrong:
        with pytest.raises(kind) as caught:
            await call()
        assert named in caught.value.message, caught.value.message
    assert graph.stats.writes + graph.stats.queries == sent


async def test_an_id_of_another_type_is_rejected_and_nothing_changes(graph: Graph) -> None:
    user = await new_user(graph)
    with pytest.raises(WrongType):
        await graph.obj_update(user, {"text": "x"}, "checkin")
    found = await graph.obj_get(user)
    assert found is not None
    assert (found.otype, found.fields["name"]) == ("user", "n")


def wrong_writes(id1: int, id2: int, reserved: int) -> list[tuple[pb.Write, str]]:
    """Return writes about two users and a reserved id that no SDK sends, each with the reason of its rejection."""
    pack = msgspec.msgpack.encode
    foreign = (SHARDS + 3) << 47 | 5

    def obj_add(data: bytes = b"", otype: int = USER, object_id: int = reserved) -> pb.Write:
        return pb.Write(obj_add=pb.ObjAdd(id=object_id, otype=otype, data=data))

    def assoc_add(atype: int = LIKES, data: bytes = b"", time: int = 1, id1: int = id1, id2: int = id2) -> pb.Write:
        return pb.Write(assoc_add=pb.AssocAdd(id1=id1, atype=atype, id2=id2, time=time, data=data))

    def update(patch: bytes, otype: int = 0, object_id: int = id1) -> pb.Write:
        return pb.Write(obj_update=pb.ObjUpdate(id=object_id, otype=otype, patch=patch))

    def change(atype: int, new_atype: int) -> pb.Write:
        move = pb.AssocChangeType(id1=id1, atype=atype, id2=id2, new_atype=new_atype)
        return pb.Write(assoc_change_type=move)

    invalid_utf8 = b"\x81\x01\xa2\xff\xfe"
    bomb = b"\x91" * 200_000 + b"\xc0"
    return [
        (obj_add(otype=0), "UNKNOWN_TYPE"),
        (obj_add(otype=(1 << 32) - 1), "UNKNOWN_TYPE"),
        (obj_add(pack({1: 7})), "INVALID_FIELD"),
        (obj_add(pack({1: None})), "INVALID_FIELD"),
        (obj_add(pack({"name": "x"})), "INVALID_FIELD"),
        (obj_add(pack([1, 2])), "INVALID_FIELD"),
        (obj_add(b"\x82\x01\xa1a\x01\xa1b"), "INVALID_FIELD"),
        (obj_add(invalid_utf8), "INVALID_FIELD"),
        (obj_add(b"\x81\x01"), "INVALID_FIELD"),
        (obj_add(b"\xdf\xff\xff\xff\xff"), "INVALID_FIELD"),
        (obj_add(b"\x81\x01\xa1x trailing"), "INVALID_FIELD"),
        (obj_add(b"\x81\x63" + bomb), "INVALID_FIELD"),
        (obj_add(b"\xc1" * 40), "INVALID_FIELD"),
        (obj_add(pack({1: "x" * MEGABYTE})), "TOO_LARGE"),
        (obj_add(object_id=TOO_HIGH), "INVALID_ARGUMENT"),
        (obj_add(object_id=(1 << 64) - 1), "INVALID_ARGUMENT"),
        (obj_add(object_id=foreign), "UNKNOWN_SHARD"),
        (pb.Write(obj_add=pb.ObjAdd(shard=SHARDS, otype=USER)), "UNKNOWN_SHARD"),
        (pb.Write(obj_add=pb.ObjAdd(shard=(1 << 32) - 1, otype=USER)), "UNKNOWN_SHARD"),
        (update(pack({1: 7})), "INVALID_FIELD"),
        (update(invalid_utf8), "INVALID_FIELD"),
        (update(b"\x81\x01"), "INVALID_FIELD"),
        (update(pack({1: "x"}), CHECKIN), "WRONG_TYPE"),
        (update(pack({1: "x"}), 77), "UNKNOWN_TYPE"),
        (update(pack({1: "x" * (MEGABYTE - 4)})), "TOO_LARGE"),
        (update(b"x" * (2 * MEGABYTE)), "TOO_LARGE"),
        (update(b"", object_id=0), "INVALID_ARGUMENT"),
        (assoc_add(atype=0), "UNKNOWN_TYPE"),
        (assoc_add(atype=999), "UNKNOWN_TYPE"),
        (assoc_add(time=TOO_HIGH), "INVALID_ARGUMENT"),
        (assoc_add(time=(1 << 64) - 1), "INVALID_ARGUMENT"),
        (assoc_add(id2=0), "INVALID_ARGUMENT"),
        (assoc_add(id2=TOO_HIGH), "INVALID_ARGUMENT"),
        (assoc_add(id2=foreign), "UNKNOWN_SHARD"),
        (assoc_add(COMMENT, pack({99: "x" * 256})), "TOO_LARGE"),
        (assoc_add(LIKES, pack({99: "x" * 256})), "TOO_LARGE"),
        (assoc_add(NOTE, pack({1: "x" * 16_384})), "TOO_LARGE"),
        (assoc_add(NOTE, pack({2: ["x", 1]})), "INVALID_FIELD"),
        (assoc_add(NOTE, b"\x81"), "INVALID_FIELD"),
        (change(LIKES, 999), "UNKNOWN_TYPE"),
        (change(999, LIKES), "UNKNOWN_TYPE"),
        (pb.Write(assoc_delete=pb.AssocDelete(id1=id1, atype=999, id2=id2)), "UNKNOWN_TYPE"),
        (pb.Write(settle_edge=pb.SettleEdge(id1=id1, atype=LIKES, id2=id2, present=True)), "INVALID_ARGUMENT"),
        (pb.Write(), "PROTOCOL_ERROR"),
    ]  # fmt: skip


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_an_invalid_write_past_the_sdk_is_rejected_and_stores_nothing(
    rig: Rig, graph: Graph, transport: str
) -> None:
    id1, id2 = await new_user(graph), await new_user(graph)
    reserved = (await graph.reserve_ids(1, near=id1))[0]
    cases = wrong_writes(id1, id2, reserved)
    good = pb.Write(obj_add=pb.ObjAdd(id=reserved, otype=USER, data=msgspec.msgpack.encode({1: "good"})))
    async with rig.session(rig.follower_of(id1), transport) as session:
        for write, reason in cases:
            assert await result_of(session, write) == reason, str(write)[:200]
        # In one batch with a valid write, each invalid one fails alone.
        batch = pb.WriteBatch(writes=[*(write for write, _ in cases), good])
        answer = (await session.ask(pb.Request(write=batch), PATIENT_SECONDS)).write
        by_slot = dict(zip(answer.slots, answer.results, strict=True))
        assert [by_slot[slot].error.reason for slot in range(len(cases) + 1)] == [*(reason for _, reason in cases), ""]
    assert await graph.assoc_count(id1, "note", critical=True) == 0
    for end, atype in ((id1, "likes"), (id2, "liked_by"), (id1, "comment"), (id1, "note")):
        assert not await graph.assoc_range(end, atype, 0, 10, critical=True)
    for object_id, fields in ((id1, {"name": "n", "home": "h"}), (reserved, {"name": "good", "home": ""})):
        found = await graph.obj_get(object_id, critical=True)
        assert found is not None
        assert dict(found.fields) == fields


@pytest.mark.parametrize("transport", ["frames", "grpc"])
@pytest.mark.parametrize("warm", [False, True])
async def test_an_invalid_read_past_the_sdk_is_rejected_whether_cached_or_not(
    rig: Rig, graph: Graph, transport: str, warm: bool
) -> None:
    id1 = await new_user(graph)
    if warm:  # A cached answer is returned without validation, where the answer does no harm.
        await graph.assoc_add(id1, "likes", await new_user(graph), 1)
        assert len(await graph.assoc_range(id1, "likes", 0, 10)) == 1

    def ranged(pos: int = 0, limit: int = 5, id1: int = id1, atype: int = LIKES) -> pb.ReadBatch:
        return pb.ReadBatch(range_id1s=[id1], range_atypes=[atype], range_positions=[pos], range_limits=[limit])

    def window(high: int, low: int) -> pb.ReadBatch:
        return pb.ReadBatch(
            time_range_id1s=[id1], time_range_atypes=[LIKES], time_range_highs=[high], time_range_lows=[low],
            time_range_limits=[5],
        )  # fmt: skip

    def got(id2s: list[int], high: int = 9) -> pb.ReadBatch:
        return pb.ReadBatch(
            get_id1s=[id1], get_atypes=[LIKES], get_id2_counts=[len(id2s)], get_id2s=id2s,
            get_highs=[high], get_lows=[0],
        )  # fmt: skip

    foreign = (SHARDS + 3) << 47 | 5
    cases = [
        (pb.ReadBatch(obj_ids=[0]), "INVALID_ARGUMENT"),
        (pb.ReadBatch(obj_ids=[TOO_HIGH]), "INVALID_ARGUMENT"),
        (pb.ReadBatch(obj_ids=[(1 << 64) - 1]), "INVALID_ARGUMENT"),
        (pb.ReadBatch(obj_ids=[foreign]), "UNKNOWN_SHARD"),
        (pb.ReadBatch(count_id1s=[id1], count_atypes=[999]), "UNKNOWN_TYPE"),
        (ranged(atype=(1 << 32) - 1), "UNKNOWN_TYPE"),
        (ranged(pos=TOO_HIGH), "INVALID_ARGUMENT"),
        (ranged(pos=(1 << 64) - 1, limit=(1 << 32) - 1), "INVALID_ARGUMENT"),
        (ranged(pos=TOO_HIGH - 1, limit=(1 << 32) - 1), ""),
        (ranged(limit=0), ""),
        (window(TOO_HIGH, 0), "INVALID_ARGUMENT"),
        (window(0, (1 << 64) - 1), "INVALID_ARGUMENT"),
        (window(3, 9), ""),
        (got(list(range(1, 6002))), "TOO_LARGE"),
        (got([5, 5, 5, 5]), ""),
        (got([]), ""),
        (got([0]), "INVALID_ARGUMENT"),
        (got([1], TOO_HIGH), "INVALID_ARGUMENT"),
        (pb.ReadBatch(range_id1s=[id1], range_atypes=[LIKES]), "INVALID_ARGUMENT"),
        (pb.ReadBatch(get_id1s=[id1], get_atypes=[LIKES], get_id2_counts=[(1 << 32) - 1]), "INVALID_ARGUMENT"),
        (pb.ReadBatch(obj_ids=[id1], minimum_slots=[0]), "INVALID_ARGUMENT"),
    ]
    follower = rig.follower_of(id1)
    async with rig.session(follower, transport) as session, rig.session(follower, role="operator") as operator:
        for batch, reason in cases:
            if not warm:
                await operator.ask(pb.Request(invalidate=pb.Invalidate(shards=[id1 >> 47])), PATIENT_SECONDS)
            found = await reading_of(session, batch)
            assert found == reason or (warm and found == ""), str(batch)[:200]


async def test_any_text_in_a_string_is_read_back_unchanged(graph: Graph) -> None:
    for text in HOSTILE_TEXTS:
        user = await graph.obj_add("user", {"name": text, "home": text})
        await graph.obj_update(user, {"home": text + text})
        await graph.assoc_add(user, "note", user, 1, {"text": text, "labels": [text, text]})
        for critical in (False, True):
            found = await graph.obj_get(user, critical=critical)
            assert found is not None
            assert dict(found.fields) == {"name": text, "home": text + text}
            (note,) = await graph.assoc_range(user, "note", 0, 5, critical=critical)
            assert dict(note.fields) == {"text": text, "labels": [text, text]}


async def test_the_largest_data_allowed_is_stored_and_one_byte_more_is_not(graph: Graph) -> None:
    name = "x" * (MEGABYTE - 7)  # map, number, str32 header
    user = await graph.obj_add("user", {"name": name})
    found = await graph.obj_get(user, critical=True)
    assert found is not None
    assert found.fields["name"] == name
    with pytest.raises(TooLarge):
        await graph.obj_update(user, {"name": name + "x"})
    with pytest.raises(TooLarge):
        await graph.obj_update(user, {"home": "y"})
    note = {"text": "x" * (16_384 - 5)}
    await graph.assoc_add(user, "note", user, 1, note)
    assert (await graph.assoc_range(user, "note", 0, 1, critical=True))[0].fields["text"] == note["text"]


async def test_many_large_objects_at_once_are_stored_or_rejected_and_memory_stays_bounded(rig: Rig) -> None:
    name = "x" * (MEGABYTE - 100)
    async with connect(str(rig.cluster.topology_path), settings=ClientSettings(timeout_seconds=20)) as graph:
        adds = (graph.obj_add("user", {"name": name}) for _ in range(48))
        results = await asyncio.gather(*adds, return_exceptions=True)
        added = [each for each in results if isinstance(each, int)]
        refused = [each for each in results if not isinstance(each, int)]
        # A database that is slow with so much data counts as down for a moment, for every request, or answers nothing
        # within the time allowed. A commit that is under way when its connection is abandoned has an unknown outcome.
        allowed = Overloaded | DatabaseDown | DeadlineExceeded | OutcomeUnknown
        assert all(isinstance(each, allowed) for each in refused), refused
        assert added
        gets = (graph.obj_get(each) for each in added)
        for each in await asyncio.gather(*gets, return_exceptions=True):
            done = isinstance(each, Object) and each.fields["name"] == name
            assert done or isinstance(each, Overloaded | DatabaseDown | DeadlineExceeded), each
        for object_id in added:

            async def is_read(object_id: int = object_id) -> bool:
                with suppress(Overloaded, DatabaseDown, DeadlineExceeded):
                    one = await graph.obj_get(object_id)
                    assert one is not None
                    assert one.fields["name"] == name
                    return True
                return False

            await until(is_read, "what was stored is not read")
        errors = rig.bystander.errors
        errors[:] = [each for each in errors if not isinstance(each, allowed)]
    for process in rig.before:
        if process.role is not Role.DATABASE:
            assert resident_mb(process.pid) < 1000, process.name


async def test_a_many_form_says_which_items_failed_and_does_the_others(graph: Graph) -> None:
    users = [await new_user(graph) for _ in range(4)]
    with pytest.raises(SomeFailed) as caught:
        await graph.obj_update_many(
            [(user, {"home": "x" * (MEGABYTE - 8 if n == 2 else 3)}) for n, user in enumerate(users)]
        )
    assert [isinstance(each, RequestError) for each in caught.value.results] == [False, False, True, False]


async def test_a_deadline_of_zero_is_exceeded_at_once(rig: Rig, graph: Graph) -> None:
    user = await new_user(graph)
    async with rig.session(rig.follower_of(user)) as session:
        with pytest.raises(DeadlineExceeded):
            await session.ask(pb.Request(read=pb.ReadBatch(obj_ids=[user])), 0)
    write = pb.WriteBatch(writes=[pb.Write(obj_delete=pb.ObjDelete(id=user))])
    async with bare_connection(rig.follower_of(user)) as (reader, writer):
        await greet(reader, writer)
        for body in (pb.Request(number=1, read=pb.ReadBatch(obj_ids=[user])), pb.Request(number=2, write=write)):
            writer.write(framing.frame(framing.REQUEST, body.SerializeToString()))
            assert (await answer_from(reader)).error.reason == "DEADLINE_EXCEEDED"
    assert await graph.obj_get(user, critical=True) is not None
