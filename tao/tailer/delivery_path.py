"""Messages to the region's leaders: in order per shard, at least once, acknowledged, bounded (DESIGN.md §7).

Each leader has a lane with one relay under way at a time, which takes along everything that has gathered meanwhile:
order needs no care, a repetition concerns one relay, and the more there is to tell the more a relay holds. While a
shard has something unacknowledged it stays in its lane; when its leader is away or not the shard's any more, what is
left of the lane is routed anew, whole shards at a time.

A transaction is behind us when all its parts, and those of all transactions before it, are acknowledged.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol

from tao.model.errors import InvalidArgument, NotMine, RequestError, TaoError, TopologyError
from tao.model.relay import Relay
from tao.model.topology import CacheServer
from tao.observability.logs import Logger
from tao.peers.links import Links
from tao.planning.row_events import Translated
from tao.routing.routes import Routes
from tao.tailer.relay_parts import Part, Receipt, contents_of, proof, relay_of
from tao.tailer.settings import DeliverySettings
from tao.wire.convert import relay_to_pb
from tao.wire.v1 import session_pb2 as pb

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class LeaderPort(Protocol):
    """The way to leaders."""

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> None:
        """Returns when the leader has applied and passed on the whole relay. Raises `NotMine` when a shard of it is
        not that leader's, and then, or with any other `TaoError`, it has to be sent again."""


class LinkedLeaders:
    """`LeaderPort` over links."""

    def __init__(self, links: Links, topology_version: Callable[[], int]) -> None:
        self._links: Final = links
        self._topology_version: Final = topology_version

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> None:
        """See `LeaderPort`."""
        request = pb.Request(topology_version=self._topology_version(), relay=relay_to_pb(relay))
        await self._links.to(leader).ask(request, timeout_seconds)


class _Lane:
    """What one leader has to be told. ``running``: a task sends."""

    __slots__ = ("leader", "parts", "running")

    def __init__(self, leader: str) -> None:
        self.leader: Final = leader
        self.parts: deque[Part] = deque()
        self.running = False


