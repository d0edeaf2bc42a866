"""Sessions that a promotion uses again, and those that it must not."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import cast

import pytest

from tao.model.errors import Unavailable
from tao.replication import kept_sessions, replication_set
from tao.replication.kept_sessions import KeptSessions
from tao.replication.locks import SESSION_IDLE_SECONDS
from tao.replication.replication_set import ReplicationSet
from tao.replication.server_statements import MemberState
from tao.storage.failures import ConnectionLost
from tao.storage.session import DatabaseSession
from tests.unit.replication.members import gtids
from tests.unit.replication.test_replication_set import replication_set_of


class Session:
    """A session without a server."""

    def __init__(self) -> None:
        self.is_open = True
        self.is_broken = False
        self.idle_since = 0.0

    def quit(self) -> None:
        self.is_open = False


def kept(session: Session) -> DatabaseSession:
    return cast("DatabaseSession", session)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Return the sessions that are opened in the test."""
    sessions = list[Session]()

    async def open_session(*_: object, **__: object) -> DatabaseSession:
        sessions.append(Session())
        return kept(sessions[-1])

    async def member_state(session: Session, *, deadline: float) -> MemberState:
        if session.is_broken:
            raise ConnectionLost("the server has restarted")
        return MemberState(True, None, gtids("1-1-1"), gtids("1-1-1"))

    monkeypatch.setattr(replication_set, "open_session", open_session)
    monkeypatch.setattr(replication_set, "member_state", member_state)
    return sessions


def set_with(sessions: KeptSessions | None) -> ReplicationSet:
    database = replication_set_of("east", "west").database
    accounts = replication_set_of("east", "west")._accounts
    return ReplicationSet(database, accounts, seen_from="", statement_seconds=1.0, sessions=sessions)


async def test_a_session_is_used_again_and_two_at_a_time_are_two(opened: list[Session]) -> None:
    replicas = set_with(KeptSessions())
    for _ in range(3):
        async with replicas.session("west"):
            pass
    assert len(opened) == 1
    async with replicas.session("west"), replicas.session("west"), replicas.session("east"):
        assert len(opened) == 3


async def test_without_a_promotion_each_use_opens_a_session_and_closes_it(opened: list[Session]) -> None:
    replicas = set_with(None)
    for _ in range(2):
        async with replicas.session("west"):
            pass
    assert [each.is_open for each in opened] == [False, False]


async def test_a_session_in_which_something_failed_is_not_used_again(opened: list[Session]) -> None:
    """It may have a transaction, or write beside the binlog."""
    replicas = set_with(KeptSessions())
    with suppress(Unavailable):
        async with replicas.session("west"):
            raise Unavailable("in the middle")
    assert not opened[0].is_open
    async with replicas.session("west"):
        assert len(opened) == 2


async def test_a_session_that_its_server_is_about_to_end_is_not_used_again(opened: list[Session]) -> None:
    replicas = set_with(KeptSessions())
    async with replicas.session("west"):
        pass
    opened[0].idle_since -= SESSION_IDLE_SECONDS
    async with replicas.session("west"):
        assert len(opened) == 2
    assert not opened[0].is_open


async def test_a_server_that_has_restarted_answers_although_a_session_to_it_was_kept(opened: list[Session]) -> None:
    replicas = set_with(KeptSessions())
    assert (await replicas.member("west")).state is not None
    opened[0].is_broken = True
    assert (await replicas.member("west")).state is not None
    assert len(opened) == 2


async def test_sessions_are_used_while_a_promotion_waits_and_broken_ones_dropped(
    opened: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[Session]()

    async def roll_back(session: Session, *, deadline: float) -> None:
        used.append(session)
        if session.is_broken:
            raise ConnectionLost("it has ended")

    monkeypatch.setattr(kept_sessions, "roll_back", roll_back)
    sessions = KeptSessions()
    replicas = set_with(sessions)
    async with replicas.session("west"), replicas.session("east"):
        opened[1].is_broken = True
    await sessions.keep_alive(deadline=asyncio.get_running_loop().time() + 1)
    assert sorted(map(id, used)) == sorted(map(id, opened))
    assert sessions.has("west-db")
    assert not sessions.has("east-db")
    sessions.close()
    assert not opened[0].is_open


async def test_a_session_that_is_given_back_after_the_promotion_is_closed(opened: list[Session]) -> None:
    sessions = KeptSessions()
    async with set_with(sessions).session("west"):
        sessions.close()
    assert not opened[0].is_open
