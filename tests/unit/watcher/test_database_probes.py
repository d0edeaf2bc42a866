"""How often a watcher looks at a database, and for how long."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, TypeVar

import msgspec
import pytest

from tao.model.ports import Clock
from tao.model.topology import Database, DatabaseServer, Topology
from tao.observability.logs import logger
from tao.replication.accounts import Account
from tao.replication.lost_master import MAX_QUESTIONS
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.watcher import probes
from tao.watcher.marks import ServerVerdict
from tao.watcher.probes import DatabaseProbes, WatcherContext
from tao.watcher.settings import ProbeSettings
from tests.rigs.pacing import ManualClock, until
from tests.unit.replication.members import master

DATABASE: Final = Database(
    name="db",
    master_region="east",
    servers={"east": DatabaseServer(name="east-db", host="127.0.0.1", port=1)},
    shards=((0, 0),),
)
_Probes = TypeVar("_Probes", bound=DatabaseProbes)


class Probes(DatabaseProbes):
    """Probes that find this state of the commits, and count their looks."""

    are_waiting = False
    looks = 0

    async def _ask(self, database: Database) -> bool:
        self.looks += 1
        return self.are_waiting


@pytest.mark.parametrize("are_waiting", [False, True])
async def test_commits_that_wait_for_lost_acknowledgements_are_looked_at_once_more_at_once(
    are_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All writes of the database wait until a second look has found the same."""
    monkeypatch.setattr(probes, "_SECOND_LOOK_SECONDS", 0.0)
    looking = probes_of(Probes, LoopClock(), lambda *_: None)
    looking.are_waiting = are_waiting
    await looking._look(DATABASE)
    assert looking.looks == (2 if are_waiting else 1)


def probes_of(
    kind: type[_Probes], clock: Clock, observe: Callable[..., None], databases: Sequence[Database] = ()
) -> _Probes:
    """``databases``: what the topology has when it is asked."""
    log, account = logger("watcher"), Account("tao_admin", "secret")
    return kind(
        lambda: Topology(version=1, shards=1, regions=(), databases=tuple(databases)),
        SetAccounts(account, account),
        "east",
        ProbeSettings(),
        WatcherContext(BackgroundTasks("watcher", log), clock, log),
        observe,
    )


@pytest.mark.parametrize(
    ("semi_sync", "refused", "ends"),
    [(True, False, [1.5, 1.81, 2.11, 2.41, 2.71, 3.01]), (True, True, [0.5]), (False, False, [1.5])],
)
async def test_a_master_that_leaves_a_probe_unanswered_is_asked_until_it_has_been_silent_for_long_enough(
    monkeypatch: pytest.MonkeyPatch, semi_sync: bool, refused: bool, ends: list[float]
) -> None:
    """Ends of the probes, since the master answered last."""
    clock, found = ManualClock(), list[float]()
    is_well = True
    began = clock.now

    async def ask_master(_: DatabaseProbes, replicas: ReplicationSet, seconds: float) -> SetMember:
        assert replicas._statement_seconds == ProbeSettings().timeout_seconds, "a renewal takes this set"
        if is_well:
            return master("1-1-1")
        if not refused:
            clock.now += seconds
        return dataclasses.replace(master(None), is_refused=refused)

    monkeypatch.setattr(DatabaseProbes, "_master", ask_master)
    database = msgspec.structs.replace(DATABASE, semi_sync=semi_sync)
    looking = probes_of(DatabaseProbes, clock, lambda *_: found.append(round(clock.now - began, 2)), [database])
    await looking._look(database)
    is_well = False
    clock.now += 0.5
    await looking._look(database)
    assert found == [0.0, *ends]


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_master_whose_probes_fail_at_once_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """As where its connections are used up; and not any more once the topology says another thing of the database."""
    clock, asked_at = ManualClock(), list[float]()
    database = msgspec.structs.replace(DATABASE, semi_sync=True)
    databases = [database]

    async def member(_: ReplicationSet, *__: object) -> SetMember:
        asked_at.append(clock.now)
        if replaced:
            databases[0] = msgspec.structs.replace(database, version_epoch=9)
        return master(None)

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(ReplicationSet, "member", member)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await probes_of(DatabaseProbes, clock, lambda *_: None, databases)._look(database)
    assert len(asked_at) == 1 if replaced else len(asked_at) > 2
    assert all(then - before >= 0.1 - 1e-9 for before, then in pairwise(asked_at))


async def test_a_database_server_that_refuses_the_watcher_is_neither_silent_nor_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    member = dataclasses.replace(master(None), error="access denied", refuses=True)
    name = member.name

    async def ask(_: ReplicationSet, *__: object) -> SetMember:
        return member

    monkeypatch.setattr(ReplicationSet, "member", ask)
    looking = probes_of(DatabaseProbes, clock, lambda *_: None)
    for _ in range(5):
        clock.now += 100.0
        await looking._ask(DATABASE)
        assert looking.silent_seconds(name) == 0
        assert looking.verdicts == {name: ServerVerdict.REFUSED}
        assert looking.refusals == {name: "access denied"}
    member = master(None)
    clock.now += 100.0
    await looking._ask(DATABASE)
    assert looking.verdicts == {name: ServerVerdict.DOWN}
    assert looking.refusals == {}


async def test_a_master_that_answers_after_its_probe_has_ended_is_slow_and_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, answers = ManualClock(), asyncio.Event()

    async def member(_: ReplicationSet, region: str, seconds: float) -> SetMember:
        assert seconds == ProbeSettings().master_gone_seconds
        await answers.wait()
        return master("1-1-1")

    monkeypatch.setattr(ReplicationSet, "member", member)
    monkeypatch.setattr(DatabaseProbes, "_answer_seconds", lambda *_: 0.0)
    looking = probes_of(DatabaseProbes, clock, lambda *_: None)
    await looking._ask(DATABASE)
    clock.now += 100.0
    await looking._ask(DATABASE)
    assert looking.silent_seconds("east-db") == 100.0
    assert looking.verdicts == {"east-db": ServerVerdict.DOWN}
    answers.set()
    await until(lambda: looking.silent_seconds("east-db") == 0.0)
    answers.clear()
    clock.now += 1.0
    await looking._ask(DATABASE)
    assert looking.silent_seconds("east-db") == 1.0
    assert looking.verdicts == {"east-db": ServerVerdict.UP}, "the watchers of other regions do not replace it"
    clock.now += 1.0
    await looking._ask(DATABASE)
    assert looking.verdicts == {"east-db": ServerVerdict.DOWN}
    looking.close()


async def test_probes_of_a_master_that_hangs_hold_a_bounded_number_of_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, under_way = 0, list[int]()

    async def member(*_: object) -> SetMember:
        nonlocal asked
        number = asked = asked + 1
        under_way.append(number)
        try:
            await asyncio.Event().wait()
            return master(None)
        finally:
            under_way.remove(number)

    monkeypatch.setattr(ReplicationSet, "member", member)
    monkeypatch.setattr(DatabaseProbes, "_answer_seconds", lambda *_: 0.0)
    looking = probes_of(DatabaseProbes, ManualClock(), lambda *_: None)
    for number in range(1, 3 * MAX_QUESTIONS):
        await looking._ask(DATABASE)
        await until(lambda number=number: number in under_way)  # type: ignore[misc]
    await until(lambda: len(under_way) == MAX_QUESTIONS)
    assert under_way[0] == 1, "a slow master answers the first one first"
    looking.close()
    await until(lambda: not under_way)
