"""Binlog events into transactions: where they begin and end, which rows they hold, what is unreadable (DESIGN.md §7).

No connection and no thread in here: events go in, transactions come out. The rule for everything strange is the same:
say which shards it may have changed, all of them if need be, and go on.
"""

from __future__ import annotations

from typing import Any, Final

from pymysqlreplication.event import (
    ExecuteLoadQueryEvent,
    FormatDescriptionEvent,
    GtidEvent,
    HeartbeatLogEvent,
    MariadbGtidEvent,
    NotImplementedEvent,
    QueryEvent,
    XAPrepareEvent,
    XidEvent,
)
from pymysqlreplication.row_event import DeleteRowsEvent, PartialUpdateRowsEvent, UpdateRowsEvent, WriteRowsEvent

from tao.planning.row_events import RowEvent
from tao.storage.names import shard_of_schema
from tao.tailer.binlog import BinlogTransaction
from tao.tailer.statements import boundary_of, shards_voided_by

Event = Any
"""An event of mysql-replication, which has no types."""

EVENTS: Final = (
    DeleteRowsEvent, ExecuteLoadQueryEvent, FormatDescriptionEvent, GtidEvent, HeartbeatLogEvent, MariadbGtidEvent,
    NotImplementedEvent, PartialUpdateRowsEvent, QueryEvent, UpdateRowsEvent, WriteRowsEvent, XAPrepareEvent, XidEvent,
)  # fmt: skip
"""What has to be asked for; all else passes unseen."""

_ROW_BYTES: Final = 700
"""What a row takes in memory beside its data: two dictionaries and their integers."""
_TRANSACTION_BYTES: Final = 400
_STANDALONE: Final = 1
"""Flag of a MariaDB GTID event: the group is one statement, without a commit of its own."""
_IGNORABLE: Final = 0x80
"""Header flag: whoever does not know the event may skip it."""
_HARMLESS_TYPES: Final = frozenset({28, 36, 37})
"""Ignorable events and the bookkeeping of MySQL's group replication."""


class ShardSchemas:
    """The schemas that hold shards, for a reader's ``in``: all else is skipped before it is decoded."""

    def __contains__(self, schema: str) -> bool:
        return shard_of_schema(schema) is not None


class Transactions:
    """The transaction being put together. Used by the reader's thread alone."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: kept of one transaction, estimated; a larger one is told by its shards only."""
        self._max_bytes: Final = max_bytes
        self._shards: Final[dict[str, int | None]] = {}
        self._begin("", 0, explicit=False)
        self.unknown_events = 0
        """Events of a kind unknown here, or that could not be decoded."""
        self.oversized = 0
        """Transactions with more than is kept."""

    def take(self, event: Event) -> BinlogTransaction | None:
        """Add the next event; the transaction that ends with it, if one does."""
        match event:
            case WriteRowsEvent() | DeleteRowsEvent() | UpdateRowsEvent():
                self._rows(event)
            case MariadbGtidEvent():
                return self._begin_after_last(event, explicit=not event.flags & _STANDALONE)
            case GtidEvent():
                return self._begin_after_last(event, explicit=False)
            case XidEvent():
                return self._end()
            case QueryEvent():
                return self._statement(event)
            case XAPrepareEvent():
                # Its rows take effect with XA COMMIT, if ever; that one then voids what they may have changed.
                if not event.one_phase:
                    self._events.clear()
                return self._end()
            case ExecuteLoadQueryEvent():
                self._void_all = True
            case NotImplementedEvent():
                if event.event_type not in _HARMLESS_TYPES and not event.packet.flags & _IGNORABLE:
                    self.undecodable()
            case _:
                pass  # a heartbeat or the head of a file: that it came is all it says
        return None

    def undecodable(self) -> None:
        """An event could not be read, and nobody knows which shard it was about."""
        self.unknown_events += 1
        self._void_all = True

    def restart(self) -> None:
        """The stream begins anew: what is unfinished comes again."""
        self._begin("", 0, explicit=False)

    def _begin_after_last(self, event: Event, *, explicit: bool) -> BinlogTransaction | None:
        """A transaction whose end was never seen was not committed when the server crashed, and is dropped, unless its
        end lay in an event that could not be read (a compressed transaction is a single such event)."""
        last = self._end() if self._void_all else None
        self._begin(event.gtid, event.timestamp, explicit=explicit)
        return last

    def _begin(self, gtid: str, timestamp: int, *, explicit: bool) -> None:
        self._gtid = gtid
        self._timestamp = timestamp
        self._explicit = explicit
        self._events: list[RowEvent] = []
        self._void: set[int] = set()
        self._void_all = False
        self._overflowed = False
        self._bytes = 0

    def _end(self) -> BinlogTransaction | None:
        transaction = BinlogTransaction(
            gtid=self._gtid,
            events=self._events,
            void_shards=frozenset(self._void),
            void_all=self._void_all,
            committed_unix_ms=self._timestamp * 1000,
            size_bytes=_TRANSACTION_BYTES + self._bytes,
        )
        self._begin("", 0, explicit=False)
        if not (transaction.gtid or transaction.events or transaction.void_shards or transaction.void_all):
            return None
        return transaction

    def _statement(self, event: Event) -> BinlogTransaction | None:
        text: str = event.query
        schema = event.schema.decode(errors="replace")
        match boundary_of(text):
            case "begin":
                self._explicit = True
                return None
            case "commit":
                return self._end()
            case "rollback":
                # In the binlog only when something could not be rolled back: trust no row of it.
                self._void.update(each.shard for each in self._events)
                self._events.clear()
                return self._end()
            case "savepoint":
                self._void.update(each.shard for each in self._events)
                return None
            case "foreign commit":
                self._void_all = True
                return self._end()
            case "statement":
                self._void |= shards_voided_by(text, schema)
                return None if self._explicit else self._end()

    def _rows(self, event: Event) -> None:
        schema: str = event.schema
        shard = self._shards.get(schema)
        if shard is None:
            shard = self._shards[schema] = shard_of_schema(schema)
            if shard is None:
                return
        if self._overflowed:
            self._void.add(shard)
            return
        try:
            rows = event.rows
        except Exception:  # noqa: BLE001 - whatever a decoder of foreign bytes stumbles over; the shard pays for it
            self.unknown_events += 1
            self._void.add(shard)
            return
        table: str = event.table
        add = self._events.append
        match event:
            case PartialUpdateRowsEvent():
                self._void.add(shard)
            case UpdateRowsEvent():
                for row in rows:
                    add(RowEvent(shard, table, row["before_values"], row["after_values"]))
            case WriteRowsEvent():
                for row in rows:
                    add(RowEvent(shard, table, None, row["values"]))
            case _:
                for row in rows:
                    add(RowEvent(shard, table, row["values"], None))
        self._bytes += event.event_size + _ROW_BYTES * len(rows)
        if self._bytes > self._max_bytes:
            self.oversized += 1
            self._overflowed = True
            self._bytes = 0
            self._void.update(each.shard for each in self._events)
            self._events.clear()
