"""A connection costs little until its peer has sent something, and is bounded meanwhile."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tao.wire.doorstep import DISPLACED, LATE, AddressPool
from tao.wire.silent_connections import SilentConnection, SilentConnections
from tests.rigs.pacing import until


class Port:
    """A port on a clock of its own, whose connections are pairs of sockets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending = AddressPool(100, 10, lambda: self.now)
        self.looked_at = 0.0
        """The time for the looks."""
        self.has_tls = False
        self.keeps_places = False
        """Whether those that have spoken stay pending."""
        self.silent = SilentConnections(
            self.pending,
            self._spoke,
            self._turned_away,
            has_tls=lambda: self.has_tls,
            now=lambda: self.looked_at,
        )
        self.silent.start()
        self.spoke: list[SilentConnection] = []
        self.others: list[int] = []
        """How many others were there when each of them was passed on."""
        self.turned_away: list[tuple[str, str]] = []
        self.seconds_of_each = 0.0
        self._sockets: list[socket.socket] = []

    def connect(
        self,
        number: int = 1,
        *,
        sends: bytes = b"",
        leaves: bool = False,
        unwatchable: bool = False,
    ) -> socket.socket:
        """Return the client's end. The client ``sends`` or ``leaves`` before its connection is accepted, which the
        system may refuse to watch."""
        client, accepted = socket.socketpair()
        self._sockets.append(client)
        if unwatchable:  # what is watched already cannot be watched again
            self.silent._epolls[0].register(accepted.fileno(), select.EPOLLIN)
        client.setblocking(False)
        if sends:
            client.send(sends)
        if leaves:
            client.close()
        self.silent.add(accepted.detach(), ("192.0.2.7", number))
        self.silent.look_at_new()
        return client

    def connect_over_tcp(self, *, sends: bytes = b"") -> socket.socket:
        """Return the client's end of a connection over TCP, at which the system can wait for several bytes."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(sends)
            accepted, peer = listener.accept()
        self._sockets.append(client)
        client.setblocking(False)
        self.silent.add(accepted.detach(), peer)
        self.silent.look_at_new()
        return client

    def _spoke(self, connection: SilentConnection) -> None:
        self.spoke.append(connection)
        self.others.append(len(self.silent))
        self._sockets.append(connection.socket)
        if not self.keeps_places:
            self.pending.leave(connection.place)
        self.now += self.seconds_of_each
        self.pending.displace_older_than(5.0)

    def _turned_away(self, reason: str, name: str) -> None:
        self.turned_away.append((reason, name))

    def close(self) -> None:
        self.silent.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    opened = Port()
    yield opened
    opened.close()


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # so is one that has sent what nobody has read
        return True


async def test_a_connection_is_passed_on_with_its_first_bytes_unread(port: Port) -> None:
    silent, speaking = port.connect(1), port.connect(2)
    speaking.send(b"hello")
    await until(lambda: len(port.spoke) == 1)
    (spoke,) = port.spoke
    assert spoke.peer == ("192.0.2.7", 2)
    assert not spoke.socket.getblocking()
    assert spoke.socket.recv(100) == b"hello"
    speaking.send(b"more")  # is for those who have taken it over
    silent.send(b"hello")
    await until(lambda: len(port.spoke) == 2)
    assert (len(port.silent), len(port.pending)) == (0, 0)


async def test_a_newcomer_that_has_spoken_waits_behind_nobody(port: Port) -> None:
    for number in range(10):
        port.connect(number)
    port.connect(10, sends=b"hello")
    (spoke,) = port.spoke  # no turn of the loop has passed
    assert spoke.socket.recv(100) == b"hello"


async def test_a_peer_that_has_left_before_it_is_accepted_displaces_nobody(port: Port) -> None:
    for number in range(10):
        port.connect(number)
    port.connect(10, leaves=True)
    assert port.turned_away == []
    assert len(port.silent) == 10


async def test_connections_whose_peers_leave_are_closed_and_passed_to_nobody(port: Port) -> None:
    for client in [port.connect() for _ in range(10)]:
        client.close()
    await until(lambda: len(port.silent) == 0)
    assert len(port.pending) == 0
    assert (port.spoke, port.turned_away) == ([], [])


async def test_peers_that_leave_fast_are_found_together(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, waiting = asyncio.get_running_loop(), list[Callable[[], None]]()

    def wait(_: float, resume: Callable[[], None]) -> asyncio.Handle:
        waiting.append(resume)
        return loop.call_soon(int)  # something to cancel

    async def leave(after: float) -> int:
        """Return how many connections are left some turns later."""
        port.looked_at += after
        clients.pop().close()
        await some_turns()
        return len(port.silent)

    clients = [port.connect() for _ in range(8)]
    monkeypatch.setattr(port.silent, "close_soon", lambda ended: ended.close())
    monkeypatch.setattr(loop, "call_later", wait)
    assert [await leave(after) for after in (1.0, 0.0015, 0.0005, 0.0001, 0.0001, 0.0001)] == [7, 6, 5, 5, 5, 5]
    (resume,) = waiting
    resume()
    await some_turns()
    assert len(port.silent) == 2


async def test_a_newcomer_that_speaks_waits_behind_nobody_that_has_left(port: Port) -> None:
    clients = [port.connect(number) for number in range(10)]
    for client in clients[:9]:
        client.close()
    clients[9].send(b"hello")
    port.silent._look(port.silent._epolls[0])
    assert [spoke.peer for spoke in port.spoke] == [("192.0.2.7", 9)]
    assert port.others == [9]
    assert len(port.silent) == 0


async def test_bytes_before_the_end_are_passed_on(port: Port) -> None:
    client = port.connect()
    client.send(b"hello")
    client.shutdown(socket.SHUT_WR)
    await until(lambda: len(port.spoke) == 1)
    assert port.spoke[0].socket.recv(100) == b"hello"


RECORD = b"\x16\x03\x01\x01\x00" + bytes(256)
"""A TLS record, as long as a ClientHello."""
LONG_RECORD = b"\x16\x03\x01\x40\x00" + bytes(1 << 14)
"""The longest one."""


async def test_the_longest_record_is_passed_on_when_it_is_whole(port: Port) -> None:
    port.has_tls = True
    client = port.connect_over_tcp(sends=LONG_RECORD[:-1])
    await some_turns()
    assert port.spoke == []
    client.send(LONG_RECORD[-1:])
    await until(lambda: len(port.spoke) == 1)
    assert port.spoke[0].socket.recv(1 << 15) == LONG_RECORD
    port.connect_over_tcp(sends=LONG_RECORD)
    await until(lambda: len(port.spoke) == 2)


@pytest.mark.parametrize("is_accepted_after", range(3))
async def test_with_tls_a_connection_is_passed_on_when_its_first_record_is_whole(
    port: Port, monkeypatch: pytest.MonkeyPatch, is_accepted_after: int
) -> None:
    port.has_tls = True
    looks = list[bool | None]()
    is_ready = port.silent._is_ready

    def look(number: int, peer: object, events: int) -> bool | None:
        if events:
            looks.append(is_ready(number, peer, events))
        return is_ready(number, peer, events)

    monkeypatch.setattr(port.silent, "_is_ready", look)
    pieces = [RECORD[:3], RECORD[3:100], *(bytes([each]) for each in RECORD[100:]), b"more"]
    client = port.connect_over_tcp(sends=b"".join(pieces[:is_accepted_after]))
    other = port.connect_over_tcp()
    for piece in pieces[is_accepted_after:-1]:
        assert port.spoke == []
        client.send(piece)
        await some_turns()
    await until(lambda: len(port.spoke) == 1)
    (spoke,) = port.spoke
    assert spoke.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    assert spoke.socket.recv(1000) == RECORD
    # The system does not wake the server at each of the bytes.
    assert len(looks) < 8
    assert not is_closed(other)
    assert len(port.silent) == 1


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x15", b"\x16\x03\x01\xff\xff"])
async def test_what_is_no_record_of_a_handshake_is_passed_on_at_once(port: Port, sent: bytes) -> None:
    port.has_tls = True
    port.connect_over_tcp(sends=sent)
    assert [each.socket.recv(1000) for each in port.spoke] == [sent]


async def test_a_peer_that_leaves_in_the_middle_of_its_first_record_is_closed(port: Port) -> None:
    port.has_tls = True
    for sent in (b"\x16", RECORD[:-1]):
        client = port.connect_over_tcp(sends=sent)
        assert len(port.silent) == 1
        client.shutdown(socket.SHUT_WR)
        await until(lambda: len(port.silent) == 0)
    assert (port.spoke, port.turned_away, len(port.pending)) == ([], [], 0)


async def test_a_peer_whose_first_record_stays_incomplete_is_late(port: Port) -> None:
    port.has_tls = True
    client = port.connect_over_tcp(sends=RECORD[:-1])
    port.now = 6.0
    port.pending.displace_older_than(5.0)
    await until(lambda: is_closed(client))
    assert [reason for reason, _ in port.turned_away] == [LATE]


async def test_the_first_byte_of_a_unix_socket_is_enough_with_tls(port: Port) -> None:
    port.has_tls = True
    client, accepted = socket.socketpair()
    client.send(RECORD[:1])
    port.silent.add(accepted.detach(), "")
    port.silent.look_at_new()
    assert [each.socket.recv(10) for each in port.spoke] == [RECORD[:1]]
    client.close()


async def test_one_more_displaces_the_oldest(port: Port) -> None:
    clients = [port.connect(number) for number in range(11)]
    await until(lambda: is_closed(clients[0]))
    assert not is_closed(clients[1])
    assert port.turned_away == [(DISPLACED, "192.0.2.7:0")]
    assert (len(port.silent), len(port.pending)) == (10, 10)


async def test_silent_ones_displace_one_another_and_nobody_who_has_spoken(port: Port) -> None:
    port.keeps_places = True
    spoken = port.connect(0, sends=b"hello")
    for number in range(1, 30):
        port.connect(number)
    assert port.turned_away == [(DISPLACED, f"192.0.2.7:{number}") for number in range(1, 21)]
    assert not is_closed(spoken)
    assert (len(port.silent), len(port.pending)) == (9, 10)


async def test_those_that_are_silent_for_too_long_are_closed(port: Port) -> None:
    client = port.connect()
    port.now = 6.0
    port.pending.displace_older_than(5.0)
    await until(lambda: is_closed(client))
    assert port.turned_away == [(LATE, "192.0.2.7:1")]


async def test_a_connection_whose_peer_has_left_gives_its_place_back_before_it_is_closed(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_soon, waiting = port.silent.close_soon, list[Any]()  # what has only to be closed
    monkeypatch.setattr(port.silent, "close_soon", waiting.append)
    clients = [port.connect(number) for number in range(10)]
    for client in clients:
        client.close()
    await until(lambda: len(port.pending) == 0)
    assert len(waiting) == 10
    for ended in waiting:
        close_soon(ended)


async def test_displaced_connections_are_closed_for_a_short_time_in_a_turn_of_the_loop(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def close_in_40_us(descriptor: int) -> None:
        port.looked_at += 0.00004
        close(descriptor)

    monkeypatch.setattr(os, "close", close_in_40_us)
    loop, waiting = asyncio.get_running_loop(), list[Callable[[], None]]()

    def wait(_: float, resume: Callable[[], None]) -> asyncio.Handle:
        waiting.append(resume)
        return loop.call_soon(int)  # something to cancel

    monkeypatch.setattr(loop, "call_later", wait)
    clients = [port.connect(number) for number in range(20)]
    closed = [sum(map(is_closed, clients))]
    while waiting:
        (resume,) = waiting
        waiting.clear()
        resume()
        closed.append(sum(map(is_closed, clients)))
    assert closed == [0, 3, 6, 9, 10]
    assert len(port.silent) == 10


async def test_a_bounded_number_of_displaced_connections_waits_to_be_closed(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tao.wire.silent_connections._MOST_ENDED", 3)
    clients = [port.connect(number) for number in range(15)]
    assert [number for number, client in enumerate(clients) if is_closed(client)] == [0, 1]


async def test_a_connection_that_is_displaced_as_another_is_passed_on_is_left_out(port: Port) -> None:
    port.seconds_of_each = 10.0
    for client in [port.connect(number) for number in range(2)]:
        client.send(b"hello")  # both are ready at the same look
    await until(lambda: len(port.spoke) == 1)
    await until(lambda: port.turned_away == [(LATE, "192.0.2.7:1")])
    assert (len(port.silent), len(port.pending)) == (0, 0)


async def test_a_connection_that_the_system_refuses_to_watch_is_closed_and_leaves_no_place(port: Port) -> None:
    client = port.connect(0, unwatchable=True)
    assert is_closed(client)
    ((reason, name),) = port.turned_away
    assert reason == "overloaded"
    assert name.startswith("192.0.2.7:0: ")
    assert (len(port.silent), len(port.pending)) == (0, 0)
    for number in range(1, 12):  # one more than there is room for
        port.connect(number)
    assert port.turned_away[1:] == [(DISPLACED, "192.0.2.7:1")]


async def test_a_fault_with_one_newcomer_costs_those_after_it_nothing(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(spoken: SilentConnection) -> None:
        port._spoke(spoken)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(port.silent, "_on_data", broken)
        with pytest.raises(ZeroDivisionError):
            port.connect(1, sends=b"hello")
    port.connect(2, sends=b"hello")
    assert [spoke.peer for spoke in port.spoke] == [("192.0.2.7", 1), ("192.0.2.7", 2)]
    assert (len(port.silent), len(port.pending)) == (0, 0)


async def test_the_end_closes_all_and_frees_their_places(port: Port) -> None:
    clients = [port.connect() for _ in range(12)]
    assert len(port.turned_away) == 2
    port.silent.close()
    assert all(map(is_closed, clients))
    assert (len(port.silent), len(port.pending)) == (0, 0)
    assert len(port.turned_away) == 2
