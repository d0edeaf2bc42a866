"""What a move does when a change of the topology lands late, the target is lost, or the lock of the move is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tao.admin import copy_follower, shard_mover
from tao.admin.copy_follower import CopyComparison, CopyFollower, rows_of_next_range
from tao.admin.shard_mover import MoverAccounts, ShardMover
from tao.model.errors import TopologyConflict, Unavailable
from tao.model.ports import TopologyStore
from tao.model.rows import ShardRow
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.observability.logs import logger
from tao.replication import shard_move
from tao.replication.accounts import Account
from tao.replication.gtid import GtidPosition, parse_position
from tao.replication.locks import FileLocks, LockHold, LockLost, Locks, LockTaken, LockTerms, mastership_lock
from tao.replication.move_statements import Advance, CopiedTable, KeyRange, ShardThere, apply_rows
from tao.replication.replication_set import SetAccounts
from tao.replication.shard_move import MoveSettings, ShardMoves, move_lock
from tao.replication.shard_move_plan import (
    AlreadyMoved,
    CopyState,
    MoveAborted,
    MovedElsewhere,
    MoveRefused,
    MoveStep,
    arrived_row,
    fenced_row,
    holder_of,
    unfenced_row,
)
from tao.storage.dialect import Dialect
from tao.storage.session import DatabaseSession
from tao.tailer.binlog import BinlogSource, BinlogTransaction
from tests.rigs.pacing import PATIENT_SECONDS, loop_clock, quiet, until

SHARD = 3
PACED = MoveSettings(megabytes_per_second=9.0)
SETTINGS = MoveSettings(switch_seconds=0.05, takeover_seconds=0.0, catch_up_seconds=0.0)
ACCOUNT = Account("tao", "secret")
FENCED = fenced_row(ShardRow(SHARD, "east-db-1", 1, "leader-1", 10), "east-db-2")
COPY = CopyState(source="db-1", source_epoch=1, target_epoch=1, position="0-1-7")


def database(name: str, shards: tuple[int, int]) -> Database:
    servers = {region: DatabaseServer(name=f"{region}-{name}") for region in ("east", "west")}
    standbys = {"east": DatabaseServer(name=f"east-{name}-standby")}
    return Database(name=name, master_region="east", servers=servers, shards=(shards,), standbys=standbys)


def region(name: str) -> Region:
    leader, follower = (CacheServer(name=f"{name}-{kind}", grpc="127.0.0.1:1") for kind in ("l", "f"))
    return Region(
        name=name,
        leaders=Tier(name="leaders", servers=(leader,)),
        followers=(Tier(name="web", servers=(follower,)),),
    )


TOPOLOGY = Topology(
    version=1,
    shards=16,
    regions=(region("east"), region("west")),
    databases=(database("db-1", (0, 7)), database("db-2", (8, 15))),
)


class LateStore:
    """A topology store. The first change is made after its caller has given up, when the next one is asked for: before
    that one, or after it."""

    def __init__(self, *, late: str = "") -> None:
        self.topology = TOPOLOGY
        self._late = late
        self._pending: Callable[[], object] | None = None

    async def load(self) -> Topology:
        return self.topology

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        def make() -> Topology:
            if self.topology.version != expected_version:
                raise TopologyConflict("it was changed meanwhile")
            self.topology = msgspec.structs.replace(changed, version=expected_version + 1)
            return self.topology

        if self._late and self._pending is None:
            self._pending = make
            await asyncio.Event().wait()
        pending, self._pending = self._pending, make
        if pending is None:
            return make()
        if self._late == "before":
            pending()
            return make()
        made = make()
        with pytest.raises(TopologyConflict):
            pending()
        return made


@dataclass
class Server:
    """A database server, and the schemas of the shard that it has."""

    name: str
    row: ShardRow | None = None
    copy: CopyState | None = None
    is_marked: bool = False
    is_away: bool = False
    waited_for: list[str] = field(default_factory=list)


class World:
    """The servers of both databases, by name. The shard is fenced, and its copy is renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, store: LateStore) -> None:
        self.store = store
        self.servers = {each.server.name: Server(each.server.name) for each in TOPOLOGY.database_servers}
        self.source, self.target = self.servers["east-db-1"], self.servers["east-db-2"]
        self.source.row, self.target.row, self.target.copy = FENCED, arrived_row(FENCED, 1), COPY
        self.locks: Locks = FileLocks(folder / "topology.json")
        world = self

        class Set:
            def __init__(self, of: Database, *_: object, **__: object) -> None:
                self.database = of

            @asynccontextmanager
            async def session(self, place: str) -> AsyncIterator[Server]:
                server = world.servers[self.database.places[place].name]
                if server.is_away:
                    raise Unavailable(f"{server.name} does not answer")
                yield server

            @staticmethod
            def statement_deadline() -> float:
                return 0.0

        monkeypatch.setattr(shard_move, "ReplicationSet", Set)
        for module in (shard_move, shard_mover):
            for statement in (
                read_shard, shards_held, fenced_shards, unfence_shard, rename_back, drop_schema, mark_moved,
                binlog_position, wait_for_position,
            ):  # fmt: skip
                monkeypatch.setattr(module, statement.__name__, statement, raising=False)

    @property
    def holder(self) -> str:
        return holder_of(self.store.topology, SHARD).name

    def moves(self) -> ShardMoves:
        accounts = SetAccounts(ACCOUNT, ACCOUNT)
        return ShardMoves(cast(TopologyStore, self.store), self.locks, accounts, SETTINGS)

    async def move(self, planned_from: str = "") -> list[MoveStep]:
        """Move the shard, and return the steps."""
        steps: list[MoveStep] = []

        async def note(step: MoveStep) -> None:
            steps.append(step)

        accounts = MoverAccounts(ACCOUNT, ACCOUNT)
        async with asyncio.timeout(PATIENT_SECONDS):
            mover = ShardMover(self.moves(), SETTINGS, accounts, logger("test"), on_step=note)
            await mover.move(SHARD, "db-2", planned_from)
        return steps


