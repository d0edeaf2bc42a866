"""Steps of a promotion that are taken at a time: none is under way any more when the next one begins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_One = TypeVar("_One")
_Other = TypeVar("_Other")


async def all_of(*awaitables: Awaitable[_One]) -> list[_One]:
    """Return all results, once all have ended. Raises the first error of them.

    Not before: what follows attaches a server again, which one of them could still stop or detach.
    """
    results: list[_One] = []
    for each in await asyncio.gather(*awaitables, return_exceptions=True):
        if isinstance(each, BaseException):
            raise each
        results.append(each)
    return results


async def both(one: Awaitable[_One], other: Awaitable[_Other]) -> tuple[_One, _Other]:
    """Return the results of two different steps, as `all_of` does."""
    first, second = await asyncio.gather(one, other, return_exceptions=True)
    if isinstance(first, BaseException):
        raise first
    if isinstance(second, BaseException):
        raise second
    return first, second
