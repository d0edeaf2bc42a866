"""Lists that are put straight into the shards' tables, as a bulk load would leave them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import aiomysql

from tao.client import Graph
from tao.devcluster.cluster import DevCluster
from tao.devcluster.state_folder import service_accounts
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import next_version

_ROWS_PER_STATEMENT: Final = 5_000
TimedIds = Sequence[tuple[int, int]]
"""The time and id2 of each edge."""


async def insert_lists(cluster: DevCluster, graph: Graph, atype: str, lists: Mapping[int, TimedIds]) -> None:
    """Insert lists by id1 with the versions that writes would have left, without the binlog, before anybody has asked
    for them; for a type with an inverse also the edges of the other ends, of one list. All shards lie in one
    database."""
    account = service_accounts(cluster.record.passwords).administrator
    (database,) = graph.topology.databases
    server = database.servers[database.master_region]
    found = graph.schema.atype(atype)
    rows: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    counts: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for id1, edges in lists.items():
        rows[id1 >> SHARD_SHIFT] += [(id1, found.number, id2, at) for at, id2 in edges]
        counts[id1 >> SHARD_SHIFT].append((id1, found.number, len(edges)))
        if found.inverse is not None:
            for at, id2 in edges:
                rows[id2 >> SHARD_SHIFT].append((id2, found.inverse, id1, at))
                counts[id2 >> SHARD_SHIFT].append((id2, found.inverse, 1))
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
                counted = [f"({a},{b},{length},{version})" for a, b, length in counts[shard]]
                for table, values in (("assocs", made), ("assoc_lists", counted)):
                    for start in range(0, len(values), _ROWS_PER_STATEMENT):
                        some = ",".join(values[start : start + _ROWS_PER_STATEMENT])
                        await cursor.execute(f"INSERT INTO {schema}.{table} VALUES {some}")  # noqa: S608 - numbers
    finally:
        await connection.ensure_closed()
