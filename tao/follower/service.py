"""The request handlers of a follower: one for sessions, which serves its own shards, and one for unary calls.

The requests of a session come from a peer that routes (the SDK, another server), so a follower answers NOT_MINE for a
shard that it does not host, and the peer learns. A unary call comes from a stub in any language, whose caller knows one
address and no topology. For it, the follower that was asked does what the SDK would do: it asks the server that hosts
the shard, and the same shard's server in the next tier when that one cannot be reached. It asks in a session, so no
call is relayed twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tao.cache import GraphCache
from tao.follower.counters import Counters
from tao.journal.journal import Journal
from tao.model.changes import ShardInvalidation
from tao.model.errors import (
    DeadlineExceeded,
    NoJournal,
    NotMine,
    Overloaded,
    RetryableError,
    StaleRead,
    TaoError,
    TooLarge,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT
from tao.model.receipts import Receipt
from tao.model.tokens import PendingShard
from tao.model.topology import CacheServer
from tao.routing.budgets import MIN_WORK_SECONDS, work_seconds
from tao.serving.access import OnBehalfOf, caller_of
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import MAX_SETTLED, ForwardPath, WriteThrough
from tao.serving.read_service import ReadService
from tao.serving.requests import CacheService
from tao.serving.shares import WorkShares, sharer_of
from tao.wire.convert import (
    error_from_pb,
    pending_of,
    reached_versions,
    settle_request,
    settle_shards_request,
    shard_messages_from_pb,
)
from tao.wire.identity import SERVER_ROLES, PeerIdentity
from tao.wire.read_batch import BatchQueries, id1s_of, operation_sizes
from tao.wire.session import AnswerAtOnce, Reply, RequestHandler, failure
from tao.wire.v1 import session_pb2 as pb


class FollowerService(CacheService):
    """The `RequestHandler` of a follower's sessions."""

    def __init__(
        self,
        context: ServerContext,
        cache: GraphCache,
        reads: ReadService,
        writes: ForwardPath,
        changes: WriteThrough,
        counters: Counters,
        journal: Journal | None = None,
    ) -> None:
        """``changes`` applies to the cache what a write has changed. ``journal`` accepts writes to be made later."""
        self._counters: Final = counters
        self._cache: Final = cache
        self._reads: Final = reads
        self._changes: Final = changes
        self._writes: Final = writes
        self._journal: Final = journal
        self._clock: Final = context.clock
        self._name: Final = context.name
        super().__init__(
            "follower",
            context,
            cache,
            reads,
            {
                "write": self._write,
                "await_applied": self._await_applied,
                "inspect_journal": self._inspect_journal,
                "change_journal": self._change_journal,
                "keep_copies": self._keep_copies,
                "get_counters": counters.get,
                "apply": self._apply,
                "reserve_ids": writes.reserve_ids,
                "settle_pairs": writes.settle_pairs,
                "invalidate": self._invalidate,
            },
        )

    def answer_at_once(self, request: bytes, peer: PeerIdentity) -> AnswerAtOnce | None:
        """Answer the hits of an application's batch: see `tao.wire.session.AtOnceHandler`. What servers ask, for others
        or for themselves, is handled as usual."""
        if peer.role in SERVER_ROLES:
            return None
        return self._reads.answer_at_once(request, peer.caller, self._configuration.routes.version)

    def _write(self, request: pb.Request, reply: Reply) -> None:
        if request.write.accept:
            self._own_journal().acceptor.accept(request, reply)
        elif self._counters.are_in(request):
            self._counters.write(request, reply)
        else:
            self._writes.handle(request, reply)

    def _await_applied(self, request: pb.Request, reply: Reply) -> None:
        self._own_journal().acceptor.await_applied(request, reply)

    def _inspect_journal(self, request: pb.Request, reply: Reply) -> None:
        self._own_journal().control.inspect(request, reply)

    def _change_journal(self, request: pb.Request, reply: Reply) -> None:
        self._own_journal().control.change(request, reply)

    def _keep_copies(self, request: pb.Request, reply: Reply) -> None:
        self._own_journal().held.keep(request, reply)

    def _own_journal(self) -> Journal:
        if self._journal is None:
            raise NoJournal(
                f"follower {self._name} keeps no journal: set journal.folder in its settings, or make the write at once"
            )
        return self._journal

    def _apply(self, request: pb.Request, reply: Reply) -> None:
        """Apply the changes of a write that another server of this tier has forwarded."""
        for changes in request.apply.changes:
            self._changes.apply_write(self._changes.decode_write(changes))
        reply.send(pb.Answer(applied=pb.Applied()))

    def _invalidate(self, request: pb.Request, reply: Reply) -> None:
        asked = request.invalidate
        otypes, atypes = tuple(asked.otypes), tuple(asked.atypes)
        shards = [shard for shard in asked.shards if self._cache.is_open(shard)]
        with self._cache.recorder.caused_by(f"asked by {reply.peer.name}"):
            for shard in shards:
                invalidation = ShardInvalidation(shard, otypes, atypes)
                epoch = self._cache.version_epoch(shard)
                self._cache.apply(invalidation, epoch, self._clock.monotonic())
        reply.send(pb.Answer(invalidated=pb.Invalidated(shards=len(shards))))


