"""One hand at a time."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from tao.model.errors import OperatorError
from tao.replication.locks import (
    ACTIVITY,
    MASTERSHIP,
    SESSION_IDLE_SECONDS,
    FileLocks,
    LockHold,
    LockLost,
    LockTaken,
    databases_being_changed,
    hold_exclusively,
    mastership_lock,
)


async def test_an_exclusive_lock_excludes_every_other_holder(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    async with one.held("master-of-db", exclusive=True):
        for exclusive in (True, False):
            with pytest.raises(LockTaken):
                async with other.held("master-of-db", exclusive=exclusive):
                    pass
        async with other.held("master-of-another", exclusive=True):
            pass
    async with other.held("master-of-db", exclusive=True):
        pass


async def promote(locks: FileLocks, timeout_seconds: float) -> None:
    async with hold_exclusively(locks, "master-of-db", timeout_seconds):
        pass


async def test_a_promotion_waits_for_a_renewal_that_is_under_way(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    async with AsyncExitStack() as renewal:
        await renewal.enter_async_context(one.held("master-of-db", exclusive=False))
        promotion = asyncio.create_task(promote(other, 30.0))
        await asyncio.sleep(0)
        await renewal.aclose()
        await promotion
    async with one.held("master-of-db", exclusive=False):
        with pytest.raises(LockTaken):
            await promote(other, 0.0)


async def test_a_lease_renewal_excludes_only_changes_of_the_master(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    async with one.held("master-of-db", exclusive=False):
        async with other.held("master-of-db", exclusive=False):
            pass
        with pytest.raises(LockTaken):
            async with other.held("master-of-db", exclusive=True):
                pass


async def test_it_can_be_seen_whose_master_is_being_changed(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    async with one.held(mastership_lock("db-1"), exclusive=True), one.held(mastership_lock("db-2"), exclusive=False):
        for locks in (one, other):
            assert await databases_being_changed(locks, ["db-1", "db-2", "db-3"]) == {"db-1"}
    assert not await databases_being_changed(other, ["db-1"])


class Clock:
    """Seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def nothing() -> None: ...


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def try_for(
    locks: FileLocks, clock: Clock, seconds: float, *, beat: Callable[[], Awaitable[None]] = nothing
) -> bool:
    """Whether somebody who tries all the time gets the lock."""
    end = clock.now + seconds
    while clock.now < end:
        with suppress(LockTaken):
            async with locks.held("watcher", exclusive=True, terms=ACTIVITY):
                return True
        clock.now += ACTIVITY.touch_seconds
        await beat()
    return False


async def test_a_lock_is_taken_over_from_a_process_that_hangs_and_from_no_other(tmp_path: Path) -> None:
    clock = Clock()
    hung, other = (FileLocks(tmp_path / "topology.json", clock=clock) for _ in range(2))
    async with hung.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        assert not await try_for(other, clock, 10 * ACTIVITY.takeover_seconds, beat=hold.touch), "it lives"
        assert not await try_for(other, clock, ACTIVITY.holder_timeout_seconds), "it may still act"
        assert await try_for(other, clock, 2 * ACTIVITY.takeover_seconds)
        assert not hold.is_held()
        with pytest.raises(LockLost):
            await hold.touch()
        for exclusive in (True, False):  # whom it has let go is not kept out by it any more
            async with other.held("watcher", exclusive=exclusive):
                pass
    async with hung.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        assert hold.is_held()
        assert not await try_for(other, clock, ACTIVITY.holder_timeout_seconds)
    assert len(files_in(tmp_path)) == 1


async def test_a_holder_that_stood_still_counts_itself_out_before_anybody_can_have_its_place(tmp_path: Path) -> None:
    for terms in (ACTIVITY, MASTERSHIP):
        clock = Clock()
        locks = FileLocks(tmp_path / "topology.json", clock=clock)
        async with locks.held("watcher", exclusive=True, terms=terms) as hold:
            clock.now += terms.holder_timeout_seconds
            hold.check()
            clock.now += terms.touch_seconds
            with pytest.raises(LockLost):
                hold.check()
            assert not hold.is_held(), "nor does it get it back"
    assert MASTERSHIP.holder_timeout_seconds + SESSION_IDLE_SECONDS < MASTERSHIP.takeover_seconds
    assert all(
        2 * terms.touch_seconds <= terms.holder_timeout_seconds < terms.takeover_seconds
        for terms in (ACTIVITY, MASTERSHIP)
    )


async def test_of_two_who_take_over_one_has_the_lock(tmp_path: Path) -> None:
    clock = Clock()
    hung, one, other = (FileLocks(tmp_path / "topology.json", clock=clock) for _ in range(3))
    async with hung.held("watcher", exclusive=False), AsyncExitStack() as taken:
        holds: list[LockHold] = []
        for _ in range(int(2 * ACTIVITY.takeover_seconds / ACTIVITY.touch_seconds)):
            for locks in (one, other):
                with suppress(LockTaken):
                    lock = locks.held("watcher", exclusive=True, terms=ACTIVITY)
                    holds.append(await taken.enter_async_context(lock))
            for hold in holds:
                await hold.touch()
            clock.now += ACTIVITY.touch_seconds
        assert len(holds) == 1


async def test_a_renewal_that_hung_fails_before_it_renews(tmp_path: Path) -> None:
    clock = Clock()
    hung, other = (FileLocks(tmp_path / "topology.json", clock=clock) for _ in range(2))
    async with hung.held("watcher", exclusive=False) as renewal:
        renewal.check()
        assert await try_for(other, clock, 2 * ACTIVITY.takeover_seconds)
        with pytest.raises(LockLost):
            renewal.check()


async def test_a_look_long_ago_is_no_proof_that_a_holder_hangs(tmp_path: Path) -> None:
    clock = Clock()
    one, other = (FileLocks(tmp_path / "topology.json", clock=clock) for _ in range(2))
    for _ in range(2):
        async with one.held("watcher", exclusive=False):
            assert not await try_for(other, clock, ACTIVITY.touch_seconds)
        clock.now += 10 * ACTIVITY.takeover_seconds


async def test_leases_go_on_in_a_folder_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = FileLocks(tmp_path / "topology.json")
    async with locks.held("master-of-db", exclusive=False):
        pass
    can_write = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system")
        return can_write(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    async with locks.held("master-of-db", exclusive=False):
        pass
    with pytest.raises(OperatorError, match="Read-only"):
        async with locks.held("master-of-db", exclusive=True, terms=MASTERSHIP):
            pass


async def test_a_folder_that_is_gone_is_an_operator_s_matter_and_no_lock_in_it_is_anybody_s(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    locks = FileLocks(folder / "topology.json")
    async with locks.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        folder.rename(tmp_path / "away")
        assert not hold.is_held()
    for exclusive in (True, False):
        with pytest.raises(OperatorError, match="cannot lock"):
            async with locks.held("watcher", exclusive=exclusive):
                pass
