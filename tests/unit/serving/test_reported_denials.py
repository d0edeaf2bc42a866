"""What the audit log records of the requests, queries and writes that callers are denied."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tao.model.errors import BudgetExceeded, PermissionDenied
from tao.model.writes import AssocAdd, ObjAdd, ObjDelete
from tao.serving.audit import Denial
from tao.serving.forward_path import MAX_WRITES_PER_BATCH
from tao.serving.request_scope import scope_of
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FOLLOWS, FRIEND, LIKES, NOTE, USER, make_id
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
    record_denials,
    region_with_edges,
    settling,
    use_rules,
)


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    async with region_with_edges() as rig:
        yield rig


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


async def test_writes_of_a_batch_that_lack_the_same_right_are_one_report(region: RegionRig) -> None:
    use_rules(region.near.configuration)
    denials = record_denials(region.near.configuration)
    edges = [AssocAdd(USER_ID, LIKES, make_id(1, shard=number % 4), 1, b"") for number in range(MAX_WRITES_PER_BATCH)]
    edges[5] = AssocAdd(USER_ID, FOLLOWS, OTHER, 1, b"")
    errors = await errors_of(region.near.service, "writer", *edges)
    assert len(set(errors)) == 2
    assert all(errors)
    assert region.near.configuration.access.denied == {"write": len(edges)}
    assert heard(denials) == [
        ("writer", "write", list_type(LIKES), {0, 1, 2, 3}, len(edges) - 1),
        ("writer", "write", list_type(FOLLOWS), {0}, 1),
    ]


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
        (pb.Request(invalidate=pb.Invalidate(shards=[0], otypes=[USER], atypes=[NOTE])), "operator/ann", "operator"),
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
