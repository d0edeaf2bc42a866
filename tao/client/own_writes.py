"""The recent writes of this process, so that its reads ask for nothing older (read your writes).

A write is in the caches of its tier before it is answered. The next read may still meet a cache without it: another
tier after a failover, another clone, another region. So every write returns the versions that it has reached. The
graph keeps them for a while, attaches them to its own reads of those keys, and makes tokens of them, which travel to
the process that serves the user's next request. Lists that lack the inverse edge of a write are kept as well, until a
read has had it settled (`tao.client.pending_inverses`).

A key is the beginning of a read's row: ``(id,)`` for an object, ``(id1, atype)`` for a list.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Final

from tao.model.graph import ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.tokens import MAX_KEYS, PendingInverse, PendingShard, WriteToken
from tao.wire.convert import pending_of, token_of
from tao.wire.read_batch import QueryRow, RowKey
from tao.wire.v1 import session_pb2 as pb

MAX_PENDING_OF_LIST: Final = 256
"""Pending inverse edges that are remembered of one list. When there are more, it has one more entry, and this graph's
reads of the list fail until its writes are forgotten."""

CRITICAL: Final = -1
"""A minimum version that only the master database is sure to meet."""


class Recording:
    """The writes made while a `recording` block runs. ``token`` names the writes so far; after the block, all of
    them."""

    __slots__ = ("_inverses", "_outer", "_owner", "_shards", "token")

    def __init__(self, owner: Callable[[], OwnWrites | None], outer: Recording | None) -> None:
        self._owner = owner
        self._outer = outer
        self._inverses: dict[PendingInverse, int] = {}
        self._shards: set[PendingShard] = set()
        self.token = WriteToken()

    def renewed(self, known: WriteToken | None) -> WriteToken:
        """Return a token for the next request: of the writes of this block, and of those that ``known`` names, a token
        from before the block. Pending inverses of ``known`` that reads of the block have had written are left out; the
        token names the versions of their lists in their place."""
        return self.token if known is None else known.settled(self._inverses, self._shards).merged(self.token)

    def _settled(
        self, owner: OwnWrites, inverses: Mapping[PendingInverse, int], shards: Iterable[PendingShard]
    ) -> None:
        if owner is self._owner():
            self._inverses.update(inverses)
            self._shards.update(shards)
        if self._outer is not None:
            self._outer._settled(owner, inverses, shards)

    def _add(self, owner: OwnWrites, token: WriteToken) -> None:
        if owner is self._owner():
            self.token = self.token.merged(token)
        if self._outer is not None:
            self._outer._add(owner, token)


# One variable serves all graphs, because a context keeps every variable it has seen for ever; a recording knows its
# graph. It is a context variable so that the recording of one request holds what that request's tasks write, and
# nothing of other requests.
_recording: ContextVar[Recording | None] = ContextVar("tao_recording", default=None)


@contextmanager
def recording_of(owner: Callable[[], OwnWrites | None]) -> Iterator[Recording]:
    """Collect the writes of one graph, of this task and of the tasks it starts, while the block runs. ``owner`` returns
    the own writes of that graph, None while it is not open."""
    recording = Recording(owner, _recording.get())
    entered = _recording.set(recording)
    try:
        yield recording
    finally:
        _recording.reset(entered)


class OwnWrites:
    """The versions that this graph's recent writes have reached, bounded by number and age.

    ``versions`` maps keys to versions. It is empty in a process that only reads, where checking that is the only cost.
    ``inverse_pending`` holds the keys whose last write has left its inverse edge pending. ``pending`` maps the lists
    that lack such edges to what they lack, each with the number of the last write that left it pending, or 0 once it is
    written and the list's version is not known; each list has an entry in ``versions``, too."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_keys: int, seconds: float) -> None:
        """Start empty. ``max_keys`` bounds the number of keys, ``seconds`` how long a write is remembered."""
        self._loop: Final = loop
        self._max_keys: Final = max_keys
        self._seconds: Final = seconds
        # The same keys, oldest write first. Finding the first key of a plain dictionary that is emptied from its front
        # takes longer and longer.
        self._written_at: OrderedDict[RowKey, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self.versions: Final[dict[RowKey, int]] = {}
        self.inverse_pending: Final[set[RowKey]] = set()
        self.pending: Final[dict[RowKey, dict[PendingInverse, int]]] = {}
        self.writes_left_pending = 0
        """How many writes have left an inverse pending."""

    def record(self, results: Sequence[pb.WriteResult]) -> None:
        """Remember writes that have succeeded, and add them to the recording of the calling task."""
        now = self._loop.time()
        for result in results:
            for key_id, atype, version in zip(
                result.changed_ids, result.changed_atypes, result.changed_versions, strict=False
            ):
                key = (key_id, atype) if atype else (key_id,)
                self._reached(key, version, now)
                if result.inverse_pending:
                    self.inverse_pending.add(key)
            self.writes_left_pending += bool(result.pending)
            for pending in pending_of(result.pending):
                self._reached(pending[:2], 0, now)
                missing = self.pending.setdefault(pending[:2], {})
                if pending in missing or len(missing) <= MAX_PENDING_OF_LIST:
                    missing[pending] = self.writes_left_pending
        while len(self.versions) > self._max_keys:
            self._drop_oldest()
        if self.versions and self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._expire)
        recording = _recording.get()
        if recording is not None:
            recording._add(self, token_of(results))

    def _reached(self, key: RowKey, version: int, now: float) -> None:
        self.versions[key] = max(version, self.versions.get(key, 0))
        self._written_at[key] = now
        self._written_at.move_to_end(key)

    def settled(self, inverses: Mapping[PendingInverse, int], shards: Collection[PendingShard], before: int) -> None:
        """Take note that these inverse edges are written, and everything between these pairs of shards. ``inverses``
        maps to the version of the list that has the edge, 0 where that is not known. ``before`` is
        `writes_left_pending` when the settlement began: what later writes have left pending is not covered."""
        for pending, version in inverses.items():
            key = pending[:2]
            left = self.pending.get(key)
            if left is None or pending not in left:
                continue
            is_covered = left[pending] <= before
            if version:
                self._reached(key, version, self._loop.time())
                if is_covered:
                    del left[pending]
                if not left:
                    del self.pending[key]
            elif is_covered:
                left[pending] = 0
        recording = _recording.get()
        if recording is not None:
            recording._settled(self, inverses, shards)

    def forget(self, key: RowKey, version: int) -> None:
        """Forget the write that took the key to ``version``, unless a later write followed. Call it when that write is
        lost and its reader has received the error."""
        if self.versions.get(key) == version:
            del self.versions[key], self._written_at[key]
            self.inverse_pending.discard(key)
            self.pending.pop(key, None)

    def token(self) -> WriteToken:
        """Return a token that names all writes that are remembered."""
        keys = list(self._written_at)
        # A token names the newest keys, and only the shards of the others, so the others are not handed to it.
        named = [(key[0], key[1] if len(key) > 1 else 0, self.versions[key]) for key in keys[-MAX_KEYS:]]
        return WriteToken(
            named,
            {key[0] >> SHARD_SHIFT for key in keys[:-MAX_KEYS]},
            pending=chain.from_iterable(self.pending.values()),
        )

    def recording(self) -> AbstractContextManager[Recording]:
        """Collect the writes of this task, and of the tasks it starts, while the block runs."""
        return recording_of(lambda: self)

    def close(self) -> None:
        """Forget everything."""
        self.versions.clear()
        self._written_at.clear()
        self.inverse_pending.clear()
        self.pending.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._written_at:
            # The sum is computed as for the timer: another order of additions may round to a moment that never comes.
            expires_at = next(iter(self._written_at.values())) + self._seconds
            if expires_at > now:
                self._timer = self._loop.call_at(expires_at, self._expire)
                break
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest, _ = self._written_at.popitem(last=False)
        del self.versions[oldest]
        self.inverse_pending.discard(oldest)
        self.pending.pop(oldest, None)


class MinimumVersions:
    """The lowest versions that may answer the rows of one operation, by its token and the graph's own writes."""

    __slots__ = ("_own", "_token")

    def __init__(self, token: WriteToken | None, own: dict[RowKey, int]) -> None:
        self._token = token
        self._own = own

    def of(self, row: QueryRow) -> int:
        """Return the lowest version that may answer a row, 0 for any version, or `CRITICAL`."""
        minimum = self._own.get(row[:2], 0)
        token = self._token
        if token is None:
            return minimum
        if token.is_critical(row[0] >> SHARD_SHIFT):
            return CRITICAL
        named = token.minimum_of_object(row[0]) if len(row) == 1 else token.minimum_of_list(ListKey(row[0], row[1]))
        return max(minimum, named)
