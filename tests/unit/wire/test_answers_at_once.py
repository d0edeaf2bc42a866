"""What a handler answers at once is sent first, and the rest is a request like any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.model.errors import InvalidArgument
from tao.wire.frames_client import connect_frames
from tao.wire.frames_server import FrameServer
from tao.wire.identity import Credentials, PeerIdentity
from tao.wire.session import AnswerAtOnce, Reply, Session
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import until

SECONDS = 20.0


class Halves:
    """Answers slot 0 at once, and keeps the replies that answer slot 1."""

    def __init__(self) -> None:
        self.rest: list[Reply] = []
        self.has_part = True
        self.fault: Exception | None = None

    def handle(self, request: pb.Request, reply: Reply) -> None:
        raise AssertionError("every request is answered at once")

    def answer_at_once(self, request: bytes, peer: PeerIdentity) -> AnswerAtOnce | None:
        number = pb.Request.FromString(request).number
        part = pb.Answer(number=number, more=True, read=pb.ReadAnswer(slots=[0], values=[b"hit"]))
        return AnswerAtOnce(part.SerializeToString() if self.has_part else b"", self._answer_rest)

    def _answer_rest(self, request: pb.Request, reply: Reply) -> None:
        assert list(request.read.obj_ids) == [5, 6]
        if self.fault is not None:
            raise self.fault
        self.rest.append(reply)


@pytest.fixture
def handler() -> Halves:
    return Halves()


@pytest.fixture
async def server(handler: Halves, tmp_path: Path) -> AsyncIterator[FrameServer]:
    server = FrameServer(handler, ServingSettings(), name="srv", topology_version=lambda: 1)
    await server.start(f"unix:{tmp_path}/s")
    yield server
    await server.close()


@pytest.fixture
async def session(server: FrameServer, tmp_path: Path) -> AsyncIterator[Session]:
    settings = SessionSettings(connect_timeout_seconds=SECONDS)
    session = await connect_frames(f"unix:{tmp_path}/s", settings, Credentials("test", "client"))
    yield session
    await session.close()


def request() -> pb.Request:
    return pb.Request(read=pb.ReadBatch(obj_ids=[5, 6]))


async def test_a_part_is_sent_before_the_rest_is_known(handler: Halves, session: Session) -> None:
    answers: list[pb.Answer] = []
    session.send(request(), SECONDS, answers.append)
    await until(lambda: answers and handler.rest)
    assert list(answers[0].read.values) == [b"hit"]
    handler.rest[0].send(pb.Answer(read=pb.ReadAnswer(slots=[1], values=[b"miss"])))
    await until(lambda: len(answers) == 2)
    assert list(answers[1].read.values) == [b"miss"]
    assert not answers[1].more


@pytest.mark.parametrize("has_part", [True, False])
async def test_an_error_of_the_rest_is_the_answer(handler: Halves, session: Session, has_part: bool) -> None:
    handler.has_part, handler.fault = has_part, InvalidArgument("no such thing")
    with pytest.raises(InvalidArgument):
        await session.ask(request(), SECONDS)


async def test_a_server_that_drains_waits_for_the_rest(handler: Halves, server: FrameServer, session: Session) -> None:
    asking = asyncio.create_task(session.ask(request(), SECONDS))
    await until(lambda: handler.rest)
    draining = asyncio.create_task(server.drain(SECONDS))
    await until(lambda: not session.is_open)  # the server has said that it goes, and waits for what is unanswered
    assert not draining.done()
    handler.rest[0].send(pb.Answer(read=pb.ReadAnswer(slots=[1], values=[b"miss"])))
    assert len((await asking).read.values) == 2
    await draining
