"""The simulated cluster: one or two regions, two databases, mastered one in each region, and all servers and clients.

Servers are the roles' own classes, wired by themselves over the substitutes. A killed server leaves nothing but its
files behind, and starts again as another process of the same name.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeGuard, TypeVar, cast

import msgspec

import tao.follower.server
import tao.leader.server
import tao.tailer.server
import tao.watcher.server
import tao.worker.server
from tao.cache import GraphCache
from tao.etcd.location import Location
from tao.follower.settings import FollowerSettings
from tao.journal.settings import JournalSettings
from tao.leader.settings import LeaderSettings
from tao.model.edge_states import State
from tao.model.errors import AccessError, TaoError, TopologyConflict, TopologyError
from tao.model.ports import TopologyStore
from tao.model.rows import RowChanges
from tao.model.topology import Database, Topology
from tao.observability.logs import Logger
from tao.replication.locks import FileLocks, Locks
from tao.replication.shard_move_plan import holder_of, master_of
from tao.routing.routes import Routes
from tao.routing.topology_changes import record_change
from tao.runtime.admin import AdminPages
from tao.schema.registry import Schema, load_schema
from tao.tailer.settings import TailerSettings
from tao.watcher.settings import WatcherSettings
from tao.worker.settings import WorkerSettings
from tests.rigs.memory_etcd import PLACE
from tests.sim.bounds import Bounds
from tests.sim.checks import Checks, Violation
from tests.sim.clients import Client
from tests.sim.copied_tables import tables_of
from tests.sim.counters import CounterChecks
from tests.sim.database import SimDatabase
from tests.sim.disks import SpoolFile
from tests.sim.documents import EtcdDocuments
from tests.sim.jobs import LEASE_SECONDS, JobChecks
from tests.sim.journals import Journals, journal_settings
from tests.sim.locks import LockTable
from tests.sim.loop import CURRENT, Process, SimLoop
from tests.sim.network import Network
from tests.sim.plans import LATER_SET_STATE, MOST_ADDED, Plan
from tests.sim.reachability import Reachability
from tests.sim.roles import follower_settings, leader_settings, tailer_settings, watcher_settings, worker_settings
from tests.sim.rows import Past
from tests.sim.single_failures import SingleFailures
from tests.sim.stores import roll_back_all_of
from tests.sim.substitutes import SimTopologyFile
from tests.sim.topologies import DATABASES, REGIONS, make_topology

_LOADED: Final = load_schema((Path(__file__).parents[2] / "config/schema.yaml").read_text(), "schema.yaml")
SCHEMA: Final = Schema(
    _LOADED.objects,
    tuple(
        replace(
            each,
            exists_filter=each.state is State.NORMAL and each.counter is None,
            # So few that the lists of a plan are trimmed, or full.
            keep=1 if each.name == "comment" else each.keep,
            keep_slack=1,
            max_edges=2 if each.name == "note" else None,
        )
        for each in _LOADED.assocs
    ),
    _LOADED.reserved_otypes,
    _LOADED.reserved_atypes,
)
_KEPT_EVENTS: Final = 3_000
FILE: Final = Path("simulated")
"""The file of the topology, where it is in one."""
_HEARD_SECONDS: Final = 10.0
"""Until every server that runs has heard of a new topology, also by looking whether its watch is silent."""
_AGAIN_SECONDS: Final = 1.0
"""Until a server that could not start is started again."""
_Settings = TypeVar("_Settings", LeaderSettings, FollowerSettings, TailerSettings, WatcherSettings, WorkerSettings)


class Trace:
    """The events of a run, in order. ``digest`` differs between two runs that differ in anything."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop: Final = loop
        self._hash = hashlib.blake2b(digest_size=12)
        self._encode: Final = msgspec.msgpack.Encoder().encode  # a third of the time that text would take
        self.recent: Final[deque[tuple[Any, ...]]] = deque(maxlen=_KEPT_EVENTS)
        self.events = 0

    def note(self, *event: Any) -> None:
        entry = (self._loop.now, *event)
        self.events += 1
        self.recent.append(entry)
        self._hash.update(self._encode(entry))

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class ProcessLog:
    """A server's log: it writes to the trace; an unforeseen error is a violation."""

    def __init__(self, name: str, note: Callable[..., None], unforeseen: Callable[[str], None]) -> None:
        self._name: Final = name
        self._note: Final = note
        self._unforeseen: Final = unforeseen

    def debug(self, event: str, **fields: object) -> None:
        """Ignore the call: nobody reads it."""

    def info(self, event: str, **fields: object) -> None:
        self._note("log", self._name, event, str(fields))

    warning = info

    def error(self, event: str, **fields: object) -> None:
        error = fields.pop("exc_info", None)
        self._note("log", self._name, event, repr(error), str(fields))
        if isinstance(error, BaseException):
            process = CURRENT.get()
            if process is None or process.state != "swept":
                self._unforeseen(f"{self._name}: {event}: {error!r} {fields}")

    def exception(self, event: str, **fields: object) -> None:
        self.error(event, **fields)


