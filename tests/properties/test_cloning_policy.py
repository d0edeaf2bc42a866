"""The policy that clones hot shards: slow to act, bounded, never oscillating, and changing only its own clones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.errors import SettingsError
from tao.routing.cloning_policy import NO_ROUNDS, CloningPolicy, ShardLoad, advise

POLICY = CloningPolicy(clone_above=100.0, give_back_below=50.0, rounds_above=2, rounds_below=3, max_copies=3)
RATES = st.floats(0, 2_000, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.lists(RATES, min_size=3, max_size=3), max_size=40), st.integers(1, 6))
def test_copies_stay_in_bounds_and_change_one_at_a_time(rates: list[list[float]], servers_up: int) -> None:
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
def test_under_a_steady_load_the_copies_stop_changing(rate: float) -> None:
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
def test_clones_made_by_an_operator_are_never_changed(rate: float, servers: int) -> None:
    rounds = NO_ROUNDS
    for _ in range(10):
        advice, rounds = advise({0: ShardLoad(rate, servers, False)}, 8, POLICY, rounds)
        assert advice is None


def test_a_burst_that_ends_restarts_the_count_of_rounds() -> None:
    rounds = NO_ROUNDS
    for rate in (500.0, 10.0, 500.0, 10.0, 500.0):
        advice, rounds = advise({0: ShardLoad(rate, 1, True)}, 8, POLICY, rounds)
        assert advice is None
    advice, _ = advise({0: ShardLoad(500.0, 1, True)}, 8, POLICY, rounds)
    assert advice is not None
    assert (advice.shard, advice.copies) == (0, 1)


def test_the_most_loaded_shard_is_cloned_first() -> None:
    loads = {0: ShardLoad(300.0, 1, True), 1: ShardLoad(900.0, 2, True), 2: ShardLoad(320.0, 1, True)}
    _, rounds = advise(loads, 8, POLICY, NO_ROUNDS)
    advice, _ = advise(loads, 8, POLICY, rounds)
    assert advice is not None
    assert (advice.shard, advice.copies) == (1, 2)


def test_bounds_that_would_add_and_remove_clones_in_turn_are_rejected() -> None:
    with pytest.raises(SettingsError):
        CloningPolicy(clone_above=10.0, give_back_below=6.0)
    with pytest.raises(SettingsError):
        CloningPolicy(rounds_above=0)
