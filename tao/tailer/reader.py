"""The binlog of a MySQL or MariaDB server, read in a thread of its own (DESIGN.md §7).

The library underneath is blocking, which is why there is a thread, the only one of the system that holds state.
What it does by itself is taken out of its hands where it would go wrong: it reconnects from the position where it once
began, and keeps table definitions whose numbers a restarted server gives to other tables. So a connection here is never
mended; it is made anew from the position reached, and transactions at or before that position are dropped.

The server sends a word twice a second even when nothing happens; when it does not for `silence_seconds`, the connection
counts as dead and is made anew, and the silence is counted and logged.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

import pymysql
import pymysql.err
from pymysql.constants import CR
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.event import FormatDescriptionEvent, QueryEvent

from tao.model.errors import InternalError, OperatorError, TaoError
from tao.observability.logs import Logger
from tao.storage.dialect import Dialect, dialect_of
from tao.storage.gtid import GtidPosition, parse_position
from tao.storage.session import ServerAccount
from tao.tailer.binlog import BinlogLost, BinlogMoved, BinlogTransaction, Position
from tao.tailer.hand_off import HandOff
from tao.tailer.server_state import connect, connection_settings, current_gtids, reading_error
from tao.tailer.settings import ReaderSettings
from tao.tailer.statements import boundary_of
from tao.tailer.transactions import EVENTS, ShardSchemas, Transactions

_NOTHING_YET: Final = "00000000-0000-0000-0000-000000000000:1"
"""A transaction that no server has: an empty set would make the library begin by file name instead."""

_MAX_TABLES: Final = 100_000
"""Table definitions kept before they are learned anew: each is a few KB, and a server's 10,000 shards have six each."""


