"""The schedule of a journal against a naive model: every entry is made at last, each at most once at a time, and a
shard that fails delays no other."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tao.journal.entries import Entry, Priority
from tao.journal.schedule import Batch, LoadPage, Schedule
from tao.journal.settings import JournalSettings

SHARDS = 6


def database_of(shard: int) -> str:
    return f"db-{shard % 2}"


class Journal:
    """A schedule, and the entries as a disk would hold them. The model: `undone` is all that must be made yet."""

    def __init__(self, settings: JournalSettings, on_disk: list[Entry]) -> None:
        self.schedule = Schedule(settings, database_of, lambda: 1.0)
        self.undone = {entry.number: entry for entry in on_disk}
        self.now = 0.0
        self.under_way: list[Batch] = []
        self.loading: list[LoadPage] = []
        self.next_number = len(on_disk) + 1
        lanes = Counter((entry.priority, entry.shard) for entry in on_disk)
        self.schedule.restart({lane: (count, 1) for lane, count in lanes.items()})

    def accept(self, priority: Priority, shard: int) -> None:
        entry = Entry(self.next_number, priority, shard, 1, b"")
        self.next_number += 1
        self.undone[entry.number] = entry
        self.schedule.add(entry)

    def begin(self) -> None:
        while (found := self.schedule.next_probe(self.now)) is not None:
            self.take(found)
        for priority in Priority:
            while (found := self.schedule.next(priority, self.now)) is not None:
                self.take(found)

    def take(self, found: Batch | LoadPage) -> None:
        if isinstance(found, LoadPage):
            self.loading.append(found)
            return
        assert found.entries
        numbers = {entry.number for batch in self.under_way for entry in batch.entries}
        for entry in found.entries:
            assert entry.number in self.undone, "made although it was done"
            assert entry.number not in numbers, "made twice at a time"
            assert (entry.priority, entry.shard) == found.lane
        assert found.lane not in [batch.lane for batch in self.under_way]
        self.under_way.append(found)

    def load(self) -> None:
        for load in self.loading:
            entries = [
                entry
                for entry in sorted(self.undone.values(), key=lambda each: each.number)
                if (entry.priority, entry.shard) == load.lane and entry.number > load.after
            ]
            self.schedule.page_read(load.lane, entries[:2])
        self.loading.clear()

    def finish(self, batch: Batch, *, fails: bool) -> None:
        self.under_way.remove(batch)
        repeated = list(batch.entries) if fails else []
        for entry in batch.entries:
            if not fails:
                del self.undone[entry.number]
        self.schedule.finished(batch, self.now, done=0 if fails else len(batch.entries), repeated=repeated)

    def settle(self, dead: set[int]) -> None:
        """Run with these shards failing until everything else is done."""
        for _ in range(10_000):
            self.begin()
            self.load()
            for batch in list(self.under_way):
                self.finish(batch, fails=batch.lane[1] in dead)
            if all(entry.shard in dead for entry in self.undone.values()):
                return
        raise AssertionError(f"{self.undone} are never made")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.sampled_from(Priority), st.integers(0, SHARDS - 1)),
        st.tuples(st.just("begin")),
        st.tuples(st.just("load")),
        st.tuples(st.just("finish"), st.booleans(), st.integers(0, 10)),
        st.tuples(st.just("wait"), st.floats(0.1, 20.0)),
    ),
    max_size=60,
)
entries_on_disk = st.lists(st.tuples(st.sampled_from(Priority), st.integers(0, SHARDS - 1)), max_size=12)


@given(steps, entries_on_disk, st.integers(0, 5), st.sets(st.integers(0, SHARDS - 1)))
def test_every_entry_is_made_and_dead_shards_delay_no_other(
    script: list[tuple[object, ...]], on_disk: list[tuple[Priority, int]], loaded: int, dead: set[int]
) -> None:
    settings = JournalSettings(
        high_tasks=3, normal_tasks=2, low_tasks=1, batch_writes=3, max_loaded_entries=loaded, max_delay_seconds=8.0
    )
    entries = [Entry(number, priority, shard, 1, b"") for number, (priority, shard) in enumerate(on_disk, 1)]
    journal = Journal(settings, entries)
    for step in script:
        match step:
            case ("accept", Priority() as priority, int() as shard):
                journal.accept(priority, shard)
            case ("begin",):
                journal.begin()
            case ("load",):
                journal.load()
            case ("finish", bool() as fails, int() as which) if journal.under_way:
                journal.finish(journal.under_way[which % len(journal.under_way)], fails=fails)
            case ("wait", float() as seconds):
                journal.now += seconds
        waiting = sum(journal.schedule.waiting().values()) + sum(len(batch.entries) for batch in journal.under_way)
        assert waiting == len(journal.undone)
    for batch in list(journal.under_way):
        journal.finish(batch, fails=True)
    # What failed before may pause still; that ends by itself.
    journal.now += 2 * settings.max_delay_seconds
    journal.settle(dead)
    journal.now += settings.max_delay_seconds
    journal.settle(set())
    assert not journal.undone
    assert not sum(journal.schedule.waiting().values())
