"""The one error tree of the system.

TaoError
 ├─ RequestError              the caller must change something before trying again
 │   ├─ InvalidArgument       a number, bound, id or set that no request may carry
 │   │   ├─ UnknownShard      the graph has no such shard
 │   │   ├─ IdNotReserved     an object's id was chosen by the caller, and may be given to another one later
 │   │   ├─ ObjectDeleted     an object is to be added under the id of one that was deleted
 │   │   ├─ NotCommutative    a write that a journal cannot accept, since it must not be made late or twice
 │   │   └─ NoJournal         the follower keeps no journal, so it accepts no writes to be made later
 │   ├─ UnknownJob            no background job has the id
 │   ├─ UnknownType           no such object or association type in the schema
 │   ├─ WrongType             the id belongs to an object of another type
 │   ├─ InvalidField          a field is unknown, or its value has the wrong type
 │   ├─ TooLarge              data, an id2 set or a message above its limit
 │   │   └─ ListFull          an association list has as many edges as its type allows
 │   ├─ Unauthorized          the peer showed no or wrong credentials
 │   └─ PermissionDenied      the caller lacks a right on a type that the request names
 ├─ RetryableError            nothing was written; the same request may succeed later
 │   ├─ NotMine               the server does not host that shard (topology skew)
 │   ├─ Overloaded            a bounded queue is full, or the deadline cannot be met
 │   │   ├─ AuditFull         the audit log cannot record what was asked, so it is not done
 │   │   ├─ BudgetExceeded    the caller has spent what the access document lets it cost a server
 │   │   ├─ ShardBlocked      a row or metadata lock of one shard was not acquired in time
 │   │   └─ AnswerFull        the answers of a batch are more than goes into one; the others came
 │   ├─ Unavailable           the server, leader or database needed cannot be reached
 │   │   ├─ DatabaseDown      the database server does not answer probes either; nothing is asked of it until it does
 │   │   ├─ DatabaseFull      the disk of the database server is full; its writes fail until room is made there
 │   │   ├─ MasterReadOnly    the database server takes no writes or critical reads: a promotion is under way, or its
 │   │   │                      lease has run out
 │   │   ├─ TlsMismatch       of two processes one speaks TLS, and the other does not
 │   │   └─ NoCopy            a write is to be accepted on two disks, and no other follower keeps the copy; or a
 │   │                          follower that is asked for a copy has none
 │   ├─ DeadlineExceeded      the time allowed has passed before anything was written
 │   ├─ Fenced                the writer no longer owns the shard
 │   └─ StaleRead             every copy within reach is below the version asked for
 ├─ OutcomeUnknown            the write may or may not have been committed
 ├─ WriteLost                 the write that a read's token names was lost with its master database
 ├─ ProtocolError             a peer broke the wire protocol
 ├─ OperatorError             an operator's mistake; the message says what to do
 │   ├─ SchemaError           the schema file is wrong
 │   ├─ SettingsError         a settings file is wrong
 │   ├─ AccessError           the access document is wrong
 │   └─ TopologyError         the topology document is wrong
 │       ├─ TopologyConflict  someone else changed the document first (compare-and-set)
 │       ├─ NameTaken         a server would register under a name that another one has
 │       └─ TopologyTooLarge  one change has more than one transaction of etcd holds
 └─ InternalError             a bug here: an invariant did not hold

Every class has a stable, machine-readable ``reason``, which travels on the wire, and says in ``retryable`` whether
sending the same request again can help. The message is for people and says what to do.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import ClassVar


class TaoError(Exception):
    """Root of all errors raised on purpose. ``reason`` and ``retryable`` are properties of the class."""

    reason: ClassVar[str] = "TAO_ERROR"
    retryable: ClassVar[bool] = False

    is_refusal: bool = False
    """One of two processes has refused the other for what it is or shows. That says nothing of the other's health, and
    least of all that it is down."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(TaoError):
    """The request is wrong; nothing was written and a repetition fails the same way."""

    reason = "INVALID_REQUEST"


class InvalidArgument(RequestError):
    """A bound, id, position, limit or time outside what the operation accepts."""

    reason = "INVALID_ARGUMENT"


class UnknownShard(InvalidArgument):
    """The shard is none of this graph, or an id lies on such a shard. A server whose topology is older than the
    sender's answers `NotMine` instead: the shard may have been added since."""

    reason = "UNKNOWN_SHARD"


class IdNotReserved(InvalidArgument):
    """The id of a new object was neither reserved nor could it have been: it is above all ids given out so far, so it
    may be given to another caller. Reserve ids, or leave the id out."""

    reason = "ID_NOT_RESERVED"


class ObjectDeleted(InvalidArgument):
    """An object cannot be added under this id: it was that of an object which was deleted, and ids are not used
    again."""

    reason = "OBJECT_DELETED"


