"""What a check needs open: links to the servers, and the databases by the read-only account."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from tao.cli.connecting import tls_of_command
from tao.cli.export_scan import ReaderLogin
from tao.model.topology import DatabaseServer
from tao.peers.links import Links, LinkSettings
from tao.routing.routes import Routes
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.scans import Scans
from tao.storage.session import ServerAccount
from tao.storage.writes import MySqlWriteStore
from tao.wire.identity import Credentials

PATIENT_PAGE_SECONDS: Final = 120.0
"""For counting the edges of a page of lists: one of them may have tens of millions."""


@dataclass(frozen=True, slots=True)
class Access:
    """The ways into a cluster that an operator's check uses."""

    routes: Routes
    links: Links
    store: MySqlReadStore
    scans: Scans
    patient_scans: Scans
    """For pages that look at many rows each."""
    intents: MySqlWriteStore
    """For what it reads of intents; the account writes nothing."""
    scans_in: Callable[[str], Scans]
    """Of a region's own servers of every database; the others read the masters."""


@asynccontextmanager
async def access_of(login: ReaderLogin, token: str) -> AsyncIterator[Access]:
    """Open on demand, closed at the end."""
    routes = Routes(login.topology)
    servers = {server.name: server for database in login.topology.databases for server in database.servers.values()}

    def account(name: str) -> ServerAccount:
        server: DatabaseServer = servers[name]
        return ServerAccount(server.host, server.port, login.user, login.password, server.socket)

    def master(shard: int) -> str:
        return routes.database_server(shard, routes.master_region(shard)).name

    def scans_in(region: str) -> Scans:
        return Scans(lambda shard: routes.database_server(shard, region).name, pools)

    pools = Pools(account, READ_SETUP)
    links = Links(LinkSettings(), Credentials("operator", "operator", token), tls_of_command())
    tables = edge_tables_of(lambda: login.schema)
    store = MySqlReadStore(master, master, pools, tables)
    try:
        patient = Scans(master, pools, page_seconds=PATIENT_PAGE_SECONDS)
        intents = MySqlWriteStore(master, pools, tables)
        yield Access(routes, links, store, Scans(master, pools), patient, intents, scans_in)
    finally:
        await links.close()
        await pools.close()
