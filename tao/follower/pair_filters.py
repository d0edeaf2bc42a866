"""Build the pair filters of a follower in the background, and scan uncertain lists again.

A pair filter (`tao.cache.pair_filters`) answers whether an edge exists, when it does not and its list is not cached,
without the leader. Types that declare ``exists_filter: true`` have one in each shard that a leader confirms. One page
is read at a time, through the leader of the shard, with pauses that leave leader and database to other queries.

All filters together stay within a budget. Beyond it shards have none, and their checks go to the leader as without
filters.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Final, NamedTuple

from tao.cache import GraphCache
from tao.cache.pair_filters import PairBuild, PairFilter
from tao.cache.shard import CachedShard
from tao.model.errors import Overloaded, ProtocolError, TaoError
from tao.model.ids import MAX_ID
from tao.model.queries import PairPage
from tao.observability.metrics import Metrics
from tao.serving.configuration import ServerContext
from tao.wire.convert import error_from_pb, pair_page_from_pb
from tao.wire.v1 import session_pb2 as pb

_LOOKED_AT_ONCE: Final = 200
"""Shards that are looked at before other tasks get their turn."""
_MAX_RESCANS: Final = 100
"""Lists of one shard that are scanned again in one look, so that the other shards get their turn."""
_PAGE_PAUSES_SECONDS: Final = 0.05, 0.2, 0.5
"""Pauses before a page that failed is asked for again."""
_REFUSED_PAUSE_SECONDS: Final = 0.2
"""Mean pause before a page that was refused is asked for again: leaders read few pages at a time, for all followers."""
_LONGEST_WAIT_SECONDS: Final = 3600.0
"""Longest pause between two builds in a shard where each is overtaken by changes or invalidations."""
_MAX_NEEDS: Final = 10_000
"""Scans without room that are remembered. Further ones are begun again, and fail again."""

_Scanned = tuple[int, int, int]
"""What a scan is of: a shard, a type and a list, or 0 for all lists."""


@dataclass(frozen=True, slots=True)
class PairFilterSettings:
    """Filters that answer "no such edge" for the lists of types with ``exists_filter``, cached or not."""

    max_mb: int = 256
    """Memory of all pair filters in MiB, beside that of the cache, the scan under way included, but not a filter while
    its successor is built. An edge takes about 2 bytes, while it is scanned 10, and a list some 30 more. 0: no
    filters."""

    page_edges: int = 2_000
    """Edges of one page: a few milliseconds of the database, and two of this follower's event loop."""

    edges_per_second: int = 50_000
    """Scan rate: edges of all types in the table of the type, because the primary key is read in its order. A hundred
    million edges take half an hour, and a tenth of a core here."""

    page_seconds: float = 5.0
    """Longest wait for one page. A scan whose page is late is given up, and begins again later."""

    check_seconds: float = 1.0
    """Interval between two looks for filters to build and for lists to scan again. What makes a list uncertain is
    mostly followed by its message within milliseconds."""

    retry_seconds: float = 30.0
    """Shortest time between two builds of a filter, so that a shard that keeps being invalidated, or has few edges that
    come and go, is not scanned all the time. It doubles, up to an hour, with each build that changes or invalidations
    overtake."""


