"""The delay line: the process through which all connections between the regions of a development cluster pass.

It adds half of a round trip in each direction, keeps the order of bytes, and can cut and heal the line between two
regions while the cluster runs. It forwards bytes without reading them, so gRPC, frames and replication pass alike. The
cluster runs it as ``python -m tao.devcluster.delay_line SETTINGS`` and gives it a port for each address that another
region uses; the port says which region calls which server. `tao.devcluster.line_control` has its commands.
"""

from __future__ import annotations

import asyncio
import selectors
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from tao.devcluster.line_control import (
    MAX_LINE_BYTES,
    AskStatus,
    Command,
    Cut,
    Heal,
    LineSettings,
    LineStatus,
    PairStatus,
    Refused,
    Route,
    SetRoundTrip,
)
from tao.devcluster.ports import LOOPBACK, PortReservation, reserve_port
from tao.model.errors import OperatorError


class DelayQueue:
    """One direction of a slow line: chunks in order, each with the time at which it may be delivered.

    A sleep after each read would add up the delays of chunks that follow each other closely, and a transfer would
    crawl. A queue of due times delays every chunk by the same time, however many are on their way. The time is passed
    in.

    It is bounded in bytes: the caller stops reading while it `is_full`, and continues once it `has_room`."""

    __slots__ = ("_chunks", "_end_due", "_latest_due", "_max_bytes", "held_bytes")

    def __init__(self, max_bytes: int, first_due: float = 0.0) -> None:
        """Make an empty queue. ``max_bytes`` may be exceeded by one chunk; nothing is due before ``first_due``."""
        self._chunks: Final = deque[tuple[float, bytes]]()
        self._max_bytes: Final = max_bytes
        self._latest_due = first_due
        self._end_due: float | None = None
        self.held_bytes = 0

    def put(self, chunk: bytes, due: float) -> None:
        """Append a chunk. It is never due before the chunk in front of it, even when the delay was made shorter."""
        self._latest_due = max(due, self._latest_due)
        self._chunks.append((self._latest_due, chunk))
        self.held_bytes += len(chunk)

    def end(self, due: float) -> None:
        """Note that nothing follows. The end is delayed like a chunk. Only the first call has an effect."""
        if self._end_due is None:
            self._latest_due = self._end_due = max(due, self._latest_due)

    def take(self, now: float) -> bytes:
        """Return everything that is due, in order; empty when nothing is."""
        taken: list[bytes] = []
        while self._chunks and self._chunks[0][0] <= now:
            taken.append(self._chunks.popleft()[1])
        found = taken[0] if len(taken) == 1 else b"".join(taken)
        self.held_bytes -= len(found)
        return found

    def has_ended(self, now: float) -> bool:
        """True once everything was taken and the end is due."""
        return not self._chunks and self._end_due is not None and self._end_due <= now

    @property
    def next_due(self) -> float | None:
        """The time at which the next chunk or the end is due; None when the queue is empty and has no end."""
        return self._chunks[0][0] if self._chunks else self._end_due

    @property
    def is_full(self) -> bool:
        """True when it holds its limit or more."""
        return self.held_bytes >= self._max_bytes

    @property
    def has_room(self) -> bool:
        """True when it holds half of its limit or less: far enough from `is_full` that reading is not stopped for each
        chunk."""
        return self.held_bytes * 2 <= self._max_bytes


_HANDSHAKE_HALVES: Final = 3


class RegionLine:
    """The line between two regions: its delay, its state (see `PairStatus`) and its connections."""

    def __init__(self, regions: tuple[str, str], rtt_ms: float, max_direction_bytes: int) -> None:
        self.regions: Final = regions
        self.max_direction_bytes: Final = max_direction_bytes
        self.one_way_seconds = rtt_ms / 2000
        self.state = "open"
        self.connections: Final = set[DelayedConnection]()
        self.carried_bytes = 0

    @property
    def is_silent(self) -> bool:
        """True while nothing is delivered."""
        return self.state == "silent"

    def carried(self, count: int) -> None:
        """Count bytes that were delivered."""
        self.carried_bytes += count


