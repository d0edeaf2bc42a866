"""The places that misses are fetched from: their interface, the databases of the region, and other cache servers.

A source answers by callback. A miss passes several objects on its way to the source and back, and a task, a future or a
coroutine at each of them would cost more than the work that is done there. What happens only after a failure (another
way is tried, or the same after a pause) may be a task: `fetch_and_wait` and `deliver_from_task` translate between the
two.

The queries of one tick are read together. While a database is read, the next queries are collected, and are sent
together when that read has ended: a statement's system calls and wake-ups cost more than the rows that it reads, and
under load the queries of a whole round trip share them. No query waits for a read that takes long, nor once enough
queries are collected. Each query is answered as soon as the statement for its shard is. To another cache server, the
queries of one tick travel in one message, whose answer serves all of them in one pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from tao.model.edge_block import checked_header
from tao.model.errors import (
    DatabaseDown,
    InternalError,
    MasterReadOnly,
    NotMine,
    ProtocolError,
    StaleRead,
    TaoError,
    TopologyError,
    Unavailable,
)
from tao.model.graph import COUNT_VALUE_BYTES, OBJECT_HEADER_BYTES, version_of
from tao.model.ports import ReadStore
from tao.model.queries import CountQuery, Fetched, FillRead, ObjectQuery, Query, shard_of
from tao.model.topology import CacheServer, DatabaseServer
from tao.model.versions import answers
from tao.serving.access import pass_caller
from tao.serving.configuration import Configuration, ServerContext, Spawn
from tao.storage.session import ServerAccount
from tao.storage.tls import DatabaseTls
from tao.wire.convert import error_from_pb
from tao.wire.links import LinksPort
from tao.wire.read_batch import encode_queries
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)

Take = Callable[[Fetched | TaoError], None]
"""A callback that is called once, with what was fetched or with why it was not."""


OnPause = Callable[[TaoError], bool]
"""A callback before a pause, with the error of the attempt before it. Returns whether another attempt may follow;
otherwise this error is the answer."""


def always_pause(_: TaoError) -> bool:
    """Let another attempt follow: what is fetched keeps no place in the share of any caller."""
    return True


class FetchRequest(msgspec.Struct):
    """One query on its way to a source, and what is done with the answer. It belongs to the source once it is fetched:
    the sources that it passes note in it what they need, so that none of them makes an object of its own."""

    query: Query
    shard: int
    minimum: int
    """The version that the answer must have at least; 0 for any."""

    take: Take
    """Called within about ``timeout_seconds``, and perhaps before `FetchSource.fetch` returns."""

    timeout_seconds: float

    critical: bool = False
    """Read the master database, by a read that begins after the call of `FetchSource.fetch`."""

    caller: str | None = None
    """On whose behalf another server should fetch, by its rights and in its share; None: on this server's."""

    on_pause: OnPause = always_pause
    """Called before each pause, except for the milliseconds in which a row becomes visible."""

    # What sources note.
    instead: Callable[[FetchRequest, TaoError], None] | None = None
    """What takes an error in place of ``take``, because there is another place to fetch from. At most one of the
    sources on the way sets it: a source in front of two others passes a new request to the second one."""
    instead_until: float = 0.0
    """The time at which there is none any more."""
    until: float = 0.0
    attempt: int = 1
    is_answered: bool = False
    """Whether this attempt is; the next one is another request."""

    def fail(self, error: TaoError) -> None:
        """Pass an error on to what takes it."""
        deliver(self.take if self.instead is None else partial(self.instead, self), error)


class FetchSource(Protocol):
    """A place to fetch queries from: the leaders for a follower, the region's database for a leader."""

    def fetch(self, asked: FetchRequest) -> None:
        """Fetch one query; queries of one tick of the loop travel together. Nothing is raised."""


def deliver(take: Take, answer: Fetched | TaoError) -> None:
    """Call ``take`` with the answer. An exception there is logged and does not keep other waiters from their answer;
    ``take`` is called again with an error, so that what waits behind it does not wait for ever."""
    try:
        take(answer)
    except Exception as error:  # noqa: BLE001 - logged there
        _deliver_failure(take, answer, error)


