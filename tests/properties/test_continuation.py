"""Whichever leader has a shard, and whatever leaders, disks and connections are lost, no subscriber misses a commit.

A subscriber has every commit of the shard up to the position that it claims, or has dropped the shard since. It does
not drop a shard without need. Histories that once broke this are tests of their own.
"""

from __future__ import annotations

from hypothesis import settings

from tests.rigs.continuation import SHARDS, ContinuationMachine
from tests.rigs.effort import examples

TestContinuation = ContinuationMachine.TestCase
TestContinuation.settings = settings(max_examples=examples(300), stateful_step_count=50, deadline=None)


def test_a_replay_that_is_abandoned_lets_the_next_one_read() -> None:
    """Two shards are replayed from the spool, one at a time. The first subscribes again after a gap before its replay
    has ended."""
    machine = ContinuationMachine()
    machine.catch_up_everyone()
    machine.commit(shards=[0, 1], quick=False, times=1)
    machine.tailer_relays(shard=1, most=1)
    machine.commit(shards=[0, 1], quick=True, times=5)
    machine.follower_connects_anew(follower=0)
    machine.catch_up_everyone()
    assert machine.followers[0].known == {shard: machine.committed(shard) for shard in SHARDS}


def test_a_replay_for_which_the_spool_has_made_room_meanwhile_is_given_up() -> None:
    """Two shards are replayed from the spool, one at a time. What the second one needs is dropped while it waits, or,
    of a shard that is read in several turns, between two of them."""
    for shards in ([0, 1], [0]):
        machine = ContinuationMachine()
        machine.catch_up_everyone()
        machine.spool_makes_room_while_it_is_read(shards=shards, follower=0, rows=17 * len(shards))
        machine.catch_up_everyone()


def test_a_follower_of_a_leader_that_was_never_linked_is_reset_when_the_shard_moved_away_meanwhile() -> None:
    """Messages went to another leader meanwhile, and nothing shows that the follower has received them."""
    machine = ContinuationMachine()
    machine.follower_takes(follower=0, most=1, name="a")
    machine.commit(shards=[0], quick=False, times=1)
    machine.shard_moves(shard=0, relayed=1, unnoticed=True)
    machine.catch_up_everyone()


def test_a_position_is_not_delivered_before_the_message_that_it_covers() -> None:
    """A leader restarts its stream, because messages went to the other leader, and then the message arrives. A
    subscriber that received only the position, and lost its connection, would never receive the message."""
    machine = ContinuationMachine()
    machine.catch_up_everyone()
    machine.shard_moves(shard=0, unnoticed=False, relayed=0)
    machine.commit(shards=[0], quick=False, times=5)
    machine.shard_moves(shard=0, unnoticed=True, relayed=9)
    machine.leader_crashes_and_restarts(name="a", disk="gone")
    machine.shard_moves(shard=0, unnoticed=False, relayed=0)
    machine.shard_moves(shard=1, unnoticed=False, relayed=0)
    machine.commit(shards=[1], quick=False, times=1)
    machine.shard_moves(shard=1, unnoticed=True, relayed=4)
    for _ in range(4):
        machine.follower_takes(follower=0, name="a", most=1)
        machine.nobody_claims_what_it_does_not_know()
    machine.teardown()


def test_a_proof_made_while_messages_are_resent_does_not_cover_them() -> None:
    """Messages that a lost leader had received are sent again in several relays, after a proof that holds only for
    servers that have them."""
    machine = ContinuationMachine()
    machine.catch_up_everyone()
    machine.shard_moves(shard=0, unnoticed=False, relayed=0)
    machine.commit(shards=[0], quick=False, times=2)
    machine.heartbeat(database="db1")
    machine.leader_crashes_and_restarts(name="b", disk="torn")
    machine.heartbeat(database="db1")
    for _ in range(4):
        machine.follower_takes(follower=0, name="b", most=1)
        machine.nobody_claims_what_it_does_not_know()
    machine.teardown()
