"""Pair filters of a follower, built through its leader: what they answer, and when they must not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import msgspec
import pytest

from tao.cache.pair_filters import PairFilter
from tao.cache.shard import CachedShard
from tao.follower.pair_filters import PairFilters, PairFilterSettings
from tao.model.changes import ListChange, ListInvalidation, ShardInvalidation
from tao.model.errors import Overloaded, TaoError, Unavailable
from tao.model.graph import EXISTS, EXISTS_NOT, Edge, EdgeKey, ListKey
from tao.model.rows import ListRow
from tao.model.writes import AssocAdd, AssocDelete
from tao.observability.metrics import Metrics
from tao.schema.registry import Schema
from tests.rigs.leader_rig import FOLLOWS, SCHEMA, make_id
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Gate, until
from tests.rigs.region_rig import FollowerRig, RegionRig
from tests.rigs.versions import make_version

A, B, NEW, FAR = make_id(64), make_id(65), make_id(66), make_id(900)
EDGES: Final = 30
FILTERED: Final = Schema(
    SCHEMA.objects,
    tuple(replace(each, exists_filter=each.name == "follows") for each in SCHEMA.assocs),
    SCHEMA.reserved_otypes,
    SCHEMA.reserved_atypes,
)
FAST: Final = PairFilterSettings(page_edges=7, edges_per_second=1_000_000, retry_seconds=0.0)


class Filtered:
    """The follower of a region with its pair filters. A has 30 edges, B has 2, to FAR and the ids after it."""

    def __init__(self, region: RegionRig, settings: PairFilterSettings) -> None:
        self.region: Final = region
        self.near: Final[FollowerRig] = region.near
        self.near.configuration.schema = FILTERED
        self.filters: Final = PairFilters(
            self.near.context, self.near.cache, self.near.subscriptions.is_subscribed, settings
        )

    @property
    def place(self) -> CachedShard:
        place = self.near.cache.filter_shard(0)
        assert place is not None
        return place

    @property
    def held(self) -> PairFilter:
        held = self.place.pairs.get(FOLLOWS)
        assert held is not None
        return held

    @property
    def asked(self) -> int:
        return len(self.region.store.reads)

    def denies(self, id1: int, id2: int) -> bool:
        return self.place.denies(id1, FOLLOWS, id2, 0)

    async def exists(self, id1: int, id2: int, minimum: int = 0, *, critical: bool = False) -> bool:
        options = {"minimum_slots": [0], "minimum_versions": [minimum]} if minimum else {}
        value = await self.near.read(
            exist_id1s=[id1], exist_atypes=[FOLLOWS], exist_id2s=[id2], critical=critical, **options
        )
        return {EXISTS: True, EXISTS_NOT: False}[value]


def store_list(store: MemoryStore, id1: int, edges: int, counter: int) -> None:
    store.rows.lists[ListKey(id1, FOLLOWS)] = ListRow(edges, make_version(1, counter))
    for place in range(edges):
        store.rows.edges[EdgeKey(id1, FOLLOWS, FAR + place)] = Edge(FAR + place, place)


@asynccontextmanager
async def filtered(settings: PairFilterSettings = FAST, *, built: bool = True) -> AsyncIterator[Filtered]:
    region = RegionRig(split_leaders=True)
    store_list(region.store, A, EDGES, 5)
    store_list(region.store, B, 2, 3)
    await region.start()
    rig = Filtered(region, settings)
    if built:
        await rig.filters.run_once()
        assert rig.filters.outcomes["built"] == len(rig.near.subscriptions.hosted)
    yield rig
    assert await region.close() == []


async def test_edges_of_lists_that_are_not_cached_are_denied_without_the_leader() -> None:
    async with filtered() as rig:
        assert not any([await rig.exists(id1, FAR + 500 + id1 % 7) for id1 in (A, B, NEW)])
        assert rig.asked == 0
        assert rig.near.cache.pair_denials == 3
        assert await rig.exists(A, FAR + 29)
        assert rig.asked == 1


async def test_every_edge_of_every_page_is_there() -> None:
    async with filtered() as rig:
        assert not any(rig.denies(A, FAR + place) for place in range(EDGES))
        assert not any(rig.denies(B, FAR + place) for place in range(2))
        assert rig.denies(B, FAR + 2)


async def test_a_read_that_asks_for_a_newer_version_or_for_the_master_is_not_denied() -> None:
    async with filtered() as rig:
        assert not await rig.exists(A, NEW, make_version(1, 5))
        assert rig.asked == 0
        store_list(rig.region.store, A, EDGES + 1, 6)
        assert await rig.exists(A, FAR + EDGES, make_version(1, 6))
        assert await rig.exists(A, FAR + EDGES, critical=True)
        assert rig.asked == 2


async def test_edge_written_in_another_region_is_denied_at_most_until_its_message_arrives() -> None:
    async with filtered() as rig:
        await rig.region.leader.write(AssocAdd(A, FOLLOWS, NEW, 99, b""))
        await until(lambda: not rig.denies(A, NEW))
        assert await rig.exists(A, NEW)
        assert not await rig.exists(A, NEW + 1)


async def test_an_own_write_is_there_before_its_message() -> None:
    async with filtered() as rig:
        await rig.near.write(AssocAdd(NEW, FOLLOWS, B, 99, b""))
        assert await rig.exists(NEW, B)
        assert not rig.held.uncertain_lists()
        await rig.near.write(AssocDelete(NEW, FOLLOWS, B))
        assert not await rig.exists(NEW, B)


async def test_touched_list_is_uncertain_until_filled() -> None:
    async with filtered() as rig:
        store_list(rig.region.store, B, 3, 4)
        rig.near.cache.apply(ListInvalidation(B, FOLLOWS, make_version(1, 4)), 1, 0.0)
        assert rig.held.uncertain_lists() == [B]
        assert await rig.exists(B, FAR + 2), "the leader is asked, and the list is filled whole"
        assert not rig.held.uncertain_lists()
        rig.near.cache.bump_shard(1)
        asked = rig.asked
        assert not await rig.exists(B, FAR + 3)
        assert rig.asked == asked


async def test_a_prefix_settles_nothing_and_a_long_list_is_scanned_again() -> None:
    async with filtered() as rig:
        store_list(rig.region.store, A, 700, 6)
        rig.near.cache.apply(ListInvalidation(A, FOLLOWS, make_version(1, 6)), 1, 0.0)
        assert await rig.exists(A, FAR + 699)
        assert rig.held.uncertain_lists() == [A]
        assert not rig.denies(A, NEW)
        await rig.filters.run_once()
        await rig.filters.run_once()
        assert rig.filters.outcomes["rescanned"] == 1
        assert not rig.held.uncertain_lists()
        assert not any(rig.denies(A, FAR + place) for place in range(700))
        assert rig.denies(A, NEW)


async def test_a_list_is_scanned_again_only_if_it_is_uncertain_at_two_looks() -> None:
    async with filtered() as rig:
        reads = count_reads(rig)
        make_uncertain(rig, A)
        await rig.filters.run_once()
        assert reads == []
        make_uncertain(rig, B)
        await rig.filters.run_once()
        assert rig.filters.outcomes["rescanned"] == 1
        await rig.filters.run_once()
        assert rig.filters.outcomes["rescanned"] == 2


async def test_a_list_that_is_settled_while_another_is_scanned_is_not_scanned() -> None:
    async with filtered() as rig:
        versions = {id1: rig.held.version(id1) for id1 in (A, B)}
        make_uncertain(rig, A, B)
        await rig.filters.run_once()

        async def deliver() -> None:
            change = ListChange(B, FOLLOWS, versions[B], versions[B] + 1, 2)
            rig.near.cache.apply(change, 1, 0.0)

        rig.region.store.before_read = deliver
        await rig.filters.run_once()
        assert rig.filters.outcomes["rescanned"] == 1


async def test_a_look_scans_a_bounded_number_of_lists_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.follower.pair_filters._MAX_RESCANS", 1)
    async with filtered() as rig:
        make_uncertain(rig, A, B)
        for scanned in (0, 1, 2):
            await rig.filters.run_once()
            assert rig.filters.outcomes["rescanned"] == scanned


async def test_a_shard_is_left_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.follower.pair_filters._PAGE_PAUSES_SECONDS", ())
    async with filtered() as rig:
        make_uncertain(rig, A, B)
        await rig.filters.run_once()
        reads = count_reads(rig, Unavailable("the database is away"))
        await rig.filters.run_once()
        assert len(reads) == 1
        rig.filters._not_before.clear()
        reads = count_reads(rig)
        await rig.filters.run_once()
        assert rig.filters.outcomes["rescanned"] == 2


async def test_a_shard_is_left_when_its_subscription_has_ended() -> None:
    async with filtered() as rig:
        make_uncertain(rig, A, B)
        await rig.filters.run_once()
        reads = count_reads(rig)
        rig.filters._is_subscribed = lambda shard: not reads  # type: ignore[misc]
        await rig.filters.run_once()
        assert rig.filters.outcomes["rescanned"] == 1


async def test_a_list_that_a_scan_does_not_settle_is_put_off_and_lets_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The database does not show version 9 of A yet."""
    monkeypatch.setattr("tao.follower.pair_filters._MAX_RESCANS", 1)
    async with filtered(replace(FAST, retry_seconds=1e9)) as rig:
        rig.near.cache.apply(ListInvalidation(A, FOLLOWS, make_version(1, 9)), 1, 0.0)
        make_uncertain(rig, B)
        assert rig.held.uncertain_lists() == [A, B]
        await rig.filters.run_once()
        reads = count_reads(rig)
        await rig.filters.run_once()
        assert reads
        assert rig.filters.outcomes["rescanned"] == 0
        assert rig.held.uncertain_lists() == [B, A]
        await rig.filters.run_once()
        assert rig.filters.outcomes["rescanned"] == 1
        reads.clear()
        await rig.filters.run_once()
        assert reads == []
        assert rig.held.uncertain_lists() == [A]


