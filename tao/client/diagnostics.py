"""Counters of a graph, and the trace that says which tier answered which read.

The counters are always on. A trace is off by default and then costs nothing; switched on, it costs a few microseconds
a query. Use it for demonstrations, and to find out why a page is slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, overload

from tao.client.calls import ReadCall
from tao.model.queries import AT_POSITION
from tao.wire.read_batch import OPERATIONS, CountRow, EdgesRow, ExistsRow, QueryRow, RangeRow, TimeRangeRow
from tao.wire.v1 import session_pb2 as pb


@dataclass(slots=True)
class ClientStats:
    """Counters since the graph was opened, except ``topology_version``. Read them at any time."""

    queries: int = 0
    """Read queries sent, retries included."""
    writes: int = 0
    """Writes sent, retries included."""
    batches: int = 0
    """Messages that carried queries or writes."""
    retries: int = 0
    """Messages sent to retry queries that a server could not answer."""
    failovers: int = 0
    """Retries that went to another server than the one that could not answer."""
    retries_refused: int = 0
    """Retries that the retry budget refused, because too many requests have failed recently."""
    errors: int = 0
    """Queries and writes that failed after all retries."""
    inverse_pending: int = 0
    """Writes committed whose inverse edge was left to repair."""
    hot_joined: int = 0
    """Reads of hot items that shared a query with other reads."""
    hot_unchanged: int = 0
    """Queries for hot items that were answered "unchanged"."""
    hot_unchecked: int = 0
    """Reads of hot items answered without a query (`ClientSettings.hot_unchecked_ms`)."""
    reverse_lookups: int = 0
    """`assoc_get` queries of long lists that were sent to the inverse lists (`ClientSettings.reverse_lookup_id2s`)."""
    reverse_lookup_fallbacks: int = 0
    """Reverse look-ups that failed and were then answered by the list itself."""
    topology_version: int = 0
    """The version of the topology that requests are routed by."""

    @property
    def turned(self) -> int:
        """Return `reverse_lookups`: the former name of the counter."""
        return self.reverse_lookups

    @property
    def turned_back(self) -> int:
        """Return `reverse_lookup_fallbacks`: the former name of the counter."""
        return self.reverse_lookup_fallbacks


MEMORY: Final = "follower memory"
"""The value of `Served.answered_by` for a query that the follower answered from its own cache."""

_MAX_TRACED: Final = 10_000  # nobody reads more of a trace; the oldest are dropped
_UNNAMED: Final = "behind the follower"


@dataclass(frozen=True, slots=True)
class Served:
    """One traced read: the name of its ``operation``, its ``key`` as readable text, the ``server`` asked and its
    ``tier``, and ``answered_by``: `MEMORY`, or the tier that the server named for a miss."""

    operation: str
    key: str
    server: str
    tier: str
    answered_by: str


class Trace(Sequence[Served]):
    """The reads answered while the trace was open, in the order of their answers; at most the last 10,000.
    ``dropped`` counts the reads before those."""

    __slots__ = ("_atype_name", "_served", "dropped")

    def __init__(self, atype_name: Callable[[int], str]) -> None:
        """Start empty. ``atype_name`` returns the name of an association type by its number."""
        self._atype_name = atype_name
        self._served: deque[Served] = deque(maxlen=_MAX_TRACED)
        self.dropped = 0

    def record(self, call: ReadCall, part: pb.ReadAnswer) -> None:
        """Add the queries that this part of an answer has answered."""
        queue = call.queue
        missed = set(part.missed_slots)
        for slot in part.slots or range(len(part.values)):
            operation, row = call.query(slot)
            answered_by = (part.served_by or _UNNAMED) if slot in missed else MEMORY
            self.dropped += len(self._served) == _MAX_TRACED
            self._served.append(
                Served(OPERATIONS[operation], self._key(row), queue.server.name, queue.tier, answered_by)
            )

    def _key(self, row: QueryRow) -> str:
        if len(row) == 1:
            return str(row[0])
        name = f"{row.id1} {self._atype_name(row.atype)}"
        match row:
            case CountRow():
                return name
            case RangeRow():
                return f"{name} {row.pos}+{row.limit}"
            case EdgesRow():
                return f"{name} to {len(row.id2s)} ids"
            case ExistsRow():
                return f"{name} to {row.id2}"
            case TimeRangeRow():
                skipped = f" from {row.start - AT_POSITION}" if row.start > AT_POSITION else ""
                return f"{name} at {row.high}…{row.low}{skipped}, {row.limit} at most"

    def __len__(self) -> int:
        return len(self._served)

    @overload
    def __getitem__(self, index: int) -> Served: ...

    @overload
    def __getitem__(self, index: slice) -> list[Served]: ...

    def __getitem__(self, index: int | slice) -> Served | list[Served]:
        return list(self._served)[index]
