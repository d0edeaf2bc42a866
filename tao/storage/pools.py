"""Pools of connections to the database servers, one per server and role, with bounded queues.

aiomysql's own pool does not bound waiting and reuses connections whose query was cancelled. This one lends a session
for the length of a ``with`` block and reuses it only when the block ended well. A caller is rejected at once when the
queue would take longer than its deadline, or when the server is down (`tao.storage.server_health`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from tao.model.errors import DeadlineExceeded, OutcomeUnknown, Overloaded, SettingsError, TaoError, Unavailable
from tao.routing.failure_detector import DetectorState
from tao.storage.dialect import SEMI_SYNC_STATUS, SessionSetup, semi_sync_state
from tao.storage.disk_space import DiskSpace, DiskSpaceSettings, ServerThread, waits_for_space
from tao.storage.failures import ConnectionLost
from tao.storage.semaphore import Semaphore
from tao.storage.server_health import HealthSettings, ServerHealth
from tao.storage.session import DatabaseSession, ServerAccount, open_session

_NEWEST_WEIGHT: Final = 0.1
"""Weight of the newest loan in the average duration of loans."""

_NO_ANSWER: Final = (Unavailable, DeadlineExceeded, OutcomeUnknown)
"""Errors of a loan from a server that does not answer. Any other error of ours is an answer."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Bounds of one pool, which is for one server and one role."""

    max_connections: int = 8
    """Eight saturate a client process: 25 k selects/s against 9 k on one; more only add threads at the server."""
    max_waiting: int = 1024
    """Callers that may wait for a connection. More are rejected as overloaded, as the queue would outlast any
    deadline."""
    connect_seconds: float = 2.0
    """A reachable server greets within a round trip. It is better to give up early on one that does not."""
    idle_seconds: float = 300.0
    """A connection unused for so long is closed rather than trusted: firewalls and servers forget silently."""
    health: HealthSettings = field(default_factory=HealthSettings)
    """Rules for when the server is down, and how it is probed."""
    disk_space: DiskSpaceSettings = field(default_factory=DiskSpaceSettings)
    """Rules for when the server's disk is full, and how its threads are looked at."""

    def __post_init__(self) -> None:
        if self.max_connections < 1 or self.max_waiting < 0 or min(self.connect_seconds, self.idle_seconds) <= 0:
            raise SettingsError(f"a pool needs at least one connection and positive times: {self}")


