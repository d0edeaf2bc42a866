"""Audit logs of real servers: who is recorded, a crash in the middle, a full disk, and the check of the files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from tao.client import Credentials, Graph, TaoError, Unauthorized, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.state_folder import StateFolder
from tao.model.errors import AuditFull
from tao.runtime.token_file import TokenRole, dump_tokens, entry_for
from tests.e2e.cluster_access import PACE_SECONDS, PATIENT
from tests.rigs.audit_rig import read_records
from tests.rigs.forked_programs import run_tao
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.small_disk import small_disk

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.unhurried,
    pytest.mark.asyncio(loop_scope="module"),
]

SHAPE = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=4)
WEB = Credentials("web", "client", "a-secret-of-clients")
OPERATORS_TOKEN = "a-secret-of-alice"
SERVERS: tuple[TokenRole, ...] = ("leader", "follower", "tailer", "watcher")
SCHEMA = (Path(__file__).parents[2] / "config" / "schema.yaml").read_text()
AUDITED = SCHEMA.replace("  user:\n    number: 1\n", "  user:\n    number: 1\n    audit: true\n")


class Audited:
    """A cluster whose leader and follower keep audit logs, and ask for tokens."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = StateFolder(folder)
        self.logs = folder / "audit"
        self.tokens = folder / "tokens.yaml"

    def audit_log(self, server: str) -> Path:
        return self.logs / f"{server}.jsonl"

    def configure(self, server: str, **settings: Any) -> None:
        path = self.folder.settings_file(server)
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | settings))

    def accept_tokens(self) -> None:
        """Have servers show a token of their role, and accept those, an operator's and an application's."""
        operator = entry_for(OPERATORS_TOKEN, "alice", "operator", None, [])
        web = entry_for(WEB.token, "web", "client", None, [])
        servers = [entry_for(f"a-secret-of-{role}s", "", role, None, []) for role in SERVERS]
        self.tokens.write_text(dump_tokens((operator, web, *servers)))
        for name, role in self.cluster.processes.items():
            if role in SERVERS:
                self.configure(name, token=f"a-secret-of-{role}s", accepted_tokens_file=str(self.tokens))

    def connect(self) -> Any:
        return connect(self.cluster.client_address, credentials=WEB, settings=PATIENT)

    async def run(self, *arguments: str, expected: int = 0) -> str:
        """Run a command as the operator Alice; return its output."""
        env = {
            "TAO_CONNECT": str(self.cluster.topology_path),
            "TAO_TOKEN": OPERATORS_TOKEN,
            "TAO_AUDIT_LOG": str(self.audit_log("operators")),
        }
        ended = await run_tao(*arguments, folder=self.folder.path, env=env)
        assert ended.status == expected, ended
        return ended.output

    async def recorded(self, server: str, action: str, count: int = 1, **fields: object) -> list[dict[str, Any]]:
        """Wait until a server has recorded an action so often with these fields, and return the records."""
        async with asyncio.timeout(PATIENT_SECONDS):
            while True:
                found = [
                    each
                    for each in self.whole_records(server)
                    if each["api"]["operation"] == action and fields.items() <= each.items()
                ]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.05)

    def whole_records(self, server: str) -> list[dict[str, Any]]:
        """Return the records of a file that may be written meanwhile."""
        text = self.audit_log(server).read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def logged(self, server: str, event: str) -> list[dict[str, Any]]:
        """Return the events of this name in the log of a server."""
        role = Role.LEADER if server.startswith("leader") else Role.FOLLOWER
        lines = self.folder.log(server, role).read_text().splitlines()
        return [found for line in lines if line.startswith("{") and (found := json.loads(line))["event"] == event]

    def published_hash(self, server: str) -> str:
        """Return the hash that a server has published last in its log."""
        return str(self.logged(server, "audit_hash_published")[-1]["hash"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def audited(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Audited]:
    folder = tmp_path_factory.mktemp("cluster")
    settings = ClusterSettings(state_dir=folder, shape=SHAPE, durability=Durability.RELAXED, log_level="info")
    async with DevCluster(settings) as cluster:
        rig = Audited(cluster, folder)
        cluster.schema_path.write_text(AUDITED)
        async with asyncio.timeout(PATIENT_SECONDS):
            while not rig.logged("leader-1", "audited_writes_not_recorded"):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        for name, role in cluster.processes.items():
            if role in (Role.LEADER, Role.FOLLOWER):
                rig.configure(name, audit={"path": str(rig.audit_log(name))})
        rig.accept_tokens()
        for name, role in cluster.processes.items():
            if role is not Role.DATABASE:
                await cluster.restart(name)
        yield rig


async def test_a_write_of_an_audited_type_is_recorded_by_the_leader_with_the_applications_name(
    audited: Audited,
) -> None:
    async with audited.connect() as graph:
        user = await graph.obj_add("user", {"name": "Ann"})
        page = await graph.obj_add("page", {"name": "not audited"})
        await graph.obj_update(user, {"home": "here"})
    added, updated = [
        (await audited.recorded("leader-1", action, status_id=1))[-1] for action in ("obj_add", "obj_update")
    ]
    for record in (added, updated):
        assert record["unmapped"]["id"] == user
        assert record["unmapped"]["types"] == ["user"]
        assert "follower" not in record["actor"]["user"]["name"], "the application, not who forwards"
    text = audited.audit_log("leader-1").read_text()
    assert str(int(page)) not in text
    assert "Ann" not in text, "values of fields are not recorded"


async def test_a_denied_token_is_recorded_and_refused(audited: Audited) -> None:
    for _ in range(3):
        with pytest.raises(Unauthorized):
            await connect(
                audited.cluster.client_address, credentials=Credentials("stranger", "client", "wrong"), settings=PATIENT
            )
    records = await audited.recorded("follower-1a", "connect", status_code="UNAUTHORIZED")
    assert records[0]["status_id"] == 2
    assert "wrong" not in audited.audit_log("follower-1a").read_text().replace("missing or wrong", "")
    assert all("stranger" in each["actor"]["user"]["name"] for each in records)


async def test_an_operators_invalidation_and_a_changed_topology_are_recorded_where_they_are_done_and_taken(
    audited: Audited,
) -> None:
    await audited.run("invalidate", "--shard", "1", "--yes")
    for server in ("leader-1", "follower-1a"):
        (record,) = await audited.recorded(server, "invalidate")
        assert (record["unmapped"]["shards"], record["status_id"]) == ([1], 1)
        assert record["actor"]["user"]["name"] == "operator/alice"
    topology = str(audited.cluster.topology_path)
    await audited.run("topology", "move-shard", "1", "follower-1a", "--tier", "tier-1", "--topology", topology, "--yes")
    for server in ("leader-1", "follower-1a"):
        changed = (await audited.recorded(server, "topology_changed"))[-1]
        assert int(changed["unmapped"]["version"]) == int(changed["unmapped"]["former_version"]) + 1
    actions = [(each["api"]["operation"], each["status_id"]) for each in read_records(audited.audit_log("operators"))]
    assert actions == [
        ("invalidate", 0),
        ("invalidate", 1),
        ("topology move-shard", 0),
        ("topology move-shard", 1),
    ]
    await audited.run("audit", "verify", str(audited.audit_log("operators")))


async def write_for_ever(graph: Graph, user: int) -> None:
    number = 0
    while True:
        number += 1
        with suppress(TaoError):
            await graph.obj_update(user, {"home": f"round {number}"})
        await asyncio.sleep(PACE_SECONDS)


async def test_a_leader_that_is_killed_while_it_writes_continues_its_chain(audited: Audited) -> None:
    starts = len(await audited.recorded("leader-1", "server_started"))
    for _ in range(2):
        async with audited.connect() as graph:
            user = await graph.obj_add("user", {"name": "Bob"})
            writers = [asyncio.create_task(write_for_ever(graph, user)) for _ in range(8)]
            before = len(audited.whole_records("leader-1"))
            async with asyncio.timeout(PATIENT_SECONDS):
                while len(audited.whole_records("leader-1")) < before + 50:  # noqa: ASYNC110 - another process writes
                    await asyncio.sleep(0.02)
            await audited.cluster.kill("leader-1")
            await audited.cluster.restart("leader-1")
            for each in writers:
                each.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
    assert len(await audited.recorded("leader-1", "server_started", starts + 2)) == starts + 2
    published = audited.published_hash("leader-1")
    log = str(audited.audit_log("leader-1"))
    assert "whole" in await audited.run("audit", "verify", log, "--newest", published)
    lines = audited.audit_log("leader-1").read_bytes().splitlines(keepends=True)
    edited = audited.logs / "edited.jsonl"
    edited.write_bytes(b"".join([*lines[:10], *lines[11:]]))
    assert ":11: gap" in await audited.run("audit", "verify", str(edited), "--newest", published, expected=1)


async def test_with_a_full_disk_audited_writes_are_refused_and_go_on_when_there_is_room(
    audited: Audited, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", size_mb=1) as disk:
        log = disk.folder / "leader-1.jsonl"
        audited.configure("leader-1", audit={"path": str(log), "retry_seconds": 0.05})
        await audited.cluster.restart("leader-1")
        try:
            async with audited.connect() as graph:
                user = await graph.obj_add("user", {"name": "Eve"})
                page = await graph.obj_add("page", {"name": "a page"})
                disk.fill()
                refused: TaoError | None = None
                async with asyncio.timeout(PATIENT_SECONDS):
                    while not isinstance(refused, AuditFull):
                        try:
                            await graph.obj_update(user, {"home": "x" * 100})
                        except TaoError as error:
                            refused = error
                assert "No space left" in str(refused)
                assert await graph.obj_update(page, {"name": "not audited"})
                assert await graph.obj_get(user) is not None
                disk.make_room()
                async with asyncio.timeout(PATIENT_SECONDS):
                    while True:
                        try:
                            await graph.obj_update(user, {"home": "there is room"})
                            break
                        except AuditFull:
                            await asyncio.sleep(0.05)
        finally:
            audited.configure("leader-1", audit={"path": str(audited.audit_log("leader-1"))})
            await audited.cluster.restart("leader-1")
        assert "whole" in await audited.run("audit", "verify", str(log))
