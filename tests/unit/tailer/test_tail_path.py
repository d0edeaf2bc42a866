"""The tailer's loop over a binlog in a list: checkpoints after acknowledgement, restarts that repeat, lost binlogs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from tao.model.changes import ObjectChange
from tao.model.errors import OperatorError, TaoError, Unavailable
from tao.model.relay import Relay, Relayed
from tao.model.topology import CacheServer
from tao.observability.logs import logger
from tao.planning.row_events import MAX_TOUCHES_PER_SHARD, Heartbeat, RowEvent
from tao.replication.gtid import MariadbPosition
from tao.routing.routes import Routes
from tao.tailer.binlog import BinlogLost, BinlogMoved, BinlogTransaction
from tao.tailer.continuity import Continuity
from tao.tailer.delivery_path import DeliveryPath, RelayScope
from tao.tailer.settings import OutboxSettings, TailSettings
from tao.tailer.tail_path import Checkpoint, Lag, TailPath, Translator
from tests.rigs.leader_rig import SCHEMA, SHARDS, make_id, make_topology
from tests.rigs.pacing import until


def test_lag_is_the_age_of_the_newest_proof() -> None:
    now = 10_000
    lag = Lag(lambda: now)
    assert lag.seconds() == float("inf")
    lag.add_commit(7_000)
    assert lag.seconds() == 3.0
    assert lag.add_heartbeats([Heartbeat("a", 9_000), Heartbeat("b", 9_500)])
    assert (lag.seconds(), lag.heartbeat_delay_seconds) == (0.5, 0.5)
    now = 12_000
    assert not lag.add_heartbeats([Heartbeat("a", 9_400)])
    assert not lag.add_heartbeats([])
    assert (lag.seconds(), lag.heartbeat_delay_seconds) == (2.5, 0.5)


def test_a_master_clock_slightly_ahead_does_not_make_the_lag_negative() -> None:
    lag = Lag(lambda: 1_000)
    assert lag.add_heartbeats([Heartbeat("a", 1_900)])
    assert (lag.seconds(), lag.heartbeat_delay_seconds) == (0, 0)


def test_times_far_in_the_future_prove_nothing_and_hide_nothing() -> None:
    now = 10_000
    lag = Lag(lambda: now)
    lag.add_commit(3_600_000)
    assert not lag.add_heartbeats([Heartbeat("an hour ahead", 3_610_000)])
    assert lag.seconds() == float("inf")
    assert lag.add_heartbeats([Heartbeat("an hour ahead", 3_611_000), Heartbeat("right", 9_000)])
    assert (lag.heartbeat_unix_ms, lag.from_the_future) == (9_000, 2)
    now = 40_000
    assert lag.seconds() == 31.0


def test_a_stored_position_is_loaded(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "state", "db1-east")
    assert checkpoint.load() is None
    checkpoint.store("0-1-7", 1)
    checkpoint.store("0-1-8", 2)
    assert Checkpoint(tmp_path / "state", "db1-east").load() == "0-1-8"
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["db1-east.position.json"]


def test_an_empty_position_is_loaded_as_a_position(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "a")
    checkpoint.store("", 1)
    assert checkpoint.load() == ""


@pytest.mark.parametrize(
    "text", ["", "{", '{"server": "b", "position": "0-1-7", "written_unix_ms": 1}', '{"server": 1}']
)
def test_a_broken_file_or_one_of_another_server_is_no_position(tmp_path: Path, text: str) -> None:
    checkpoint = Checkpoint(tmp_path, "a")
    checkpoint.path.write_text(text)
    assert checkpoint.load() is None


def test_an_unusable_folder_is_an_operator_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match="cannot be stored"):
        Checkpoint(tmp_path / "file", "a").store("0-1-7", 1)
    Checkpoint(tmp_path, "b").path.mkdir()
    with pytest.raises(OperatorError, match="cannot be read"):
        Checkpoint(tmp_path, "b").load()
    with pytest.raises(OperatorError, match="cannot be stored"):
        Checkpoint(tmp_path, "b").store("0-1-7", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.position.json", "file"]


QUICK = OutboxSettings(gather_parts=1, backoff_first_seconds=0.001, backoff_max_seconds=0.002)


class Binlog:
    """A `BinlogSource` with transactions ``0-1-1``, ``0-1-2`` and so on, of which the first may be purged."""

    def __init__(self) -> None:
        self.held: list[BinlogTransaction] = []
        self.purged = 0
        self.failures: list[Exception] = []
        self.more = asyncio.Event()
        self.opened_at: list[str] = []
        self.behind = 0

    def commit(self, *events: RowEvent, all_invalid: bool = False, invalid: frozenset[int] = frozenset()) -> None:
        gtid = f"0-1-{len(self.held) + 1}"
        self.held.append(
            BinlogTransaction(
                gtid=gtid, events=events, all_invalid=all_invalid, invalid_shards=invalid, committed_unix_ms=1_000
            )
        )
        self.more.set()

    def fail(self, error: Exception) -> None:
        self.failures.append(error)
        self.more.set()

    async def current_position(self) -> str:
        reached = len(self.held) - self.behind
        return f"0-1-{reached}" if reached else ""

    def position(self, stored: str) -> MariadbPosition:
        return MariadbPosition(stored)

    async def batches(self, position: str) -> AsyncGenerator[Sequence[BinlogTransaction], None]:
        self.opened_at.append(position)
        done = int(position.rpartition("-")[2] or 0)
        if done < self.purged:
            raise BinlogLost("purged")
        while True:
            if self.failures:
                raise self.failures.pop(0)
            if len(self.held) > done:
                batch, done = self.held[done:], len(self.held)
                yield batch
            else:
                self.more.clear()
                await self.more.wait()


class Leaders:
    def __init__(self) -> None:
        self.relayed: list[Relay] = []
        self.failure: TaoError | None = None

    async def relay(self, leader: CacheServer, relay: Relay, timeout_seconds: float) -> Relayed:
        if self.failure is not None:
            raise self.failure
        self.relayed.append(relay)
        return Relayed()


class Tailer:
    """One run of a tailer."""

    def __init__(
        self, binlog: Binlog, folder: Path, retry_seconds: float = 0.001, catch_up_seconds: float = 60.0
    ) -> None:
        self.leaders = Leaders()
        self.tasks: set[asyncio.Task[None]] = set()
        self.checkpoint = Checkpoint(folder, "db")
        routes = Routes(make_topology())
        self.tail = TailPath(
            binlog,
            self.checkpoint,
            Translator(lambda: SCHEMA, lambda: range(SHARDS), MAX_TOUCHES_PER_SHARD),
            Lag(lambda: 2_000),
            lambda: 2_000,
            TailSettings(
                checkpoint_seconds=0.001,
                retry_seconds=retry_seconds,
                catch_up_seconds=catch_up_seconds,
                catch_up_poll_seconds=0.001,
            ),
            logger("test"),
        )

        async def refresh() -> None:
            return

        self.delivery = DeliveryPath(
            RelayScope("east", "db", lambda: routes, refresh),
            self.leaders,
            Continuity("db", lambda: 1, lambda _: True),
            self.tail.acknowledged,
            lambda job: self.tasks.add(asyncio.create_task(job)),
            QUICK,
            logger("test"),
        )
        self.running = asyncio.create_task(self.tail.run(self.delivery))

    @property
    def versions(self) -> list[int]:
        return [
            message.after
            for relay in self.leaders.relayed
            for each in relay.changes
            for message in each.messages
            if isinstance(message, ObjectChange)
        ]

    @property
    def invalidated(self) -> list[tuple[int, ...]]:
        return [relay.bulk_shards for relay in self.leaders.relayed if relay.bulk_shards]

    async def until_stored(self, position: str) -> None:
        await until(lambda: self.checkpoint.load() == position)

    async def until_trouble(self, text: str) -> None:
        await until(lambda: text in self.tail.trouble)

    async def stop(self) -> None:
        self.running.cancel()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(self.running, *self.tasks, return_exceptions=True)


def row(version: int, shard: int = 0) -> RowEvent:
    made = {"id": make_id(1, shard), "otype": 1, "version": version + (1 << 48), "deleted": 0, "data": b""}
    return RowEvent(shard, "objects", None, made)


FIRST = 1 << 48


async def test_the_first_run_invalidates_all_shards_and_follows_from_the_present_end(tmp_path: Path) -> None:
    binlog = Binlog()
    binlog.commit(row(1))
    tailer = Tailer(binlog, tmp_path)
    await tailer.until_stored("0-1-1")
    assert tailer.invalidated == [tuple(range(SHARDS))]
    binlog.commit(row(2))
    await tailer.until_stored("0-1-2")
    assert tailer.versions == [FIRST + 2]
    assert tailer.tail.trouble == ""
    await tailer.stop()


async def test_a_position_is_stored_only_after_acknowledgement_and_a_restart_repeats_the_rest(tmp_path: Path) -> None:
    binlog = Binlog()
    first = Tailer(binlog, tmp_path)
    await first.until_stored("")
    binlog.commit(row(1))
    await first.until_stored("0-1-1")
    first.leaders.failure = Unavailable("away")
    binlog.commit(row(2))
    binlog.commit(row(3))
    await until(lambda: first.delivery.retried_relays >= 3)
    assert first.checkpoint.load() == "0-1-1"
    await first.stop()
    assert first.checkpoint.load() == "0-1-1"
    second = Tailer(binlog, tmp_path)
    await second.until_stored("0-1-3")
    assert (second.versions, second.invalidated) == ([FIRST + 2, FIRST + 3], [])
    await second.stop()


async def test_the_position_is_stored_when_the_tailer_stops(tmp_path: Path) -> None:
    binlog = Binlog()
    tailer = Tailer(binlog, tmp_path)
    await tailer.until_stored("")
    binlog.commit(row(1))
    await until(lambda: tailer.tail.position)
    await tailer.stop()
    assert tailer.checkpoint.load() == "0-1-1"


async def test_a_lost_binlog_invalidates_all_shards_and_continues_from_the_present_end(tmp_path: Path) -> None:
    binlog = Binlog()
    for version in range(1, 6):
        binlog.commit(row(version))
    Checkpoint(tmp_path, "db").store("0-1-2", 1)
    binlog.purged = 4
    tailer = Tailer(binlog, tmp_path)
    await tailer.until_stored("0-1-5")
    binlog.commit(row(6))
    await tailer.until_stored("0-1-6")
    assert tailer.invalidated == [tuple(range(SHARDS))]
    assert tailer.versions == [FIRST + 6]
    assert tailer.tail.counts.lost_binlogs == 1
    await tailer.stop()


async def test_faults_that_a_person_has_to_fix_are_reported_and_retried(tmp_path: Path) -> None:
    binlog = Binlog()
    tailer = Tailer(binlog, tmp_path, retry_seconds=0.05)
    await tailer.until_stored("")
    binlog.commit(row(1))
    await tailer.until_stored("0-1-1")
    for error in (OperatorError("server_id in use"), Unavailable("away"), ValueError("a bug")):
        binlog.fail(error)
        await tailer.until_trouble(str(error))
        binlog.commit(row(len(binlog.held) + 1))
        await tailer.until_stored(f"0-1-{len(binlog.held)}")
        assert tailer.tail.trouble == ""
    assert binlog.opened_at == ["", "0-1-1", "0-1-2", "0-1-3"]
    assert tailer.versions == [FIRST + version for version in (1, 2, 3, 4)]
    await tailer.stop()


async def test_unreadable_changes_invalidate_their_shards_and_the_rest_is_sent(tmp_path: Path) -> None:
    binlog = Binlog()
    Checkpoint(tmp_path, "db").store("", 1)
    tailer = Tailer(binlog, tmp_path)
    binlog.commit(row(1, 0), row(2, 1), invalid=frozenset({1}))
    await tailer.until_stored("0-1-1")
    assert (tailer.versions, tailer.invalidated) == ([FIRST + 1], [(1,)])
    binlog.commit(row(3, 0), all_invalid=True)
    await tailer.until_stored("0-1-2")
    assert (tailer.versions, tailer.invalidated) == ([FIRST + 1], [(1,), tuple(range(SHARDS))])
    await tailer.stop()


async def test_a_heartbeat_proves_its_time_to_the_leaders_once(tmp_path: Path) -> None:
    binlog = Binlog()
    Checkpoint(tmp_path, "db").store("", 1)
    tailer = Tailer(binlog, tmp_path)
    for written in (1_500, 1_500, 1_400, 1_600):
        binlog.commit(RowEvent(0, "heartbeat", None, {"writer": b"leader-1", "written_unix_ms": written}))
    await tailer.until_stored("0-1-4")
    proofs = [relay.source_unix_ms for relay in tailer.leaders.relayed]
    assert max(proofs) == 1_600
    await tailer.stop()


async def test_a_leader_that_is_away_stops_neither_a_lost_nor_a_broken_binlog_from_being_followed(
    tmp_path: Path,
) -> None:
    binlog = Binlog()
    for version in range(1, 6):
        binlog.commit(row(version))
    Checkpoint(tmp_path, "db").store("0-1-2", 1)
    binlog.purged = 4
    tailer = Tailer(binlog, tmp_path)
    tailer.leaders.failure = Unavailable("away")
    await until(lambda: binlog.opened_at == ["0-1-2", "0-1-5"])
    binlog.commit(row(6))
    binlog.fail(Unavailable("the server restarts"))
    await until(lambda: binlog.opened_at == ["0-1-2", "0-1-5", "0-1-5"])
    assert tailer.checkpoint.load() == "0-1-2"
    tailer.leaders.failure = None
    await tailer.until_stored("0-1-6")
    assert tailer.invalidated == [tuple(range(SHARDS))]
    assert tailer.versions[-1] == FIRST + 6
    await tailer.stop()


async def test_another_servers_binlog_is_read_from_the_position_reached(tmp_path: Path) -> None:
    binlog = Binlog()
    binlog.commit(row(1))
    tailer = Tailer(binlog, tmp_path, retry_seconds=60.0)
    await tailer.until_stored("0-1-1")
    binlog.fail(BinlogMoved("to the master's"))
    binlog.commit(row(2))
    await tailer.until_stored("0-1-2")
    assert binlog.opened_at == ["0-1-1", "0-1-1"]
    assert tailer.versions == [FIRST + 2]
    assert tailer.tail.counts.lost_binlogs == 0
    assert tailer.tail.trouble == ""


async def test_the_tailer_waits_for_a_server_that_has_not_reached_the_position_yet(tmp_path: Path) -> None:
    binlog = Binlog()
    for version in (1, 2, 3):
        binlog.commit(row(version))
    tailer = Tailer(binlog, tmp_path)
    await tailer.until_stored("0-1-3")
    binlog.behind = 2
    binlog.fail(BinlogMoved("back to the replica's"))
    await tailer.until_trouble("has not reached 0-1-3")
    assert len(binlog.opened_at) == 1
    binlog.behind = 0
    binlog.commit(row(4))
    await tailer.until_stored("0-1-4")
    assert tailer.versions == [FIRST + 4]
    assert tailer.invalidated == [tuple(range(SHARDS))], "only at the first start"


async def test_a_server_that_never_reaches_the_position_invalidates_all_shards(tmp_path: Path) -> None:
    binlog = Binlog()
    for version in (1, 2, 3):
        binlog.commit(row(version))
    tailer = Tailer(binlog, tmp_path, catch_up_seconds=0.01)
    await tailer.until_stored("0-1-3")
    binlog.behind = 2
    binlog.fail(BinlogMoved("to the new master's"))
    await until(lambda: len(tailer.invalidated) >= 2)
    assert tailer.tail.counts.lost_binlogs == 1
