"""The semaphore admits a fixed number at a time; a waiter that gives up costs no other waiter its turn."""

from __future__ import annotations

import asyncio

import pytest

from tao.storage.semaphore import Semaphore


async def test_a_free_turn_is_taken_at_once_and_others_wait_in_line() -> None:
    semaphore = Semaphore(2)
    assert [semaphore.try_acquire(), semaphore.try_acquire(), semaphore.try_acquire()] == [True, True, False]
    order: list[int] = []

    async def wait(number: int) -> None:
        await semaphore.acquire()
        order.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    semaphore.release()
    assert not semaphore.try_acquire(), "it is the first one's in line"
    semaphore.release()
    await asyncio.wait(waiting[:2])
    assert order == [0, 1]
    semaphore.release()
    await waiting[2]
    semaphore.release()
    assert semaphore.try_acquire()


@pytest.mark.parametrize("given_before", [False, True])
async def test_who_is_cancelled_in_line_leaves_his_turn_to_the_next(given_before: bool) -> None:
    semaphore = Semaphore(1)
    assert semaphore.try_acquire()
    first, second = (asyncio.create_task(semaphore.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    if given_before:
        semaphore.release()
        first.cancel()  # the turn is his already, and he does not know it yet
    else:
        first.cancel()
        semaphore.release()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert not semaphore.try_acquire()
    semaphore.release()
    assert semaphore.try_acquire()
