"""One connection of the driver, with its commands and the reading of its answers replaced.

aiomysql connects and authenticates. Then its transport gets another protocol: received bytes go to a `ResultReader`,
and a waiting task is woken once an answer can be read further, which for a read of few rows is once. aiomysql's own
reader, an `asyncio.StreamReader`, wakes the task for every packet. The rows of a cache fill are passed to a callback in
the turn of the loop in which they arrive, without a task.

One of aiomysql's private parts is used, the writer for its transport; the tests of sessions fail without it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import pymysql.err
from pymysql.constants import COMMAND, CR

from tao.storage.result_packets import Columns, ResultReader, Row, command_packets

_MAX_UNREAD_BYTES: Final = 256 * 1024
"""Bytes that may lie here before the transport stops reading while no task waits for them: one to four chunks of the
loop."""


class ServerConnection(asyncio.Protocol):
    """A connection that one task at a time uses; at most one command is under way."""

    def __init__(self, driver: Any) -> None:
        """``driver``: an aiomysql connection that has just been made. `Any`, because aiomysql has no types."""
        self._driver: Final = driver
        self._encoding: Final[str] = driver.encoding
        self._escape: Final[Callable[[object], str]] = driver.escape
        self._transport: Final[asyncio.Transport] = driver._writer.transport
        self._reader: Final = ResultReader(self._encoding, driver.decoders)
        self._loop: Final = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        # the results that take the rows, while a task waits for all of them
        self._results: list[list[Row]] | None = None
        self._rows: list[Row] = []  # the rows of the result after those
        # the callbacks that take the rows of the answer, while no task waits for it
        self._on_rows: Callable[[list[Row]], None] | None = None
        self._on_end: Callable[[Exception | None], None] = _ignore
        self._most_rows = 0
        self._is_resting = False  # until the next turn of the loop, after so many rows
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._lost = ""
        self.is_open = True
        """False once the connection is closed, from either side."""
        self._transport.set_protocol(self)

    @property
    def server_version(self) -> str:
        """Return the version text of the server's greeting."""
        return str(self._driver.get_server_info())

    @property
    def thread_id(self) -> int:
        """Return the server's number for the connection."""
        return int(self._driver.thread_id())

    @property
    def column_names(self) -> tuple[str, ...]:
        """Return the column names of the result that is being read; empty once it is at its end."""
        columns = self._reader.columns
        return columns.names if columns is not None else ()

    @property
    def has_next(self) -> bool:
        """Return whether another result follows the one that has been read to its end."""
        return self._reader.has_next

    @property
    def committed_gtid(self) -> str:
        """Return `ResultReader.committed_gtid`."""
        return self._reader.committed_gtid

    def send(self, sql: str, arguments: Sequence[object], expected: Columns | None = None) -> None:
        """Send statements, with the arguments in place of each ``%s``. ``expected``: as in `ResultReader.begin`. Raises
        what the driver does."""
        self._reader.begin(expected)
        escape = self._escape
        # Percent signs are interpreted without arguments, too: one rule for all statements.
        text = sql % tuple([each if type(each) is int else _literal(each, escape) for each in arguments])
        content = text.encode(self._encoding, "surrogateescape")
        self._transport.write(command_packets(COMMAND.COM_QUERY, content))

    async def prepare(self, sql: str, deadline: float) -> int:
        """Prepare a statement that returns no rows, with a ``?`` for each value. Returns the server's number for it.
        Raises as `head` does."""
        self._reader.begin()
        self._transport.write(command_packets(COMMAND.COM_STMT_PREPARE, sql.encode(self._encoding)))
        while (statement := self._reader.read_prepared()) is None:
            await self._more(deadline)
        return statement

    async def execute(self, content: bytes, deadline: float) -> None:
        """Execute a prepared statement with what follows the command in its packet. Raises as `head` does."""
        self._reader.begin()
        self._transport.write(command_packets(COMMAND.COM_STMT_EXECUTE, content))
        await self.head(deadline)

    async def results(self, results: list[list[Row]], deadline: float) -> None:
        """Append the rows of each result of the answer, to its end; the waiting task is woken once. Raises as `head`
        does, with the results that were complete before in ``results``."""
        if not (self._reader.unread and self._take(results)):
            self._results = results
            try:
                await self._more(deadline)
            finally:
                self._results = None

    def _take(self, results: list[list[Row]]) -> bool:
        """Read what has arrived. Returns whether the answer is at its end."""
        reader = self._reader
        while True:
            if reader.columns is None:
                if reader.read_results(results):
                    return True
                if not reader.unread:  # as when the server sends the answer to each statement by itself
                    return False
                has_rows = reader.read_head()
                if has_rows is None:
                    return False
                self._rows = []
            else:
                has_rows = True
            if has_rows and reader.read_rows(self._rows, sys.maxsize) is None:
                return False
            results.append(self._rows)
            if not reader.has_next:
                return True

    async def head(self, deadline: float) -> bool:
        """Begin with the next result. Returns whether it has rows. Raises `TimeoutError` at ``deadline`` (in the loop's
        time), and `pymysql.err.MySQLError` when the statement was rejected or the connection breaks."""
        while True:
            has_rows = self._reader.read_head()
            if has_rows is not None:
                return has_rows
            await self._more(deadline)

    async def rows(self, rows: list[Row], limit: int, deadline: float) -> bool:
        """Append rows until there are ``limit`` of them, or the result is at its end. Returns whether it is. Raises as
        `head` does."""
        while True:
            is_at_end = self._reader.read_rows(rows, limit)
            if is_at_end is not None:
                return is_at_end
            await self._more(deadline)

    async def packed_rows(self, rows: list[bytes], limit: int, deadline: float) -> bool:
        """Do as `rows`, and leave the rows as the server has packed them."""
        while True:
            is_at_end = self._reader.read_packed(rows, limit)
            if is_at_end is not None:
                return is_at_end
            await self._more(deadline)

    def pass_rows(
        self,
        on_rows: Callable[[list[Row]], None],
        on_end: Callable[[Exception | None], None],
        limit: int,
        deadline: float,
    ) -> None:
        """Pass the rows of the next result to ``on_rows`` as they arrive, at most ``limit`` in one turn of the loop.

        ``on_end`` is called once, with None at the result's end, or with what `head` would raise or ``on_rows`` has
        raised. It must not raise."""
        self._on_rows, self._on_end, self._most_rows = on_rows, on_end, limit
        self._rows = []
        if self._lost:
            self._end_rows(pymysql.err.OperationalError(CR.CR_SERVER_LOST, self._lost))
            return
        self._wait_until(deadline)

    def _go_on(self) -> None:
        self._is_resting = False
        if self._on_rows is not None:
            if self._is_paused:
                self._is_paused = False
                self._transport.resume_reading()
            self._take_rows(self._on_rows)

    def _take_rows(self, on_rows: Callable[[list[Row]], None]) -> None:
        reader = self._reader
        try:
            is_at_end: bool | None = reader.read_whole(self._rows, self._most_rows)
            if not is_at_end:
                if reader.columns is None:
                    has_rows = reader.read_head()
                    if not has_rows:
                        if has_rows is not None:
                            self._end_rows(None)
                        return
                is_at_end = reader.read_rows(self._rows, self._most_rows)
                if is_at_end is None:
                    return
            rows, self._rows = self._rows, []
            on_rows(rows)
        except Exception as error:  # noqa: BLE001 - passed on to `on_end`
            self._end_rows(error)
            return
        if is_at_end:
            self._end_rows(None)
        else:
            self._is_resting = True
            self._loop.call_soon(self._go_on)

    def _end_rows(self, error: Exception | None) -> None:
        on_end = self._on_end
        self._on_rows, self._on_end = None, _ignore  # an idle connection keeps no answer
        on_end(error)

    def close(self) -> None:
        """Close at once."""
        self.is_open = False
        self._driver.close()

    def quit(self) -> None:
        """Send the quit command and close. No command may be under way. Waits for nothing: the transport sends what it
        has before it closes."""
        self._transport.write(command_packets(COMMAND.COM_QUIT, b""))
        self.close()

    async def _more(self, deadline: float) -> None:
        if self._lost:
            raise pymysql.err.OperationalError(CR.CR_SERVER_LOST, self._lost)
        self._wait_until(deadline)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wait_until(self, deadline: float) -> None:
        self._deadline = deadline
        if self._alarm is None or self._alarm.when() > deadline:
            self._set_alarm(deadline)
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _set_alarm(self, at: float) -> None:
        """Start the timer of the deadline. One timer serves many answers: usually each has come long before, and the
        next deadline is later."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._alarm = None
        is_waiting = self._waiter is not None and not self._waiter.done()
        if not is_waiting and self._on_rows is None:
            return
        if self._loop.time() < self._deadline:
            self._set_alarm(self._deadline)
        elif self._waiter is not None:
            self._waiter.set_exception(TimeoutError())
        else:
            self._end_rows(TimeoutError())

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        reader = self._reader
        reader.feed(data)
        if self._on_rows is not None and not self._is_resting:
            if reader.unread >= reader.wanted:
                self._take_rows(self._on_rows)
        elif self._waiter is None:
            if reader.unread > _MAX_UNREAD_BYTES and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
        elif reader.unread >= reader.wanted and not self._waiter.done():
            try:
                if self._results is None or self._take(self._results):
                    self._waiter.set_result(None)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the answer is waited for
                self._waiter.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lost = "Lost connection to MySQL server during query" + (f" ({error})" if error else "")
        self.close()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        lost = pymysql.err.OperationalError(CR.CR_SERVER_LOST, self._lost)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(lost)
        elif self._on_rows is not None:
            self._end_rows(lost)


def _ignore(_: Exception | None) -> None:
    pass


def _literal(value: object, escape: Callable[[object], str]) -> str:
    """Return a value as text of a statement. ``escape`` is the driver's way, which takes ten times as long for what
    most values of a write are."""
    if value == b"" and type(value) is bytes:
        return "_binary''"
    if type(value) is list and set(map(type, value)) <= {int}:
        return f"({','.join(map(str, value))})"
    return escape(value)
