"""The membership filters of one shard: how they are built, kept at their lists' versions, and evicted (DESIGN.md §10).

A build begins before the list is scanned and keeps the changes that come meanwhile. Every page of the scan says which
version the list had in its snapshot. Pages are of different moments, and need not be of one: an edge of the last
version was there from the first page on, and is in the page that has its id, or was put by a change, which is kept. So
the changes must chain without a gap from the version of the first page to at least the newest that any page was of, and
nothing newer may have been heard of. Otherwise the build is void.

A finished filter lies in its list's arena like any entry: counted, evicted, gone with the shard's epoch. A change that
follows on its version moves it on; hearing of any other newer version drops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from tao.cache.floors import floor_key
from tao.cache.membership import MembershipFilter
from tao.model.changes import ListChange

if TYPE_CHECKING:
    from tao.cache.eviction import Arena
    from tao.cache.tables import Arenas

_ENTRY_BYTES: Final = 512  # the objects of a filter, its key, and its record in the queue
_MAX_KEPT_CHANGES: Final = 20_000


class FilterBuild:
    """One scan under way. The scanner calls `take`, the shard all others."""

    __slots__ = ("_changes", "_floor", "_heard", "_newest", "_version_epoch", "atype", "filter", "id1", "is_void")

    def __init__(self, id1: int, atype: int, floor: int, version_epoch: int) -> None:
        self.id1 = id1
        self.atype = atype
        self.is_void = False
        self.filter: MembershipFilter | None = None
        self._floor = floor
        self._version_epoch = version_epoch
        self._newest = self._heard = 0
        self._changes: list[ListChange] = []

    def take(self, version_epoch: int, version: int, count: int, id2s: Sequence[int]) -> bool:
        """A page of ids, and what the list was in its snapshot. False: the build is void."""
        known = self.filter
        if version_epoch != self._version_epoch or version < (known.version if known else self._floor):
            self.is_void = True  # of another master, or from where less is visible than is known
        elif known is None:
            known = self.filter = MembershipFilter(count)
            known.version = version
        if self.is_void or known is None:
            return False
        self._newest = max(self._newest, version)
        known.add(id2s)
        return True

    def keep(self, change: ListChange) -> None:
        self._heard = max(self._heard, change.after)
        self._changes.append(change)
        if len(self._changes) > _MAX_KEPT_CHANGES:
            self.is_void = True

    def hear(self, version: int) -> None:
        self._heard = max(self._heard, version)

    def catch_up(self) -> bool:
        """Apply what came meanwhile. False: something is missing, which may be on its way, or the build is void."""
        known = self.filter
        if self.is_void or known is None:
            return False
        self._changes.sort(key=lambda change: change.before)
        for change in self._changes:
            _move(known, change)
        self._changes = [change for change in self._changes if change.after > known.version]
        return not self._changes and known.version >= max(self._newest, self._heard)


class FilterTable:
    """Filters of one association type in one shard: a `tao.cache.eviction.EvictableTable`."""

    __slots__ = ("_filters", "_shared", "arena", "atype", "number")

    def __init__(self, atype: int, arena: Arena, shared: Arenas) -> None:
        self.atype = atype
        self.arena = arena
        self.number = 0
        self._filters: dict[int, MembershipFilter | None] = {}
        self._shared = shared
        arena.register(self)

    def __len__(self) -> int:
        return len(self._filters)

    def get(self, key: int) -> MembershipFilter | None:
        return self._filters.get(key)

    def held(self) -> Iterable[MembershipFilter]:
        return (each for each in self._filters.values() if each is not None)

    def size_of(self, key: int) -> int:
        held = self._filters[key]
        return 0 if held is None else _ENTRY_BYTES + held.size_bytes

    def put(self, key: int, made: MembershipFilter) -> bool:
        """False: it would take too large a part of the arena."""
        self.drop(key)
        if made.size_bytes > self.arena.largest_entry_bytes:
            return False
        if key not in self._filters:
            self.arena.admit(self, key)
            self.arena.bytes += _ENTRY_BYTES
        self._filters[key] = made
        self.arena.bytes += made.size_bytes
        self.arena.make_room()
        return self._filters.get(key) is made

    def drop(self, key: int) -> None:
        held = self._filters.get(key)
        if held is not None:
            self._filters[key] = None  # the record in the queue needs its key
            self.arena.bytes -= held.size_bytes

    def evict(self, key: int) -> None:
        held = self._filters.pop(key)
        self.arena.bytes -= _ENTRY_BYTES
        if held is not None:
            self.arena.bytes -= held.size_bytes
            self._shared.departed.record(key, self.atype, held.version)

    def free_some(self, limit: int) -> int:
        freed = min(limit, len(self._filters))
        for _ in range(freed):
            _, held = self._filters.popitem()
            self.arena.bytes -= _ENTRY_BYTES + (held.size_bytes if held is not None else 0)
        return freed


class ShardFilters:
    """All filters of one shard, and the builds under way."""

    __slots__ = ("_arenas", "_builds", "_tables")

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._tables: dict[int, FilterTable] = {}
        self._builds: dict[int, FilterBuild] = {}

    def get(self, id1: int, atype: int) -> MembershipFilter | None:
        table = self._tables.get(atype)
        return table.get(id1) if table is not None else None

    def version(self, id1: int, atype: int) -> int:
        """That of the filter held; 0: none is."""
        held = self.get(id1, atype) if self._tables else None
        return held.version if held is not None else 0

    def held(self) -> Iterable[MembershipFilter]:
        return (each for table in self._tables.values() for each in table.held())

    # builds

    def begin(self, id1: int, atype: int, floor: int, version_epoch: int) -> FilterBuild:
        """From now on changes are kept; the scan begins after this. Ends by `put` or `give_up`."""
        build = self._builds[floor_key(id1, atype)] = FilterBuild(id1, atype, floor, version_epoch)
        return build

    def give_up(self, build: FilterBuild) -> None:
        build.is_void = True
        if self._builds.get(floor_key(build.id1, build.atype)) is build:
            del self._builds[floor_key(build.id1, build.atype)]

    def put(self, build: FilterBuild) -> bool:
        """Hold what was built, which has caught up. False: it finds no room."""
        self.give_up(build)
        assert build.filter is not None
        table = self._tables.get(build.atype)
        if table is None:
            arena = self._arenas.for_list(build.atype)
            table = self._tables[build.atype] = FilterTable(build.atype, arena, self._arenas)
        return table.put(build.id1, build.filter)

    # what is heard

    def apply(self, change: ListChange) -> None:
        build = self._builds.get(floor_key(change.id1, change.atype)) if self._builds else None
        if build is not None:
            build.keep(change)
        held = self.get(change.id1, change.atype) if self._tables else None
        if held is not None and not _move(held, change):
            self._tables[change.atype].drop(change.id1)

    def hear(self, id1: int, atype: int, version: int) -> None:
        """The list has been at that version, and nothing is known of how it came there."""
        build = self._builds.get(floor_key(id1, atype)) if self._builds else None
        if build is not None:
            build.hear(version)
        if 0 < self.version(id1, atype) < version:
            self._tables[atype].drop(id1)

    def drop(self, id1: int, atype: int) -> None:
        """What is known of the list may be wrong."""
        build = self._builds.get(floor_key(id1, atype)) if self._builds else None
        if build is not None:
            build.is_void = True
        if atype in self._tables:
            self._tables[atype].drop(id1)

    def void(self, atypes: Iterable[int] | None = None) -> None:
        """Those of these types, or all, are no more; and every build."""
        for build in list(self._builds.values()):
            self.give_up(build)
        for atype in list(self._tables if atypes is None else atypes):
            table = self._tables.pop(atype, None)
            if table is not None:
                table.arena.retire(table)

    def retire_moved(self) -> None:
        """After a schema change: types whose lists are to lie in another arena start there with nothing."""
        self.void([atype for atype, table in self._tables.items() if table.arena is not self._arenas.for_list(atype)])


def _move(held: MembershipFilter, change: ListChange) -> bool:
    """Bring the filter from ``before`` to ``after``. False: the change does not follow on its version, and is newer."""
    if change.after <= held.version:
        return True
    if change.before != held.version:
        return False
    put = {edge.id2 for edge in change.put}
    held.move(change.after, change.count, put, sum(gone.id2 not in put for gone in change.gone))
    return True
