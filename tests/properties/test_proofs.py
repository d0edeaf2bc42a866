"""Proofs that are kept once for each leader say of every shard what they would say if each shard kept its own.

The model keeps a time and a position for each shard, and raises those of all shards that the leader sends whenever it
proves something.
"""

from __future__ import annotations

from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tao.delivery.inbox import Inbox
from tao.model.changes import ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery
from tests.rigs.effort import examples

SHARDS: Final = range(4)
LEADERS: Final = ("leader-1", "leader-2")
SOURCES: Final = ("db-0@1", "db-0@2", "db-1@1")
SOME_SHARDS: Final = st.lists(st.sampled_from(SHARDS), min_size=1, max_size=4, unique=True)


def database_of(shard: int) -> str:
    return f"db-{shard // 2}"


class ProofMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.inbox = Inbox(database_of)
        self.inbox.positions_for(SHARDS)
        self.sender: dict[int, str] = {}
        self.unix_ms = dict.fromkeys(SHARDS, 0)
        self.positions = {shard: Position(shard) for shard in SHARDS}
        self.proven: dict[tuple[str, str], int] = {}
        for leader in LEADERS:
            self.inbox.begin_stream(leader)

    @rule(leader=st.sampled_from(LEADERS))
    def begin_stream(self, leader: str) -> None:
        """Begin a stream as a follower does: the former one has ended, and the subscription of its shards with it."""
        self.suspend([shard for shard, sender in self.sender.items() if sender == leader])
        self.inbox.begin_stream(leader)

    @rule(shards=SOME_SHARDS)
    def suspend(self, shards: list[int]) -> None:
        self.inbox.suspend(shards)
        for shard in shards:
            self.sender.pop(shard, None)

    @rule(leader=st.sampled_from(LEADERS), shard=st.sampled_from(SHARDS), source=st.sampled_from(SOURCES),
          back=st.integers(0, 3), reset=st.booleans())  # fmt: skip
    def confirm(self, leader: str, shard: int, source: str, back: int, reset: bool) -> None:
        """Take a delivery of one shard, with a reset to an earlier position or a continuation."""
        held = self.positions[shard]
        reset = reset or source != held.source
        reached = max(0, self.proven.get((leader, source), 0) - back)
        position = Position(shard, "s", 1, source, reached)
        part = ShardDelivery(position, reset, ShardMessages(shard, 1, ()))
        self.inbox.confirm(leader, self.inbox.receive(Delivery(1, (part,))).confirmed)
        self.positions[shard] = position if reset or reached >= held.reached else held
        self.sender[shard] = leader

    @rule(leader=st.sampled_from(LEADERS), keys=st.sets(st.sampled_from(("db-0", "db-1", *SOURCES))),
          more=st.integers(0, 2))  # fmt: skip
    def prove(self, leader: str, keys: set[str], more: int) -> None:
        """Prove times and positions, which never fall in one stream."""
        for key in keys:
            self.proven[leader, key] = self.proven.get((leader, key), 1) + more
        proven = {key: self.proven[leader, key] for key in sorted(keys)}
        times = tuple((key, value) for key, value in proven.items() if "@" not in key)
        numbers = tuple((key, value) for key, value in proven.items() if "@" in key)
        self.inbox.prove(leader, Delivery(1, proven=times, reached=numbers))
        for shard, sender in self.sender.items():
            if sender == leader:
                self.unix_ms[shard] = max(self.unix_ms[shard], proven.get(database_of(shard), 0))
                held = self.positions[shard]
                if proven.get(held.source, 0) > held.reached:
                    self.positions[shard] = Position(shard, "s", 1, held.source, proven[held.source])

    @rule(shard=st.sampled_from(SHARDS))
    def forget(self, shard: int) -> None:
        self.inbox.forget(shard)
        self.inbox.positions_for([shard])
        self.sender.pop(shard, None)
        self.unix_ms[shard] = 0
        self.positions[shard] = Position(shard)

    @invariant()
    def says_what_each_shard_would_say(self) -> None:
        assert {shard: self.inbox.proven_unix_ms(shard) for shard in SHARDS} == self.unix_ms
        assert self.inbox.positions_for(SHARDS) == list(self.positions.values())


TestProofs = ProofMachine.TestCase
TestProofs.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
