"""Regions in one process for the races that need one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rigs.region_rig import RegionRig


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    """Yield a region in which one leader has all shards, ``near-2`` has shard 1, and ``near-1`` has the others."""
    rig = RegionRig()
    await rig.start()
    yield rig
    assert await rig.close() == []


@pytest.fixture
async def split_region() -> AsyncIterator[RegionRig]:
    """Yield a region as ``region``, but ``leader-2`` has shard 1."""
    rig = RegionRig(split_leaders=True)
    await rig.start()
    yield rig
    assert await rig.close() == []
