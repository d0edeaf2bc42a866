"""A small, correct document that the tests of this folder break in one place each."""

from __future__ import annotations

import pytest

from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology


def _server(name: str, port: int) -> CacheServer:
    return CacheServer(name=name, grpc=f"127.0.0.1:{port}", frames=f"unix:/run/{name}.sock")


@pytest.fixture
def topology() -> Topology:
    region = Region(
        name="here",
        leaders=Tier(name="leaders", servers=(_server("l-1", 1), _server("l-2", 2))),
        followers=(
            Tier(name="web", servers=(_server("w-1", 3), _server("w-2", 4)), moved={2: ("w-2", "w-1"), 10: ("w-1",)}),
        ),
    )
    database = Database(
        name="db", master_region="here", servers={"here": DatabaseServer(name="db-here")}, shards=((0, 11), (12, 15))
    )
    return Topology(version=1, shards=16, regions=(region,), databases=(database,))
