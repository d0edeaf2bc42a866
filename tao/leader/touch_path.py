"""Keys that someone else changed get a new version from their owner, lists the count of their edges (DESIGN.md §7).

A *touch* is a write like any other: under the lanes, the shard's lock and the generation, in the order of the shard's
own commits. What it writes is seen in the binlog as a version that rises alone, and that is how every region's caches
learn of it: so nobody takes it for one more foreign change. Keys travel by the hundred in one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

import msgspec

from tao.cache import GraphCache
from tao.model.errors import TaoError
from tao.model.relay import Touch, TouchKind
from tao.model.writes import TouchKeys


def touched_floor(cache: GraphCache, touch: Touch) -> int:
    """The highest version that the cache has heard of for the key, 0 when it has heard of none."""
    if touch.kind is TouchKind.OBJECT:
        return cache.floor_of_object(touch.id)
    return cache.floor_of_list(touch.id, touch.atype)


class TouchPath:
    """Touches, as writes of this leader."""

    def __init__(
        self,
        commit: Callable[[TouchKeys, float], Awaitable[object]],
        floor: Callable[[Touch], int],
        keys_per_write: int,
    ) -> None:
        """``commit``: do the write until a time of the clock. ``floor``: the highest version heard of for a key."""
        self._commit: Final = commit
        self._floor: Final = floor
        self._keys_per_write: Final = keys_per_write
        self.keys = 0
        """Keys that got a new version."""
        self.failed = 0
        """Keys that did not, and are told again."""

    async def touch(self, touches: Iterable[Touch], deadline: float) -> None:
        """Give all of these keys new versions. Raises the first `TaoError` when that of one or more is not known to
        be done; another attempt harms nobody."""
        writes = list(self._writes(touches))
        results = await asyncio.gather(*(self._commit(write, deadline) for write in writes), return_exceptions=True)
        failure: BaseException | None = None
        for write, result in zip(writes, results, strict=True):
            if isinstance(result, BaseException):
                self.failed += len(write.touches)
                # What is no TaoError is a fault here, and must not hide behind a database that is busy.
                if failure is None or not isinstance(result, TaoError):
                    failure = result
            else:
                self.keys += len(write.touches)
        if failure is not None:
            raise failure

    def _writes(self, touches: Iterable[Touch]) -> Iterator[TouchKeys]:
        by_shard: dict[int, dict[tuple[int, int], Touch]] = {}
        for touch in touches:
            keys = by_shard.setdefault(touch.shard, {})
            key = touch.id, touch.atype
            known = keys.get(key)
            version = max(touch.version, self._floor(touch) if known is None else known.version)
            keys[key] = msgspec.structs.replace(touch, version=version)
        size = self._keys_per_write
        for shard, keys in by_shard.items():
            merged = tuple(keys.values())
            for start in range(0, len(merged), size):
                yield TouchKeys(shard, merged[start : start + size])
