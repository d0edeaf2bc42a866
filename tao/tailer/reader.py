"""Read the binlog of a MySQL or MariaDB server in a thread of its own.

The library underneath blocks, hence the thread. Two things that the library does by itself are prevented, because they
go wrong: it reconnects from the position where it once began, and it keeps table definitions under numbers that a
restarted server gives to other tables. So a broken connection is never repaired. A new one is opened from the position
reached, and transactions at or before that position are dropped.

The server sends a heartbeat twice a second when nothing happens. After `silence_seconds` without any event the
connection counts as dead and is replaced, and the silence is counted and logged.
"""

from __future__ import annotations

import asyncio
import select
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pymysql.err
from pymysql.constants import CR
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.event import FormatDescriptionEvent, QueryEvent

from tao.model.errors import InternalError, OperatorError, TaoError, Unavailable
from tao.observability.logs import Logger
from tao.replication.gtid import GtidPosition, parse_position
from tao.storage.dialect import Dialect, dialect_of
from tao.storage.failures import number_of, translate
from tao.storage.session import ServerAccount
from tao.storage.tls import BinlogConnection
from tao.tailer.binlog import BinlogLost, BinlogMoved, BinlogTransaction, BinlogUnusable, ServerIdTaken
from tao.tailer.settings import ReaderSettings
from tao.tailer.transactions import EVENTS, RowDecoder, ShardSchemas, Transactions, boundary_of

_CANNOT_READ: Final = 1236
"""ER_MASTER_FATAL_ERROR_READING_BINLOG: has many causes, which only the text distinguishes."""
_DUPLICATE_SERVER_ID: Final = 4052
"""MariaDB's error for the older of two readers with one server_id. (MySQL uses 1236.)"""
_NO_PRIVILEGE: Final = frozenset({1045, 1227})

_NEEDED: Final[Mapping[str, str]] = {
    "log_bin": "ON",
    "binlog_format": "ROW",
    "binlog_row_image": "FULL",
    "binlog_row_metadata": "FULL",
    # Not every server has these:
    "gtid_mode": "ON",
    "log_slave_updates": "ON",
    "log_replica_updates": "ON",
    "binlog_transaction_compression": "OFF",
    "log_bin_compress": "OFF",
}
"""The variables that the binlog needs: whole rows with their column names, and replicated transactions in it too."""


def connection_settings(account: ServerAccount, settings: ReaderSettings) -> dict[str, Any]:
    """Return pymysql's connection arguments. Reading blocks for `ReaderSettings.silence_seconds` at most."""
    return {
        "host": account.host,
        "port": account.port,
        "unix_socket": account.socket or None,
        "user": account.user,
        "password": account.password,
        "charset": "utf8mb4",
        "connect_timeout": settings.connect_seconds,
        "read_timeout": settings.silence_seconds,
        "write_timeout": settings.silence_seconds,
        "program_name": "tao tailer",
        "ssl": account.ssl_context(),
    }


def connect(account: ServerAccount, settings: ReaderSettings) -> Any:
    """Open a connection for queries. Raises `pymysql.err.MySQLError`."""
    return BinlogConnection(autocommit=True, **connection_settings(account, settings))


def current_gtids(connection: Any, dialect: Dialect) -> str:
    """Return the position at the end of the server's binlog, in the server's notation.

    Raises `BinlogUnusable` when the settings of the binlog do not allow a tailer to follow it."""
    with connection.cursor() as cursor:
        names = ", ".join(["%s"] * len(_NEEDED))
        cursor.execute(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})", tuple(_NEEDED))
        wrong = [
            f"{name} = {value} (needed: {_NEEDED[name.lower()]})"
            for name, value in cursor.fetchall()
            if value.upper() != _NEEDED[name.lower()]
        ]
        if wrong:
            raise BinlogUnusable(
                f"the binlog cannot be followed with {', '.join(sorted(wrong))}; change the server's options"
            )
        # MariaDB: the position in the server's own binlog. On a replica that is what it has applied, not received.
        cursor.execute(
            "SELECT @@global.gtid_binlog_pos" if dialect is Dialect.MARIADB else "SELECT @@global.gtid_executed"
        )
        return str(cursor.fetchone()[0])


