"""What a server records in its audit log: denials, operators' actions, audited writes, changes of what it goes by.

Without an audit log nothing of this costs anything: the paths of requests ask `AuditTrail.is_on` when they are made,
and reads are never recorded. Denials are what strangers can cause, as often as they like. So equal ones within a second
are one record with a count, the number of records in a second is bounded, and they never take the room of others.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Self

import msgspec

from tao.access.document import AccessDocument
from tao.model.errors import OutcomeUnknown, TaoError, Unauthorized
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import Topology
from tao.observability.audit_log import AuditLog, AuditSettings
from tao.observability.audit_records import Activity, AuditEvent, Outcome
from tao.observability.logs import Logger
from tao.schema.registry import Schema
from tao.topology.document import dump_topology
from tao.wire.identity import PASSING_ON, PeerIdentity
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

_DENIAL_SECONDS: Final = 1.0
_DENIAL_SHARE: Final = 0.5
_MAX_NAME: Final = 200
"""Characters that are kept of what a stranger says of itself."""
_ANONYMOUS: Final = "anonymous"
_OPERATOR: Final = "operator"
_OTHER_DENIALS: Final = "denials"
"""The action of the record that stands for all denials beyond the bound."""

RequestPath = Callable[[pb.Request, Reply], None]
"""What serves the requests of one kind."""


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
        self._denials: dict[_Denial, AuditEvent] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._topology_version = 0
        self._schema_hash = ""

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

    def denied(self, caller: str, action: str, error: TaoError, peer: PeerIdentity | None = None) -> None:
        """Record that a caller was denied something, within the bound. ``peer``: the sender of the request, if it is
        known."""
        if self.log is None:
            return
        role, host = ("", "") if peer is None else (peer.role[:_MAX_NAME], _host(peer.address))
        denial = _Denial(action, caller[:_MAX_NAME], role, host, error.reason)
        if denial not in self._denials and len(self._denials) >= self.log.settings.max_denials_per_second:
            denial = _Denial(_OTHER_DENIALS, "", "", "", "")
        known = self._denials.get(denial)
        if known is None:
            self._denials[denial] = self._event(
                denial.caller,
                denial.action,
                outcome=Outcome.FAILURE,
                reason=denial.reason,
                message=error.message[: 2 * _MAX_NAME] if denial.reason else "",
                role=denial.role,
                address=denial.host,
            )
        else:
            self._denials[denial] = msgspec.structs.replace(known, count=known.count + 1, end_time_ms=self._unix_ms())
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DENIAL_SECONDS, self.record_denials)

    def record_denials(self) -> None:
        """Record the denials of the last second."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        denials, self._denials = self._denials, {}
        for event in denials.values():
            assert self.log is not None, "without a log no denial is kept"
            self.log.record(event, share=_DENIAL_SHARE)

    def connection_refused(self, peer: PeerIdentity, error: TaoError) -> None:
        """Record that a connection or call was refused for its credentials."""
        if isinstance(error, Unauthorized):
            self.denied(recorded_name(peer), "connect", error, peer)

    def started(self, topology: Topology, schema: Schema | None = None, access: AccessDocument | None = None) -> None:
        """Record the start of this server, and the documents that it goes by."""
        self._topology_version = topology.version
        self._schema_hash = "" if schema is None else schema.version_hash
        self.policy_version = "" if access is None else str(access.version)
        if self.log is None:
            return
        details: dict[str, object] = {"topology_version": topology.version, "topology_sha256": _digest(topology)}
        if schema is not None:
            details["schema_sha256"] = schema.version_hash
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
        former, self._schema_hash = self._schema_hash, schema.version_hash
        self.changed("schema", former, schema.version_hash, schema.version_hash)

    def use_access_document(self, document: AccessDocument) -> None:
        """Record newer rights; records name their version from now on."""
        former, self.policy_version = self.policy_version, str(document.version)
        if self.log is not None:
            digest = hashlib.sha256(document.model_dump_json().encode()).hexdigest()
            self.changed("rights", former, self.policy_version, digest)

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


class _Denial(NamedTuple):
    """Denials that are alike in this are one record."""

    action: str
    caller: str
    role: str
    host: str
    reason: str


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
            asked, caller = _described(request), recorded_caller(request, peer)
            entry = self._trail.begin(caller, self._kind, role=peer.role, address=peer.address, **asked)
        if entry is None:
            self._path(request, reply)
            return
        try:
            self._path(request, _RecordedReply(reply, entry))
        except BaseException as error:
            entry.end(error)
            raise


class _RecordedReply:
    """A `Reply` whose last answer ends an entry of the audit log."""

    def __init__(self, reply: Reply, entry: AuditEntry) -> None:
        self._reply: Final = reply
        self._entry: Final = entry
        self.on_close: Final = reply.on_close

    @property
    def peer(self) -> PeerIdentity:
        return self._reply.peer

    @property
    def closed(self) -> bool:
        return self._reply.closed

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
    """Return the address of a peer without its port, which every connection of a stranger has anew."""
    found = re.fullmatch(r"\('([^']*)', .*\)|ipv[46]:(.*):\d+", address)
    return address if found is None else found[1] or found[2]


def _described(request: pb.Request) -> Mapping[str, object]:
    """Return the fields of an event that say what an operator asks for."""
    if request.HasField("invalidate"):
        asked = request.invalidate
        numbers = [*(f"object {each}" for each in asked.otypes), *(f"association {each}" for each in asked.atypes)]
        return {"shards": tuple(asked.shards), "types": tuple(numbers)}
    if request.HasField("touch_keys"):
        touches = request.touch_keys.touches
        return {"shards": _shards(touch.id for touch in touches), "details": {"keys": len(touches)}}
    if request.HasField("change_journal"):
        change = request.change_journal
        kind = change.WhichOneof("change") or "nothing"
        return {"details": {kind: getattr(change, kind, "")}}
    settle = request.settle_pairs
    shards = {*_shards(pair.low_id for pair in settle.pairs), *(each.low_shard for each in settle.shards)}
    return {"shards": tuple(sorted(shards)), "details": {"pairs": len(settle.pairs)}}


def _shards(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({each >> SHARD_SHIFT for each in ids}))


def _digest(topology: Topology) -> str:
    return hashlib.sha256(dump_topology(topology).encode()).hexdigest()
