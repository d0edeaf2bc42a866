"""The events that a server remembers, in both implementations: each by itself, and both together, event for event."""

from __future__ import annotations

import gc
import importlib
import importlib.util
from itertools import count
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tao.cache.key_recorder import EVICTED, FILL_BEGUN
from tao.cache.outcomes import Applied, Stored
from tao.model.ids import SHARD_SHIFT
from tao.observability import key_events_python
from tests.rigs.effort import examples

COMPILED = "tao.observability.key_events_core"
HAS_COMPILED = importlib.util.find_spec(COMPILED) is not None
needs_compiled = pytest.mark.skipif(not HAS_COMPILED, reason="no compiled core in this environment")
LARGEST = (1 << 63) - 1
ATYPES = st.one_of(st.integers(0, 2), st.just((1 << 32) - 1))
KEYS = st.sampled_from([1, 2, 1 << SHARD_SHIFT, LARGEST])
SHARDS = st.sampled_from([0, 1, LARGEST >> SHARD_SHIFT])
EVENTS = st.sampled_from([FILL_BEGUN, EVICTED, Applied.IGNORED, Stored.STORED])
VERSIONS = st.one_of(st.integers(0, 3), st.just((1 << 64) - 1))
CAUSES = st.one_of(st.just(""), st.text())


@pytest.fixture(params=["tao.observability.key_events_python", pytest.param(COMPILED, marks=needs_compiled)])
def core(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def compiled() -> Any:  # `Any`: the compiled module has the twin's interface and no common type
    return importlib.import_module(COMPILED)


def make(core: Any, most_of_keys: int = 1_000, most_of_shards: int = 10) -> Any:
    return core.KeyEvents(most_of_keys, most_of_shards, map(float, count(1)).__next__)


def test_events_of_a_key_and_its_shard_come_in_their_order_with_their_causes(core: ModuleType) -> None:
    log = make(core)
    log.record_shard(1, "opened", 7)
    log.cause = "delivery"
    log.record_key(1 << SHARD_SHIFT, 5, Applied.APPLIED, 8)
    log.cause = ""
    log.record_key(1 << SHARD_SHIFT, 0, FILL_BEGUN, 8)
    log.record_shard(2, "opened", 7)
    log.record_shard(1, "closed", 0)
    assert log.events_of(1 << SHARD_SHIFT, 5) == [
        (1.0, "opened", 7, "", True),
        (2.0, "applied", 8, "delivery", False),
        (5.0, "closed", 0, "", True),
    ]


def test_events_may_be_recorded_by_a_finalizer_while_others_are_searched(core: ModuleType) -> None:
    """The log grows meanwhile, so it moves to another place in memory."""
    log = make(core, 1_000_000)
    for version in range(4_096):
        log.record_key(1, 0, FILL_BEGUN, version)
    finalized: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            finalized.append(1)
            for version in range(4_096):
                log.record_key(2, 0, EVICTED, version)

    before = gc.get_threshold()
    gc.collect()
    Cycle()
    gc.set_threshold(300)
    try:
        found = log.events_of(1, 0)
    finally:
        gc.set_threshold(*before)
    assert finalized
    assert found == [(float(version + 1), FILL_BEGUN, version, "", False) for version in range(4_096)]


@pytest.mark.parametrize("most", [1, 2, 64, 65, 200])
def test_the_newest_events_are_remembered_and_no_more_than_the_bound(core: ModuleType, most: int) -> None:
    log = make(core, most, 1)
    for version in range(2 * most + 1):
        assert log.complete_since() == (None if version < most else version - most + 1.0)
        log.record_key(1, 0, FILL_BEGUN, version)
        assert log.of_keys == min(most, version + 1)
    assert [version for _, _, version, _, _ in log.events_of(1, 0)] == list(range(most + 1, 2 * most + 1))
    log.record_shard(0, "opened", 1)
    log.record_shard(0, "closed", 2)
    assert log.of_shards == 1
    assert [event for _, event, _, _, of_shard in log.events_of(2, 0) if of_shard] == ["closed"]


def test_a_log_without_room_remembers_nothing(core: ModuleType) -> None:
    log = make(core, 0, 0)
    log.record_key(1, 0, FILL_BEGUN, 1)
    log.record_shard(0, "opened", 1)
    assert (log.of_keys, log.of_shards, log.events_of(1, 0)) == (0, 0, [])
    assert log.complete_since() == 3.0
    with pytest.raises(ValueError, match=r"negative|0 events"):
        make(core, -1)


def test_what_an_event_names_lives_as_long_as_the_event(core: ModuleType) -> None:
    log = make(core, 2)
    for number in range(5):
        log.cause = f"cause {number}"
        log.record_key(1, 0, f"event {number}", number)
    assert [(event, cause) for _, event, _, cause, _ in log.events_of(1, 0)] == [
        ("event 3", "cause 3"),
        ("event 4", "cause 4"),
    ]


@needs_compiled
@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(0, 80),
    st.integers(0, 3),
    st.lists(
        st.one_of(
            st.tuples(st.just("record_key"), KEYS, ATYPES, EVENTS, VERSIONS),
            st.tuples(st.just("record_shard"), SHARDS, EVENTS, VERSIONS),
            st.tuples(st.just("because"), CAUSES),
        ),
        max_size=200,
    ),
)
def test_both_remember_the_same(most_of_keys: int, most_of_shards: int, steps: list[tuple[Any, ...]]) -> None:
    both = [make(each, most_of_keys, most_of_shards) for each in (key_events_python, compiled())]
    for name, *arguments in steps:
        for log in both:
            if name == "because":
                (log.cause,) = arguments
            else:
                getattr(log, name)(*arguments)
    first, second = both
    assert (first.of_keys, first.of_shards) == (second.of_keys, second.of_shards)
    assert first.complete_since() == second.complete_since()
    for key in (1, 2, 1 << SHARD_SHIFT, LARGEST):
        for atype in (0, 1, 2, (1 << 32) - 1):
            assert first.events_of(key, atype) == second.events_of(key, atype)
