"""The topology and the schema that a graph works by: fetched once, then watched.

Followers serve both documents, so one address is enough to connect. The watch moves to another follower when its
connection breaks, and names the versions it has, so that no change is missed. A process that may not watch fetches the
documents now and then instead. When a follower answers NOT_MINE, its topology is fetched at once. A document that
cannot be used is logged and skipped: the graph keeps the last good one.

A topology of thousands of servers takes a tenth of a second to decode and route by, and the loop belongs to a web
process: so only one region's part of it is asked for, and a thread decodes a large one and makes its routes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, ParamSpec, Protocol, TypeVar

from tao.client.server_queues import ServerLink, ServerQueue
from tao.client.settings import ClientSettings
from tao.etcd.location import EtcdSettings, is_etcd_url, location_of
from tao.model.errors import (
    InvalidArgument,
    OperatorError,
    PermissionDenied,
    TaoError,
    TopologyError,
    Unavailable,
    unreadable,
)
from tao.model.topology import CacheServer, Region, ServerPlace, Topology
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.topology.document import decode_topology, parse_topology
from tao.wire.address import parse_address
from tao.wire.convert import error_from_pb
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class LinkPool(Protocol):
    """The methods of `tao.wire.links.Links` that a graph needs."""

    def to(self, server: CacheServer) -> ServerLink: ...

    def keep_only(self, places: Mapping[str, ServerPlace]) -> None: ...

    def figures(self) -> dict[str, dict[str, object]]: ...

    async def close(self) -> None: ...


class ConfigurationListener(Protocol):
    """The receiver of each topology's routes and each schema."""

    def use_routes(self, routes: Routes) -> None: ...

    def use_schema(self, schema: Schema) -> None: ...


_UNWATCHED_PAUSES: Final = 30
"""Pauses between two looks for newer documents by a process that may not watch. A query that is refused for an old
topology fetches the newer one at once."""

_WATCH_DRAWS: Final = 4
"""Followers among which one that is not down is looked for; each that was never asked costs a link, so they are few."""

_SKIPPED_SECONDS: Final = 5.0
"""How long a version of the topology is not fetched again that could not be used: every query that it refuses would
fetch the whole document."""

_OLDER_SECONDS: Final = 0.25
"""The same for a version whose server still sends an older one: it names the version of a leader, and reads that too in
the meantime."""

_MAX_BYTES_AT_ONCE: Final = 16 << 10
"""Size of the documents that the loop decodes and routes by itself, of some 70 servers: that takes less than ten ms,
and a process of a small installation needs no thread for them."""


async def _run_off_loop_if_large(
    size_bytes: int, work: Callable[_Parameters, _Result], *arguments: _Parameters.args, **named: _Parameters.kwargs
) -> _Result:
    """Do the work on a document of this size: at once, or in a thread while the loop goes on."""
    if size_bytes > _MAX_BYTES_AT_ONCE:
        return await asyncio.to_thread(work, *arguments, **named)
    return work(*arguments, **named)


_TARGET_FORMS: Final = (
    "connect to a follower's host:port or frames:host:port, to a topology file (FILE.json, ./FILE or file:FILE), or to "
    "etcd://HOST:PORT,…/PREFIX"
)


async def read_target(target: str) -> Topology | CacheServer:
    """Read the target of `tao.client.connect`: a topology file (``file:…``, a path with a slash, or ``….json``; a large
    one in a thread), the URL of etcd where the topology is, or one follower's address (``host:port`` of its gRPC port,
    or ``frames:host:port``).

    Raises `InvalidArgument` when it is none of these, `TopologyError` for a topology that cannot be read or used."""
    if is_etcd_url(target):
        return await _read_from_etcd(target)
    found = _parse_target(target)
    return await _run_off_loop_if_large(_size_bytes(found), _read_topology, found) if isinstance(found, Path) else found


async def _read_from_etcd(url: str) -> Topology:
    """Return the topology in etcd, with the credentials in the environment (`EtcdSettings.from_environment`)."""
    from tao.topology.stores import EtcdConnections, open_topology  # hardly any application needs it

    etcd = EtcdConnections(EtcdSettings.from_environment())
    try:
        return await open_topology(location_of(url), etcd, lambda error: None).load()
    finally:
        await etcd.close()


