"""Starts and stops a whole cluster on this machine, with one region or several.

The start goes in the order of dependency: etcd, if it has one, databases, then (with several regions) the delay line
and replication, the tables of the shards, leaders, tailers, followers, watchers, workers. Each step waits until the
servers of the one before are ready. The stop goes in the opposite order. Everything that is needed to find a process
again is written to the state folder before the process starts, so that a crash at any moment leaves a folder that the
next start, `tao dev status` and `tao dev down` understand.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from tao.admin.documents import database_of_server
from tao.admin.drain import drain_cache_server
from tao.admin.replication import (
    catch_up,
    follow,
    hold,
    lead,
    masters,
    replicas,
    resume,
    wait_for_replicas,
)
from tao.admin.server_stats import wait_until_ready
from tao.devcluster.certificates import certificate_ids, cluster_accounts, issue_certificates
from tao.devcluster.configuration import build_topology, crossings, instance_settings, settings_text
from tao.devcluster.database import DatabaseInstance
from tao.devcluster.database_program import ServerBinary, find_server_binary
from tao.devcluster.etcd import etcd_command, find_etcd, wait_until_etcd_answers
from tao.devcluster.fork_server import tao_fork_server
from tao.devcluster.inspection import (
    STOP_SECONDS,
    ClusterStatus,
    client_address,
    cluster_status,
    stop_recorded,
)
from tao.devcluster.layout import PORT_KINDS, ClusterSettings, Member, Role, Shape, StartOptions
from tao.devcluster.line_control import wait_until_line_answers
from tao.devcluster.ports import LOOPBACK, reserve_again, reserve_port
from tao.devcluster.processes import (
    ManagedProcess,
    ProcessIdentity,
    ProcessOptions,
    kill_process,
    read_record,
    stop_process,
    to_the_end,
)
from tao.devcluster.state_folder import (
    ClusterRecord,
    StateFolder,
    TopologyOutline,
    choose_schema,
    etcd_location,
    new_passwords,
    outline_of,
    read_topology,
)
from tao.etcd.location import EtcdSettings, Location
from tao.model.errors import OperatorError, TopologyError
from tao.model.topology import Database, Topology
from tao.replication.etcd_locks import open_locks
from tao.replication.locks import hold_exclusively, mastership_lock
from tao.schema.registry import Schema
from tao.storage.migrations import migrate
from tao.topology.document import dump_topology
from tao.topology.edits import shards_of
from tao.topology.stores import SCHEMA_KEY, EtcdConnections, TextDocuments, open_topology

_OPERATOR_ERROR_STATUS = 2


class DevCluster:
    """A development cluster. Use it as an async context manager, or call `start`, then `stop` (`release` when it is
    detached), on one event loop. `attached` gives one that another command started."""

    def __init__(self, settings: ClusterSettings, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._settings = settings
        self._on_progress = on_progress
        self._folder = StateFolder(settings.state_dir)
        self._record: ClusterRecord | None = None
        self._databases: dict[str, DatabaseInstance] = {}
        self._servers: dict[str, ManagedProcess] = {}
        # Until the end, so that no other cluster picks the port of a server that is down.
        self._reserved: Final = ExitStack()

    @classmethod
    def attached(cls, state_dir: Path, on_progress: Callable[[str], None] = lambda _: None) -> Self:
        """Return the cluster that runs in a folder. What it starts goes on running when the caller ends; call `release`
        at the end.

        Raises `OperatorError` when no cluster runs there, or another command starts or changes it."""
        folder = StateFolder(state_dir)
        record = folder.require()
        if not folder.running(record) or folder.is_orphaned:
            raise OperatorError(f"no cluster runs in {folder.path}: start it with {folder.command('up')}")
        options = msgspec.structs.asdict(record.options)
        cluster = cls(ClusterSettings(state_dir=state_dir, shape=record.shape, detached=True, **options), on_progress)
        if read_record(folder.owner) is None:  # a foreground keeps the lock while it runs
            cluster._folder.lock()
        if not record.ready:
            cluster._folder.unlock()
            raise OperatorError(
                f"the start of the cluster in {folder.path} is not complete: wait, or {folder.command('down')}"
            )
        cluster._record = record
        cluster._define_databases(find_server_binary(os.environ))
        return cluster

    @property
    def client_address(self) -> str:
        """``host:port`` of the first follower's gRPC port, which `tao.client.connect` takes."""
        return client_address(self.record)

    def client_address_in(self, region: str) -> str:
        """Return ``host:port`` of the gRPC port of a region's first follower."""
        return client_address(self.record, region)

    @property
    def line_control(self) -> Path:
        """The Unix socket of the delay line, for `tao.devcluster.line_control.ask_line`."""
        return self._folder.line_control

    @property
    def topology_path(self) -> Path:
        """The topology document, which `tao.client.connect` takes too, of a cluster without etcd."""
        return self._folder.topology

    @property
    def topology_place(self) -> Location:
        """Where the topology document is, with etcd or without it."""
        return etcd_location(self.record) or self._folder.topology

    async def topology(self) -> Topology:
        """Return the topology that the servers go by. Raises `TopologyError`."""
        return await read_topology(self.topology_place)

    @property
    def schema_path(self) -> Path:
        """The schema file of the servers."""
        return self._folder.schema

    @property
    def record(self) -> ClusterRecord:
        """The cluster's shape, ports and passwords. Raises `OperatorError` before the start."""
        if self._record is None:
            raise OperatorError(f"the cluster in {self._folder.path} was not started")
        return self._record

    @property
    def processes(self) -> dict[str, Role]:
        """The role of every process by name, in starting order."""
        return self.record.shape.server_names

    @property
    def running(self) -> list[str]:
        """The names of the processes that run now, in starting order."""
        return [] if self._record is None else list(self._folder.running(self._record))

    def admin(self, name: str) -> str:
        """Return ``host:port`` of a server's admin port. Raises `OperatorError` for a process without one."""
        self._member(name)
        port = self.record.ports[name].get("admin")
        if port is None:
            raise OperatorError(f"{name} has no admin port")
        return f"{LOOPBACK}:{port}"

    def database(self, name: str) -> DatabaseInstance:
        """Return a database server. Raises `OperatorError` for another process."""
        self._member(name)
        if name not in self._databases:
            raise OperatorError(f"{name} is not a database")
        return self._databases[name]

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
        run before, and the data are unchanged. A mistake that is found before the first process starts leaves the
        folder as it was."""
        settings, folder = self._settings, self._folder
        binary = find_server_binary(os.environ)
        former = folder.read()
        try:
            if former is not None:
                folder.lock()
                former = await self._cleared()
            shape = _checked_shape(settings.shape or (former.shape if former else Shape()), former, folder.path)
            if shape.etcd:
                find_etcd(os.environ)
            schema, schema_text = choose_schema(folder, settings.schema_file)
            record = self._planned(shape, former)
            if former is None:
                folder.create()
                folder.lock()
                if folder.read() is not None:
                    raise OperatorError(f"another process has just used {folder.path}: try again")
            self._record = record
            folder.write_file(folder.schema, schema_text.encode())
            if settings.detached:
                folder.owner.unlink(missing_ok=True)
            else:
                folder.write_owner()
            await self._start(binary, schema)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> list[str]:
        """Stop all processes and return the names of those that had to be killed; the data are kept.

        It runs to its end even when the caller is cancelled. Idempotent."""
        killed: list[str] = []
        if self._record is not None:
            # Another command may have added a follower, or removed it.
            killed = await to_the_end(self._stop_all(self._folder.read() or self._record))
            self._folder.owner.unlink(missing_ok=True)
        self._reserved.close()
        self._folder.unlock()
        return killed

    def release(self) -> None:
        """Stop watching the processes of a detached cluster, which go on running; `stop` does nothing then."""
        children: list[DatabaseInstance | ManagedProcess] = [*self._databases.values(), *self._servers.values()]
        for child in children:
            child.release()
        self._record = None
        self._reserved.close()
        self._folder.unlock()

    async def kill(self, name: str) -> bool:
        """Kill one process with SIGKILL, as a crash would. Returns False when it did not run."""
        member = self._member(name)
        identity = self._identity(member)
        if identity is not None:
            await kill_process(identity)
        await self._reap(name)
        return identity is not None

    async def restart(self, name: str) -> None:
        """Start one process again on its ports, and return when it is ready. Stops it first when it runs."""
        member = self._member(name)
        await self._stop_one(member)
        await self._start_one(member)
        if member.role is Role.DATABASE and self.record.shape.replicates:
            await self._resume(name)

    async def _resume(self, name: str) -> None:
        """Let a database server take up its part. Under the lock of its database, so that no watcher changes its master
        meanwhile."""
        database = database_of_server(await self.topology(), name).name
        etcd = EtcdConnections(EtcdSettings())
        try:
            locks = open_locks(self.topology_place, etcd)
            async with hold_exclusively(locks, mastership_lock(database), self._settings.start_seconds):
                accounts, watched = cluster_accounts(self._folder, self.record), self.record.shape.watchers > 0
                await resume(await self.topology(), name, accounts, watched=watched)
        finally:
            await etcd.close()

    async def start_stopped(self) -> list[str]:
        """Start the processes that do not run, in starting order; return their names when they are ready."""
        running = set(self.running)
        for role in Role:
            names = [member.name for member in self.record.shape.select(role) if member.name not in running]
            if names:
                self._on_progress(f"starting {', '.join(names)}")
                await _together(map(self.restart, names))
        return [name for name in self.processes if name not in running]

    async def add_follower(self) -> str:
        """Start one more follower, which registers itself in the first tier; return its name when it is ready. It then
        takes its part of the ring in steps."""
        before = self.record
        added = before.shape.added_followers + 1
        shape = msgspec.structs.replace(before.shape, added_followers=added).check()
        (member,) = [each for each in shape.members if each.name not in before.shape.server_names]
        with ExitStack() as reservations:
            ports = {kind: reservations.enter_context(reserve_port()).port for kind in PORT_KINDS[member.role]}
            self._use_shape(shape, {**before.ports, member.name: ports})
            try:
                schema, _ = choose_schema(self._folder, None)
                if self._settings.tls:
                    ids = certificate_ids(shape)
                    issue_certificates(self._folder, {member.name: ids[member.name]})
                self._write_settings_of(member, schema)
                self._on_progress(f"starting {member.name}")
                await self._start_one(member)
            except BaseException:
                self._use_shape(before.shape, before.ports)
                raise
            self._reserved.push(reservations.pop_all())
        return member.name

    async def remove_follower(self, timeout_seconds: float) -> str:
        """Drain the follower that was added last, stop it, and return its name.

        Raises `OperatorError` when none was added, or when it does not leave in time; then it goes on running."""
        record = self.record
        name = next((each.name for each in reversed(record.shape.members) if each.registers), "")
        if not name:
            raise OperatorError("no follower was added to this cluster: `tao dev add-follower` adds one")
        self._on_progress(f"draining {name}")
        member = self._member(name)
        if (await self.topology()).server_places.get(name):
            drained = await drain_cache_server(self.topology_place, name, timeout_seconds, self._on_progress)
            if drained.waiting_for:
                raise OperatorError(drained.describe())
        await self._stop_one(member)
        shape = msgspec.structs.replace(record.shape, added_followers=record.shape.added_followers - 1)
        self._use_shape(shape, {other: ports for other, ports in record.ports.items() if other != name})
        return name

    def _use_shape(self, shape: Shape, ports: dict[str, dict[str, int]]) -> None:
        self._record = msgspec.structs.replace(self.record, shape=shape, ports=ports)
        self._folder.write(self._record)

    async def reset(self) -> None:
        """Start anew without the data, on the same ports, and return when every server is ready.

        Raises `OperatorError` when a server does not start; then nothing runs."""
        record = self.record
        schema, _ = choose_schema(self._folder, None)
        binary = find_server_binary(os.environ)
        await to_the_end(self._stop_all(record))
        self._on_progress("removing the data")
        await asyncio.to_thread(self._folder.remove_data, record)
        try:
            self._reserved.close()
            self._record = self._planned(record.shape, record)
            await self._start(binary, schema)
        except BaseException:
            await self.stop()
            raise

    async def _stop_all(self, record: ClusterRecord) -> list[str]:
        killed = await stop_recorded(self._folder, record, self._on_progress)
        for name in (*self._databases, *self._servers):
            await self._reap(name)
        return killed

    def _member(self, name: str) -> Member:
        found = {member.name: member for member in self.record.shape.members}
        if name not in found:
            raise OperatorError(f"there is no {name} here: the processes are {', '.join(found)}")
        return found[name]

    def _identity(self, member: Member) -> ProcessIdentity | None:
        """Return the process of a member that runs now, whichever command started it."""
        identity = read_record(self._folder.process_record(member.name, member.role))
        return identity if identity is not None and identity.is_running() else None

    async def _reap(self, name: str) -> None:
        """Take the exit status of a process that has ended, where it is a child of this one."""
        child = self._databases.get(name) or self._servers.get(name)
        if child is not None:
            await child.stop()

    async def _cleared(self) -> ClusterRecord:
        """Return the record of the locked folder, and end what a crash left running.

        Raises `OperatorError` when a cluster runs in the folder."""
        folder = self._folder
        record = folder.require()
        running = folder.running(record)
        # The kernel ends the processes of a foreground that was killed, but not in the same instant.
        if running and record.ready and not folder.is_orphaned:
            raise OperatorError(
                f"a cluster is running in {folder.path} ({len(running)} processes): {folder.command('status')} "
                f"shows it, {folder.command('down')} stops it, --state-dir chooses another folder"
            )
        if running:
            self._on_progress("stopping what was left running")
            await stop_recorded(folder, record, self._on_progress)
        return record

    def _planned(self, shape: Shape, former: ClusterRecord | None) -> ClusterRecord:
        """Return the record of this start, with reserved ports.

        A port of the last start is taken again where it is free, so that clients find its server again."""
        fixed = {(shape.first_follower(), "grpc"): self._settings.client_port}

        def port(name: str, kind: str) -> int:
            wanted = fixed.get((name, kind), 0)
            before = (former.ports if former else {}).get(name, {}).get(kind, 0)
            return self._reserved.enter_context(reserve_port(wanted) if wanted else reserve_again(before)).port

        kinds = {**PORT_KINDS, Role.LINE: [each.key for each in crossings(shape)]}
        ports = {
            member.name: {kind: port(member.name, kind) for kind in kinds[member.role]} for member in shape.members
        }
        record = former or ClusterRecord(shape=shape, passwords=new_passwords())
        rtt_ms = record.rtt_ms if self._settings.rtt_ms is None else self._settings.rtt_ms
        # Above the file's version too: an operator may have changed the file.
        version = max(self._folder.former_topology().version, record.topology_version) + 1
        return msgspec.structs.replace(
            record,
            shape=shape,
            ports=ports,
            rtt_ms=rtt_ms,
            topology_version=version,
            options=msgspec.convert(self._settings, StartOptions, from_attributes=True),
            ready=False,
        )

    async def _start(self, binary: ServerBinary, schema: Schema) -> None:
        record, shape = self.record, self.record.shape
        self._folder.write(record)
        await self._start_role(Role.ETCD)
        await self._store_documents()
        self._write_settings(schema)
        self._define_databases(binary)
        if self._settings.roles - {Role.DATABASE, Role.LINE, Role.ETCD}:
            tao_fork_server()  # it imports modules while the databases start
        await self._start_role(Role.DATABASE)
        await self._start_role(Role.LINE)
        if shape.replicates:
            await self._replicate()
        self._on_progress(f"preparing {shape.shards} shards")
        await self._migrate(schema)
        if shape.replicates:
            await self._catch_up()
        for role in (Role.LEADER, Role.TAILER, Role.FOLLOWER, Role.WATCHER, Role.WORKER):
            await self._start_role(role)
        self._record = msgspec.structs.replace(record, ready=True)
        self._folder.write(self._record)

    def _define_databases(self, binary: ServerBinary) -> None:
        for member in self.record.shape.select(Role.DATABASE):
            found = instance_settings(member, self.record, self._folder, self._settings)
            self._databases[member.name] = DatabaseInstance(binary, found)

    async def _start_role(self, role: Role) -> None:
        members = self.record.shape.select(role) if role in self._settings.roles else []
        if members:
            self._on_progress(f"waiting for {', '.join(member.name for member in members)}")
            await _together(self._start_one(member) for member in members)

    async def _stop_one(self, member: Member) -> None:
        identity = self._identity(member)
        if identity is not None:
            await stop_process(identity, STOP_SECONDS[member.role])
        await self._reap(member.name)

    async def _start_one(self, member: Member) -> None:
        """Start a process and wait until it is ready.

        A server is run by its command, as an operator runs it (``tao leader --settings FILE``), in a fork. Raises
        `OperatorError`, with nothing left running, when it ends instead or takes too long."""
        name, role = member.name, member.role
        if role is Role.DATABASE:
            await self._databases[name].start()
            return
        # The delay line and etcd are no servers of the product: they are executed.
        fork_server = None if role in (Role.LINE, Role.ETCD) else await tao_fork_server().ready()
        process = self._servers[name] = ManagedProcess(
            name,
            self._command(name, role),
            os.environ,
            self._folder.log(name, role),
            ProcessOptions(
                folder=self._folder.path,
                record_path=self._folder.process_record(name, role),
                detached=self._settings.detached,
                stop_seconds=STOP_SECONDS[role],
                fork_server=fork_server,
            ),
        )
        try:
            await self._wait(process, role)
        except BaseException:
            await process.kill()
            raise

    def _command(self, name: str, role: Role) -> list[str]:
        if role is Role.ETCD:
            ports = self.record.ports[name]
            return etcd_command(find_etcd(os.environ), self.etcd_data, ports["client"], ports["peer"])
        module = ["tao.devcluster.delay_line"] if role is Role.LINE else ["tao.cli", str(role), "--settings"]
        # -P: modules in the folder where it starts must not replace installed ones.
        return [sys.executable, "-P", "-m", *module, str(self._folder.settings_file(name))]

    @property
    def etcd_data(self) -> Path:
        """The folder of etcd's data."""
        return self._folder.path / "servers" / "etcd"

    async def _wait(self, process: ManagedProcess, role: Role) -> None:
        seconds = self._settings.start_seconds
        if role is Role.ETCD:
            ready = wait_until_etcd_answers(self.record.ports[process.name]["client"], seconds)
        elif role is Role.LINE:
            ready = wait_until_line_answers(self._folder.line_control, seconds)
        else:
            ready = wait_until_ready(self.admin(process.name), seconds)
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

    async def _store_documents(self) -> None:
        """Store the topology, and in etcd the schema beside it. The record is written first, so that it is never behind
        the file."""
        folder, place, semi_sync = self._folder, self.topology_place, self._settings.semi_sync
        if isinstance(place, Path):
            self._topology = build_topology(self.record, folder.former_topology(), semi_sync=semi_sync)
            folder.write_file(folder.topology, dump_topology(self._topology).encode())
            return
        etcd = EtcdConnections(EtcdSettings())
        try:
            store = open_topology(place, etcd, lambda error: None)
            former, found = TopologyOutline(), 0
            with suppress(TopologyError):  # there is none yet, or a mistake in it must not keep the cluster down
                topology = await store.load()
                former, found = outline_of(topology), topology.version
            version = max(self.record.topology_version, found + 1)
            self._record = msgspec.structs.replace(self.record, topology_version=version)
            folder.write(self.record)
            built = build_topology(self.record, former, semi_sync=semi_sync)
            self._topology = await store.replace(found, built)
            text = await asyncio.to_thread(folder.schema.read_text)
            await TextDocuments(etcd.to(place), place).write(SCHEMA_KEY, text)
        finally:
            await etcd.close()

    def _write_settings(self, schema: Schema) -> None:
        """Write the settings files of the servers."""
        if self._settings.tls:
            issue_certificates(self._folder, certificate_ids(self.record.shape))
        for member in self.record.shape.members:
            if member.role not in (Role.DATABASE, Role.ETCD):
                self._write_settings_of(member, schema)

    def _write_settings_of(self, member: Member, schema: Schema) -> None:
        folder = self._folder
        arenas = {otype.arena for otype in schema.objects} | {atype.arena for atype in schema.assocs}
        text = settings_text(member, self.record, folder, self._settings, arenas)
        folder.write_file(folder.settings_file(member.name), text)

    async def _replicate(self) -> None:
        accounts = cluster_accounts(self._folder, self.record)
        self._on_progress("attaching replicas")
        watched = self.record.shape.watchers > 0 and Role.WATCHER in self._settings.roles
        await _together(lead(master, accounts.administrator, keeps_lease=watched) for master in masters(self._topology))
        if not self._settings.tls:  # a replica goes on with TLS, if the last start had it
            await _together(hold(replica, accounts.administrator) for replica in replicas(self._topology))
        await _together(
            follow(replica, accounts.administrator, accounts.replicator) for replica in replicas(self._topology)
        )

    async def _catch_up(self) -> None:
        administrator = cluster_accounts(self._folder, self.record).administrator
        self._on_progress("waiting for replicas to catch up")
        await _together(
            catch_up(replica, administrator, self._settings.start_seconds) for replica in replicas(self._topology)
        )
        if self._settings.semi_sync:
            await _together(wait_for_replicas(master, administrator) for master in masters(self._topology))

    async def _migrate(self, schema: Schema) -> None:
        administrator = cluster_accounts(self._folder, self.record).administrator
        tables = schema.custom_tables()

        async def one(database: Database) -> None:
            master = database.servers[database.master_region]
            await migrate(
                administrator.at(master),
                sorted(shards_of(database)),
                tables,
                master.name,
                version_epoch=database.version_epoch,
            )

        await _together(map(one, self._topology.databases))


