"""The lane scheduler under random schedules, against the list of everything that was offered, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cmp_to_key

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tao.model.errors import Overloaded
from tao.planning.lanes import LaneScheduler
from tests.rigs.effort import examples

LANES, BATCH, WAITING, OVERTAKING = 2, 3, 6, 3
SERVERS = ("db1", "db2")
KEYS = st.frozensets(st.sampled_from("abcde"), min_size=1, max_size=3)
SHARDS = st.frozensets(st.integers(1, 3), min_size=1, max_size=2)


@dataclass
class Offered:
    """A write of the model. ``sub_writes_before``: how many sub-writes had been offered to the server before it."""

    sequence_number: int
    server: str
    keys: frozenset[str]
    shards: frozenset[int]
    sub_write: bool
    sub_writes_before: int

    def goes_before(self, other: Offered) -> bool:
        """True for the earlier of two writes, except that the next `OVERTAKING` sub-writes overtake another write."""
        if self.sequence_number > other.sequence_number:
            return not other.goes_before(self)
        overtaken = other.sub_write and not self.sub_write
        return not (overtaken and other.sub_writes_before - self.sub_writes_before < OVERTAKING)


def _compare(one: Offered, other: Offered) -> int:
    return -1 if one.goes_before(other) else 1


@dataclass
class Model:
    waiting: list[Offered] = field(default_factory=list)
    open: list[list[Offered]] = field(default_factory=list)

    def held(self, server: str) -> set[str]:
        return {key for batch in self.open for each in batch if each.server == server for key in each.keys}

    def expected_batch(self, server: str) -> list[Offered] | None:
        """Return the next writes: at each step, of those that no open transaction and no write before them blocks, the
        one that goes before all others."""
        if sum(batch[0].server == server for batch in self.open) >= LANES:
            return None
        held = self.held(server)
        left = sorted(
            (each for each in self.waiting if each.server == server),
            key=cmp_to_key(_compare),
        )
        batch: list[Offered] = []
        while len(batch) < BATCH:
            ready = [
                each
                for at, each in enumerate(left)
                if not held & each.keys and not any(each.keys & earlier.keys for earlier in left[:at])
            ]
            if not ready:
                break
            batch.append(ready[0])
            left.remove(ready[0])
        return batch or None


class LanesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lanes = LaneScheduler(LANES, BATCH, WAITING, max_overtaking=OVERTAKING)
        self.model = Model()
        self.last = 0
        self.sub_writes = dict.fromkeys(SERVERS, 0)

    @rule(server=st.sampled_from(SERVERS), keys=KEYS, shards=SHARDS, sub_write=st.booleans())
    def offer(self, server: str, keys: frozenset[str], shards: frozenset[int], sub_write: bool) -> None:
        self.last += 1
        each = Offered(self.last, server, keys, shards, sub_write, self.sub_writes[server])
        full = any(self.count(shard, sub_write) >= WAITING for shard in shards)
        if full:
            with pytest.raises(Overloaded):
                self.lanes.offer(each.sequence_number, server, keys, shards, sub_write)
        else:
            self.lanes.offer(each.sequence_number, server, keys, shards, sub_write)
            self.model.waiting.append(each)
            self.sub_writes[server] += sub_write

    def count(self, shard: int, sub_write: bool) -> int:
        return sum(shard in each.shards and each.sub_write == sub_write for each in self.model.waiting)

    @rule(server=st.sampled_from(SERVERS))
    def next_batch(self, server: str) -> None:
        expected = self.model.expected_batch(server)
        batch = self.lanes.next_batch(server)
        assert batch == (None if expected is None else [each.sequence_number for each in expected])
        if expected is not None:
            self.model.open.append(expected)
            for each in expected:
                self.model.waiting.remove(each)

    @precondition(lambda self: self.model.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = self.model.open.pop(data.draw(st.integers(0, len(self.model.open) - 1)))
        self.lanes.finish([each.sequence_number for each in batch])

    @precondition(lambda self: self.model.open)
    @rule(data=st.data(), without=st.one_of(st.none(), st.integers(1, 3)))
    def requeue(self, data: st.DataObject, without: int | None) -> None:
        batch = self.model.open.pop(data.draw(st.integers(0, len(self.model.open) - 1)))
        returned = self.lanes.requeue([each.sequence_number for each in batch], without)
        assert returned == [each.sequence_number for each in batch if without in each.shards]
        kept = [each for each in batch if without not in each.shards]
        self.model.waiting = sorted([*kept, *self.model.waiting], key=lambda each: each.sequence_number)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.model.waiting))
        assert self.lanes.withdraw(each.sequence_number)
        self.model.waiting.remove(each)

    @precondition(lambda self: self.model.open)
    @rule(data=st.data())
    def withdraw_too_late(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.model.open))
        assert not self.lanes.withdraw(data.draw(st.sampled_from(batch)).sequence_number)

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        for server in SERVERS:
            assert self.lanes.waiting_writes(server) == sum(each.server == server for each in self.model.waiting)

    @invariant()
    def no_key_is_in_two_open_batches(self) -> None:
        for server in SERVERS:
            held = [
                {key for each in batch for key in each.keys} for batch in self.model.open if batch[0].server == server
            ]
            assert sum(map(len, held)) == len(set().union(*held))

    def teardown(self) -> None:
        """Check that every waiting write gets its turn."""
        while self.model.open:
            self.lanes.finish([each.sequence_number for each in self.model.open.pop()])
        for server in SERVERS:
            while self.model.expected_batch(server):
                self.next_batch(server)
                self.lanes.finish([each.sequence_number for each in self.model.open.pop()])
        assert self.model.waiting == []


LanesMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=60, deadline=None)
TestLanes = LanesMachine.TestCase
