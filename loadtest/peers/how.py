"""Where an answer came from."""

from __future__ import annotations

from enum import IntEnum


class How(IntEnum):
    """Where an answer came from; of several keys, the most expensive."""

    HIT = 0
    """Without the database; of tao, out of the follower's memory."""
    JOINED = 1
    """Somebody else was fetching it already, and was waited for."""
    MISS = 2
    """The database was asked; of tao, the follower's leader."""
    UNKNOWN = 3
    """A write, or nobody can tell."""


class Asked:
    """What becomes known of one request while it is answered."""

    __slots__ = ("how",)

    def __init__(self) -> None:
        self.how = How.HIT

    def at_least(self, how: How) -> None:
        """The request has needed this."""
        if how > self.how:
            self.how = how
