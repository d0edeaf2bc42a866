"""What a server records in its audit log: denials, operators' actions, audited writes, changes of what it goes by.

Without an audit log nothing of this costs anything: the paths of requests ask `AuditTrail.is_on` when they are made,
and reads are never recorded. Denials are what strangers can cause, as often as they like. So those of a second that
differ in their types and shards alone are one record with a count, which lists so many types and shards and counts the
others; the number of records in a second is bounded, and they never take the room of others.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Self, TypeVar

import msgspec

from tao.access.decisions import TypeKind
from tao.access.document import AccessDocument
from tao.model.errors import OutcomeUnknown, TaoError, Unauthorized, UnknownType
from tao.model.topology import Topology
from tao.observability.audit_log import AuditLog, AuditSettings
from tao.observability.audit_records import MAX_LISTED, Activity, AuditEvent, Outcome
from tao.observability.logs import Logger
from tao.runtime.credentials import AcceptedCredentialFiles, CredentialChange
from tao.schema.registry import Schema
from tao.serving.request_scope import NamedType, Scope, Scoped, scope_of
from tao.topology.document import dump_topology
from tao.wire.identity import PASSING_ON, PeerIdentity
from tao.wire.session import PassedReply, Reply
from tao.wire.v1 import session_pb2 as pb

_DENIAL_SECONDS: Final = 1.0
_DENIAL_SHARE: Final = 0.5
_MAX_DENIED_KEYS: Final = 400
"""Keys of a denied request that are looked at, which nobody's share of the work and no budget pays for."""
_MAX_NAME: Final = 200
"""Characters that are kept of what a stranger says of itself."""
_ANONYMOUS: Final = "anonymous"
_OPERATOR: Final = "operator"

_Item = TypeVar("_Item", int, NamedType)

RequestPath = Callable[[pb.Request, Reply], None]
"""What serves the requests of one kind."""


class Denial(NamedTuple):
    """Something that a caller was denied. ``action``: the kind of the request, or the operation that the rules deny.
    ``peer``: who has sent the request. ``what`` was denied; it is read when the denial is recorded. ``times``: so many
    equal ones."""

    caller: str
    action: str
    error: TaoError
    peer: PeerIdentity
    what: Scoped = Scope()
    times: int = 1


class AuditEntry:
    """The record of something under way, which `end` writes. Room for it is kept."""

    __slots__ = ("_log", "event")

    def __init__(self, log: AuditLog, event: AuditEvent) -> None:
        self._log: Final = log
        self.event: AuditEvent | None = event
        """What will be recorded; None once it is, or was given up."""

    def end(self, error: BaseException | None = None, **learned: object) -> None:
        """Record how it ended; a second call does nothing. ``learned``: fields of the event that were not known at the
        beginning."""
        event, self.event = self.event, None
        if event is None:
            return
        if error is not None:
            outcome, reason, message = _failure_of(error)
            learned |= {"outcome": outcome, "reason": reason, "message": message}
        self._log.record(msgspec.structs.replace(event, **learned), reserved=True)

    def give_up(self) -> None:
        """Record nothing: it was not done here, or needs no record."""
        if self.event is not None:
            self.event = None
            self._log.release()


