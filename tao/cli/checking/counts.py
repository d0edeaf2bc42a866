"""`tao repair`: lists whose count is not that of their edges, and their mending (DESIGN.md §6, invariant 5).

Counts and edges change in one transaction, so a statement that reads both sees them agree. Where they do not, someone
else has changed rows where no tailer was listening, or restored a part. Edges are counted by list, in pages, along the
primary key; what does not agree with the list's row is counted again in one statement together with it. The owner of
the shard mends it as a touch: it counts under its locks and raises the version, which every cache then hears of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tao.cli.checking.mending import MAX_FOUND, LeaderResult, have_mended
from tao.model.graph import ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.relay import Touch
from tao.model.rows import ListRow
from tao.peers.links import Link, Links
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.storage.scans import FIRST_LIST, Scans
from tao.wire.convert import touch_to_pb
from tao.wire.v1 import session_pb2 as pb

PAGE_LISTS: Final = 500
LISTS_PER_CALL: Final = 100
CALL_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, order=True)
class WrongCount:
    """``stored``: as the list's row says, 0 when there is none; ``counted``: its edges; ``version``: of the row."""

    id1: int
    atype: int
    stored: int
    counted: int
    version: int


async def find_wrong_counts(
    routes: Routes,
    schema: Schema,
    scans: Scans,
    *,
    on_progress: Callable[[int, int], None] = lambda _shard, _lists: None,
) -> list[WrongCount]:
    """Lists whose count is wrong, at most `MAX_FOUND`. ``on_progress`` hears the shard and how many lists have been
    looked at."""
    table_of = {atype.number: atype.table or DEFAULT_EDGE_TABLE for atype in schema.assocs}
    tables = sorted({DEFAULT_EDGE_TABLE, *table_of.values()})
    wrong: list[WrongCount] = []
    looked_at = 0
    for shard in range(routes.shards):
        suspects: dict[ListKey, None] = {}
        counted: dict[str, dict[ListKey, int]] = {table: {} for table in tables}
        ends: dict[str, ListKey | None] = dict.fromkeys(tables, FIRST_LIST)
        async for page, last in _list_pages(scans, shard):
            looked_at += len(page)
            for table in tables:
                while (end := ends[table]) is not None and (last is None or end < last):
                    more = await scans.count_edges(shard, table, end, PAGE_LISTS)
                    counted[table].update(more)
                    ends[table] = more[-1][0] if len(more) == PAGE_LISTS else None
            for key, stored in page:
                found = counted[table_of.get(key.atype, DEFAULT_EDGE_TABLE)].pop(key, 0)
                if found != stored.count:
                    suspects[key] = None
            for table in tables:
                # Counted, and not a list by now: its row is missing, or has come meanwhile.
                passed = [key for key in counted[table] if last is None or key <= last]
                for key in passed:
                    del counted[table][key]
                    if table_of.get(key.atype, DEFAULT_EDGE_TABLE) == table:
                        suspects[key] = None
            on_progress(shard, looked_at)
        for key in suspects:
            table = table_of.get(key.atype, DEFAULT_EDGE_TABLE)
            row, edges = await scans.count_again(shard, table, key)
            if row.count != edges:
                wrong.append(WrongCount(key.id1, key.atype, row.count, edges, row.version))
                if len(wrong) >= MAX_FOUND:
                    return sorted(wrong)
            await asyncio.sleep(0)
    return sorted(wrong)


async def _list_pages(scans: Scans, shard: int) -> AsyncIterator[tuple[list[tuple[ListKey, ListRow]], ListKey | None]]:
    """Pages of lists, and the last key of each; None for the last page, after which only rowless lists may come."""
    after = FIRST_LIST
    while True:
        page = await scans.scan_lists(shard, after, PAGE_LISTS)
        if len(page) < PAGE_LISTS:
            yield page, None
            return
        after = page[-1][0]
        yield page, after


async def mend_counts(routes: Routes, links: Links, counts: Sequence[WrongCount]) -> list[LeaderResult]:
    """Have the owners count these lists anew."""

    async def ask(link: Link, some: Sequence[WrongCount]) -> int:
        touches = [touch_to_pb(Touch(each.id1, each.atype, each.version)) for each in some]
        answer = await link.ask(pb.Request(touch_keys=pb.TouchKeys(touches=touches)), CALL_SECONDS)
        return answer.touched_keys.keys

    return await have_mended(routes, links, counts, lambda each: each.id1 >> SHARD_SHIFT, ask, LISTS_PER_CALL)