async def test_a_page_that_fails_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.follower.pair_filters._PAGE_PAUSES_SECONDS", (0.0, 0.0))
    async with filtered(replace(FAST, retry_seconds=1e9), built=False) as rig:
        reads = count_reads(rig, Unavailable("the database is away"), failing=(4, 5))
        await rig.filters.run_once()
        assert len(reads) > 5
        assert rig.filters.outcomes["given_up"] == 0
        assert rig.denies(B, NEW)


async def test_a_page_that_the_leader_refuses_is_asked_for_until_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tao.follower.pair_filters._PAGE_PAUSES_SECONDS", ())
    monkeypatch.setattr("tao.follower.pair_filters._REFUSED_PAUSE_SECONDS", 0.001)
    async with filtered(replace(FAST, retry_seconds=1e9, page_seconds=60.0), built=False) as rig:
        reads = count_reads(rig, Overloaded("pages of edges are being read"), failing=tuple(range(4, 24)))
        await rig.filters.run_once()
        assert len(reads) > 23
        assert rig.filters.outcomes["given_up"] == 0
        assert rig.denies(B, NEW)


async def test_scans_of_lists_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    async with filtered() as rig:
        store_list(rig.region.store, A, 3_000, 6)
        monkeypatch.setattr(PairFilters, "_budget_bytes", rig.filters.held().size_bytes + 4_000)
        make_uncertain(rig, A)
        for _ in range(2):
            await rig.filters.run_once()
        assert rig.filters.outcomes["no_room"] == 1
        assert rig.held.uncertain_lists() == [A]
        reads = count_reads(rig)
        await rig.filters.run_once()
        assert reads == [], "there is no more room than before"
        monkeypatch.setattr(PairFilters, "_budget_bytes", 1 << 20)
        await rig.filters.run_once()
        assert rig.filters.outcomes["rescanned"] == 1


