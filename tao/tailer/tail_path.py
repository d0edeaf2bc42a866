"""The tailer's main loop from the binlog to the leaders, its checkpoint on disk, and the region's replication lag.

A tailer without a usable position (on its first run, after a lost disk or a purged binlog) may have missed any change.
It notes the present end of the binlog, invalidates every shard of the database in its region, and continues from the
noted position. Neither that nor a broken stream waits for leaders: otherwise one leader that is away would stop the
messages for all others.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

import msgspec

from tao.model.errors import OperatorError, TaoError, unreadable
from tao.model.relay import REGION_INVALIDATED
from tao.observability.logs import Logger
from tao.planning.row_events import Heartbeat, Translated, translate
from tao.replication.gtid import GtidPosition
from tao.schema.registry import Schema
from tao.tailer.binlog import BinlogLost, BinlogMoved, BinlogSource, BinlogTransaction, UndecodedRows
from tao.tailer.delivery_path import DeliveryPath
from tao.tailer.settings import TailSettings

_NEVER: Final = 0

_MAX_AHEAD_MS: Final = 1_000
"""Commit times may be this far ahead of this machine's clock. A later time proves nothing: a session sets its time as
it likes, and a machine whose clock is an hour ahead would make the region look up to date for an hour."""


class _StoredPosition(msgspec.Struct, frozen=True, kw_only=True):
    server: str
    position: str
    written_unix_ms: int


class Checkpoint:
    """The file with the position in one database server's binlog from which a tailer continues after a restart.

    The file is replaced atomically. Methods block; call them in a thread."""

    def __init__(self, folder: Path, server: str) -> None:
        """``server`` is the database server's name; a position of another server means nothing."""
        self._server: Final = server
        self.path: Final = folder / f"{server}.position.json"

    def load(self) -> str | None:
        """Return the stored position, or None when there is no usable one, so that earlier changes are unknown.

        Raises `OperatorError` when the file cannot be read."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OperatorError(unreadable(self.path, error)) from error
        try:
            stored = msgspec.json.decode(text, type=_StoredPosition)
        except msgspec.MsgspecError:
            return None
        return stored.position if stored.server == self._server else None

    def store(self, position: str, now_unix_ms: int) -> None:
        """Write the position and sync it to disk. Raises `OperatorError`."""
        text = msgspec.json.encode(_StoredPosition(server=self._server, position=position, written_unix_ms=now_unix_ms))
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{self.path.name}.")
            temporary = Path(name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            directory = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise OperatorError(f"{self.path}: the position cannot be stored: {error}") from error


class Lag:
    """The replication lag of a region, measured on one binlog.

    Leaders write heartbeat rows on the masters. A heartbeat in the local binlog proves that everything committed before
    it has arrived too, so that an idle stream still proves its freshness. Without heartbeats the commit times of
    transactions prove the same, in whole seconds. Times are Unix milliseconds; those of the masters are compared with
    this machine's clock."""

    def __init__(self, unix_ms: Callable[[], int]) -> None:
        self._unix_ms: Final = unix_ms
        self.heartbeat_unix_ms = _NEVER
        """The time at which the newest heartbeat seen was written."""
        self.heartbeat_delay_seconds = 0.0
        """Time from the writing of the newest heartbeat to its arrival here."""
        self.committed_unix_ms = _NEVER
        """The newest commit time seen."""
        self.from_the_future = 0
        """Heartbeats that prove nothing because their time is too far ahead of this machine's clock."""

    def add_heartbeats(self, heartbeats: Iterable[Heartbeat]) -> bool:
        """Process heartbeat rows. Returns whether one is newer than all before."""
        latest = self._unix_ms() + _MAX_AHEAD_MS
        newest = _NEVER
        for each in heartbeats:
            if each.unix_ms > latest:
                self.from_the_future += 1
            else:
                newest = max(newest, each.unix_ms)
        if newest <= self.heartbeat_unix_ms:
            return False
        self.heartbeat_unix_ms = newest
        self.heartbeat_delay_seconds = max(0, self._unix_ms() - newest) / 1000
        return True

    def add_commit(self, unix_ms: int) -> None:
        """Process the commit time of a transaction."""
        if unix_ms <= self._unix_ms() + _MAX_AHEAD_MS:
            self.committed_unix_ms = max(unix_ms, self.committed_unix_ms)

    def seconds(self) -> float:
        """Return the age of the newest proof, in seconds; infinite before the first.

        This is an upper bound of the lag, which on an idle stream includes the interval between heartbeats."""
        proof = max(self.heartbeat_unix_ms, self.committed_unix_ms)
        return float("inf") if proof == _NEVER else max(0, self._unix_ms() - proof) / 1000


