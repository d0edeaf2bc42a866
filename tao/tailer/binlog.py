"""The port to a binlog: committed transactions in their order, from a position on (DESIGN.md §7).

The tailer above it knows nothing of threads, connections and event formats, so its tests feed it from a list.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from tao.model.errors import OperatorError, Unavailable
from tao.planning.row_events import RowEvent


class BinlogLost(Unavailable):
    """The server cannot continue from the position asked for: what came after it is purged, or it never had it."""

    reason = "BINLOG_LOST"


class BinlogMoved(Unavailable):
    """Another server's binlog is to be read from now on, from the same position."""

    reason = "BINLOG_MOVED"


class BinlogUnusable(OperatorError):
    """The server's binlog is off or lacks what a tailer needs, or the account may not read it."""

    reason = "BINLOG_UNUSABLE"


class ServerIdTaken(OperatorError):
    """Another reader has connected under this one's ``server_id``; the server keeps only one of them."""

    reason = "SERVER_ID_TAKEN"


class BinlogTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """One committed transaction, as far as it concerns shards.

    ``gtid`` is empty for a part that no position counts. ``void_shards`` were changed in ways that rows do not tell
    (a statement, an event that cannot be decoded, more rows than are kept); with ``void_all`` any may have been.
    ``committed_unix_ms`` is the server's, in whole seconds. ``size_bytes``: in memory, estimated."""

    gtid: str
    events: Sequence[RowEvent] = ()
    void_shards: frozenset[int] = frozenset()
    void_all: bool = False
    committed_unix_ms: int = 0
    size_bytes: int = 0


class Position(Protocol):
    """A place in a binlog that moves on by transactions; ``str()`` is its stored form."""

    def advance(self, gtid: str) -> None:
        """The transaction is behind us."""

    def includes(self, gtid: str) -> bool:
        """Whether the transaction was behind us already."""

    def is_beyond(self, server_is_at: str) -> bool:
        """Whether a server that has come so far (its stored form) cannot be read from here yet."""


class BinlogSource(Protocol):
    """A database server's binlog."""

    async def current_position(self) -> str:
        """Where the binlog ends now. Raises `Unavailable` or `OperatorError`."""

    def position(self, stored: str) -> Position:
        """From the stored form. Raises `OperatorError` for what is none of this server's."""

    def batches(self, position: str) -> AsyncGenerator[Sequence[BinlogTransaction], None]:
        """All transactions after ``position``, for ever, each batch being what is there. Connections that break are
        made again. Raises `BinlogLost`, `BinlogMoved`, or `OperatorError` for what only a person can mend. One
        iteration at a time."""
