"""A tailer records who is refused at the port at which watchers ask it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tao.model.errors import Unauthorized
from tao.model.topology import CacheServer, TailerProcess
from tao.observability.audit_log import AuditSettings
from tao.observability.audit_records import verify
from tao.observability.logs import logger
from tao.runtime.token_file import TokenRole, dump_tokens, entry_for
from tao.tailer.server import TailerServer
from tao.tailer.settings import TailerSettings
from tao.topology.document import dump_topology
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.audit_rig import read_records
from tests.rigs.leader_rig import make_topology
from tests.rigs.ports import free_ports

SCHEMA = Path(__file__).parents[3] / "config" / "schema.yaml"
PROBE = pb.Request(read=pb.ReadBatch())


async def ask(address: str, role: str, token: str) -> pb.Answer:
    links = Links(LinkSettings(), Credentials(f"{role}-1", role, token))
    try:
        return await links.to(CacheServer(name="tailer-1", grpc="", frames=address)).ask(PROBE, 20.0)
    finally:
        await links.close()


async def test_a_tailer_records_who_is_refused_at_its_port(tmp_path: Path) -> None:
    topology, address = make_topology(), f"127.0.0.1:{free_ports(1)[0]}"
    tailer = TailerProcess(name="tailer-1", database="db", admin="127.0.0.1:7002", frames=address)
    region = msgspec.structs.replace(topology.regions[0], tailers=(tailer,))
    (tmp_path / "topology.json").write_text(dump_topology(msgspec.structs.replace(topology, regions=(region,))))
    roles: tuple[TokenRole, ...] = ("watcher", "leader", "tailer")
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(dump_tokens(tuple(entry_for(f"a {role}'s", "", role, None, []) for role in roles)))
    settings = TailerSettings(
        name="tailer-1",
        region="east",
        database_server="db",
        topology_file=tmp_path / "topology.json",
        schema_file=SCHEMA,
        state_folder=tmp_path / "state",
        password="",
        accepted_tokens_file=tokens,
        token="a tailer's",
        audit=AuditSettings(path=tmp_path / "audit.jsonl"),
    )
    server = await TailerServer(settings, logger("test")).start()
    try:
        assert (await ask(address, "watcher", "a watcher's")).HasField("read")
        for role, token in (("watcher", "wrong"), ("leader", "a leader's")):
            with pytest.raises(Unauthorized):
                await ask(address, role, token)
        assert b"tao_audit_records_total" in vars(vars(server)["_admin"])["_pages"].metrics()
    finally:
        await server.close()
    started, *refused, stopped = read_records(tmp_path / "audit.jsonl")
    assert [each["api"]["operation"] for each in (started, stopped)] == ["server_started", "server_stopped"]
    assert started["unmapped"]["accepted_tokens_sha256"]
    assert [(each["api"]["operation"], each["actor"]["user"]["name"], each["status_id"]) for each in refused] == [
        ("connect", "watcher/watcher-1", 2),
        ("probe", "leader/leader-1", 2),
    ]
    assert verify((tmp_path / "audit.jsonl").read_bytes().splitlines(keepends=True)).fault is None