class DelayedConnection:
    """One connection through the line: two sockets, and a queue for each direction between them.

    The far socket is opened when the handshake of a real line would have ended, one and a half round trips after the
    near one was accepted, and nothing arrives before. Bytes that one side does not read fill the queue; a full queue
    stops the reading of the other side, as a full TCP window does. ``on_gone`` is called once, when both are closed."""

    def __init__(self, span: RegionLine, host: str, port: int, on_gone: Callable[[DelayedConnection], None]) -> None:
        self._span = span
        self._target = (host, port)
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._opens_at = self._loop.time() + _HANDSHAKE_HALVES * span.one_way_seconds
        # The way back needs no such time: it begins when the far socket is open.
        self._there = _Direction(self, span, self._opens_at)
        self._back = _Direction(self, span, 0.0)
        self.near = _Side(self, outward=self._there, inward=self._back)
        self._far = _Side(self, outward=self._back, inward=self._there)
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._opens_at, self._open_far)
        self._is_over = False

    def resume(self) -> None:
        """Deliver what was held while the line was silent."""
        if self._timer is None and self._opening is None:
            self._open_far()
        self._there.arm()
        self._back.arm()

    def abort(self) -> None:
        """Reset both sides at once; bytes on their way are lost."""
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
        """Note that the socket of a side is closed."""
        if self._far.is_closed and self.near.is_closed:
            self.abort()

    def direction_ended(self) -> None:
        """Note that a direction has ended, and close both sides when both have."""
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
            # No server listens there: the caller sees its connection reset, much as it would see a refusal.
            self.abort()


class _Direction:
    """One direction of a connection."""

    def __init__(self, connection: DelayedConnection, span: RegionLine, first_due: float) -> None:
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
        """Take a chunk that the source sent."""
        self._queue.put(chunk, self._loop.time() + self._span.one_way_seconds)
        if self._queue.is_full and self.source is not None:
            self._reading_is_paused = True
            self.source.pause_reading()
        self.arm()

    def feed_end(self, closed: bool) -> None:
        """Note that the source sends nothing more. ``closed``: it does not read any more either."""
        self._source_is_closed |= closed
        if self.has_ended and closed and self.sink is not None:
            self.sink.close()
        self._queue.end(self._loop.time() + self._span.one_way_seconds)
        self.arm()

    def arm(self) -> None:
        """Set the timer for the next chunk, unless nothing can be delivered now."""
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
    """One socket: it feeds the direction that leads away from it, and the other direction writes to it."""

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


MAX_RTT_MS: Final = 10_000.0
"""Longer than twice around the earth, and still below the deadlines that tests exceed on purpose."""


