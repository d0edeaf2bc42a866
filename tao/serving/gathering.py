"""What is asked for in one tick of the loop goes out as one batch per destination (DESIGN.md §5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

Destination = TypeVar("Destination", bound=Hashable)
Item = TypeVar("Item")


class Gathering(Generic[Destination, Item]):
    """Holds items until the loop has run what is ready now, then hands each destination's over, at most
    ``max_items`` at a time."""

    def __init__(self, hand_over: Callable[[Destination, list[Item]], None], max_items: int) -> None:
        self._hand_over: Final = hand_over
        self._max_items: Final = max_items
        self._call_soon: Final = asyncio.get_running_loop().call_soon
        self._waiting: dict[Destination, list[Item]] = {}

    def add(self, destination: Destination, item: Item) -> None:
        """Hand the item over at the end of this tick, or now when that fills a batch."""
        if not self._waiting:
            self._call_soon(self._flush)
        items = self._waiting.setdefault(destination, [])
        items.append(item)
        if len(items) >= self._max_items:
            self._waiting[destination] = []
            self._hand_over(destination, items)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for destination, items in waiting.items():
            if items:
                self._hand_over(destination, items)
