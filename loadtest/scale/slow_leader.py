"""A real tailer on a real database, with four stub leaders of which one takes a second for each relay.

Every leader gets objects of 128 KB at the same pace. What is measured is how long a commit takes to reach the leaders
that are not slow. Objects are large, so that seconds fill what a tailer may hold back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec

from loadtest.conditions import until
from loadtest.rounds import percentile
from loadtest.scale.installation import REGION, Addresses, InstallationShape, store, topology_of
from loadtest.scale.processes import running
from loadtest.scale.stubs import StubLeaders
from loadtest.scenario import SCHEMA
from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.devcluster.ports import LOOPBACK, reserve_port
from tao.model.ids import make_id
from tao.model.topology import Topology
from tao.model.writes import ObjAdd
from tao.planning.coordination import PlannedWrite, keys_of
from tao.planning.write_plan import draft_writes, plan_of
from tao.replication.accounts import Account, ServiceAccounts
from tao.routing.routes import Routes
from tao.schema.registry import load_schema
from tao.storage.migrations import migrate
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.session import ServerAccount
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tao.wire.v1 import session_pb2 as pb

_SHAPE: Final = InstallationShape(shards=16, leaders=4, followers_per_leader=1, tiers=1, databases=1)
_DATABASE: Final = "db-1"
_SLOW_SECONDS: Final = 1.0
_OBJECT_BYTES: Final = 128 << 10
_COMMITS_PER_SECOND: Final = 50
_NOW_MS: Final = 1_700_000_000_000
_LOOK_SECONDS: Final = 0.02
_PATIENCE_SECONDS: Final = 60.0
_WAIT_SECONDS: Final = 15.0
"""Time limit for the last changes to arrive; what has not arrived then counts as late as that."""


class SlowLeaderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How long commits take to reach the leaders that are not slow, in milliseconds."""

    p99_without_ms: float
    p99_with_ms: float

    @property
    def ratio(self) -> float:
        """The second as a multiple of the first."""
        return self.p99_with_ms / self.p99_without_ms


async def measure_slow_leader(folder: Path, seconds: float, versions: dict[str, str]) -> SlowLeaderFigures:
    """Measure without a slow leader, then with one. ``versions`` gets the database's. Raises `OperatorError`."""
    accounts = ServiceAccounts(
        **{each.name: Account(f"tao_{each.name}", os.urandom(8).hex()) for each in dataclasses.fields(ServiceAccounts)}
    )
    async with AsyncExitStack() as stack:
        instance = await _database(folder, accounts, versions)
        stack.push_async_callback(instance.stop)
        stubs = StubLeaders(
            [f"{REGION}-leader-{number}" for number in range(1, _SHAPE.leaders + 1)], (), lambda _: _DATABASE
        )
        topology = _topology(await stubs.start(), instance)
        stack.push_async_callback(stubs.close)
        store(topology, folder / "tailing.json")
        commits = _Commits(stubs, Routes(topology), instance)
        stack.push_async_callback(commits.close)
        with reserve_port() as admin:
            settings = {
                "name": "tailer",
                "region": REGION,
                "database_server": f"{REGION}-db-1",
                "topology_file": str(folder / "tailing.json"),
                "schema_file": str(SCHEMA),
                "state_folder": str(folder / "tailer"),
                "user": accounts.replicator.user,
                "password": accounts.replicator.password,
                "admin": f"{LOOPBACK}:{admin.port}",
            }
            await stack.enter_async_context(running("tailer", settings, str(settings["admin"]), folder))
        without = await commits.run(seconds)
        stubs.leaders[commits.slow].relay_seconds = _SLOW_SECONDS
        return SlowLeaderFigures(p99_without_ms=without, p99_with_ms=await commits.run(seconds))