async def test_a_filter_needs_room_for_one_of_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with filtered() as rig:
        await rig.near.write(*(AssocDelete(A, FOLLOWS, FAR + place) for place in range(12)))
        assert rig.held.is_loose
        before = rig.held
        monkeypatch.setattr(PairFilters, "_budget_bytes", rig.filters.held().size_bytes + 500)
        await rig.filters.run_once()
        assert rig.held is not before


def make_uncertain(rig: Filtered, *id1s: int) -> None:
    """Report a newer version of each list without its edges; the database has it."""
    for id1 in id1s:
        version = rig.held.version(id1) + 1
        key = ListKey(id1, FOLLOWS)
        rig.region.store.rows.lists[key] = ListRow(rig.region.store.rows.lists[key].count, version)
        rig.near.cache.apply(ListInvalidation(id1, FOLLOWS, version), 1, 0.0)


def count_reads(rig: Filtered, error: TaoError | None = None, failing: tuple[int, ...] = ()) -> list[int]:
    """Return a list that gets the number of each page that is read from now on. Pages ``failing``, or all of them,
    fail with the error."""
    reads: list[int] = []

    async def read() -> None:
        reads.append(len(reads) + 1)
        if error is not None and (not failing or reads[-1] in failing):
            raise error

    rig.region.store.before_read = read
    return reads


