"""A watcher that those of all other regions refuse does not keep the others from acting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from tao.observability.logs import logger
from tao.replication.locks import ACTIVITY, FileLocks, LockTaken
from tao.watcher.refused_turns import OTHERS_SECONDS, OWN_SECONDS, RefusedTurns
from tao.watcher.server import ACTIVE_LOCK, WatcherServer
from tao.watcher.settings import ProbeSettings, WatcherSettings
from tests.rigs.pacing import until


def test_a_refused_watcher_leaves_the_work_to_others_first_and_then_from_time_to_time() -> None:
    turns = RefusedTurns()
    assert not turns.is_of_others(False, 7.0)
    assert turns.is_of_others(True, 8.0)
    assert turns.is_of_others(True, 8.0 + OTHERS_SECONDS - 0.1)
    assert not turns.is_of_others(True, 8.0 + OTHERS_SECONDS), "they refuse each other, and nobody else acts"
    assert not turns.is_of_others(True, 8.0 + OTHERS_SECONDS + OWN_SECONDS - 0.1)
    assert turns.is_of_others(True, 8.0 + OTHERS_SECONDS + OWN_SECONDS)
    assert not turns.is_of_others(False, 9.0 + OTHERS_SECONDS + OWN_SECONDS)


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