class Translator:
    """Translates transactions into messages, touches and bulk invalidations, by the current schema and shards."""

    def __init__(
        self, schema: Callable[[], Schema], shards: Callable[[], Iterable[int]], max_touches_per_shard: int
    ) -> None:
        """``shards`` returns all shards of the database. ``max_touches_per_shard``: see `TailSettings`."""
        self._schema: Final = schema
        self.shards: Final = shards
        self._max_touches_per_shard: Final = max_touches_per_shard

    def translate(self, transaction: BinlogTransaction) -> Translated:
        """Translate one transaction. Its invalid shards become bulk invalidations and have no messages or touches."""
        invalid = set(self.shards()) if transaction.all_invalid else transaction.invalid_shards
        translated = translate(transaction.events, self._schema(), self._max_touches_per_shard)
        return _invalidate(translated, invalid) if invalid else translated


def _invalidate(translated: Translated, shards: Iterable[int]) -> Translated:
    """Replace the messages and touches of ``shards`` by bulk invalidations."""
    invalid = {*shards, *translated.bulk_shards}
    return msgspec.structs.replace(
        translated,
        messages=tuple(each for each in translated.messages if each.shard not in invalid),
        touches=tuple(each for each in translated.touches if each.shard not in invalid),
        bulk_shards=tuple(sorted(invalid)),
    )


class TailCounts(msgspec.Struct):
    """Counts since the start. Of what is not decoded, only transactions are counted."""

    transactions: int = 0
    rows: int = 0
    messages: int = 0
    touches: int = 0
    invalidated_shards: int = 0
    skipped_rows: int = 0
    unknown_column_rows: int = 0
    lost_binlogs: int = 0
    """Times that the binlog could not be continued."""


