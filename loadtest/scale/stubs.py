"""Stubs of an installation's servers: they speak the protocol of the real ones, and neither cache nor store anything.

They run in the scenario's own process. A stub confirms, acknowledges and counts; it routes by no topology and holds no
invariant. Their sessions and listeners are those of `tao.wire`, so the frames on the wire are those of real servers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Final

from loadtest.conditions import together
from tao.devcluster.ports import LOOPBACK
from tao.follower.subscriptions import SubscriptionSettings
from tao.model.changes import ObjectChange, ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery, Span
from tao.model.errors import TaoError, Unavailable
from tao.model.ids import make_id
from tao.model.relay import Relay
from tao.model.versions import FIRST_EPOCH, NEVER_WRITTEN, next_version
from tao.wire.convert import delivery_to_pb, position_from_pb, relay_to_pb, span_from_pb, subscribe_to_pb
from tao.wire.frames_client import connect_frames
from tao.wire.frames_server import FrameServer
from tao.wire.identity import Credentials
from tao.wire.session import Reply, Session, failure
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.v1 import session_pb2 as pb

_TICK_SECONDS: Final = 0.005
_PART_SHARDS: Final = 64
"""Shards that a stub leader confirms in one delivery."""
_UNACKNOWLEDGED: Final = 256
"""Deliveries that a stub leader sends ahead."""
_FOLLOWER: Final = SubscriptionSettings()
"""Says when a follower acknowledges."""
_TIMEOUT_SECONDS: Final = 10.0
_SESSION: Final = SessionSettings(connect_timeout_seconds=_TIMEOUT_SECONDS)
_NEXT_SECONDS: Final = 0.5
"""Time from a client's watch to the document that it brings."""
_DATA: Final = bytes(200)
_EPOCH_MS: Final = 1_700_000_000_000

DatabaseOf = Callable[[int], str]
"""Maps a shard to the name of its database."""


async def _at_rate(per_second: float, do: Callable[[], None]) -> None:
    """Call so often a second until cancelled, some calls at a time."""
    began, done = time.monotonic(), 0
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        due = int((time.monotonic() - began) * per_second)
        for _ in range(due - done):
            do()
        done = due


class ChangeMaker:
    """Makes changes of new objects, one after the other."""

    def __init__(self, otype: int = 1, data: bytes = _DATA) -> None:
        self._otype: Final = otype
        self._data: Final = data
        self._made = 0

    def change(self, shard: int) -> ShardMessages:
        """Return the change of one object of the shard."""
        self._made += 1
        version = next_version(NEVER_WRITTEN, FIRST_EPOCH)
        key = make_id(shard, _EPOCH_MS + self._made, 0)
        return ShardMessages(shard, FIRST_EPOCH, (ObjectChange(key, NEVER_WRITTEN, version, self._otype, self._data),))


@dataclass(slots=True)
class _Series:
    """The deliveries to one subscriber."""

    reply: Reply
    sequences: dict[int, int] = field(default_factory=dict)
    number: int = 0
    acknowledged: int = 0


