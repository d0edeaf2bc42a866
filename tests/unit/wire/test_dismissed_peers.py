"""A peer whose credential is refused is sent away, and what it was promised is kept."""

from __future__ import annotations

import asyncio
from hashlib import sha256

import pytest

from tao.model.errors import Unauthorized
from tao.wire import frames_server
from tao.wire.frames_client import connect_frames
from tao.wire.frames_server import FrameServer
from tao.wire.identity import (
    CLIENT,
    AcceptedCredentials,
    AcceptedToken,
    Credentials,
    PeerAuthenticator,
    PeerIdentity,
)
from tao.wire.server_session import ServedConnection
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import PATIENT_SECONDS, until

REFUSAL = Unauthorized("its token was revoked")
SETTINGS = ServingSettings(leaving_seconds=1.0, unary_deadline_seconds=10.0)


class Connection(ServedConnection):
    """A connection whose requests are answered by the test."""

    def __init__(self) -> None:
        super().__init__(self, SETTINGS, PeerIdentity("web-1", "client"))
        self.held: list[Reply] = []
        self.answers: list[str] = []
        self.times_sent_away = 0

    def handle(self, _: pb.Request, reply: Reply) -> None:
        self.held.append(reply)

    def transmit(self, answer: pb.Answer) -> None:
        self.answers.append(answer.error.reason)

    def go_away(self) -> None:
        self.times_sent_away += 1

    def ask(self) -> None:
        self.receive(pb.Request(number=1, deadline_ms=1_000, read=pb.ReadBatch(obj_ids=[1])))


@pytest.fixture
def connection() -> Connection:
    return Connection()


def test_it_is_served_until_its_time_to_leave_is_over(connection: Connection) -> None:
    assert not connection.dismiss(REFUSAL, 0.0)
    assert connection.is_leaving(0.9)
    connection.ask()
    assert (len(connection.held), connection.answers, connection.times_sent_away) == (1, [], 1)


def test_it_has_to_end_when_nothing_is_under_way(connection: Connection) -> None:
    connection.dismiss(REFUSAL, 0.0)
    assert not connection.is_leaving(1.0)
    assert connection.dismiss(REFUSAL, 1.0)


def test_what_is_under_way_is_answered_first_and_further_requests_are_refused(connection: Connection) -> None:
    connection.dismiss(REFUSAL, 0.0)
    connection.ask()
    assert not connection.dismiss(REFUSAL, 1.0)
    connection.ask()
    assert connection.answers == [Unauthorized.reason]
    assert connection.is_leaving(2.0)
    connection.held[0].send(pb.Answer())
    assert not connection.is_leaving(2.0)
    assert connection.dismiss(REFUSAL, 2.0)


def test_it_does_not_stay_for_an_answer_that_does_not_come(connection: Connection) -> None:
    connection.ask()
    connection.dismiss(REFUSAL, 0.0)
    connection.dismiss(REFUSAL, 1.0)
    assert connection.is_leaving(10.9)
    assert not connection.is_leaving(11.0)
    assert connection.dismiss(REFUSAL, 11.0)


@pytest.mark.parametrize("after", [0.5, 1.5])
def test_a_peer_that_is_accepted_again_is_served_and_may_be_sent_away_once_more(
    connection: Connection, after: float
) -> None:
    connection.ask()
    connection.dismiss(REFUSAL, 0.0)
    if after > 1.0:
        connection.dismiss(REFUSAL, 1.0)
    assert not connection.dismiss(None, after)
    assert not connection.is_leaving(after)
    connection.ask()
    assert (len(connection.held), connection.answers) == (2, [])
    connection.dismiss(REFUSAL, 20.0)
    assert connection.times_sent_away == 2


class OneATurn:
    """Answers each write at once, and says by its clock that a turn of the loop is over."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.asked = 0

    def monotonic(self) -> float:
        return self.seconds

    def handle(self, _: pb.Request, reply: Reply) -> None:
        self.seconds += frames_server.TURN_SECONDS
        self.asked += 1
        reply.send(pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult()])))


async def test_writes_that_have_arrived_when_the_time_to_leave_is_over_are_refused_and_not_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = OneATurn()
    monkeypatch.setattr(frames_server, "monotonic", handler.monotonic)
    accepted = AcceptedCredentials((AcceptedToken("web", CLIENT, sha256(b"secret").digest(), "web"),))
    settings = ServingSettings(authenticator=PeerAuthenticator(accepted))
    server = FrameServer(handler, settings, name="srv", topology_version=lambda: 1)
    patient = SessionSettings(connect_timeout_seconds=PATIENT_SECONDS)
    address = await server.start("127.0.0.1:0")
    session = await connect_frames(address, patient, Credentials("web-1", "client", "secret"))
    write = pb.Request(write=pb.WriteBatch(writes=[pb.Write()]))
    writes = [asyncio.ensure_future(session.ask(write, PATIENT_SECONDS)) for _ in range(50)]
    await until(lambda: handler.asked > 0)
    settings.authenticator.accepted = AcceptedCredentials(())
    (connection,) = server.connections
    connection.check_admission()  # asks it to leave
    connection.check_admission()  # refuses what comes later
    await asyncio.wait(writes, timeout=PATIENT_SECONDS)
    refused = [write for write in writes if isinstance(write.exception(), Unauthorized)]
    assert 0 < len(refused) == 50 - handler.asked
    assert all(write.exception() is None for write in writes if write not in refused)
    await until(lambda: not server.connections)
    await session.close()
    await server.close()
