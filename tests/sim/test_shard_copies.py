"""A simulated copy of a shard takes and refuses what one at a server does."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest

from tao.model.rows import ObjectRow, ShardRow
from tao.replication.move_statements import Advance
from tao.replication.shard_move_plan import CopyState
from tao.storage.failures import TablesMissing
from tests.sim import shard_copies
from tests.sim.checks import Violation
from tests.sim.copied_tables import ROW, TABLES
from tests.sim.loop import SimLoop
from tests.sim.plans import Shape, make_plan
from tests.sim.sessions import SimSession
from tests.sim.world import World

SHARD = 0
FIRST, LATE = Advance("", "0-1-7"), Advance("0-1-7", "0-1-8")


def test_a_renamed_copy_takes_no_change_and_keeps_its_position() -> None:
    """A mover that undoes a switch lets leaders write before it renames the copy back, and still follows them.
    `tests.races.test_renamed_copy` has the same at a server."""
    loop, found = SimLoop(), list[Violation]()
    world = World(loop, make_plan(1, 1, Shape(), kinds={}), found.append)
    target = next(each for each in world.databases.values() if SHARD not in each.truth.shards and not each.read_only)
    session = cast(Any, SimSession(world, target))
    apply = partial(shard_copies.apply_rows, session, SHARD, {"objects": {(1,): {ROW: ObjectRow(1, 1, 1, False, b"")}}})

    async def play() -> None:
        state = CopyState(source="db1", source_epoch=1, target_epoch=1)
        await shard_copies.begin_copy(session, SHARD, state, deadline=9.0)
        await apply(TABLES, FIRST, deadline=9.0)
        await shard_copies.rename_copy(session, ShardRow(SHARD, target.name, 1, "", 0), deadline=9.0)
        with pytest.raises(TablesMissing):
            await apply(TABLES, LATE, deadline=9.0)
        await shard_copies.rename_back(session, SHARD, deadline=9.0)
        copy = (await shard_copies.read_shard(session, SHARD, deadline=9.0)).copy
        assert copy is not None
        assert copy.position == FIRST.after
        await apply(TABLES, LATE, deadline=9.0)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(play(), context=world.operator.context)
    assert not found
