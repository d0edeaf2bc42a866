"""Delivery of maintenance messages to the region's leaders: in order per shard, at least once, acknowledged, bounded.

Each leader has an outbox with one relay under way at a time. The next relay takes along everything that was queued
meanwhile, so order needs no extra care, a retry concerns one relay, and relays grow under load. While a shard has
unacknowledged parts it stays in its outbox. When the outbox's leader is away or no longer leads the shard, the
remaining parts are routed again, whole shards at a time. Messages that a leader of this region published when it
committed wait a moment for more of their kind.

What the leader may have committed itself is queued undecoded, and a relay only names it. It is decoded when the leader
is missing it, and before it is replaced by an invalidation, since it may be a touch.

One leader or shard that accepts nothing, or too little, delays no other. A shard that is not accepted is sent alone.
Each outbox is bounded, and all of them together: messages for a leader that is away or slow are replaced by bulk
invalidations when they reach a bound. Touches count against the common bound alone, and are kept while anybody accepts
them. Reading waits only for leaders that are about to make room.

A transaction is finished when all its parts, and those of all transactions before it, are acknowledged.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

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
from tao.model.relay import Relay, Relayed
from tao.model.topology import CacheServer
from tao.observability.logs import Logger
from tao.planning.row_events import Translated
from tao.routing.budgets import RetryBudget
from tao.routing.routes import Routes, TierRoutes
from tao.serving.configuration import Spawn
from tao.tailer.binlog import UndecodedRows
from tao.tailer.continuity import Continuity
from tao.tailer.leader_outbox import (
    Content,
    LeaderOutbox,
    Part,
    Receipts,
    contents_of,
    decoded_parts,
    head_of,
    is_minimal,
    is_proof,
    is_undecoded,
    proof,
    relay_of,
)
from tao.tailer.settings import OutboxSettings
from tao.wire.convert import relay_to_pb, relayed_from_pb
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class RelayScope:
    """The database whose changes are relayed, and the region whose leaders receive them."""

    region: str
    database: str
    routes: Callable[[], Routes]
    """Returns the current routes."""
    refresh_routes: Callable[[], Awaitable[None]]
    """Reads the topology again; raises `TaoError` when it cannot be used."""


class LeaderPort(Protocol):
    """Sends relays to leaders."""

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Relayed:
        """Send a relay; return once the leader has applied and published all of it, or has answered what it is missing.

        Raises `NotMine` when a shard is not that leader's. After any `TaoError` the relay has to be sent again."""


class LinkedLeaders:
    """`LeaderPort` over links."""

    def __init__(self, links: Links, topology_version: Callable[[], int]) -> None:
        self._links: Final = links
        self._topology_version: Final = topology_version

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Relayed:
        """See `LeaderPort`."""
        request, content = pb.Request(topology_version=self._topology_version()), relay_to_pb(relay)
        if relay.references:
            request.relay_by_reference.CopyFrom(content)
        else:
            request.relay.CopyFrom(content)
        answer = await self._links.to(leader).ask(request, timeout_seconds)
        return relayed_from_pb(answer.relayed)


async def _decode_nothing(undecoded: Sequence[UndecodedRows]) -> Sequence[Translated]:
    raise InternalError(f"{len(undecoded)} parts are undecoded, and nothing here decodes them")


