"""gRPC connections with a cluster: the channel trusts the certificate that was looked at, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tao.model.errors import Unavailable
from tao.model.topology import CacheServer
from tao.wire import links
from tao.wire.identity import Credentials, ExpectedServer
from tao.wire.links import Links, LinkSettings
from tao.wire.settings import SessionSettings
from tao.wire.tls import ClientTls
from tests.rigs.certificates import TestAuthority

NAMED = CacheServer(name="leader-1", grpc="127.0.0.1:1")
BY_ADDRESS = CacheServer(name="127.0.0.1:1", grpc="127.0.0.1:1")


class Connections:
    """Shows these certificates one after the other, and refuses all connections."""

    def __init__(self, *shown: bytes) -> None:
        self._shown: Iterator[bytes] = iter(shown)
        self.trusted: list[object] = []

    async def look(self, _address: str, _expected: ExpectedServer) -> bytes:
        return next(self._shown)

    async def connect(self, *arguments: Any) -> None:
        self.trusted.append(arguments[-1])
        raise Unavailable("the handshake failed")


@pytest.mark.parametrize(
    ("server", "shown", "trusted"),
    [
        (NAMED, (b"one", b"one"), [b"one"]),
        (NAMED, (b"one", b"two"), [b"one", b"two"]),
        (BY_ADDRESS, (b"one", b"one"), [b"one", b"one"]),
        (BY_ADDRESS, (b"one", b"two"), [b"one", b"two"]),
        (BY_ADDRESS, (b"",), [b""]),
    ],
)
async def test_the_channel_trusts_what_was_shown_and_a_mismatch_is_looked_at_once_more(
    server: CacheServer, shown: tuple[bytes, ...], trusted: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = Connections(*shown)
    monkeypatch.setattr(ClientTls, "look", connections.look)
    monkeypatch.setattr(ClientTls, "channel_credentials", lambda _tls, shown: shown)
    monkeypatch.setattr(links, "connect_grpc", connections.connect)
    files = TestAuthority(tmp_path).issue("client", cluster="spiffe://example.org/tao/main")
    opened = Links(LinkSettings(), Credentials("test", "client"), files)
    with pytest.raises(Unavailable):
        await opened._connector.connect(server)
    assert connections.trusted == trusted
    await opened.close()


async def test_a_port_that_is_silent_for_the_whole_time_to_connect_is_asked_no_more(tmp_path: Path) -> None:
    accepted = list[asyncio.StreamWriter]()
    silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    address = "127.0.0.1:{1}".format(*silent.sockets[0].getsockname())
    files = TestAuthority(tmp_path).issue("client", cluster="spiffe://example.org/tao/main")
    settings = LinkSettings(session=SessionSettings(connect_timeout_seconds=0.2))
    opened = Links(settings, Credentials("test", "client"), files)
    with pytest.raises(Unavailable, match="cannot be looked at: TimeoutError"):
        await opened._connector.connect(CacheServer(name="leader-1", grpc=address))
    assert len(accepted) == 1
    await opened.close()
    silent.close()
    for writer in accepted:
        writer.transport.abort()
