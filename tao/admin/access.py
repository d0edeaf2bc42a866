"""Opens the databases of a cluster with the read-only account, and links to its cache servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from tao.admin.connection import operator_links
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.scans import Scans
from tao.storage.session import ServerAccount
from tao.storage.tls import DatabaseTls
from tao.storage.writes import MySqlWriteStore
from tao.wire.links import Links
from tao.wire.tls import TlsFiles

SLOW_PAGE_SECONDS: Final = 120.0
"""Time limit of a page that counts the edges of its lists: one list may have tens of millions."""


@dataclass(frozen=True, slots=True)
class ReaderLogin:
    """A cluster's topology and schema, and the read-only account of its databases."""

    topology: Topology
    schema: Schema
    user: str
    password: str = field(repr=False)
    tls: DatabaseTls | None = None
    """How connections to the databases are encrypted; None: they are plain."""


@dataclass(frozen=True, slots=True)
class Access:
    """Open connections to a cluster, as an operator's check uses them."""

    routes: Routes
    links: Links
    store: MySqlReadStore
    scans: Scans
    """Scans of the master databases."""
    slow_scans: Scans
    """The same with a longer time limit, for pages that read many rows each."""
    intents: MySqlWriteStore
    """Reads intents. The account cannot write."""
    scans_at: Callable[[str], Scans]
    """Returns scans of the database server of that name."""


@asynccontextmanager
async def access_of(login: ReaderLogin, token: str, tls: TlsFiles | None = None) -> AsyncIterator[Access]:
    """Give access to a cluster; connections open on demand and are closed at the end. ``token``: the operator's."""
    routes = Routes(login.topology)
    servers = {each.server.name: each.server for each in login.topology.database_servers}

    def account(name: str) -> ServerAccount:
        server = servers[name]
        return ServerAccount(server.host, server.port, login.user, login.password, server.socket, login.tls)

    def master(shard: int) -> str:
        return routes.database_server(shard, routes.master_region(shard)).name

    def scans_at(name: str) -> Scans:
        return Scans(lambda _shard: name, pools)

    tables = edge_tables_of(lambda: login.schema)
    pools = Pools(account, READ_SETUP)
    try:
        async with operator_links(login.topology, token, tls) as links:
            yield Access(
                routes=routes,
                links=links,
                store=MySqlReadStore(
                    master, master, pools, tables, keeps_lease=lambda shard: routes.database_of(shard).keeps_lease
                ),
                scans=Scans(master, pools),
                slow_scans=Scans(master, pools, page_seconds=SLOW_PAGE_SECONDS),
                intents=MySqlWriteStore(master, pools, tables),
                scans_at=scans_at,
            )
    finally:
        await pools.close()