class DeliveryPath:
    """The outboxes of all leaders of the region, and the receipts of the transactions in them.

    Only one task may call `submit`."""

    def __init__(
        self,
        scope: RelayScope,
        leaders: LeaderPort,
        continuity: Continuity,
        acknowledged: Callable[[str], None],
        spawn: Spawn,
        settings: OutboxSettings,
        log: Logger,
    ) -> None:
        """``acknowledged`` is called with the GTID of each finished transaction, in order."""
        self._scope: Final = scope
        self._routes: Final = scope.routes
        self._leaders: Final = leaders
        self._continuity: Final = continuity
        self._acknowledged: Final = acknowledged
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._budget: Final = RetryBudget(settings.retries, 0.0)
        self._log: Final = log
        self._outboxes: Final[dict[str, LeaderOutbox]] = {}
        # Shard with unacknowledged parts → the outbox that holds them, and their number.
        self._outbox_of: Final[dict[int, tuple[LeaderOutbox, int]]] = {}
        self._receipts: Final = Receipts()
        self._progress: Final = asyncio.Event()
        self.on_wanted: Callable[[Iterable[Span]], None] = lambda _: None
        """Called with the shards about which a leader asked when it acknowledged a relay."""
        self.on_asking: Callable[[bool], None] = lambda _: None
        """Called after each answer with whether any leader is asked now for messages of its own. While none is, rows
        are better decoded at once."""
        self.decode: Callable[[Sequence[UndecodedRows]], Awaitable[Sequence[Translated]]] = _decode_nothing
        """Decodes and translates rows, each a shard's of one transaction."""
        self.unacknowledged_bytes = 0
        """Estimated size of all unacknowledged parts."""
        self.acknowledged_relays = 0
        """Relays acknowledged."""
        self.references = {"entered": 0, "missing": 0}
        """Transactions of a shard that were relayed without their messages, and whether the leader had them."""
        self.retried_relays = 0
        """Relays that failed and were sent again."""
        self.rejected_relays = 0
        """Relays that a leader rejected for their content; their shards were invalidated instead."""
        self.dropped_parts = 0
        """Parts replaced by bulk invalidations, because memory was needed while their leader did not take them."""
        self.collapses = {"away": 0, "slow": 0, "shard": 0}
        """How often an outbox reached a bound, and its parts were replaced by bulk invalidations: its leader was away,
        or slow, or did not accept some shards."""
        self.unrouted_parts = 0
        """Parts of shards that the topology does not have: another system uses the same database server."""

    async def submit(
        self, gtid: str, translated: Translated, proven_unix_ms: int = 0, undecoded: Sequence[UndecodedRows] = ()
    ) -> None:
        """Queue the messages of one transaction, or its ``undecoded`` rows, once there is room.

        It waits for a leader only if that leader is about to make room (`OutboxSettings.slow_seconds`).
        ``proven_unix_ms``: all commits up to then have been submitted, which is sent to every leader of the region.
        Raises `TopologyError`, with nothing queued."""
        while full := self._full():
            await self._decode_stuck(full)
            if self._make_room(full):
                break
            await self._wait_for_room(full)
        leaders = self._routes().leaders(self._scope.region)
        receipt = self._receipts.begin([gtid] if gtid else [])
        contents = list(contents_of(translated, self._settings, undecoded))
        spans = self._continuity.spans_of(gtid, [shard for shard, _, _ in contents])
        deferrable = self._is_published_already(gtid, translated)
        for (shard, content, size), span in zip(contents, spans, strict=True):
            self._queue(Part(receipt, shard, content, size, span), leaders, deferrable=deferrable)
        if proven_unix_ms:
            reached = self._continuity.proven(gtid)
            for leader in leaders.up:
                self._add(self._outbox(leader.name), proof(receipt, proven_unix_ms, reached))
        if not receipt.unacknowledged:
            self._receipts.finished += 1
        self._settle()

    def resend(self, parts: Iterable[tuple[Content, int, Span]]) -> None:
        """Queue contents that were sent before, with their sizes in bytes, for the present leaders of their shards."""
        leaders = self._routes().leaders(self._scope.region)
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

    def leader_bytes(self) -> dict[str, float]:
        """Return the estimated size of the unacknowledged parts of each leader."""
        return {outbox.leader: outbox.bytes for outbox in self._outboxes.values()}

    def begin(self, position: str) -> None:
        """Begin at a position: everything that follows it will be submitted from now on."""
        self._continuity.begin(position)

    def forget_gtids(self) -> None:
        """Deliver what has been submitted so far without reporting it as finished: the position was lost."""
        self._receipts.forget_gtids()

    def _is_published_already(self, gtid: str, translated: Translated) -> bool:
        """Return whether leaders of this region have made the transaction, and published it when they committed: its
        rows have versions and the master is in this region."""
        return bool(gtid) and not (translated.touches or translated.bulk_shards) and self._is_mastered_here()

    def _is_mastered_here(self) -> bool:
        scope, databases = self._scope, self._routes().topology.databases
        return any(each.name == scope.database and each.master_region == scope.region for each in databases)

    def _asks_any_leader(self) -> bool:
        now = self._time()
        return any(outbox.asks(now) for outbox in self._outboxes.values()) and self._is_mastered_here()

    # ---- queues ----------------------------------------------------------------------------------------------------

    def _queue(self, part: Part, leaders: TierRoutes, *, deferrable: bool = False) -> None:
        outbox, unacknowledged = self._outbox_of.get(part.shard, (None, 0))
        if outbox is None:
            try:
                outbox = self._outbox(leaders.home(part.shard).name)
            except InvalidArgument:
                self.unrouted_parts += 1
                return
        self._outbox_of[part.shard] = (outbox, unacknowledged + 1)
        self._add(outbox, part, deferrable=deferrable and outbox.bytes < self._settings.relay_bytes)

    def _outbox(self, leader: str) -> LeaderOutbox:
        outbox = self._outboxes.get(leader)
        if outbox is None:
            outbox = self._outboxes[leader] = LeaderOutbox(leader)
        return outbox

    def _add(self, outbox: LeaderOutbox, part: Part, *, deferrable: bool = False) -> None:
        part.receipt.unacknowledged += 1
        self.unacknowledged_bytes += part.size_bytes
        self._put(outbox, part, deferrable=deferrable)

    def _put(self, outbox: LeaderOutbox, part: Part, *, deferrable: bool = False) -> None:
        replaced = outbox.add(part, deferrable=deferrable)
        if replaced is not None:
            self._finish(replaced)
        if not outbox.running and not outbox.may_pause(self._settings):
            self._start(outbox)
        elif not outbox.running and outbox.timer is None:
            self._start_later(outbox)

    def _start_later(self, outbox: LeaderOutbox) -> None:
        loop = asyncio.get_running_loop()
        outbox.timer = loop.call_later(self._settings.gather_seconds, self._start_by_timer, outbox)

    def _start_by_timer(self, outbox: LeaderOutbox) -> None:
        with suppress(Overloaded):  # the tailer is closing
            self._start(outbox)

    def _start(self, outbox: LeaderOutbox) -> None:
        if outbox.timer is not None:
            outbox.timer.cancel()
            outbox.timer = None
        self._spawn(self._run(outbox))
        outbox.running = True

    def _full(self) -> list[LeaderOutbox]:
        """Return the outboxes in which nothing may be queued: those that have reached their bound, or all of them when
        they have reached the common one."""
        if self.unacknowledged_bytes >= self._settings.unacknowledged_bytes:
            return list(self._outboxes.values())
        return [each for each in self._outboxes.values() if each.waiting_bytes >= self._settings.leader_bytes]

    def _make_room(self, full: Iterable[LeaderOutbox]) -> bool:
        """Replace parts that cannot be sent, or not soon, by bulk invalidations. Returns whether there is room now."""
        with_touches = self.unacknowledged_bytes >= self._settings.unacknowledged_bytes
        for outbox in full:
            is_slow = self._is_slow(outbox)
            if not (outbox.failures or outbox.rejected or is_slow):
                continue
            dropped, freed_bytes = outbox.collapse(is_slow=is_slow, with_touches=with_touches)
            self.unacknowledged_bytes -= freed_bytes
            for part in dropped:
                self._finish(part)
            self.dropped_parts += len(dropped)
            if dropped or freed_bytes:
                cause = "away" if outbox.failures else "slow" if is_slow else "shard"
                self.collapses[cause] += 1
                if outbox.collapsed != cause:
                    outbox.collapsed = cause
                    self._log.warning("shards_invalidated_for_memory", leader=outbox.leader, cause=cause)
        self._settle()
        return not self._full()

    def _is_slow(self, outbox: LeaderOutbox) -> bool:
        return outbox.waiting_bytes > 0 and self._time() >= outbox.slow_at(self._settings)

    async def _decode_stuck(self, full: Iterable[LeaderOutbox]) -> None:
        """Decode what waits for leaders that do not take it soon. An invalidation may then stand for the messages, and
        not for the touches that may be among them. A relay's size at a time: decoded rows take more memory."""
        for outbox in full:
            while outbox.failures or outbox.rejected or self._is_slow(outbox):
                async with outbox.decoding:
                    parts = outbox.waiting_undecoded(self._settings.relay_bytes)
                    if not parts:
                        break
                    decoded = await self._decoded(parts)
                    for queue in (outbox.parts, *outbox.held.values()):
                        first = outbox.sending_count if queue is outbox.sending else 0
                        self._put_in_place(outbox, queue, decoded, first)

    async def _decoded(self, parts: Sequence[Part]) -> dict[int, list[Part]]:
        """Return the parts to put in place of undecoded ones, by the ``id`` of those."""
        if not parts:
            return {}
        translated = await self.decode([part.content for part in parts if isinstance(part.content, UndecodedRows)])
        return {
            id(part): decoded_parts(part, each, self._settings) for part, each in zip(parts, translated, strict=True)
        }

    def _put_in_place(
        self, outbox: LeaderOutbox, queue: deque[Part], decoded: dict[int, list[Part]], first: int = 0
    ) -> None:
        for part in outbox.put_in_place(queue, decoded, first=first) if decoded else ():
            instead = decoded[id(part)]
            part.receipt.unacknowledged += len(instead) - 1
            self.unacknowledged_bytes += sum(each.size_bytes for each in instead) - part.size_bytes
            held_by, unacknowledged = self._outbox_of[part.shard]
            self._outbox_of[part.shard] = (held_by, unacknowledged + len(instead) - 1)

    async def _wait_for_room(self, full: Iterable[LeaderOutbox]) -> None:
        """Return when a leader has acknowledged or failed, or one of those with ``full`` outboxes counts as slow."""
        self._progress.clear()
        now = self._time()
        slow_at = min((at for outbox in full if (at := outbox.slow_at(self._settings)) > now), default=inf)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(None if slow_at == inf else slow_at):
                await self._progress.wait()

    def _finish(self, part: Part) -> None:
        """Count off a part that is in no queue any more: it is acknowledged, or need not be."""
        self.unacknowledged_bytes -= part.size_bytes
        part.receipt.unacknowledged -= 1
        if not part.receipt.unacknowledged:
            self._receipts.finished += 1
        if not is_proof(part):
            outbox, unacknowledged = self._outbox_of[part.shard]
            if unacknowledged == 1:
                del self._outbox_of[part.shard]
            else:
                self._outbox_of[part.shard] = (outbox, unacknowledged - 1)

    def _settle(self) -> None:
        """Report the transactions that are finished by now."""
        for gtid in self._receipts.settle():
            self._acknowledged(gtid)
        self._progress.set()

    # ---- sending ---------------------------------------------------------------------------------------------------

    async def _run(self, outbox: LeaderOutbox) -> None:
        try:
            outbox.urgent_parts = len(outbox.parts)  # deferred parts have waited long enough
            while not outbox.may_pause(self._settings):
                try:
                    await self._advance(outbox)
                except Exception as error:  # noqa: BLE001 - if this task ended, its shards would silently get nothing
                    outbox.failures += 1
                    self._report_failure(outbox, error)
                    await asyncio.sleep(self._backoff_seconds(outbox.failures))
            if not outbox.empty:
                self._start_later(outbox)
        finally:
            outbox.running = False
            outbox.relay_seconds, outbox.collapsed = 0.0, ""

    async def _advance(self, outbox: LeaderOutbox) -> None:
        """Send one relay, or try the held shards once. Raises errors that concern the leader as a whole."""
        if outbox.failures or outbox.topology_version != self._routes().version:
            self._reroute(outbox)
        wait_seconds = outbox.retry_at - self._time()
        if outbox.held and wait_seconds <= 0:
            await self._retry_held(outbox)
        elif outbox.parts:
            await self._send_head(outbox, outbox.parts)
        elif outbox.held:
            outbox.woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await outbox.woken.wait()

    async def _retry_held(self, outbox: LeaderOutbox) -> None:
        """Read the topology again, then send each held shard alone."""
        try:
            await self._scope.refresh_routes()
        except TaoError as error:
            self._log.error("topology_unusable", reason=error.message)
        self._reroute(outbox)
        for shard in list(outbox.held):
            if await self._send_head(outbox, outbox.held[shard]):
                outbox.release(shard)
        if outbox.held:
            outbox.held_attempts += 1
            outbox.retry_at = self._time() + self._backoff_seconds(outbox.held_attempts)

    async def _send_head(self, outbox: LeaderOutbox, queue: deque[Part]) -> bool:
        """Send the first parts of a queue. Returns whether the leader accepted them.

        Parts that were not accepted are held, or reduced to invalidations and sent again. Raises errors that are caused
        neither by the content nor by its shards."""
        parts: list[Part] = []
        try:
            while True:
                parts = await self._begin_relay(outbox, queue)
                relay = relay_of(parts, self._scope.database)
                if relay.source_unix_ms and self._has_parts_elsewhere(outbox):
                    relay = msgspec.structs.replace(relay, source_unix_ms=0)
                relayed = await self._send(outbox.leader, relay)
                outbox.take_answer(relay, relayed, self._time())
                self.on_asking(self._asks_any_leader())
                if not relayed.missing:
                    break
                if not relay.references:
                    raise ProtocolError(f"{outbox.leader} is missing what a relay without references contains")
                await self._decode_missing(outbox, queue, parts, relayed)
        except (RequestError, NotMine, ShardBlocked, InternalError, ProtocolError) as error:
            shards = {part.shard for part in parts if not is_proof(part)}
            if not shards:
                raise
            if any(map(is_undecoded, parts)) and not isinstance(error, NotMine | ShardBlocked):
                # A leader of a former version does not serve such relays.
                outbox.takes_references = False
                self.on_asking(self._asks_any_leader())
                self._report_failure(outbox, error)
                return False
            outbox.failures = 0
            self._handle_rejection(outbox, parts, shards, error)
            self._report_failure(outbox, error)
            return False
        finally:
            outbox.end_relay()
        outbox.failures = 0
        self._budget.earn()
        self.acknowledged_relays += 1
        for part in outbox.take_acknowledged(queue, len(parts), self._time()):
            self.references["entered"] += is_undecoded(part)
            self._continuity.acknowledge(part.span)
            self._finish(part)
        self._settle()
        self.on_wanted(relayed.wanted)
        return True

    async def _begin_relay(self, outbox: LeaderOutbox, queue: deque[Part]) -> list[Part]:
        """Return the first parts of a queue, which are under way from now on. They are decoded for a leader that has
        committed nothing here."""
        while True:
            async with outbox.decoding:  # else `_decode_stuck` may be decoding these parts
                parts = head_of(queue, self._settings)
                outbox.begin_relay(queue, parts, self._time())
            asks = outbox.asks(self._time()) and self._is_mastered_here()
            undecoded = [part for part in parts if is_undecoded(part) and not (asks and part.span.source)]
            if not undecoded:
                return parts
            self._put_in_place(outbox, queue, await self._decoded(undecoded))

    async def _decode_missing(
        self, outbox: LeaderOutbox, queue: deque[Part], parts: Sequence[Part], relayed: Relayed
    ) -> None:
        """Decode what the leader does not have; everything, if it names nothing that was sent."""
        missing = {(each.shard, each.source, number) for each in relayed.missing for number in each.numbers}
        undecoded = [part for part in parts if is_undecoded(part)]
        named = [part for part in undecoded if (part.shard, part.span.source, part.span.number) in missing]
        self.references["missing"] += len(named)
        self._put_in_place(outbox, queue, await self._decoded(named or undecoded))

    async def _send(self, leader: str, relay: Relay) -> Relayed:
        try:
            server = self._routes().server(leader)
        except TopologyError as error:
            raise NotMine(error.message) from error
        try:
            return await self._leaders.relay(server, relay, self._settings.timeout_seconds)
        except TaoError:
            raise
        except Exception as error:  # an encoder failed, so the cause is in the relay's content
            self._log.exception("relay_not_sent", leader=leader)
            raise InternalError(f"a relay could not be sent: {error!r}") from error

    def _has_parts_elsewhere(self, outbox: LeaderOutbox) -> bool:
        """Return whether a shard that this leader leads by now still has parts in the outbox of its former leader. Then
        this relay proves no time; the next heartbeat may."""
        leaders = self._routes().leaders(self._scope.region)
        for shard, (other, _) in self._outbox_of.items():
            with suppress(InvalidArgument):
                if other is not outbox and leaders.home(shard).name == outbox.leader:
                    return True
        return False

    # ---- failures --------------------------------------------------------------------------------------------------

    def _handle_rejection(self, outbox: LeaderOutbox, parts: list[Part], shards: set[int], error: TaoError) -> None:
        """Reduce the rejected parts, or hold their shards: sending each shard alone shows which one is the cause."""
        alone = shards <= outbox.held.keys()
        faulty = isinstance(error, InternalError | ProtocolError)
        if not is_minimal(parts) and (isinstance(error, RequestError) or (faulty and alone)):
            self._reduce(outbox, parts, error)
        elif alone:
            outbox.rejected.update(shards)
        else:
            if not outbox.held:
                outbox.held_attempts = 1
                outbox.retry_at = self._time() + self._backoff_seconds(1)
            for replaced in outbox.hold(shards):
                self._finish(replaced)
            self._settle()

    def _reduce(self, outbox: LeaderOutbox, parts: list[Part], error: TaoError) -> None:
        """Replace parts by bulk invalidations: a leader that rejects their content will always reject it."""
        self.rejected_relays += 1
        self._log.error("relay_rejected", leader=outbox.leader, reason=error.message, parts=len(parts))
        outbox.reduce(parts)

    def _report_failure(self, outbox: LeaderOutbox, error: Exception) -> None:
        self.retried_relays += 1
        if not isinstance(error, TaoError):
            self._log.exception("outbox_failed", leader=outbox.leader)
        elif outbox.failures <= 1 and outbox.held_attempts <= 1:
            self._log.warning("relay_failed", leader=outbox.leader, reason=error.message, kind=error.reason)
        self._progress.set()  # a `submit` that waits for room can make room in this outbox now

    def _backoff_seconds(self, failures: int) -> float:
        settings = self._settings
        longest = settings.backoff_max_seconds
        if self._budget.spend(self._time()):
            longest = min(longest, settings.backoff_first_seconds * 2 ** min(failures - 1, 16))
        return float(longest * random.uniform(0.5, 1.0))

    def _time(self) -> float:
        return asyncio.get_running_loop().time()

    def _reroute(self, outbox: LeaderOutbox) -> None:
        """Move the shards that another leader leads now, with all their unacknowledged parts in their order."""
        outbox.topology_version = self._routes().version
        leaders = self._routes().leaders(self._scope.region)
        held, rejected = set(outbox.held), set(outbox.rejected)
        parts = outbox.take_all()
        stays = outbox.leader in {server.name for server in leaders.up}
        for part in parts:
            home = self._home_of(part, outbox if stays else None, leaders)
            if home is None:
                self._finish(part)
                continue
            if home is outbox and part.shard in held:
                outbox.held.setdefault(part.shard, deque())
                if part.shard in rejected:
                    outbox.rejected.add(part.shard)
            if not is_proof(part):
                self._outbox_of[part.shard] = (home, self._outbox_of[part.shard][1])
                if home is not outbox:
                    home.invalidate_proofs()  # the proofs that wait there do not cover this part
            self._put(home, part)
        if not stays and outbox.empty:
            self._outboxes.pop(outbox.leader, None)
        self._settle()

    def _home_of(self, part: Part, former: LeaderOutbox | None, leaders: TierRoutes) -> LeaderOutbox | None:
        """Return the outbox to which a part belongs now. None: the part is not needed.

        A proof stays in the ``former`` outbox; it is dropped if that outbox's leader is gone (None)."""
        if is_proof(part):
            return former
        try:
            return self._outbox(leaders.home(part.shard).name)
        except InvalidArgument:
            self.unrouted_parts += 1
            return None
