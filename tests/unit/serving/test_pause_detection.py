"""A paused server answers nothing until it has checked what it missed."""

from __future__ import annotations

import asyncio

import pytest

from tao.model.errors import Overloaded, SettingsError, Unavailable
from tao.observability.logs import logger
from tao.serving.requests import PauseDetector, PauseSettings
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import Gate, ManualClock

READ = pb.Request(read=pb.ReadBatch(obj_ids=[1]))
WRITE = pb.Request(write=pb.WriteBatch())


class Inner:
    def __init__(self) -> None:
        self.handled: list[str] = []
        self.fault: Exception | None = None

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.handled.append(str(request.WhichOneof("body")))
        if self.fault is not None:
            raise self.fault
        reply.send(pb.Answer())


class Rig:
    def __init__(self, max_held: int = 2) -> None:
        self.clock, self.inner = ManualClock(), Inner()
        self.looks = 0
        self.gate: Gate | None = None
        self.fault: Unavailable | None = None
        settings = PauseSettings(max_held=max_held)
        self.guard = PauseDetector(self.inner, frozenset({"read"}), self.look, self.clock, settings, logger("test"))
        self.answers: list[pb.Answer] = []

    async def look(self, seconds: float) -> None:
        assert seconds > 0
        self.looks += 1
        if self.gate is not None:
            await self.gate.pass_through()
        if self.fault is not None:
            raise self.fault

    def ask(self, request: pb.Request = READ) -> MemoryReply:
        reply = MemoryReply(self.answers.append)
        self.guard.handle(request, reply)
        return reply


async def paused(max_held: int = 2) -> Rig:
    rig = Rig(max_held)
    await rig.guard.tick()
    rig.clock.now += 1.6
    return rig


async def test_a_server_that_was_not_paused_answers_at_once() -> None:
    rig = Rig()
    rig.ask()
    for _ in range(10):
        await rig.guard.tick()
        rig.clock.now += 1.4
        rig.ask()
    assert len(rig.answers) == 11
    assert rig.looks == rig.guard.stalls == 0


async def test_a_request_after_a_pause_is_answered_after_the_check() -> None:
    rig = await paused()
    rig.gate = gate = Gate()
    rig.ask()
    ticking = asyncio.ensure_future(rig.guard.tick())
    await gate.arrived.wait()
    rig.ask()
    assert rig.answers == []
    gate.open()
    await ticking
    assert len(rig.answers) == 2
    rig.ask()
    assert len(rig.answers) == 3
    assert (rig.looks, rig.guard.stalls) == (1, 1)


async def test_requests_that_are_fenced_anyway_are_not_held() -> None:
    rig = await paused()
    rig.ask(WRITE)
    assert rig.inner.handled == ["write"]


async def test_a_pause_during_the_check_is_followed_by_another_check() -> None:
    rig = await paused()
    rig.gate = gate = Gate()
    rig.ask()
    ticking = asyncio.ensure_future(rig.guard.tick())
    await gate.arrived.wait()
    rig.clock.now += 1.6
    gate.open()
    await ticking
    assert rig.looks == 2
    assert len(rig.answers) == 1


async def test_requests_are_answered_after_a_failed_check() -> None:
    rig = await paused()
    rig.fault = Unavailable("nobody answers")
    rig.ask()
    await rig.guard.tick()
    assert len(rig.answers) == 1


async def test_held_requests_are_bounded_and_a_gone_peer_is_not_answered() -> None:
    rig = await paused(max_held=2)
    gone = rig.ask()
    gone.close()
    rig.ask()
    with pytest.raises(Unavailable):
        rig.ask()
    await rig.guard.tick()
    assert len(rig.inner.handled) == len(rig.answers) == 1


@pytest.mark.parametrize(("fault", "reason"), [(Overloaded("full"), "OVERLOADED"), (ValueError("bug"), "INTERNAL")])
async def test_a_request_that_fails_after_the_check_fails_as_without_it(fault: Exception, reason: str) -> None:
    rig = await paused()
    rig.ask()
    rig.ask()
    rig.inner.fault = fault
    await rig.guard.tick()
    assert [answer.error.reason for answer in rig.answers] == [reason] * 2


async def test_the_mark_is_advanced_until_cancelled() -> None:
    rig = await paused()
    keeping = asyncio.ensure_future(rig.guard.keep())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rig.looks == 1
    keeping.cancel()


@pytest.mark.parametrize("wrong", [{"tick_seconds": 1.5}, {"check_seconds": 2.0}, {"tick_seconds": 0.0}])
def test_a_tick_or_check_longer_than_the_detected_pause_is_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        PauseSettings(**wrong)  # type: ignore[arg-type]  # numbers of seconds all