class DeliveryPath:
    """All lanes. One task submits; ``acknowledged`` is called with the GTIDs that are behind us, in their order."""

    def __init__(
        self,
        region: str,
        database: str,
        routes: Callable[[], Routes],
        refresh_routes: Callable[[], Awaitable[None]],
        leaders: LeaderPort,
        acknowledged: Callable[[str], None],
        spawn: Spawn,
        settings: DeliverySettings,
        log: Logger,
    ) -> None:
        self._region: Final = region
        self._database: Final = database
        self._routes: Final = routes
        self._refresh_routes: Final = refresh_routes
        self._leaders: Final = leaders
        self._acknowledged: Final = acknowledged
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._log: Final = log
        self._lanes: Final[dict[str, _Lane]] = {}
        self._lane_of: Final[
            dict[int, tuple[_Lane, int]]
        ] = {}  # of shards with parts unacknowledged, with their number
        self._receipts: Final[deque[Receipt]] = deque()
        self._progress: Final = asyncio.Event()
        self.unacknowledged_bytes = 0
        """Estimated, of all lanes."""
        self.relays = 0
        """Relays acknowledged."""
        self.repeated = 0
        """Relays that failed and were sent again."""
        self.refused = 0
        """Relays that a leader would not take for what they held; their shards were made void instead."""
        self.unrouted = 0
        """Parts of shards that the topology does not know: another system's in the same server."""

    async def submit(self, gtid: str, translated: Translated, proven_unix_ms: int = 0) -> None:
        """Queue what one transaction means, once there is room. ``proven_unix_ms``: all commits up to then have been
        submitted; every leader of the region is told."""
        while self.unacknowledged_bytes >= self._settings.unacknowledged_bytes:
            self._progress.clear()
            await self._progress.wait()
        receipt = Receipt(gtid, 0)
        self._receipts.append(receipt)
        for shard, content, size in contents_of(translated, self._settings):
            self._queue(Part(receipt, shard, content, size))
        if proven_unix_ms:
            for leader in self._routes().leaders(self._region).servers:
                self._add(self._lane(leader.name), proof(receipt, proven_unix_ms))
        if not receipt.unacknowledged:
            self._settle()

    async def drained(self) -> None:
        """Return when everything submitted is acknowledged."""
        while self._receipts:
            self._progress.clear()
            await self._progress.wait()

    def _queue(self, part: Part) -> None:
        lane, unacknowledged = self._lane_of.get(part.shard, (None, 0))
        if lane is None:
            try:
                lane = self._lane(self._routes().leaders(self._region).home(part.shard).name)
            except InvalidArgument:
                self.unrouted += 1
                return
        self._lane_of[part.shard] = (lane, unacknowledged + 1)
        self._add(lane, part)

    def _lane(self, leader: str) -> _Lane:
        lane = self._lanes.get(leader)
        if lane is None:
            lane = self._lanes[leader] = _Lane(leader)
        return lane

    def _add(self, lane: _Lane, part: Part) -> None:
        part.receipt.unacknowledged += 1
        self.unacknowledged_bytes += part.size_bytes
        lane.parts.append(part)
        self._start(lane)

    def _start(self, lane: _Lane) -> None:
        if not lane.running:
            lane.running = True
            self._spawn(self._run(lane))

    async def _run(self, lane: _Lane) -> None:
        failures = 0
        try:
            while lane.parts:
                parts = self._next(lane)
                try:
                    await self._send(lane.leader, relay_of(parts, self._database))
                except TaoError as error:
                    failures += 1
                    self.repeated += 1
                    if failures == 1:
                        self._log.warning("relay_failed", leader=lane.leader, reason=error.message, kind=error.reason)
                    if isinstance(error, RequestError) and not _is_void(parts):
                        self._make_void(lane, parts, error)
                        continue
                    await self._pause(failures, error)
                    self._route_anew(lane)
                    continue
                failures = 0
                self.relays += 1
                self._take_off(lane, parts)
        finally:
            lane.running = False

    async def _send(self, leader: str, relay: Relay) -> None:
        try:
            server = self._routes().server(leader)
        except TopologyError as error:
            raise NotMine(error.message) from error
        await self._leaders.relay(server, relay, self._settings.timeout_seconds)

    def _next(self, lane: _Lane) -> list[Part]:
        """As much of the lane as one relay holds."""
        taken: list[Part] = []
        size = 0
        for part in lane.parts:
            size += part.size_bytes
            if taken and (size > self._settings.relay_bytes or len(taken) >= self._settings.relay_parts):
                break
            taken.append(part)
        return taken

    def _take_off(self, lane: _Lane, parts: list[Part]) -> None:
        """The first parts of the lane are acknowledged."""
        for part in parts:
            lane.parts.popleft()
            self.unacknowledged_bytes -= part.size_bytes
            part.receipt.unacknowledged -= 1
            if part.content is not None:
                _, unacknowledged = self._lane_of[part.shard]
                if unacknowledged == 1:
                    del self._lane_of[part.shard]
                else:
                    self._lane_of[part.shard] = (lane, unacknowledged - 1)
        self._settle()

    def _settle(self) -> None:
        receipts = self._receipts
        while receipts and not receipts[0].unacknowledged:
            gtid = receipts.popleft().gtid
            if gtid:
                self._acknowledged(gtid)
        self._progress.set()

    async def _pause(self, failures: int, error: TaoError) -> None:
        settings = self._settings
        longest = min(settings.backoff_max_seconds, settings.backoff_first_seconds * 2 ** min(failures - 1, 16))
        await asyncio.sleep(longest * random.uniform(0.5, 1.0))
        if isinstance(error, NotMine):
            try:
                await self._refresh_routes()
            except TaoError as unusable:
                self._log.error("topology_unusable", reason=unusable.message)

    def _route_anew(self, lane: _Lane) -> None:
        """Move the shards that are another leader's now, with all that is unacknowledged of them, in their order."""
        leaders = self._routes().leaders(self._region)
        names = {server.name for server in leaders.servers}
        parts = list(lane.parts)
        lane.parts.clear()
        for part in parts:
            if part.content is None:
                # A time is proved to whoever is a leader; one that is gone needs no proof.
                home = lane if lane.leader in names else None
            else:
                home = self._lane(leaders.home(part.shard).name)
                self._lane_of[part.shard] = (home, self._lane_of[part.shard][1])
            if home is None:
                self.unacknowledged_bytes -= part.size_bytes
                part.receipt.unacknowledged -= 1
                continue
            home.parts.append(part)
            if home is not lane:
                self._start(home)
        if lane.leader not in names and not lane.parts:
            self._lanes.pop(lane.leader, None)
        self._settle()

    def _make_void(self, lane: _Lane, parts: list[Part], error: TaoError) -> None:
        """What a leader refuses for its content it will always refuse: say less, but say something."""
        self.refused += 1
        self._log.error("relay_refused", leader=lane.leader, reason=error.message, parts=len(parts))
        for part in parts:
            if part.content is not None:
                part.content = part.shard


def _is_void(parts: list[Part]) -> bool:
    return all(part.content is None or isinstance(part.content, int) for part in parts)
