"""The topology document in sections, each stored under a key of its own, so that one change moves little.

A section is the JSON of one server, one database, the shards of a tier that are mapped by hand (256 shards a section),
one recorded change, and so on. The document follows from its sections alone, and they from it: equal documents have
equal sections. Pure functions.

========================================  ============================================================================
``head``                                  version, number of shards, watchers' marks, names of regions and databases,
                                          versions of the recorded changes
``regions/REGION``                        names of its tiers, tailers and watchers
``tiers/REGION/TIER``                     names of its servers, shards with clones that a watcher made
``moved/REGION/TIER/BLOCK``, ``told/…``   mappings of the shards from 256 × BLOCK on
``servers/NAME``, ``tailers/NAME``,       one process
``watchers/NAME``
``databases/NAME``                        its master region, version epoch, shards, and the names of its servers
``database-servers/NAME``                 one server
``changes/VERSION``                       what one change affected
========================================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from tao.model.errors import TopologyError
from tao.model.topology import Database, Region, Tier, Topology
from tao.topology.document import parse_topology

HEAD: Final = "head"
"""The section that every change rewrites."""

_OF_SERVERS: Final = ("servers", "standbys")
"""The fields of a database that map a region to a server. Those without any are left out: programs of an earlier
version refuse fields that they do not know."""

_SHARDS_OF_BLOCK: Final = 256
_encode = msgspec.json.Encoder(order="sorted").encode
_Sections = Mapping[str, bytes]


def sections_of(topology: Topology) -> dict[str, bytes]:
    """Return the sections of a checked document by their keys."""
    return dict(_sections(topology))


def _sections(topology: Topology) -> Iterator[tuple[str, bytes]]:
    head = {
        "version": topology.version,
        "shards": topology.shards,
        "regions": [region.name for region in topology.regions],
        "databases": [database.name for database in topology.databases],
        "marked_by_watcher": topology.marked_by_watcher,
        "changes": None if topology.changes is None else [change.version for change in topology.changes],
    }
    yield HEAD, _encode(head)
    for region in topology.regions:
        yield from _region_sections(region)
    for database in topology.databases:
        yield f"databases/{database.name}", _encode(_without_servers(database))
        for server in database.places.values():
            yield f"database-servers/{server.name}", _encode(server)
    for change in topology.changes or ():
        yield f"changes/{change.version}", _encode(change)


def _region_sections(region: Region) -> Iterator[tuple[str, bytes]]:
    names = {
        "leaders": region.leaders.name,
        "followers": [tier.name for tier in region.followers],
        "tailers": [tailer.name for tailer in region.tailers],
        "watchers": [watcher.name for watcher in region.watchers],
    }
    yield f"regions/{region.name}", _encode(names)
    for tier in region.tiers:
        yield from _tier_sections(f"{region.name}/{tier.name}", tier)
    for tailer in region.tailers:
        found = msgspec.to_builtins(tailer)
        if not tailer.frames:
            del found["frames"]  # programs of an earlier version refuse fields that they do not know
        yield f"tailers/{tailer.name}", _encode(found)
    for watcher in region.watchers:
        yield f"watchers/{watcher.name}", _encode(watcher)


def _tier_sections(path: str, tier: Tier) -> Iterator[tuple[str, bytes]]:
    servers = [server.name for server in tier.servers]
    yield f"tiers/{path}", _encode({"servers": servers, "cloned_by_watcher": tier.cloned_by_watcher})
    for server in tier.servers:
        yield f"servers/{server.name}", _encode(server)
    for kind, mappings in (("moved", tier.moved), ("told", tier.told)):
        blocks: dict[int, dict[str, tuple[str, ...]]] = {}
        for shard, hosts in mappings.items():
            blocks.setdefault(shard // _SHARDS_OF_BLOCK, {})[str(shard)] = hosts
        for block, found in blocks.items():
            yield f"{kind}/{path}/{block:03}", _encode(found)


def _without_servers(database: Database) -> dict[str, Any]:  # Any: the fields of a database
    fields: dict[str, Any] = {name: getattr(database, name) for name in database.__struct_fields__ if name != "name"}
    named = {kind: {region: server.name for region, server in fields.pop(kind).items()} for kind in _OF_SERVERS}
    return {**fields, **{kind: names for kind, names in named.items() if names}}


def topology_of(sections: _Sections, source: str) -> Topology:
    """Return the document of these sections. ``source`` names it in errors.

    Raises `TopologyError` for a section that is missing or that nothing names, and as `parse_topology` does."""
    parts = _Parts(sections, source)
    head = parts.take(HEAD)
    changes = head.get("changes")
    document = {
        **head,
        "regions": [_region_of(parts, name) for name in head.get("regions", ())],
        "databases": [_database_of(parts, name) for name in head.get("databases", ())],
        "changes": None if changes is None else [parts.take(f"changes/{version}") for version in changes],
    }
    parts.check_all_taken()
    return parse_topology(_encode(document), source)


class _Parts:
    """The sections of a document while it is put together. (`Any`: a section's fields.)"""

    def __init__(self, sections: _Sections, source: str) -> None:
        self._sections: Final = sections
        self._source: Final = source
        self._left: Final = set(sections)

    def take(self, key: str) -> dict[str, Any]:
        """Return the section of a key, once."""
        found = self._sections.get(key)
        if found is None:
            raise TopologyError(f"{self._source}: the section {key} is missing")
        self._left.discard(key)
        try:
            return msgspec.json.decode(found, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TopologyError(f"{self._source}: the section {key} is wrong: {error}") from error

    def merged(self, kind: str, path: str) -> dict[str, Any]:
        """Return the contents of all blocks of a tier's mappings."""
        prefix = f"{kind}/{path}/"
        return {
            shard: hosts for key in self._sections if key.startswith(prefix) for shard, hosts in self.take(key).items()
        }

    def check_all_taken(self) -> None:
        """Raise `TopologyError` when sections are left over: nobody would notice a misspelt key."""
        if self._left:
            raise TopologyError(f"{self._source}: nothing names the section {min(self._left)}")


def _region_of(parts: _Parts, name: str) -> dict[str, Any]:
    region = parts.take(f"regions/{name}")
    return {
        "name": name,
        "leaders": _tier_of(parts, name, region.pop("leaders", "")),
        "followers": [_tier_of(parts, name, tier) for tier in region.pop("followers", ())],
        "tailers": [parts.take(f"tailers/{tailer}") for tailer in region.pop("tailers", ())],
        "watchers": [parts.take(f"watchers/{watcher}") for watcher in region.pop("watchers", ())],
        **region,  # what a later version has added is refused as in a file
    }


def _tier_of(parts: _Parts, region: str, name: str) -> dict[str, Any]:
    path = f"{region}/{name}"
    tier = parts.take(f"tiers/{path}")
    servers = [parts.take(f"servers/{server}") for server in tier.pop("servers", ())]
    mappings = {kind: parts.merged(kind, path) for kind in ("moved", "told")}
    return {"name": name, "servers": servers, **mappings, **tier}


def _database_of(parts: _Parts, name: str) -> dict[str, Any]:
    database = parts.take(f"databases/{name}")
    servers = {
        kind: {region: parts.take(f"database-servers/{server}") for region, server in database.pop(kind, {}).items()}
        for kind in _OF_SERVERS
    }
    return {"name": name, **servers, **database}
