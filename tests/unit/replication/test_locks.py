"""One hand at a time."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
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


def test_an_exclusive_lock_excludes_every_other_holder(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    with one.held("master-of-db", exclusive=True):
        for exclusive in (True, False):
            with pytest.raises(LockTaken), other.held("master-of-db", exclusive=exclusive):
                pass
        with other.held("master-of-another", exclusive=True):
            pass
    with other.held("master-of-db", exclusive=True):
        pass


async def test_a_promotion_waits_for_a_renewal_that_is_under_way(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    with ExitStack() as renewal:
        renewal.enter_context(one.held("master-of-db", exclusive=False))
        asyncio.get_running_loop().call_soon(renewal.close)
        async with hold_exclusively(other, "master-of-db", 30.0):
            pass
    with one.held("master-of-db", exclusive=False), pytest.raises(LockTaken):
        async with hold_exclusively(other, "master-of-db", 0.0):
            pass


def test_a_lease_renewal_excludes_only_changes_of_the_master(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    with one.held("master-of-db", exclusive=False):
        with other.held("master-of-db", exclusive=False):
            pass
        with pytest.raises(LockTaken), other.held("master-of-db", exclusive=True):
            pass


def test_it_can_be_seen_whose_master_is_being_changed(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    with one.held(mastership_lock("db-1"), exclusive=True), one.held(mastership_lock("db-2"), exclusive=False):
        for locks in (one, other):
            assert databases_being_changed(locks, ["db-1", "db-2", "db-3"]) == {"db-1"}
    assert not databases_being_changed(other, ["db-1"])


class Clock:
    """Seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def try_for(locks: FileLocks, clock: Clock, seconds: float, *, beat: Callable[[], None] = lambda: None) -> bool:
    """Whether somebody who tries all the time gets the lock."""
    end = clock.now + seconds
    while clock.now < end:
        with suppress(LockTaken), locks.held("watcher", exclusive=True, terms=ACTIVITY):
            return True
        clock.now += ACTIVITY.touch_seconds
        beat()
    return False


def test_a_lock_is_taken_over_from_a_process_that_hangs_and_from_no_other(tmp_path: Path) -> None:
    clock = Clock()
    hung, other = (FileLocks(tmp_path / "topology.json", clock=clock) for _ in range(2))
    with hung.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        assert not try_for(other, clock, 10 * ACTIVITY.takeover_seconds, beat=hold.touch), "it lives"
        assert not try_for(other, clock, ACTIVITY.holder_timeout_seconds), "it may still act"
        assert try_for(other, clock, 2 * ACTIVITY.takeover_seconds)
        assert not hold.is_held()
        with pytest.raises(LockLost):
            hold.touch()
        for exclusive in (True, False):  # whom it has let go is not kept out by it any more
            with other.held("watcher", exclusive=exclusive):
                pass
    with hung.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        assert hold.is_held()
        assert not try_for(other, clock, ACTIVITY.holder_timeout_seconds)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_holder_that_stood_still_counts_itself_out_before_anybody_can_have_its_place(tmp_path: Path) -> None:
    for terms in (ACTIVITY, MASTERSHIP):
        clock = Clock()
        with FileLocks(tmp_path / "topology.json", clock=clock).held("watcher", exclusive=True, terms=terms) as hold:
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


def test_of_two_who_take_over_one_has_the_lock(tmp_path: Path) -> None:
    clock = Clock()
    hung, one, other = (FileLocks(tmp_path / "topology.json", clock=clock) for _ in range(3))
    with hung.held("watcher", exclusive=False), ExitStack() as taken:
        holds: list[LockHold] = []
        for _ in range(int(2 * ACTIVITY.takeover_seconds / ACTIVITY.touch_seconds)):
            for locks in (one, other):
                with suppress(LockTaken):
                    holds.append(taken.enter_context(locks.held("watcher", exclusive=True, terms=ACTIVITY)))
            for hold in holds:
                hold.touch()
            clock.now += ACTIVITY.touch_seconds
        assert len(holds) == 1


def test_a_renewal_that_hung_fails_before_it_renews(tmp_path: Path) -> None:
    clock = Clock()
    hung, other = (FileLocks(tmp_path / "topology.json", clock=clock) for _ in range(2))
    with hung.held("watcher", exclusive=False) as renewal:
        renewal.check()
        assert try_for(other, clock, 2 * ACTIVITY.takeover_seconds)
        with pytest.raises(LockLost):
            renewal.check()


def test_a_look_long_ago_is_no_proof_that_a_holder_hangs(tmp_path: Path) -> None:
    clock = Clock()
    one, other = (FileLocks(tmp_path / "topology.json", clock=clock) for _ in range(2))
    for _ in range(2):
        with one.held("watcher", exclusive=False):
            assert not try_for(other, clock, ACTIVITY.touch_seconds)
        clock.now += 10 * ACTIVITY.takeover_seconds


def test_leases_go_on_in_a_folder_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = FileLocks(tmp_path / "topology.json")
    with locks.held("master-of-db", exclusive=False):
        pass
    can_write = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system")
        return can_write(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    with locks.held("master-of-db", exclusive=False):
        pass
    with pytest.raises(OperatorError, match="Read-only"), locks.held("master-of-db", exclusive=True, terms=MASTERSHIP):
        pass


def test_a_folder_that_is_gone_is_an_operator_s_matter_and_no_lock_in_it_is_anybody_s(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    locks = FileLocks(folder / "topology.json")
    with locks.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        folder.rename(tmp_path / "away")
        assert not hold.is_held()
    for exclusive in (True, False):
        with pytest.raises(OperatorError, match="cannot lock"), locks.held("watcher", exclusive=exclusive):
            pass
