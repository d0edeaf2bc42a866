"""Shards are added while a master is replaced, after a run that was interrupted, and while a kind of jobs is paused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.admin.shard_tables import added_shards, create_shards
from tao.model.topology import Topology
from tao.replication.accounts import ServiceAccounts
from tao.replication.promotion_plan import PromotionRequest
from tao.replication.shard_move_plan import MoveAborted
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.topology import edits
from tests.rigs.move_rig import SHARDS, SOURCE, MoveRig, Writer, move_rig, soon

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.asyncio]

NEW = SHARDS  # The first one is added to `SOURCE`.


async def add(rig: MoveRig, before: Topology) -> Topology:
    after = edits.add_shards(before, 4)
    assert added_shards(before, after)[SOURCE] == [NEW, NEW + 1]
    return await create_shards(rig.moves(), before, after, {}, rig.accounts.administrator)


async def test_shards_are_added_to_the_present_master_alone_and_begin_with_the_pauses_of_the_others(
    tmp_path: Path, database_accounts: ServiceAccounts
) -> None:
    async with move_rig(tmp_path, database_accounts, regions=("east", "west")) as rig:
        before = rig.topology
        former = before.databases[0].servers["east"]
        # A run that ended before it stored the topology.
        await migrate(rig.accounts.administrator.at(former), [NEW], {}, former.name)
        async with rig.session(former.name) as session:
            await session.run(f"INSERT INTO {schema_name(3)}.paused_jobs VALUES ('each_edge'); COMMIT", deadline=soon())
        await rig.promoter().promote(SOURCE, PromotionRequest("west"))
        with pytest.raises(MoveAborted, match=f"{SOURCE} has got another master"):
            await add(rig, before)
        assert await rig.rows(former.name, f"SHOW DATABASES LIKE '{schema_name(NEW + 1)}'") == []

        await add(rig, rig.topology)
        for shard in (NEW, NEW + 1):
            assert await Writer(rig.store(), shard).write_one(), "its row names the present master"
        for shard, server in ((NEW, f"west-{SOURCE}"), (NEW + 3, "east-db-2")):
            assert await rig.rows(server, f"SELECT kind FROM {schema_name(shard)}.paused_jobs") == [(b"each_edge",)]