class NotCommutative(InvalidArgument):
    """A journal accepts only writes that may be made late, in any order and twice: operations on edges of types with
    states, states of nodes, and `obj_add` and `add_job` with a reserved id. It refuses adds of types with `max_edges`,
    because a list that is full by then would refuse an edge that was accepted, and `counter_add`, which would count
    twice. Make this write without the journal."""

    reason = "NOT_COMMUTATIVE"


class NoJournal(InvalidArgument):
    """The follower keeps no journal, so it cannot accept writes to be made later: make them at once, or have
    ``journal.folder`` set in the settings of the followers."""

    reason = "NO_JOURNAL"


class UnknownJob(RequestError):
    """There is no background job with this id. One that has ended is kept for a week."""

    reason = "UNKNOWN_JOB"


class UnknownType(RequestError):
    """The schema has no such object or association type."""

    reason = "UNKNOWN_TYPE"


class WrongType(RequestError):
    """The id is that of an object of another type than the one named."""

    reason = "WRONG_TYPE"


class InvalidField(RequestError):
    """A field is not in the type's schema, or its value has another type."""

    reason = "INVALID_FIELD"


class TooLarge(RequestError):
    """Data, an id2 set or a message above its limit (docs/reference/limits.md)."""

    reason = "TOO_LARGE"


class ListFull(TooLarge):
    """The association list has as many edges as its type allows (``max_edges`` in the schema). Delete one first."""

    reason = "LIST_FULL"


class OperationTooOld(InvalidArgument):
    """The operation on an edge is older than the type's ``keep_removed_days``. A removal that was newer may have been
    purged since, so the operation is refused, and never applied. Among servers: the first flush of a counter by a
    follower's life that began more than a day ago."""

    reason = "TOO_OLD"


class OperationAhead(InvalidArgument):
    """The time of the operation on an edge is more than 60 s ahead of the leader's clock. It would win over all later
    ones: mend the clock that it was taken from."""

    reason = "TOO_FAR_AHEAD"


class Unauthorized(RequestError):
    """The peer's credentials are missing or wrong."""

    reason = "UNAUTHORIZED"


class PermissionDenied(RequestError):
    """The access document gives the caller no right to do this with a type that the request names. The message says
    which right is missing; `tao access explain` says why."""

    reason = "PERMISSION_DENIED"


class RetryableError(TaoError):
    """Nothing was written; the same request may succeed later or at another server."""

    reason = "RETRYABLE"
    retryable = True


class NotMine(RetryableError):
    """The server does not host the shard. Refresh the topology to at least ``topology_version`` and ask again."""

    reason = "NOT_MINE"

    def __init__(self, message: str, topology_version: int = 0) -> None:
        super().__init__(message)
        self.topology_version = topology_version


class Overloaded(RetryableError):
    """A bounded queue is full, or the request cannot be served within its deadline."""

    reason = "OVERLOADED"


class ShardBlocked(Overloaded):
    """A lock was not acquired in time; the transaction is rolled back. ``shard`` is -1 when the server did not name
    it."""

    reason = "SHARD_BLOCKED"

    def __init__(self, message: str, shard: int = -1) -> None:
        super().__init__(message)
        self.shard = shard


class AuditFull(Overloaded):
    """The audit log of the server is full or cannot be written, and its settings demand that nothing is done that it
    does not record. Nothing was written."""

    reason = "AUDIT_FULL"


class BudgetExceeded(Overloaded):
    """The misses, critical reads and writes of the caller have cost this server as much as the access document allows
    it (``budget``). Cache hits go on. Send less, or repeat the request when the message says; a larger budget is the
    operator's to give."""

    reason = "BUDGET_EXCEEDED"


class TooManyConnections(Overloaded):
    """The caller has as many connections to a port of this server, or gRPC calls of one kind, as one caller may have.
    Share a connection among more requests, or have ``doorstep.max_connections_per_caller`` raised."""

    reason = "TOO_MANY_CONNECTIONS"


class AnswerFull(Overloaded):
    """The answers of a read batch are more than one answer may hold. The answers before this one came. Ask for this
    one again without them, and it comes too."""

    reason = "ANSWER_FULL"


class Unavailable(RetryableError):
    """A server, leader or database that the request needs cannot be reached. Catching it catches `DatabaseDown`,
    `DatabaseFull` and `MasterReadOnly` too."""

    reason = "UNAVAILABLE"


class MasterReadOnly(Unavailable):
    """The database server is closed to writes: it is being replaced as master, or was. Nothing was written, and a
    critical read is not answered from there; a moment later the same request finds the new master."""

    reason = "MASTER_READ_ONLY"


class DatabaseDown(Unavailable):
    """The database server that holds the shard has failed and does not answer probes: no other server of the
    region can serve what needs it (and none at all a critical read, when it is the master), so none is asked before it
    is back."""

    reason = "DATABASE_DOWN"


