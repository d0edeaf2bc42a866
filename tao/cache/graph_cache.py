"""The cache of one server: open shards, reads, fills and maintenance.

Reads return encoded bytes that are ready to send, or None for a miss; a read costs one or two dictionary look-ups.
Every method is synchronous. ``now`` is the time of any monotonic clock in seconds; callers always pass the same clock.
Ids must be valid (`tao.model.ids.check_id`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Literal

from tao.cache import key_recorder as events
from tao.cache.answers import Hits, edges_answer, filtered_answer
from tao.cache.kept_answers import Asked, KeptAnswers
from tao.cache.key_recorder import KeyRecorder, NoRecorder
from tao.cache.outcomes import (
    Applied,
    ArenaStatistics,
    Denial,
    EdgesAnswer,
    FillTicket,
    FloorStatistics,
    KeySample,
    Stored,
)
from tao.cache.settings import ArenaChoice, CacheSettings
from tao.cache.shard import CachedShard
from tao.cache.statistics import arena_statistics, floor_statistics, sample_keys
from tao.cache.tables import Arenas
from tao.model.changes import (
    ListChange,
    Message,
    ObjectChange,
    ObjectInvalidation,
    ShardInvalidation,
    ShardMessages,
)
from tao.model.graph import EXISTS_NOT, MAX_TIME, version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import EdgesQuery
from tao.model.versions import epoch_of


class GraphCache:
    """Caches the objects and lists of open shards. A read of a closed shard is a miss; a fill of a closed shard is not
    kept."""

    __slots__ = (
        "_arenas",
        "_closed_epochs",
        "_hits",
        "_last_shard_epoch",
        "_old_overflows",
        "_settings",
        "_shards",
        "denials",
        "dropped",
        "kept_answers",
        "not_kept",
        "pair_denials",
        "recorder",
    )  # fmt: skip

    def __init__(self, settings: CacheSettings, types: ArenaChoice, recorder: KeyRecorder | None = None) -> None:
        """Make an empty cache. ``recorder`` records what happens to keys, except hits; None records nothing."""
        self._settings = settings
        self.recorder: KeyRecorder = NoRecorder() if recorder is None else recorder
        self._arenas = Arenas(settings, types, self.recorder)
        self._shards: dict[int, CachedShard] = {}
        self._hits = Hits(self._shards, self._arenas.credit)
        self._last_shard_epoch = 0
        # Shards that are not open → their epoch, raised by each change, which no version floor remembers.
        self._closed_epochs: dict[int, int] = {}
        self._old_overflows = 0
        self.kept_answers = KeptAnswers(settings.kept_answers_bytes)
        self.denials = 0  # queries for edges that a membership filter answered, in full or in part
        self.pair_denials = 0  # queries whether an edge exists that a pair filter answered
        self.dropped = 0  # entries dropped because a change or message could not be applied to their version
        self.not_kept = 0  # fills that were good but not cached, including values too large for their arena

    def on_shrunk(self, listener: Callable[[int, int, int, int], None]) -> None:
        """Call ``listener(id1, atype, before, left)`` when a change shrinks a cached prefix of a longer list from
        ``before`` to ``left`` edges."""
        self._arenas.report_shrunk = listener

    def set_types(self, types: ArenaChoice) -> None:
        """Follow a new schema. Lists whose arena changed are dropped; new limits apply from the next change or fill
        on."""
        self._arenas.types = types
        for shard in self._shards.values():
            shard.follow_types()

    # shards

    def open_shard(self, shard: int, version_epoch: int = 0) -> None:
        """Start to cache a shard, empty. A shard that is open already only learns the epoch. 0: the epoch is not known
        yet."""
        known = self._shards.get(shard)
        if known is None:
            self._shards[shard] = CachedShard(
                shard, self._next_shard_epoch(), version_epoch, self._arenas, self._settings
            )
            self.recorder.record_shard(shard, events.OPENED, version_epoch)
        else:
            self._learn(known, version_epoch)

    def close_shard(self, shard: int) -> None:
        """Forget the shard and its version floors. `reclaim_step` frees the memory."""
        known = self._shards.pop(shard, None)
        if known is not None:
            self._closed_epochs[shard] = self._next_shard_epoch()
            self._old_overflows += known.floors.overflows
            known.retire()
            self.recorder.record_shard(shard, events.CLOSED, known.version_epoch)

    def is_open(self, shard: int) -> bool:
        return shard in self._shards

    def open_shards(self) -> list[int]:
        return list(self._shards)

    def version_epoch(self, shard: int) -> int:
        """Return the highest version epoch known of the shard; 0 for a closed shard."""
        known = self._shards.get(shard)
        return 0 if known is None else known.version_epoch

    def bump_shard(self, shard: int) -> None:
        """Invalidate every entry and every fill ticket of the shard (bulk invalidation). Time: O(1) in the number of
        entries."""
        known = self._shards.get(shard)
        if known is not None:
            known.bump(self._next_shard_epoch())
            self.recorder.record_shard(shard, events.INVALIDATED, known.version_epoch)

    def invalidate_types(self, shard: int, otypes: Sequence[int], atypes: Sequence[int]) -> None:
        """Invalidate the lists and counts of ``atypes``, and all objects in the arenas of ``otypes`` (bulk
        invalidation).

        Objects of other types in the same arenas, and absent objects, share their tables and go too. Every fill ticket
        of the shard becomes invalid. Time: O(1) in the number of entries.
        """
        known = self._shards.get(shard)
        if known is not None:
            known.invalidate_types(otypes, atypes, self._next_shard_epoch())
            self.recorder.record_shard(shard, events.TYPES_INVALIDATED, known.version_epoch)

    def reclaim_step(self) -> bool:
        """Free a bounded number of entries of dropped tables. Returns True when more are left: call it again soon."""
        left = [arena.reclaim(self._settings.reclaim_entries_per_step) for arena in self._arenas.all().values()]
        return any(left)

    def forget_old_floors(self, now: float) -> None:
        """Forget expired version floors, also in shards that receive no messages. Call it every half of
        ``floor_seconds``."""
        for shard in self._shards.values():
            shard.floors.rotate(now)

    # reads

    @property
    def hits(self) -> Hits:
        """Return what answers the reads below from entries alone, without membership filters."""
        return self._hits

    def object(self, id: int, minimum: int = 0) -> bytes | None:  # noqa: A002 - the word of the model
        """Return the value of object ``id`` at version ``minimum`` or later; also the value that says that it is
        absent."""
        return self._hits.object(id, minimum)

    def objects(self, ids: Sequence[int]) -> list[bytes | None]:
        """Return what `object` returns for each of the ids."""
        return self._hits.objects(ids)

    def count(self, id1: int, atype: int, minimum: int = 0) -> bytes | None:
        """Return the count value of the list."""
        return self._hits.count(id1, atype, minimum)

    def range(self, id1: int, atype: int, pos: int, limit: int, minimum: int = 0) -> bytes | None:
        """Return an edge block of the edges at positions ``pos`` to ``pos + limit - 1``."""
        return self._hits.range(id1, atype, pos, limit, minimum)

    def time_range(
        self, id1: int, atype: int, high: int, low: int, limit: int, minimum: int = 0, start: int = 0
    ) -> bytes | None:
        """Return an edge block of at most ``limit`` edges with ``high >= time >= low``; see `time_range_answer`."""
        return self._hits.time_range(id1, atype, high, low, limit, minimum, start)

    def edge(
        self, id1: int, atype: int, id2: int, high: int = MAX_TIME, low: int = 0, minimum: int = 0
    ) -> bytes | None:
        """Return what `edges` returns for one id, or None when the cache cannot decide."""
        block = self._hits.edge(id1, atype, id2, high, low, minimum)
        if block is not None:
            return block
        answer = self._filtered(None, id1, atype, (id2,), minimum)
        return None if answer is None or answer.missing else answer.block

    def edges(
        self, id1: int, atype: int, id2s: Sequence[int], high: int = MAX_TIME, low: int = 0, minimum: int = 0
    ) -> EdgesAnswer | None:
        """Return the edges to ``id2s`` with ``high >= time >= low``, and the ids that the cache cannot decide."""
        block = self._hits.block(id1, atype, minimum)
        if block is None:
            nothing = self._hits.range(id1, atype, 0, 0, minimum)  # answered by the count when the list is empty
            return EdgesAnswer(nothing) if nothing is not None else self._filtered(None, id1, atype, id2s, minimum)
        answer = edges_answer(block, id2s, high, low)
        if answer is not None and not answer.missing:
            return answer
        if self.kept_answers.has(id1, atype):
            kept = self.kept_answers.find(block, id1, atype, Asked(_column(id2s), high, low))
            if kept is not None:
                return EdgesAnswer(kept)
        return self._filtered(answer, id1, atype, id2s, minimum)

    def kept_edges(self, id1: int, atype: int, id2s: bytes, high: int, low: int, minimum: int = 0) -> bytes | None:
        """Return the answer to a query for edges that `keep_edges` has kept. ``id2s`` is a column of ids, as edge
        blocks have them."""
        if not self.kept_answers.has(id1, atype):
            return None
        block = self.peek_list(id1, atype)
        if block is None or version_of(block) < minimum:
            return None
        answer = self.kept_answers.find(block, id1, atype, Asked(id2s, high, low))
        if answer is not None:
            self._hits.use(id1 + atype)
        return answer

    def keep_edges(self, query: EdgesQuery, answer: bytes, shard_epoch: int) -> None:
        """Keep the answer to a query that the cached prefix of its list cannot decide, if it has the version of that
        prefix. ``shard_epoch`` is `shard_epoch` from before the answer was fetched. Single ids are not worth it: they
        are asked at the other end of the edge, or denied by filters."""
        block = self.peek_list(query.id1, query.atype)
        if block is None or version_of(block) != version_of(answer) or len(query.id2s) == 1:
            return
        if shard_epoch == self.shard_epoch(query.id1 >> SHARD_SHIFT):
            asked = Asked(_column(query.id2s), query.high, query.low)
            self.kept_answers.put(block, query.id1, query.atype, asked, answer)

    def exists(self, id1: int, atype: int, id2: int, minimum: int = 0) -> bytes | None:
        """Return whether the list has an edge to ``id2``: `EXISTS`, `EXISTS_NOT`, or None when the cache cannot
        decide."""
        value = self._hits.exists(id1, atype, id2, minimum)
        return self.denied(id1, atype, id2, minimum) if value is None else value

    def exist_all(self, id1s: Sequence[int], atypes: Sequence[int], id2s: Sequence[int]) -> list[bytes | None]:
        """Return what `exists` returns for each of the edges, which are columns of one length."""
        values = self._hits.exist_all(_column(id1s), _column(atypes), _column(id2s))
        if None in values:
            for place, value in enumerate(values):
                if value is None:
                    values[place] = self.denied(id1s[place], atypes[place], id2s[place], 0)
        return values

    def denied(self, id1: int, atype: int, id2: int, minimum: int) -> bytes | None:
        """Return `EXISTS_NOT` when a filter denies the edge, which no entry has decided, and count the denial."""
        denial = self.denial(id1, atype, id2, minimum)
        self.count_denial(denial)
        return None if denial is Denial.NONE else EXISTS_NOT

    def denial(self, id1: int, atype: int, id2: int, minimum: int) -> Denial:
        """Return which filter denies the edge, which no entry has decided. The caller counts the denials that it
        answers with."""
        if not id1:  # no id: the query is invalid, and the usual way says so
            return Denial.NONE
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        if shard is not None and shard.denies(id1, atype, id2, minimum):
            return Denial.BY_PAIR_FILTER
        answer = self._membership(None, id1, atype, (id2,), minimum)
        return Denial.NONE if answer is None or answer.missing else Denial.BY_MEMBERSHIP_FILTER

    def count_denial(self, denial: Denial) -> None:
        """Count a query whether an edge exists that was answered by `denial`."""
        self.pair_denials += denial is Denial.BY_PAIR_FILTER
        self.denials += denial is Denial.BY_MEMBERSHIP_FILTER

    def _filtered(
        self, known: EdgesAnswer | None, id1: int, atype: int, id2s: Sequence[int], minimum: int
    ) -> EdgesAnswer | None:
        answer = self._membership(known, id1, atype, id2s, minimum)
        self.denials += answer is not None and not answer.missing
        return answer

    def _membership(
        self, known: EdgesAnswer | None, id1: int, atype: int, id2s: Sequence[int], minimum: int
    ) -> EdgesAnswer | None:
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        held = shard.filters.get(id1, atype) if shard is not None else None
        if held is None or held.version < minimum:
            return known
        self._hits.use(id1 + atype)
        return filtered_answer(known, id2s, held)

    def has_filter(self, id1: int, atype: int) -> bool:
        """Return whether a membership filter is held of the list."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        return shard is not None and shard.filters.get(id1, atype) is not None

    def filter_shard(self, shard: int) -> CachedShard | None:
        """Return the place where the filters of a shard are built; None for a closed shard."""
        return self._shards.get(shard)

    # values held, read without marking them as used

    def peek_object(self, id: int) -> bytes | None:  # noqa: A002
        shard = self._shards.get(id >> SHARD_SHIFT)
        return (shard.held_object(id) or None) if shard else None

    def peek_list(self, id1: int, atype: int) -> bytes | None:
        """Return the cached prefix of the list."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        return (shard.held_list(id1, atype) or None) if shard else None

    def peek_count(self, id1: int, atype: int) -> bytes | None:
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        return (shard.held_count(id1, atype) or None) if shard else None

    def floor_of_object(self, id: int) -> int:  # noqa: A002
        """Return the highest version of the key that is known by any means; 0 for a closed shard."""
        return self.floor_of_list(id, 0)

    def floor_of_list(self, id1: int, atype: int) -> int:
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        return 0 if shard is None else shard.floor(id1, atype)

    def sample_keys(self, shard: int, limit: int, after: int = 0, stride: int = 1) -> KeySample:
        """Return every ``stride``-th key of the shard from place ``after`` on, at most ``limit`` keys. Keys that are
        added or removed between calls may be seen twice or not at all."""
        return sample_keys(self._shards.get(shard), limit, after, stride)

    # fills

    def object_ticket(self, id: int, now: float) -> FillTicket:  # noqa: A002
        """Return a fill ticket. Take it before the object is read from its source."""
        return self.ticket("object", id, 0, now)

    def list_ticket(self, id1: int, atype: int, now: float) -> FillTicket:
        """Return a fill ticket. Take it before the list or its count is read from its source."""
        return self.ticket("list", id1, atype, now)

    def ticket(self, kind: Literal["object", "list"], key: int, atype: int, now: float) -> FillTicket:
        """Return what `object_ticket` (``atype`` 0) and `list_ticket` return."""
        shard = self._shards.get(key >> SHARD_SHIFT)
        if shard is None:
            return FillTicket(kind, key, atype, 0, self._closed_epoch(key >> SHARD_SHIFT), 0, now)
        floor = shard.floor(key, atype)
        self.recorder.record_key(key, atype, events.FILL_BEGUN, floor)
        return FillTicket(kind, key, atype, floor, shard.shard_epoch, shard.version_epoch, now)

    def is_invalid(self, ticket: FillTicket) -> bool:
        """Return whether a bulk invalidation, the opening or closing of the shard, or a change of the shard while it
        was not open came after the ticket was taken. A value read under such a ticket may be one that was to be
        invalidated."""
        return ticket.shard_epoch != self.shard_epoch(ticket.id >> SHARD_SHIFT)

    def shard_epoch(self, shard: int) -> int:
        """Return a number that changes with each bulk invalidation of the shard, when it is opened and closed, and with
        each change of it while it is not open."""
        known = self._shards.get(shard)
        return self._closed_epoch(shard) if known is None else known.shard_epoch

    def _closed_epoch(self, shard: int) -> int:
        return self._closed_epochs.get(shard, 0)

    def store_object(self, ticket: FillTicket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Store an object value that was read under ``ticket`` from a source at ``version_epoch``."""
        return self._store(CachedShard.store_object, ticket, value, version_epoch, now)

    def store_list(self, ticket: FillTicket, block: bytes, version_epoch: int, now: float) -> Stored:
        """Store an edge block, if it starts at position 0."""
        return self._store(CachedShard.store_list, ticket, block, version_epoch, now)

    def store_count(self, ticket: FillTicket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Store a count value. ``ticket`` is a ticket of the list."""
        return self._store(CachedShard.store_count, ticket, value, version_epoch, now)

    def pass_over(self, ticket: FillTicket, value: bytes, version_epoch: int, now: float) -> Stored:
        """Check a value as the methods above do, but do not store it."""
        not_kept = self.not_kept
        outcome = self._store(CachedShard.pass_over, ticket, value, version_epoch, now)
        self.not_kept = not_kept  # counts values that were to be kept, and this one was not
        return outcome

    def _store(
        self,
        store: Callable[[CachedShard, FillTicket, bytes], Stored],
        ticket: FillTicket,
        value: bytes,
        version_epoch: int,
        now: float,
    ) -> Stored:
        """Check the value, and have its shard store it. Every fill comes by here, and each call less is a fiftieth of
        what the cache does for it."""
        version = int.from_bytes(value[:8], "little")  # as `version_of`
        shard = self._shards.get(ticket.id >> SHARD_SHIFT)
        if shard is None:
            outcome = Stored.BELOW_FLOOR if version < ticket.floor else Stored.NOT_KEPT
        else:
            # Compared before the epoch is learned: a fill that itself brings a new version epoch is kept.
            is_invalid = ticket.shard_epoch != shard.shard_epoch
            if version_epoch > shard.version_epoch:
                self._learn(shard, version_epoch)
            outcome = shard.check_fill(ticket, version, version_epoch, now, is_invalid)
            if outcome is Stored.STORED:
                outcome = store(shard, ticket, value)
        if outcome is Stored.NOT_KEPT:
            self.not_kept += 1
        self.recorder.record_key(ticket.id, ticket.atype, outcome, version)
        return outcome

    # messages and changesets

    def apply(self, message: Message, version_epoch: int, now: float, insert: bool = False) -> Applied:
        """Apply a maintenance message of any kind. ``insert`` also caches an object or a list's first version that was
        not cached (write-through). It is allowed only when every later change came while the shard was open, and within
        ``floor_seconds``."""
        shard = self._shards.get(message.shard)
        if shard is None:
            return self._pass_closed(message.shard)
        return self._apply_to(shard, message, version_epoch, now, insert)

    def apply_all(self, messages: ShardMessages, now: float, insert: bool = False) -> None:
        """Apply the messages of one shard in order, each as `apply` does."""
        shard, version_epoch = self._shards.get(messages.shard), messages.version_epoch
        if shard is None:
            if messages.messages:
                self._pass_closed(messages.shard)
            return
        for message in messages.messages:
            self._apply_to(shard, message, version_epoch, now, insert)

    def _apply_to(self, shard: CachedShard, message: Message, version_epoch: int, now: float, insert: bool) -> Applied:
        bumped = version_epoch > shard.version_epoch and self._learn(shard, version_epoch)
        is_of_lost_master = version_epoch < shard.version_epoch
        if isinstance(message, ListChange):
            key, atype, version = message.id1, message.atype, message.after
            applied = shard.drop(key, atype) if is_of_lost_master else shard.apply_list(message, now, insert)
        elif isinstance(message, ObjectChange):
            key, atype, version = message.id, 0, message.after
            applied = shard.drop(key, 0) if is_of_lost_master else shard.apply_object(message, now, insert)
        elif isinstance(message, ShardInvalidation):
            if message.otypes or message.atypes:
                self.invalidate_types(message.shard, message.otypes, message.atypes)
            else:
                self.bump_shard(message.shard)
            return Applied.EPOCH_BUMPED
        else:
            key, atype = (message.id, 0) if isinstance(message, ObjectInvalidation) else (message.id1, message.atype)
            version = message.version
            applied = (
                shard.drop(key, atype) if is_of_lost_master else shard.raise_floor(key, atype, message.version, now)
            )
        if applied is Applied.DROPPED:
            self.dropped += 1
        self.recorder.record_key(key, atype, applied, version)
        return Applied.EPOCH_BUMPED if bumped else applied

    def has_applied(self, key: int, atype: int, version: int, version_epoch: int) -> bool:
        """Return whether a change of the object (``atype`` 0) or list to ``version`` was applied, so that to apply it
        again changes nothing, not even with ``insert``."""
        shard = self._shards.get(key >> SHARD_SHIFT)
        if shard is None or shard.version_epoch != version_epoch or not shard.has_applied(key, atype, version):
            return False
        self.recorder.record_key(key, atype, Applied.IGNORED, version)
        return True

    def _pass_closed(self, shard: int) -> Applied:
        """Note a change of a shard that is not open: fills under way may bring what was there before it."""
        self._closed_epochs[shard] = self._next_shard_epoch()
        return Applied.NOT_CACHED

    def raise_object_floor(self, id: int, version: int, now: float) -> None:  # noqa: A002
        """Raise the version floor of an object to ``version``, which a token, a peer or a critical read has named.
        Older fills are rejected from now on, and an older cached value is dropped. Do not call it for tokens of an
        older version epoch: their write may be lost."""
        self.raise_list_floor(id, 0, version, now)

    def raise_list_floor(self, id1: int, atype: int, version: int, now: float) -> None:
        """Raise the version floor of a list and its count, as `raise_object_floor` does."""
        shard = self._shards.get(id1 >> SHARD_SHIFT)
        if shard is not None:
            self._learn(shard, epoch_of(version))
            self.dropped += shard.raise_floor(id1, atype, version, now) is Applied.DROPPED
            self.recorder.record_key(id1, atype, events.LEARNT, version)

    # statistics

    @property
    def too_large(self) -> int:
        """Return how many fills and changes were not kept because their value is too large a part of its arena."""
        return self._arenas.too_large

    def arenas(self) -> list[ArenaStatistics]:
        """Return the statistics of each arena, in the order of the settings. Time: the number of tables."""
        return arena_statistics(self._shards.values(), self._arenas.all())

    def floor_statistics(self, now: float) -> FloorStatistics:
        return floor_statistics(self._shards.values(), self._old_overflows, now)

    def _next_shard_epoch(self) -> int:
        self._last_shard_epoch += 1
        return self._last_shard_epoch

    def _learn(self, shard: CachedShard, version_epoch: int) -> bool:
        if version_epoch <= shard.version_epoch:
            return False
        is_invalidated = shard.learn_epoch(version_epoch, self._next_shard_epoch())
        self.recorder.record_shard(shard.number, events.EPOCH_RAISED, version_epoch)
        return is_invalidated


def _column(numbers: Sequence[int]) -> bytes:
    return array("Q", numbers).tobytes()
