"""`etcd_faults`: what happens to etcd, for how long, and what is judged."""

from __future__ import annotations

from random import Random
from typing import cast

from loadtest.faults.etcd_faults import EtcdFaultsOptions, Watch, _aims, _plan
from loadtest.faults.harness import Outcome
from loadtest.faults.injection import Injector
from loadtest.faults.record import RunRecord
from loadtest.region_cluster import RegionCluster


def planned(wanted: EtcdFaultsOptions, away_seconds: float = 12.0) -> dict[str, float]:
    """Return the seconds of each kind of a plan whose time is over when it begins."""
    injector = Injector(cast("RegionCluster", None), Random(1))
    return {step.kind: step.seconds for (step,) in _plan(wanted, away_seconds, injector, RunRecord())}


def test_every_kind_happens_at_least_once_and_a_region_is_cut_off_from_etcd_alone_for_longer_than_a_lease() -> None:
    everything = planned(EtcdFaultsOptions(seconds=0.001))
    assert everything == {
        "etcd_kill": 12.0,
        "etcd_stop": 12.0,
        "etcd_cut": 12.0,
        "link_cut": 2.5,
        "etcd_compacted": 2.5,
        "etcd_restored": 12.0,
        "master_kill": 12.0,
    }
    assert list(planned(EtcdFaultsOptions(seconds=0.001, kinds=("etcd_stop",)))) == ["etcd_stop"]


def test_two_masters_none_and_a_step_back_are_what_is_not_allowed() -> None:
    watch, outcome = Watch(looks=7), Outcome()
    assert all(aim.met for aim in _aims(outcome, watch))
    watch.open_at_once["db-1"] += 1
    watch.closed["db-2"] += 2
    watch.steps_back["east-leader-1"] += 1
    outcome.record.unexplained["etcd_kill"] += 1
    assert {aim.aim: aim.value for aim in _aims(outcome, watch) if not aim.met} == {
        "no read fails": 1,
        "no database has two masters": 1,
        "masters stay open while etcd does not answer all": 2,
        "no server goes back to an older document": 1,
    }


def test_a_cut_from_etcd_alone_that_no_open_master_has_seen_shows_nothing() -> None:
    outcome = Outcome()
    outcome.record.strike("etcd_cut", "etcd")
    aim = "open masters that are cut off from etcd are seen"
    for seen, met in ((0, False), (1, True)):
        watch = Watch(looks=7)
        watch.held_without_etcd["db-2"] += seen
        assert {each.aim: each.met for each in _aims(outcome, watch)}[aim] is met
