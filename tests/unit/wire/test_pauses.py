"""A process that was paused runs its timers before it reads: nobody is taken for silent for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from tao.wire import framing
from tao.wire.frames_client import FrameSession
from tao.wire.frames_server import FrameConnection, FrameServer
from tao.wire.identity import Credentials
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.v1 import frames_pb2
from tao.wire.v1 import session_pb2 as pb

SESSION = SessionSettings(ping_interval_seconds=5.0, ping_timeout_seconds=5.0, pause_seconds=1.0)
SERVING = ServingSettings(silence_timeout_seconds=30.0, sweep_interval_seconds=0.25, pause_seconds=1.0)


class SlowClock:
    """The running loop, with a clock and timers that the test turns by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> asyncio.Handle:
        self.timers.append((self.now + seconds, lambda: callback(*args)))
        return asyncio.Handle(callback, args, self._loop)

    def fire(self, *, late_seconds: float = 0.0) -> None:
        """The one timer that is set, so much later than it is due."""
        ((due, callback),) = self.timers
        self.timers.clear()
        self.now = due + late_seconds
        callback()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Wire(asyncio.Transport):
    """Accepts everything, and records whether it was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        assert not self.is_cut, "uvloop raises RuntimeError"
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_cut

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_cut = True

    abort = close


@pytest.fixture
async def clock() -> SlowClock:
    return SlowClock()


def a_session(clock: SlowClock) -> tuple[FrameSession, Wire]:
    session = FrameSession(cast("asyncio.AbstractEventLoop", clock), "there", SESSION, Credentials("test", "client"))
    wire = Wire()
    session.connection_made(wire)
    session.data_received(framing.frame(framing.WELCOME, frames_pb2.Welcome(server_name="s").SerializeToString()))
    return session, wire


async def test_a_server_that_stays_silent_is_given_up(clock: SlowClock) -> None:
    session, wire = a_session(clock)
    clock.fire()  # asks for a word
    assert session.is_open
    clock.fire()
    assert (session.is_open, wire.is_cut) == (False, True)


async def test_a_request_on_a_connection_that_is_being_lost_fails_as_unavailable(clock: SlowClock) -> None:
    session, wire = a_session(clock)
    taken: list[pb.Answer] = []
    session.send(pb.Request(read=pb.ReadBatch()), 5.0, taken.append)
    wire.is_cut = True
    session.flush()
    assert not taken
    session.connection_lost(None)
    assert [answer.error.reason for answer in taken] == ["UNAVAILABLE"]


async def test_after_a_pause_of_its_own_a_client_reads_before_it_gives_up(clock: SlowClock) -> None:
    session, wire = a_session(clock)
    clock.fire()
    clock.fire(late_seconds=60.0)
    assert (session.is_open, wire.is_cut) == (True, False)
    session.data_received(framing.frame(framing.PONG, b""))  # which lay there all the time
    clock.fire()
    assert session.is_open


async def test_a_silence_that_goes_on_after_the_pause_is_one(clock: SlowClock) -> None:
    session, wire = a_session(clock)
    clock.fire(late_seconds=60.0)
    assert session.is_open
    clock.fire()
    assert (session.is_open, wire.is_cut) == (False, True)


class Nothing:
    def handle(self, request: pb.Request, reply: Reply) -> None:
        raise AssertionError(request)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_server_drops_a_silent_peer_but_not_after_a_pause_of_its_own(clock: SlowClock, *, paused: bool) -> None:
    loop = cast("asyncio.AbstractEventLoop", clock)
    server = FrameServer(Nothing(), SERVING, name="s", topology_version=lambda: 1)
    place = server.doorstep.pending.enter("here", lambda reason: None)
    connection, wire = FrameConnection(server, loop, place), Wire()
    connection.connection_made(wire)
    hello = frames_pb2.Hello(protocol_version=framing.PROTOCOL_VERSION, name="c", role="client")
    connection.data_received(framing.frame(framing.HELLO, hello.SerializeToString()))
    server._schedule_sweep(loop)
    if paused:
        clock.fire(late_seconds=60.0)
        assert not wire.is_cut
        connection.data_received(framing.frame(framing.PING, b""))
        clock.fire()
        assert not wire.is_cut
    else:
        for _ in range(int(SERVING.silence_timeout_seconds / SERVING.sweep_interval_seconds) + 2):
            clock.fire()
        assert wire.is_cut
    connection.connection_lost(None)


async def test_a_peer_that_only_receives_is_pinged_and_kept(clock: SlowClock) -> None:
    loop = cast("asyncio.AbstractEventLoop", clock)
    server = FrameServer(Nothing(), SERVING, name="s", topology_version=lambda: 1)
    connection, wire = FrameConnection(server, loop, server.doorstep.pending.enter("here", lambda reason: None)), Wire()
    connection.connection_made(wire)
    hello = frames_pb2.Hello(protocol_version=framing.PROTOCOL_VERSION, name="c", role="client")
    connection.data_received(framing.frame(framing.HELLO, hello.SerializeToString()))
    session, answers = a_session(clock)
    clock.timers.clear()  # the server goes on sending parts of an answer, so the client does not ping
    server._schedule_sweep(loop)
    pings = 0
    for _ in range(3 * int(SERVING.silence_timeout_seconds / SERVING.sweep_interval_seconds)):
        wire.written.clear()
        answers.written.clear()
        clock.fire()
        await asyncio.sleep(0)  # what is queued is written
        if framing.frame(framing.PING, b"") in wire.written:
            pings += 1
            session.data_received(framing.frame(framing.PING, b""))
            session.flush()
            for pong in answers.written:
                connection.data_received(pong)
    assert not wire.is_cut
    assert 3 <= pings <= 6, "one ping after each half of the timeout"
    connection.connection_lost(None)
    session.connection_lost(None)
