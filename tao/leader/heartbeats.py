"""Write heartbeat rows to the master databases, and report how far behind their masters this leader's messages are.

A row with the time at which it was written follows every commit through replication. A reader that meets it in a
binlog has met everything that was acknowledged before it, so an idle stream still proves how fresh it is.

Each row of a database becomes a relay to every leader of every region, so one leader writes them, in the table of the
lowest shard that it owns there. Leaders agree on it without a message: they have ranks, and each waits longer than the
one before it for a row of another. The first is the leader of the database's first shard. When it fails, or its rows
do not arrive, the next ones write. Rows of several leaders do no harm, because the newest counts. Neither does a row of
a leader that has lost the shard meanwhile: the row says something about the database's order of commits, and nothing
about the shard.

Time by the clock is divided into slots as long as the interval, and the first leader writes a row when a slot begins.
So the proofs of all databases reach a leader at about the same time, and its subscribers in one delivery. A row belongs
to the slot of its own time: the rows of a leader whose clock is behind keep nobody from writing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

from tao.delivery.publisher import Publisher
from tao.model.errors import SettingsError, TaoError
from tao.model.ports import WriteStore
from tao.observability.metrics import Metrics
from tao.serving.configuration import ServerContext

_MAX_ROUNDING: Final = 1e-6
"""Relative error of a quotient of two settings."""


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """How often heartbeat rows are written."""

    interval_seconds: float = 1.0
    """Interval between two rows of a database. The known staleness of an idle region grows by at most this. Each row
    costs the master one small commit, and each leader of each region a relay."""

    takeover_seconds: float = 0.5
    """Each further leader of a database writes a row when it has heard of none for so much longer than the one before
    it. Longer than a row takes to arrive, so that one leader writes while nothing fails; `interval_seconds`, or a
    half, a third and so on of it."""

    timeout_seconds: float = 2.0
    """Time limit for one row. A slower database gets the next row once it has answered."""

    def __post_init__(self) -> None:
        steps = self.interval_seconds / self.takeover_seconds if self.takeover_seconds > 0 else 0.0
        if steps < 1 or abs(steps - round(steps)) > _MAX_ROUNDING:
            raise SettingsError(
                f"takeover_seconds is {self.takeover_seconds}; it must be above 0, and divide interval_seconds, "
                f"which is {self.interval_seconds}, into equal parts"
            )


@dataclass(slots=True)
class HeartbeatStatus:
    """The state of one database's heartbeats.

    ``newest_unix_ms``: the time in the newest row that this leader has committed or heard of (0: none yet).
    ``slot``: the newest slot of a row that it heard of or tried to write. ``quiet_since``: monotonic time at which it
    heard of a current row, or last tried to write one. ``trouble``: why its last
    row failed, or empty; ``is_logged``: that it is failing has been logged. ``waits_for_replica``: whether commits
    waited for a replica when its last row was written; None before the first one, and while another leader writes."""

    newest_unix_ms: int = 0
    slot: float = -inf
    quiet_since: float = -inf
    trouble: str = ""
    is_logged: bool = False
    waits_for_replica: bool | None = None


class Heartbeats:
    """Writes the heartbeat rows of the databases of which this leader owns a shard and nobody else writes one, and
    reports their ages and how far behind its masters the leader's messages are at most."""

    def __init__(
        self,
        context: ServerContext,
        store: WriteStore,
        owned: Callable[[], Iterable[int]],
        publisher: Publisher,
        settings: HeartbeatSettings,
    ) -> None:
        """``owned``: returns the owned shards. ``publisher``: knows what its messages prove."""
        self._name: Final = context.name
        self._region: Final = context.region
        self._configuration: Final = context.configuration
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._store: Final = store
        self._owned: Final = owned
        self._publisher: Final = publisher
        self._settings: Final = settings
        self._under_way: Final[dict[str, asyncio.Task[None]]] = {}
        self.statuses: Final[dict[str, HeartbeatStatus]] = {}
        """By name of the database, for databases of which this leader owns shards."""

    async def run(self) -> None:
        """Write heartbeats until cancelled, to all databases concurrently: one that hangs must not delay the others."""
        step_seconds = self._settings.takeover_seconds
        try:
            while True:
                self._write_due()
                await asyncio.sleep(step_seconds - self._clock.unix_ms() / 1000 % step_seconds)
        finally:
            for task in tuple(self._under_way.values()):
                task.cancel()

    def heard(self, database: str, unix_ms: int) -> None:
        """Note that a row of this time has arrived in the database's binlog, from this leader or another one."""
        status = self.statuses.get(database)
        if status is not None and unix_ms > status.newest_unix_ms:
            status.newest_unix_ms = unix_ms
            status.trouble, status.waits_for_replica = "", None  # the writer knows
            now = self._clock.unix_ms()
            # A row of a clock that is ahead covers no slot that has not begun here, or its writer could die unnoticed.
            status.slot = max(status.slot, self._slot(min(unix_ms, now))[0])
            settings = self._settings
            if now - unix_ms < (settings.interval_seconds + settings.takeover_seconds) * 1000:
                status.quiet_since = self._clock.monotonic()

    def _write_due(self) -> None:
        chosen: dict[str, int] = {}
        for shard in self._owned():
            database = self._publisher.database_of(shard)
            chosen[database] = min(shard, chosen.get(database, shard))
        for gone in self.statuses.keys() - chosen.keys():
            del self.statuses[gone]
        for database, shard in chosen.items():
            status = self.statuses.setdefault(database, HeartbeatStatus())
            if database not in self._under_way and self._is_due(status, self._rank(database)):
                status.slot, _ = self._slot(self._clock.unix_ms())
                status.quiet_since = self._clock.monotonic()
                task = asyncio.create_task(self._write(database, shard), name=f"{self._name}: heartbeat {database}")
                self._under_way[database] = task
                task.add_done_callback(partial(self._forget_task, database))

    def _is_due(self, status: HeartbeatStatus, rank: int) -> bool:
        """Return whether this leader has waited long enough for a row of another one."""
        settings = self._settings
        wait_seconds = rank * settings.takeover_seconds
        if wait_seconds < settings.interval_seconds:
            slot, into_ms = self._slot(self._clock.unix_ms())
            # A clock that was set back has a lower slot than before.
            return slot != status.slot and into_ms >= wait_seconds * 1000
        # The wait is longer than a slot. It ends at a multiple of a step: half a step less, so that a late turn of the
        # loop does not skip one.
        patience_seconds = settings.interval_seconds + wait_seconds - settings.takeover_seconds / 2
        return self._clock.monotonic() >= status.quiet_since + patience_seconds

    def _slot(self, unix_ms: int) -> tuple[float, float]:
        """Return the number of the slot of a time, and the milliseconds since it began."""
        return divmod(unix_ms, self._settings.interval_seconds * 1000)

    def _rank(self, database: str) -> int:
        """Return how many leaders of the region come before this one as writers of the database's rows.

        Databases begin with different leaders, since the ring spreads their first shards."""
        routes = self._configuration.routes
        leaders = routes.leaders(self._region)
        names = sorted(server.name for server in leaders.up)
        first_shard = next(
            (each.shards[0][0] for each in routes.topology.databases if each.name == database and each.shards), None
        )
        if self._name not in names or first_shard is None:
            return len(names)
        first = leaders.home(first_shard).name
        return (names.index(self._name) - (names.index(first) if first in names else 0)) % len(names)

    async def _write(self, database: str, shard: int) -> None:
        status = self.statuses.setdefault(database, HeartbeatStatus())
        # The time is read before the transaction begins: everything acknowledged by then is committed before the row.
        now = self._clock.unix_ms()
        try:
            status.waits_for_replica = await self._store.write_heartbeat(
                shard, self._name, now, timeout_seconds=self._settings.timeout_seconds
            )
        except TaoError as error:
            # The database is read-only during a promotion, or unavailable. Log it once, and try again at the next
            # heartbeat.
            if not status.is_logged:
                self._log.warning("heartbeat_not_written", database=database, shard=shard, reason=error.message)
            status.trouble, status.is_logged = error.message, True
        except Exception as error:  # noqa: BLE001 - a bug must show up as trouble of this database
            status.trouble = repr(error)
            self._log.exception("heartbeat_failed", database=database)
        else:
            status.newest_unix_ms = max(now, status.newest_unix_ms)
            status.trouble, status.is_logged = "", False

    def _forget_task(self, database: str, _: asyncio.Task[None]) -> None:
        del self._under_way[database]

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        metrics.gauge_family(
            "staleness_seconds",
            "Upper bound on how far messages about a database lag behind its master; infinite while it is unknown.",
            "database",
            lambda: {name: inf if age is None else age for name, age in self._staleness().items()},
        )
        metrics.gauge_family(
            "heartbeat_age_seconds",
            "Age of the newest heartbeat row that this leader wrote or heard of, by database of which it owns shards; "
            "infinite before the first.",
            "database",
            lambda: {name: inf if age is None else age for name, age in self._ages().items()},
        )

    def summary(self) -> dict[str, object]:
        """Return the numbers for ``/stats``. Ages are None while they are unknown."""
        statuses = self.statuses
        return {
            "staleness_seconds": self._staleness(),
            "heartbeats": {
                name: {
                    "age_seconds": age,
                    "trouble": statuses[name].trouble,
                    "waits_for_replica": statuses[name].waits_for_replica,
                }
                for name, age in self._ages().items()
            },
        }

    def _staleness(self) -> dict[str, float | None]:
        proven = self._publisher.proven
        databases = self._configuration.routes.topology.databases
        return {database.name: self._age(proven.get(database.name, 0)) for database in databases}

    def _ages(self) -> dict[str, float | None]:
        return {name: self._age(status.newest_unix_ms) for name, status in self.statuses.items()}

    def _age(self, unix_ms: int) -> float | None:
        return max(0, self._clock.unix_ms() - unix_ms) / 1000 if unix_ms else None
