"""No id is given out twice, whatever owners, clocks, pauses, promotions and restores do: `IdSequence` against a list of
all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tao.model.errors import IdNotReserved, Overloaded
from tao.model.ids import (
    CLOCKS_DIFFER_MS,
    FARTHEST_AHEAD_MS,
    MAX_RESERVED_IDS,
    RESERVED_AHEAD_MS,
    SEQUENCE_PER_MS,
    STEP_MS,
    WINDOW_MS,
    IdSequence,
    LostTimes,
    make_id,
    next_reserved,
    shard_of,
    unix_ms_of,
)

SHARD = 7
START_MS = 1_750_000_000_000
assert START_MS % WINDOW_MS == 0
SKEW_MS = CLOCKS_DIFFER_MS // 2
"""Each clock is wrong by as much at most."""
LAPSES = 30
"""Reservations in a burst, each of a whole second of ids."""


class Stored(NamedTuple):
    """What the shard's database has after a commit: the reserved time, if there is one, and the version epoch."""

    reserved_unix_ms: int | None
    epoch: int


@dataclass
class Owner:
    """One ownership. An owner that lost it may go on giving out ids for a while, but can raise nothing any more."""

    ids: IdSequence
    clock_off_ms: int
    admitted: list[int] = field(default_factory=list)


class World:
    """A shard, its owners and its database, which keeps all that was ever stored: promotions and restores go back."""

    def __init__(self, phase_ms: int) -> None:
        self.now = START_MS + phase_ms
        self.stored: list[Stored] = [Stored(None, 1)]
        self.owners: list[Owner] = []
        self.given_out: list[tuple[int, int]] = []
        self.begin(0)

    def begin(self, clock_off_ms: int) -> None:
        """Let a new owner take the shard."""
        now = self.now + clock_off_ms
        time, epoch = self.stored[-1]
        owner = Owner(IdSequence(SHARD, now + RESERVED_AHEAD_MS if time is None else time), clock_off_ms)
        if time is None:
            self.stored.append(Stored(owner.ids.reserved_unix_ms, epoch))
        self.owners.append(owner)

    def raise_time(self) -> None:
        """Let the owner commit a higher time. Only the newest can."""
        owner = self.owners[-1]
        time, epoch = self.stored[-1]
        assert time is not None
        now = self.now + owner.clock_off_ms
        raised = next_reserved(time, now)
        assert raised is not None, "nothing is asked for that would be refused"
        assert time < raised < now + FARTHEST_AHEAD_MS + WINDOW_MS
        self.stored.append(Stored(raised, epoch))
        owner.ids.reserved_unix_ms = raised

    def take(self, owner: Owner, count: int) -> None:
        now = self.now + owner.clock_off_ms
        try:
            first = owner.ids.take(count, now)
        except Overloaded:
            return
        if first is None and owner is self.owners[-1]:
            self.raise_time()
            first = owner.ids.take(count, now)
            assert first is not None, "one commit is enough for any reservation"
        if first is None:
            return
        last = first + count - 1
        assert shard_of(first) == shard_of(last) == SHARD
        assert all(last < begin or end < first for begin, end in self.given_out), "given out twice"
        assert not any(first <= each <= last for other in self.owners for each in other.admitted)
        self.given_out.append((first, last))

    def admit(self, object_id: int) -> None:
        owner = self.owners[-1]
        now = self.now + owner.clock_off_ms
        try:
            if not owner.ids.admit(object_id, now):
                self.raise_time()
                assert owner.ids.admit(object_id, now)
        except IdNotReserved:
            assert unix_ms_of(object_id) > now
            assert not any(begin <= object_id <= end for begin, end in self.given_out), "it was given out"
            return
        if not any(begin <= object_id <= end for begin, end in self.given_out):
            # Former owners are over: one that does not know it may still hold this time.
            self.owners = [owner]
            owner.admitted.append(object_id)

    def go_back(self, back: int, clock_off_ms: int, *, restored: bool) -> None:
        """Go on with a database that lacks the last commits: a replica's, of which the topology says how many epochs
        there were, or a backup's."""
        time, epoch = self.stored[max(0, len(self.stored) - 1 - back)]
        lost, known_epoch = LostTimes.at(self.now + clock_off_ms), self.stored[-1].epoch
        begin = lost.begin(time or 0, lacks_epoch=restored or epoch < known_epoch)
        self.stored.append(Stored(begin, known_epoch + 1))


offsets = st.integers(-SKEW_MS, SKEW_MS)
phases = st.integers(0, WINDOW_MS - 1)
"""Where in a window everything begins."""
acts = st.one_of(
    st.tuples(st.just("time passes"), st.integers(0, 90_000)),
    st.tuples(st.just("clock steps"), offsets),
    st.tuples(st.just("takeover"), offsets),
    st.tuples(st.just("take"), st.integers(1, MAX_RESERVED_IDS)),
    st.tuples(st.just("burst"), st.integers(1, LAPSES)),
    st.tuples(st.just("take of a former owner"), st.integers(1, MAX_RESERVED_IDS)),
    st.tuples(st.just("admit"), st.integers(-90_000, 90_000)),
    st.tuples(st.just("admit one given out"), st.integers(0, 1_000)),
    st.tuples(st.just("master lost"), st.integers(0, 99)),
    st.tuples(st.just("restored"), st.integers(0, 99)),
)


