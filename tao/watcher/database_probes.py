"""Asks every database server how it does: does it answer, is it open, whom does it follow, how far behind is it
(DESIGN.md §9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tao.model.ports import Clock
from tao.model.topology import Database, Topology
from tao.runtime.tasks import BackgroundTasks
from tao.watcher.marks import Verdict, lag_verdict, steady_verdict
from tao.watcher.promotion_plan import Member
from tao.watcher.replication_set import ReplicationSet, SetAccounts
from tao.watcher.settings import ProbeSettings


class DatabaseProbes:
    """The servers of every database as of the last look, and since when those that are silent have been so."""

    def __init__(
        self,
        topology: Callable[[], Topology],
        accounts: SetAccounts,
        region: str,
        clock: Clock,
        settings: ProbeSettings,
        tasks: BackgroundTasks,
        looked: Callable[[ReplicationSet, list[Member], float], None],
    ) -> None:
        """``looked`` is called after each look at a database, with when that began, in the loop; it must be quick."""
        self._topology: Final = topology
        self._accounts: Final = accounts
        self._region: Final = region
        self._clock: Final = clock
        self._settings: Final = settings
        self._tasks: Final = tasks
        self._looked: Final = looked
        self._looking: Final = set[str]()
        self._answered_at: Final[dict[str, float]] = {}
        self._following_at: Final[dict[str, float]] = {}
        self._good_looks: Final[dict[str, int]] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.lags: dict[str, float | None] = {}
        self.waits_for_replica: dict[str, bool] = {}
        """By database, of those that are semi-synchronous and whose master is open: do its commits wait for one."""

    async def run(self) -> None:
        """Until cancelled. A database whose servers hang holds up no other's."""
        while True:
            for database in self._topology().databases:
                if database.name not in self._looking:
                    self._looking.add(database.name)
                    self._tasks.start(self._look(database), f"look at {database.name}")
            await asyncio.sleep(self._settings.interval_seconds)

    def silent_seconds(self, server: str) -> float:
        """How long ago the server answered last; counted from the first question when it never has."""
        now = self._clock.monotonic()
        return now - self._answered_at.setdefault(server, now)

    async def _look(self, database: Database) -> None:
        try:
            await self._ask(database)
        finally:
            self._looking.discard(database.name)

    async def _ask(self, database: Database) -> None:
        replicas = ReplicationSet(
            database, self._accounts, seen_from=self._region, statement_seconds=self._settings.timeout_seconds
        )
        began = self._clock.monotonic()
        members = await replicas.members()
        for member in members:
            if member.state is not None:
                self._answered_at[member.name] = began
            else:
                self._answered_at.setdefault(member.name, began)
            verdict = self._verdict(replicas, member, began)
            self._good_looks[member.name] = self._good_looks.get(member.name, 0) + 1 if verdict is Verdict.UP else 0
            self.verdicts[member.name] = steady_verdict(
                verdict,
                database.servers[member.region].down,
                self._good_looks[member.name],
                looks_until_up=self._settings.answers_until_up,
            )
            if member.is_master:
                self._note_waiting(database, member)
        self._looked(replicas, members, began)

    def _note_waiting(self, database: Database, master: Member) -> None:
        if database.semi_sync and master.state is not None and not master.state.read_only:
            self.waits_for_replica[database.name] = master.state.waits_for_replica
        else:
            self.waits_for_replica.pop(database.name, None)

    def _verdict(self, replicas: ReplicationSet, member: Member, now: float) -> Verdict:
        settings = self._settings
        is_marked = replicas.database.servers[member.region].down
        if member.state is None:
            gone = self.silent_seconds(member.name) >= settings.interval_seconds * settings.cache_failures
            return Verdict.DOWN if gone else Verdict.UNSURE
        if member.is_master:
            return Verdict.UP
        following = member.state.following
        self.lags[member.name] = following.lag_seconds if following is not None else None
        if following is None or not replicas.follows(member, replicas.database.master_region):
            # An old master that is back, or a server that somebody is working on: its data may be another history.
            return Verdict.DOWN
        if following.receiving and following.applying:
            self._following_at[member.name] = now
            return lag_verdict(
                following.lag_seconds,
                is_marked,
                down_seconds=settings.lag_down_seconds,
                up_seconds=settings.lag_up_seconds,
            )
        # Cut off from its master: as old as its last word from there, and until then better than nothing.
        behind = now - self._following_at.setdefault(member.name, now)
        return lag_verdict(behind, is_marked, down_seconds=settings.lag_down_seconds, up_seconds=0.0)
