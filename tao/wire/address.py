"""Listening addresses: ``host:port`` (an IPv6 host in brackets) or ``unix:/path``, spelled as in the topology."""

from __future__ import annotations

from ipaddress import ip_address

import msgspec

from tao.model.errors import InvalidArgument

_UNIX_PREFIX = "unix:"
_MAX_PORT = 65535


class TcpAddress(msgspec.Struct, frozen=True):
    """A TCP address. ``port=0`` listens on any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixAddress(msgspec.Struct, frozen=True):
    """A Unix domain socket of this machine."""

    path: str

    def __str__(self) -> str:
        return f"{_UNIX_PREFIX}{self.path}"


def is_loopback(address: TcpAddress | UnixAddress) -> bool:
    """Return whether only this machine reaches the address. A name other than ``localhost`` may stand for anything."""
    if isinstance(address, UnixAddress) or address.host == "localhost":
        return True
    try:
        return ip_address(address.host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> TcpAddress | UnixAddress:
    """Parse an address. Raises `InvalidArgument` when the text has neither form."""
    if text.startswith(_UNIX_PREFIX):
        path = text.removeprefix(_UNIX_PREFIX)
        if not path:
            raise InvalidArgument(f"address {text!r} names no socket; write unix:/path")
        return UnixAddress(path)
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise InvalidArgument(f"address {text!r} is neither host:port nor unix:/path")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidArgument(f"address {text!r}: write an IPv6 host in brackets")
    return TcpAddress(host, int(port))
