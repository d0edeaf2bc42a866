"""Regions in one process for the races that need one, and a database server that was the master."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tao.devcluster.database import DatabaseInstance
from tests.rigs.former_master import FormerMaster, former_master, migrated_shards
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


@pytest.fixture(scope="module")
def server_of_former(database_server: DatabaseInstance) -> Iterator[DatabaseInstance]:
    """Yield a database server that has the shards of `former`."""
    with migrated_shards(database_server) as server:
        yield server


@pytest.fixture
async def former(server_of_former: DatabaseInstance) -> AsyncIterator[FormerMaster]:
    """Yield a database server that is the master, under a lease, until the test replaces it."""
    async with former_master(server_of_former) as found:
        yield found
