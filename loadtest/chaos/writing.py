"""The writes of a run: all operations, of clients in both regions, one at a time for each key.

A write is never repeated here. One whose outcome is unknown rests its key until no deadline allows it to happen any
more and the faults of the time are healed; then a critical read says what became of it, and from then on it is held
to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Final

from loadtest.chaos.history import Fate, Register, Verdict
from loadtest.chaos.readings import HEAD, Key, Kind, Reader
from loadtest.chaos.record import Record
from tao.client import Graph, RetryableError, TaoError
from tao.model.errors import RequestError
from tao.model.ids import SEQUENCE_PER_MS, make_id

_OLD_UNIX_MS: Final = 1_650_000_000_000
"""Ids of that time are nobody's: no object was made then."""
REST_SECONDS: Final = 12.0
"""Longer than the deadlines of a write on all hops together."""
_FAILURE_PAUSE_SECONDS: Final = 0.3
"""On average: a fault refuses writes faster than a well cluster takes them."""
_LIST_WRITES: Final = 2_000
"""Of one list: its edges stay far below what caches hold of a list."""


def absent_ids(shards: int, count: int, chance: Random) -> list[int]:
    """Ids of no object, of all shards in turn; an edge's ends are not looked up."""
    first = chance.randrange(1 << 24)
    return [
        make_id(number % shards, _OLD_UNIX_MS + first + number // SEQUENCE_PER_MS, number % SEQUENCE_PER_MS)
        for number in range(count)
    ]


async def make_keys(graph: Graph, shards: int, per_shard: int, chance: Random, record: Record) -> list[Key]:
    """Objects on every shard; each is also the beginning of an edge and of a list."""
    ids = [await graph.reserve_ids(per_shard, shard=shard) for shard in range(shards)]
    objects = [object_id for of_shard in ids for object_id in of_shard]
    await graph.obj_add_many([("user", {"name": "chaos", "home": "0"}, None, object_id) for object_id in objects])
    record.acknowledged += len(objects)
    keys = [Key(Kind.OBJECT, object_id, 0, Register(0)) for object_id in objects]
    for object_id in objects:
        ends = absent_ids(shards, 1 + _LIST_WRITES, chance)
        keys.append(Key(Kind.EDGE, object_id, ends[0], Register(None)))
        keys.append(Key(Kind.LIST, object_id, 0, Register(None), ends=ends[1:]))
    return keys


class Writing:
    """Writers of many clients."""

    def __init__(self, keys: list[Key], record: Record, chance: Random) -> None:
        self._keys: Final = keys
        self._record: Final = record
        self._chance: Final = chance

    async def one(self, writer: Reader) -> None:
        """One write, of a key that is free; or what became of an earlier one."""
        place = self._chance.randrange(len(self._keys))
        key = self._keys[place]
        if key.register.busy or (key.kind is Kind.LIST and len(key.register.writes) > len(key.ends)):
            return
        record, register = self._record, key.register
        number = len(register.writes)
        removes = key.kind is Kind.EDGE and register.last.value is not None and self._chance.random() < 0.5
        write = register.begin(None if removes else number, record.now())
        try:
            with writer.graph.recording() as recording:
                await self._write(writer.graph, key, number, removes)
        except TaoError as error:
            unknown = not isinstance(error, RetryableError | RequestError)
            record.failed_write(error, write.began, f"{writer.name}, {key.kind} {key.id}", unknown=unknown)
            if not unknown:
                register.end(write, Fate.REFUSED, record.now())
            else:
                register.end(write, Fate.UNKNOWN, record.now())
                key.rests_until = record.now() + REST_SECONDS
            await asyncio.sleep(2 * _FAILURE_PAUSE_SECONDS * self._chance.random())
            return
        now = record.now()
        register.end(write, Fate.ACKNOWLEDGED, now)
        record.acknowledged += 1
        key.token, key.token_number = recording.token, write.number
        writer.own[place], writer.own_at[place] = write.number, write.began

    async def _write(self, graph: Graph, key: Key, number: int, removes: bool) -> None:
        if key.kind is Kind.OBJECT:
            await graph.obj_update(key.id, {"home": str(number)}, "user")
        elif key.kind is Kind.LIST:
            await graph.assoc_add(key.id, "follows", key.ends[number - 1], number)
        elif not removes:
            await graph.assoc_add(key.id, "likes", key.other, number)
        elif self._chance.random() < 0.5:
            await graph.assoc_delete(key.id, "likes", key.other)
        else:
            await graph.assoc_change_type(key.id, "likes", key.other, "page_likes")

    async def settle(self, graphs: Sequence[Graph]) -> None:
        """Find out what became of writes that have rested long enough, while all is well."""
        record = self._record
        for key in self._keys:
            calm = record.calm_since is not None and record.calm_since + REST_SECONDS < record.now()
            if not calm:
                return
            if key.rests_until and key.rests_until < record.now():
                try:
                    found = await newest(self._chance.choice(graphs), key)
                except TaoError:
                    continue  # another time
                key.rests_until = 0.0
                if key.register.settle(found, record.now()) is not Verdict.RIGHT:
                    record.lose(f"{key.kind} {key.id}: {found} after {key.register.last}")


async def newest(graph: Graph, key: Key, *, critical: bool = True) -> int | None:
    """What the master database holds of a key, or a cache."""
    if key.kind is Kind.OBJECT:
        found = await graph.obj_get(key.id, critical=critical)
        return None if found is None else int(str(found.fields["home"]))
    if key.kind is Kind.EDGE:
        edges = await graph.assoc_get(key.id, "likes", [key.other], critical=critical)
    else:
        edges = await graph.assoc_range(key.id, "follows", 0, HEAD, critical=critical)
    return edges.times[0] if edges else None
