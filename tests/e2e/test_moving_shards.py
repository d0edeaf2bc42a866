"""A shard moves to another database while a leader writes it: interrupted at every step, undone, and aborted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio

from tao.admin.move_sequence import move_patiently
from tao.admin.shard_balance import PlannedMove
from tao.admin.shard_contents import MovedShard, ShardContents
from tao.model.errors import RetryableError, TaoError
from tao.model.ids import SHARD_SHIFT
from tao.observability.logs import logger
from tao.replication.accounts import ServiceAccounts
from tao.replication.locks import LockTaken
from tao.replication.promotion_plan import PromotionRequest
from tao.replication.shard_move import MoveSettings, move_lock
from tao.replication.shard_move_plan import LEFT_FREE_BYTES, MoveAborted, MoveRefused, MoveStep, NoRoom
from tao.storage.migrations import migrate
from tests.rigs.move_rig import QUICK, SHARDS, SOURCE, TARGET, MoveRig, Writer, move_rig, soon, writing

pytestmark = [
    pytest.mark.database,
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
]

EAST_SOURCE, EAST_TARGET = f"east-{SOURCE}", f"east-{TARGET}"
LARGE = {"assocs_large": 65_535}
ALL_BYTES = bytes(range(256))
KILLED_AT = (
    MoveStep.COPY,
    MoveStep.FOLLOW,
    MoveStep.COMPARE,
    MoveStep.FENCE,
    MoveStep.CATCH_UP,
    MoveStep.RENAME,
    MoveStep.REPLICAS,
    MoveStep.SWITCH,
    MoveStep.CLEAR,
)


class Killed(BaseException):
    """The effect of SIGKILL on code: nothing is cleaned up except what the kernel takes back."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, database_accounts: ServiceAccounts) -> AsyncIterator[MoveRig]:
    async with move_rig(tmp_path_factory.mktemp("moves"), database_accounts) as rig:
        yield rig


