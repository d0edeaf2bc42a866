"""Locks in files and in etcd: one holder, sharers, and a holder that died or was cut off."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from tao.replication.locks import (
    ACTIVITY,
    MASTERSHIP,
    LockHold,
    LockLost,
    Locks,
    LockTaken,
    databases_being_changed,
    hold_exclusively,
    keep_alive,
    mastership_lock,
)
from tests.conformance.store_rig import StoreRig
from tests.rigs.pacing import PATIENT_SECONDS


async def is_free(locks: Locks, name: str, *, exclusive: bool) -> bool:
    try:
        async with locks.held(name, exclusive=exclusive):
            return True
    except LockTaken:
        return False


async def taken_over(locks: Locks, name: str) -> AbstractAsyncContextManager[LockHold]:
    """Return the entered hold of the first attempt that succeeds."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            attempt = locks.held(name, exclusive=True, terms=ACTIVITY)
            try:
                await attempt.__aenter__()
                return attempt
            except LockTaken:
                await asyncio.sleep(0.1)


async def test_an_exclusive_lock_excludes_all_others_until_it_is_released(stores: StoreRig) -> None:
    one, other = stores.locks(), stores.locks()
    async with one.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        assert hold.is_held()
        assert not await is_free(other, "watcher", exclusive=True)
        assert not await is_free(other, "watcher", exclusive=False)
        assert await is_free(other, "another", exclusive=True)
    assert await is_free(other, "watcher", exclusive=True)


async def test_a_shared_lock_excludes_only_exclusive_ones(stores: StoreRig) -> None:
    one, other = stores.locks(), stores.locks()
    async with one.held("watcher", exclusive=False) as hold, one.held("watcher", exclusive=False):
        hold.check()
        assert await is_free(other, "watcher", exclusive=False)
        assert not await is_free(other, "watcher", exclusive=True)
        assert not await is_free(one, "watcher", exclusive=True)
    assert await is_free(other, "watcher", exclusive=True)


async def test_of_many_that_try_at_once_one_has_the_lock(stores: StoreRig) -> None:
    async with AsyncExitStack() as held:
        attempts = [stores.locks().held("watcher", exclusive=True, terms=ACTIVITY) for _ in range(8)]
        results = await asyncio.gather(*map(held.enter_async_context, attempts), return_exceptions=True)
        assert sum(not isinstance(result, BaseException) for result in results) == 1
        assert all(isinstance(result, LockTaken) for result in results if isinstance(result, BaseException))


async def test_a_change_of_a_master_is_seen_and_waits_for_a_renewal(stores: StoreRig) -> None:
    one, other = stores.locks(), stores.locks()
    async with AsyncExitStack() as renewal:
        await renewal.enter_async_context(one.held(mastership_lock("db"), exclusive=False))
        assert not await databases_being_changed(other, ["db"])

        async def change() -> frozenset[str]:
            async with hold_exclusively(other, mastership_lock("db"), 30.0):
                return await databases_being_changed(one, ["db", "other"])

        changing = asyncio.create_task(change())
        await asyncio.sleep(0)
        await renewal.aclose()
        assert await changing == {"db"}


async def test_a_lock_is_lost_to_another_process_when_its_holder_gives_no_sign_of_life(stores: StoreRig) -> None:
    one, other = stores.locks(), stores.locks()
    async with one.held("watcher", exclusive=True, terms=ACTIVITY) as hold:
        await hold.touch()
        successor = await taken_over(other, "watcher")
        assert not hold.is_held()
        with pytest.raises(LockLost):
            hold.check()
        with pytest.raises(LockLost):
            await hold.touch()
    # What the former holder releases is not its successor's lock.
    assert not await is_free(stores.locks(), "watcher", exclusive=True)
    await successor.__aexit__(None, None, None)
    assert await is_free(stores.locks(), "watcher", exclusive=True)


async def test_a_holder_that_gives_signs_of_life_keeps_its_lock(stores: StoreRig) -> None:
    one, other = stores.locks(), stores.locks()
    loop = asyncio.get_running_loop()
    async with one.held("watcher", exclusive=True, terms=ACTIVITY) as hold, keep_alive(hold, ACTIVITY):
        end = loop.time() + ACTIVITY.takeover_seconds + ACTIVITY.touch_seconds
        while loop.time() < end:
            assert not await is_free(other, "watcher", exclusive=True)
            hold.check()
            await asyncio.sleep(ACTIVITY.touch_seconds)
    assert MASTERSHIP.holder_timeout_seconds < MASTERSHIP.takeover_seconds