def _deliver_failure(take: Take, answer: Fetched | TaoError, error: Exception) -> None:
    """Do what `deliver` does about an exception of ``take``. Where many answers come at once, each is delivered by a
    ``try`` of its own in place of a call."""
    _logger.error("a fetched answer could not be delivered", exc_info=error)
    if not isinstance(answer, InternalError):
        deliver(take, _broken(error))


async def fetch_and_wait(
    source: FetchSource,
    query: Query,
    minimum: int,
    *,
    critical: bool,
    timeout_seconds: float,
    caller: str | None = None,
    on_pause: OnPause = always_pause,
) -> Fetched:
    """Call `FetchSource.fetch` and return the answer. Raises the `TaoError`."""
    waiter: asyncio.Future[Fetched | TaoError] = asyncio.get_running_loop().create_future()

    def take(answer: Fetched | TaoError) -> None:
        if not waiter.done():
            waiter.set_result(answer)

    source.fetch(FetchRequest(query, shard_of(query), minimum, take, timeout_seconds, critical, caller, on_pause))
    answer = await waiter
    if isinstance(answer, TaoError):
        raise answer
    return answer


def deliver_from_task(spawn: Spawn, fetching: Coroutine[Any, Any, Fetched], take: Take) -> None:
    """Run ``fetching`` as a task of the server, and call ``take`` with its result or its error."""
    try:
        spawn(_deliver_result(fetching, take))
    except TaoError as refused:  # the server has as many tasks as it may have
        fetching.close()
        deliver(take, refused)


async def _deliver_result(fetching: Coroutine[Any, Any, Fetched], take: Take) -> None:
    try:
        answer: Fetched | TaoError = await fetching
    except TaoError as error:
        answer = error
    except Exception as error:
        deliver(take, _broken(error))
        raise
    deliver(take, answer)


Destination = TypeVar("Destination", bound=Hashable)
Item = TypeVar("Item")


