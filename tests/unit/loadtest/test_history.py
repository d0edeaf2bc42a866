"""The judge of `chaos`: what a read may answer, given the outcomes of the writes."""

import msgspec

from loadtest.faults.history import ReadVerdict, RecordedOutcome, Register
from loadtest.faults.record import AFTERMATH_SECONDS, FailedRead, Fault, RunRecord, Whereabouts
from tao.model.errors import StaleRead


def written(*fates: RecordedOutcome, initial: int | None = None) -> Register:
    """Write 1 leaves 1 and is under way from second 1 to 1.5, write 2 leaves 2 …"""
    register = Register(initial)
    for number, fate in enumerate(fates, 1):
        write = register.begin(number, float(number))
        if fate is not RecordedOutcome.PENDING:
            register.end(write, fate, number + 0.5)
    return register


ACK, NO, MAYBE = RecordedOutcome.ACKNOWLEDGED, RecordedOutcome.REFUSED, RecordedOutcome.UNKNOWN


def test_a_read_may_see_its_floor_or_anything_later() -> None:
    register = written(ACK, ACK, ACK)
    assert [register.judge(value, 2, 9) for value in (2, 3)] == [ReadVerdict.RIGHT, ReadVerdict.RIGHT]
    assert [register.judge(value, 2, 9) for value in (1, None)] == [ReadVerdict.STALE, ReadVerdict.STALE]
    assert register.judge(4, 2, 9) is ReadVerdict.WRONG


def test_a_rejected_write_is_seen_by_no_reader() -> None:
    register = written(ACK, NO)
    assert register.judge(2, 0, 9) is ReadVerdict.WRONG
    assert register.judge(1, 1, 9) is ReadVerdict.RIGHT


def test_nothing_is_seen_before_it_was_written() -> None:
    register = written(ACK, RecordedOutcome.PENDING)
    assert register.judge(2, 1, 1.9) is ReadVerdict.WRONG
    assert register.judge(2, 1, 2.1) is ReadVerdict.RIGHT


def test_a_removed_edge_is_the_last_removal_that_fits() -> None:
    register = written(ACK)
    register.end(register.begin(None, 2), ACK, 2.5)
    register.end(register.begin(3, 3), ACK, 3.5)
    assert register.judge(None, 2, 9) is ReadVerdict.RIGHT
    assert register.judge(None, 3, 9) is ReadVerdict.STALE


def test_an_edge_exists_as_at_some_write_from_the_floor_on() -> None:
    register = written(ACK)
    register.end(register.begin(None, 2), ACK, 2.5)
    assert [register.judge_existence(True, floor, 9) for floor in (1, 2)] == [ReadVerdict.RIGHT, ReadVerdict.STALE]
    assert [register.judge_existence(False, floor, 9) for floor in (0, 2)] == [ReadVerdict.RIGHT, ReadVerdict.RIGHT]
    assert written(ACK).judge_existence(False, 1, 9) is ReadVerdict.STALE
    assert written(NO).judge_existence(True, 0, 9) is ReadVerdict.WRONG
    assert written(ACK, initial=7).judge_existence(False, 0, 9) is ReadVerdict.WRONG


def test_a_list_has_the_edges_that_were_added_and_no_others() -> None:
    register = written(ACK, NO, ACK, MAYBE)
    assert [register.judge_member(1, False, floor, 9) for floor in (0, 1)] == [ReadVerdict.RIGHT, ReadVerdict.STALE]
    assert [register.judge_member(2, found, 3, 9) for found in (False, True)] == [ReadVerdict.RIGHT, ReadVerdict.WRONG]
    assert [register.judge_member(4, found, 4, 9) for found in (False, True)] == [ReadVerdict.RIGHT, ReadVerdict.RIGHT]
    assert register.judge_member(3, True, 0, 2.9) is ReadVerdict.WRONG, "it was not begun yet"


def test_the_floor_of_a_moment_is_the_last_acknowledged_write_before_it() -> None:
    register = written(ACK, NO, ACK)
    assert [register.acknowledged_before(moment) for moment in (-1, 1.4, 1.5, 3.4, 3.5)] == [0, 0, 1, 1, 3]


def test_a_write_of_unknown_outcome_is_held_to_what_was_found() -> None:
    happened, never = written(ACK, MAYBE), written(ACK, MAYBE)
    assert happened.busy
    assert happened.judge(1, 1, 9) is happened.judge(2, 1, 9) is ReadVerdict.RIGHT
    assert happened.settle(2, 20) is ReadVerdict.RIGHT
    assert happened.judge(1, happened.acknowledged_before(21), 22) is ReadVerdict.STALE
    assert never.settle(1, 20) is ReadVerdict.RIGHT
    assert never.judge(2, 0, 22) is ReadVerdict.WRONG
    assert not never.busy


def test_a_settling_read_that_finds_less_than_was_acknowledged_has_found_a_loss() -> None:
    assert written(ACK, ACK, MAYBE).settle(1, 20) is ReadVerdict.STALE


def test_a_count_lies_between_what_was_acknowledged_and_what_may_have_happened() -> None:
    register = written(ACK, NO, ACK, MAYBE)
    assert [register.judge_count(count, 3, 9) for count in (1, 2, 3, 4)] == [
        ReadVerdict.STALE,
        ReadVerdict.RIGHT,
        ReadVerdict.RIGHT,
        ReadVerdict.WRONG,
    ]
    assert register.judge_count(3, 3, 3.9) is ReadVerdict.WRONG


