"""The topology and schema that a server goes by: replaced while it serves, and told to whoever watches (DESIGN.md §5).

Both are whole values; a change swaps the reference and calls the listeners, synchronously and in order. Clients ask
with GetTopology, GetSchema and Watch, so that one address is enough to connect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from tao.model.errors import TaoError
from tao.model.topology import Topology
from tao.observability.logs import Logger
from tao.routing.routes import Routes
from tao.schema.compatibility import compare
from tao.schema.registry import Schema, load_schema
from tao.topology.document import dump_topology
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb


class Configuration:
    """Current routes and schema, and those who want to know of newer ones."""

    def __init__(
        self,
        topology: Topology,
        schema: Schema,
        log: Logger,
        load: Callable[[], Awaitable[Topology]] | None = None,
    ) -> None:
        """``load`` reads the topology as it is now, for `refresh`."""
        self._load: Final = load
        self._looking: asyncio.Future[None] | None = None
        self.routes = Routes(topology)
        self.schema = schema
        self._log: Final = log
        self._topology_json = dump_topology(topology).encode()
        self._on_routes: list[Callable[[Routes], None]] = []
        self._on_schema: list[Callable[[Schema], None]] = []
        self._watchers: dict[Reply, None] = {}

    def on_routes(self, listener: Callable[[Routes], None]) -> None:
        """Call ``listener`` with every newer topology's routes."""
        self._on_routes.append(listener)

    def on_schema(self, listener: Callable[[Schema], None]) -> None:
        """Call ``listener`` with every newer schema."""
        self._on_schema.append(listener)

    def use_topology(self, topology: Topology) -> None:
        """Go by a newer document; an older or equal one is passed over."""
        if topology.version <= self.routes.version:
            return
        self.routes = Routes(topology, self.routes)
        self._topology_json = dump_topology(topology).encode()
        self._log.info("topology_changed", topology_version=topology.version)
        for listener in self._on_routes:
            try:
                listener(self.routes)
            except Exception as error:  # noqa: BLE001 - logged; one part's fault must not keep the others from hearing
                self._log.error("topology_listener_failed", exc_info=error)
        self._tell(pb.WatchEvent(topology=self.topology_document()))

    async def refresh(self) -> None:
        """Look for a newer topology now, because a server has said that it goes by one. Whoever asks meanwhile shares
        the look; a document that cannot be had changes nothing."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
            self._looking.add_done_callback(self._looked)
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        if self._load is None:
            return
        try:
            self.use_topology(await self._load())
        except TaoError as error:
            self._log.warning("topology_not_refreshed", reason=error.message)

    def _looked(self, _: asyncio.Future[None]) -> None:
        self._looking = None

    def use_schema_text(self, text: str, source: str) -> bool:
        """Go by a changed schema file. One that is wrong or breaks what is stored is refused, and the old one stays:
        a server must not stop serving because of a typing error. Returns whether it is in use now."""
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
            self._log.info("schema_changed", schema_hash=schema.version_hash)
            for listener in self._on_schema:
                listener(schema)
            self._tell(pb.WatchEvent(schema=self.schema_document()))
        return True

    def topology_document(self) -> pb.TopologyDocument:
        """As sent to clients."""
        return pb.TopologyDocument(version=self.routes.version, json=self._topology_json)

    def schema_document(self) -> pb.SchemaDocument:
        """As sent to clients."""
        return pb.SchemaDocument(hash=self.schema.version_hash, json=self.schema.to_json().encode())

    def watch(self, request: pb.Request, reply: Reply) -> None:
        """Tell ``reply`` of what is newer than the caller has, now and from now on."""
        event = pb.WatchEvent()
        if request.watch.topology_version < self.routes.version:
            event.topology.CopyFrom(self.topology_document())
        if request.watch.schema_hash != self.schema.version_hash:
            event.schema.CopyFrom(self.schema_document())
        self._watchers[reply] = None
        reply.on_close(lambda: self._watchers.pop(reply, None))
        if event.HasField("topology") or event.HasField("schema"):
            reply.send(pb.Answer(more=True, watch=event))

    def _tell(self, event: pb.WatchEvent) -> None:
        for reply in list(self._watchers):
            reply.send(pb.Answer(more=True, watch=event))
