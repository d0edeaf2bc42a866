"""So many at a time: whoever gives up his place in line takes nobody's turn along."""

from __future__ import annotations

import asyncio

import pytest

from tao.storage.turns import Turns


async def test_a_free_turn_is_taken_at_once_and_others_wait_in_line() -> None:
    turns = Turns(2)
    assert [turns.take(), turns.take(), turns.take()] == [True, True, False]
    order: list[int] = []

    async def wait(number: int) -> None:
        await turns.wait()
        order.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    turns.give_back()
    assert not turns.take(), "it is the first one's in line"
    turns.give_back()
    await asyncio.wait(waiting[:2])
    assert order == [0, 1]
    turns.give_back()
    await waiting[2]
    turns.give_back()
    assert turns.take()


@pytest.mark.parametrize("given_before", [False, True])
async def test_who_is_cancelled_in_line_leaves_his_turn_to_the_next(given_before: bool) -> None:
    turns = Turns(1)
    assert turns.take()
    first, second = (asyncio.create_task(turns.wait()) for _ in range(2))
    await asyncio.sleep(0)
    if given_before:
        turns.give_back()
        first.cancel()  # the turn is his already, and he does not know it yet
    else:
        first.cancel()
        turns.give_back()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert not turns.take()
    turns.give_back()
    assert turns.take()
