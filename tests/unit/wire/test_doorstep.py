"""Peers without a credential are bounded in time, in all and per address; those that are turned away are counted."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import SettingsError
from tao.wire.doorstep import DISPLACED, LATE, LOCAL, AddressPool, Doorstep, Place, address_of, name_of
from tao.wire.settings import DoorstepSettings


class Crowd:
    """A pool on a clock of its own, and the peers that have lost their place."""

    def __init__(self, max_peers: int, max_per_address: int) -> None:
        self.now = 0.0
        self.pool = AddressPool(max_peers, max_per_address, lambda: self.now)
        self.displaced: list[tuple[str, str]] = []

    def enter(self, name: str, address: str) -> Place:
        return self.pool.enter(address, lambda reason: self.displaced.append((name, reason)))


def test_one_more_of_an_address_takes_the_place_of_its_oldest() -> None:
    crowd = Crowd(10, 2)
    for name in ("a1", "a2", "a3"):
        crowd.enter(name, "a")
    crowd.enter("b1", "b")
    assert crowd.displaced == [("a1", DISPLACED)]
    assert len(crowd.pool) == 3


def test_when_all_places_are_taken_the_address_that_has_most_loses_its_oldest() -> None:
    crowd = Crowd(4, 3)
    crowd.enter("honest", "h")
    for name in ("a1", "a2", "a3"):
        crowd.enter(name, "a")
    crowd.enter("another", "o")
    assert crowd.displaced == [("a1", DISPLACED)]
    assert len(crowd.pool) == 4


def test_a_connection_that_is_pending_for_too_long_is_late() -> None:
    crowd = Crowd(10, 10)
    crowd.enter("early", "a")
    crowd.now = 3.0
    crowd.enter("later", "a")
    crowd.now = 5.5
    crowd.pool.displace_older_than(5.0)
    assert crowd.displaced == [("early", LATE)]
    assert len(crowd.pool) == 1


def test_a_place_that_was_lost_can_be_left() -> None:
    crowd = Crowd(1, 1)
    lost = crowd.enter("a1", "a")
    kept = crowd.enter("a2", "a")
    crowd.pool.leave(lost)
    assert len(crowd.pool) == 1
    crowd.pool.leave(kept)
    assert len(crowd.pool) == 0


def test_a_crowd_that_says_nothing_displaces_nobody_who_has_spoken() -> None:
    crowd = Crowd(100, 10)
    spoken, begun = crowd.enter("spoken", "a"), crowd.enter("begun", "a")
    crowd.pool.advance(spoken)
    crowd.pool.advance(begun)
    crowd.pool.advance(begun)
    for number in range(50):
        crowd.enter(str(number), "a")
    assert [name for name, _ in crowd.displaced] == [str(number) for number in range(42)]
    crowd.pool.leave(spoken)
    crowd.pool.leave(begun)
    assert len(crowd.pool) == 8


def test_a_crowd_that_has_spoken_displaces_nobody_who_is_silent_or_whose_work_has_begun() -> None:
    crowd = Crowd(100, 9)
    begun, _silent = crowd.enter("begun", "a"), crowd.enter("silent", "a")
    crowd.pool.advance(begun)
    crowd.pool.advance(begun)
    for number in range(50):
        crowd.pool.advance(crowd.enter(str(number), "a"))
    assert [name for name, _ in crowd.displaced] == [str(number) for number in range(43)]


def test_one_that_has_spoken_is_late_like_others() -> None:
    crowd = Crowd(10, 10)
    crowd.enter("silent", "a")
    crowd.now = 3.0
    crowd.pool.advance(crowd.enter("spoken", "a"))
    crowd.now = 8.5
    crowd.pool.displace_older_than(5.0)
    assert crowd.displaced == [("silent", LATE), ("spoken", LATE)]


class Peer:
    """A peer of the naive model, in the order of their arrival at their stages."""

    def __init__(self, number: int, address: str, stage: int) -> None:
        self.number = number
        self.address = address
        self.stage = stage


class NaivePool:
    """The same decisions, by searching one list of peers in the order in which they have come to their stages."""

    def __init__(self, max_peers: int, max_per_address: int) -> None:
        self._max_peers = max_peers
        self._max_per_address = max_per_address
        self.peers: list[Peer] = []

    def at(self, address: str) -> list[Peer]:
        return [peer for peer in self.peers if peer.address == address]

    def may_be_displaced_by(self, address: str) -> list[Peer]:
        """Return whom a newcomer may displace: among addresses of one size, any may lose a place."""
        if len(self.at(address)) >= self._max_per_address:
            return [self._next_to_go(address)]
        if len(self.peers) < self._max_peers:
            return []
        sizes = {peer.address: len(self.at(peer.address)) for peer in self.peers}
        return [self._next_to_go(each) for each in sizes if sizes[each] == max(sizes.values())]

    def _next_to_go(self, address: str) -> Peer:
        stages = [[peer for peer in self.at(address) if peer.stage == stage] for stage in range(3)]
        return max(stages, key=len)[0]

    def remove(self, number: int) -> Peer | None:
        for peer in self.peers:
            if peer.number == number:
                self.peers.remove(peer)
                return peer
        return None

    def advance(self, number: int) -> None:
        if (peer := self.remove(number)) is not None:
            self.peers.append(Peer(number, peer.address, peer.stage + 1))


@given(
    st.integers(1, 9),
    st.integers(1, 7),
    st.lists(
        st.one_of(st.sampled_from("abcd"), st.tuples(st.sampled_from(["leave", "advance"]), st.integers(0, 20))),
        max_size=60,
    ),
)
def test_a_pool_is_like_a_list_that_is_searched(
    max_peers: int, max_per_address: int, steps: list[str | tuple[str, int]]
) -> None:
    crowd, model = Crowd(max_peers, max_per_address), NaivePool(max_peers, max_per_address)
    places: list[Place] = []
    for step in steps:
        if not isinstance(step, str):
            act, number = step
            if number < len(places) and act == "leave":
                crowd.pool.leave(places[number])
                model.remove(number)
            elif number < len(places) and places[number].stage < 2:
                crowd.pool.advance(places[number])
                model.advance(number)
            continue
        candidates = model.may_be_displaced_by(step)
        lost_before = len(crowd.displaced)
        places.append(crowd.enter(str(len(places)), step))
        lost = [(int(name), reason) for name, reason in crowd.displaced[lost_before:]]
        assert len(lost) == bool(candidates)
        for number, reason in lost:
            assert reason == DISPLACED
            assert number in [peer.number for peer in candidates]
            model.remove(number)
        model.peers.append(Peer(len(places) - 1, step, 0))
        assert len(crowd.pool) == len(model.peers) <= max_peers
        assert len(model.at(step)) <= max_per_address
    for place in places:
        crowd.pool.leave(place)
    assert len(crowd.pool) == 0
    assert (crowd.pool._by_address, crowd.pool._by_count) == ({}, {})


def test_all_who_are_turned_away_are_counted_and_a_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    doorstep = Doorstep("frames", DoorstepSettings(max_log_lines=3, log_interval_seconds=10.0), lambda: now)
    with caplog.at_level(logging.WARNING):
        assert [doorstep.turn_away("unauthorized") for _ in range(1_000)].count(True) == 3
        doorstep.sweep()
        assert caplog.messages == []
        now = 10.0
        doorstep.sweep()
        doorstep.sweep()
        (line,) = caplog.messages
        assert line.startswith("997 more peers without a credential were turned away at the frames port")
        assert doorstep.turn_away(LATE)
    assert doorstep.turned_away == {"unauthorized": 1_000, LATE: 1}


def test_after_a_pause_of_the_process_nobody_is_late_before_what_has_arrived_could_be_read() -> None:
    now = 0.0
    doorstep, displaced = Doorstep("admin", DoorstepSettings(), lambda: now), list[str]()
    doorstep.pending.enter("192.0.2.7", displaced.append)
    doorstep.sweep()
    now = 60.0  # the process stood still meanwhile
    doorstep.sweep()
    assert displaced == []
    now = 60.25
    doorstep.sweep()
    assert displaced == [LATE]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.7", 4711), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 4711, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 4712, 0, 0), "2001:db8:1:2::/64"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("", LOCAL),
        (None, LOCAL),
    ],
)
def test_a_connection_counts_for_its_address_or_network(peer: object, address: str) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        (("192.0.2.7", 4711), "192.0.2.7:4711"),
        (("2001:db8:1::6", 4711, 0, 0), "[2001:db8:1::6]:4711"),
        ("", "unix"),
    ],
)
def test_a_peer_is_named_in_logs_by_its_address(peer: object, name: str) -> None:
    assert name_of(peer) == name


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(DoorstepSettings)])
def test_every_bound_is_above_zero(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is 0"):
        dataclasses.replace(DoorstepSettings(), **{name: 0})
