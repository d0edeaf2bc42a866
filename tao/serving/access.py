"""What callers may do at this server: the rules in force, the checks of requests, and counts of what they refuse.

A request is checked by the caller on whose behalf it is made. An application is the caller of its own requests. A
follower or leader passes the caller of a write or critical read on with it, and is believed, because only a server's
credentials prove that role; what it asks for itself, such as the fill of its cache, is checked nowhere. Tailers and
watchers ask for nothing that rights are for (`tao.serving.requests`). An operator is bound by its role alone, unless
the document names it: then it needs the right to administer.

Without rules every check is a test of `AccessControl.policy` for None. With rules, a batch is checked once for each
type that it names, and only for a caller who may not read everything. The type of an object is known when it has been
read: one of another type is answered as if it had never been there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Final, Literal, NamedTuple, Self

from tao.access.decisions import Decisions, TypeKind
from tao.access.document import AccessDocument, Operation
from tao.access.policy import ALL_TYPES, NO_TYPES, Budget, Grant, Policy, Rights
from tao.model.errors import AccessError, BudgetExceeded, PermissionDenied, UnknownType
from tao.model.graph import ABSENT, deleted_otype, encode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import ObjectQuery, Query
from tao.model.versions import NEVER_WRITTEN
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.schema.registry import Schema
from tao.schema.types import AssocType
from tao.serving.audit import Denial, recorded_name
from tao.serving.request_scope import NamedType, Scope, Scoped
from tao.wire.identity import PASSING_ON, PeerIdentity
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

_OPERATOR: Final = "operator"
SERVERS: Final = PASSING_ON | {_OPERATOR}
"""Roles that are not bound by the rights of their own name as applications are."""
OBSERVERS: Final = frozenset({"tailer", "watcher"})
"""Roles that serve no requests, and read nothing. What the rules deny applications is denied to them, too, but for the
changes of topology and schema."""

_NEVER_WRITTEN: Final = encode_object(NEVER_WRITTEN, ABSENT, b"")
NOTHING_SHOWN: Final = (None, _NEVER_WRITTEN)
"""The values that show no item."""
_MAX_KEPT: Final = 10_000
"""Callers whose checks, and denials whose texts, are kept: names are chosen by callers and must not fill the memory."""

GUARDED: Final = frozenset(
    {
        *("watch", "reserve_ids", "settle_pairs", "inspect", "invalidate", "touch_keys", "list_jobs", "change_jobs"),
        *("inspect_journal", "change_journal", "scan_shard", "purge_removed", "fold_counters"),
    }
)
"""The kinds of requests that `AccessControl.guarded` checks as a whole. Reads and writes are checked one by one; the
topology and the schema are for everybody who may connect; the rest is between servers."""


def _ignore(*_: object) -> None:
    pass


def caller_of(request: pb.Request, peer: PeerIdentity) -> str | None:
    """Return the caller on whose behalf a request is made, empty for one without a name; None for what a server asks
    for itself."""
    if peer.role in PASSING_ON:
        return request.caller if request.HasField("caller") else None
    return None if peer.role == _OPERATOR else peer.caller


def pass_caller(passed: pb.Request, caller: str | None) -> None:
    """Name the caller in a request that this server passes on."""
    if caller is None:
        passed.ClearField("caller")
    else:
        passed.caller = caller


class OnBehalfOf(NamedTuple):
    """The caller and the operator on whose behalf this server passes a change on."""

    caller: str | None
    """See `caller_of`."""
    operator: str = ""
    """The operator who asked for it, as audit logs name it; no right depends on that."""

    @classmethod
    def sender(cls, request: pb.Request, peer: PeerIdentity) -> Self:
        """Return on whose behalf a peer sends a request. Servers are believed, as with the caller."""
        if peer.role in PASSING_ON:
            return cls(caller_of(request, peer), request.operator)
        return cls(caller_of(request, peer), recorded_name(peer) if peer.role == _OPERATOR else "")

    def name_in(self, passed: pb.Request) -> None:
        """Name both in a request that this server passes on."""
        pass_caller(passed, self.caller)
        passed.operator = self.operator


class Asked(NamedTuple):
    """What the rules deny: on whose behalf it is asked for, who has sent it, and the request, or the part of it."""

    caller: str
    peer: PeerIdentity
    what: Scoped


def _denied_type(rights: Rights, write: pb.Write) -> tuple[TypeKind, int] | None:
    """Return the type that a write needs and that is not granted, or None."""
    operation = write.WhichOneof("operation")
    if operation == "read_state":
        atype = write.read_state.atype
        return None if rights.critical.associations >> atype & 1 else (TypeKind.ASSOCIATION, atype)
    grant = rights.write
    if operation in ("obj_add", "obj_update", "obj_delete"):
        otype: int = getattr(write, operation).otype
        # Without a type, the leader compares that of the row.
        allowed = grant.objects >> otype & 1 if otype or operation == "obj_add" else grant.objects != NO_TYPES
        return None if allowed else (TypeKind.OBJECT, otype)
    if operation == "node_set_state":
        named = write.node_set_state.atypes
        return next(((TypeKind.ASSOCIATION, each) for each in named if not grant.associations >> each & 1), None)
    if operation in ("assoc_add", "assoc_delete", "assoc_change_type", "assoc_merge", "place_edges", "counter_add"):
        edge = getattr(write, operation)
        atypes: tuple[int, ...] = (edge.atype, edge.new_atype) if operation == "assoc_change_type" else (edge.atype,)
        return next(((TypeKind.ASSOCIATION, each) for each in atypes if not grant.associations >> each & 1), None)
    if operation in ("add_job", "cancel_job"):
        # A job does what its worker may do, whatever its types are.
        return None if grant.covers_all else (TypeKind.OBJECT, ABSENT)
    if operation == "read_job":
        return (TypeKind.OBJECT, ABSENT) if grant == (NO_TYPES, NO_TYPES) else None
    return None


class AccessControl:
    """The rules of one server, and what they have refused."""

    def __init__(self, schema: Schema, log: Logger) -> None:
        self._schema = schema
        self._log: Final = log
        self._decisions: Decisions | None = None
        self.readers: Readers | None = None
        """The checks of reads by applications, by caller; None: every caller may do everything."""
        self._texts: dict[tuple[str, Operation, TypeKind, int], str] = {}
        self.policy: Policy | None = None
        """The rules in force; None: every caller may do everything."""
        self.denied: Counter[str] = Counter()
        """Number of refused requests, queries and writes, by operation."""
        self.would_deny: Counter[str] = Counter()
        """Number of those that were done although the rules deny them."""
        self.document_errors = 0
        self.on_document: Callable[[AccessDocument], None] = _ignore
        """Called with each newer document that comes into force."""
        self.on_denied: Callable[[Denial], None] | None = None
        """Called for each refusal; None: nobody records them."""

    @property
    def document(self) -> AccessDocument | None:
        """Return the document in force, None without rules."""
        return None if self._decisions is None else self._decisions.document

    # ---- the rules in force ----------------------------------------------------------------------------------------

    def use_document(self, document: AccessDocument) -> None:
        """Use a newer document; ignore an older or equal one."""
        if self._decisions is not None:
            current = self._decisions.document
            if document.version <= current.version:
                if document != current:
                    refused = f"version {document.version} is not above {current.version}, and differs from it"
                    self.note_error(AccessError(refused))
                return
        self._use(Decisions(document, self._schema))
        self.on_document(document)
        self._log.info("access_changed", access_version=document.version, mode=document.mode)

    def warn_if_open(self) -> None:
        """Warn when there is no document although callers show credentials, which suggests that it is missing."""
        if self._decisions is None:
            why = "there is no access document: every caller may do everything (access_file makes servers require one)"
            self._log.warning("no_access_document", reason=why)

    def use_schema(self, schema: Schema) -> None:
        """Use the types of this schema from now on."""
        self._schema = schema
        if self._decisions is not None:
            self._use(Decisions(self._decisions.document, schema))

    def note_error(self, error: AccessError) -> None:
        """Count and log a document that cannot be used; the former one stays in force."""
        self.document_errors += 1
        self._log.error("access_refused", reason=error.message)

    def _use(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self.policy = decisions.policy
        self.readers = Readers(self, decisions.policy)
        self._texts.clear()

    # ---- checks ----------------------------------------------------------------------------------------------------

    def reader(self, request: pb.Request, peer: PeerIdentity) -> ReadCheck | None:
        """Return the check of a batch of reads that a server or operator has sent, None when it is not checked. Raises
        `PermissionDenied`."""
        assert self.readers is not None, "asked only with rules"
        self.check_operator(request, peer)
        if request.read.for_fill and not request.read.critical and peer.role in PASSING_ON:
            return None  # it fills a cache, for everybody who misses the key
        caller = caller_of(request, peer)
        return None if caller is None else self.readers[caller]

    def refused_writes(self, request: pb.Request, peer: PeerIdentity) -> dict[int, PermissionDenied]:
        """Return the errors of the writes that their caller may not make, by slot."""
        policy = self.policy
        if policy is None:
            return {}
        self.check_operator(request, peer)
        caller = caller_of(request, peer)
        if caller is None:
            return {}
        rights = policy.rights(caller)
        if rights.write.covers_all and rights.critical.covers_all:
            return {}
        writes = request.write.writes
        denied: dict[tuple[Operation, TypeKind, int], list[int]] = {}
        for slot, write in enumerate(writes):
            which = _denied_type(rights, write)
            if which is not None:
                # The state of an edge is read from the master, and changes nothing.
                operation = Operation.CRITICAL if write.HasField("read_state") else Operation.WRITE
                self.count(operation, enforced=policy.enforced)
                denied.setdefault((operation, *which), []).append(slot)
        if not policy.enforced:
            return {}
        # One report of all that lack the same right: thousands of writes cost hardly more than one.
        refused: dict[int, PermissionDenied] = {}
        for lacking, slots in denied.items():
            asked = Asked(caller, peer, [writes[slot] for slot in slots])
            refused |= dict.fromkeys(slots, self.refuse(asked, *lacking, times=len(slots)))
        return refused

    def writer(self, request: pb.Request, peer: PeerIdentity) -> WriteCheck | None:
        """Return the check of writes by the types of stored objects, None when their caller may write objects of every
        type."""
        policy = self.policy
        if policy is None or (caller := caller_of(request, peer)) is None:
            return None
        rights = policy.rights(caller)
        return None if rights.write.objects == ALL_TYPES else WriteCheck(self, caller, rights, peer)

    def guarded(self, kind: str, path: Callable[[pb.Request, Reply], None]) -> Callable[[pb.Request, Reply], None]:
        """Return a path of a kind in `GUARDED` with the check in front of it."""

        def handle(request: pb.Request, reply: Reply) -> None:
            if self.policy is not None:
                self._check_request(kind, request, reply.peer)
            path(request, reply)

        return handle

    def _check_request(self, kind: str, request: pb.Request, peer: PeerIdentity) -> None:
        assert self.policy is not None, "asked only with rules"
        self.check_operator(request, peer)
        caller = caller_of(request, peer)
        if caller is None or peer.role in OBSERVERS:
            return
        rights, asked = self.policy.rights(caller), Asked(caller, peer, request)
        if kind == "watch" and not rights.watch.covers_all:
            self._raise(asked, Operation.WATCH, "it needs the right on all types")
        elif kind == "reserve_ids" and rights.write.objects == NO_TYPES:
            self._raise(asked, Operation.WRITE, "ids are reserved for objects, and it may write no type of object")
        elif kind == "settle_pairs":
            self._check_pairs(asked, rights.read.associations, request.settle_pairs)
        elif kind == "scan_shard":
            self._check_scan(asked, rights.critical, request.scan_shard)
        elif kind == "purge_removed":
            self._check_all(asked, rights.write.associations, [each for each in self._schema.assocs if each.states])
        elif kind == "fold_counters":
            self._check_all(asked, rights.write.associations, self._schema.counters)

    def _check_scan(self, asked: Asked, granted: Grant, scan: pb.ScanShard) -> None:
        """Raise `PermissionDenied` unless a caller may read every row that a scan of the master may find."""
        if scan.atype:
            number, types, is_denied = scan.atype, TypeKind.ASSOCIATION, not granted.associations >> scan.atype & 1
        elif scan.otype:
            number, types, is_denied = scan.otype, TypeKind.OBJECT, not granted.objects >> scan.otype & 1
        else:
            if granted.objects != ALL_TYPES:
                self._raise(asked, Operation.CRITICAL, "objects of any type are scanned with the right on all types")
            return
        if is_denied and self.count(Operation.CRITICAL, enforced=self._is_enforced):
            raise self.refuse(asked, Operation.CRITICAL, types, number)

    def _check_all(self, asked: Asked, writable: int, atypes: Iterable[AssocType]) -> None:
        """Raise `PermissionDenied` unless a caller may write edges of all these types: a purge, or a fold, finds
        all."""
        for atype in atypes:
            if not writable >> atype.number & 1:
                if self.count(Operation.WRITE, enforced=self._is_enforced):
                    raise self.refuse(asked, Operation.WRITE, TypeKind.ASSOCIATION, atype.number)
                return

    def _check_pairs(self, asked: Asked, readable: int, settle: pb.SettlePairs) -> None:
        """Raise `PermissionDenied` unless a caller may read both lists of each edge that is to be settled."""
        if readable == NO_TYPES:
            self._raise(asked, Operation.READ, "pairs are settled for readers, and it may read no type of association")
            return
        for atype in {atype for pair in settle.pairs for atype in pair.atypes}:
            inverse = self._schema.atype(atype).inverse if self._schema.knows_atype(atype) else None
            for each in (atype,) if inverse is None else (atype, inverse):
                if not readable >> each & 1 and self.count(Operation.READ, enforced=self._is_enforced):
                    raise self.refuse(asked, Operation.READ, TypeKind.ASSOCIATION, each)

    def budget_of(self, caller: str) -> Budget | None:
        """Return the budget of a caller, None when it has none. While denials are only counted, it bounds the cost per
        second alone, which `over_budget` counts."""
        policy = self.policy
        budget = None if policy is None else policy.rights(caller).budget
        return budget if budget is None or self._is_enforced else budget._replace(units_under_way=None)

    def over_budget(self, asked: Asked, units_per_second: int, seconds: float) -> BudgetExceeded | None:
        """Count a request of a caller that has spent its budget, and return its error; None while denials are only
        counted. ``seconds``: until it may spend again."""
        assert self._decisions is not None, "only rules give budgets"
        if not self.count("budget", enforced=self._is_enforced):
            return None
        error = BudgetExceeded(
            f"{self._decisions.who(asked.caller)}, which may cost this server {units_per_second} units a second "
            "(`budget` in the access document; a miss costs 1, more with a long answer, a critical read or a write "
            f"several): send less, or again in {seconds:.1f} s"
        )
        if self.on_denied is not None:
            self.on_denied(Denial(asked.caller, "budget", error, asked.peer, asked.what))
        return error

    def readable_lists(self, caller: str) -> int:
        """Return the types of the lists that a caller may read."""
        policy = self.policy
        return ALL_TYPES if policy is None or not policy.enforced else policy.rights(caller).read.associations

    def check_operator(self, request: pb.Request, peer: PeerIdentity) -> None:
        """Raise `PermissionDenied` for an operator whom the document names, and who may not administer what the request
        names: the types that it invalidates, or else everything."""
        if peer.role != _OPERATOR or self.policy is None or peer.caller not in self.policy.named:
            return
        grant, asked = self.policy.rights(peer.caller).administer, Asked(peer.caller, peer, request)
        invalidate = request.invalidate
        if invalidate.otypes or invalidate.atypes:
            if all(grant.objects >> each & 1 for each in invalidate.otypes) and all(
                grant.associations >> each & 1 for each in invalidate.atypes
            ):
                return
            self._raise(asked, Operation.ADMINISTER, "it needs the right on every type that it names")
        elif not grant.covers_all:
            self._raise(asked, Operation.ADMINISTER, "it needs the right on all types")

    # ---- refusals --------------------------------------------------------------------------------------------------

    def refuse(
        self, asked: Asked, operation: Operation, kind: TypeKind, number: int, times: int = 1
    ) -> PermissionDenied:
        """Return the error of a refusal. ``number`` is the type's, 0 for any. ``times``: so many were refused."""
        key = asked.caller, operation, kind, number
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= _MAX_KEPT:
                self._texts.clear()
            text = self._texts[key] = self._text(*key)
        return self.denial(asked, operation, text, times)

    def denial(self, asked: Asked, operation: Operation, text: str, times: int = 1) -> PermissionDenied:
        """Return the error of a refusal, which is reported."""
        error = PermissionDenied(text)
        if self.on_denied is not None:
            self.on_denied(Denial(asked.caller, operation.value, error, asked.peer, asked.what, times))
        return error

    def count(self, operation: Operation | Literal["budget"], *, enforced: bool) -> bool:
        """Count one refusal. Returns whether the rules are enforced."""
        (self.denied if enforced else self.would_deny)[str(operation)] += 1
        return enforced

    @property
    def _is_enforced(self) -> bool:
        return self.policy is not None and self.policy.enforced

    def _raise(self, asked: Asked, operation: Operation, why: str) -> None:
        assert self._decisions is not None, "only rules refuse"
        if self.count(operation, enforced=self._is_enforced):
            raise self.denial(asked, operation, f"{self._decisions.who(asked.caller)}; {operation} is denied: {why}")

    def _text(self, caller: str, operation: Operation, kind: TypeKind, number: int) -> str:
        decisions = self._decisions
        assert decisions is not None, "only rules refuse"
        find = self._schema.otype if kind is TypeKind.OBJECT else self._schema.atype
        try:
            name = find(number).name
            why = decisions.verdict(caller, operation, kind, name).why
        except UnknownType:
            name, which = "TYPE", f"the {kind} type {number}" if number else f"any {kind} type"
            why = f"none of its roles grants {operation} of {which}"
        named = f"--caller {caller} " if caller else ""
        ask = f"tao access explain {named}--operation {operation} --type {name}"
        return f"{decisions.who(caller)}; {why} (see {ask})"

    # ---- metrics and /stats ----------------------------------------------------------------------------------------

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        for outcome, counter in (("denied", self.denied), ("would_deny", self.would_deny)):
            metrics.gauge_family(
                "access_denials_total",
                "Requests, queries and writes that the access document denies, by operation: refused, or done because "
                "its mode is to count; or whose caller has spent its budget. A write that a follower lets pass is "
                "judged and counted again at its leader.",
                "operation",
                counter.copy,
                outcome=outcome,
            )
        metrics.gauge(
            "access_version",
            "Version of the access document in force; 0: there is none.",
            lambda: 0 if self.policy is None else self.policy.version,
        )
        metrics.gauge_family(
            "access_document_errors_total",
            "Access documents that were refused: they are wrong, missing, or of no higher version.",
            "event",
            lambda: {"refused": self.document_errors},
        )

    def summary(self) -> dict[str, object]:
        """Return the numbers for `/stats`."""
        policy = self.policy
        return {
            "version": 0 if policy is None else policy.version,
            "mode": "none" if policy is None else "enforce" if policy.enforced else "count",
            "denied": self.denied.total(),
            "would_deny": self.would_deny.total(),
            "refused_documents": self.document_errors,
        }


