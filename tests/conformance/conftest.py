"""A rig per transport, and one per place of documents and locks: every conformance test of theirs runs on each."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tao.etcd.location import EtcdLocation
from tests.conformance.store_rig import StoreRig
from tests.conformance.transport_rig import Rig
from tests.rigs.etcd_rig import EtcdRig


@pytest.fixture(params=["tcp", "unix", "grpc"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(request.param, tmp_path)
    yield rig
    await rig.close()


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdRig]:
    """One etcd for all tests that do not stop it; each has a prefix of its own."""
    rig = EtcdRig(tmp_path_factory.mktemp("etcd"))
    with asyncio.Runner() as runner:
        runner.run(rig.start())
        yield rig
        runner.run(rig.kill())


@pytest.fixture(params=["file", "etcd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | EtcdLocation:
    if request.param == "file":
        return tmp_path / "topology.json"
    server: EtcdRig = request.getfixturevalue("etcd_server")
    return server.url(uuid4().hex)


@pytest.fixture
async def stores(place: Path | EtcdLocation) -> AsyncIterator[StoreRig]:
    stores = StoreRig(place)
    yield stores
    await stores.close()
