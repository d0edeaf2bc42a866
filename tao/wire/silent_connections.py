"""Accepted connections whose peers have sent nothing yet, or only the beginning of their first TLS record.

Every client of every port speaks first, so nothing has to be made for a connection before its first bytes: it is a file
descriptor in one epoll set with a place at the doorstep. That costs a tenth of a transport with its protocol and task,
and the end of a crowd that never spoke is handled a few connections at a time, once in a millisecond if they leave one
after the other. They are closed a few at a time later, as those are that lose their places. So a flood of silent
connections delays requests little, and newcomers do not wait until something was made for each connection in front of
them, or the one that it displaced was closed. Peers that have spoken are never behind those that have left.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import socket
import termios
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

from tao.wire.doorstep import AddressPool, Place, address_of, name_of
from tao.wire.paced_reader import PacedReader
from tao.wire.tls import RECORD_HEAD_BYTES, first_record_bytes

_TURN_SECONDS: Final = 0.0003
"""The time for connections that are ready in one turn of the loop, as long as that for accepts: peers that have left,
at 4 µs each, must not be accepted faster than they are found, or they would displace a newcomer behind them."""
_CLOSING_SECONDS: Final = 0.0001
"""The time for closing connections in one turn of the loop, at 5 to 8 µs each, most of them in the system."""
_CLOSING_PAUSE_SECONDS: Final = 0.002
"""The time between such turns. With it they close as many connections as a port accepts within its bounds."""
_MOST_ENDED: Final = 1_024
"""Connections that may wait to be closed, so that they take a bounded number of file descriptors."""
_MOST_READY: Final = 4_096
"""Connections with events that are looked at in one turn: more than may be pending."""
_LEFT: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_PEEK: Final = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
"""As one number: the names of flags cost more than the system's call."""
_FIRST_LOOK_BYTES: Final = 2_048
"""At least as long as the ClientHello of most clients, and no more than may be copied for nothing."""


class SilentConnection(NamedTuple):
    """One that is silent no longer."""

    socket: socket.socket
    place: Place
    peer: object
    """The address of the peer, as its socket says it."""


class _Silent(NamedTuple):
    """One of them, whose file descriptor is known."""

    place: Place
    peer: object


class _Closable(Protocol):
    """What waits to be closed."""

    def close(self) -> None: ...


