"""The types and shards that requests of every kind name."""

from __future__ import annotations

import pytest

from tao.access.decisions import TypeKind
from tao.serving.request_scope import MAX_KEYS, NamedType, Scope, scope_of
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import make_id

A, B, C = make_id(1, 3), make_id(1, 5), make_id(1, 70)
SHARDS = {3, 5, 70}
NOTHING = Scope()
WITHOUT_KEYS = {
    *("get_topology", "get_schema", "watch", "forget", "acknowledge", "get_watcher_report", "await_applied"),
    *("get_clock", "inspect_journal", "change_journal", "change_jobs", "list_jobs", "lease_jobs", "report_jobs"),
}


def named(shards: set[int], objects: tuple[int, ...] = (), associations: tuple[int, ...] = ()) -> Scope:
    types = [
        *(NamedType(TypeKind.OBJECT, each) for each in objects),
        *(NamedType(TypeKind.ASSOCIATION, each) for each in associations),
    ]
    return Scope(frozenset(types), frozenset(shards))


READ = pb.ReadBatch(
    obj_ids=[A],
    count_id1s=[B],
    count_atypes=[1],
    range_id1s=[B],
    range_atypes=[2],
    time_range_id1s=[B],
    time_range_atypes=[3],
    get_id1s=[C],
    get_atypes=[4],
    get_id2s=[A],
    exist_id1s=[B],
    exist_atypes=[5],
)
CASES = {
    "read": (pb.Request(read=READ), named(SHARDS, (), (1, 2, 3, 4, 5))),
    "write": (
        pb.Request(
            write=pb.WriteBatch(
                writes=[
                    pb.Write(obj_add=pb.ObjAdd(shard=9, otype=6)),
                    pb.Write(assoc_add=pb.AssocAdd(id1=A, atype=2, id2=C)),
                    pb.Write(),
                ]
            )
        ),
        named({9, 3, 70}, (6,), (2,)),
    ),
    "reserve_ids": (pb.Request(reserve_ids=pb.ReserveIds(shard=0, count=1)), named({0})),
    "select": (
        pb.Request(
            select=pb.SelectRequest(
                terms=[
                    pb.SelectTerm(list=pb.ListTerm(id1=A, atype=1)),
                    pb.SelectTerm(union=pb.UnionTerm(id1s=[B, C], atype=2)),
                    pb.SelectTerm(operator=pb.SET_AND),
                ]
            )
        ),
        named(SHARDS, (), (1, 2)),
    ),
    "apply": (pb.Request(apply=pb.ApplyChanges(changes=[pb.ShardMessages(shard=4)])), named({4})),
    "subscribe": (pb.Request(subscribe=pb.Subscribe(positions=[pb.Position(shard=4)])), named({4})),
    "inspect": (
        pb.Request(inspect=pb.Inspect(obj_ids=[A], list_id1s=[B], list_atypes=[2], sample_shard=8, sample_limit=1)),
        named({3, 5, 8}, (), (2,)),
    ),
    "invalidate": (
        pb.Request(invalidate=pb.Invalidate(shards=[1, 2], otypes=[3], atypes=[4])),
        named({1, 2}, (3,), (4,)),
    ),
    "settle_pairs": (
        pb.Request(
            settle_pairs=pb.SettlePairs(
                pairs=[pb.Pair(low_id=A, high_id=C, atypes=[1, 2])], shards=[pb.ShardPair(low_shard=0, high_shard=9)]
            )
        ),
        named({3, 70, 0, 9}, (), (1, 2)),
    ),
    "relay": (
        pb.Request(
            relay=pb.Relay(changes=[pb.ShardMessages(shard=4)], touches=[pb.Touch(id=A, atype=1)], bulk_shards=[7])
        ),
        named({4, 3, 7}, (), (1,)),
    ),
    "relay_by_reference": (
        pb.Request(relay_by_reference=pb.Relay(references=[pb.Reference(shard=4)])),
        named({4}),
    ),
    "touch_keys": (
        pb.Request(touch_keys=pb.TouchKeys(touches=[pb.Touch(id=A, atype=1)])),
        named({3}, (), (1,)),
    ),
    "scan_shard": (pb.Request(scan_shard=pb.ScanShard(shard=4, otype=6)), named({4}, (6,))),
    "purge_removed": (pb.Request(purge_removed=pb.PurgeRemoved(shard=4)), named({4})),
    "fold_counters": (pb.Request(fold_counters=pb.FoldCounters(shard=4)), named({4})),
    "get_counters": (
        pb.Request(get_counters=pb.GetCounters(ids=[A, B], atypes=[1, 2])),
        named({3, 5}, (), (1, 2)),
    ),
    "scan_pairs": (pb.Request(scan_pairs=pb.ScanPairs(shard=4, atype=6)), named({4}, (), (6,))),
    "keep_copies": (pb.Request(keep_copies=pb.KeepCopies(copies=[pb.WriteCopy(shard=4)])), named({4})),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_request_names_its_types_and_shards(kind: str) -> None:
    request, expected = CASES[kind]
    assert request.WhichOneof("body") == kind
    assert scope_of(request) == expected


def test_every_other_kind_of_request_names_none() -> None:
    kinds = {each.name for each in pb.Request.DESCRIPTOR.oneofs_by_name["body"].fields}
    assert kinds - CASES.keys() == WITHOUT_KEYS
    for kind in WITHOUT_KEYS:
        request = pb.Request()
        getattr(request, kind).SetInParent()
        assert scope_of(request) == NOTHING, kind
    assert scope_of(pb.Request()) == NOTHING


def test_every_write_of_an_id_names_its_shard_and_its_types() -> None:
    for field in pb.Write.DESCRIPTOR.oneofs_by_name["operation"].fields:
        message = field.message_type
        assert message is not None
        fields = {each.name for each in message.fields}
        write = pb.Write()
        operation = getattr(write, field.name)
        operation.SetInParent()
        for name in fields & {"id", "id1"}:
            setattr(operation, name, A)
        for name in fields & {"otype", "atype"}:
            setattr(operation, name, 6)
        found = scope_of([write])
        assert found.shards == {3}, field.name
        assert len(found.types) == len(fields & {"otype", "atype"}), field.name


def test_keys_beyond_the_bound_are_counted_and_not_looked_at() -> None:
    batch = pb.ReadBatch(obj_ids=[A] * (MAX_KEYS - 1), count_id1s=[B, C], count_atypes=[1, 2])
    assert scope_of(pb.Request(read=batch)) == named({3, 5}, (), (1, 2))._replace(unread_shards=1)


def test_types_beyond_the_bound_are_counted_apart_from_keys() -> None:
    pairs = [pb.Pair(low_id=A, high_id=B, atypes=[2, 1, 2] * 8), pb.Pair(low_id=A, high_id=C, atypes=[1])]
    request = pb.Request(settle_pairs=pb.SettlePairs(pairs=pairs))
    assert scope_of(request, 2) == named(SHARDS, (), (1, 2))
    pairs[0].atypes.append(3)
    request = pb.Request(settle_pairs=pb.SettlePairs(pairs=pairs))
    assert scope_of(request, 2) == named(SHARDS, (), (1, 2))._replace(unread_types=1)


def test_numbers_of_types_beyond_the_bound_are_not_compared() -> None:
    pair = pb.Pair(low_id=A, high_id=B, atypes=[1] * 30)
    found = scope_of(pb.Request(settle_pairs=pb.SettlePairs(pairs=[pair])), 1)
    assert found == named({3, 5}, (), (1,))._replace(unread_types=5)


def test_with_a_bound_of_none_everything_that_repeats_is_counted() -> None:
    assert scope_of(pb.Request(read=READ), 0) == Scope(unread_types=5, unread_shards=6)
    assert scope_of(CASES["write"][0], 0) == Scope(unread_types=3, unread_shards=3)
    assert scope_of([pb.Write(obj_delete=pb.ObjDelete(id=A, otype=6))], 0) == Scope(unread_types=1, unread_shards=1)


def test_as_many_pairs_as_may_be_looked_at_have_their_types_read() -> None:
    pair = pb.Pair(low_id=A, high_id=C, atypes=[1])
    full = pb.Request(settle_pairs=pb.SettlePairs(pairs=[pair] * MAX_KEYS))
    assert scope_of(full) == named({3, 70}, (), (1,))
    full.settle_pairs.pairs.append(pair)
    full.settle_pairs.shards.add(low_shard=0, high_shard=9)
    assert scope_of(full) == named({3, 70}, (), (1,))._replace(unread_types=1, unread_shards=2)


def test_the_types_of_an_invalidation_are_named_however_many_shards_it_has() -> None:
    shards = range(MAX_KEYS + 5)
    found = scope_of(pb.Request(invalidate=pb.Invalidate(shards=shards, otypes=[3], atypes=[4])))
    assert found == named({*range(MAX_KEYS)}, (3,), (4,))._replace(unread_shards=5)
