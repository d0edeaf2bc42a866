"""A running follower that asks for credentials, and honest clients of it. It has no leader: its doorstep needs none."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from loadtest.hostile.attacks import SECONDS, Ports
from tao.admin.documents import example_schema_file
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.runtime.admin_client import admin_get
from tao.runtime.token_file import dump_tokens, entry_for
from tao.topology.document import dump_topology
from tao.wire.frames_client import connect_frames
from tao.wire.grpc_client import greeting_metadata
from tao.wire.identity import Credentials
from tao.wire.session import Session
from tao.wire.settings import SessionSettings
from tao.wire.tls import ServerCheck, TlsFiles
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.cluster_access import PACE_SECONDS
from tests.e2e.hostile_rig import resident_mb
from tests.rigs.certificates import TestAuthority
from tests.rigs.ports import free_ports

WEB = Credentials("web", "client", "a-secret-of-clients")


@dataclass
class Follower:
    """A follower process, as its clients reach it."""

    server: CacheServer
    pid: int
    log: Path
    tls: TlsFiles | None

    @property
    def memory_mb(self) -> int:
        return resident_mb(self.pid)

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        return None if self.tls is None else self.tls.client_context()

    def log_lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    async def session(self) -> Session:
        settings = SessionSettings(connect_timeout_seconds=SECONDS)
        check = None if self.tls_context is None else ServerCheck(self.tls_context)
        return await connect_frames(self.server.frames, settings, WEB, check)

    def channel(self) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        if self.tls is None:
            return grpc.aio.insecure_channel(self.server.grpc, options)
        return grpc.aio.secure_channel(self.server.grpc, self.tls.channel_credentials(), options)

    @property
    def ports(self) -> Ports:
        return Ports(self.server.grpc, self.server.frames, self.server.admin)

    async def turned_away(self) -> dict[str, float]:
        """Return the peers that were turned away, by port and reason."""
        _, page = await admin_get(self.server.admin, "/metrics", SECONDS)
        found: dict[str, float] = {}
        for line in page.decode().splitlines():
            if line.startswith("tao_peers_turned_away_total{"):
                labels, value = line.removeprefix("tao_peers_turned_away_total").rsplit(" ", 1)
                named = dict(pair.split("=") for pair in labels.strip("{}").replace('"', "").split(","))
                found[f"{named['port']} {named['reason']}"] = float(value)
        return found


@asynccontextmanager
async def running_follower(folder: Path, *, tls: bool = False, **settings: object) -> AsyncIterator[Follower]:
    """Run a follower that asks for a token on loopback."""
    grpc_at, frames_at, admin_at, unused = (f"127.0.0.1:{port}" for port in free_ports(4))
    server = CacheServer(name="follower-1a", grpc=grpc_at, frames=frames_at, admin=admin_at)
    leader = CacheServer(name="leader-1", grpc=unused)
    region = Region(
        name="home",
        leaders=Tier(name="leaders", servers=(leader,)),
        followers=(Tier(name="tier-1", servers=(server,)),),
    )
    database = Database(
        name="db", master_region="home", servers={"home": DatabaseServer(name="db-1", socket="/none")}, shards=((0, 0),)
    )
    tokens = folder / "tokens.yaml"
    tokens.write_text(dump_tokens((entry_for(WEB.token, "web", "client", None, []),)))
    topology = folder / "topology.json"
    topology.write_text(dump_topology(Topology(version=1, shards=1, regions=(region,), databases=(database,))))
    asked: dict[str, object] = {
        "name": server.name,
        "topology_file": str(topology),
        "schema_file": str(example_schema_file()),
        "accepted_tokens_file": str(tokens),
        **settings,
    }
    files = None
    if tls:
        files = TestAuthority(folder / "certificates").issue(server.name)
        asked["tls"] = {
            "certificate": str(files.certificate),
            "private_key": str(files.private_key),
            "authorities": str(files.authorities),
            "demand_certificates": False,
        }
    settings_file = folder / "follower.yaml"
    settings_file.write_text(yaml.safe_dump(asked))
    log = folder / "follower.log"
    with log.open("w") as out:
        command = (sys.executable, "-P", "-m", "tao.cli", "follower", "--settings", str(settings_file))
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out, env={**os.environ})
        try:
            await until_healthy(server.admin)
            yield Follower(server, process.pid, log, files)
            assert process.returncode is None, log.read_text()[-4_000:]
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


async def until_healthy(admin: str) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                if (await admin_get(admin, "/health", SECONDS))[0] == 200:
                    return
            except Exception:  # noqa: BLE001 - it is starting
                await asyncio.sleep(0.1)


@dataclass
class Honest:
    """Clients with a credential and probes, one request after the other, and the time that each took."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def p99_ms(self, kind: str) -> float:
        times = sorted(self.seconds[kind])
        return times[min(len(times) - 1, len(times) * 99 // 100)] * 1000

    async def repeat(self, kind: str, ask: Callable[[], Awaitable[object]]) -> None:
        while True:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(SECONDS):
                    await ask()
            except Exception as error:  # noqa: BLE001 - any failure of an honest client is what a test looks for
                self.failures.append(f"{kind}: {type(error).__name__}: {error}")
            self.seconds.setdefault(kind, []).append(time.perf_counter() - began)
            await asyncio.sleep(PACE_SECONDS)


@asynccontextmanager
async def honest_clients(follower: Follower) -> AsyncIterator[Honest]:
    """Run an open session, new sessions, an authorised gRPC call, a gRPC health check and a probe beside what the
    caller does."""
    honest = Honest()
    session = await follower.session()
    request = pb.Request(get_schema=pb.GetSchema())
    async with follower.channel() as channel:
        schema: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/tao.v1.Graph/Schema")
        health = health_pb2_grpc.HealthStub(channel)

        async def connect_anew() -> None:
            await (await follower.session()).close()

        async def probe() -> None:
            assert (await admin_get(follower.server.admin, "/health", SECONDS))[0] == 200

        asks: dict[str, Callable[[], Awaitable[object]]] = {
            "frames": lambda: session.ask(request, SECONDS),
            "new connection": connect_anew,
            "grpc": lambda: schema(b"", metadata=greeting_metadata(WEB), timeout=SECONDS),
            "health": lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS),
            "probe": probe,
        }
        tasks = [asyncio.create_task(honest.repeat(kind, ask)) for kind, ask in asks.items()]
        try:
            yield honest
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await session.close()
