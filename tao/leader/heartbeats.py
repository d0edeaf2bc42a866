"""Write heartbeat rows to the master databases, and report how far behind their masters this leader's messages are.

A row with the time at which it was written follows every commit through replication. A reader that meets it in a
binlog has met everything that was acknowledged before it, so an idle stream still proves how fresh it is. Each
leader writes one row per database, in the table of the lowest shard that it owns there. Rows of several leaders do
no harm, because the newest counts. Neither does a row of a leader that has lost the shard meanwhile: the row says
something about the database's order of commits, and nothing about the shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

from tao.delivery.publisher import Publisher
from tao.model.errors import TaoError
from tao.model.ports import WriteStore
from tao.observability.metrics import Metrics
from tao.serving.configuration import ServerContext


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """How often heartbeat rows are written."""

    interval_seconds: float = 1.0
    """Between two rows of one database. The known staleness of an idle region grows by at most this, and each row
    costs the master one small commit."""

    timeout_seconds: float = 2.0
    """For one row. A slower database gets the next row once it has answered."""


@dataclass(slots=True)
class HeartbeatStatus:
    """The state of one database's heartbeats.

    ``written_unix_ms``: the time in the newest committed row (0: none yet). ``trouble``: why the last row failed, or
    empty. ``waits_for_replica``: whether commits waited for a replica when that row was written; None before the
    first row."""

    written_unix_ms: int = 0
    trouble: str = ""
    waits_for_replica: bool | None = None


class Heartbeats:
    """Writes the heartbeat rows of one leader, one per database of which it owns a shard, and reports their ages and
    how far behind its masters the leader's messages are at most."""

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
        try:
            while True:
                self._write_all()
                await asyncio.sleep(self._settings.interval_seconds)
        finally:
            for task in tuple(self._under_way.values()):
                task.cancel()

    def _write_all(self) -> None:
        chosen: dict[str, int] = {}
        for shard in self._owned():
            database = self._publisher.database_of(shard)
            chosen[database] = min(shard, chosen.get(database, shard))
        for gone in self.statuses.keys() - chosen.keys():
            del self.statuses[gone]
        for database, shard in chosen.items():
            if database not in self._under_way:
                task = asyncio.create_task(self._write(database, shard), name=f"{self._name}: heartbeat {database}")
                self._under_way[database] = task
                task.add_done_callback(partial(self._forget_task, database))

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
            if not status.trouble:
                self._log.warning("heartbeat_not_written", database=database, shard=shard, reason=error.message)
            status.trouble = error.message
        except Exception as error:  # noqa: BLE001 - a bug must show up as trouble of this database
            status.trouble = repr(error)
            self._log.exception("heartbeat_failed", database=database)
        else:
            status.written_unix_ms, status.trouble = now, ""

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
            "Age of the newest heartbeat row that this leader wrote, by database; infinite before the first.",
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
        return {name: self._age(status.written_unix_ms) for name, status in self.statuses.items()}

    def _age(self, unix_ms: int) -> float | None:
        return max(0, self._clock.unix_ms() - unix_ms) / 1000 if unix_ms else None
