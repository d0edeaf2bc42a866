"""One hand at a time."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from tao.watcher.locks import FileLocks, LockTaken, held_alone, in_change, mastership_lock


def test_a_lock_held_alone_is_nobody_else_s(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    with one.held("master-of-db", alone=True):
        for alone in (True, False):
            with pytest.raises(LockTaken), other.held("master-of-db", alone=alone):
                pass
        with other.held("master-of-another", alone=True):
            pass
    with other.held("master-of-db", alone=True):
        pass


async def test_a_promotion_waits_for_a_renewal_that_is_under_way(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    with ExitStack() as renewal:
        renewal.enter_context(one.held("master-of-db", alone=False))
        asyncio.get_running_loop().call_soon(renewal.close)
        async with held_alone(other, "master-of-db", 30.0):
            pass
    with one.held("master-of-db", alone=False), pytest.raises(LockTaken):
        async with held_alone(other, "master-of-db", 0.0):
            pass


def test_whoever_renews_a_lease_keeps_only_those_out_who_change_the_master(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    with one.held("master-of-db", alone=False):
        with other.held("master-of-db", alone=False):
            pass
        with pytest.raises(LockTaken), other.held("master-of-db", alone=True):
            pass


def test_it_can_be_seen_whose_master_is_being_changed(tmp_path: Path) -> None:
    one, other = (FileLocks(tmp_path / "topology.json") for _ in range(2))
    with one.held(mastership_lock("db-1"), alone=True), one.held(mastership_lock("db-2"), alone=False):
        for locks in (one, other):
            assert in_change(locks, ["db-1", "db-2", "db-3"]) == {"db-1"}
    assert not in_change(other, ["db-1"])
