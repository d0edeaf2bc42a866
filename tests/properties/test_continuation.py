"""Whoever leads a shard, and whatever of leaders, disks and connections is lost: a subscriber has every commit of the
shard up to the position that it claims, or has dropped the shard since (DESIGN §7). And it does not drop without need.
Histories that once broke this are played one by one."""

from __future__ import annotations

from hypothesis import settings

from tests.rigs.continuation import SHARDS, ContinuationMachine

TestContinuation = ContinuationMachine.TestCase
TestContinuation.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


def test_whoever_leaves_the_spool_makes_room_for_the_next() -> None:
    """Two shards come through the spool, one at a time; the first asks anew, because of a gap, before it has all."""
    machine = ContinuationMachine()
    machine.all_is_told()
    machine.commit(shards=[0, 1], quick=False, times=1)
    machine.tailer_tells(shard=1, most=1)
    machine.commit(shards=[0, 1], quick=True, times=5)
    machine.follower_connects_anew(follower=0)
    machine.all_is_told()
    assert machine.followers[0].known == {shard: machine.committed(shard) for shard in SHARDS}


def test_who_followed_a_leader_before_it_was_linked_starts_cold_when_the_shard_was_away_unnoticed() -> None:
    """What was told meanwhile was told to another leader, and nothing says that the follower has it."""
    machine = ContinuationMachine()
    machine.follower_takes(follower=0, most=1, name="a")
    machine.commit(shards=[0], quick=False, times=1)
    machine.shard_moves(shard=0, tell=1, unnoticed=True)
    machine.all_is_told()


def test_how_far_a_message_reaches_is_not_told_before_the_message() -> None:
    """A leader restarts its stream, because something was told to the other one, and then the message comes. Whoever
    had the position alone, and lost the connection, would not be told the message again."""
    machine = ContinuationMachine()
    machine.all_is_told()
    machine.shard_moves(shard=0, unnoticed=False, tell=0)
    machine.commit(shards=[0], quick=False, times=5)
    machine.shard_moves(shard=0, unnoticed=True, tell=9)
    machine.leader_crashes_and_restarts(name="a", disk="gone")
    machine.shard_moves(shard=0, unnoticed=False, tell=0)
    machine.shard_moves(shard=1, unnoticed=False, tell=0)
    machine.commit(shards=[1], quick=False, times=1)
    machine.shard_moves(shard=1, unnoticed=True, tell=4)
    for _ in range(4):
        machine.follower_takes(follower=0, name="a", most=1)
        machine.nobody_claims_what_it_does_not_know()
    machine.teardown()


def test_what_is_proved_while_something_is_told_again_is_not_proved_of_it() -> None:
    """What the lost leader was told comes again in several relays, after a proof that was for those who had it."""
    machine = ContinuationMachine()
    machine.all_is_told()
    machine.shard_moves(shard=0, unnoticed=False, tell=0)
    machine.commit(shards=[0], quick=False, times=2)
    machine.heartbeat(database="db1")
    machine.leader_crashes_and_restarts(name="b", disk="torn")
    machine.heartbeat(database="db1")
    for _ in range(4):
        machine.follower_takes(follower=0, name="b", most=1)
        machine.nobody_claims_what_it_does_not_know()
    machine.teardown()
