"""Finds and repairs what failures or foreign writes left inconsistent in the databases (`tao repair`).

Four kinds of faults are found:

* Old intents: writes of an edge and its inverse that were left half done. Leaders settle these themselves within
  seconds; an intent that stands for longer they could not settle, say because the other database refuses the write.
* Broken pairs: edges whose inverse is missing or differs. The databases are scanned, and for every edge of a type with
  an inverse the other end is read. The edge at the smaller id is the truth: it is copied to the larger id, and an edge
  that the smaller id does not have is deleted at the larger.
* Edges with states whose ends have different registers (`tao.admin.edge_registers`). Neither end is the truth: both are
  joined.
* Wrong counts: lists whose count is not the number of their edges. Counts and edges change in one transaction, so a
  statement that reads both sees them agree, unless rows were changed where no tailer was listening, or restored in
  part. Edges are counted by list, in pages, along the primary key; a list that seems wrong is counted again in one
  statement together with its row.

The leader that owns a shard makes the repair: it coordinates the pair, or counts a list under its locks and raises the
version, which reaches every cache. A leader that does not answer keeps no other from its part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tao.admin.access import Access
from tao.admin.edge_registers import find_unequal_ends
from tao.model.edge_block import decode_block
from tao.model.errors import DeadlineExceeded, TaoError, Unavailable
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import ReadStore
from tao.model.queries import EdgesQuery
from tao.model.relay import Touch
from tao.model.rows import IntentRow, ListRow
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.storage.names import DEFAULT_EDGE_TABLE
from tao.storage.scans import FIRST_EDGE, FIRST_LIST, Scans
from tao.wire.convert import touch_to_pb
from tao.wire.links import Link, Links
from tao.wire.v1 import session_pb2 as pb

OnProgress = Callable[[int, int], None]
"""Receives a shard and a number of rows."""
MAX_FOUND: Final = 100_000
"""The largest number of faults of one kind in one run, some tens of megabytes: repeat the command for more."""
OLD_INTENT_SECONDS: Final = 60.0
"""Intents of this age are taken for left over. Leaders settle intents that are ten seconds old, a hundred at a time;
clocks differ, too."""
PAGE_EDGES: Final = 1_000
PAGE_LISTS: Final = 500
_FAULTS_PER_CALL: Final = 100
_CALL_SECONDS: Final = 30.0
_NO_INVERSE: Final = "no inverse"

_Fault = TypeVar("_Fault")


@dataclass(slots=True)
class LeaderResult:
    """The repairs of one leader.

    ``asked``: faults that it was asked to repair. ``repaired``: how many it has repaired. ``error``: why it has not
    repaired the others."""

    server: str
    asked: int = 0
    repaired: int = 0
    error: str = ""


async def _repair_by_leader(
    routes: Routes,
    links: Links,
    faults: Iterable[_Fault],
    shard_of: Callable[[_Fault], int],
    ask: Callable[[Link, Sequence[_Fault]], Awaitable[int]],
) -> list[LeaderResult]:
    """Send the faults of each shard to its leader, and return the results by leader.

    ``shard_of`` gives the shard of a fault. ``ask`` sends some faults of one shard to a leader and returns how many it
    has repaired. A leader that does not answer is not asked about its other shards."""
    by_shard: dict[int, list[_Fault]] = {}
    for each in faults:
        by_shard.setdefault(shard_of(each), []).append(each)
    results: dict[str, LeaderResult] = {}
    away: set[str] = set()
    for shard, of_shard in by_shard.items():
        leader = routes.leaders(routes.master_region(shard)).home(shard)
        result = results.setdefault(leader.name, LeaderResult(leader.name))
        result.asked += len(of_shard)
        if leader.name in away:
            continue
        try:
            for start in range(0, len(of_shard), _FAULTS_PER_CALL):
                result.repaired += await ask(links.to(leader), of_shard[start : start + _FAULTS_PER_CALL])
        except TaoError as error:
            result.error = error.message
            if isinstance(error, (Unavailable, DeadlineExceeded)):
                away.add(leader.name)
    return list(results.values())


async def _settle(link: Link, pairs: Iterable[pb.Pair]) -> int:
    answer = await link.ask(pb.Request(settle_pairs=pb.SettlePairs(pairs=pairs)), _CALL_SECONDS)
    return answer.settled_pairs.settled


async def settle_intents(routes: Routes, links: Links, intents: Sequence[IntentRow]) -> list[LeaderResult]:
    """Have the coordinating leaders settle these intents."""

    async def ask(link: Link, some: Sequence[IntentRow]) -> int:
        return await _settle(
            link,
            [pb.Pair(low_id=each.low_id, high_id=each.high_id, atypes=each.atypes, token=each.token) for each in some],
        )

    return await _repair_by_leader(routes, links, intents, lambda each: each.low_id >> SHARD_SHIFT, ask)


@dataclass(frozen=True, slots=True, order=True)
class BrokenPair:
    """Two ids whose edges disagree.

    ``atype``: the type as seen from ``low_id``. ``fault``: what is wrong, as seen from ``found_at``. ``joins``: the
    type has states, so the repair joins both ends."""

    low_id: int
    high_id: int
    atype: int
    found_at: EdgeKey
    fault: str
    joins: bool = False

    @property
    def deletes(self) -> bool:
        """True when the repair deletes the only edge there is, because the smaller id, which decides, has none."""
        return not self.joins and self.fault == _NO_INVERSE and self.found_at.id1 != self.low_id

    @property
    def repair(self) -> str:
        """What the repair does, as text."""
        if self.joins:
            return "joined at both ids"
        return "deleted at the larger id" if self.deletes else "copied to the larger id"


async def find_broken_pairs(
    routes: Routes,
    schema: Schema,
    scans: Scans,
    store: ReadStore,
    *,
    recheck_seconds: float = 1.0,
    on_progress: OnProgress = lambda _shard, _edges: None,
    time_ns: Callable[[], int] = time.time_ns,
) -> list[BrokenPair]:
    """Return the pairs whose two edges are not each other's inverse, at most about `MAX_FOUND`.

    A pair that disagrees is read again after ``recheck_seconds``, because it may be being written. ``on_progress``
    receives the shard and how many edges have been read so far. ``time_ns`` returns the time since 1970."""
    broken: dict[tuple[int, int, int], BrokenPair] = {}
    looked_at = 0
    paired_types = [atype for atype in schema.assocs if atype.inverse is not None and not atype.states]
    tables = sorted({atype.table or DEFAULT_EDGE_TABLE for atype in paired_types})
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
    unequal = find_unequal_ends(
        routes, schema, scans, recheck_seconds=recheck_seconds, on_progress=on_progress, time_ns=time_ns
    )
    async for key, fault in unequal:
        at_low = key if key.id1 <= key.id2 else _mirror(key, schema)
        broken[at_low.id1, at_low.id2, at_low.atype] = BrokenPair(
            at_low.id1, at_low.id2, at_low.atype, key, fault, joins=True
        )
        if len(broken) >= MAX_FOUND:
            break
    return sorted(broken.values())


async def _pages(scans: Scans, shard: int, table: str) -> AsyncIterator[list[tuple[EdgeKey, Edge]]]:
    last = FIRST_EDGE
    while page := await scans.scan_edges(shard, table, last, PAGE_EDGES):
        last = page[-1][0]
        yield page


def _mirror(key: EdgeKey, schema: Schema) -> EdgeKey:
    inverse = schema.atype(key.atype).inverse
    assert inverse is not None, "only edges of types with an inverse are compared"
    return EdgeKey(key.id2, inverse, key.id1)


async def _current(keys: Sequence[EdgeKey], store: ReadStore) -> list[tuple[EdgeKey, Edge | None]]:
    if not keys:
        return []
    queries = [EdgesQuery(key.id1, key.atype, (key.id2,)) for key in keys]
    read = await store.read(queries, critical=True, timeout_seconds=_CALL_SECONDS)
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


async def repair_pairs(routes: Routes, links: Links, pairs: Sequence[BrokenPair]) -> list[LeaderResult]:
    """Have the coordinating leaders copy or delete the edge at the larger id of these pairs."""

    async def ask(link: Link, some: Sequence[BrokenPair]) -> int:
        return await _settle(
            link, [pb.Pair(low_id=pair.low_id, high_id=pair.high_id, atypes=[pair.atype]) for pair in some]
        )

    return await _repair_by_leader(routes, links, pairs, lambda pair: pair.low_id >> SHARD_SHIFT, ask)


@dataclass(frozen=True, slots=True, order=True)
class WrongCount:
    """A list with a wrong count.

    ``stored``: the count in its row, 0 without a row; ``counted``: the number of its edges;
    ``version``: the version of its row."""

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
    on_progress: OnProgress = lambda _shard, _lists: None,
) -> list[WrongCount]:
    """Return the lists whose count is wrong, at most `MAX_FOUND`.

    ``on_progress`` receives the shard and how many lists have been read so far."""
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
                # Its edges were counted, but its row was not read: the row is missing, or was added meanwhile.
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
    """Yield pages of lists, each with its last key; None for the last page: only lists without a row are behind it."""
    after = FIRST_LIST
    while True:
        page = await scans.scan_lists(shard, after, PAGE_LISTS)
        if len(page) < PAGE_LISTS:
            yield page, None
            return
        after = page[-1][0]
        yield page, after


async def repair_counts(routes: Routes, links: Links, counts: Sequence[WrongCount]) -> list[LeaderResult]:
    """Have the owners of these lists count them again."""

    async def ask(link: Link, some: Sequence[WrongCount]) -> int:
        touches = [touch_to_pb(Touch(each.id1, each.atype, each.version)) for each in some]
        answer = await link.ask(pb.Request(touch_keys=pb.TouchKeys(touches=touches)), _CALL_SECONDS)
        return answer.touched_keys.keys

    return await _repair_by_leader(routes, links, counts, lambda each: each.id1 >> SHARD_SHIFT, ask)


@dataclass(slots=True)
class Faults:
    """Everything that `find_faults` found."""

    intents: list[IntentRow] = field(default_factory=list)
    pairs: list[BrokenPair] = field(default_factory=list)
    counts: list[WrongCount] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """True when there is something to repair."""
        return bool(self.intents or self.pairs or self.counts)

    @property
    def is_cut(self) -> bool:
        """True when there may be more faults than were looked for."""
        return max(len(self.intents), len(self.pairs), len(self.counts)) >= MAX_FOUND


@dataclass(slots=True)
class Repairs:
    """What `repair_faults` did, by leader."""

    intents: list[LeaderResult] = field(default_factory=list)
    pairs: list[LeaderResult] = field(default_factory=list)
    counts: list[LeaderResult] = field(default_factory=list)

    def complete(self, faults: Faults) -> bool:
        """True when every fault was repaired, and no further one can be left."""
        kinds = ((faults.intents, self.intents), (faults.pairs, self.pairs), (faults.counts, self.counts))
        return not faults.is_cut and all(len(found) == total_repaired(results) for found, results in kinds)

    def by_leader(self) -> list[LeaderResult]:
        """Return one result for each leader, over all kinds of faults."""
        merged: dict[str, LeaderResult] = {}
        for each in (*self.intents, *self.pairs, *self.counts):
            result = merged.setdefault(each.server, LeaderResult(each.server))
            result.asked += each.asked
            result.repaired += each.repaired
            result.error = result.error or each.error
        return list(merged.values())


def total_repaired(results: Iterable[LeaderResult]) -> int:
    """Return the number of faults that all leaders have repaired."""
    return sum(each.repaired for each in results)


async def find_faults(
    access: Access,
    schema: Schema,
    *,
    inverses: bool,
    counts: bool,
    on_edges: OnProgress = lambda _shard, _edges: None,
    on_lists: OnProgress = lambda _shard, _lists: None,
    time_ns: Callable[[], int] = time.time_ns,
) -> Faults:
    """Look for old intents and broken pairs (``inverses``), and for wrong counts (``counts``).

    ``on_edges`` and ``on_lists`` receive a shard and how many edges or lists have been read so far. ``time_ns`` returns
    the time since 1970, by which intents and removed edges are old."""
    found = Faults()
    if inverses:
        before = time_ns() // 1_000_000 - round(OLD_INTENT_SECONDS * 1000)
        shards = range(access.routes.shards)
        found.intents = await access.intents.old_intents(shards, before_unix_ms=before, limit=MAX_FOUND)
        found.pairs = await find_broken_pairs(
            access.routes, schema, access.scans, access.store, on_progress=on_edges, time_ns=time_ns
        )
    if counts:
        found.counts = await find_wrong_counts(access.routes, schema, access.slow_scans, on_progress=on_lists)
    return found


async def repair_faults(access: Access, faults: Faults) -> Repairs:
    """Have the leaders repair the faults. Intents come first: their pairs may be among those that disagree."""
    return Repairs(
        await settle_intents(access.routes, access.links, faults.intents),
        await repair_pairs(access.routes, access.links, faults.pairs),
        await repair_counts(access.routes, access.links, faults.counts),
    )
