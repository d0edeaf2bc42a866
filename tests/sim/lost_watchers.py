"""The watchers of `tests.sim.lost_masters`: the product's parts that concern masters, and what they ask each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from tao.model.errors import TaoError, TopologyConflict
from tao.model.ports import TopologyStore
from tao.model.topology import CacheServer, Topology
from tao.observability.logs import logger
from tao.replication.accounts import Account
from tao.replication.etcd_locks import EtcdLocks
from tao.replication.locks import ACTIVITY, FileLocks, Locks, keep_alive
from tao.replication.promotion import Promoter, PromotionSettings
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.topology import edits
from tao.topology.etcd_store import EtcdTopology
from tao.watcher.mastership import Mastership
from tao.watcher.probes import DatabaseProbes, PeerReports, WatcherContext
from tao.watcher.server import ACTIVE_LOCK
from tao.watcher.settings import WatcherSettings
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.memory_etcd import PLACE
from tests.sim.etcd import SimEtcdClient
from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.sim.lost_masters import Hour


class SimWatcher:
    """One watcher, of the product's parts that concern masters."""

    def __init__(self, hour: Hour, name: str, region: str) -> None:
        self.process: Final = Process(name, region)
        self._hour: Final = hour
        settings = WatcherSettings(
            name=name,
            region=region,
            topology_file=Path("simulated"),
            administrator_user="tao_admin",
            administrator_password="a",
            replicator_password="r",
            auto_rejoin=hour.rejoins,
        )
        accounts = SetAccounts(Account("tao_watcher", "a"), Account("tao_replicator", "r"))
        log = logger("watcher")
        self.tasks: Final = BackgroundTasks(name, log)
        context = WatcherContext(self.tasks, LoopClock(), log)
        self.topology = hour.topology
        self.store: TopologyStore
        self.locks: Locks
        if hour.etcd is None:
            self.store = hour.store
            self.locks = FileLocks(Path("simulated"), clock=hour.loop.time)
        else:
            client = SimEtcdClient(hour.etcd)
            self.store = EtcdTopology(client, PLACE, on_error=ignore)
            self.locks = EtcdLocks(client, PLACE, clock=hour.loop.time)
        promoter = Promoter(
            self.store, self.locks, accounts, PromotionSettings(), seen_from=region, on_step=partial(hour.on_step, self)
        )
        self.databases: Final = DatabaseProbes(
            lambda: self.topology, accounts, region, settings.probes, context, self._observe
        )
        links = cast("Links", _Links(hour))
        self.peers: Final = PeerReports(links, lambda: self.topology, region, settings.probes, name)
        self.mastership: Final = Mastership(
            settings,
            promoter,
            self.locks,
            self.peers,
            self.databases.silent_seconds,
            context,
            self.databases.is_dead,
        )
        self.promoter: Final = promoter

    def start(self) -> None:
        self.store.watch(self._use_topology)
        for job in (self.databases.run, self.peers.run, self.mastership.keep_leases, self._act):
            self.tasks.keep(job, job.__name__)

    def report(self) -> pb.WatcherReport:
        return pb.WatcherReport(
            region=self.process.region,
            verdicts={name: verdict.value for name, verdict in self.databases.verdicts.items()},
            renewed_seconds_ago=self.mastership.renewed_seconds_ago(),
        )

    def _use_topology(self, topology: Topology) -> None:
        self.topology = topology

    def _observe(self, replicas: ReplicationSet, members: list[SetMember], began: float) -> None:
        self.mastership.observe(replicas, members, began)

    async def _act(self) -> None:
        """Do what `WatcherServer._run_as_active` does, without marks."""
        while True:
            with suppress(TaoError):
                async with (
                    self.locks.held(ACTIVE_LOCK, exclusive=True, terms=ACTIVITY) as hold,
                    keep_alive(hold, ACTIVITY),
                ):
                    self.mastership.active_since = self._hour.loop.now
                    self.mastership.activity = hold
                    try:
                        while True:
                            await asyncio.sleep(0.5)
                            hold.check()
                    finally:
                        self.mastership.activity = None
            await asyncio.sleep(0.5)


def ignore(_: TaoError) -> None:
    """Report nothing."""


class _Links:
    """Replaces links between watchers."""

    def __init__(self, hour: Hour) -> None:
        self._hour: Final = hour

    def to(self, watcher: CacheServer) -> _Link:
        return _Link(self._hour, watcher.name)

    def refusal_at(self, _: str) -> str:
        return ""


class _Link:
    def __init__(self, hour: Hour, name: str) -> None:
        self._hour: Final = hour
        self._name: Final = name

    async def ask(self, _: pb.Request, timeout_seconds: float) -> pb.Answer:
        return pb.Answer(watcher_report=await self._hour.report_of(self._name, timeout_seconds))


class SimStore:
    """Replaces the store of the topology document in a file, which everybody can reach."""

    def __init__(self, hour: Hour) -> None:
        self._hour: Final = hour
        self._watchers: Final[list[Callable[[Topology], None]]] = []

    async def load(self) -> Topology:
        await asyncio.sleep(0.001)
        return self._hour.topology

    async def change(self, expected_version: int, changed: Topology) -> Topology:
        await asyncio.sleep(0.001)
        if self._hour.topology.version != expected_version:
            raise TopologyConflict("the document has changed")
        self._hour.topology = edits.as_version(changed, expected_version + 1)
        for on_change in self._watchers:
            on_change(self._hour.topology)
        return self._hour.topology

    def watch(self, on_change: Callable[[Topology], None]) -> None:
        self._watchers.append(on_change)
