"""Connections to the database servers, pooled per (server, role), bounded in number and in who may wait.

aiomysql's own pool has no bound on waiting and gives back connections whose query was cancelled; this one lends a
session for the length of a ``with``, and takes back only one that ended well. Nobody stands in a line that is longer
than his time, and nobody is sent to a server that is down (`tao.storage.server_health`): both are refused at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from tao.model.errors import DeadlineExceeded, OutcomeUnknown, Overloaded, SettingsError, TaoError, Unavailable
from tao.routing.failure_detector import Standing
from tao.storage.dialect import SessionSetup
from tao.storage.failures import ConnectionLost
from tao.storage.server_health import HealthSettings, ServerHealth
from tao.storage.session import ServerAccount, Session, open_session
from tao.storage.turns import Turns

_NEWEST_WEIGHT: Final = 0.1
"""Of the last loan in the average length of loans."""

_NO_ANSWER: Final = (Unavailable, DeadlineExceeded, OutcomeUnknown)
"""What a server that does not answer makes a loan end with; any other error of ours is an answer."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """One pool: one server, one role."""

    max_connections: int = 8
    """Eight saturate a client process: 25 k selects/s against 9 k on one; more only add threads at the server."""
    max_waiting: int = 1024
    """Askers in line for a connection; beyond that the answer is "overloaded" at once, as the line would outlast any
    deadline."""
    connect_seconds: float = 2.0
    """A server in reach greets within a round trip; one that does not is better given up early."""
    idle_seconds: float = 300.0
    """A connection unused for so long is closed rather than trusted: firewalls and servers forget silently."""
    health: HealthSettings = field(default_factory=HealthSettings)
    """When the server is down, and how it is probed."""

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
        self._turns = Turns(settings.max_connections)
        self._waiting = 0
        self._idle: list[Session] = []  # the last used first, so that what is superfluous ages
        self._lent: dict[Session, float] = {}  # since when
        self._is_closed = False
        self._loan_seconds = 0.0  # the average of late
        self._health = ServerHealth(server, settings.health, self._probe, self._went_down)

    @property
    def standing(self) -> Standing:
        """What is held of the server."""
        return self._health.standing

    @property
    def waiting(self) -> int:
        """Askers in line."""
        return self._waiting

    @property
    def lent(self) -> int:
        """Sessions in use."""
        return len(self._lent)

    def session(self, *, deadline: float, fresh: bool = False) -> AbstractAsyncContextManager[Session]:
        """Lend a session until the block ends; with an exception out of the block its connection is closed.

        ``fresh``: a new connection, the idle ones are dropped; for a second try after one was found dead.
        Entering raises `Overloaded` when the line is full, or too long for ``deadline`` (in the loop's time),
        `Unavailable` when the server is down or cannot be reached.
        """
        return _Loan(self, deadline, fresh)

    async def lend(self, deadline: float, fresh: bool) -> Session:
        """As `session`, which gives it back."""
        self._health.check()
        if not self._turns.take():
            await self._stand_in_line(deadline)
        try:
            self._health.check()  # it may have gone down while this one stood in line
            session = (None if fresh else self._idle_session()) or await self._open(deadline)
        except BaseException:
            self._turns.give_back()
            raise
        self._lent[session] = self._health.began()
        return session

    def take_back(self, session: Session, error: BaseException | None) -> None:
        """``error``: what its use has ended with."""
        lent_at = self._lent.pop(session)
        if error is None:
            loan_seconds = self._health.answered() - lent_at
            self._loan_seconds += _NEWEST_WEIGHT * (loan_seconds - self._loan_seconds)
        else:
            session.abort()
            if isinstance(error, TaoError) and not isinstance(error, _NO_ANSWER):
                self._health.answered()
        self._health.ended()
        if self._is_closed:
            session.abort()
        elif session.is_open:
            session.idle_since = self._loop.time()
            self._idle.append(session)
        self._turns.give_back()

    async def close(self) -> None:
        """Close all connections; what is still under way on one fails. Idempotent."""
        self._is_closed = True
        await self._health.close()
        for session in tuple(self._lent):
            session.abort()
        idle, self._idle = self._idle, []
        for session in idle:
            await session.quit()

    async def _stand_in_line(self, deadline: float) -> None:
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
                await self._turns.wait()
        except TimeoutError as error:
            raise Overloaded(f"no connection to database server {self._server} came free in time") from error
        finally:
            self._waiting -= 1

    def _idle_session(self) -> Session | None:
        """The one that was used last, if it can be trusted."""
        while self._idle:
            session = self._idle.pop()
            if session.is_open and self._loop.time() - session.idle_since < self._settings.idle_seconds:
                return session
            session.abort()
        return None

    async def _open(self, deadline: float) -> Session:
        """A new one, and the idle ones, if there are any, are dropped."""
        if self._is_closed:
            raise Unavailable(f"the connections to database server {self._server} are closed")
        for session in self._idle:
            session.abort()
        self._idle.clear()
        loop = self._loop
        began = loop.time()
        connect_by = min(deadline, began + self._settings.connect_seconds)
        try:
            return await open_session(self._account, self._server, self._setup, deadline=connect_by)
        except ConnectionLost as error:
            if loop.time() < connect_by:
                self._health.refused(error.message)
            elif connect_by < deadline:  # else the caller had hardly any time, which says nothing of the server
                self._health.not_connected(error.message)
            raise

    async def _probe(self, deadline: float) -> None:
        """Ask for next to nothing on a connection of its own. Raises `ConnectionLost` when there is no answer."""
        session = await open_session(self._account, self._server, self._setup, deadline=deadline)
        await session.quit()

    def _went_down(self) -> None:
        """What is under way will not be answered: whoever waits for it, or for its connection, learns it now."""
        for session in (*self._lent, *self._idle):
            session.abort()
        self._idle.clear()


class _Loan:
    """A context manager by hand: one made of a generator costs as much as all else about lending."""

    __slots__ = ("_deadline", "_fresh", "_pool", "_session")

    def __init__(self, pool: Pool, deadline: float, fresh: bool) -> None:
        self._pool = pool
        self._deadline = deadline
        self._fresh = fresh
        self._session: Session

    async def __aenter__(self) -> Session:
        self._session = await self._pool.lend(self._deadline, self._fresh)
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.take_back(self._session, error)


class Pools:
    """The pools of one role, made as servers are named. A server's address may change with the topology."""

    def __init__(
        self, account_of: Callable[[str], ServerAccount], setup: SessionSetup, settings: PoolSettings | None = None
    ) -> None:
        self._account_of = account_of
        self._setup = setup
        self._settings = settings or PoolSettings()
        self._pools: dict[str, tuple[ServerAccount, Pool]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, server: str) -> Pool:
        """The pool of a server by its name in the topology."""
        account = self._account_of(server)
        known = self._pools.get(server)
        if known is not None:
            if known[0] == account:
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

    def standings(self) -> dict[str, Standing]:
        """What is held of each server, for metrics and people."""
        return {name: pool.standing for name, (_, pool) in self._pools.items()}

    def figures(self) -> dict[str, dict[str, object]]:
        """For ``/stats``, by server: what is held of it, and how many use and wait for its connections."""
        now = asyncio.get_running_loop().time()
        return {
            name: {"lent": pool.lent, "waiting": pool.waiting, **pool.standing.figures(now)}
            for name, (_, pool) in self._pools.items()
        }

    async def close(self) -> None:
        """Close every pool."""
        pools, self._pools = self._pools, {}
        for _, pool in pools.values():
            await pool.close()
        if self._closing:
            await asyncio.wait(self._closing)
