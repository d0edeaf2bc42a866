"""The etcd of a simulated cluster that keeps its topology and its locks there, beneath the product's own code.

Servers and commands reach it over the simulated network, as a machine of its own (`tests.sim.etcd`). Faults and changes
of masters change the topology as operators do at that machine: at once, and only while etcd answers. Their locks are
taken there, too, so that they last as long as their work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from tao.etcd.client import EtcdClient
from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import TaoError
from tao.model.ports import TopologyStore
from tao.model.topology import Topology
from tao.replication.etcd_locks import EtcdLocks
from tao.replication.locks import Locks
from tao.topology.etcd_document import Snapshot
from tao.topology.etcd_store import EtcdTopology
from tao.topology.stores import EtcdConnections
from tests.rigs.memory_etcd import PLACE
from tests.sim.etcd import ETCD, SimEtcd, SimEtcdClient
from tests.sim.loop import CURRENT, Process, SimLoop
from tests.sim.network import Network
from tests.sim.substitutes import Substitution

_HEAD_KEY: Final = PLACE.key("topology/head")
_POLL_SECONDS: Final = 0.1


def _ignore(_: TaoError) -> None:
    """Report nothing."""


class _Links:
    """Implements `tests.sim.etcd.Links` over the simulated network."""

    def __init__(self, loop: SimLoop, network: Network, rng: random.Random, machine: Process) -> None:
        self.loop: Final = loop
        self.random: Final = rng
        self.refuses: Final = rng.random() < 0.5
        self._network: Final = network
        self._machine: Final = machine

    def is_cut(self, one: str, _: str) -> bool:
        return self._network.is_cut(_present(one), self._machine)

    def one_way_seconds(self, one: str, _: str) -> float:
        return self._network.delay(_present(one), self._machine)


def _present(name: str) -> Process:
    process = CURRENT.get()
    assert process is not None, "only simulated processes call etcd"
    assert process.name == name, "a process calls for itself"
    return process


class _Local(EtcdClient):
    """The calls of somebody at the machine of etcd, which take no time."""

    def __init__(self, etcd: SimEtcd) -> None:
        super().__init__(PLACE, EtcdSettings())
        self._etcd: Final = etcd

    async def read(self, key: bytes, range_end: bytes = b"") -> pb.RangeResponse:
        return self._etcd.read_at_once(key, range_end)

    async def transact(
        self, compare: Sequence[pb.Compare], success: Sequence[pb.RequestOp], failure: Sequence[pb.RequestOp] = ()
    ) -> pb.TxnResponse:
        return self._etcd.carry_out(pb.TxnRequest(compare=compare, success=success, failure=failure))


class _LocalTopology(EtcdTopology):
    """The topology, as somebody at the machine of etcd reads and changes it."""

    async def _take(self, snapshot: Snapshot) -> tuple[Snapshot, Topology]:
        self._state = snapshot, self._parse(snapshot)
        return self._state

    def store(self, before: int, changed: Topology) -> None:
        """Store a document in place of the one of that version (0: as the first)."""
        changing = self.change(before, changed)
        try:
            changing.send(None)
        except StopIteration:
            return
        raise AssertionError("nothing waits at the machine of etcd")

    def parse(self, keys: Mapping[bytes, bytes]) -> Topology:
        """Return the document that some keys have."""
        return self._parse(Snapshot(0, 0, keys))


class EtcdDocuments:
    """The topology and the locks of one world, in etcd."""

    def __init__(self, loop: SimLoop, network: Network, seed: int, regions: Sequence[str]) -> None:
        rng = random.Random(f"etcd of {seed}")
        self.machine: Final = Process(ETCD, rng.choice(("elsewhere", *regions)))
        self.etcd: Final = SimEtcd(_Links(loop, network, rng, self.machine), self._read)
        self.on_change: Callable[[Topology], None] = lambda _: None
        """Called with each newer document that is stored."""
        self._loop: Final = loop
        self._network: Final = network
        self._local: Final = _LocalTopology(_Local(self.etcd), PLACE, on_error=_ignore)
        self._head = b""

    def store(self, before: int, changed: Topology) -> None:
        """Store a document at once in place of the one of that version (0: as the first)."""
        self._local.store(before, changed)

    def reaches(self, process: Process) -> bool:
        """Return whether etcd answers a process now."""
        return not self.etcd.is_away and not self._network.is_cut(process, self.machine)

    async def until_there(self) -> None:
        """Wait until etcd answers at its own machine."""
        while self.etcd.is_away:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(_POLL_SECONDS)

    def topology(self) -> TopologyStore:
        """Return the topology as the present process reads and changes it."""
        return EtcdTopology(SimEtcdClient(self.etcd), PLACE, on_error=_ignore)

    def locks(self) -> Locks:
        """Return the locks as the present process takes them."""
        return EtcdLocks(SimEtcdClient(self.etcd), PLACE, clock=self._loop.time)

    def local_locks(self) -> Locks:
        """Return the locks as somebody takes them at the machine of etcd."""
        return EtcdLocks(self.etcd, PLACE, clock=self._loop.time)

    def substitutes(self) -> list[Substitution]:
        """Return the substitutes beneath everybody who opens a document or takes a lock in etcd."""
        return [Substitution(EtcdConnections, partial(_Connections, self.etcd))]

    def _read(self, etcd: SimEtcd) -> None:
        head = etcd.keys.get(_HEAD_KEY)
        if head is not None and head.value != self._head:
            self._head = head.value
            self.on_change(self._local.parse({key: each.value for key, each in etcd.keys.items()}))


class _Connections:
    """Replaces `tao.topology.stores.EtcdConnections`."""

    def __init__(self, etcd: SimEtcd, _: object) -> None:
        self._client: Final = SimEtcdClient(etcd)

    def to(self, _: EtcdLocation) -> EtcdClient:
        return self._client

    async def close(self) -> None:
        """Do nothing: there are no connections to close."""
