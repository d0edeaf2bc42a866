"""`chaos` when the cluster does not become healthy after a fault: the figures are reported all the same, with the
reason."""

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
from loadtest.faults.record import RunRecord
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
