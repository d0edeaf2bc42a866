"""Reads and changes the documents that describe a cluster: the topology, the schema and the access document.

A change of the topology is stored by compare-and-set, so that two operators, or an operator and a watcher, never
overwrite each other's change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import tao
from tao.access.document import AccessDocument, load_access
from tao.etcd.location import EtcdLocation, EtcdSettings, Location
from tao.model.errors import AccessError, OperatorError, SchemaError, TopologyConflict, TopologyError, unreadable
from tao.model.ports import TopologyStore
from tao.model.topology import Database, Topology
from tao.replication.locks import Locks
from tao.routing.routes import Routes
from tao.schema.registry import Schema, load_schema
from tao.topology import edits
from tao.topology.document import dump_topology, parse_topology
from tao.topology.stores import ACCESS_KEY, SCHEMA_KEY, EtcdConnections, TextDocuments, open_topology

_MAX_LISTED_SHARDS: Final = 20
"""Moved shards of one tier that are listed one by one; beyond that only their number is shown."""


def load_topology(place: Location) -> Topology:
    """Return the topology document in a file, or in etcd. Raises `OperatorError` when it cannot be read or is wrong.

    Not for code that runs in an event loop."""
    if isinstance(place, EtcdLocation):
        return asyncio.run(topology_file(place).load())
    try:
        text = place.read_bytes()
    except OSError as error:
        raise OperatorError(unreadable(place, error)) from error
    return parse_topology(text, str(place))


def topology_file(place: Location) -> TopologyStore:
    """Return the store of a topology, in a file or in etcd; its errors are raised and not logged."""

    def fail(error: TopologyError) -> None:
        raise error

    return open_topology(place, _connections(), fail)


def text_documents(place: EtcdLocation) -> TextDocuments:
    """Return the schema and the access document beside a topology in etcd."""
    return TextDocuments(_connections().to(place), place)


def topology_locks(place: Location) -> Locks:
    """Return the locks beside a topology."""
    from tao.replication.etcd_locks import open_locks  # it needs gRPC, and most commands need no locks

    return open_locks(place, _connections())


def _connections() -> EtcdConnections:
    """Return connections with the settings of a command's environment. They end with the command."""
    return EtcdConnections(EtcdSettings.from_environment())


def example_schema_file() -> Path:
    """Return the path of the schema that comes with this package: beside it in a checkout, inside it in a wheel."""
    package = Path(tao.__file__).parent
    installed = package / "_config" / "schema.yaml"
    return installed if installed.exists() else package.parent / "config" / "schema.yaml"


def read_schema(place: Location) -> tuple[Schema, str]:
    """Return the schema in a file or in etcd, and its text. With etcd not for code that runs in an event loop.

    Raises `OperatorError` when the file cannot be read, `SchemaError` when the schema is wrong."""
    text = _read_text(place, SCHEMA_KEY, SchemaError)
    return load_schema(text, str(place)), text


def read_access(place: Location) -> AccessDocument:
    """Return the access document in a file or in etcd. With etcd not for code that runs in an event loop.

    Raises `OperatorError` when the file cannot be read, `AccessError` when the document is wrong."""
    return load_access(_read_text(place, ACCESS_KEY, AccessError), str(place))


def _read_text(place: Location, key: str, failure: type[OperatorError]) -> str:
    if isinstance(place, EtcdLocation):
        text = asyncio.run(text_documents(place).read(key))
        if text is None:
            raise failure(f"{place} has no {key}: store one with `tao topology import`")
        return text
    try:
        return place.read_text(encoding="utf-8")
    except OSError as error:
        raise OperatorError(unreadable(place, error)) from error
    except UnicodeDecodeError as error:
        raise failure(unreadable(place, error)) from error


def type_name(schema: Schema, atype: int) -> str:
    """Return the label of an association type, its number when the schema does not know it, or "" for 0 (no type)."""
    found = next((each.label for each in schema.assocs if each.number == atype), "")
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
    known = ", ".join(sorted(each.server.name for each in topology.database_servers))
    raise TopologyError(f"there is no database server {name!r}; there are {known}")


async def mark_in_file(
    file: Location, name: str, *, down: bool, check: Callable[[Topology, str], None] | None = None
) -> Topology:
    """Mark a server down or up in a topology file and return the document, unchanged when it was marked so already.

    ``check`` may refuse the document as it was, before anything is stored. Raises `TopologyError`."""

    def mark(before: Topology) -> Topology:
        if check is not None:
            check(before, name)
        return edits.mark_any(before, name, down)

    return await change_in_file(file, mark)


async def change_in_file(file: Location, edit: Callable[[Topology], Topology]) -> Topology:
    """Store what ``edit`` makes of the topology, and return it; the document itself where nothing changes. Raises
    `TopologyError`, and what ``edit`` raises."""
    store = topology_file(file)
    while True:
        before = await store.load()
        after = edit(before)
        if msgspec.structs.replace(after, version=before.version) == before:
            return before
        try:
            return await store.change(before.version, after)
        except TopologyConflict:
            continue  # a watcher, or a server that has registered itself, stored a change of its own in between


class ClusterTexts(NamedTuple):
    """The documents of a cluster as text; None for one that there is not, or that is not meant. ``sources``: what
    errors call them, say by the names of their files."""

    topology: str
    schema: str | None
    access: str | None
    sources: tuple[str, str, str] = ("the topology", "the schema", "the access document")


async def import_documents(place: Location, texts: ClusterTexts, above: int) -> Topology:
    """Store whole documents where a cluster's are, whatever was there, and return the topology, which is stored first.

    It is stored under its own version, or a higher one where that is not above ``above`` and the version that is there.
    Servers that skip versions cannot rely on the record of changes of another document, so it begins anew. Raises
    `TopologyError`, and what is wrong with another document."""
    topology_source, schema_source, access_source = texts.sources
    document = parse_topology(texts.topology, topology_source)
    if texts.schema is not None:
        load_schema(texts.schema, schema_source)
    if texts.access is not None:
        load_access(texts.access, access_source)
    others = {key: text for key, text in ((SCHEMA_KEY, texts.schema), (ACCESS_KEY, texts.access)) if text is not None}
    if others and isinstance(place, Path):
        raise TopologyError(f"{place} is a file: the {next(iter(others))} beside it is a file, too; copy it there")
    store = topology_file(place)
    try:
        found = (await store.load()).version
    except TopologyError:
        found = 0  # there is none; another reason is found when it is stored
    wanted = msgspec.structs.replace(
        document,
        version=max(document.version, found + 1, above + 1),
        changes=None if document.changes is None else (),
    )
    stored = await store.replace(found, wanted)
    if isinstance(place, EtcdLocation):
        for key, text in others.items():
            await text_documents(place).write(key, text)
    return stored


async def export_documents(place: Location) -> ClusterTexts:
    """Return the documents that are at a place: of a file the topology alone. Raises `TopologyError`."""
    topology = dump_topology(await topology_file(place).load())
    if isinstance(place, Path):
        return ClusterTexts(topology, None, None)
    others = text_documents(place)
    return ClusterTexts(topology, await others.read(SCHEMA_KEY), await others.read(ACCESS_KEY))


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
