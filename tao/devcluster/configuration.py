"""Computes the files of a development cluster from its record: the topology document and the servers' settings.

Between regions, leaders call leaders, followers call the leaders of the master region, replicas read from their
masters, and a second tailer reads from a master. So leaders and databases have an address for each other region, which
is a port of the delay line; nobody calls another region's followers. Nothing here starts a process or writes a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
import yaml

from tao.devcluster.database import InstanceSettings, default_cache_folder
from tao.devcluster.database_program import ServerOptions
from tao.devcluster.layout import LINE, PORT_KINDS, ClusterSettings, Member, Ports, Role, Shape
from tao.devcluster.line_control import LineSettings, Route
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.processes import Lifetime
from tao.devcluster.state_folder import ClusterRecord, StateFolder, service_accounts
from tao.model.topology import (
    CacheServer,
    Database,
    DatabaseAddress,
    DatabaseServer,
    Region,
    ServerAddress,
    TailerProcess,
    Tier,
    Topology,
    WatcherProcess,
)
from tao.model.versions import FIRST_EPOCH
from tao.schema.types import DEFAULT_ARENA


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """A connection between regions: from ``source`` to ``server`` in ``target``. ``kind``: grpc, frames or mysql."""

    source: str
    target: str
    server: str
    kind: str

    @property
    def key(self) -> str:
        """The name of its port in the ports of the delay line."""
        return _key(self.source, self.server, self.kind)


def _key(source: str, server: str, kind: str) -> str:
    return f"{source}>{server}/{kind}"


def crossings(shape: Shape) -> list[Crossing]:
    """List the connections between regions; there are none in a cluster of one region."""
    kinds = {Role.DATABASE: ("mysql",), Role.LEADER: ("grpc", "frames")}
    return [
        Crossing(source=source, target=member.region, server=member.name, kind=kind)
        for member in shape.members
        for source in shape.region_names
        if source != member.region
        for kind in kinds.get(member.role, ())
    ]


def line_routes(shape: Shape, ports: Ports) -> list[Route]:
    """Return the routes of the delay line."""
    return [
        Route(
            source=crossing.source,
            target=crossing.target,
            listen=ports[LINE][crossing.key],
            host=LOOPBACK,
            port=ports[crossing.server][crossing.kind],
        )
        for crossing in crossings(shape)
    ]


def build_topology(
    shape: Shape,
    version: int,
    ports: Ports,
    master_regions: Mapping[str, str],
    *,
    version_epochs: Mapping[str, int] | None = None,
    semi_sync: bool = False,
) -> Topology:
    """Return the topology document.

    ``master_regions``: the master region of each database. ``version_epochs``: the version epochs of databases that
    have had a promotion."""
    regions = shape.region_names

    def others(region: str) -> list[str]:
        return [other for other in regions if other != region]

    def database_server(region: str, database: str) -> DatabaseServer:
        name = shape.database_server(region, database)
        views = {
            source: DatabaseAddress(host=LOOPBACK, port=ports[LINE][_key(source, name, "mysql")])
            for source in others(region)
        }
        return DatabaseServer(name=name, host=LOOPBACK, port=ports[name]["mysql"], reached_from=views)

    def region_of(region: str) -> Region:
        tailers = [member for member in shape.members if member.role is Role.TAILER and member.region == region]
        watchers = [member for member in shape.members if member.role is Role.WATCHER and member.region == region]
        return Region(
            name=region,
            leaders=Tier(
                name="leaders",
                servers=tuple(_leader(name, others(region), ports) for name in shape.leaders_in(region)),
            ),
            followers=tuple(
                Tier(name=tier, servers=tuple(_cache_server(name, ports) for name in shape.followers_in(region, tier)))
                for tier in shape.tier_names
            ),
            tailers=tuple(
                TailerProcess(
                    name=tailer.name, database=tailer.database, admin=f"{LOOPBACK}:{ports[tailer.name]['admin']}"
                )
                for tailer in tailers
            ),
            watchers=tuple(
                WatcherProcess(name=watcher.name, admin=f"{LOOPBACK}:{ports[watcher.name]['admin']}")
                for watcher in watchers
            ),
        )

    return Topology(
        version=version,
        shards=shape.shards,
        regions=tuple(region_of(region) for region in regions),
        databases=tuple(
            Database(
                name=name,
                master_region=master_regions[name],
                servers={region: database_server(region, name) for region in regions},
                shards=(shards,),
                version_epoch=(version_epochs or {}).get(name, FIRST_EPOCH),
                semi_sync=semi_sync,
            )
            for name, shards in shape.shard_ranges.items()
        ),
    )


_SERVER_IDS_PER_REGION = 1_000


def _cache_server(name: str, ports: Ports) -> CacheServer:
    grpc, frames, admin = (f"{LOOPBACK}:{ports[name][kind]}" for kind in PORT_KINDS[Role.FOLLOWER])
    return CacheServer(name=name, grpc=grpc, frames=frames, admin=admin)


def _leader(name: str, other_regions: list[str], ports: Ports) -> CacheServer:
    """Return a leader, which other regions reach through the delay line."""

    def through_line(source: str, kind: str) -> str:
        return f"{LOOPBACK}:{ports[LINE][_key(source, name, kind)]}"

    views = {
        source: ServerAddress(grpc=through_line(source, "grpc"), frames=through_line(source, "frames"))
        for source in other_regions
    }
    return msgspec.structs.replace(_cache_server(name, ports), reached_from=views)


def lifetime_of(settings: ClusterSettings) -> Lifetime:
    """Return whether the cluster's processes may outlive this one."""
    return Lifetime.DETACHED if settings.detached else Lifetime.WITH_PARENT


