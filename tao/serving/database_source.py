"""Fetch misses from the region's database, those of one tick in few statements, and choose the server to ask.

While a read is under way the next queries are collected, and are sent together when it has ended: a statement's system
calls and wake-ups cost more than the rows that it reads, and under load the queries of a whole round trip share them.
No query waits for a read that takes long, nor once enough queries are collected. Each query is answered as soon as the
statement for its shard is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tao.model.errors import InternalError, StaleRead, TaoError, TopologyError
from tao.model.graph import version_of
from tao.model.ports import ReadStore
from tao.model.queries import Fetched, FillRead, Query, shard_of
from tao.model.topology import DatabaseServer
from tao.model.versions import answers
from tao.serving.configuration import Configuration
from tao.serving.fetch_source import Take, TickBatcher, deliver
from tao.storage.session import ServerAccount


class Databases:
    """The database servers that one region uses, by the current topology."""

    def __init__(self, region: str, configuration: Configuration) -> None:
        self._region: Final = region
        self._configuration: Final = configuration

    def database_of(self, shard: int) -> str:
        """Return the name of the shard's replication set. Raises `InvalidArgument` for a shard that does not exist."""
        return self._configuration.routes.database_of(shard).name

    def local(self, shard: int) -> str:
        """Return the name of the region's own server. Raises `InvalidArgument`, or `TopologyError` if there is none."""
        return self._configuration.routes.database_server(shard, self._region).name

    def master(self, shard: int) -> str:
        """Return the name of the master server. Raises what `local` raises."""
        routes = self._configuration.routes
        return routes.database_server(shard, routes.master_region(shard)).name

    def local_is_down(self, shard: int) -> bool:
        """Return whether the region's own server is marked down. Raises what `local` raises."""
        return self._configuration.routes.database_server(shard, self._region).down

    def is_mastered_here(self, shard: int) -> bool:
        """Return whether the region's own server is the master. Raises `InvalidArgument`."""
        return self._configuration.routes.master_region(shard) == self._region

    def other_region(self, shard: int) -> str | None:
        """Return the region to ask when this region's server cannot answer, or None. That is the master's region; if
        the master is in this region, it is one that has a replica. A replica that is marked down is better than none: a
        server that is being promoted is marked down for a moment, and may be the only one then. Raises
        `InvalidArgument`."""
        database = self._configuration.routes.database_of(shard)
        if database.master_region != self._region:
            return database.master_region
        replicas = [region for region in database.servers if region != self._region]
        return min(replicas, key=lambda region: database.servers[region].down, default=None)

    def login(self, user: str, password: str) -> Callable[[str], ServerAccount]:
        """Return a function from a server's name to its address, as this region reaches it, with the account to use.
        The function raises `TopologyError` for an unknown name."""

        def account(name: str) -> ServerAccount:
            server = self._server(name)
            return ServerAccount(server.host, server.port, user, password, server.socket)

        return account

    def _server(self, name: str) -> DatabaseServer:
        for database in self._configuration.routes.topology.databases:
            for server in database.servers.values():
                if server.name == name:
                    return server.seen_from(self._region)
        raise TopologyError(f"the topology names no database server {name}")


@dataclass(frozen=True, slots=True)
class DatabaseReadSettings:
    """Batching and repeats of database reads."""

    max_batch_queries: int = 256
    """Most queries handed to the store at once; the store makes few statements of them."""

    max_rereads: int = 6
    """Most reads of a row that is older than the message about it: a change becomes visible within milliseconds after
    the binlog reader has seen it."""

    first_pause_seconds: float = 0.002
    """Pause before the second read; it doubles."""

    gather_seconds: float = 0.002
    """Longest wait for a read that is under way, so that the misses that come meanwhile share the next one: a round
    trip to a near database that is not busy is shorter. 0: no wait."""

    max_gathered: int = 32
    """Collected queries that are read at once, beside the read that is under way: more queries in one statement save
    little."""


class _Asked(msgspec.Struct):
    query: Query
    minimum: int
    critical: bool
    timeout_seconds: float
    take: Take
    until: float = 0.0
    reads: int = 1
    is_answered: bool = False  # this read; another read of the query is another `_Asked`


class _Line:
    """The queries that are collected for one database."""

    __slots__ = ("began", "gathered", "timer", "under_way")

    def __init__(self) -> None:
        self.gathered: list[_Asked] = []
        self.under_way: list[_Asked] | None = None  # the queries of the latest read
        self.began = 0.0
        self.timer: asyncio.TimerHandle | None = None


class DatabaseSource:
    """A `FetchSource` that reads databases."""

    def __init__(
        self,
        store: ReadStore,
        database_of: Callable[[int], str],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: DatabaseReadSettings,
    ) -> None:
        """``database_of`` maps a shard to the name of its database. Queries for one database do not wait for
        another."""
        self._store: Final = store
        self._database_of: Final = database_of
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._loop: Final = asyncio.get_running_loop()
        self._gathering: TickBatcher[tuple[str, bool], _Asked] = TickBatcher(self._line_up, settings.max_batch_queries)
        self._lines: dict[tuple[str, bool], _Line] = {}
        self.read_seconds: Callable[[float], None] = _nobody_observes

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """Read one query. ``timeout_seconds`` is the limit of each read. The answer is `StaleRead` when the database
        stays below ``minimum``. See `tao.serving.fetch_source.FetchSource`."""
        self._ask(_Asked(query, minimum, critical, timeout_seconds, take))

    def _ask(self, asked: _Asked) -> None:
        asked.until = self._loop.time() + asked.timeout_seconds
        try:
            database = self._database_of(shard_of(asked.query))
        except TaoError as error:  # the shard may be gone from the topology since the last read
            deliver(asked.take, error)
        else:
            self._gathering.add((database, asked.critical), asked)

    def _take(self, asked: _Asked, fetched: Fetched) -> None:
        if answers(version_of(fetched.value), asked.minimum, fetched.version_epoch):
            deliver(asked.take, fetched)
        elif asked.reads < self._settings.max_rereads:
            again = msgspec.structs.replace(asked, reads=asked.reads + 1, is_answered=False)
            self._loop.call_later(self._settings.first_pause_seconds * 2 ** (asked.reads - 1), self._ask, again)
        else:
            shard = shard_of(asked.query)
            message = f"the database of shard {shard} does not have version {asked.minimum} yet; try again"
            deliver(asked.take, StaleRead(message))

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
                    # First what may raise: a query that is marked as answered is not failed when the read ends.
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
            deliver(one.take, error)


def _nobody_observes(_: float) -> None:
    """Ignore a duration, until the server sets a metric."""
