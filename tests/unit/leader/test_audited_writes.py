"""A leader's records of writes: which types, which outcome, on whose behalf; and what happens when there is no room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.model.errors import AuditFull, OutcomeUnknown, ShardBlocked, error_from_reason
from tao.model.ids import SHARD_SHIFT
from tao.model.writes import AssocAdd, AssocDelete, ObjAdd, ObjDelete, ObjUpdate, SettleEdge, Write
from tao.serving.audit import AuditTrail
from tao.wire.convert import write_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.audit_rig import AuditRig, audit_rig
from tests.rigs.leader_rig import COMMENT, LIKED_BY, LIKES, USER, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import until

TEXT = (Path(__file__).parents[3] / "config/schema.yaml").read_text()
AUDITED = TEXT.replace("  user:\n    number: 1\n", "  user:\n    number: 1\n    audit: true\n").replace(
    "    number: 4\n    inverse: liked_by\n", "    number: 4\n    inverse: liked_by\n    audit: true\n"
)
PAGE = 5
A, B = make_id(64), make_id(128, 1)


@pytest.fixture
async def store() -> MemoryStore:
    return MemoryStore(4)


@pytest.fixture
async def audit(tmp_path: Path) -> AsyncIterator[AuditRig]:
    with audit_rig(tmp_path, max_queued=4) as rig:
        yield rig


@pytest.fixture
async def rig(store: MemoryStore, audit: AuditRig) -> AsyncIterator[LeaderRig]:
    rig = LeaderRig(store, store, audit=audit.trail)
    await rig.take(0, 1)
    assert rig.configuration.use_schema_text(AUDITED, "schema.yaml")
    yield rig
    await rig.close()
    assert rig.tasks.errors == []


async def write(
    rig: LeaderRig, *writes: Write, peer: str = "near-1", caller: str | None = "app/web", operator: str = ""
) -> list[pb.WriteResult]:
    """Send the writes as a follower forwards them; return their results."""
    answers: list[pb.Answer] = []
    batch = pb.WriteBatch(writes=[write_to_pb(each) for each in writes])
    request = pb.Request(deadline_ms=5_000, write=batch, caller=caller, operator=operator)
    rig.service.handle(request, MemoryReply(answers.append, peer=peer))
    await until(lambda: answers and not answers[-1].more)
    found = [each for part in answers for each in zip(part.write.slots, part.write.results, strict=True)]
    return [result for _, result in sorted(found, key=lambda each: each[0])]


def user(object_id: int = A) -> ObjAdd:
    return ObjAdd(object_id, USER, b"", allocated=False)


def edge() -> AssocAdd:
    return AssocAdd(A, LIKES, B, 1, b"")


async def test_a_write_of_a_type_that_asks_for_it_is_recorded_with_its_caller_and_outcome(
    rig: LeaderRig, audit: AuditRig
) -> None:
    (added,) = await write(rig, ObjAdd(0, USER, b"", allocated=True), peer="near-1")
    (record,) = await audit.records()
    assert record["actor"]["user"]["name"] == "app/web"
    assert (record["api"]["operation"], record["activity_id"], record["status_id"]) == ("obj_add", 1, 1)
    assert record["unmapped"]["id"] == added.id
    assert record["unmapped"]["types"] == ["user"]
    assert record["unmapped"]["shards"] == [added.id >> SHARD_SHIFT]
    await write(rig, ObjUpdate(added.id, USER, b""), ObjDelete(added.id, USER), caller=None)
    assert await audit.shown() == [
        ("app/web", "obj_add", 1),
        ("follower/near-1", "obj_update", 1),
        ("follower/near-1", "obj_delete", 1),
    ]


async def test_a_write_that_a_server_passes_on_for_an_operator_is_recorded_in_the_operators_name(
    rig: LeaderRig, audit: AuditRig
) -> None:
    await write(rig, user(), peer="near-1", caller=None, operator="operator/ann")
    await write(rig, ObjUpdate(A, USER, b""), peer="operator", caller=None, operator="operator/bob")
    assert await audit.shown() == [("operator/ann", "obj_add", 1), ("operator/operator", "obj_update", 1)]


async def test_types_that_do_not_ask_and_copies_of_writes_leave_no_record(rig: LeaderRig, audit: AuditRig) -> None:
    await write(rig, ObjAdd(make_id(7), PAGE, b"", allocated=False), AssocAdd(A, COMMENT, B, 1, b""))
    await rig.write(SettleEdge(A, LIKES, B, present=True))
    assert await audit.records() == []


async def test_an_edge_is_recorded_from_whichever_end_it_is_written(rig: LeaderRig, audit: AuditRig) -> None:
    await write(rig, edge())
    await write(rig, AssocDelete(B, LIKED_BY, A))
    first, second = await audit.records()
    assert [each["unmapped"]["types"] for each in (first, second)] == [["likes"], ["liked_by"]]
    assert [each["unmapped"]["shards"] for each in (first, second)] == [[0, 1], [0, 1]]
    assert (second["unmapped"]["id1"], second["unmapped"]["id2"], second["unmapped"]["found"]) == (B, A, True)


async def test_a_write_that_names_no_type_is_recorded_unless_its_result_shows_one_that_does_not_ask(
    rig: LeaderRig, audit: AuditRig
) -> None:
    page = make_id(7)
    await write(rig, user(), ObjAdd(page, PAGE, b"", allocated=False))
    await write(rig, ObjUpdate(page, 0, b"\x81\x01\xa1p"), ObjUpdate(A, 0, b"\x81\x01\xa1u"))
    await write(rig, ObjDelete(page))
    records = await audit.records()
    assert [(each["api"]["operation"], each["unmapped"]["types"]) for each in records] == [
        ("obj_add", ["user"]),
        ("obj_update", ["user"]),
        ("obj_delete", []),
    ]


async def test_failures_are_recorded_and_unknown_outcomes_as_unknown(
    store: MemoryStore, rig: LeaderRig, audit: AuditRig
) -> None:
    async def broken() -> None:
        raise OutcomeUnknown("the connection broke")

    store.lock_faults.append(ShardBlocked("locked by hand", 0))
    (blocked,) = await write(rig, edge())
    assert blocked.error.reason == "SHARD_BLOCKED"
    store.before_commit = broken
    (unknown,) = await write(rig, edge())
    assert unknown.error.reason == "OUTCOME_UNKNOWN"
    assert [each["status_code"] for each in await audit.records()] == ["SHARD_BLOCKED", "OUTCOME_UNKNOWN"]
    assert [each["status_id"] for each in await audit.records()] == [2, 0]


async def test_a_write_of_a_shard_that_another_leader_owns_is_left_to_that_ones_records(
    rig: LeaderRig, audit: AuditRig
) -> None:
    for _ in range(10):
        (refused,) = await write(rig, user(make_id(64, 2)))
        assert refused.error.reason == "NOT_MINE"
    assert await audit.records() == []
    (added,) = await write(rig, user())
    assert not added.HasField("error"), "the room kept for them was given back"


async def test_without_room_in_the_log_audited_writes_are_refused_and_others_go_on(
    store: MemoryStore, rig: LeaderRig, audit: AuditRig
) -> None:
    audit.log.trouble = "the disk is full"
    refused, page = await write(rig, user(), ObjAdd(make_id(7), PAGE, b"", allocated=False))
    assert isinstance(error_from_reason(refused.error.reason, refused.error.message), AuditFull)
    assert "the disk is full" in refused.error.message
    assert not page.HasField("error")
    audit.log.trouble = ""
    (added,) = await write(rig, user())
    assert not added.HasField("error")
    assert await audit.shown() == [("app/web", "obj_add", 1)]


async def test_a_write_that_is_cut_off_by_the_end_of_the_server_is_recorded_as_unknown(
    store: MemoryStore, rig: LeaderRig, audit: AuditRig
) -> None:
    arrived, never = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        arrived.set()
        await never.wait()

    store.before_commit = hang
    batch = pb.WriteBatch(writes=[write_to_pb(edge())])
    rig.service.handle(pb.Request(deadline_ms=5_000, write=batch), MemoryReply(lambda _: None, peer="near-1"))
    await arrived.wait()
    await rig.tasks.close()
    assert await audit.shown() == [("follower/near-1", "assoc_add", 0)]


async def test_a_leader_without_an_audit_log_writes_audited_types_as_ever(store: MemoryStore) -> None:
    rig = LeaderRig(store, store, audit=AuditTrail())
    await rig.take(0, 1)
    assert rig.configuration.use_schema_text(AUDITED, "schema.yaml")
    (added,) = await write(rig, user())
    assert not added.HasField("error")
    await rig.close()
