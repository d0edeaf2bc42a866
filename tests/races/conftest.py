"""A region in one process for every race that needs one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rigs.region_rig import RegionRig


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    """One leader has all shards; ``near-2`` has shard 1, ``near-1`` the others."""
    rig = RegionRig()
    await rig.start()
    yield rig
    assert await rig.close() == []


@pytest.fixture
async def split_region() -> AsyncIterator[RegionRig]:
    """As ``region``, and ``leader-2`` has shard 1."""
    rig = RegionRig(split_leaders=True)
    await rig.start()
    yield rig
    assert await rig.close() == []
