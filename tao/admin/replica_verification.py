"""Compares every replica and standby with its master, row by row (`tao verify --all-regions`).

Both are scanned in key order, a page at a time. The pages are read at different moments, and a replica is behind its
master, so rows that differ are read again after a pause. A row was in flight when it is equal then, or has changed at
the replica; it is wrong when it still differs and has not changed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tao.admin.comparison import Report, ServerReport
from tao.model.graph import EdgeKey, ListKey
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.storage.scans import FIRST_EDGE, FIRST_LIST, Scans

PAGE_ROWS: Final = 2_000
ROWS_AT_ONCE: Final = 8
"""Rows that are read again concurrently, as many as a pool has connections: the other region may be far away."""

Key = tuple[int, ...]
Page = Mapping[Key, object]
"""Rows by key, in key order."""
ScanPage = Callable[[Scans, int, Key, int], Awaitable[Page]]
"""Reads at most ``limit`` rows of a shard behind a key: ``(scans, shard, after, limit)``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that differs between a replica and its master, or is missing at either."""

    server: str
    shard: int
    table: str
    key: Key
    at_master: bool
    at_replica: bool


@dataclass(slots=True, kw_only=True)
class ReplicaReport(ServerReport):
    """The result at one replica. ``region``: its place, which is ``REGION/standby`` for a standby."""

    region: str
    rows: int = 0


ReplicasReport = Report[ReplicaReport, Difference]
"""The result of `compare_replicas`."""


async def compare_replicas(
    routes: Routes,
    schema: Schema,
    masters: Scans,
    scans_at: Callable[[str], Scans],
    *,
    recheck_seconds: float = 2.0,
    page_rows: int = PAGE_ROWS,
    on_progress: Callable[[str, int], None] = lambda _server, _rows: None,
) -> ReplicasReport:
    """Compare all replicas, standbys included, with their masters.

    ``masters``: scans of the masters. ``scans_at``: returns scans of a server by its name. ``recheck_seconds``: the
    pause before rows that differ are read again. ``on_progress`` receives a replica's name and how many rows have been
    compared."""
    report = ReplicasReport()
    tables = _tables(schema)
    compared = [
        (database, place, server)
        for database in routes.topology.databases
        for place, server in database.places.items()
        if place != database.master_region
    ]
    for database, place, server in compared:
        line = ReplicaReport(server=server.name, region=place)
        with report.checking(line):
            check = _ReplicaCheck(line, masters, scans_at(server.name), report, recheck_seconds, page_rows)
            for shard in (shard for first, last in database.shards for shard in range(first, last + 1)):
                for table, (start, scan) in tables.items():
                    await check.check_table(shard, table, start, scan)
                on_progress(server.name, line.rows)
    return report


class _ReplicaCheck:
    """Compares the rows of one replica."""

    def __init__(
        self,
        line: ReplicaReport,
        master: Scans,
        replica: Scans,
        report: ReplicasReport,
        recheck_seconds: float,
        page_rows: int,
    ) -> None:
        self._line: Final = line
        self._master: Final = master
        self._replica: Final = replica
        self._report: Final = report
        self._recheck_seconds: Final = recheck_seconds
        self._page_rows: Final = page_rows

    async def check_table(self, shard: int, table: str, start: Key, scan: ScanPage) -> None:
        after: Key | None = start
        while after is not None:
            pages = await asyncio.gather(
                scan(self._master, shard, after, self._page_rows), scan(self._replica, shard, after, self._page_rows)
            )
            # Rows behind the last key of a full page have not been read on that side.
            after = min((max(page) for page in pages if len(page) == self._page_rows), default=None)
            keys = {key for page in pages for key in page if after is None or key <= after}
            self._line.rows += len(keys)
            await self._compare_again(shard, table, scan, _differing(keys, *pages), pages[1])

    async def _compare_again(self, shard: int, table: str, scan: ScanPage, doubtful: list[Key], seen: Page) -> None:
        if not doubtful:
            return
        await asyncio.sleep(self._recheck_seconds)
        for start in range(0, len(doubtful), ROWS_AT_ONCE):
            some = doubtful[start : start + ROWS_AT_ONCE]
            pairs = await asyncio.gather(*(self._both(shard, scan, key) for key in some))
            for key, (at_master, at_replica) in zip(some, pairs, strict=True):
                if at_master == at_replica or at_replica != seen.get(key):
                    self._line.in_flight += 1
                    continue
                found = at_master is not None, at_replica is not None
                self._report.add(self._line, Difference(self._line.server, shard, table, key, *found))

    async def _both(self, shard: int, scan: ScanPage, key: Key) -> tuple[object, object]:
        """Return the row as the master and the replica have it now: the first one behind the key before it."""
        just_before = (*key[:-1], key[-1] - 1)
        at_master, at_replica = await asyncio.gather(
            scan(self._master, shard, just_before, 1), scan(self._replica, shard, just_before, 1)
        )
        return at_master.get(key), at_replica.get(key)


def _differing(keys: Iterable[Key], at_master: Page, at_replica: Page) -> list[Key]:
    return [key for key in sorted(keys) if at_master.get(key) != at_replica.get(key)]


def _tables(schema: Schema) -> dict[str, tuple[Key, ScanPage]]:
    """Return every table of the graph, with the key where its scan begins and the function that scans it."""
    edge_tables = {atype.table or DEFAULT_EDGE_TABLE for atype in schema.assocs} | {DEFAULT_EDGE_TABLE}
    return {
        "objects": ((0,), _objects),
        "assoc_lists": ((FIRST_LIST.id1, FIRST_LIST.atype), _lists),
        **{
            table: ((FIRST_EDGE.id1, FIRST_EDGE.atype, FIRST_EDGE.id2), _edges_of(table))
            for table in sorted(edge_tables)
        },
    }


async def _objects(scans: Scans, shard: int, after: Key, limit: int) -> Page:
    return {(row.id,): row for row in await scans.scan_objects(shard, after[0], limit)}


async def _lists(scans: Scans, shard: int, after: Key, limit: int) -> Page:
    rows = await scans.scan_lists(shard, ListKey(after[0], after[1]), limit)
    return {(key.id1, key.atype): row for key, row in rows}


def _edges_of(table: str) -> ScanPage:
    async def scan(scans: Scans, shard: int, after: Key, limit: int) -> Page:
        rows = await scans.scan_edges(shard, table, EdgeKey(after[0], after[1], after[2]), limit)
        return {(key.id1, key.atype, key.id2): edge for key, edge in rows}

    return scan
