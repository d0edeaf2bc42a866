"""Shards are added while a master is replaced, after runs that were interrupted, and while jobs are paused; tables are
created by one process at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tao.admin import shard_tables
from tao.admin.shard_tables import added_shards, create_shards, migrate_all
from tao.model.errors import OperatorError
from tao.model.topology import Topology
from tao.replication.accounts import ServiceAccounts
from tao.replication.locks import LockTaken, mastership_lock
from tao.replication.promotion_plan import PromotionRequest
from tao.replication.shard_move_plan import MoveAborted
from tao.storage.migrations import migrate
from tao.storage.names import schema_name, shard_of_schema
from tao.topology import edits
from tests.rigs.move_rig import SHARDS, SOURCE, TARGET, MoveRig, Writer, move_rig, soon

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.asyncio]

NEW = SHARDS  # The first one is added to `SOURCE`.


async def add(rig: MoveRig, before: Topology, count: int = 4) -> Topology:
    after = edits.add_shards(before, count)
    assert added_shards(before, after)[SOURCE] == list(range(NEW, NEW + count // 2))
    return await create_shards(rig.moves(), before, after, {}, rig.accounts.administrator)


async def unnamed(rig: MoveRig, server: str) -> set[int]:
    """Return the shards of a server that were not there in the beginning."""
    shards = {shard_of_schema(str(name)) for (name,) in await rig.rows(server, "SHOW DATABASES LIKE 'tao\\_%%'")}
    return {shard for shard in shards if shard is not None and shard >= NEW}


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[MoveRig]:
    async with move_rig(tmp_path, database_accounts) as rig:
        yield rig


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


@pytest.mark.parametrize("count", [2, 8])
async def test_after_an_interruption_another_number_of_shards_leaves_none_at_the_wrong_database(
    rig: MoveRig, count: int
) -> None:
    before = rig.topology
    for database in before.databases:  # all of four shards, of which one has paused a kind that was resumed since
        master = database.servers["east"]
        shards = added_shards(before, edits.add_shards(before, 4))[database.name]
        await migrate(rig.accounts.administrator.at(master), shards, {}, master.name)
    async with rig.session(f"east-{SOURCE}") as session:
        await session.run(f"INSERT INTO {schema_name(NEW)}.paused_jobs VALUES ('each_edge'); COMMIT", deadline=soon())
        await session.run(f"CREATE DATABASE {schema_name(NEW + 20)}", deadline=soon())  # its tables were to follow

    await add(rig, before, count)
    half = count // 2
    assert await unnamed(rig, f"east-{SOURCE}") == set(range(NEW, NEW + half))
    assert await unnamed(rig, f"east-{TARGET}") == set(range(NEW + half, NEW + count))
    assert await rig.rows(f"east-{SOURCE}", f"SELECT kind FROM {schema_name(NEW)}.paused_jobs") == []
    for shard in range(NEW, NEW + count):
        assert await Writer(rig.store(), shard).write_one()


async def test_a_shard_with_rows_that_no_topology_names_is_not_dropped(rig: MoveRig) -> None:
    before = rig.topology
    await add(rig, before)
    writer = Writer(rig.store(), NEW + 1)
    assert await writer.write_one()
    older = edits.as_version(before, rig.topology.version + 1)
    await rig.moves().store.change(rig.topology.version, older)
    with pytest.raises(OperatorError, match=f"east-{SOURCE} has rows of shard {NEW + 1}"):
        await add(rig, older, 2)
    assert await rig.written(f"east-{SOURCE}", NEW + 1) == writer.acknowledged
    assert await unnamed(rig, f"east-{TARGET}") == {NEW + 2, NEW + 3}


async def test_tables_are_created_by_one_process_at_a_time(rig: MoveRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration stands still at the first database. Another one, and one that adds shards, would make the same
    tables."""
    topology, moves = rig.topology, rig.moves()
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def migrate_late(*arguments: object, **options: object) -> int:
        begun.set()
        await go_on.wait()
        return 0

    async def migrate_now() -> dict[str, int]:
        return await migrate_all(
            moves.store, rig.moves().locks, topology, {}, rig.accounts.administrator, lambda *_: None
        )

    monkeypatch.setattr(shard_tables, "migrate", migrate_late)
    first = asyncio.create_task(migrate_now())
    await begun.wait()
    monkeypatch.undo()
    with pytest.raises(LockTaken):
        await migrate_now()
    with pytest.raises(LockTaken):
        await add(rig, topology)
    with pytest.raises(LockTaken):  # nor is a master replaced meanwhile
        async with rig.moves().locks.held(mastership_lock(SOURCE), exclusive=True):
            pass
    assert not await unnamed(rig, f"east-{SOURCE}")
    go_on.set()
    assert await first == {SOURCE: 0, TARGET: 0}
    await add(rig, topology)
    assert await unnamed(rig, f"east-{SOURCE}") == {NEW, NEW + 1}