async def test_a_change_that_does_not_follow_makes_its_list_uncertain() -> None:
    async with filtered() as rig:
        place, before = rig.place, make_version(1, 3)
        store_list(rig.region.store, B, 4, 5)
        (first,) = await rig.near.write(AssocAdd(B, FOLLOWS, NEW, 99, b""))
        assert first is not None
        assert rig.held.version(B) > before
        assert rig.held.uncertain_lists() == [B], "version 4 and 5 were never reported"
        assert not place.denies(B, FOLLOWS, FAR + 3, 0)


async def test_filter_that_missed_messages_is_discarded() -> None:
    async with filtered() as rig:
        rig.near.cache.bump_shard(0)
        assert rig.place.pairs.get(FOLLOWS) is None
        store_list(rig.region.store, B, 3, 4)
        assert await rig.exists(B, FAR + 2)


async def test_bulk_invalidation_of_the_type_discards_the_filter_and_a_build_under_way() -> None:
    async with filtered() as rig:
        build = rig.place.begin_pairs(FOLLOWS)
        rig.near.cache.apply(ShardInvalidation(0, (), (FOLLOWS,)), 1, 0.0)
        assert rig.place.pairs.get(FOLLOWS) is None
        assert not rig.place.finish_pairs(build, 0.0)


async def test_a_promotion_discards_the_filter() -> None:
    async with filtered() as rig:
        rig.near.cache.open_shard(0, 2)
        assert rig.place.pairs.get(FOLLOWS) is None


async def test_a_page_of_another_version_epoch_is_refused() -> None:
    async with filtered(built=False) as rig:
        rig.region.store.shards[0] = msgspec.structs.replace(rig.region.store.shards[0], version_epoch=2)
        await rig.filters.run_once()
        assert rig.place.pairs.get(FOLLOWS) is None
        assert rig.filters.outcomes["given_up"] >= 1


async def test_a_write_while_the_filter_is_built_is_in_it() -> None:
    async with filtered(built=False) as rig:
        gate = Gate()
        rig.region.store.after_read = gate.pass_through
        building = asyncio.ensure_future(rig.filters.run_once())
        await gate.arrived.wait()
        await rig.region.leader.write(AssocAdd(NEW, FOLLOWS, B, 99, b""))
        await until(lambda: rig.place.floors.get(NEW, FOLLOWS))
        gate.open()
        await building
        assert not rig.denies(NEW, B)
        assert rig.denies(NEW, A)
        assert not rig.held.uncertain_lists()


async def test_a_message_that_came_before_its_row_is_visible_leaves_its_list_uncertain() -> None:
    """The follower knows version 4 from before the build, and the replica shows version 3. No message comes again."""
    async with filtered(built=False) as rig:
        for version, id1 in ((4, B), (1, NEW)):
            rig.near.cache.apply(ListInvalidation(id1, FOLLOWS, make_version(1, version)), 1, 0.0)
        await rig.filters.run_once()
        assert sorted(rig.held.uncertain_lists()) == [B, NEW]
        assert rig.denies(A, NEW)


async def test_what_only_the_leader_knows_leaves_its_list_uncertain() -> None:
    """The leader heard of versions before this follower subscribed; its replica does not show them yet."""
    async with filtered(built=False) as rig:
        for version, id1 in ((4, B), (1, NEW)):
            message = ListInvalidation(id1, FOLLOWS, make_version(1, version))
            rig.region.leader.cache.apply(message, 1, rig.region.leader.clock.monotonic())
        await rig.filters.run_once()
        assert sorted(rig.held.uncertain_lists()) == [B, NEW]


async def test_a_leader_that_has_forgotten_floors_gives_no_pages() -> None:
    async with filtered(built=False) as rig:
        shard = rig.region.leader.cache.filter_shard(0)
        assert shard is not None
        shard.floors.overflowed_until = rig.region.leader.clock.monotonic() + 60
        await rig.filters.run_once()
        assert rig.place.pairs.get(FOLLOWS) is None


