"""What a running follower records of denials: the types and shards that an application asked for, and its address."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tao.admin.documents import example_schema_file
from tao.schema.registry import load_schema
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.cluster_access import PACE_SECONDS
from tests.e2e.doorstep_rig import running_follower
from tests.rigs.audit_rig import read_records
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

RULES = """
format: 1
version: 3
roles: {reader: {read: {associations: [friend]}}}
callers: {web: [reader]}
"""


async def recorded(path: Path, number: int) -> list[dict[str, Any]]:
    """Return the records of denied reads, when they stand for so many."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            found = [each for each in read_records(path) if each["api"]["operation"] == "read"]
            if sum(each.get("count", 1) for each in found) >= number:
                return found
            await asyncio.sleep(PACE_SECONDS)


async def test_denied_reads_of_several_types_are_all_in_the_audit_log(tmp_path: Path) -> None:
    rules, log = tmp_path / "access.yaml", tmp_path / "audit.jsonl"
    rules.write_text(RULES)
    schema = load_schema(example_schema_file().read_text(), "schema.yaml")
    types = ("likes", "follows", "comment")
    request = pb.Request(
        read=pb.ReadBatch(count_id1s=[5] * len(types), count_atypes=[schema.atype(each).number for each in types])
    )
    async with running_follower(tmp_path, access_file=str(rules), audit={"path": str(log)}) as follower:
        session = await follower.session()
        answer = await session.ask(request, PATIENT_SECONDS)
        assert [each.reason for each in answer.read.errors] == ["PERMISSION_DENIED"] * len(types)
        records = await recorded(log, len(types))
        await session.close()
    assert sorted({name for each in records for name in each["unmapped"]["types"]}) == sorted(types)
    for record in records:
        assert record["actor"]["user"]["name"] == "web"
        assert record["unmapped"]["shards"] == [0]
        assert (record["unmapped"]["role"], record["unmapped"]["policy_version"]) == ("client", "3")
        assert record["src_endpoint"]["name"] == "127.0.0.1"
