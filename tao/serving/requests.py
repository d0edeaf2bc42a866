"""The way of a request into a cache server: a listener takes it, a pause holds it, and the peer's role admits it to
a path.

A process that is stopped, swapped out or frozen with its machine wakes up with the cache of the moment when it was
paused. Meanwhile other servers may have marked it down, taken over its shards and written; and the first events that it
finds are requests. So each request compares the clock with a mark that a background job advances all the time: when the
mark is in the past, nothing has run here for longer than the bound, and the request is held until the server has
checked what may have changed. The bound is shorter than the time after which a server is marked down, so that a server
which was marked down notices it. A clock that stands still while the machine is frozen hides the pause from every
process on it; then the regular checks of ownership and topology, one a second, bound the damage.

Only servers and operators change caches, never an application. Without credentials the server believes the role that a
peer states, which suits loopback and a closed network. Where they are in use, the role is what the peer's credential
proves (`tao.wire.identity`). The check costs one look-up for each request, and a request is a batch.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import sleep
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tao.cache import GraphCache
from tao.model.errors import (
    InternalError,
    InvalidArgument,
    NotMine,
    SettingsError,
    TaoError,
    Unauthorized,
    Unavailable,
    UnknownShard,
)
from tao.model.ports import Clock
from tao.model.settings import renamed
from tao.model.topology import CacheServer
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.serving.access import GUARDED, OBSERVERS
from tao.serving.configuration import Configuration, ServerContext, region_asked
from tao.serving.forward_path import bounded_writes
from tao.serving.inspection import inspect
from tao.serving.read_service import ReadService
from tao.wire.address import is_loopback, parse_address
from tao.wire.doorstep import Doorstep
from tao.wire.frames_server import FrameServer
from tao.wire.grpc_server import GrpcServer
from tao.wire.identity import CLIENT, SERVER_ROLES, PeerIdentity
from tao.wire.session import AnswerAtOnce, AtOnceHandler, PassedReply, Reply, RequestHandler, failure
from tao.wire.settings import ServingSettings
from tao.wire.tls import ServerTls, TlsFiles
from tao.wire.v1 import session_pb2 as pb

CERTIFICATES_SECONDS: Final = 1.0
"""Interval between two checks whether the certificate files have changed, which reads them."""


def check_exposure(server: CacheServer, tls: TlsFiles, *, has_credentials: bool) -> None:
    """Raise `SettingsError` when other machines can reach the server, and it asks for no credentials, or takes them
    unencrypted. Certificates without `tls.cluster` are none: they say who may connect, and not who it is."""
    exposed = [each for each in (server.grpc, server.frames) if each and not is_loopback(parse_address(each))]
    if not exposed:
        return
    lacks = []
    if tls.if_set is None:
        lacks.append("TLS (`tls`)")
    if not has_credentials:
        lacks.append("credentials (`accepted_tokens_file`, or `tls.cluster` for certificates with ids)")
    if lacks:
        raise SettingsError(
            f"{server.name} would serve at {' and '.join(exposed)}, where other machines reach it, without "
            f"{' and '.join(lacks)}. Set what is missing, or `insecure: true` if nobody else can reach that network"
        )


class Listeners:
    """The gRPC server and the frame server in front of one request handler."""

    def __init__(
        self,
        server: CacheServer,
        handler: RequestHandler,
        settings: ServingSettings,
        topology_version: Callable[[], int],
        choose_shard: Callable[[], int],
        unary_handler: RequestHandler | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """``choose_shard`` returns the shard of a new object whose caller names no neighbour. ``unary_handler`` handles
        gRPC's unary calls, if not ``handler``. ``tls`` applies to both servers; None means plain connections. Raises
        `SettingsError` when the TLS files cannot be used."""
        self._server: Final = server
        self._tls: Final = None if tls is None else ServerTls(tls)
        self._rereading: asyncio.Task[None] | None = None
        self._grpc: Final = GrpcServer(
            handler,
            settings,
            name=server.name,
            topology_version=topology_version,
            choose_shard=choose_shard,
            unary_handler=unary_handler,
            tls=None if self._tls is None else self._tls.context,
        )
        self._frames: Final = FrameServer(
            handler,
            settings,
            name=server.name,
            topology_version=topology_version,
            grpc_address=server.grpc,
            tls=None if self._tls is None else self._tls.context,
        )

    @property
    def doorsteps(self) -> tuple[Doorstep, ...]:
        """Return the doorsteps of both ports."""
        return self._grpc.doorstep, self._frames.doorstep

    async def start(self) -> None:
        """Listen at the addresses in the topology. Raises `OSError` when an address is taken."""
        if self._server.grpc:
            await self._grpc.start(self._server.grpc)
        if self._server.frames:
            await self._frames.start(self._server.frames)
        if self._tls is not None:
            self._rereading = asyncio.create_task(self._follow_certificates(self._tls), name="certificates")

    async def _follow_certificates(self, tls: ServerTls) -> None:
        """Use changed certificate files for new connections, until cancelled."""
        while True:
            await sleep(CERTIFICATES_SECONDS)
            if await asyncio.to_thread(tls.reread):
                self._frames.tls = self._grpc.proxy.tls = tls.context

    async def drain(self, grace_seconds: float) -> None:
        """Ask all peers to leave, and wait at most ``grace_seconds`` for the requests under way."""
        await self._stop_rereading()
        await asyncio.gather(self._grpc.drain(grace_seconds), self._frames.drain(grace_seconds))

    async def close(self) -> None:
        """Close every connection."""
        await self._stop_rereading()
        await asyncio.gather(self._grpc.close(), self._frames.close())

    async def _stop_rereading(self) -> None:
        if self._rereading is not None:
            self._rereading.cancel()
            await asyncio.wait([self._rereading])
            self._rereading = None


@dataclass(frozen=True, slots=True)
class PauseSettings:
    """The durations that define a pause, and the bound on held requests."""

    pause_seconds: float = renamed(1.5, formerly="stall_seconds")
    """A server that has not run for this long considers itself paused. Longer than a busy loop delays it; shorter than
    the time until it is marked down, or it could be replaced without noticing."""

    tick_seconds: float = 0.25
    """Interval between two advances of the mark: several within the bound, each of which costs a microsecond."""

    check_seconds: float = renamed(1.0, formerly="look_seconds")
    """Longest time of the check for changes. Whatever is not confirmed in this time counts as changed."""

    max_held: int = 10_000
    """Most requests held during the check; further ones are refused, and can be sent to another server."""

    def __post_init__(self) -> None:
        if not 0 < self.tick_seconds < self.pause_seconds or not 0 < self.check_seconds < self.pause_seconds:
            raise SettingsError(f"tick_seconds and check_seconds have to be above 0 and below pause_seconds: {self}")


class PauseDetector:
    """A `RequestHandler` in front of another one, which holds requests after a pause."""

    def __init__(
        self,
        inner: RequestHandler,
        kinds: frozenset[str],
        look: Callable[[float], Awaitable[None]],
        clock: Clock,
        settings: PauseSettings,
        log: Logger,
    ) -> None:
        """``kinds`` are the requests that are answered from what this server believes. ``look(seconds)`` checks what
        has changed; after it, whether it raised or not, the server must serve nothing that is not known to be right."""
        self._inner: Final = inner
        self._answer_at_once: Final = inner.answer_at_once if isinstance(inner, AtOnceHandler) else None
        self._kinds: Final = kinds
        self._look: Final = look
        self._clock: Final = clock
        self._settings: Final = settings
        self._log: Final = log
        self._alive_until = math.inf
        self._held: list[tuple[pb.Request, Reply]] = []
        self.stalls = 0

    def register(self, metrics: Metrics) -> None:
        """Register the number of pauses."""
        metrics.gauge_family(
            "pauses_total",
            "Pauses of this process that were long enough for it to have been replaced.",
            "event",
            lambda: {"noticed": self.stalls},
        )

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Pass the request to the inner handler, now or after the check. Raises `Unavailable` when too many are
        held."""
        if self._clock.monotonic() <= self._alive_until or request.WhichOneof("body") not in self._kinds:
            self._inner.handle(request, reply)
        elif len(self._held) < self._settings.max_held:
            self._held.append((request, reply))
        else:
            raise Unavailable("this server was paused and is checking what it has missed; try again, or another one")

    def answer_at_once(self, request: bytes, peer: PeerIdentity) -> AnswerAtOnce | None:
        """Have the inner handler answer a request at once, unless there was a pause: see
        `tao.wire.session.AtOnceHandler`."""
        if self._answer_at_once is None or self._clock.monotonic() > self._alive_until:
            return None
        return self._answer_at_once(request, peer)

    async def keep(self) -> None:
        """Advance the mark, and check for changes after a pause, until cancelled."""
        while True:
            await self.tick()
            await sleep(self._settings.tick_seconds)

    async def tick(self) -> None:
        """Advance the mark once. When the last advance is too long ago, check first what has changed."""
        while (now := self._clock.monotonic()) > self._alive_until:
            self.stalls += 1
            self._log.warning("server_was_paused", seconds=round(now - self._alive_until, 1), held=len(self._held))
            try:
                await self._look(self._settings.check_seconds)
            except TaoError as error:
                self._log.error("pause_check_failed", reason=error.message)
            # The process may be paused again during the check: what it saw may be out of date already.
            self._alive_until = now + self._settings.pause_seconds
        self._alive_until = self._clock.monotonic() + self._settings.pause_seconds
        self._answer_held()

    def _answer_held(self) -> None:
        held, self._held = self._held, []
        for request, reply in held:
            if reply.closed:
                continue
            try:
                self._inner.handle(request, reply)
            except TaoError as error:
                reply.send(failure(error))
            except Exception as error:  # noqa: BLE001 - as a transport does: log, answer, go on
                self._log.error("request_failed", exc_info=error)
                reply.send(failure(InternalError(f"{type(error).__name__} in the server; its log says more")))


