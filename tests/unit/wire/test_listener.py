"""Connections are accepted for a short time in a turn, and no more in a while than the bound."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from tao.wire.address import TcpAddress, UnixAddress
from tao.wire.listener import Listener
from tests.rigs.pacing import until

ANY_PORT = TcpAddress("127.0.0.1", 0)


class Door:
    """A listener on a clock of its own, and what it has accepted: how many connections at each turn of the loop in
    which there were any."""

    def __init__(self, per_second: float, *, seconds_of_each: float = 0.0) -> None:
        self.now = 0.0
        self.listener = Listener(
            "tested", per_second, self._accepted, turn_ended=self._turn_ended, now=lambda: self.now
        )
        self.accepted: list[socket.socket] = []
        self.of_turns: list[int] = []
        self.clients: list[socket.socket] = []
        self._seconds_of_each = seconds_of_each
        self._of_this_turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.stop()
        for each in (*self.clients, *self.accepted):
            each.close()

    def _accepted(self, descriptor: int, _: object) -> None:
        self.accepted.append(socket.socket(fileno=descriptor))
        self.now += self._seconds_of_each
        self._of_this_turn += 1

    def _turn_ended(self) -> None:
        self.of_turns.append(self._of_this_turn)
        self._of_this_turn = 0


@asynccontextmanager
async def crowd(door: Door, count: int) -> AsyncIterator[None]:
    """Have so many clients wait before the listener starts."""
    where = door.listener.bind(ANY_PORT)
    assert isinstance(where, TcpAddress)
    door.listener.start()
    with door:
        door.clients += [socket.create_connection((where.host, where.port)) for _ in range(count)]
        yield


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_connections_are_accepted_for_a_short_time_in_a_turn_of_the_loop() -> None:
    door = Door(1e6, seconds_of_each=0.00012)
    async with crowd(door, 30):
        await until(lambda: len(door.accepted) == 30)
    assert max(door.of_turns) == 3


async def test_a_bounded_number_of_connections_is_accepted_in_a_turn_of_the_loop() -> None:
    door = Door(1e6)
    async with crowd(door, 40):
        await until(lambda: len(door.accepted) == 40)
    assert door.of_turns == [16, 16, 8]


async def test_a_wave_within_the_saved_accepts_is_accepted_and_no_more() -> None:
    door = Door(16.0)
    async with crowd(door, 6):
        await until(lambda: len(door.accepted) == 4)
        await some_turns()
        assert len(door.accepted) == 4


async def test_the_others_are_accepted_when_time_has_passed() -> None:
    door = Door(16.0)
    async with crowd(door, 8):
        await until(lambda: len(door.accepted) == 4)
        door.now = 2 / 16
        await until(lambda: len(door.accepted) == 6)
        await some_turns()
        assert len(door.accepted) == 6


async def test_accepts_are_saved_for_a_quarter_of_a_second_only() -> None:
    door = Door(16.0)
    door.now = 1_000.0
    async with crowd(door, 6):
        await until(lambda: len(door.accepted) == 4)
        await some_turns()
        assert len(door.accepted) == 4


async def turns_of_accepts(door: Door, pauses: Sequence[float]) -> list[int]:
    """Have a client connect after each of the pauses, let the loop turn, and return how many were accepted at each turn
    in which there were any."""
    where = door.listener.bind(ANY_PORT)
    assert isinstance(where, TcpAddress)
    door.listener.start()
    for pause in pauses:
        door.now += pause
        door.clients.append(connected(where.host, where.port))
        await some_turns()
    return door.of_turns


async def test_a_fault_with_one_connection_does_not_keep_those_behind_it_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, waiting = asyncio.get_running_loop(), list[Callable[[], None]]()

    def wait(_: float, resume: Callable[[], None]) -> asyncio.Handle:
        waiting.append(resume)
        return loop.call_soon(int)  # something to cancel

    def broken(descriptor: int, _: object) -> None:
        os.close(descriptor)
        raise ZeroDivisionError

    monkeypatch.setattr(loop, "call_later", wait)
    with Door(1e6) as door:
        await turns_of_accepts(door, [1.0, 0.0005, *[0.0001] * 3])
        accept = door.listener._accept
        door.listener._accept = broken  # type: ignore[misc]
        (resume,) = waiting
        with pytest.raises(ZeroDivisionError):
            resume()
        door.listener._accept = accept  # type: ignore[misc]
        await until(lambda: len(door.accepted) == 4)


async def test_connections_that_come_fast_are_accepted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, waiting = asyncio.get_running_loop(), list[Callable[[], None]]()

    def wait(_: float, resume: Callable[[], None]) -> asyncio.Handle:
        waiting.append(resume)
        return loop.call_soon(int)  # something to cancel

    monkeypatch.setattr(loop, "call_later", wait)
    with Door(1e6) as door:
        assert await turns_of_accepts(door, [1.0, 0.0005, *[0.0001] * 8]) == [1, 1]
        (resume,) = waiting
        resume()
        await some_turns()
        assert door.of_turns == [1, 1, 8]


async def test_connections_that_come_slowly_are_accepted_at_once() -> None:
    with Door(1e6) as door:
        assert await turns_of_accepts(door, [0.0015] * 3) == [1, 1, 1]


async def test_a_failure_of_the_system_is_logged_once_and_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    door = Door(1e6)
    async with crowd(door, 1):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            await until(lambda: len(caplog.messages) > 0)
            await some_turns()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(caplog.messages) == 1
        assert "no connection can be accepted at the tested port" in caplog.messages[0]
        await until(lambda: len(door.accepted) == 1)


async def test_accepted_connections_do_not_wait_to_fill_packets() -> None:
    door = Door(1e6)
    async with crowd(door, 1):
        await until(lambda: len(door.accepted) == 1)
        assert door.accepted[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_an_address_that_is_taken_is_named() -> None:
    door, other = Door(10.0), Door(10.0)
    taken = door.listener.bind(ANY_PORT)
    door.listener.start()
    with pytest.raises(OSError, match=r"cannot listen at 127\.0\.0\.1"):
        other.listener.bind(taken)
    door.listener.stop()


def resolved_to(*hosts: tuple[socket.AddressFamily, str]) -> object:
    """Return a name service that finds these addresses for every name."""

    def find(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        del host
        return [(family, socket.SOCK_STREAM, 0, "", (address, port)) for family, address in hosts]

    return find


async def test_an_address_of_a_name_that_this_machine_lacks_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, foreign = (socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "192.0.2.1")
    monkeypatch.setattr(socket, "getaddrinfo", resolved_to(foreign, mine))
    door = Door(10.0)
    where = door.listener.bind(TcpAddress("here", 0))
    assert isinstance(where, TcpAddress)
    assert where.port
    door.listener.stop()
    monkeypatch.setattr(socket, "getaddrinfo", resolved_to(foreign))
    with pytest.raises(OSError, match="cannot listen at here:0"):
        Door(10.0).listener.bind(TcpAddress("here", 0))


async def test_a_socket_left_behind_by_a_server_that_has_ended_is_replaced(tmp_path: Path) -> None:
    where = UnixAddress(str(tmp_path / "s"))
    left = socket.socket(socket.AF_UNIX)
    left.bind(where.path)
    left.close()
    door = Door(10.0)
    assert door.listener.bind(where) == where
    door.listener.start()
    client = socket.socket(socket.AF_UNIX)
    client.connect(where.path)
    await until(lambda: len(door.accepted) == 1)
    door.listener.stop()
    client.close()
    door.accepted[0].close()


def connected(host: str, port: int) -> socket.socket:
    client = socket.socket()
    client.connect((host, port))
    return client


@pytest.mark.parametrize(("crowded", "other"), [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
async def test_a_crowd_at_one_address_of_a_name_keeps_nobody_waiting_at_another(
    monkeypatch: pytest.MonkeyPatch, crowded: str, other: str
) -> None:
    both = [(socket.AF_INET, host) for host in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", resolved_to(*both))
    door = Door(16.0)
    where = door.listener.bind(TcpAddress("here", 0))
    assert isinstance(where, TcpAddress)
    door.listener.start()
    clients = [connected(crowded, where.port) for _ in range(20)]
    try:
        await until(lambda: len(door.accepted) == 4)
        clients.append(connected(other, where.port))
        door.now += 4 / 16
        await until(lambda: len(door.accepted) == 8)
        door.now += 4 / 16
        await until(lambda: len(door.accepted) == 12)
        assert clients[-1].getsockname() in [each.getpeername() for each in door.accepted]
    finally:
        door.listener.stop()
        for each in (*clients, *door.accepted):
            each.close()
