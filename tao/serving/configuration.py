"""The topology, schema and rights that a server uses, and the context that the parts of a cache server share.

Topology and schema are whole values. A change replaces the reference and calls the listeners, synchronously and in
order. Clients ask with GetTopology, GetSchema and Watch, so that one address is enough to connect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tao.etcd.location import Location
from tao.model.errors import SchemaError, TaoError
from tao.model.ports import Clock
from tao.model.topology import Topology
from tao.observability.logs import Logger
from tao.routing.budgets import RetryBudget
from tao.routing.routes import Routes
from tao.runtime.watched_file import WatchedFile
from tao.schema.compatibility import compare
from tao.schema.registry import Schema, load_schema
from tao.serving.access import AccessControl
from tao.serving.audit import AuditTrail
from tao.topology.document import dump_topology, encode_region
from tao.topology.registration import placed
from tao.topology.stores import SCHEMA_KEY, EtcdConnections
from tao.wire.links import Links
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from tao.topology.etcd_document import EtcdSchema

_NOTED_PAUSE_SECONDS: Final = 0.1
"""Shortest pause between two looks for a version that peers have named: the document may not be visible here yet, and
clients ask again in tenths of a second."""

_NOTED_PAUSES: Final = 9.0
"""The same as a multiple of what the look before took: a large document takes a tenth of a second."""


_UNREAD_LOG_SECONDS: Final = 5.0
"""Shortest pause between two lines in the log about a document that cannot be read: peers ask for it ten times a
second."""


class Configuration:
    """The current routes and schema, and the listeners and watching clients that are notified of newer ones."""

    def __init__(
        self,
        topology: Topology,
        schema: Schema,
        log: Logger,
        load: Callable[[], Awaitable[Topology]] | None = None,
    ) -> None:
        """``load`` reads the current topology document, for `refresh`."""
        self._load: Final = load
        self._looking: asyncio.Future[bool] | None = None
        self._may_look_at = -inf
        self._may_log_unread_at = -inf
        self.routes = Routes(topology)
        self.schema = schema
        self.access: Final = AccessControl(schema, log)
        """What callers may do here."""
        self._log: Final = log
        self._topology_jsons: dict[str | None, bytes] = {}  # by region; of the present version
        self._on_routes: list[Callable[[Routes], None]] = []
        self._on_schema: list[Callable[[Schema], None]] = []
        self._watchers: dict[Reply, str | None] = {}  # with the region whose part each receives

    def on_routes(self, listener: Callable[[Routes], None]) -> None:
        """Call ``listener`` with every newer topology's routes."""
        self._on_routes.append(listener)

    def on_schema(self, listener: Callable[[Schema], None]) -> None:
        """Call ``listener`` with every newer schema."""
        self._on_schema.append(listener)

    def use_topology(self, topology: Topology) -> None:
        """Use a newer topology document; ignore one that is older or equal."""
        if topology.version <= self.routes.version:
            return
        self.routes = Routes(topology, self.routes)
        self._topology_jsons.clear()
        self._log.info("topology_changed", topology_version=topology.version)
        for listener in self._on_routes:
            try:
                listener(self.routes)
            except Exception as error:  # noqa: BLE001 - one listener's bug must not affect others
                self._log.error("topology_listener_failed", exc_info=error)
        self._notify(lambda region: pb.WatchEvent(topology=self.topology_document(region)))

    async def refresh(self, seconds: float = inf) -> bool:
        """Read the topology document now, because another server has named a newer version. Concurrent callers share
        one read. A document that cannot be read changes nothing. Returns whether it was read within ``seconds``; a read
        that takes longer goes on."""
        looking = self._looking or self._begin_looking()
        await asyncio.wait((looking,), timeout=None if seconds == inf else max(0.0, seconds))
        return looking.done() and looking.result()

    def note_version(self, version: int) -> None:
        """Read the topology document soon if a peer routes by a newer one: it takes this server for the host of shards
        that are not here yet. At most a tenth of the time is spent on that, whatever versions peers name."""
        now = asyncio.get_running_loop().time()
        if version > self.routes.version and self._looking is None and now >= self._may_look_at:
            self._look_soon(now)

    def _look_soon(self, began: float) -> None:
        def looked(_: asyncio.Future[bool]) -> None:
            now = asyncio.get_running_loop().time()
            self._may_look_at = now + max(_NOTED_PAUSE_SECONDS, _NOTED_PAUSES * (now - began))

        self._begin_looking().add_done_callback(looked)

    async def look_for(self, version: int, seconds: float) -> None:
        """Do as `note_version`, and wait at most ``seconds`` for the document if it is being read."""
        self.note_version(version)
        if self._looking is not None:
            await asyncio.wait((self._looking,), timeout=max(0.0, seconds))

    async def refresh_after_pause(self) -> bool:
        """Read the topology document as `refresh` does, in a read that has not begun before this call: one that was
        under way during a pause may have read a document that has been replaced meanwhile."""
        if self._looking is not None:
            await asyncio.wait((self._looking,))
        return await self.refresh()

    def _begin_looking(self) -> asyncio.Future[bool]:
        self._looking = asyncio.ensure_future(self._look())
        self._looking.add_done_callback(self._looked)
        return self._looking

    async def _look(self) -> bool:
        if self._load is None:
            return False
        try:
            self.use_topology(await self._load())
        except TaoError as error:
            now = asyncio.get_running_loop().time()
            if now >= self._may_log_unread_at:
                self._may_log_unread_at = now + _UNREAD_LOG_SECONDS
                self._log.warning("topology_refresh_failed", reason=error.message)
            return False
        return True

    def _looked(self, _: asyncio.Future[bool]) -> None:
        self._looking = None

    def use_schema_text(self, text: str, source: str) -> bool:
        """Use a changed schema file. A schema that is invalid or breaks stored data is rejected, and the former one
        stays in use: a server must not stop serving because of a typing error. Returns whether the schema is in use
        now."""
        try:
            schema = load_schema(text, source)
        except TaoError as error:
            self._log.error("schema_refused", reason=error.message)
            return False
        broken = [change for change in compare(self.schema, schema) if not change.compatible]
        if broken:
            self._log.error("schema_refused", reason="; ".join(f"{change.path}: {change.why}" for change in broken))
            return False
        if schema.version_hash != self.schema.version_hash:
            self.schema = schema
            self.access.use_schema(schema)
            self._log.info("schema_changed", schema_hash=schema.version_hash)
            for listener in self._on_schema:
                listener(schema)
            self._notify(lambda _: pb.WatchEvent(schema=self.schema_document()))
        return True

    def lists(self, role: str, server: str, region: str) -> bool:
        """Return whether the topology in use lists that server; an empty name or region means any."""
        return self.routes.lists(role, server, region)

    def topology_document(self, region: str | None = None) -> pb.TopologyDocument:
        """Return the topology as it is sent to clients: the part of a region, or (None) the whole document, without
        the recorded changes, which programs of earlier versions refuse. An unknown region gets the whole document."""
        topology = self.routes.topology
        if region is not None and all(each.name != region for each in topology.regions):
            region = None
        found = self._topology_jsons.get(region)
        if found is None:
            whole = msgspec.structs.replace(topology, changes=None)
            found = dump_topology(whole).encode() if region is None else encode_region(topology, region)
            self._topology_jsons[region] = found
        return pb.TopologyDocument(version=self.routes.version, json=found)

    def schema_document(self) -> pb.SchemaDocument:
        """Return the schema as it is sent to clients."""
        return pb.SchemaDocument(hash=self.schema.version_hash, json=self.schema.to_json().encode())

    def watch(self, request: pb.Request, reply: Reply, own_region: str) -> None:
        """Send ``reply`` the topology and schema that are newer than the caller's, now and whenever they change.
        ``own_region`` is that of this server."""
        event = pb.WatchEvent()
        region = region_asked(request.watch, own_region)
        if request.watch.topology_version < self.routes.version:
            event.topology.CopyFrom(self.topology_document(region))
        if request.watch.schema_hash != self.schema.version_hash:
            event.schema.CopyFrom(self.schema_document())
        self._watchers[reply] = region
        reply.on_close(lambda: self._forget_watcher(reply))
        if event.HasField("topology") or event.HasField("schema"):
            reply.send(pb.Answer(more=True, watch=event))

    def _forget_watcher(self, reply: Reply) -> None:
        self._watchers.pop(reply, None)

    def _notify(self, event_for: Callable[[str | None], pb.WatchEvent]) -> None:
        events = {region: event_for(region) for region in set(self._watchers.values())}
        for reply, region in list(self._watchers.items()):
            reply.send(pb.Answer(more=True, watch=events[region]))


