"""Receipts of journaled writes in the SDK: which followers are asked for the result, and what their failures mean."""

from __future__ import annotations

from typing import cast

import pytest

from tao.client import DeadlineExceeded, NoCopy, NoJournal, TaoError, Unavailable
from tao.client.values import Accepted
from tao.model.graph import ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.receipts import Receipt
from tao.model.tokens import PendingInverse
from tao.wire.v1 import session_pb2 as pb
from tests.unit.client.fakes import FakeCluster, FakeLink, make_topology

RECEIPT = Receipt("near-1", "journal", 1, b"x").encoded()
TIER = ("near-1", "near-2", "near-3", "near-4")


def receipt_links(cluster: FakeCluster) -> list[FakeLink]:
    """Return the links over which the receipt was shown, in order."""
    shown = [(link, sent) for link in cluster.links.values() for sent in link.sent if sent.HasField("await_applied")]
    return [link for link, _ in shown]


@pytest.fixture
def tier() -> FakeCluster:
    """Return a tier whose first follower has accepted the write, and cannot be reached."""
    cluster = FakeCluster(make_topology(near=TIER))
    for name in TIER:
        cluster.link(name).of_receipts = NoCopy("it has none")
    cluster.link("near-1").of_receipts = Unavailable("near-1 is down")
    return cluster


@pytest.mark.parametrize(
    "failure", [NoCopy("it has none"), DeadlineExceeded("no answer in time"), NoJournal("it keeps no journal")]
)
async def test_copy_at_the_last_follower_of_the_tier_is_found(tier: FakeCluster, failure: TaoError) -> None:
    async with await tier.connect() as graph:
        names = [link.name for link in cast(list[FakeLink], graph._router.links_of_receipt("near-1"))]
        assert sorted(names) == list(TIER)
        for name in names[1:]:
            tier.link(name).of_receipts = failure
        tier.link(names[-1]).of_receipts = pb.WriteResult(found=True)
        await graph.applied(Accepted(RECEIPT, (3,), graph.applied))
        assert len(receipt_links(tier)) == len(TIER)


async def test_other_followers_have_a_part_of_the_time_each(tier: FakeCluster) -> None:
    async with await tier.connect() as graph:
        for name in TIER[1:]:
            tier.link(name).of_receipts = DeadlineExceeded("no answer in time")
        with pytest.raises(Unavailable, match="near-1 is down"):
            await graph.applied(Accepted(RECEIPT, (3,), graph.applied), timeout=50.0)
        assert all(tier.link(name).timeouts[-1] <= 1.0 for name in TIER[1:])
        assert tier.link("near-1").timeouts[-1] > 1.0


async def test_write_that_still_waits_at_its_follower_is_asked_for_nowhere_else(tier: FakeCluster) -> None:
    tier.link("near-1").of_receipts = DeadlineExceeded("the write is accepted and still waits")
    async with await tier.connect() as graph:
        with pytest.raises(DeadlineExceeded, match="still waits"):
            await graph.applied(Accepted(RECEIPT, (3,), graph.applied))
        assert [link.name for link in receipt_links(tier)] == ["near-1"]


async def test_write_of_which_there_is_a_copy_is_asked_for_again_later(tier: FakeCluster) -> None:
    tier.link("near-3").of_receipts = pb.WriteResult(accepted=RECEIPT)
    async with await tier.connect() as graph:
        with pytest.raises(DeadlineExceeded, match="does not answer or has lost it"):
            await graph.applied(Accepted(RECEIPT, (3,), graph.applied), timeout=0.0)


async def test_token_of_a_write_that_is_made_names_the_far_list_that_is_owed(tier: FakeCluster) -> None:
    near, far_list = 7, ListKey(3 << SHARD_SHIFT | 9, 5)
    owed = pb.PendingInverse(id1=far_list.id1, atype=far_list.atype, coordinator_id=near)
    tier.link("near-1").of_receipts = pb.WriteResult(inverse_pending=True, pending=[owed])
    async with await tier.connect() as graph:
        token = await graph.applied(Accepted(RECEIPT, (0, 3), graph.applied))
    assert token.pending_in(far_list) == [PendingInverse(far_list.id1, far_list.atype, near)]
    assert not token.pending_at(3), "this list alone is owed, and not all of its shard"
