"""Make accepted writes, by the write path of the follower: the first attempt as the hundredth.

An entry leaves the journal when its outcome is known. Done, or changed nothing because a newer operation was there: it
is removed. Rejected: it is parked, for an operator to look at. Everything else, also an unknown outcome, is repeated,
since an entry may be made twice (`tao.journal.commutativity`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from tao.journal.entries import Entry, ParkedEntry, Priority, decode_body
from tao.journal.schedule import Batch, LaneKey, LoadPage, Schedule
from tao.journal.settings import JournalSettings
from tao.journal.store import JournalStore, Page
from tao.model.errors import (
    InternalError,
    InvalidArgument,
    ObjectDeleted,
    OperationAhead,
    Overloaded,
    RequestError,
    TaoError,
    Unauthorized,
    UnknownType,
)
from tao.serving.access import OnBehalfOf
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import ForwardPath
from tao.serving.own_writes import OwnWrites
from tao.wire.convert import error_to_pb
from tao.wire.v1 import session_pb2 as pb

_LOOK_SECONDS: Final = 0.05
"""Pause between two looks whether batches are still under way."""

_MAX_WAITING: Final = 100_000
"""Most callers that may wait for results."""

Waiter = Callable[[pb.WriteResult], None]
"""Receives the result of an accepted write: an error when it is parked."""


class Applier:
    """Makes the entries of one journal, and hands their results to the callers who wait for them."""

    def __init__(
        self,
        context: ServerContext,
        store: JournalStore,
        schedule: Schedule,
        writes: ForwardPath,
        settings: JournalSettings,
    ) -> None:
        self._store: Final = store
        self._schedule: Final = schedule
        self._writes: Final = OwnWrites(context.name, context.clock, writes, settings.attempt_seconds)
        self._settings: Final = settings
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._spawn: Final = context.spawn_as("journaled batch")
        self._loop: Final = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._holds = True  # until the journal is open
        self._closed = False
        self._known: Final[set[int]] = set()  # entries in memory, waiting or under way
        self._under_way: Final[dict[int, Entry]] = {}
        self._waiters: Final[dict[int, list[Waiter]]] = {}
        self._waiting_callers = 0
        self._results: Final[OrderedDict[int, pb.WriteResult]] = OrderedDict()
        self._failures: Final[dict[int, str]] = {}  # by shard that pauses, why its last attempt failed
        self.done: Final[dict[Priority, int]] = dict.fromkeys(Priority, 0)
        """Entries that are done, since the start."""
        self.errors: Final[dict[Priority, int]] = dict.fromkeys(Priority, 0)
        """Attempts of entries that failed and are repeated, since the start."""

    def start(self) -> None:
        """Begin with what the journal held when it was opened."""
        self.restart(self._store.waiting_at_start)

    def close(self) -> None:
        """Begin no further batch, whatever is asked for later."""
        self._holds = self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    async def hold(self) -> None:
        """Begin no further batch until `restart`, and return once none is under way."""
        self._holds = True
        while self._under_way:  # noqa: ASYNC110 - rare, and each ends within an attempt
            await asyncio.sleep(_LOOK_SECONDS)

    def restart(self, on_disk: Mapping[LaneKey, tuple[int, int]]) -> None:
        """Go on with what is on disk (`Schedule.restart`)."""
        if self._closed:
            return
        self._holds = False
        self._known.clear()
        self._schedule.restart(on_disk)
        self._pump_soon()

    def add(self, entries: Sequence[Entry]) -> None:
        """Make these entries, which have been stored, when it is their turn."""
        for entry in entries:
            if self._schedule.add(entry):
                self._known.add(entry.number)
        self._pump_soon()

    # ---- what callers wait for -------------------------------------------------------------------------------------

    def is_known(self, number: int) -> bool:
        """Return whether this entry waits in memory, or is under way."""
        return number in self._known

    def standing(self, entry: Entry) -> str:
        """Return for people why an entry still waits: its attempts, the last error, and when the next one is due."""
        so_far = f"it was attempted {entry.attempts} times" if entry.attempts else "it was not attempted to the end yet"
        ends = self._schedule.pause_end(entry.shard)
        if ends is None:
            return f"{so_far}, and is due"
        seconds = max(0.0, ends - self._clock.monotonic())
        failure = self._failures.get(entry.shard, "unknown")
        return f"{so_far}; shard {entry.shard} pauses for {seconds:.0f} s at most after: {failure}"

    def result(self, number: int) -> pb.WriteResult | None:
        """Return the result of an entry, None when it is not kept."""
        return self._results.get(number)

    def forget_result(self, number: int) -> None:
        """Forget the error of a parked entry, which is put back."""
        self._results.pop(number, None)

    def wait_for(self, number: int, waiter: Waiter) -> None:
        """Call ``waiter`` with the result of an entry. Raises `Overloaded`."""
        if self._waiting_callers >= _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} callers wait for accepted writes here already; ask again later")
        self._waiting_callers += 1
        self._waiters.setdefault(number, []).append(waiter)

    def stop_waiting(self, number: int, waiter: Waiter) -> None:
        """Forget a waiter."""
        waiters = self._waiters.get(number, [])
        if waiter in waiters:
            waiters.remove(waiter)
            self._waiting_callers -= 1
        if not waiters:
            self._waiters.pop(number, None)

    # ---- figures ---------------------------------------------------------------------------------------------------

    def waiting(self) -> dict[Priority, int]:
        """Return the number of entries that are not done, by priority, with those under way."""
        found = self._schedule.waiting()
        for entry in self._under_way.values():
            found[entry.priority] += 1
        return found

    def oldest_seconds(self) -> dict[Priority, float]:
        """Return the age of the oldest entry that is not done, by priority; 0 where none waits."""
        oldest, now = self._schedule.oldest_ms(), self._clock.unix_ms()
        for entry in self._under_way.values():
            oldest[entry.priority] = min(oldest[entry.priority], entry.accepted_ms)
        return {each: max(0.0, now - since) / 1000 if since < inf else 0.0 for each, since in oldest.items()}

    # ---- batches ---------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Begin everything that is due, and come back when something else will be."""
        self._pumping = False
        if self._holds:
            return
        now = self._clock.monotonic()
        while (found := self._schedule.next_probe(now)) is not None:
            self._begin(found)
        for priority in Priority:
            while (found := self._schedule.next(priority, now)) is not None:
                self._begin(found)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._schedule.next_time()
        if due < inf:
            self._timer = self._loop.call_later(max(0.001, due - now), self._pump_soon)

    def _begin(self, found: Batch | LoadPage) -> None:
        if isinstance(found, LoadPage):
            self._store.read_page(found.lane, found.after, lambda page: self._page_read(found, page))
            return
        self._under_way.update({entry.number: entry for entry in found.entries})
        try:
            self._spawn(self._make(found))
        except TaoError as error:  # too many tasks
            self._finish(found, dict.fromkeys((entry.number for entry in found.entries), error))

    def _page_read(self, load: LoadPage, page: Page | None) -> None:
        if page is None:  # the disk has failed
            self._loop.call_later(self._settings.retry_seconds, self._page_over, load, None)
        else:
            self._page_over(load, page)

    def _page_over(self, load: LoadPage, page: Page | None) -> None:
        if page is None:
            self._schedule.page_read(load.lane, None)
        else:
            self._known.update(entry.number for entry in page.entries)
            self._schedule.page_read(load.lane, page.entries, page.torn)
        self._pump_soon()

    async def _make(self, batch: Batch) -> None:
        """Attempt the entries of a batch once."""
        outcomes: dict[int, pb.WriteResult | TaoError] = {}
        of_callers: dict[tuple[str | None, str], list[tuple[Entry, pb.Write]]] = {}
        try:
            for entry in batch.entries:
                try:
                    body = decode_body(entry.body)
                    write = pb.Write.FromString(body.write)
                except (msgspec.DecodeError, DecodeError) as error:
                    # Parked alone: the others of the batch are to be made.
                    outcomes[entry.number] = InvalidArgument(f"the accepted write cannot be decoded: {error}")
                    continue
                of_callers.setdefault((body.caller, body.operator), []).append((entry, write))
            attempts = (self._attempt(writes, OnBehalfOf(*behalf)) for behalf, writes in of_callers.items())
            for found in await asyncio.gather(*attempts):
                outcomes.update(found)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the lane busy for ever
            self._log.error("journaled_batch_failed", shard=batch.lane[1], exc_info=error)
            failed = InternalError(f"{type(error).__name__} while accepted writes were made; see the follower's log")
            outcomes = dict.fromkeys((entry.number for entry in batch.entries), failed)
        self._finish(batch, outcomes)

    async def _attempt(
        self, entries: Sequence[tuple[Entry, pb.Write]], behalf: OnBehalfOf
    ) -> dict[int, pb.WriteResult | TaoError]:
        outcomes = await self._writes.make([write for _, write in entries], behalf)
        return {entry.number: outcome for (entry, _), outcome in zip(entries, outcomes, strict=True)}

    def _finish(self, batch: Batch, outcomes: Mapping[int, pb.WriteResult | TaoError]) -> None:
        """Take the outcomes of an attempt."""
        done: list[Entry] = []
        repeated: list[Entry] = []
        parked: list[ParkedEntry] = []
        for entry in batch.entries:
            outcome = outcomes[entry.number]
            if isinstance(outcome, ObjectDeleted):
                outcome = pb.WriteResult(found=True)  # a deletion wins over an object that is added again
            if isinstance(outcome, pb.WriteResult):
                done.append(entry)
                self._deliver(entry, outcome)
                continue
            entry.attempts += batch.counts
            if _is_rejection(outcome) or entry.attempts >= self._settings.max_attempts:
                parked.append(ParkedEntry(entry, outcome.reason, outcome.message))
                self._deliver(entry, pb.WriteResult(error=error_to_pb(outcome)))
            else:
                repeated.append(entry)
                self.errors[entry.priority] += 1
        for entry in batch.entries:
            del self._under_way[entry.number]
        self.done[batch.lane[0]] += len(done)
        self._store.remove(done)
        if repeated and batch.counts:
            self._store.note_attempts(repeated)
        if parked:
            self._store.park(parked)
        self._schedule.finished(batch, self._clock.monotonic(), done=len(done), repeated=repeated)
        self._note_failure(batch, outcomes, repeated)
        self._pump_soon()

    def _note_failure(
        self, batch: Batch, outcomes: Mapping[int, pb.WriteResult | TaoError], repeated: Sequence[Entry]
    ) -> None:
        """Keep the reasons of the shards that pause."""
        paused = self._schedule.paused_shards
        if repeated:
            error = outcomes[repeated[0].number]
            assert isinstance(error, TaoError), "only errors are repeated"
            self._failures[batch.lane[1]] = f"{error.reason}: {error.message}"
        if len(self._failures) > 2 * len(paused) or not repeated:
            for shard in [shard for shard in self._failures if shard not in paused]:
                del self._failures[shard]

    def _deliver(self, entry: Entry, result: pb.WriteResult) -> None:
        """Keep the result of an entry that is over, and hand it to those who wait for it."""
        self._known.discard(entry.number)
        self._results[entry.number] = result
        if len(self._results) > self._settings.kept_results:
            self._results.popitem(last=False)
        waiters = self._waiters.pop(entry.number, ())
        self._waiting_callers -= len(waiters)
        for waiter in waiters:
            waiter(result)


def _is_rejection(error: TaoError) -> bool:
    """Return whether an entry is parked for this error: it would fail again in the same way. The credentials of this
    server, and a schema that a leader does not have yet, are no faults of the entry. Neither is the clock of a leader
    that is behind the one that stamped it, as after a failover: in time it passes the stamp."""
    return isinstance(error, RequestError) and not isinstance(error, Unauthorized | UnknownType | OperationAhead)