Rules = Mapping[str, frozenset[str]]
"""A map from the kind of a request to the roles that may send it. Every role may send a kind that is not listed."""

_CACHES: Final = frozenset({"follower", "leader"})
_CACHES_AND_OPERATOR: Final = _CACHES | {"operator"}
_WATCHER: Final = frozenset({"watcher"})
_WORKER: Final = frozenset({"worker"})
_OPERATOR: Final = frozenset({"operator"})
_ASKING: Final = frozenset({CLIENT, "follower", "worker", "operator"})
"""Roles that read and write at followers. A follower asks another one for what an application has called it for."""

FOLLOWER_RULES: Final[Rules] = {
    "read": _ASKING,
    "probe": _WATCHER,
    "write": _ASKING,
    "reserve_ids": _ASKING,
    "settle_pairs": _ASKING,
    "apply": frozenset({"follower"}),
    "inspect": _CACHES_AND_OPERATOR,
    "most_read": _WATCHER,
    "invalidate": _CACHES_AND_OPERATOR,
    "await_applied": _ASKING,
    "get_counters": _ASKING,
    "inspect_journal": frozenset({"operator"}),
    "change_journal": frozenset({"operator"}),
    "keep_copies": frozenset({"follower"}),
}

LEADER_RULES: Final[Rules] = {
    "read": _CACHES_AND_OPERATOR,
    "probe": _WATCHER,
    "write": _CACHES_AND_OPERATOR,
    "reserve_ids": _CACHES_AND_OPERATOR,
    "subscribe": frozenset({"follower"}),
    "acknowledge": frozenset({"follower"}),
    "inspect": _CACHES_AND_OPERATOR,
    "most_read": _WATCHER,
    "invalidate": _CACHES_AND_OPERATOR,
    "settle_pairs": _CACHES_AND_OPERATOR,
    "touch_keys": _OPERATOR,
    "settle_edge": frozenset({"leader"}),
    "relay": frozenset({"tailer"}),
    "relay_by_reference": frozenset({"tailer"}),
    "apply": frozenset({"leader"}),
    "scan_pairs": frozenset({"follower"}),
    "lease_jobs": _WORKER,
    "report_jobs": _WORKER,
    "scan_shard": _WORKER,
    "purge_removed": _WORKER,
    "fold_counters": _WORKER,
    "list_jobs": _OPERATOR,
    "change_jobs": _OPERATOR,
    "get_clock": _CACHES,
}
"""The rules of a leader. ``settle_edge`` is a kind of write and is checked separately; ``probe`` and ``most_read`` are
what observers may read and inspect (`kind_for_observer`)."""

