"""The rows of a shard pass from one database server to another as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tao.model.errors import MasterReadOnly, TaoError
from tao.model.topology import DatabaseServer
from tao.replication.accounts import Account, ServiceAccounts
from tao.replication.move_statements import CopiedTable, begin_copy, copied_tables, copy_tables
from tao.replication.row_copy import CopyEnds, CopyPace, copy_rows
from tao.replication.shard_move_plan import CopyState, MoveRefused
from tao.storage.names import incoming_schema_name, schema_name
from tao.storage.session import DatabaseSession, ServerAccount
from tests.rigs.move_rig import SOURCE, TARGET, MoveRig, move_rig, soon

pytestmark = [
    pytest.mark.database,
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
]

EAST_SOURCE, EAST_TARGET = f"east-{SOURCE}", f"east-{TARGET}"
PACE = CopyPace(stall_seconds=30)
HIGHEST = (1 << 64) - 1
VALUES = [
    *(b"", b"\0", bytes(range(256)), b"\xfb\xfc\xfd\xfe\xff", b"'\\\"%s?", b"x" * 250, b"x" * 251, b"x" * 70_000),
    bytes(3 << 20),  # larger than a batch
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, database_accounts: ServiceAccounts) -> AsyncIterator[MoveRig]:
    async with move_rig(tmp_path_factory.mktemp("copies"), database_accounts) as rig:
        yield rig


def login(rig: MoveRig, server: str, account: Account) -> ServerAccount:
    return account.at(DatabaseServer(name=server, port=rig.servers[server].port))


def ends(rig: MoveRig, shard: int) -> CopyEnds:
    source = login(rig, EAST_SOURCE, rig.accounts.administrator)
    return CopyEnds(shard, source, EAST_SOURCE, login(rig, EAST_TARGET, rig.accounts.leader), EAST_TARGET)


async def prepared(rig: MoveRig, shard: int) -> dict[str, CopiedTable]:
    """Make an incoming copy without rows, and return its tables."""
    async with rig.session(EAST_SOURCE) as here, rig.session(EAST_TARGET) as there:
        await begin_copy(there, shard, CopyState(source=SOURCE, source_epoch=1, target_epoch=1), deadline=soon())
        await copy_tables(here, there, shard, deadline=soon())
        return await copied_tables(here, schema_name(shard), deadline=soon())


async def contents(session: DatabaseSession, schema: str, tables: dict[str, CopiedTable]) -> dict[str, list[object]]:
    return {
        name: list(
            (await session.run(f"SELECT * FROM {schema}.{name} ORDER BY {', '.join(each.key)}", deadline=soon()))[0]
        )
        for name, each in tables.items()
    }


async def fill(session: DatabaseSession, shard: int) -> None:
    """Write rows of all sizes, and more small ones than a statement takes."""
    schema = schema_name(shard)
    objects = [
        *((number, 1, number, 0, data) for number, data in enumerate(VALUES)),
        (HIGHEST, 65_535, HIGHEST, 1, b""),
    ]
    for row in objects:
        await session.run(f"INSERT INTO {schema}.objects VALUES (%s, %s, %s, %s, %s); COMMIT", row, deadline=soon())
    edges = [(number // 100, 7, number, number, 1, b"%d" % number) for number in range(5_000)]
    values = ", ".join(["(%s, %s, %s, %s, %s, %s)"] * len(edges))
    await session.run(
        f"INSERT INTO {schema}.assocs VALUES {values}; COMMIT", [each for row in edges for each in row], deadline=soon()
    )


async def test_rows_of_all_sizes_arrive_as_they_were(rig: MoveRig) -> None:
    tables = await prepared(rig, 0)
    async with rig.session(EAST_SOURCE) as here, rig.session(EAST_TARGET) as there:
        await fill(here, 0)
        await here.run("ROLLBACK; SET SESSION time_zone = '+05:30'", deadline=soon())
        await there.run("ROLLBACK; SET SESSION time_zone = '+05:30'", deadline=soon())
        shown: list[int] = []
        copied_bytes, position = await copy_rows(ends(rig, 0), tables, PACE, shown.append)
        expected = await contents(here, schema_name(0), tables)
        assert len(expected["assocs"]) == 5_000
        assert await contents(there, incoming_schema_name(0), tables) == expected
        assert shown[-1] == copied_bytes > sum(map(len, VALUES))
        assert position


async def test_a_position_has_nothing_that_the_copy_lacks(rig: MoveRig) -> None:
    """Objects are written one by one meanwhile. Those behind the position are written again by the follower."""
    tables = await prepared(rig, 1)
    positions: list[str] = []
    name = "gtid_binlog_pos" if await is_mariadb(rig) else "gtid_executed"
    ended = asyncio.Event()

    async def write() -> None:
        async with rig.session(EAST_SOURCE) as session:
            number = 0
            while not ended.is_set():
                row = (number, 1, 1, 0, b"")
                sql = f"INSERT INTO {schema_name(1)}.objects VALUES (%s, %s, %s, %s, %s); COMMIT"
                *_, ((position,),) = await session.run(f"{sql}; SELECT @@GLOBAL.{name}", row, deadline=soon())
                await session.run("ROLLBACK", deadline=soon())
                positions.append(str(position).replace("\n", ""))
                number += 1

    writing = asyncio.create_task(write())
    while len(positions) < 50:  # noqa: ASYNC110 - counts what another task does
        await asyncio.sleep(0.005)
    _, position = await copy_rows(ends(rig, 1), tables, PACE, lambda _: None)
    ended.set()
    await writing
    async with rig.session(EAST_TARGET) as there:
        rows = (await contents(there, incoming_schema_name(1), tables))["objects"]
    assert position in positions
    assert len(rows) >= positions.index(position) + 1


async def is_mariadb(rig: MoveRig) -> bool:
    ((version,),) = await rig.rows(EAST_SOURCE, "SELECT VERSION()")
    return "mariadb" in str(version).lower()


async def test_a_column_that_may_be_null_is_refused(rig: MoveRig) -> None:
    tables = await prepared(rig, 2)
    async with rig.session(EAST_SOURCE) as here:
        await here.run(f"ROLLBACK; ALTER TABLE {schema_name(2)}.objects ADD note VARBINARY(9)", deadline=soon())
    with pytest.raises(MoveRefused, match=r"tao_00002.objects.note may be NULL"):
        await copy_rows(ends(rig, 2), tables, PACE, lambda _: None)


async def test_a_target_that_is_closed_takes_no_rows(rig: MoveRig) -> None:
    tables = await prepared(rig, 3)
    async with rig.session(EAST_SOURCE) as here, rig.session(EAST_TARGET) as there:
        await fill(here, 3)
        await there.run("ROLLBACK; SET GLOBAL read_only = 1", deadline=soon())
        try:
            with pytest.raises(MasterReadOnly):
                await copy_rows(ends(rig, 3), tables, PACE, lambda _: None)
        finally:
            await there.run("SET GLOBAL read_only = 0", deadline=soon())


async def test_a_copy_goes_on_when_its_pace_allows_it(rig: MoveRig) -> None:
    tables = await prepared(rig, 4)
    asked = 0

    async def may_go_on() -> None:
        nonlocal asked
        asked += 1

    async def refuse() -> None:
        raise TaoError("the lock of the move is lost")

    async with rig.session(EAST_SOURCE) as here, rig.session(EAST_TARGET) as there:
        await fill(here, 4)
        pace = replace(PACE, bytes_per_second=1e9, may_go_on=may_go_on)
        with pytest.raises(TaoError, match="is lost"):
            await copy_rows(ends(rig, 4), tables, replace(pace, may_go_on=refuse), lambda _: None)
        assert not any((await contents(there, incoming_schema_name(4), tables)).values())
        await copy_rows(ends(rig, 4), tables, pace, lambda _: None)
        expected = await contents(here, schema_name(4), tables)
        assert asked >= sum(bool(rows) for rows in expected.values()) > 0
        assert await contents(there, incoming_schema_name(4), tables) == expected
