"""Pair filters against the cache's naive graph with history.

Whatever messages, fills, tokens, invalidations, resets and promotions come in whichever order, and of whichever moments
the pages of a scan are, a "no" was true of the list at the version that the filter names, and no newer version of it is
known."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tao.cache.pair_filters import PairBuild
from tao.cache.shard import CachedShard
from tao.model.graph import EdgeKey, ListKey, version_of
from tao.model.ids import MAX_ID
from tao.model.queries import PairPage, PairsQuery
from tests.properties.cache_truth import Snapshot
from tests.properties.test_cache_model import LISTS, REPLICA_LAG_SECONDS, SHARD, CacheMachine
from tests.rigs.effort import examples
from tests.rigs.pair_pages import page_of_rows

IDS = range(1, 12)
ATYPES = [1, 2]


def page_of(shot: Snapshot, atype: int, after: tuple[int, int], limit: int) -> PairPage:
    """Return the page that a database reads: at most ``limit`` rows, of all types."""
    query = PairsQuery(SHARD, atype, *after, MAX_ID, limit)
    versions = {key: version for key, (version, _) in shot.lists.items()}
    edges = [EdgeKey(key.id1, key.atype, edge.id2) for key, (_, held) in shot.lists.items() for edge in held]
    return page_of_rows(shot.epoch, query, versions, edges)


class PairFilterMachine(CacheMachine):
    build: PairBuild | None = None
    after = (0, 0)

    @property
    def place(self) -> CachedShard:
        place = self.cache.filter_shard(SHARD)
        assert place is not None
        return place

    @rule(atype=st.sampled_from(ATYPES), alone=st.booleans())
    def begin_scan(self, atype: int, alone: bool) -> None:
        if self.build is not None:
            self.place.pairs.give_up(self.build)
        held = self.place.pairs.get(atype)
        uncertain = held.uncertain_lists() if held is not None and alone else []
        self.build = self.place.begin_pairs(atype, uncertain[0] if uncertain else 0)
        self.begun, self.after = self.now, (self.build.id1, 0)

    @precondition(lambda self: self.build is not None and self.after[0] < MAX_ID)
    @rule(data=st.data(), rows=st.sampled_from([1, 2, 5, 100]))
    def scan_a_page(self, data: st.DataObject, rows: int) -> None:
        """The page is of any moment between what the replica had when the scan began, and now."""
        assert self.build is not None
        surely_replicated = self.begun - REPLICA_LAG_SECONDS
        had = [at for at, shot in enumerate(self.truth.snapshots) if at == 0 or shot.time <= surely_replicated]
        oldest = max(self.replica_has, had[-1])
        shot = self.truth.snapshots[data.draw(st.integers(oldest, len(self.truth.snapshots) - 1))]
        page = page_of(shot, self.build.atype, self.after, rows)
        if not self.place.take_pairs(self.build, page):
            self.place.pairs.give_up(self.build)
            self.build = None
        else:
            self.after = (page.after_id1, page.after_id2) if page.after_id1 else (MAX_ID, 0)

    @rule(atype=st.sampled_from(ATYPES))
    def scan_all_edges_now(self, atype: int) -> None:
        """The scan is ahead of every message under way. A follower scans one type at a time."""
        if self.build is not None:
            self.place.pairs.give_up(self.build)
            self.build = None
        build = self.place.begin_pairs(atype)
        if self.place.take_pairs(build, page_of(self.truth.now, atype, (0, 0), 1_000)):
            self.place.finish_pairs(build, self.now)
        self.place.pairs.give_up(build)

    @precondition(lambda self: self.build is not None)
    @rule()
    def add_some(self) -> None:
        """Begin to make the filter, while changes go on."""
        assert self.build is not None
        if self.after[0] == MAX_ID:
            self.build.add_some()

    @precondition(lambda self: self.build is not None and self.after[0] == MAX_ID)
    @rule()
    def finish(self) -> None:
        assert self.build is not None
        self.place.finish_pairs(self.build, self.now)
        self.place.pairs.give_up(self.build)
        self.build = None

    def reopen(self) -> None:
        super().reopen()
        self.build = None

    def denied(self, key: ListKey, minimum: int = 0) -> set[int]:
        return {id2 for id2 in IDS if self.place.denies(key.id1, key.atype, id2, minimum)}

    @invariant()
    def nothing_that_is_there_is_denied(self) -> None:
        for key in LISTS:
            denied = self.denied(key)
            if denied:
                held = self.place.pairs.get(key.atype)
                assert held is not None
                version = held.version(key.id1)
                assert not denied & {edge.id2 for edge in self.truth.edges_at(key, version)}
                count = self.cache.peek_count(key.id1, key.atype)
                assert count is None or version_of(count) == version, "one batch has answers of two versions"
                self.answer(key, version)
                assert denied == self.denied(key, version)
                assert not self.denied(key, version + 1)


TestFilterDeniesNoEdgeThatAnyMessageHasReported = PairFilterMachine.TestCase
TestFilterDeniesNoEdgeThatAnyMessageHasReported.settings = settings(
    max_examples=examples(150), stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)
