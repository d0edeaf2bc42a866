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
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from tao.devcluster.line_control import (
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
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.model.errors import OperatorError

_HANDSHAKE_HALVES: Final = 3
MAX_RTT_MS: Final = 10_000.0
"""Longer than twice around the earth, and still below the deadlines that tests exceed on purpose."""


class _Span:
    """The line between two regions: its delay, its state (see `PairStatus`) and its connections."""

    def __init__(self, regions: tuple[str, str], rtt_ms: float) -> None:
        self.regions: Final = regions
        self.routes: Final[list[Route]] = []
        self.connections: Final[set[_Connection]] = set()
        self.one_way_seconds = rtt_ms / 2000
        self.state = "open"
        self.carried_bytes = 0
        self.delivers: Final = asyncio.Event()
        """Cleared while the line is silent."""

    def enter(self, state: str) -> None:
        """Change the state. A cut resets the connections: bytes on their way are lost."""
        self.state = state
        if state == "silent":
            self.delivers.clear()
            return
        self.delivers.set()
        if state == "cut":
            self.reset()
            return
        for connection in self.connections:
            connection.near.arm()
            connection.far.arm()

    def reset(self, to_port: int = 0) -> None:
        """Reset the connections to a port, or with 0 all."""
        for connection in [*self.connections]:
            if to_port in (0, connection.port):
                connection.abort()


class _Connection:
    """One connection through the line, of two sockets.

    The far socket is opened when the handshake of a real line would have ended, one and a half round trips after the
    near one was accepted, and nothing arrives before. It is over when both directions have ended, or one is reset."""

    def __init__(self, span: _Span, route: Route, max_direction_bytes: int) -> None:
        self.span: Final = span
        self.port: Final = route.port
        self.near = _Side(self, max_direction_bytes)
        self.far = _Side(self, max_direction_bytes)
        self.near.other, self.far.other = self.far, self.near
        self._opening = asyncio.get_running_loop().create_task(self._open_far(route))
        span.connections.add(self)

    async def _open_far(self, route: Route) -> None:
        await asyncio.sleep(_HANDSHAKE_HALVES * self.span.one_way_seconds)
        await self.span.delivers.wait()
        try:
            await asyncio.get_running_loop().create_connection(lambda: self.far, route.host, route.port)
        except OSError:
            # No server listens there: the caller sees its connection reset, much as it would see a refusal.
            self.abort()

    def close_if_ended(self) -> None:
        """Close both sockets when both directions have ended."""
        if self.near.has_ended and self.far.has_ended:
            for transport in self._stop():
                transport.close()

    def abort(self) -> None:
        """Reset both sockets at once."""
        for transport in self._stop():
            transport.abort()

    def _stop(self) -> list[asyncio.Transport]:
        self.span.connections.discard(self)
        self._opening.cancel()
        self.near.stop()
        self.far.stop()
        return [side.transport for side in (self.near, self.far) if side.transport is not None]


class _Side(asyncio.Protocol):
    """One socket of a connection. What it receives is delayed, and then written to the other socket.

    A sleep after each read would add up the delays of chunks that follow each other closely, and a transfer would
    crawl. A queue of due times delays every chunk by the same time, however many are on their way. A full queue stops
    the reading, as a full TCP window does; its limit may be exceeded by one chunk."""

    other: _Side

    def __init__(self, connection: _Connection, max_bytes: int) -> None:
        self._connection = connection
        self._span = connection.span
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        # An empty chunk is the end, None a reset; both are delayed like bytes.
        self._chunks: deque[tuple[float, bytes | None]] = deque()
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._reading_is_paused = False
        self._is_writable = False
        self.transport: asyncio.Transport | None = None
        self.has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._put(data)
        if self._held_bytes >= self._max_bytes and self.transport is not None:
            self._reading_is_paused = True
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        self._put(b"")
        return True  # the other direction may go on

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_writable = False
        if exc is not None:
            self._put(None)

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self.other.arm()

    def arm(self) -> None:
        """Set the timer for the next chunk, unless nothing can be delivered now."""
        if self._timer is None and self._chunks and self._delivers:
            self._timer = self._loop.call_at(self._chunks[0][0], self._deliver)

    def stop(self) -> None:
        """Deliver nothing more."""
        self._chunks.clear()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _delivers(self) -> bool:
        """True when the first chunk may be delivered. A reset needs no socket that takes bytes."""
        return self._span.delivers.is_set() and (self.other._is_writable or self._chunks[0][1] is None)

    def _put(self, chunk: bytes | None) -> None:
        self._chunks.append((self._loop.time() + self._span.one_way_seconds, chunk))
        self._held_bytes += len(chunk or b"")
        self.arm()

    def _deliver(self) -> None:
        self._timer = None
        now, sink = self._loop.time(), self.other.transport
        while self._chunks and self._chunks[0][0] <= now and self._delivers:
            _, chunk = self._chunks.popleft()
            if chunk is None or sink is None:
                self._connection.abort()
            elif chunk:
                self._held_bytes -= len(chunk)
                self._span.carried_bytes += len(chunk)
                sink.write(chunk)  # may make the other side unwritable
            else:
                self.has_ended = True
                sink.write_eof()
                self._connection.close_if_ended()
        # Half of the limit: reading must not be stopped and continued for each chunk.
        if self._reading_is_paused and self._held_bytes * 2 <= self._max_bytes and self.transport is not None:
            self._reading_is_paused = False
            self.transport.resume_reading()
        self.arm()


class DelayLine:
    """All lines of a cluster. `run` serves until it is stopped."""

    def __init__(self, settings: LineSettings) -> None:
        self._settings: Final = settings
        self._rtt_ms = settings.rtt_ms
        self._spans: Final[dict[tuple[str, str], _Span]] = {}
        self._listeners: Final[dict[Route, asyncio.Server]] = {}
        for route in settings.routes:
            pair = _pair(route.source, route.target)
            self._spans.setdefault(pair, _Span(pair, settings.rtt_ms)).routes.append(route)

    async def run(self, stopped: asyncio.Event) -> None:
        """Serve until ``stopped`` is set. Raises `OperatorError` when a port is taken."""
        with ExitStack() as reservations:
            for route in self._settings.routes:
                reservations.enter_context(reserve_port(route.listen))  # it stays ours while connections are refused
            try:
                for span in self._spans.values():
                    await self._enter(span, "open")
                async with await asyncio.start_unix_server(self._serve_control, self._settings.control):
                    await stopped.wait()
            finally:
                for span in self._spans.values():
                    await self._enter(span, "cut")

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
            case Cut(between, silent, to_port) if to_port:
                self._cut_ways(self._span(between), to_port, silent=silent)
            case Cut(between, silent):
                await self._enter(self._span(between), "silent" if silent else "cut")
            case Heal(between):
                for span in self._spans.values() if between is None else (self._span(between),):
                    await self._enter(span, "open")
            case AskStatus():
                pass
        pairs = [
            PairStatus(
                regions=span.regions,
                state=span.state,
                connections=len(span.connections),
                carried_bytes=span.carried_bytes,
            )
            for span in self._spans.values()
        ]
        return LineStatus(rtt_ms=self._rtt_ms, pairs=pairs)

    def _span(self, between: tuple[str, str]) -> _Span:
        found = self._spans.get(_pair(*between))
        if found is None:
            known = ", ".join(" and ".join(pair) for pair in self._spans)
            raise OperatorError(f"there is no line between {' and '.join(between)}; there is one between {known}")
        return found

    async def _enter(self, span: _Span, state: str) -> None:
        for route in span.routes:
            if state == "cut" and route in self._listeners:
                self._listeners.pop(route).close()
            elif state != "cut" and route not in self._listeners:
                accept = partial(self._accept, span, route)
                server = await asyncio.get_running_loop().create_server(accept, LOOPBACK, route.listen)
                self._listeners[route] = server
        span.enter(state)

    def _cut_ways(self, span: _Span, to_port: int, *, silent: bool) -> None:
        """Refuse connections to one port, and reset those that there are."""
        if silent:
            raise OperatorError("a silent cut is one of all ways")
        routes = [route for route in span.routes if route.port == to_port]
        if not routes:
            raise OperatorError(f"no way between {' and '.join(span.regions)} leads to port {to_port}")
        for route in routes:
            if route in self._listeners:
                self._listeners.pop(route).close()
        span.reset(to_port)

    def _accept(self, span: _Span, route: Route) -> asyncio.Protocol:
        if sum(len(each.connections) for each in self._spans.values()) >= self._settings.max_connections:
            return _Refused()
        return _Connection(span, route, self._settings.max_direction_bytes).near

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: LineStatus | Refused
        try:
            answer = await self.do(msgspec.json.decode(await reader.readline(), type=Command))
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
