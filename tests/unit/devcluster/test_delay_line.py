"""The delay line delays, keeps order, limits what is on its way, cuts and heals, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tao.devcluster.delay_line import DelayLine
from tao.devcluster.line_control import (
    AskStatus,
    Cut,
    Heal,
    LineSettings,
    LineStatus,
    Route,
    SetRoundTrip,
    ask_line,
    wait_until_line_answers,
)
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.model.errors import OperatorError, Unavailable

RTT_MS = 40.0
TO_WEST = ("east", "west")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Line:
    """A running line from east to two echo servers in west."""

    def __init__(self, control: Path, routes: list[Route]) -> None:
        self.control = control
        self.routes = routes
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, server: int = 0) -> Streams:
        streams = await asyncio.open_connection(LOOPBACK, self.routes[server].listen)
        self.writers.append(streams[1])
        return streams

    async def do(self, command: AskStatus | SetRoundTrip | Cut | Heal) -> LineStatus:
        return await ask_line(self.control, command)

    async def wait_for_connections(self, count: int) -> None:
        while (await self.do(AskStatus())).pairs[0].connections != count:  # noqa: ASYNC110 - the line notifies nobody
            await asyncio.sleep(0.005)


class Echo(asyncio.Protocol):
    """Sends back what comes, as fast as it is read."""

    def __init__(self, gone: list[asyncio.Event]) -> None:
        self._gone = asyncio.Event()
        gone.append(self._gone)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()


@asynccontextmanager
async def running_line(folder: Path, **changes: float) -> AsyncIterator[Line]:
    """A line with two echo servers behind it, all stopped at the end."""
    gone: list[asyncio.Event] = []
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Echo(gone), LOOPBACK, 0) for _ in range(2)]
    with reserve_port() as one, reserve_port() as other:
        listen = (one.port, other.port)
    control = folder / "line.sock"
    routes = [
        Route(source="east", target="west", listen=port, host=LOOPBACK, port=server.sockets[0].getsockname()[1])
        for port, server in zip(listen, servers, strict=True)
    ]
    settings = LineSettings(**{"control": str(control), "routes": routes, "rtt_ms": RTT_MS, **changes})  # type: ignore[arg-type]
    stopped = asyncio.Event()
    serving = asyncio.create_task(DelayLine(settings).run(stopped))
    await wait_until_line_answers(control, 10.0)
    line = Line(control, routes)
    yield line
    stopped.set()
    await serving
    for writer in line.writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    for each in gone:
        await each.wait()
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with running_line(tmp_path) as running:
        yield running


async def round_trip(streams: Streams, message: bytes = b"hello") -> float:
    """Seconds until an echo is back, by the loop's clock."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    streams[1].write(message)
    assert await streams[0].readexactly(len(message)) == message
    return loop.time() - began


async def closed(streams: Streams) -> bytes:
    """What still came before the connection ended."""
    try:
        return await streams[0].read(1)
    except ConnectionError:
        return b""
    finally:
        streams[1].close()


async def test_a_round_trip_takes_at_least_what_was_set_and_the_first_also_a_handshake(line: Line) -> None:
    began = asyncio.get_running_loop().time()
    streams = await line.connect()
    await round_trip(streams)
    assert asyncio.get_running_loop().time() - began >= 2 * RTT_MS / 1000
    assert await round_trip(streams) >= RTT_MS / 1000
    await line.do(SetRoundTrip(90.0))
    assert await round_trip(streams) >= 0.090
    assert (await line.do(AskStatus())).rtt_ms == 90.0
    streams[1].close()
    await line.wait_for_connections(0)


async def test_bytes_do_not_overtake_those_that_were_sent_before_the_round_trip_became_shorter(line: Line) -> None:
    streams = await line.connect()
    await round_trip(streams)
    streams[1].write(b"first")
    await line.do(SetRoundTrip(0.0))
    streams[1].write(b"second")
    assert await streams[0].readexactly(len(b"firstsecond")) == b"firstsecond"