OPERATORS_CHANGES: Final = frozenset({"invalidate", "settle_pairs", "touch_keys", "change_jobs", "change_journal"})
"""The requests by which operators change something at a cache server."""


_COSTLY: Final = frozenset({"write", "reserve_ids", "settle_pairs"})
"""Requests that are one item of work in their caller's share; the misses of reads are so one by one."""


def check_role(rules: Rules, kind: str, role: str) -> None:
    """Raise `Unauthorized` unless a peer of ``role`` may send requests of ``kind``."""
    allowed = rules.get(kind)
    if allowed is None or role in allowed or (CLIENT in allowed and role not in SERVER_ROLES):
        return
    whose = " and ".join(f"{each}s" for each in sorted(allowed))
    raise Unauthorized(
        f"{kind!r} requests are for {whose}, and this peer is taken for a {role or 'peer without a role'}: "
        "applications ask followers to read and write; operators use the tao command, with a token of an operator"
    )


def kind_for_observer(kind: str, request: pb.Request) -> str:
    """Return the kind of an observer's request: an empty read is a probe, and an inspection that names no key asks what
    is most read."""
    if kind == "read" and request.read == pb.ReadBatch():
        return "probe"
    if kind == "inspect" and request.inspect == pb.Inspect(hot_limit=request.inspect.hot_limit):
        return "most_read"
    return kind