@pytest.fixture
def shard(numbers: Iterator[int]) -> int:
    """A shard of the source that no other test moves."""
    return next(numbers)


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return iter(range(SHARDS // 2))


def killer(step: MoveStep) -> object:
    async def stop(at: MoveStep) -> None:
        if at is step:
            raise Killed

    return stop


async def assert_moved(rig: MoveRig, writer: Writer, holder: str) -> None:
    """Assert that a database holds the shard with everything that was acknowledged, and takes writes of it."""
    assert rig.holder(writer.shard) == holder
    async with writing(writer):
        await writer.more(3)
    await assert_has_all(rig, writer, f"east-{holder}")


async def assert_has_all(rig: MoveRig, writer: Writer, server: str) -> None:
    """Assert that a server has everything that was acknowledged, as it was written last."""
    found = await rig.written(server, writer.shard)
    known = {key: data for key, data in writer.acknowledged.items() if key not in writer.unknown}
    assert known
    assert {key: found.get(key) for key in known} == known


async def test_move_killed_at_each_step_is_finished_or_undone(rig: MoveRig, shard: int) -> None:
    writer, (here, there) = Writer(rig.store(), shard), (SOURCE, TARGET)
    async with writing(writer):
        await writer.more(50)
        for step in KILLED_AT:
            with pytest.raises(Killed):
                await rig.mover(killer(step)).move(shard, there)  # type: ignore[arg-type]
            switched = step is MoveStep.CLEAR
            assert rig.holder(shard) == (there if switched else here), step
            if step in (MoveStep.CATCH_UP, MoveStep.RENAME, MoveStep.REPLICAS, MoveStep.SWITCH):
                assert await rig.moves(account=rig.accounts.watcher).release(shard), (
                    "it was fenced: the watcher lets leaders write again"
                )
                await writer.more(3)
            result = await rig.mover().move(shard, there)
            assert (result.source, result.target, rig.holder(shard)) == (here, there, there), step
            await writer.more(3)
            await assert_nothing_left(rig, shard, here)
            here, there = there, here
    await assert_moved(rig, writer, here)


async def assert_nothing_left(rig: MoveRig, shard: int, here: str) -> None:
    for server in rig.servers:
        assert await rig.rows(server, f"SHOW DATABASES LIKE 'tao_{shard:05d}%%incoming'") == []
    async with rig.session(f"east-{here}") as session:
        await session.run(f"ROLLBACK; DROP DATABASE tao_{shard:05d}", deadline=soon())


@pytest.mark.parametrize("step", [MoveStep.FOLLOW, MoveStep.COMPARE, MoveStep.CLEAR], ids=lambda step: step.name)
async def test_a_move_waits_for_a_server_that_is_paused(rig: MoveRig, shard: int, step: MoveStep) -> None:
    """A server that says nothing fails the attempt. The next one goes on with the same copy."""
    writer, target = Writer(rig.store(), shard), rig.servers[EAST_TARGET].process.identity
    steps: list[MoveStep] = []
    failed: list[str] = []
    assert await writer.write_one()

    async def pause(at: MoveStep) -> None:
        if at is step and at not in steps:
            target.signal(signal.SIGSTOP)
        steps.append(at)

    def resume(error: RetryableError, _: float) -> None:
        target.signal(signal.SIGCONT)
        failed.append(error.message)

    try:
        mover = rig.mover(pause, replace(QUICK, statement_seconds=2.0))
        result = await move_patiently(mover, PlannedMove(shard, SOURCE, TARGET), resume)
    finally:
        target.signal(signal.SIGCONT)
    assert (result.source, result.target) == (SOURCE, TARGET)
    assert "did not answer a new connection within 2.0 s" in failed[0]
    assert steps.count(MoveStep.COPY) == 1
    await assert_moved(rig, writer, TARGET)


async def test_a_run_goes_on_behind_the_fence_of_a_killed_one_that_had_renamed(rig: MoveRig, shard: int) -> None:
    writer = Writer(rig.store(), shard)
    assert await writer.write_one()
    with pytest.raises(Killed):
        await rig.mover(killer(MoveStep.SWITCH)).move(shard, TARGET)  # type: ignore[arg-type]
    assert not await writer.write_one(), "nobody may write behind the fence"
    steps: list[MoveStep] = []

    async def note(step: MoveStep) -> None:
        steps.append(step)

    await rig.mover(note).move(shard, TARGET)
    assert steps == [MoveStep.REPLICAS, MoveStep.SWITCH, MoveStep.CLEAR]
    await assert_moved(rig, writer, TARGET)


async def test_transaction_open_at_the_fence_is_copied_or_rejected(rig: MoveRig, shard: int) -> None:
    """A transaction that holds the shard's row when the fence comes (Vitess #9453)."""
    writer, store = Writer(rig.store(), shard), rig.store()
    assert await writer.write_one()
    (row,) = await rig.rows(EAST_SOURCE, f"SELECT owner, generation FROM tao_{shard:05d}.shard")
    fencing, key = asyncio.Event(), shard << SHARD_SHIFT | 999

    async def note(step: MoveStep) -> None:
        if step is MoveStep.FENCE:
            fencing.set()
            await asyncio.sleep(0)

    async with rig.session(EAST_SOURCE) as session:
        await session.run(
            f"START TRANSACTION; SELECT * FROM tao_{shard:05d}.shard WHERE only_row = 1 LOCK IN SHARE MODE; "
            f"INSERT INTO tao_{shard:05d}.objects VALUES (%s, 1, 1, 0, %s)",
            (key, ALL_BYTES),
            deadline=soon(),
        )
        moving = asyncio.create_task(rig.mover(note).move(shard, TARGET))
        while not fencing.is_set():
            await session.run("DO 0", deadline=soon())  # the server ends a session that is idle in a transaction
            await asyncio.sleep(0.2)
        await session.run("COMMIT", deadline=soon())
    await moving
    assert row == (b"leader-1", 1)
    assert (await rig.written(EAST_TARGET, shard))[key] == ALL_BYTES, "it was acknowledged, so it has moved"
    late = await store.read_ownership([shard], timeout_seconds=5)
    assert late[shard].master_server == EAST_TARGET
    await assert_moved(rig, writer, TARGET)


async def test_position_to_wait_for_is_read_after_the_fence(rig: MoveRig, shard: int) -> None:
    """Whatever is committed up to the fence is behind no position that the copy waits for (Vitess #16563)."""
    writer, last = Writer(rig.store(), shard), 0

    async def write_to_the_last(step: MoveStep) -> None:
        nonlocal last
        if step is MoveStep.FENCE:
            while writer.next < last + 40:
                await writer.write_one()
            last = writer.next

    await rig.mover(write_to_the_last).move(shard, TARGET)
    assert last >= 40
    assert await rig.written(EAST_TARGET, shard) == writer.acknowledged


async def test_move_does_not_switch_to_a_lagging_copy(rig: MoveRig, shard: int) -> None:
    writer = Writer(rig.store(), shard)
    async with writing(writer):
        await writer.more(20)
        settings = MoveSettings(steady_seconds=0.0, max_behind_seconds=-1.0, catch_up_seconds=1.0)
        with pytest.raises(MoveAborted, match="does not catch up"):
            await rig.mover(settings=settings).move(shard, TARGET)
        assert rig.holder(shard) == SOURCE
        await writer.more(3)
    assert writer.rejected == 0, "it was never fenced"
    steps = await rig.moves().undo(shard, TARGET)
    assert steps == [MoveStep.DROP_COPY]
    await rig.mover().move(shard, TARGET)
    await assert_moved(rig, writer, TARGET)


async def test_every_table_of_a_shard_moves_with_what_changes_meanwhile(rig: MoveRig, shard: int) -> None:
    """Edges with states, states of nodes, jobs, paused kinds, intents, and the table of a type."""
    await migrate(rig.accounts.administrator.at(rig.topology.databases[0].servers["east"]), [shard], LARGE, EAST_SOURCE)
    tables = await filled_tables(rig, shard)
    kinds = {table.partition(".")[2] for table in tables}
    assert kinds >= {"assocs_large", "assocs_states", "jobs", "node_states", "paused_jobs"}

    async def change(*statements: str) -> None:
        async with rig.session(EAST_SOURCE) as session:
            await session.run("; ".join([*statements, "COMMIT"]), deadline=soon())

    def inserted(number: int) -> list[str]:
        return [
            f"INSERT INTO {table} VALUES ({', '.join(text.format(number) for _, text in columns)})"
            for table, columns in tables.items()
        ]

    def deleted(number: int) -> list[str]:
        return [f"DELETE FROM {table} WHERE {c[-1][0]} = {c[-1][1].format(number)}" for table, c in tables.items()]

    async def change_all(step: MoveStep) -> None:
        if step is MoveStep.COMPARE:
            updated = [
                f"UPDATE {table} SET {c[-1][0]} = {c[-1][1].format(77)} WHERE {c[-1][0]} = {c[-1][1].format(1)}"
                for table, c in tables.items()
            ]
            await change(*updated, *deleted(2), *inserted(4))
        if step is MoveStep.FENCE:
            await change(*deleted(3), *inserted(5))

    await change(*(statement for number in (1, 2, 3) for statement in inserted(number)))
    await rig.mover(change_all).move(shard, TARGET)
    for table, columns in tables.items():
        names = ", ".join(name for name, _ in columns)
        here, there = [
            await rig.rows(server, f"SELECT {names} FROM {table} ORDER BY {names}")
            for server in (EAST_SOURCE, EAST_TARGET)
        ]
        assert (here, len(here)) == (there, 3), table


async def filled_tables(rig: MoveRig, shard: int) -> dict[str, list[tuple[str, str]]]:
    """Return the tables of a shard that leaders write, each with its columns and the literal of a number in each."""
    found: dict[str, list[tuple[str, str]]] = {}
    for table, column, kind in await rig.rows(
        EAST_SOURCE,
        "SELECT table_name, column_name, data_type FROM information_schema.columns "
        f"WHERE table_schema = 'tao_{shard:05d}' AND table_name NOT IN ('shard', 'heartbeat', 'schema_migrations') "
        "ORDER BY table_name, ordinal_position",
    ):
        literal = "{}" if str(kind).endswith("int") else "'v{}'"
        found.setdefault(f"tao_{shard:05d}.{table}", []).append((str(column), literal))
    return found


async def test_undo_before_the_switch_takes_everything_back(rig: MoveRig, shard: int) -> None:
    writer = Writer(rig.store(), shard)
    assert await writer.write_one()
    with pytest.raises(Killed):
        await rig.mover(killer(MoveStep.SWITCH)).move(shard, TARGET)  # type: ignore[arg-type]
    before = rig.topology.version
    assert await rig.moves().undo(shard, TARGET) == [MoveStep.UNFENCE, MoveStep.RENAME_BACK, MoveStep.DROP_COPY]
    assert rig.topology.version > before, "a change that the killed process was about to make is refused"
    await assert_moved(rig, writer, SOURCE)
    assert await rig.rows(EAST_TARGET, f"SHOW DATABASES LIKE 'tao_{shard:05d}%%'") == []


async def test_what_a_killed_move_leaves_behind_is_dropped_only_after_the_switch(rig: MoveRig, shard: int) -> None:
    writer = Writer(rig.store(), shard)
    assert await writer.write_one()
    contents = ShardContents(rig.moves(), QUICK, rig.accounts.replicator, logger("test"))
    with pytest.raises(Killed):
        await rig.mover(killer(MoveStep.SWITCH)).move(shard, TARGET)  # type: ignore[arg-type]
    assert await contents.find_moved([shard], 0) == ([], []), "the renamed copy is on its way"
    with pytest.raises(Killed):
        await rig.mover(killer(MoveStep.CLEAR)).move(shard, TARGET)  # type: ignore[arg-type]
    left = MovedShard(shard=shard, database=SOURCE, moved_to="", hours_ago=0.0)
    assert await contents.find_moved([shard], 3_600) == ([], [left]), "nobody has noted when it has left"
    await contents.drop([left])
    assert await rig.rows(EAST_SOURCE, f"SHOW DATABASES LIKE 'tao_{shard:05d}%%'") == []
    await rig.mover().move(shard, TARGET)
    await assert_moved(rig, writer, TARGET)
    await rig.mover().move(shard, SOURCE)
    left = MovedShard(shard=shard, database=TARGET, moved_to=SOURCE, hours_ago=0.0)
    assert await contents.find_moved([shard], 0) == ([left], [])


async def test_a_failure_behind_the_fence_undoes_itself(rig: MoveRig, shard: int) -> None:
    writer = Writer(rig.store(), shard)
    async with writing(writer):
        await writer.more(5)
        for step in (MoveStep.CATCH_UP, MoveStep.RENAME, MoveStep.REPLICAS, MoveStep.SWITCH):

            async def fail(at: MoveStep, step: MoveStep = step) -> None:
                if at is step:
                    raise TaoError("a step failed")

            with pytest.raises(TaoError, match="a step failed"):
                await rig.mover(fail).move(shard, TARGET)
            assert rig.holder(shard) == SOURCE
            await writer.more(3)
        await rig.mover().move(shard, TARGET)
    await assert_moved(rig, writer, TARGET)


async def test_a_wrong_copy_is_noticed_and_made_again(rig: MoveRig, shard: int) -> None:
    writer = Writer(rig.store(), shard)
    for _ in range(60):
        assert await writer.write_one()

    async def spoil(step: MoveStep) -> None:
        if step is MoveStep.COMPARE:
            async with rig.session(EAST_TARGET) as session:
                change = f"UPDATE tao_{shard:05d}_incoming.objects SET data = 'x' ORDER BY id DESC LIMIT 1; COMMIT"
                await session.run(change, deadline=soon())

    with pytest.raises(MoveAborted, match="wrong in 1 rows"):
        await rig.mover(spoil).move(shard, TARGET)
    await rig.mover().move(shard, TARGET)
    await assert_moved(rig, writer, TARGET)


async def test_what_cannot_be_moved_is_refused(rig: MoveRig, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = rig.mover()
    for number, target, why in (
        (99, TARGET, "there is no shard 99"),
        (shard, "db-3", "there is no database"),
        (shard, SOURCE, f"holds shard {shard} already"),
    ):
        with pytest.raises(MoveRefused, match=why):
            await mover.move(number, target)
    async with rig.moves().locks.held(move_lock(shard), exclusive=True):
        with pytest.raises(LockTaken):
            await mover.move(shard, TARGET)
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=LEFT_FREE_BYTES - 1))
        for refused in (mover.plan(shard, TARGET), mover.move(shard, TARGET)):
            with pytest.raises(NoRoom, match=f"{EAST_TARGET} has 1,023 MiB of free disk"):
                await refused
    assert await rig.rows(EAST_TARGET, f"SHOW DATABASES LIKE 'tao_{shard:05d}%%'") == []
    plan = await mover.plan(shard, TARGET)
    assert plan.free_bytes
    assert plan.about_bytes
    await mover.move(shard, TARGET)
    with pytest.raises(MoveRefused, match=f"drop-moved {shard}"):
        await mover.move(shard, SOURCE)


async def test_promotion_during_the_copy_aborts_the_move(tmp_path: Path, database_accounts: ServiceAccounts) -> None:
    shard = 1
    async with move_rig(tmp_path, database_accounts, regions=("east", "west")) as rig:
        writer = Writer(rig.store(), shard)
        async with writing(writer):
            await writer.more(10)
            for database in (SOURCE, TARGET):

                async def promote(step: MoveStep, database: str = database) -> None:
                    if step is MoveStep.COMPARE:
                        await rig.promoter().promote(database, PromotionRequest("west"))

                with pytest.raises(MoveAborted, match=f"has become the master of {database}"):
                    await rig.mover(promote).move(shard, TARGET)
                assert rig.holder(shard) == SOURCE
                await writer.more(3)
            await rig.mover().move(shard, TARGET)
            await writer.more(3)
            await rig.promoter().promote(TARGET, PromotionRequest("east"))
            await writer.more(3)
        (found,) = await rig.rows(EAST_TARGET, f"SELECT version_epoch FROM tao_{shard:05d}.shard")
        promoted = next(each for each in rig.topology.databases if each.name == TARGET)
        assert found == (promoted.version_epoch,), "a promotion raises the document's epoch above the moved shard's"
        await assert_has_all(rig, writer, EAST_TARGET)
