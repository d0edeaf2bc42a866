"""Heartbeat rows on the masters (DESIGN.md §8).

A row with the time at which it was written travels the way of every commit: whoever meets it in a binlog has met all
that was acknowledged before it, so an idle stream still proves how far it has come. Each leader writes one row per
database, in the table of the lowest shard that it owns there; several leaders' rows do no harm, the newest counts. That
a leader may have lost its shard meanwhile does none either: the row says something of the database's order of commits,
and nothing of the shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tao.model.errors import TaoError
from tao.model.ports import Clock, WriteStore
from tao.observability.logs import Logger


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """How often the masters are told the time."""

    interval_seconds: float = 1.0
    """Between two rows of one database: what an idle region is known to be behind at most grows by this, and each row
    costs the master one small commit."""

    timeout_seconds: float = 2.0
    """For one row. A database that takes longer gets the next one when it has answered."""


@dataclass(slots=True)
class Beat:
    """Of one database: the time in the newest row committed (0: none yet), and why the last one failed, or empty.
    ``waits_for_replica``: so did commits there when that row was written; None before the first."""

    written_unix_ms: int = 0
    trouble: str = ""
    waits_for_replica: bool | None = None


class Heartbeats:
    """The rows of one leader, one per database of which it owns a shard."""

    def __init__(
        self,
        name: str,
        store: WriteStore,
        owned: Callable[[], Iterable[int]],
        database_of: Callable[[int], str],
        clock: Clock,
        settings: HeartbeatSettings,
        log: Logger,
    ) -> None:
        """``owned``: shards; ``database_of``: shard → name of its database."""
        self._name: Final = name
        self._store: Final = store
        self._owned: Final = owned
        self._database_of: Final = database_of
        self._clock: Final = clock
        self._settings: Final = settings
        self._log: Final = log
        self._under_way: Final[dict[str, asyncio.Task[None]]] = {}
        self.beats: Final[dict[str, Beat]] = {}
        """By database, of those that this leader owns shards of."""

    async def run(self) -> None:
        """Until cancelled. Databases side by side: one that hangs keeps no other from its row."""
        try:
            while True:
                self._beat()
                await asyncio.sleep(self._settings.interval_seconds)
        finally:
            for task in tuple(self._under_way.values()):
                task.cancel()

    def _beat(self) -> None:
        chosen: dict[str, int] = {}
        for shard in self._owned():
            database = self._database_of(shard)
            chosen[database] = min(shard, chosen.get(database, shard))
        for gone in self.beats.keys() - chosen.keys():
            del self.beats[gone]
        for database, shard in chosen.items():
            if database not in self._under_way:
                task = asyncio.create_task(self._write(database, shard), name=f"{self._name}: heartbeat {database}")
                self._under_way[database] = task
                task.add_done_callback(partial(self._over, database))

    async def _write(self, database: str, shard: int) -> None:
        beat = self.beats.setdefault(database, Beat())
        # Before the transaction begins: what is acknowledged by now is committed before it.
        now = self._clock.unix_ms()
        try:
            beat.waits_for_replica = await self._store.write_heartbeat(
                shard, self._name, now, timeout_seconds=self._settings.timeout_seconds
            )
        except TaoError as error:
            # Read-only while another server is promoted, or away: said once, and tried again at the next beat.
            if not beat.trouble:
                self._log.warning("heartbeat_not_written", database=database, shard=shard, reason=error.message)
            beat.trouble = error.message
        except Exception as error:  # noqa: BLE001 - a row whose writing ended for a fault would be silence without a word
            beat.trouble = repr(error)
            self._log.exception("heartbeat_failed", database=database)
        else:
            beat.written_unix_ms, beat.trouble = now, ""

    def _over(self, database: str, _: asyncio.Task[None]) -> None:
        del self._under_way[database]
