"""An edge between databases with masters in two regions, written while the regions are cut off from each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
import pytest_asyncio

from tao.client import Graph, StaleRead, TaoError, WriteToken, connect
from tao.devcluster.layout import Shape
from tao.model.graph import ListKey
from tao.model.tokens import MAX_PENDING
from tao.wire.v1 import graph_pb2 as graph_pb
from tao.wire.v1.graph_pb2_grpc import GraphStub
from tests.e2e.cluster_access import PATIENT
from tests.e2e.region_access import Regions, plain, running_regions, until
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SHAPE = Shape(regions=2, tiers=1, followers=1, leaders=1, databases=2, mixed_mastership=True, shards=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def regions(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Regions]:
    async with running_regions(tmp_path_factory.mktemp("regions"), SHAPE) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def east(regions: Regions) -> AsyncIterator[Graph]:
    async with connect(regions.target, region="east", settings=PATIENT) as graph:
        yield graph


@pytest_asyncio.fixture(loop_scope="module")
async def west(regions: Regions) -> AsyncIterator[Graph]:
    async with connect(regions.target, region="west", settings=PATIENT) as graph:
        yield graph


async def pair(east: Graph) -> tuple[int, int]:
    """Return a user whose shard is mastered in the east, and a page whose shard is mastered in the west."""
    (low,) = await east.reserve_ids(1, shard=0)
    (high,) = await east.reserve_ids(1, shard=1)
    return low, high


async def write_pending(east: Graph, low: int, high: int, at: int) -> WriteToken:
    """Write the edge until its inverse is pending: a link that has just been cut may still fail the first write."""
    with east.recording() as recording:
        written = await east.assoc_add(low, "likes", high, at)
    assert written.inverse_pending
    return recording.token


@pytest.mark.parametrize("silent", [False, True], ids=["refusing", "silent"])
async def test_a_token_covers_a_pending_inverse_in_both_regions_and_the_cut_ends_it(
    regions: Regions, east: Graph, west: Graph, silent: bool
) -> None:
    low, high = await pair(east)
    assert plain(await west.assoc_range(high, "liked_by", 0, 5)) == []
    await regions.cut(silent=silent)
    try:
        token = await write_pending(east, low, high, 7)
        assert plain(await east.assoc_range(low, "likes", 0, 5)) == [(high, 7)]
        assert plain(await west.assoc_range(high, "liked_by", 0, 5, critical=True)) == [], "the truth of its own rows"
        for demand in ({}, {"critical": True}, {"max_staleness_ms": 60_000}):
            with pytest.raises(StaleRead, match="lacks the inverse"):
                await west.assoc_range(high, "liked_by", 0, 5, after=WriteToken.from_text(token.text()), **demand)
        with pytest.raises(StaleRead, match="lacks the inverse"):
            await east.assoc_count(high, "liked_by")
        reason = refusal_of_unary_read(regions, high, west.schema.atype("liked_by").number, token)
        assert reason == (grpc.StatusCode.UNAVAILABLE, "STALE_READ")
    finally:
        await regions.heal()

    async def there() -> bool:
        with suppress(TaoError):
            return plain(await west.assoc_range(high, "liked_by", 0, 5, critical=True)) == [(low, 7)]
        return False

    await until(there, "the inverse is not written after the end of the cut")

    async def answers() -> bool:
        with suppress(TaoError):
            return plain(await west.assoc_range(high, "liked_by", 0, 5, after=token)) == [(low, 7)]
        return False

    await until(answers, "the token's reader is not answered")
    assert plain(await east.assoc_range(high, "liked_by", 0, 5)) == [(low, 7)], "its own writes"
    await regions.assert_converges()


async def test_a_token_covers_pending_inverses_that_it_cannot_name_until_they_are_written(
    regions: Regions, east: Graph, west: Graph
) -> None:
    (low,) = await east.reserve_ids(1, shard=0)
    oldest, *others = await east.reserve_ids(MAX_PENDING + 2, shard=1)
    await regions.cut(silent=False)
    try:
        with east.recording() as recording:
            written = await east.assoc_add_many([(low, "likes", high, 7) for high in (oldest, *others)])
        assert all(each.inverse_pending for each in written)
        token = WriteToken.from_text(recording.token.text())
        assert len(token.named_pending) == MAX_PENDING
        with pytest.raises(StaleRead, match="may lack inverse edges"):
            await west.assoc_range(oldest, "liked_by", 0, 5, after=token)
        atype = west.schema.atype("liked_by").number
        assert refusal_of_unary_read(regions, oldest, atype, token) == (grpc.StatusCode.UNAVAILABLE, "STALE_READ")
    finally:
        await regions.heal()

    async def answers() -> bool:
        with suppress(TaoError):
            return plain(await west.assoc_range(oldest, "liked_by", 0, 5, after=token)) == [(low, 7)]
        return False

    await until(answers, "the token's reader is not answered")
    with west.recording() as recording:
        await west.assoc_count_many([(high, "liked_by") for high in (oldest, *others)], after=token)
    assert not recording.renewed(token).has_pending, "all of it is settled"
    await regions.assert_converges()


async def test_the_token_of_a_journaled_write_names_the_far_list_that_is_owed(
    regions: Regions, east: Graph, west: Graph
) -> None:
    low, high = await pair(east)
    far_list = ListKey(high, east.schema.atype("subscribers").number)
    await regions.cut(silent=False)
    try:
        receipt = await east.later.assoc_add(low, "subscribes", high, 7)
        token = WriteToken.from_text((await receipt.applied(timeout=PATIENT_SECONDS)).text())
        assert plain(await east.assoc_range(low, "subscribes", 0, 5)) == [(high, 7)], "the near side is made"
        assert [each.coordinator_id for each in token.pending_in(far_list)] == [low]
        with pytest.raises(StaleRead, match="lacks the inverse"):
            await west.assoc_range(high, "subscribers", 0, 5, after=token)
    finally:
        await regions.heal()

    async def answers() -> bool:
        with suppress(TaoError):
            return plain(await west.assoc_range(high, "subscribers", 0, 5, after=token)) == [(low, 7)]
        return False

    await until(answers, "the token's reader is not answered")
    with west.recording() as recording:
        await west.assoc_count(high, "subscribers", after=token)
    assert not recording.renewed(token).pending_in(far_list), "it is not owed any more"


def refusal_of_unary_read(regions: Regions, id1: int, atype: int, token: WriteToken) -> tuple[grpc.StatusCode, str]:
    address = regions.routes.follower_tiers("west")[0].servers[0].grpc
    request = graph_pb.AssocRangeRequest(id1=id1, atype=atype, limit=5, after=token.text())
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        GraphStub(channel).AssocRange(request, timeout=10.0)
    reasons = [each.value for each in caught.value.trailing_metadata() if each.key == "tao-reason"]
    return caught.value.code(), str(reasons[0])