async def read_shard(server: Server, *_: object, **__: object) -> ShardThere:
    return ShardThere(server.row, server.copy, server.is_marked)


async def shards_held(server: Server, **_: object) -> tuple[list[int], list[int]]:
    return [SHARD] * (server.row is not None), [SHARD] * (server.copy is not None)


async def fenced_shards(server: Server, shards: list[int], other_servers: list[str], **_: object) -> list[int]:
    return [shard for shard in shards if server.row is not None and server.row.master_server in other_servers]


async def unfence_shard(server: Server, shard: int, master: str, epoch: int, **_: object) -> None:
    assert server.row is not None
    server.row = unfenced_row(server.row, master, epoch)


async def rename_back(server: Server, *_: object, **__: object) -> None:
    server.row = None


async def drop_schema(server: Server, schema: str, **_: object) -> None:
    assert schema.endswith("_incoming")
    server.copy = None


async def mark_moved(server: Server, *_: object, **__: object) -> None:
    server.is_marked = True


async def binlog_position(server: Server, **_: object) -> str:
    return f"end of {server.name}"


async def wait_for_position(server: Server, position: str, **_: object) -> None:
    server.waited_for.append(position)


@pytest.fixture(params=["before", "after"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    """A switch that was given up lands before the change that undoing makes, or after it."""
    return World(monkeypatch, tmp_path, LateStore(late=request.param))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path, LateStore())


def assert_whole(world: World) -> None:
    """Assert that the database which holds the shard has it, and that leaders may write it there."""
    holder = world.source if world.holder == "db-1" else world.target
    assert holder.row is not None
    assert holder.row.master_server == holder.name


async def test_a_switch_that_lands_late_is_refused_or_seen_by_who_undoes_it(late: World) -> None:
    moves = late.moves()
    view = await moves.view(SHARD, "db-2")
    async with moves.exclusively(view.source, view.target) as hold:
        switching = asyncio.create_task(moves.switch(view, hold))
        await asyncio.sleep(0)
        switching.cancel()
        await asyncio.wait([switching])
    try:
        steps = await moves.undo(SHARD, "db-2")
    except MoveRefused:
        assert late.holder == "db-2"
        assert late.target.copy == COPY, "nothing was undone"
    else:
        assert late.holder == "db-1"
        assert steps == [MoveStep.UNFENCE, MoveStep.RENAME_BACK, MoveStep.DROP_COPY]
    assert_whole(late)


async def test_a_switch_that_takes_too_long_is_undone_or_finished(late: World) -> None:
    try:
        await late.move()
    except MoveAborted:
        assert late.holder == "db-1"
        assert (late.target.row, late.target.copy) == (None, COPY), "the next run goes on with the copy"
    else:
        assert late.holder == "db-2"
        assert (late.target.copy, late.source.is_marked) == (None, True)
    assert_whole(late)


async def test_nothing_is_dropped_when_the_topology_names_a_target_without_the_shard(world: World) -> None:
    moves = world.moves()
    view = await moves.view(SHARD, "db-2")
    async with moves.exclusively(view.source, view.target) as hold:
        await moves.switch(view, hold)
    world.target.row = None
    switched = await moves.view(SHARD, "db-2")
    for drop in (world.move(), moves.clear(switched), moves.drop_copy(switched)):
        with pytest.raises(MoveRefused, match="nothing is dropped"):
            await drop
    assert (world.target.copy, world.source.is_marked) == (COPY, False)


async def test_a_command_waits_for_no_move_that_is_under_way_and_says_what_is_in_its_way(world: World) -> None:
    async with world.locks.held(move_lock(SHARD), exclusive=True):
        for command in (world.moves().undo(SHARD, "db-2"), world.move()):
            with pytest.raises(LockTaken, match=f"another process moves shard {SHARD}.*repeat the command"):
                await command
    assert world.source.row == FENCED


async def test_a_shard_stays_at_a_database_that_it_has_got_since_its_move_was_planned(world: World) -> None:
    with pytest.raises(MovedElsewhere, match="db-1 holds shard 3"):
        await world.move(planned_from="db-3")
    assert (world.source.row, world.target.copy) == (FENCED, COPY), "nothing was changed"
    await world.move(planned_from="db-1")
    assert world.holder == "db-2"
    with pytest.raises(AlreadyMoved):
        await world.move(planned_from="db-1")


async def test_leaders_write_again_while_the_target_is_lost(world: World) -> None:
    world.target.is_away = True
    with pytest.raises(Unavailable):
        await world.moves().undo(SHARD, "db-2")
    assert_whole(world)
    world.target.is_away = False
    assert await world.moves().undo(SHARD, "db-2") == [MoveStep.RENAME_BACK, MoveStep.DROP_COPY]


async def test_a_fence_is_found_at_the_source_without_a_copy_anywhere(world: World) -> None:
    world.target.row, world.target.copy, world.target.is_away = None, None, True
    moves = world.moves()
    assert [await moves.fenced(each) for each in TOPOLOGY.databases[:1]] == [[SHARD]]
    assert await moves.release(SHARD)
    assert_whole(world)
    assert not await moves.fenced(TOPOLOGY.databases[0])
    version = world.store.topology.version
    assert not await moves.release(SHARD)
    assert world.store.topology.version == version


async def test_a_resumed_switch_waits_for_the_replicas_and_the_standby_of_the_target(world: World) -> None:
    steps = await world.move()
    assert steps == [MoveStep.REPLICAS, MoveStep.SWITCH, MoveStep.CLEAR]
    for replica in ("west-db-2", "east-db-2-standby"):
        assert "end of east-db-2" in world.servers[replica].waited_for, replica
    assert world.holder == "db-2"


class Lost:
    """Locks of which one is lost as soon as it is held."""

    can_be_away = False

    def __init__(self, lost: str, others: Locks) -> None:
        self._lost = lost
        self._others = others
        self.is_touched = asyncio.Event()

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[LockHold]:
        yield self

    def held(
        self, name: str, *, exclusive: bool, terms: LockTerms | None = None
    ) -> AbstractAsyncContextManager[LockHold]:
        return self._held() if name == self._lost else self._others.held(name, exclusive=exclusive, terms=terms)

    def is_held(self) -> bool:
        return False

    def check(self) -> None:
        raise LockLost("another process moves the shard")

    async def touch(self) -> None:
        self.is_touched.set()


async def test_a_move_whose_lock_is_lost_is_undone(world: World) -> None:
    world.locks = Lost(move_lock(SHARD), world.locks)
    with pytest.raises(LockLost):
        await world.move()
    assert world.holder == "db-1"
    assert_whole(world)


async def test_the_lock_of_a_change_of_schemas_is_kept_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.locks = lost = Lost(mastership_lock("db-1"), world.locks)
    terms = LockTerms(touch_seconds=0.0, holder_timeout_seconds=1.0, takeover_seconds=2.0)
    monkeypatch.setattr(shard_move, "MASTERSHIP", terms, raising=False)
    async with asyncio.timeout(PATIENT_SECONDS), world.moves().administrating(TOPOLOGY.databases[0]):
        await lost.is_touched.wait()


class Session:
    """A database session that answers every read with one position."""

    def __init__(self, position: bytes) -> None:
        self._position = position
        self.statements: list[str] = []

    async def run(self, sql: str, *_: object, **__: object) -> list[list[tuple[bytes]]]:
        self.statements.append(sql.split(" ", maxsplit=1)[0])
        return [[], [(self._position,)]]


async def test_rows_are_not_written_into_a_copy_that_another_process_has_gone_on_with() -> None:
    session = Session(b"0-1-9")
    with pytest.raises(MoveAborted, match="another process"):
        await apply_rows(cast(DatabaseSession, session), SHARD, {}, {}, Advance("0-1-7", "0-1-8"), deadline=0.0)
    assert session.statements == ["START", "ROLLBACK"]
    session = Session(b"0-1-7")
    await apply_rows(cast(DatabaseSession, session), SHARD, {}, {}, Advance("0-1-7", "0-1-8"), deadline=0.0)
    assert session.statements == ["START", "UPDATE"]


class Binlog:
    """A binlog that is read with a fault in the program."""

    async def current_position(self) -> str:
        return ""

    def position(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(has=lambda _: False)

    async def batches(self, _: str) -> AsyncIterator[list[object]]:
        for number in (1, 0):
            yield [1 // number]


async def test_waiters_for_a_copy_get_any_error_of_its_follower() -> None:
    follower = CopyFollower(cast(BinlogSource, Binlog()), SHARD, {}, cast(Any, None), "0-1-7", SETTINGS)
    async with follower.following():
        with pytest.raises(MoveAborted, match="cannot be followed"):
            await follower.until("0-1-8", 20)


class SteadyBinlog:
    """A binlog with three transactions that change nothing, each read when it is asked for."""

    def __init__(self) -> None:
        self.read = 0

    async def current_position(self) -> str:
        return "0-1-7"

    def position(self, text: str) -> GtidPosition:
        return parse_position(Dialect.MARIADB, text)

    async def batches(self, _: str) -> AsyncIterator[list[BinlogTransaction]]:
        for number in (8, 9, 10):
            self.read += 1
            yield [BinlogTransaction(gtid=f"0-1-{number}")]
        await asyncio.Event().wait()


async def test_a_paced_move_lets_changes_gather_unless_it_waits_for_them() -> None:
    binlog = SteadyBinlog()
    settings = MoveSettings(megabytes_per_second=9.0, paced_gather_seconds=3_600)
    follower = CopyFollower(cast(BinlogSource, binlog), SHARD, {}, cast(Any, None), "0-1-7", settings)
    async with follower.following():
        await until(lambda: binlog.read)
        await quiet()
        assert binlog.read == 1
        await follower.until("0-1-10", 20)
        assert binlog.read == 3


async def test_a_shard_that_changes_faster_than_it_is_compared_is_not_moved(world: World) -> None:
    class Comparison:
        async def compare_changed(self) -> int:
            await asyncio.sleep(0)
            return SETTINGS.fenced_rows + 1

    mover = ShardMover(world.moves(), SETTINGS, MoverAccounts(ACCOUNT, ACCOUNT), logger("test"))
    view = await world.moves().view(SHARD, "db-2")
    async with asyncio.timeout(PATIENT_SECONDS), world.locks.held(move_lock(SHARD), exclusive=True) as mover._hold:
        with pytest.raises(MoveAborted, match="changes faster"):
            await mover._compare_changed(view, cast(CopyComparison, Comparison()))


def test_rows_are_compared_in_ranges_that_read_for_half_a_second_at_most() -> None:
    settings, rows = MoveSettings(), 625
    for _ in range(5):
        rows = rows_of_next_range(rows, 0.01, settings)
    assert rows == settings.rows_per_range
    assert rows_of_next_range(rows, 0.3, settings) == rows
    for _ in range(20):
        rows = rows_of_next_range(rows, 6.0, settings)
    assert rows == 50


def test_a_paced_move_compares_ranges_that_take_a_hundredth_of_a_second_at_most() -> None:
    assert rows_of_next_range(600, 0.002, PACED) == 1_200
    assert rows_of_next_range(600, 0.005, PACED) == 600
    assert rows_of_next_range(600, 0.015, PACED) == 300
    assert rows_of_next_range(600, 0.06, MoveSettings()) == 1_200


class Ranges:
    """A table of two ranges at servers that take so long for each statement."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, statement_seconds: float) -> None:
        self._clock = loop_clock(monkeypatch)
        self._statement_seconds = statement_seconds
        self.sessions = 0
        self.active = self.most_active = 0
        self.rests: list[float] = []
        monkeypatch.setattr(copy_follower, "next_range", self._next_range)
        monkeypatch.setattr(copy_follower, "range_checksum", self._range_checksum)
        self._turn = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _next_range(self, session: object, schema: str, table: object, low: int, *_: object, **__: object) -> Any:
        return KeyRange(low, 9 if not low else (1 << 64) - 1)

    async def _range_checksum(self, *_: object, **__: object) -> tuple[int, ...]:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        await self._turn(0)
        self._clock.now += self._statement_seconds
        self.active -= 1
        return (1, 2)

    async def _sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self._clock.now += seconds

    @asynccontextmanager
    async def session(self) -> AsyncIterator[DatabaseSession]:
        self.sessions += 1
        yield cast(DatabaseSession, None)

    async def compare(self, settings: MoveSettings) -> int:
        """Compare the table with itself, and return how many rows were compared."""
        table = CopiedTable("objects", ("id", "data"), ("id",))
        follower = CopyFollower(cast(BinlogSource, Binlog()), SHARD, {}, self.session, "0-1-7", settings)
        comparison = CopyComparison(self.session, self.session, SHARD, {"objects": table}, follower, settings)
        await comparison.compare_all()
        return comparison.compared_rows


@pytest.mark.parametrize(("settings", "at_once", "rests"), [(MoveSettings(), 2, []), (PACED, 1, [7.0])])
async def test_a_paced_comparison_asks_one_server_at_a_time_and_rests_seven_eighths_of_the_time(
    monkeypatch: pytest.MonkeyPatch, settings: MoveSettings, at_once: int, rests: list[float]
) -> None:
    ranges = Ranges(monkeypatch, 0.5)
    assert await ranges.compare(settings) == 2
    assert (ranges.most_active, ranges.rests) == (at_once, rests)


@pytest.mark.parametrize(("statement_seconds", "sessions"), [(0.05, 2), (0.5, 4)])
async def test_ranges_share_their_sessions_until_those_have_been_idle_for_long(
    monkeypatch: pytest.MonkeyPatch, statement_seconds: float, sessions: int
) -> None:
    ranges = Ranges(monkeypatch, statement_seconds)
    await ranges.compare(PACED)
    assert ranges.sessions == sessions