_LATER = [("time passes", 90_000), ("time passes", 90_000)]
_BURSTS = [("burst", LAPSES)] * 8
_ALL = 3 * 1_000
"""As many commits are lost: all that there were."""
_SOON = ("time passes", CLOCKS_DIFFER_MS + WINDOW_MS + STEP_MS)


@given(st.lists(acts, max_size=60), phases)
@example([*_LATER, ("take", 10_000), ("master lost", 6), ("take", 10_000)], 0)
@example([*_LATER, ("take", 1), ("takeover", 0), ("take", 10_000), ("master lost", 6), ("take", 10_000)], 0)
@example([*_LATER, ("admit", 0), ("take", 1)], 0)
# A restore of a backup that lacks a promotion, another restore, or several bursts after one.
@example([*_LATER, ("take", 1), ("master lost", 0), ("take", 1), ("restored", _ALL), _SOON, *_BURSTS], 0)
@example([*_LATER, ("restored", _ALL), _SOON, *_BURSTS, ("restored", _ALL), _SOON, *_BURSTS], 0)
@example([*_LATER, *[("master lost", 0), *_BURSTS] * 4, ("restored", _ALL), _SOON, *_BURSTS], 0)
# A promotion that lacks the promotion before, minutes of reservations, or seconds within a window.
@example([*_LATER, ("master lost", 0), *_BURSTS, ("master lost", _ALL), _SOON, *_BURSTS], 0)
@example([*_LATER, ("take", 1), *_BURSTS, *_BURSTS, ("master lost", _ALL), *_BURSTS], 0)
@example([*_LATER, ("take", 1), ("master lost", 0), *_BURSTS, ("master lost", 3 * 10), *_BURSTS], 0)
# The owner's clock is ahead and the server's is behind, so that a window lies between the two: the margin is needed.
@example([("takeover", SKEW_MS), ("burst", 9 * LAPSES), ("master lost", _ALL), ("burst", 9 * LAPSES)], 17_000)
@example([("restored", _ALL), ("time passes", 3_000), *_BURSTS, ("restored", _ALL), _SOON, *_BURSTS], 14_000)
def test_no_id_is_given_out_twice(script: list[tuple[str, int]], phase_ms: int) -> None:
    world = World(phase_ms)
    for act, value in script:
        match act:
            case "time passes":
                world.now += value
            case "clock steps":
                world.owners[-1].clock_off_ms = value
            case "takeover":
                world.begin(value)
            case "take":
                world.take(world.owners[-1], value)
            case "burst":
                for _ in range(value):
                    world.take(world.owners[-1], (STEP_MS - 1) * SEQUENCE_PER_MS)
            case "take of a former owner":
                world.take(world.owners[value % len(world.owners)], value)
            case "admit":
                world.admit(make_id(SHARD, world.now + value, value % 64))
            case "admit one given out" if world.given_out:
                first, last = world.given_out[value % len(world.given_out)]
                world.admit(first + value % (last - first + 1))
            case "master lost" | "restored":
                # Clocks are those of the server, of the machine of the restore, and of the next owner.
                off_ms = SKEW_MS * (value % 3 - 1)
                world.go_back(value // 3, off_ms, restored=act == "restored")
                world.begin(-off_ms)


@given(phases, offsets)
def test_ids_go_on_at_once_after_a_promotion_that_lacks_only_commits(at_ms: int, off_ms: int) -> None:
    now = START_MS + at_ms
    stored = now + RESERVED_AHEAD_MS
    for _ in range(7):
        stored = LostTimes.at(now + off_ms).begin(stored, lacks_epoch=False)
        assert next_reserved(stored, now - off_ms) is not None


@given(phases, offsets, st.sampled_from([0, RESERVED_AHEAD_MS, FARTHEST_AHEAD_MS]))
def test_ids_wait_for_the_clocks_after_a_restore(at_ms: int, off_ms: int, ahead_ms: int) -> None:
    now = START_MS + at_ms
    ids = IdSequence(SHARD, LostTimes.at(now + off_ms).begin(now + ahead_ms, lacks_epoch=True))
    with pytest.raises(Overloaded, match=r"try again in [1-4]?\d s$"):
        ids.take(1, now - off_ms)
    later = now + CLOCKS_DIFFER_MS + WINDOW_MS + 2 * abs(off_ms)
    assert ids.take(1, later - off_ms) is None, "a commit gets more"


@given(st.lists(st.tuples(st.integers(-5, 200), st.integers(1, 300)), min_size=1, max_size=30))
def test_ids_grow_and_follow_the_clock(takes: list[tuple[int, int]]) -> None:
    ids = IdSequence(SHARD, START_MS)
    ids.reserved_unix_ms = START_MS + RESERVED_AHEAD_MS
    now, last = START_MS, 0
    for step, count in takes:
        now += step
        first = ids.take(count, now)
        assert first is not None
        assert first > last
        assert unix_ms_of(first) >= now
        last = first + count - 1
