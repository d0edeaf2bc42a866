"""`tao repair`: edges whose inverse is missing or differs, and their mending (DESIGN.md §6, invariant 6).

The databases are scanned; for every edge of a type with an inverse the other end is looked up. Of a pair that does not
agree the row at the smaller id is the truth, and the leader that coordinates the pair copies it to the other end; an
edge that the smaller id does not have is deleted at the larger.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tao.cli.checking.mending import MAX_FOUND, LeaderResult, have_mended
from tao.model.edge_block import decode_block
from tao.model.graph import Edge, EdgeKey
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import ReadStore
from tao.model.queries import EdgesQuery
from tao.peers.links import Link, Links
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.storage.scans import FIRST_EDGE, Scans
from tao.wire.v1 import session_pb2 as pb

PAGE_EDGES: Final = 1_000
PAIRS_PER_CALL: Final = 100
CALL_SECONDS: Final = 30.0
_NO_INVERSE: Final = "no inverse"


@dataclass(frozen=True, slots=True, order=True)
class BrokenPair:
    """Two ids whose edges disagree; ``atype`` as seen from ``low_id``, ``fault`` as seen from ``found_at``."""

    low_id: int
    high_id: int
    atype: int
    found_at: EdgeKey
    fault: str

    @property
    def deletes(self) -> bool:
        """Whether mending deletes the only edge there is, because the smaller id, which decides, has none."""
        return self.fault == _NO_INVERSE and self.found_at.id1 != self.low_id

    @property
    def mending(self) -> str:
        """What becomes of the pair."""
        return "deleted at the larger id" if self.deletes else "copied to the larger id"


async def find_broken_pairs(
    routes: Routes,
    schema: Schema,
    scans: Scans,
    store: ReadStore,
    *,
    recheck_seconds: float = 1.0,
    on_progress: Callable[[int, int], None] = lambda _shard, _edges: None,
) -> list[BrokenPair]:
    """Pairs whose two edges are not each other's mirror, at most some `MAX_FOUND`. One that is being written at this
    moment is looked at a second time. ``on_progress`` hears the shard and how many edges have been looked at."""
    broken: dict[tuple[int, int, int], BrokenPair] = {}
    looked_at = 0
    tables = sorted({atype.table or DEFAULT_EDGE_TABLE for atype in schema.assocs if atype.inverse is not None})
    for shard in range(routes.shards):
        for table in tables:
            async for page in _pages(scans, shard, table):
                paired = [(key, edge) for key, edge in page if schema.atype(key.atype).inverse is not None]
                suspects = await _disagreeing(paired, schema, store)
                if suspects:
                    await asyncio.sleep(recheck_seconds)
                    now = await _current([key for key, _ in suspects], store)
                    still = [(key, edge) for key, edge in now if edge is not None]
                    for pair in await _faults(still, schema, store):
                        broken[pair.low_id, pair.high_id, pair.atype] = pair
                looked_at += len(page)
                on_progress(shard, looked_at)
                if len(broken) >= MAX_FOUND:
                    return sorted(broken.values())
    return sorted(broken.values())


async def _pages(scans: Scans, shard: int, table: str) -> AsyncIterator[list[tuple[EdgeKey, Edge]]]:
    last = FIRST_EDGE
    while page := await scans.scan_edges(shard, table, last, PAGE_EDGES):
        last = page[-1][0]
        yield page


def _mirror(key: EdgeKey, schema: Schema) -> EdgeKey:
    inverse = schema.atype(key.atype).inverse
    assert inverse is not None, "only edges of paired types are looked at"
    return EdgeKey(key.id2, inverse, key.id1)


async def _current(keys: Sequence[EdgeKey], store: ReadStore) -> list[tuple[EdgeKey, Edge | None]]:
    if not keys:
        return []
    queries = [EdgesQuery(key.id1, key.atype, (key.id2,)) for key in keys]
    read = await store.read(queries, critical=True, timeout_seconds=CALL_SECONDS)
    return [(key, next(iter(decode_block(block)), None)) for key, block in zip(keys, read.values, strict=True)]


async def _disagreeing(
    edges: Sequence[tuple[EdgeKey, Edge]], schema: Schema, store: ReadStore
) -> list[tuple[EdgeKey, Edge]]:
    mirrors = await _current([_mirror(key, schema) for key, _ in edges], store)
    return [(key, edge) for (key, edge), (_, mirror) in zip(edges, mirrors, strict=True) if _fault(edge, mirror)]


async def _faults(edges: Sequence[tuple[EdgeKey, Edge]], schema: Schema, store: ReadStore) -> list[BrokenPair]:
    mirrors = await _current([_mirror(key, schema) for key, _ in edges], store)
    pairs: list[BrokenPair] = []
    for (key, edge), (mirror_key, mirror) in zip(edges, mirrors, strict=True):
        fault = _fault(edge, mirror)
        if fault:
            low, high = sorted((key.id1, key.id2))
            atype = key.atype if key.id1 == low else mirror_key.atype
            pairs.append(BrokenPair(low, high, atype, key, fault))
    return pairs


def _fault(edge: Edge, mirror: Edge | None) -> str:
    if mirror is None:
        return _NO_INVERSE
    if mirror.time != edge.time:
        return "inverse has another time"
    return "" if mirror.data == edge.data else "inverse has other data"


async def mend(routes: Routes, links: Links, pairs: Sequence[BrokenPair]) -> list[LeaderResult]:
    """Have the coordinating leaders settle these pairs."""

    async def ask(link: Link, some: Sequence[BrokenPair]) -> int:
        batch = [pb.Pair(low_id=pair.low_id, high_id=pair.high_id, atypes=[pair.atype]) for pair in some]
        answer = await link.ask(pb.Request(settle_pairs=pb.SettlePairs(pairs=batch)), CALL_SECONDS)
        return answer.settled_pairs.settled

    return await have_mended(routes, links, pairs, lambda pair: pair.low_id >> SHARD_SHIFT, ask, PAIRS_PER_CALL)
