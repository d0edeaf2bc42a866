"""What a reader does with packets once it has to stop."""

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
from tao.tailer.reader import BinlogReader
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
