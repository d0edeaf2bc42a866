"""Who is told what happens to keys: the seam between a cache and the story of its keys (DESIGN.md §13).

Hits are never told. Fills, messages and evictions are, by one call each, so whoever listens must take well under a
microsecond. The words for what happened are those of `tao.cache.outcomes`, and those here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

import msgspec

FILL_BEGUN: Final = "fill_begun"
"""A fill ticket was taken; the version is the least that the fill must have."""
LEARNT: Final = "learnt"
"""The floor was raised by an answer that is not kept."""
EVICTED: Final = "evicted"
OPENED: Final = "opened"
CLOSED: Final = "closed"
VOIDED: Final = "voided"
"""A bulk invalidation, of the whole shard."""
TYPES_VOIDED: Final = "types_voided"
"""A bulk invalidation of some types of the shard."""
EPOCH_RAISED: Final = "epoch_raised"
"""A higher version epoch was heard of; the version is that epoch."""


class KeyEvent(msgspec.Struct, frozen=True):
    """Something that happened to a key, or to its shard as a whole. ``cause``: who or what brought it; may be empty."""

    unix_ms: int
    event: str
    version: int
    cause: str
    of_shard: bool


class KeyStory(msgspec.Struct, frozen=True):
    """Events in order. Before ``since_unix_ms`` things may have happened that are not remembered."""

    events: tuple[KeyEvent, ...]
    since_unix_ms: int


class Witness(Protocol):
    """Remembers what it is told, within bounds."""

    def tell_key(self, key: int, atype: int, event: str, version: int) -> None:
        """Of an object (``atype`` 0), or of a list and its count."""

    def tell_shard(self, shard: int, event: str, version: int) -> None:
        """Of everything in the shard."""

    def because(self, cause: str) -> AbstractContextManager[object]:
        """What is told within has this cause. For synchronous work only: other tasks must not run meanwhile."""

    def story_of(self, key: int, atype: int) -> KeyStory:
        """What is remembered of the key and of its shard."""


class NoWitness:
    """Remembers nothing."""

    def tell_key(self, key: int, atype: int, event: str, version: int) -> None: ...

    def tell_shard(self, shard: int, event: str, version: int) -> None: ...

    def because(self, cause: str) -> AbstractContextManager[object]:
        return nullcontext()

    def story_of(self, key: int, atype: int) -> KeyStory:
        return KeyStory((), 0)
