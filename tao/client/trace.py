"""Which tier answered which read: for demonstrations and for finding out why a page is slow.

Off by default and then free; switched on, it costs a few microseconds a query.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, overload

from tao.client.calls import ReadCall
from tao.client.columns import COUNT, EDGES, OBJECT, OPERATIONS, RANGE, Row
from tao.wire.v1 import session_pb2 as pb

MEMORY: Final = "follower memory"
"""``answered_by`` of a query that the follower answered without asking anyone."""

_MAX_TRACED: Final = 10_000  # whoever reads a trace looks at fewer; the oldest go
_UNNAMED: Final = "behind the follower"


@dataclass(frozen=True, slots=True)
class Served:
    """One read: ``operation`` by its name, ``key`` for people, the ``server`` asked and its ``tier``, and who had the
    answer: `MEMORY`, or what the server said of a miss."""

    operation: str
    key: str
    server: str
    tier: str
    answered_by: str


class Trace(Sequence[Served]):
    """The reads answered while the trace was open, in the order of their answers; at most the last 10,000.
    ``dropped`` counts those before."""

    __slots__ = ("_atype_name", "_served", "dropped")

    def __init__(self, atype_name: Callable[[int], str]) -> None:
        self._atype_name = atype_name
        self._served: deque[Served] = deque(maxlen=_MAX_TRACED)
        self.dropped = 0

    def note(self, call: ReadCall, part: pb.ReadAnswer) -> None:
        """Add what this part of an answer has served."""
        lane = call.lane
        missed = set(part.missed_slots)
        for slot in part.slots or range(len(part.values)):
            kind, row = call.query(slot)
            answered_by = (part.served_by or _UNNAMED) if slot in missed else MEMORY
            self.dropped += len(self._served) == _MAX_TRACED
            self._served.append(
                Served(OPERATIONS[kind], self._key(kind, row), lane.server.name, lane.tier, answered_by)
            )

    def _key(self, kind: int, row: Row) -> str:
        if kind == OBJECT:
            return str(row[0])
        name = f"{row[0]} {self._atype_name(row[1])}"
        if kind == COUNT:
            return name
        if kind == RANGE:
            return f"{name} {row[2]}+{row[3]}"
        if kind == EDGES:
            return f"{name} to {len(row[2])} ids"
        return f"{name} at {row[2]}…{row[3]}, {row[4]} at most"

    def __len__(self) -> int:
        return len(self._served)

    @overload
    def __getitem__(self, index: int) -> Served: ...

    @overload
    def __getitem__(self, index: slice) -> list[Served]: ...

    def __getitem__(self, index: int | slice) -> Served | list[Served]:
        return list(self._served)[index]
