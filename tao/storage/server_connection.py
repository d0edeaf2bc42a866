"""One connection of the driver's, with commands and the reading of answers taken over.

aiomysql connects and proves who it is. Once it has, its transport gets another protocol: what arrives goes to a
`ResultReader`, and whoever waits is woken once an answer can be read any further, which for a read of few rows is once.
Its own reader, an `asyncio.StreamReader`, wakes him for every packet.

Of aiomysql's private parts one is used, the writer for its transport; the tests of sessions fail without it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, Final

import pymysql.err
from pymysql.constants import COMMAND, CR

from tao.storage.result_packets import Columns, ResultReader, Row, command_packets

_MAX_UNREAD_BYTES: Final = 256 * 1024
"""What may lie here before the transport stops reading, while nobody waits for it: a chunk or four of the loop's."""


class ServerConnection(asyncio.Protocol):
    """Used by one task at a time; one command is under way at most."""

    def __init__(self, driver: Any) -> None:
        """``driver``: an aiomysql connection that has just been made. `Any`: aiomysql has no types."""
        self._driver: Final = driver
        self._transport: Final[asyncio.Transport] = driver._writer.transport
        self._reader: Final = ResultReader(driver.encoding, driver.decoders)
        self._loop: Final = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._results: list[list[Row]] | None = None  # that takes what arrives, while somebody waits for all of it
        self._rows: list[Row] = []  # of the result after those
        self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._lost = ""
        self._transport.set_protocol(self)

    @property
    def is_open(self) -> bool:
        """False once the connection is closed, from either side."""
        return not self._driver.closed

    @property
    def server_version(self) -> str:
        """As in the server's greeting."""
        return str(self._driver.get_server_info())

    @property
    def thread_id(self) -> int:
        """The server's number for the connection."""
        return int(self._driver.thread_id())

    @property
    def column_names(self) -> tuple[str, ...]:
        """Of the result that is being read; empty once it is at its end."""
        columns = self._reader.columns
        return columns.names if columns is not None else ()

    def send(self, sql: str, arguments: Sequence[object], expected: Columns | None = None) -> None:
        """Send statements, with the arguments in place of each ``%s``. ``expected``: as `ResultReader.begin`. Raises
        what the driver does."""
        self._reader.begin(expected)
        escape = self._driver.escape
        # Without arguments, too, percent signs are looked for: one rule for all.
        text = sql % tuple([each if type(each) is int else escape(each) for each in arguments])
        content = text.encode(self._driver.encoding, "surrogateescape")
        self._transport.write(command_packets(COMMAND.COM_QUERY, content))

    async def results(self, results: list[list[Row]], deadline: float) -> None:
        """Append the rows of each result of the answer, to its end; who waits for them is woken once. Raises as `head`,
        with those in ``results`` that were complete before."""
        if not self._take(results):
            self._results = results
            try:
                await self._more(deadline)
            finally:
                self._results = None

    def _take(self, results: list[list[Row]]) -> bool:
        """Read what has arrived. Whether the answer is at its end."""
        reader = self._reader
        while True:
            if reader.columns is None:
                has_rows = reader.read_head()
                if has_rows is None:
                    return False
                self._rows = []
            if reader.columns is not None and reader.read_rows(self._rows, sys.maxsize) is None:
                return False
            results.append(self._rows)
            if not reader.has_next:
                return True

    async def head(self, deadline: float) -> bool:
        """Begin with the next result: whether it has rows. Raises `TimeoutError` at ``deadline`` (in the loop's time),
        `pymysql.err.MySQLError` for what was refused or when the connection breaks."""
        while True:
            has_rows = self._reader.read_head()
            if has_rows is not None:
                return has_rows
            await self._more(deadline)

    async def rows(self, rows: list[Row], limit: int, deadline: float) -> bool:
        """Append rows until there are ``limit`` of them, or the result is at its end, which is returned. Raises as
        `head`."""
        while True:
            is_at_end = self._reader.read_rows(rows, limit)
            if is_at_end is not None:
                return is_at_end
            await self._more(deadline)

    def close(self) -> None:
        """Close at once."""
        self._driver.close()

    async def quit(self) -> None:
        """Say good-bye and close. Raises `OSError` when the peer is gone."""
        await self._driver.ensure_closed()

    async def _more(self, deadline: float) -> None:
        if self._lost:
            raise pymysql.err.OperationalError(CR.CR_SERVER_LOST, self._lost)
        self._deadline = deadline
        if self._alarm is None or self._alarm.when() > deadline:
            self._set_alarm(deadline)
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _set_alarm(self, at: float) -> None:
        """One for many answers: commonly each has come long before, and the next deadline is later."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._alarm = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() >= self._deadline:
            self._waiter.set_exception(TimeoutError())
        else:
            self._set_alarm(self._deadline)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        reader = self._reader
        reader.feed(data)
        if self._waiter is None:
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
        self._driver.close()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(pymysql.err.OperationalError(CR.CR_SERVER_LOST, self._lost))
