"""From the binlog to the leaders, and what to do when the binlog cannot be followed (DESIGN.md §7).

A tailer that does not know where it was (its first run, a lost disk, a purged binlog) may have missed anything. It
notes where the binlog ends, makes every shard of the database void in its region, and goes on from the noted place.
Neither that nor a broken stream waits for leaders: one that is away would silence the tailer for all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Final

import msgspec

from tao.model.errors import OperatorError, TaoError
from tao.observability.logs import Logger
from tao.planning.row_events import Translated, translate
from tao.schema.registry import Schema
from tao.tailer.binlog import BinlogLost, BinlogMoved, BinlogSource, BinlogTransaction, Position
from tao.tailer.checkpoint import Checkpoint
from tao.tailer.delivery_path import DeliveryPath
from tao.tailer.lag import Lag
from tao.tailer.settings import TailSettings

_REGION_VOID: Final = "region void"
"""In the place of a GTID: acknowledged when every leader knows that all is void, and the new position counts."""


class Counts(msgspec.Struct):
    """What went through, since the start."""

    transactions: int = 0
    rows: int = 0
    messages: int = 0
    touches: int = 0
    void_shards: int = 0
    passed_over_rows: int = 0
    unknown_column_rows: int = 0
    lost_binlogs: int = 0
    """Times that the binlog could not be continued."""


class TailPath:
    """The loop. `run` is its life; `acknowledged` is for the delivery path to call."""

    def __init__(
        self,
        source: BinlogSource,
        checkpoint: Checkpoint,
        schema: Callable[[], Schema],
        shards: Callable[[], Iterable[int]],
        lag: Lag,
        unix_ms: Callable[[], int],
        settings: TailSettings,
        log: Logger,
    ) -> None:
        """``shards``: those of the database, for when all become void."""
        self._source: Final = source
        self._checkpoint: Final = checkpoint
        self._schema: Final = schema
        self._shards: Final = shards
        self._lag: Final = lag
        self._unix_ms: Final = unix_ms
        self._settings: Final = settings
        self._log: Final = log
        self._position: Position | None = None
        self._moved = False
        self._lost = False
        self.counts: Final = Counts()
        self.trouble = "has not begun yet"
        """Why the binlog is not followed now, or empty."""

    @property
    def position(self) -> str:
        """Everything up to here is acknowledged, or has become void and is being told so."""
        return "" if self._position is None else str(self._position)

    def acknowledged(self, gtid: str) -> None:
        """The transaction, and all before it, are behind us."""
        if gtid == _REGION_VOID:
            self._moved = True
        elif self._position is not None:
            self._position.advance(gtid)
            self._moved = True

    async def run(self, delivery: DeliveryPath) -> None:
        """Until cancelled. The position is stored in between and at the end."""
        keeping = asyncio.create_task(self._keep_checkpoint(), name="tailer checkpoint")
        try:
            while True:
                try:
                    await self._follow(delivery)
                except BinlogMoved as error:
                    self.trouble = error.message
                    self._log.info("binlog_moved", position=self.position)
                except BinlogLost as error:
                    again, self._lost = self._lost, True
                    self.counts.lost_binlogs += 1
                    self._troubled("binlog_lost", error.message)
                    self._position, self._moved = None, False
                    if again:  # not even the present end of the binlog can be read: no hurry
                        await asyncio.sleep(self._settings.retry_seconds)
                except TaoError as error:
                    self._troubled("binlog_not_followed", error.message)
                    await asyncio.sleep(self._settings.retry_seconds)
                except Exception as error:  # noqa: BLE001 - a tailer that ended for one fault would be silent about all
                    self._troubled("binlog_not_followed", repr(error))
                    self._log.exception("tailer_failed")
                    await asyncio.sleep(self._settings.retry_seconds)
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))
            await self._store()

    async def _follow(self, delivery: DeliveryPath) -> None:
        now = await self._source.current_position()
        if self._position is None:
            stored = None if self._lost else await asyncio.to_thread(self._checkpoint.load)
            if stored is None:
                await self._make_region_void(now, delivery)
            self._position = self._source.position(now if stored is None else stored)
        await self._until_reached(now)
        position = self.position
        self._log.info("following_binlog", position=position)
        delivery.begin(position)
        async with aclosing(self._source.batches(position)) as batches:
            self.trouble = ""
            async for batch in batches:
                self._lost = False
                for transaction in batch:
                    await self._pass_on(transaction, delivery)

    async def _until_reached(self, now: str) -> None:
        """A replica whose master's binlog was read in its place may have to apply what was read already. One that does
        not come to it has another history, or is no use: then all is void, and its present end is the position."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.behind_seconds
        while self._position is not None and self._position.is_beyond(now):
            if loop.time() >= until:
                raise BinlogLost(f"the server is at {now or 'nothing'}, and does not reach {self.position}")
            self.trouble = f"the server is at {now or 'nothing'}, and has not reached {self.position} yet"
            await asyncio.sleep(self._settings.behind_poll_seconds)
            now = await self._source.current_position()

    async def _make_region_void(self, now: str, delivery: DeliveryPath) -> None:
        """No leader is waited for: until all have been told, nothing is acknowledged, hence no position stored."""
        # What was submitted before counts for the position that is lost, not for the new one.
        delivery.forget_gtids()
        self._moved = False
        shards = tuple(self._shards())
        self._log.warning("region_made_void", shards=len(shards), position=now, lost_binlog=self._lost)
        self.counts.void_shards += len(shards)
        await delivery.submit(_REGION_VOID, Translated(bulk_shards=shards))

    async def _pass_on(self, transaction: BinlogTransaction, delivery: DeliveryPath) -> None:
        counts = self.counts
        translated = meaning_of(transaction, self._schema(), self._shards, self._settings.max_touches_per_shard)
        counts.transactions += 1
        counts.rows += len(transaction.events)
        counts.messages += sum([len(of_shard.messages) for of_shard in translated.messages])
        counts.touches += len(translated.touches)
        counts.void_shards += len(translated.bulk_shards)
        counts.passed_over_rows += translated.passed_over
        counts.unknown_column_rows += translated.unknown_columns
        self._lag.committed(transaction.committed_unix_ms)
        newer = bool(translated.heartbeats) and self._lag.heard(translated.heartbeats)
        await delivery.submit(transaction.gtid, translated, self._lag.heartbeat_unix_ms if newer else 0)

    def _troubled(self, event: str, reason: str) -> None:
        self.trouble = reason
        self._log.error(event, reason=reason, position=self.position)

    async def _keep_checkpoint(self) -> None:
        while True:
            await asyncio.sleep(self._settings.checkpoint_seconds)
            await self._store()

    async def _store(self) -> None:
        position = self._position
        if self._moved and position is not None:
            self._moved = False
            try:
                await asyncio.to_thread(self._checkpoint.store, str(position), self._unix_ms())
            except OperatorError as error:
                # A full disk must not stop the messages; until it is mended, a restart repeats more.
                self._moved = self._moved or self._position is position
                self._log.error("checkpoint_not_stored", reason=error.message)


def meaning_of(
    transaction: BinlogTransaction, schema: Schema, shards: Callable[[], Iterable[int]], max_touches_per_shard: int
) -> Translated:
    """Messages, touches and void shards of a transaction. ``shards``: all that the database has."""
    void = set(shards()) if transaction.void_all else transaction.void_shards
    translated = translate(transaction.events, schema, max_touches_per_shard)
    return _without(translated, void) if void else translated


def _without(translated: Translated, void: Iterable[int]) -> Translated:
    """The same with these shards void."""
    gone = {*void, *translated.bulk_shards}
    return msgspec.structs.replace(
        translated,
        messages=tuple(each for each in translated.messages if each.shard not in gone),
        touches=tuple(each for each in translated.touches if each.shard not in gone),
        bulk_shards=tuple(sorted(gone)),
    )
