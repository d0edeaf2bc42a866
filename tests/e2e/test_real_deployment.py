"""The deployment that docs/how-to/deploy.md and docker/ describe.

It has accounts, tables, a leader and followers by settings files, a token for each role, and the commands of an
operator, on its own ports and with its own database server.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tao.admin.documents import example_schema_file
from tao.admin.server_stats import wait_until_ready
from tao.client import ClientSettings, Credentials, TlsFiles, Unauthorized, Unavailable, connect
from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.replication.accounts import ServiceAccounts
from tao.topology.document import dump_topology
from tests.rigs.certificates import TestAuthority
from tests.rigs.ports import free_ports

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.unhurried]

SHARDS = 4
SECRETS = {
    "TAO_ADMIN_PASSWORD": "a-password-of-the-operator",
    "TAO_LEADER_PASSWORD": "a-password-of-leaders",
    "TAO_READER_PASSWORD": "a-password-of-readers",
    "TAO_REPLICATOR_PASSWORD": "a-password-of-replicas",
    "TAO_TOKEN": "a-secret-of-alice",
}
CLIENT_TOKEN = "a-secret-of-clients"
SERVERS_TOKENS = {"leader": "a-secret-of-leaders", "follower": "a-secret-of-followers"}


@dataclass
class Operator:
    """An operator with a folder, a topology, and the secrets in the environment."""

    folder: Path
    topology: Topology
    authority: TestAuthority

    def __post_init__(self) -> None:
        mine = self.authority.issue("operator")
        self.environment = {
            "TAO_CONNECT": str(self.topology_file),
            "TAO_CA": str(mine.authorities),
            "TAO_CERTIFICATE": str(mine.certificate),
            "TAO_PRIVATE_KEY": str(mine.private_key),
        }

    @property
    def topology_file(self) -> Path:
        return self.folder / "topology.json"

    @property
    def accepted_tokens(self) -> Path:
        return self.folder / "tokens.yaml"

    async def accept(self, token: str, *arguments: str) -> None:
        """Have servers accept a token."""
        command = ("token", "new", *arguments, "--existing", "--file", str(self.accepted_tokens))
        process = await self.start(*command)
        _, err = await process.communicate(f"{token}\n".encode())
        assert process.returncode == 0, err.decode()

    async def start(self, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tao.cli", *arguments),
            cwd=self.folder,
            env={**os.environ, **SECRETS, **self.environment, **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str, **environment: str) -> tuple[int | None, str, str]:
        process = await self.start(*arguments, **environment)
        out, err = await process.communicate(b"")  # which ends the input, so that nothing is asked for
        return process.returncode, out.decode(), err.decode()

    async def must(self, *arguments: str) -> str:
        status, out, err = await self.run(*arguments)
        assert status == 0, err
        return out

    def settings(self, role: str, name: str) -> str:
        """Return the example settings with this cluster's names and secrets."""
        example = Path(__file__).resolve().parents[2] / "config" / f"{role}.yaml"
        settings = yaml.safe_load(example.read_text())
        settings |= {"name": name, "token": SERVERS_TOKENS[role], "accepted_tokens_file": str(self.accepted_tokens)}
        files = self.authority.issue(name)
        settings["tls"] = {key: str(getattr(files, key)) for key in ("certificate", "private_key", "authorities")}
        settings["tls"]["demand_certificates"] = role == "leader"
        settings |= {"topology_file": str(self.topology_file), "schema_file": str(example_schema_file())}
        if role == "leader":
            settings["leader_password"] = SECRETS["TAO_LEADER_PASSWORD"]
            settings["reader_password"] = SECRETS["TAO_READER_PASSWORD"]
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings))
        return str(path)


def server_at_free_ports(name: str) -> CacheServer:
    grpc, frames, admin = (f"127.0.0.1:{port}" for port in free_ports(3))
    return CacheServer(name=name, grpc=grpc, frames=frames, admin=admin)


@pytest.fixture
async def operator(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[Operator]:
    instance = DatabaseInstance(
        find_server_binary(os.environ),
        InstanceSettings(
            folder=tmp_path / "db",
            accounts=database_accounts,
            cache_folder=default_cache_folder(os.environ),
            options=ServerOptions(durability=Durability.RELAXED),
        ),
    )
    await instance.start()
    leader = server_at_free_ports("leader-1")
    followers = [server_at_free_ports(name) for name in ("follower-1a", "follower-2a")]
    database = DatabaseServer(name="db-1", socket=str(instance.socket_path))
    topology = Topology(
        version=1,
        shards=SHARDS,
        regions=(
            Region(
                name="home",
                leaders=Tier(name="leaders", servers=(leader,)),
                followers=tuple(Tier(name=f"tier-{number + 1}", servers=(f,)) for number, f in enumerate(followers)),
            ),
        ),
        databases=(Database(name="social", master_region="home", servers={"home": database}, shards=((0, 3),)),),
    )
    person = Operator(tmp_path, topology, TestAuthority(tmp_path / "certificates"))
    person.topology_file.write_text(dump_topology(topology))
    yield person
    await instance.stop()


async def test_a_cluster_comes_up_by_the_documented_commands_and_keeps_its_secrets(operator: Operator) -> None:
    topology, schema = str(operator.topology_file), str(example_schema_file())
    await operator.must("accounts", "--topology", topology, "--yes")
    assert "4 of 4 shards were changed" in await operator.must(
        "migrate", "--topology", topology, "--schema", schema, "--yes"
    )
    for role, token in SERVERS_TOKENS.items():
        await operator.accept(token, "--role", role)
    await operator.accept(SECRETS["TAO_TOKEN"], "alice", "--role", "operator")
    await operator.accept(CLIENT_TOKEN, "web")
    region = operator.topology.regions[0]
    servers = [("leader", region.leaders.servers[0]), *(("follower", tier.servers[0]) for tier in region.followers)]
    async with AsyncExitStack() as running:
        for role, server in servers:
            process = await operator.start(role, "--settings", operator.settings(role, server.name))
            running.push_async_callback(stopped, process)
            await wait_until_ready(server.admin, 30)
            assert await operator.must("ready", "--admin", server.admin) == "ready\n"
        alice = (await operator.must("add", "object", "user", "name=Alice")).strip()
        assert "Alice" in await operator.must("get", alice)
        assert "all caches equal the databases" in await operator.must("verify", "--schema", schema)
        assert "every edge has its inverse" in await operator.must("repair", "--schema", schema, "--dry-run")
        status, _, err = await operator.run("get", alice, TAO_TOKEN="wrong")
        assert (status, "UNAUTHORIZED" in err) == (2, True)
        status, out, err = await operator.run("verify", "--schema", schema, TAO_TOKEN=CLIENT_TOKEN)
        assert (status, "that of a client" in out) == (1, True), err
        web = Credentials("web", "client", CLIENT_TOKEN)
        by_tls = ClientSettings(tls=TlsFiles(authorities=operator.authority.file))
        with pytest.raises(Unauthorized):
            await connect(topology, settings=by_tls)
        with pytest.raises(Unavailable):
            await connect(topology, credentials=web)
        async with connect(topology, settings=by_tls, credentials=web) as graph:
            user = await graph.obj_get(int(alice))
            assert user is not None
            assert user.fields["name"] == "Alice"


async def stopped(process: asyncio.subprocess.Process) -> None:
    """Stop it as a service manager does: it drains, and exits with status 0."""
    process.terminate()
    _, err = await process.communicate()
    assert process.returncode == 0, err.decode()
