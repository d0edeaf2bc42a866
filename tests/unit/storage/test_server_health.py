"""A database server that refuses, or is silent: when nobody is sent to it any more, and when it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tao.model.errors import OperatorError, Unavailable
from tao.routing.failure_detector import DetectorSettings, Health
from tao.storage.failures import ConnectionLost
from tao.storage.server_health import HealthSettings, ServerHealth
from tests.rigs.pacing import until

QUICK = HealthSettings(
    silence_seconds=0.01,
    detector=DetectorSettings(failures_until_down=1, first_probe_seconds=0.002, max_probe_seconds=0.01),
)
PATIENT = replace(QUICK, silence_seconds=600.0)


class Server:
    """What a probe finds; ``answer`` is raised, None is a good answer."""

    def __init__(self) -> None:
        self.answer: Exception | None = None
        self.probes = 0
        self.at_once = 0
        self.downs = 0
        self.health = ServerHealth("db-1", QUICK, self.probe, self.went_down)

    async def probe(self, deadline: float) -> None:
        self.probes += 1
        self.at_once += 1
        assert self.at_once == 1
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.answer is not None:
            raise self.answer

    def went_down(self) -> None:
        self.downs += 1


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    yield server
    await server.health.close()


def state(server: Server) -> Health:
    return server.health.state.health


async def test_a_refused_connection_closes_the_way_and_probes_open_it_again(server: Server) -> None:
    server.answer = ConnectionLost("refused")
    server.health.refused("refused")
    with pytest.raises(Unavailable, match="db-1 is down: refused"):
        server.health.check()
    await until(lambda: server.probes > 3)
    assert server.downs == 1
    server.answer = None
    await until(lambda: state(server) is Health.UP)
    server.health.check()


async def test_silence_is_no_outage_while_probes_are_answered(server: Server) -> None:
    server.health.began()
    await until(lambda: server.probes >= 4)
    server.health.check()
    server.health.answered()
    server.health.ended()
    assert (server.downs, state(server)) == (0, Health.UP)


async def test_silence_with_a_silent_probe_is_an_outage(server: Server) -> None:
    server.answer = ConnectionLost("did not answer in time")
    server.health.began()
    await until(lambda: server.downs == 1)
    server.health.ended()
    server.answer = None
    await until(lambda: state(server) is Health.UP)


async def test_a_server_that_is_down_does_not_go_down_again_while_its_statements_last(server: Server) -> None:
    server.answer = ConnectionLost("did not answer in time")
    server.health.began()
    await until(lambda: server.downs > 0)
    looks = server.probes + 10
    await until(lambda: server.probes > looks)
    assert server.downs == 1
    server.health.ended()


async def test_a_late_connection_is_no_outage_of_a_server_that_has_just_answered_others(server: Server) -> None:
    """Two lost packets: the commits under way on other connections must not be cut for them."""
    health = ServerHealth("db-1", PATIENT, server.probe, server.went_down)
    health.began()
    health.answered()
    health.not_connected("did not answer in time")
    health.check()
    await until(lambda: health.state.health is Health.UP)
    assert (server.probes > 0, server.downs) == (True, 0)
    health.ended()
    await health.close()


async def test_a_late_connection_is_an_outage_when_the_server_answers_no_other(server: Server) -> None:
    server.answer = ConnectionLost("did not answer in time")
    server.health.began()
    server.health.not_connected("did not answer in time")
    with pytest.raises(Unavailable, match="did not answer in time"):
        server.health.check()
    server.health.ended()


async def test_a_suspect_that_neither_answers_nor_lets_in_is_down(server: Server) -> None:
    health = ServerHealth("db-1", PATIENT, server.probe, server.went_down)
    server.answer = ConnectionLost("did not answer in time")
    health.answered()
    health.not_connected("did not answer in time")
    await until(lambda: server.downs == 1)
    await health.close()


async def test_a_server_that_will_not_have_us_is_there(server: Server) -> None:
    server.health.refused("refused")
    server.answer = OperatorError("access denied")
    await until(lambda: state(server) is Health.UP)


async def test_a_server_without_work_is_not_probed(server: Server) -> None:
    server.health.began()
    server.health.answered()
    server.health.ended()
    await until(lambda: server.health._look_timer is None)
    assert server.probes == 0