def _parse_target(target: str) -> Path | CacheServer:
    """Return the path of the topology file, or the follower, that a target names. Raises `InvalidArgument`."""
    if not target:
        raise InvalidArgument(f"the target is empty; {_TARGET_FORMS}")
    if target.startswith("frames:"):
        address = str(parse_address(target.removeprefix("frames:")))
        return CacheServer(name=target, grpc="", frames=address)
    if target.startswith("file:") or "/" in target or target.endswith(".json"):
        return Path(target.removeprefix("file:"))
    try:
        return CacheServer(name=target, grpc=str(parse_address(target)))
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.message}; {_TARGET_FORMS}") from None


def _read_topology(path: Path) -> Topology:
    """Return the topology in a file. Raises `TopologyError` when it cannot be read or used."""
    try:
        return parse_topology(path.read_bytes(), str(path))
    except OSError as error:
        raise TopologyError(unreadable(path, error)) from None


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class ClientConfiguration:
    """The newest topology and schema that were received. Made by `ClientConfiguration.fetch`."""

    def __init__(self, links: LinkPool, settings: ClientSettings, routes: Routes, schema: Schema, region: str):
        """``routes`` are those of ``region``, made by `_routes_of`."""
        self.routes = routes
        self.schema = schema
        self.region = region
        self._links = links
        self._settings = settings
        self._listener: ConfigurationListener | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._refresh_task: asyncio.Task[None] | None = None
        self._unusable_until: dict[int, float] = {}  # by version: the time until which it is not fetched again
        self._watched: tuple[pb.TopologyDocument, str] | None = None  # received by the watch, and not taken yet
        self._take_task: asyncio.Task[None] | None = None

    @property
    def topology(self) -> Topology:
        """The topology in use: from a server, the part of it that applications of this region need."""
        return self.routes.topology

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
            links.keep_only(_places(source))
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
                    # Before the region is known, the server that is asked knows it: the address is one of its region.
                    link.ask(pb.Request(get_topology=pb.GetTopology(region=region or "")), time_left),
                    link.ask(pb.Request(get_schema=pb.GetSchema()), time_left),
                )
            except TaoError as error:
                failure = error
                continue
            document = answers[0].topology.json
            topology = await _run_off_loop_if_large(
                len(document), decode_topology, document, f"topology of {server.name}"
            )
            schema = Schema.from_json(answers[1].schema.json, f"schema of {server.name}")
            asked = server if isinstance(source, CacheServer) else None
            found = _region_of(topology, region, asked)
            routes = await _run_off_loop_if_large(len(document), _routes_of, topology, found, None)
            return cls(links, settings, routes, schema, found)
        raise failure

    def follow(self, listener: ConfigurationListener) -> None:
        """Hand both documents to a listener now, and every newer one when it arrives. Raises `TopologyError`."""
        self._listener = listener
        listener.use_routes(self.routes)
        listener.use_schema(self.schema)
        self._links.keep_only(_places(self.topology))
        self._watch_task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Stop watching."""
        tasks = [task for task in (self._watch_task, self._refresh_task, self._take_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self, version: int, queue: ServerQueue) -> None:
        """Fetch the topology of a server, unless ours is of this version or newer, or has been fetched in vain a moment
        ago. Concurrent calls share one fetch."""
        loop = asyncio.get_running_loop()
        if self.topology.version >= version or loop.time() < self._unusable_until.get(version, -math.inf):
            return
        task = self._refresh_task
        if task is None:
            task = self._refresh_task = loop.create_task(self._fetch_topology(version, queue))
        await asyncio.wait([task])
        task.result()

    async def refresh_schema(self) -> None:
        """Fetch the schema from a follower, when an answer has a type that ours lacks. Raises a `TaoError`."""
        server = random.choice(_followers(self.topology, self.region))
        request = pb.Request(get_schema=pb.GetSchema())
        answer = await self._links.to(server).ask(request, self._settings.timeout_seconds)
        self._take_schema(answer.schema, server.name)

    async def _fetch_topology(self, version: int, queue: ServerQueue) -> None:
        try:
            request = pb.Request(get_topology=pb.GetTopology(region=self.region))
            answer = await queue.link.ask(request, self._settings.timeout_seconds)
            await self._take_topology(answer.topology, queue.server.name)
            if self.topology.version < version:
                self._note_unusable(version, _SKIPPED_SECONDS if answer.topology.version >= version else _OLDER_SECONDS)
        except TaoError as error:
            # The query that was refused is retried all the same; the watch brings the document later.
            _logger.warning("the topology of %s could not be fetched: %s", queue.server.name, error.message)
        finally:
            self._refresh_task = None

    def _note_unusable(self, version: int, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        fetched = {each: until for each, until in self._unusable_until.items() if until > now}
        self._unusable_until = {**fetched, version: now + seconds}

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            server = self._server_to_watch()
            ended: asyncio.Future[TaoError | None] = loop.create_future()
            watch = pb.Watch(
                topology_version=self.topology.version, schema_hash=self.schema.version_hash, region=self.region
            )
            self._links.to(server).send(pb.Request(watch=watch), math.inf, self._event_handler(server.name, ended))
            error = await ended
            _logger.debug("the watch through %s ended: %s", server.name, error)
            pause_seconds = self._settings.watch_retry_seconds
            if isinstance(error, PermissionDenied):
                await self._fetch_both(server)
                pause_seconds *= _UNWATCHED_PAUSES
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.5))

    def _server_to_watch(self) -> CacheServer:
        """Return a random follower of the region, so that thousands of clients do not all watch through the first; one
        that is not known to be down, if there is one among a few: it may be gone by a topology that is not known
        here."""
        followers = _followers(self.topology, self.region)
        drawn = random.sample(followers, min(len(followers), _WATCH_DRAWS))
        return next((each for each in drawn if not self._links.to(each).is_down), drawn[0])

    async def _fetch_both(self, server: CacheServer) -> None:
        """Fetch the documents whose changes this process has no right to receive."""
        link, seconds = self._links.to(server), self._settings.timeout_seconds
        try:
            topology = await link.ask(pb.Request(get_topology=pb.GetTopology(region=self.region)), seconds)
            await self._take_topology(topology.topology, server.name)
            schema = await link.ask(pb.Request(get_schema=pb.GetSchema()), seconds)
            self._take_schema(schema.schema, server.name)
        except TaoError as error:
            _logger.debug("the documents of %s could not be fetched: %s", server.name, error)

    def _event_handler(self, server: str, ended: asyncio.Future[TaoError | None]) -> Callable[[pb.Answer], None]:
        def on_answer(answer: pb.Answer) -> None:
            if self._watch_task is None or self._watch_task.done():
                return
            if answer.HasField("watch"):
                if answer.watch.HasField("topology"):
                    self._take_later(answer.watch.topology, server)
                if answer.watch.HasField("schema"):
                    self._take_schema(answer.watch.schema, server)
            if not answer.more and not ended.done():
                ended.set_result(error_from_pb(answer.error) if answer.HasField("error") else None)

        return on_answer

    def _take_later(self, document: pb.TopologyDocument, server: str) -> None:
        """Take a topology that the watch has received, after the one that is being taken. Of several that come
        meanwhile the last is taken."""
        self._watched = document, server
        if self._take_task is None or self._take_task.done():
            self._take_task = asyncio.get_running_loop().create_task(self._take_watched())

    async def _take_watched(self) -> None:
        while self._watched is not None:
            (document, server), self._watched = self._watched, None
            await self._take_topology(document, server)

    async def _take_topology(self, document: pb.TopologyDocument, server: str) -> None:
        if document.version <= self.topology.version:
            return
        try:
            size = len(document.json)
            topology = await _run_off_loop_if_large(size, decode_topology, document.json, f"topology of {server}")
            routes = await _run_off_loop_if_large(size, _routes_of, topology, self.region, self.routes)
            if routes.version <= self.topology.version:
                return  # the watch and a request for it may bring the same document
            if self._listener is not None:
                self._listener.use_routes(routes)
        except OperatorError as error:
            _logger.warning(
                "topology version %d of %s is not usable and was skipped: %s", document.version, server, error.message
            )
            return
        self.routes = routes
        self._links.keep_only(_places(topology))

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


def _routes_of(topology: Topology, region: str, former: Routes | None) -> Routes:
    """Return the routes of a topology, with those of the region's follower tiers computed. Raises `TopologyError` when
    it lacks the region or has a tier without a server to route to."""
    routes = Routes(topology, former)
    routes.follower_tiers(region)
    return routes


def _region_of(topology: Topology, wanted: str | None, asked: CacheServer | None) -> str:
    if wanted is not None:
        return topology.region(wanted).name
    names = [region.name for region in topology.regions]
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


def _places(topology: Topology) -> dict[str, ServerPlace]:
    """Return the places of the followers, which alone are asked."""
    return {name: place for name, place in topology.server_places.items() if place.role == "follower"}
