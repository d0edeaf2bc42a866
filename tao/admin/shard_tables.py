# ruff: noqa: S608 - schema and table names come from tao.storage.names or the server's own tables, values are bound
"""Brings the tables of all shards up to date, and creates more shards: `tao migrate` and `tao topology add-shards`.

One process at a time does either. The tables of new shards are created before the topology names them. No master is
replaced in between: the rows of the new shards name the masters, and a promotion changes only the rows of shards that
the topology names. What an earlier run has left, which ended before it stored the topology, is brought up to date, or
dropped where another number of shards puts it into another database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from tao.model.errors import OperatorError, TopologyConflict
from tao.model.ports import TopologyStore
from tao.model.topology import Database, DatabaseServer, Topology
from tao.replication.accounts import Account
from tao.replication.locks import MASTERSHIP, Locks, keep_alive, mastership_lock
from tao.replication.move_statements import copied_tables, drop_schema, shards_held
from tao.replication.replication_set import find_database
from tao.replication.server_statements import raise_epoch
from tao.replication.shard_move import ShardMoves
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.session import DatabaseSession
from tao.topology.edits import shards_of

TABLES_LOCK: Final = "tables-of-shards"
"""The lock under which tables of shards are created and changed. Two migrations at one time would both find a column
missing, and one of them would fail."""
_SHARDS_PER_STATEMENT: Final = 200
_SHARDS_PER_MASTERSHIP: Final = 100
"""Shards that are migrated while a promotion has to wait: some seconds of work."""
_LONG_SECONDS: Final = 600.0
"""Time limit of statements that touch many shards."""
_WRITTEN_AT_CREATION: Final = frozenset({"shard", "schema_migrations", "heartbeat", "paused_jobs"})
"""Tables that have rows before a leader has written anything into the shard."""


async def migrate_all(
    store: TopologyStore,
    locks: Locks,
    topology: Topology,
    tables: Mapping[str, int],
    administrator: Account,
    progress: Callable[[str, int], None],
) -> dict[str, int]:
    """Bring the tables of all shards up to date at the masters. Returns how many shards of each database needed it.

    No master is replaced while its tables change: it would have what its successor lacks. A promotion waits for the
    hundred shards that are under way.

    ``tables``: see `migrate`. ``progress`` is called with the name of a database and how many of its shards are up to
    date. Raises `OperatorError` when a master was replaced since the topology was read, or shards were moved,
    `LockTaken` while another process does the same or a master is being replaced, and what `migrate` raises; the next
    run goes on."""
    changed: dict[str, int] = {}
    async with locks.held(TABLES_LOCK, exclusive=True) as hold:
        for database in topology.databases:
            shards, changed[database.name] = sorted(shards_of(database)), 0
            for done in range(0, len(shards), _SHARDS_PER_MASTERSHIP):

                def show(more: int, _: int, name: str = database.name, done: int = done) -> None:
                    progress(name, done + more)

                async with (
                    locks.held(mastership_lock(database.name), exclusive=False) as kept,
                    keep_alive(kept, MASTERSHIP),
                ):
                    hold.check()
                    now = find_database(await store.load(), database.name)
                    if (_master(now).name, now.shards) != (_master(database).name, database.shards):
                        raise OperatorError(
                            "a master was replaced since the question, or shards were moved: repeat the command"
                        )
                    changed[database.name] += await migrate(
                        administrator.at(_master(now)),
                        shards[done : done + _SHARDS_PER_MASTERSHIP],
                        tables,
                        _master(now).name,
                        version_epoch=now.version_epoch,
                        progress=show,
                    )
    return changed


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

    ``tables``: see `migrate`. Kinds of jobs that are paused on any present shard are paused on the new ones, and no
    others. Raises `MoveAborted` when a master was replaced since ``before`` was read, `LockTaken` while one is being
    replaced or another process creates shards, `TopologyConflict` when the topology was changed, and `OperatorError`
    for a master with rows of a shard that no topology names; the next run goes on."""
    added = added_shards(before, after)
    async with AsyncExitStack() as stack:
        # Another run must not drop the shards of this one before the topology names them.
        holds = [await stack.enter_async_context(moves.locks.held(TABLES_LOCK, exclusive=True))]
        holds += [await stack.enter_async_context(moves.master_kept(database)) for database in before.databases]
        if (found := (await moves.store.load()).version) != before.version:
            raise TopologyConflict(f"the topology has version {found} by now, not {before.version}: repeat the command")
        unnamed = {each.name: await _unnamed_shards(moves, each, before.shards) for each in before.databases}
        for hold in holds:
            hold.check()
        for database in before.databases:
            await _drop(moves, database, sorted(unnamed[database.name] - set(added[database.name])))
        paused: set[bytes] = set()
        for database in before.databases:
            async with moves.servers(database).session(database.master_region) as session:
                paused |= await paused_kinds(session, sorted(shards_of(database)))
        for database in after.databases:
            await _create(moves, database, added[database.name], tables, administrator, sorted(paused))
        for hold in holds:
            hold.check()
        return await moves.store.change(before.version, after)