class _Listener:
    """The port of one route, which stays reserved while connections are refused."""

    def __init__(self, route: Route, span: RegionLine) -> None:
        self.route: Final = route
        self.span: Final = span
        self._reservation: PortReservation | None = None
        self._server: asyncio.Server | None = None

    async def open(self, line: DelayLine) -> None:
        """Accept connections. Raises `OperatorError` when the port is taken."""
        if self._reservation is None:
            self._reservation = reserve_port(self.route.listen)
        if self._server is None:
            factory = lambda: line.accept(self.route, self.span)  # noqa: E731 - what create_server takes
            self._server = await asyncio.get_running_loop().create_server(factory, LOOPBACK, self.route.listen)

    def close(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def release(self) -> None:
        """Refuse connections and release the port."""
        self.close()
        if self._reservation is not None:
            self._reservation.release()


class DelayLine:
    """All lines of a cluster. `run` serves until it is stopped."""

    def __init__(self, settings: LineSettings) -> None:
        self._settings: Final = settings
        self._rtt_ms = settings.rtt_ms
        self._spans: Final[dict[tuple[str, str], RegionLine]] = {}
        self._listeners: Final[list[_Listener]] = []
        for route in settings.routes:
            pair = _pair(route.source, route.target)
            span = self._spans.get(pair)
            if span is None:
                span = self._spans[pair] = RegionLine(pair, settings.rtt_ms, settings.max_direction_bytes)
            self._listeners.append(_Listener(route, span))

    async def run(self, stopped: asyncio.Event) -> None:
        """Serve until ``stopped`` is set. Raises `OperatorError` when a port is taken."""
        try:
            for listener in self._listeners:
                await listener.open(self)
            server = await asyncio.start_unix_server(self._serve_control, self._settings.control, limit=MAX_LINE_BYTES)
            async with server:
                await stopped.wait()
        finally:
            for listener in self._listeners:
                listener.release()
            for span in self._spans.values():
                _reset(span)

    def accept(self, route: Route, span: RegionLine) -> asyncio.Protocol:
        """Return the protocol for a socket that was just accepted."""
        if sum(len(each.connections) for each in self._spans.values()) >= self._settings.max_connections:
            return _Refused()
        connection = DelayedConnection(span, route.host, route.port, span.connections.discard)
        span.connections.add(connection)
        return connection.near

    async def do(self, command: Command) -> LineStatus:
        """Carry out a command and return the state of the line.

        Raises `OperatorError` for a wrong command; then nothing was changed."""
        match command:
            case SetRoundTrip(rtt_ms):
                if not 0 <= rtt_ms <= MAX_RTT_MS:
                    raise OperatorError(f"a round trip of {rtt_ms:g} ms is out of bounds: use 0 to {MAX_RTT_MS:g} ms")
                self._rtt_ms = rtt_ms
                for span in self._spans.values():
                    span.one_way_seconds = rtt_ms / 2000
            case Cut(between, silent):
                await self._set_state(self._span(between), "silent" if silent else "cut")
            case Heal(between):
                for span in self._spans.values() if between is None else (self._span(between),):
                    await self._set_state(span, "open")
            case AskStatus():
                pass
        return self._status()

    def _span(self, between: tuple[str, str]) -> RegionLine:
        found = self._spans.get(_pair(*between))
        if found is None:
            known = ", ".join(" and ".join(pair) for pair in self._spans)
            raise OperatorError(f"there is no line between {' and '.join(between)}; there is one between {known}")
        return found

    async def _set_state(self, span: RegionLine, state: str) -> None:
        span.state = state
        for listener in self._listeners:
            if listener.span is span:
                if state == "cut":
                    listener.close()
                else:
                    await listener.open(self)
        if state == "cut":
            _reset(span)
        elif state == "open":
            for connection in span.connections:
                connection.resume()

    def _status(self) -> LineStatus:
        return LineStatus(
            rtt_ms=self._rtt_ms,
            pairs=[
                PairStatus(
                    regions=span.regions,
                    state=span.state,
                    connections=len(span.connections),
                    carried_bytes=span.carried_bytes,
                )
                for span in self._spans.values()
            ],
        )

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: LineStatus | Refused
        try:
            command = msgspec.json.decode(await reader.readline(), type=Command)
            answer = await self.do(command)
        except OperatorError as error:
            answer = Refused(error.message)
        except (msgspec.MsgspecError, ValueError) as error:
            answer = Refused(f"this is not a command: {error}")
        writer.write(msgspec.json.encode(answer) + b"\n")
        writer.close()


class _Refused(asyncio.Protocol):
    """Resets a connection at once, because there are too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _reset(span: RegionLine) -> None:
    for connection in list(span.connections):
        connection.abort()


def _new_loop() -> asyncio.AbstractEventLoop:
    # select() waits with microseconds; epoll rounds up to whole milliseconds, at each end.
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def _serve(settings: LineSettings) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await DelayLine(settings).run(stopped)


def main(settings_file: str) -> int:
    """Run the line of a settings file until SIGTERM. Returns the exit status: 2 for a mistake, which is one line."""
    try:
        settings = msgspec.json.decode(Path(settings_file).read_bytes(), type=LineSettings)
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_serve(settings))
    except OperatorError as error:
        sys.stderr.write(f"delay line: {error.message}\n")
        return 2
    except (OSError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"delay line: {settings_file}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
