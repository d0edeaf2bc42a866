"""Objects and edges out of the databases: page by page, shard by shard, by the read-only account.

Pages are of different moments: an export of a graph that is being written is no snapshot of it.
"""

from __future__ import annotations

import csv
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from tao.cli.connecting import DEFAULT_STATE_DIR
from tao.cli.field_text import text_of_value
from tao.cli.loading.key_map import KeyMap
from tao.devcluster.schema_copy import read_schema
from tao.devcluster.state_folder import StateFolder, service_accounts
from tao.model.errors import OperatorError
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.schema.codec import decode_fields
from tao.schema.registry import Schema
from tao.schema.types import GraphType
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP
from tao.storage.scans import FIRST_EDGE, Scans
from tao.storage.session import ServerAccount
from tao.topology.document import parse_topology

_PAGE_ROWS: Final = 2000


@dataclass(frozen=True, slots=True)
class ReaderLogin:
    """Where the databases are, whose types they hold, and as whom to read them."""

    topology: Topology
    schema: Schema
    user: str
    password: str = field(repr=False)


def reader_login(
    connect: str | None, schema_file: Path | None, reader_user: str, reader_password: str | None
) -> ReaderLogin:
    """From the options, or the development cluster's records. Raises `OperatorError` naming what is missing."""
    if connect is None:
        folder = StateFolder(DEFAULT_STATE_DIR)
        reader = service_accounts(folder.require().passwords).reader
        topology_file, schema_file = folder.topology, schema_file or folder.schema
        user, password = reader.user, reader.password
    else:
        topology_file = Path(connect.removeprefix("file:"))
        user, password = reader_user, reader_password or ""
        if schema_file is None or not password:
            raise OperatorError(
                "reading the databases needs --schema FILE, and the reader's password in TAO_READER_PASSWORD"
            )
    try:
        text = topology_file.read_bytes()
    except OSError as error:
        raise OperatorError(f"cannot read the topology file {topology_file}: {error.strerror}") from error
    return ReaderLogin(parse_topology(text, str(topology_file)), read_schema(schema_file)[0], user, password)


async def export_objects(file: TextIO, login: ReaderLogin, otype: str, key_column: str, keys: Path | None) -> int:
    """Write all objects of a type; returns how many."""
    found = login.schema.otype(otype)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([key_column, *(each.name for each in found.fields)])
    count = 0
    with _naming(keys) as naming:
        async with _scans(login) as scans:
            for shard in range(login.topology.shards):
                last = 0
                while page := await scans.scan_objects(shard, last, _PAGE_ROWS):
                    last = page[-1].id
                    rows = [row for row in page if row.otype == found.number and not row.deleted]
                    names = naming.names_of(row.id for row in rows)
                    writer.writerows([names[row.id], *_cells(found, row.data)] for row in rows)
                    count += len(rows)
    return count


async def export_edges(
    file: TextIO, login: ReaderLogin, atype: str, columns: tuple[str, str], keys: Path | None
) -> int:
    """Write all edges of a type, of a symmetric one each pair once; returns how many."""
    found = login.schema.atype(atype)
    symmetric = found.inverse == found.number
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*columns, "time", *(each.name for each in found.fields)])
    count = 0
    with _naming(keys) as naming:
        async with _scans(login) as scans:
            for shard in range(login.topology.shards):
                last = FIRST_EDGE
                while page := await scans.scan_edges(shard, found.table or DEFAULT_EDGE_TABLE, last, _PAGE_ROWS):
                    last = page[-1][0]
                    rows = [
                        (key, edge)
                        for key, edge in page
                        if key.atype == found.number and not (symmetric and key.id1 > key.id2)
                    ]
                    names = naming.names_of(each for key, _ in rows for each in (key.id1, key.id2))
                    writer.writerows(
                        [names[key.id1], names[key.id2], edge.time, *_cells(found, edge.data)] for key, edge in rows
                    )
                    count += len(rows)
    return count


def _cells(graph_type: GraphType, data: bytes) -> list[str]:
    if not graph_type.fields:
        return []
    values = decode_fields(graph_type, data)
    return [text_of_value(each, values[each.name]) for each in graph_type.fields]


class _Naming:
    """What stands for an id: its external key, or itself."""

    def __init__(self, key_map: KeyMap | None) -> None:
        self._key_map = key_map

    def names_of(self, ids: Iterable[int]) -> dict[int, str]:
        wanted = list(ids)
        names = {each: str(each) for each in wanted}
        if self._key_map is not None:
            keys = self._key_map.keys_of(wanted)
            missing = next((each for each in wanted if each not in keys), None)
            if missing is not None:
                raise OperatorError(f"object {missing} has no key in the key map: leave --keys out to write ids")
            names = keys
        return names


@contextmanager
def _naming(keys: Path | None) -> Iterator[_Naming]:
    if keys is None:
        yield _Naming(None)
        return
    with KeyMap(keys, must_exist=True) as key_map:
        yield _Naming(key_map)


@asynccontextmanager
async def _scans(login: ReaderLogin) -> AsyncIterator[Scans]:
    routes = Routes(login.topology)
    servers = {server.name: server for database in login.topology.databases for server in database.servers.values()}

    def account_of(name: str) -> ServerAccount:
        server = servers[name]
        return ServerAccount(server.host, server.port, login.user, login.password, server.socket)

    def master_of(shard: int) -> str:
        return routes.database_server(shard, routes.master_region(shard)).name

    pools = Pools(account_of, READ_SETUP)
    try:
        yield Scans(master_of, pools)
    finally:
        await pools.close()
