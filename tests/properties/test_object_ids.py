"""No id is given out twice, whatever owners, clocks, pauses and promotions do: `IdSequence` against a list of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from tao.model.errors import IdNotReserved
from tao.model.ids import (
    MAX_RESERVED_IDS,
    PROMOTION_AHEAD_MS,
    RESERVED_AHEAD_MS,
    IdSequence,
    make_id,
    next_reserved,
    shard_of,
    unix_ms_of,
)

SHARD = 7
START_MS = 1_750_000_000_000
SKEW_MS = 10_000
"""Clocks are wrong by as much: a promotion's margin has to cover it."""


@dataclass
class Owner:
    """One ownership. An owner that lost it may go on giving out ids for a while, but can raise nothing any more."""

    ids: IdSequence
    clock_off_ms: int
    admitted: list[int] = field(default_factory=list)


class World:
    """A shard, its owners and its database, which keeps all that was ever stored: a lossy promotion goes back to it."""

    def __init__(self) -> None:
        self.now = START_MS
        self.stored: list[int | None] = [None]
        self.owners: list[Owner] = []
        self.promoted = 0
        self.given_out: list[tuple[int, int]] = []
        self.begin(0)

    def begin(self, clock_off_ms: int) -> None:
        """Let a new owner take the shard."""
        now = self.now + clock_off_ms
        stored = self.stored[-1]
        owner = Owner(IdSequence(SHARD, now + RESERVED_AHEAD_MS if stored is None else stored), clock_off_ms)
        if stored is None:
            self.stored.append(owner.ids.reserved_unix_ms)
        self.owners.append(owner)

    def raise_time(self) -> None:
        """Let the owner commit a higher time. Only the newest can."""
        owner = self.owners[-1]
        stored = self.stored[-1]
        assert stored is not None
        raised = next_reserved(stored, self.now + owner.clock_off_ms)
        assert raised > stored
        self.stored.append(raised)
        owner.ids.reserved_unix_ms = raised

    def take(self, owner: Owner, count: int) -> None:
        now = self.now + owner.clock_off_ms
        first = owner.ids.take(count, now)
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

    def lose_master(self, back: int) -> None:
        """Promote a server that lacks the last commits since the promotion before."""
        left = self.stored[max(self.promoted, len(self.stored) - 1 - back)]
        until = self.now + PROMOTION_AHEAD_MS
        self.promoted = len(self.stored)
        self.stored.append(until if left is None else max(left + RESERVED_AHEAD_MS, until))


offsets = st.integers(-SKEW_MS, SKEW_MS)
acts = st.one_of(
    st.tuples(st.just("time passes"), st.integers(0, 90_000)),
    st.tuples(st.just("clock steps"), offsets),
    st.tuples(st.just("takeover"), offsets),
    st.tuples(st.just("take"), st.integers(1, MAX_RESERVED_IDS)),
    st.tuples(st.just("take of a former owner"), st.integers(1, MAX_RESERVED_IDS)),
    st.tuples(st.just("admit"), st.integers(-90_000, 90_000)),
    st.tuples(st.just("admit one given out"), st.integers(0, 1_000)),
    st.tuples(st.just("master lost"), st.integers(0, 6)),
)


_LATER = [("time passes", 90_000), ("time passes", 90_000)]


@given(st.lists(acts, max_size=40))
@example([*_LATER, ("take", 10_000), ("master lost", 6), ("take", 10_000)])
@example([*_LATER, ("take", 1), ("takeover", 0), ("take", 10_000), ("master lost", 6), ("take", 10_000)])
@example([*_LATER, ("admit", 0), ("take", 1)])
def test_no_id_is_given_out_twice(script: list[tuple[str, int]]) -> None:
    world = World()
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
            case "take of a former owner":
                world.take(world.owners[value % len(world.owners)], value)
            case "admit":
                world.admit(make_id(SHARD, world.now + value, value % 64))
            case "admit one given out" if world.given_out:
                first, last = world.given_out[value % len(world.given_out)]
                world.admit(first + value % (last - first + 1))
            case "master lost":
                world.lose_master(value)
                world.begin(0)


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
