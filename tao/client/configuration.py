"""The topology and the schema that a graph works by: fetched once, then watched.

Followers serve both documents, so one address is enough to connect. The watch moves to another follower when its
connection breaks, and names the versions it has, so that no change is missed. When a follower answers NOT_MINE, its
topology is fetched at once. A document that cannot be used is logged and skipped: the graph keeps the last good one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tao.client.server_queues import ServerLink, ServerQueue
from tao.client.settings import ClientSettings
from tao.model.errors import InvalidArgument, OperatorError, TaoError, TopologyError, Unavailable
from tao.model.topology import CacheServer, Region, Topology
from tao.schema.registry import Schema
from tao.topology.document import parse_topology
from tao.wire.address import parse_address
from tao.wire.convert import error_from_pb
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)


class LinkPool(Protocol):
    """The methods of `tao.wire.links.Links` that a graph needs."""

    def to(self, server: CacheServer) -> ServerLink: ...

    def keep_only(self, names: set[str]) -> None: ...

    def figures(self) -> dict[str, dict[str, object]]: ...

    async def close(self) -> None: ...


class ConfigurationListener(Protocol):
    """The receiver of each topology and schema."""

    def use_topology(self, topology: Topology) -> None: ...

    def use_schema(self, schema: Schema) -> None: ...


def read_target(target: str) -> Topology | CacheServer:
    """Read the target of `tao.client.connect`: a topology file (``file:…``, a path with a slash, or ``….json``) or one
    follower's address (``host:port`` of its gRPC port, or ``frames:host:port``).

    Raises `InvalidArgument` when it is neither, `TopologyError` for a file that cannot be read or used."""
    if not target:
        raise InvalidArgument("the target is empty: connect to 'host:port' of a follower, or to a topology file")
    if target.startswith("frames:"):
        address = str(parse_address(target.removeprefix("frames:")))
        return CacheServer(name=target, grpc="", frames=address)
    if target.startswith("file:") or "/" in target or target.endswith(".json"):
        path = Path(target.removeprefix("file:"))
        try:
            return parse_topology(path.read_bytes(), str(path))
        except OSError as error:
            raise TopologyError(f"{path}: the topology file cannot be read: {error.strerror}") from None
    return CacheServer(name=target, grpc=str(parse_address(target)))


class ClientConfiguration:
    """The newest topology and schema that were received. Made by `ClientConfiguration.fetch`."""

    def __init__(self, links: LinkPool, settings: ClientSettings, topology: Topology, schema: Schema, region: str):
        self.topology = topology
        self.schema = schema
        self.region = region
        self._links = links
        self._settings = settings
        self._listener: ConfigurationListener | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._refresh_task: asyncio.Task[None] | None = None

    @classmethod
    async def fetch(
        cls, source: Topology | CacheServer, region: str | None, links: LinkPool, settings: ClientSettings
    ) -> ClientConfiguration:
        """Fetch both documents from the follower, or from the first of the topology's followers that answers. Raises
        the error of the last one that was asked, `InvalidArgument` when the region must be named, `TopologyError` when
        there is no such region."""
        if isinstance(source, Topology):
            region = _region_of(source, region, None)
            servers = _followers(source, region)
            random.shuffle(servers)  # spreads a thousand processes that start together
        else:
            servers = [source]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.connect_timeout_seconds
        failure: TaoError = Unavailable("the topology names no followers")
        for index, server in enumerate(servers):
            link = links.to(server)
            time_left = (deadline - loop.time()) / (len(servers) - index)
            try:
                answers = await asyncio.gather(
                    link.ask(pb.Request(get_topology=pb.GetTopology()), time_left),
                    link.ask(pb.Request(get_schema=pb.GetSchema()), time_left),
                )
            except TaoError as error:
                failure = error
                continue
            topology = parse_topology(answers[0].topology.json, f"topology of {server.name}")
            schema = Schema.from_json(answers[1].schema.json, f"schema of {server.name}")
            asked = server if isinstance(source, CacheServer) else None
            return cls(links, settings, topology, schema, _region_of(topology, region, asked))
        raise failure

    def follow(self, listener: ConfigurationListener) -> None:
        """Hand both documents to a listener now, and every newer one when it arrives. Raises `TopologyError`."""
        self._listener = listener
        listener.use_topology(self.topology)
        listener.use_schema(self.schema)
        self._links.keep_only(_names(self.topology))
        self._watch_task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Stop watching."""
        tasks = [task for task in (self._watch_task, self._refresh_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self, version: int, queue: ServerQueue) -> None:
        """Fetch the topology of a server, unless ours is of this version or newer. Concurrent calls share one fetch."""
        if self.topology.version >= version:
            return
        if self._refresh_task is None:
            self._refresh_task = asyncio.get_running_loop().create_task(self._fetch_topology(queue))
        await asyncio.shield(self._refresh_task)

    async def refresh_schema(self) -> None:
        """Fetch the schema from a follower, when an answer has a type that ours lacks. Raises a `TaoError`."""
        server = random.choice(_followers(self.topology, self.region))
        request = pb.Request(get_schema=pb.GetSchema())
        answer = await self._links.to(server).ask(request, self._settings.timeout_seconds)
        self._take_schema(answer.schema, server.name)

    async def _fetch_topology(self, queue: ServerQueue) -> None:
        try:
            request = pb.Request(get_topology=pb.GetTopology())
            answer = await queue.link.ask(request, self._settings.timeout_seconds)
            self._take_topology(answer.topology, queue.server.name)
        except TaoError as error:
            # The query that was refused is retried all the same; the watch brings the document later.
            _logger.warning("the topology of %s could not be fetched: %s", queue.server.name, error.message)
        finally:
            self._refresh_task = None

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # A random follower of the region, so that thousands of clients do not all watch through the first.
            server = random.choice(_followers(self.topology, self.region))
            ended: asyncio.Future[TaoError | None] = loop.create_future()
            watch = pb.Watch(topology_version=self.topology.version, schema_hash=self.schema.version_hash)
            self._links.to(server).send(pb.Request(watch=watch), math.inf, self._event_handler(server.name, ended))
            error = await ended
            _logger.debug("the watch through %s ended: %s", server.name, error)
            await asyncio.sleep(self._settings.watch_retry_seconds * random.uniform(0.5, 1.5))

    def _event_handler(self, server: str, ended: asyncio.Future[TaoError | None]) -> Callable[[pb.Answer], None]:
        def on_answer(answer: pb.Answer) -> None:
            if self._watch_task is None or self._watch_task.done():
                return
            if answer.HasField("watch"):
                if answer.watch.HasField("topology"):
                    self._take_topology(answer.watch.topology, server)
                if answer.watch.HasField("schema"):
                    self._take_schema(answer.watch.schema, server)
            if not answer.more and not ended.done():
                ended.set_result(error_from_pb(answer.error) if answer.HasField("error") else None)

        return on_answer

    def _take_topology(self, document: pb.TopologyDocument, server: str) -> None:
        if document.version <= self.topology.version:
            return
        try:
            topology = parse_topology(document.json, f"topology of {server}")
            if self._listener is not None:
                self._listener.use_topology(topology)
        except OperatorError as error:
            _logger.warning(
                "topology version %d of %s is not usable and was skipped: %s", document.version, server, error.message
            )
            return
        self.topology = topology
        self._links.keep_only(_names(topology))

    def _take_schema(self, document: pb.SchemaDocument, server: str) -> None:
        if document.hash == self.schema.version_hash:
            return
        try:
            self.schema = Schema.from_json(document.json, f"schema of {server}")
        except OperatorError as error:
            _logger.warning("schema %s of %s is not usable and was skipped: %s", document.hash, server, error.message)
            return
        if self._listener is not None:
            self._listener.use_schema(self.schema)


def _region_of(topology: Topology, wanted: str | None, asked: CacheServer | None) -> str:
    names = [region.name for region in topology.regions]
    if wanted is not None:
        if wanted not in names:
            raise TopologyError(f"there is no region {wanted!r} in topology version {topology.version}: {names}")
        return wanted
    if asked is not None:
        for region in topology.regions:
            if any(_is_at(server, asked) for server in _servers(region)):
                return region.name
    if len(names) == 1:
        return names[0]
    raise InvalidArgument(f"the region of this process is not known: pass region= one of {', '.join(names)}")


def _is_at(server: CacheServer, asked: CacheServer) -> bool:
    return bool(asked.grpc and server.grpc == asked.grpc) or bool(asked.frames and server.frames == asked.frames)


def _servers(region: Region) -> Sequence[CacheServer]:
    return [server for tier in region.followers for server in tier.servers]


def _followers(topology: Topology, region: str) -> list[CacheServer]:
    """Return the region's followers that are not marked down, or all of them when every one is."""
    servers = [server for each in topology.regions if each.name == region for server in _servers(each)]
    return [server for server in servers if not server.down] or servers


def _names(topology: Topology) -> set[str]:
    return {server.name for region in topology.regions for server in _servers(region)}
