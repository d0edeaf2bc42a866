"""Unused ports on loopback, for servers whose address must be known before they listen."""

from __future__ import annotations

from tao.devcluster.ports import reserve_port


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports that were free a moment ago."""
    held = [reserve_port() for _ in range(count)]
    for each in held:
        each.release()
    return [each.port for each in held]
