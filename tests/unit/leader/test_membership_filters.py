"""Filters of long lists: when a leader builds them, and what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.leader.membership_filters import MembershipFilters, MembershipSettings
from tao.model.changes import ListChange
from tao.model.edge_block import decode_block, encode_block
from tao.model.errors import Unavailable
from tao.model.graph import EXISTS_NOT, Edge
from tao.model.queries import EdgesQuery, Fetched, MemberPage, Query, RangeQuery
from tao.observability.logs import logger
from tao.observability.metrics import Metrics
from tao.serving.single_flight import FillSettings, SingleFlight
from tests.properties.test_cache_model import Types
from tests.rigs.asking import WaitingSource, answer, make_misses
from tests.rigs.leader_rig import make_id
from tests.rigs.pacing import Gate
from tests.rigs.versions import make_version
from tests.unit.client.fakes import until

ID1, ATYPE = make_id(64, 0), 1  # caches keep at most three of its edges
LENGTH = 40


class LongList(WaitingSource):
    """The database: a source of fills, scanned for filters. ``before_page`` runs before each page is read."""

    def __init__(self) -> None:
        self.ids = list(range(1, LENGTH + 1))
        self.version = 1
        self.asked: list[Query] = []
        self.pages = 0
        self.before_page: Gate | None = None
        self.fault: Unavailable | None = None

    def change(self, put: int) -> ListChange:
        self.ids.append(put)
        self.version += 1
        before, after = make_version(1, self.version - 1), make_version(1, self.version)
        return ListChange(ID1, ATYPE, before, after, len(self.ids), (), (Edge(put, put),))

    async def read(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        self.asked.append(query)
        edges = [Edge(id2, id2) for id2 in sorted(self.ids, reverse=True)]
        if isinstance(query, EdgesQuery):
            edges = [edge for edge in edges if edge.id2 in query.id2s]
        elif isinstance(query, RangeQuery):
            edges = edges[: query.limit]
        block = encode_block(
            make_version(1, self.version), len(self.ids), edges, 8 if isinstance(query, RangeQuery) else 0
        )
        return Fetched(block, 1, "database")

    async def read_members(self, id1: int, atype: int, after_id2: int, limit: int, *, deadline: float) -> MemberPage:
        self.pages += 1
        if self.before_page is not None:
            await self.before_page.pass_through()
        if self.fault is not None:
            raise self.fault
        ids = sorted(id2 for id2 in self.ids if id2 > after_id2)[:limit]
        return MemberPage(1, make_version(1, self.version), len(self.ids), ids)


class Clock:
    def monotonic(self) -> float:
        return 1.0

    def unix_ms(self) -> int:
        return 1


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.stored = LongList()
        self.cache = GraphCache(CacheSettings(), Types())
        self.cache.open_shard(0, 1)
        self.tasks: set[asyncio.Task[None]] = set()
        chosen = MembershipSettings(**{"min_edges": 20, "misses_before_build": 2, "page_edges": 7, **settings})
        self.filters = MembershipFilters(
            self.stored, self.cache, self.stored, Clock(), self.spawn, chosen, logger("test")
        )
        single_flight = SingleFlight(self.cache, self.filters, Clock(), lambda _: 3, FillSettings())
        self.misses = make_misses(single_flight)

    def spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(job)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def edges(self, *id2s: int) -> list[int]:
        """Answer a query from the cache, else by a fill."""
        known = self.cache.edges(ID1, ATYPE, id2s)
        if known is not None and not known.missing:
            return [edge.id2 for edge in decode_block(known.block)]
        fetched = await answer(self.misses, EdgesQuery(ID1, ATYPE, id2s), 0, critical=False)
        return [edge.id2 for edge in decode_block(fetched.value)]

    def asked(self) -> int:
        return sum(isinstance(query, EdgesQuery) for query in self.stored.asked)


async def test_a_list_with_many_misses_gets_a_filter_that_spares_the_database() -> None:
    rig = Rig()
    assert await rig.edges(900) == []
    assert await rig.edges(5) == [5], "what is there was not asked in vain"
    assert rig.stored.pages == 0
    assert await rig.edges(901) == []
    await until(lambda: rig.filters.built)
    assert rig.stored.pages == LENGTH // 7 + 1
    asked = rig.asked()
    assert [await rig.edges(id2) for id2 in range(1000, 1020)] == [[]] * 20
    assert rig.asked() == asked
    assert await rig.edges(5, 1000) == [5]
    assert rig.stored.asked[-1] == EdgesQuery(ID1, ATYPE, (5,)), "only what may be there is asked of the database"
    number, size_bytes = rig.filters.held()
    assert number == 1
    assert size_bytes > 0
    assert rig.filters.summary()["denials"] >= 20


async def test_a_filter_denies_existence_and_affirms_none() -> None:
    rig = Rig()
    for id2 in (900, 901):
        await rig.edges(id2)
    await until(lambda: rig.filters.built)
    denied = list(range(1000, 1020))
    cache, columns = rig.cache, ([ID1] * 21, [ATYPE] * 21)
    assert cache.exist_all(*columns, [*denied, 5]) == [EXISTS_NOT] * 20 + [None]
    assert cache.exists(ID1, ATYPE, 1000) == EXISTS_NOT
    assert cache.exists(ID1, ATYPE, 1000, make_version(1, 2)) is None, "of that version the filter knows nothing"
    assert rig.filters.summary()["denials"] >= 21


async def test_a_write_during_the_scan_is_in_the_filter() -> None:
    rig = Rig()
    gate = rig.stored.before_page = Gate()
    for id2 in (900, 901):
        await rig.edges(id2)
    await until(lambda: rig.stored.pages)
    gate.open()
    await until(lambda: rig.stored.pages > 3)
    rig.cache.apply(rig.stored.change(put=902), 1, 1.0)
    await until(lambda: rig.filters.built)
    assert await rig.edges(902) == [902]
    assert await rig.edges(903) == []


async def test_a_missed_change_drops_the_filter_and_later_misses_build_it_again() -> None:
    rig = Rig()
    for id2 in (900, 901):
        await rig.edges(id2)
    await until(lambda: rig.filters.built == 1)
    rig.stored.change(put=902)
    rig.cache.apply(rig.stored.change(put=903), 1, 1.0)
    assert rig.filters.held() == (0, 0)
    assert await rig.edges(902) == [902]
    for id2 in (904, 905):
        assert await rig.edges(id2) == []
    await until(lambda: rig.filters.built == 2)
    assert await rig.edges(902, 906) == [902]


async def test_a_scan_that_fails_is_given_up_and_tried_again_by_later_misses() -> None:
    rig = Rig()
    rig.stored.fault = Unavailable("gone")
    for id2 in (900, 901):
        assert await rig.edges(id2) == []
    await until(lambda: rig.filters.given_up)
    rig.stored.fault = None
    for id2 in (902, 903):
        assert await rig.edges(id2) == []
    await until(lambda: rig.filters.built)


@pytest.mark.parametrize("least", [0, LENGTH + 1])
async def test_shorter_lists_or_none_at_all_get_filters_by_setting(least: int) -> None:
    rig = Rig(min_edges=least)
    for id2 in range(900, 910):
        assert await rig.edges(id2) == []
    assert rig.stored.pages == 0


async def test_the_metrics_of_filters_can_be_collected() -> None:
    rig = Rig()
    metrics = Metrics(role="leader", server="leader-1")
    rig.filters.register(metrics)
    for id2 in (900, 901):
        await rig.edges(id2)
    await until(lambda: rig.filters.built)
    text = metrics.render().decode()
    assert 'tao_membership_filter_builds_total{outcome="built"' in text
    assert "tao_membership_filter_entries" in text
