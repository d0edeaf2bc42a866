"""What the masters of a topology have of its shards: how much, how often it is written, and what has moved away."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from tao.admin.shard_balance import PlannedMove
from tao.model.topology import Database, Topology
from tao.observability.logs import Logger
from tao.replication.accounts import Account
from tao.replication.move_statements import ShardThere, data_bytes, drop_schema, moved_since, read_shard, shards_held
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.replication.shard_move_plan import holder_of
from tao.storage.names import schema_name
from tao.tailer.reader import BinlogReader
from tao.tailer.settings import ReaderSettings
from tao.topology.edits import shards_of

_UPPER_HALF: Final = 1 << 31


class MovedShard(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard has left behind at a database. ``moved_to``: the database that it moved to from there; empty, and 0
    hours ago, when the move was killed before it noted that."""

    shard: int
    database: str
    moved_to: str
    hours_ago: float


class ShardContents:
    """Asks the master of each database."""

    def __init__(self, moves: ShardMoves, settings: MoveSettings, replicator: Account, log: Logger) -> None:
        """``replicator``: the account that reads binlogs."""
        self._moves: Final = moves
        self._settings: Final = settings
        self._replicator: Final = replicator
        self._log: Final = log

    async def load_topology(self) -> Topology:
        """Return the present topology."""
        return await self._moves.store.load()

    async def in_bytes(self, topology: Topology) -> dict[str, dict[int, float]]:
        """Return about how many bytes each shard takes, by database."""
        found: dict[str, dict[int, float]] = {}
        for database in topology.databases:
            servers = self._moves.servers(database)
            async with servers.session(database.master_region) as session:
                sizes = await data_bytes(session, servers.shards, deadline=self._deadline())
            found[database.name] = {shard: float(size) for shard, size in sizes.items()}
        return found

    async def in_row_changes(self, topology: Topology, seconds: float) -> dict[str, dict[int, float]]:
        """Return how many rows of each shard change a second, by database, counted for some seconds."""
        counted = await asyncio.gather(*(self._row_changes(each, seconds) for each in topology.databases))
        return {database.name: changes for database, changes in zip(topology.databases, counted, strict=True)}

    async def _row_changes(self, database: Database, seconds: float) -> dict[int, float]:
        servers = self._moves.servers(database)
        login = servers.login(database.master_region, self._replicator)
        server_id = _UPPER_HALF | zlib.crc32(f"{database.name}/row changes".encode())
        binlog = BinlogReader(login, server_id, ReaderSettings(), self._log)
        counts: Counter[int] = Counter()
        position = await binlog.current_position()
        try:
            async with asyncio.timeout(seconds), aclosing(binlog.batches(position)) as batches:
                async for batch in batches:
                    for transaction in batch:
                        counts.update(event.shard for event in transaction.events)
        except TimeoutError:
            pass
        return {shard: counts[shard] / seconds for shard in servers.shards}

    async def find_moved(self, shards: Sequence[int], seconds: float) -> tuple[list[MovedShard], list[MovedShard]]:
        """Return what these shards, or all, have left behind at least so many seconds ago, and what later."""
        topology = await self._moves.store.load()
        found: tuple[list[MovedShard], list[MovedShard]] = [], []
        for database in topology.databases:
            servers = self._moves.servers(database)
            async with servers.session(database.master_region) as session:
                held, _ = await shards_held(session, deadline=self._deadline())
                left = set(held) - set(servers.shards)
                for shard in sorted(left & set(shards) if shards else left):
                    there = await read_shard(session, shard, deadline=self._deadline())
                    if shard >= topology.shards or not _is_left_behind(there):
                        continue
                    target, ago = "", 0
                    if there.is_marked:
                        target, ago = await moved_since(session, shard, deadline=self._deadline())
                    found[ago < seconds].append(
                        MovedShard(
                            shard=shard, database=database.name, moved_to=target, hours_ago=round(ago / 3_600, 1)
                        )
                    )
        return found

    async def find_left_behind(self) -> set[tuple[int, str]]:
        """Return the shards that have left databases which still keep what they were, each with such a database."""
        found, _ = await self.find_moved((), 0.0)
        return {(each.shard, each.database) for each in found}

    async def find_begun(self, topology: Topology) -> list[PlannedMove]:
        """Return the moves that were begun and not finished: a copy stands at the target, or what was left of it was
        not cleared away."""
        found: list[PlannedMove] = []
        for target in topology.databases:
            async with self._moves.servers(target).session(target.master_region) as session:
                _, incoming = await shards_held(session, deadline=self._deadline())
                for shard in incoming:
                    copy = (await read_shard(session, shard, deadline=self._deadline())).copy
                    if shard >= topology.shards or copy is None:
                        continue
                    holder = holder_of(topology, shard).name
                    source = copy.source or holder  # a run that died at once has not noted it
                    if source != target.name and holder in (source, target.name):
                        found.append(PlannedMove(shard, source, target.name))
        return found

    async def drop(self, found: Iterable[MovedShard]) -> None:
        """Drop what shards have left behind. What a database holds by now, or is about to, is left alone."""
        for each in found:
            async with self._moves.move_held(each.shard):
                topology = await self._moves.store.load()
                database = next(one for one in topology.databases if one.name == each.database)
                async with self._moves.administrating(database) as session:
                    there = await read_shard(session, each.shard, deadline=self._deadline())
                    if each.shard in shards_of(database) or not _is_left_behind(there):
                        continue
                    if not await self._is_at(topology, each.shard):
                        continue  # this is all there is of it
                    deadline = asyncio.get_running_loop().time() + self._settings.drop_seconds
                    await drop_schema(session, schema_name(each.shard), deadline=deadline)

    async def _is_at(self, topology: Topology, shard: int) -> bool:
        """Return whether the database that the topology names has a shard."""
        holder = holder_of(topology, shard)
        async with self._moves.servers(holder).session(holder.master_region) as session:
            return (await read_shard(session, shard, deadline=self._deadline())).row is not None

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.statement_seconds


def _is_left_behind(there: ShardThere) -> bool:
    """Return whether a shard that the topology gives to another database has left this one. A copy beside it says that
    it is on its way here, unless it has left since."""
    return there.row is not None and (there.is_marked or there.copy is None)
