# ruff: noqa: S608 - schema names come from tao.storage.names, values are bound
"""Creates the shards that a topology is to have in addition: `tao topology add-shards`.

Their tables are created before the topology names them. No master is replaced in between: the rows of the new shards
name the masters, and a promotion changes only the rows of shards that the topology names. What an earlier run has left,
which ended before it stored the topology, is brought up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from tao.model.topology import Database, Topology
from tao.replication.accounts import Account
from tao.replication.server_statements import raise_epoch
from tao.replication.shard_move import ShardMoves
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.session import DatabaseSession
from tao.topology.edits import shards_of

_SHARDS_PER_STATEMENT: Final = 200
_LONG_SECONDS: Final = 600.0
"""Time limit of statements that touch many shards."""


def added_shards(before: Topology, after: Topology) -> dict[str, list[int]]:
    """Return the shards that each database has in addition, by its name."""
    return {
        database.name: sorted(shards_of(database) - shards_of(former))
        for former, database in zip(before.databases, after.databases, strict=True)
    }


async def create_shards(
    moves: ShardMoves, before: Topology, after: Topology, tables: Mapping[str, int], administrator: Account
) -> Topology:
    """Create the shards that ``after`` has in addition to ``before``, store it, and return what was stored.

    ``tables``: see `migrate`. Kinds of jobs that are paused on any present shard are paused on the new ones. Raises
    `MoveAborted` when a master was replaced since ``before`` was read, `LockTaken` while one is being replaced, and
    `TopologyConflict` when the topology was changed; the next run goes on."""
    added = added_shards(before, after)
    async with AsyncExitStack() as stack:
        holds = [await stack.enter_async_context(moves.master_kept(database)) for database in before.databases]
        paused: set[bytes] = set()
        for database in before.databases:
            async with moves.servers(database).session(database.master_region) as session:
                paused |= await _paused_kinds(session, sorted(shards_of(database)))
        for database in after.databases:
            await _create(moves, database, added[database.name], tables, administrator, sorted(paused))
        for hold in holds:
            hold.check()
        return await moves.store.change(before.version, after)


async def _create(
    moves: ShardMoves,
    database: Database,
    shards: Sequence[int],
    tables: Mapping[str, int],
    administrator: Account,
    paused: Sequence[bytes],
) -> None:
    if not shards:
        return
    master = database.servers[database.master_region]
    await migrate(administrator.at(master), shards, tables, master.name, version_epoch=database.version_epoch)
    async with moves.servers(database).session(database.master_region) as session:
        # An earlier run may have created them at a master that was replaced since.
        await raise_epoch(session, shards, master.name, database.version_epoch, deadline=_soon())
        for shard in shards if paused else ():
            kinds = ", ".join(["(%s)"] * len(paused))
            insert = f"INSERT IGNORE INTO {schema_name(shard)}.paused_jobs (kind) VALUES {kinds}; COMMIT"
            await session.run(insert, paused, deadline=_soon())


async def _paused_kinds(session: DatabaseSession, shards: Sequence[int]) -> set[bytes]:
    found: set[bytes] = set()
    for at in range(0, len(shards), _SHARDS_PER_STATEMENT):
        some = shards[at : at + _SHARDS_PER_STATEMENT]
        union = " UNION ".join(f"(SELECT kind FROM {schema_name(shard)}.paused_jobs)" for shard in some)
        rows, _ = await session.run(f"{union}; ROLLBACK", deadline=_soon())
        found |= {kind for (kind,) in rows}
    return found


def _soon() -> float:
    return asyncio.get_running_loop().time() + _LONG_SECONDS