class DatabaseFull(Unavailable):
    """The disk of the database server that holds the shard is full: nothing was written, and its writes fail until
    somebody makes room there. Reads go on."""

    reason = "DATABASE_FULL"


class TlsMismatch(Unavailable):
    """The server speaks TLS and this process connects without it, or the other way round. The message says which, and
    what to set. Another server may be reached, so requests are tried there as after `Unavailable`."""

    reason = "TLS_MISMATCH"

    is_refusal = True


class NoCopy(Unavailable):
    """The follower accepts a write only when another follower of its tier has a copy on its disk
    (``journal.copies: 2``), and none takes one now. Nothing was accepted: try again later, or make the write at
    once. Asked for the result of a write that another follower has accepted, a follower without a copy of it answers
    the same."""

    reason = "NO_COPY"


class DeadlineExceeded(RetryableError):
    """The time allowed for the request has passed; nothing was written."""

    reason = "DEADLINE_EXCEEDED"


class Fenced(RetryableError):
    """The leader that tried to write no longer owns the shard; its owner can do the write."""

    reason = "FENCED"


class StaleRead(RetryableError):
    """No copy within reach has the minimum version that the read asks for."""

    reason = "STALE_READ"


class OutcomeUnknown(TaoError):
    """The connection broke while the write was being committed: it may have happened. Writes of the graph are
    idempotent except for allocation, so repeating it is safe unless another writer came between."""

    reason = "OUTCOME_UNKNOWN"


class WriteLost(TaoError):
    """The read asks for nothing older than a write that no longer exists: it was acknowledged, and lost when its master
    database was replaced before a replica had it. The same read without the token is answered."""

    reason = "WRITE_LOST"


class ProtocolError(TaoError):
    """A peer sent what the wire protocol does not allow; its connection is closed."""

    reason = "PROTOCOL_ERROR"


class OperatorError(TaoError):
    """A mistake in how the system is run. The message says what to do; it is shown without a traceback."""

    reason = "OPERATOR_ERROR"


class SchemaError(OperatorError):
    """The schema file cannot be used; the message names file, line and path."""

    reason = "SCHEMA_ERROR"


class SettingsError(OperatorError):
    """A settings file cannot be used; the message names file and field."""

    reason = "SETTINGS_ERROR"


class AccessError(OperatorError):
    """The access document cannot be used; the message names file, line and path."""

    reason = "ACCESS_ERROR"


class TopologyError(OperatorError):
    """The topology document cannot be used."""

    reason = "TOPOLOGY_ERROR"


class TopologyConflict(TopologyError):
    """The topology changed since it was read; read it again and repeat the change."""

    reason = "TOPOLOGY_CONFLICT"


class NameTaken(TopologyError):
    """Another server has the name under which this one would register: give it another name, or drain and remove the
    other one first."""

    reason = "NAME_TAKEN"


class TopologyTooLarge(TopologyError):
    """One change of the topology has more than one transaction of etcd holds; make several changes."""

    reason = "TOPOLOGY_TOO_LARGE"


class InternalError(TaoError):
    """An invariant of the system did not hold. Please report it with the server's log."""

    reason = "INTERNAL"


def _all_classes(root: type[TaoError]) -> list[type[TaoError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_all_classes(child))
    return found


_BY_REASON: dict[str, type[TaoError]] = {cls.reason: cls for cls in _all_classes(TaoError)}


def error_from_reason(reason: str, message: str, topology_version: int = 0) -> TaoError:
    """Rebuild an error that travelled as ``(reason, message)``; an unknown reason becomes a plain `TaoError`."""
    cls = _BY_REASON.get(reason, TaoError)
    if cls is NotMine:
        return NotMine(message, topology_version)
    return cls(message)


def unreadable(path: object, error: OSError | UnicodeDecodeError) -> str:
    """Return the text of an error about a file that cannot be read: the same words in every command and server."""
    if isinstance(error, UnicodeDecodeError):
        return f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}"
    return f"{path}: cannot be read: {error.strerror or error}"


def is_tls_refusal(error: BaseException) -> bool:
    """Return whether TLS has failed because one side does not believe or understand the other. A connection that was
    lost meanwhile says nothing of that."""
    lost = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    return isinstance(error, ssl.SSLError) and not isinstance(error, lost)


def refuse_passphrase(private_key: object) -> Callable[[], str]:
    """Return what a TLS context calls for the passphrase of an encrypted key. It raises `SettingsError`: without it,
    OpenSSL would ask at the terminal, and a server would wait for an answer."""

    def refuse() -> str:
        raise SettingsError(
            f"the private key {private_key} is encrypted, and nobody is asked for its passphrase: write it unencrypted "
            f"(openssl pkey -in {private_key} -out FILE) to a file that only this process's account may read"
        )

    return refuse


def unwritable(path: object, error: OSError) -> str:
    """Return the text of an error about a file that cannot be written: the same words in every command and server."""
    return f"{path}: cannot be written: {error.strerror or error}"
