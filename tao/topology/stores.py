"""Opens the documents of a cluster where they are: in files, or in etcd. Nothing else depends on which it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.model.errors import AccessError, TopologyError
from tao.model.ports import TopologyStore
from tao.topology.file_store import ACCESS_FILE_NAME, AccessFile, TopologyFile

if TYPE_CHECKING:
    from tao.etcd.client import EtcdClient
    from tao.topology.etcd_document import EtcdAccess

ACCESS_KEY: Final = "access"
SCHEMA_KEY: Final = "schema"


class EtcdConnections:
    """The clients of a process, one for each etcd cluster that its documents and locks are in."""

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings: Final = settings
        self._clients: Final[dict[tuple[tuple[str, ...], bool], EtcdClient]] = {}

    def to(self, location: EtcdLocation) -> EtcdClient:
        """Return the client of a cluster. Raises `SettingsError` for settings that cannot be used."""
        from tao.etcd.client import EtcdClient  # gRPC is heavy, and most commands need none

        cluster = location.endpoints, location.tls
        found = self._clients.get(cluster)
        if found is None:
            found = self._clients[cluster] = EtcdClient(location, self._settings)
        return found

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()


class TextDocuments:
    """The texts that lie beside a topology in etcd, by their keys: `SCHEMA_KEY` and `ACCESS_KEY`."""

    def __init__(self, client: EtcdClient, location: EtcdLocation) -> None:
        self._client: Final = client
        self._location: Final = location

    async def read(self, key: str) -> str | None:
        """Return a text; None when there is none. Raises `TaoError`."""
        found = (await self._client.read(self._location.key(key))).kvs
        return found[0].value.decode(errors="replace") if found else None

    async def write(self, key: str, text: str) -> None:
        """Store a text, whatever was there. Raises `TaoError`."""
        from tao.etcd.client import put

        await self._client.transact((), [put(self._location.key(key), text.encode())])


def open_topology(
    place: Path | EtcdLocation, etcd: EtcdConnections, on_error: Callable[[TopologyError], None]
) -> TopologyStore:
    """Return the store of the topology in a file, or under a prefix in etcd."""
    if isinstance(place, Path):
        return TopologyFile(place, on_error=on_error)
    from tao.topology.etcd_store import EtcdTopology

    return EtcdTopology(etcd.to(place), place, on_error=on_error)


def open_access(
    place: Path | EtcdLocation | None,
    topology: Path | EtcdLocation,
    etcd: EtcdConnections,
    on_error: Callable[[AccessError], None],
) -> AccessFile | EtcdAccess:
    """Return the store of the access document, which must be there; for None the one beside the topology, which need
    not be there."""
    found = place or topology
    if isinstance(found, Path):
        path = found if place is not None else found.with_name(ACCESS_FILE_NAME)
        return AccessFile(path, required=place is not None, on_error=on_error)
    from tao.topology.etcd_document import EtcdAccess

    key = found.key(ACCESS_KEY)
    return EtcdAccess(etcd.to(found), key, f"{found}/{ACCESS_KEY}", required=place is not None, on_error=on_error)
