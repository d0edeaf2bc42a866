"""`chaos`: its aims on times, and what it reports when the cluster does not become healthy after a fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loadtest.faults import chaos, harness, load, plan
from loadtest.faults.injection import FAULTS
from loadtest.faults.load import RecordedOptions
from loadtest.faults.record import Fault, PendingInverse, RunRecord
from loadtest.scenario import BenchSettings, Silent
from tao.model.errors import OperatorError

NOT_WELL = "not well 240 s after it was mended: east-db-1 has no replica"


class Load(harness.ClientLoad):
    """Some writes and reads, until the work fails; the machine sleeps for ``slept`` seconds before it begins."""

    def __init__(self, options: RecordedOptions, record: RunRecord, slept: float) -> None:
        super().__init__()
        self.record = record
        record.acknowledged = int(options.writes)
        record._began -= slept

    async def while_running(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        finally:
            self.record.reads += 7

    def describe(self) -> tuple[str, float]:
        return "", 0.0


@pytest.mark.parametrize("slept", [0.0, 3600.0])
async def test_a_run_that_ends_because_the_cluster_does_not_get_well_says_so_in_its_figures_and_fails(
    slept: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def region_cluster(*_: object, **__: object) -> AsyncIterator[object]:
        yield SimpleNamespace(versions={"mariadb": "10.11"}, cluster=None)

    @asynccontextmanager
    async def recorded_load(
        options: RecordedOptions, regions: object, record: RunRecord, chance: object
    ) -> AsyncIterator[harness.ClientLoad]:
        yield Load(options, record, slept)

    @asynccontextmanager
    async def kill(harm: object) -> AsyncIterator[str]:
        yield "east-db-1"

    async def until_well(*_: object) -> None:
        raise OperatorError(NOT_WELL)

    monkeypatch.setattr(harness, "region_cluster", region_cluster)
    monkeypatch.setattr(load, "recorded_load", recorded_load)
    monkeypatch.setattr(plan, "until_well", until_well)
    monkeypatch.setitem(FAULTS, "follower_kill", kill)
    monkeypatch.setattr(chaos, "_TOY_AWAY_SECONDS", 0.0)
    wanted = chaos.ChaosOptions(seconds=0.01, kinds=("follower_kill",)).at_toy_size()
    result = await chaos.run(BenchSettings(tmp_path, toy=True), Silent(), wanted)
    assert NOT_WELL in result.faults[0]
    written = msgspec.json.decode(msgspec.json.encode(result.measured))
    assert (written["not_well"], written["stale_after_quiescence"]) == (NOT_WELL, None)
    assert (written["acked_writes"], written["reads"], written["faults"]) == (20, 7, {"follower_kill": 1})
    assert ("stale after quiescence", "–", "") in result.listings[0].rows


def fault(kind: str, struck: float, healing: float, mended: float, healthy: float, **more: Any) -> Fault:
    return Fault(kind=kind, victim="line", struck=struck, healing=healing, mended=mended, healthy=healthy, **more)


def test_an_inverse_counts_from_the_end_of_the_cut_that_left_it_pending_or_from_its_later_acknowledgement() -> None:
    outcome = harness.Outcome(busy_seconds=50.0)
    outcome.record.faults.extend(
        [
            fault("link_cut", 10.0, 14.0, 14.1, 17.0, splits_masters=True, far_end_reads_while_pending=7),
            fault("follower_kill", 20.0, 21.0, 22.0, 23.0),
            fault("link_silent", 30.0, 34.0, 34.0, 40.0, splits_masters=True),
        ]
    )
    outcome.record.pending.extend(
        [
            PendingInverse(acknowledged=12.0, settled=14.5),
            PendingInverse(acknowledged=13.0, settled=13.5),
            PendingInverse(acknowledged=15.0, settled=15.3),
            PendingInverse(acknowledged=20.5, settled=29.0),
            PendingInverse(acknowledged=32.0),
        ]
    )
    reads, settled = chaos._cut_aims(outcome)
    assert (reads.value, reads.bound, reads.met, reads.shape) == (0, 1, False, "2 cuts")
    assert (settled.value, settled.bound, settled.met, settled.shape) == (16.0, 2.0, False, "4 inverses, 2 cuts")
    assert [round(each, 3) for each in chaos._settled_seconds(outcome.record.cuts[0], outcome)] == [0.4, 0.0, 0.3]


def test_without_a_pending_inverse_nothing_is_said_of_how_soon_it_is_written() -> None:
    outcome = harness.Outcome(busy_seconds=50.0)
    assert chaos._cut_aims(outcome) == []
    outcome.record.faults.append(fault("link_cut", 1.0, 4.0, 4.1, 7.0))
    assert chaos._cut_aims(outcome) == [], "all masters are in one region"
    outcome.record.faults.append(fault("link_cut", 10.0, 14.0, 14.1, 17.0, splits_masters=True))
    assert [aim.met for aim in chaos._cut_aims(outcome)] == [False]


def test_a_full_disk_counts_from_the_room_on_it_until_every_shard_is_written() -> None:
    outcome = harness.Outcome(busy_seconds=50.0)
    assert chaos._disk_aims(outcome) == []
    again = fault("leader_disk_full", 10.0, 14.0, 14.1, 17.0, unwritten_since=14.1, written=15.6)
    outcome.record.faults.append(again)
    (aim,) = chaos._disk_aims(outcome)
    assert (round(aim.value, 3), aim.bound, aim.met) == (1.5, 10.0, True)
    outcome.record.faults.append(fault("tailer_disk_full", 20.0, 24.0, 24.0, 27.0, unwritten_since=24.0))
    (aim,) = chaos._disk_aims(outcome)
    assert (aim.value, aim.met, aim.shape) == (26.0, False, "2 disks")


def test_a_killed_leader_that_led_no_shard_delays_no_write() -> None:
    """All masters of its region's databases were in the other region when it was killed."""
    outcome = harness.Outcome(busy_seconds=50.0)
    kill = fault("leader_kill", 10.0, 14.0, 14.1, 17.0)
    outcome.record.faults.append(kill)
    outcome.record.await_writes(kill, ())
    assert [aim.met for aim in chaos._leader_aims(outcome)] == [True, True]
