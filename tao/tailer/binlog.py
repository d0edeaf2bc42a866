"""The port to a binlog: committed transactions in order, starting after a position.

The tailer above this port does not depend on threads, connections or event formats, so its tests feed it from a list.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, Protocol

import msgspec

from tao.model.errors import OperatorError, Unavailable
from tao.planning.row_events import RowEvent
from tao.replication.gtid import GtidPosition


class BinlogLost(Unavailable):
    """The server cannot continue from the requested position: the binlog after it is purged, or the server never had
    that position."""

    reason = "BINLOG_LOST"


class BinlogMoved(Unavailable):
    """The binlog of another server has to be read from now on, from the same position."""

    reason = "BINLOG_MOVED"


class BinlogUnusable(OperatorError):
    """The server's binlog is off or has the wrong settings for a tailer, or the account may not read it."""

    reason = "BINLOG_UNUSABLE"


class ServerIdTaken(OperatorError):
    """Another reader has connected with this reader's ``server_id``, and the server keeps only one of them."""

    reason = "SERVER_ID_TAKEN"


class UndecodedRows:
    """The row events of one transaction in the tables of one shard's graph, as the server sent them."""

    __slots__ = ("_decoded", "_lock", "_read", "messages", "shard", "size_bytes")

    def __init__(
        self, shard: int, size_bytes: int, read: Callable[[], BinlogTransaction], *, messages: int = 1
    ) -> None:
        """``size_bytes``: estimated size in memory. ``read`` returns what the rows say; it is called once.
        ``messages``: estimated number of messages."""
        self.shard: Final = shard
        self.size_bytes: Final = size_bytes
        self.messages: Final = messages
        self._read: Callable[[], BinlogTransaction] | None = read
        self._decoded: BinlogTransaction | None = None
        self._lock: Final = threading.Lock()

    def decode(self) -> BinlogTransaction:
        """Return what the rows say, as the transaction of this shard alone. If they cannot be read, the shard is
        invalid. Any thread may call it, and each call returns the same: what reads rows keeps a state."""
        with self._lock:
            if self._read is not None:
                try:
                    self._decoded = self._read()
                except Exception:  # noqa: BLE001 - decoding foreign bytes may raise anything
                    self._decoded = BinlogTransaction(gtid="", invalid_shards=frozenset({self.shard}))
                self._read = None
        assert self._decoded is not None
        return self._decoded


class BinlogTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one committed transaction that concerns shards.

    ``gtid`` is empty for changes that no position counts. ``undecoded``: the rows by shard, where leaders may have
    their messages; then there are no ``events``. ``invalid_shards`` have changes that row events do not describe (a
    statement, an event that cannot be decoded, more rows than are kept); with ``all_invalid`` any shard may have.
    ``committed_unix_ms`` is the server's commit time, in whole seconds. ``size_bytes`` is the estimated size in
    memory."""

    gtid: str
    events: Sequence[RowEvent] = ()
    undecoded: Sequence[UndecodedRows] = ()
    invalid_shards: frozenset[int] = frozenset()
    all_invalid: bool = False
    committed_unix_ms: int = 0
    size_bytes: int = 0


class BinlogSource(Protocol):
    """A database server's binlog."""

    async def current_position(self) -> str:
        """Return the present end of the binlog. Raises `Unavailable` or `OperatorError`."""

    def position(self, stored: str) -> GtidPosition:
        """Parse a stored position. Raises `OperatorError` when it has another notation than this server's."""

    def batches(self, position: str) -> AsyncGenerator[Sequence[BinlogTransaction], None]:
        """Yield all transactions after ``position``, without end, in batches of those that are available.

        Broken connections are reopened. Raises `BinlogLost`, `BinlogMoved`, or `OperatorError` for faults that only a
        person can mend. Only one iteration may be under way."""