async def _unnamed_shards(moves: ShardMoves, database: Database, named: int) -> set[int]:
    """Return the shards that a master has beyond those that the topology names. Raises `OperatorError` when one of them
    has rows: the topology that named it is lost."""
    async with moves.servers(database).session(database.master_region) as session:
        found = {shard for shard in (await shards_held(session, deadline=_soon()))[0] if shard >= named}
        for shard in sorted(found):
            if await is_written(session, shard):
                raise OperatorError(
                    f"{_master(database).name} has rows of shard {shard}, and the topology names {named:,} shards: was "
                    "an older topology restored? Store the newest one with `tao topology import`"
                )
    return found


async def is_written(session: DatabaseSession, shard: int) -> bool:
    """Return whether a leader has written anything into a shard, or may do so now."""
    schema = schema_name(shard)
    tables = (await copied_tables(session, schema, deadline=_soon())).keys()
    looks = [f"(SELECT 1 FROM {schema}.{table} LIMIT 1)" for table in sorted(tables - _WRITTEN_AT_CREATION)]
    if "shard" in tables:  # a leader that owns the shard may write into it at any time
        looks.append(f"(SELECT 1 FROM {schema}.shard WHERE owner <> '')")
    if not looks:  # the first run ended right at the beginning
        return False
    union = " UNION ALL ".join(looks)
    rows, _ = await session.run(f"{union}; ROLLBACK", deadline=_soon())
    return bool(rows)


async def _drop(moves: ShardMoves, database: Database, shards: Sequence[int]) -> None:
    """Drop empty shards that an earlier run has created here, and that this one creates in another database or not at
    all."""
    if shards:
        async with moves.servers(database).session(database.master_region) as session:
            for shard in shards:
                await drop_schema(session, schema_name(shard), deadline=_soon())


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
    master = _master(database)
    await migrate(administrator.at(master), shards, tables, master.name, version_epoch=database.version_epoch)
    async with moves.servers(database).session(database.master_region) as session:
        # An earlier run may have created them at a master that was replaced since.
        await raise_epoch(session, shards, master.name, database.version_epoch, deadline=_soon())
        for shard in shards:
            await pause_kinds(session, shard, paused)


async def pause_kinds(session: DatabaseSession, shard: int, paused: Sequence[bytes]) -> None:
    """Pause these kinds of jobs on a shard, and no others: what was paused at an earlier run may have been resumed
    since."""
    table = f"{schema_name(shard)}.paused_jobs"
    kinds = ", ".join(["(%s)"] * len(paused))
    insert = f"INSERT INTO {table} (kind) VALUES {kinds}; " if paused else ""
    await session.run(f"DELETE FROM {table}; {insert}COMMIT", paused, deadline=_soon())


async def paused_kinds(session: DatabaseSession, shards: Sequence[int]) -> set[bytes]:
    """Return the kinds of jobs that are paused on any of these shards."""
    found: set[bytes] = set()
    for at in range(0, len(shards), _SHARDS_PER_STATEMENT):
        some = shards[at : at + _SHARDS_PER_STATEMENT]
        union = " UNION ".join(f"(SELECT kind FROM {schema_name(shard)}.paused_jobs)" for shard in some)
        rows, _ = await session.run(f"{union}; ROLLBACK", deadline=_soon())
        found |= {kind for (kind,) in rows}
    return found


def _master(database: Database) -> DatabaseServer:
    return database.servers[database.master_region]


def _soon() -> float:
    return asyncio.get_running_loop().time() + _LONG_SECONDS
