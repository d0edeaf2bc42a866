"""`move`: what is judged, and which shards move."""

from __future__ import annotations

from loadtest.move import LargeShard, ManyMoves, MoveOptions, MoveTimes
from tao.replication.shard_move_plan import MoveStep


def large(**changes: float) -> LargeShard:
    """Return moves of 2 GB that meet every aim by little, with these figures changed."""
    figures = {"stood": 1.4, "gap": 1.5, "p99": 0.0119, "loaded": 249.0, "idle": 99.0, **changes}
    found = LargeShard(2_000.0)
    found.under_load = MoveTimes(copy_seconds=figures["loaded"], stood_seconds=figures["stood"])
    found.idle = MoveTimes(copy_seconds=figures["idle"])
    found.before.others.extend([0.010] * 100)
    found.during.others.extend([figures["p99"]] * 100)
    found.during.longest_write_gap = figures["gap"]
    return found


def missed(found: LargeShard) -> list[str]:
    return [aim.aim for aim in [*found.demands(), *found.aims()] if not aim.met]


def test_a_large_shard_is_judged_by_failures_pause_latency_and_rate() -> None:
    assert missed(large()) == []
    assert (
        missed(large(stood=1.6)) == missed(large(gap=1.6)) == ["writes of a moving shard stand still for 1.5 s at most"]
    )
    assert missed(large(p99=0.0121)) == ["p99 of other shards is at most 1.2 × that before the move"]
    assert missed(large(loaded=251.0)) == ["a copy under load takes 8 MB of data a second or more"]
    assert missed(large(idle=101.0)) == ["a copy on an idle cluster takes 20 MB of data a second"]
    failing = large()
    failing.failed.append("UNAVAILABLE: no leader")
    assert missed(failing) == ["no request fails while a shard moves"]


def test_the_mover_has_to_be_killed_at_each_step_and_to_clear_everything_away() -> None:
    moves = ManyMoves(10)
    moves.done = moves.left_behind = 10
    moves.killed.update(dict.fromkeys(MoveStep, 1))
    assert all(aim.met for aim in moves.demands())
    moves.killed[MoveStep.RENAME] = 0
    moves.left_behind = 9
    assert [aim.aim for aim in moves.demands() if not aim.met] == [
        "the mover is killed at each step",
        "every finished move is cleared away",
    ]


def test_the_large_shard_is_none_of_those_that_move_under_faults() -> None:
    assert MoveOptions().large_shard == 127
    toy = MoveOptions().at_toy_size()
    assert (toy.megabytes, toy.moved_shards, toy.large_shard) == (2, 1, 1)
