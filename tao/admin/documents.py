"""Reads and changes the files that describe a cluster: the topology document, the schema and the access document.

A change of the topology is stored by compare-and-set, so that two operators, or an operator and a watcher, never
overwrite each other's change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import tao
from tao.access.document import AccessDocument, load_access
from tao.model.errors import AccessError, OperatorError, SchemaError, TopologyConflict, TopologyError
from tao.model.topology import Database, Topology
from tao.routing.routes import Routes
from tao.schema.registry import Schema, load_schema
from tao.topology import edits
from tao.topology.document import parse_topology
from tao.topology.file_store import TopologyFile

_MAX_LISTED_SHARDS: Final = 20
"""Moved shards of one tier that are listed one by one; beyond that only their number is shown."""


def load_topology(path: Path) -> Topology:
    """Return the topology document in a file. Raises `OperatorError` when it cannot be read or is wrong."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise OperatorError(f"cannot read the topology file {path}: {error.strerror}") from error
    return parse_topology(text, str(path))


def topology_file(path: Path) -> TopologyFile:
    """Return the store of a topology file; errors of the file are raised and not logged."""

    def fail(error: TopologyError) -> None:
        raise error

    return TopologyFile(path, on_error=fail)


def example_schema_file() -> Path:
    """Return the path of the schema that comes with this package: beside it in a checkout, inside it in a wheel."""
    package = Path(tao.__file__).parent
    installed = package / "_config" / "schema.yaml"
    return installed if installed.exists() else package.parent / "config" / "schema.yaml"


def read_schema(path: Path) -> tuple[Schema, str]:
    """Return the schema in a file and the file's text.

    Raises `OperatorError` when the file cannot be read, `SchemaError` when the schema is wrong."""
    text = _read_text(path, "schema file", SchemaError)
    return load_schema(text, str(path)), text


def read_access(path: Path) -> AccessDocument:
    """Return the access document in a file.

    Raises `OperatorError` when the file cannot be read, `AccessError` when the document is wrong."""
    return load_access(_read_text(path, "access document", AccessError), str(path))


def _read_text(path: Path, what: str, failure: type[OperatorError]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OperatorError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise failure(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def type_name(schema: Schema, atype: int) -> str:
    """Return the name of an association type, its number when the schema does not know it, or "" for 0 (no type)."""
    found = next((each.name for each in schema.assocs if each.number == atype), "")
    return found or (str(atype) if atype else "")


def find_tier(topology: Topology, text: str) -> tuple[str, str]:
    """Return the region and the tier that ``text`` names, as TIER or REGION/TIER. Raises `TopologyError`."""
    fitting = [place for place in topology.tiers if text in (place.tier.name, place.path)]
    if len(fitting) == 1:
        return fitting[0].region.name, fitting[0].tier.name
    known = ", ".join(place.path for place in fitting or topology.tiers)
    raise TopologyError(f"{text!r} names {'no tier' if not fitting else 'several tiers'}; name one of {known}")


def is_database_server(topology: Topology, name: str) -> bool:
    """True when a server of this name belongs to a database, and not to a cache tier."""
    return any(each.server.name == name for each in topology.database_servers)


def database_of_server(topology: Topology, name: str) -> Database:
    """Return the database that a database server belongs to. Raises `TopologyError` when there is no such server."""
    for each in topology.database_servers:
        if each.server.name == name:
            return each.database
    raise TopologyError(f"there is no database server {name!r}")


async def mark_in_file(
    file: Path, name: str, *, down: bool, check: Callable[[Topology, str], None] | None = None
) -> Topology:
    """Mark a server down or up in a topology file and return the document, unchanged when it was marked so already.

    ``check`` may refuse the document as it was, before anything is stored. Raises `TopologyError`."""
    store = topology_file(file)
    while True:
        before = await store.load()
        if check is not None:
            check(before, name)
        after = edits.mark_any(before, name, down)
        if msgspec.structs.replace(after, version=before.version) == before:
            return before
        try:
            return await store.change(before.version, after)
        except TopologyConflict:
            continue  # a watcher stored a mark of its own in between


class TopologyChange(NamedTuple):
    """One difference between two topologies, as text for a person."""

    what: str
    before: str
    after: str


def topology_changes(before: Topology, after: Topology) -> list[TopologyChange]:
    """List what a change does to servers, marks and the placement of shards."""
    old, new = _servers(before), _servers(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    changes = [TopologyChange(name, old.get(name, "-"), new.get(name, "-")) for name in names]
    was_at, now_at = _hosts(before), _hosts(after)
    for place, now in now_at.items():
        was = was_at[place]
        moved = [shard for shard in range(after.shards) if was[shard] != now[shard]]
        changes += [
            TopologyChange(f"{place} shard {shard}", ", ".join(was[shard]), ", ".join(now[shard]))
            for shard in moved[:_MAX_LISTED_SHARDS]
        ]
        if len(moved) > _MAX_LISTED_SHARDS:
            changes.append(TopologyChange(f"{place}: {len(moved) - _MAX_LISTED_SHARDS:,} more shards", "…", "…"))
    if not changes and _mappings(before) != _mappings(after):
        # A shard mapped by hand to where the ring has it anyway: the mapping matters once the ring changes.
        changes.append(TopologyChange("mapped by hand", _mappings(before), _mappings(after)))
    if before.changes is None and after.changes is not None:
        changes.append(TopologyChange("recorded changes", "none", "the last 64"))
    return changes


def _servers(found: Topology) -> dict[str, str]:
    caches = {
        server.name: f"{place.path} {server.grpc} {'down' if server.down else 'up'}"
        for place, server in found.cache_servers
    }
    databases = {
        server.name: f"{database.name} in {region} {'down' if server.down else 'up'}"
        for database, region, server in found.database_servers
    }
    return {**caches, **databases}


def _hosts(found: Topology) -> dict[str, list[tuple[str, ...]]]:
    routes = Routes(found)
    return {
        place.path: [
            tuple(server.name for server in routes.tier(place.region.name, place.tier.name).hosts(shard))
            for shard in range(found.shards)
        ]
        for place in found.tiers
    }


def _mappings(found: Topology) -> str:
    return ", ".join(
        f"{place.path} {shard}: {' '.join(servers)}"
        for place in found.tiers
        for shard, servers in place.tier.moved.items()
    )
