"""Accepts connections at an address, for a short time in one turn of the loop and at a bounded rate.

The loops accept whatever waits before anything else has its turn: a flood of connections then delays every request by
tens of milliseconds, again and again. Here further connections wait in the system's queue, which costs nothing. A
quarter of a second's accepts are saved up in quiet times, so that an ordinary wave of connections does not wait.
Connections that come faster than one in a millisecond are accepted together (`tao.wire.paced_reader`).
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from tao.wire.address import TcpAddress, UnixAddress
from tao.wire.paced_reader import PacedReader

_logger = logging.getLogger(__name__)

Accept = Callable[[int, object], None]
"""Takes the file descriptor of an accepted socket, and the address of its peer. It must not raise."""

_TURN_SECONDS: Final = 0.0003
"""The time for accepts in one turn of the loop."""
_MOST_OF_A_TURN: Final = 16
"""The most connections that are accepted in one: what is done for each of them follows in the same turn."""
_SAVED_SECONDS: Final = 0.25
"""The accepts of so long are saved up."""
_ACCEPTS_TO_RESUME: Final = 8
"""Accepts that are saved up before the first of those that had to wait: waking the loop for each would cost more."""
_FAILED_SECONDS: Final = 0.25
"""The time until the next try after a failure of the system, for instance for lack of file descriptors."""
_BACKLOG: Final = 1_024


def _do_nothing() -> None:
    pass


class Listener:
    """Listens at one address, which may have several sockets: a name can have more than one IP address."""

    def __init__(
        self,
        port: str,
        per_second: float,
        accept: Accept,
        *,
        turn_ended: Callable[[], None] = _do_nothing,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``port`` names the port in logs. ``per_second``: the most connections to accept. ``turn_ended`` is called
        when all connections of one turn are accepted, and must not raise. ``now`` returns the time in seconds."""
        self._per_second: Final = per_second
        self._most: Final = max(1.0, per_second * _SAVED_SECONDS)
        """Accepts that may be saved up."""
        self._port: Final = port
        self._accept: Final = accept
        self._turn_ended: Final = turn_ended
        self._now: Final = now
        self._sockets: list[socket.socket] = []
        self._saved = self._most
        self._counted_at = now()
        self._reader: Final = PacedReader(self._sockets, self._accept_some, now)

    def bind(self, where: TcpAddress | UnixAddress) -> TcpAddress | UnixAddress:
        """Take the address. Returns it with the port that was assigned. Raises `OSError` when it is taken."""
        try:
            return self._bind(where)
        except OSError as error:
            self.stop()
            raise OSError(error.errno, f"cannot listen at {where}: {error.strerror}") from error

    def start(self) -> None:
        """Accept connections at the address that was taken."""
        for listener in self._sockets:
            listener.setblocking(False)
            listener.listen(_BACKLOG)
        self._reader.start()

    def stop(self) -> None:
        """Accept no more connections."""
        self._reader.stop()
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()

    def _bind(self, where: TcpAddress | UnixAddress) -> TcpAddress | UnixAddress:
        if isinstance(where, UnixAddress):
            listener = socket.socket(socket.AF_UNIX)
            self._sockets.append(listener)
            path = Path(where.path)
            if path.is_socket():  # of a server that has ended: it stays
                path.unlink()
            listener.bind(where.path)
            return where
        port, unusable = where.port, OSError(errno.EADDRNOTAVAIL, "the name has no address")
        for family, _, _, _, address in _addresses(where):
            try:
                port = self._bind_one(family, (address[0], port, *address[2:]))
            except OSError as error:
                # A name may have an address of a family that this machine has switched off.
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                unusable = error
        if not self._sockets:
            raise unusable
        return TcpAddress(where.host, port)

    def _bind_one(self, family: socket.AddressFamily, address: tuple[str | int, ...]) -> int:
        """Take one of a name's addresses, and return its port."""
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of every accepted connection, that is
            if family == socket.AF_INET6 and address[0] != "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        self._sockets.append(listener)
        port: int = listener.getsockname()[1]
        return port

    def _accept_some(self, listener: socket.socket) -> int | None:
        """Accept the connections of one turn. Returns how many there were, or None when there may be more."""
        now = self._now()
        self._saved = min(self._most, self._saved + (now - self._counted_at) * self._per_second)
        self._counted_at = now
        saved = self._saved
        is_empty = self._accept_until(listener, now + _TURN_SECONDS)
        count = round(saved - self._saved)
        if count:
            self._turn_ended()
        if self._saved < 1:
            # The first one may take all accepts when they resume: without turns a crowd would keep the others waiting.
            self._sockets.remove(listener)
            self._sockets.append(listener)
            self._reader.pause_for((min(_ACCEPTS_TO_RESUME, self._most) - self._saved) / self._per_second)
        return count if is_empty else None

    def _accept_until(self, listener: socket.socket, until: float) -> bool:
        """Accept connections for one turn, which lasts until then. Returns whether no more are waiting."""
        for _ in range(_MOST_OF_A_TURN):
            if self._saved < 1 or self._now() >= until:
                return False
            try:
                # `accept` makes a socket of it, too, which costs more than the system's call; most are closed unused.
                accepted, address = listener._accept()  # type: ignore[attr-defined]  # the stubs leave it out
            except (BlockingIOError, InterruptedError, ConnectionError):
                return True
            except OSError as error:  # no more descriptors, for one
                _logger.warning("no connection can be accepted at the %s port: %s", self._port, error)
                self._reader.pause_for(_FAILED_SECONDS)
                return False
            self._saved -= 1
            self._accept(accepted, address)
        return False


_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]


def _addresses(where: TcpAddress) -> list[_Address]:
    """Return the addresses to listen at: a name may have several."""
    found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(cast("list[_Address]", found)))
