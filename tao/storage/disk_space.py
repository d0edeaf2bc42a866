"""Whether a database server has room for writes, from the errors of its writes and from its list of threads.

A server whose tables cannot grow refuses the statement, and answers the next one: each write is tried, and fails by
itself. A server whose binlog cannot be written says nothing: the commit waits, and all others behind it, until the
server tries again, up to a minute after room was made (`MY_WAIT_FOR_USER_TO_FIX_PANIC` in its source). So when a write
takes long, or a lock is not had, the server's threads are looked at. One that waits for space is a full disk: writes
in progress fail at once, further ones before anything is sent, until no thread waits any more.

MySQL's thread does not say that it waits for space: its state is that of every commit. A commit that has taken seconds
and waits for no replica is taken for one that waits for the disk, which is full, or does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple

from tao.model.errors import DatabaseFull, DeadlineExceeded, ShardBlocked, TaoError
from tao.observability.logs import logger
from tao.storage.failures import ConnectionLost
from tao.storage.session import DatabaseSession

_WAITING_STATES: Final = ("waiting for someone to free space", "waiting for disk space")
"""What MariaDB and MySQL call the state of a thread that waits for space; MySQL only that of a replica."""

_COMMITTING: Final = "waiting for handler commit"
"""What MySQL calls the state of a thread that commits. MariaDB has no such state."""

_STUCK_SECONDS: Final = 3
"""Time after which a commit that waits for no replica hangs, as the server counts it: the difference of two whole
seconds, so that two of them have passed at least. A sync takes milliseconds, on a disk that stalls a second."""

_log = logger("tao.storage")


@dataclass(frozen=True, slots=True)
class DiskSpaceSettings:
    """How soon a full disk of a database server is found, and how soon its end."""

    patience_seconds: float = 0.5
    """A statement that writes may take so long before the server's threads are looked at. Commits take milliseconds;
    a commit that waits for a distant replica takes a tenth of a second."""

    interval_seconds: float = 1.0
    """Interval between two looks at the threads. A server that waits for space tries again once a minute."""

    quiet_seconds: float = 5.0
    """After a write was refused for lack of room, the disk counts as full until a write was committed and none was
    refused for so long: small writes succeed in the room that is left in the tables."""


class ServerThread(NamedTuple):
    """A thread of the server, as SHOW PROCESSLIST has it: its state, and for how many seconds its statement runs."""

    state: str | None
    seconds: int | None


def waits_for_space(threads: Sequence[ServerThread], *, waits_for_replica: bool) -> bool:
    """Return whether one of these threads waits for space on the disk, or hangs in a commit that nothing else holds
    up. ``waits_for_replica``: a commit of the server, perhaps of a thread that this account does not see, waits for
    a replica."""
    states = [(thread.state or "").lower() for thread in threads]
    if any(state.startswith(_WAITING_STATES) for state in states):
        return True
    if waits_for_replica:  # and all others behind it
        return False
    return any(
        state == _COMMITTING and (thread.seconds or 0) >= _STUCK_SECONDS
        for state, thread in zip(states, threads, strict=True)
    )


class _Locking:
    """The context of `DiskSpace.locking`. Contexts made of generators would take twice the calls."""

    __slots__ = ("_space",)

    def __init__(self, space: DiskSpace) -> None:
        self._space = space

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ShardBlocked):
            self._space.start_looking()


class _Writing:
    """The context of `DiskSpace.writing`."""

    __slots__ = ("_session", "_space")

    def __init__(self, space: DiskSpace, session: DatabaseSession) -> None:
        self._space = space
        self._session = session

    def __enter__(self) -> None:
        self._space.began_to_write(self._session)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._space.ended_to_write(self._session, error)


class DiskSpace:
    """Tracks whether the server of one pool has room for writes. Belongs to the running loop."""

    def __init__(self, server: str, settings: DiskSpaceSettings, look: Callable[[float], Awaitable[bool]]) -> None:
        """``look``: return whether a thread of the server waits for space, by the loop's time given. Raises
        `TaoError` when the server does not answer."""
        self._server: Final = server
        self._settings: Final = settings
        self._look: Final = look
        self._loop: Final = asyncio.get_running_loop()
        self._writing: Final[dict[DatabaseSession, float]] = {}  # session → when its statement was sent
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._waits = False  # a thread of the server waits for space
        self._refusal = ""  # why a write was refused, while that counts
        self._refused_at = 0.0
        self._quiet_timer: asyncio.TimerHandle | None = None
        self._locking: Final = _Locking(self)

    @property
    def reason(self) -> str:
        """Return why writes fail; empty while there is room."""
        if self._waits:
            return (
                f"the disk of database server {self._server} is full, or does not answer: the server waits to write "
                "its binlog; make room there, and it goes on within a minute"
            )
        return self._refusal

    def check(self) -> None:
        """Raise `DatabaseFull` while a write would only wait for space."""
        if self._waits:
            raise DatabaseFull(f"{self.reason}; nothing was written")

    def writing(self, session: DatabaseSession) -> AbstractContextManager[None]:
        """Run statements that write on a session, and learn from how they end.

        Raises `DatabaseFull` in place of the error of a connection that was given up because of the full disk. The
        caller knows whether COMMIT had been sent."""
        return _Writing(self, session)

    def locking(self) -> AbstractContextManager[None]:
        """Take locks: one that is not acquired in time may be held by a commit that waits for space."""
        return self._locking

    def began_to_write(self, session: DatabaseSession) -> None:
        """Note that the statements of `writing` are sent."""
        self._writing[session] = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._settings.patience_seconds, self._look_if_slow)

    def ended_to_write(self, session: DatabaseSession, error: BaseException | None) -> None:
        """Note how the statements of `writing` have ended. Raises as that does."""
        self._writing.pop(session, None)
        if error is None:
            if self._refusal and self._quiet_timer is None:
                quiet_at = self._refused_at + self._settings.quiet_seconds
                self._quiet_timer = self._loop.call_at(quiet_at, self._went_quiet)
        elif isinstance(error, DatabaseFull):
            self._refused(error.message)
        elif isinstance(error, ConnectionLost | DeadlineExceeded) and self._waits:
            raise DatabaseFull(self.reason) from error

    async def close(self) -> None:
        """Stop looking."""
        for timer in (self._timer, self._quiet_timer):
            if timer is not None:
                timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    def _look_if_slow(self) -> None:
        self._timer = None
        if not self._writing:
            return
        if self._is_slow():
            self.start_looking()
        self._timer = self._loop.call_later(self._settings.patience_seconds, self._look_if_slow)

    def _is_slow(self) -> bool:
        began = min(self._writing.values(), default=self._loop.time())
        return self._loop.time() - began >= self._settings.patience_seconds

    def start_looking(self) -> None:
        """Look whether the server waits for space, until it has room."""
        if self._looking is None:
            self._looking = self._loop.create_task(self._look_until_room())

    async def _look_until_room(self) -> None:
        try:
            while True:
                try:
                    self._found(await self._look(self._loop.time() + self._settings.interval_seconds))
                except TaoError:
                    pass  # whether the server answers at all is for `ServerHealth` to find out
                if not self._waits and not self._is_slow():
                    return
                await asyncio.sleep(self._settings.interval_seconds)
        finally:
            self._looking = None

    def _found(self, waits: bool) -> None:
        if waits == self._waits:
            return
        had_room = not self.reason
        self._waits = waits
        self._report(had_room)
        if waits:
            # These statements would be answered when there is room, or never. Their callers should know now.
            for session in tuple(self._writing):
                session.abort()

    def _refused(self, message: str) -> None:
        had_room = not self.reason
        self._refusal, self._refused_at = message, self._loop.time()
        if self._quiet_timer is not None:
            self._quiet_timer.cancel()
            self._quiet_timer = None
        self._report(had_room)

    def _went_quiet(self) -> None:
        self._quiet_timer = None
        self._refusal = ""
        self._report(had_room=False)

    def _report(self, had_room: bool) -> None:
        reason = self.reason
        if reason and had_room:
            _log.error("database_full", database_server=self._server, reason=reason)
        elif not reason and not had_room:
            _log.warning("database_has_room", database_server=self._server)