class Readers(dict[str, "ReadCheck | None"]):
    """The checks of reads by caller, each made when it is asked for; None for a caller who may read everything."""

    def __init__(self, control: AccessControl, policy: Policy) -> None:
        super().__init__()
        self._control: Final = control
        self._policy: Final = policy

    def __missing__(self, caller: str) -> ReadCheck | None:
        rights = self._policy.rights(caller)
        if len(self) >= _MAX_KEPT:
            self.clear()
        check = self[caller] = None if rights.reads_all else ReadCheck(self._control, caller, rights)
        return check


def _bytes_of(bits: int) -> bytes:
    return bits.to_bytes(bits.bit_length() // 8 + 1, "little")


class ReadCheck:
    """The check of reads of one caller who may not read everything."""

    __slots__ = ("_caller", "_control", "_enforced", "_peer", "_rights", "atypes", "otypes")

    def __init__(self, control: AccessControl, caller: str, rights: Rights) -> None:
        assert control.policy is not None, "made only with rules"
        self._control: Final = control
        self._caller: Final = caller
        self._peer = PeerIdentity("", "")
        self._rights: Final = rights
        self._enforced: Final = control.policy.enforced
        objects, associations = rights.read
        self.otypes: Final = None if objects == ALL_TYPES else _bytes_of(objects & ~(1 << ABSENT))
        """The types of the objects that the caller may read, as a bit set in bytes; None: all. `ABSENT` is not among
        them, since a deleted object has had a type."""
        self.atypes: Final = None if associations == ALL_TYPES else _bytes_of(associations)
        """The association types that it may read."""

    def asked_by(self, peer: PeerIdentity) -> ReadCheck:
        """Return this check for a request of a peer, whom the records of its refusals name."""
        if self._control.on_denied is None:
            return self
        check = copy(self)
        check._peer = peer
        return check

    def check_bound(self, request: pb.Request) -> None:
        """Raise `PermissionDenied` for a bound on staleness that is below the least that the caller may ask for."""
        least, max_staleness_ms = self._rights.min_staleness_ms, request.read.max_staleness_ms
        if 0 < max_staleness_ms < least and self._control.count(Operation.READ, enforced=self._enforced):
            raise self._control.denial(
                Asked(self._caller, self._peer, request),
                Operation.READ,
                f"max_staleness_ms is {max_staleness_ms}, and the roles of caller {self._caller!r} allow {least} or "
                "more (min_staleness_ms)",
            )

    def leave_out(self, atypes: Sequence[int], values: list[bytes | None], first: int) -> None:
        """Turn hits of types that the caller may not read into misses, which `refuse` refuses. ``first`` is the slot of
        the first type."""
        allowed = self._rights.read.associations
        for slot, atype in zip(range(first, len(values)), atypes, strict=False):
            if not allowed >> atype & 1 and values[slot] is not None:
                if self._enforced:
                    values[slot] = None
                else:
                    self._control.count(Operation.READ, enforced=False)

    def hide(self, ids: Sequence[int], values: list[bytes | None], minimums: Mapping[int, int]) -> None:
        """Turn objects of types that the caller may not read into absent ones; into misses where the caller asks for a
        version, which one that never was does not have. ``ids``: theirs, by slot."""
        hidden: dict[int, list[int]] = {}
        for slot, value in enumerate(values):
            if not value or not (otype := self._hidden_otype(value)):
                continue
            if self._enforced and minimums.get(slot, 0):
                values[slot] = None
            elif self._control.count(Operation.READ, enforced=self._enforced):
                values[slot] = _NEVER_WRITTEN
                hidden.setdefault(otype, []).append(ids[slot])
        if self._control.on_denied is not None:
            for otype, found in hidden.items():
                self._deny(Operation.READ, TypeKind.OBJECT, otype, found)

    def may_ask_for(self, atype: int) -> bool:
        """Return whether a query of an association type is answered; of objects, which have type 0, every one is."""
        return not self._enforced or not atype or bool(self._rights.read.associations >> atype & 1)

    def _hidden_otype(self, value: bytes) -> int:
        """Return the type that an object has, or had until it was deleted, if the caller may not read it; else 0."""
        otype = int.from_bytes(value[8:12], "little") or deleted_otype(value)
        return 0 if otype == ABSENT or self._rights.read.objects >> otype & 1 else otype

    def refuse(self, query: Query, *, critical: bool) -> PermissionDenied | None:
        """Return why the caller may not have this query answered, or None. Objects are compared by `shown`, too."""
        rights = self._rights
        if isinstance(query, ObjectQuery):
            if critical and rights.critical.objects == NO_TYPES:
                return self._refuse(Operation.CRITICAL, TypeKind.OBJECT, 0, query.id)
            return None
        atype = query.atype
        if not rights.read.associations >> atype & 1:
            return self._refuse(Operation.READ, TypeKind.ASSOCIATION, atype, query.id1)
        if critical and not rights.critical.associations >> atype & 1:
            return self._refuse(Operation.CRITICAL, TypeKind.ASSOCIATION, atype, query.id1)
        return None

    def shown(self, object_id: int, value: bytes, *, critical: bool) -> bytes | PermissionDenied:
        """Return an object's value as the caller may see it, or why it may not be read critically."""
        if hidden := self._hidden_otype(value):
            refused = self._refuse(Operation.READ, TypeKind.OBJECT, hidden, object_id)
            return value if refused is None else _NEVER_WRITTEN
        otype = int.from_bytes(value[8:12], "little")
        if critical and otype != ABSENT and not self._rights.critical.objects >> otype & 1:
            return self._refuse(Operation.CRITICAL, TypeKind.OBJECT, otype, object_id) or value
        return value

    def _refuse(self, operation: Operation, kind: TypeKind, number: int, key_id: int) -> PermissionDenied | None:
        if not self._control.count(operation, enforced=self._enforced):
            return None
        return self._deny(operation, kind, number, (key_id,))

    def _deny(self, operation: Operation, kind: TypeKind, number: int, ids: Sequence[int]) -> PermissionDenied:
        types = frozenset((NamedType(kind, number),) if number else ())
        scope = Scope(types, frozenset([each >> SHARD_SHIFT for each in ids]))
        return self._control.refuse(Asked(self._caller, self._peer, scope), operation, kind, number, len(ids))


class WriteCheck:
    """The check of writes to stored objects by a caller who may not write objects of every type."""

    def __init__(self, control: AccessControl, caller: str, rights: Rights, peer: PeerIdentity) -> None:
        assert control.policy is not None, "made only with rules"
        self._control: Final = control
        self._caller: Final = caller
        self._peer: Final = peer
        self._rights: Final = rights
        self.writable: Final = rights.write.objects if control.policy.enforced else ALL_TYPES
        """The types of the objects that a write may change; one of another type is left alone."""

    def judge(self, object_id: int, otype: int) -> PermissionDenied | None:
        """Return the error of a write that has met an object of this type; None when it was written, or when the caller
        may not know of the object. 0: it has met none."""
        if not otype or self._rights.write.objects >> otype & 1:
            return None
        if not self._control.count(Operation.WRITE, enforced=not self.writable >> otype & 1):
            return None
        scope = Scope(frozenset({NamedType(TypeKind.OBJECT, otype)}), frozenset({object_id >> SHARD_SHIFT}))
        asked = Asked(self._caller, self._peer, scope)
        refused = self._control.refuse(asked, Operation.WRITE, TypeKind.OBJECT, otype)
        return refused if self._rights.read.objects >> otype & 1 else None
