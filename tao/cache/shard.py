"""One open shard: its tables, version floors and version epoch, and how fills and changes enter them.

Every way in keeps these rules:

* The version of a key never falls, except by a bulk invalidation.
* A list and its count are never held both, so two answers about one list cannot have different versions.
* A version that becomes known raises the floor before anything else happens.
* Data of an older version epoch changes nothing; a message with such data drops its key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from tao.cache.filters import FilterBuild, ShardFilters
from tao.cache.outcomes import Applied, FillTicket, Stored
from tao.cache.packed import PackedCounts
from tao.cache.pair_filters import PairBuild, ShardPairFilters
from tao.cache.settings import CacheSettings
from tao.cache.splices import splice
from tao.cache.tables import Arenas, CountTable, EntryTable
from tao.cache.version_floors import VersionFloors
from tao.model.changes import ListChange, ObjectChange
from tao.model.edge_block import (
    COMPLETE,
    HEADER_BYTES,
    PREFIX,
    empty_block,
    header,
    id2_column,
    slice_block,
    with_flags,
)
from tao.model.graph import (
    COUNT_VALUE_BYTES,
    OBJECT_HEADER_BYTES,
    decode_count,
    encode_count,
    encode_object,
    version_of,
)
from tao.model.queries import PairPage

_NO_ENTRIES: Final[dict[int, bytes]] = {}
"""The objects of every shard that has no table of the default arena yet. Never changed: entries are put into tables."""
_NEVER_WRITTEN_LIST: Final = empty_block(0)


class CachedShard:
    """The cached part of one shard.

    ``objects`` and ``lists`` are the dictionaries of the tables, ``counts`` their packed counts; hits read them
    directly, because they cannot afford a call. ``objects`` belongs to the default arena, ``other_objects`` to the
    other arenas. Each table is made when it gets its first entry: a server that starts opens thousands of shards at
    once.
    """

    __slots__ = (
        "_arenas",
        "_former_arenas",
        "_list_tables",
        "_object_tables",
        "_settings",
        "_tables_by_otype",
        "counts",
        "filters",
        "floors",
        "lists",
        "number",
        "objects",
        "other_objects",
        "pairs",
        "shard_epoch",
        "version_epoch",
    )

    def __init__(
        self, number: int, shard_epoch: int, version_epoch: int, arenas: Arenas, settings: CacheSettings
    ) -> None:
        self.number = number
        self.version_epoch = version_epoch
        self.floors = VersionFloors(settings.floor_seconds, settings.max_floors_per_shard)
        self.filters = ShardFilters(arenas)
        self.pairs = ShardPairFilters()
        self._arenas = arenas
        self._settings = settings
        self._reset(shard_epoch)

    # tables

    def _reset(self, shard_epoch: int) -> None:
        self.shard_epoch = shard_epoch
        self._object_tables: dict[str, EntryTable] = {}
        self._tables_by_otype: dict[int, EntryTable] = {}  # in which each type is put, from its first object on
        self._former_arenas: dict[int, set[str]] = {}  # where objects may be that were put by an earlier schema
        self._list_tables: dict[int, tuple[EntryTable, CountTable]] = {}
        self.lists: dict[int, dict[int, bytes]] = {}
        self.counts: dict[int, PackedCounts] = {}
        self.other_objects: tuple[dict[int, bytes], ...] = ()
        self.objects = _NO_ENTRIES

    def tables(self) -> Iterator[EntryTable | CountTable]:
        yield from self._object_tables.values()
        for pair in self._list_tables.values():
            yield from pair

    def retire(self) -> None:
        """Drop all tables. Time: the number of tables, regardless of their size."""
        for table in self.tables():
            table.retire()
        self.filters.invalidate()
        self.pairs.discard()

    def bump(self, shard_epoch: int) -> None:
        """Invalidate all entries, and all tickets taken before. Version floors stay: they are still true."""
        self.retire()
        self._reset(shard_epoch)

    def invalidate_types(self, otypes: Collection[int], atypes: Collection[int], shard_epoch: int) -> None:
        """Invalidate the lists of ``atypes``, the objects in the arenas of ``otypes``, and all tickets taken before.
        Fills of other types that are under way are answered and not kept."""
        self.shard_epoch = shard_epoch
        for atype in atypes:
            for table in self._list_tables.pop(atype, ()):
                table.retire()
            self.lists.pop(atype, None)
            self.counts.pop(atype, None)
        self.filters.invalidate(atypes)
        self.pairs.discard(atypes)
        if otypes:
            self._invalidate_objects(otypes)

    def _invalidate_objects(self, otypes: Collection[int]) -> None:
        # Absent objects have no type and lie in the default arena. They may be of one of these types.
        names = {self._arenas.for_object(otype).name for otype in (0, *otypes)}
        for otype in otypes:
            names |= self._former_arenas.pop(otype, set())
        for name in names:
            held = self._object_tables.pop(name, None)
            if held is not None:
                held.retire()
        for otype in [otype for otype, table in self._tables_by_otype.items() if table.arena.name in names]:
            del self._tables_by_otype[otype]
        default = self._object_tables.get(self._arenas.for_object(0).name)
        self.objects = _NO_ENTRIES if default is None else default.entries
        self.other_objects = tuple(table.entries for table in self._object_tables.values() if table is not default)

    def follow_types(self) -> None:
        """Follow a new schema: drop the tables of association types that it puts into another arena, and put objects
        into those that it chooses. Objects that are held stay where they are, beside others in one table."""
        for otype, objects in list(self._tables_by_otype.items()):
            if objects.arena is not self._arenas.for_object(otype):
                self._former_arenas.setdefault(otype, set()).add(objects.arena.name)
                del self._tables_by_otype[otype]
        for atype, pair in list(self._list_tables.items()):
            if pair[0].arena is not self._arenas.for_list(atype):
                for table in pair:
                    table.retire()
                del self._list_tables[atype], self.lists[atype], self.counts[atype]
        self.filters.retire_moved()

    def _objects_of(self, otype: int) -> EntryTable:
        arena = self._arenas.for_object(otype)
        table = self._object_tables.get(arena.name)
        if table is None:
            table = EntryTable("object", self.number, 0, arena, self._arenas)
            self._object_tables[arena.name] = table
            if arena is self._arenas.for_object(0):
                self.objects = table.entries
            else:
                self.other_objects = (*self.other_objects, table.entries)
        return table

    def _lists_of(self, atype: int) -> tuple[EntryTable, CountTable]:
        pair = self._list_tables.get(atype)
        if pair is None:
            arena = self._arenas.for_list(atype)
            wide = EntryTable("count", self.number, atype, arena, self._arenas)
            counts = CountTable(self.number, atype, self.version_epoch, wide, self._arenas)
            lists = EntryTable("list", self.number, atype, arena, self._arenas, counts)
            pair = self._list_tables[atype] = lists, counts
            self.lists[atype], self.counts[atype] = lists.entries, counts.packed
        return pair

    # values held

    def held_object(self, key: int) -> bytes:
        """Return the object value, empty when none is held."""
        value = self.objects.get(key)
        if not value and self.other_objects:
            value = next(filter(None, (entries.get(key) for entries in self.other_objects)), None)
        return value or b""

    def held_list(self, id1: int, atype: int) -> bytes:
        entries = self.lists.get(atype)
        return entries.get(id1, b"") if entries else b""

    def held_count(self, id1: int, atype: int) -> bytes:
        """Return the count value from the count table or the list, empty when neither is held."""
        counts = self.counts.get(atype)
        if counts is not None and (value := counts.peek(id1)):
            return value
        entries = self.lists.get(atype)
        return entries.get(id1, b"")[:COUNT_VALUE_BYTES] if entries else b""

    def held(self, key: int, atype: int) -> bytes:
        """Return the value whose version is held: the object (``atype`` 0) or the count of the list."""
        return self.held_count(key, atype) if atype else self.held_object(key)

    def floor(self, key: int, atype: int, held: bytes | None = None) -> int:
        """Return the highest version of the object (``atype`` 0) or list that is known by any means. ``held``: the
        value that is held, of a caller that has looked it up."""
        if held is None:
            if atype:  # as `held_count`: a fill asks for two floors
                counts = self.counts.get(atype)
                held = None if counts is None else counts.peek(key)
                if not held and (entries := self.lists.get(atype)):
                    held = entries.get(key)
            else:
                held = self.held_object(key) if self.other_objects else self.objects.get(key)
        floors = self.floors
        known = floors.get(key, atype) if floors.young or floors.old else 0
        departed = self._arenas.departed.get(key, atype)
        if departed > known:
            known = departed
        if held and (version := version_of(held)) > known:
            known = version
        if atype:
            if self.filters.tables and (version := self.filters.version(key, atype)) > known:
                known = version
            if self.pairs.filters and (version := self.pairs.version(key, atype)) > known:
                known = version
        return known

    # ways in: each one leaves its arena within the budget

    def _put_object(self, key: int, value: bytes, otype: int) -> bool:
        target = self._tables_by_otype.get(otype)
        if target is None:
            target = self._tables_by_otype[otype] = self._objects_of(otype)
        if self.other_objects:
            for table in self._object_tables.values():
                if table is not target:
                    table.drop(key)
        return self._put(target, key, value)

    def _put_list(self, id1: int, atype: int, block: bytes) -> bool:
        lists, counts = self._list_tables.get(atype) or self._lists_of(atype)
        if not lists.entries.get(id1):  # where a list is held, no count is
            counts.drop(id1)
        return self._put(lists, id1, block)

    def _put_count(self, id1: int, atype: int, value: bytes) -> bool:
        lists, counts = self._list_tables.get(atype) or self._lists_of(atype)
        if lists.entries.get(id1):
            lists.drop(id1)
        return self._put(counts, id1, value)

    def _put(self, table: EntryTable | CountTable, key: int, value: bytes) -> bool:
        if not table.put(key, value):
            self._arenas.too_large += 1
            table.drop(key)
            self._arenas.departed.record(key, table.atype, version_of(value))
            return False
        arena = table.arena
        if arena.bytes > arena.budget_bytes:
            arena.make_room()
        return True

    def drop(self, key: int, atype: int) -> Applied:
        """Drop the object (``atype`` 0), or the list with its count and filter. Their version stays known."""
        self.filters.drop(key, atype)
        self.pairs.mark_uncertain(key, atype)
        return self._forget(key, atype)

    def _forget(self, key: int, atype: int) -> Applied:
        held = self.held(key, atype)
        if not held:
            return Applied.NOT_CACHED
        self._arenas.departed.record(key, atype, version_of(held))
        for table in self._list_tables[atype] if atype else self._object_tables.values():
            table.drop(key)
        return Applied.DROPPED

    def raise_floor(self, key: int, atype: int, version: int, now: float) -> Applied:
        """Raise the version floor, and drop an older value."""
        self.floors.raise_to(key, atype, version, now)
        self.filters.note_version(key, atype, version)
        self.pairs.note_version(key, atype, version)
        held = self.held(key, atype)
        return Applied.IGNORED if held and version_of(held) >= version else self._forget(key, atype)

    # membership filters

    def begin_filter(self, id1: int, atype: int) -> FilterBuild:
        """Begin to build a filter. Call it before the list is scanned. See `ShardFilters.begin`."""
        return self.filters.begin(id1, atype, self.floor(id1, atype), self.version_epoch)

    def finish_filter(self, build: FilterBuild, now: float) -> bool:
        """Install a filter that was built, once it has caught up with the changes. Returns False when it has not caught
        up yet, or never will (``is_abandoned``)."""
        if build.is_abandoned or build.filter is None or self.floors.is_overflowed(now) or not build.catch_up():
            return False
        version = build.filter.version
        if version < self.floor(build.id1, build.atype):
            return False
        self.raise_floor(build.id1, build.atype, version, now)
        return self.filters.put(build)

    # pair filters

    def begin_pairs(self, atype: int, id1: int = 0) -> PairBuild:
        """Begin to build the pair filter of a type, or to scan one list of it again. Call it before the scan. The build
        ends by `finish_pairs` or `ShardPairFilters.give_up`."""
        held = self.pairs.get(atype)
        if id1:
            known = {id1: self.floor(id1, atype)}
        else:
            known = self.floors.of_lists(atype)
            for each in () if held is None else held.uncertain_lists():
                known[each] = max(known.get(each, 0), held.version(each) if held is not None else 0)
        build = PairBuild(atype, self.version_epoch, known, id1, held if id1 else None)
        self.pairs.begin(build)
        return build

    def take_pairs(self, build: PairBuild, page: PairPage) -> bool:
        """Add a page to the build. Returns False when the build is abandoned."""
        for id1, version in zip(page.id1s, page.versions, strict=True):
            floor = self.floor(id1, build.atype)
            if floor > version:  # the filter that is held has a version of every list
                build.raise_known(id1, floor)
        return build.take(page)

    def finish_pairs(self, build: PairBuild, now: float) -> bool:
        """Install what was built. Returns False when too much has come meanwhile that is not known."""
        if build.is_abandoned or self.floors.is_overflowed(now):
            return False
        self.pairs.put(build)
        return True

    def denies(self, id1: int, atype: int, id2: int, minimum: int) -> bool:
        """Return whether a pair filter says that there is no such edge, at ``minimum`` or later."""
        held = self.pairs.get(atype)
        if held is None or not held.denies(id1, id2, minimum):
            return False
        # A scan may be ahead of the messages: the entry goes on to answer at its version, and no answer mixes two.
        entry = self.held_count(id1, atype)
        if entry and version_of(entry) < held.version(id1):
            return False
        # A list without a version may have a row that the scan could not see yet and a fill has seen before it.
        return held.names(id1) or not self.floor(id1, atype)

    def known_versions(self, atype: int, first: int, last: int, id1s: Iterable[int]) -> dict[int, int]:
        """Return the highest versions known of the lists ``id1s``, and of all lists from ``first`` to ``last`` whose
        version floor is kept."""
        known = {id1: floor for id1, floor in self.floors.of_lists(atype).items() if first <= id1 <= last}
        known.update({id1: self.floor(id1, atype) for id1 in id1s})
        return known

    # fills

    def check_fill(self, ticket: FillTicket, version: int, version_epoch: int, now: float, is_invalid: bool) -> Stored:
        """Return `Stored.STORED` when a value of this version may be stored, else the reason why not. ``is_invalid``:
        what the ticket was taken for may be something that was to be invalidated. The caller has recorded
        ``version_epoch`` before, and stores the value in the same synchronous call: no message can come in between."""
        self._arenas.moment.now = now
        floor = self.floor(ticket.id, ticket.atype)
        # Epoch 0: not known when the ticket was taken.
        floor_is_of_lost_master = 0 < ticket.version_epoch < self.version_epoch
        if not floor_is_of_lost_master:
            floor = max(floor, ticket.floor)
        if version_epoch < self.version_epoch or version < floor:
            return Stored.BELOW_FLOOR
        if ticket.kind == "list":
            if self.filters.tables or self.filters.builds:
                self.filters.note_version(ticket.id, ticket.atype, version)
            if self.pairs.filters or self.pairs.builds:
                self.pairs.note_version(ticket.id, ticket.atype, version)
        is_too_late = now - ticket.started > self._settings.floor_seconds or now < self.floors.overflowed_until
        if is_invalid or is_too_late:
            return self.note_not_kept(ticket, version)
        return Stored.STORED

    def note_not_kept(self, ticket: FillTicket, version: int) -> Stored:
        """Note the version of a value that is answered but not kept, so that the next answer is most likely not older:
        the memory is lossy, and the message of a recent change is on its way anyway."""
        self._arenas.departed.record(ticket.id, ticket.atype, version)
        return Stored.NOT_KEPT

    # The following four are without a check: `check_fill` comes first.

    def pass_over(self, ticket: FillTicket, value: bytes) -> Stored:
        return self.note_not_kept(ticket, version_of(value))

    def store_object(self, ticket: FillTicket, value: bytes) -> Stored:
        otype = int.from_bytes(value[8:OBJECT_HEADER_BYTES], "little")
        return Stored.STORED if self._put_object(ticket.id, value, otype) else Stored.NOT_KEPT

    def store_count(self, ticket: FillTicket, value: bytes) -> Stored:
        version, count = decode_count(value)
        if not count and self.pairs.filters:
            self.pairs.fill(ticket.id, ticket.atype, version, ())
        held = self.held_count(ticket.id, ticket.atype)
        if held and version_of(held) == version:
            return Stored.STORED
        return Stored.STORED if self._put_count(ticket.id, ticket.atype, value) else Stored.NOT_KEPT

    def store_list(self, ticket: FillTicket, block: bytes) -> Stored:
        """Store the block when it starts at position 0, cut at the type's limit; ignore it otherwise."""
        version, count, n, flags = header(block)
        if not flags & PREFIX:
            return self.note_not_kept(ticket, version)
        if n == count and self.pairs.filters:
            self.pairs.fill(ticket.id, ticket.atype, version, id2_column(block))
        if n == 0:  # An empty list is stored as its count, which answers every query and takes a tenth of the memory.
            return self.store_count(ticket, block[:COUNT_VALUE_BYTES])
        held = self.held_list(ticket.id, ticket.atype)
        if held and version_of(held) == version and header(held)[2] >= n:
            return Stored.STORED
        limit = self._arenas.types.list_limit(ticket.atype)
        if n > limit:
            block = slice_block(block, 0, limit, PREFIX)
        elif flags != (wanted := PREFIX | (COMPLETE if n == count else 0)):
            block = with_flags(block, wanted)
        return Stored.STORED if self._put_list(ticket.id, ticket.atype, block) else Stored.NOT_KEPT

    # changes of the current version epoch

    def apply_object(self, change: ObjectChange, now: float, insert: bool) -> Applied:
        """Apply an object change. The change carries the whole value, so it can replace any older value."""
        self._arenas.moment.now = now
        key, after = change.id, change.after
        held = self.held_object(key)
        self.floors.raise_to(key, 0, after, now)
        if held and version_of(held) >= after:
            return Applied.IGNORED
        if not held and (not insert or self.floor(key, 0) > after or self.floors.is_overflowed(now)):
            return Applied.NOT_CACHED
        if change.data is None and not change.deleted:
            return self.drop(key, 0)
        value = encode_object(after, change.otype, change.data or b"")
        return Applied.APPLIED if self._put_object(key, value, change.otype) else Applied.DROPPED

    def apply_list(self, change: ListChange, now: float, insert: bool) -> Applied:
        """Apply a list change. A list at version ``before`` is spliced, any other is dropped; the count is replaced."""
        self._arenas.moment.now = now
        id1, atype, before, after = change.id1, change.atype, change.before, change.after
        entries = self.lists.get(atype)
        block = entries.get(id1, b"") if entries else b""
        held = block  # a list begins with its version, as a count does
        if not block and (counts := self.counts.get(atype)) is not None:
            held = counts.peek(id1) or b""
        self.floors.raise_to(id1, atype, after, now)
        if self.filters.tables or self.filters.builds:
            self.filters.apply(change)
        if self.pairs.filters or self.pairs.builds:
            self.pairs.apply(change)
        version = version_of(held) if held else 0
        if not held:
            if not insert or before or self.floor(id1, atype, b"") > after or now < self.floors.overflowed_until:
                return Applied.NOT_CACHED
            block = _NEVER_WRITTEN_LIST
        elif version >= after:
            return Applied.IGNORED
        elif not block and decode_count(held) == (before, 0):
            block = empty_block(before)
        if block and version == before:
            limit = self._arenas.types.list_limit(atype)
            spliced = splice(block, change, limit)
            if spliced is None:
                return self.drop(id1, atype)
            n = header(block)[2]
            if change.gone or n > limit:  # nothing else makes a prefix shorter
                _, _, left, flags = header(spliced)
                if left < n and not flags & COMPLETE:
                    self._arenas.report_shrunk(id1, atype, n, left)
            if len(spliced) > HEADER_BYTES:
                return Applied.APPLIED if self._put_list(id1, atype, spliced) else Applied.DROPPED
        self._put_count(id1, atype, encode_count(after, change.count))
        return Applied.DROPPED if block and version != before else Applied.APPLIED

    def has_applied(self, key: int, atype: int, version: int) -> bool:
        """Return whether the key is held at ``version`` or later, and that version is its floor: another change to
        ``version`` or an older one would change nothing. Where only the entry has the version, a membership filter or
        a pair filter may lack the change."""
        if self.floors.get(key, atype) < version:
            return False
        held = self.held(key, atype)
        return bool(held) and version_of(held) >= version

    def learn_epoch(self, version_epoch: int, shard_epoch: int) -> bool:
        """Record a version epoch. A higher epoch invalidates the shard. Returns whether it did."""
        if version_epoch <= self.version_epoch:
            return False
        known, self.version_epoch = self.version_epoch, version_epoch
        if known == 0:  # Nothing can have been stored before the first epoch was known.
            return False
        self.floors.clear()
        self._arenas.departed.clear()
        self.bump(shard_epoch)
        return True