class StubLeader:
    """A leader that confirms every subscription and acknowledges every relay. A `RequestHandler`."""

    def __init__(self, name: str, database_of: DatabaseOf) -> None:
        self.name: Final = name
        self.positions = 0
        """Positions that were subscribed."""
        self.relay_seconds = 0.0
        """How long a relay takes."""
        self.on_relay: Callable[[pb.Relay], None] = lambda _: None
        self._database_of: Final = database_of
        self._stream: Final = f"{name}/1"
        self._series: dict[tuple[str, int], _Series] = {}
        self._relays = asyncio.Lock()
        self._tasks: Final[set[asyncio.Task[None]]] = set()

    @property
    def series(self) -> list[_Series]:
        """The series whose subscriber is there."""
        self._series = {key: series for key, series in self._series.items() if not series.reply.closed}
        return list(self._series.values())

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """See `tao.wire.session.RequestHandler`."""
        match request.WhichOneof("body"):
            case "subscribe":
                self._subscribe(request, reply)
            case "acknowledge":
                series = self._series.get((reply.peer.name, request.acknowledge.subscribe_number))
                if series is not None:
                    series.acknowledged = request.acknowledge.delivery_number
            case "relay":
                task = asyncio.get_running_loop().create_task(self._take(request.relay, reply))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "read":
                reply.send(pb.Answer(read=pb.ReadAnswer()))
            case kind:
                reply.send(failure(Unavailable(f"{self.name} is a stub and answers no {kind}")))

    async def _take(self, relay: pb.Relay, reply: Reply) -> None:
        async with self._relays:
            await asyncio.sleep(self.relay_seconds)
        self.on_relay(relay)
        reply.send(pb.Answer(relayed=pb.Relayed()))

    def _subscribe(self, request: pb.Request, reply: Reply) -> None:
        asked = request.subscribe
        self.positions += len(asked.positions)
        peer = reply.peer.name
        if asked.series:
            series = self._series.get((peer, asked.series))
            reply.send(pb.Answer(applied=pb.Applied()))
        else:
            series = self._series[peer, request.number] = _Series(reply)
        if series is not None:
            parts = [self._confirmed(series, position_from_pb(position)) for position in asked.positions]
            for first in range(0, len(parts), _PART_SHARDS):
                self.deliver(series, parts=parts[first : first + _PART_SHARDS])

    def _confirmed(self, series: _Series, held: Position) -> ShardDelivery:
        """Continue what has a position of any leader, and reset what has none."""
        known = held.stream == self._stream
        sequence = series.sequences[held.shard] = held.sequence if known else 0
        position = Position(held.shard, self._stream, sequence, self._database_of(held.shard), max(1, held.reached))
        messages = ShardMessages(held.shard, FIRST_EPOCH, ())
        return ShardDelivery(position, not held.source, messages, continued=bool(held.source) and not known)

    def deliver(self, series: _Series, parts: Sequence[ShardDelivery] = ()) -> None:
        """Deliver these parts now."""
        series.number += 1
        delivery = delivery_to_pb(Delivery(series.number, tuple(parts)))
        series.reply.send(pb.Answer(more=True, delivery=delivery))

    def publish(self, series: _Series, change: ShardMessages) -> None:
        """Deliver a change of one of the series' shards."""
        shard = change.shard
        sequence = series.sequences[shard] = series.sequences[shard] + 1
        position = Position(shard, self._stream, sequence, self._database_of(shard), 1)
        self.deliver(series, [ShardDelivery(position, False, change)])


class StubLeaders:
    """The stub leaders of a region. `start` them; `close` them at the end."""

    def __init__(self, names: Iterable[str], databases: Sequence[str], database_of: DatabaseOf) -> None:
        self.leaders: Final = {name: StubLeader(name, database_of) for name in names}
        self.sent = 0
        """Deliveries of proofs and changes."""
        self._databases: Final = databases
        self._servers: Final[list[FrameServer]] = []

    async def start(self) -> dict[str, str]:
        """Listen, and return the addresses by name."""
        found = {}
        for name, leader in self.leaders.items():
            server = FrameServer(leader, ServingSettings(), name=name, topology_version=lambda: 1)
            self._servers.append(server)
            found[name] = await server.start(f"{LOOPBACK}:0")
        return found

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        for server in self._servers:
            await server.close()

    @property
    def positions(self) -> int:
        """Positions that were subscribed at all leaders."""
        return sum(leader.positions for leader in self.leaders.values())

    async def prove(self, per_second: float) -> None:
        """Deliver proofs of all databases so often a second, by the leaders in turn, until cancelled."""
        turns = self._turns()

        def do() -> None:
            _, series = next(turns)
            if series.number - series.acknowledged > _UNACKNOWLEDGED:
                return
            series.number += 1
            self.sent += 1
            now = time.time_ns() // 1_000_000
            proven = tuple((database, now) for database in self._databases)
            reached = tuple((database, self.sent) for database in self._databases)
            delivery = delivery_to_pb(Delivery(series.number, proven=proven, reached=reached))
            series.reply.send(pb.Answer(more=True, delivery=delivery))

        await _at_rate(per_second, do)

    async def change(self, per_second: float) -> None:
        """Deliver changes so often a second, by the leaders in turn, until cancelled."""
        turns, maker = self._turns(), ChangeMaker()
        shards = {leader.name: cycle(series.sequences) for leader, series in self._pairs()}

        def do() -> None:
            leader, series = next(turns)
            leader.publish(series, maker.change(next(shards[leader.name])))
            self.sent += 1

        await _at_rate(per_second, do)

    def _pairs(self) -> list[tuple[StubLeader, _Series]]:
        return [(leader, series) for leader in self.leaders.values() for series in leader.series if series.sequences]

    def _turns(self) -> Iterator[tuple[StubLeader, _Series]]:
        return cycle(self._pairs())


