"""The decision which accepted writes are made next. No I/O and no clock: time is passed in.

Entries of one shard and priority are a *lane*. A lane holds entries in memory, in the order in which they are due, and
counts those behind them that are on disk only. A lane has at most one batch under way, and a database has at most three
quarters of a priority's tasks while there are others, so a database that hangs leaves room for them. An attempt that
failed and may be repeated pauses its shard, and no other. Once a shard that has failed is done with an entry, all
shards of its database are due at once; the number of tasks paces them. The success of a shard that has not failed shows
nothing about the others: their leader may be away, and not the database.

A paused shard is also tried with a single entry now and then (a *probe*), so that a long pause does not outlast its
reason. A failed probe counts neither as an attempt nor towards the pause. Neither does an attempt count whose pause
was cut short: the bound of attempts stands for a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from tao.journal.entries import Entry, Priority
from tao.journal.settings import JournalSettings

LaneKey = tuple[Priority, int]
"""A priority and a shard."""

_SHARDS_PER_PROBE: Final = 8
"""Most paused shards that are looked at for an entry to probe their database with."""

MAX_BATCH_BYTES: Final = 4 << 20
"""Most bytes of a batch of several entries: well below the largest message."""


class Batch(NamedTuple):
    """Entries to be made now, of one lane. ``database``: that of the shard. ``counts``: a failure counts as an attempt
    of its entries."""

    lane: LaneKey
    database: str
    entries: Sequence[Entry]
    is_probe: bool
    counts: bool


class LoadPage(NamedTuple):
    """A demand to read the next entries of a lane from disk, those after ``after``."""

    lane: LaneKey
    after: int


@dataclass(slots=True)
class _Lane:
    ready: deque[Entry] = field(default_factory=deque)
    on_disk: int = 0
    loaded_to: int = 0
    """Entries up to this number are in memory, or done."""
    disk_since_ms: int = 0
    """The time, about, at which the oldest entry that is on disk only was accepted."""
    is_busy: bool = False
    """A batch is under way, or a page is being read."""
    loads_for: str | None = None
    """The database of the shard while a page is being read."""

    @property
    def waiting(self) -> int:
        return len(self.ready) + self.on_disk


class Schedule:
    """The waiting entries of one journal."""

    def __init__(
        self, settings: JournalSettings, database_of: Callable[[int], str], chance: Callable[[], float]
    ) -> None:
        """``database_of`` maps a shard to its database. ``chance`` returns a random number from 0 to 1."""
        self._settings: Final = settings
        self._database_of: Final = database_of
        self._chance: Final = chance
        self._tasks: Final = {
            Priority.HIGH: settings.high_tasks,
            Priority.NORMAL: settings.normal_tasks,
            Priority.LOW: settings.low_tasks,
        }
        self._lanes: Final[dict[LaneKey, _Lane]] = {}
        # Priority and database → the lanes that may be next. A lane is in its queue or busy or paused.
        self._queues: Final[dict[Priority, dict[str, deque[LaneKey]]]] = {each: {} for each in Priority}
        self._queued: Final[set[LaneKey]] = set()
        self._databases: Final[set[str]] = set()  # those that entries were for since the start
        self._under_way: Final[dict[Priority, Counter[str]]] = {each: Counter() for each in Priority}
        self._paused: Final[dict[int, str]] = {}  # shards that pause, with their databases
        self._pauses: Final[dict[str, dict[int, float]]] = {}  # by database, when the pauses of its shards end
        self._due: Final[list[tuple[float, int]]] = []  # the same times in order; some are outdated
        self._delays: Final[dict[int, float]] = {}  # by shard, the last pause, until an attempt succeeds
        self._cut_short: Final[set[int]] = set()  # shards whose last pause did not last to its end
        self._probe_at: Final[dict[str, float]] = {}  # by database with pauses, when it may be probed next
        self.loaded = 0
        """Entries in memory that wait."""

    # ---- what waits ------------------------------------------------------------------------------------------------

    def restart(self, on_disk: Mapping[LaneKey, tuple[int, int]]) -> None:
        """Begin anew with what is on disk: by lane, the number of entries and when the oldest was accepted, in Unix
        milliseconds. No batch may be under way."""
        for state in (self._lanes, self._queued, self._paused, self._pauses, self._due, self._delays, self._probe_at):
            state.clear()
        self._cut_short.clear()
        for queues in self._queues.values():
            queues.clear()
        for under_way in self._under_way.values():
            under_way.clear()  # pages that are being read, whose entries are not taken any more
        self.loaded = 0
        for key, (entries, oldest_ms) in on_disk.items():
            self._lanes[key] = _Lane(on_disk=entries, disk_since_ms=oldest_ms)
            self._queue(key)

    def add(self, entry: Entry) -> bool:
        """Add an entry that has been stored. Returns whether it is held in memory."""
        key = entry.priority, entry.shard
        lane = self._lane(key)
        holds = not lane.on_disk and self.loaded < self._settings.max_loaded_entries
        if holds:
            lane.ready.append(entry)
            lane.loaded_to = max(lane.loaded_to, entry.number)
            self.loaded += 1
        else:
            if not lane.on_disk:
                lane.disk_since_ms = entry.accepted_ms
            lane.on_disk += 1
        self._queue(key)
        return holds

    def page_read(self, key: LaneKey, entries: Sequence[Entry] | None, gone: int = 0) -> None:
        """Take the entries of a page, None when the disk failed. ``gone``: further ones that cannot be read."""
        lane = self._lanes.get(key)
        if lane is None or lane.loads_for is None:
            return  # asked for before `restart`
        self._under_way[key[0]][lane.loads_for] -= 1
        lane.is_busy, lane.loads_for = False, None
        if entries is not None:
            lane.on_disk = max(0, lane.on_disk - len(entries) - gone) if entries or gone else 0
            lane.ready.extend(entries)
            self.loaded += len(entries)
            if entries:
                lane.loaded_to = max(lane.loaded_to, entries[-1].number)
                lane.disk_since_ms = entries[-1].accepted_ms
        # Made before other lanes are loaded: otherwise all lanes would be in memory at once.
        self._queue(key, is_first=True)

    def waiting(self) -> dict[Priority, int]:
        """Return the number of waiting entries by priority, without those under way."""
        found = dict.fromkeys(Priority, 0)
        for (priority, _), lane in self._lanes.items():
            found[priority] += lane.waiting
        return found

    def oldest_ms(self) -> dict[Priority, float]:
        """Return when the oldest waiting entry of each priority was accepted, infinite where none waits."""
        oldest: dict[Priority, float] = dict.fromkeys(Priority, inf)
        for (priority, _), lane in self._lanes.items():
            ready = [entry.accepted_ms for entry in lane.ready]
            oldest[priority] = min(oldest[priority], *ready, lane.disk_since_ms if lane.on_disk else inf)
        return oldest

    @property
    def paused_shards(self) -> Collection[int]:
        """Return the shards that pause."""
        return self._paused.keys()

    def pause_end(self, shard: int) -> float | None:
        """Return when the pause of a shard ends, None while it does not pause."""
        database = self._paused.get(shard)
        return None if database is None else self._pauses[database][shard]

    # ---- what is next ----------------------------------------------------------------------------------------------

    def next(self, priority: Priority, now: float) -> Batch | LoadPage | None:
        """Return what is to be done next for this priority, which counts as one of its tasks; None when nothing is due
        or all its tasks are busy."""
        self._end_pauses(now)
        under_way = self._under_way[priority]
        if under_way.total() >= self._tasks[priority]:
            return None
        queues = self._queues[priority]
        most = self._tasks[priority]
        if len(self._databases) > 1:
            most = max(1, most * 3 // 4)
        for database in list(queues):
            if under_way[database] >= most:
                continue
            key = queues[database].popleft()
            self._queued.discard(key)
            # Databases take turns: the next one is asked first the next time.
            rest = queues.pop(database)
            if rest:
                queues[database] = rest
            return self._take(key, database, self._settings.batch_writes, is_probe=False)
        return None

    def next_probe(self, now: float) -> Batch | LoadPage | None:
        """Return a single entry of a paused shard, of a database that is due to be probed. It is made beyond the tasks
        of its priority."""
        for database, due in self._probe_at.items():
            if due > now:
                continue
            self._probe_at[database] = now + self._settings.probe_seconds
            pauses = self._pauses[database]
            for shard in list(islice(pauses, _SHARDS_PER_PROBE)):
                # Another shard is probed next time: this one may fail for a reason of its own.
                pauses[shard] = pauses.pop(shard)
                for key in ((priority, shard) for priority in Priority):
                    lane = self._lanes.get(key)
                    if lane is not None and lane.waiting and not lane.is_busy:
                        return self._take(key, database, 1, is_probe=True)
        return None

    def next_time(self) -> float:
        """Return the time at which something is due that is not due now; infinite when nothing is."""
        while self._due and not self._is_current(*self._due[0]):
            heappop(self._due)
        return min(self._due[0][0] if self._due else inf, *self._probe_at.values(), inf)

    # ---- outcomes --------------------------------------------------------------------------------------------------

    def finished(self, batch: Batch, now: float, *, done: int, repeated: Sequence[Entry]) -> None:
        """Take the outcome of a batch: so many of its entries are ``done``, and these must be ``repeated``."""
        key, shard = batch.lane, batch.lane[1]
        lane = self._lanes[key]
        self._under_way[key[0]][batch.database] -= 1
        if done:
            # While the lane is busy: an empty one would be removed together with the pause that ends.
            if batch.is_probe or shard in self._delays:
                self._answers(batch.database)
            self._delays.pop(shard, None)
        lane.is_busy = False
        if repeated:
            # Behind the others: nothing depends on the order, and one that fails again and again delays no other.
            lane.ready.extend(repeated)
            self.loaded += len(repeated)
            if not batch.is_probe:
                self._pause(shard, batch.database, now, answers=done > 0)
        self._queue(key)

    # ---- the parts of the above ------------------------------------------------------------------------------------

    def _lane(self, key: LaneKey) -> _Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
        return lane

    def _queue(self, key: LaneKey, *, is_first: bool = False) -> None:
        """Have the lane be next when its turn comes, unless it is busy, paused or empty."""
        lane = self._lanes[key]
        if key in self._queued or lane.is_busy or key[1] in self._paused:
            return
        if not lane.waiting:
            del self._lanes[key]
            return
        self._queued.add(key)
        database = self._database_of(key[1])
        self._databases.add(database)
        queue = self._queues[key[0]].setdefault(database, deque())
        if is_first:
            queue.appendleft(key)
        else:
            queue.append(key)

    def _take(self, key: LaneKey, database: str, most: int, *, is_probe: bool) -> Batch | LoadPage:
        lane = self._lanes[key]
        lane.is_busy = True
        self._under_way[key[0]][database] += 1
        if not lane.ready:
            lane.loads_for = database
            return LoadPage(key, lane.loaded_to)
        entries = [lane.ready.popleft()]
        size = len(entries[0].body)
        while lane.ready and len(entries) < most and (size := size + len(lane.ready[0].body)) <= MAX_BATCH_BYTES:
            entries.append(lane.ready.popleft())
        self.loaded -= len(entries)
        return Batch(key, database, entries, is_probe, counts=not is_probe and key[1] not in self._cut_short)

    def _pause(self, shard: int, database: str, now: float, *, answers: bool) -> None:
        """Pause a shard, twice as long as the last time unless its database answers."""
        settings, earlier = self._settings, self._delays.get(shard)
        if earlier is None or answers:
            delay = settings.first_delay_seconds
        else:
            delay = min(2 * earlier, settings.max_delay_seconds)
        until = now + delay * (0.5 + self._chance() / 2)
        self._delays[shard] = delay
        self._cut_short.discard(shard)
        self._paused[shard] = database
        self._pauses.setdefault(database, {})[shard] = until
        heappush(self._due, (until, shard))
        self._probe_at.setdefault(database, now + settings.probe_seconds)
        for priority in Priority:
            self._unqueue((priority, shard), database)
            if self.loaded >= settings.max_loaded_entries:
                self._unload((priority, shard))

    def _unload(self, key: LaneKey) -> None:
        """Leave the entries of a lane that waits to the disk, which has them: the memory is for those that are due."""
        lane = self._lanes.get(key)
        if lane is None or lane.is_busy or not lane.ready:
            return
        oldest = min(entry.accepted_ms for entry in lane.ready)
        lane.disk_since_ms = min(oldest, lane.disk_since_ms) if lane.on_disk else oldest
        lane.on_disk += len(lane.ready)
        lane.loaded_to = 0  # what is done is removed before a page is read
        self.loaded -= len(lane.ready)
        lane.ready.clear()

    def _unqueue(self, key: LaneKey, database: str) -> None:
        if key in self._queued:
            self._queued.discard(key)
            queues = self._queues[key[0]]
            queues[database].remove(key)
            if not queues[database]:
                del queues[database]

    def _answers(self, database: str) -> None:
        """End the pauses of a database that answers, and forget how long they were."""
        for shard in list(self._pauses.get(database, ())):
            self._delays.pop(shard, None)
            self._cut_short.add(shard)
            self._end_pause(shard)

    def _end_pauses(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            until, shard = heappop(self._due)
            if self._is_current(until, shard):
                self._end_pause(shard)

    def _end_pause(self, shard: int) -> None:
        database = self._paused.pop(shard)
        pauses = self._pauses[database]
        del pauses[shard]
        if not pauses:
            del self._pauses[database], self._probe_at[database]
        for priority in Priority:
            if (priority, shard) in self._lanes:
                self._queue((priority, shard))

    def _is_current(self, until: float, shard: int) -> bool:
        database = self._paused.get(shard)
        return database is not None and self._pauses[database][shard] == until
