"""A watcher that those of all other regions refuse does not keep the others from acting."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from tao.model.topology import Topology
from tao.observability.logs import logger
from tao.replication.locks import ACTIVITY, FileLocks, LockTaken
from tao.watcher.refused_turns import OTHERS_SECONDS, OWN_SECONDS, SLOT_SECONDS, RefusedTurns
from tao.watcher.server import ACTIVE_LOCK, WatcherServer
from tao.watcher.settings import ProbeSettings, WatcherSettings
from tests.rigs.pacing import until


def _turns_of(region: str, regions: list[str], seconds: list[float], refused_at: float = 0.0) -> list[float]:
    """Return when a watcher that is refused from some time on leaves the work to others."""
    turns = RefusedTurns(region)
    return [each for each in seconds if turns.is_of_others(each >= refused_at, regions, each)]


def test_a_refused_watcher_leaves_the_work_to_others_soon_and_then_from_time_to_time() -> None:
    regions, tenths = ["east", "west"], [each / 10 for each in range(10 * 300)]
    for refused_at in (0.0, 1.0, 8.5, 17.0):
        left = _turns_of("west", regions, tenths, refused_at)
        begins = [left[0], *(then for before, then in pairwise(left) if then - before > 0.15)]
        assert left[0] - refused_at < len(regions) * SLOT_SECONDS
        assert all(then - before >= OWN_SECONDS for before, then in pairwise(begins)), "somebody has to act"
        assert len(begins) > 3
        assert len(left) > 10 * (OTHERS_SECONDS * (len(begins) - 1) - 1)
    assert not _turns_of("west", regions, tenths, refused_at=1000.0)


def test_a_watcher_that_is_not_refused_any_more_leaves_nothing_and_begins_anew() -> None:
    turns, in_turn = RefusedTurns("east"), 4 * SLOT_SECONDS
    period = 2 * SLOT_SECONDS
    later = in_turn + period * math.ceil(OWN_SECONDS / period)
    assert turns.is_of_others(True, ["west"], in_turn)
    assert not turns.is_of_others(False, ["west"], in_turn + 1.0)
    assert turns.is_of_others(True, ["west"], later)
    assert not turns.is_of_others(True, ["west"], later + period)


@pytest.mark.parametrize("region", ["east", "west"])
def test_a_refusal_that_flickers_leaves_the_work_no_oftener_to_others(region: str) -> None:
    regions, tenths = ["east", "west"], [each / 10 for each in range(10 * 300)]
    turns, steady = RefusedTurns(region), _turns_of(region, regions, tenths)
    flickering = [each for each in tenths if turns.is_of_others(int(10 * each) % 40 != 0, regions, each)]
    assert set(flickering) <= set(steady)
    assert len(flickering) > 0.9 * len(steady)


@pytest.mark.parametrize("regions", [["east", "west"], ["east", "middle", "west"]])
def test_two_regions_that_refuse_each_other_never_leave_the_work_to_each_other_at_a_time(regions: list[str]) -> None:
    """The masters of a third region, without a watcher there that they do not refuse, would lose their leases."""
    tenths = [each / 10 for each in range(10 * 300)]
    for east_at, west_at in ((0.0, 0.0), (0.0, 1.5), (3.0, 40.0), (20.0, 0.7)):
        east, west = (_turns_of(region, regions, tenths, at) for region, at in (("east", east_at), ("west", west_at)))
        assert east
        assert west
        # Their clocks differ a little.
        assert min(abs(one - other) for one in east for other in west) > SLOT_SECONDS - OTHERS_SECONDS - 0.2


@dataclass
class Peers:
    """What the other watchers answer."""

    all_refuse: bool = False
    refusals: dict[str, str] = field(default_factory=lambda: {"west-watcher-1": "certificate expired"})


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WatcherServer]:
    settings = WatcherSettings(
        name="watcher-1",
        region="east",
        topology_file=tmp_path / "topology.json",
        administrator_user="tao_admin",
        administrator_password="a",
        replicator_password="b",
        probes=ProbeSettings(interval_seconds=0.01),
    )
    server = WatcherServer(settings, logger("watcher"))
    server._topology = Topology(version=1, shards=1, regions=(), databases=())
    monkeypatch.setattr(RefusedTurns, "is_of_others", lambda _, is_refused, *__: is_refused)

    async def change_marks() -> None: ...

    monkeypatch.setattr(server, "_change_marks", change_marks)
    monkeypatch.setattr(server, "_mastership", SimpleNamespace(activity=None), raising=False)
    monkeypatch.setattr(server, "_peers", Peers(), raising=False)
    acting = asyncio.create_task(server._run_as_active())
    yield server
    acting.cancel()
    with suppress(asyncio.CancelledError):
        await acting


async def test_another_watcher_takes_the_lock_of_an_active_one_that_is_refused(
    server: WatcherServer, tmp_path: Path
) -> None:
    await until(lambda: server._mastership.activity is not None)
    locks = FileLocks(tmp_path / "topology.json")
    with pytest.raises(LockTaken):
        async with locks.held(ACTIVE_LOCK, exclusive=True, terms=ACTIVITY):
            pass
    with capture_logs() as logs:
        server._peers.all_refuse = True  # type: ignore[misc]
        await until(lambda: server._mastership.activity is None)
        async with locks.held(ACTIVE_LOCK, exclusive=True, terms=ACTIVITY):
            server._peers.all_refuse = False  # type: ignore[misc]
    assert [each["reason"] for each in logs if each["event"] == "activity_left_to_others"] == ["certificate expired"]
    await until(lambda: server._mastership.activity is not None)
