"""Waiting for what other processes bring about: nothing there sets an event of this one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tao.model.errors import OperatorError


async def until(condition: Callable[[], Awaitable[bool]], pause_seconds: float) -> None:
    """Return once the condition holds; the caller has the time limit."""
    while not await condition():  # noqa: ASYNC110 - see the module
        await asyncio.sleep(pause_seconds)


async def within(seconds: float, condition: Callable[[], Awaitable[bool]], pause_seconds: float, what: str) -> None:
    """As `until`. Raises `OperatorError` saying ``what`` did not come in time."""
    try:
        async with asyncio.timeout(seconds):
            await until(condition, pause_seconds)
    except TimeoutError:
        raise OperatorError(f"{what} within {seconds:g} s") from None
