"""Watchers replace masters that are lost and no others, and the simulation notices when a rule is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tao.replication import etcd_locks, lost_master, promotion, promotion_plan, replication_set
from tao.replication.lease import LeaseTerms
from tao.replication.lost_master import LostMaster
from tao.replication.promotion import Promoter, PromotionResult, PromotionStep
from tao.replication.promotion_plan import PromotionRefused, SetMember
from tao.replication.replication_set import ReplicationSet
from tao.replication.server_statements import member_state
from tao.watcher import mastership
from tao.watcher.mastership import Mastership
from tao.watcher.probes import DatabaseProbes
from tao.watcher.settings import LeaseSettings
from tests.sim.loop import Process, SimLoop
from tests.sim.lost_masters import Findings, Hour, play_hour, play_hours
from tests.sim.replicated import Machines

_HOURS = 20
_MOST_HOURS = 300


def test_no_master_is_replaced_that_is_well_and_nothing_acknowledged_is_lost() -> None:
    found = play_hours(range(_HOURS))
    assert found.violations == []
    assert found.promotions


def _first(*kinds: str, regions: int, seed: int) -> Findings:
    """Return what the first hour from ``seed`` on with incidents of these kinds and a violation brought."""
    hours = (play_hour(each, kinds, regions) for each in range(seed, seed + _MOST_HOURS))
    return next((found for found in hours if found.violations), Findings())


async def _nothing(*_: object, **__: object) -> None: ...


def test_a_promotion_that_does_not_wait_for_the_lease_although_a_replica_still_receives_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SetMember, "receives", property(lambda _: False))
    monkeypatch.setattr(Machines, "acknowledging", lambda *_: 0)  # as many as then seem to
    monkeypatch.setattr(replication_set, "stop_receiving", member_state)
    monkeypatch.setattr(ReplicationSet, "forget_master", _nothing)
    assert _first("other watchers cut off", regions=3, seed=35).lost_writes


def test_a_master_that_is_opened_while_the_former_one_still_answers_critical_reads_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Promoter, "_outlast", _nothing)
    # A short lease is mostly over when the other steps are done.
    monkeypatch.setattr(LeaseSettings, "terms", lambda _, **__: LeaseTerms(20.0))
    assert _first("region cut off", regions=2, seed=81).stale_reads


async def _lost(master: LostMaster) -> SetMember:
    return SetMember(master.found.name, master.found.region, None, is_master=True)


@asynccontextmanager
async def _not_asked(_: LostMaster) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(("kind", "regions", "seed"), [("rack cut off", 2, 105), ("master pauses", 1, 11)])
def test_a_promotion_that_does_not_ask_a_lost_master_again_is_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: str, regions: int, seed: int
) -> None:
    monkeypatch.setattr(LostMaster, "asked", _not_asked)
    monkeypatch.setattr(LostMaster, "until_certain", _lost)
    monkeypatch.setattr(Mastership, "_has_answered", lambda *_: False)
    assert _first(kind, regions=regions, seed=seed).false


def test_questions_that_are_withdrawn_from_a_slow_master_after_a_second_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To open a session and to ask for the state of the master takes two answers."""
    monkeypatch.setattr(DatabaseProbes, "_note_answer", lambda *_: None)
    monkeypatch.setattr(lost_master, "_ANSWER_SECONDS", 1.0)
    assert _first("master cut off from replicas", "master slow", regions=1, seed=31).false


async def _gives_nothing_back(*_: object) -> dict[str, str]:
    return {}


def _silent_since_the_question(probes: DatabaseProbes, server: str) -> float:
    now = probes._clock.monotonic()
    asked_at = probes._answered_at.setdefault(server, now)
    return now - max(asked_at, probes._answered_late_at.get(server, asked_at))


def test_a_silence_that_counts_from_what_a_slow_master_has_answered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where replicas receive, they hear from a slow master: these stay stopped when a promotion breaks off.
    monkeypatch.setattr(promotion, "give_back", _gives_nothing_back)
    kinds, seed = ("master slow", "master refuses watchers"), 464
    assert not play_hour(seed, kinds, 1).false
    monkeypatch.setattr(DatabaseProbes, "silent_seconds", _silent_since_the_question)
    assert play_hour(seed, kinds, 1).false