def reading_error(error: Exception, server: str, server_id: int) -> TaoError:
    """Translate a driver's error into `BinlogLost`, an `OperatorError`, or an error after which a retry can help."""
    number = number_of(error)
    text = str(error.args[-1]) if error.args else repr(error)
    if number == _DUPLICATE_SERVER_ID or (number == _CANNOT_READ and _names_duplicate_server_id(text)):
        return ServerIdTaken(
            f"{server}: another replica or tailer has connected with server_id {server_id}, and the server keeps only "
            f"one; give each its own (server_id in the tailer's settings). The server says: {text}"
        )
    if number == _CANNOT_READ:
        return BinlogLost(f"{server}: the binlog cannot be continued from where this tailer is: {text}")
    if number in _NO_PRIVILEGE:
        return BinlogUnusable(
            f"{server}: the tailer's account needs REPLICATION SLAVE and REPLICATION CLIENT on *.*: {text}"
        )
    found = translate(error, server, locking=False)
    # The statements here are correct, so an unknown error counts as a server in trouble.
    return found if found.retryable or isinstance(found, OperatorError) else Unavailable(found.message)


def _names_duplicate_server_id(text: str) -> bool:
    lower = text.lower()
    return "same server_uuid/server_id" in lower or "same server_id" in lower or "same server-id" in lower


class TransactionQueue:
    """A queue from the reader's thread to the event loop, bounded by estimated memory.

    A full queue blocks the thread and thereby the binlog stream. A transaction larger than the bound passes alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._loop: Final = asyncio.get_running_loop()
        self._some: Final = asyncio.Event()
        self._room: Final = threading.Condition()
        self._waiting: list[BinlogTransaction] = []
        self._bytes = 0
        self._failure: TaoError | None = None
        self.stopped: Final = threading.Event()
        """Set by the loop when the thread has to end."""

    @property
    def waiting_bytes(self) -> int:
        """Estimated size of the transactions that wait for the loop."""
        return self._bytes

    def put(self, transaction: BinlogTransaction) -> bool:
        """Wait for room and append a transaction; called in the thread. Returns False when the thread has to end."""
        weight = transaction.size_bytes
        with self._room:
            while self._bytes and self._bytes + weight > self._max_bytes and not self.stopped.is_set():
                self._room.wait()
            if self.stopped.is_set():
                return False
            self._waiting.append(transaction)
            self._bytes += weight
            first = len(self._waiting) == 1
        if first:
            self._wake()
        return True

    def fail(self, error: TaoError) -> None:
        """Have `take` raise ``error`` after the queued transactions; called in the thread before it ends."""
        with self._room:
            self._failure = error
        self._wake()

    async def take(self) -> list[BinlogTransaction]:
        """Wait for transactions and remove them all; called in the loop. Raises the error passed to `fail`."""
        while True:
            with self._room:
                self._some.clear()
                if self._waiting:
                    taken, self._waiting, self._bytes = self._waiting, [], 0
                    self._room.notify()
                    return taken
                if self._failure is not None:
                    raise self._failure
            await self._some.wait()

    def stop(self) -> None:
        """Have the thread end even if it waits for room; called in the loop."""
        self.stopped.set()
        with self._room:
            self._room.notify()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._some.set)
        except RuntimeError:
            # The loop is closed, so nothing takes transactions any more.
            self.stopped.set()


_READ_BYTES: Final = 128 << 10
"""Bytes that are read at once: a dozen transactions of a leader's batches."""


