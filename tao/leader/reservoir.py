"""A sample of bounded size of a stream of unknown length, each item as likely as any other, whenever it came.

Li's algorithm L ("Reservoir-sampling algorithms of time complexity O(n(1 + log(N/n)))", 1994): once the reservoir is
full, it is drawn how many items are passed over before the next one takes somebody's place. So most cost nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import exp, log, log1p
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
Offered = TypeVar("Offered")


class Reservoir(Generic[Item]):
    """``items``: the sample of what has been offered since it was made or emptied."""

    __slots__ = ("_passed_over", "_size", "_threshold", "items")

    def __init__(self, size: int) -> None:
        """``size``: of the sample, at least 1."""
        self._size: Final = size
        self.items: list[Item] = []
        self.empty()

    def empty(self) -> None:
        """Begin another stream."""
        self.items.clear()
        self._passed_over = 0
        self._threshold = 1.0

    def chosen(self, offered: Sequence[Offered]) -> Iterator[Offered]:
        """Those of the next ones that come into the sample; each is to be `put`, in whatever form it is kept."""
        at = self._passed_over
        while at < len(offered):
            yield offered[at]
            at += 1
            if len(self.items) == self._size:
                self._threshold *= exp(log(_chance()) / self._size)
                at += int(log(_chance()) / log1p(-self._threshold))
        self._passed_over = at - len(offered)

    def put(self, item: Item) -> None:
        """In the place of another one when there is no room."""
        if len(self.items) < self._size:
            self.items.append(item)
        else:
            self.items[random.randrange(self._size)] = item


def _chance() -> float:
    """Above 0 and below 1."""
    return random.random() or 0.5
