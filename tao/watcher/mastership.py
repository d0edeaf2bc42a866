"""What the active watcher does about masters: renews their leases, opens one that restarted, replaces one that is gone
(DESIGN.md §9). What is to be done is decided by `next_deed`, a pure function of the last look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from tao.model.errors import TaoError
from tao.model.ports import Clock
from tao.observability.logs import Logger
from tao.runtime.tasks import BackgroundTasks
from tao.storage.lease import install_lease, lease_seconds, renew_lease, server_unix_ms
from tao.watcher.locks import Hold, Locks, LockTaken, mastership_lock
from tao.watcher.peers import PeerViews
from tao.watcher.promotion import Promoted, Promoter
from tao.watcher.promotion_plan import Member, Wish
from tao.watcher.replication_set import ReplicationSet
from tao.watcher.settings import WatcherSettings


class Deed(StrEnum):
    """What a database needs."""

    NOTHING = "nothing"
    RESTORE = "restore"
    """The master of the topology answers and is closed: it restarted, or a promotion was interrupted."""
    PROMOTE = "promote"
    """It has been silent for too long."""
    REJOIN = "rejoin"
    """A server follows nobody."""
    WAIT = "wait"
    """Commits of the master wait for no replica, though the topology wants it and one acknowledges: it was drained and
    unmarked by hand, seeding it was interrupted, or it was away when the master was opened."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A database as the watcher sees it. ``silent_seconds``: of its master."""

    members: Sequence[Member]
    silent_seconds: float
    closed_looks: int
    """Looks in a row that found the master closed."""
    vouched: bool = False
    """The watcher of the master's own region sees it well: it is cut off from here, and not lost."""
    semi_sync: bool = False
    """By the topology."""
    acknowledging: Sequence[str] = ()
    """Replicas for which commits may wait."""


CLOSED_LOOKS: Final = 2
"""One may fall into a promotion's moment between its fence and its lock's being seen; two are a state."""


def next_deed(sight: Sight, *, gone_seconds: float, auto_promote: bool, auto_rejoin: bool) -> tuple[Deed, str]:
    """What is to be done now, and for a rejoin at which server."""
    master = next(member for member in sight.members if member.is_master)
    if master.state is None:
        if auto_promote and not sight.vouched and sight.silent_seconds >= gone_seconds and len(sight.members) > 1:
            return Deed.PROMOTE, ""
        return Deed.NOTHING, ""
    if sight.closed_looks >= CLOSED_LOOKS:
        return Deed.RESTORE, ""
    if sight.semi_sync and not master.state.waits_for_replica and sight.acknowledging:
        return Deed.WAIT, ""
    if auto_rejoin:
        for member in sight.members:
            if not member.is_master and member.is_whole and member.state and member.state.following is None:
                return Deed.REJOIN, member.name
    return Deed.NOTHING, ""


