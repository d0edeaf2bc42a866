"""A driver that fails in its own ways: whatever it raises, the session says that the connection is lost, and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pymysql.err
import pytest

from tao.model.errors import DatabaseFull, OperatorError
from tao.storage.failures import ConnectionLost, translate
from tao.storage.result_packets import Columns, Row
from tao.storage.server_connection import ServerConnection
from tao.storage.session import DatabaseSession


class FailingConnection(ServerConnection):
    """Fails with ``failure`` if there is one, else returns 513 rows."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.is_open = True
        self.left = 513

    @property
    def server_version(self) -> str:
        return "10.11.6-MariaDB"

    def send(self, sql: str, arguments: Sequence[object], expected: Columns | None = None) -> None:
        if self.failure is not None:
            raise self.failure

    async def head(self, deadline: float) -> bool:
        return True

    async def rows(self, rows: list[Row], limit: int, deadline: float) -> bool:
        rows.extend([(1,)] * min(limit, self.left))
        self.left -= len(rows)
        return not self.left

    def close(self) -> None:
        self.is_open = False

    def quit(self) -> None:
        self.is_open = False


def soon() -> float:
    return asyncio.get_running_loop().time() + 10


@pytest.mark.parametrize(
    "failure",
    [
        AttributeError("'NoneType' object has no attribute 'readexactly'"),
        RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"),
        KeyError(1205),
        IndexError("list index out of range"),
        OSError(32, "Broken pipe"),
    ],
)
async def test_what_the_driver_fails_with_by_accident_is_a_lost_connection(failure: Exception) -> None:
    connection = FailingConnection(failure)
    session = DatabaseSession(connection, "db-1", locking=True)
    with pytest.raises(ConnectionLost, match="db-1"):
        await session.run("SELECT 1", deadline=soon())
    assert not connection.is_open
    with pytest.raises(ConnectionLost):
        await session.run("SELECT 1", deadline=soon())


async def test_what_the_server_refuses_leaves_the_connection_open() -> None:
    connection = FailingConnection(pymysql.err.ProgrammingError(1146, "no such table"))
    with pytest.raises(OperatorError):
        await DatabaseSession(connection, "db-1", locking=False).run("SELECT 1", deadline=soon())
    assert connection.is_open


async def test_rows_come_in_chunks_until_there_are_no_more() -> None:
    seen: list[int] = []
    connection = FailingConnection()
    await DatabaseSession(connection, "db-1", locking=False).stream(
        "SELECT 1", (), lambda rows: seen.append(len(rows)), deadline=soon()
    )
    assert (seen, connection.is_open) == ([256, 256, 1], True)


async def test_an_exception_of_the_row_consumer_is_raised_unchanged_and_closes_the_connection() -> None:
    def take(rows: list[Row]) -> None:
        raise LookupError("a bug above the driver")

    connection = FailingConnection()
    with pytest.raises(LookupError, match="above the driver"):
        await DatabaseSession(connection, "db-1", locking=False).stream("SELECT 1", (), take, deadline=soon())
    assert not connection.is_open


@pytest.mark.parametrize("number", [1021, 1026, 1114])
def test_a_full_disk_is_a_server_to_ask_again_later_and_says_what_to_do(number: int) -> None:
    found = translate(pymysql.err.OperationalError(number, "full"), "db-1", locking=True)
    assert type(found) is DatabaseFull
    assert "disk of database server db-1 is full" in found.message
    assert "make room" in found.message


@pytest.mark.parametrize("refuses", [True, False])
def test_a_server_that_refuses_an_account_or_certificate_is_there_and_another_failure_may_be_silence(
    refuses: bool,
) -> None:
    for number in (1045, 1130, 1227, 1698, 2026, 4151) if refuses else (1040, 1053, 1129, 1146, 2003, 2013):
        error = translate(pymysql.err.OperationalError(number, "as the server says"), "east-db", locking=False)
        assert error.is_refusal is refuses, number


def test_a_refused_login_leads_to_the_password_and_a_refused_statement_to_migrations_and_rights() -> None:
    login = translate(pymysql.err.OperationalError(1045, "Access denied for user 'tao_admin'"), "db-1", locking=False)
    assert (type(login), "password" in login.message, "migrations" in login.message) == (OperatorError, True, False)
    statement = translate(pymysql.err.OperationalError(1142, "SELECT command denied"), "db-1", locking=False)
    assert (type(statement), "password" in statement.message, "migrations" in statement.message) == (
        OperatorError,
        False,
        True,
    )
