"""Membership filters against the whole history of a list: a "no" must be true at the filter's version.

Changes arrive late, twice and in any order, or never; a scan reads each of its pages at any moment between what was
surely visible and now. These conditions hold: an edge of the list at the filter's version is never denied; the version
is at least every known one; the arena's accounts are right.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tao.cache import CacheSettings, GraphCache
from tao.cache.filters import FilterBuild, FilterTable
from tao.model.changes import ListChange, ListInvalidation
from tao.model.edge_block import header
from tao.model.graph import Edge, ListKey
from tests.properties.cache_truth import Truth
from tests.properties.test_cache_model import Types
from tests.rigs.effort import examples

SHARD = 3
KEY = ListKey((SHARD << 47) + 64, 1)  # at most three edges are cached of it
IDS = range(1, 25)
edits = st.lists(
    st.sampled_from(IDS).flatmap(
        lambda id2: st.tuples(st.just(id2), st.none() | st.builds(Edge, st.just(id2), st.integers(0, 3)))
    ),
    min_size=1,
    max_size=3,
)


class FilterMachine(RuleBasedStateMachine):
    @initialize(budget=st.sampled_from([4_000, 1 << 20, 1 << 20]), first=st.lists(st.sampled_from(IDS), max_size=20))
    def start(self, budget: int, first: list[int]) -> None:
        self.now = 100.0
        self.truth = Truth()
        self.cache = GraphCache(CacheSettings(arena_bytes={"default": budget}, credit_slots=101), Types())
        self.cache.open_shard(SHARD, 1)
        self.waiting: list[ListChange | ListInvalidation] = []
        self.delivered: list[ListChange | ListInvalidation] = []
        self.heard = 0
        self.visible = 0
        self.build: FilterBuild | None = None
        self.page_after = 0
        if first:
            change = self.truth.write_list(KEY, [(id2, Edge(id2, id2 % 3)) for id2 in first], self.now)
            self.deliver_one(change)
            self.visible = 1

    @rule(edits=edits, carried=st.sampled_from([True, True, True, False]), own=st.booleans())
    def write(self, edits: list[tuple[int, Edge | None]], carried: bool, own: bool) -> None:
        change = self.truth.write_list(KEY, edits, self.now)
        message = change if carried else ListInvalidation(KEY.id1, KEY.atype, change.after)
        self.waiting.append(message)
        if own:
            self.deliver_one(change)

    def deliver_one(self, message: ListChange | ListInvalidation) -> None:
        self.cache.apply(message, 1, self.now)
        self.delivered.append(message)
        self.heard = max(self.heard, message.after if isinstance(message, ListChange) else message.version)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.deliver_one(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        self.deliver_one(data.draw(st.sampled_from(self.delivered)))

    @rule()
    def replica_catches_up(self) -> None:
        self.visible = len(self.truth.snapshots) - 1

    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        ticket = self.cache.list_ticket(KEY.id1, KEY.atype, self.now)
        shot = self.truth.snapshots[data.draw(st.integers(self.visible, len(self.truth.snapshots) - 1))]
        self.cache.store_list(ticket, shot.block(KEY, 0, 3), 1, self.now)

    @rule()
    def a_token_names_the_newest(self) -> None:
        version = self.truth.now.lists.get(KEY, (0, ()))[0]
        self.cache.raise_list_floor(KEY.id1, KEY.atype, version, self.now)
        self.heard = max(self.heard, version)

    @rule(event=st.integers(0, 60))
    def bulk_invalidation(self, event: int) -> None:
        if event == 7:
            self.cache.bump_shard(SHARD)
            assert self.cache.filter_shard(SHARD).filters.get(KEY.id1, KEY.atype) is None  # type: ignore[union-attr]

    @rule()
    def begin_scan(self) -> None:
        shard = self.cache.filter_shard(SHARD)
        assert shard is not None
        if self.build is not None:
            shard.filters.give_up(self.build)
        self.build = shard.begin_filter(KEY.id1, KEY.atype)
        self.page_after = 0

    @precondition(lambda self: self.build is not None)
    @rule(data=st.data(), rows=st.sampled_from([2, 5, 100]))
    def scan_a_page(self, data: st.DataObject, rows: int) -> None:
        """The page is of any moment from what is surely visible on, also an earlier one than the page before."""
        build = self.build
        shard = self.cache.filter_shard(SHARD)
        assert build is not None
        assert shard is not None
        shot = self.truth.snapshots[data.draw(st.integers(self.visible, len(self.truth.snapshots) - 1))]
        version, edges = shot.lists.get(KEY, (0, ()))
        ids = sorted(edge.id2 for edge in edges if edge.id2 > self.page_after)[:rows]
        taken = build.take(shot.epoch, version, len(edges), ids)
        if not taken:
            shard.filters.give_up(build)
            self.build = None
        elif len(ids) == rows:
            self.page_after = ids[-1]
        else:
            self.page_after = IDS.stop

    @precondition(lambda self: self.build is not None and self.page_after == IDS.stop)
    @rule()
    def finish(self) -> None:
        shard = self.cache.filter_shard(SHARD)
        assert shard is not None
        assert self.build is not None
        if shard.finish_filter(self.build, self.now) or self.build.is_abandoned:
            shard.filters.give_up(self.build)
            self.build = None

    @invariant()
    def nothing_that_is_there_is_denied(self) -> None:
        shard = self.cache.filter_shard(SHARD)
        assert shard is not None
        held = shard.filters.get(KEY.id1, KEY.atype)
        if held is not None:
            there = self.truth.edges_at(KEY, held.version)
            assert held.version >= self.heard
            assert held.count == len(there)
            assert all(held.may_have(edge.id2) for edge in there)
        for id2 in IDS:
            answer = self.cache.edges(KEY.id1, KEY.atype, (id2, 99))
            if answer is None:
                continue
            version, count, n, _ = header(answer.block)
            there = self.truth.edges_at(KEY, version)
            assert version >= self.heard
            assert count == len(there)
            if id2 not in answer.missing:
                assert n == sum(edge.id2 == id2 for edge in there)
            assert self.cache.edges(KEY.id1, KEY.atype, (id2,), minimum=version + 1) is None

    @invariant()
    def the_accounts_are_right(self) -> None:
        shard = self.cache.filter_shard(SHARD)
        assert shard is not None
        (arena,) = self.cache._arenas.all().values()
        retired = [table for table in arena._retired if isinstance(table, FilterTable)]
        filters = [held for table in [*shard.filters.tables.values(), *retired] for held in table._filters.values()]
        mine = sum(512 + (held.size_bytes if held is not None else 0) for held in filters)
        assert mine <= arena.bytes <= arena.budget_bytes

    def teardown(self) -> None:
        if not hasattr(self, "truth"):
            return
        for _ in range(1000):
            if not self.cache.reclaim_step():
                break
        assert not any(arena._retired for arena in self.cache._arenas.all().values())


TestFilters = FilterMachine.TestCase
TestFilters.settings = settings(
    max_examples=examples(100), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
