"""Sessions at the servers of one set that are used again: by one promotion, or by the probes of a watcher.

Opening a session takes four round trips. Between distant regions that is a quarter of a second, and the writers of the
whole database wait for a promotion.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from typing import Final

from tao.model.errors import TaoError
from tao.replication.locks import SESSION_IDLE_SECONDS
from tao.replication.server_statements import roll_back
from tao.storage.session import DatabaseSession

_FRESH_SECONDS: Final = SESSION_IDLE_SECONDS - 1.0
"""A session that was idle for longer is not used again: the server of one that is used under a lock is about to end
it."""

KEEP_ALIVE_SECONDS: Final = 1.0
"""Interval at which a caller that waits uses its sessions."""


class KeptSessions:
    """Idle sessions by server. Each is used by one task at a time.

    A session is given back only after a use without an error: an error may leave a transaction behind, or a setting
    such as ``sql_log_bin = 0``.
    """

    def __init__(self) -> None:
        self._idle: Final = defaultdict[str, list[DatabaseSession]](list)
        self._is_closed = False

    def take(self, server: str) -> DatabaseSession | None:
        """Return a session that can be used now, or None when one has to be opened."""
        idle = self._idle[server]
        while idle:
            session = idle.pop()
            if session.is_open and asyncio.get_running_loop().time() - session.idle_since < _FRESH_SECONDS:
                return session
            session.quit()
        return None

    def give(self, server: str, session: DatabaseSession) -> None:
        """Keep a session for the next use, if there can be one."""
        if self._is_closed:
            session.quit()
            return
        session.idle_since = asyncio.get_running_loop().time()
        self._idle[server].append(session)

    def has(self, server: str) -> bool:
        """Return whether a session at a server is idle."""
        return bool(self._idle.get(server))

    def drop(self, server: str) -> None:
        """Close the idle sessions at a server."""
        for session in self._idle.pop(server, []):
            session.quit()

    async def keep_alive(self, *, deadline: float) -> None:
        """Use each idle session once, so that its server does not end it. Drops those that are broken."""
        servers = list(self._idle)
        taken = [(server, session) for server in servers for session in iter(partial(self.take, server), None)]
        await asyncio.gather(*(self._use(server, session, deadline) for server, session in taken))

    async def _use(self, server: str, session: DatabaseSession, deadline: float) -> None:
        try:
            await roll_back(session, deadline=deadline)
        except TaoError:
            session.quit()
        else:
            self.give(server, session)

    def close(self) -> None:
        """Close all sessions, those in use as soon as they are given back."""
        self._is_closed = True
        for server in list(self._idle):
            self.drop(server)
