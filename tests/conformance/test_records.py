"""What a cache remembers beside its entries, in both implementations: each by itself, and both together, slot for
slot."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tao.cache import records_python
from tests.rigs.effort import examples

COMPILED = "tao.cache.records_core"
HAS_COMPILED = importlib.util.find_spec(COMPILED) is not None
needs_compiled = pytest.mark.skipif(not HAS_COMPILED, reason="no compiled core in this environment")
LARGEST = (1 << 63) - 1
KEYS = st.one_of(st.integers(0, 40), st.integers(0, LARGEST))
ATYPES = st.one_of(st.integers(0, 2), st.integers(0, (1 << 32) - 1))
VERSIONS = st.integers(0, (1 << 64) - 1)


@pytest.fixture(params=["tao.cache.records_python", pytest.param(COMPILED, marks=needs_compiled)])
def core(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def compiled() -> Any:  # `Any`: the compiled module has the twin's interface and no common type
    return importlib.import_module(COMPILED)


def test_records_come_out_in_the_order_they_went_in_across_chunks(core: ModuleType) -> None:
    queue = core.RecordQueue()
    for key in range(20_000):
        queue.append(1, key, 0.0)
    assert [queue.pop()[1] for _ in range(15_000)] == list(range(15_000))
    queue.append(2, LARGEST, 0.0)
    assert queue.length == 5_001
    assert [queue.pop() for _ in range(5_001)][-1] == (2, LARGEST)
    with pytest.raises(IndexError):
        queue.pop()


def test_a_queue_knows_when_its_oldest_chunk_was_begun(core: ModuleType) -> None:
    queue = core.RecordQueue()
    for place in range(2 * records_python.CHUNK_RECORDS):
        queue.append(1, place, float(place))
    for _ in range(records_python.CHUNK_RECORDS):
        assert queue.began == 0.0
        queue.pop()
    queue.pop()
    assert queue.began == float(records_python.CHUNK_RECORDS)
    while queue.length:
        queue.pop()
    queue.append(1, 1, 5_000.0)
    assert queue.began == 5_000.0


def test_who_comes_back_soon_after_leaving_is_not_on_trial_again(core: ModuleType) -> None:
    ghosts, id1, atype = core.Ghosts(1 << 20), 1 << 48 | 7, 3
    ghosts.leaves(id1, atype, 1000)
    ghosts.leaves(id1, 0, 1000)
    assert ghosts.returned(id1, atype)
    assert not ghosts.returned(id1, atype)
    assert ghosts.returns == [1, 0, 0, 0]
    for place in range(1, 8):
        ghosts.leaves(id1 + place, 0, 100_000)
    assert not ghosts.returned(id1 + 100, 0)
    assert ghosts.returned(id1 + 1, 0)
    assert ghosts.returns == [1, 0, 0, 1]
    ghosts.leaves(id1 + 200, 0, 1 << 20)
    assert not ghosts.returned(id1 + 2, 0)


def test_the_highest_version_of_an_entry_is_remembered_until_another_takes_its_slot(core: ModuleType) -> None:
    versions = core.DepartedVersions(1)
    assert versions.get(5, 0) == 0
    versions.record(5, 0, 9)
    versions.record(5, 0, 8)
    assert (versions.get(5, 0), versions.get(5, 1), versions.get(6, 0)) == (9, 0, 0)
    versions.record(LARGEST, 1, (1 << 64) - 1)
    assert (versions.get(5, 0), versions.get(LARGEST, 1)) == (0, (1 << 64) - 1)
    versions.clear()
    assert versions.get(LARGEST, 1) == 0


@needs_compiled
@settings(max_examples=examples(100))
@given(st.lists(st.one_of(st.none(), st.tuples(KEYS, KEYS, st.floats(0, 1e9))), max_size=200))
def test_both_queues_hold_the_same(steps: list[tuple[int, int, float] | None]) -> None:
    queues = [records_python.RecordQueue(), compiled().RecordQueue()]
    for step in steps:
        if step is not None:
            for queue in queues:
                queue.append(*step)
        elif queues[0].length:
            assert queues[0].pop() == queues[1].pop()
        assert (queues[0].length, queues[0].began) == (queues[1].length, queues[1].began)


@needs_compiled
@settings(max_examples=examples(100))
@given(
    st.integers(0, 1 << 24),
    st.lists(st.tuples(KEYS, ATYPES, st.one_of(st.none(), st.integers(0, 1 << 22))), max_size=200),
)
def test_both_have_the_same_ghosts(budget: int, steps: list[tuple[int, int, int | None]]) -> None:
    both = [records_python.Ghosts(budget), compiled().Ghosts(budget)]
    for key, atype, size_bytes in steps:
        if size_bytes is None:
            assert both[0].returned(key, atype) == both[1].returned(key, atype)
        else:
            for ghosts in both:
                ghosts.leaves(key, atype, size_bytes)
    assert both[0].returns == both[1].returns


@needs_compiled
@settings(max_examples=examples(100))
@given(st.integers(1, 100_000), st.lists(st.tuples(KEYS, ATYPES, VERSIONS), max_size=200))
def test_both_remember_the_same_versions(slots: int, steps: list[tuple[int, int, int]]) -> None:
    both = [records_python.DepartedVersions(slots), compiled().DepartedVersions(slots)]
    for step in steps:
        for versions in both:
            versions.record(*step)
    for key, atype, _ in steps:
        assert both[0].get(key, atype) == both[1].get(key, atype)
