# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""The id2s of one long list, page by page along the primary key (DESIGN.md §10 "High degree").

Each page is one statement, so one snapshot, and says which version the list has in it; see `tao.cache.filters` for why
the pages need not be of the same. No snapshot is held open for the length of a scan: it would keep the server from
purging what everybody writes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from tao.model.errors import InternalError
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import MemberPage
from tao.storage.names import EdgeTables, schema_name
from tao.storage.pools import Pools
from tao.storage.result_packets import Row

_SHARD = 0
_LIST = 1


class MySqlMemberScans:
    """See `tao.model.ports.MemberScans`."""

    def __init__(self, server_of: Callable[[int], str], pools: Pools, edge_tables: EdgeTables) -> None:
        """``server_of``: shard → name of the region's server. ``pools`` as of `tao.storage.reads.MySqlReadStore`."""
        self._server_of = server_of
        self._pools = pools
        self._edge_tables = edge_tables

    async def read_members(self, id1: int, atype: int, after_id2: int, limit: int, *, deadline: float) -> MemberPage:
        """See the port."""
        shard = id1 >> SHARD_SHIFT
        schema = schema_name(shard)
        # The first column says what a row is; columns without a use repeat one of their own (see `read_plan`).
        sql = (
            f"(SELECT {_SHARD}, version_epoch, only_row FROM {schema}.shard WHERE only_row = 1) UNION ALL "
            f"(SELECT {_LIST}, version, count FROM {schema}.assoc_lists FORCE INDEX (PRIMARY) "
            "WHERE id1 = %s AND atype = %s) UNION ALL "
            f"(SELECT 2, id2, atype FROM {schema}.{self._edge_tables(atype)} FORCE INDEX (PRIMARY) "
            "WHERE id1 = %s AND atype = %s AND id2 > %s ORDER BY id2 LIMIT %s)"
        )
        rows: list[Row] = []
        async with self._pools.of(self._server_of(shard)).session(deadline=deadline) as session:
            await session.stream(sql, (id1, atype, id1, atype, after_id2, limit), rows.extend, deadline=deadline)
        version_epoch = version = count = 0
        id2s: list[int] = []
        for kind, value, other in rows:
            if kind == _SHARD:
                version_epoch = value
            elif kind == _LIST:
                version, count = value, other
            else:
                id2s.append(value)
        if not version_epoch:
            raise InternalError(f"table {schema}.shard is empty: run the shard's migrations")
        return MemberPage(version_epoch, version, count, id2s)
