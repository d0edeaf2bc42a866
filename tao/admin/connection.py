"""Opens connections to a cluster as an operator: a client, and links to every cache server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tao.client import ClientSettings, Credentials, Graph, connect
from tao.client.configuration import read_target
from tao.etcd.client import EtcdRefused, EtcdUnavailable
from tao.model.errors import RetryableError, TaoError, TlsMismatch, TopologyError
from tao.model.topology import Topology
from tao.schema.registry import Schema
from tao.wire.links import Links, LinkSettings
from tao.wire.tls import TlsFiles

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """Where a cluster is reached, and with which credentials."""

    address: str
    """A follower's ``host:port``, or where the topology is: the path of a file, or the URL of etcd."""
    region: str | None = None
    """The region whose followers are asked. None: the region of the follower at ``address``, or else the first one of
    the topology."""
    tls: TlsFiles | None = None
    """Certificates; None connects without TLS."""
    secret: str = field(default="", repr=False)
    """The token of the operator; empty where servers ask for none."""


@contextmanager
def _with_way_around_etcd() -> Iterator[None]:
    """Say at the error of an etcd that does not answer, or refuses, what to do until it does."""
    try:
        yield
    except TopologyError as error:
        if not isinstance(error.__cause__, EtcdUnavailable | EtcdRefused):
            raise
        raise TopologyError(
            f"{error.message}; until etcd answers, name a follower, which has the topology: --connect HOST:PORT or "
            "TAO_CONNECT=HOST:PORT"
        ) from error


@asynccontextmanager
async def open_graph(target: ClusterTarget, settings: ClientSettings | None = None) -> AsyncIterator[Graph]:
    """Open a client of the cluster and close it at the end. Raises what connecting raises."""
    settings = replace(settings or ClientSettings(), tls=target.tls)
    credentials = Credentials("operator", "client", target.secret)
    is_open = False
    try:
        with _with_way_around_etcd():
            async with connect(
                target.address, region=await region_of(target), settings=settings, credentials=credentials
            ) as graph:
                is_open = True
                yield graph
    except RetryableError as error:
        if not is_open and not isinstance(error, TlsMismatch):  # that one says itself what to do
            error.add_note("start the cluster, or name another follower with --connect or TAO_CONNECT")
        raise


async def region_of(target: ClusterTarget) -> str | None:
    """Return the region whose followers are asked; None: the region of the follower at the address.

    Raises a `TaoError` for a file that cannot be read and for an address that is none."""
    if target.region is not None:
        return target.region
    found = await read_target(target.address)
    return found.regions[0].name if isinstance(found, Topology) else None


@asynccontextmanager
async def operator_links(topology: Topology, secret: str, tls: TlsFiles | None = None) -> AsyncIterator[Links]:
    """Give links to the cache servers of a topology with an operator's rights; each opens when it is first used."""
    links = Links(LinkSettings(), Credentials("operator", "operator", secret), tls)
    links.keep_only(topology.server_places)
    try:
        yield links
    finally:
        await links.close()


async def current_topology(target: ClusterTarget) -> Topology:
    """Return the topology: from the file, for which no server has to run, or as the follower at the address has it."""
    with _with_way_around_etcd():
        found = await read_target(target.address)
    if isinstance(found, Topology):
        return found
    async with open_graph(target) as graph:
        return graph.topology


async def current_schema(target: ClusterTarget) -> Schema:
    """Return the schema that a follower uses now."""
    async with open_graph(target) as graph:
        return graph.schema


async def ask_each(asked: Iterable[_Asked], ask: Callable[[_Asked], Awaitable[_Answer]]) -> list[_Answer | TaoError]:
    """Call ``ask`` for every item concurrently; an item that fails has its error in the place of an answer."""

    async def one(item: _Asked) -> _Answer | TaoError:
        try:
            return await ask(item)
        except TaoError as error:
            return error

    return await asyncio.gather(*map(one, asked))