def instance_settings(
    member: Member, record: ClusterRecord, folder: StateFolder, settings: ClusterSettings, *, port: int
) -> InstanceSettings:
    """Return the settings of a database server of the cluster. ``port`` 0 picks a free one."""
    shape = record.shape
    number = shape.database_names.index(member.database) + 1
    return InstanceSettings(
        folder=folder.database(member.name),
        accounts=service_accounts(record.passwords),
        cache_folder=default_cache_folder(os.environ),
        port=port,
        options=ServerOptions(
            server_id=number + _SERVER_IDS_PER_REGION * shape.region_names.index(member.region),
            gtid_domain=number,
            replicated=shape.is_distributed,
            semi_sync=settings.semi_sync,
            # With several servers each starts closed to writes; the one that the topology names as master is opened.
            read_only=shape.is_distributed,
            durability=settings.durability,
            buffer_pool_mb=settings.buffer_pool_mb,
        ),
        lifetime=lifetime_of(settings),
        start_seconds=settings.start_seconds,
    )


def settings_text(
    member: Member, record: ClusterRecord, folder: StateFolder, settings: ClusterSettings, arenas: set[str]
) -> bytes:
    """Return the settings file of a server (YAML) or of the delay line (JSON).

    ``arenas``: the names of the arenas in the schema.
    """
    shape, ports = record.shape, record.ports
    if member.role is Role.LINE:
        routes = line_routes(shape, ports)
        line = LineSettings(control=str(folder.line_control), routes=routes, rtt_ms=record.rtt_ms)
        return msgspec.json.format(msgspec.json.encode(line))
    accounts = service_accounts(record.passwords)
    admins = {name: f"{LOOPBACK}:{taken['admin']}" for name, taken in ports.items() if "admin" in taken}
    found: dict[str, object] = {
        "name": member.name,
        "topology_file": str(folder.topology),
        "log_level": settings.log_level,
    }
    if member.role in (Role.TAILER, Role.WATCHER):
        found |= {"region": member.region, "admin": admins[member.name]}
    if member.role is Role.WATCHER:
        found |= {
            "administrator_password": accounts.administrator.password,
            "replicator_password": accounts.replicator.password,
            "peers": {
                other.region: admins[other.name]
                for other in shape.members
                if other.role is Role.WATCHER and other.region != member.region
            },
        }
    else:
        found["schema_file"] = str(folder.schema)
    if member.role is Role.TAILER:
        found |= {
            "database_server": shape.database_server(member.region, member.database),
            "state_folder": str(folder.path / "servers" / member.name),
            "user": accounts.replicator.user,
            "password": accounts.replicator.password,
        }
    if member.role in (Role.LEADER, Role.FOLLOWER):
        found |= {
            "cache_mb": settings.cache_mb,
            "arena_mb": dict.fromkeys(sorted(arenas - {DEFAULT_ARENA}), settings.arena_mb),
            "reader_user": accounts.reader.user,
            "reader_password": accounts.reader.password,
        }
    if member.role is Role.LEADER:
        found |= {
            "leader_user": accounts.leader.user,
            "leader_password": accounts.leader.password,
            "spool": {"folder": str(folder.path / "servers" / member.name)},
        }
    return yaml.safe_dump(found, sort_keys=False).encode()
