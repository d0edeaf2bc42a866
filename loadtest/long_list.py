"""An association list of any length: put straight into the shards' tables, as a bulk load would leave it, or, into a
running cluster, whose databases are not ours, written edge by edge."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import aiomysql

from loadtest.published.contestant import written
from tao.client import Graph
from tao.devcluster.cluster import DevCluster
from tao.devcluster.state_folder import service_accounts
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import next_version

EDGES_PER_TIME: Final = 7  # edges that share a time
_ROWS_PER_STATEMENT: Final = 5_000
_EDGES_AT_ONCE: Final = 2_000


def _planned(shards: int, count: int) -> list[tuple[int, int]]:
    """``(time, id2)`` of the edges, newest first."""
    edges = [(number // EDGES_PER_TIME, number % shards << SHARD_SHIFT | number) for number in range(1, count + 1)]
    return sorted(edges, reverse=True)


async def write_list(graph: Graph, id1: int, atype: str, count: int) -> list[int]:
    """Through the API, the newest last. Returns the id2s, newest first. Raises a `TaoError`."""
    edges = _planned(graph.topology.shards, count)
    for end in range(len(edges), 0, -_EDGES_AT_ONCE):
        some = edges[max(0, end - _EDGES_AT_ONCE) : end]
        await written(graph.assoc_add_many, [(id1, atype, id2, at) for at, id2 in reversed(some)])
    return [id2 for _, id2 in edges]


async def load_list(cluster: DevCluster, graph: Graph, id1: int, atype: str, count: int) -> list[int]:
    """Rows with the versions that writes would have left, past the binlog, before anybody has asked; of a type with an
    inverse those of the other end, too. All shards lie in one database. Returns the id2s, newest first."""
    account = service_accounts(cluster.record.passwords).administrator
    (database,) = graph.topology.databases
    server = database.servers[database.master_region]
    found = graph.schema.atype(atype)
    shards = graph.topology.shards
    edges = _planned(shards, count)
    rows: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    lists: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    rows[id1 >> SHARD_SHIFT] = [(id1, found.number, id2, at) for at, id2 in edges]
    lists[id1 >> SHARD_SHIFT] = [(id1, found.number, count)]
    if found.inverse is not None:
        for at, id2 in edges:
            rows[id2 >> SHARD_SHIFT].append((id2, found.inverse, id1, at))
            lists[id2 >> SHARD_SHIFT].append((id2, found.inverse, 1))
    connection = await aiomysql.connect(
        host=server.host, port=server.port, user=account.user, password=account.password, autocommit=True
    )
    try:
        async with connection.cursor() as cursor:
            await cursor.execute("SET SESSION sql_log_bin = 0")
            for shard in sorted(rows):
                schema = f"tao_{shard:05d}"
                await cursor.execute(f"SELECT version_epoch FROM {schema}.shard")  # noqa: S608
                ((version_epoch,),) = await cursor.fetchall()
                version = next_version(0, version_epoch)
                made = [f"({a},{b},{c},{at},{version},'')" for a, b, c, at in rows[shard]]
                counted = [f"({a},{b},{length},{version})" for a, b, length in lists[shard]]
                for table, values in (("assocs", made), ("assoc_lists", counted)):
                    for start in range(0, len(values), _ROWS_PER_STATEMENT):
                        some = ",".join(values[start : start + _ROWS_PER_STATEMENT])
                        await cursor.execute(f"INSERT INTO {schema}.{table} VALUES {some}")  # noqa: S608 - numbers
    finally:
        await connection.ensure_closed()
    return [id2 for _, id2 in edges]
