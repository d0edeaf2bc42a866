"""The topology document of a development cluster, and what its delay line leads where.

Between regions go: leaders to leaders and followers to the leaders of the master region, replicas to their masters, a
second tailer to a master. So leaders and databases are given an address per region that looks at them from outside,
each a port of the delay line; nobody calls another region's followers. Pure: ports in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tao.devcluster.layout import CachePorts, Role, Shape
from tao.devcluster.line_control import Route
from tao.devcluster.ports import LOOPBACK
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
)
from tao.model.versions import FIRST_EPOCH


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Every port of a cluster; all on 127.0.0.1."""

    caches: Mapping[str, CachePorts]
    """Of leaders and followers, by name."""
    databases: Mapping[str, int]
    """Of database servers, by name."""
    tailers: Mapping[str, int]
    """Admin ports, by name."""
    line: Mapping[str, int]
    """The delay line's, by `Crossing.key`."""


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """Someone in ``source`` calls ``server``, which is in ``target``. ``kind``: grpc, frames or mysql."""

    source: str
    target: str
    server: str
    kind: str

    @property
    def key(self) -> str:
        """Its name in `Addresses.line`."""
        return _key(self.source, self.server, self.kind)


def _key(source: str, server: str, kind: str) -> str:
    return f"{source}>{server}/{kind}"


def crossings(shape: Shape) -> list[Crossing]:
    """Everything that crosses between regions; nothing in a cluster that has one."""
    kinds = {Role.DATABASE: ("mysql",), Role.LEADER: ("grpc", "frames")}
    return [
        Crossing(source=source, target=member.region, server=member.name, kind=kind)
        for member in shape.members
        for source in shape.region_names
        if source != member.region
        for kind in kinds.get(member.role, ())
    ]


def line_routes(shape: Shape, addresses: Addresses) -> list[Route]:
    """The delay line's routes."""

    def port(crossing: Crossing) -> int:
        if crossing.kind == "mysql":
            return addresses.databases[crossing.server]
        caches = addresses.caches[crossing.server]
        return caches.grpc if crossing.kind == "grpc" else caches.frames

    return [
        Route(
            source=crossing.source,
            target=crossing.target,
            listen=addresses.line[crossing.key],
            host=LOOPBACK,
            port=port(crossing),
        )
        for crossing in crossings(shape)
    ]


def build_topology(
    shape: Shape,
    version: int,
    addresses: Addresses,
    master_regions: Mapping[str, str],
    *,
    version_epochs: Mapping[str, int] | None = None,
    semi_sync: bool = False,
) -> Topology:
    """The topology document. ``master_regions``: database → region; ``version_epochs``: those above the first."""
    regions = shape.region_names

    def others(region: str) -> list[str]:
        return [other for other in regions if other != region]

    def follower(name: str) -> CacheServer:
        ports = addresses.caches[name]
        return CacheServer(
            name=name,
            grpc=f"{LOOPBACK}:{ports.grpc}",
            frames=f"{LOOPBACK}:{ports.frames}",
            admin=f"{LOOPBACK}:{ports.admin}",
        )

    def leader(name: str, region: str) -> CacheServer:
        def through_line(source: str, kind: str) -> str:
            return f"{LOOPBACK}:{addresses.line[_key(source, name, kind)]}"

        views = {
            source: ServerAddress(grpc=through_line(source, "grpc"), frames=through_line(source, "frames"))
            for source in others(region)
        }
        return msgspec.structs.replace(follower(name), reached_from=views)

    def database_server(region: str, database: str) -> DatabaseServer:
        name = shape.database_server(region, database)
        views = {
            source: DatabaseAddress(host=LOOPBACK, port=addresses.line[_key(source, name, "mysql")])
            for source in others(region)
        }
        return DatabaseServer(name=name, host=LOOPBACK, port=addresses.databases[name], reached_from=views)

    def region_of(region: str) -> Region:
        tailers = [member for member in shape.members if member.role is Role.TAILER and member.region == region]
        return Region(
            name=region,
            leaders=Tier(name="leaders", servers=tuple(leader(name, region) for name in shape.leaders_in(region))),
            followers=tuple(
                Tier(name=tier, servers=tuple(follower(name) for name in shape.followers_in(region, tier)))
                for tier in shape.tier_names
            ),
            tailers=tuple(
                TailerProcess(
                    name=tailer.name, database=tailer.database, admin=f"{LOOPBACK}:{addresses.tailers[tailer.name]}"
                )
                for tailer in tailers
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
