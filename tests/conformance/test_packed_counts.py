"""Packed counts, in both implementations: each against a dictionary, and against each other, eviction for eviction."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tao.cache import packed_python
from tao.model.graph import decode_count, encode_count
from tests.rigs.effort import examples
from tests.rigs.versions import make_version

COMPILED = "tao.cache.packed_core"
HAS_COMPILED = importlib.util.find_spec(COMPILED) is not None


def twins() -> list[Any]:  # `Any`: the compiled module has the twin's interface and no common type
    missing = pytest.mark.skipif(not HAS_COMPILED, reason="no compiled core in this environment")
    return [pytest.param("tao.cache.packed_python"), pytest.param(COMPILED, marks=missing)]


@pytest.fixture(params=twins())
def core(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def value(count: int, counter: int = 1, epoch: int = 1) -> bytes:
    return encode_count(make_version(epoch, counter) if counter else 0, count)


def test_a_count_comes_back_with_its_version(core: ModuleType) -> None:
    counts = core.PackedStore(64, 64).open(3, {})
    for key, held in enumerate(
        [
            value(0, 0),
            value(0, 7, 1),
            value(0, 4095, 3),
            value(0, 4096, 3),
            value(5, 0),
            value(5, 7, 2),
            value((1 << 22) - 1, (1 << 22) - 1, 1),
        ]
    ):
        assert counts.put(key, held) == 1
        assert counts.get(key) == counts.peek(key) == held
    assert counts.live == 7


def test_what_does_not_fit_is_refused_and_what_was_held_is_gone(core: ModuleType) -> None:
    counts = core.PackedStore(64, 64).open(17, {})
    for wrong in (
        value(1 << 22, 1, 17),
        value(1, 1 << 22, 17),
        value(1, 1, 1),
        value(1, 1, 18),
        encode_count(make_version(17, 0), 1),
        encode_count(make_version(1, 1), (1 << 64) - 1),
    ):
        assert counts.put(5, value(2, 2, 17)) == 1
        assert counts.put(5, wrong) == 0
        assert counts.get(5) is None
        assert counts.live == 0


def test_a_value_of_another_size_is_an_error(core: ModuleType) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        core.PackedStore(8, 8).open(1, {}).put(1, b"short")


def test_what_is_kept_elsewhere_is_found_there(core: ModuleType) -> None:
    wide = {5: value(1 << 30)}
    counts = core.PackedStore(8, 8).open(1, wide)
    assert counts.get(5) == counts.peek(5) == value(1 << 30)
    assert counts.get(6) is None


def test_an_entry_takes_14_bytes_and_one_without_edges_10_when_the_tables_are_full(core: ModuleType) -> None:
    for number, count, entry_bytes in ((0, 3, 14), (1, 0, 10)):
        store = core.PackedStore(0 if number else 1024, 1024 if number else 0)
        counts = store.open(1, {})
        for key in range(6 * 1024 * 8):
            counts.put(key * 64, value(count))
        assert store.size_bytes == 1024 * 8 * entry_bytes
        assert store.size_bytes <= store.entries * entry_bytes * 1.02
        assert store.entries == counts.live


def test_the_least_recently_used_of_a_bucket_leaves_and_is_named(core: ModuleType) -> None:
    store = core.PackedStore(8, 0)
    counts = store.open(1, {})
    kept = []
    for key in range(1, 1000):
        left = counts.put(key, value(key, key))
        if left == 2:
            number, gone, version = store.displaced
            assert (number, version) == (counts.number, make_version(1, gone))
            assert counts.peek(gone) is None
            assert gone != 1
        assert counts.get(1) == value(1, 1)
        kept.append(key)
    assert store.entries == counts.live == 64


def test_growing_loses_next_to_nothing(core: ModuleType) -> None:
    store = core.PackedStore(1 << 14, 1 << 14)
    views = [store.open(1, {}) for _ in range(16)]
    for place in range(1_000):
        for shard, view in enumerate(views):
            view.put((shard << 47) + place * 64, value(place))
    assert sum(view.live for view in views) > 15_500
    assert store.size_bytes < 16_000 * 14 / 0.34


def test_a_closed_number_is_forgotten_at_once_and_swept_in_steps(core: ModuleType) -> None:
    store = core.PackedStore(512, 512)
    one, two = store.open(1, {}), store.open(1, {})
    for key in range(500):
        one.put(key, value(key))
        two.put(key, value(key + 1))
    number = one.number
    one.close()
    assert (one.get(3), one.live, one.number) == (None, 0, 0)
    assert one.put(3, value(3)) == 0
    other = store.open(1, {})
    assert other.number not in (number, two.number)
    steps = 1
    while store.sweep(8):
        steps += 1
    assert steps > 10
    assert store.entries == two.live
    assert [two.peek(key) for key in range(0, 500, 50)] == [value(key + 1) for key in range(0, 500, 50)]
    assert store.open(1, {}).number == number
    two.close()
    while store.sweep(100):
        pass
    assert store.size_bytes == 0


def test_numbers_run_out_without_harm() -> None:
    store = packed_python.PackedStore(8, 8)
    store._holders.extend([None] * packed_python.MAX_NUMBER)
    counts = store.open(1, {})
    assert (counts.number, counts.put(1, value(1)), counts.get(1), counts.drop(1)) == (0, 0, None, False)


def test_all_keys_of_a_number_are_found_by_scanning(core: ModuleType) -> None:
    store = core.PackedStore(512, 512)
    one, two = store.open(1, {}), store.open(1, {})
    for key in range(300):
        one.put(key, value(key % 3))
        two.put(key, value(1))
    found: list[int] = []
    place = 0
    while place >= 0:
        keys, place = one.scan(place, 10)
        found += keys
    assert sorted(found) == [key for key in range(300) if one.peek(key)]


def test_a_scan_of_the_last_bucket_ends_where_no_short_buckets_follow(core: ModuleType) -> None:
    counts = core.PackedStore(8, 0).open(1, {})
    counts.put(7 << 47, value(1))
    assert counts.scan(7, 1)[1] == -1


keys = st.integers(0, 40).map(lambda place: (7 << 47) + place * 64)
versions = st.sampled_from([(1, 0), (1, 1), (1, 5000), (2, 9), (3, 1 << 22), (20, 3)])


@pytest.mark.skipif(not HAS_COMPILED, reason="no compiled core in this environment")
class TwinsMachine(RuleBasedStateMachine):
    @initialize(buckets=st.sampled_from([0, 8, 16]), short=st.sampled_from([0, 8]))
    def start(self, buckets: int, short: int) -> None:
        self.stores = [importlib.import_module(COMPILED).PackedStore(buckets, short)]
        self.stores.append(packed_python.PackedStore(buckets, short))
        self.views: list[list[Any]] = []
        self.known: list[dict[int, bytes]] = []

    def alike(self, results: list[Any]) -> Any:
        assert results[0] == results[1]
        return results[0]

    @rule(epoch=st.sampled_from([1, 3, 20]))
    def open(self, epoch: int) -> None:
        if len(self.views) < 6:
            self.views.append([store.open(epoch, {}) for store in self.stores])
            self.known.append({})
            self.alike([view.number for view in self.views[-1]])

    @precondition(lambda self: self.views)
    @rule(at=st.integers(0, 5), key=keys, version=versions, count=st.sampled_from([0, 1, 7, 1 << 22]))
    def put(self, at: int, key: int, version: tuple[int, int], count: int) -> None:
        at %= len(self.views)
        encoded = value(count, version[1], version[0])
        outcome = self.alike([view.put(key, encoded) for view in self.views[at]])
        self.known[at].pop(key, None)
        if outcome:
            self.known[at][key] = encoded
        if outcome == 2:
            number, gone, left = self.alike([store.displaced for store in self.stores])
            (other,) = [i for i, views in enumerate(self.views) if views[0].number == number]
            assert decode_count(self.known[other].pop((7 << 47) + gone))[0] == left

    @precondition(lambda self: self.views)
    @rule(at=st.integers(0, 5), key=keys, use=st.booleans())
    def look(self, at: int, key: int, use: bool) -> None:
        at %= len(self.views)
        found = self.alike([view.get(key) if use else view.peek(key) for view in self.views[at]])
        assert found == self.known[at].get(key)

    @precondition(lambda self: self.views)
    @rule(at=st.integers(0, 5), key=keys)
    def drop(self, at: int, key: int) -> None:
        at %= len(self.views)
        dropped = self.alike([view.drop(key) for view in self.views[at]])
        assert dropped == (self.known[at].pop(key, None) is not None)

    @precondition(lambda self: self.views)
    @rule(at=st.integers(0, 5))
    def close(self, at: int) -> None:
        at %= len(self.views)
        for view in self.views.pop(at):
            view.close()
        self.known.pop(at)

    @rule(buckets=st.integers(1, 12))
    def sweep(self, buckets: int) -> None:
        self.alike([store.sweep(buckets) for store in self.stores])

    @precondition(lambda self: self.views)
    @rule(at=st.integers(0, 5), place=st.integers(0, 30), buckets=st.integers(1, 40))
    def scan(self, at: int, place: int, buckets: int) -> None:
        at %= len(self.views)
        found, _ = self.alike([view.scan(place, buckets) for view in self.views[at]])
        assert {(7 << 47) + key for key in found} <= self.known[at].keys()

    @invariant()
    def sums_agree(self) -> None:
        if hasattr(self, "stores"):
            self.alike([store.size_bytes for store in self.stores])
            self.alike([store.entries for store in self.stores])
            for views, known in zip(self.views, self.known, strict=True):
                assert self.alike([view.live for view in views]) == len(known)


TestTwins = TwinsMachine.TestCase
TestTwins.settings = settings(
    max_examples=examples(100), stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
