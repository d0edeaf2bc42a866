"""The delay line: a process through which everything passes that goes from one region to another.

Networks between regions are what a development machine lacks: this one adds half of a round trip each way, keeps order,
and can be cut and healed for each pair of regions (DESIGN.md §8). It forwards bytes and knows nothing of what they
mean, so gRPC, frames and replication pass alike. Run as ``python -m tao.devcluster.delay_line SETTINGS`` by the
cluster, which gives it a port for each address that another region uses; the port says who calls whom.
"""

from __future__ import annotations

import asyncio
import selectors
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

from tao.devcluster.delay_connection import DelayedConnection
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

MAX_RTT_MS: Final = 10_000.0
"""Longer than twice around the earth, and still below the deadlines that a test wants to see passed."""


class _Span:
    """The line between two regions; `tao.devcluster.delay_connection.Span`."""

    def __init__(self, regions: tuple[str, str], rtt_ms: float, max_direction_bytes: int) -> None:
        self.regions: Final = regions
        self.max_direction_bytes: Final = max_direction_bytes
        self.one_way_seconds = rtt_ms / 2000
        self.state = "open"
        self.connections: Final = set[DelayedConnection]()
        self.carried_bytes = 0

    @property
    def is_silent(self) -> bool:
        return self.state == "silent"

    def carried(self, count: int) -> None:
        self.carried_bytes += count


class _Listener:
    """The port of one route, kept while nobody may connect to it."""

    def __init__(self, route: Route, span: _Span) -> None:
        self.route: Final = route
        self.span: Final = span
        self._reservation: PortReservation | None = None
        self._server: asyncio.Server | None = None

    async def open(self, line: DelayLine) -> None:
        """Accept connections. Raises `OperatorError` when the port is not to be had."""
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

    def give_up(self) -> None:
        """Refuse connections for good."""
        self.close()
        if self._reservation is not None:
            self._reservation.release()


class DelayLine:
    """All lines of a cluster. `run` serves until cancelled."""

    def __init__(self, settings: LineSettings) -> None:
        self._settings: Final = settings
        self._rtt_ms = settings.rtt_ms
        self._spans: Final[dict[tuple[str, str], _Span]] = {}
        self._listeners: Final[list[_Listener]] = []
        for route in settings.routes:
            pair = _pair(route.source, route.target)
            span = self._spans.get(pair)
            if span is None:
                span = self._spans[pair] = _Span(pair, settings.rtt_ms, settings.max_direction_bytes)
            self._listeners.append(_Listener(route, span))

    async def run(self, stopped: asyncio.Event) -> None:
        """Serve until ``stopped`` is set. Raises `OperatorError` when a port or the socket is not to be had."""
        try:
            for listener in self._listeners:
                await listener.open(self)
            server = await asyncio.start_unix_server(self._serve_control, self._settings.control, limit=MAX_LINE_BYTES)
            async with server:
                await stopped.wait()
        finally:
            for listener in self._listeners:
                listener.give_up()
            for span in self._spans.values():
                _reset(span)

    def accept(self, route: Route, span: _Span) -> asyncio.Protocol:
        """The protocol for a socket that was just accepted."""
        if sum(len(each.connections) for each in self._spans.values()) >= self._settings.max_connections:
            return _Turned()
        connection = DelayedConnection(span, route.host, route.port, span.connections.discard)
        span.connections.add(connection)
        return connection.near

    async def do(self, command: Command) -> LineStatus:
        """Obey. Raises `OperatorError` when the command makes no sense here; then nothing was changed."""
        match command:
            case SetRoundTrip(rtt_ms):
                if not 0 <= rtt_ms <= MAX_RTT_MS:
                    raise OperatorError(f"a round trip of {rtt_ms:g} ms cannot be: use 0 to {MAX_RTT_MS:g}")
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

    def _span(self, between: tuple[str, str]) -> _Span:
        found = self._spans.get(_pair(*between))
        if found is None:
            known = ", ".join(" and ".join(pair) for pair in self._spans)
            raise OperatorError(f"there is no line between {' and '.join(between)}; there is one between {known}")
        return found

    async def _set_state(self, span: _Span, state: str) -> None:
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
            answer = Refused(f"this is no command: {error}")
        writer.write(msgspec.json.encode(answer) + b"\n")
        writer.close()


class _Turned(asyncio.Protocol):
    """A connection too many: reset at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _reset(span: _Span) -> None:
    for connection in list(span.connections):
        connection.abort()


def _new_loop() -> asyncio.AbstractEventLoop:
    # select() counts in microseconds where epoll counts in whole milliseconds, which would be rounded up at each end.
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def _serve(settings: LineSettings) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await DelayLine(settings).run(stopped)


def main(settings_file: str) -> int:
    """Run the line of a settings file until SIGTERM. Returns the exit status; a mistake is one line and status 2."""
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
