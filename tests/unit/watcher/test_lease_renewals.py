"""When a watcher renews the lease of a master that may have a successor, or may hang."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tao.watcher.mastership as mastership_module
from tao.observability.logs import logger
from tao.replication.lease import LeaseTerms
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.watcher.probes import PeerReports
from tao.watcher.settings import LeaseSettings
from tests.rigs.pacing import ManualClock
from tests.unit.replication.members import master, replica
from tests.unit.watcher.test_mastership import AwayLocks, Broken, east_and_west, mastership_of, set_of


@pytest.mark.parametrize(
    ("ended", "is_master", "renewed"), [(False, False, True), (True, True, True), (True, False, False)]
)
async def test_a_lease_is_renewed_in_its_grace_only_while_the_topology_names_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool, is_master: bool, renewed: bool
) -> None:
    """What the watcher knows may be a second old: by then another server may be master, and open."""

    class Replicas(ReplicationSet):
        @asynccontextmanager
        async def session(self, region: str) -> AsyncIterator[str]:  # type: ignore[override]
            yield region

    class Knowing(Broken):
        async def is_master(self, database: str, server: str) -> bool:
            assert (database, server) == ("db", "east-db")
            return is_master

    async def lease_terms(region: str, **_: object) -> LeaseTerms:
        return LeaseSettings().terms(semi_sync=True)

    async def server_unix_ms(*_: object, **__: object) -> float:
        return 7.0

    async def renew_lease(server: str, since: float, terms: LeaseTerms, **_: object) -> bool:
        return terms.grace_seconds > 0 or not ended

    for each in (lease_terms, server_unix_ms, renew_lease):
        monkeypatch.setattr(mastership_module, each.__name__, each)
    tasks = BackgroundTasks("watcher", logger("watcher"))
    mastership = mastership_of(tmp_path, Knowing(), tasks, LoopClock())
    replicas = Replicas.__new__(Replicas)
    replicas.__dict__.update(east_and_west(semi_sync=True).__dict__)
    await mastership._renew(replicas)
    assert (mastership.renewals, mastership.missed_renewals) == (int(renewed), int(not renewed))
    await tasks.close()


@pytest.mark.parametrize(
    ("acts", "listed", "region", "renews"),
    [
        (True, False, "west", True),
        (False, True, "east", True),
        (False, True, "west", False),
        (False, False, "east", False),
    ],
)
async def test_a_watcher_of_which_others_do_not_know_renews_a_lease_only_while_it_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acts: bool, listed: bool, region: str, renews: bool
) -> None:
    """Who replaced the master would not ask it, and would count from an earlier renewal."""
    tasks = BackgroundTasks("watcher", logger("watcher"))
    mastership = mastership_of(tmp_path, Broken(), tasks, LoopClock())
    if not acts:
        mastership.activity = None
    monkeypatch.setattr(PeerReports, "is_listed", property(lambda _: listed))
    assert mastership._renews_lease_of(set_of([region, "north"], master=region)) is renews
    await tasks.close()


@pytest.mark.parametrize("ceases_to_act", [False, True])
async def test_a_lease_is_renewed_without_its_lock_only_while_others_know_of_the_watcher_or_it_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ceases_to_act: bool
) -> None:
    """It takes seconds until the locks count as away. By then another watcher may act, and it asks the listed ones."""

    class Replicas(ReplicationSet):
        @asynccontextmanager
        async def session(self, region: str) -> AsyncIterator[str]:  # type: ignore[override]
            yield region

        async def members(self) -> list[SetMember]:
            if ceases_to_act:
                mastership.activity = None
            return []

        def is_followed_by_all(self, members: Iterable[SetMember]) -> bool:
            return True

    async def lease_terms(region: str, **_: object) -> LeaseTerms:
        return LeaseSettings().terms(semi_sync=True)

    async def server_unix_ms(*_: object, **__: object) -> float:
        return 7.0

    async def renew_lease(*_: object, **__: object) -> bool:
        return True

    for each in (lease_terms, server_unix_ms, renew_lease):
        monkeypatch.setattr(mastership_module, each.__name__, each)
    monkeypatch.setattr(PeerReports, "is_listed", property(lambda _: False))
    tasks = BackgroundTasks("watcher", logger("watcher"))
    mastership = mastership_of(tmp_path, Broken(), tasks, LoopClock(), locks=AwayLocks())
    replicas = Replicas.__new__(Replicas)
    replicas.__dict__.update(east_and_west(semi_sync=True).__dict__)
    await mastership._renew(replicas)
    assert mastership.renewals == (0 if ceases_to_act else 1)
    await tasks.close()


@pytest.mark.parametrize(
    ("silent", "misses", "first"),
    [(True, 1, 0.5), (True, 2, 1.5), (False, 2, 0.0)],
)
async def test_a_lease_is_renewed_again_soon_after_a_single_question_that_was_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool, misses: int, first: float
) -> None:
    """``silent``: its master did not answer; otherwise the question failed at once, and so does a renewal."""
    tasks, clock, renewed = BackgroundTasks("watcher", logger("watcher")), ManualClock(), list[float]()
    mastership = mastership_of(tmp_path, Broken(), tasks, clock)
    replicas, began = east_and_west(), clock.now

    async def renew(_: ReplicationSet) -> None:
        renewed.append(round(clock.now - began, 2))

    async def rounds(seconds: float) -> None:
        """Let the time until the next round pass, and end after ten."""
        await next_turn(0)
        mastership._renewing.clear()
        clock.now += seconds
        if clock.now > began + 5.0:
            raise TimeoutError

    next_turn = asyncio.sleep
    monkeypatch.setattr(mastership, "_renew", renew)
    missed = dataclasses.replace(master(None), is_silent=silent)
    for _ in range(misses):
        mastership.observe(replicas, [missed, replica("west", "1-1-1")], clock.monotonic())
    monkeypatch.setattr(asyncio, "sleep", rounds)
    with pytest.raises(TimeoutError):
        await mastership.keep_leases()
    monkeypatch.undo()
    assert renewed[0] == first
    await tasks.close()
