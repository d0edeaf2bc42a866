"""A critical read meets the fence of a move, whose mover is dead or at work, over two real database servers.

reader                            source                       target                     operator
                                  fenced: names the target                           ←    moves the shard, dies
reads the rows           →        rows, and the fence
asks where the fence sends it  →                               nobody has written there
answered by the rows

reader (its topology is old)      source                       target
                                                               a leader takes the shard, and writes version 2
reads the rows           →        rows at version 1
asks where the fence sends it  →                               the generation is higher
refused: not version 1

reader (older still)           source                       target                     another one
                                                               left, and dropped          taken, and written
reads the rows           →        rows at version 1
asks where the fence sends it  →                               neither shard nor copy
refused: not version 1
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from tao.model.errors import MasterReadOnly, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import FillRead, ObjectQuery
from tao.model.topology import DatabaseServer
from tao.replication.accounts import ServiceAccounts
from tao.replication.move_statements import drop_schema, rename_back
from tao.replication.shard_move_plan import MoveStep
from tao.storage.names import incoming_schema_name, schema_name
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tests.rigs.move_rig import SOURCE, TARGET, MoveRig, Writer, move_rig, soon

pytestmark = [
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
]

EAST_SOURCE, EAST_TARGET = f"east-{SOURCE}", f"east-{TARGET}"


class Killed(BaseException):
    """The effect of SIGKILL on code."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, database_accounts: ServiceAccounts) -> AsyncIterator[MoveRig]:
    folder: Path = tmp_path_factory.mktemp("moves")
    async with move_rig(folder, database_accounts) as rig:
        yield rig


async def read(rig: MoveRig, shard: int) -> bytes | TaoError:
    """Read the writer's first object critically, by the topology from before any move."""
    servers = rig.topology.databases

    def is_elsewhere(_: int, name: str) -> bool:
        return any(name == each.name for each in servers[1].servers.values())

    pools = Pools(
        lambda name: rig.accounts.reader.at(DatabaseServer(name=name, port=rig.servers[name].port)), READ_SETUP
    )
    store = MySqlReadStore(
        lambda _: EAST_SOURCE, lambda _: EAST_SOURCE, pools, lambda _: "assocs", is_elsewhere=is_elsewhere
    )
    found: list[bytes | TaoError] = []

    def take(_: Sequence[int], answer: FillRead | TaoError) -> None:
        found.append(answer if isinstance(answer, TaoError) else answer.values[0])

    try:
        query = ObjectQuery(shard << SHARD_SHIFT | 1)
        await store.read_each([query], critical=True, timeout_seconds=10, on_read=take)
    finally:
        await pools.close()
    (only,) = found
    return only


async def begin(rig: MoveRig, shard: int, killed_at: MoveStep) -> Writer:
    """Write an object, and begin a move whose process dies before a step."""
    writer = Writer(rig.store(), shard)
    assert await writer.write_one()

    async def die(step: MoveStep) -> None:
        if step is killed_at:
            raise Killed

    with pytest.raises(Killed):
        await rig.mover(die).move(shard, TARGET)
    return writer


@pytest.mark.parametrize(
    ("shard", "killed_at"), [(0, MoveStep.CATCH_UP), (1, MoveStep.REPLICAS), (2, MoveStep.SWITCH), (3, MoveStep.CLEAR)]
)
async def test_a_shard_behind_the_fence_is_read_while_nobody_can_write_it(
    rig: MoveRig, shard: int, killed_at: MoveStep
) -> None:
    writer = await begin(rig, shard, killed_at)
    answer = await read(rig, shard)
    assert isinstance(answer, bytes), answer
    assert answer.endswith(writer.acknowledged[shard << SHARD_SHIFT | 1])


async def test_a_shard_that_was_taken_at_the_target_is_not_read_at_the_source(rig: MoveRig) -> None:
    writer = await begin(rig, 4, MoveStep.CLEAR)
    assert isinstance(await read(rig, 4), bytes), "it has arrived, and nobody has written it there"
    while not await writer.write_one():
        pass  # a leader that is refused takes the shard again
    assert isinstance(await read(rig, 4), MasterReadOnly)


@pytest.mark.parametrize("shard", [6, 7])
async def test_a_target_that_the_shard_has_left_confirms_nothing(rig: MoveRig, shard: int) -> None:
    """It moved on to a third database, what it left at the target was dropped, and maybe it comes back."""
    writer = await begin(rig, shard, MoveStep.CLEAR)
    while not await writer.write_one():
        pass
    async with rig.session(EAST_TARGET) as session:
        if shard == 7:
            await rename_back(session, shard, deadline=soon())
            assert isinstance(await read(rig, shard), MasterReadOnly), "the copy is one of what others have written"
            await drop_schema(session, incoming_schema_name(shard), deadline=soon())
        else:
            await drop_schema(session, schema_name(shard), deadline=soon())  # and a copy's empty schema is left
    assert isinstance(await read(rig, shard), MasterReadOnly)


async def test_a_target_that_does_not_confirm_to_be_the_master_confirms_nothing(rig: MoveRig) -> None:
    await begin(rig, 5, MoveStep.CATCH_UP)
    async with rig.session(EAST_TARGET) as session:
        await session.run("ROLLBACK; SET GLOBAL read_only = 1", deadline=soon())
        try:
            assert isinstance(await read(rig, 5), MasterReadOnly)
        finally:
            await session.run("SET GLOBAL read_only = 0", deadline=soon())
    assert isinstance(await read(rig, 5), bytes)