def test_the_head_of_a_list_has_no_holes() -> None:
    register = written(ACK, NO, ACK, ACK)
    assert register.judge_head([4, 3, 1], 4, 9) is ReadVerdict.RIGHT
    assert register.judge_head([4, 1], 4, 9) is ReadVerdict.WRONG
    assert register.judge_head([3, 1], 4, 9) is ReadVerdict.STALE


def test_at_the_end_every_acknowledged_edge_is_there_and_no_refused_one() -> None:
    register = written(ACK, NO, MAYBE, ACK)
    missing, unwanted = register.misplaced({2, 4})
    assert [write.number for write in missing] == [1]
    assert [write.number for write in unwanted] == [2]


HERE, ACROSS = Whereabouts("east", "db1", "east"), Whereabouts("west", "db1", "east")


def failed(seconds: float, demand: str = "plain", where: Whereabouts = HERE, *, attached: bool = False) -> FailedRead:
    return FailedRead(
        seconds=seconds,
        what="object",
        demand=demand,
        client="east/tier-1",
        where=where,
        attached=attached,
        reason=StaleRead.reason,
        message="",
    )


def explained(fault: Fault, read: FailedRead) -> bool:
    record = RunRecord()
    record.faults.append(fault)
    record.active.append(fault)
    record.failed_read(read)
    return read.explained


def test_a_lost_master_excuses_what_needs_that_master_until_there_is_one_again() -> None:
    lost = Fault(kind="master_kill", victim="east-db1", database="db1", struck=1.0, mended=9.0)
    assert explained(lost, failed(2.0, "critical"))
    assert explained(lost, failed(2.0, attached=True))
    assert explained(lost, failed(9.0 + AFTERMATH_SECONDS, "token", ACROSS))
    assert not explained(lost, failed(2.0))
    assert not explained(lost, failed(9.1 + AFTERMATH_SECONDS, "critical"))
    assert not explained(lost, failed(2.0, "critical", Whereabouts("east", "db2", "east")))


def test_a_cut_line_excuses_what_must_cross_it_and_a_slow_one_nothing() -> None:
    cut = Fault(kind="link_cut", victim="line", struck=1.0)
    slow = Fault(kind="link_slow", victim="line", struck=1.0)
    assert explained(cut, failed(2.0, "max_staleness", ACROSS))
    assert not explained(cut, failed(2.0, "max_staleness", HERE))
    assert not explained(cut, failed(2.0, "plain", ACROSS))
    assert not explained(slow, failed(2.0, "critical", ACROSS))


def test_a_pending_inverse_excuses_a_refused_read_of_its_list_while_a_fault_lasts() -> None:
    killed = Fault(kind="leader_kill", victim="leader-1", struck=1.0, mended=3.0)
    refused = msgspec.structs.replace(failed(2.0, attached=True), inverse_pending=True)
    assert explained(killed, refused)
    assert explained(killed, msgspec.structs.replace(refused, demand="token", attached=False))
    assert not explained(killed, msgspec.structs.replace(refused, reason="UNAVAILABLE"))
    assert not explained(killed, msgspec.structs.replace(refused, seconds=3.1 + AFTERMATH_SECONDS))


def test_a_killed_leaders_shards_are_written_again_when_each_has_a_later_write() -> None:
    record = RunRecord()
    before = record.now()
    fault = record.strike("leader_kill", "leader-1")
    record.await_writes(fault, {0, 2})
    for shard, began in ((0, before), (1, record.now()), (0, record.now())):
        record.acknowledge(shard, began)
    assert (fault.unwritten, fault.written) == ({2}, 0)
    record.healed(fault)
    record.acknowledge(2, record.now())
    assert not fault.unwritten
    assert fault.written >= fault.struck
    assert record.acknowledged == 4


def test_other_faults_excuse_nothing() -> None:
    gone = Fault(kind="follower_kill", victim="east-follower-1a", struck=1.0)
    assert not explained(gone, failed(2.0, "critical"))
    assert not explained(gone, failed(2.0, attached=True))


def test_a_read_that_fails_while_a_fault_is_injected_has_met_it() -> None:
    """The kernel takes a moment to end a process."""
    record = RunRecord()
    record.failed_read(failed(1.0, "critical"))
    failed_before = len(record.failed)
    record.failed_read(failed(1.0, "critical"))
    record.failed_read(failed(1.0, "plain"))
    record.strike("master_kill", "east-db-1", HERE.database, failed_before)
    assert [(each.fault, each.explained) for each in record.failed] == [
        ("", False),
        ("master_kill", True),
        ("master_kill", False),
    ]
    assert dict(record.unexplained) == {"": 1, "master_kill": 1}
    assert sum(record.failures.values()) == record.failed_reads == 3


def test_a_read_that_began_before_a_fault_was_healed_met_it() -> None:
    record = RunRecord()
    fault = record.strike("follower_kill", "east-follower-1a")
    began = record.now()
    record.healed(fault)
    record.failed_read(failed(began))
    record.failed_read(failed(record.now() + 1))
    assert [each.fault for each in record.failed] == ["follower_kill", ""]
    assert (record.failed_reads, record.failed_in_single, record.unexplained.total()) == (2, 1, 2)


def test_a_slow_read_that_meets_one_fault_after_the_other_has_met_single_ones() -> None:
    record = RunRecord()
    began = record.now()
    record.healed(record.strike("follower_kill", "east-follower-1a"))
    record.strike("tailer_kill", "east-tailer")
    record.failed_read(failed(began))
    assert record.failed_in_single == 1
    record.strike("leader_kill", "east-leader-1")
    record.failed_read(failed(record.now()))
    assert record.failed_in_single == 1
