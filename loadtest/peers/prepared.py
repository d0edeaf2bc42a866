"""A contestant's requests, drawn before its turn: what is measured is the client, not the dice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from operator import length_hint
from typing import Final

from loadtest.published.requests import Request

_AT_A_TIME: Final = 1_000
"""Drawn at once when a turn asks for more than was prepared."""


class Prepared(Iterator[Request]):
    """An endless stream, some of it drawn ahead."""

    def __init__(self, source: Iterator[Request], note: Callable[[Request], None]) -> None:
        """``note``: told of every request that was asked, when the next are prepared: while nobody is measured, unless
        a turn asks for more than was drawn for it."""
        self._source: Final = source
        self._note: Final = note
        self._drawn: list[Request] = []
        self._left: Iterator[Request] = iter(self._drawn)

    def __next__(self) -> Request:
        for request in self._left:
            return request
        self.prepare(_AT_A_TIME)
        return next(self._left)

    def prepare(self, count: int) -> None:
        """Have ``count`` requests drawn at least."""
        self.settle()
        self._drawn += islice(self._source, max(0, count - len(self._drawn)))
        self._left = iter(self._drawn)

    def settle(self) -> None:
        """Note what was asked so far."""
        asked = len(self._drawn) - length_hint(self._left)
        for request in self._drawn[:asked]:
            self._note(request)
        self._drawn = self._drawn[asked:]
        self._left = iter(self._drawn)