class World:
    """The simulated cluster. Implements `tests.sim.substitutes.Outside`."""

    def __init__(self, loop: SimLoop, plan: Plan, found: Callable[[Violation], None]) -> None:
        seed, shape = plan.seed, plan.shape
        self.seed: Final = seed
        self.loop: Final = loop
        self.shape: Final = shape
        self.pace: Final = plan.tempo.pace
        self.has_filters: Final = seed % 2 == 1
        """Half of the runs have pair filters, without another random number: so a seed keeps its faults."""
        self.has_short_prefixes: Final = shape.has_short_prefixes or seed % 8 == 6
        """In an eighth of the runs caches keep few edges of a list."""
        self.random: Final = random.Random(seed ^ 0x5EED)
        self.trace: Final = Trace(loop)
        self.network: Final = Network(loop, seed ^ 0x0E7, self.trace.note)
        self.schema: Final[Schema] = SCHEMA
        self.arena_bytes: Final = shape.arena_bytes
        self.disks: Final[dict[str, str]] = {}
        self.spools: Final[dict[str, SpoolFile]] = {}
        self.journals: Final = Journals()
        self.has_journals: Final = any(op.kind == LATER_SET_STATE for op in plan.ops)
        self.has_copies: Final = self.has_journals and shape.followers > 1
        """Accepted writes are on the disks of two followers, so one of these may be lost."""
        self.topology_watchers: Final[dict[object, tuple[Process, Callable[[Topology], None]]]] = {}
        self.clock_skew_ms: Final[dict[str, int]] = {}
        self.locks: Final = LockTable(loop)
        self.topology = make_topology(shape)
        self.documents: Final = self._store_in_etcd() if shape.etcd else None
        """The topology and the locks in etcd; None where they are in files."""
        self._topology_since = 0.0
        self._changes: Final = deque[Callable[[], None]]()
        """What waits until the topology can be changed."""
        self._stopping: Final[dict[str, Any]] = {}
        """The servers that do their last work; one of them may be killed before its end."""
        self.late_topologies: Final[dict[str, Topology]] = {}
        """Region → the document that its cache servers and tailers read while they are cut off from newer ones."""
        self.databases: Final[dict[str, SimDatabase]] = {}
        self.processes: Final[dict[str, Process]] = {}
        """Cache servers and tailers by name: the incarnation that runs, or ran last."""
        self.dead: Final[list[Process]] = []
        self.servers: Final[dict[str, Any]] = {}
        self.caches: Final[dict[str, GraphCache]] = {}
        self.clients: Final[list[Client]] = []
        self.operator: Final = Process("operator", REGIONS[0])
        self.at_pair_commit: Final[dict[str, Callable[[Process], None]]] = {}
        """Leader → what happens when one side of its next pair is committed."""
        self.rows_to_lose: Final[set[int]] = set()
        """Shards of which the next row that is copied gets lost on the way into the copy."""
        self.found: Final = found
        self.network.twice_passed_on = lambda text: found(Violation("hops", text))
        self.checks: Final = Checks(self.master_of, self.schema, loop.time, found)
        self.jobs: Final = JobChecks(self.master_of, self.schema, loop.time, found)
        self.counters: Final = CounterChecks(self.master_of, found)
        self.bounds: Final = Bounds(shape.shards + 2 * MOST_ADDED, shape.arena_bytes, found)
        self.single_failures: Final = SingleFailures(Reachability(self), loop.time, self.checks.looked_at)
        self._under_way: Final[dict[asyncio.Task[None], None]] = {}
        self._roles: Final[dict[str, tuple[str, str]]] = {}  # name → role and region
        self._make_databases()
        self._place_servers()

    def master_of(self, shard: int) -> SimDatabase:
        """Return the database server that holds the shard's committed rows."""
        for database in self.topology.databases:
            if any(first <= shard <= last for first, last in database.shards):
                return self.databases[database.servers[database.master_region].name]
        raise KeyError(shard)

    @property
    def masters(self) -> list[SimDatabase]:
        return [self.databases[each.servers[each.master_region].name] for each in self.topology.databases]

    def names(self, role: str) -> list[str]:
        return [name for name, (of, _) in self._roles.items() if of == role]

    # life

    async def start(self) -> None:
        """Start every server, then every client."""
        for name in self._roles:
            self.start_server(name)
        await asyncio.sleep(5.0)
        for client in self.clients:
            task = self.loop.create_task(
                client.open(self.loop, self.topology, self.checks, self.single_failures), context=client.process.context
            )
            await task

    def start_server(self, name: str) -> None:
        """Start a new process of that name, unless there is one."""
        if name in self.processes and self.is_up(name):
            return
        role, region = self._roles[name]
        process = self.processes[name] = Process(name, region)
        self.spawn(self._serve(name, role, process), process)
        self.trace.note("start", name)

    def _may_not_start_for(self, error: Exception, process: Process) -> TypeGuard[TaoError]:
        """Return whether a server may not start for this error: etcd does not answer, or the file that it reads is an
        old copy, to which it cannot add itself."""
        if self.documents is not None:
            return isinstance(error, TopologyError | AccessError)
        return isinstance(error, TopologyConflict) and process.region in self.late_topologies

    def spawn(self, job: Coroutine[Any, Any, None], process: Process | None = None) -> None:
        """Run a coroutine in the context of a process, or outside of all."""
        task = self.loop.create_task(job, context=Context() if process is None else process.context.copy())
        self._under_way[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        if not task.cancelled() and (error := task.exception()):
            self.found(Violation("unforeseen", f"in the simulation: {error!r}"))

    async def _serve(self, name: str, role: str, process: Process) -> None:
        log = cast(Logger, ProcessLog(name, self.trace.note, lambda text: self.found(Violation("unforeseen", text))))
        server = self._role(name, role, process.region, log)
        try:
            self.servers[name] = await server.start()
        except Exception as error:  # noqa: BLE001 - a server that cannot start is a finding, whatever the cause
            if not self._may_not_start_for(error, process):
                self.found(Violation("unforeseen", f"{name} does not start: {error!r}"))
                return
            self.trace.note("ends", name, error.message)  # an operating system starts it again
            self.kill(name)
            self.loop.call_later(_AGAIN_SECONDS, self.start_server, name, context=Context())

    def _placed(self, settings: _Settings) -> _Settings:
        """Return settings of a server that reads the topology of this world."""
        return replace(settings, topology_file=self.place)

    def _role(self, name: str, role: str, region: str, log: Logger) -> Any:
        match role:
            case "leader":
                return tao.leader.server.LeaderServer(
                    self._placed(leader_settings(name, self.pace, has_workers=self.shape.workers > 0)), log
                )
            case "follower":
                settings = follower_settings(
                    name,
                    self.pace,
                    journal_settings(name, self.pace, has_copies=self.has_copies)
                    if self.has_journals
                    else JournalSettings(),
                    reads_databases=self.shape.reads_databases,
                    has_filters=self.has_filters,
                )
                return tao.follower.server.FollowerServer(self._placed(settings), log)
            case "watcher":
                return tao.watcher.server.WatcherServer(self._placed(watcher_settings(name, region)), log)
            case "worker":
                return tao.worker.server.WorkerServer(
                    self._placed(worker_settings(name, region, self.pace, LEASE_SECONDS)), log
                )
            case _:
                return tao.tailer.server.TailerServer(self._placed(tailer_settings(name, region, self.pace)), log)

    def kill(self, name: str) -> None:
        """Kill a process as SIGKILL does."""
        process = self.processes[name]
        if process.state == "killed":
            return
        self.trace.note("kill", name)
        self.loop.kill(process)
        self.dead.append(process)
        self.network.vanish(process)
        self.locks.release(process)
        self._follower_ended(self.servers.pop(name, None) or self._stopping.pop(name, None))
        self.caches.pop(name, None)
        for token, (watcher, _) in list(self.topology_watchers.items()):
            if watcher is process:
                del self.topology_watchers[token]
        for database in self.databases.values():
            # Its connections are closed when the database notices; a commit may arrive before.
            self.loop.call_later(self.random.random() * 0.004, roll_back_all_of, database, process)
        self.single_failures.look()

    def is_up(self, name: str) -> bool:
        return self.processes[name].state != "killed"

    async def stop(self, name: str) -> None:
        """End a process as SIGTERM does: drain, then close."""
        process = self.processes[name]
        if name not in self.servers or process.state != "runs":
            return
        server = self._stopping[name] = self.servers.pop(name)
        self.trace.note("stop", name)

        async def end() -> None:
            try:
                async with asyncio.timeout(10.0):
                    await server.drain()
                async with asyncio.timeout(5.0):
                    await server.close()
            except TimeoutError:
                return

        await self.loop.create_task(end(), context=process.context.copy())
        self.kill(name)

    def _follower_ended(self, server: Any) -> None:
        if isinstance(server, tao.follower.server.FollowerServer):
            self.counters.follower_ended(server)

    def committing(self, writer: Process, changes: RowChanges) -> None:
        """Note that a transaction of that process is being committed."""
        if changes.put_intents and writer.name in self.at_pair_commit:
            self.at_pair_commit[writer.name](writer)

    def _committed(self, database: SimDatabase, changes: RowChanges) -> None:
        self.checks.committed(database, changes)
        self.jobs.committed(changes)
        self.counters.committed(database, changes)

    def stop_database(self, database: SimDatabase) -> None:
        """Stop a database: connections are refused, open transactions are rolled back, and the disk keeps what was
        committed."""
        database.stopped = True
        database.restarts += 1
        roll_back_all_of(database, None)

    def check_masters(self, database: Database) -> None:
        """Check, when a master was opened, that no other server of its database takes writes."""
        is_open = [
            server.name
            for server in (self.databases[each.name] for each in database.servers.values())
            if not server.read_only and not server.down
        ]
        if len(is_open) > 1:
            self.found(Violation("1", f"{' and '.join(is_open)} take writes of {database.name} at the same time"))

    def _check_watchers(self) -> None:
        """Check, when a watcher acts, that no other one does."""
        servers = [self.servers[name] for name in self.names("watcher") if name in self.servers]
        if sum(server._mastership.is_active for server in servers) > 1:
            self.found(Violation("watchers", "two watchers act at the same time"))

    def change_topology(self, changed: Topology) -> None:
        """Publish the next version; where it is in a file, its watchers notice within half a second."""
        if self.documents is not None:
            self.documents.store(self.topology.version, changed)
            return
        changed = msgspec.structs.replace(changed, version=self.topology.version + 1)
        self._use_topology(record_change(self.topology, changed))

    def _use_topology(self, changed: Topology) -> None:
        process = CURRENT.get()
        if process is not None and self._roles.get(process.name, ("", ""))[0] == "watcher":
            self._check_watchers()
        former = {shard: self.master_of(shard) for shard in range(self.topology.shards)}
        adds_shards = changed.shards > self.topology.shards
        self.topology, self._topology_since = changed, self.loop.now
        if not self._is_heard_by_enough(adds_shards=adds_shards):
            # A request may go to a server that serves by the former topology.
            self.checks.calm.undisturbed = False
        for shard, master in former.items():
            if self.master_of(shard).past is not master.past:
                self._check_arrived(shard, master)
                master.past.hand_over(self.master_of(shard).past, shard)
        self.trace.note("topology", self.topology.version)
        self.look_at_topology()

    async def until_documents_change(self) -> None:
        """Wait until the topology can be changed."""
        if self.documents is not None:
            await self.documents.until_there()

    def when_documents_change(self, change: Callable[[], None]) -> None:
        """Change the topology now, or as soon as it can be changed, in the order of the calls."""
        if not self._changes and (self.documents is None or not self.documents.etcd.is_away):
            change()
            return
        self._changes.append(change)
        if len(self._changes) == 1:
            self.spawn(self._change_later())

    async def _change_later(self) -> None:
        while self._changes:
            await self.until_documents_change()
            self._changes.popleft()()

    @property
    def place(self) -> Location:
        """The place of the topology, as operators name it."""
        return FILE if self.documents is None else PLACE

    def open_topology(self) -> TopologyStore:
        """Return the topology as the present process reads and changes it."""
        file = cast(TopologyStore, SimTopologyFile(self, FILE))
        return file if self.documents is None else self.documents.topology()

    def open_locks(self) -> Locks:
        """Return the locks as the present process takes them."""
        return FileLocks(FILE, clock=self.loop.time) if self.documents is None else self.documents.locks()

    def _store_in_etcd(self) -> EtcdDocuments:
        documents = EtcdDocuments(self.loop, self.network, self.seed, REGIONS[: self.shape.regions])
        documents.store(0, self.topology)
        documents.on_change = self._use_topology
        return documents

    def _check_arrived(self, shard: int, former: SimDatabase) -> None:
        """Check, when the topology gives a shard to another database, that its servers have all that was committed at
        the former one."""
        database = holder_of(self.topology, shard)
        expected = tables_of(former.truth.of_shard(shard))
        for server in (each for each in database.servers.values() if not each.down):
            there = self.databases[server.name]
            rows = there.truth if server.name == master_of(database) else there.rows
            if shard not in rows.shards or tables_of(rows.of_shard(shard)) != expected:
                self.found(Violation("1", f"{server.name} gets shard {shard}, and lacks what {former.name} has of it"))

    def look_at_topology(self) -> None:
        """Let every process notice within half a second that there is another document."""
        for process, on_change in list(self.topology_watchers.values()):
            self.loop.call_later(
                self.random.random() * 0.5, self._look_at_topology, on_change, context=process.context.copy()
            )

    def topology_read_by(self, process: Process | None) -> Topology:
        """Return the document that a process reads now."""
        role, region = self._roles.get("" if process is None else process.name, ("", ""))
        return self.topology if role == "watcher" else self.late_topologies.get(region, self.topology)

    def outdated_routes(self, process: Process) -> Routes | None:
        """See `tests.sim.reachability.Situation`."""
        server = self.servers.get(process.name)
        if self.documents is None or server is None or self.documents.reaches(process):
            return None
        routes: Routes = server._context.configuration.routes
        return routes

    def _look_at_topology(self, on_change: Callable[[Topology], None]) -> None:
        """Note a change of the file; reading it takes a thread a moment, also for a process that was paused."""
        self.loop.call_later(0.002, self._deliver_topology, on_change)

    def _deliver_topology(self, on_change: Callable[[Topology], None]) -> None:
        on_change(self.topology_read_by(CURRENT.get()))

    def admin_pages(self, name: str) -> AdminPages | None:
        """Return the admin pages of a cache server or tailer; None while it cannot answer."""
        server = self.servers.get(name)
        return server._admin.pages if server is not None and self.processes[name].state == "runs" else None

    async def close(self) -> None:
        """Let every task of every process end, whatever it is doing."""
        everyone = [*self.dead, *self.processes.values(), *(client.process for client in self.clients), self.operator]
        for process in dict.fromkeys([*everyone, *(server.process for server in self.databases.values())]):
            self.loop.sweep(process)
        for _ in range(50):
            await asyncio.sleep(0.2)
        self.journals.discard()

    def not_ready(self) -> str:
        """Return the first server that is not ready, and why; or nothing."""
        for name in self._roles:
            server = self.servers.get(name)
            if server is None:
                return f"{name} has not started"
            why = server._admin.pages.not_ready()
            if why:
                return f"{name}: {why}"
        return ""

    def has_new_topology(self) -> bool:
        """Return whether the topology has changed so recently that a server may not have heard of it yet."""
        return self.loop.now < self._topology_since + _HEARD_SECONDS

    def _is_heard_by_enough(self, *, adds_shards: bool) -> bool:
        """Return whether nobody is cut off from the place of the topology. Where it adds shards, followers may be, if
        another tier of their region hears of it: they refuse requests for these shards, and the others serve them."""
        if self.documents is None:
            return True
        machine = self.documents.machine
        deaf = {process.name for process in self.processes.values() if self.network.is_cut(process, machine)}
        if not adds_shards or not deaf.issubset(self.names("follower")):
            return not deaf
        return all(
            any(deaf.isdisjoint(server.name for server in tier.servers) for tier in region.followers)
            for region in self.topology.regions
        )

    def uses_former_topology(self) -> str:
        """Return the first server that has not heard of the topology in time, and what it uses; or nothing."""
        if self.has_new_topology():
            return ""
        for name, server in self.servers.items():
            version = server._admin.pages.stats()["topology_version"]
            if version != self.topology.version:
                return f"{name} uses topology {version}, and {self.topology.version} is the newest"
        return ""

    # making

    def _make_databases(self) -> None:
        past = {name: Past() for name in DATABASES}
        for database in self.topology.databases:
            servers = {}
            for region, named in database.servers.items():
                server_id = 1 + len(self.databases)
                server = SimDatabase(named.name, region, self.loop, self.random, server_id)
                server.past = past[database.name]
                server.on_commit = self._committed
                server.before_commit = self.checks.committing
                for first, last in database.shards:
                    server.host(range(first, last + 1), database.servers[database.master_region].name)
                servers[region] = self.databases[named.name] = server
            master = servers[database.master_region]
            master.replicas.extend(server for server in servers.values() if server is not master)
            master.open(0.0)

    def _place_servers(self) -> None:
        for region in self.topology.regions:
            for server in region.leaders.servers:
                self._roles[server.name] = ("leader", region.name)
                self.clock_skew_ms[server.name] = self.random.choice((0, 0, -400, 700))
            for tier in region.followers:
                for server in tier.servers:
                    self._roles[server.name] = ("follower", region.name)
            for tailer in region.tailers:
                self._roles[tailer.name] = ("tailer", region.name)
            for watcher in region.watchers:
                self._roles[watcher.name] = ("watcher", region.name)
            for number in range(self.shape.workers):
                self._roles[f"worker-{region.name}-{number}"] = ("worker", region.name)
            for number in range(self.shape.clients):
                process = Process(f"client-{region.name}-{number}", region.name)
                tier_name = region.followers[number % len(region.followers)].name
                attaches = number % 2 == 0
                self.clients.append(Client(process, tier_name, self.shape.shards, self.pace, attaches=attaches))
