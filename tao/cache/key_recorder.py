"""The interface through which a cache reports what happens to its keys.

Hits are not reported. Fills, messages and evictions are reported by one call each, so an implementation must take well
under a microsecond. Events are named by `tao.cache.outcomes` and by the constants here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

import msgspec

FILL_BEGUN: Final = "fill_begun"
"""A fill ticket was taken; the version is the lowest that the fill must have."""
LEARNT: Final = "learnt"
"""An answer that is not kept raised the version floor."""
EVICTED: Final = "evicted"
OPENED: Final = "opened"
CLOSED: Final = "closed"
INVALIDATED: Final = "voided"
"""A bulk invalidation of the whole shard. (The text travels to commands of other releases, so it stays.)"""
TYPES_INVALIDATED: Final = "types_voided"
"""A bulk invalidation of some types of the shard."""
EPOCH_RAISED: Final = "epoch_raised"
"""A higher version epoch became known; the version is that epoch."""


class KeyEvent(msgspec.Struct, frozen=True):
    """An event of a key, or of its shard as a whole. ``cause`` names what brought it about and may be empty."""

    unix_ms: int
    event: str
    version: int
    cause: str
    of_shard: bool


class KeyHistory(msgspec.Struct, frozen=True):
    """Events in order of time. Events before ``since_unix_ms`` may be forgotten."""

    events: tuple[KeyEvent, ...]
    since_unix_ms: int


class KeyRecorder(Protocol):
    """Records events within bounds."""

    cause: str
    """The cause that is recorded with the next events. Restore the former value before other code runs, as `caused_by`
    does for a block."""

    def record_key(self, key: int, atype: int, event: str, version: int) -> None:
        """Record an event of an object (``atype`` 0), or of a list and its count."""

    def record_shard(self, shard: int, event: str, version: int) -> None:
        """Record an event of everything in the shard."""

    def caused_by(self, cause: str) -> AbstractContextManager[object]:
        """Give the events that are recorded in the block this cause. The block must not await: other tasks must not run
        meanwhile."""

    def history_of(self, key: int, atype: int) -> KeyHistory:
        """Return the recorded events of the key and of its shard."""


class NoRecorder:
    """A recorder that records nothing."""

    cause = ""

    def record_key(self, key: int, atype: int, event: str, version: int) -> None: ...

    def record_shard(self, shard: int, event: str, version: int) -> None: ...

    def caused_by(self, cause: str) -> AbstractContextManager[object]:
        return nullcontext()

    def history_of(self, key: int, atype: int) -> KeyHistory:
        return KeyHistory((), 0)
