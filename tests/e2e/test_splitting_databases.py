"""`tao database split` and `tao database balance` move shards between two databases while these are written."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tao.model.ids import SHARD_SHIFT
from tao.replication.accounts import ServiceAccounts
from tao.replication.shard_move_plan import MoveStep
from tests.rigs.forked_programs import run_tao
from tests.rigs.move_rig import SOURCE, TARGET, MoveRig, Writer, move_rig, soon, writing

pytestmark = [pytest.mark.database, pytest.mark.e2e]

SHARDS, AT_SOURCE = 5, 4
ROW_BYTES = 60_000


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[MoveRig]:
    async with move_rig(tmp_path, database_accounts, shards=SHARDS, at_source=AT_SOURCE) as rig:
        yield rig


async def tao(rig: MoveRig, *words: str) -> list[dict[str, Any]]:
    """Run a command to its end, and return the moves that it made."""
    accounts = rig.accounts
    env = {
        "TAO_ADMIN_PASSWORD": accounts.administrator.password,
        "TAO_REPLICATOR_PASSWORD": accounts.replicator.password,
        "TAO_LEADER_PASSWORD": accounts.leader.password,
    }
    options = ("--topology", rig.topology_path, "--steady-seconds", 0, "--json", "--yes")
    ended = await run_tao("database", *words, *options, folder=rig.topology_path.parent, env=env)
    assert ended.status == 0, ended.errors
    moves: list[dict[str, Any]] = json.loads(ended.output)["moves"]
    return moves


async def fill(rig: MoveRig, shard: int, rows: int) -> None:
    """Give a shard so many large objects, of which the estimate of its size knows."""
    async with rig.session(f"east-{rig.holder(shard)}") as session:
        sql = f"INSERT INTO tao_{shard:05d}.objects VALUES {', '.join(['(%s, 1, 1, 0, %s)'] * 10)}; COMMIT"
        for first in range(1_000, 1_000 + rows, 10):
            keys = [shard << SHARD_SHIFT | number for number in range(first, first + 10)]
            await session.run(sql, [each for key in keys for each in (key, bytes(ROW_BYTES))], deadline=soon())


async def analyze(rig: MoveRig) -> None:
    """Bring the estimates of sizes up to date."""
    for shard in range(SHARDS):
        async with rig.session(f"east-{rig.holder(shard)}") as session:
            await session.run(f"ANALYZE TABLE tao_{shard:05d}.objects", deadline=soon())


@asynccontextmanager
async def leaders_of(rig: MoveRig, shards: Sequence[int]) -> AsyncIterator[list[Writer]]:
    """Write these shards until the context ends, and then see that nothing acknowledged is missing where they are."""
    writers = [Writer(rig.store(), shard) for shard in shards]
    async with AsyncExitStack() as stack:
        for writer in writers:
            await stack.enter_async_context(writing(writer))
            await writer.more(3)
        yield writers
        for writer in writers:
            await writer.more(3)
    for writer in writers:
        found = await rig.written(f"east-{rig.holder(writer.shard)}", writer.shard)
        known = {key: data for key, data in writer.acknowledged.items() if key not in writer.unknown}
        assert {key: found.get(key) for key in known} == known


class Killed(BaseException):
    """The effect of SIGKILL on a mover."""


async def die_at_the_comparison(step: MoveStep) -> None:
    if step is MoveStep.COMPARE:
        raise Killed


async def test_a_database_is_split_and_databases_are_balanced_by_writes_and_by_bytes(rig: MoveRig) -> None:
    for shard, rows in ((0, 100), (1, 100), (4, 50)):
        await fill(rig, shard, rows)
    await analyze(rig)
    async with leaders_of(rig, range(AT_SOURCE)):
        with pytest.raises(Killed):
            await rig.mover(die_at_the_comparison).move(3, TARGET)
        moves = await tao(rig, "split", SOURCE, "--into", TARGET)
    assert [move["shard"] for move in moves] == [3, 1], "what was begun, then the second one of the others by size"
    assert moves[0]["copied_bytes"] == 0, "an interrupted run has copied it"
    assert moves[1]["copied_bytes"] > 0
    assert all(move["target"] == TARGET and move["writes_stood_seconds"] is not None for move in moves)
    assert await tao(rig, "split", SOURCE, "--into", TARGET) == [], "half of the shards have moved"
    assert [rig.holder(shard) for shard in range(SHARDS)] == [SOURCE, TARGET, SOURCE, TARGET, TARGET]

    async with leaders_of(rig, (0, 2)):
        moves = await tao(rig, "balance", "--by", "writes", "--sample-seconds", "1")
    assert [move["target"] for move in moves] == [TARGET], "one of the two that are written"
    assert moves[0]["shard"] in (0, 2)

    await analyze(rig)
    async with leaders_of(rig, (4,)):
        moves = await tao(rig, "balance", "--by", "bytes")
    assert [(move["shard"], move["target"]) for move in moves] == [(4, SOURCE)], "others have left something there"
