"""A leader's publisher with the spool behind it: opened, shown, closed (DESIGN.md §7)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from tao.delivery.publisher import Publisher
from tao.delivery.spool import SqliteSpool
from tao.leader.settings import LeaderSettings
from tao.model.ports import Clock
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics


class Publishing:
    """``publisher``, ready."""

    def __init__(self, publisher: Publisher, spool: SqliteSpool | None) -> None:
        self.publisher: Final = publisher
        self._spool: Final = spool

    async def close(self) -> None:
        """Store what is on its way to the spool."""
        if self._spool is not None:
            await self._spool.close()

    def figures(self) -> dict[str, object]:
        """For ``/stats``."""
        spool = self._spool
        if spool is None:
            return {**self.publisher.figures(), "spool": None}
        kept = {"bytes": spool.bytes, "rows_total": spool.rows, "dropped_rows_total": spool.dropped_rows}
        faults = {"failures_total": spool.failures, "set_aside_total": spool.set_aside, "trouble": spool.trouble}
        return {**self.publisher.figures(), "spool": {**kept, **faults}}

    def register(self, metrics: Metrics) -> None:
        """Have the figures collected with each scrape."""
        for name, help_text in (
            ("waiting_shards", "Subscribed shards neither confirmed nor refused yet: for the tailer or the spool."),
            ("unlinked_shards", "Open shards of which the tailer has not said yet where it goes on."),
        ):
            metrics.gauge(f"delivery_{name}", help_text, partial(self.figure, name))
        metrics.gauge_family(
            "subscribed_shards_total",
            "What became of subscriptions: continued by the position in the binlog, or reset (cold); and streams begun "
            "anew because something between two relays had been told to others.",
            "outcome",
            lambda: {
                "continued": self.figure("continued_total"),
                "reset": self.figure("resets_total"),
                "stream_restarted": self.figure("restarted_streams_total"),
            },
        )
        spool = self._spool
        if spool is None:
            return
        metrics.gauge("spool_bytes", "Messages in the spool, encoded.", lambda: spool.bytes)
        metrics.gauge_family(
            "spool_rows_total",
            "Rows stored, and rows that made room by size or age.",
            "event",
            lambda: {"stored": spool.rows, "dropped": spool.dropped_rows},
        )
        metrics.gauge_family(
            "spool_faults_total",
            "Times that the disk was full or failed, and files set aside because they could not be read.",
            "fault",
            lambda: {"failure": spool.failures, "set_aside": spool.set_aside},
        )

    def figure(self, name: str) -> float:
        """One of `Publisher.figures`."""
        return self.publisher.figures()[name]


async def open_publishing(
    settings: LeaderSettings, database_of: Callable[[int], str], clock: Clock, log: Logger
) -> Publishing:
    """Open the spool, if there is to be one, and a publisher that goes on from it."""
    spool = None
    if settings.spool.folder is not None:
        spool = SqliteSpool(settings.spool.folder, settings.spool, log)
        await spool.open()
    # The process id and time make a stream's name unique to this run of this leader.
    incarnation = f"{settings.name}-{os.getpid()}-{clock.unix_ms()}"
    return Publishing(Publisher(settings.delivery, incarnation, database_of, spool, _later), spool)


def _later(seconds: float, do: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, do)
