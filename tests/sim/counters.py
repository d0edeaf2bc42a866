"""Counters in the simulation: additions by clients, folds at any time, and followers that are killed.

Additions are positive, so the checks are two bounds. A counter is never more than what clients have asked for, at any
commit: nothing is counted twice. When all is calm it is not less than what was acknowledged, but for what followers
held unwritten when they ended, and but for what was lost with a master; and every client reads the master's value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from tao.client import Graph
from tao.model.counters import FOLDED_SLOT, decode_totals
from tao.model.errors import TaoError
from tao.model.graph import ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import RowChanges
from tao.model.writes import FoldCounter
from tests.sim.checks import Violation
from tests.sim.database import SimDatabase

VIEWS: Final = 401
NAME: Final = "views"


class CounterChecks:
    """What was added to the counters of a run."""

    def __init__(self, master_of: Callable[[int], SimDatabase], found: Callable[[Violation], None]) -> None:
        self._master_of: Final = master_of
        self._found: Final = found
        self._asked: Final[dict[int, int]] = defaultdict(int)
        self._acknowledged: Final[dict[int, int]] = defaultdict(int)
        self._lost: Final[dict[int, int]] = defaultdict(int)

    async def add(self, graph: Graph, counted_id: int, by: int) -> None:
        """Add to a counter. Raises `TaoError`."""
        self._asked[counted_id] += by
        await graph.counter_add(counted_id, NAME, by)
        self._acknowledged[counted_id] += by

    def follower_ended(self, server: Any) -> None:
        """Note what a follower held unwritten when it ended."""
        totals = server._counters._totals
        for held in (*totals._current.values(), *chain.from_iterable(totals._former.values())):
            self._lost[held.key[0]] += held.plus - held.minus - held.flushed

    def value(self, server: SimDatabase, counted_id: int) -> int:
        """Return the value of a counter by the rows of a database."""
        edges = server.truth.edges.get(ListKey(counted_id, VIEWS), {})
        return sum(decode_totals(edge.data).value for edge in edges.values())

    def slots(self, counted_id: int) -> list[int]:
        """Return the slots of a counter that may be folded."""
        truth = self._master_of(counted_id >> SHARD_SHIFT).truth
        return sorted(slot for slot in truth.edges.get(ListKey(counted_id, VIEWS), ()) if slot != FOLDED_SLOT)

    def committed(self, server: SimDatabase, changes: RowChanges) -> None:
        """Check that no counter is more than what was asked for."""
        for key in {edge.id1 for edge in (*changes.put_edges, *changes.delete_edges) if edge.atype == VIEWS}:
            value = self.value(server, key)
            if not 0 <= value <= self._asked[key]:
                self._found(Violation("counters", f"counter {key} is {value}, and {self._asked[key]} was asked for"))

    async def check_calm(self, graph: Graph) -> int:
        """Check the counters when everything is written. Returns how many there are. Raises `Violation`."""
        for counted_id, acknowledged in sorted(self._acknowledged.items()):
            master = self._master_of(counted_id >> SHARD_SHIFT)
            value = self.value(master, counted_id)
            least = acknowledged - self._lost[counted_id]
            if value < least and not master.past.lost.get((counted_id, VIEWS)):
                raise Violation("counters", f"counter {counted_id} is {value}; {least} was acknowledged and not lost")
            try:
                read = (await graph.counter_get(counted_id, NAME)).value
            except TaoError as error:
                raise Violation("7", f"counter {counted_id} cannot be read: {error}") from error
            if read != value:
                raise Violation("counters", f"counter {counted_id} is {value}, and is read as {read}")
        return len(self._acknowledged)


async def fold(leader: Any, counted_id: int, slots: list[int]) -> None:
    """Have a leader fold slots of a counter. Raises `TaoError`."""
    deadline = leader._context.clock.monotonic() + 4.0
    await leader._writes.commit(FoldCounter(counted_id, VIEWS, tuple(slots)), deadline, both_sides=True)
