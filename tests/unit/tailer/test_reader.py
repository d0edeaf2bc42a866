"""What a reader does with packets once it has to stop, and when it waits for more of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from tests.rigs.certificates import TestAuthority


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


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_reader_knows_whether_more_has_arrived(with_tls: bool, tmp_path: Path) -> None:
    """Over TLS a socket hands out one record at a time, so a short piece does not say that it was the last one."""
    near, far = socket.socketpair()
    if with_tls:
        files = TestAuthority(tmp_path).issue("database")
        with ThreadPoolExecutor(1) as thread:
            accepted = thread.submit(files.server_context().wrap_socket, far, server_side=True)
            near = files.client_context().wrap_socket(near, server_hostname="localhost")
            far = accepted.result()
    arrived: list[bool] = []

    def before_receiving(ahead: ReadAhead) -> None:
        arrived.append(ahead.has_arrived())
        if not arrived[-1]:
            far.sendall(b"y")

    far.sendall(bytes(40_000))
    ahead = ReadAhead(SimpleNamespace(_sock=near, _read_timeout=60.0), before_receiving)
    for _ in range(10):
        assert ahead.read(4_000) == bytes(4_000)
    assert all(arrived)
    assert ahead.read(1) == b"y"
    assert not arrived[-1]
    near.close()
    far.close()


def test_the_reader_waits_once_behind_a_transaction_that_is_left_undecoded() -> None:
    account = ServerAccount("127.0.0.1", 1, "replicator", "", socket="", tls=None)
    reader = BinlogReader(account, 4_000_000_001, ReaderSettings(gather_seconds=7.0), logger("test"))
    queue: Any = SimpleNamespace(put=lambda _: True)
    waits: list[float] = []
    stopped: Any = SimpleNamespace(wait=waits.append)
    reached: Any = None
    undecoded: Any = (object(),)
    drained: Any = SimpleNamespace(has_arrived=lambda: False)
    reader._gather(stopped, drained)
    for transaction in (BinlogTransaction(gtid="", undecoded=undecoded), BinlogTransaction(gtid="")):
        reader._pass_on(transaction, reached, queue)
        for _ in range(2):
            reader._gather(stopped, drained)
    assert waits == [7.0], "decoded transactions hold nobody up"
    reader._pass_on(BinlogTransaction(gtid="", undecoded=undecoded), reached, queue)
    drained.has_arrived = lambda: True
    reader._gather(stopped, drained)
    assert waits == [7.0], "what has arrived is read first"
