"""Messages to the region's leaders: in order per shard, at least once, acknowledged, bounded (DESIGN.md §7).

Each leader has a lane with one relay under way at a time, which takes along everything that has gathered meanwhile:
order needs no care, a repetition concerns one relay, and the more there is to tell the more a relay holds. While a
shard has something unacknowledged it stays in its lane; when its leader is away or not the shard's any more, what is
left of the lane is routed anew, whole shards at a time. One leader or shard that takes nothing holds up no other: a
shard that is not accepted is tried alone, and when memory is used up, what could not be told gives way to bulk
invalidation. What a leader of this region has told when it committed waits a moment for more of its kind.

A transaction is behind us when all its parts, and those of all transactions before it, are acknowledged.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec

from tao.model.delivery import Span
from tao.model.errors import (
    InternalError,
    InvalidArgument,
    NotMine,
    Overloaded,
    ProtocolError,
    RequestError,
    ShardBlocked,
    TaoError,
    TopologyError,
)
from tao.model.relay import Relay
from tao.observability.logs import Logger
from tao.planning.row_events import Translated
from tao.routing.retry_budget import RetryBudget
from tao.routing.routes import Routes, TierRoutes
from tao.tailer.continuity import Continuity
from tao.tailer.lane import Lane, head_of
from tao.tailer.leaders import LeaderPort
from tao.tailer.relay_parts import Content, Part, Receipts, contents_of, is_proof, is_void, proof, relay_of
from tao.tailer.settings import DeliverySettings

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class DeliveryPath:
    """All lanes. One task submits; ``acknowledged`` is called with the GTIDs that are behind us, in their order."""

    def __init__(
        self,
        region: str,
        database: str,
        routes: Callable[[], Routes],
        refresh_routes: Callable[[], Awaitable[None]],
        leaders: LeaderPort,
        continuity: Continuity,
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
        self._continuity: Final = continuity
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._budget: Final = RetryBudget(settings.retries, 0.0)
        self._log: Final = log
        self._lanes: Final[dict[str, Lane]] = {}
        self._lane_of: Final[dict[int, tuple[Lane, int]]] = {}  # of shards with parts unacknowledged, with their number
        self._receipts: Final = Receipts()
        self._acknowledged: Final = acknowledged
        self._progress: Final = asyncio.Event()
        self.on_wanted: Callable[[Iterable[Span]], None] = lambda _: None
        """Told what a leader that has taken a relay wants to know."""
        self.unacknowledged_bytes = 0
        """Estimated, of all lanes."""
        self.relays = 0
        """Relays acknowledged."""
        self.repeated = 0
        """Relays that failed and were sent again."""
        self.refused = 0
        """Relays that a leader would not take for what they held; their shards were made void instead."""
        self.given_way = 0
        """Parts not told, because the room was needed while their leader did not take them: their shards are void."""
        self.unrouted = 0
        """Parts of shards that the topology does not know: another system's in the same server."""

    async def submit(self, gtid: str, translated: Translated, proven_unix_ms: int = 0) -> None:
        """Queue what one transaction means, once there is room. ``proven_unix_ms``: all commits up to then have been
        submitted; every leader of the region is told. Raises `TopologyError`, with nothing queued."""
        while self.unacknowledged_bytes >= self._settings.unacknowledged_bytes and not self._make_room():
            self._progress.clear()
            await self._progress.wait()
        leaders = self._routes().leaders(self._region)
        receipt = self._receipts.begin([gtid] if gtid else [])
        contents = list(contents_of(translated, self._settings))
        spans = self._continuity.spans_of(gtid, [shard for shard, _, _ in contents])
        patient = self._is_told_already(gtid, translated) and self.unacknowledged_bytes < self._settings.relay_bytes
        for (shard, content, size), span in zip(contents, spans, strict=True):
            self._queue(Part(receipt, shard, content, size, span), leaders, patient=patient)
        if proven_unix_ms:
            reached = self._continuity.proven(gtid)
            for leader in leaders.up:
                self._add(self._lane(leader.name), proof(receipt, proven_unix_ms, reached))
        if not receipt.unacknowledged:
            self._receipts.finished += 1
        self._settle()

    def tell_again(self, parts: Iterable[tuple[Content, int, Span]]) -> None:
        """What was told before, to be told whoever leads its shards by now: contents with their sizes."""
        leaders = self._routes().leaders(self._region)
        receipt = self._receipts.begin([])
        for content, size, span in parts:
            self._queue(Part(receipt, span.shard, content, size, span), leaders)
        if not receipt.unacknowledged:
            self._receipts.finished += 1
        self._settle()

    async def drained(self) -> None:
        """Return when everything submitted is acknowledged."""
        while self._receipts:
            self._progress.clear()
            await self._progress.wait()

    def begin(self, position: str) -> None:
        """What is submitted from now on is all that follows the position."""
        self._continuity.begin(position)

    def forget_gtids(self) -> None:
        """What has been submitted will be told, but counts for no position any more."""
        self._receipts.forget_gtids()

    def _is_told_already(self, gtid: str, translated: Translated) -> bool:
        """Whether it is the leaders' own, and the master is here: they have told it when they committed."""
        routes = self._routes()
        if not gtid or translated.touches or translated.bulk_shards:
            return False
        of_databases = routes.topology.databases
        return any(each.name == self._database and each.master_region == self._region for each in of_databases)

    def _queue(self, part: Part, leaders: TierRoutes, *, patient: bool = False) -> None:
        lane, unacknowledged = self._lane_of.get(part.shard, (None, 0))
        if lane is None:
            try:
                lane = self._lane(leaders.home(part.shard).name)
            except InvalidArgument:
                self.unrouted += 1
                return
        self._lane_of[part.shard] = (lane, unacknowledged + 1)
        self._add(lane, part, patient=patient)

    def _lane(self, leader: str) -> Lane:
        lane = self._lanes.get(leader)
        if lane is None:
            lane = self._lanes[leader] = Lane(leader)
        return lane

    def _add(self, lane: Lane, part: Part, *, patient: bool = False) -> None:
        part.receipt.unacknowledged += 1
        self.unacknowledged_bytes += part.size_bytes
        self._put(lane, part, patient=patient)

    def _put(self, lane: Lane, part: Part, *, patient: bool = False) -> None:
        superfluous = lane.add(part, patient=patient)
        if superfluous is not None:
            self._done(superfluous)
        if not lane.running and not lane.may_rest(self._settings):
            self._start(lane)
        elif not lane.running and lane.timer is None:
            self._rest(lane)

    def _rest(self, lane: Lane) -> None:
        lane.timer = asyncio.get_running_loop().call_later(self._settings.gather_seconds, self._due, lane)

    def _due(self, lane: Lane) -> None:
        with suppress(Overloaded):  # the tailer is closing
            self._start(lane)

    def _start(self, lane: Lane) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        self._spawn(self._run(lane))
        lane.running = True

    def _make_room(self) -> bool:
        """Of what cannot be told, say less. Returns whether there is room then."""
        for lane in self._lanes.values():
            if not (lane.failures or lane.refused):
                continue
            dropped, freed_bytes = lane.collapse()
            self.unacknowledged_bytes -= freed_bytes
            for part in dropped:
                self._done(part)
            self.given_way += len(dropped)
            if freed_bytes:
                self._log.warning("made_void_for_room", leader=lane.leader, dropped=len(dropped))
        self._settle()
        return self.unacknowledged_bytes < self._settings.unacknowledged_bytes

    async def _run(self, lane: Lane) -> None:
        try:
            lane.hurried = len(lane.parts)  # what has waited, waits no more
            while not lane.may_rest(self._settings):
                try:
                    await self._turn(lane)
                except Exception as error:  # noqa: BLE001 - a lane that ended would be silent about its shards
                    lane.failures += 1
                    self._failed(lane, error)
                    await asyncio.sleep(self._backoff_seconds(lane.failures))
            if not lane.empty:
                self._rest(lane)
        finally:
            lane.running = False

    async def _turn(self, lane: Lane) -> None:
        """One relay, or one try of the held shards. Raises what makes the whole lane wait."""
        if lane.failures or lane.routed_by != self._routes().version:
            self._route_anew(lane)
        wait_seconds = lane.retry_at - self._time()
        if lane.held and wait_seconds <= 0:
            await self._retry_held(lane)
        elif lane.parts:
            await self._tell(lane, lane.parts)
        elif lane.held:
            lane.woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await lane.woken.wait()

    async def _retry_held(self, lane: Lane) -> None:
        """Look for new routes, then try each held shard alone."""
        try:
            await self._refresh_routes()
        except TaoError as unusable:
            self._log.error("topology_unusable", reason=unusable.message)
        self._route_anew(lane)
        for shard in list(lane.held):
            if await self._tell(lane, lane.held[shard]):
                lane.release(shard)
        if lane.held:
            lane.held_tries += 1
            lane.retry_at = self._time() + self._backoff_seconds(lane.held_tries)

    async def _tell(self, lane: Lane, queue: deque[Part]) -> bool:
        """Send the head of a queue. Returns whether it was accepted; what was not is held, or says less when it comes
        again. Raises what is not for its content or its shards."""
        parts = head_of(queue, self._settings)
        lane.sending, lane.sending_count = queue, len(parts)
        try:
            relay = relay_of(parts, self._database)
            if relay.source_unix_ms and self._others_owe(lane):
                relay = msgspec.structs.replace(relay, source_unix_ms=0)
            wanted = await self._send(lane.leader, relay)
        except (RequestError, NotMine, ShardBlocked, InternalError, ProtocolError) as error:
            shards = {part.shard for part in parts if not is_proof(part)}
            if not shards:
                raise
            lane.failures = 0
            self._not_accepted(lane, parts, shards, error)
            self._failed(lane, error)
            return False
        finally:
            lane.sending, lane.sending_count = None, 0
        lane.failures = 0
        self._budget.earn()
        self.relays += 1
        lane.hurried -= len(parts) if queue is lane.parts else 0
        for _ in parts:
            part = queue.popleft()
            self._continuity.acknowledged(part.span)
            self._done(part)
        self._settle()
        self.on_wanted(wanted)
        return True

    def _others_owe(self, lane: Lane) -> bool:
        """Whether a shard that is this leader's by now has something left in the lane of its former one: then no time
        is proved yet, and the next heartbeat may."""
        leaders = self._routes().leaders(self._region)
        for shard, (other, _) in self._lane_of.items():
            with suppress(InvalidArgument):
                if other is not lane and leaders.home(shard).name == lane.leader:
                    return True
        return False

    def _not_accepted(self, lane: Lane, parts: list[Part], shards: set[int], error: TaoError) -> None:
        """Of one shard or all: which one the leader means is found by trying each alone."""
        alone = shards <= lane.held.keys()
        faulty = isinstance(error, InternalError | ProtocolError)
        if not is_void(parts) and (isinstance(error, RequestError) or (faulty and alone)):
            self._make_void(lane, parts, error)
        elif alone:
            lane.refused.update(shards)
        else:
            if not lane.held:
                lane.held_tries = 1
                lane.retry_at = self._time() + self._backoff_seconds(1)
            for superfluous in lane.hold(shards):
                self._done(superfluous)
            self._settle()

    async def _send(self, leader: str, relay: Relay) -> Iterable[Span]:
        try:
            server = self._routes().server(leader)
        except TopologyError as error:
            raise NotMine(error.message) from error
        try:
            return await self._leaders.relay(server, relay, self._settings.timeout_seconds)
        except TaoError:
            raise
        except Exception as error:  # an encoder's, which means something that the relay holds
            self._log.exception("relay_not_sent", leader=leader)
            raise InternalError(f"a relay could not be sent: {error!r}") from error

    def _done(self, part: Part) -> None:
        """The part, which is in no queue any more, is acknowledged or need not be."""
        self.unacknowledged_bytes -= part.size_bytes
        part.receipt.unacknowledged -= 1
        if not part.receipt.unacknowledged:
            self._receipts.finished += 1
        if not is_proof(part):
            lane, unacknowledged = self._lane_of[part.shard]
            if unacknowledged == 1:
                del self._lane_of[part.shard]
            else:
                self._lane_of[part.shard] = (lane, unacknowledged - 1)

    def _settle(self) -> None:
        for gtid in self._receipts.settle():
            self._acknowledged(gtid)
        self._progress.set()

    def _failed(self, lane: Lane, error: Exception) -> None:
        self.repeated += 1
        if not isinstance(error, TaoError):
            self._log.exception("lane_failed", leader=lane.leader)
        elif lane.failures <= 1 and lane.held_tries <= 1:
            self._log.warning("relay_failed", leader=lane.leader, reason=error.message, kind=error.reason)
        self._progress.set()  # who waits for room can make it now

    def _backoff_seconds(self, failures: int) -> float:
        settings = self._settings
        longest = settings.backoff_max_seconds
        if self._budget.spend(self._time()):
            longest = min(longest, settings.backoff_first_seconds * 2 ** min(failures - 1, 16))
        return float(longest * random.uniform(0.5, 1.0))

    def _time(self) -> float:
        return asyncio.get_running_loop().time()

    def _route_anew(self, lane: Lane) -> None:
        """Move the shards that are another leader's now, with all that is unacknowledged of them, in their order."""
        lane.routed_by = self._routes().version
        leaders = self._routes().leaders(self._region)
        held, refused = set(lane.held), set(lane.refused)
        parts = lane.take_all()
        stays = lane.leader in {server.name for server in leaders.up}
        for part in parts:
            home = None
            if is_proof(part):
                # A time is proved to whoever is a leader; one that is gone needs no proof.
                home = lane if stays else None
            else:
                try:
                    home = self._lane(leaders.home(part.shard).name)
                except InvalidArgument:
                    self.unrouted += 1
            if home is None:
                self._done(part)
                continue
            if home is lane and part.shard in held:
                lane.held.setdefault(part.shard, deque())
                if part.shard in refused:
                    lane.refused.add(part.shard)
            if not is_proof(part):
                self._lane_of[part.shard] = (home, self._lane_of[part.shard][1])
                if home is not lane:
                    home.disprove()  # what waits there was no proof of what comes after it
            self._put(home, part)
        if not stays and lane.empty:
            self._lanes.pop(lane.leader, None)
        self._settle()

    def _make_void(self, lane: Lane, parts: list[Part], error: TaoError) -> None:
        """What a leader refuses for its content it will always refuse: say less, but say something."""
        self.refused += 1
        self._log.error("relay_refused", leader=lane.leader, reason=error.message, parts=len(parts))
        for part in parts:
            if not is_proof(part):
                part.content = part.shard