async def test_a_scan_that_fails_is_given_up_and_begins_again_later() -> None:
    async with filtered(replace(FAST, retry_seconds=1e9), built=False) as rig:
        failing = rig.region.store

        async def fail() -> None:
            raise Unavailable("the database is away")

        failing.before_read, healthy = fail, failing.before_read
        await rig.filters.run_once()
        failing.before_read = healthy
        await rig.filters.run_once()
        assert rig.place.pairs.get(FOLLOWS) is None, "not before the pause"
        rig.filters._not_before.clear()
        await rig.filters.run_once()
        assert rig.denies(B, NEW)


async def test_the_wait_doubles_with_each_build_that_changes_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.cache.pair_filters._MAX_KEPT_CHANGES", 0)
    async with filtered(replace(FAST, retry_seconds=30.0), built=False) as rig:

        async def change() -> None:
            rig.near.cache.apply(ListInvalidation(NEW, FOLLOWS, make_version(1, 1)), 1, 0.0)

        rig.region.store.before_read = change
        rig.filters._is_subscribed = lambda shard: shard == 0  # type: ignore[misc]
        scanned = (0, FOLLOWS, 0)
        waits = []
        for given_up in range(1, 10):
            rig.filters._not_before.clear()
            await rig.filters.run_once()
            assert rig.filters.outcomes["given_up"] == given_up
            waits.append(rig.filters._wait_seconds(scanned))
        assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
        count_reads(rig)
        rig.filters._not_before.clear()
        await rig.filters.run_once()
        assert rig.filters.outcomes["built"] == 1
        assert rig.filters._wait_seconds(scanned) == 30


async def test_filters_stay_within_their_budget() -> None:
    async with filtered(replace(FAST, max_mb=0), built=False) as rig:
        await rig.filters.run_once()
        assert rig.filters.outcomes == {"built": 0, "given_up": 0, "no_room": 3, "discarded": 0, "rescanned": 0}
        await rig.filters.run_once()
        assert rig.filters.outcomes["no_room"] == 3, "there is no more room than before"
        assert rig.filters.held().number == 0


async def test_a_filter_that_has_outgrown_the_budget_is_discarded() -> None:
    async with filtered() as rig:
        object.__setattr__(rig.filters._settings, "max_mb", 0)
        try:
            await rig.filters.run_once()
        finally:
            object.__setattr__(rig.filters._settings, "max_mb", FAST.max_mb or 256)
        assert rig.place.pairs.get(FOLLOWS) is None


async def test_many_additions_or_deletions_have_the_filter_built_again() -> None:
    async with filtered() as rig:
        await rig.near.write(*(AssocDelete(A, FOLLOWS, FAR + place) for place in range(12)))
        assert rig.held.is_loose
        before = rig.held
        await rig.filters.run_once()
        assert rig.held is not before
        assert rig.denies(A, FAR + 3)
        await rig.near.write(*(AssocAdd(A, FOLLOWS, FAR + place, 1, b"") for place in range(100, 300)))
        assert rig.held.is_loose
        assert not any(rig.denies(A, FAR + place) for place in range(100, 300)), "a full filter denies less, not more"


async def test_too_many_uncertain_lists_have_the_filter_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.cache.pair_filters._MAX_UNCERTAIN", 3)
    async with filtered(replace(FAST, retry_seconds=1e9)) as rig:
        for id1 in range(A, A + 4):
            rig.near.cache.apply(ListInvalidation(id1, FOLLOWS, make_version(1, 9)), 1, 0.0)
        await rig.filters.run_once()
        assert rig.place.pairs.get(FOLLOWS) is None
        assert rig.filters.outcomes["discarded"] == 1


async def test_a_type_without_the_declaration_has_no_filter_and_one_that_loses_it_loses_its_filter() -> None:
    async with filtered() as rig:
        rig.near.configuration.schema = SCHEMA
        await rig.filters.run_once()
        assert rig.filters.held().number == 0


async def test_the_metrics_can_be_collected() -> None:
    async with filtered() as rig:
        metrics = Metrics(role="follower", server="near-1")
        rig.filters.register(metrics)
        assert not await rig.exists(B, NEW)
        text = metrics.render().decode()
        assert 'tao_pair_filter_builds_total{outcome="built"' in text
        assert rig.filters.summary()["denials"] == 1