def _checked_shape(shape: Shape, former: ClusterRecord | None, folder: Path) -> Shape:
    """Return the shape. Raises `OperatorError` when it is impossible, or the data in the folder have another shape."""
    old = shape if former is None else former.shape
    if (shape.shards, shape.databases) != (old.shards, old.databases):
        raise OperatorError(
            f"{folder} has data of {old.shards} shards on {old.databases} database server(s), which cannot be changed: "
            "leave --shards and --databases out, or choose another --state-dir"
        )
    if shape.etcd is not old.etcd:
        raise OperatorError(
            f"{folder} has its topology in {'etcd' if old.etcd else 'a file'}, which cannot be changed: "
            f"{'repeat' if old.etcd else 'leave out'} --etcd, or choose another --state-dir"
        )
    if (shape.regions, shape.mixed_mastership) != (old.regions, old.mixed_mastership):
        raise OperatorError(
            f"{folder} has data of {old.regions} region(s), which cannot be changed: leave --regions and "
            "--mixed-mastership out, or choose another --state-dir"
        )
    if shape.standby is not old.standby:
        raise OperatorError(
            f"{folder} has data {'with' if old.standby else 'without'} standbys, which cannot be changed: "
            f"{'repeat' if old.standby else 'leave out'} --standby, or choose another --state-dir"
        )
    return shape.check()


async def _together(steps: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all steps concurrently; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