class TailPath:
    """The loop from the binlog to the leaders, and the position up to which they have acknowledged everything."""

    def __init__(
        self,
        source: BinlogSource,
        checkpoint: Checkpoint,
        translator: Translator,
        lag: Lag,
        unix_ms: Callable[[], int],
        settings: TailSettings,
        log: Logger,
    ) -> None:
        self._source: Final = source
        self._checkpoint: Final = checkpoint
        self._translator: Final = translator
        self._lag: Final = lag
        self._unix_ms: Final = unix_ms
        self._settings: Final = settings
        self._log: Final = log
        self._position: GtidPosition | None = None
        self._moved = False  # the position differs from the stored one
        self._lost = False  # the binlog could not be continued, so the stored position must not be used
        self.counts: Final = TailCounts()
        self.trouble = "has not begun yet"
        """The reason why the binlog is not being followed now; empty when it is."""

    @property
    def position(self) -> str:
        """Everything up to here is acknowledged, or covered by invalidations that are on their way."""
        return "" if self._position is None else str(self._position)

    def acknowledged(self, gtid: str) -> None:
        """Move the position past a transaction; it and all before it are finished."""
        if gtid == REGION_INVALIDATED:
            self._moved = True
        elif self._position is not None:
            self._position.advance(gtid)
            self._moved = True

    async def run(self, delivery: DeliveryPath) -> None:
        """Follow the binlog until cancelled. The position is stored regularly and at the end."""
        storing = asyncio.create_task(self._keep_checkpoint(), name="tailer checkpoint")
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
                    self._report_trouble("binlog_lost", error.message)
                    self._position, self._moved = None, False
                    if again:  # not even the present end of the binlog can be read, so there is no hurry
                        await asyncio.sleep(self._settings.retry_seconds)
                except TaoError as error:
                    self._report_trouble("binlog_not_followed", error.message)
                    await asyncio.sleep(self._settings.retry_seconds)
                except Exception as error:  # noqa: BLE001 - if the loop ended, all later changes would go unnoticed
                    self._report_trouble("binlog_not_followed", repr(error))
                    self._log.exception("tailer_failed")
                    await asyncio.sleep(self._settings.retry_seconds)
        finally:
            storing.cancel()
            await asyncio.wait((storing,))
            await self._store()

    async def _follow(self, delivery: DeliveryPath) -> None:
        now = await self._source.current_position()
        if self._position is None:
            stored = None if self._lost else await asyncio.to_thread(self._checkpoint.load)
            if stored is None:
                await self._invalidate_region(now, delivery)
            self._position = self._source.position(now if stored is None else stored)
        await self._wait_until_reached(now)
        position = self.position
        self._log.info("binlog_followed", position=position)
        delivery.begin(position)
        async with aclosing(self._source.batches(position)) as batches:
            self.trouble = ""
            async for batch in batches:
                self._lost = False
                for transaction in batch:
                    await self._submit(transaction, delivery)

    async def _wait_until_reached(self, now: str) -> None:
        """Wait until the server has reached the position, from ``now``, where it is.

        A replica whose master's binlog was read in its place may still have to apply changes that were read already.
        One that does not reach the position in time has another history or is stuck. Then `BinlogLost` makes the region
        invalid, and reading continues from the server's present end."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.catch_up_seconds
        while self._position is not None and self._position.is_beyond(now):
            if loop.time() >= until:
                raise BinlogLost(f"the server is at {now or 'nothing'}, and does not reach {self.position}")
            self.trouble = f"the server is at {now or 'nothing'}, and has not reached {self.position} yet"
            await asyncio.sleep(self._settings.catch_up_poll_seconds)
            now = await self._source.current_position()

    async def _invalidate_region(self, now: str, delivery: DeliveryPath) -> None:
        """Invalidate all shards without waiting for leaders: until every leader has done it, nothing is acknowledged,
        and so no position is stored."""
        # Transactions submitted before count for the position that is lost, not for the new one.
        delivery.forget_gtids()
        self._moved = False
        shards = tuple(self._translator.shards())
        self._log.warning("region_invalidated", shards=len(shards), position=now, lost_binlog=self._lost)
        self.counts.invalidated_shards += len(shards)
        await delivery.submit(REGION_INVALIDATED, Translated(bulk_shards=shards))

    async def _submit(self, transaction: BinlogTransaction, delivery: DeliveryPath) -> None:
        translated = self._translator.translate(transaction)
        self.counts.transactions += 1
        self._count(transaction, translated)
        self._lag.add_commit(transaction.committed_unix_ms)
        newer = bool(translated.heartbeats) and self._lag.add_heartbeats(translated.heartbeats)
        proven_unix_ms = self._lag.heartbeat_unix_ms if newer else 0
        await delivery.submit(transaction.gtid, translated, proven_unix_ms, transaction.undecoded)

    async def decode(self, undecoded: Sequence[UndecodedRows]) -> Sequence[Translated]:
        """Decode and translate rows, in a thread: thousands of rows would keep the event loop busy for long."""

        def decode_all() -> list[tuple[BinlogTransaction, Translated]]:
            transactions = [rows.decode() for rows in undecoded]
            return [(each, self._translator.translate(each)) for each in transactions]

        decoded = await asyncio.to_thread(decode_all)
        for transaction, translated in decoded:
            self._count(transaction, translated)
        return [translated for _, translated in decoded]

    def _count(self, transaction: BinlogTransaction, translated: Translated) -> None:
        counts = self.counts
        counts.rows += len(transaction.events)
        counts.messages += sum([len(of_shard.messages) for of_shard in translated.messages])
        counts.touches += len(translated.touches)
        counts.invalidated_shards += len(translated.bulk_shards)
        counts.skipped_rows += translated.passed_over
        counts.unknown_column_rows += translated.unknown_columns

    def _report_trouble(self, event: str, reason: str) -> None:
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
                # A full disk must not stop the messages; until it has room again, a restart repeats more of them.
                self._moved = self._moved or self._position is position
                self._log.error("checkpoint_not_stored", reason=error.message)