def region_asked(request: pb.GetTopology | pb.Watch, own_region: str) -> str | None:
    """Return the region whose part of the topology a caller asks for; None for the whole document."""
    return (request.region or own_region) if request.HasField("region") else None


class SchemaFile(WatchedFile):
    """The schema file of a server."""

    def __init__(self, path: Path, *, poll_seconds: float = 1.0) -> None:
        super().__init__(path, SchemaError, poll_seconds=poll_seconds)

    async def load(self) -> Schema:
        """Return the schema in the file. Raises `SchemaError`."""
        return load_schema(await self.read(), str(self.path))


def open_schema(place: Location, etcd: EtcdConnections) -> SchemaFile | EtcdSchema:
    """Return the schema in a file, or under a prefix in etcd."""
    if isinstance(place, Path):
        return SchemaFile(place)
    from tao.topology.etcd_document import EtcdSchema  # gRPC is heavy, and most servers need none of etcd's code

    return EtcdSchema(etcd.to(place), place.key(SCHEMA_KEY), f"{place}/{SCHEMA_KEY}")


Spawn = Callable[[Coroutine[Any, Any, None]], object]
"""Starts a coroutine as a task of the server. Raises `Overloaded`, with the coroutine closed, when the server has as
many tasks as it may have."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One cache server's place in the topology, its clock, its connections to other servers, and its tasks."""

    name: str
    """The server's name in the topology."""

    region: str
    tier: str

    configuration: Configuration
    """The current topology and schema."""

    links: Links
    """Connections to other cache servers."""

    clock: Clock

    spawn_as: Callable[[str], Spawn]
    """Return a `Spawn` whose tasks carry this name in logs."""

    budget: RetryBudget
    """Bounds the requests that this server repeats, over all of its parts."""

    log: Logger

    audit: AuditTrail = field(default_factory=AuditTrail)
    """Records what the audit log asks for."""

    registered_grpc: str = ""
    """The gRPC address under which the server has registered itself; empty for one that an operator has added."""

    def own_shards(self, routes: Routes) -> frozenset[int]:
        """Return the shards that a topology assigns to this server; none when it is not listed.

        None either when another server has registered under its name: two leaders of one name would take each other's
        shards in turn."""
        found = placed(routes.topology, self.name) if self.registered_grpc else None
        if found is not None and found.server.grpc != self.registered_grpc:
            return frozenset()
        return frozenset(routes.tier(self.region, self.tier).shards_of(self.name))