class ReadAhead:
    """Reads an open connection of pymysql in large pieces.

    The driver sets a timeout twice for each packet, and reads 8 KB at a time. Each of these system calls also lets the
    event loop's thread have the interpreter, which may keep it for milliseconds."""

    def __init__(self, connection: Any, before_receiving: Callable[[ReadAhead], None]) -> None:
        """Three private parts of the connection are used; the tests of the reader fail without them. The driver may
        have nothing buffered. ``before_receiving`` is called with this object when more is needed than was read."""
        self._connection: Final = connection
        self._before_receiving: Final = before_receiving
        self._data = b""
        self._at = 0

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes, in place of the driver's ``_read_bytes``.

        Raises `pymysql.err.OperationalError` when the connection is lost, or sends nothing in its ``read_timeout``."""
        end = self._at + count
        if end > len(self._data):
            self._fill(count)
            end = count
        data = self._data[self._at : end]
        self._at = end
        return data

    def has_arrived(self) -> bool:
        """Return whether more can be received without waiting for it."""
        arrived = self._connection._sock
        if isinstance(arrived, ssl.SSLSocket) and arrived.pending():
            return True
        poll = select.poll()
        poll.register(arrived, select.POLLIN)
        return bool(poll.poll(0))

    def _fill(self, count: int) -> None:
        """Begin the data with the unread rest, and read until ``count`` bytes are there."""
        connection = self._connection
        self._before_receiving(self)
        pieces = [self._data[self._at :]]
        self._data, self._at = b"", 0
        missing = count - len(pieces[0])
        try:
            connection._sock.settimeout(connection._read_timeout)
            while missing > 0:
                piece = connection._sock.recv(_READ_BYTES)
                if not piece:
                    raise ConnectionResetError("the server closed it")
                pieces.append(piece)
                missing -= len(piece)
        except OSError as error:
            connection._force_close()
            raise pymysql.err.OperationalError(CR.CR_SERVER_LOST, f"the connection is lost: {error}") from error
        self._data = b"".join(pieces)


_NOTHING_YET: Final = "00000000-0000-0000-0000-000000000000:1"
"""A transaction that no server has: with an empty set the library would begin by file name instead."""

_MAX_TABLES: Final = 100_000
"""Table definitions that are kept before all are dropped and read again. Each takes a few KB, and 10,000 shards have
six tables each."""


class BinlogReader:
    """The `BinlogSource` of one database server. The event loop may read its counters at any time."""

    def __init__(
        self,
        account: ServerAccount,
        server_id: int,
        settings: ReaderSettings,
        log: Logger,
        *,
        schemas: Container[object] | None = None,
    ) -> None:
        """``schemas``: names of those whose rows are read; None for those of all shards."""
        self._account = account
        self._schemas: Final[Container[object]] = ShardSchemas() if schemas is None else schemas
        self._server_id: Final = server_id
        self._settings: Final = settings
        self._log: Final = log
        self._dialect: Dialect | None = None
        self._transactions: Final = Transactions(settings.max_transaction_bytes)
        self._queue: TransactionQueue | None = None
        self._moved = BinlogMoved("the binlog of another server must be read now")
        self._heard_at = 0.0  # monotonic time of the last event
        self._may_gather = False  # since a transaction that is left undecoded was queued
        self.connected = False
        """True while the stream is open, as far as is known."""
        self.connections = 0
        """Streams opened: the first, and one more for each that broke."""
        self.silences = 0
        """Streams closed because the server sent nothing for too long."""
        self.duplicates = 0
        """Transactions that arrived again and were dropped."""

    @property
    def unknown_events(self) -> int:
        """Events of unknown type or content; each of them invalidated at least one shard."""
        return self._transactions.unknown_events

    @property
    def oversized(self) -> int:
        """Transactions larger than `ReaderSettings.max_transaction_bytes`."""
        return self._transactions.oversized

    @property
    def waiting_bytes(self) -> int:
        """Estimated size of the transactions that were read and not taken yet."""
        return 0 if self._queue is None else self._queue.waiting_bytes

    def leave_undecoded(self, leave: bool) -> None:
        """Leave the rows of coming transactions undecoded where possible, or decode all of them."""
        self._transactions.leaves_undecoded = leave

    def read_from(self, account: ServerAccount) -> None:
        """Read another server's binlog from now on; `batches` that is under way raises `BinlogMoved`. Positions stay
        valid, since both servers belong to one replication set."""
        if account != self._account:
            self._account = account
            if self._queue is not None:
                self._queue.stop()
                self._queue.fail(self._moved)

    async def current_position(self) -> str:
        """See `BinlogSource`. Also checks that the settings of the binlog suit a tailer."""
        return await asyncio.to_thread(self._current_position, self._account)

    def position(self, stored: str) -> GtidPosition:
        """See `BinlogSource`. Call `current_position` first: it finds out which notation the server uses."""
        if self._dialect is None:
            raise InternalError("the server's notation of positions is unknown; call current_position first")
        return parse_position(self._dialect, stored)

    async def batches(self, position: str) -> AsyncGenerator[Sequence[BinlogTransaction], None]:
        """See `BinlogSource`."""
        queue = self._queue = TransactionQueue(self._settings.read_ahead_bytes)
        thread = threading.Thread(
            target=self._run, args=(self._account, self.position(position), queue), name="binlog reader", daemon=True
        )
        thread.start()
        try:
            while True:
                yield await queue.take()
        finally:
            queue.stop()
            await asyncio.to_thread(thread.join, self._settings.silence_seconds)

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

    def _run(self, account: ServerAccount, reached: GtidPosition, queue: TransactionQueue) -> None:
        failures = 0
        while not queue.stopped.is_set():
            before = str(reached)
            try:
                self._read(account, reached, queue)
            except (pymysql.err.MySQLError, OSError) as error:
                found = reading_error(error, account.address, self._server_id)
                if queue.stopped.is_set():
                    return
                if isinstance(found, BinlogLost | OperatorError):
                    queue.fail(found)
                    return
                failures = 0 if str(reached) != before else failures + 1
                self._log.warning("binlog_connection_lost", reason=found.message, position=str(reached))
            except TaoError as error:
                queue.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - the thread ends, and the loop raises the error
                self._log.exception("binlog_reader_failed")
                queue.fail(InternalError(f"the binlog reader failed: {error!r}"))
                return
            finally:
                self.connected = False
            pause = min(
                self._settings.backoff_max_seconds, self._settings.backoff_first_seconds * 2 ** min(failures, 16)
            )
            queue.stopped.wait(pause)

    def _open_stream(
        self, account: ServerAccount, reached: GtidPosition, opened: list[Any], stopped: threading.Event
    ) -> Any:
        """Return a stream that starts after ``reached``; its connections are appended to ``opened``."""

        def open_once(**settings: Any) -> Any:
            # The stream has one connection for events and one for queries: a third would be the library's reconnection.
            if len(opened) == 2:
                raise pymysql.err.OperationalError(CR.CR_SERVER_LOST, "the connection broke while reading the binlog")
            connection: Any = BinlogConnection(**settings)
            connection._read_bytes = ReadAhead(connection, partial(self._gather, stopped)).read
            opened.append(connection)
            return connection

        mariadb = self._dialect is Dialect.MARIADB
        return BinLogStreamReader(
            connection_settings=connection_settings(account, self._settings),
            server_id=self._server_id,
            blocking=True,
            only_events=EVENTS,
            only_schemas=self._schemas,
            filter_non_implemented_events=False,
            auto_position=str(reached) or ("" if mariadb else _NOTHING_YET),
            freeze_schema=True,
            is_mariadb=mariadb,
            slave_heartbeat=self._settings.heartbeat_seconds,
            pymysql_wrapper=open_once,
            enable_logging=False,
        )

    def _read(self, account: ServerAccount, reached: GtidPosition, queue: TransactionQueue) -> None:
        """Read one stream until it breaks or the thread has to end."""
        opened: list[Any] = []
        stream = self._open_stream(account, reached, opened, queue.stopped)
        self._transactions.restart()
        self.connections += 1
        self._heard_at = time.monotonic()
        try:
            while not queue.stopped.is_set():
                try:
                    event = stream.fetchone()
                except (pymysql.err.MySQLError, OSError):
                    if time.monotonic() - self._heard_at >= self._settings.silence_seconds:
                        self.silences += 1
                        self._log.error("binlog_silent", seconds=self._settings.silence_seconds)
                    raise
                except Exception as error:
                    if len(opened) < 2:
                        raise  # the connections could not be opened
                    # The library failed on one event; the stream is at the next one.
                    self._log.error("binlog_event_undecodable", error=repr(error), position=str(reached))
                    self._transactions.undecodable()
                    continue
                self._heard_at = time.monotonic()
                self.connected = True
                if event is None:
                    raise pymysql.err.OperationalError(CR.CR_SERVER_LOST, "the server ended the binlog stream")
                if isinstance(event, FormatDescriptionEvent):
                    self._take_packets(stream, queue.stopped)
                self._forget_tables(stream, event)
                transaction = self._transactions.take(event)
                if transaction is not None and not self._pass_on(transaction, reached, queue):
                    return
        finally:
            for connection in opened:
                connection._force_close()  # without COM_QUIT: the server is in the middle of a packet stream

    def _gather(self, stopped: threading.Event, ahead: ReadAhead) -> None:
        """Wait, behind a transaction that is left undecoded, for more to be read at once, unless more has arrived."""
        if self._may_gather:
            self._may_gather = False
            if not ahead.has_arrived():
                stopped.wait(self._settings.gather_seconds)

    def _take_packets(self, stream: Any, stopped: threading.Event) -> None:
        """Have packets of row events pass the library by, until ``stopped``."""
        connection, decoder, take = stream._stream_connection, RowDecoder(stream), self._transactions.take_packet
        read = partial(type(connection)._read_packet, connection)

        def read_packet() -> Any:
            while True:
                packet = read()
                self._heard_at = time.monotonic()
                # The library asks for the next one by itself after events of other schemas. And when the wait for this
                # thread was given up, another one assembles its transactions already.
                if stopped.is_set():
                    raise pymysql.err.InterfaceError("the reader has to stop")
                if not take(packet.get_all_data(), stream.table_map, decoder):
                    return packet

        connection._read_packet = read_packet

    def _pass_on(self, transaction: BinlogTransaction, reached: GtidPosition, queue: TransactionQueue) -> bool:
        """Queue a transaction that is not a duplicate. Returns False when the thread has to end."""
        if transaction.gtid and reached.includes(transaction.gtid):
            self.duplicates += 1
            return True
        if not queue.put(transaction):
            return False
        self._may_gather = bool(transaction.undecoded)
        if transaction.gtid:
            reached.advance(transaction.gtid)
        return True

    def _forget_tables(self, stream: Any, event: Any) -> None:
        """Drop the stream's table definitions after an event that may change one, or the numbers of tables.

        Keeping the definitions otherwise triples the rate."""
        if (
            isinstance(event, FormatDescriptionEvent)
            or (isinstance(event, QueryEvent) and boundary_of(event.query) == "statement")
            or len(stream.table_map) > _MAX_TABLES
        ):
            stream.table_map = {}
