"""One graph for everybody: written into the peers' tables once, and copied from there into tao's by the server itself.

As a bulk load would leave it: rows with the versions that writes would have given them, past the binlog, before anybody
has asked. Through the API a hundred thousand nodes with their edges took ten minutes of two cores; this takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from loadtest.peers.sql_graph import DATABASE, SqlGraph
from loadtest.published.contestant import LINK, NODE, Payloads, reserve_nodes
from loadtest.published.graph_plan import GraphPlan
from tao.client import Graph
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import next_version

_FIELDS: Final = (
    "CONCAT(X'8101', CASE WHEN LENGTH(payload) < 256 THEN CONCAT(X'C4', UNHEX(LPAD(HEX(LENGTH(payload)), 2, '0'))) "
    "WHEN LENGTH(payload) < 65536 THEN CONCAT(X'C5', UNHEX(LPAD(HEX(LENGTH(payload)), 4, '0'))) "
    "ELSE CONCAT(X'C6', UNHEX(LPAD(HEX(LENGTH(payload)), 8, '0'))) END, payload)"
)
"""What `tao.schema.codec.encode_fields` makes of a payload, the type's field 1: a msgpack map of one number."""


async def fill_everybody(
    graph: Graph, sql: SqlGraph, plan: GraphPlan, payloads: Payloads, shards: int, tell: Callable[[str, float], None]
) -> list[int]:
    """The ids by node; node ``n`` is on shard ``n % shards``. Raises a `TaoError` or `pymysql.err.MySQLError`."""
    ids = await reserve_nodes(graph, plan.nodes, shards)
    await sql.load(plan, ids, payloads, tell)
    for shard in range(shards):
        tell(f"copying the graph into shard {shard} of tao", 0.0)
        schema = f"tao_{shard:05d}"
        version = next_version(0, await sql.version_epoch(schema))
        await sql.copied(_copies(graph, schema, shard, version))
    return ids


def _copies(graph: Graph, schema: str, shard: int, version: int) -> Iterator[str]:
    link, node = graph.schema.atype(LINK), graph.schema.otype(NODE)
    low, high = shard << SHARD_SHIFT, (shard + 1 << SHARD_SHIFT) - 1
    here = f"BETWEEN {low} AND {high}"
    # S608: numbers and names of ours.
    yield (
        f"INSERT INTO {schema}.objects (id, otype, version, deleted, data) "  # noqa: S608
        f"SELECT id, {node.number}, {version}, 0, {_FIELDS} FROM {DATABASE}.node WHERE id {here}"
    )
    yield (
        f"INSERT INTO {schema}.assocs (id1, atype, id2, time, version, data) "  # noqa: S608
        f"SELECT id1, {link.number}, id2, time, {version}, IF(payload = '', '', {_FIELDS}) "
        f"FROM {DATABASE}.link WHERE id1 {here}"
    )
    yield (
        f"INSERT INTO {schema}.assocs (id1, atype, id2, time, version, data) "  # noqa: S608
        f"SELECT id1, {link.inverse}, id2, time, {version}, '' FROM {DATABASE}.linked_by WHERE id1 {here}"
    )
    yield (
        f"INSERT INTO {schema}.assoc_lists (id1, atype, count, version) "  # noqa: S608
        f"SELECT id1, atype, COUNT(*), {version} FROM {schema}.assocs GROUP BY id1, atype"
    )
