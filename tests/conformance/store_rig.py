"""The places where a cluster's documents and locks may be: every test runs in each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tao.access.document import AccessDocument
from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.model.errors import TaoError
from tao.model.ports import TopologyStore
from tao.model.topology import Topology
from tao.replication.etcd_locks import open_locks
from tao.replication.locks import Locks
from tao.serving.configuration import SchemaFile, open_schema
from tao.topology.etcd_document import EtcdAccess, EtcdSchema
from tao.topology.file_store import AccessFile
from tao.topology.stores import EtcdConnections, TextDocuments, open_access, open_topology
from tests.rigs.etcd_rig import keys_under, set_keys
from tests.rigs.pacing import PATIENT_SECONDS


class Ear:
    """Hears documents and errors, and lets a test wait for them."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.texts: list[str] = []
        self.errors: list[str] = []
        self._news = asyncio.Event()

    def changed(self, document: Topology | AccessDocument) -> None:
        self.versions.append(document.version)
        self._news.set()

    def changed_text(self, text: str, source: str) -> None:
        self.texts.append(text)
        self._news.set()

    def failed(self, error: TaoError) -> None:
        self.errors.append(error.message)
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENT_SECONDS):
            while not true():
                self._news.clear()
                await self._news.wait()


class StoreRig:
    """One place. Each store and each lock table made here is that of a process of its own."""

    def __init__(self, place: Path | EtcdLocation) -> None:
        self.place = place
        self._connections: list[EtcdConnections] = []

    def store(self, ear: Ear | None = None) -> TopologyStore:
        return open_topology(self.place, self._connect(), (ear or Ear()).failed)

    def access(self, ear: Ear, *, required: bool = False) -> AccessFile | EtcdAccess:
        place = self.place if isinstance(self.place, EtcdLocation) else self.place.with_name("access.yaml")
        return open_access(place if required else None, self.place, self._connect(), ear.failed)

    def schema(self) -> SchemaFile | EtcdSchema:
        if isinstance(self.place, Path):
            return open_schema(self.place.with_name("schema.yaml"), self._connect())
        return open_schema(self.place, self._connect())

    def locks(self) -> Locks:
        return open_locks(self.place, self._connect())

    async def write(self, key: str, text: str) -> None:
        """Store the schema or the access document, as an operator does."""
        if isinstance(self.place, Path):
            await asyncio.to_thread(self.place.with_name(f"{key}.yaml").write_text, text)
        else:
            await TextDocuments(self._connect().to(self.place), self.place).write(key, text)

    async def snapshot(self) -> dict[bytes, bytes]:
        """Return everything that is stored."""
        if isinstance(self.place, Path):
            return {b"": await asyncio.to_thread(self.place.read_bytes)}
        return await keys_under(self._connect().to(self.place), self.place)

    async def restore(self, snapshot: dict[bytes, bytes]) -> None:
        """Bring back what was stored then."""
        if isinstance(self.place, Path):
            await asyncio.to_thread(self.place.write_bytes, snapshot[b""])
        else:
            await set_keys(self._connect().to(self.place), self.place, snapshot)

    async def close(self) -> None:
        for each in self._connections:
            await each.close()

    def _connect(self) -> EtcdConnections:
        found = EtcdConnections(EtcdSettings(timeout_seconds=2.0))
        self._connections.append(found)
        return found
