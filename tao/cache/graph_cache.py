"""The cache of one server: open shards, reads, fills, maintenance (DESIGN.md §4).

Reads return encoded bytes ready to send, or None on a miss, and cost a look-up or two. Everything is synchronous;
``now`` is any monotonic clock in seconds, the same one throughout. Ids must be valid (`tao.model.ids.check_id`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from tao.cache import witness as events
from tao.cache.answers import Hits, edges_answer, filtered_answer
from tao.cache.outcomes import (
    Applied,
    ArenaFigures,
    EdgesAnswer,
    FloorFigures,
    KeySample,
    Stored,
    Ticket,
)
from tao.cache.settings import ArenaChoice, CacheSettings
from tao.cache.shard import CachedShard
from tao.cache.survey import arena_figures, floor_figures, sample_keys
from tao.cache.tables import Arenas
from tao.cache.witness import NoWitness, Witness
from tao.model.changes import (
    Change,
    ListChange,
    Message,
    ObjectChange,
    ObjectInvalidation,
    ShardInvalidation,
)
from tao.model.graph import MAX_TIME, version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import epoch_of


class GraphCache:
    """Caches what belongs to open shards; reads of a closed shard miss and fills of it are passed over."""

    __slots__ = ("_arenas", "_generation", "_hits", "_old_overflows", "_settings", "_shards",
                 "denials", "dropped", "not_kept", "witness")  # fmt: skip

    def __init__(self, settings: CacheSettings, types: ArenaChoice, witness: Witness | None = None) -> None:
        """``witness`` is told what happens to keys, hits excepted; None: nobody is."""
        self._settings = settings
        self.witness: Witness = NoWitness() if witness is None else witness
        self._arenas = Arenas(settings, types, self.witness)
        self._shards: dict[int, CachedShard] = {}
        self._hits = Hits(self._shards, self._arenas.credit)
        self._generation = 0
        self._old_overflows = 0
        self.denials = 0  # queries for edges that a membership filter answered, wholly or in the end
        self.dropped = 0  # entries that a change or message found older than it could build upon
        self.not_kept = 0  # fills that were to be kept and were not, those too large for their arena among them

    def on_shrunk(self, tell: Callable[[int, int, int, int], None]) -> None:
        """``tell(id1, atype, before, left)``: a change took a prefix from so many edges to so many of a longer list."""
        self._arenas.tell_shrunk = tell

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
            self.witness.tell_shard(shard, events.OPENED, version_epoch)
        else:
            self._learn(known, version_epoch)

    def close_shard(self, shard: int) -> None:
        """Forget the shard, floors too. Its memory is freed by `reclaim_step`."""
        known = self._shards.pop(shard, None)
        if known is not None:
            self._old_overflows += known.floors.overflows
            known.retire()
            self.witness.tell_shard(shard, events.CLOSED, known.version_epoch)

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
            self.witness.tell_shard(shard, events.VOIDED, known.version_epoch)

    def void_types(self, shard: int, otypes: Sequence[int], atypes: Sequence[int]) -> None:
        """Bulk invalidation of lists and counts of ``atypes``, and of the objects of all types that lie in the arenas
        of ``otypes``, absent ones too: they share tables. Every ticket of the shard is void. O(1) in the number of
        entries."""
        known = self._shards.get(shard)
        if known is not None:
            known.void_types(otypes, atypes, self._next_generation())
            self.witness.tell_shard(shard, events.TYPES_VOIDED, known.version_epoch)

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
        return self._hits.object(id, minimum)

    def objects(self, ids: Sequence[int]) -> list[bytes | None]:
        """`object` for each of the ids."""
        return self._hits.objects(ids)

    def count(self, id1: int, atype: int, minimum: int = 0) -> bytes | None:
        """The count value of the list."""
        return self._hits.count(id1, atype, minimum)

    def range(self, id1: int, atype: int, pos: int, limit: int, minimum: int = 0) -> bytes | None:
        """An edge block of the edges at ``pos … pos+limit-1``."""
        return self._hits.range(id1, atype, pos, limit, minimum)

    def time_range(
        self, id1: int, atype: int, high: int, low: int, limit: int, minimum: int = 0, below_id2: int = 0
    ) -> bytes | None:
        """An edge block of at most ``limit`` edges with ``high ≥ time ≥ low``; see `time_range_answer`."""
        return self._hits.time_range(id1, atype, high, low, limit, minimum, below_id2)

    def edge(
        self, id1: int, atype: int, id2: int, high: int = MAX_TIME, low: int = 0, minimum: int = 0
    ) -> bytes | None:
        """`edges` for one id: it is decided, or None."""
        block = self._hits.edge(id1, atype, id2, high, low, minimum)
        if block is not None:
            return block
        answer = self._filtered(None, id1, atype, (id2,), minimum)
        return None if answer is None or answer.missing else answer.block

    def edges(
        self, id1: int, atype: int, id2s: Sequence[int], high: int = MAX_TIME, low: int = 0, minimum: int = 0
    ) -> EdgesAnswer | None:
        """The edges to ``id2s`` with ``high ≥ time ≥ low``, and the ids that the cache cannot decide."""
        block = self._hits.block(id1, atype, minimum)
        if block is None:
            nothing = self._hits.range(id1, atype, 0, 0, minimum)  # by the count, when it is 0
            return EdgesAnswer(nothing) if nothing is not None else self._filtered(None, id1, atype, id2s, minimum)
        answer = edges_answer(block, id2s, high, low)
        if answer is not None and not answer.missing:
            return answer
        return self._filtered(answer, id1, atype, id2s, minimum)

    def _filtered(
        self, known: EdgesAnswer | None, id1: int, atype: int, id2s: Sequence[int], minimum: int
    ) -> EdgesAnswer | None:
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        held = shard.filters.get(id1, atype) if shard is not None else None
        if held is None or held.version < minimum:
            return known
        self._hits.use(id1 + atype)
        answer = filtered_answer(known, id2s, held)
        self.denials += answer is not None and not answer.missing
        return answer

    def filter_shard(self, shard: int) -> CachedShard | None:
        """Where the filters of a shard are built; None: it is not open."""
        return self._shards.get(shard)

    # what is held, without a use

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

    def floor_of_object(self, id: int) -> int:  # noqa: A002
        """The highest version known by any means; 0 for a closed shard."""
        return self.floor_of_list(id, 0)

    def floor_of_list(self, id1: int, atype: int) -> int:
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        return 0 if shard is None else shard.floor(id1, atype)

    def sample_keys(self, shard: int, limit: int, after: int = 0, stride: int = 1) -> KeySample:
        """Every ``stride``-th key of the shard, from place ``after`` on, at most ``limit``. What comes or goes between
        calls may be seen twice or not at all."""
        return sample_keys(self._shards.get(shard), limit, after, stride)

    # fills

    def object_ticket(self, id: int, now: float) -> Ticket:  # noqa: A002
        """To be taken before the object is read."""
        return self._ticket("object", id, 0, now)

    def list_ticket(self, id1: int, atype: int, now: float) -> Ticket:
        """To be taken before the list or its count is read."""
        return self._ticket("list", id1, atype, now)

    def _ticket(self, kind: Literal["object", "list"], key: int, atype: int, now: float) -> Ticket:
        shard = self._shards.get(key >> SHARD_SHIFT)
        if shard is None:
            return Ticket(kind, key, atype, 0, 0, 0, now)
        floor = shard.floor(key, atype)
        self.witness.tell_key(key, atype, events.FILL_BEGUN, floor)
        return Ticket(kind, key, atype, floor, shard.generation, shard.version_epoch, now)

    def is_void(self, ticket: Ticket) -> bool:
        """Whether a bulk invalidation, or the shard's opening or closing, came after the ticket was taken: what it
        brings may be what the invalidation was about."""
        shard = self._shards.get(ticket.id >> SHARD_SHIFT)
        return ticket.generation != (0 if shard is None else shard.generation)

    def store_object(self, ticket: Ticket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Keep an object value that was read under ``ticket`` by someone at ``version_epoch``."""
        shard, outcome = self._accept(ticket, value, version_epoch, now)
        return self._told(ticket, value, outcome if shard is None else shard.store_object(ticket, value))

    def store_list(self, ticket: Ticket, block: bytes, version_epoch: int, now: float) -> Stored:
        """Keep an edge block, if it starts at position 0."""
        shard, outcome = self._accept(ticket, block, version_epoch, now)
        return self._told(ticket, block, outcome if shard is None else shard.store_list(ticket, block))

    def store_count(self, ticket: Ticket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Keep a count value; ``ticket`` is that of the list."""
        shard, outcome = self._accept(ticket, value, version_epoch, now)
        return self._told(ticket, value, outcome if shard is None else shard.store_count(ticket, value))

    def pass_over(self, ticket: Ticket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Hold a value to what is known, as the above do, and keep it not."""
        shard, outcome = self._accept(ticket, value, version_epoch, now)
        if shard is not None:
            outcome = shard.pass_over(ticket, version_of(value))
        self.witness.tell_key(ticket.id, ticket.atype, outcome, version_of(value))
        return outcome

    def _told(self, ticket: Ticket, value: bytes, outcome: Stored) -> Stored:
        self.not_kept += outcome is Stored.NOT_KEPT
        self.witness.tell_key(ticket.id, ticket.atype, outcome, version_of(value))
        return outcome

    def _accept(
        self, ticket: Ticket, value: bytes, version_epoch: int, now: float
    ) -> tuple[CachedShard | None, Stored]:
        """The shard when it takes the value; else the reason why not."""
        shard = self._shards.get(ticket.id >> SHARD_SHIFT)
        if shard is None:
            below = version_of(value) < ticket.floor
            return None, Stored.BELOW_FLOOR if below else Stored.NOT_KEPT
        voided = ticket.generation != shard.generation
        self._learn(shard, version_epoch)
        outcome = shard.accept(ticket, value, version_epoch, now)
        if outcome is Stored.STORED and voided:
            outcome = shard.pass_over(ticket, version_of(value))
        return (shard if outcome is Stored.STORED else None), outcome

    # messages and changesets

    def apply(self, change: Change, version_epoch: int, now: float, insert: bool = False) -> Applied:
        """Apply a committed change. ``insert``: also cache what was not (write-through), an object or a list's first
        version; only when all that followed it came while the shard was open, and within ``floor_seconds``."""
        shard = self._shards.get(change.shard)
        if shard is None:
            return Applied.NOT_CACHED
        key, atype = (change.id, 0) if isinstance(change, ObjectChange) else (change.id1, change.atype)
        bumped = self._learn(shard, version_epoch)
        if version_epoch < shard.version_epoch:
            applied = shard.drop(key, atype)
        elif isinstance(change, ObjectChange):
            applied = shard.apply_object(change, now, insert)
        else:
            applied = shard.apply_list(change, now, insert)
        self.dropped += applied is Applied.DROPPED
        self.witness.tell_key(key, atype, applied, change.after)
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
            if message.otypes or message.atypes:
                self.void_types(message.shard, message.otypes, message.atypes)
            else:
                self.bump_shard(message.shard)
            return Applied.EPOCH_BUMPED
        key, atype = (message.id, 0) if isinstance(message, ObjectInvalidation) else (message.id1, message.atype)
        if version_epoch < shard.version_epoch:
            applied = shard.drop(key, atype)
        else:
            applied = shard.raise_floor(key, atype, message.version, now)
        self.dropped += applied is Applied.DROPPED
        self.witness.tell_key(key, atype, applied, message.version)
        return Applied.EPOCH_BUMPED if bumped else applied

    def raise_object_floor(self, id: int, version: int, now: float) -> None:  # noqa: A002
        """The object has been at ``version``, says a token, a peer or a critical read: fills below it are no good, and
        what is held below it is dropped. Not for tokens of an older version epoch: their write may be lost (§8)."""
        self.raise_list_floor(id, 0, version, now)

    def raise_list_floor(self, id1: int, atype: int, version: int, now: float) -> None:
        """The same for a list and its count."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        if shard is not None:
            self._learn(shard, epoch_of(version))
            self.dropped += shard.raise_floor(id1, atype, version, now) is Applied.DROPPED
            self.witness.tell_key(id1, atype, events.LEARNT, version)

    # figures

    @property
    def too_large(self) -> int:
        """Fills and changes that were not kept because they would take too large a part of their arena."""
        return self._arenas.too_large

    def arenas(self) -> list[ArenaFigures]:
        """One line per arena, in the order of the settings. Time: the number of tables."""
        return arena_figures(self._shards.values(), self._arenas.all())

    def floor_figures(self, now: float) -> FloorFigures:
        return floor_figures(self._shards.values(), self._old_overflows, now)

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _learn(self, shard: CachedShard, version_epoch: int) -> bool:
        if version_epoch <= shard.version_epoch:
            return False
        voided = shard.learn_epoch(version_epoch, self._next_generation())
        self.witness.tell_shard(shard.number, events.EPOCH_RAISED, version_epoch)
        return voided
