"""The records of the audit log: events, their lines, the chain of hashes through them, and its check.

A line is one JSON document with sorted keys and without blanks, in the form of OCSF's class API Activity (6003) as far
as its fields fit; the rest stands under ``unmapped``. ``seq`` numbers the records, ``previous`` is the hash of the
record before, and ``hash`` is the SHA-256 of ``previous`` followed by the line without ``hash``. So a line that is
changed, removed, moved or added breaks the chain. Lines that are cut off at the end do not: for that, a newest hash is
published, and the check is given one.

Everything here is pure; `tao.observability.audit_log` does the writing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

import msgspec

from tao import __version__

_API_ACTIVITY: Final = 6003
_APPLICATION_ACTIVITY: Final = 6
_OCSF_VERSION: Final = "1.3.0"
_INFORMATIONAL, _MEDIUM = 1, 3
_MAX_TEXT: Final = 300
"""Characters of a text in a record: peers choose their names, and errors may quote what they have sent."""
MAX_LISTED: Final = 100
"""Shards, and types, that a record lists; it always says how many there are."""
_HASH_DIGITS: Final = 64


class Outcome(IntEnum):
    """OCSF's ``status_id``. `UNKNOWN`: it may have been done, or is not finished yet."""

    UNKNOWN = 0
    SUCCESS = 1
    FAILURE = 2