class _ReplyToNewer(PassedReply):
    """A `Reply` to a peer that routes by a newer topology, which may have shards that are not known here. Their
    requests are not wrong, as `UnknownShard` says: another server may serve them, and soon this one. So the answer is
    `NotMine`, whatever path found that the shard is unknown."""

    def __init__(self, reply: Reply, configuration: Configuration) -> None:
        super().__init__(reply)
        self._configuration: Final = configuration

    def send(self, answer: pb.Answer) -> None:
        """See `Reply.send`."""
        for error in (
            answer.error,
            *answer.read.errors,
            *answer.counter_values.errors,
            *(result.error for result in answer.write.results),
        ):
            if error.reason == UnknownShard.reason:
                error.reason, error.topology_version = NotMine.reason, self._configuration.routes.version
        self._reply.send(answer)


class CacheService:
    """The `RequestHandler` of a cache server's sessions: passes each request to the path that serves it."""

    def __init__(
        self,
        role: Literal["follower", "leader"],
        context: ServerContext,
        cache: GraphCache,
        reads: ReadService,
        paths: Mapping[str, Callable[[pb.Request, Reply], None]],
    ) -> None:
        """``paths`` serve the kinds of requests that the other role does not serve in the same way."""
        configuration, region = context.configuration, context.region
        self._role: Final = role
        self._configuration: Final = configuration
        self._access: Final = configuration.access
        self._audit: Final = context.audit
        self._rules: Final = FOLLOWER_RULES if role == "follower" else LEADER_RULES
        self._paths: Final[dict[str, Callable[[pb.Request, Reply], None]]] = {
            "read": reads.handle,
            "get_topology": lambda request, reply: reply.send(
                pb.Answer(topology=configuration.topology_document(region_asked(request.get_topology, region)))
            ),
            "get_schema": lambda _, reply: reply.send(pb.Answer(schema=configuration.schema_document())),
            "watch": lambda request, reply: configuration.watch(request, reply, region),
            "inspect": lambda request, reply: reply.send(
                pb.Answer(inspection=inspect(cache, reads.traffic, request.inspect))
            ),
            **paths,
        }
        for kind in _COSTLY & self._paths.keys():
            self._paths[kind] = reads.shares.sharing(self._paths[kind])
        # Outside of the shares: what is refused waits for nothing, and spends no budget.
        if "write" in self._paths:
            self._paths["write"] = bounded_writes(self._paths["write"])
        for kind in GUARDED & self._paths.keys():
            self._paths[kind] = configuration.access.guarded(kind, self._paths[kind])
        for kind in OPERATORS_CHANGES & self._paths.keys():
            self._paths[kind] = context.audit.of_operators(kind, self._paths[kind])

    def handle(self, request: pb.Request, reply: Reply) -> None:
        """Serve one request. Whatever the cache can answer is answered before this returns.

        Raises `InvalidArgument` for a request that this role does not serve, `Unauthorized` for one that the peer's
        role may not make, `PermissionDenied` for one that its caller has no right to make."""
        kind = request.WhichOneof("body") or "nothing"
        path = self._paths.get(kind)
        if path is None:
            other = "leader" if self._role == "follower" else "follower"
            raise InvalidArgument(f"a {self._role} does not serve {kind!r} requests; ask a {other}")
        try:
            role = reply.peer.role
            check_role(self._rules, kind_for_observer(kind, request) if role in OBSERVERS else kind, role)
            if request.topology_version > self._configuration.routes.version:
                self._configuration.note_version(request.topology_version)
                self._serve_newer(path, request, reply)
            else:
                path(request, reply)
        except Unauthorized as error:
            self._audit.request_refused(kind, request, reply.peer, error)
            raise

    def _serve_newer(self, path: Callable[[pb.Request, Reply], None], request: pb.Request, reply: Reply) -> None:
        """Serve a request whose sender routes by a newer topology. Raises `NotMine` for `UnknownShard`."""
        try:
            path(request, _ReplyToNewer(reply, self._configuration))
        except UnknownShard as error:
            raise NotMine(error.message, self._configuration.routes.version) from error

    def admit(self, request: pb.Request, peer: PeerIdentity) -> None:
        """Check what only this server can check of a read or write that it passes on for its peer: the peer's role, and
        an operator's rights. The caller's rights are checked where the request is served.

        Raises `Unauthorized` and `PermissionDenied`."""
        kind = request.WhichOneof("body") or "nothing"
        try:
            check_role(self._rules, kind, peer.role)
        except Unauthorized as error:
            self._audit.request_refused(kind, request, peer, error)
            raise
        self._access.check_operator(request, peer)