class TickBatcher(Generic[Destination, Item]):
    """Collects the items that come within one tick of the event loop into one batch for each destination."""

    def __init__(
        self,
        send: Callable[[Destination, list[Item]], None],
        fail: Callable[[Destination, list[Item], Exception], None],
        max_items: int,
    ) -> None:
        """``send`` is called with at most ``max_items`` items of one destination at a time. When it raises, ``fail`` is
        called with the same items and the exception, and must end the wait of their callers; it raises nothing."""
        self._send: Final = send
        self._fail: Final = fail
        self._max_items: Final = max_items
        self._call_soon: Final = asyncio.get_running_loop().call_soon
        self._waiting: dict[Destination, list[Item]] = {}

    def add(self, destination: Destination, item: Item) -> None:
        """Send the item at the end of this tick, or now when it completes a batch."""
        if not self._waiting:
            self._call_soon(self._flush)
        items = self._waiting.setdefault(destination, [])
        items.append(item)
        if len(items) >= self._max_items:
            self._waiting[destination] = []
            self.send_now(destination, items)

    def send_now(self, destination: Destination, items: list[Item]) -> None:
        """Send these items at once, and no others with them."""
        try:
            self._send(destination, items)
        except TaoError as error:
            self._fail(destination, items, error)
        except Exception as error:
            # A bug must not leave callers without an answer, here or at the other destinations.
            _logger.exception("a batch could not be sent")
            self._fail(destination, items, error)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for destination, items in waiting.items():
            if items:
                self.send_now(destination, items)


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

    def keeps_lease(self, shard: int) -> bool:
        """Return whether the shard's master takes writes only under a lease. Raises `InvalidArgument`."""
        return self._configuration.routes.database_of(shard).keeps_lease

    def is_elsewhere(self, shard: int, server: str) -> bool:
        """Return whether a database server belongs to another database than the shard. Raises `InvalidArgument`."""
        holder = self._configuration.routes.database_of(shard)
        return any(
            each.server.name == server and each.database.name != holder.name
            for each in self._configuration.routes.topology.database_servers
        )

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

    def login(self, user: str, password: str, tls: DatabaseTls | None) -> Callable[[str], ServerAccount]:
        """Return a function from a server's name to its address, as this region reaches it, with the account to use.
        The function raises `TopologyError` for an unknown name."""
        accounts: dict[str, ServerAccount] = {}  # of the routes in use: each read asks for one
        routes = self._configuration.routes

        def account(name: str) -> ServerAccount:
            nonlocal routes
            if routes is not self._configuration.routes:
                routes = self._configuration.routes
                accounts.clear()
            found = accounts.get(name)
            if found is None:
                server = self._server(name)
                found = accounts[name] = ServerAccount(server.host, server.port, user, password, server.socket, tls)
            return found

        return account

    def _server(self, name: str) -> DatabaseServer:
        for database in self._configuration.routes.topology.databases:
            for server in database.places.values():
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
    the binlog reader has seen it. Also of a critical read that a former master refused, after which the topology is
    read anew, one reading for all at a time: the caller tries again when it takes longer."""

    first_pause_seconds: float = 0.002
    """Pause before the second read; it doubles."""

    gather_seconds: float = 0.002
    """Longest wait for a read that is under way, so that the misses that come meanwhile share the next one: a round
    trip to a near database that is not busy is shorter. 0: no wait."""

    max_gathered: int = 32
    """Collected queries that are read at once, beside the read that is under way: more queries in one statement save
    little."""


def not_there_yet(query: Query, minimum: int) -> StaleRead:
    """Return the error of a read whose database stays below the version that it asks for."""
    return StaleRead(f"the database of shard {shard_of(query)} does not have version {minimum} yet; try again")


class _Line:
    """The queries that are collected for one database."""

    __slots__ = ("began", "gathered", "is_starting", "timer", "under_way")

    def __init__(self) -> None:
        self.gathered: list[FetchRequest] = []
        self.is_starting = False  # a read takes what is gathered in the next turn of the loop
        self.under_way: list[FetchRequest] | None = None  # the queries of the latest read
        self.began = 0.0
        self.timer: asyncio.TimerHandle | None = None


_TOPOLOGY_SECONDS: Final = 0.1
"""Longest wait for a topology that may name another master, before the next read of what a server refused. It is read
within milliseconds. While etcd is silent, the server that refused may be opened all the same."""


async def _nothing_to_refresh(_: float) -> None:
    return


class DatabaseSource:
    """A `FetchSource` that reads databases."""

    def __init__(
        self,
        store: ReadStore,
        database_of: Callable[[int], str],
        spawn: Spawn,
        settings: DatabaseReadSettings,
        refresh: Callable[[float], Awaitable[object]] = _nothing_to_refresh,
    ) -> None:
        """``database_of`` maps a shard to the name of its database. Queries for one database do not wait for
        another. ``refresh`` reads the topology anew, which may name another master, and waits for it at most the
        seconds that it is given."""
        self._store: Final = store
        self._database_of: Final = database_of
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._refresh: Final = refresh
        self._loop: Final = asyncio.get_running_loop()
        self._lines: dict[tuple[str, bool], _Line] = {}
        self.read_seconds: Callable[[float], None] = lambda _: None

    def fetch(self, asked: FetchRequest) -> None:
        """Read one query. ``timeout_seconds`` is the limit of each read. The answer is `StaleRead` when the database
        stays below ``minimum``. See `FetchSource`."""
        now = self._loop.time()
        asked.until = now + asked.timeout_seconds
        try:
            database = self._database_of(asked.shard)
        except TaoError as error:  # the shard may be gone from the topology since the last read
            asked.fail(error)
        else:
            self._line_up((database, asked.critical), asked, now)

    def _take(self, asked: FetchRequest, fetched: Fetched) -> None:
        if answers(version_of(fetched.value), asked.minimum, fetched.version_epoch):
            deliver(asked.take, fetched)
        elif asked.attempt < self._settings.max_rereads:
            self._ask_again(asked)
        else:
            asked.fail(not_there_yet(asked.query, asked.minimum))

    def _ask_again(self, asked: FetchRequest) -> None:
        again = msgspec.structs.replace(asked, attempt=asked.attempt + 1, is_answered=False)
        self._loop.call_later(self._settings.first_pause_seconds * 2 ** (asked.attempt - 1), self.fetch, again)

    def _refuse(self, asked: Sequence[FetchRequest], error: TaoError) -> None:
        """Fail queries, or ask the master of a newer topology when the server turned out not to be the master."""
        again = [one for one in asked if not one.is_answered and one.attempt < self._settings.max_rereads]
        if isinstance(error, MasterReadOnly) and again:
            try:
                self._spawn(self._ask_new_master(again, error))
            except TaoError as refused:
                error = refused
            else:
                for one in again:
                    one.is_answered = True  # this read
        _fail_all(asked, error)

    async def _ask_new_master(self, asked: Sequence[FetchRequest], error: MasterReadOnly) -> None:
        try:
            await self._refresh(min(_TOPOLOGY_SECONDS, min([one.until for one in asked]) - self._loop.time()))
        except Exception:
            # A bug there must not leave a fetch that never finishes; the failed task is logged.
            for one in asked:
                one.fail(error)
            raise
        for one in asked:
            self._ask_again(one)

    def _line_up(self, to: tuple[str, bool], asked: FetchRequest, now: float) -> None:
        line = self._lines.get(to)
        if line is None:
            line = self._lines[to] = _Line()
        line.gathered.append(asked)
        if line.is_starting:
            return
        may_wait_until = line.began + self._settings.gather_seconds
        if line.under_way is None or len(line.gathered) >= self._settings.max_gathered or now >= may_wait_until:
            self._start_reading(to, line)
        elif line.timer is None:
            line.timer = self._loop.call_at(may_wait_until, self._start_reading, to, line)

    def _start_reading(self, to: tuple[str, bool], line: _Line) -> None:
        """Start a read, which begins in the next turn of the loop: the queries of this turn join it."""
        if line.timer is not None:
            line.timer.cancel()
            line.timer = None
        if line.gathered and not line.is_starting:
            line.is_starting = True
            self._loop.call_soon(self._begin_read, to, line)

    def _begin_read(self, to: tuple[str, bool], line: _Line) -> None:
        started = line.began = self._loop.time()
        most = self._settings.max_batch_queries
        asked, line.gathered = line.gathered[:most], line.gathered[most:]
        line.is_starting = False
        line.under_way = asked
        if line.gathered:
            self._start_reading(to, line)

        def end() -> None:
            self.read_seconds(self._loop.time() - started)
            if line.under_way is asked:
                line.under_way = None
                self._start_reading(to, line)

        def end_at_once() -> None:
            self._read_rest(asked, to[1], end)

        has_begun = False
        try:
            has_begun = not to[1] and self._store.read_at_once(
                [one.query for one in asked],
                timeout_seconds=max([one.until for one in asked]) - started,
                on_read=partial(self._take_read, asked),
                on_end=end_at_once,
            )
        except Exception:
            # A bug there must not leave fetches that never finish.
            _logger.exception("a read could not be begun at once")
        if not has_begun:
            self._read_rest(asked, to[1], end)

    def _take_read(self, asked: Sequence[FetchRequest], places: Sequence[int], read: FillRead | TaoError) -> None:
        some = [asked[place] for place in places]
        if isinstance(read, TaoError):
            self._refuse(some, read)
            return
        epochs = read.version_epochs
        for one, value in zip(some, read.values, strict=True):
            if not one.is_answered:
                # First what may raise: a query that is marked as answered is not failed when the read ends.
                fetched = Fetched(value, epochs[one.shard], "database")
                one.is_answered = True
                if one.minimum:
                    self._take(one, fetched)
                else:
                    try:
                        one.take(fetched)
                    except Exception as error:  # noqa: BLE001 - logged there
                        _deliver_failure(one.take, fetched, error)

    def _read_rest(self, asked: Sequence[FetchRequest], critical: bool, on_end: Callable[[], None]) -> None:
        """Read the queries that have no answer yet, if there are any, as a task."""
        rest = [one for one in asked if not one.is_answered]
        if not rest:
            on_end()
            return
        try:
            self._spawn(self._read(rest, critical, on_end))
        except TaoError as error:
            _fail_all(rest, error)
            on_end()

    async def _read(self, asked: Sequence[FetchRequest], critical: bool, on_end: Callable[[], None]) -> None:
        failure: TaoError | None = None
        try:
            await self._store.read_each(
                [one.query for one in asked],
                critical=critical,
                timeout_seconds=max([one.until for one in asked]) - self._loop.time(),
                on_read=partial(self._take_read, asked),
            )
        except TaoError as error:
            failure = error
        finally:
            _fail_all(asked, failure or InternalError("the read was given up; see the server's log"))
            on_end()


def _broken(error: Exception) -> InternalError:
    return InternalError(f"{type(error).__name__} in a fetch; see the server's log")


def _fail_all(asked: Sequence[FetchRequest], error: TaoError) -> None:
    for one in asked:
        if not one.is_answered:
            one.is_answered = True
            one.fail(error)


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Batches and attempts of requests to the server above."""

    max_batch_queries: int = 512
    """Most queries in one message to a leader: an answer with so many lists stays well below the largest frame."""

    max_attempts: int = 6
    """Most attempts of one fetch while the leader does not own the shard yet, or cannot be reached."""

    first_pause_seconds: float = 0.05
    """Pause before the second attempt; it doubles. A leader takes its shards within a few hundred milliseconds of the
    topology that gives them to it, and the six attempts span a second and a half."""


