"""Ports on loopback for servers whose address must be known before they listen."""

from __future__ import annotations

from typing import Final

from tao.devcluster.ports import PortReservation, reserve_port

_HELD: Final[list[PortReservation]] = []
"""They stay reserved until the process of the tests ends: other tests reserve ports before a server listens here."""


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports at which nobody listens. A server of a test may, and nobody else gets them."""
    held = [reserve_port() for _ in range(count)]
    _HELD.extend(held)
    return [each.port for each in held]