def test_a_promotion_although_the_replicas_hear_from_the_master_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion_plan, "_hears_nothing", lambda *_: True)
    assert _first("master cut off from watchers", regions=1, seed=2).false


async def _not_finished(_: Promoter, database: str) -> PromotionResult:
    raise PromotionRefused(f"nobody finishes a promotion of {database}")


def test_a_promotion_that_nobody_finishes_because_its_old_master_answers_again_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Promoter, "finish", _not_finished)
    assert _first("rack cut off", regions=1, seed=85).stuck


def _never_goes_on(*_: object) -> None:
    raise PromotionRefused("the old master has gone on without it")


def test_an_old_master_that_has_overtaken_an_interrupted_promotion_and_stays_closed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answered again before the promotion was finished, and a replica rejoined."""
    seed = 13_009_653
    assert not play_hour(seed).violations
    monkeypatch.setattr(promotion, "check_goes_on", _never_goes_on)
    assert play_hour(seed).stuck


def _follows_nobody(member: SetMember) -> bool:
    return member.state is None or member.state.following is None


def test_a_master_that_waits_for_ever_for_replicas_that_a_failed_promotion_has_stopped_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mastership, "_has_stopped_receiving", _follows_nobody)
    assert _first("rack cut off", "replica stands still", regions=1, seed=86).stuck


def test_a_master_that_refuses_the_watcher_and_does_not_get_its_replicas_back_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promotion, "give_back", _gives_nothing_back)
    assert _first("master refuses watchers", regions=1, seed=11).stuck


def test_replicas_that_stay_stopped_and_so_cannot_hear_a_master_out_of_the_watchers_reach_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first promotion breaks off, and a second one begins when the master runs again."""
    monkeypatch.setattr(promotion, "give_back", _gives_nothing_back)
    assert _first("master cut off from watchers", "master refuses watchers", regions=2, seed=43).false


async def _is_a_successor(_: ReplicationSet, member: SetMember) -> SetMember:
    return member


def test_a_former_master_that_takes_its_place_again_with_nothing_of_what_was_written_since_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The present master hangs, which acknowledges alone: its only replica is that one, and has not rejoined."""
    monkeypatch.setattr(ReplicationSet, "as_successor", _is_a_successor)
    assert play_hour(10_000_009).lost_writes


async def _is_not_renewed(*_: object) -> bool:
    return False


def test_a_lease_that_one_lost_packet_ends_while_etcd_is_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_locks, "_SHARED_SECONDS", 1.0)
    monkeypatch.setattr(mastership, "_ATTEMPTS_WITHOUT_LOCK", 1)
    assert play_hour(3_001_292).closed


def test_a_master_whose_lease_nobody_renews_while_etcd_is_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mastership, "_renew_without_lock", _is_not_renewed)
    assert _first("etcd away", regions=2, seed=4).closed


def test_a_lease_that_is_renewed_without_its_lock_although_a_replica_has_stopped_following_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ReplicationSet, "is_followed_by_all", lambda *_: True)
    assert _first("etcd cut off", "region cut off", regions=2, seed=22).stale_reads


@pytest.mark.parametrize(("is_open", "reached_for", "false"), [(True, 0.0, 1), (False, 0.0, 0), (False, 2.1, 1)])
def test_a_closed_master_is_well_if_the_watcher_that_replaces_it_could_hear_from_it_and_an_open_one_if_a_replica_could(
    is_open: bool, reached_for: float, false: int
) -> None:
    loop = SimLoop()
    hour = Hour(1, loop, regions=1)
    hour._breaks_at, hour._kinds_drawn, hour.master.read_only = None, ["master cut off from watchers"], not is_open
    watcher: Any = SimpleNamespace(process=Process("east-watcher", "east"))  # no more of one is looked at
    hour.watchers.update(dict.fromkeys(hour._named("east"), watcher))

    async def promote() -> None:
        hour.cut_off([hour.master.name], hour.watchers, seconds=60.0)
        await asyncio.sleep(10.0)
        if reached_for:
            hour.machines.heal()
        await asyncio.sleep(reached_for)
        await hour.on_step(watcher, PromotionStep.RAISE_EPOCH)

    loop.run_until_complete(promote())
    loop.close()
    assert (hour.findings.promotions, len(hour.findings.false)) == (1, false)
