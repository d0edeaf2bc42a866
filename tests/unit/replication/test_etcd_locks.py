"""Locks in an etcd whose answers are lost, which carries out a call a second time, late, or which refuses calls."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tao.etcd.client import EtcdRefused, EtcdUnavailable
from tao.replication.etcd_locks import EtcdLocks
from tao.replication.locks import ACTIVITY, LocksAway, LockTaken
from tests.rigs.memory_etcd import PLACE, MemoryEtcd
from tests.rigs.pacing import PATIENT_SECONDS

NAME = "master-of-db"
NO_SPACE = EtcdRefused("etcd refused it: etcdserver: mvcc: database space exceeded")


class Rig:
    """An etcd, and the locks of one process and of another one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.etcd = MemoryEtcd(lambda: self.now)
        self.one, self.other = (EtcdLocks(self.etcd, PLACE, clock=lambda: self.now) for _ in range(2))

    async def is_free(self) -> bool:
        try:
            async with self.other.held(NAME, exclusive=True, terms=ACTIVITY):
                return True
        except LockTaken:
            return False

    async def until_free(self) -> None:
        """Wait until the lock is free, at a moment at which no lease ends by itself."""
        async with asyncio.timeout(PATIENT_SECONDS):
            while not await self.is_free():
                pass


async def test_a_late_duplicate_of_a_shared_lock_ends_although_its_process_goes_on_sharing_locks() -> None:
    rig = Rig()
    async with rig.one.held(NAME, exclusive=False):
        (taken,) = rig.etcd.transactions
    assert await rig.is_free()
    rig.etcd.carry_out(taken)
    assert not await rig.is_free()
    for _ in range(12):
        rig.now += 0.5
        async with rig.one.held(NAME, exclusive=False) as hold:
            hold.check()
    assert await rig.is_free()


async def test_a_late_duplicate_of_its_own_shared_lock_does_not_keep_a_process_from_the_exclusive_one() -> None:
    rig = Rig()
    async with rig.one.held(NAME, exclusive=False):
        (taken,) = rig.etcd.transactions
    rig.etcd.carry_out(taken)
    async with rig.one.held(NAME, exclusive=False):
        with pytest.raises(LockTaken):
            async with rig.one.held(NAME, exclusive=True):
                pytest.fail("a lock that is held was removed")
    with suppress(LockTaken):  # which removes it
        async with rig.one.held(NAME, exclusive=True):
            pass
    async with rig.one.held(NAME, exclusive=True) as hold:
        hold.check()


async def test_sharers_at_one_time_have_one_lease() -> None:
    rig = Rig()

    async def share(name: str) -> None:
        async with rig.one.held(name, exclusive=False):
            pass

    await asyncio.gather(*(share(f"master-of-{number}") for number in range(8)))
    assert len(rig.etcd.leases) == 1


async def test_a_lease_that_etcd_has_forgotten_is_replaced() -> None:
    rig = Rig()
    async with rig.one.held(NAME, exclusive=False):
        pass
    rig.etcd.leases.clear()
    with pytest.raises(LocksAway, match="has forgotten the lease"):
        async with rig.one.held(NAME, exclusive=False):
            pass
    async with rig.one.held(NAME, exclusive=False) as hold:
        hold.check()


async def test_an_etcd_that_refuses_is_away_for_sharers_and_says_why_to_others() -> None:
    rig = Rig()
    rig.etcd.refusal = NO_SPACE
    with pytest.raises(LocksAway, match="space exceeded"):
        async with rig.one.held(NAME, exclusive=False):
            pass
    with pytest.raises(EtcdRefused, match="space exceeded"):
        async with rig.one.held(NAME, exclusive=True):
            pass


async def test_an_exclusive_lock_of_unknown_outcome_is_released_as_soon_as_etcd_answers() -> None:
    rig = Rig()
    rig.etcd.lost_answer = EtcdUnavailable("no answer")
    with pytest.raises(LocksAway):
        async with rig.one.held(NAME, exclusive=True):
            pass
    rig.etcd.refusal = EtcdUnavailable("no answer")
    await asyncio.sleep(0)
    rig.etcd.refusal = None
    await rig.until_free()


async def test_an_exclusive_lock_that_was_not_released_is_released_as_soon_as_etcd_answers() -> None:
    rig = Rig()
    async with rig.one.held(NAME, exclusive=True, terms=ACTIVITY):
        rig.etcd.refusal = EtcdUnavailable("no answer")
    rig.etcd.refusal = None
    await rig.until_free()