_OPERATIONS_BY_ID: Final = frozenset(
    {"obj_add", "obj_update", "obj_delete", "node_set_state", "add_job", "read_job", "cancel_job", "counter_add"}
)
"""Operations that name one id, where others name the two of an edge."""


@dataclass(frozen=True, slots=True)
class UnarySettings:
    """Attempts and bounds of relayed calls."""

    max_servers_asked: int = 3
    """Most followers asked for one call: the shard's home, its server in the next tier, and one more."""

    first_attempt_share: float = 0.5
    """Share of the time left that a read's first server gets while another one could still answer. A write's server
    gets all of it, because a write that may have reached its server is not repeated."""

    first_pause_seconds: float = 0.02
    """Pause before a call is sent again that a server has refused because it routes by an older topology; it doubles.
    The server reads the newer document meanwhile, in milliseconds."""

    max_pause_seconds: float = 0.16
    """Longest such pause."""

    max_relayed: int = 10_000
    """Most calls under way to other followers, each of which holds a task. More are refused as overload. One caller may
    have at most as many as are free then: half of all while it is alone, a third each beside another that has as many.
    So there is room for one more, however many have all that they may."""


class UnaryPath:
    """The `RequestHandler` of one follower's unary calls."""

    def __init__(
        self,
        context: ServerContext,
        own: RequestHandler,
        admit: Callable[[pb.Request, PeerIdentity], None],
        shares: WorkShares,
        hosted: Callable[[], frozenset[int]],
        settings: UnarySettings,
    ) -> None:
        """``own`` serves the requests for the shards that this follower hosts, which ``hosted`` returns. ``admit``
        raises for a peer that may not send a request, which ``own`` checks itself. Pairs are settled in ``shares``."""
        self._own: Final = own
        self._name: Final = context.name
        self._admit: Final = admit
        self._shares: Final = shares
        self._region: Final = context.region
        self._tier: Final = context.tier
        self._configuration: Final = context.configuration
        self._links: Final = context.links
        self._clock: Final = context.clock
        self._spawn: Final = context.spawn_as("unary call")
        self._settings: Final = settings
        self._hosted: Final = hosted
        self._under_way: Final = Counter[str]()  # calls by caller

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Serve the call here, or relay it. Raises `Overloaded` when too many calls are being relayed,
        `DeadlineExceeded` when there is too little time to ask another server, and what ``admit`` raises: the servers
        that are asked take the call for this follower's."""
        settles = bool(request.settle_first or request.settle_shards_first)
        candidates = self._candidates(request)
        if settles or candidates:
            self._admit(request, reply.peer)
        if settles:
            self._spawn(self._settle_and_handle(request, reply, self._until(request)))
        else:
            self._serve(request, candidates, reply)

    def _serve(self, request: pb.Request, candidates: tuple[CacheServer, ...], reply: Reply) -> None:
        if not candidates:
            self._own.handle(request, reply)
            return
        caller = sharer_of(request, reply.peer) or ""
        own, free = self._under_way[caller], self._settings.max_relayed - self._under_way.total()
        if own >= free:
            raise Overloaded(
                f"{own} calls of this caller are under way to other followers, and {free} of all are free: a caller "
                "may have no more than that; send less at a time"
            )
        self._spawn(self._relay(request, candidates, reply, self._until(request), caller))

    def _until(self, request: pb.Request) -> float:
        """Return the time until which to work on a request. Raises `DeadlineExceeded`, before a task exists in which
        nobody would report it."""
        return self._clock.monotonic() + work_seconds(request.deadline_ms)

    async def _settle_and_handle(self, request: pb.Request, reply: Reply, until: float) -> None:
        """Have the inverses written that the token names as pending in the list, then read it at the versions that have
        them; from the master where these are not known."""
        task = asyncio.current_task()
        assert task is not None, "run by the spawner, as a task"
        reply.on_close(lambda: _stop(task))
        try:
            behalf = OnBehalfOf.sender(request, reply.peer)
            self._check_list(request, reply.peer, critical=False)
            between = [
                (shard, each.high_shard)
                for each in request.settle_shards_first
                for shard in PendingShard(each.high_shard, each.low_shard).coordinator_shards()
            ]
            writes = len(request.settle_first) + len(between)
            if writes > MAX_SETTLED:
                raise TooLarge(f"the token has {writes} pairs settled before the read; the bound is {MAX_SETTLED}")
            async with self._shares.turn(request, reply.peer, writes, until - self._clock.monotonic()):
                minimum, is_known = await self._settle_all(request, between, until, behalf)
            del request.settle_first[:], request.settle_shards_first[:]
            if is_known:
                minimum = max(minimum, *request.read.minimum_versions, 0)
                del request.read.minimum_slots[:], request.read.minimum_versions[:]
                request.read.minimum_slots.append(0)
                request.read.minimum_versions.append(minimum)
            else:
                self._check_list(request, reply.peer, critical=True)
                request.read.critical = True
            request.deadline_ms = max(1, round((until - self._clock.monotonic()) * 1000))
            self._serve(request, self._candidates(request), reply)
        except TaoError as error:
            reply.send(failure(error))

    async def _settle_all(
        self, request: pb.Request, between: Sequence[tuple[int, int]], until: float, behalf: OnBehalfOf
    ) -> tuple[int, bool]:
        """Have the pairs of a call settled, and those between the shards. Returns the version of the list that has them
        all, and whether it is known."""
        minimum, is_known = 0, not between
        for pending in pending_of(request.settle_first):
            settle = settle_request((pending,), self._configuration.schema)
            left = until - self._clock.monotonic()
            settled = await self._settle(pending.coordinator_id >> SHARD_SHIFT, settle, left, behalf)
            reached = reached_versions(map(shard_messages_from_pb, settled.changes))
            version = reached.get((pending.id1, pending.atype), 0)
            minimum, is_known = max(minimum, version), is_known and version > 0
        left = until - self._clock.monotonic()
        settles = ((low, settle_shards_request(low, high)) for low, high in between)
        await asyncio.gather(*(self._settle(shard, settle, left, behalf) for shard, settle in settles))
        return minimum, is_known

    def _check_list(self, request: pb.Request, peer: PeerIdentity, *, critical: bool) -> None:
        """Raise `PermissionDenied` unless the caller may read the list of the call's one query; `StaleRead` when it may
        not read it from the master, which the token and not the caller asks for."""
        caller, readers = caller_of(request, peer), self._configuration.access.readers
        check = None if caller is None or readers is None else readers[caller]
        if check is None:
            return
        denied = check.asked_by(peer).refuse(
            BatchQueries(request.read, operation_sizes(request.read)).query(0), critical=critical
        )
        if denied is not None and critical:
            raise StaleRead(
                "a write that the token names is not known here, and its caller may not read the master; try again "
                f"later: {denied.message}"
            )
        if denied is not None:
            raise denied

    async def _settle(
        self, coordinator_shard: int, settle: pb.Request, timeout_seconds: float, behalf: OnBehalfOf
    ) -> pb.SettledPairs:
        behalf.name_in(settle)
        routes = self._configuration.routes
        settle.topology_version = routes.version
        leader = routes.leaders(self._region).home(coordinator_shard)
        try:
            answer = await self._links.to(leader).ask(settle, timeout_seconds)
        except RetryableError as error:
            raise StaleRead(error.message) from error
        if not answer.settled_pairs.settled:
            raise StaleRead("the pair of a pending inverse could not be settled; try again")
        return answer.settled_pairs

    def _candidates(self, request: pb.Request) -> tuple[CacheServer, ...]:
        """Return the servers of the call's shard, best first, or the follower that has accepted a write. None when the
        call has no shard, when this follower hosts it, or when it does not exist, which the own handler reports."""
        routes = self._configuration.routes
        if request.HasField("await_applied"):
            return self._acceptor(request.await_applied)
        shard = home_shard(request)
        if shard is None or shard >= routes.shards or shard in self._hosted():
            return ()
        tiers = sorted(routes.follower_tiers(self._region), key=lambda tier: tier.tier != self._tier)
        servers = [server for tier in tiers for server in tier.hosts(shard)]
        servers.sort(key=lambda server: server.down or self._links.is_down(server))
        return tuple(servers[: self._settings.max_servers_asked])

    def _acceptor(self, asked: pb.AwaitApplied) -> tuple[CacheServer, ...]:
        """Return the follower that a receipt names, then those that may have a copy of the write; none when this one
        answers itself. Raises `InvalidArgument`."""
        name = Receipt.decoded(asked.accepted).server
        routes = self._configuration.routes
        tiers = [
            tier for tier in routes.follower_tiers(self._region) if any(each.name == name for each in tier.servers)
        ]
        found = [server for tier in tiers for server in (routes.server(name), *tier.successors(name))]
        found.sort(key=lambda server: server.down or self._links.is_down(server))
        if name == self._name or (found and found[0].name == self._name):
            return ()
        others = [server for server in found if server.name != self._name]
        return tuple(others[: self._settings.max_servers_asked])

    async def _relay(
        self, request: pb.Request, candidates: tuple[CacheServer, ...], reply: Reply, until: float, caller: str
    ) -> None:
        task = asyncio.current_task()
        assert task is not None, "run by the spawner, as a task"
        reply.on_close(lambda: _stop(task))
        self._under_way[caller] += 1
        try:
            answer = await self._ask_until_found(request, candidates, OnBehalfOf.sender(request, reply.peer), until)
            if answer is None:
                request.deadline_ms = max(1, round((until - self._clock.monotonic()) * 1000))
                self._own.handle(request, reply)
                return
        except TaoError as error:
            answer = failure(error)
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]
        reply.send(answer)

    async def _ask_until_found(
        self, request: pb.Request, candidates: tuple[CacheServer, ...], behalf: OnBehalfOf, until: float
    ) -> pb.Answer | None:
        """Return the first answer that is not an error; None when this follower hosts the shard by now. As long as
        servers refuse the call because they route by another version of the topology, ask by the newer one. Raises the
        error of the last server that was asked."""
        pause_seconds = self._settings.first_pause_seconds
        while candidates:
            version = self._configuration.routes.version
            try:
                return await self._ask(request, candidates, behalf, until)
            except NotMine as error:
                if error.topology_version == version:
                    raise
                # The older side reads the document at once: this server here, the other because it was asked.
                if error.topology_version > version:
                    left = until - self._clock.monotonic() - MIN_WORK_SECONDS
                    await self._configuration.look_for(error.topology_version, left)
                is_newer = self._configuration.routes.version != version
                needed_seconds = MIN_WORK_SECONDS + (0.0 if is_newer else pause_seconds)
                if until - self._clock.monotonic() <= needed_seconds:
                    raise
                if not is_newer:
                    await asyncio.sleep(pause_seconds)
                    pause_seconds = min(2 * pause_seconds, self._settings.max_pause_seconds)
            candidates = self._candidates(request)
        return None

    async def _ask(
        self, request: pb.Request, candidates: tuple[CacheServer, ...], behalf: OnBehalfOf, until: float
    ) -> pb.Answer:
        """Return the first answer that is not an error. Raises the error of the last server that was asked, but
        `NotMine` when any of them has refused the call for another version of the topology."""
        error: TaoError = Unavailable("the topology names no follower for the shard")
        skew: NotMine | None = None
        version = self._configuration.routes.version
        is_write = request.HasField("write")
        for number, server in enumerate(candidates, 1):
            left = until - self._clock.monotonic()
            if number == 1 and len(candidates) > 1 and not is_write:
                left *= self._settings.first_attempt_share
            relayed = pb.Request(topology_version=version, traceparent=request.traceparent)
            if is_write:
                relayed.write.CopyFrom(request.write)
            elif request.HasField("get_counters"):
                relayed.get_counters.CopyFrom(request.get_counters)
            elif request.HasField("await_applied"):
                relayed.await_applied.CopyFrom(request.await_applied)
            else:
                relayed.read.CopyFrom(request.read)
            behalf.name_in(relayed)
            try:
                answer = await self._links.to(server).ask(relayed, left)
                refused = error_of(answer)
                if refused is None:
                    return answer
                error = refused
            except TaoError as failed:
                error = failed
            if isinstance(error, NotMine) and error.topology_version != version:
                skew = error
            # A read that was not answered in time may be asked again; a write that had all the time may not.
            if not isinstance(error, NotMine | Unavailable) and (is_write or not isinstance(error, DeadlineExceeded)):
                raise error
        raise skew or error


def home_shard(request: pb.Request) -> int | None:
    """Return the shard of a unary call's one query or write, or None for a request that any follower serves."""
    if request.HasField("read"):
        batch = request.read
        for id1 in id1s_of(batch):
            return id1 >> SHARD_SHIFT
    elif request.HasField("get_counters"):
        for counted_id in request.get_counters.ids:
            return counted_id >> SHARD_SHIFT
    elif request.HasField("write"):
        write = request.write.writes[0]
        operation = write.WhichOneof("operation")
        if operation is not None:
            message = getattr(write, operation)
            key_id: int = message.id if operation in _OPERATIONS_BY_ID else message.id1
            if not key_id and operation in ("obj_add", "add_job"):
                shard: int = message.shard
                return shard
            return key_id >> SHARD_SHIFT
    return None


def error_of(answer: pb.Answer) -> TaoError | None:
    """Return the error of the one query or write in the answer, or None."""
    for errors in (answer.read.errors, answer.counter_values.errors):
        if errors:
            return error_from_pb(errors[0])
    for result in answer.write.results:
        if result.HasField("error"):
            return error_from_pb(result.error)
    return None


def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