class Activity(IntEnum):
    """OCSF's ``activity_id`` of this class."""

    CREATE = 1
    UPDATE = 3
    DELETE = 4
    OTHER = 99


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded. ``time_ms``: Unix time. ``count``: equal events that this one stands for, until
    ``end_time_ms``. ``more_shards`` and ``more_types``: how many there are besides. ``policy_version``: of the access
    rules in force. ``details``: plain data of the action."""

    time_ms: int
    server: str
    caller: str
    action: str
    activity: Activity = Activity.OTHER
    outcome: Outcome = Outcome.SUCCESS
    reason: str = ""
    message: str = ""
    role: str = ""
    address: str = ""
    shards: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    more_shards: int = 0
    more_types: int = 0
    policy_version: str = ""
    count: int = 1
    end_time_ms: int = 0
    details: Mapping[str, object] = {}


class ChainEnd(NamedTuple):
    """The newest record of a chain: its number and its hash."""

    seq: int
    hash: str


CHAIN_START: Final = ChainEnd(0, "0" * _HASH_DIGITS)
"""The end of a chain without records."""


def encode(event: AuditEvent, after: ChainEnd, lost: int = 0) -> tuple[bytes, ChainEnd]:
    """Return the line of an event, with its line feed, and the new end of the chain. ``lost``: records that could not
    be written before this one."""
    document = {**_ocsf(event, lost), "seq": after.seq + 1, "previous": after.hash}
    digest = _hash(after.hash, document)
    return _canonical({**document, "hash": digest}) + b"\n", ChainEnd(after.seq + 1, digest)


def record_end(line: bytes) -> ChainEnd | None:
    """Return the number and hash of the record on a line, with its line feed; None for a line that is not whole or was
    changed."""
    document = _parsed(line)
    return None if document is None or not _is_unchanged(line, document) else _end_of(document)


class Fault(StrEnum):
    """Why a line does not fit."""

    UNREADABLE = "unreadable"
    """It is not a record."""
    CHANGED = "changed"
    """It is not what was written: its own hash does not fit."""
    GAP = "gap"
    """Records are missing before it."""
    REORDERED = "reordered"
    """It stands behind a later record, or twice."""
    DETACHED = "detached"
    """It continues another record than the one before it, which was replaced."""
    TORN = "torn"
    """It has no end: a crash, or somebody, cut it off."""
    TRUNCATED = "truncated"
    """No record has the newest published hash: records are missing at the end, or were written anew."""


class Verdict(NamedTuple):
    """The result of a check. ``records``: those that fit, up to ``end``. ``line``: the number of the first line that
    does not, from 1; behind the last one for `Fault.TRUNCATED`."""

    records: int
    end: ChainEnd
    fault: Fault | None = None
    line: int = 0
    detail: str = ""


def verify(lines: Iterable[bytes], *, newest: str = "", after: str = CHAIN_START.hash) -> Verdict:
    """Check lines, each with its line feed. ``newest``: a hash that was published, which a record must have.
    ``after``: the hash that the first line continues, where older lines were removed on purpose."""
    end = CHAIN_START if after == CHAIN_START.hash else ChainEnd(-1, after)
    found_newest = newest in ("", after)
    records = 0
    for number, line in enumerate(lines, 1):
        fault, detail, next_end = _check(line, end)
        if fault is not None:
            return Verdict(records, end, fault, number, detail)
        records, end = number, next_end
        found_newest = found_newest or newest == end.hash
    if not found_newest:
        return Verdict(records, end, Fault.TRUNCATED, records + 1, f"no record has the hash {newest}")
    return Verdict(records, end)


def _check(line: bytes, after: ChainEnd) -> tuple[Fault | None, str, ChainEnd]:
    if not line.endswith(b"\n"):
        return Fault.TORN, f"the line ends after {len(line)} bytes", after
    document = _parsed(line)
    if document is None:
        return Fault.UNREADABLE, "the line is not a record", after
    if not _is_unchanged(line, document):
        return Fault.CHANGED, f"record {document['seq']} does not have the hash that it names", after
    end = _end_of(document)
    expected = after.seq + 1 if after.seq >= 0 else end.seq
    if end.seq > expected:
        return Fault.GAP, f"record {end.seq} follows record {after.seq}", after
    if end.seq < expected:
        return Fault.REORDERED, f"record {end.seq} stands behind record {after.seq}", after
    if document["previous"] != after.hash:
        return Fault.DETACHED, f"record {end.seq} continues {document['previous']}, not {after.hash}", after
    return None, "", end


def _parsed(line: bytes) -> dict[str, object] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    chained = (document.get("seq"), document.get("previous"), document.get("hash"))
    return document if tuple(map(type, chained)) == (int, str, str) else None


def _is_unchanged(line: bytes, document: Mapping[str, object]) -> bool:
    """Return whether the line is the canonical one of its document, which has the hash that it names."""
    try:
        rest = {key: value for key, value in document.items() if key != "hash"}
        return line == _canonical(document) + b"\n" and document["hash"] == _hash(str(document["previous"]), rest)
    except UnicodeEncodeError:  # an escaped half of a surrogate pair
        return False


def _end_of(document: Mapping[str, object]) -> ChainEnd:
    seq, digest = document["seq"], document["hash"]
    assert isinstance(seq, int), "checked when the line was parsed"
    return ChainEnd(seq, str(digest))


def _hash(previous: str, document: Mapping[str, object]) -> str:
    return hashlib.sha256(previous.encode() + _canonical(document)).hexdigest()


def _canonical(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _ocsf(event: AuditEvent, lost: int) -> dict[str, object]:
    unmapped: dict[str, object] = {
        "server": event.server,
        "role": _clipped(event.role),
        "policy_version": event.policy_version,
        "types": [_clipped(each) for each in event.types[:MAX_LISTED]],
        "type_count": len(event.types) + event.more_types,
        "shards": list(event.shards[:MAX_LISTED]),
        "shard_count": len(event.shards) + event.more_shards,
        **{key: _clipped(value) if isinstance(value, str) else value for key, value in event.details.items()},
    }
    if lost:
        unmapped["lost"] = lost
    document: dict[str, object] = {
        "activity_id": int(event.activity),
        "actor": {"user": {"name": _clipped(event.caller)}},
        "api": {"operation": _clipped(event.action)},
        "category_uid": _APPLICATION_ACTIVITY,
        "class_uid": _API_ACTIVITY,
        "metadata": {
            "product": {"name": "tao-graph", "vendor_name": "tao-graph", "version": __version__},
            "version": _OCSF_VERSION,
        },
        "severity_id": _MEDIUM if event.outcome is Outcome.FAILURE else _INFORMATIONAL,
        "src_endpoint": {"name": _clipped(event.address or event.server)},
        "status_id": int(event.outcome),
        "time": event.time_ms,
        "type_uid": _API_ACTIVITY * 100 + int(event.activity),
        "unmapped": unmapped,
    }
    if event.reason:
        document |= {"status_code": event.reason, "status_detail": _clipped(event.message)}
    if event.count > 1:
        document |= {"count": event.count, "start_time": event.time_ms, "end_time": event.end_time_ms}
    return document


def _clipped(text: str) -> str:
    """Return a text that a line may hold: of bounded length, and without halves of surrogate pairs."""
    short = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    return short.encode(errors="replace").decode()