class _Descriptor(NamedTuple):
    """A file descriptor that waits to be closed."""

    number: int

    def close(self) -> None:
        os.close(self.number)


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
        self._connections: dict[int, _Silent] = {}
        """The connections by file descriptor."""
        self._new: dict[int, object] = {}
        """The peers of those that were accepted in this turn, by file descriptor. They have no place yet."""
        self._arrived: Final = bytearray(4)
        self._epolls: Final = list[select.epoll]()
        """The one that has all connections, when it was started."""
        self._reader: Final = PacedReader(self._epolls, self._look, now)
        self._ended: deque[_Closable] = deque()
        """Connections that have lost their places, or whose peers have left, and wait to be closed."""
        self._closing: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Begin to look for bytes. Repeats have no effect."""
        if not self._epolls:
            self._epolls.append(select.epoll())
            self._reader.start()

    def add(self, descriptor: int, peer: object) -> None:
        """Take over an accepted connection, by its file descriptor, and watch it. Call `look_at_new` in this turn of
        the loop."""
        (epoll,) = self._epolls
        try:
            epoll.register(descriptor, select.EPOLLIN | select.EPOLLRDHUP)
        except OSError as error:  # the system bounds what an account may watch, and its memory
            os.close(descriptor)
            self._on_turned_away("overloaded", f"{name_of(peer)}: {error}")
        else:
            self._new[descriptor] = peer

    def look_at_new(self) -> None:
        """Give the connections that were added a place, and pass on those whose first bytes are there already. Those
        whose peers have left already are closed, and displace nobody."""
        (epoll,) = self._epolls
        events_of = dict(epoll.poll(0, _MOST_READY))
        new, self._new = self._new, {}
        for number, peer in new.items():
            is_ready = self._is_ready(number, peer, events_of.get(number, 0))
            if is_ready is None:
                epoll.unregister(number)
                self.close_soon(_Descriptor(number))
                continue
            place = self._pending.enter(address_of(peer), partial(self._displace, number))
            self._connections[number] = _Silent(place, peer)
            if is_ready:
                self._pass_on(number)

    def close(self) -> None:
        """Close all of them. More may be added after another start."""
        for number in tuple(self._connections):
            self._close(number)
        while self._ended:
            self._ended.popleft().close()
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        self._reader.stop()
        while self._epolls:
            self._epolls.pop().close()

    def close_soon(self, ended: _Closable) -> None:
        """Close a connection that has lost its place, or whose peer has left."""
        if len(self._ended) >= _MOST_ENDED:
            self._ended.popleft().close()
        self._ended.append(ended)
        if self._closing is None:
            self._closing = asyncio.get_running_loop().call_later(_CLOSING_PAUSE_SECONDS, self._close_ended)

    def _displace(self, number: int, reason: str) -> None:
        connection = self._take(number)
        self.close_soon(_Descriptor(number))
        self._on_turned_away(reason, name_of(connection.peer))

    def _close_ended(self) -> None:
        """Close some of those that have ended, and go on in a moment."""
        self._closing, began = None, self._now()
        while self._ended and self._now() - began < _CLOSING_SECONDS:
            self._ended.popleft().close()
        if self._ended:
            self._closing = asyncio.get_running_loop().call_later(_CLOSING_PAUSE_SECONDS, self._close_ended)

    def _close(self, number: int) -> None:
        self._pending.leave(self._take(number).place)
        os.close(number)

    def _pass_on(self, number: int) -> None:
        connection = self._take(number)
        self._pending.advance(connection.place)
        spoken = socket.socket(fileno=number)
        spoken.setblocking(False)
        # Those who take the connection over want to be woken by whatever arrives.
        spoken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._on_data(SilentConnection(spoken, connection.place, connection.peer))

    def _take(self, number: int) -> _Silent:
        (epoll,) = self._epolls
        epoll.unregister(number)
        return self._connections.pop(number)

    def _look(self, epoll: select.epoll) -> int | None:
        """Pass on the connections that have something to read, and give up those whose peers have left, for one turn.
        Returns how many have left, or None when somebody has spoken or there are more."""
        ends, has_spoken = self._now() + _TURN_SECONDS, False
        ready = epoll.poll(0, _MOST_READY)
        ready.sort(key=_has_left)
        for number, events in ready:
            connection = self._connections.get(number)
            if connection is None:  # displaced by one that was passed on before it
                continue
            is_ready = self._is_ready(number, connection.peer, events)
            if is_ready:
                has_spoken = True
                self._pass_on(number)
            elif is_ready is None:
                self._pending.leave(self._take(number).place)
                self.close_soon(_Descriptor(number))
            if self._now() > ends:
                return None
        return None if has_spoken else len(ready)

    def _is_ready(self, number: int, peer: object, events: int) -> bool | None:
        """Return whether enough has arrived to be read, and None when the peer has left."""
        if not events:
            return False
        # The system does not wake at more than a byte of a Unix socket, whose peers are on this machine.
        if self._has_tls() and isinstance(peer, tuple):
            is_ready = _has_first_record(number)
            return None if not is_ready and events & _LEFT else is_ready
        if not events & _LEFT:
            return True
        fcntl.ioctl(number, termios.FIONREAD, self._arrived)
        return any(self._arrived) or None


def _has_left(ready: tuple[int, int]) -> bool:
    """Return whether the peer of a connection with these events, by its file descriptor, has left."""
    return bool(ready[1] & _LEFT)


def _has_first_record(number: int) -> bool | None:
    """Return whether the first TLS record of a connection, or what is no such record, has arrived, and None when its
    peer has left. Have the system wait for the whole of it."""
    connection = socket.socket(fileno=number)
    try:
        arrived = connection.recv(_FIRST_LOOK_BYTES, _PEEK)
        if not arrived:
            return None
        needed = first_record_bytes(arrived[:RECORD_HEAD_BYTES])
        if needed > len(arrived) == _FIRST_LOOK_BYTES:
            arrived = connection.recv(needed, _PEEK)
        if needed > len(arrived):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, needed)
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        connection.detach()
    return len(arrived) >= needed
