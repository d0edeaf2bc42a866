"""The cache of one server: open shards, reads, fills, maintenance (DESIGN.md §4).

Reads return encoded bytes ready to send, or None on a miss, and cost a look-up or two. Everything is synchronous;
``now`` is any monotonic clock in seconds, the same one throughout. Ids must be valid (`tao.model.ids.check_id`).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Final, cast

from tao.cache.answers import edges_answer, range_answer, time_range_answer
from tao.cache.outcomes import (
    Applied,
    ArenaFigures,
    CachedKey,
    EdgesAnswer,
    FloorFigures,
    KeySample,
    Stored,
    Ticket,
)
from tao.cache.settings import ArenaChoice, CacheSettings
from tao.cache.shard import CachedShard
from tao.cache.tables import Arenas
from tao.model.changes import (
    Change,
    ListChange,
    Message,
    ObjectChange,
    ObjectInvalidation,
    ShardInvalidation,
)
from tao.model.edge_block import COMPLETE, empty_block
from tao.model.graph import MAX_TIME, decode_count
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import epoch_of

_N_FLAGS: Final = struct.Struct("<II").unpack_from
_N_FLAGS_AT: Final = 16  # in an edge block


class GraphCache:
    """Caches what belongs to open shards; reads of a closed shard miss and fills of it are passed over."""

    __slots__ = ("_arenas", "_generation", "_mark_slots", "_marks", "_overflows_of_closed", "_settings", "_shards")

    def __init__(self, settings: CacheSettings, types: ArenaChoice) -> None:
        self._settings = settings
        self._arenas = Arenas(settings, types)
        self._marks = self._arenas.marks
        self._mark_slots = settings.mark_slots
        self._shards: dict[int, CachedShard] = {}
        self._generation = 0
        self._overflows_of_closed = 0

    def set_types(self, types: ArenaChoice) -> None:
        """Follow a new schema. Lists whose arena changed are dropped; limits hold from the next change or fill on."""
        self._arenas.types = types
        for shard in self._shards.values():
            shard.retire_moved_lists()

    # shards

    def open_shard(self, shard: int, version_epoch: int = 0) -> None:
        """Begin to cache the shard, with nothing. An open one only learns the epoch. 0: not known yet."""
        known = self._shards.get(shard)
        if known is None:
            self._shards[shard] = CachedShard(
                shard, self._next_generation(), version_epoch, self._arenas, self._settings
            )
        else:
            self._learn(known, version_epoch)

    def close_shard(self, shard: int) -> None:
        """Forget the shard, floors too. Its memory is freed by `reclaim_step`."""
        known = self._shards.pop(shard, None)
        if known is not None:
            self._overflows_of_closed += known.floors.overflows
            known.retire()

    def is_open(self, shard: int) -> bool:
        return shard in self._shards

    def open_shards(self) -> list[int]:
        return list(self._shards)

    def version_epoch(self, shard: int) -> int:
        """The highest version epoch heard of the shard; 0 for a closed one."""
        known = self._shards.get(shard)
        return 0 if known is None else known.version_epoch

    def bump_shard(self, shard: int) -> None:
        """Bulk invalidation: every entry and every ticket of the shard is void. O(1) in the number of entries."""
        known = self._shards.get(shard)
        if known is not None:
            known.bump(self._next_generation())

    def reclaim_step(self) -> bool:
        """Free a bounded number of entries of dropped tables. True: more is left, call again soon."""
        left = [arena.reclaim(self._settings.reclaim_entries_per_step) for arena in self._arenas.all().values()]
        return any(left)

    def forget_old_floors(self, now: float) -> None:
        """Also in shards that hear of nothing new. To be called now and then; half of ``floor_seconds`` is right."""
        for shard in self._shards.values():
            shard.floors.rotate(now)

    # reads

    def object(self, id: int, minimum: int = 0) -> bytes | None:  # noqa: A002 - the word of the model
        """The object value of ``id``, at ``minimum`` or later; also that of an object known to be absent."""
        shard = self._shards.get(id >> SHARD_SHIFT)
        if shard is None:
            return None
        value = shard.objects.get(id) or (shard.held_object(id) if shard.other_objects else None)
        if not value or (minimum and int.from_bytes(value[:8], "little") < minimum):
            return None
        self._marks[id % self._mark_slots] = 1
        return value

    def objects(self, ids: Sequence[int]) -> list[bytes | None]:
        """`object` for each of the ids."""
        shards = self._shards
        try:
            values = [shards[key >> SHARD_SHIFT].objects[key] for key in ids]
        except KeyError:
            values = []
        if not values or not all(values):
            return list(map(self.object, ids))
        # All are there, as nearly always: without a call for each, a hundred cost half.
        marks, mark_slots = self._marks, self._mark_slots
        for key in ids:
            marks[key % mark_slots] = 1
        return cast("list[bytes | None]", values)

    def count(self, id1: int, atype: int, minimum: int = 0) -> bytes | None:
        """The count value of the list."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        if shard is None or atype not in shard.counts:
            return None
        value = shard.counts[atype].get(id1) or shard.lists[atype].get(id1, b"")[:16]
        if not value or (minimum and int.from_bytes(value[:8], "little") < minimum):
            return None
        self._marks[(id1 + atype) % self._mark_slots] = 1
        return value

    def range(self, id1: int, atype: int, pos: int, limit: int, minimum: int = 0) -> bytes | None:
        """An edge block of the edges at ``pos … pos+limit-1``."""
        block = self._block(id1, atype, minimum)
        if block is None:
            count = self.count(id1, atype, minimum)
            return self._beyond(count, pos) if count is not None else None
        if pos == 0:
            n, flags = _N_FLAGS(block, _N_FLAGS_AT)
            if n <= limit and flags & COMPLETE:
                return block
        return range_answer(block, pos, limit)

    def time_range(self, id1: int, atype: int, high: int, low: int, limit: int, minimum: int = 0) -> bytes | None:
        """An edge block of at most ``limit`` edges with ``high ≥ time ≥ low``."""
        block = self._block(id1, atype, minimum)
        if block is None:
            return self._nothing(id1, atype, minimum)
        return time_range_answer(block, high, low, limit)

    def edges(
        self,
        id1: int,
        atype: int,
        id2s: Sequence[int],
        high: int = MAX_TIME,
        low: int = 0,
        minimum: int = 0,
    ) -> EdgesAnswer | None:
        """The edges to ``id2s`` with ``high ≥ time ≥ low``, and the ids that the cache cannot decide."""
        block = self._block(id1, atype, minimum)
        if block is None:
            nothing = self._nothing(id1, atype, minimum)
            return EdgesAnswer(nothing) if nothing is not None else None
        return edges_answer(block, id2s, high, low)

    def _block(self, id1: int, atype: int, minimum: int) -> bytes | None:
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        if shard is None or atype not in shard.lists:
            return None
        block = shard.lists[atype].get(id1)
        if not block or (minimum and int.from_bytes(block[:8], "little") < minimum):
            return None
        self._marks[(id1 + atype) % self._mark_slots] = 1
        return block

    def _nothing(self, id1: int, atype: int, minimum: int) -> bytes | None:
        """The answer to any query on a list that is known to be empty, by its count alone."""
        count = self.count(id1, atype, minimum)
        return self._beyond(count, 0) if count is not None else None

    @staticmethod
    def _beyond(count_value: bytes, pos: int) -> bytes | None:
        """The empty answer to a range that begins at or after the end of the list."""
        version, count = decode_count(count_value)
        if count == 0:
            return empty_block(version)
        return empty_block(version, count, 0) if pos >= count else None

    # what is held, without a mark of use

    def peek_object(self, id: int) -> bytes | None:  # noqa: A002
        shard = self._shards.get(id >> SHARD_SHIFT)
        return (shard.held_object(id) or None) if shard else None

    def peek_list(self, id1: int, atype: int) -> bytes | None:
        """The prefix held."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        return (shard.held_list(id1, atype) or None) if shard else None

    def peek_count(self, id1: int, atype: int) -> bytes | None:
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        return (shard.held_count(id1, atype) or None) if shard else None

    def floor_of_object(self, id: int, now: float) -> int:  # noqa: A002
        """The highest version known by any means; 0 for a closed shard."""
        return self.object_ticket(id, now).floor

    def floor_of_list(self, id1: int, atype: int, now: float) -> int:
        return self.list_ticket(id1, atype, now).floor

    def sample_keys(self, shard: int, limit: int, after: int = 0) -> KeySample:
        """Up to ``limit`` keys of the shard, from place ``after`` on. What comes or goes between calls may be seen
        twice or not at all."""
        known = self._shards.get(shard)
        keys = (
            CachedKey(table.kind, key, table.atype)
            for table in (known.tables() if known else ())
            for key, value in table.entries.items()
            if value
        )
        found = tuple(islice(keys, after, after + limit))
        return KeySample(found, after + limit if len(found) == limit else None)

    # fills

    def object_ticket(self, id: int, now: float) -> Ticket:  # noqa: A002
        """To be taken before the object is read."""
        shard = self._shards.get(id >> SHARD_SHIFT)
        if shard is None:
            return Ticket("object", id, 0, 0, 0, 0, now)
        return Ticket("object", id, 0, shard.floor(id, 0), shard.generation, shard.version_epoch, now)

    def list_ticket(self, id1: int, atype: int, now: float) -> Ticket:
        """To be taken before the list or its count is read."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        if shard is None:
            return Ticket("list", id1, atype, 0, 0, 0, now)
        floor = shard.floor(id1, atype)
        return Ticket("list", id1, atype, floor, shard.generation, shard.version_epoch, now)

    def is_void(self, ticket: Ticket) -> bool:
        """Whether a bulk invalidation, or the shard's opening or closing, came after the ticket was taken: what it
        brings may be what the invalidation was about."""
        shard = self._shards.get(ticket.id >> SHARD_SHIFT)
        return ticket.generation != (0 if shard is None else shard.generation)

    def store_object(self, ticket: Ticket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Keep an object value that was read under ``ticket`` by someone at ``version_epoch``."""
        shard, outcome = self._accept(ticket, value, version_epoch, now)
        return outcome if shard is None else shard.store_object(ticket, value)

    def store_list(self, ticket: Ticket, block: bytes, version_epoch: int, now: float) -> Stored:
        """Keep an edge block, if it starts at position 0."""
        shard, outcome = self._accept(ticket, block, version_epoch, now)
        return outcome if shard is None else shard.store_list(ticket, block)

    def store_count(self, ticket: Ticket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Keep a count value; ``ticket`` is that of the list."""
        shard, outcome = self._accept(ticket, value, version_epoch, now)
        return outcome if shard is None else shard.store_count(ticket, value)

    def pass_over(self, ticket: Ticket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Hold a value to what is known, as the above do, and keep it not."""
        shard, outcome = self._accept(ticket, value, version_epoch, now)
        return outcome if shard is None else shard.pass_over(ticket, int.from_bytes(value[:8], "little"))

    def _accept(
        self, ticket: Ticket, value: bytes, version_epoch: int, now: float
    ) -> tuple[CachedShard | None, Stored]:
        """The shard when it takes the value; else the reason why not."""
        shard = self._shards.get(ticket.id >> SHARD_SHIFT)
        if shard is None:
            below = int.from_bytes(value[:8], "little") < ticket.floor
            return None, Stored.BELOW_FLOOR if below else Stored.NOT_KEPT
        voided = ticket.generation != shard.generation
        self._learn(shard, version_epoch)
        outcome = shard.accept(ticket, value, version_epoch, now)
        if outcome is Stored.STORED and voided:
            outcome = shard.pass_over(ticket, int.from_bytes(value[:8], "little"))
        return (shard if outcome is Stored.STORED else None), outcome

    # messages and changesets

    def apply(self, change: Change, version_epoch: int, now: float, insert: bool = False) -> Applied:
        """Apply a committed change. ``insert``: also cache what was not (the writer's own tier, write-through): an
        object always, a list when this is its first version."""
        shard = self._shards.get(change.shard)
        if shard is None:
            return Applied.NOT_CACHED
        bumped = self._learn(shard, version_epoch)
        if version_epoch < shard.version_epoch:
            return (
                shard.drop(change.id, 0) if isinstance(change, ObjectChange) else shard.drop(change.id1, change.atype)
            )
        if isinstance(change, ObjectChange):
            applied = shard.apply_object(change, now, insert)
        else:
            applied = shard.apply_list(change, now, insert)
        return Applied.EPOCH_BUMPED if bumped else applied

    def apply_message(self, message: Message, version_epoch: int, now: float, insert: bool = False) -> Applied:
        """Apply any maintenance message."""
        if isinstance(message, ObjectChange | ListChange):
            return self.apply(message, version_epoch, now, insert)
        shard = self._shards.get(message.shard)
        if shard is None:
            return Applied.NOT_CACHED
        bumped = self._learn(shard, version_epoch)
        if isinstance(message, ShardInvalidation):
            shard.bump(self._next_generation())
            return Applied.EPOCH_BUMPED
        key, atype = (message.id, 0) if isinstance(message, ObjectInvalidation) else (message.id1, message.atype)
        if version_epoch < shard.version_epoch:
            return shard.drop(key, atype)
        applied = shard.raise_floor(key, atype, message.version, now)
        return Applied.EPOCH_BUMPED if bumped else applied

    def raise_object_floor(self, id: int, version: int, now: float) -> None:  # noqa: A002
        """The object has been at ``version``, says a token, a peer or a critical read: fills below it are no good, and
        what is held below it is dropped. Not for tokens of an older version epoch: their write may be lost (§8)."""
        self._raise_floor(id, 0, version, now)

    def raise_list_floor(self, id1: int, atype: int, version: int, now: float) -> None:
        """The same for a list and its count."""
        self._raise_floor(id1, atype, version, now)

    def _raise_floor(self, key: int, atype: int, version: int, now: float) -> None:
        shard = self._shards.get(key >> SHARD_SHIFT)
        if shard is not None:
            self._learn(shard, epoch_of(version))
            shard.raise_floor(key, atype, version, now)

    # figures

    def arenas(self) -> list[ArenaFigures]:
        """One line per arena, in the order of the settings. Time: the number of tables."""
        live: Counter[tuple[str, str]] = Counter()
        for shard in self._shards.values():
            for table in shard.tables():
                live[table.arena.name, table.kind] += table.live
        return [
            ArenaFigures(
                name,
                arena.bytes,
                arena.budget_bytes,
                live[name, "object"],
                live[name, "list"],
                live[name, "count"],
                arena.evictions,
            )
            for name, arena in self._arenas.all().items()
        ]

    def floor_figures(self, now: float) -> FloorFigures:
        floors = [shard.floors for shard in self._shards.values()]
        return FloorFigures(
            sum(map(len, floors)),
            self._overflows_of_closed + sum(each.overflows for each in floors),
            sum(each.is_overflowed(now) for each in floors),
        )

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _learn(self, shard: CachedShard, version_epoch: int) -> bool:
        return version_epoch > shard.version_epoch and shard.learn_epoch(version_epoch, self._next_generation())
