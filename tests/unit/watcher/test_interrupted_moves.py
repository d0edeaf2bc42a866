"""A watcher releases the shards of moves whose process is gone, while it acts, and reports trouble once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from tao.model.errors import TaoError, Unavailable
from tao.model.topology import Database, DatabaseServer, Topology
from tao.observability.logs import Logger
from tao.replication.locks import LockTaken
from tao.replication.shard_move import ShardMoves
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.serving.audit import AuditTrail
from tao.watcher.interrupted_moves import InterruptedMoves
from tao.watcher.probes import WatcherContext
from tests.rigs.audit_rig import audit_rig


def database(name: str) -> Database:
    return Database(name=name, master_region="east", servers={"east": DatabaseServer(name=f"east-{name}")}, shards=())


TOPOLOGY = Topology(version=1, shards=16, regions=(), databases=(database("one"), database("two")))


class Moves:
    """Databases of which the second has fenced its shards 3 and 4; another process releases shard 4 first."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.failure: TaoError | None = None

    async def fenced(self, found: Database) -> list[int]:
        return [3, 4] if found.name == "two" else []

    async def release(self, shard: int) -> bool:
        self.asked.append(shard)
        if self.failure is not None:
            raise self.failure
        return shard == 3


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_: object) -> None:
        self.events.append(event)


async def looks(
    moves: Moves,
    log: Log,
    count: int,
    *,
    active: bool = True,
    dry_run: bool = False,
    audit: AuditTrail | None = None,
) -> InterruptedMoves:
    """Run until the watcher has looked so many times."""
    left = count

    def is_active() -> bool:
        nonlocal left
        left -= 1
        return active and left >= 0

    tasks = BackgroundTasks("watcher", cast(Logger, log))
    context = WatcherContext(tasks, LoopClock(), cast(Logger, log), audit or AuditTrail())
    watching = InterruptedMoves(cast(ShardMoves, moves), lambda: TOPOLOGY, is_active, 0.0, context, dry_run=dry_run)
    task: asyncio.Task[Any] = asyncio.create_task(watching.run())
    while left >= 0:  # noqa: ASYNC110 - another task looks
        await asyncio.sleep(0)
    task.cancel()
    return watching


async def test_fenced_shards_are_released(tmp_path: Path) -> None:
    moves, log = Moves(), Log()
    with audit_rig(tmp_path) as audit:
        watching = await looks(moves, log, 1, audit=audit.trail)
        assert await audit.shown() == [("server/leader-1", "interrupted_move_released", 1)]
    assert moves.asked == [3, 4]
    assert (watching.released, log.events) == (1, ["interrupted_move_released"])


async def test_a_watcher_that_does_not_act_or_only_says_what_it_would_do_releases_nothing() -> None:
    moves, log = Moves(), Log()
    await looks(moves, log, 3, active=False)
    await looks(moves, log, 3, dry_run=True)
    assert (moves.asked, log.events) == ([], [])


async def test_a_move_under_way_is_no_trouble_and_other_trouble_is_reported_once() -> None:
    moves, log = Moves(), Log()
    moves.failure = LockTaken("a move is at it")
    await looks(moves, log, 2)
    assert log.events == []
    moves.failure = Unavailable("it does not answer")
    await looks(moves, log, 3)
    assert log.events == ["interrupted_moves_not_seen"]