class Pool:
    """Sessions of one role at one server."""

    def __init__(self, server: str, account: ServerAccount, setup: SessionSetup, settings: PoolSettings) -> None:
        self._server = server
        self._account = account
        self._setup = setup
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._semaphore = Semaphore(settings.max_connections)
        self._waiting = 0
        self._idle: list[DatabaseSession] = []  # used as a stack, so that superfluous sessions age
        self._lent: dict[DatabaseSession, float] = {}  # session → when it was lent
        self._is_closed = False
        self._loan_seconds = 0.0  # moving average
        self._health = ServerHealth(server, settings.health, self._probe, self._went_down)
        self.space: Final = DiskSpace(server, settings.disk_space, self._has_waiting_threads)

    @property
    def state(self) -> DetectorState:
        """The health of the server."""
        return self._health.state

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a session."""
        return self._waiting

    @property
    def lent(self) -> int:
        """Number of sessions in use."""
        return len(self._lent)

    def session(self, *, deadline: float, fresh: bool = False) -> AbstractAsyncContextManager[DatabaseSession]:
        """Lend a session until the block ends. An exception out of the block closes its connection, in the way that the
        server expects if no statement is under way.

        ``fresh``: drop the idle connections and make a new one, for a second try after one was found dead. Entering
        raises `Overloaded` when the queue is full or too long for ``deadline`` (in the loop's time), and `Unavailable`
        when the server is down or cannot be reached.
        """
        return _Loan(self, deadline, fresh)

    def lend_at_once(self) -> DatabaseSession | None:
        """Lend an idle session, or return None when there is none or others wait; the caller returns it by `take_back`.
        Raises `DatabaseDown`."""
        self._health.check()
        if not self._idle or not self._semaphore.try_acquire():
            return None
        session = self._idle_session()
        if session is None:
            self._semaphore.release()
            return None
        self._lent[session] = self._health.began()
        return session

    async def lend(self, deadline: float, fresh: bool) -> DatabaseSession:
        """Lend a session; the caller returns it by `take_back`. See `session`."""
        self._health.check()
        if not self._semaphore.try_acquire():
            await self._wait_in_queue(deadline)
        try:
            self._health.check()  # the server may have gone down while this caller waited
            session = (None if fresh else self._idle_session()) or await self._open(deadline)
        except BaseException:
            self._semaphore.release()
            raise
        self._lent[session] = self._health.began()
        return session

    def take_back(self, session: DatabaseSession, error: BaseException | None) -> None:
        """Take a session back. ``error``: the exception that ended its use, if any."""
        lent_at = self._lent.pop(session)
        if error is None:
            loan_seconds = self._health.answered() - lent_at
            self._loan_seconds += _NEWEST_WEIGHT * (loan_seconds - self._loan_seconds)
        else:
            session.quit()
            if isinstance(error, TaoError) and not isinstance(error, _NO_ANSWER):
                self._health.answered()
        self._health.ended()
        if self._is_closed:
            session.quit()
        elif session.is_open:
            session.idle_since = self._loop.time()
            self._idle.append(session)
        self._semaphore.release()

    async def close(self) -> None:
        """Close all connections; statements in progress fail. Idempotent."""
        self._is_closed = True
        await self._health.close()
        await self.space.close()
        for session in tuple(self._lent):
            session.abort()
        idle, self._idle = self._idle, []
        for session in idle:
            session.quit()
        await asyncio.sleep(0)  # the transports send and close in the loop's next turn

    async def _wait_in_queue(self, deadline: float) -> None:
        if self._waiting >= self._settings.max_waiting:
            raise Overloaded(f"{self._waiting} askers wait for a connection to database server {self._server}")
        left = deadline - self._loop.time()
        expected = self._loan_seconds * (self._waiting + 1) / self._settings.max_connections
        if expected > left:
            line = f"the line for database server {self._server}"
            raise Overloaded(f"{line} takes some {expected:.2f} s, and {left:.2f} s are left; try again later")
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._semaphore.acquire()
        except TimeoutError as error:
            raise Overloaded(f"no connection to database server {self._server} came free in time") from error
        finally:
            self._waiting -= 1

    def _idle_session(self) -> DatabaseSession | None:
        """Return the session used last, unless it has been idle for too long."""
        while self._idle:
            session = self._idle.pop()
            if session.is_open and self._loop.time() - session.idle_since < self._settings.idle_seconds:
                return session
            session.quit()
        return None

    async def _open(self, deadline: float) -> DatabaseSession:
        """Open a new session, and drop the idle ones."""
        if self._is_closed:
            raise Unavailable(f"the connections to database server {self._server} are closed")
        for session in self._idle:
            session.quit()
        self._idle.clear()
        loop = self._loop
        began = loop.time()
        connect_by = min(deadline, began + self._settings.connect_seconds)
        try:
            return await open_session(self._account, self._server, self._setup, deadline=connect_by)
        except ConnectionLost as error:
            if loop.time() < connect_by:
                self._health.refused(error.message)
            # otherwise the caller had hardly any time, which proves nothing about the server
            elif connect_by < deadline:
                self._health.not_connected(error.message)
            raise

    async def _probe(self, deadline: float) -> None:
        """Connect separately to check the server. Raises `ConnectionLost` when there is no answer."""
        session = await open_session(self._account, self._server, self._setup, deadline=deadline)
        session.quit()

    async def _has_waiting_threads(self, deadline: float) -> bool:
        """Connect separately, and return whether a thread of this account waits for space on the disk."""
        session = await open_session(self._account, self._server, self._setup, deadline=deadline)
        try:
            threads = [
                ServerThread(thread["State"], thread["Time"])
                for thread in await session.named("SHOW PROCESSLIST", deadline=deadline)
            ]
            (rows,) = await session.run(SEMI_SYNC_STATUS, deadline=deadline)
            waiting = semi_sync_state(session.dialect, rows).waiting
            return waits_for_space(threads, waits_for_replica=waiting > 0)
        finally:
            session.quit()

    def _went_down(self) -> None:
        """Abort all sessions: their statements will not be answered, and their callers should fail now."""
        for session in (*self._lent, *self._idle):
            session.abort()
        self._idle.clear()


class _Loan:
    """A hand-written context manager: one made of a generator costs as much as the rest of lending."""

    __slots__ = ("_deadline", "_fresh", "_pool", "_session")

    def __init__(self, pool: Pool, deadline: float, fresh: bool) -> None:
        self._pool = pool
        self._deadline = deadline
        self._fresh = fresh
        self._session: DatabaseSession

    async def __aenter__(self) -> DatabaseSession:
        self._session = await self._pool.lend(self._deadline, self._fresh)
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.take_back(self._session, error)


class Pools:
    """The pools of one role, created on first use. A server's address may change with the topology."""

    def __init__(
        self, account_of: Callable[[str], ServerAccount], setup: SessionSetup, settings: PoolSettings | None = None
    ) -> None:
        self._account_of = account_of
        self._setup = setup
        self._settings = settings or PoolSettings()
        self._pools: dict[str, tuple[ServerAccount, Pool]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, server: str) -> Pool:
        """Return the pool of a server, by its name in the topology."""
        account = self._account_of(server)
        known = self._pools.get(server)
        if known is not None:
            if known[0] is account or known[0] == account:
                return known[1]
            closing = asyncio.ensure_future(known[1].close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        pool = Pool(server, account, self._setup, self._settings)
        self._pools[server] = (account, pool)
        return pool

    def each(self) -> dict[str, Pool]:
        """All pools by server name, for metrics."""
        return {name: pool for name, (_, pool) in self._pools.items()}

    def states(self) -> dict[str, DetectorState]:
        """Return the health of each server, for metrics and people."""
        return {name: pool.state for name, (_, pool) in self._pools.items()}

    def full(self) -> dict[str, str]:
        """Return for each server why its writes fail for lack of room; empty while there is room."""
        return {name: pool.space.reason for name, (_, pool) in self._pools.items()}

    def figures(self) -> dict[str, dict[str, object]]:
        """Return, for ``/stats``, each server's health, why its disk counts as full (empty: it has room), and the
        numbers of sessions lent and callers waiting."""
        now = asyncio.get_running_loop().time()
        return {
            name: {"lent": pool.lent, "waiting": pool.waiting, "full": pool.space.reason, **pool.state.figures(now)}
            for name, (_, pool) in self._pools.items()
        }

    async def close(self) -> None:
        """Close every pool."""
        pools, self._pools = self._pools, {}
        for _, pool in pools.values():
            await pool.close()
        if self._closing:
            await asyncio.wait(self._closing)
