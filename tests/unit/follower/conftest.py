"""A region in one process, of which the tests here look at the follower ``near-1``."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rigs.region_rig import RegionRig


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    """Both leaders at work: ``leader-2`` has shard 1, as has ``near-2``."""
    rig = RegionRig(split_leaders=True)
    await rig.start()
    yield rig
    assert await rig.close() == []
