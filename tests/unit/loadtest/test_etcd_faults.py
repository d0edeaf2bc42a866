"""`etcd_faults`: what happens to etcd, for how long, and what is judged."""

from __future__ import annotations

from random import Random
from typing import cast

from loadtest.faults.etcd_faults import EtcdAlone, EtcdFaultsOptions, Watch, _aims, _plan
from loadtest.faults.harness import Outcome
from loadtest.faults.injection import Injector
from loadtest.faults.load import Demand
from loadtest.faults.record import FailedRead, RunRecord, Whereabouts
from loadtest.region_cluster import RegionCluster


class EndedRun(RunRecord):
    """A run whose time is over when it begins."""

    def now(self) -> float:
        return 1.0


def failed_read(demand: str) -> FailedRead:
    where = Whereabouts("west", "db-1", "east")
    return FailedRead(
        seconds=1.0,
        what="object",
        demand=demand,
        client="west/web",
        where=where,
        attached=False,
        reason="UNAVAILABLE",
        message="",
    )


def after(kind: str) -> Outcome:
    """Return the outcome of a run with one fault."""
    outcome = Outcome()
    outcome.record.strike(kind, "victim", "db-1")
    return outcome


def planned(wanted: EtcdFaultsOptions, away_seconds: float = 12.0) -> dict[str, float]:
    """Return the seconds of each kind of a plan whose time is over when it begins."""
    injector = Injector(cast("RegionCluster", None), Random(1))
    return {step.kind: step.seconds for (step,) in _plan(wanted, away_seconds, EtcdAlone(), injector, EndedRun())}


def test_every_kind_happens_at_least_once_and_a_region_is_cut_off_from_etcd_alone_for_longer_than_a_lease() -> None:
    everything = planned(EtcdFaultsOptions(seconds=0.001))
    assert list(everything.items()) == [
        ("etcd_kill", 12.0),
        ("etcd_stop", 12.0),
        ("etcd_cut", 12.0),
        ("etcd_compacted", 12.0),
        ("etcd_restored", 12.0),
        ("link_cut", 2.5),
        ("master_kill", 12.0),
    ]
    assert list(planned(EtcdFaultsOptions(seconds=0.001, kinds=("etcd_stop",)))) == ["etcd_stop"]


def test_reads_that_fail_count_in_full_until_something_else_than_etcd_fails() -> None:
    injector, record, alone = Injector(cast("RegionCluster", None), Random(1)), EndedRun(), EtcdAlone()
    wanted = EtcdFaultsOptions(seconds=0.001, kinds=("etcd_kill", "master_kill"))
    for (step,) in _plan(wanted, 12.0, alone, injector, record):
        record.strike(step.kind, "victim", "db-1")
        for demand in (Demand.PLAIN, Demand.CRITICAL):
            record.failed_read(failed_read(demand))
        record.reads += 7
        record.healed(record.active[0])
    assert (alone.reads, alone.failed, alone.failed_plain) == (7, 2, 1)
    missed = [aim.aim for aim in _aims(after("etcd_kill"), Watch(looks=7, looks_without_etcd=3), alone) if not aim.met]
    assert missed == [
        "no plain read fails while nothing but etcd fails",
        "no read fails while nothing but etcd fails",
    ]


def test_two_masters_none_and_a_step_back_are_what_is_not_allowed() -> None:
    watch, outcome, alone = Watch(looks=7, looks_without_etcd=3), after("etcd_kill"), EtcdAlone(reads=1)
    assert all(aim.met for aim in _aims(outcome, watch, alone))
    watch.open_at_once["db-1"] += 1
    watch.closed["db-2"] += 2
    watch.steps_back["east-leader-1"] += 1
    outcome.record.unexplained["etcd_kill"] += 1
    assert {aim.aim: aim.value for aim in _aims(outcome, watch, alone) if not aim.met} == {
        "no read fails that another server could have answered": 1,
        "no database has two masters": 1,
        "masters stay open while etcd does not answer all": 2,
        "no server goes back to an older document": 1,
    }


def test_a_run_with_other_faults_alone_is_not_judged_by_what_happens_to_etcd() -> None:
    aims = [aim.aim for aim in _aims(after("master_kill"), Watch(looks=7), EtcdAlone())]
    assert "no database has two masters" in aims
    assert [aim for aim in aims if "etcd" in aim] == []


def test_faults_of_etcd_during_which_nothing_was_read_or_looked_at_show_nothing() -> None:
    missed = [aim.aim for aim in _aims(after("etcd_stop"), Watch(looks=7), EtcdAlone()) if not aim.met]
    assert missed == [
        "reads are judged while nothing but etcd fails",
        "databases are looked at while etcd does not answer all",
    ]


def test_a_cut_from_etcd_alone_that_no_open_master_has_seen_shows_nothing() -> None:
    outcome = Outcome()
    outcome.record.strike("etcd_cut", "etcd")
    aim = "open masters that are cut off from etcd are seen"
    for seen, met in ((0, False), (1, True)):
        watch = Watch(looks=7)
        watch.held_without_etcd["db-2"] += seen
        assert {each.aim: each.met for each in _aims(outcome, watch, EtcdAlone())}[aim] is met
