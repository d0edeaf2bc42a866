"""The schedule of a journal: what is left of a lane when a batch of a paused shard ends."""

from __future__ import annotations

from tao.journal.entries import Entry, Priority
from tao.journal.schedule import Batch, Schedule
from tao.journal.settings import JournalSettings


def schedule_of(*entries: Entry) -> Schedule:
    schedule = Schedule(JournalSettings(first_delay_seconds=4.0, probe_seconds=1.0), lambda _: "db", lambda: 1.0)
    for entry in entries:
        schedule.add(entry)
    return schedule


def taken(found: object) -> Batch:
    assert isinstance(found, Batch)
    return found


def test_a_probe_of_the_only_entry_of_a_shard_ends_its_pause() -> None:
    entry = Entry(1, Priority.NORMAL, 1, 0, b"")
    schedule = schedule_of(entry)
    schedule.finished(taken(schedule.next(Priority.NORMAL, 0.0)), 0.0, done=0, repeated=[entry])
    assert list(schedule.paused_shards) == [1]
    schedule.finished(taken(schedule.next_probe(1.0)), 1.0, done=1, repeated=[])
    assert not schedule.paused_shards
    assert not sum(schedule.waiting().values())


def test_the_rest_of_a_batch_is_repeated_when_another_priority_has_paused_its_shard() -> None:
    first, second = Entry(1, Priority.HIGH, 1, 0, b""), Entry(2, Priority.HIGH, 1, 0, b"")
    other = Entry(3, Priority.NORMAL, 1, 0, b"")
    schedule = schedule_of(first, second, other)
    high = taken(schedule.next(Priority.HIGH, 0.0))
    schedule.finished(taken(schedule.next(Priority.NORMAL, 0.0)), 0.0, done=0, repeated=[other])
    schedule.finished(high, 0.5, done=1, repeated=[second])
    assert schedule.waiting() == {Priority.HIGH: 1, Priority.NORMAL: 1, Priority.LOW: 0}
    assert taken(schedule.next(Priority.HIGH, 5.0)).entries == [second]


def test_success_of_a_shard_that_has_not_failed_ends_no_pause_of_its_database() -> None:
    stuck = Entry(1, Priority.NORMAL, 1, 0, b"")
    schedule = schedule_of(stuck)
    now, attempts = 0.0, 0
    for number in range(2, 2_000):
        schedule.add(Entry(number, Priority.NORMAL, 2, 0, b""))
        while (batch := schedule.next(Priority.NORMAL, now)) is not None:
            fails = taken(batch).lane[1] == 1
            attempts += fails
            schedule.finished(taken(batch), now, done=int(not fails), repeated=[stuck] if fails else [])
        now += 0.25
    assert attempts == 7, "500 s are pauses of 4, 8, 16, 32, 64, 128 and 256 s"


def test_an_attempt_whose_pause_was_cut_short_does_not_count() -> None:
    first, second = Entry(1, Priority.NORMAL, 1, 0, b""), Entry(2, Priority.NORMAL, 2, 0, b"")
    schedule = schedule_of(first, second)
    for entry in (first, second):
        batch = taken(schedule.next(Priority.NORMAL, 0.0))
        assert batch.counts
        schedule.finished(batch, 0.0, done=0, repeated=[entry])
    probe = taken(schedule.next_probe(1.0))
    assert not probe.counts
    schedule.finished(probe, 1.0, done=1, repeated=[])
    assert not schedule.paused_shards, "the database answers"
    again = taken(schedule.next(Priority.NORMAL, 1.0))
    assert not again.counts
    schedule.finished(again, 1.0, done=0, repeated=again.entries)
    assert schedule.next(Priority.NORMAL, 2.0) is None
    assert taken(schedule.next(Priority.NORMAL, 5.0)).counts, "this pause has lasted to its end"


def test_batch_of_large_entries_fits_into_a_message() -> None:
    mib = bytes(1 << 20)
    schedule = schedule_of(
        *(Entry(number, Priority.NORMAL, 1, 0, mib * 5 if number == 7 else mib) for number in range(9))
    )
    sizes = []
    while (batch := schedule.next(Priority.NORMAL, 0.0)) is not None:
        sizes.append(len(taken(batch).entries))
        schedule.finished(taken(batch), 0.0, done=sizes[-1], repeated=[])
    assert sizes == [4, 3, 1, 1]
