"""Reserves free TCP ports on 127.0.0.1 for servers that listen there, and while they are down.

Ports are picked below the range that the kernel uses for outgoing connections, so that none of these takes a port while
its server restarts. A reservation is a bound socket that never listens. Linux lets a server that sets ``SO_REUSEADDR``
(mariadbd, mysqld, asyncio and gRPC do) bind and listen beside it, while a program that looks for any free port gets
another one. A program that uses this very port and sets ``SO_REUSEADDR`` may still win; the server then fails to start.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from tao.model.errors import OperatorError

LOOPBACK = "127.0.0.1"
_LOWEST_PORT = 20_000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_PICK_ATTEMPTS = 200


class PortReservation:
    """A port that no other program picks until `release` is called. A context manager."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = listener
        self.port: int = listener.getsockname()[1]

    def release(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def reserve_port(port: int = 0) -> PortReservation:
    """Reserve ``port``, or any free one for 0. Raises `OperatorError` when it is taken, or no port is left."""
    if port == 0:
        return _reserve_any()
    listener = socket.socket()
    try:
        # Connections of the server's last run may linger in TIME_WAIT; they must not make its own port unusable.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
    except OSError as error:
        listener.close()
        raise OperatorError(
            f"port {port} on {LOOPBACK} cannot be used ({error.strerror}): "
            f"stop what uses it (`ss -ltnp 'sport = :{port}'` names it) or choose another port"
        ) from error
    return PortReservation(listener)


def reserve_again(port: int) -> PortReservation:
    """Reserve the port of the last start where it is still free, else any port (also for 0)."""
    try:
        return reserve_port(port)
    except OperatorError:
        return reserve_port()


def _reserve_any() -> PortReservation:
    first_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    for attempt in range(_PICK_ATTEMPTS):
        # Where no port is free below the ephemeral range, one of that range is used.
        roomy = first_ephemeral > _LOWEST_PORT and attempt < _PICK_ATTEMPTS - 1
        candidate = random.randrange(_LOWEST_PORT, first_ephemeral) if roomy else 0
        listener = socket.socket()
        try:
            # Bound without SO_REUSEADDR, so that two reservations never share a port. Set later, it admits the server.
            listener.bind((LOOPBACK, candidate))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            listener.close()
            continue
        return PortReservation(listener)
    raise OperatorError(f"no free TCP port on {LOOPBACK} after {_PICK_ATTEMPTS} attempts: stop some servers")
