"""More shards in the simulation: an operator runs `tao topology add-shards` while clients work, and some runs die.

The command's code is the product's own, above the statements that are replaced here. Once the topology names the new
shards, clients add objects anywhere. No request may fail for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Final

from tao.admin import shard_tables
from tao.admin.shard_tables import create_shards
from tao.model.errors import UnknownShard
from tao.model.jobs import PausedKind
from tao.model.rows import RowChanges, ShardRow
from tao.replication.server_statements import raise_epoch
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.storage.migrations import migrate
from tao.storage.session import ServerAccount
from tao.topology import edits
from tests.sim.checks import Violation
from tests.sim.clients import Client
from tests.sim.commands import CommandRun
from tests.sim.database import SimDatabase
from tests.sim.loop import Process
from tests.sim.plans import Op
from tests.sim.rows import Rows
from tests.sim.sessions import SimSession
from tests.sim.substitutes import Substitution
from tests.sim.topologies import REGIONS
from tests.sim.watchers import ACCOUNT
from tests.sim.world import World

_AGAIN_SECONDS: Final = 2.0
_ADDED_AFTER_SECONDS: Final = 1.0
"""From the new topology until clients use its shards: they learn of it within half a second."""
_ABOUT_SECONDS: Final = 1.5
"""About how long a run takes."""


class Growth:
    """An operator's additions of shards to one world."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._numbers: Final = count(1)

    def begin(self, op: Op) -> None:
        """Add shards, with a run that dies first in half of the cases."""
        self._world.spawn(self._grow(op.two, op.one / 1000 * _ABOUT_SECONDS if op.one % 2 else 0.0))

    async def _grow(self, added: int, dies_after: float) -> None:
        """Add shards. A second run may add another number of them."""
        world = self._world
        before = world.topology.shards
        while world.topology.shards == before:
            await self._run(added, dies_after)
            added, dies_after = 1, 0.0
            await asyncio.sleep(_AGAIN_SECONDS)
        for client in world.clients:
            world.loop.call_later(_ADDED_AFTER_SECONDS, self._use, client)

    async def _run(self, added: int, dies_after: float) -> None:
        number = next(self._numbers)
        process = Process(f"growth-{number}", REGIONS[number % self._world.shape.regions])

        async def add(moves: ShardMoves) -> str:
            before = await moves.store.load()
            after = await create_shards(moves, before, edits.add_shards(before, added), {}, ACCOUNT)
            return f"{after.shards} shards"

        await CommandRun(self._world, process, MoveSettings()).do(add, dies_after=dies_after)

    def _use(self, client: Client) -> None:
        if client.graph is not None:
            self._world.spawn(self._add_anywhere(client), client.process)

    async def _add_anywhere(self, client: Client) -> None:
        result = await client.add_anywhere()
        self._world.trace.note("added anywhere", client.process.name, result)
        what = f"{client.process.name}: an object on any shard"
        if result == UnknownShard.reason:
            # The client routes by a topology that has the shard, although some servers may have an older one.
            self._world.found(Violation("7", f"{what} was refused as a mistake"))
        self._world.checks.done(what, result)


def growth_substitutes(world: World) -> list[Substitution]:
    """Return the substitutes beneath additions of shards."""
    return [
        Substitution(migrate, partial(sim_migrate, world)),
        Substitution(raise_epoch, partial(sim_raise_epoch, world)),
        Substitution(shard_tables.is_written, is_written),
        Substitution(shard_tables.paused_kinds, paused_kinds),
        Substitution(shard_tables.pause_kinds, pause_kinds),
    ]


async def sim_migrate(
    world: World,
    account: ServerAccount,
    shards: Sequence[int],
    _: Mapping[str, int],
    master_server: str,
    *,
    version_epoch: int,
) -> int:
    """Replaces `tao.storage.migrations.migrate`: makes the tables of the shards that have none."""
    session = SimSession(world, world.databases[account.host])
    made = 0
    for shard in shards:
        row = ShardRow(shard, master_server, version_epoch, "", 0)

        async def make(shard: int = shard, row: ShardRow = row) -> int:
            if shard in session.server.truth.shards:
                return 0
            await session.server.execute(partial(_add_row, row), shard)
            return 1

        made += await session.do(make)
    return made


def _add_row(row: ShardRow, rows: Rows) -> None:
    rows.shards[row.shard] = row


async def sim_raise_epoch(
    world: World, session: SimSession, shards: Sequence[int], master: str, version_epoch: int, *, deadline: float
) -> None:
    """Replaces `tao.replication.server_statements.raise_epoch`."""

    async def raise_there() -> None:
        server = session.server
        rows = {
            shard: ShardRow(shard, master, max(row.version_epoch, version_epoch), "", row.generation + 1)
            for shard in shards
            if (row := server.truth.shards[shard]).master_server != master or row.version_epoch < version_epoch
        }
        await asyncio.sleep(server.log(RowChanges(), world.schema, rows))
        server.show(RowChanges(), rows)

    await session.do(raise_there, deadline)


async def is_written(session: SimSession, shard: int) -> bool:
    """Replaces `tao.admin.shard_tables.is_written`."""

    def look(server: SimDatabase) -> bool:
        changes = server.rows.of_shard(shard)
        changes.put_paused_jobs = {}
        return bool(changes) or bool(server.rows.shards[shard].owner)

    return await session.run(look)


async def paused_kinds(session: SimSession, shards: Sequence[int]) -> set[bytes]:
    """Replaces `tao.admin.shard_tables.paused_kinds`."""

    def look(server: SimDatabase) -> set[bytes]:
        return {key.kind.encode() for key, paused in server.rows.paused_jobs.items() if paused and key.shard in shards}

    return await session.run(look)


async def pause_kinds(session: SimSession, shard: int, paused: Sequence[bytes]) -> None:
    """Replaces `tao.admin.shard_tables.pause_kinds`."""

    def pause(rows: Rows) -> None:
        for key in [key for key in rows.paused_jobs if key.shard == shard]:
            del rows.paused_jobs[key]
        rows.paused_jobs.update({PausedKind(shard, kind.decode()): True for kind in paused})

    await session.do(partial(session.server.execute, pause))
