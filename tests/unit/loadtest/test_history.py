"""The judge of `chaos`: what a read may answer, given what became of the writes."""

from loadtest.chaos.history import Fate, Register, Verdict
from loadtest.chaos.record import FailedRead, Record, explains
from tao.model.errors import StaleRead


def written(*fates: Fate, initial: int | None = None) -> Register:
    """Write 1 leaves 1 and is under way from second 1 to 1.5, write 2 leaves 2 …"""
    register = Register(initial)
    for number, fate in enumerate(fates, 1):
        write = register.begin(number, float(number))
        if fate is not Fate.UNDER_WAY:
            register.end(write, fate, number + 0.5)
    return register


ACK, NO, MAYBE = Fate.ACKNOWLEDGED, Fate.REFUSED, Fate.UNKNOWN


def test_a_read_may_see_its_floor_or_anything_later() -> None:
    register = written(ACK, ACK, ACK)
    assert [register.judge(value, 2, 9) for value in (2, 3)] == [Verdict.RIGHT, Verdict.RIGHT]
    assert [register.judge(value, 2, 9) for value in (1, None)] == [Verdict.STALE, Verdict.STALE]
    assert register.judge(4, 2, 9) is Verdict.WRONG


def test_a_refused_write_is_seen_by_nobody() -> None:
    register = written(ACK, NO)
    assert register.judge(2, 0, 9) is Verdict.WRONG
    assert register.judge(1, 1, 9) is Verdict.RIGHT


def test_nothing_is_seen_before_it_was_written() -> None:
    register = written(ACK, Fate.UNDER_WAY)
    assert register.judge(2, 1, 1.9) is Verdict.WRONG
    assert register.judge(2, 1, 2.1) is Verdict.RIGHT


def test_a_removed_edge_is_the_last_removal_that_fits() -> None:
    register = written(ACK)
    register.end(register.begin(None, 2), ACK, 2.5)
    register.end(register.begin(3, 3), ACK, 3.5)
    assert register.judge(None, 2, 9) is Verdict.RIGHT
    assert register.judge(None, 3, 9) is Verdict.STALE


def test_the_floor_of_a_moment_is_the_last_acknowledged_write_before_it() -> None:
    register = written(ACK, NO, ACK)
    assert [register.acknowledged_before(moment) for moment in (-1, 1.4, 1.5, 3.4, 3.5)] == [0, 0, 1, 1, 3]


def test_a_write_of_unknown_outcome_is_held_to_what_was_found() -> None:
    happened, never = written(ACK, MAYBE), written(ACK, MAYBE)
    assert happened.busy
    assert happened.judge(1, 1, 9) is happened.judge(2, 1, 9) is Verdict.RIGHT
    assert happened.settle(2, 20) is Verdict.RIGHT
    assert happened.judge(1, happened.acknowledged_before(21), 22) is Verdict.STALE
    assert never.settle(1, 20) is Verdict.RIGHT
    assert never.judge(2, 0, 22) is Verdict.WRONG
    assert not never.busy


def test_a_settling_read_that_finds_less_than_was_acknowledged_has_found_a_loss() -> None:
    assert written(ACK, ACK, MAYBE).settle(1, 20) is Verdict.STALE


def test_a_count_lies_between_what_was_acknowledged_and_what_may_have_happened() -> None:
    register = written(ACK, NO, ACK, MAYBE)
    assert [register.judge_count(count, 3, 9) for count in (1, 2, 3, 4)] == [
        Verdict.STALE,
        Verdict.RIGHT,
        Verdict.RIGHT,
        Verdict.WRONG,
    ]
    assert register.judge_count(3, 3, 3.9) is Verdict.WRONG


def test_the_head_of_a_list_has_no_holes() -> None:
    register = written(ACK, NO, ACK, ACK)
    assert register.judge_head([4, 3, 1], 4, 9) is Verdict.RIGHT
    assert register.judge_head([4, 1], 4, 9) is Verdict.WRONG
    assert register.judge_head([3, 1], 4, 9) is Verdict.STALE


def test_at_the_end_every_acknowledged_edge_is_there_and_no_refused_one() -> None:
    register = written(ACK, NO, MAYBE, ACK)
    missing, uncalled = register.astray({2, 4})
    assert [write.number for write in missing] == [1]
    assert [write.number for write in uncalled] == [2]


def test_a_fault_explains_what_needs_the_master_and_no_plain_read() -> None:
    def failed(demand: str, *, attached: bool = False) -> FailedRead:
        return FailedRead.of(StaleRead(""), 1.0, "object", demand, "east/tier-1", attached=attached)

    assert explains(["master_kill"], failed("critical"))
    assert explains(["link_cut"], failed("plain", attached=True))
    assert not explains(["link_cut"], failed("plain"))
    assert not explains(["follower_kill"], failed("critical"))
    assert not explains([], failed("token"))


def test_a_read_that_began_before_a_fault_was_healed_met_it() -> None:
    record = Record()
    fault = record.strike("follower_kill", "east-follower-1a")
    began = record.now()
    record.healed(fault)
    record.failed_read(FailedRead.of(StaleRead(""), began, "object", "plain", "east/tier-1", attached=False))
    later = FailedRead.of(StaleRead(""), record.now() + 1, "object", "plain", "east/tier-1", attached=False)
    record.failed_read(later)
    assert [each.fault for each in record.failed] == ["follower_kill", ""]
    assert (record.failed_reads, record.failed_in_single, record.unexplained) == (2, 1, 2)
