"""`DevCluster`: a whole cluster of one region on this machine, started in dependency order and gated on health.

Databases first, then the shards' migrations, then leaders, then followers; each step waits until the one before is
ready. It stops in the opposite order. What it knows goes into the state folder before it is needed there, so that a
crash at any moment leaves a folder that the next start, `status` and `down` understand.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import yaml

from tao.devcluster.database import DatabaseInstance, InstanceSettings
from tao.devcluster.identity import read_record
from tao.devcluster.inspection import ClusterStatus, client_address, cluster_status, stop_recorded
from tao.devcluster.layout import ClusterSettings, Role, Shape, build_topology
from tao.devcluster.ports import PortReservation, reserve_port
from tao.devcluster.processes import Lifetime
from tao.devcluster.schema_copy import place_schema
from tao.devcluster.server_binary import ServerBinary, find_server_binary
from tao.devcluster.server_options import ServerOptions
from tao.devcluster.server_process import ServerProcess, release, reserve_ports
from tao.devcluster.state_folder import ClusterRecord, StateFolder, new_passwords, service_accounts
from tao.devcluster.template import default_cache_folder
from tao.model.errors import OperatorError
from tao.schema.registry import Schema
from tao.schema.types import DEFAULT_ARENA
from tao.storage.migrations import migrate
from tao.storage.session import ServerAccount
from tao.topology.document import dump_topology


class DevCluster:
    """An async context manager; or `start`, then `stop` (or `release`, when detached). Use it on one event loop."""

    def __init__(self, settings: ClusterSettings, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._settings = settings
        self._tell = on_progress
        self._folder = StateFolder(settings.state_dir)
        self._lifetime = Lifetime.DETACHED if settings.detached else Lifetime.WITH_PARENT
        self._record = ClusterRecord(shape=settings.shape or Shape())
        self._databases: dict[str, DatabaseInstance] = {}
        self._servers: dict[str, ServerProcess] = {}

    @property
    def client_address(self) -> str:
        """gRPC address (``host:port``) of the first follower: what `tao.client.connect` takes."""
        return client_address(self._record)

    @property
    def topology_path(self) -> Path:
        """The topology document; `tao.client.connect` takes this too."""
        return self._folder.topology

    @property
    def schema_path(self) -> Path:
        """The servers' schema file."""
        return self._folder.schema

    @property
    def record(self) -> ClusterRecord:
        """Shape, ports and passwords."""
        return self._record

    @property
    def processes(self) -> dict[str, Role]:
        """Every process by name, in starting order."""
        return self._record.shape.server_names

    @property
    def running(self) -> list[str]:
        """Names of the processes that run now."""
        return [name for name in self.processes if self._process(name).is_running]

    def admin(self, name: str) -> str:
        """``host:port`` of a leader's or follower's admin port."""
        process = self._process(name)
        if not isinstance(process, ServerProcess):
            raise OperatorError(f"{name} is a database and has no admin port")
        return process.admin

    def database(self, name: str) -> DatabaseInstance:
        """A private database server of the cluster."""
        process = self._process(name)
        if not isinstance(process, DatabaseInstance):
            raise OperatorError(f"{name} is no database")
        return process

    async def status(self) -> ClusterStatus:
        """What runs, as `tao dev status` shows it."""
        return await cluster_status(self._folder.path)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything; returns when every server is ready.

        Raises `OperatorError` for an operator's mistake or a server that does not come up; then nothing runs that did
        not run before, and data are as they were.
        """
        binary = find_server_binary(os.environ)
        self._folder.create()
        self._folder.lock()
        try:
            await self._take_over()
            await self._start(binary)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> list[str]:
        """Stop followers, leaders, databases; returns the names that had to be killed. Data are kept. Idempotent."""
        killed = await self._stop_processes()
        self._folder.owner.unlink(missing_ok=True)
        self._folder.unlock()
        return killed

    def release(self) -> None:
        """Leave the processes of a detached cluster to themselves."""
        for instance in self._databases.values():
            instance.process.release()
        for server in self._servers.values():
            server.process.release()
        self._folder.unlock()

    async def kill(self, name: str) -> None:
        """SIGKILL one process, as a crash would."""
        await self._process(name).kill()

    async def restart(self, name: str) -> None:
        """Start one process again on its ports (stopping it first when it runs); returns when it is ready."""
        process = self._process(name)
        await process.stop()
        await process.start()

    def _process(self, name: str) -> DatabaseInstance | ServerProcess:
        found = self._databases.get(name) or self._servers.get(name)
        if found is None:
            raise OperatorError(f"there is no {name} here: the processes are {', '.join(self.processes)}")
        return found

    async def _take_over(self) -> None:
        """Decide on the shape; refuse a folder whose cluster is in use, and clear what a crash left in it."""
        settings = self._settings
        old = self._folder.read()
        if old is None:
            self._record = ClusterRecord(shape=(settings.shape or Shape()).check(), passwords=new_passwords())
            return
        running = self._folder.running(old)
        # Processes of a foreground that was killed are ended by the kernel, but not in the same instant.
        owner = read_record(self._folder.owner)
        orphaned = owner is not None and not owner.is_running()
        if running and old.ready and not orphaned:
            raise OperatorError(
                f"a cluster is running in {self._folder.path} ({len(running)} processes): `tao dev status` shows it, "
                "`tao dev down` stops it, --state-dir chooses another folder"
            )
        shape = (settings.shape or old.shape).check()
        if (shape.shards, shape.databases) != (old.shape.shards, old.shape.databases):
            raise OperatorError(
                f"{self._folder.path} has data of {old.shape.shards} shards on {old.shape.databases} database "
                "server(s), which cannot be changed: leave --shards and --databases out, or choose another --state-dir"
            )
        if running:
            self._tell("clearing what was left running")
            await stop_recorded(self._folder, old, self._tell)
        self._record = msgspec.structs.replace(old, shape=shape, ready=False)

    async def _start(self, binary: ServerBinary) -> None:
        settings, shape = self._settings, self._record.shape
        schema = place_schema(self._folder, settings.schema_file)
        reservations = self._reserve_ports()
        try:
            self._folder.write(self._record)
            if settings.detached:
                self._folder.owner.unlink(missing_ok=True)
            else:
                self._folder.write_owner()
            self._tell(f"starting {_listed(shape.database_names)}")
            await self._start_databases(binary)
            self._write_documents(schema)
            self._tell(f"preparing {shape.shards} shards")
            await self._migrate(schema)
            followers = [name for name in self._servers if self._servers[name].role is Role.FOLLOWER]
            for names in (shape.leader_names, followers):
                self._tell(f"waiting for {_listed(names)}")
                await _together(self._servers[name].start(reservations[name]) for name in names)
        finally:
            for held in reservations.values():
                release(held)
        self._record = msgspec.structs.replace(self._record, ready=True)
        self._folder.write(self._record)

    def _reserve_ports(self) -> dict[str, list[PortReservation]]:
        settings, shape = self._settings, self._record.shape
        first_follower = shape.follower_names(shape.tier_names[0])[0]
        ports = dict(self._record.ports)
        reservations: dict[str, list[PortReservation]] = {}
        try:
            for name, role in shape.server_names.items():
                if role is Role.DATABASE:
                    continue
                fixed = settings.client_port if name == first_follower else 0
                ports[name], reservations[name] = reserve_ports(ports.get(name), fixed)
                self._servers[name] = ServerProcess(
                    name,
                    role,
                    ports[name],
                    self._folder,
                    environment=settings.environment,
                    lifetime=self._lifetime,
                    start_seconds=settings.start_seconds,
                    stop_seconds=settings.stop_seconds,
                )
        except OperatorError:
            for held in reservations.values():
                release(held)
            raise
        self._record = msgspec.structs.replace(self._record, ports=ports)
        return reservations

    async def _start_databases(self, binary: ServerBinary) -> None:
        settings, record = self._settings, self._record
        for number, name in enumerate(record.shape.database_names, start=1):
            instance = InstanceSettings(
                folder=self._folder.database(name),
                accounts=service_accounts(record.passwords),
                cache_folder=default_cache_folder(os.environ),
                port=_still_free(record.database_ports.get(name, 0)),
                options=ServerOptions(
                    server_id=number,
                    gtid_domain=number,
                    durability=settings.durability,
                    buffer_pool_mb=settings.buffer_pool_mb,
                ),
                lifetime=self._lifetime,
                start_seconds=settings.start_seconds,
            )
            self._databases[name] = DatabaseInstance(binary, instance)
        await _together(instance.start() for instance in self._databases.values())

    def _write_documents(self, schema: Schema) -> None:
        """Topology and settings files; the record first, so that it is never behind them."""
        record = msgspec.structs.replace(
            self._record,
            database_ports={name: instance.port for name, instance in self._databases.items()},
            topology_version=self._next_topology_version(),
        )
        self._record = record
        self._folder.write(record)
        topology = build_topology(record.shape, record.topology_version, record.ports, record.database_ports)
        self._folder.write_file(self._folder.topology, dump_topology(topology).encode())
        arenas = {otype.arena for otype in schema.objects} | {atype.arena for atype in schema.assocs}
        for server in self._servers.values():
            settings = yaml.safe_dump(self._server_settings(server, arenas), sort_keys=False).encode()
            self._folder.write_file(self._folder.settings_file(server.name), settings)

    def _next_topology_version(self) -> int:
        """Above the recorded one and the file's: an operator may have changed the file since."""
        try:
            version = msgspec.json.decode(self._folder.topology.read_bytes(), type=_Versioned).version
        except (OSError, msgspec.MsgspecError):
            version = 0
        return max(version, self._record.topology_version) + 1

    def _server_settings(self, server: ServerProcess, arenas: set[str]) -> dict[str, object]:
        accounts = service_accounts(self._record.passwords)
        settings: dict[str, object] = {
            "name": server.name,
            "topology_file": str(self._folder.topology),
            "schema_file": str(self._folder.schema),
            "cache_mb": self._settings.cache_mb,
            "arena_mb": dict.fromkeys(sorted(arenas - {DEFAULT_ARENA}), self._settings.arena_mb),
            "log_level": self._settings.log_level,
        }
        if server.role is Role.LEADER:
            settings |= {
                "leader_user": accounts.leader.user,
                "leader_password": accounts.leader.password,
                "reader_user": accounts.reader.user,
                "reader_password": accounts.reader.password,
            }
        return settings

    async def _migrate(self, schema: Schema) -> None:
        administrator = service_accounts(self._record.passwords).administrator
        tables = schema.custom_tables()

        async def one(name: str, first: int, last: int) -> None:
            database = self._databases[name]
            account = ServerAccount(database.host, database.port, administrator.user, administrator.password)
            await migrate(account, range(first, last + 1), tables, name)

        await _together(one(name, first, last) for name, (first, last) in self._record.shape.shard_ranges.items())

    async def _stop_processes(self) -> list[str]:
        """In reverse order of dependency; bounded by each process's own bounds."""
        killed: list[str] = []
        for role in (Role.FOLLOWER, Role.LEADER):
            servers = [server for server in self._servers.values() if server.role is role]
            if any(server.is_running for server in servers):
                self._tell(f"stopping {_listed([server.name for server in servers if server.is_running])}")
            quietly = await asyncio.gather(*(server.stop() for server in servers))
            killed += [server.name for server, went in zip(servers, quietly, strict=True) if not went]
        running = [name for name, instance in self._databases.items() if instance.is_running]
        if running:
            self._tell(f"stopping {_listed(running)}")
        quietly = await asyncio.gather(*(instance.stop() for instance in self._databases.values()))
        killed += [name for name, went in zip(self._databases, quietly, strict=True) if not went]
        return killed


class _Versioned(msgspec.Struct):
    """The one field of a topology document that is wanted here."""

    version: int


def _still_free(port: int) -> int:
    """The port, or 0 when somebody took it since the last start."""
    try:
        reserve_port(port).release()
    except OperatorError:
        return 0
    return port


def _listed(names: list[str]) -> str:
    return ", ".join(names)


async def _together(steps: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all at once; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
