"""The simulated network: sessions between simulated processes, with delays, cuts and breaks.

It replaces frames and gRPC (`tao.wire.session`) below the halves that both share, so that numbering, deadlines,
rejections and encoding are the real ones. As with TCP, the messages of one connection arrive in order or not at all,
and a lost packet is a late one; the order among connections is undefined. A connection that is cut stays silent until
it is given up, as pings would do, or goes on when the cut is healed first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, Final

from tao.model.errors import TaoError, Unavailable
from tao.wire.client_session import NumberedSession
from tao.wire.identity import Credentials, PeerIdentity
from tao.wire.server_session import ServedConnection
from tao.wire.session import RequestHandler
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.v1 import session_pb2 as pb
from tests.sim.loop import CURRENT, Process, SimLoop

_PASSED_ON: Final = ContextVar("passed on", default=False)
"""True in whatever follows from a request for the master of a shard that another region has sent."""

SILENCE_SECONDS: Final = 10.0
"""Seconds after which a session gives its peer up: the interval of pings and their timeout (`SessionSettings`)."""
SESSION: Final = SessionSettings(deadline_tick_seconds=0.25, max_unanswered=40)
"""Coarser ticks than the product's, because each wakes the loop while anything is unanswered. There is room for some
bursts at once."""


class Network:
    """All connections. ``note`` writes the trace."""

    def __init__(self, loop: SimLoop, seed: int, note: Callable[..., None]) -> None:
        self.loop: Final = loop
        self._random: Final = random.Random(seed)
        self._note: Final = note
        self._listeners: dict[str, Listener] = {}
        self._connections: dict[Connection, None] = {}
        self._cut: set[tuple[str, str]] = set()
        self._outside: Final = Context()
        self.twice_passed_on: Callable[[str], None] = lambda _: None
        """Called with what happened when a request for a master crosses regions a second time."""
        self.slow: dict[str, float] = {}
        """Process or region → most seconds by which all its messages, in both directions, are delayed."""
        self.messages = 0

    # time and cuts

    def delay(self, here: Process, there: Process) -> float:
        """Return a random delay of one message, in seconds; a few take much longer, as after a lost packet."""
        chance = self._random.random()
        seconds = (0.0002 if here.region == there.region else 0.015) * (1.0 + 2.0 * chance)
        if chance > 0.99:
            seconds += self._random.random() * 0.25
        for place in self.slow:
            if place in (here.name, here.region, there.name, there.region):
                seconds += self._random.random() * self.slow[place]
        return seconds

    def slowness(self, here: Process, there: Process) -> float:
        """Return the most seconds that slow places add to one message."""
        places = (here.name, here.region, there.name, there.region)
        return sum(seconds for place, seconds in self.slow.items() if place in places)

    def cut(self, some: list[str], others: list[str], *, both_ways: bool = True) -> None:
        """Deliver nothing from some to others, and with ``both_ways`` nothing back."""
        for one in some:
            for other in others:
                self._cut.add((one, other))
                if both_ways:
                    self._cut.add((other, one))
        for connection in list(self._connections):
            if self.is_cut(connection.client_process, connection.server_process):
                self.loop.call_later(SILENCE_SECONDS, self._give_up, connection, context=self._outside.copy())

    def heal(self) -> None:
        """End all cuts and deliver what waited in connections that still live."""
        self._cut.clear()
        for connection in list(self._connections):
            connection.flow_again()

    def is_cut(self, here: Process, there: Process) -> bool:
        """Return whether nothing gets there, or nothing comes back."""
        pair = (here.name, there.name)
        return bool(self._cut) and (pair in self._cut or pair[::-1] in self._cut)

    def is_blocked(self, here: Process, there: Process) -> bool:
        """Return whether nothing gets there."""
        return bool(self._cut) and (here.name, there.name) in self._cut

    def _give_up(self, connection: Connection) -> None:
        if self.is_cut(connection.client_process, connection.server_process):
            self.break_off(connection)

    # connections

    def listen(self, address: str, listener: Listener) -> None:
        self._listeners[address] = listener

    def stop_listening(self, address: str) -> None:
        self._listeners.pop(address, None)

    def listener_at(self, address: str) -> Process | None:
        """Return the process that listens at an address."""
        listener = self._listeners.get(address)
        return None if listener is None else listener.process

    async def connect(
        self, address: str, settings: SessionSettings, credentials: Credentials, _: object = None
    ) -> SimSession:
        """Replace `tao.wire.frames_client.connect_frames`. Raises `Unavailable`."""
        here = CURRENT.get()
        assert here is not None, "only simulated processes connect"
        _PASSED_ON.set(False)  # the connection will send requests of others, too
        listener = self._listeners.get(address)
        there = None if listener is None else listener.process
        if there is None or self.is_cut(here, there) or there.state == "paused":
            await asyncio.sleep(0.001 if there is None else settings.connect_timeout_seconds)
            raise Unavailable(f"{address} did not answer")
        await asyncio.sleep(self.delay(here, there) + self.delay(there, here))
        if self._listeners.get(address) is not listener or listener is None:
            raise Unavailable(f"{address} refused the connection")
        connection = Connection(self, here, listener, address, credentials)
        self._connections[connection] = None
        return connection.client

    def connections_of(self, process: Process) -> list[Connection]:
        return [each for each in self._connections if process in (each.client_process, each.server_process)]

    def break_off(self, connection: Connection) -> None:
        """Report the break to both ends, each in its time; messages on their way are lost."""
        if connection in self._connections:
            del self._connections[connection]
            connection.is_broken = True
            self._note("break", connection.client_process.name, connection.server_process.name)
            client, server = connection.client_process, connection.server_process
            lost = Unavailable(f"the connection to {connection.address} was lost")
            self.loop.call_later(self.delay(server, client), connection.client.lost, lost, context=_in(client))
            self.loop.call_later(self.delay(client, server), connection.server.peer_gone, context=_in(server))

    def vanish(self, process: Process) -> None:
        """Close the ports of a dead process and report that to its peers."""
        for address, listener in list(self._listeners.items()):
            if listener.process is process:
                del self._listeners[address]
        for connection in self.connections_of(process):
            self.break_off(connection)

    def silence(self, process: Process) -> None:
        """Let the peers of a paused process give it up after a while, unless it resumes before."""
        for connection in self.connections_of(process):
            self.loop.call_later(SILENCE_SECONDS, self._give_up_sleeper, connection, context=self._outside.copy())

    def _give_up_sleeper(self, connection: Connection) -> None:
        if "paused" in (connection.client_process.state, connection.server_process.state):
            self.break_off(connection)

    def random_connection(self) -> Connection | None:
        connections = list(self._connections)
        return self._random.choice(connections) if connections else None


def _is_for_master(request: pb.Request) -> bool:
    """Return whether only the region that masters the shard can serve the request. Copies of inverse edges, which
    leaders send to other masters on behalf of a write, are requests of their own."""
    if request.HasField("write"):
        return not any(write.HasField("settle_edge") for write in request.write.writes)
    return request.HasField("reserve_ids") or (request.HasField("read") and request.read.critical)


def _in(process: Process) -> Context:
    """Return a fresh context of the process."""
    return process.context.copy()


class Listener:
    """A port of a process, with its handler."""

    def __init__(self, process: Process, name: str, handler: RequestHandler, settings: ServingSettings) -> None:
        self.process: Final = process
        self.name: Final = name
        self.handler: Final = handler
        self.settings: Final = settings
        self.connections: dict[SimServed, None] = {}


class Connection:
    """A connection: two ends, and the messages on their way between them."""

    def __init__(
        self, network: Network, client: Process, listener: Listener, address: str, credentials: Credentials
    ) -> None:
        self.address: Final = address
        self.client_process: Final = client
        self.server_process: Final = listener.process
        self.is_broken = False
        self._network: Final = network
        self._last = [0.0, 0.0]  # arrival times, to the server and to the client
        self._stalled: tuple[list[Any], list[Any]] = ([], [])
        self.client: Final = SimSession(network.loop, address, SESSION, self, listener.name)
        peer = PeerIdentity(credentials.name, credentials.role)
        self.server: Final = SimServed(listener, peer, self)
        listener.connections[self.server] = None

    @property
    def crosses_regions(self) -> bool:
        return self.client_process.region != self.server_process.region

    def to_server(self, message: bytes) -> None:
        if self.crosses_regions and _PASSED_ON.get() and _is_for_master(pb.Request.FromString(message)):
            self._network.twice_passed_on(
                f"{self.client_process.name} sends {self.server_process.name} what another region has sent it"
            )
        self._post(0, self.client_process, self.server_process, self.server.arrived, message)

    def to_client(self, message: bytes) -> None:
        self._post(1, self.server_process, self.client_process, self.client.arrived, message)

    def drained(self) -> None:
        """Send the client the server's request to go to another server."""
        self._post(1, self.server_process, self.client_process, self.client.go_away, b"")

    def closed_by_client(self) -> None:
        self._network.break_off(self)

    def flow_again(self) -> None:
        for stalled in self._stalled:
            waiting, stalled[:] = list(stalled), []
            for each in waiting:
                self._post(*each)

    def _post(self, way: int, here: Process, there: Process, deliver: Callable[[bytes], None], message: bytes) -> None:
        network = self._network
        if self.is_broken or here.state == "swept":
            return
        if network.is_blocked(here, there):
            self._stalled[way].append((way, here, there, deliver, message))
            return
        network.messages += 1
        arrival = max(self._last[way], network.loop.now + network.delay(here, there))
        self._last[way] = arrival
        network._note("send", here.name, there.name, len(message), arrival)
        network.loop.call_at(arrival, self._arrive, deliver, message, context=_in(there))

    def _arrive(self, deliver: Callable[[bytes], None], message: bytes) -> None:
        if not self.is_broken:
            deliver(message)