class Mastership:
    """The masters of all databases. Deeds are done one at a time for each database."""

    def __init__(
        self,
        settings: WatcherSettings,
        promoter: Promoter,
        locks: Locks,
        peers: PeerViews,
        silent_seconds: Callable[[str], float],
        tasks: BackgroundTasks,
        clock: Clock,
        log: Logger,
    ) -> None:
        self._settings: Final = settings
        self._promoter: Final = promoter
        self._locks: Final = locks
        self._peers: Final = peers
        self._silent_seconds: Final = silent_seconds
        self._tasks: Final = tasks
        self._clock: Final = clock
        self._log: Final = log
        self._sets: Final[dict[str, ReplicationSet]] = {}
        self._closed_looks: Final[dict[str, int]] = {}
        self._renewed_at: Final[dict[str, float]] = {}
        self._began: Final = clock.monotonic()
        self._prepared: Final[set[str]] = set()
        self._doing: Final = set[str]()
        self._done_at: Final[dict[str, float]] = {}
        self._renewing: Final = set[str]()
        self._refusals: Final[dict[str, str]] = {}
        self.activity: Hold | None = None
        """Of the lock of the watcher that acts."""
        self.active_since = clock.monotonic()
        """Until then another watcher was active, or this one's predecessor."""
        self.deeds: Final[dict[str, int]] = dict.fromkeys((deed.value for deed in Deed if deed is not Deed.NOTHING), 0)
        self.failed_deeds = 0
        self.renewals = 0
        self.missed_renewals = 0
        self.last_promotion: dict[str, object] = {}

    @property
    def is_active(self) -> bool:
        """Looked up each time: this process may have stood still, and another one acts since."""
        return self.activity is not None and self.activity.is_mine()

    def looked(self, replicas: ReplicationSet, members: list[Member], began: float) -> None:
        """After each look at a database. ``began``: when it did; what was seen before a deed was done is no reason for
        another one."""
        name = replicas.database.name
        self._prepared.difference_update(member.name for member in members if member.state is None)
        if began < self._done_at.get(name, began):
            return
        self._sets[name] = replicas
        master = next(member for member in members if member.is_master)
        closed = master.state is not None and master.state.read_only
        self._closed_looks[name] = self._closed_looks.get(name, 0) + 1 if closed else 0
        if not self.is_active or name in self._doing:
            return
        settings = self._settings
        sight = Sight(
            members,
            self._silent_seconds(master.name),
            self._closed_looks[name],
            self._peers.says_up(master.region, master.name),
            replicas.database.semi_sync,
            replicas.acknowledging(members),
        )
        deed, server = next_deed(
            sight,
            gone_seconds=settings.probes.master_gone_seconds,
            auto_promote=settings.auto_promote and (settings.leases or replicas.database.semi_sync),
            auto_rejoin=settings.auto_rejoin,
        )
        if deed is not Deed.NOTHING:
            if settings.dry_run:
                self._log.warning("would_act", database=name, deed=deed.value, target=server or master.name)
                return
            self._doing.add(name)
            self._tasks.start(self._do(name, deed, server, sight), f"{deed} {name}")

    async def keep_leases(self) -> None:
        """Renew until cancelled, each database by itself: while active, and always for masters of the own region. A
        region that is cut off from the active watcher keeps its masters so, as long as nobody replaces them."""
        while True:
            if self._settings.leases and not self._settings.dry_run:
                for name, replicas in self._sets.items():
                    if self._keeps(replicas) and name not in self._renewing:
                        self._renewing.add(name)
                        self._tasks.start(self._keep_lease(replicas), f"lease of {name}")
            await asyncio.sleep(self._settings.lease.renew_seconds)

    async def _do(self, name: str, deed: Deed, server: str, sight: Sight) -> None:
        began = self._clock.monotonic()
        done: Promoted | None = None
        try:
            if deed is Deed.PROMOTE:
                self._log.warning("master_lost", database=name, silent_seconds=round(sight.silent_seconds, 2))
                region = next(member.region for member in sight.members if member.is_master)
                renewed = partial(self._last_renewal, name, region)
                done = await self._promoter.promote(name, Wish(master_lost=True), renewed=renewed)
            elif deed is Deed.RESTORE:
                done = await self._promoter.restore(name)
            elif deed is Deed.WAIT:
                await self._promoter.wait_for_replicas(name)
            else:
                await self._promoter.rejoin(name, server)
        except LockTaken:
            return  # an operator is at it
        except TaoError as error:
            self.failed_deeds += 1
            if self._refusals.get(name) != error.message:  # once for each different reason
                self._refusals[name] = error.message
                self._log.error("not_done", database=name, deed=deed.value, reason=error.message)
            return
        except Exception:
            self.failed_deeds += 1
            raise  # and is logged by whoever holds the task
        finally:
            self._doing.discard(name)
            self._done_at[name] = self._clock.monotonic()
        self._refusals.pop(name, None)
        self._closed_looks[name] = 0
        self._renewed_at[name] = self._clock.monotonic()  # or the new master's lease was granted
        self.deeds[deed.value] += 1
        seconds = self._clock.monotonic() - began
        if done is not None and deed is Deed.PROMOTE:
            self.last_promotion = {
                "database": name,
                "master": done.master,
                "detected_after_seconds": round(sight.silent_seconds, 3),
                "promoted_within_seconds": round(seconds, 3),
                "waits_for_replica": done.waits_for_replica,
            }
        self._log.warning(
            "done",
            database=name,
            deed=deed.value,
            seconds=round(seconds, 3),
            master=done.master if done else "",
            target=server,
            left=done.left if done else {},
            without_tables=done.without_tables if done else {},
            waits_for_replica=done.waits_for_replica if done else None,
        )

    def renewed_seconds_ago(self) -> dict[str, float]:
        """By database, for other watchers: when this one renewed its master's lease last. It may have done so up to its
        start, before which another process had its place."""
        now = self._clock.monotonic()
        return {name: now - self._renewed_at.get(name, self._began) for name in self._sets}

    async def _last_renewal(self, database: str, region: str) -> float:
        """By anybody who might have: this watcher, and the one of the master's region."""
        renewed_at = max(self._renewed_at.get(database, self._began), self.active_since)
        if region in self._peers.views:
            asked_at = self._clock.monotonic()
            ago = await self._peers.renewed_seconds_ago(region, database)
            renewed_at = max(renewed_at, (asked_at if ago else self._clock.monotonic()) - ago)
        return renewed_at

    def _keeps(self, replicas: ReplicationSet) -> bool:
        """Whether the lease of its master is this watcher's to renew."""
        return replicas.database.master_region == self._settings.region or self.is_active

    async def _keep_lease(self, replicas: ReplicationSet) -> None:
        try:
            await self._renew(replicas)
        except Exception:
            self.missed_renewals += 1
            raise
        finally:
            self._renewing.discard(replicas.database.name)

    async def _renew(self, replicas: ReplicationSet) -> None:
        """Prepare the servers of a set for leases, and renew that of its master."""
        database = replicas.database
        for region, server in database.servers.items():
            if server.name not in self._prepared:
                await self._prepare(replicas, region, server.name)
        try:
            with self._locks.held(mastership_lock(database.name), alone=False) as hold:
                async with replicas.session(database.master_region) as session:
                    now = await server_unix_ms(session, deadline=replicas.soon())
                    # Whatever becomes of the renewal, the lease is over so long after this moment.
                    self._renewed_at[database.name] = self._clock.monotonic()
                    # Looked up after that moment: whoever replaces the master since then reckons with it.
                    hold.check()
                    if not self._keeps(replicas):
                        return
                    renewed = await renew_lease(session, now, deadline=replicas.soon())
        except LockTaken:
            return  # its master is being changed
        except TaoError as error:
            self.missed_renewals += 1
            self._log.warning("lease_not_renewed", database=database.name, reason=error.message)
            return
        if renewed:
            self.renewals += 1
        else:
            self.missed_renewals += 1

    async def _prepare(self, replicas: ReplicationSet, region: str, name: str) -> None:
        lasts = self._settings.lease.seconds
        try:
            async with replicas.session(region) as session:
                if await lease_seconds(session, deadline=replicas.soon()) != lasts:
                    await install_lease(session, lasts, deadline=replicas.soon())
            self._prepared.add(name)
        except TaoError as error:
            self._log.debug(
                "lease_not_installed", target=name, reason=error.message
            )  # again and again while it is away
