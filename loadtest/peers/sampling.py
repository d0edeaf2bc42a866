"""Which of tao's answers were hits, told of a sample: of what is answered while the SDK's trace is open.

The trace is open for a moment now and then, on the very client that is measured: what it tells of has shared its
messages with the rest, and what is answered while it is closed costs nothing. A client of its own for the sample would
send messages of one query, which are dearer than those that it stands for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from loadtest.peers.how import How
from tao.client import Graph
from tao.client.trace import MEMORY, Trace

_OPEN_SECONDS: Final = 0.005
_CLOSED_SECONDS: Final = 0.045
"""A tenth of the time is sampled: thousands of answers in a few seconds of load, hundreds of misses among them."""


class Sampling:
    """Of one client's reads."""

    def __init__(self, graph: Graph) -> None:
        self._graph: Final = graph
        self._had: Final[dict[tuple[str, str], bool]] = {}
        """Operation and first id → whether the follower had the latest such answer in memory."""
        self._looked_at = 0
        self.trace: Trace | None = None
        """None: what is answered now is no part of the sample."""

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Open and close the trace in turns until the end of this context."""
        task = asyncio.ensure_future(self._take_turns())
        try:
            yield
        finally:
            task.cancel()
            self.trace = None

    def how(self, operation: str, ids: Iterable[int]) -> How:
        """Of a read that has just been answered, of these objects or of the list of this id."""
        trace = self.trace
        if trace is None:
            return How.UNKNOWN
        if len(trace) > self._looked_at:
            for served in trace[self._looked_at :]:
                self._had[served.operation, served.key.partition(" ")[0]] = served.answered_by == MEMORY
            self._looked_at = len(trace)
        had = [self._had.get((operation, str(each))) for each in ids]
        if None in had:
            return How.UNKNOWN
        return How.HIT if all(had) else How.MISS

    async def _take_turns(self) -> None:
        while True:
            await asyncio.sleep(_CLOSED_SECONDS)
            with self._graph.trace() as trace:
                self._had.clear()
                self._looked_at, self.trace = 0, trace
                await asyncio.sleep(_OPEN_SECONDS)
            # Who has been answered last has not been awoken yet.
            await asyncio.sleep(0)
            self.trace = None
