"""What a reader does with packets once it has to stop."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pymysql.err
import pytest
from pymysql.protocol import MysqlPacket

from tao.observability.logs import logger
from tao.storage.session import ServerAccount
from tao.tailer.reader import BinlogReader
from tao.tailer.settings import ReaderSettings


class Connection:
    """A connection on which packets of another schema's rows arrive for ever."""

    def __init__(self) -> None:
        self.read = 0

    def _read_packet(self) -> Any:
        self.read += 1
        return MysqlPacket(bytes([0, *(0,) * 4, 23, *(0,) * 30]), "utf8")


def test_a_reader_that_has_to_stop_does_so_among_events_that_the_library_passes_over() -> None:
    account = ServerAccount("127.0.0.1", 1, "replicator", "", socket="", tls=None)
    reader = BinlogReader(account, 4_000_000_001, ReaderSettings(), logger("test"))
    connection, stopped = Connection(), threading.Event()
    stream = SimpleNamespace(
        _stream_connection=connection,
        _ctl_connection=None,
        mysql_version="",
        _BinLogStreamReader__use_checksum=False,
        _BinLogStreamReader__post_header_lengths=None,
        table_map={},
    )
    reader._take_packets(stream, stopped)
    assert connection._read_packet().get_all_data()[5] == 23
    stopped.set()
    with pytest.raises(pymysql.err.InterfaceError):
        connection._read_packet()
    assert connection.read == 2
