"""What a reader does with packets once it has to stop, and when it waits for more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pymysql.err
import pytest
from pymysql.protocol import MysqlPacket

from tao.observability.logs import logger
from tao.storage.session import ServerAccount
from tao.tailer.binlog import BinlogTransaction
from tao.tailer.reader import BinlogReader, ReadAhead
from tao.tailer.settings import ReaderSettings


class Connection:
    """A connection on which packets of another schema's rows arrive for ever."""

    def __init__(self, on_read: Callable[[int], None]) -> None:
        """``on_read`` gets the number of packets that have been read."""
        self.read = 0
        self._on_read: Final = on_read

    def _read_packet(self) -> Any:
        self.read += 1
        self._on_read(self.read)
        return MysqlPacket(bytes([0, *(0,) * 4, 23, *(0,) * 30]), "utf8")


def test_a_reader_that_has_to_stop_does_so_among_rows_of_other_schemas() -> None:
    account = ServerAccount("127.0.0.1", 1, "replicator", "", socket="", tls=None)
    reader = BinlogReader(account, 4_000_000_001, ReaderSettings(), logger("test"))
    stopped = threading.Event()
    connection = Connection(lambda read: stopped.set() if read == 5 else None)
    stream = SimpleNamespace(
        _stream_connection=connection,
        _ctl_connection=None,
        mysql_version="",
        _BinLogStreamReader__use_checksum=False,
        _BinLogStreamReader__post_header_lengths=None,
        table_map={},
    )
    reader._take_packets(stream, stopped)
    with pytest.raises(pymysql.err.InterfaceError):
        connection._read_packet()
    assert connection.read == 5


class Pieces:
    """A connection and its socket, on which these pieces arrive."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces: Final = list(pieces)
        self._sock: Final = self
        self._read_timeout: Final = 1.0

    def settimeout(self, seconds: float) -> None:
        pass

    def recv(self, most: int) -> bytes:
        return self._pieces.pop(0)


def test_the_reader_is_asked_to_wait_only_when_all_that_had_arrived_is_read() -> None:
    full = 128 << 10
    waits: list[None] = []
    ahead = ReadAhead(Pieces(b"abc", bytes(full), b"de"), lambda: waits.append(None))
    assert (ahead.read(3), len(waits)) == (b"abc", 0)
    assert (len(ahead.read(full)), len(waits)) == (full, 1)
    assert (ahead.read(2), len(waits)) == (b"de", 1), "more may have arrived with a full piece"


def test_the_reader_waits_once_behind_a_transaction_that_is_left_undecoded() -> None:
    account = ServerAccount("127.0.0.1", 1, "replicator", "", socket="", tls=None)
    reader = BinlogReader(account, 4_000_000_001, ReaderSettings(gather_seconds=7.0), logger("test"))
    queue: Any = SimpleNamespace(put=lambda _: True)
    waits: list[float] = []
    stopped: Any = SimpleNamespace(wait=waits.append)
    reached: Any = None
    undecoded: Any = (object(),)
    reader._gather(stopped)
    for transaction in (BinlogTransaction(gtid="", undecoded=undecoded), BinlogTransaction(gtid="")):
        reader._pass_on(transaction, reached, queue)
        for _ in range(2):
            reader._gather(stopped)
    assert waits == [7.0], "decoded transactions hold nobody up"
