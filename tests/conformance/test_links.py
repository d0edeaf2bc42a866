"""Links over every transport: they connect, fail at once, reconnect, and leave a server that drains."""

import asyncio
import contextlib

import pytest

from tao.model.errors import (
    Unavailable,
)
from tao.routing.failure_detector import DetectorSettings
from tao.wire.links import Links, LinkSettings
from tao.wire.settings import SessionSettings
from tests.conformance.transport_rig import ME, Rig, echo, read, until
from tests.rigs.pacing import PATIENT_SECONDS


async def test_a_connection_to_an_address_without_a_listener_is_unavailable(rig: Rig) -> None:
    server = await rig.serve()
    await server.close()
    rig.forget_socket()
    with pytest.raises(Unavailable):
        await rig.connect(SessionSettings(connect_timeout_seconds=0.5))


async def test_a_link_connects_when_first_used_and_again_after_a_restart(rig: Rig) -> None:
    server = await rig.serve()
    links = Links(LinkSettings(detector=DetectorSettings(first_probe_seconds=0.001, max_probe_seconds=0.01)), ME)
    link = links.to(rig.server_as_topology())
    assert links.to(rig.server_as_topology()) is link
    assert not link.is_up
    answers = await asyncio.gather(*(link.ask(read(n), PATIENT_SECONDS) for n in range(50)))
    assert [answer.read.values[0] for answer in answers] == [b"v%d" % n for n in range(50)]
    assert link.is_up
    assert link.consecutive_failures == 0  # type: ignore[unreachable]

    await server.close()
    await until(lambda: not link.is_up)
    with pytest.raises(Unavailable):
        await link.ask(read(1), PATIENT_SECONDS)
    assert link.consecutive_failures > 0
    with pytest.raises(Unavailable):
        await link.ask(read(1), PATIENT_SECONDS)

    await rig.serve(address=rig.address)
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            with contextlib.suppress(Unavailable):
                await link.ask(read(1), PATIENT_SECONDS)
                break
            await asyncio.sleep(0.001)
    assert link.is_up
    assert link.consecutive_failures == 0
    await links.close()
    with pytest.raises(Unavailable):
        await link.ask(read(1), PATIENT_SECONDS)


async def test_a_link_leaves_a_draining_server_for_its_successor(rig: Rig) -> None:
    server = await rig.serve()
    links = Links(LinkSettings(), ME)
    link = links.to(rig.server_as_topology())
    held = asyncio.ensure_future(link.ask(read(1, critical=True), PATIENT_SECONDS))
    await until(lambda: bool(rig.handler.held))
    draining = asyncio.ensure_future(server.drain(PATIENT_SECONDS))
    await until(lambda: not link.is_up)
    rig.forget_socket()
    if rig.transport != "grpc":
        await rig.serve(address=rig.address)
    assert (await link.ask(read(2), PATIENT_SECONDS)).read.values == [b"v2"]
    echo(1, rig.handler.held[0])
    assert list((await held).reserved_ids.ids) == [1]
    await draining
    await links.close()