async def test_much_data_passes_whole_and_in_order_through_a_small_bound(tmp_path: Path) -> None:
    async with running_line(tmp_path, max_direction_bytes=100_000, rtt_ms=2.0) as line:
        reader, writer = await line.connect()
        sent = bytes(range(256)) * 8_000
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()
        await line.wait_for_connections(0)


async def test_a_cut_resets_what_is_open_and_refuses_what_is_new_until_it_is_healed(line: Line) -> None:
    streams = await line.connect()
    await round_trip(streams)
    (pair,) = (await line.do(Cut(("west", "east")))).pairs
    assert (pair.state, pair.connections) == ("cut", 0)
    assert await closed(streams) == b""
    with pytest.raises(ConnectionRefusedError):
        await line.connect()
    (pair,) = (await line.do(Heal())).pairs
    assert pair.state == "open"
    await round_trip(await line.connect())


async def test_a_cut_of_the_ways_to_one_server_leaves_the_others_open(line: Line) -> None:
    streams, others = await line.connect(), await line.connect(1)
    for each in (streams, others):
        await round_trip(each)
    (pair,) = (await line.do(Cut(TO_WEST, to_port=line.routes[0].port))).pairs
    assert (pair.state, pair.connections) == ("open", 1)
    assert await closed(streams) == b""
    with pytest.raises(ConnectionRefusedError):
        await line.connect()
    await round_trip(others)
    await line.do(Heal(TO_WEST))
    for each in (others, await line.connect()):
        await round_trip(each)


async def test_a_silent_line_closes_nothing_and_delivers_after_healing(line: Line) -> None:
    streams = await line.connect()
    await round_trip(streams)
    await line.do(Cut(TO_WEST, silent=True))
    late = await line.connect()
    before = (await line.do(AskStatus())).pairs[0].carried_bytes
    answers = [asyncio.create_task(round_trip(each)) for each in (streams, late)]
    done, _ = await asyncio.wait(answers, timeout=3 * RTT_MS / 1000)
    assert not done
    assert (await line.do(AskStatus())).pairs[0].carried_bytes == before
    await line.do(Heal(TO_WEST))
    await asyncio.gather(*answers)


async def test_a_connection_to_a_stopped_server_ends(tmp_path: Path) -> None:
    async with running_line(tmp_path, rtt_ms=1.0) as line:
        with reserve_port() as near, reserve_port() as stopped_server:
            settings = LineSettings(
                control=str(tmp_path / "other.sock"),
                routes=[Route(source="a", target="b", listen=near.port, host=LOOPBACK, port=stopped_server.port)],
                rtt_ms=1.0,
            )
            stopped = asyncio.Event()
            serving = asyncio.create_task(DelayLine(settings).run(stopped))
            await wait_until_line_answers(tmp_path / "other.sock", 10.0)
            assert await closed(await asyncio.open_connection(LOOPBACK, near.port)) == b""
            stopped.set()
            await serving
        assert (await line.do(AskStatus())).pairs[0].connections == 0


async def test_one_connection_too_many_is_reset(tmp_path: Path) -> None:
    async with running_line(tmp_path, max_connections=1, rtt_ms=1.0) as line:
        first = await line.connect()
        await round_trip(first)
        assert await closed(await line.connect()) == b""
        await round_trip(first)


async def test_a_wrong_command_is_refused_and_changes_nothing(line: Line, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no line between east and north; there is one between east and west"):
        await line.do(Cut(("east", "north")))
    with pytest.raises(OperatorError, match="no way between east and west leads to port 1"):
        await line.do(Cut(TO_WEST, to_port=1))
    with pytest.raises(OperatorError, match="a silent cut is one of all ways"):
        await line.do(Cut(TO_WEST, silent=True, to_port=line.routes[0].port))
    with pytest.raises(OperatorError, match="-1 ms is out of bounds"):
        await line.do(SetRoundTrip(-1.0))
    reader, writer = await asyncio.open_unix_connection(str(line.control))
    writer.write(b'{"type": "dance"}\n')
    assert b"this is not a command" in await reader.readline()
    writer.close()
    assert (await line.do(AskStatus())).rtt_ms == RTT_MS
    with pytest.raises(Unavailable, match="does not answer"):
        await ask_line(tmp_path / "nothing.sock", AskStatus())
