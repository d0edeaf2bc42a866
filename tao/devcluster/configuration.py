"""Computes the files of a development cluster from its record: the topology document and the servers' settings.

Between regions, leaders call leaders, followers call the leaders of the master region, replicas read from their
masters, and a second tailer reads from a master. So leaders and databases have an address for each other region, which
is a port of the delay line; nobody calls another region's followers. Nothing here starts a process or writes a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import yaml

from tao.devcluster.certificates import cluster_accounts, tls_files
from tao.devcluster.database import InstanceSettings, default_cache_folder
from tao.devcluster.database_program import ServerOptions
from tao.devcluster.layout import LINE, PORT_KINDS, ClusterSettings, Member, Ports, Role, Shape
from tao.devcluster.line_control import LineSettings, Route
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.state_folder import ClusterRecord, StateFolder, TopologyOutline, etcd_location
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
from tao.replication.accounts import TlsDemand
from tao.schema.types import DEFAULT_ARENA

_SERVER_IDS_PER_REGION = 1_000
_ARENA_MB = 64


class Crossing(NamedTuple):
    """A connection between regions: from ``source`` to ``server`` in ``target``. ``kind``: grpc, frames, mysql or
    client."""

    source: str
    target: str
    server: str
    kind: str

    @property
    def key(self) -> str:
        """The name of its port in the ports of the delay line."""
        return f"{self.source}>{self.server}/{self.kind}"


def crossings(shape: Shape) -> list[Crossing]:
    """List the connections between regions; there are none in a cluster of one region."""
    kinds = {Role.ETCD: ("client",), Role.DATABASE: ("mysql",), Role.LEADER: ("grpc", "frames")}
    return [
        Crossing(source, member.region, member.name, kind)
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


def _listed_followers(shape: Shape, region: str, tier: str) -> list[Member]:
    """Return the followers of a tier that do not add themselves to the topology."""
    return [each for each in shape.select(Role.FOLLOWER, region, tier=tier) if not each.registers]


def build_topology(record: ClusterRecord, former: TopologyOutline, *, semi_sync: bool = False) -> Topology:
    """Return the topology document. Masters, version epochs and the shards of each database are those of the ``former``
    document, if it has any."""
    shape, ports = record.shape, record.ports
    through_line: dict[str, dict[str, dict[str, int]]] = {}
    for crossing in crossings(shape):
        views = through_line.setdefault(crossing.server, {})
        views.setdefault(crossing.source, {})[crossing.kind] = ports[LINE][crossing.key]

    def database_server(member: Member) -> DatabaseServer:
        views = {
            source: DatabaseAddress(host=LOOPBACK, port=seen["mysql"])
            for source, seen in through_line.get(member.name, {}).items()
        }
        return DatabaseServer(name=member.name, host=LOOPBACK, port=ports[member.name]["mysql"], reached_from=views)

    def cache_servers(members: Iterable[Member]) -> Iterator[CacheServer]:
        for name in (member.name for member in members):
            views = {
                source: ServerAddress(**{kind: f"{LOOPBACK}:{port}" for kind, port in seen.items()})
                for source, seen in through_line.get(name, {}).items()
            }
            grpc, frames, admin = (f"{LOOPBACK}:{ports[name][kind]}" for kind in PORT_KINDS[Role.LEADER])
            yield CacheServer(name=name, grpc=grpc, frames=frames, admin=admin, reached_from=views)

    def region_of(region: str) -> Region:
        return Region(
            name=region,
            leaders=Tier(name="leaders", servers=tuple(cache_servers(shape.select(Role.LEADER, region)))),
            followers=tuple(
                Tier(name=tier, servers=tuple(cache_servers(_listed_followers(shape, region, tier))))
                for tier in shape.tier_names
            ),
            tailers=tuple(
                TailerProcess(
                    name=tailer.name,
                    database=tailer.database,
                    frames=f"{LOOPBACK}:{ports[tailer.name]['frames']}",
                    admin=f"{LOOPBACK}:{ports[tailer.name]['admin']}",
                )
                for tailer in shape.select(Role.TAILER, region)
            ),
            watchers=tuple(
                WatcherProcess(
                    name=watcher.name,
                    **{kind: f"{LOOPBACK}:{ports[watcher.name][kind]}" for kind in PORT_KINDS[Role.WATCHER]},
                )
                for watcher in shape.select(Role.WATCHER, region)
            ),
        )

    return Topology(
        version=record.topology_version,
        shards=former.shards or shape.shards,
        regions=tuple(map(region_of, shape.region_names)),
        databases=tuple(
            _database(name, shape, former, database_server, semi_sync=semi_sync) for name in shape.database_names
        ),
        changes=(),
    )


def _database(
    name: str,
    shape: Shape,
    former: TopologyOutline,
    server_of: Callable[[Member], DatabaseServer],
    *,
    semi_sync: bool,
) -> Database:
    former_standbys = former.standbys()

    def servers_in(region: str) -> list[DatabaseServer]:
        """Return the server that serves a region, then its standby, if any."""
        members = shape.select(Role.DATABASE, region, database=name)
        return [server_of(each) for each in sorted(members, key=lambda each: each.name in former_standbys)]

    return Database(
        name=name,
        master_region=former.master_regions(shape)[name],
        servers={region: servers_in(region)[0] for region in shape.region_names},
        standbys={region: standby for region in shape.region_names for standby in servers_in(region)[1:]},
        shards=former.shard_ranges(shape)[name],
        version_epoch=former.version_epochs().get(name, FIRST_EPOCH),
        semi_sync=semi_sync,
    )


def instance_settings(
    member: Member, record: ClusterRecord, folder: StateFolder, settings: ClusterSettings
) -> InstanceSettings:
    """Return the settings of a database server of the cluster."""
    shape = record.shape
    number = shape.database_names.index(member.database) + 1
    of_region = shape.select(Role.DATABASE, member.region, database=member.database)
    return InstanceSettings(
        folder=folder.database(member.name),
        accounts=cluster_accounts(folder, record),
        cache_folder=default_cache_folder(os.environ),
        port=record.ports[member.name]["mysql"],
        options=ServerOptions(
            server_id=number
            + _SERVER_IDS_PER_REGION * shape.region_names.index(member.region)
            + _SERVER_IDS_PER_REGION // 2 * of_region.index(member),
            gtid_domain=number,
            replicated=shape.replicates,
            semi_sync=settings.semi_sync,
            # With several servers each starts closed to writes; the one that the topology names as master is opened.
            read_only=shape.replicates,
            durability=settings.durability,
            buffer_pool_mb=settings.buffer_pool_mb,
            tls=tls_files(folder, member.name) if settings.tls else None,
        ),
        demand=TlsDemand.CERTIFICATE if settings.tls else TlsDemand.NONE,
        detached=settings.detached,
        start_seconds=settings.start_seconds,
    )


def _registration(member: Member, ports: Mapping[str, Mapping[str, int]], step_seconds: float) -> dict[str, object]:
    """Return the settings by which a server adds itself to the topology."""
    addresses = {kind: f"{LOOPBACK}:{ports[member.name][kind]}" for kind in PORT_KINDS[member.role]}
    return {
        "join": True,
        "region": member.region,
        "tier": member.tier,
        "step_seconds": step_seconds,
        **addresses,
    }


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
    accounts = cluster_accounts(folder, record)
    own_folder = str(folder.path / "servers" / member.name)

    def admin(one: Member) -> str:
        return f"{LOOPBACK}:{ports[one.name]['admin']}"

    etcd = etcd_location(record, member.region)
    found: dict[str, object] = {
        "name": member.name,
        "topology_file": str(etcd or folder.topology),
        "log_level": settings.log_level,
    }
    if settings.tls:
        files = tls_files(folder, member.name)
        named = {field: str(getattr(files, field)) for field in ("certificate", "private_key", "authorities")}
        found["tls"] = {**named, "cluster": files.cluster}
        if member.role is not Role.WORKER:
            found["database_tls"] = named
    if member.role in (Role.TAILER, Role.WATCHER, Role.WORKER):
        found |= {"region": member.region, "admin": admin(member)}
    if member.role is Role.WATCHER:
        account = accounts.watcher or accounts.administrator
        found |= {
            "administrator_user": account.user,
            "administrator_password": account.password,
            "replicator_password": accounts.replicator.password,
        }
    elif member.role is not Role.WORKER:
        found["schema_file"] = str(etcd or folder.schema)
    if member.role is Role.TAILER:
        found |= {
            "database_server": shape.database_server(member.region, member.database),
            "state_folder": own_folder,
            "user": accounts.replicator.user,
            "password": accounts.replicator.password,
        }
    if member.role in (Role.LEADER, Role.FOLLOWER):
        found |= {
            "cache_mb": settings.cache_mb,
            "arena_mb": dict.fromkeys(sorted(arenas - {DEFAULT_ARENA}), _ARENA_MB),
            "reader_user": accounts.reader.user,
            "reader_password": accounts.reader.password,
        }
    if member.registers:
        found["registration"] = _registration(member, ports, settings.step_seconds)
    if member.role is Role.LEADER:
        found |= {
            "leader_user": accounts.leader.user,
            "leader_password": accounts.leader.password,
            "spool": {"folder": own_folder},
        }
    if member.role is Role.FOLLOWER:
        found["journal"] = {"folder": own_folder}
    for each in (member.role, member.name):
        found |= settings.server_settings.get(each, {})
    return yaml.safe_dump(found, sort_keys=False).encode()
