"""A rig per transport: every conformance test of the transports runs on each."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.transport_rig import Rig


@pytest.fixture(params=["tcp", "unix", "grpc"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(request.param, tmp_path)
    yield rig
    await rig.close()