class PairFilters:
    """The pair filters of one follower."""

    def __init__(
        self,
        context: ServerContext,
        cache: GraphCache,
        is_subscribed: Callable[[int], bool],
        settings: PairFilterSettings,
    ) -> None:
        """``is_subscribed`` returns whether a leader has confirmed that it sends this follower the shard's changes."""
        self._configuration: Final = context.configuration
        self._links: Final = context.links
        self._region: Final = context.region
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._cache: Final = cache
        self._is_subscribed: Final = is_subscribed
        self._settings: Final = settings
        self._has_filters = False
        self._not_before: dict[_Scanned, float] = {}
        self._needs: dict[_Scanned, int] = {}
        self._overtaken: dict[_Scanned, int] = {}  # builds one after another that were given up, though pages were read
        self._held_bytes = 0
        self._uncertain: dict[tuple[int, int], frozenset[int]] = {}
        self.outcomes = {"built": 0, "given_up": 0, "no_room": 0, "discarded": 0, "rescanned": 0}
        """Number of builds by how they ended, of filters that were discarded because too much was missed, and of lists
        that were scanned again."""

    async def keep(self) -> None:
        """Build what is missing, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.check_seconds)
            if self._settings.max_mb:
                await self.run_once()

    async def run_once(self) -> None:
        """Build the filters that are missing or loose, and scan uncertain lists again."""
        atypes = {each.number for each in self._configuration.schema.assocs if each.exists_filter}
        if atypes or self._has_filters:
            self._drop_what_is_not_wanted(atypes)
        self._has_filters = bool(atypes)
        open_shards = self._cache.open_shards()
        for key in [key for key in self._uncertain if key[0] not in open_shards]:
            del self._uncertain[key]
        for scanned in [scanned for scanned in self._overtaken if scanned[0] not in open_shards]:
            del self._overtaken[scanned]
        if atypes:
            for number, shard in enumerate(sorted(open_shards), 1):
                if not number % _LOOKED_AT_ONCE:
                    await asyncio.sleep(0)
                await self._look_at(shard, sorted(atypes))

    async def _look_at(self, shard: int, atypes: Sequence[int]) -> None:
        """Scan what one shard lacks, up to the first failure: a leader that hangs would hold up each scan."""
        rescans = 0
        for atype in atypes:
            place = self._subscribed(shard)
            if place is None:
                return
            held = place.pairs.get(atype)
            for id1 in self._uncertain_twice(place, atype, held):
                if self._subscribed(shard) is not place:
                    return
                if rescans == _MAX_RESCANS or held is None or place.pairs.get(atype) is not held:
                    break
                if held.is_uncertain(id1):  # its message may have come during the scans before
                    rescans += 1
                    if not await self._scan_again(place, held, atype, id1):
                        return
            is_wanted = (held is None or held.is_loose) and self._is_due((shard, atype, 0))
            if is_wanted and not await self._build(place, atype):
                return

    def _subscribed(self, shard: int) -> CachedShard | None:
        """Return the shard if its filters may be built now."""
        place = self._cache.filter_shard(shard)
        return place if place is not None and place.version_epoch and self._is_subscribed(shard) else None

    def _uncertain_twice(self, place: CachedShard, atype: int, held: PairFilter | None) -> list[int]:
        """Return the lists that are uncertain and were so at the former look, and whose scan is due. The message about
        any other is most likely on its way."""
        key = (place.number, atype)
        former = self._uncertain.pop(key, frozenset())
        lists = [] if held is None else held.uncertain_lists()
        if lists:
            self._uncertain[key] = frozenset(lists)
        return [id1 for id1 in lists if id1 in former and self._is_due((*key, id1))]

    def _is_due(self, scanned: _Scanned) -> bool:
        if self._not_before.get(scanned, 0.0) > self._clock.monotonic():
            return False
        return self._needs.get(scanned, 0) <= self._budget_bytes - self._held_bytes

    def _drop_what_is_not_wanted(self, wanted: Collection[int]) -> None:
        """Discard the filters of types that the schema does not name any more, those that are of little use, and, in
        the order of shards, those for which there is no room."""
        total = 0
        for place, atype, held in list(self._held()):
            if atype not in wanted:
                place.pairs.discard((atype,))
            elif held.is_lost or total + held.size_bytes > self._budget_bytes:
                self.outcomes["discarded"] += 1
                place.pairs.discard((atype,))
                self._put_off((place.number, atype, 0))
            else:
                total += held.size_bytes
        self._held_bytes = total
        if len(self._not_before) > 2 * len(self._cache.open_shards()) * max(1, len(wanted)):
            now = self._clock.monotonic()
            self._not_before = {key: until for key, until in self._not_before.items() if until > now}

    @property
    def _budget_bytes(self) -> int:
        return self._settings.max_mb << 20

    def _put_off(self, scanned: _Scanned) -> None:
        self._not_before[scanned] = self._clock.monotonic() + self._wait_seconds(scanned)

    def _wait_seconds(self, scanned: _Scanned) -> float:
        shortest = self._settings.retry_seconds
        wait = shortest * (1 << min(self._overtaken.get(scanned, 0), 20))
        return min(wait, max(shortest, _LONGEST_WAIT_SECONDS))

    def _room(self, replaced: PairFilter | None) -> int:
        self._held_bytes = sum(held.size_bytes for _, _, held in self._held())
        return self._budget_bytes - self._held_bytes + (0 if replaced is None else replaced.size_bytes)

    def _note_no_room(self, scanned: _Scanned, size_bytes: int) -> None:
        """Begin the scan again only when there is noticeably more room than it took."""
        if len(self._needs) >= _MAX_NEEDS:
            self._needs.clear()
        self._needs[scanned] = size_bytes * 5 // 4

    def _held(self) -> Iterator[tuple[CachedShard, int, PairFilter]]:
        for number in self._cache.open_shards():
            place = self._cache.filter_shard(number)
            if place is not None:
                for atype, held in place.pairs.held():
                    yield place, atype, held

    async def _build(self, place: CachedShard, atype: int) -> bool:
        """Build a filter. Returns False when a page could not be read."""
        scanned = (place.number, atype, 0)
        self._put_off(scanned)
        started = self._clock.monotonic()
        build = place.begin_pairs(atype)
        room = self._room(place.pairs.get(atype))
        outcome, reason, failed = "given_up", "", False
        try:
            if not await self._scan(place, build, room):
                if not build.is_abandoned:
                    outcome, reason = "no_room", f"the filters have {self._settings.max_mb} MiB"
                    self._note_no_room(scanned, build.size_bytes)
            else:
                await self._add_all(build)
                if place.finish_pairs(build, self._clock.monotonic()):
                    outcome = "built"
                    self._needs.pop(scanned, None)
                    if self._overtaken.pop(scanned, 0):
                        self._put_off(scanned)
            if outcome == "given_up":
                reason = "too many changes during the scan" if build.is_overrun else "invalidated during the scan"
                self._overtaken[scanned] = self._overtaken.get(scanned, 0) + 1
                self._put_off(scanned)
        except TaoError as error:
            reason, failed = error.message, True
        finally:
            place.pairs.give_up(build)
        self.outcomes[outcome] += 1
        log = self._log.debug if outcome == "built" else self._log.info  # there may be thousands of shards
        log(
            "pair_filter_scanned",
            shard=place.number,
            atype=atype,
            outcome=outcome,
            reason=reason,
            bytes=build.size_bytes,
            seconds=round(self._clock.monotonic() - started, 1),
        )
        return not failed

    async def _add_all(self, build: PairBuild) -> None:
        """Make the filter of what was scanned, step by step."""
        for _ in count():
            if build.is_abandoned or not build.add_some():
                return
            await asyncio.sleep(0)

    async def _scan_again(self, place: CachedShard, held: PairFilter, atype: int, id1: int) -> bool:
        """Scan one list. It stays uncertain when the scan fails or is behind what is known, and is scanned again later.
        Returns False when a page could not be read."""
        scanned = (place.number, atype, id1)
        build = place.begin_pairs(atype, id1)
        try:
            if await self._scan(place, build, self._room(None)):
                await self._add_all(build)
                is_current = place.pairs.get(atype) is held
                if is_current and place.finish_pairs(build, self._clock.monotonic()) and not held.is_uncertain(id1):
                    self.outcomes["rescanned"] += 1
                self._needs.pop(scanned, None)
            elif not build.is_abandoned:
                self.outcomes["no_room"] += 1
                self._note_no_room(scanned, build.size_bytes)
            if held.is_uncertain(id1) and scanned not in self._needs:  # the pages are behind what is known
                self._put_off(scanned)
                held.put_last(id1)
        except TaoError as error:
            self._put_off(scanned)  # so that another list is the first one at the next look
            self._log.debug("list_scan_failed", id1=id1, atype=atype, reason=error.message)
            return False
        finally:
            place.pairs.give_up(build)
        return True

    async def _scan(self, place: CachedShard, build: PairBuild, room: int) -> bool:
        """Read all pages into the build. Returns False when it is abandoned, or takes more bytes than ``room``."""
        settings = self._settings
        asked = pb.ScanPairs(
            shard=place.number,
            atype=build.atype,
            after_id1=build.id1,
            last_id1=build.id1 or MAX_ID,
            limit=settings.page_edges,
        )
        while True:
            page = await self._page(asked)
            if not place.take_pairs(build, page) or build.size_bytes > room:
                return False
            if not page.after_id1 or page.after_id1 > asked.last_id1:
                return True
            asked.after_id1, asked.after_id2 = page.after_id1, page.after_id2
            # A full page was read, though most of it may be edges of other types.
            await asyncio.sleep(settings.page_edges / settings.edges_per_second)

    async def _page(self, asked: pb.ScanPairs) -> PairPage:
        """Return a page. After an error that may pass, ask for it again a few times within `page_seconds`, because a
        failure costs all pages before it; while the leader refuses it, for all of that time. Raises `TaoError`."""
        deadline = self._clock.monotonic() + self._settings.page_seconds
        pauses = iter(_PAGE_PAUSES_SECONDS)
        while True:
            try:
                return await self._ask(asked, deadline - self._clock.monotonic())
            except TaoError as error:
                if isinstance(error, Overloaded):
                    pause = _REFUSED_PAUSE_SECONDS * random.uniform(0.5, 1.5)  # not in step with other followers
                else:
                    pause = next(pauses, inf) if error.retryable else inf
                if self._clock.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)

    async def _ask(self, asked: pb.ScanPairs, timeout_seconds: float) -> PairPage:
        routes = self._configuration.routes
        link = self._links.to(routes.leaders(self._region).home(asked.shard))
        answer = await link.ask(pb.Request(topology_version=routes.version, scan_pairs=asked), timeout_seconds)
        if answer.HasField("error"):
            raise error_from_pb(answer.error)
        if not answer.HasField("scanned_pairs"):
            raise ProtocolError("the leader has answered a scan of edges with something else")
        return pair_page_from_pb(answer.scanned_pairs)

    def held(self) -> HeldPairFilters:
        """Return the number and the size of the filters."""
        every = [held for _, _, held in self._held()]
        return HeldPairFilters(
            len(every), sum(each.size_bytes for each in every), sum(len(each.uncertain_lists()) for each in every)
        )

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        metrics.gauge_family(
            "pair_filter_builds_total",
            "Builds of pair filters by outcome: built, given up because of a failure or an invalidation, without room; "
            "filters discarded because too much was missed or room was short; and lists scanned again.",
            "outcome",
            lambda: self.outcomes,
        )
        metrics.gauge(
            "pair_filter_queries",
            "Queries whether an edge exists that a pair filter answered without the leader.",
            lambda: self._cache.pair_denials,
        )
        metrics.gauge("pair_filter_bytes", "Memory of pair filters in bytes.", lambda: self.held().size_bytes)
        metrics.gauge("pair_filter_entries", "Pair filters held.", lambda: self.held().number)
        metrics.gauge(
            "pair_filter_uncertain_entries",
            "Lists that pair filters do not answer for until they are filled or scanned again.",
            lambda: self.held().uncertain_lists,
        )

    def summary(self) -> dict[str, int]:
        """Return the numbers for `/stats`."""
        number, size_bytes, uncertain = self.held()
        return {
            "filters": number,
            "bytes": size_bytes,
            "uncertain_lists": uncertain,
            "denials": self._cache.pair_denials,
            **self.outcomes,
        }


class HeldPairFilters(NamedTuple):
    """The number of filters, their size in bytes, and the number of lists that they do not answer for."""

    number: int
    size_bytes: int
    uncertain_lists: int
