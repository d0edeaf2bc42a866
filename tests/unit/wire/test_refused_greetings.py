"""Which ends of a connection before its greeting are refusals: what one shows the other, and not how busy that is."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import pytest

from tao.model.errors import Overloaded, TaoError, TooManyConnections, Unauthorized, Unavailable
from tao.wire import framing
from tao.wire.convert import error_to_pb
from tao.wire.frames_client import FrameSession
from tao.wire.grpc_client import _refusal
from tao.wire.identity import Credentials
from tao.wire.settings import SessionSettings
from tao.wire.status import REASON_KEY
from tao.wire.tls import ServerCheck
from tests.rigs.certificates import TestAuthority

REFUSALS = [(Unauthorized, True), (Overloaded, False), (TooManyConnections, False), (Unavailable, True)]
"""`Unavailable`: the topology does not list it."""


def session_of(tls: ServerCheck | None = None) -> FrameSession:
    return FrameSession(asyncio.get_running_loop(), "there", SessionSettings(), Credentials("w", "watcher"), tls)


async def failure_of(session: FrameSession) -> TaoError:
    with pytest.raises(TaoError) as raised:
        await session.greeted()
    return raised.value


@pytest.mark.parametrize(("kind", "is_refusal"), REFUSALS)
async def test_a_server_without_room_refuses_nobody_for_what_it_shows(kind: type[TaoError], is_refusal: bool) -> None:
    session = session_of()
    said = error_to_pb(kind("as the server says"))
    session.data_received(framing.frame(framing.ERROR, said.SerializeToString()))
    session.connection_lost(None)
    assert (await failure_of(session)).is_refusal is is_refusal
    trailers = ((REASON_KEY, kind.reason),)
    assert _refusal(grpc.StatusCode.UNAVAILABLE, "as the server says", trailers).is_refusal is is_refusal


@pytest.mark.parametrize(
    ("lost", "is_refusal"),
    [(None, True), (ssl.SSLError(1, "tlsv13 alert certificate required"), True), (ConnectionResetError(), False)],
)
async def test_a_connection_with_tls_that_is_reset_before_the_greeting_was_not_refused(
    tmp_path: Path, lost: Exception | None, is_refusal: bool
) -> None:
    """A server that does not believe a certificate ends the connection; one that dies resets it."""
    session = session_of(ServerCheck(TestAuthority(tmp_path).issue("srv").client_context()))
    session.connection_lost(lost)
    assert (await failure_of(session)).is_refusal is is_refusal
