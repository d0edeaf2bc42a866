"""What this process has written a moment ago, so that its reads ask for no less (DESIGN.md §8).

A write is in the caches of its tier before it is answered; but the next read may meet another tier after a failover,
another clone, or another region. So every write says which versions it has reached. The graph keeps them for a while,
attaches them to its own reads of those keys, and makes tokens of them that go wherever the user's next request goes.

Keys are what a read's row begins with: ``(id,)`` for an object, ``(id1, atype)`` for a list.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from tao.client.columns import Row
from tao.model.errors import InvalidArgument
from tao.model.graph import ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import MAX_KEYS, WriteToken
from tao.wire.convert import token_of
from tao.wire.v1 import session_pb2 as pb

After = WriteToken | str | None
"""What a read may be told to be no older than: a token, its text, or nothing."""

CRITICAL: Final = -1
"""In the place of a minimum: only the master database is sure to be new enough."""


class Recording:
    """The writes made while a `recording()` block runs. ``token`` names them: those so far while it runs, and all of
    them afterwards."""

    __slots__ = ("_outer", "_owner", "token")

    def __init__(self, owner: OwnWrites, outer: Recording | None) -> None:
        self._owner = owner
        self._outer = outer
        self.token = WriteToken()

    def _note(self, owner: OwnWrites, token: WriteToken) -> None:
        if owner is self._owner:
            self.token = self.token.merged(token)
        if self._outer is not None:
            self._outer._note(owner, token)


# One for all graphs, because a context keeps the variables it knows for ever; a recording knows its graph. A context
# variable, so that a request's recording holds what its own tasks write and nothing of its neighbours.
_recording: ContextVar[Recording | None] = ContextVar("tao_recording", default=None)


class OwnWrites:
    """``versions``: key → the version that this graph's writes have reached; bounded by number and age. Empty in a
    process that only reads, where looking whether it is empty is all that it costs. ``unpaired``: those of the keys of
    which a write has left its inverse to repair."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_keys: int, seconds: float) -> None:
        self._loop: Final = loop
        self._max_keys: Final = max_keys
        self._seconds: Final = seconds
        # The same keys, the oldest write first. A plain dictionary takes ever longer to find the first of its keys.
        self._written_at: OrderedDict[Row, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self.versions: Final[dict[Row, int]] = {}
        self.unpaired: Final[set[Row]] = set()

    def note(self, results: Sequence[pb.WriteResult]) -> None:
        """Writes have succeeded, on behalf of the task that calls."""
        now = self._loop.time()
        for result in results:
            for key_id, atype, version in zip(
                result.changed_ids, result.changed_atypes, result.changed_versions, strict=False
            ):
                key = (key_id, atype) if atype else (key_id,)
                self.versions[key] = max(version, self.versions.get(key, 0))
                self._written_at[key] = now
                self._written_at.move_to_end(key)
                if result.inverse_pending:
                    self.unpaired.add(key)
        while len(self.versions) > self._max_keys:
            self._drop_oldest()
        if self.versions and self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._expire)
        recording = _recording.get()
        if recording is not None:
            recording._note(self, token_of(results))

    def forget(self, key: Row, version: int) -> None:
        """The write that took the key to ``version`` is lost, and its reader has been told; unless a later one came."""
        if self.versions.get(key) == version:
            del self.versions[key], self._written_at[key]
            self.unpaired.discard(key)

    def token(self) -> WriteToken:
        """Names what is kept."""
        keys = list(self._written_at)
        # Of thousands of keys a token names few: those that it would drop are not handed to it.
        named = [(key[0], key[1] if len(key) > 1 else 0, self.versions[key]) for key in keys[-MAX_KEYS:]]
        return WriteToken(named, {key[0] >> SHARD_SHIFT for key in keys[:-MAX_KEYS]})

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Collect the writes of this task, and of those it starts, while the block runs."""
        recording = Recording(self, _recording.get())
        entered = _recording.set(recording)
        try:
            yield recording
        finally:
            _recording.reset(entered)

    def close(self) -> None:
        """Forget everything."""
        self.versions.clear()
        self._written_at.clear()
        self.unpaired.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._written_at:
            # The same sum as the timer's: another one may round to a moment that never comes.
            expires_at = next(iter(self._written_at.values())) + self._seconds
            if expires_at > now:
                self._timer = self._loop.call_at(expires_at, self._expire)
                break
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest, _ = self._written_at.popitem(last=False)
        del self.versions[oldest]
        self.unpaired.discard(oldest)


class Minimums:
    """What the rows of one operation ask for, by its token and the graph's own writes."""

    __slots__ = ("_own", "_token")

    def __init__(self, after: After, own: dict[Row, int]) -> None:
        """Raises `InvalidArgument` for text that is no token."""
        self._token = _token_in(after)
        self._own = own

    def of(self, row: Row) -> int:
        """The least version that may answer, 0 for any, or `CRITICAL`."""
        minimum = self._own.get(row[:2], 0)
        token = self._token
        if token is None:
            return minimum
        if token.is_critical(row[0] >> SHARD_SHIFT):
            return CRITICAL
        named = token.minimum_of_object(row[0]) if len(row) == 1 else token.minimum_of_list(ListKey(row[0], row[1]))
        return max(minimum, named)


def _token_in(after: After) -> WriteToken | None:
    if after is None or isinstance(after, WriteToken):
        return after
    if not isinstance(after, str):
        raise InvalidArgument(f"after must be a write token or its text, not {type(after).__name__}")
    return WriteToken.from_text(after) if after else None
