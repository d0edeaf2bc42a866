"""The text of the topology document, and its rules.

The text is JSON, with every field written out and in a fixed order, so that two versions can be compared line by line.
All other code relies on the rules: `tao.routing` and the servers do not check again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import msgspec

from tao.model.errors import TopologyError
from tao.model.ids import MAX_SHARDS
from tao.model.topology import Database, Region, TailerProcess, Tier, Topology, WatcherProcess
from tao.model.versions import FIRST_EPOCH, MAX_EPOCH
from tao.routing.shard_map import ring_points
from tao.routing.topology_changes import is_range_text

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_FAULTS_SHOWN: Final = 10
_Key = TypeVar("_Key", int, str)
_Value = TypeVar("_Value")


def parse_topology(text: bytes | str, source: str) -> Topology:
    """Parse and check a document. ``source`` names it in errors. Raises `TopologyError` for text that is not JSON, has
    unknown fields, lacks some, or breaks a rule of `check_topology`."""
    topology = decode_topology(text, source)
    unknown = list(_unknown(msgspec.json.decode(text), msgspec.to_builtins(topology, str_keys=True), "$"))
    if unknown:
        raise TopologyError(f"{source}: there is no such field: {', '.join(unknown[:_FAULTS_SHOWN])}")
    try:
        check_topology(topology)
    except TopologyError as error:
        raise TopologyError(f"{source}: {error.message}") from error
    return topology


def decode_topology(text: bytes | str, source: str) -> Topology:
    """Decode a document that a server has checked and sent: no rule is checked again, and fields that a later version
    has added are passed over. Raises `TopologyError` for text that is no topology."""
    try:
        return msgspec.json.decode(text, type=Topology)
    except msgspec.ValidationError as error:
        raise TopologyError(f"{source}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TopologyError(_syntax_fault(text, source, error)) from error


def _syntax_fault(text: bytes | str, source: str, error: Exception) -> str:
    """Return the message about text that is not JSON, with line and column, which ``error`` does not know."""
    try:
        json.loads(text)
    except json.JSONDecodeError as fault:
        return f"{source}:{fault.lineno}: is not JSON: {fault.msg}, at column {fault.colno}"
    except (ValueError, RecursionError):
        pass  # it is no UTF-8 text, or nested beyond all bounds
    return f"{source}: is not JSON: {error}"


def encode_region(topology: Topology, region: str) -> bytes:
    """Return the JSON of the part of a document that applications of ``region`` need, for `decode_topology`: without
    other regions, marks and recorded changes. Raises `TopologyError` when there is no such region."""
    part = msgspec.structs.replace(topology, regions=(topology.region(region),), marked_by_watcher=(), changes=None)
    return msgspec.json.encode(part)


def dump_topology(topology: Topology) -> str:
    """Return the text of a document, the same for equal documents."""
    replace = msgspec.structs.replace  # dictionaries of equal documents may differ in order

    def ordered(tier: Tier) -> Tier:
        servers = tuple(replace(server, reached_from=_sorted(server.reached_from)) for server in tier.servers)
        return replace(tier, servers=servers, moved=_sorted(tier.moved), told=_sorted(tier.told))

    regions = tuple(
        replace(region, leaders=ordered(region.leaders), followers=tuple(map(ordered, region.followers)))
        for region in topology.regions
    )
    databases = tuple(
        replace(
            database,
            servers={
                region: replace(server, reached_from=_sorted(server.reached_from))
                for region, server in sorted(database.servers.items())
            },
            standbys={
                region: replace(server, reached_from=_sorted(server.reached_from))
                for region, server in sorted(database.standbys.items())
            },
        )
        for database in topology.databases
    )
    document = msgspec.to_builtins(replace(topology, regions=regions, databases=databases), str_keys=True)
    # Programs of an earlier version refuse fields that they do not know.
    if document["changes"] is None:
        del document["changes"]
    for database in document["databases"]:
        if not database["standbys"]:
            del database["standbys"]
    for region in document["regions"]:
        if not region["watchers"]:
            del region["watchers"]
        for tailer in region["tailers"]:
            for key in ("down", "frames"):
                if not tailer[key]:
                    del tailer[key]
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def _sorted(mapping: dict[_Key, _Value]) -> dict[_Key, _Value]:
    return dict(sorted(mapping.items()))


def check_topology(topology: Topology) -> None:
    """Raise `TopologyError` that names up to ten broken rules, each by its place in the document."""
    faults = list(_faults(topology))
    if faults:
        more = [f"… and {len(faults) - _FAULTS_SHOWN} more"] if len(faults) > _FAULTS_SHOWN else []
        raise TopologyError("\n".join([*faults[:_FAULTS_SHOWN], *more]))


def _faults(topology: Topology) -> Iterator[str]:
    if topology.version < 1:
        yield f"version: is {topology.version}; versions start at 1"
    if not 1 <= topology.shards <= MAX_SHARDS:
        yield f"shards: is {topology.shards}; there can be 1 to {MAX_SHARDS}"
        return  # the checks below count shards
    if not topology.regions:
        yield "regions: there must be at least one"
    yield from _name_faults("regions", [region.name for region in topology.regions])
    servers = [server.name for _, server in topology.cache_servers]
    servers += [tailer.name for region in topology.regions for tailer in region.tailers]
    servers += [watcher.name for region in topology.regions for watcher in region.watchers]
    yield from _name_faults("cache servers, tailers and watchers (of all regions and tiers)", servers)
    databases = {database.name for database in topology.databases}
    for region in topology.regions:
        yield from _region_faults(region, databases)
    regions = {region.name for region in topology.regions}
    for place in topology.tiers:
        yield from _tier_faults(place.path, place.tier, topology.shards)
        for server in place.tier.servers:
            yield from _viewpoint_faults(f"{place.path}/{server.name}", server.reached_from, regions)
    yield from _name_faults("databases", [database.name for database in topology.databases])
    database_servers = [each.server.name for each in topology.database_servers]
    yield from _name_faults("database servers (of all databases)", database_servers)
    for database in topology.databases:
        yield from _database_faults(database, regions)
    yield from _range_faults(topology)
    yield from _change_faults(topology)


def _name_faults(where: str, names: list[str]) -> Iterator[str]:
    for name, times in Counter(names).items():
        if not _NAME.fullmatch(name):
            yield f"{where}: {name!r} is no name; use 1 to 63 letters, digits, '_', '.' and '-'"
        if times > 1:
            yield f"{where}: {name!r} is there {times} times; names must be unique"


def _region_faults(region: Region, databases: set[str]) -> Iterator[str]:
    if not region.followers:
        yield f"{region.name}: has no follower tier; clients need at least one"
    yield from _name_faults(f"tiers of {region.name}", [tier.name for tier in region.tiers])
    for tailer in region.tailers:
        if tailer.database not in databases:
            yield f"{region.name}/{tailer.name}.database: there is no database {tailer.database!r}"
    processes: list[TailerProcess | WatcherProcess] = [*region.tailers, *region.watchers]
    for process in processes:
        for kind, address in (("admin", process.admin), ("frames", process.frames)):
            if address:
                yield from _address_faults(f"{region.name}/{process.name}.{kind}", address)


def _tier_faults(where: str, tier: Tier, shards: int) -> Iterator[str]:
    names = {server.name for server in tier.servers}
    for server in tier.servers:
        if server.registration and not server.registration.share > 0:
            yield f"{where}/{server.name}.registration.share: is {server.registration.share}; a share is above 0"
        yield from _serving_faults(f"{where}/{server.name}", server.grpc, server.frames)
        for region, there in server.reached_from.items():
            yield from _serving_faults(f"{where}/{server.name}.reached_from.{region}", there.grpc, there.frames)
        if server.admin:
            yield from _address_faults(f"{where}/{server.name}.admin", server.admin)
    if not tier.servers:
        yield f"{where}: has no servers"
    else:
        try:
            ring_points({server.name: server.weight for server in tier.servers})
        except TopologyError as error:
            yield f"{where}: {error.message}"
    mappings = [("moved", *item) for item in tier.moved.items()] + [("told", *item) for item in tier.told.items()]
    for kind, shard, hosts in mappings:
        place = f"{where}.{kind}.{shard}"
        if not 0 <= shard < shards:
            yield f"{place}: there is no such shard; they are 0 to {shards - 1}"
        if not hosts:
            yield f"{place}: names no server; remove the mapping to give the shard back to the ring"
        if len(set(hosts)) != len(hosts):
            yield f"{place}: names a server twice"
        for name in hosts:
            if name not in names:
                yield f"{place}: {name!r} is not a server of this tier"


def _serving_faults(where: str, grpc: str, frames: str) -> Iterator[str]:
    yield from _address_faults(f"{where}.grpc", grpc)
    if frames and not frames.startswith("unix:/"):
        yield from _address_faults(f"{where}.frames", frames)


def _viewpoint_faults(where: str, reached_from: Iterable[str], regions: set[str]) -> Iterator[str]:
    for region in reached_from:
        if region not in regions:
            yield f"{where}.reached_from: there is no region {region!r}"


def _address_faults(where: str, address: str) -> Iterator[str]:
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65_535 or " " in host:
        yield f"{where}: {address!r} is no address; write host:port"


def _database_faults(database: Database, regions: set[str]) -> Iterator[str]:
    where = f"databases/{database.name}"
    if database.master_region not in regions:
        yield f"{where}.master_region: there is no region {database.master_region!r}"
    for region in sorted(regions - set(database.servers)):
        yield f"{where}.servers: has none in region {region!r}; a database has one in each region"
    for region in sorted(set(database.servers) - regions):
        yield f"{where}.servers: there is no region {region!r}"
    for region in sorted(set(database.standbys) - regions):
        yield f"{where}.standbys: there is no region {region!r}"
    if not FIRST_EPOCH <= database.version_epoch <= MAX_EPOCH:
        yield f"{where}.version_epoch: is {database.version_epoch}; epochs are {FIRST_EPOCH} to {MAX_EPOCH}"
    for server in database.places.values():
        if not server.socket and not (server.host and 1 <= server.port <= 65_535):
            yield f"{where}/{server.name}: needs a socket, or a host and a port from 1 to 65535"
        yield from _viewpoint_faults(f"{where}/{server.name}", server.reached_from, regions)
        for region, there in server.reached_from.items():
            if not (there.host and 1 <= there.port <= 65_535):
                yield f"{where}/{server.name}.reached_from.{region}: needs a host and a port from 1 to 65535"


def _range_faults(topology: Topology) -> Iterator[str]:
    owners: dict[int, str] = {}
    for database in topology.databases:
        for first, last in database.shards:
            where = f"databases/{database.name}.shards[{first}, {last}]"
            if not 0 <= first <= last < topology.shards:
                yield f"{where}: is no range within 0 to {topology.shards - 1}"
                continue
            taken = next((shard for shard in range(first, last + 1) if shard in owners), None)
            if taken is not None:
                yield f"{where}: shard {taken} belongs to {owners[taken]} already"
            owners.update(dict.fromkeys(range(first, last + 1), database.name))
    missing = next((shard for shard in range(topology.shards) if shard not in owners), None)
    if missing is not None:
        yield f"databases: none holds shard {missing} ({topology.shards - len(owners)} shards have no database)"


def _change_faults(topology: Topology) -> Iterator[str]:
    before = 0
    for change in topology.changes or ():
        where = f"changes/{change.version}"
        if not before < change.version <= topology.version:
            yield f'{where}: versions ascend, up to the document\'s own; write "changes": [] to begin anew'
        before = change.version
        for region, text in change.leaders.items():
            if not is_range_text(text, topology.shards):
                yield (
                    f"{where}.leaders.{region}: {text!r} is not of shards 0 to {topology.shards - 1}; "
                    "write ranges as in 3,17-20"
                )


def _unknown(found: object, known: object, path: str) -> Iterator[str]:
    """Yield the paths that the document's definition does not have: a misspelt ``down`` must not be taken for its
    default."""
    if isinstance(found, dict) and isinstance(known, dict):
        for key, value in found.items():
            if key not in known:
                yield f"{path}.{key}"
            elif isinstance(value, dict | list) and value:
                yield from _unknown(value, known[key], f"{path}.{key}")
    elif isinstance(found, list) and isinstance(known, list | tuple):
        for index, (inner, inner_known) in enumerate(zip(found, known, strict=True)):
            if isinstance(inner, dict | list):
                yield from _unknown(inner, inner_known, f"{path}[{index}]")
