"""The form of a record of the audit log."""

from __future__ import annotations

import hashlib
import json

import pytest

from tao.observability.audit_records import (
    CHAIN_START,
    Activity,
    AuditEvent,
    ChainEnd,
    Fault,
    Outcome,
    encode,
    record_end,
    verify,
)

EVENT = AuditEvent(
    time_ms=1_700_000_000_000,
    server="leader-1",
    caller="app/web",
    action="obj_update",
    activity=Activity.UPDATE,
    role="client",
    address="10.0.0.7",
    shards=(3,),
    types=("user",),
    policy_version="7",
    details={"id": 12},
)


def test_a_record_has_the_fields_of_an_api_activity_and_the_rest_under_unmapped() -> None:
    line, end = encode(EVENT, CHAIN_START)
    document = json.loads(line)
    assert document.pop("hash") == end.hash
    assert document == {
        "activity_id": 3,
        "actor": {"user": {"name": "app/web"}},
        "api": {"operation": "obj_update"},
        "category_uid": 6,
        "class_uid": 6003,
        "metadata": document["metadata"],
        "previous": "0" * 64,
        "seq": 1,
        "severity_id": 1,
        "src_endpoint": {"name": "10.0.0.7"},
        "status_id": 1,
        "time": 1_700_000_000_000,
        "type_uid": 600303,
        "unmapped": {
            "id": 12,
            "policy_version": "7",
            "role": "client",
            "server": "leader-1",
            "shard_count": 1,
            "shards": [3],
            "types": ["user"],
            "type_count": 1,
        },
    }
    assert document["metadata"]["product"]["name"] == "tao-graph"


def test_the_hash_is_that_of_the_hash_before_and_the_line_without_its_own() -> None:
    _, first = encode(EVENT, CHAIN_START)
    line, second = encode(EVENT, first)
    document = json.loads(line)
    del document["hash"]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert second == ChainEnd(2, hashlib.sha256(f"{first.hash}{canonical}".encode()).hexdigest())


def test_a_failure_names_its_reason_a_count_its_span_and_a_gap_what_was_lost() -> None:
    event = AuditEvent(
        time_ms=5, server="s", caller="c", action="connect", outcome=Outcome.FAILURE, reason="UNAUTHORIZED",
        message="wrong token", count=4, end_time_ms=900,
    )  # fmt: skip
    document = json.loads(encode(event, CHAIN_START, lost=3)[0])
    shown = {key: document[key] for key in ("status_id", "status_code", "status_detail", "severity_id")}
    assert shown == {
        "status_id": 2,
        "status_code": "UNAUTHORIZED",
        "status_detail": "wrong token",
        "severity_id": 3,
    }
    assert (document["count"], document["start_time"], document["end_time"]) == (4, 5, 900)
    assert document["unmapped"]["lost"] == 3


def test_what_a_stranger_sends_makes_a_line_of_bounded_length() -> None:
    long = "\n\ud800é" * 100_000
    event = AuditEvent(
        time_ms=0, server="s", caller=long, action=long, role=long, address=long, message=long, reason="R",
        shards=tuple(range(60_000)), details={"question": long},
    )  # fmt: skip
    line, end = encode(event, CHAIN_START)
    assert len(line) < 8_000
    assert line.count(b"\n") == 1
    assert verify([line], newest=end.hash).fault is None
    assert json.loads(line)["unmapped"]["shard_count"] == 60_000


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(b'"seq":1', b'"seq": 1'),
        lambda line: line.replace(b'"seq":1', b'"seq":1,"seq":1'),
        lambda line: line.replace(b"app/web", b"app/\\u0077eb"),
        lambda line: line.replace(b'"seq":1', b'"seq":true'),
        lambda line: line.replace(b"app/web", b"\\ud800"),
    ],
)
def test_a_line_that_says_the_same_in_another_way_is_not_what_was_written(change: object) -> None:
    assert callable(change)
    line, _ = encode(EVENT, CHAIN_START)
    assert change(line) != line
    assert verify([change(line)]).fault in (Fault.CHANGED, Fault.UNREADABLE)
    assert record_end(change(line)) is None
