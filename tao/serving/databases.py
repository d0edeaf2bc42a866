"""Which database server a cache server asks, and as whom, by the topology as it is then (DESIGN.md §3, §8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tao.model.errors import TopologyError
from tao.model.topology import DatabaseServer
from tao.serving.configuration import Configuration
from tao.storage.session import ServerAccount


class Databases:
    """The database servers as one region sees them."""

    def __init__(self, region: str, configuration: Configuration) -> None:
        self._region: Final = region
        self._configuration: Final = configuration

    def database_of(self, shard: int) -> str:
        """Name of the replication set. Raises `InvalidArgument` for a shard that does not exist."""
        return self._configuration.routes.database_of(shard).name

    def local(self, shard: int) -> str:
        """Name of the region's own server. Raises `InvalidArgument`, or `TopologyError` where there is none."""
        return self._configuration.routes.database_server(shard, self._region).name

    def master(self, shard: int) -> str:
        """Name of the master server. Raises as `local`."""
        routes = self._configuration.routes
        return routes.database_server(shard, routes.master_region(shard)).name

    def local_is_down(self, shard: int) -> bool:
        """Whether the region's own server is marked down. Raises as `local`."""
        return self._configuration.routes.database_server(shard, self._region).down

    def is_mastered_here(self, shard: int) -> bool:
        """Whether the region's own server is the master. Raises `InvalidArgument`."""
        return self._configuration.routes.master_region(shard) == self._region

    def other_region(self, shard: int) -> str | None:
        """The region to ask when this one's server cannot answer: the master's, or where the master is in this one, one
        that has a replica. One that is marked down is better than none: a server that is being promoted is marked for
        a moment, and it is the only one then. None when there is none. Raises `InvalidArgument`."""
        database = self._configuration.routes.database_of(shard)
        if database.master_region != self._region:
            return database.master_region
        replicas = [region for region in database.servers if region != self._region]
        return min(replicas, key=lambda region: database.servers[region].down, default=None)

    def login(self, user: str, password: str) -> Callable[[str], ServerAccount]:
        """Server name → where it is from here, and as whom to come in. Raises `TopologyError` for an unknown name."""

        def account(name: str) -> ServerAccount:
            server = self._server(name)
            return ServerAccount(server.host, server.port, user, password, server.socket)

        return account

    def _server(self, name: str) -> DatabaseServer:
        for database in self._configuration.routes.topology.databases:
            for server in database.servers.values():
                if server.name == name:
                    return server.seen_from(self._region)
        raise TopologyError(f"the topology names no database server {name}")
