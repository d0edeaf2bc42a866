"""Assemble binlog events into transactions: where a transaction begins and ends, its rows, and its unreadable changes.

Where leaders commit what is read, the rows of a transaction are left undecoded, because the leader of a shard mostly
has their messages. Everything else is decoded at once: heartbeats, unknown tables, and whatever comes with a statement.

There are no connections and threads here. Every change that row events do not describe is treated alike: mark the
shards that it may have changed as invalid, all of them if necessary, and continue. A TRUNCATE or DROP removes rows
without an event for each, and a session may log its UPDATE as text. Such statements name their tables, so a search for
the schemas' names finds the shards, and errs on the side of too many.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from pymysql.protocol import MysqlPacket
from pymysqlreplication.constants import BINLOG
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
from pymysqlreplication.packet import BinLogPacketWrapper
from pymysqlreplication.row_event import DeleteRowsEvent, PartialUpdateRowsEvent, UpdateRowsEvent, WriteRowsEvent

from tao.planning.row_events import (
    CUSTOM_EDGES_PREFIX,
    EDGES_TABLE,
    HOUSEKEEPING_TABLES,
    LISTS_TABLE,
    OBJECTS_TABLE,
    RowEvent,
)
from tao.storage.names import shard_of_schema
from tao.tailer.binlog import BinlogTransaction, UndecodedRows
from tao.tailer.row_images import ROW_EVENTS, PacketRows

_SHARD_NAME: Final = re.compile(r"\btao_[0-9]{5}\b")
_COMMENT: Final = re.compile(r"^(\s|/\*M?!\d*|/\*.*?\*/|--[^\n]*\n|#[^\n]*\n)+", re.DOTALL)
"""Leading comments. Of ``/*!40000 DROP …*/`` and ``/*M!… */`` only the head: servers execute the content of such
comments, and dumps are full of them."""
_HARMLESS: Final = frozenset(
    {"CREATE", "ALTER", "GRANT", "REVOKE", "FLUSH", "ANALYZE", "OPTIMIZE", "REPAIR", "SET", "COMMENT"}
)
"""First words of statements that leave the rows of a table as they are."""
_HARMFUL: Final = re.compile(r"\b(PARTITION|TABLESPACE|RENAME|OR\s+REPLACE|SET\s+STATEMENT)\b", re.IGNORECASE)
"""Words that make such a statement change rows after all: ALTER TABLE … TRUNCATE PARTITION, EXCHANGE PARTITION and
IMPORT TABLESPACE, renaming one table to another, CREATE OR REPLACE, and the statement after MariaDB's SET STATEMENT …
FOR."""

Boundary = Literal["begin", "commit", "rollback", "savepoint", "statement", "foreign commit"]


def boundary_of(text: str) -> Boundary:
    """Return how a statement affects the boundaries of its transaction.

    ``foreign commit``: rows that were prepared under XA take effect, long after their events."""
    words = _without_comment(text)[:64].upper().rstrip("; \n").split()
    match words:
        case ["BEGIN", *_] | ["START", "TRANSACTION", *_] | ["XA", "START" | "BEGIN" | "END", *_]:
            return "begin"
        case ["XA", "COMMIT", *_]:
            return "foreign commit"
        case ["COMMIT", *_]:
            return "commit"
        case ["ROLLBACK", "TO", *_] | ["SAVEPOINT" | "RELEASE", *_]:
            return "savepoint"
        case ["ROLLBACK", *_] | ["XA", "ROLLBACK", *_]:
            return "rollback"
        case _:
            return "statement"


def shards_invalidated_by(text: str, default_schema: str) -> frozenset[int]:
    """Return the shards whose rows a statement may have changed. ``default_schema`` is its session's."""
    words = _without_comment(text).split(maxsplit=1)
    if not words or (words[0].upper() in _HARMLESS and not _HARMFUL.search(text)):
        return frozenset()
    named = {shard_of_schema(name) for name in (default_schema, *_SHARD_NAME.findall(text))}
    return frozenset(shard for shard in named if shard is not None)


def _without_comment(text: str) -> str:
    return _COMMENT.sub("", text, count=1)


Event = Any
"""An event of mysql-replication, which has no types."""

