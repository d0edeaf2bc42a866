"""Waiting for conditions that other processes bring about, which set no event of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from tao.model.errors import OperatorError

Result = TypeVar("Result")


async def until(condition: Callable[[], Awaitable[bool]], pause_seconds: float) -> None:
    """Return once the condition holds; the caller sets the time limit."""
    while not await condition():  # noqa: ASYNC110 - see the module
        await asyncio.sleep(pause_seconds)


async def within(seconds: float, condition: Callable[[], Awaitable[bool]], pause_seconds: float, what: str) -> None:
    """Wait as `until` does, for a bounded time. Raises `OperatorError` with ``what`` when it is over."""
    try:
        async with asyncio.timeout(seconds):
            await until(condition, pause_seconds)
    except TimeoutError:
        raise OperatorError(f"{what} within {seconds:g} s") from None


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all, run side by side. The first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
