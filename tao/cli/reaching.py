"""Links of a command to every cache server of a cluster, as operator, and what one call to many of them brings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from tao.cli.connecting import graph_of, target_of, tls_of_command
from tao.model.errors import TaoError
from tao.model.topology import CacheServer, Topology
from tao.peers.links import Links, LinkSettings
from tao.schema.registry import Schema
from tao.wire.identity import Credentials

_Asked = TypeVar("_Asked")
_Got = TypeVar("_Got")


@asynccontextmanager
async def operator_links(token: str) -> AsyncIterator[Links]:
    """Opened on demand, closed at the end."""
    links = Links(LinkSettings(), Credentials("operator", "operator", token), tls_of_command())
    try:
        yield links
    finally:
        await links.close()


async def topology_of(connect: str | None) -> Topology:
    """Of a file, as it stands there: no server has to be up for that. Of an address, what that follower goes by."""
    from tao.client.configuration import read_target

    found = read_target(target_of(connect))
    if isinstance(found, Topology):
        return found
    async with graph_of(connect) as graph:
        return graph.topology


async def schema_of(connect: str | None) -> Schema:
    """As a follower has it."""
    async with graph_of(connect) as graph:
        return graph.schema


def cache_servers(topology: Topology) -> list[tuple[str, CacheServer]]:
    """Role and server of all, the leaders of all regions first."""
    leaders = [("leader", server) for region in topology.regions for server in region.leaders.servers]
    followers = [
        ("follower", server) for region in topology.regions for tier in region.followers for server in tier.servers
    ]
    return leaders + followers


async def each(asked: Iterable[_Asked], ask: Callable[[_Asked], Awaitable[_Got]]) -> list[_Got | TaoError]:
    """Ask all side by side; in the place of an answer the reason why there is none."""

    async def one(each_of: _Asked) -> _Got | TaoError:
        try:
            return await ask(each_of)
        except TaoError as error:
            return error

    return await asyncio.gather(*map(one, asked))
