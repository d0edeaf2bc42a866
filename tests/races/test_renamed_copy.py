"""A change reaches the copy of a shard late, when the copy was renamed, over two real database servers.

follower of the copy              target                                          mover
                                  the copy is renamed: it is the shard       ←    switches, in vain
                                                                                  lets leaders write at the source
writes what they write     →
refused, position and all
                                  the shard is a copy again                  ←    undoes the switch
writes it, from there on   →

A copy that had taken the position without the rows would lack them for ever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tao.model.ids import SHARD_SHIFT
from tao.replication.accounts import ServiceAccounts
from tao.replication.move_statements import (
    Advance,
    CopiedTable,
    NetRows,
    apply_rows,
    copied_tables,
    read_shard,
    rename_back,
)
from tao.replication.shard_move_plan import MoveStep
from tao.storage.failures import TablesMissing
from tao.storage.names import incoming_schema_name
from tests.rigs.move_rig import TARGET, MoveRig, Writer, move_rig, soon

pytestmark = [
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

SHARD = 0
EAST_TARGET = f"east-{TARGET}"


class Killed(BaseException):
    """The effect of SIGKILL on code."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, database_accounts: ServiceAccounts) -> AsyncIterator[MoveRig]:
    folder: Path = tmp_path_factory.mktemp("moves")
    async with move_rig(folder, database_accounts) as rig:
        yield rig


async def test_a_renamed_copy_takes_no_change_and_keeps_its_position(rig: MoveRig) -> None:
    tables: dict[str, CopiedTable] = {}
    assert await Writer(rig.store(), SHARD).write_one()

    async def look_then_die(step: MoveStep) -> None:
        if step is MoveStep.FENCE:
            async with rig.session(EAST_TARGET) as session:
                tables.update(await copied_tables(session, incoming_schema_name(SHARD), deadline=soon()))
        elif step is MoveStep.REPLICAS:
            raise Killed

    with pytest.raises(Killed):
        await rig.mover(look_then_die).move(SHARD, TARGET)
    row = {"id": SHARD << SHARD_SHIFT | 9, "otype": 1, "version": 1, "deleted": 0, "data": b"late"}
    image = {name: row.get(name) for name in tables["objects"].columns}
    net: NetRows = {"objects": {tables["objects"].key_of(image): image}}
    async with rig.session(EAST_TARGET) as session:
        there = await read_shard(session, SHARD, deadline=soon())
        assert there.row is not None
        assert there.copy is not None
        late = Advance(there.copy.position, f"{there.copy.position},9-9-9")
        with pytest.raises(TablesMissing):
            await apply_rows(session, SHARD, net, tables, late, deadline=soon())
    async with rig.session(EAST_TARGET) as session:
        await rename_back(session, SHARD, deadline=soon())
        assert (await read_shard(session, SHARD, deadline=soon())).copy == there.copy
        await apply_rows(session, SHARD, net, tables, late, deadline=soon())