class BinlogReader:
    """The `BinlogSource` of one database server. Counters may be read from the loop at any time."""

    def __init__(self, account: ServerAccount, server_id: int, settings: ReaderSettings, log: Logger) -> None:
        self._account = account
        self._server_id: Final = server_id
        self._settings: Final = settings
        self._log: Final = log
        self._dialect: Dialect | None = None
        self._transactions: Final = Transactions(settings.max_transaction_bytes)
        self._hand_off: HandOff | None = None
        self._moved = BinlogMoved("another server's binlog is to be read")
        self.connected = False
        """The stream is open, as far as is known."""
        self.connections = 0
        """Streams opened: the first, and one more for each that broke."""
        self.silences = 0
        """Streams given up because the server said nothing."""
        self.duplicates = 0
        """Transactions that came again, and were dropped."""

    @property
    def unknown_events(self) -> int:
        """Events of unknown kind or content; each made at least a shard void."""
        return self._transactions.unknown_events

    @property
    def oversized(self) -> int:
        """Transactions with more than is kept."""
        return self._transactions.oversized

    @property
    def waiting_bytes(self) -> int:
        """Read and not yet taken, estimated."""
        return 0 if self._hand_off is None else self._hand_off.waiting_bytes

    def read_from(self, account: ServerAccount) -> None:
        """Another server's binlog from now on; `batches` under way end with `BinlogMoved`. Positions are as good there:
        both are of one replication set."""
        if account != self._account:
            self._account = account
            if self._hand_off is not None:
                self._hand_off.stop()
                self._hand_off.fail(self._moved)

    async def current_position(self) -> str:
        """See `BinlogSource`. Checks, too, that the binlog has what a tailer needs."""
        return await asyncio.to_thread(self._current_position, self._account)

    def position(self, stored: str) -> Position:
        """See `BinlogSource`; `current_position` must have been asked before: it tells which notation is spoken."""
        return self._parse(stored)

    async def batches(self, position: str) -> AsyncGenerator[Sequence[BinlogTransaction], None]:
        """See `BinlogSource`."""
        hand_off = self._hand_off = HandOff(self._settings.hand_off_bytes)
        thread = threading.Thread(
            target=self._run, args=(self._account, self._parse(position), hand_off), name="binlog reader", daemon=True
        )
        thread.start()
        try:
            while True:
                yield await hand_off.take()
        finally:
            hand_off.stop()
            await asyncio.to_thread(thread.join, self._settings.silence_seconds)

    def _parse(self, stored: str) -> GtidPosition:
        if self._dialect is None:
            raise InternalError("the server's kind is not known before current_position was asked")
        return parse_position(self._dialect, stored)

    def _current_position(self, account: ServerAccount) -> str:
        try:
            connection = connect(account, self._settings)
            try:
                self._dialect = dialect_of(connection.get_server_info())
                return str(parse_position(self._dialect, current_gtids(connection, self._dialect)))
            finally:
                connection.close()
        except (pymysql.err.MySQLError, OSError) as error:
            raise reading_error(error, account.address, self._server_id) from error

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _run(self, account: ServerAccount, reached: GtidPosition, hand_off: HandOff) -> None:
        failures = 0
        while not hand_off.stopped.is_set():
            before = str(reached)
            try:
                self._read(account, reached, hand_off)
            except (pymysql.err.MySQLError, OSError) as error:
                found = reading_error(error, account.address, self._server_id)
                if hand_off.stopped.is_set():
                    return
                if isinstance(found, BinlogLost | OperatorError):
                    hand_off.fail(found)
                    return
                failures = 0 if str(reached) != before else failures + 1
                self._log.warning("binlog_connection_lost", reason=found.message, position=str(reached))
            except TaoError as error:
                hand_off.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - the end of the thread; the loop hears of it
                self._log.exception("binlog_reader_failed")
                hand_off.fail(InternalError(f"the binlog reader failed: {error!r}"))
                return
            finally:
                self.connected = False
            pause = min(
                self._settings.backoff_max_seconds, self._settings.backoff_first_seconds * 2 ** min(failures, 16)
            )
            hand_off.stopped.wait(pause)

    def _read(self, account: ServerAccount, reached: GtidPosition, hand_off: HandOff) -> None:
        """One stream, until it breaks or the thread has to end."""
        opened: list[Any] = []

        def open_once(**settings: Any) -> Any:
            if (
                len(opened) == 2
            ):  # the stream and the one for questions: a third would be the library's own reconnection
                raise pymysql.err.OperationalError(CR.CR_SERVER_LOST, "the connection broke while reading the binlog")
            opened.append(pymysql.connect(**settings))
            return opened[-1]

        mariadb = self._dialect is Dialect.MARIADB
        stream = BinLogStreamReader(
            connection_settings=connection_settings(account, self._settings),
            server_id=self._server_id,
            blocking=True,
            only_events=EVENTS,
            only_schemas=ShardSchemas(),
            filter_non_implemented_events=False,
            auto_position=str(reached) or ("" if mariadb else _NOTHING_YET),
            freeze_schema=True,
            is_mariadb=mariadb,
            slave_heartbeat=self._settings.heartbeat_seconds,
            pymysql_wrapper=open_once,
            enable_logging=False,
        )
        self._transactions.restart()
        self.connections += 1
        heard_at = time.monotonic()
        try:
            while not hand_off.stopped.is_set():
                try:
                    event = stream.fetchone()
                except (pymysql.err.MySQLError, OSError):
                    if time.monotonic() - heard_at >= self._settings.silence_seconds:
                        self.silences += 1
                        self._log.error("binlog_silent", seconds=self._settings.silence_seconds)
                    raise
                except Exception as error:
                    if len(opened) < 2:
                        raise  # it is the connection that could not be made
                    # One event that the library stumbles over; the stream stands at the next.
                    self._log.error("binlog_event_undecodable", error=repr(error), position=str(reached))
                    self._transactions.undecodable()
                    continue
                heard_at = time.monotonic()
                self.connected = True
                if event is None:
                    raise pymysql.err.OperationalError(CR.CR_SERVER_LOST, "the server ended the binlog stream")
                self._forget_tables(stream, event)
                transaction = self._transactions.take(event)
                if transaction is not None and not self._pass_on(transaction, reached, hand_off):
                    return
        finally:
            for connection in opened:
                connection._force_close()  # no goodbye: the server is in the middle of a packet stream

    def _pass_on(self, transaction: BinlogTransaction, reached: GtidPosition, hand_off: HandOff) -> bool:
        """False when the thread has to end."""
        if transaction.gtid and reached.includes(transaction.gtid):
            self.duplicates += 1
            return True
        if not hand_off.put(transaction):
            return False
        if transaction.gtid:
            reached.advance(transaction.gtid)
        return True

    def _forget_tables(self, stream: Any, event: Any) -> None:
        """Definitions are read once and kept, which triples the rate; whatever may change one, or the meaning of a
        table's number, makes the stream learn them anew."""
        if (
            isinstance(event, FormatDescriptionEvent)
            or (isinstance(event, QueryEvent) and boundary_of(event.query) == "statement")
            or len(stream.table_map) > _MAX_TABLES
        ):
            stream.table_map = {}
