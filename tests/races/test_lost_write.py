"""An acknowledged write is lost with its master before a replica has it; its writer then reads with the token.

writer                     old master              new master              caches of the region
writes "b", acknowledged   version 1:2             (has 1:1)               1:2, and floors at 1:2
                           lost                    raises the epoch to 2
reads after "b"            …                       1:1, read under epoch 2
the writer must get the error that "b" is lost; readers without the token must be answered, whether a cache knows the
new epoch or not
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tao.model.errors import WriteLost
from tao.model.graph import Edge, EdgeKey, ListKey, version_of
from tao.model.rows import ListRow, ObjectRow
from tao.model.writes import AssocAdd, ObjUpdate
from tests.rigs.leader_rig import COMMENT, USER, make_id
from tests.rigs.region_rig import FollowerRig, RegionRig
from tests.rigs.versions import make_version

A, B = make_id(64), make_id(128)

READS: dict[str, dict[str, Any]] = {
    "object": {"obj_ids": [A]},
    "count": {"count_id1s": [A], "count_atypes": [COMMENT]},
    "range": {"range_id1s": [A], "range_atypes": [COMMENT], "range_positions": [0], "range_limits": [9]},
    "part": {"range_id1s": [A], "range_atypes": [COMMENT], "range_positions": [6000], "range_limits": [9]},
    "window": {
        "time_range_id1s": [A],
        "time_range_atypes": [COMMENT],
        "time_range_highs": [9],
        "time_range_lows": [0],
        "time_range_limits": [9],
    },
    "edges": {
        "get_id1s": [A],
        "get_atypes": [COMMENT],
        "get_id2_counts": [1],
        "get_id2s": [B],
        "get_highs": [9],
        "get_lows": [0],
    },
}


async def lose_a_write(region: RegionRig) -> None:
    """Acknowledge version 1:2 of an object and a list; then leave the database with 1:1 and epoch 2."""
    store = region.store
    before = ObjectRow(A, USER, make_version(1, 1), False, b"\x80"), ListRow(1, make_version(1, 1))
    store.rows.objects[A], store.rows.lists[ListKey(A, COMMENT)] = before
    store.rows.edges[EdgeKey(A, COMMENT, B + 1)] = Edge(B + 1, 1)
    await region.near.write(AssocAdd(A, COMMENT, B, 2, b""), ObjUpdate(A, USER, b"\x80"))
    assert store.rows.lists[ListKey(A, COMMENT)].version == store.rows.objects[A].version == make_version(1, 2)
    assert await region.near.times(A, COMMENT) == [2, 1], "and it is in the caches"
    store.rows.objects[A], store.rows.lists[ListKey(A, COMMENT)] = before
    del store.rows.edges[EdgeKey(A, COMMENT, B)]
    store.shards[0] = msgspec.structs.replace(store.shards[0], version_epoch=2)


async def read_after(follower: FollowerRig, read: dict[str, Any], **options: Any) -> int:
    """Return the version in the answer to the writer."""
    minimum = {"minimum_slots": [0], "minimum_versions": [make_version(1, 2)]}
    return version_of(await follower.read(**read, **minimum, **options))


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("known_to", ["nobody", "the leader", "both"])
async def test_the_reader_with_the_token_gets_the_loss_reported_and_all_others_read_on(
    region: RegionRig, read: dict[str, Any], known_to: str
) -> None:
    await lose_a_write(region)
    # Caches serve the lost version until they learn of the loss; so it is evicted here, and version floors are left
    # behind.
    for cache, knows in ((region.leader.cache, known_to != "nobody"), (region.near.cache, known_to == "both")):
        if knows:
            cache.open_shard(0, 2)
        else:
            cache.bump_shard(0)
    assert version_of(await region.near.read(**read)) == make_version(1, 1)
    with pytest.raises(WriteLost):
        await read_after(region.near, read)
    assert version_of(await region.near.read(**read)) == make_version(1, 1)
    with pytest.raises(WriteLost):
        await read_after(region.near, read)


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
async def test_the_reader_with_the_token_may_be_the_first_to_learn_of_the_loss(
    region: RegionRig, read: dict[str, Any]
) -> None:
    await lose_a_write(region)
    for cache in (region.leader.cache, region.near.cache):
        cache.bump_shard(0)
    with pytest.raises(WriteLost):
        await read_after(region.near, read)
    assert version_of(await region.near.read(**read)) == make_version(1, 1)


async def test_a_critical_read_reports_the_loss_as_well(region: RegionRig) -> None:
    await lose_a_write(region)
    with pytest.raises(WriteLost):
        await read_after(region.near, READS["object"], critical=True)


async def test_a_write_that_outlived_its_master_is_not_said_to_be_lost(region: RegionRig) -> None:
    await lose_a_write(region)
    region.store.rows.lists[ListKey(A, COMMENT)] = ListRow(2, make_version(1, 2))
    region.store.rows.edges[EdgeKey(A, COMMENT, B)] = Edge(B, 2)
    for cache in (region.leader.cache, region.near.cache):
        cache.open_shard(0, 2)
    assert await read_after(region.near, READS["range"]) == make_version(1, 2)
