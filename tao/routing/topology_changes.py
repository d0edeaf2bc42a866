"""The last changes of a topology document, by which a server that follows it disturbs only the shards concerned.

A server looks at the document every half second, so that it may see version 9 after version 7. From the two documents
alone it cannot see that version 8 gave a shard to another leader and version 9 gave it back; but that leader may have
received the shard's changes in between. So each document that is stored records what its change affected, and keeps
what the last changes did. For a server that finds every version since its own, the affected shards are those of all of
them, and those that differ between the documents. For a server that does not find them all, every shard is affected.

Documents of former versions have no such record, and servers, commands, and applications that connect to the file,
refuse it if they are of former versions. It is written only into a document that has it already: a new one, or one for
which an operator has begun the record (`tao topology record-changes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from tao.model.errors import TopologyError
from tao.model.topology import Database, RecordedChange, Topology, ranges_text
from tao.routing.routes import Routes

MAX_CHANGES: Final = 64
"""Changes that a document records: far more than come within the half second between two looks, so that a server finds
them also after a pause of minutes."""

MAX_CHANGES_BYTES: Final = 64 << 10
"""Size of the record. The oldest changes go first: a leader of thirty that goes down affects 333 of 10,000 shards,
which takes 2 KB."""

_RANGES: Final = re.compile(r"\d{1,18}(-\d{1,18})?(,\d{1,18}(-\d{1,18})?)*")


class AffectedShards(NamedTuple):
    """The shards that changes of the topology affected in one region.

    ``led``: another leader of the region leads them, or may have led them in between, or another database holds them.
    ``database``: their database has another master or server, or may have had one in between."""

    led: frozenset[int]
    database: frozenset[int]


def record_change(before: Topology, after: Topology) -> Topology:
    """Return the document ``after``, which is about to replace ``before``, with the change recorded in it, if documents
    of this cluster record changes."""
    if after.changes is None:
        return after
    change = RecordedChange(
        version=after.version,
        leaders=dict(_moved_by_region(before, after)),
        databases=_changed_databases(before, after),
    )
    kept: list[RecordedChange] = []
    room = MAX_CHANGES_BYTES
    for each in (change, *reversed(before.changes or ())):
        room -= len(msgspec.json.encode(each))
        if room < 0 or len(kept) == MAX_CHANGES:
            break
        kept.append(each)
    return msgspec.structs.replace(after, changes=tuple(reversed(kept)))


def affected_shards(former: Routes, now: Routes, region: str) -> AffectedShards:
    """Return the shards of ``region`` that any change since the ``former`` routes affected: all of them, when the
    document does not record what each change was."""
    changes = _changes_since(former.version, now.topology)
    if changes is None or former.shards > now.shards:
        everything = frozenset(range(now.shards))
        return AffectedShards(everything, everything)
    led = set(_moved(former, now, region))
    databases = set(_changed_databases(former.topology, now.topology))
    for change in changes:
        led.update(_shards_of_ranges(_ranges_in(change.leaders.get(region, ""))))
        databases.update(change.databases)
    of_databases = (each.shards for each in now.topology.databases if each.name in databases)
    return AffectedShards(
        frozenset(led), frozenset(shard for ranges in of_databases for shard in _shards_of_ranges(ranges))
    )


def is_range_text(text: str, shards: int) -> bool:
    """Return whether the text names shards below ``shards`` as a `RecordedChange` does, in ranges such as 3,17-20. A
    larger number is found without listing the shards of its range, which could take for ever."""
    if _RANGES.fullmatch(text) is None:
        return False
    return all(first <= last < shards for first, last in _ranges_in(text))


def _changes_since(version: int, topology: Topology) -> Sequence[RecordedChange] | None:
    """Return the changes that made the versions between ``version`` and the document's own; None when one is missing.
    The last change needs no record: the two documents show it, if no version was skipped."""
    if topology.version == version + 1:
        return ()
    found = [change for change in topology.changes or () if change.version > version]
    return found if len(found) == topology.version - version else None


def _moved_by_region(before: Topology, after: Topology) -> Iterator[tuple[str, str]]:
    former, now = Routes(before), Routes(after)
    for region in after.regions:
        moved = _moved(former, now, region.name) if former.shards <= now.shards else range(now.shards)
        if moved:
            yield region.name, _range_text(moved)


def _moved(former: Routes, now: Routes, region: str) -> Sequence[int]:
    """Return the shards that another leader of the region leads, or another database holds, and those that are new, in
    ascending order."""
    try:
        was = former.leaders(region)
    except TopologyError:
        return range(now.shards)
    moved = set(now.leaders(region).moved_since(was))
    if [_place(each) for each in former.topology.databases] != [_place(each) for each in now.topology.databases]:
        moved.update(
            shard for shard in range(former.shards) if former.database_of(shard).name != now.database_of(shard).name
        )
    return sorted(moved)


def _place(database: Database) -> tuple[str, tuple[tuple[int, int], ...]]:
    return database.name, database.shards


def _changed_databases(before: Topology, after: Topology) -> tuple[str, ...]:
    """Return the names of the databases with another master, version epoch, server or range of shards."""

    def essence(database: Database) -> object:
        servers = {region: server.name for region, server in database.servers.items()}
        return database.master_region, database.version_epoch, servers, database.shards

    known = {database.name: essence(database) for database in before.databases}
    return tuple(each.name for each in after.databases if known.get(each.name) != essence(each))


def _range_text(shards: Iterable[int]) -> str:
    """Return ascending shards as text: 3, 17, 18 and 19 as ``3,17-19``."""
    runs: list[tuple[int, int]] = []
    for shard in shards:
        if runs and runs[-1][1] == shard - 1:
            runs[-1] = runs[-1][0], shard
        else:
            runs.append((shard, shard))
    return ranges_text(runs, ",")


def _ranges_in(text: str) -> Iterator[tuple[int, int]]:
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        yield int(first), int(last or first)


def _shards_of_ranges(ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    for first, last in ranges:
        yield from range(first, last + 1)
