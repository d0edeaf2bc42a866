"""Writes that a server makes for itself, through its own write path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from tao.model.errors import OutcomeUnknown, TaoError
from tao.model.ports import Clock
from tao.serving.access import OnBehalfOf
from tao.serving.forward_path import ForwardPath, WriteResults
from tao.wire.convert import error_from_pb
from tao.wire.identity import PeerIdentity
from tao.wire.v1 import session_pb2 as pb

_ANSWER_SECONDS: Final = 2.0
"""Time beyond an attempt's own in which its write path must have answered."""


class OwnWrites:
    """Makes writes of any shard, once: what fails is left to the caller."""

    def __init__(self, name: str, clock: Clock, path: ForwardPath, attempt_seconds: float) -> None:
        """``name``: of this server, a follower."""
        self._peer: Final = PeerIdentity(name, "follower")
        self._clock: Final = clock
        self._path: Final = path
        self._attempt_seconds: Final = attempt_seconds

    async def make(self, writes: Sequence[pb.Write], behalf: OnBehalfOf) -> list[pb.WriteResult | TaoError]:
        """Return the result or the error of each write, after an attempt's time at the latest."""
        request = pb.Request()
        behalf.name_in(request)
        request.write.writes.extend(writes)
        collected = _CollectedResults(self._peer, len(writes))
        results = WriteResults(collected, len(writes), want_changes=False)
        deadline = self._clock.monotonic() + self._attempt_seconds
        self._path.forward(request, range(len(writes)), results, deadline, self._peer, for_any_shard=True)
        try:
            async with asyncio.timeout(self._attempt_seconds + _ANSWER_SECONDS):
                await collected.complete.wait()
        except TimeoutError:
            pass  # those without a result are unknown
        unknown = OutcomeUnknown("the write path did not answer")
        return [collected.results.get(slot, unknown) for slot in range(len(writes))]


class _CollectedResults:
    """A `Reply` that keeps the results of a batch."""

    def __init__(self, peer: PeerIdentity, expected: int) -> None:
        self.peer: Final = peer
        self.closed: Final = False
        self.results: Final[dict[int, pb.WriteResult | TaoError]] = {}
        self.complete: Final = asyncio.Event()
        self._expected: Final = expected

    def send(self, answer: pb.Answer) -> None:
        """See `Reply.send`."""
        for slot, result in zip(answer.write.slots, answer.write.results, strict=True):
            self.results[slot] = error_from_pb(result.error) if result.HasField("error") else result
        if len(self.results) == self._expected:
            self.complete.set()

    def on_close(self, callback: Callable[[], None]) -> None:
        """See `Reply.on_close`: it is never closed."""