EVENTS: Final = (
    DeleteRowsEvent, ExecuteLoadQueryEvent, FormatDescriptionEvent, GtidEvent, HeartbeatLogEvent, MariadbGtidEvent,
    NotImplementedEvent, PartialUpdateRowsEvent, QueryEvent, UpdateRowsEvent, WriteRowsEvent, XAPrepareEvent, XidEvent,
)  # fmt: skip
"""The event types to decode; the reader skips all others."""

_ROW_BYTES: Final = 700
"""Memory of a row beside its data: two dictionaries and their integers."""
_TRANSACTION_BYTES: Final = 400
_EVENT_BYTES: Final = 120
"""Memory of an undecoded event beside its data."""
_UNDECODED_BYTES: Final = 900
"""Memory of the undecoded events of a shard beside the events, until a leader has acknowledged them: their place in an
outbox, and a share of the transaction."""
_MESSAGE_BYTES: Final = 64
"""Size of a small row in the binlog, of which one message is made."""
_MAX_UNDECODED_BYTES: Final = 1 << 20
"""Estimated size of a transaction whose rows are left undecoded. A leader keeps no messages of larger ones either."""
_GRAPH_TABLES: Final = frozenset({OBJECTS_TABLE, LISTS_TABLE, EDGES_TABLE})
_TABLE_ID: Final = slice(20, 26)
"""Place of the number of a table in a packet: after the byte OK and the header of 19 bytes."""
_STANDALONE: Final = 1
"""Flag of a MariaDB GTID event: its group is one statement without a commit event."""
_IGNORABLE: Final = 0x80
"""Header flag: a reader that does not know the event may skip it."""
_HARMLESS_TYPES: Final = frozenset({28, 36, 37})
"""Numbers of ignorable event types, and of the bookkeeping events of MySQL's group replication."""


class ShardSchemas:
    """The set of schemas that hold shards. The reader skips events of other schemas before decoding them."""

    def __contains__(self, schema: object) -> bool:
        return shard_of_schema(str(schema)) is not None


class RowDecoder:
    """Decodes row events of one stream apart from it."""

    def __init__(self, stream: Any) -> None:
        """``stream``: a `BinLogStreamReader` that has read its format. Two of its private parts are used; the tests of
        the reader fail without them."""
        self._connection: Final = stream._ctl_connection
        self._version: Final = stream.mysql_version
        self._use_checksum: Final = stream._BinLogStreamReader__use_checksum
        self._header_lengths: Final = stream._BinLogStreamReader__post_header_lengths
        self._packets: Final = PacketRows(use_checksum=self._use_checksum, header_lengths=self._header_lengths)

    def knows(self, data: bytes, table: Any) -> bool:
        """Return whether `rows` needs no library. ``table``: the library's definition of the table."""
        return self._packets.columns(data, table) is not None

    def rows(self, shard: int, data: bytes, table: Any) -> list[RowEvent] | None:
        """Return the rows in a packet; None when they cannot be read."""
        columns = self._packets.columns(data, table)
        try:
            if columns is None:
                return decoded_rows(shard, self.event(data, table))
            return self._packets.events(shard, data, table.table, columns)
        except Exception:  # noqa: BLE001 - as in `decoded_rows`
            return None

    def event(self, data: bytes, table: Any) -> Event:
        """Return the event in a packet, as the library reads it. Raises what the library does."""
        return BinLogPacketWrapper(
            MysqlPacket(data, "utf8"),
            {table.table_id: table},
            self._connection,
            self._version,
            self._use_checksum,
            frozenset({WriteRowsEvent, UpdateRowsEvent, DeleteRowsEvent}),
            *(None, None, None, None),  # every table of every schema
            freeze_schema=True,
            ignore_decode_errors=False,
            verify_checksum=False,
            optional_meta_data=True,
            enable_logging=False,
            post_header_lengths=self._header_lengths,
        ).event


class _LeftRows(NamedTuple):
    """A row event that is not decoded, the library's definition of its table, and what decodes it."""

    shard: int
    data: bytes
    table: Any
    decoder: RowDecoder

    @property
    def size_bytes(self) -> int:
        return _EVENT_BYTES + len(self.data)

    def decoded(self) -> list[RowEvent] | None:
        """Return the rows; None when they cannot be read."""
        return self.decoder.rows(self.shard, self.data, self.table)