class StubSubscriber:
    """A follower that subscribes some shards at a leader and acknowledges what it delivers."""

    def __init__(self, name: str, shards: Sequence[int]) -> None:
        self.deliveries = 0
        self._name: Final = name
        self._positions: Final = {shard: Position(shard) for shard in shards}
        self._number = 0
        self._applied = 0
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, address: str) -> Session:
        """Connect and subscribe. Raises `TaoError`."""
        session = self._session = await connect_frames(address, _SESSION, Credentials(self._name, "follower"))
        self.subscribe()
        return session

    def subscribe(self) -> None:
        """Begin a series of all shards, and end the former one, as a follower does whose topology has changed."""
        if self._number:
            forget = pb.Forget(forgotten_number=self._number)
            self._session.send(pb.Request(forget=forget), _TIMEOUT_SECONDS, self._take)
        request = subscribe_to_pb(self._name, self._positions.values(), 0)
        self._number = self._session.send(request, math.inf, self._take)

    def _take(self, answer: pb.Answer) -> None:
        if not answer.HasField("delivery") or answer.number != self._number:
            return
        self.deliveries += 1
        self._applied = answer.delivery.delivery_number
        for part in answer.delivery.shards:
            self._positions[part.position.shard] = position_from_pb(part.position)
        seconds = _FOLLOWER.acknowledge_seconds if answer.delivery.shards else _FOLLOWER.acknowledge_proofs_seconds
        due = asyncio.get_running_loop().time() + seconds
        if self._timer is None or due < self._timer.when():
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_at(due, self._acknowledge)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _acknowledge(self) -> None:
        self._stop_timer()
        acknowledge = pb.Acknowledge(subscribe_number=self._number, delivery_number=self._applied)
        self._session.send(pb.Request(acknowledge=acknowledge), _TIMEOUT_SECONDS, self._take)


class StubTailer:
    """The tailer of one database, as one leader sees it. It relays again once the last relay is acknowledged."""

    def __init__(self, database: str) -> None:
        self.relays = 0
        """Acknowledged relays."""
        self.wanted = 0
        """Shards of which the leader has asked where they continue."""
        self.topology_version = 1
        self._database: Final = database
        self._number = 1
        self._wanted: list[Span] = []
        self._sent: Final[dict[int, int]] = {}
        """Shard → the number up to which it has been relayed."""

    async def open(self, address: str) -> Session:
        """Connect. Raises `TaoError`."""
        credentials = Credentials(f"tailer-{self._database}", "tailer")
        self._session = await connect_frames(address, _SESSION, credentials)
        return self._session

    async def run(self, seconds_between: float, changes: Callable[[str], Sequence[ShardMessages]]) -> None:
        """Relay the changes of this database, or a proof if there are none, again and again, until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.relay(changes(self._database))
            except TaoError:
                self._wanted = []  # a shard that has moved; what the leader still wants, it asks for again
            await asyncio.sleep(max(0.0, began + seconds_between - time.monotonic()))

    async def relay(self, changes: Sequence[ShardMessages] = ()) -> None:
        """Relay the changes, or a proof if there are none, and where the shards continue that the leader asked about.

        Raises `TaoError`."""
        before, self._number = self._number, self._number + 1
        spans = [Span(each.shard, self._database, each.number, before) for each in self._wanted]
        spans += [
            Span(change.shard, self._database, self._sent.get(change.shard, 0), self._number) for change in changes
        ]
        self._sent.update({change.shard: self._number for change in changes})
        relay = Relay(
            changes=tuple(changes),
            source=self._database,
            source_unix_ms=0 if changes else time.time_ns() // 1_000_000,
            spans=tuple(spans),
            reached=("", 0) if changes else (self._database, self._number),
        )
        request = pb.Request(topology_version=self.topology_version, relay=relay_to_pb(relay))
        answer = await self._session.ask(request, _TIMEOUT_SECONDS)
        self.relays += 1
        self._wanted = [span_from_pb(span) for span in answer.relayed.wanted]
        self.wanted += len(self._wanted)


class StubFollower:
    """A follower that gives a client its documents, and the next one a moment later. A `RequestHandler`."""

    def __init__(
        self, document: pb.TopologyDocument, following: pb.TopologyDocument, schema: pb.SchemaDocument
    ) -> None:
        self._document: Final = document
        self._following: Final = following
        self._schema: Final = schema

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """See `tao.wire.session.RequestHandler`."""
        match request.WhichOneof("body"):
            case "get_topology":
                reply.send(pb.Answer(topology=self._document))
            case "get_schema":
                reply.send(pb.Answer(schema=self._schema))
            case "watch":
                event = pb.Answer(more=True, watch=pb.WatchEvent(topology=self._following))
                asyncio.get_running_loop().call_later(_NEXT_SECONDS, reply.send, event)
            case _:
                reply.send(pb.Answer(read=pb.ReadAnswer()))


async def open_subscribers(
    address: str, shards: Mapping[str, Sequence[int]], at_once: int = 50
) -> tuple[list[StubSubscriber], list[Session]]:
    """Connect the subscribers, some at a time. Raises `TaoError`."""
    subscribers = [StubSubscriber(name, of) for name, of in shards.items()]
    sessions: list[Session] = []
    for first in range(0, len(subscribers), at_once):
        sessions += await together(map(partial(StubSubscriber.open, address=address), subscribers[first:][:at_once]))
    return subscribers, sessions