class AuditTrail:
    """Makes the records of one server. Without an audit log it makes none."""

    def __init__(self, log: AuditLog | None = None, server: str = "", unix_ms: Callable[[], int] = lambda: 0) -> None:
        self.log: Final = log
        self.policy_version = ""
        """The version of the access rules in force, which every record names."""
        self._server: Final = server
        self._unix_ms: Final = unix_ms
        self._denials: dict[_DenialKey, _Denials] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._topology_version = 0
        self._schema: Schema | None = None

    @classmethod
    async def open(cls, settings: AuditSettings, server: str, unix_ms: Callable[[], int], log: Logger) -> Self:
        """Return what makes the records of a server, with its log open if the settings name one. Raises
        `OperatorError` or `OSError`."""
        if settings.path is None:
            return cls(None, server, unix_ms)
        found = AuditLog(settings, log)
        await asyncio.to_thread(found.open)
        return cls(found, server, unix_ms)

    @property
    def is_on(self) -> bool:
        """Return whether there is an audit log."""
        return self.log is not None

    def begin(self, caller: str, action: str, **fields: object) -> AuditEntry | None:
        """Begin the record of a request; None without an audit log. ``fields``: further ones of the event.

        Raises `AuditFull` when it could not be recorded and the settings say so."""
        if self.log is None:
            return None
        self.log.reserve()
        return AuditEntry(self.log, self._event(caller, action, **fields))

    def of_operators(self, kind: str, path: RequestPath) -> RequestPath:
        """Return a path that records the requests of operators, whose outcome is known by their last answer, and is
        otherwise ``path``."""
        return path if self.log is None else _OperatorPath(self, kind, path)

    def denied(self, denial: Denial) -> None:
        """Record that a caller was denied something, within the bound."""
        if self.log is None:
            return
        key = _DenialKey.of(denial)
        if key not in self._denials and len(self._denials) >= self.log.settings.max_denials_per_second:
            key = _OTHER_DENIALS
        known = self._denials.get(key)
        if known is None:
            message = "" if key is _OTHER_DENIALS else denial.error.message[: 2 * _MAX_NAME]
            event = self._event(key.caller, key.action, outcome=Outcome.FAILURE, reason=key.reason, message=message)
            known = self._denials[key] = _Denials(
                msgspec.structs.replace(event, role=key.role, address=key.host, count=0)
            )
        known.add(denial, self._unix_ms())
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DENIAL_SECONDS, self.record_denials)

    def record_denials(self) -> None:
        """Record the denials of the last second."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        denials, self._denials = self._denials, {}
        for key, each in denials.items():
            assert self.log is not None, "without a log no denial is kept"
            event = each.event(self._names)
            if key is _OTHER_DENIALS:
                event = msgspec.structs.replace(event, details={"denied": dict(each.actions)})
            self.log.record(event, share=_DENIAL_SHARE)

    def connection_refused(self, peer: PeerIdentity, error: TaoError) -> None:
        """Record that a connection or call was refused for its credentials."""
        if isinstance(error, Unauthorized):
            self.denied(Denial(recorded_name(peer), "connect", error, peer))

    def request_refused(self, kind: str, request: pb.Request, peer: PeerIdentity, error: TaoError) -> None:
        """Record that a peer may not make a request of this kind."""
        if self.log is not None:
            self.denied(Denial(recorded_caller(request, peer), kind, error, peer, request))

    def started(
        self,
        topology: Topology,
        schema: Schema | None = None,
        access: AccessDocument | None = None,
        accepted: AcceptedCredentialFiles | None = None,
    ) -> None:
        """Record the start of this server, and the documents that it goes by. What ``accepted`` accepts is recorded
        when it changes, too."""
        self._topology_version = topology.version
        self._schema = schema
        self.policy_version = "" if access is None else str(access.version)
        if self.log is None:
            return
        details: dict[str, object] = {"topology_version": topology.version, "topology_sha256": _digest(topology)}
        if schema is not None:
            details["schema_sha256"] = schema.version_hash
        if accepted is not None:
            details |= {f"{kind}_sha256": digest for kind, digest in accepted.digests.items()}
            accepted.on_changed = self._credentials_changed
        if self.log.torn_bytes:
            details["torn_bytes"] = self.log.torn_bytes
        self._note("server_started", details)

    def use_topology(self, topology: Topology) -> None:
        """Record a newer topology. Its digest is that of the file which the commands of operators write."""
        former, self._topology_version = self._topology_version, topology.version
        if self.log is not None:
            self.changed("topology", str(former), str(topology.version), _digest(topology))

    def use_schema(self, schema: Schema) -> None:
        """Record a newer schema. Its version is the digest of its canonical document."""
        former, self._schema = "" if self._schema is None else self._schema.version_hash, schema
        self.changed("schema", former, schema.version_hash, schema.version_hash)

    def use_access_document(self, document: AccessDocument) -> None:
        """Record newer rights; records name their version from now on."""
        former, self.policy_version = self.policy_version, str(document.version)
        if self.log is not None:
            digest = hashlib.sha256(document.model_dump_json().encode()).hexdigest()
            self.changed("rights", former, self.policy_version, digest)

    def _credentials_changed(self, change: CredentialChange) -> None:
        details: dict[str, object] = {
            "file": change.file,
            "former_version": change.former_sha256,
            "version": change.sha256,
            "sha256": change.sha256,
        }
        for what, tokens in (("added", change.added), ("removed", change.removed)):
            if tokens:
                details |= {what: list(tokens[:MAX_LISTED]), f"{what}_count": len(tokens)}
        self._note(f"{change.kind}_changed", details, Activity.UPDATE)

    def changed(self, what: str, former: str, version: str, sha256: str) -> None:
        """Record that this server goes by another version of a document from now on."""
        details = {"former_version": former, "version": version, "sha256": sha256}
        self._note(f"{what}_changed", details, Activity.UPDATE)

    def acted(self, action: str, error: BaseException | None = None, **details: object) -> None:
        """Record what this server has done of its own accord, or failed to do. It is done while the log is full, too:
        the record counts as lost then."""
        outcome, reason, message = Outcome.SUCCESS, "", ""
        if error is not None:
            outcome, reason, message = _failure_of(error)
        if self.log is not None:
            event = self._event(f"server/{self._server}", action, outcome=outcome, reason=reason, message=message)
            self.log.record(msgspec.structs.replace(event, activity=Activity.UPDATE, details=details))

    def described(self, request: pb.Request) -> Mapping[str, object]:
        """Return the fields of an event that say what a request asks for."""
        scope = scope_of(request)
        return {
            "types": self._names(scope.types),
            "shards": tuple(sorted(scope.shards)),
            "more_types": scope.unread_types,
            "more_shards": scope.unread_shards,
            "details": _details(request),
        }

    def _names(self, types: Iterable[NamedType]) -> tuple[str, ...]:
        """Return the names of types in their order; of one that the schema does not have, its number."""
        return tuple(sorted(map(self._name, types)))

    def _name(self, named: NamedType) -> str:
        if self._schema is None:
            return str(named)
        find = self._schema.otype if named.kind is TypeKind.OBJECT else self._schema.atype
        try:
            return find(named.number).name
        except UnknownType:
            return str(named)

    async def close(self) -> None:
        """Record the end of this server, and close the log."""
        if self.log is not None:
            self.record_denials()
            self._note("server_stopped")
            await asyncio.to_thread(self.log.close)

    def _note(
        self, action: str, details: Mapping[str, object] | None = None, activity: Activity = Activity.OTHER
    ) -> None:
        if self.log is not None:
            self.log.record(self._event(f"server/{self._server}", action, activity=activity, details=details or {}))

    def _event(self, caller: str, action: str, **fields: object) -> AuditEvent:
        event = AuditEvent(
            time_ms=self._unix_ms(),
            server=self._server,
            caller=caller,
            action=action,
            policy_version=self.policy_version,
        )
        return msgspec.structs.replace(event, **fields)


class _DenialKey(NamedTuple):
    """Denials that are alike in this are one record."""

    action: str
    caller: str = ""
    role: str = ""
    host: str = ""
    reason: str = ""

    @classmethod
    def of(cls, denial: Denial) -> Self:
        role, host = denial.peer.role[:_MAX_NAME], _host(denial.peer.address)
        return cls(denial.action, denial.caller[:_MAX_NAME], role, host, denial.error.reason)


_OTHER_DENIALS: Final = _DenialKey("denials")
"""All denials beyond the bound."""


class _Denials:
    """The denials of one record."""

    def __init__(self, event: AuditEvent) -> None:
        """``event``: what they have in common, and the message of the first."""
        self._event = event
        self._types: Final[set[NamedType]] = set()
        self._shards: Final[set[int]] = set()
        self.actions: Final = Counter[str]()

    def add(self, denial: Denial, unix_ms: int) -> None:
        """Add one. A type or shard that the record does not list counts each time; of a request every one does once the
        record has no room to list more."""
        is_full = len(self._types) == len(self._shards) == MAX_LISTED
        event, scope = self._event, scope_of(denial.what, 0 if is_full else _MAX_DENIED_KEYS)
        self.actions[denial.action] += denial.times
        self._event = msgspec.structs.replace(
            event,
            count=event.count + denial.times,
            end_time_ms=unix_ms,
            more_types=event.more_types + _list_some(self._types, scope.types) + scope.unread_types,
            more_shards=event.more_shards + _list_some(self._shards, scope.shards) + scope.unread_shards,
        )

    def event(self, names: Callable[[Iterable[NamedType]], tuple[str, ...]]) -> AuditEvent:
        """Return the event of all. ``names`` names their types."""
        return msgspec.structs.replace(self._event, types=names(self._types), shards=tuple(sorted(self._shards)))


def _list_some(listed: set[_Item], found: frozenset[_Item]) -> int:
    """List what there is room for. Returns how many are not listed."""
    new = found - listed
    listed.update(sorted(new)[: MAX_LISTED - len(listed)])
    return len(new - listed)


class _OperatorPath:
    """A path in front of another one, which records what operators ask for, themselves or through another server."""

    def __init__(self, trail: AuditTrail, kind: str, path: RequestPath) -> None:
        self._trail: Final = trail
        self._kind: Final = kind
        self._path: Final = path

    def __call__(self, request: pb.Request, reply: Reply) -> None:
        """Serve the request. Raises as the path does, and `AuditFull`."""
        peer = reply.peer
        entry = None
        if peer.role == _OPERATOR or (request.operator and peer.role in PASSING_ON):
            asked, caller = self._trail.described(request), recorded_caller(request, peer)
            entry = self._trail.begin(caller, self._kind, role=peer.role, address=peer.address, **asked)
        if entry is None:
            self._path(request, reply)
            return
        try:
            self._path(request, _RecordedReply(reply, entry))
        except BaseException as error:
            entry.end(error)
            raise


class _RecordedReply(PassedReply):
    """A `Reply` whose last answer ends an entry of the audit log."""

    def __init__(self, reply: Reply, entry: AuditEntry) -> None:
        super().__init__(reply)
        self._entry: Final = entry

    def send(self, answer: pb.Answer) -> None:
        """See `Reply.send`."""
        if not answer.more:
            failed = answer.HasField("error")
            self._entry.end(
                outcome=Outcome.FAILURE if failed else Outcome.SUCCESS,
                reason=answer.error.reason,
                message=answer.error.message,
            )
        self._reply.send(answer)


def _failure_of(error: BaseException) -> tuple[Outcome, str, str]:
    """Return outcome, reason and message of what has failed, or may have been done."""
    is_unknown = isinstance(error, OutcomeUnknown) or not isinstance(error, TaoError)
    reason = error.reason if isinstance(error, TaoError) else type(error).__name__
    return Outcome.UNKNOWN if is_unknown else Outcome.FAILURE, reason, str(error)


def recorded_name(peer: PeerIdentity) -> str:
    """Return the name by which the audit log knows a peer: its caller, else its role and the name that it states."""
    return peer.caller or f"{peer.role or 'peer'}/{peer.name}"


def recorded_caller(request: pb.Request, peer: PeerIdentity) -> str:
    """Return on whose behalf a peer asks: a cache server names the caller or operator of what it passes on, anybody
    else is it."""
    if peer.role in PASSING_ON:
        if request.operator:
            return request.operator
        if request.HasField("caller"):
            return request.caller or _ANONYMOUS
    return recorded_name(peer)


def _host(address: str) -> str:
    """Return the address of a peer (`tao.wire.doorstep.name_of`) without its port, which every connection of a stranger
    has anew."""
    host, _, port = address.rpartition(":")
    return host.strip("[]") if host and port.isdigit() else address


def _details(request: pb.Request) -> dict[str, object]:
    """Return what the record of an operator's request has besides its types and shards."""
    if request.HasField("touch_keys"):
        return {"keys": len(request.touch_keys.touches)}
    if request.HasField("settle_pairs"):
        return {"pairs": len(request.settle_pairs.pairs)}
    if request.HasField("change_journal") or request.HasField("change_jobs"):
        change = request.change_journal if request.HasField("change_journal") else request.change_jobs
        kind = change.WhichOneof("change") or "nothing"
        return {kind: getattr(change, kind, "")}
    return {}


def _digest(topology: Topology) -> str:
    return hashlib.sha256(dump_topology(topology).encode()).hexdigest()