class Transactions:
    """The transaction that is being assembled. Used by the reader's thread only."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` bounds the estimated size of a transaction; of a larger one only the shards are kept, as
        invalid."""
        self._max_bytes: Final = max_bytes
        self._shards: Final[dict[str, int | None]] = {}
        self.leaves_undecoded = False
        """Leave rows undecoded where possible. Any thread may set it."""
        self._begin("", 0, explicit=False)
        self.unknown_events = 0
        """Events of an unknown type, or that could not be decoded."""
        self.oversized = 0
        """Transactions larger than ``max_bytes``."""

    def take(self, event: Event) -> BinlogTransaction | None:
        """Add the next event. Returns the transaction that ends with it, if any."""
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
                # Its rows take effect with XA COMMIT, if ever, which then invalidates the shards that they may change.
                if not event.one_phase:
                    self._events.clear()
                    self._undecoded.clear()
                return self._end()
            case ExecuteLoadQueryEvent():
                self._all_invalid = True
            case NotImplementedEvent():
                if event.event_type not in _HARMLESS_TYPES and not event.packet.flags & _IGNORABLE:
                    self.undecodable()
            case _:
                pass  # a heartbeat or the head of a file, which carries no change
        return None

    def undecodable(self) -> None:
        """Record an event that could not be decoded, so that its shard is unknown."""
        self.unknown_events += 1
        self._all_invalid = True

    def restart(self) -> None:
        """Drop the unfinished transaction: the stream restarts and sends it again."""
        self._begin("", 0, explicit=False)

    def _begin_after_last(self, event: Event, *, explicit: bool) -> BinlogTransaction | None:
        """Begin a transaction with a GTID event. Returns the last one if it ended unseen.

        Normally a transaction without an end was not committed when the server crashed, and is dropped. But its end may
        have been in an event that could not be decoded (a compressed transaction is a single such event)."""
        last = self._end() if self._all_invalid else None
        self._begin(event.gtid, event.timestamp, explicit=explicit)
        return last

    def _begin(self, gtid: str, timestamp: int, *, explicit: bool) -> None:
        self._gtid = gtid
        self._timestamp = timestamp
        self._explicit = explicit
        self._events: list[RowEvent] = []
        self._undecoded: list[_LeftRows] = []
        self._must_decode = not (gtid and self.leaves_undecoded)
        self._invalid: set[int] = set()
        self._all_invalid = False
        self._overflowed = False
        self._bytes = 0

    def _end(self) -> BinlogTransaction | None:
        if self._undecoded and (self._invalid or self._all_invalid):
            self._decode_all()
        undecoded = _by_shard(self._undecoded)
        transaction = BinlogTransaction(
            gtid=self._gtid,
            events=self._events,
            undecoded=undecoded,
            invalid_shards=frozenset(self._invalid),
            all_invalid=self._all_invalid,
            committed_unix_ms=self._timestamp * 1000,
            size_bytes=_TRANSACTION_BYTES + _UNDECODED_BYTES * len(undecoded) + self._bytes,
        )
        self._begin("", 0, explicit=False)
        if not (transaction.gtid or transaction.events or transaction.invalid_shards or transaction.all_invalid):
            return None
        return transaction

    def _statement(self, event: Event) -> BinlogTransaction | None:
        text: str = event.query
        schema = event.schema.decode(errors="replace")
        boundary = boundary_of(text)
        if boundary not in ("begin", "commit"):
            self._decode_all()
        match boundary:
            case "begin":
                self._explicit = True
                return None
            case "commit":
                return self._end()
            case "rollback":
                # A rollback is in the binlog only when some change could not be rolled back, so no row can be trusted.
                self._invalid.update(each.shard for each in self._events)
                self._events.clear()
                return self._end()
            case "savepoint":
                self._invalid.update(each.shard for each in self._events)
                return None
            case "foreign commit":
                self._all_invalid = True
                return self._end()
            case "statement":
                self._invalid |= shards_invalidated_by(text, schema)
                return None if self._explicit else self._end()

    def _rows(self, event: Event) -> None:
        """Take the rows of an event that the library has read."""
        shard = self._shard_of(event.schema)
        if shard is None:
            return
        if self._overflowed:
            self._invalid.add(shard)
            return
        self._decode_all()
        if isinstance(event, PartialUpdateRowsEvent):
            self._invalid.add(shard)
            return
        self._add(shard, decoded_rows(shard, event), event.event_size)

    def take_packet(self, data: bytes, tables: Mapping[int, Any], decoder: RowDecoder) -> bool:
        """Take an event from its packet, if possible. Returns False for an event that the library has to read.

        ``tables``: the library's definitions by number. It has to read those that it lacks, and has none of the schemas
        that are not read: their rows would be left out after 30 µs each."""
        if len(data) < _TABLE_ID.stop or data[0]:
            return False
        kind = data[5]
        if kind not in ROW_EVENTS:
            return kind == BINLOG.TABLE_MAP_EVENT and int.from_bytes(data[_TABLE_ID], "little") in tables
        table = tables.get(int.from_bytes(data[_TABLE_ID], "little"))
        if table is None:
            return True  # rows of another schema, such as the copy of a shard that moves here
        shard = self._shard_of(table.schema)
        if shard is None:
            return False
        return self._leave(shard, data, table, decoder) or self._decode(shard, data, table, decoder)

    def _leave(self, shard: int, data: bytes, table: Any, decoder: RowDecoder) -> bool:
        """Keep the rows of an event undecoded. Returns False when they have to be decoded at once."""
        if self._must_decode:
            return False
        name: str = table.table
        if name in HOUSEKEEPING_TABLES:
            return True  # caches hold nothing of these
        if name not in _GRAPH_TABLES and not name.startswith(CUSTOM_EDGES_PREFIX):
            return False
        left = _LeftRows(shard, data, table, decoder)
        self._bytes += left.size_bytes
        self._undecoded.append(left)
        if self._bytes > _MAX_UNDECODED_BYTES:
            self._decode_all()
        return True

    def _decode(self, shard: int, data: bytes, table: Any, decoder: RowDecoder) -> bool:
        """Decode the rows of an event. Returns False when the library has to."""
        if not decoder.knows(data, table):
            return False
        self._decode_all()
        if self._overflowed:
            self._invalid.add(shard)
        else:
            self._add(shard, decoder.rows(shard, data, table), len(data))
        return True

    def _decode_all(self) -> None:
        """Decode the rows that were left, and all that follow."""
        self._must_decode = True
        undecoded, self._undecoded = self._undecoded, []
        if undecoded:
            self._bytes = 0
        for each in undecoded:
            self._add(each.shard, each.decoded(), len(each.data))

    def _shard_of(self, schema: str) -> int | None:
        shard = self._shards.get(schema)
        if shard is None:
            shard = self._shards[schema] = shard_of_schema(schema)
        return shard

    def _add(self, shard: int, events: list[RowEvent] | None, size_bytes: int) -> None:
        """Add the decoded rows of an event; None when they could not be read."""
        if self._overflowed:
            self._invalid.add(shard)
            return
        if events is None:
            self.unknown_events += 1
            self._invalid.add(shard)
            return
        self._events += events
        self._bytes += size_bytes + _ROW_BYTES * len(events)
        if self._bytes > self._max_bytes:
            self.oversized += 1
            self._overflowed = True
            self._bytes = 0
            self._invalid.update(each.shard for each in self._events)
            self._events.clear()