class RemoteSource:
    """A `FetchSource` that asks other cache servers."""

    def __init__(
        self,
        context: ServerContext,
        locate: Callable[[int], CacheServer],
        settings: RemoteSettings,
        *,
        gives_up: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """``locate`` maps a shard to the server to ask, by the topology that is current when it is called.
        ``gives_up`` returns true for a shard for which a failed request is not repeated."""
        self._configuration: Final = context.configuration
        self._locate: Final = locate
        self._links: Final[LinksPort] = context.links
        self._spawn: Final = context.spawn_as("repeated fetch")
        self._settings: Final = settings
        self._budget: Final = context.budget
        self._gives_up: Final = gives_up
        loop = asyncio.get_running_loop()
        self._now: Final = loop.time
        self._call_soon: Final = loop.call_soon
        # By shard, because the leader of a shard is located once for all of its queries.
        self._gathered: dict[tuple[int, bool, str | None], list[FetchRequest]] = {}

    def fetch(self, asked: FetchRequest) -> None:
        """Fetch one query; all attempts together take at most ``timeout_seconds``. See
        `FetchSource`."""
        if asked.attempt == 1:
            asked.until = self._now() + asked.timeout_seconds
        if not self._gathered:
            self._call_soon(self._ask_leaders)
        key = asked.shard, asked.critical, asked.caller
        gathered = self._gathered.get(key)
        if gathered is None:
            self._gathered[key] = [asked]
        else:
            gathered.append(asked)

    def _ask_leaders(self) -> None:
        gathered, self._gathered = self._gathered, {}
        by_leader: dict[tuple[CacheServer, bool, str | None], list[FetchRequest]] = {}
        for (shard, critical, caller), asked in gathered.items():
            try:
                leader = self._locate(shard)
            except TaoError as error:
                _fail_all(asked, error)
            except Exception as error:
                _logger.exception("the leader of shard %d could not be located", shard)
                _fail_all(asked, _broken(error))
            else:
                by_leader.setdefault((leader, critical, caller), []).extend(asked)
        most = self._settings.max_batch_queries
        for (leader, critical, caller), asked in by_leader.items():
            for start in range(0, len(asked), most):
                some = asked[start : start + most]
                try:
                    self._ask_leader(leader, critical, caller, some)
                except Exception as error:
                    # A bug must not leave fetches that never finish, here or at the other leaders.
                    _logger.exception("%s could not be asked", leader.name)
                    _fail_all(some, _broken(error))

    def _ask_leader(self, leader: CacheServer, critical: bool, caller: str | None, asked: list[FetchRequest]) -> None:
        # The request's batch is filled in place, because protobuf copies a message that is assigned to a field.
        request = pb.Request(topology_version=self._configuration.routes.version)
        order = encode_queries([(one.query, one.minimum) for one in asked], request.read)
        if critical:
            request.read.critical = True
        if caller is not None:
            pass_caller(request, caller)
        by_slot = [asked[index] for index in order]
        timeout_seconds = max([one.until for one in asked]) - self._now()
        link = self._links.to(leader)
        # Written here and not in the next turn of the loop: the queries of this one are all in the message.
        link.hold()
        try:
            link.send(request, timeout_seconds, lambda answer: self._take(by_slot, answer))
        finally:
            link.flush()

    def _take(self, by_slot: Sequence[FetchRequest], answer: pb.Answer) -> None:
        if answer.HasField("error"):
            error = error_from_pb(answer.error)
            for one in by_slot:
                self._fail(one, error)
            return
        # Protobuf creates a sub-message that is merely read, so only fields with content are read.
        read = answer.read
        if values := read.values:
            self._budget.earn(len(values))
            epochs = dict(zip(read.epoch_shards, read.version_epochs, strict=False))
            missed, served_by = set(read.missed_slots), read.served_by
            slots: Sequence[int] = read.slots or range(len(values))
            for slot, value in zip(slots, values, strict=False):
                one = by_slot[slot]
                if not one.is_answered:
                    one.is_answered = True
                    origin = served_by if slot in missed else "leader"
                    kind, size = type(one.query), len(value)
                    is_right = kind is ObjectQuery and size >= OBJECT_HEADER_BYTES
                    is_right = is_right or (kind is CountQuery and size == COUNT_VALUE_BYTES)
                    if not is_right and (wrong := _fault_of(one.query, value)) is not None:
                        one.fail(wrong)
                        continue
                    fetched = Fetched(value, epochs.get(one.shard, 0), origin)
                    try:
                        one.take(fetched)
                    except Exception as error:  # noqa: BLE001 - logged there
                        _deliver_failure(one.take, fetched, error)
        if failed := read.failed_slots:
            for slot, failure in zip(failed, read.errors, strict=False):
                self._fail(by_slot[slot], error_from_pb(failure))
        if not answer.more:
            for one in by_slot:
                if not one.is_answered:
                    self._fail(one, ProtocolError("the leader's answer lacks a value for a query"))

    def _fail(self, asked: FetchRequest, error: TaoError) -> None:
        if asked.is_answered:
            return
        asked.is_answered = True
        # The leader knows that the database is down; a repeated request brings it back no sooner.
        if isinstance(error, NotMine | Unavailable) and not isinstance(error, DatabaseDown):
            now, settings = self._now(), self._settings
            pause_seconds = settings.first_pause_seconds * 2 ** (asked.attempt - 1)
            # Also when the leader is known to be down by now: the caller may have another source to ask.
            gone = self._gives_up(asked.shard) or now + pause_seconds >= asked.until
            may_repeat = not gone and asked.attempt < settings.max_attempts
            if may_repeat and asked.on_pause(error) and self._budget.spend(now):
                try:
                    self._spawn(self._ask_again(asked, pause_seconds, error))
                except TaoError as refused:
                    error = refused
                else:
                    return
        asked.fail(error)

    async def _ask_again(self, asked: FetchRequest, pause_seconds: float, last: TaoError) -> None:
        """Ask again after a pause, and by the topology that the last answer has named: by an older one the query would
        go where it was refused. A look for that topology counts as an attempt."""
        named = last.topology_version if isinstance(last, NotMine) else 0
        attempt = asked.attempt
        while True:
            await asyncio.sleep(pause_seconds)
            attempt += 1
            try:
                # No longer than the pause: while etcd is silent, a read takes all the time of the fetch. It goes on.
                await self._configuration.refresh(min(pause_seconds, asked.until - self._now()))
            except Exception as error:
                # A bug there must not leave a fetch that never finishes; the failed task is logged.
                asked.fail(_broken(error))
                raise
            if self._configuration.routes.version >= named:
                break
            pause_seconds *= 2
            if attempt >= self._settings.max_attempts or self._now() + pause_seconds >= asked.until:
                asked.fail(last)
                return
        self.fetch(msgspec.structs.replace(asked, attempt=attempt, is_answered=False))


def _fault_of(query: Query, value: bytes) -> ProtocolError | None:
    """Return what is wrong with a leader's value, or None. It is checked before the value is cached, because an invalid
    value would fail every batch that asks for it."""
    if isinstance(query, ObjectQuery):
        if len(value) < OBJECT_HEADER_BYTES:
            return ProtocolError(f"the leader's object has {len(value)} bytes, fewer than {OBJECT_HEADER_BYTES}")
    elif isinstance(query, CountQuery):
        if len(value) != COUNT_VALUE_BYTES:
            return ProtocolError(f"the leader's count has {len(value)} bytes instead of {COUNT_VALUE_BYTES}")
    else:
        try:
            checked_header(value)
        except ProtocolError as error:
            return error
    return None