class _Commits:
    """Commits an object for each leader in one transaction, and notes when each leader has it."""

    def __init__(self, stubs: StubLeaders, routes: Routes, instance: DatabaseInstance) -> None:
        leaders = routes.leaders(REGION)
        self._shards: Final = {leaders.home(shard).name: shard for shard in range(_SHAPE.shards)}
        self.slow: Final = min(self._shards)
        """The leader that may be slow."""
        self._committed: dict[int, float] = {}
        self._seconds: list[float] = []
        self._schema: Final = load_schema(SCHEMA.read_text(), str(SCHEMA))
        login = _account(instance, instance.accounts.leader)
        self._pools: Final = Pools(lambda _: login, WRITE_SETUP)
        tables = edge_tables_of(lambda: self._schema)
        self._store: Final = MySqlWriteStore(lambda _: _DATABASE, self._pools, tables)
        self._made = 0
        for name, leader in stubs.leaders.items():
            if name != self.slow:
                leader.on_relay = self._arrived

    async def close(self) -> None:
        """Close the connections."""
        await self._pools.close()

    async def run(self, seconds: float) -> float:
        """Commit at a constant rate; return the 99th percentile of the times to the leaders that are not slow."""
        self._seconds = []
        began = time.perf_counter()
        for number in range(round(seconds * _COMMITS_PER_SECOND)):
            await asyncio.sleep(max(0.0, began + number / _COMMITS_PER_SECOND - time.perf_counter()))
            await self._commit()

        async def all_arrived() -> bool:
            return not self._committed

        with suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_SECONDS):
                await until(all_arrived, _LOOK_SECONDS)
        now = time.perf_counter()
        self._seconds += [now - committed for committed in self._committed.values()]
        self._committed.clear()
        return 1000 * percentile(sorted(self._seconds), 0.99)

    async def _commit(self) -> None:
        self._made += 1
        ids = {name: make_id(shard, _NOW_MS + self._made, 0) for name, shard in self._shards.items()}
        otype, data = self._schema.otype("item").number, os.urandom(_OBJECT_BYTES)
        planned = [PlannedWrite(ObjAdd(each, otype, data, allocated=False), True) for each in ids.values()]
        async with self._store.transaction(_DATABASE, timeout_seconds=_PATIENCE_SECONDS) as transaction:
            shards, existing = await transaction.lock_and_read([*self._shards.values()], keys_of(planned, self._schema))
            await transaction.apply(plan_of(draft_writes(existing, planned, self._schema, _NOW_MS), shards).rows)
            now = time.perf_counter()
            self._committed |= {each: now for name, each in ids.items() if name != self.slow}
            await transaction.commit()

    def _arrived(self, relay: pb.Relay) -> None:
        now = time.perf_counter()
        for messages in relay.changes:
            for message in messages.messages:
                committed = self._committed.pop(message.object_change.id, None)
                if committed is not None:
                    self._seconds.append(now - committed)


async def _database(folder: Path, accounts: ServiceAccounts, versions: dict[str, str]) -> DatabaseInstance:
    binary = find_server_binary(os.environ)
    versions[binary.flavour] = binary.version_text
    instance = DatabaseInstance(
        binary,
        InstanceSettings(
            folder=folder / "database",
            accounts=accounts,
            cache_folder=default_cache_folder(os.environ),
            options=ServerOptions(durability=Durability.RELAXED),
        ),
    )
    await instance.start()
    schema = load_schema(SCHEMA.read_text(), str(SCHEMA))
    await migrate(_account(instance, accounts.administrator), range(_SHAPE.shards), schema.custom_tables(), _DATABASE)
    return instance


def _account(instance: DatabaseInstance, account: Account) -> ServerAccount:
    return ServerAccount(instance.host, instance.port, account.user, account.password, socket="", tls=None)


def _topology(leaders: dict[str, str], instance: DatabaseInstance) -> Topology:
    topology = topology_of(_SHAPE, {name: Addresses(frames=address) for name, address in leaders.items()})
    (database,) = topology.databases
    own = msgspec.structs.replace(database.servers[REGION], port=instance.port)
    database = msgspec.structs.replace(database, servers={**database.servers, REGION: own})
    return msgspec.structs.replace(topology, databases=(database,))
