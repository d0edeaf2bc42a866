"""A fake cluster per test, and a graph connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tao.client.graph import Graph
from tests.unit.client.fakes import FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
async def graph(cluster: FakeCluster) -> AsyncIterator[Graph]:
    async with await cluster.connect() as opened:
        yield opened
