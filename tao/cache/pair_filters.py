"""The pair filters of one shard: which edges of a type there may be, in all of its lists, cached or not.

A pair filter is a Bloom filter over (id1, id2) of all edges of one type in one shard, and the version of each list that
it covers. Its "no" says that the list has no such edge, so a wrong "no" is a lost edge. One rule keeps it right: *the
filter has every edge of a list at the version that it names, and denies only while no newer version is known.*

* Every change adds its edges before anything else. A change that follows on the named version advances it.
* A version that becomes known without its edges (an invalidation, a token, a fill of a part, a change that does not
  follow) makes the list *uncertain*: nothing of it is denied until changes lead to that version, or the list is filled
  or scanned whole.
* A list that the filter does not name has never had an edge (version 0). A change that does not begin there makes it
  uncertain.
* A bulk invalidation, a reset and a new version epoch discard the filter, with the builds under way.

A build begins before its scan, and keeps the changes and versions that come meanwhile. Each page of the scan is of one
snapshot, and names the versions of its lists there and the versions that the leader knows of. A list that lies on
several pages is right at the version that the changes lead to from its first page, if that is at least the version of
its last page: an edge of that version either was there from the first page on, and is on the page that has its id, or
was put by one of the changes. A list for which this does not hold is uncertain; the other lists are not affected.

A list of a filter is scanned again in the same way, as a build of that list alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Final

from tao.cache.bloom_filter import BloomFilter
from tao.cache.list_versions import ListVersions
from tao.model.changes import ListChange
from tao.model.queries import PairPage

_U64: Final = (1 << 64) - 1
_MIX: Final = 0x9E3779B97F4A7C15
_NEVER: Final = _U64
"""Instead of the version of an uncertain list: no change settles it, because what is known of the list may be wrong."""
_LOOSE_SHARE: Final = 0.25
_UNCERTAIN_BYTES: Final = 200
"""Memory of an uncertain list: its place in a dictionary, and two numbers."""
_MAX_KEPT_CHANGES: Final = 50_000
_MAX_UNCERTAIN: Final = 10_000
"""Lists of one filter. More of them mean that much was missed: the filter is discarded and built again."""
_ADDED_AT_ONCE: Final = 2_000
"""Pairs added in one step, which takes about a millisecond."""
_DECIDED_AT_ONCE: Final = 500
"""Lists decided in one step, which takes about a millisecond."""
_KEPT_BYTES: Final = 200
"""Memory of a change that is kept: two versions, and its place in a list and in a dictionary."""


def pair_key(id1: int, id2: int) -> int:
    """Return the number that stands for an edge."""
    return (id1 * _MIX ^ id2) & _U64


class PairFilter:
    """The edges of one type in one shard."""

    __slots__ = ("_gone", "_pairs", "_uncertain", "_versions", "edges", "is_lost")

    def __init__(self, pairs: BloomFilter, edges: int, versions: ListVersions, uncertain: dict[int, int]) -> None:
        """``pairs`` has all edges of the lists at ``versions``. ``uncertain`` maps lists to higher versions that are
        known of them. ``edges`` is how many there are."""
        self._pairs = pairs
        self._versions = versions
        self._uncertain = uncertain
        self._gone = 0
        self.edges = edges
        self.is_lost = len(uncertain) > _MAX_UNCERTAIN
        """Whether so many lists have been uncertain that the filter must be discarded. It denies nothing any more."""

    @property
    def size_bytes(self) -> int:
        """Return the memory in bytes, to within some hundred bytes."""
        return self._pairs.size_bytes + self._versions.size_bytes + _UNCERTAIN_BYTES * len(self._uncertain)

    @property
    def is_loose(self) -> bool:
        """Return whether so many edges have been added or deleted that a new filter would deny more."""
        return self._pairs.is_full or self._gone > _LOOSE_SHARE * self.edges

    def uncertain_lists(self) -> list[int]:
        return list(self._uncertain)

    def denies(self, id1: int, id2: int, minimum: int) -> bool:
        """Return whether the list certainly has no edge to ``id2``, at ``minimum`` or later."""
        if self.is_lost or id1 in self._uncertain or (minimum and self._versions.get(id1) < minimum):
            return False
        return not self._pairs.may_have(pair_key(id1, id2))

    def names(self, id1: int) -> bool:
        """Return whether the filter has a version of the list."""
        return self._versions.get(id1) > 0

    def version(self, id1: int) -> int:
        """Return the version at which the filter has the list, or the higher one that is known of it."""
        known = self._uncertain.get(id1, 0) if self._uncertain else 0
        return max(self._versions.get(id1), 0 if known == _NEVER else known)

    def apply(self, change: ListChange) -> None:
        """Add the edges of a change, and advance its list if the change follows on the version there."""
        id1, after = change.id1, change.after
        put = {edge.id2 for edge in change.put}
        new = [key for id2 in put if not self._pairs.may_have(key := pair_key(id1, id2))]
        self._pairs.add(new)
        version = self._versions.get(id1)
        if after <= version:
            return
        gone = sum(each.id2 not in put for each in change.gone)
        self._gone += gone
        self.edges += len(new) - gone
        if change.before == version:
            self._versions.put(id1, after)
            if self._uncertain.get(id1, _NEVER) <= after:
                del self._uncertain[id1]
        else:
            self.note_version(id1, after)

    def note_version(self, id1: int, version: int) -> None:
        """Note that the list has reached ``version`` by changes that are not known."""
        if version > self._versions.get(id1):
            self._note_uncertain(id1, max(version, self._uncertain.get(id1, 0)))

    def mark_uncertain(self, id1: int) -> None:
        """Note that what is known of the list may be wrong."""
        self._note_uncertain(id1, _NEVER)

    def _note_uncertain(self, id1: int, version: int) -> None:
        if not self.is_lost:  # nothing more is noted: it may be minutes until the filter is discarded
            self._uncertain[id1] = version
            self.is_lost = len(self._uncertain) > _MAX_UNCERTAIN

    def fill(self, id1: int, version: int, id2s: Iterable[int]) -> None:
        """Take all edges of a list at ``version``."""
        known = self._uncertain.get(id1)
        if known is None and version <= self._versions.get(id1):
            return
        self._pairs.add(key for id2 in id2s if not self._pairs.may_have(key := pair_key(id1, id2)))
        self.settle(id1, version)

    def settle(self, id1: int, version: int) -> None:
        """Note that the filter has all edges of the list at ``version``."""
        known = self._uncertain.get(id1, 0)
        if known == _NEVER or version >= known:
            self._uncertain.pop(id1, None)
            self._versions.put(id1, version)
        elif version > self._versions.get(id1):
            self._versions.put(id1, version)

    def is_uncertain(self, id1: int) -> bool:
        return id1 in self._uncertain

    def put_last(self, id1: int) -> None:
        """Return the list after all others from `uncertain_lists`, so that they get their turn."""
        self._uncertain[id1] = self._uncertain.pop(id1)

    def add(self, keys: Iterable[int]) -> None:
        """Add edges by `pair_key`."""
        self._pairs.add(key for key in keys if not self._pairs.may_have(key))


class PairBuild:
    """A scan under way, of all lists of a type or of ``id1`` alone. The scanner calls `take`, `add_some` and `finish`
    or `settle` (through the shard), the shard all other methods.

    The edges of a list alone are added to the filter that is held, step by step: too many edges deny less, and no
    edge wrongly."""

    __slots__ = (
        "_added",
        "_changes",
        "_kept",
        "_keys",
        "_known",
        "_pairs",
        "_uncertain",
        "_version_epoch",
        "_versions",
        "atype",
        "held",
        "id1",
        "is_abandoned",
    )  # fmt: skip

    def __init__(
        self, atype: int, version_epoch: int, known: dict[int, int], id1: int = 0, held: PairFilter | None = None
    ) -> None:
        """``known`` maps lists to the highest versions known of them, of which no changes may come any more. ``held``
        is the filter that gets the edges of ``id1``."""
        self.atype = atype
        self.id1 = id1
        self.held = held
        self.is_abandoned = not version_epoch
        self._version_epoch = version_epoch
        self._known = known
        """The highest versions known of lists that are not decided yet."""
        self._uncertain: dict[int, int] = {}
        """The same of lists to whose version neither scan nor changes lead, as far as they are decided."""
        self._versions = ListVersions()
        self._changes: dict[int, list[tuple[int, int]]] = {}
        self._kept = 0
        self._keys = array("Q")
        self._pairs: BloomFilter | None = None
        self._added = 0

    @property
    def size_bytes(self) -> int:
        """Return the memory in bytes of the scan and of the filter that it builds, if any."""
        scanned = 8 * len(self._keys) + self._versions.size_bytes + _KEPT_BYTES * self._kept
        scanned += _UNCERTAIN_BYTES * (len(self._known) + len(self._uncertain))
        if self.id1:
            return scanned
        return scanned + (2 * len(self._keys) if self._pairs is None else self._pairs.size_bytes)

    @property
    def is_overrun(self) -> bool:
        """Return whether more has come than is kept, so that the build is abandoned."""
        return self._kept > _MAX_KEPT_CHANGES

    def covers(self, id1: int) -> bool:
        return self.id1 in (0, id1)

    def take(self, page: PairPage) -> bool:
        """Add a page of edges. Returns False when the build is abandoned."""
        if page.version_epoch != self._version_epoch:
            self.is_abandoned = True
        if self.is_abandoned:
            return False
        for id1, version in zip(page.id1s, page.versions, strict=True):
            known = self._versions.get(id1)
            if not known:
                self._versions.put(id1, version)
            elif version < known:  # another server's copy, which is behind that of the page before
                self._known[id1] = _NEVER
            else:
                self.raise_known(id1, version)
        for id1, floor in zip(page.known_id1s, page.known_versions, strict=True):
            self.raise_known(id1, floor)
        keys, start = self._keys, 0
        for id1, size in zip(page.id1s, page.sizes, strict=True):
            keys.extend([(id1 * _MIX ^ id2) & _U64 for id2 in page.id2s[start : start + size]])
            start += size
        return True

    def raise_known(self, id1: int, version: int) -> None:
        """Note that a version of the list is known."""
        if self._known.get(id1, 0) < version:
            self._known[id1] = version

    def keep(self, change: ListChange) -> None:
        id1 = change.id1
        if self.is_abandoned or not self.covers(id1):
            return
        self._keys.extend([pair_key(id1, edge.id2) for edge in change.put])
        self._changes.setdefault(id1, []).append((change.before, change.after))
        self.raise_known(id1, change.after)
        self._count_kept(1 + len(change.put))

    def note_version(self, id1: int, version: int) -> None:
        """Note that the list has reached ``version`` by changes that are not known."""
        if self.covers(id1) and not self.is_abandoned:
            self.raise_known(id1, version)
            self._count_kept(1)

    def mark_uncertain(self, id1: int) -> None:
        """Note that what is known of the list may be wrong."""
        if self.covers(id1) and not self.is_abandoned:
            self._known[id1] = _NEVER
            self._count_kept(1)

    def _count_kept(self, number: int) -> None:
        self._kept += number
        if self.is_overrun:
            self.is_abandoned = True

    def add_some(self) -> bool:
        """Add some of the scanned edges to the filter, then decide some lists. All pages have been taken. Returns True
        when more are left: call it again."""
        some = self._keys[self._added : self._added + _ADDED_AT_ONCE]
        if self.held is not None:
            self.held.add(some)
        else:
            if self._pairs is None:
                self._pairs = BloomFilter(len(self._keys))
            self._pairs.add(some)
        self._added += len(some)
        if self._added == len(self._keys):
            self._decide_some()
        return self._added < len(self._keys) or bool(self._known)

    def _decide_some(self) -> None:
        """Decide of some lists whether their scan and their changes lead to the highest version that is known. A list
        of which more comes afterwards is decided again."""
        for _ in range(min(len(self._known), _DECIDED_AT_ONCE)):
            id1, known = self._known.popitem()
            version = self._versions.get(id1)
            changes = self._changes.pop(id1, None)
            if changes is not None:
                for before, after in sorted(changes):
                    if before == version:
                        version = after
                self._versions.put(id1, version)
                later = [each for each in changes if each[0] > version]
                if later:  # the change between may still come
                    self._changes[id1] = later
            known = max(known, self._uncertain.pop(id1, 0))
            if known > version:
                self._uncertain[id1] = known

    def finish(self) -> PairFilter:
        """Return the filter of all that was scanned and that came meanwhile. The last few changes are added here."""
        while self.add_some():
            continue
        assert self._pairs is not None
        return PairFilter(self._pairs, len(self._keys), self._versions, self._uncertain)

    def settle(self) -> None:
        """Let the filter that is held answer for the list again, if the scan and what came meanwhile lead to its
        highest version that is known. The last few changes are added here."""
        assert self.held is not None
        while self.add_some():
            continue
        if self.id1 not in self._uncertain:
            self.held.settle(self.id1, self._versions.get(self.id1))


_NO_FILTERS: Final[dict[int, PairFilter]] = {}
_NO_BUILDS: Final[tuple[PairBuild, ...]] = ()
"""The empty filters and builds of a shard that has never had one. Never changed: the first one replaces them."""


class ShardPairFilters:
    """The pair filters of one shard by type, and the builds under way.

    ``filters`` and ``builds`` are empty in most shards; who applies many changes looks at them before it calls."""

    __slots__ = ("builds", "filters")

    def __init__(self) -> None:
        self.filters = _NO_FILTERS
        self.builds = _NO_BUILDS

    def get(self, atype: int) -> PairFilter | None:
        return self.filters.get(atype)

    def held(self) -> Iterator[tuple[int, PairFilter]]:
        """Return the types and their filters."""
        return iter(tuple(self.filters.items()))

    def version(self, id1: int, atype: int) -> int:
        """Return the highest version of the list that is known of a filter; 0 without one."""
        held = self.filters.get(atype)
        return 0 if held is None else held.version(id1)

    # builds

    def begin(self, build: PairBuild) -> None:
        """Send the build what comes from now on. It ends by `put` or `give_up`."""
        self.builds = (*self.builds, build)

    def give_up(self, build: PairBuild) -> None:
        build.is_abandoned = True
        self.builds = tuple(each for each in self.builds if each is not build)

    def put(self, build: PairBuild) -> None:
        """Keep the filter of a build of all lists, or what a build of one list has found."""
        if not build.id1:
            if self.filters is _NO_FILTERS:
                self.filters = {}
            self.filters[build.atype] = build.finish()
        elif build.held is not None and build.held is self.filters.get(build.atype):
            build.settle()
        self.give_up(build)

    # changes and versions that become known

    def apply(self, change: ListChange) -> None:
        for build in self.builds:
            if build.atype == change.atype:
                build.keep(change)
        held = self.filters.get(change.atype)
        if held is not None:
            held.apply(change)

    def note_version(self, id1: int, atype: int, version: int) -> None:
        """Note that the list has reached ``version`` by changes that are not known."""
        for build in self.builds:
            if build.atype == atype:
                build.note_version(id1, version)
        held = self.filters.get(atype)
        if held is not None:
            held.note_version(id1, version)

    def mark_uncertain(self, id1: int, atype: int) -> None:
        """Note that what is known of the list may be wrong."""
        for build in self.builds:
            if build.atype == atype:
                build.mark_uncertain(id1)
        held = self.filters.get(atype)
        if held is not None:
            held.mark_uncertain(id1)

    def fill(self, id1: int, atype: int, version: int, id2s: Iterable[int]) -> None:
        """Take all edges of a list at ``version``."""
        held = self.filters.get(atype)
        if held is not None:
            held.fill(id1, version, id2s)

    def discard(self, atypes: Iterable[int] | None = None) -> None:
        """Discard the filters of these types, or of all types, and the builds under way."""
        for build in self.builds:
            self.give_up(build)
        if self.filters:
            for atype in list(self.filters if atypes is None else atypes):
                self.filters.pop(atype, None)
