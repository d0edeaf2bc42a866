"""The membership filters of one shard: how they are built, kept at their lists' versions, and evicted.

A filter is the set of id2s that a long list may have (`tao.cache.bloom_filter`), and its "no" is certain. Deletions
make it loose: after many of them, or after more additions than it was made for, it is built anew.

A build begins before the list is scanned, and keeps the changes that come meanwhile. Every page of the scan names the
version of the list in its snapshot. Pages may be of different moments. An edge of the last version either was there
from the first page on, and is in the page that has its id, or was put by a change, which is kept. So the changes must
chain without a gap from the version of the first page to at least the newest version of any page, and no newer version
may be known. Otherwise the build is abandoned.

A finished filter lies in its list's arena as any entry does: it is counted, evicted, and dropped with the shard's
epoch. A change that follows on its version advances it; any other newer version drops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from tao.cache.bloom_filter import BloomFilter
from tao.model.changes import ListChange

_LOOSE_SHARE: Final = 0.25  # the part of deleted ids from which a rebuild pays


class MembershipFilter(BloomFilter):
    """The ids of one list at ``version``, and of its earlier versions since the filter was built. ``count``: the edges
    of the list."""

    __slots__ = ("_gone", "count", "version")

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._gone = 0
        self.version = 0
        self.count = count

    @property
    def is_loose(self) -> bool:
        """Return whether so many ids have been added or deleted that a new filter would answer more queries."""
        return self.is_full or self._gone > _LOOSE_SHARE * self.count

    def move(self, version: int, count: int, put: Iterable[int], deleted: int) -> None:
        """Advance to ``version``: ``put`` are ids that came or stayed, ``deleted`` is the number that left."""
        self.add(id2 for id2 in put if not self.may_have(id2))
        self._gone += deleted
        self.version = version
        self.count = count


if TYPE_CHECKING:
    from tao.cache.eviction import Arena
    from tao.cache.tables import Arenas

_ENTRY_BYTES: Final = 512  # the objects of a filter, its key, and its record in the queue
_MAX_KEPT_CHANGES: Final = 20_000


class FilterBuild:
    """A scan under way. The scanner calls `take`, the shard all other methods."""

    __slots__ = (
        "_changes",
        "_floor",
        "_known_version",
        "_newest",
        "_version_epoch",
        "atype",
        "filter",
        "id1",
        "is_abandoned",
    )

    def __init__(self, id1: int, atype: int, floor: int, version_epoch: int) -> None:
        self.id1 = id1
        self.atype = atype
        self.is_abandoned = False
        self.filter: MembershipFilter | None = None
        self._floor = floor
        self._version_epoch = version_epoch
        self._newest = self._known_version = 0
        self._changes: list[ListChange] = []

    def take(self, version_epoch: int, version: int, count: int, id2s: Sequence[int]) -> bool:
        """Add a page of ids, with the version and count of the list in its snapshot. Returns False when the build is
        abandoned."""
        known = self.filter
        if version_epoch != self._version_epoch or version < (known.version if known else self._floor):
            # The page is of another master, or of a server that has seen less than is known here.
            self.is_abandoned = True
        elif known is None:
            known = self.filter = MembershipFilter(count)
            known.version = version
        if self.is_abandoned or known is None:
            return False
        self._newest = max(self._newest, version)
        known.add(id2s)
        return True

    def keep(self, change: ListChange) -> None:
        self._known_version = max(self._known_version, change.after)
        self._changes.append(change)
        if len(self._changes) > _MAX_KEPT_CHANGES:
            self.is_abandoned = True

    def note_version(self, version: int) -> None:
        self._known_version = max(self._known_version, version)

    def catch_up(self) -> bool:
        """Apply the changes that came meanwhile. Returns False when one is missing, which may still arrive, or when the
        build is abandoned."""
        known = self.filter
        if self.is_abandoned or known is None:
            return False
        self._changes.sort(key=lambda change: change.before)
        for change in self._changes:
            _move(known, change)
        self._changes = [change for change in self._changes if change.after > known.version]
        return not self._changes and known.version >= max(self._newest, self._known_version)


class FilterTable:
    """The filters of one association type in one shard: a `tao.cache.eviction.EvictableTable`."""

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
        """Store a filter. Returns False when it would take too large a part of the arena."""
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


_NO_TABLES: Final[dict[int, FilterTable]] = {}
_NO_BUILDS: Final[dict[tuple[int, int], FilterBuild]] = {}
"""The empty tables and builds of a shard that has never had a filter. Never changed: the first one replaces them."""


class ShardFilters:
    """All filters of one shard, and the builds under way.

    ``tables`` and ``builds`` are empty in most shards; who applies many changes looks at them before it calls."""

    __slots__ = ("_arenas", "builds", "tables")

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self.tables = _NO_TABLES
        self.builds = _NO_BUILDS

    def get(self, id1: int, atype: int) -> MembershipFilter | None:
        table = self.tables.get(atype)
        return table.get(id1) if table is not None else None

    def version(self, id1: int, atype: int) -> int:
        """Return the version of the filter that is held; 0 when none is."""
        held = self.get(id1, atype) if self.tables else None
        return held.version if held is not None else 0

    def held(self) -> Iterable[MembershipFilter]:
        return (each for table in self.tables.values() for each in table.held())

    # builds

    def begin(self, id1: int, atype: int, floor: int, version_epoch: int) -> FilterBuild:
        """Begin a build, which keeps changes from now on. Begin the scan after this call. The build ends by `put` or
        `give_up`."""
        if self.builds is _NO_BUILDS:
            self.builds = {}
        build = self.builds[id1, atype] = FilterBuild(id1, atype, floor, version_epoch)
        return build

    def give_up(self, build: FilterBuild) -> None:
        build.is_abandoned = True
        if self.builds.get((build.id1, build.atype)) is build:
            del self.builds[build.id1, build.atype]

    def put(self, build: FilterBuild) -> bool:
        """Store the filter of a build that has caught up. Returns False when there is no room."""
        self.give_up(build)
        assert build.filter is not None
        table = self.tables.get(build.atype)
        if table is None:
            arena = self._arenas.for_list(build.atype)
            if self.tables is _NO_TABLES:
                self.tables = {}
            table = self.tables[build.atype] = FilterTable(build.atype, arena, self._arenas)
        return table.put(build.id1, build.filter)

    # changes and versions that become known

    def apply(self, change: ListChange) -> None:
        build = self.builds.get((change.id1, change.atype)) if self.builds else None
        if build is not None:
            build.keep(change)
        held = self.get(change.id1, change.atype) if self.tables else None
        if held is not None and not _move(held, change):
            self.tables[change.atype].drop(change.id1)

    def note_version(self, id1: int, atype: int, version: int) -> None:
        """Note that the list has reached ``version`` by changes that are not known."""
        build = self.builds.get((id1, atype)) if self.builds else None
        if build is not None:
            build.note_version(version)
        if 0 < self.version(id1, atype) < version:
            self.tables[atype].drop(id1)

    def drop(self, id1: int, atype: int) -> None:
        """Drop the filter of the list, because what is known of the list may be wrong."""
        build = self.builds.get((id1, atype)) if self.builds else None
        if build is not None:
            build.is_abandoned = True
        if atype in self.tables:
            self.tables[atype].drop(id1)

    def invalidate(self, atypes: Iterable[int] | None = None) -> None:
        """Drop the filters of these types, or of all types, and every build."""
        for build in list(self.builds.values()):
            self.give_up(build)
        for atype in list(self.tables if atypes is None else atypes):
            table = self.tables.pop(atype, None)
            if table is not None:
                table.arena.retire(table)

    def retire_moved(self) -> None:
        """Drop the filters of types that a new schema puts into another arena."""
        for_list = self._arenas.for_list
        self.invalidate([atype for atype, table in self.tables.items() if table.arena is not for_list(atype)])


def _move(held: MembershipFilter, change: ListChange) -> bool:
    """Advance the filter from ``before`` to ``after``. Returns False when the change does not follow on the filter's
    version and is newer."""
    if change.after <= held.version:
        return True
    if change.before != held.version:
        return False
    put = {edge.id2 for edge in change.put}
    held.move(change.after, change.count, put, sum(gone.id2 not in put for gone in change.gone))
    return True
