"""Substitutes for sockets, files, clocks and MySQL under the servers' own wiring.

The roles' `server` modules construct everything they need from names that they import. During a run those names mean
the classes below, in every module of `tao` that imports them; so the simulation runs the wiring that processes run, and
follows it when it changes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

import msgspec

from tao.cache import CacheSettings, GraphCache
from tao.delivery.spool import SqliteSpool
from tao.model.errors import TopologyConflict, Unavailable
from tao.model.ports import Clock
from tao.model.topology import CacheServer, Topology
from tao.planning.row_events import HEARTBEAT_TABLE, RowEvent
from tao.replication.gtid import MariadbPosition
from tao.routing.shard_map import Ring
from tao.runtime import admin_client
from tao.runtime.admin import AdminPages, AdminServer
from tao.runtime.admin_client import NobodyListens, admin_get
from tao.runtime.clock import LoopClock
from tao.schema.registry import Schema
from tao.serving.configuration import SchemaFile
from tao.serving.requests import Listeners, PauseDetector
from tao.serving.server import SchemaArenas, maintain_cache
from tao.storage.names import schema_name
from tao.storage.pools import Pools
from tao.storage.reads import MySqlReadStore
from tao.storage.scans import MySqlMemberScans
from tao.storage.session import ServerAccount
from tao.storage.writes import MySqlWriteStore
from tao.tailer.binlog import BinlogLost, BinlogMoved, BinlogTransaction, UndecodedRows
from tao.tailer.reader import BinlogReader
from tao.tailer.tail_path import Checkpoint
from tao.topology import stores
from tao.topology.document import check_topology
from tao.topology.file_store import AccessFile, TopologyFile
from tao.wire.doorstep import Doorstep
from tao.wire.frames_client import connect_frames
from tao.wire.links import LinkSettings
from tao.wire.session import RequestHandler
from tao.wire.settings import DoorstepSettings, ServingSettings
from tests.sim import roles
from tests.sim.copied_tables import events_of
from tests.sim.database import unix_ms
from tests.sim.disks import Machine, SimSpool
from tests.sim.loop import CURRENT, Process
from tests.sim.network import Listener, Network
from tests.sim.pauses import SimPauseDetector
from tests.sim.rows import Logged
from tests.sim.stores import Databases, SimMemberScans, SimReadStore, SimWriteStore

_PACKAGES: Final = (
    *("tao.follower", "tao.leader", "tao.tailer", "tao.watcher", "tao.worker", "tao.replication"),
    *("tao.serving", "tao.wire.links", "tao.client", "tao.journal"),
    *("tao.routing.routes", "tao.topology.clones", "tao.topology.edits", "tao.topology.document", "tao.admin"),
    *(stores.__name__, admin_client.__name__),
)
"""The last packages belong to the operator's commands: modules first loaded during a run would keep the substitutes for
ever."""
ROW_BYTES: Final = 150
"""Estimated size of a row that is not decoded."""
_FOLLOWED_AFTER_SECONDS: Final = 0.6
"""The longest delay of what a move reads in a binlog: as on busy machines, and within what a move allows."""
HOUSE_SECONDS: Final = 15.0
"""Seconds between two rounds of cache maintenance, times the pace; at the product's tenth of a second they would be
most of what happens."""


class Outside(Databases, Machine, Protocol):
    """The part of the world that the substitutes need."""

    @property
    def topology(self) -> Topology: ...

    def topology_read_by(self, process: Process | None) -> Topology:
        """Return the document that a process reads now."""

    @property
    def disks(self) -> dict[str, str]: ...

    @property
    def processes(self) -> dict[str, Process]: ...

    def admin_pages(self, name: str) -> AdminPages | None:
        """Return the admin pages of a server, if it runs."""

    def change_topology(self, changed: Topology) -> None:
        """Store a document as the next version."""

    @property
    def topology_watchers(self) -> dict[object, tuple[Process, Callable[[Topology], None]]]: ...

    @property
    def arena_bytes(self) -> int: ...

    @property
    def has_short_prefixes(self) -> bool: ...

    @property
    def clock_skew_ms(self) -> dict[str, int]: ...

    @property
    def pace(self) -> float: ...


class SimClock:
    """Replaces `tao.runtime.clock.LoopClock`; the wall clock of a process may be wrong."""

    def __init__(self, world: Outside) -> None:
        self.monotonic: Final = world.loop.time
        process = CURRENT.get()
        skew_ms = 0 if process is None else world.clock_skew_ms.get(process.name, 0)
        self.unix_ms: Final[Callable[[], int]] = lambda: unix_ms(world.loop.now) + skew_ms


class SimListeners:
    """Replaces `tao.serving.requests.Listeners`."""

    def __init__(
        self,
        network: Network,
        server: CacheServer,
        handler: RequestHandler,
        settings: ServingSettings,
        topology_version: Callable[[], int],
        choose_shard: Callable[[], int],
        unary_handler: RequestHandler | None = None,
        tls: object = None,
    ) -> None:
        process = CURRENT.get()
        assert process is not None, "only simulated processes serve"
        self._network: Final = network
        self._address: Final = server.frames
        self._listener: Final = Listener(process, server.name, handler, settings)
        self.doorsteps: Final = ()

    async def start(self) -> None:
        self._network.listen(self._address, self._listener)

    async def drain(self, grace_seconds: float) -> None:
        self._network.stop_listening(self._address)
        connections = list(self._listener.connections)
        for each in connections:
            each.go_away()
        try:
            async with asyncio.timeout(grace_seconds):
                for each in connections:
                    await each.until_idle()
        except TimeoutError:
            return

    async def close(self) -> None:
        self._network.stop_listening(self._address)
        for each in list(self._listener.connections):
            each.close()


class NoAdmin:
    """Replaces `tao.runtime.admin.AdminServer`."""

    def __init__(self, _: object, pages: Any, __: object, ___: object = "") -> None:
        self.pages: Final = pages
        self.doorstep: Final = Doorstep("admin", DoorstepSettings())

    async def start(self) -> None:
        """Do nothing: nobody asks."""

    async def close(self) -> None:
        """Do nothing: nobody asks."""


async def sim_admin_get(world: Outside, address: str, path: str, timeout_seconds: float = 2.0) -> tuple[int, bytes]:
    """Replaces `tao.runtime.admin_client.admin_get`."""
    here, name = CURRENT.get(), address.partition(":")[0]
    assert here is not None, "only simulated processes ask"
    there = world.processes[name]
    await asyncio.sleep(world.network.delay(here, there))
    pages = None if world.network.is_cut(here, there) else world.admin_pages(name)
    if pages is None:
        if there.state != "paused" and not world.network.is_cut(here, there):
            raise NobodyListens(f"{address}{path} does not answer")
        await asyncio.sleep(timeout_seconds)
        raise Unavailable(f"{address}{path} does not answer")
    if path == "/stats":
        answer = 200, msgspec.json.encode(pages.stats())
    else:
        why = pages.not_ready()
        answer = 503 if why else 200, why.encode()
    await asyncio.sleep(world.network.delay(there, here))
    return answer


class SimTopologyFile:
    """Replaces `tao.topology.file_store.TopologyFile`: a change is noticed within half a second."""

    def __init__(self, world: Outside, _: Path, **__: object) -> None:
        self._world: Final = world

    async def load(self) -> Topology:
        await asyncio.sleep(0.001)
        return self._world.topology_read_by(CURRENT.get())

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        """See `TopologyFile.change`."""
        await asyncio.sleep(0.001)
        check_topology(changed)
        found = self._world.topology.version
        if found != expected_version:
            raise TopologyConflict(f"the document is at version {found}, not {expected_version}")
        self._world.change_topology(changed)
        return self._world.topology

    def watch(self, on_change: Callable[[Topology], None]) -> Callable[[], None]:
        process = CURRENT.get()
        assert process is not None, "only simulated processes watch"
        token = object()
        self._world.topology_watchers[token] = (process, on_change)

        def stop() -> None:
            self._world.topology_watchers.pop(token, None)

        return stop


class SimSchemaFile:
    """Replaces `tao.serving.configuration.SchemaFile` by a schema that never changes."""

    def __init__(self, world: Outside, _: Path) -> None:
        self._world: Final = world

    async def load(self) -> Schema:
        return self._world.schema

    async def watch(self, _: object) -> None:
        await asyncio.Event().wait()

    async def look(self, _: object) -> None:
        """Report that the schema is unchanged."""


class NoAccessFile:
    """Replaces `tao.topology.file_store.AccessFile`: there is no document, so every caller may do everything."""

    def __init__(self, _: Path, **__: object) -> None:
        """Do nothing: there is no file."""

    async def load_if_there(self) -> None:
        """Report that there is no document."""

    def watch(self, _: object) -> Callable[[], None]:
        return lambda: None


class NoPools:
    """Replaces `tao.storage.pools.Pools`."""

    def __init__(self, *_: object) -> None:
        """Do nothing: there are no connections to keep."""

    def states(self) -> dict[str, object]:
        """Report that there is no state about any server."""
        return {}

    figures = full = states

    async def close(self) -> None:
        """Do nothing: there are no connections to close."""


class SimCheckpoint:
    """Replaces `tao.tailer.tail_path.Checkpoint`."""

    def __init__(self, world: Outside, folder: Path, server: str) -> None:
        self._disks: Final = world.disks
        self.path: Final = folder / f"{server}.position.json"

    def load(self) -> str | None:
        return self._disks.get(str(self.path))

    def store(self, position: str, now_unix_ms: int) -> None:
        self._disks[str(self.path)] = position


class SimBinlogReader:
    """Replaces `tao.tailer.reader.BinlogReader`."""

    def __init__(
        self, world: Outside, account: ServerAccount, *_: object, schemas: frozenset[str] = frozenset()
    ) -> None:
        """``schemas``: of shards that are followed in all their tables; without them, what tailers read is read."""
        self._world: Final = world
        self._schemas: Final = schemas
        self._server = world.databases[account.host]
        self._more: Final = asyncio.Event()
        self.connected = False
        self.unknown_events = self.oversized = self.duplicates = self.connections = self.silences = 0
        self.waiting_bytes = 0
        self._leaves_undecoded = False

    def leave_undecoded(self, leave: bool) -> None:
        self._leaves_undecoded = leave

    def read_from(self, account: ServerAccount) -> None:
        self._server = self._world.databases[account.host]
        self._more.set()

    async def current_position(self) -> str:
        await self._reach()
        return self._server.position

    def position(self, stored: str) -> MariadbPosition:
        return MariadbPosition(stored)

    async def batches(self, position: str) -> AsyncGenerator[Sequence[BinlogTransaction], None]:
        """See `tao.tailer.binlog.BinlogSource`."""
        server = self._server
        server.listeners[self] = self._more.set
        try:
            while True:
                await self._reach()
                if server is not self._server:
                    raise BinlogMoved(f"the binlog of {self._server.name} is to be read")
                self.connected = True
                logged = server.after(position)
                if logged is None:
                    raise BinlogLost(f"{server.name} does not know what follows {position}")
                if not logged:
                    self._more.clear()
                    await self._more.wait()
                    continue
                if self._schemas:
                    await asyncio.sleep(self._world.random.random() * _FOLLOWED_AFTER_SECONDS)
                position = logged[-1].gtid
                yield [self._transaction(each) for each in logged]
        finally:
            self.connected = False
            server.listeners.pop(self, None)

    def _transaction(self, logged: Logged) -> BinlogTransaction:
        is_heartbeat = any(event.table == HEARTBEAT_TABLE for event in logged.events)
        committed = BinlogTransaction(gtid=logged.gtid, committed_unix_ms=logged.unix_ms // 1000 * 1000)
        if self._schemas:
            rows = events_of(logged.changes)
            events = [event for event in rows if schema_name(event.shard) in self._schemas]
            return msgspec.structs.replace(committed, events=events, invalid_shards=logged.invalid)
        if logged.invalid:
            return msgspec.structs.replace(committed, invalid_shards=logged.invalid)
        if is_heartbeat or not self._leaves_undecoded:
            return msgspec.structs.replace(committed, events=logged.events)
        by_shard: dict[int, list[RowEvent]] = {}
        for event in logged.events:
            by_shard.setdefault(event.shard, []).append(event)
        undecoded = [
            UndecodedRows(shard, ROW_BYTES * len(events), partial(BinlogTransaction, gtid="", events=events))
            for shard, events in by_shard.items()
        ]
        return msgspec.structs.replace(committed, undecoded=undecoded)

    async def _reach(self) -> None:
        here, network = CURRENT.get(), self._world.network
        assert here is not None, "only simulated processes read binlogs"
        await asyncio.sleep(network.delay(self._server.process, here))
        while self._server.down or network.is_cut(here, self._server.process):
            self.connected = False
            await asyncio.sleep(1.0)


async def keep_house_seldom(seconds: float, cache: GraphCache, clock: Clock) -> None:
    """Replaces `tao.serving.server.maintain_cache`."""
    while True:
        await asyncio.sleep(seconds)
        while cache.reclaim_step():
            pass
        cache.forget_old_floors(clock.monotonic())


def ring_of(servers: Mapping[str, float]) -> Ring:
    """Replaces `tao.routing.shard_map.Ring`: twenty processes in one would all make the same rings."""
    return _ring_of(tuple(servers.items()))


@lru_cache(maxsize=256)
def _ring_of(servers: tuple[tuple[str, float], ...]) -> Ring:
    return Ring(dict(servers))


class ShortPrefixes(SchemaArenas):
    """Has caches keep few edges of a list."""

    def list_limit(self, atype: int) -> int:
        return roles.SHORT_PREFIX_EDGES


@dataclass(frozen=True, slots=True)
class Substitution:
    """One name of the product, and what it means during a run."""

    original: object
    instead: object


def substitutes_for(world: Outside) -> list[Substitution]:
    """Return all substitutes."""

    def cache_settings(**_: object) -> CacheSettings:
        # Every server allocates these: small tables that evict, and few marks.
        arenas = {"default": world.arena_bytes, "pages": world.arena_bytes}
        return CacheSettings(
            arena_bytes=arenas,
            credit_slots=1009,
            departed_slots=4093,
            max_floors_per_shard=roles.MAX_FLOORS,
            kept_answers_bytes=roles.KEPT_ANSWERS_BYTES,
        )

    return [
        Substitution(connect_frames, world.network.connect),
        Substitution(Listeners, partial(SimListeners, world.network)),
        Substitution(AdminServer, NoAdmin),
        Substitution(admin_get, partial(sim_admin_get, world)),
        Substitution(TopologyFile, partial(SimTopologyFile, world)),
        Substitution(SchemaFile, partial(SimSchemaFile, world)),
        Substitution(AccessFile, NoAccessFile),
        Substitution(LoopClock, partial(SimClock, world)),
        Substitution(Pools, NoPools),
        Substitution(MySqlReadStore, partial(SimReadStore, world)),
        Substitution(MySqlMemberScans, partial(SimMemberScans, world)),
        Substitution(MySqlWriteStore, partial(SimWriteStore, world)),
        Substitution(BinlogReader, partial(SimBinlogReader, world)),
        Substitution(Checkpoint, partial(SimCheckpoint, world)),
        Substitution(SqliteSpool, partial(SimSpool, world)),
        Substitution(os, SimpleNamespace(getpid=lambda: 1)),
        Substitution(CacheSettings, cache_settings),
        Substitution(SchemaArenas, ShortPrefixes if world.has_short_prefixes else SchemaArenas),
        Substitution(LinkSettings, lambda **named: replace(roles.SDK.links, **named)),
        Substitution(ServingSettings, lambda **named: replace(roles.SERVING, **named)),
        Substitution(maintain_cache, partial(keep_house_seldom, HOUSE_SECONDS * world.pace)),
        Substitution(Ring, ring_of),
        Substitution(PauseDetector, SimPauseDetector),
    ]


@contextmanager
def substituted(world: Outside, more: Sequence[Substitution] = ()) -> Iterator[None]:
    """Let the roles' names mean the substitutes, and ``more`` of them, while the block runs."""
    with replaced([*substitutes_for(world), *more]):
        yield


@contextmanager
def replaced(substitutions: Iterable[Substitution]) -> Iterator[None]:
    """Let the names of the product mean the substitutes while the block runs."""
    instead = {id(each.original): each.instead for each in substitutions}
    changed: list[tuple[Any, str, object]] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES) and module is not None:
            for attribute, value in list(vars(module).items()):
                if id(value) in instead:
                    changed.append((module, attribute, value))
                    setattr(module, attribute, instead[id(value)])
    try:
        yield
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)
