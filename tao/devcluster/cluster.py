"""`DevCluster`: a whole cluster on this machine, of one region or several, started in dependency order and gated on
health.

Databases first, then (with several regions) the delay line and replication, the shards' migrations at the masters,
leaders, tailers, followers; each step waits until the one before is ready. It stops in the opposite order. What it
knows goes into the state folder before it is needed there, so that a crash at any moment leaves a folder that the next
start, `status` and `down` understand.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tao.devcluster.cluster_topology import build_topology, crossings
from tao.devcluster.database import DatabaseInstance
from tao.devcluster.identity import read_record
from tao.devcluster.inspection import ClusterStatus, client_address, cluster_status, stop_recorded
from tao.devcluster.layout import DEFAULT_RTT_MS, STOPPING_ORDER, ClusterSettings, Member, Role, Shape
from tao.devcluster.ports import PortReservation, reserve_port
from tao.devcluster.process_settings import instance_settings, lifetime_of, settings_text
from tao.devcluster.processes import to_the_end
from tao.devcluster.replication_sets import (
    catch_up,
    follow,
    lead,
    masters,
    replicas,
    resume,
    wait_for_replicas,
)
from tao.devcluster.schema_copy import place_schema
from tao.devcluster.server_binary import ServerBinary, find_server_binary
from tao.devcluster.server_process import ServerProcess, release, reserve_again, reserve_ports
from tao.devcluster.state_folder import ClusterRecord, StateFolder, new_passwords, service_accounts
from tao.model.errors import OperatorError
from tao.model.topology import DatabaseServer
from tao.schema.registry import Schema
from tao.storage.migrations import migrate
from tao.storage.session import ServerAccount
from tao.topology.document import dump_topology, parse_topology


class DevCluster:
    """An async context manager; or `start`, then `stop` (or `release`, when detached). Use it on one event loop."""

    def __init__(self, settings: ClusterSettings, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._settings = settings
        self._tell = on_progress
        self._folder = StateFolder(settings.state_dir)
        self._record = ClusterRecord(shape=settings.shape or Shape())
        self._databases: dict[str, DatabaseInstance] = {}
        self._servers: dict[str, ServerProcess] = {}

    @property
    def client_address(self) -> str:
        """gRPC address (``host:port``) of the first follower: what `tao.client.connect` takes."""
        return client_address(self._record)

    def client_address_in(self, region: str) -> str:
        """As `client_address`, of one region."""
        return client_address(self._record, region)

    @property
    def line_control(self) -> Path:
        """The Unix socket of the delay line, for `tao.devcluster.line_control.ask_line`."""
        return self._folder.line_control

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
        running: dict[str, DatabaseInstance | ServerProcess] = {**self._databases, **self._servers}
        return [name for name in self.processes if name in running and running[name].is_running]

    def admin(self, name: str) -> str:
        """``host:port`` of the admin port of a leader, follower or tailer."""
        process = self._process(name)
        if not isinstance(process, ServerProcess) or not process.admin:
            raise OperatorError(f"{name} has no admin port")
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
            self._folder.discard()
            await self.stop()
            raise

    async def stop(self) -> list[str]:
        """Stop followers, leaders, databases; returns the names that had to be killed. Data are kept. Idempotent. Goes
        on to its end also when the caller is cancelled."""
        killed = await to_the_end(self._stop_processes())
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
        if isinstance(process, DatabaseInstance) and self._record.shape.is_distributed:
            topology = parse_topology(await asyncio.to_thread(self._folder.topology.read_bytes), "topology")
            watched = self._record.shape.watchers > 0
            await resume(topology, name, service_accounts(self._record.passwords), watched=watched)

    def _process(self, name: str) -> DatabaseInstance | ServerProcess:
        found = self._databases.get(name) or self._servers.get(name)
        if found is None:
            raise OperatorError(f"there is no {name} here: the processes are {', '.join(self.processes)}")
        return found

    async def _take_over(self) -> None:
        """Decide on the shape; refuse a folder whose cluster is in use, and clear what a crash left in it."""
        settings = self._settings
        old = self._folder.read()
        rtt_ms = settings.rtt_ms if settings.rtt_ms is not None else old.rtt_ms if old is not None else DEFAULT_RTT_MS
        if old is None:
            shape = (settings.shape or Shape()).check()
            self._record = ClusterRecord(shape=shape, rtt_ms=rtt_ms, passwords=new_passwords())
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
        if (shape.regions, shape.mixed_mastership) != (old.shape.regions, old.shape.mixed_mastership):
            raise OperatorError(
                f"{self._folder.path} has data of {old.shape.regions} region(s), which cannot be changed: leave "
                "--regions and --mixed-mastership out, or choose another --state-dir"
            )
        if running:
            self._tell("clearing what was left running")
            await stop_recorded(self._folder, old, self._tell)
        self._record = msgspec.structs.replace(old, shape=shape, rtt_ms=rtt_ms, ready=False)

    async def _start(self, binary: ServerBinary) -> None:
        settings, shape = self._settings, self._record.shape
        schema = place_schema(self._folder, settings.schema_file)
        reservations = self._reserve_ports()
        self._prepare_databases(binary)
        try:
            self._folder.write(self._record)
            if settings.detached:
                self._folder.owner.unlink(missing_ok=True)
            else:
                self._folder.write_owner()
            self._tell(f"starting {_listed(list(self._databases))}")
            await _together(instance.start() for instance in self._databases.values())
            self._write_documents(schema)
            await self._start_role(Role.LINE, reservations)
            if shape.is_distributed:
                await self._replicate()
            self._tell(f"preparing {shape.shards} shards")
            await self._migrate(schema)
            if shape.is_distributed:
                await self._catch_up()
            for role in (Role.LEADER, Role.TAILER, Role.FOLLOWER, Role.WATCHER):
                await self._start_role(role, reservations)
        finally:
            for held in reservations.values():
                release(held)
        self._record = msgspec.structs.replace(self._record, ready=True)
        self._folder.write(self._record)

    async def _start_role(self, role: Role, reservations: dict[str, list[PortReservation]]) -> None:
        names = [name for name, server in self._servers.items() if server.role is role]
        if names:
            self._tell(f"waiting for {_listed(names)}")
            await _together(self._servers[name].start(reservations[name]) for name in names)

    def _reserve_ports(self) -> dict[str, list[PortReservation]]:
        """Give every process of the roles asked for its ports. The databases reserve theirs themselves."""
        record, shape = self._record, self._record.shape
        ports, line = dict(record.ports), dict(record.line_ports)
        tailers, watchers = dict(record.tailer_ports), dict(record.watcher_ports)
        first_follower = shape.followers_in(shape.region_names[0], shape.tier_names[0])[0]
        reservations: dict[str, list[PortReservation]] = {}
        try:
            for member in shape.members:
                name, admin_port = member.name, 0
                if member.role is Role.DATABASE:
                    continue
                if member.role is Role.LINE:
                    keys = [crossing.key for crossing in crossings(shape)]
                    reservations[name] = [reserve_again(line.get(key, 0)) for key in keys]
                    line = {key: held.port for key, held in zip(keys, reservations[name], strict=True)}
                elif member.role in (Role.TAILER, Role.WATCHER):
                    admins = tailers if member.role is Role.TAILER else watchers
                    reservations[name] = [reserve_again(admins.get(name, 0))]
                    admin_port = admins[name] = reservations[name][0].port
                else:
                    fixed = self._settings.client_port if name == first_follower else 0
                    ports[name], reservations[name] = reserve_ports(ports.get(name), fixed)
                    admin_port = ports[name].admin
                if member.role in self._settings.roles:
                    self._servers[name] = self._server(member, admin_port)
        except OperatorError:
            for held in reservations.values():
                release(held)
            raise
        self._record = msgspec.structs.replace(
            record, ports=ports, tailer_ports=tailers, watcher_ports=watchers, line_ports=line
        )
        return reservations

    def _server(self, member: Member, admin_port: int) -> ServerProcess:
        settings = self._settings
        return ServerProcess(
            member.name,
            member.role,
            admin_port,
            self._folder,
            environment=settings.environment,
            lifetime=lifetime_of(settings),
            start_seconds=settings.start_seconds,
            stop_seconds=settings.stop_seconds,
        )

    def _prepare_databases(self, binary: ServerBinary) -> None:
        record, folder = self._record, self._folder
        for member in record.shape.members:
            if member.role is Role.DATABASE:
                port = _still_free(record.database_ports.get(member.name, 0))
                settings = instance_settings(member, record, folder, self._settings, port=port)
                self._databases[member.name] = DatabaseInstance(binary, settings)

    def _write_documents(self, schema: Schema) -> None:
        """Topology and settings files; the record first, so that it is never behind them."""
        record = msgspec.structs.replace(
            self._record,
            database_ports={name: instance.port for name, instance in self._databases.items()},
            topology_version=self._next_topology_version(),
        )
        self._record = record
        self._folder.write(record)
        self._topology = build_topology(
            record.shape,
            record.topology_version,
            record.addresses,
            self._folder.master_regions(record.shape),
            version_epochs=self._folder.version_epochs(),
            semi_sync=self._settings.semi_sync,
        )
        self._folder.write_file(self._folder.topology, dump_topology(self._topology).encode())
        arenas = {otype.arena for otype in schema.objects} | {atype.arena for atype in schema.assocs}
        for member in record.shape.members:
            if member.role is not Role.DATABASE:
                text = settings_text(member, record, self._folder, self._settings, arenas)
                self._folder.write_file(self._folder.settings_file(member.name), text)

    def _next_topology_version(self) -> int:
        """Above the recorded one and the file's: an operator may have changed the file since."""
        return max(self._folder.topology_version(), self._record.topology_version) + 1

    async def _replicate(self) -> None:
        accounts = service_accounts(self._record.passwords)
        self._tell("attaching replicas")
        watched = self._record.shape.watchers > 0 and Role.WATCHER in self._settings.roles
        await _together(lead(master, accounts.administrator, keeps_lease=watched) for master in masters(self._topology))
        await _together(
            follow(replica, accounts.administrator, accounts.replicator) for replica in replicas(self._topology)
        )

    async def _catch_up(self) -> None:
        administrator = service_accounts(self._record.passwords).administrator
        self._tell("waiting for replicas to catch up")
        await _together(
            catch_up(replica, administrator, self._settings.start_seconds) for replica in replicas(self._topology)
        )
        if self._settings.semi_sync:
            await _together(wait_for_replicas(master, administrator) for master in masters(self._topology))

    async def _migrate(self, schema: Schema) -> None:
        administrator = service_accounts(self._record.passwords).administrator
        tables = schema.custom_tables()

        async def one(master: DatabaseServer, first: int, last: int) -> None:
            account = ServerAccount(master.host, master.port, administrator.user, administrator.password)
            await migrate(account, range(first, last + 1), tables, master.name)

        ranges = self._record.shape.shard_ranges.values()
        await _together(one(master, *shards) for master, shards in zip(masters(self._topology), ranges, strict=True))

    async def _stop_processes(self) -> list[str]:
        """In reverse order of dependency; bounded by each process's own bounds."""
        killed: list[str] = []
        for role in STOPPING_ORDER:
            found: dict[str, DatabaseInstance | ServerProcess] = {
                **({} if role is not Role.DATABASE else self._databases),
                **{name: server for name, server in self._servers.items() if server.role is role},
            }
            running = [name for name, process in found.items() if process.is_running]
            if running:
                self._tell(f"stopping {_listed(running)}")
            quietly = await asyncio.gather(*(process.stop() for process in found.values()))
            killed += [name for name, went in zip(found, quietly, strict=True) if not went]
        return killed


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
