"""Accepted connections whose peers have sent nothing yet, or only the beginning of their first TLS record.

Every client of every port speaks first, so nothing has to be made for a connection before its first bytes: it is a
socket in one epoll set with a place at the doorstep. That costs a fifth of a transport with its protocol and task, and
the end of a crowd that never spoke is handled a few connections at a time, once in a millisecond if they leave one
after the other. Those that lose their places are closed a few at a time, too. So a flood of silent connections delays
requests little, and newcomers do not wait until something was made for each connection in front of them, or the one
that it displaced was closed.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from tao.wire.doorstep import AddressPool, Place, address_of, name_of
from tao.wire.listener import TOGETHER_SECONDS
from tao.wire.tls import RECORD_HEAD_BYTES, first_record_bytes

_TURN_SECONDS: Final = 0.0003
"""The time for connections that are ready in one turn of the loop, as long as that for accepts: peers that have left,
at 5 µs each, must not be accepted faster than they are found, or they would displace a newcomer behind them."""
_CLOSING_SECONDS: Final = 0.0001
"""The time for closing displaced connections in one turn of the loop, at 8 µs each, most of them in the system."""
_CLOSING_PAUSE_SECONDS: Final = 0.002
"""The time between such turns. With it they close more connections than a wave within the bounds of a port displaces
until the next wave."""
_MOST_DISPLACED: Final = 1_024
"""Displaced connections that may wait to be closed, so that they take a bounded number of file descriptors."""
_READY_OF_A_TURN: Final = 64
"""The most that have room in that time."""
_LEFT: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_PEEK: Final = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
"""As one number: the names of flags cost more than the system's call."""
_FIRST_LOOK_BYTES: Final = 2_048
"""At least as long as the ClientHello of most clients, and no more than may be copied for nothing."""


class SilentConnection(NamedTuple):
    """One of them."""

    socket: socket.socket
    place: Place
    peer: object
    """The address of the peer, as its socket says it."""


class SilentConnections:
    """The silent connections of one port."""

    def __init__(
        self,
        pending: AddressPool,
        on_data: Callable[[SilentConnection], None],
        on_turned_away: Callable[[str, str], None],
        *,
        has_tls: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pending`` bounds them, together with those that have spoken. ``on_data`` takes over a connection that has
        something to read, with its place; ``on_turned_away(reason, name)`` is called when the connection of a peer is
        closed because it has lost its place, or the system has none for it. Neither may raise. A peer of a port that
        ``has_tls`` has something to read when its first TLS record has arrived. ``now`` returns the time in seconds."""
        self._pending: Final = pending
        self._on_data: Final = on_data
        self._on_turned_away: Final = on_turned_away
        self._has_tls: Final = has_tls
        self._now: Final = now
        self._connections: dict[int, SilentConnection] = {}
        self._epoll: select.epoll | None = None
        self._emptied_at = -math.inf
        """When all that were ready had been looked at the last time."""
        self._resuming: asyncio.TimerHandle | None = None
        self._displaced: deque[socket.socket] = deque()
        """Connections that have lost their places, and wait to be closed."""
        self._closing: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Begin to look for bytes. Repeats have no effect."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._resume()

    def add(self, accepted: socket.socket, peer: object) -> None:
        """Wait for the first bytes of an accepted connection. What is there already is passed on at once."""
        assert self._epoll is not None
        is_ready = self._is_ready(accepted, peer)
        if is_ready is None:
            accepted.close()
            return
        number = accepted.fileno()
        place = self._pending.enter(address_of(peer), partial(self._displace, number))
        connection = SilentConnection(accepted, place, peer)
        if is_ready:
            self._on_data(connection)
            return
        try:
            self._epoll.register(number, select.EPOLLIN | select.EPOLLRDHUP)
        except OSError as error:  # the system bounds what an account may watch, and its memory
            self._pending.leave(place)
            accepted.close()
            self._on_turned_away("overloaded", f"{name_of(peer)}: {error}")
        else:
            self._connections[number] = connection

    def close(self) -> None:
        """Close all of them. More may be added after another start."""
        for number in tuple(self._connections):
            self._close(number)
        while self._displaced:
            self._displaced.popleft().close()
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll)
            self._epoll.close()
            self._epoll = None

    def close_soon(self, displaced: socket.socket) -> None:
        """Close a connection that has lost its place."""
        if len(self._displaced) >= _MOST_DISPLACED:
            self._displaced.popleft().close()
        self._displaced.append(displaced)
        if self._closing is None:
            self._closing = asyncio.get_running_loop().call_later(_CLOSING_PAUSE_SECONDS, self._close_displaced)

    def _displace(self, number: int, reason: str) -> None:
        connection = self._take(number)
        self.close_soon(connection.socket)
        self._on_turned_away(reason, name_of(connection.peer))

    def _close_displaced(self) -> None:
        """Close some of those that have lost their places, and go on in a moment."""
        self._closing, began = None, self._now()
        while self._displaced and self._now() - began < _CLOSING_SECONDS:
            self._displaced.popleft().close()
        if self._displaced:
            self._closing = asyncio.get_running_loop().call_later(_CLOSING_PAUSE_SECONDS, self._close_displaced)

    def _close(self, number: int) -> None:
        connection = self._take(number)
        self._pending.leave(connection.place)
        connection.socket.close()

    def _take(self, number: int) -> SilentConnection:
        assert self._epoll is not None
        self._epoll.unregister(number)
        return self._connections.pop(number)

    def _resume(self) -> None:
        assert self._epoll is not None
        self._resuming = None
        asyncio.get_running_loop().add_reader(self._epoll, self._look)

    def _look(self) -> None:
        """Pass on the connections that have something to read, and close those whose peers have left."""
        assert self._epoll is not None
        began, has_spoken = self._now(), False
        ready = self._epoll.poll(0, _READY_OF_A_TURN)
        for number, events in ready:
            connection = self._connections.get(number)
            if connection is None:  # displaced by one that was passed on before it
                continue
            is_ready = self._is_ready(connection.socket, connection.peer)
            if is_ready:
                has_spoken = True
                # Those who take the connection over want to be woken by whatever arrives.
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                self._on_data(self._take(number))
            elif is_ready is None or events & _LEFT:
                self._close(number)
            if self._now() - began > _TURN_SECONDS:
                return
        if len(ready) < _READY_OF_A_TURN and not has_spoken:
            self._wait_for_more(began)

    def _wait_for_more(self, began: float) -> None:
        """Look again in a moment if peers leave fast. ``began``: when this turn did."""
        is_fast = began - self._emptied_at < TOGETHER_SECONDS
        self._emptied_at = self._now()
        if is_fast:
            assert self._epoll is not None
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._epoll)
            self._resuming = loop.call_later(TOGETHER_SECONDS, self._resume)

    def _is_ready(self, accepted: socket.socket, peer: object) -> bool | None:
        """Return whether enough has arrived to be read, and None when the peer has left."""
        try:
            # The system does not wake at more than a byte of a Unix socket, whose peers are on this machine.
            if not self._has_tls() or not isinstance(peer, tuple):
                return bool(accepted.recv(1, _PEEK)) or None
            arrived = accepted.recv(_FIRST_LOOK_BYTES, _PEEK)
            if not arrived:
                return None
            needed = first_record_bytes(arrived[:RECORD_HEAD_BYTES])
            if needed > len(arrived) == _FIRST_LOOK_BYTES:
                arrived = accepted.recv(needed, _PEEK)
            if needed > len(arrived):
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, needed)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return len(arrived) >= needed
