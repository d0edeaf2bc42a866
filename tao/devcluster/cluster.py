"""Starts and stops a whole cluster on this machine, with one region or several.

The start goes in the order of dependency: databases, then (with several regions) the delay line and replication, the
tables of the shards, leaders, tailers, followers, watchers. Each step waits until the servers of the one before are
ready. The stop goes in the opposite order. Everything that is needed to find a process again is written to the state
folder before the process starts, so that a crash at any moment leaves a folder that the next start, `tao dev status`
and `tao dev down` understand.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tao.admin.replication import (
    catch_up,
    follow,
    lead,
    masters,
    replicas,
    resume,
    wait_for_replicas,
)
from tao.admin.server_stats import wait_until_ready
from tao.devcluster.configuration import build_topology, crossings, instance_settings, lifetime_of, settings_text
from tao.devcluster.database import DatabaseInstance
from tao.devcluster.database_program import ServerBinary, find_server_binary
from tao.devcluster.inspection import ClusterStatus, client_address, cluster_status, stop_in_order, stop_recorded
from tao.devcluster.layout import (
    DEFAULT_RTT_MS,
    PORT_KINDS,
    ClusterSettings,
    Member,
    Role,
    Shape,
)
from tao.devcluster.line_control import wait_until_line_answers
from tao.devcluster.ports import LOOPBACK, PortReservation, release_all, reserve_again, reserve_port, still_free
from tao.devcluster.processes import ManagedProcess, ProcessOptions, read_record, to_the_end
from tao.devcluster.state_folder import ClusterRecord, StateFolder, new_passwords, place_schema, service_accounts
from tao.model.errors import OperatorError
from tao.model.topology import DatabaseServer
from tao.schema.registry import Schema
from tao.storage.migrations import migrate
from tao.storage.session import ServerAccount
from tao.topology.document import dump_topology, parse_topology

_OPERATOR_ERROR_STATUS = 2


class ServerProcess:
    """A leader, follower, tailer, watcher or delay line, over its restarts.

    It is run by its command, as an operator runs it (``tao leader --settings FILE``); the delay line, which is no
    server of the product, is run as a module."""

    def __init__(self, member: Member, admin_port: int, folder: StateFolder, settings: ClusterSettings) -> None:
        self.member = member
        self._admin_port = admin_port
        self._folder = folder
        self._settings = settings
        self._process: ManagedProcess | None = None

    @property
    def admin(self) -> str:
        """``host:port`` of the admin port; empty for the delay line, which has none."""
        return f"{LOOPBACK}:{self._admin_port}" if self._admin_port else ""

    @property
    def process(self) -> ManagedProcess:
        """The process of the latest start. Raises `OperatorError` before the first."""
        if self._process is None:
            raise OperatorError(f"{self.member.name} was not started")
        return self._process

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.is_running

    async def start(self, reservations: Iterable[PortReservation] = ()) -> None:
        """Start the server, wait until it is ready, and release the reservations of its ports.

        Raises `OperatorError`, with nothing left running, when it ends instead or takes too long."""
        name, role, settings = self.member.name, self.member.role, self._settings
        command = ["tao.devcluster.delay_line"] if role is Role.LINE else ["tao.cli", str(role), "--settings"]
        process = ManagedProcess(
            name,
            # -P: modules in the folder where it starts must not replace installed ones.
            [sys.executable, "-P", "-m", *command, str(self._folder.settings_file(name))],
            {**os.environ, **settings.environment},
            self._folder.log(name, role),
            ProcessOptions(
                folder=self._folder.path,
                record_path=self._folder.process_record(name, role),
                lifetime=lifetime_of(settings),
                stop_seconds=settings.stop_seconds,
            ),
        )
        try:
            process.start()
            self._process = process
            await self._wait(process)
        except BaseException:
            if self._process is process:
                await process.kill()
            raise
        finally:
            release_all(reservations)

    async def _wait(self, process: ManagedProcess) -> None:
        seconds = self._settings.start_seconds
        ready = (
            wait_until_ready(self.admin, seconds)
            if self.admin
            else wait_until_line_answers(self._folder.line_control, seconds)
        )
        try:
            status = await process.ended_before(ready)
        except OperatorError as error:
            raise OperatorError(f"{process.name} is {error.message}; log: {process.log_path}") from error
        if status is not None:
            # The log of an operator's mistake ends with one line that says it; another fault needs more of the log.
            tail = process.log_tail(1 if status == _OPERATOR_ERROR_STATUS else 12)
            raise OperatorError(
                f"{process.name} ended with status {status} instead of starting: {tail} (log: {process.log_path})"
            )

    async def stop(self) -> bool:
        """Send SIGTERM, and SIGKILL when it does not drain in time. Returns True without SIGKILL. Idempotent."""
        return self._process is None or await self._process.stop()

    async def kill(self) -> None:
        """Kill it with SIGKILL, as a crash would."""
        await self.process.kill()


class DevCluster:
    """A development cluster. Use it as an async context manager, or call `start`, then `stop` (`release` when it is
    detached), on one event loop."""

    def __init__(self, settings: ClusterSettings, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._settings = settings
        self._on_progress = on_progress
        self._folder = StateFolder(settings.state_dir)
        self._record = ClusterRecord(shape=settings.shape or Shape())
        self._databases: dict[str, DatabaseInstance] = {}
        self._servers: dict[str, ServerProcess] = {}

    @property
    def client_address(self) -> str:
        """``host:port`` of the first follower's gRPC port, which `tao.client.connect` takes."""
        return client_address(self._record)

    def client_address_in(self, region: str) -> str:
        """Return ``host:port`` of the gRPC port of a region's first follower."""
        return client_address(self._record, region)

    @property
    def line_control(self) -> Path:
        """The Unix socket of the delay line, for `tao.devcluster.line_control.ask_line`."""
        return self._folder.line_control

    @property
    def topology_path(self) -> Path:
        """The topology document, which `tao.client.connect` takes too."""
        return self._folder.topology

    @property
    def schema_path(self) -> Path:
        """The schema file of the servers."""
        return self._folder.schema

    @property
    def record(self) -> ClusterRecord:
        """The cluster's shape, ports and passwords."""
        return self._record

    @property
    def processes(self) -> dict[str, Role]:
        """The role of every process by name, in starting order."""
        return self._record.shape.server_names

    @property
    def running(self) -> list[str]:
        """The names of the processes that run now, in starting order."""
        found = self._by_name()
        return [name for name in self.processes if name in found and found[name].is_running]

    def admin(self, name: str) -> str:
        """Return ``host:port`` of a server's admin port. Raises `OperatorError` for a process without one."""
        process = self._process(name)
        if not isinstance(process, ServerProcess) or not process.admin:
            raise OperatorError(f"{name} has no admin port")
        return process.admin

    def database(self, name: str) -> DatabaseInstance:
        """Return a database server. Raises `OperatorError` for another process."""
        process = self._process(name)
        if not isinstance(process, DatabaseInstance):
            raise OperatorError(f"{name} is not a database")
        return process

    async def status(self) -> ClusterStatus:
        """Return the state of all processes, as `tao dev status` shows it."""
        return await cluster_status(self._folder.path)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all processes; return when every server is ready.

        Raises `OperatorError` for an operator's mistake or a server that does not start; then nothing runs that did not
        run before, and the data are unchanged.
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
        """Stop all processes and return the names of those that had to be killed; the data are kept.

        It runs to its end even when the caller is cancelled. Idempotent."""
        killed = await to_the_end(self._stop_processes())
        self._folder.owner.unlink(missing_ok=True)
        self._folder.unlock()
        return killed

    def release(self) -> None:
        """Stop watching the processes of a detached cluster, which go on running."""
        for each in self._by_name().values():
            each.process.release()
        self._folder.unlock()

    async def kill(self, name: str) -> None:
        """Kill one process with SIGKILL, as a crash would."""
        await self._process(name).kill()

    async def restart(self, name: str) -> None:
        """Start one process again on its ports, and return when it is ready. Stops it first when it runs."""
        process = self._process(name)
        await process.stop()
        await process.start()
        if isinstance(process, DatabaseInstance) and self._record.shape.is_distributed:
            topology = parse_topology(await asyncio.to_thread(self._folder.topology.read_bytes), "topology")
            watched = self._record.shape.watchers > 0
            await resume(topology, name, service_accounts(self._record.passwords), watched=watched)

    def _by_name(self) -> dict[str, DatabaseInstance | ServerProcess]:
        return {**self._databases, **self._servers}

    def _process(self, name: str) -> DatabaseInstance | ServerProcess:
        found = self._by_name().get(name)
        if found is None:
            raise OperatorError(f"there is no {name} here: the processes are {', '.join(self.processes)}")
        return found

    async def _take_over(self) -> None:
        """Take the record of the folder, or begin a new one, and end what a crash left running.

        Raises `OperatorError` when a cluster runs in the folder, or its data have another shape."""
        settings, folder = self._settings, self._folder
        old = folder.read()
        if old is None:
            shape = (settings.shape or Shape()).check()
            rtt_ms = DEFAULT_RTT_MS if settings.rtt_ms is None else settings.rtt_ms
            self._record = ClusterRecord(shape=shape, rtt_ms=rtt_ms, passwords=new_passwords())
            return
        running = folder.running(old)
        # The kernel ends the processes of a foreground that was killed, but not in the same instant.
        owner = read_record(folder.owner)
        orphaned = owner is not None and not owner.is_running()
        if running and old.ready and not orphaned:
            raise OperatorError(
                f"a cluster is running in {folder.path} ({len(running)} processes): `tao dev status` shows it, "
                "`tao dev down` stops it, --state-dir chooses another folder"
            )
        shape = (settings.shape or old.shape).check()
        _check_shape(shape, old.shape, folder.path)
        if running:
            self._on_progress("stopping what was left running")
            await stop_recorded(folder, old, self._on_progress)
        rtt_ms = old.rtt_ms if settings.rtt_ms is None else settings.rtt_ms
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
            self._on_progress(f"starting {', '.join(self._databases)}")
            await _together(instance.start() for instance in self._databases.values())
            self._write_documents(schema)
            await self._start_role(Role.LINE, reservations)
            if shape.is_distributed:
                await self._replicate()
            self._on_progress(f"preparing {shape.shards} shards")
            await self._migrate(schema)
            if shape.is_distributed:
                await self._catch_up()
            for role in (Role.LEADER, Role.TAILER, Role.FOLLOWER, Role.WATCHER):
                await self._start_role(role, reservations)
        finally:
            for held in reservations.values():
                release_all(held)
        self._record = msgspec.structs.replace(self._record, ready=True)
        self._folder.write(self._record)

    async def _start_role(self, role: Role, reservations: dict[str, list[PortReservation]]) -> None:
        names = [name for name, server in self._servers.items() if server.member.role is role]
        if names:
            self._on_progress(f"waiting for {', '.join(names)}")
            await _together(self._servers[name].start(reservations[name]) for name in names)

    def _reserve_ports(self) -> dict[str, list[PortReservation]]:
        """Reserve the ports of every process but the databases, which reserve theirs when they start.

        A port of the last start is taken again where it is free, so that clients find its server again."""
        record, shape, client_port = self._record, self._record.shape, self._settings.client_port
        ports = dict(record.ports)
        first_follower = shape.followers_in(shape.region_names[0], shape.tier_names[0])[0]
        reservations: dict[str, list[PortReservation]] = {}
        try:
            for member in shape.members:
                name, role = member.name, member.role
                if role is Role.DATABASE:
                    continue
                former = ports.get(name, {})
                kinds = [each.key for each in crossings(shape)] if role is Role.LINE else PORT_KINDS[role]
                held = reservations[name] = []
                for kind in kinds:
                    fixed = client_port if (name, kind) == (first_follower, "grpc") else 0
                    held.append(reserve_port(fixed) if fixed else reserve_again(former.get(kind, 0)))
                ports[name] = {kind: each.port for kind, each in zip(kinds, held, strict=True)}
                if role in self._settings.roles:
                    self._servers[name] = ServerProcess(
                        member, ports[name].get("admin", 0), self._folder, self._settings
                    )
        except OperatorError:
            for held in reservations.values():
                release_all(held)
            raise
        self._record = msgspec.structs.replace(record, ports=ports)
        return reservations

    def _prepare_databases(self, binary: ServerBinary) -> None:
        record = self._record
        for member in record.shape.members:
            if member.role is Role.DATABASE:
                port = still_free(record.ports.get(member.name, {}).get("mysql", 0))
                settings = instance_settings(member, record, self._folder, self._settings, port=port)
                self._databases[member.name] = DatabaseInstance(binary, settings)

    def _write_documents(self, schema: Schema) -> None:
        """Write the topology and the settings files. The record is written first, so that it is never behind them."""
        folder = self._folder
        self._record = record = msgspec.structs.replace(
            self._record,
            ports={**self._record.ports, **{name: {"mysql": at.port} for name, at in self._databases.items()}},
            # Above the file's version too: an operator may have changed the file.
            topology_version=max(folder.topology_version(), self._record.topology_version) + 1,
        )
        folder.write(record)
        self._topology = build_topology(
            record.shape,
            record.topology_version,
            record.ports,
            folder.master_regions(record.shape),
            version_epochs=folder.version_epochs(),
            semi_sync=self._settings.semi_sync,
        )
        folder.write_file(folder.topology, dump_topology(self._topology).encode())
        arenas = {otype.arena for otype in schema.objects} | {atype.arena for atype in schema.assocs}
        for member in record.shape.members:
            if member.role is not Role.DATABASE:
                text = settings_text(member, record, folder, self._settings, arenas)
                folder.write_file(folder.settings_file(member.name), text)

    async def _replicate(self) -> None:
        accounts = service_accounts(self._record.passwords)
        self._on_progress("attaching replicas")
        watched = self._record.shape.watchers > 0 and Role.WATCHER in self._settings.roles
        await _together(lead(master, accounts.administrator, keeps_lease=watched) for master in masters(self._topology))
        await _together(
            follow(replica, accounts.administrator, accounts.replicator) for replica in replicas(self._topology)
        )

    async def _catch_up(self) -> None:
        administrator = service_accounts(self._record.passwords).administrator
        self._on_progress("waiting for replicas to catch up")
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
        """Stop all processes; each has a time limit of its own."""
        stops = {name: process.stop for name, process in self._by_name().items()}
        return await stop_in_order(stops, self.processes, self.running, self._on_progress)


def _check_shape(shape: Shape, old: Shape, folder: Path) -> None:
    """Raise `OperatorError` when the data in the folder have another shape."""
    if (shape.shards, shape.databases) != (old.shards, old.databases):
        raise OperatorError(
            f"{folder} has data of {old.shards} shards on {old.databases} database server(s), which cannot be changed: "
            "leave --shards and --databases out, or choose another --state-dir"
        )
    if (shape.regions, shape.mixed_mastership) != (old.regions, old.mixed_mastership):
        raise OperatorError(
            f"{folder} has data of {old.regions} region(s), which cannot be changed: leave --regions and "
            "--mixed-mastership out, or choose another --state-dir"
        )


async def _together(steps: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all steps concurrently; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