def decoded_rows(shard: int, event: Event) -> list[RowEvent] | None:
    """Decode the rows of an event; None when they cannot be read."""
    try:
        rows = event.rows
    except Exception:  # noqa: BLE001 - decoding foreign bytes may raise anything; the shard becomes invalid
        return None
    table: str = event.table
    match event:
        case UpdateRowsEvent():
            return [RowEvent(shard, table, row["before_values"], row["after_values"]) for row in rows]
        case WriteRowsEvent():
            return [RowEvent(shard, table, None, row["values"]) for row in rows]
        case _:
            return [RowEvent(shard, table, row["values"], None) for row in rows]


def _by_shard(undecoded: Sequence[_LeftRows]) -> Sequence[UndecodedRows]:
    """Group row events by their shard."""
    by_shard: dict[int, list[_LeftRows]] = {}
    for each in undecoded:
        by_shard.setdefault(each.shard, []).append(each)
    return [
        UndecodedRows(
            shard,
            _UNDECODED_BYTES + sum([each.size_bytes for each in some]),
            partial(_decoded, shard, some),
            messages=sum([1 + len(each.data) // _MESSAGE_BYTES for each in some]),
        )
        for shard, some in by_shard.items()
    ]


def _decoded(shard: int, undecoded: Sequence[_LeftRows]) -> BinlogTransaction:
    events: list[RowEvent] = []
    for each in undecoded:
        decoded = each.decoded()
        if decoded is None:
            return BinlogTransaction(gtid="", invalid_shards=frozenset({shard}))
        events += decoded
    return BinlogTransaction(gtid="", events=events)
