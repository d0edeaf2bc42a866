"""Misses that go to the region's database, those of one tick in few statements (DESIGN.md §3, §5). Each has its answer
as soon as its shard has one.

While a read is under way the next ones gather, and go together when it has ended: a statement's system calls and
wake-ups cost more than what it asks for, and under load as many as come within a round trip share them. Nobody waits
for a read that takes long, nor when many have gathered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tao.model.errors import InternalError, StaleRead, TaoError
from tao.model.graph import version_of
from tao.model.ports import ReadStore
from tao.model.queries import Fetched, FillRead, Query, shard_of
from tao.model.versions import answers
from tao.serving.fill_source import Take, give
from tao.serving.gathering import Gathering


@dataclass(frozen=True, slots=True)
class MissSettings:
    """How the database is asked."""

    max_batch_queries: int = 256
    """Queries handed to the store at once; it makes few statements of them."""

    max_rereads: int = 6
    """Reads of a row that is not yet as new as the message about it: what the binlog reader sees first becomes visible
    within milliseconds."""

    first_pause_seconds: float = 0.002
    """Pause before the first of these; it doubles."""

    gather_seconds: float = 0.002
    """How long a read that is under way may be waited for, so that misses share the next: a round trip to a database
    in reach and not busy is shorter. 0: none is."""

    max_gathered: int = 32
    """Queries that have gathered go at once, beside the read that is under way: more in one statement save little."""


class _Asked(msgspec.Struct):
    query: Query
    minimum: int
    critical: bool
    timeout_seconds: float
    take: Take
    until: float = 0.0
    reads: int = 1
    is_answered: bool = False  # it, and another read is another one


class _Line:
    """What gathers for one database."""

    __slots__ = ("began", "gathered", "timer", "under_way")

    def __init__(self) -> None:
        self.gathered: list[_Asked] = []
        self.under_way: list[_Asked] | None = None  # by the read that was begun last
        self.began = 0.0
        self.timer: asyncio.TimerHandle | None = None


class DatabaseSource:
    """A `FillSource`."""

    def __init__(
        self,
        store: ReadStore,
        database_of: Callable[[int], str],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: MissSettings,
    ) -> None:
        """``database_of``: shard → name of its database; what one of them delays holds up no other's queries."""
        self._store: Final = store
        self._database_of: Final = database_of
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._loop: Final = asyncio.get_running_loop()
        self._gathering: Gathering[tuple[str, bool], _Asked] = Gathering(self._line_up, settings.max_batch_queries)
        self._lines: dict[tuple[str, bool], _Line] = {}
        self.read_seconds: Callable[[float], None] = _nobody_observes

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """As `tao.serving.fill_source.FillSource`; ``timeout_seconds`` are those of each read. `StaleRead` when the
        database stays below ``minimum``."""
        self._ask(_Asked(query, minimum, critical, timeout_seconds, take))

    def _ask(self, asked: _Asked) -> None:
        asked.until = self._loop.time() + asked.timeout_seconds
        try:
            database = self._database_of(shard_of(asked.query))
        except TaoError as error:  # a topology without the shard, which may have come since the last read
            give(asked.take, error)
        else:
            self._gathering.add((database, asked.critical), asked)

    def _take(self, asked: _Asked, fetched: Fetched) -> None:
        if answers(version_of(fetched.value), asked.minimum, fetched.version_epoch):
            give(asked.take, fetched)
        elif asked.reads < self._settings.max_rereads:
            again = msgspec.structs.replace(asked, reads=asked.reads + 1, is_answered=False)
            self._loop.call_later(self._settings.first_pause_seconds * 2 ** (asked.reads - 1), self._ask, again)
        else:
            shard = shard_of(asked.query)
            message = f"the database of shard {shard} does not have version {asked.minimum} yet; try again"
            give(asked.take, StaleRead(message))

    def _line_up(self, to: tuple[str, bool], asked: list[_Asked]) -> None:
        line = self._lines.get(to)
        if line is None:
            line = self._lines[to] = _Line()
        room = self._settings.max_batch_queries - len(line.gathered)
        if len(asked) > room:
            self._start_reading(to, line)
        line.gathered.extend(asked)
        may_wait_until = line.began + self._settings.gather_seconds
        if (
            line.under_way is None
            or len(line.gathered) >= self._settings.max_gathered
            or self._loop.time() >= may_wait_until
        ):
            self._start_reading(to, line)
        elif line.timer is None:
            line.timer = self._loop.call_at(may_wait_until, self._start_reading, to, line)

    def _start_reading(self, to: tuple[str, bool], line: _Line) -> None:
        if line.timer is not None:
            line.timer.cancel()
            line.timer = None
        asked, line.gathered = line.gathered, []
        if not asked:
            return
        line.under_way = asked
        line.began = self._loop.time()
        try:
            self._spawn(self._read(to, line, asked))
        except TaoError as error:
            line.under_way = None
            _fail(asked, error)

    async def _read(self, to: tuple[str, bool], line: _Line, asked: list[_Asked]) -> None:
        started = self._loop.time()
        failure: TaoError = InternalError("the read was given up; see the server's log")

        def take(places: Sequence[int], read: FillRead | TaoError) -> None:
            some = [asked[place] for place in places]
            if isinstance(read, TaoError):
                _fail(some, read)
                return
            for one, value in zip(some, read.values, strict=True):
                if not one.is_answered:
                    # At first what may break: one that counts as answered is not failed when the read ends.
                    fetched = Fetched(value, read.version_epochs[shard_of(one.query)], "database")
                    one.is_answered = True
                    self._take(one, fetched)

        try:
            await self._store.read_each(
                [one.query for one in asked],
                critical=to[1],
                timeout_seconds=max(one.until for one in asked) - started,
                on_read=take,
            )
        except TaoError as error:
            failure = error
        finally:
            _fail(asked, failure)
            self.read_seconds(self._loop.time() - started)
            if line.under_way is asked:
                line.under_way = None
                self._start_reading(to, line)


def _fail(asked: list[_Asked], error: TaoError) -> None:
    for one in asked:
        if not one.is_answered:
            one.is_answered = True
            give(one.take, error)


def _nobody_observes(_: float) -> None:
    """Until the server wires a metric in."""
