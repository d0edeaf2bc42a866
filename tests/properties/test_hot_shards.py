"""The policy that clones hot shards: patient, bounded, never in circles, and only with clones of its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.errors import SettingsError
from tao.routing.hot_shards import NO_ROUNDS, CloningPolicy, ShardLoad, advise

POLICY = CloningPolicy(clone_above=100.0, give_back_below=50.0, rounds_above=2, rounds_below=3, max_copies=3)
RATES = st.floats(0, 2_000, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.lists(RATES, min_size=3, max_size=3), max_size=40), st.integers(1, 6))
def test_copies_stay_within_bounds_and_change_one_at_a_time_by_one(rates: list[list[float]], servers_up: int) -> None:
    servers, rounds = [1, 1, 1], NO_ROUNDS
    for round_rates in rates:
        loads = {shard: ShardLoad(rate, servers[shard], True) for shard, rate in enumerate(round_rates)}
        advice, rounds = advise(loads, servers_up, POLICY, rounds)
        if advice is None:
            continue
        load = loads[advice.shard]
        assert abs(advice.copies + 1 - load.servers) == 1
        assert 0 <= advice.copies <= POLICY.max_copies
        if advice.copies + 1 > load.servers:
            assert load.per_second / load.servers > POLICY.clone_above
            assert advice.copies + 1 <= servers_up
        else:
            assert load.per_second / (load.servers - 1) < POLICY.give_back_below
        servers[advice.shard] = advice.copies + 1


@settings(deadline=None)
@given(RATES)
def test_a_steady_load_comes_to_rest(rate: float) -> None:
    servers, rounds, changes = 1, NO_ROUNDS, []
    for _ in range(60):
        advice, rounds = advise({0: ShardLoad(rate, servers, True)}, 8, POLICY, rounds)
        if advice is not None:
            changes.append(advice.copies + 1 - servers)
            servers = advice.copies + 1
    assert set(changes) <= {1}, "from one server on it only rises, and never turns back"
    assert len(changes) <= POLICY.max_copies
    assert rate / servers <= POLICY.clone_above or servers == POLICY.max_copies + 1


@given(RATES, st.integers(2, 4))
def test_clones_made_by_hand_are_left_alone(rate: float, servers: int) -> None:
    rounds = NO_ROUNDS
    for _ in range(10):
        advice, rounds = advise({0: ShardLoad(rate, servers, False)}, 8, POLICY, rounds)
        assert advice is None


def test_a_burst_that_is_over_begins_anew() -> None:
    rounds = NO_ROUNDS
    for rate in (500.0, 10.0, 500.0, 10.0, 500.0):
        advice, rounds = advise({0: ShardLoad(rate, 1, True)}, 8, POLICY, rounds)
        assert advice is None
    advice, _ = advise({0: ShardLoad(500.0, 1, True)}, 8, POLICY, rounds)
    assert advice is not None
    assert (advice.shard, advice.copies) == (0, 1)


def test_the_shard_that_is_worst_comes_first() -> None:
    loads = {0: ShardLoad(300.0, 1, True), 1: ShardLoad(900.0, 2, True), 2: ShardLoad(320.0, 1, True)}
    _, rounds = advise(loads, 8, POLICY, NO_ROUNDS)
    advice, _ = advise(loads, 8, POLICY, rounds)
    assert advice is not None
    assert (advice.shard, advice.copies) == (1, 2)


def test_bounds_that_would_chase_each_other_are_refused() -> None:
    with pytest.raises(SettingsError):
        CloningPolicy(clone_above=10.0, give_back_below=6.0)
    with pytest.raises(SettingsError):
        CloningPolicy(rounds_above=0)