class SimSession(NumberedSession):
    """The client's end of a connection."""

    def __init__(
        self, loop: SimLoop, address: str, settings: SessionSettings, connection: Connection, server_name: str
    ) -> None:
        super().__init__(loop, address, settings)
        self._connection = connection
        self._opened()
        self.server_name = server_name

    def arrived(self, message: bytes) -> None:
        if self._connected:
            self._answer_arrived(pb.Answer.FromString(message))

    def go_away(self, _: bytes) -> None:
        if self._connected:
            self._server_drains()

    def lost(self, error: TaoError) -> None:
        if self._connected:
            self._lost(error)

    async def close(self) -> None:
        """Close the connection from this side."""
        if self._connected:
            self._connection.closed_by_client()
            self._lost(Unavailable(f"the session with {self._address} was closed here"))

    def _transmit(self, message: bytes) -> None:
        self._connection.to_server(message)

    def _unsent_bytes(self) -> int:
        return 0

    def _shut(self) -> None:
        self._connection.closed_by_client()
        self._lost(Unavailable(f"{self._address} is draining; connect again"))


class SimServed(ServedConnection):
    """The server's end of a connection."""

    def __init__(self, listener: Listener, peer: PeerIdentity, connection: Connection) -> None:
        super().__init__(listener.handler, listener.settings, peer)
        self._listener = listener
        self._connection = connection

    def arrived(self, message: bytes) -> None:
        if not self.closed:
            request = pb.Request.FromString(message)
            if self._connection.crosses_regions and _is_for_master(request):
                _PASSED_ON.set(True)  # in the context of this message
            self.receive(request)

    def transmit(self, answer: pb.Answer) -> None:
        for message in self.fitting(answer):
            self._connection.to_client(message)

    def go_away(self) -> None:
        """Ask the client to connect to another server."""
        self._connection.drained()

    def peer_gone(self) -> None:
        self._listener.connections.pop(self, None)
        super().peer_gone()

    def close(self) -> None:
        """Close the session from this side."""
        self._connection.closed_by_client()
