"""One connection through the delay line: two sockets and, between them, a queue for each direction.

The far socket is opened when the handshake of a real line would have come to its end, one and a half round trips after
the near one was accepted, and nothing arrives before. What one side does not read fills the queue; a full queue stops
the reading of the other side, as a full window would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from tao.devcluster.delay_queue import DelayQueue

_HANDSHAKE_HALVES: Final = 3


class Span(Protocol):
    """What a connection asks the line between its two regions."""

    @property
    def one_way_seconds(self) -> float:
        """The delay for what is sent now."""

    @property
    def is_silent(self) -> bool:
        """True while nothing may arrive."""

    @property
    def max_direction_bytes(self) -> int:
        """Bound of each direction."""

    def carried(self, count: int) -> None:
        """So many bytes have arrived."""


class DelayedConnection:
    """Made for a socket that was accepted; ``on_gone`` is called once, when both sockets are closed."""

    def __init__(self, span: Span, host: str, port: int, on_gone: Callable[[DelayedConnection], None]) -> None:
        self._span = span
        self._target = (host, port)
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._opens_at = self._loop.time() + _HANDSHAKE_HALVES * span.one_way_seconds
        # The way back needs no such bound: it begins when the far socket is open.
        self._there = _Direction(self, span, self._opens_at)
        self._back = _Direction(self, span, 0.0)
        self.near = _Side(self, outward=self._there, inward=self._back)
        self._far = _Side(self, outward=self._back, inward=self._there)
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._opens_at, self._open_far)
        self._is_over = False

    def resume(self) -> None:
        """The line is no longer silent: go on with what was held."""
        if self._timer is None and self._opening is None:
            self._open_far()
        self._there.arm()
        self._back.arm()

    def abort(self) -> None:
        """Reset both sides at once; what is on its way is lost."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
        for direction in (self._there, self._back):
            direction.stop()
        for side in (self.near, self._far):
            if side.transport is not None:
                side.transport.abort()
        self._on_gone(self)

    def side_closed(self) -> None:
        """A side's socket is closed."""
        if self._far.is_closed and self.near.is_closed:
            self.abort()

    def direction_ended(self) -> None:
        """A direction has come to its end; when both have, nothing can follow."""
        if self._there.has_ended and self._back.has_ended:
            for side in (self.near, self._far):
                if side.transport is not None:
                    side.transport.close()

    def _open_far(self) -> None:
        self._timer = None
        if not self._span.is_silent:
            self._opening = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            await self._loop.create_connection(lambda: self._far, *self._target)
        except OSError:
            # Nobody listens there: the caller sees its connection reset, as it would see a refusal.
            self.abort()


class _Direction:
    """What travels one way."""

    def __init__(self, connection: DelayedConnection, span: Span, first_due: float) -> None:
        self._connection = connection
        self._span = span
        self._loop = asyncio.get_running_loop()
        self._queue = DelayQueue(span.max_direction_bytes, first_due)
        self._timer: asyncio.TimerHandle | None = None
        self._reading_is_paused = False
        self._source_is_closed = False
        self.source: asyncio.Transport | None = None
        self.sink: asyncio.Transport | None = None
        self.sink_is_full = False
        self.has_ended = False

    def feed(self, chunk: bytes) -> None:
        """The source sent something."""
        self._queue.put(chunk, self._loop.time() + self._span.one_way_seconds)
        if self._queue.is_full and self.source is not None:
            self._reading_is_paused = True
            self.source.pause_reading()
        self.arm()

    def feed_end(self, closed: bool) -> None:
        """The source sends nothing more, and when it is ``closed`` will not read either."""
        self._source_is_closed |= closed
        if self.has_ended and closed and self.sink is not None:
            self.sink.close()
        self._queue.end(self._loop.time() + self._span.one_way_seconds)
        self.arm()

    def arm(self) -> None:
        """Have the next chunk delivered when it is due; nothing while it cannot be."""
        due = self._queue.next_due
        ready = self.sink is not None and not self.sink_is_full and not self._span.is_silent and not self.has_ended
        if self._timer is None and ready and due is not None:
            self._timer = self._loop.call_at(due, self._deliver)

    def stop(self) -> None:
        """Deliver nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self.has_ended = True

    def _deliver(self) -> None:
        self._timer = None
        if self.sink is None or self._span.is_silent:
            return
        now = self._loop.time()
        chunk = self._queue.take(now)
        if chunk:
            self._span.carried(len(chunk))
            self.sink.write(chunk)  # may set sink_is_full
        if self._reading_is_paused and self._queue.has_room and self.source is not None:
            self._reading_is_paused = False
            self.source.resume_reading()
        if self._queue.has_ended(now):
            self.has_ended = True
            if self._source_is_closed:
                self.sink.close()
            elif self.sink.can_write_eof():
                self.sink.write_eof()
            self._connection.direction_ended()
        self.arm()


class _Side(asyncio.Protocol):
    """One socket: feeds the direction that leads away from it, and is written to by the other."""

    def __init__(self, connection: DelayedConnection, outward: _Direction, inward: _Direction) -> None:
        self._connection = connection
        self._outward = outward
        self._inward = inward
        self.transport: asyncio.Transport | None = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = self._outward.source = self._inward.sink = transport
        self._inward.arm()

    def data_received(self, data: bytes) -> None:
        self._outward.feed(data)

    def eof_received(self) -> bool:
        self._outward.feed_end(closed=False)
        return True  # the other direction may go on

    def pause_writing(self) -> None:
        self._inward.sink_is_full = True

    def resume_writing(self) -> None:
        self._inward.sink_is_full = False
        self._inward.arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._inward.stop()
        self._outward.feed_end(closed=True)
        self._connection.side_closed()
