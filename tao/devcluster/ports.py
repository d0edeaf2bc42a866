"""Free TCP ports of 127.0.0.1, kept until the server that needs them has taken them.

Ports are picked below the range from which the kernel serves outgoing connections, so that none of those takes a port
while its server restarts. A reservation is a bound socket that never listens; Linux lets a server that sets
``SO_REUSEADDR`` (mariadbd, mysqld, asyncio and gRPC do) bind and listen beside it, while everybody who merely looks for
a free port passes on. What remains is a program that was told to use this very port and sets ``SO_REUSEADDR`` too:
it may win, the server then fails to start, and the starter tries another port.
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
    """A port that nobody else will pick until `release`; a context manager."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = listener
        self.port: int = listener.getsockname()[1]

    def release(self) -> None:
        """Let go of the port. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def reserve_port(port: int = 0) -> PortReservation:
    """Reserve ``port``, or with 0 any free one. Raises `OperatorError` when it is taken (or no port is left)."""
    if port == 0:
        return _reserve_any()
    listener = socket.socket()
    try:
        # Connections of the server's last run may linger in TIME_WAIT; they are no reason to refuse its own port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
    except OSError as error:
        listener.close()
        raise OperatorError(
            f"port {port} on {LOOPBACK} cannot be used ({error.strerror}): "
            f"stop what uses it (`ss -ltnp 'sport = :{port}'` names it) or choose another port"
        ) from error
    return PortReservation(listener)


def _reserve_any() -> PortReservation:
    first_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    for attempt in range(_PICK_ATTEMPTS):
        # A machine that leaves no room below its ephemeral range gets one of those, and so does a crowded one.
        roomy = first_ephemeral > _LOWEST_PORT and attempt < _PICK_ATTEMPTS - 1
        candidate = random.randrange(_LOWEST_PORT, first_ephemeral) if roomy else 0
        listener = socket.socket()
        try:
            # Bound without SO_REUSEADDR: two reservations never share a port. Set afterwards, it admits the server.
            listener.bind((LOOPBACK, candidate))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            listener.close()
            continue
        return PortReservation(listener)
    raise OperatorError(f"no free TCP port on {LOOPBACK} after {_PICK_ATTEMPTS} attempts: stop some servers")
