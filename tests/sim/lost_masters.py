"""Simulate watchers, leases and links around one database, hour after hour, and count promotions that were not due.

The watchers are the product's own: probes, reports, locks, renewals, decisions, and a promotion with all its steps.
Replaced are the statements that they send to database servers (`tests.sim.replicated`). Each hour has one incident, and
only the seconds around it are played: in between nothing happens that could be misjudged.

A promotion is *false* when its master was well: its process ran, and the watcher that promoted, one of the master's own
region that could say so, or a replica could have reached it throughout the two seconds before. One that answers, and
sends heartbeats, later than a probe waits is not well. Also checked: no acknowledged write of a semi-synchronous
database is missing at a later master; no critical read, by a client with any topology, lacks what was acknowledged
before it began; and writes go on within `REPLACED_SECONDS` of the loss of a master that died or stood still for good,
if nothing else befell it. One that pauses again and again, each time for less than
`ProbeSettings.master_hangs_seconds`, keeps its place. In some hours a step of a promotion fails, and links are perhaps
mended before the next attempt, so that the old master goes on. Then everything is mended at the end, and writes have to
go on.

In some hours the topology and the locks are in etcd (`tests.sim.etcd`), which is away, restored from a snapshot, or out
of reach of some watchers, alone or beside another incident. While nothing else happens, a semi-synchronous master has
to stay open, and to answer critical reads.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Final, cast

import structlog

from tao.model.errors import TaoError, TopologyConflict
from tao.model.ports import TopologyStore
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology, WatcherProcess
from tao.observability.logs import logger
from tao.replication.accounts import Account
from tao.replication.etcd_locks import EtcdLocks
from tao.replication.locks import ACTIVITY, FileLocks, LockFiles, Locks, keep_alive
from tao.replication.promotion import Promoter, PromotionSettings, PromotionStep
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.runtime.clock import LoopClock
from tao.runtime.tasks import BackgroundTasks
from tao.storage.failures import ConnectionLost
from tao.topology import edits
from tao.topology.etcd_document import Snapshot
from tao.topology.etcd_store import EtcdTopology
from tao.watcher.mastership import Mastership
from tao.watcher.probes import DatabaseProbes, PeerReports, WatcherContext
from tao.watcher.server import ACTIVE_LOCK
from tao.watcher.settings import LeaseSettings, ProbeSettings, WatcherSettings
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.memory_etcd import PLACE
from tests.sim.etcd import ETCD, EtcdSnapshot, SimEtcd, SimEtcdClient
from tests.sim.locks import LockTable, SimLockFiles
from tests.sim.loop import CURRENT, Process, SimLoop
from tests.sim.replicated import Machines, Server, critical_read, statements, write
from tests.sim.substitutes import Substitution, replaced

REPLACED_SECONDS: Final = 4.0
"""From the loss of a semi-synchronous master until a write is acknowledged again, in one region."""
_REGIONS: Final = ("east", "west", "north")
_BEFORE_SECONDS: Final = 3.0
"""Until watchers have begun, and have seen the master wait for its replicas."""
_AFTER_SECONDS: Final = 12.0
_RESUMED_SECONDS: Final = 25.0
"""Until writes go on when everything is mended after a promotion that failed: it is perhaps repeated."""
_CLIENT_SECONDS: Final = 0.1
_ANSWER_SECONDS: Final = 1.0
_OPEN_SECONDS: Final = 2.0
"""Longest time without a write or a critical read while nothing but etcd fails."""
_STOPPED_SECONDS: Final = 10.0
"""How long etcd stands still before a snapshot is restored: longer than any lease in it."""
_ETCD_SECONDS: Final = 18.0
"""What an hour is longer in which something befalls etcd: the locks of a watcher that is cut off last for seconds, a
promotion may have to outlast two leases, and a snapshot is restored when all locks have ended."""
_OPERATOR_SECONDS: Final = 0.5
_HEAD_KEY: Final = PLACE.key("topology/head")
_WELL_SECONDS: Final = 2.0
"""Longer than it takes to find out, a last time, that a master does not answer."""
_LIVELY_SECONDS: Final = 0.5
"""A master that has run for so long between two pauses has answered a question that was under way."""
_FOR_GOOD_SECONDS: Final = 50.0


@dataclass(slots=True)
class Findings:
    """What some hours have brought."""

    hours: int = 0
    promotions: int = 0
    false: list[str] = field(default_factory=list)
    lost_writes: list[str] = field(default_factory=list)
    stale_reads: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    incidents: Counter[str] = field(default_factory=Counter)
    replaced_seconds: list[float] = field(default_factory=list)
    """Time until a write was acknowledged again, of masters whose process died and that had no other fault."""
    hung_seconds: list[float] = field(default_factory=list)
    """The same of masters that stood still for good."""

    def add(self, other: Findings) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def violations(self) -> list[str]:
        return [*self.false, *self.lost_writes, *self.stale_reads, *self.late, *self.closed, *self.stuck, *self.errors]


class _Watcher:
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
            self.store = EtcdTopology(client, PLACE, on_error=_ignore)
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


def _ignore(_: TaoError) -> None:
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


def _tier(server: str) -> Tier:
    return Tier(name=f"{server}s", servers=(CacheServer(name=server, grpc="127.0.0.1:1"),))


class _Store:
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


class Hour:
    """One hour of one database, with one incident."""

    def __init__(self, seed: int, loop: SimLoop, kinds: Sequence[str] = (), regions: int = 0) -> None:
        """``kinds`` of incidents, and number of ``regions``: none and 0 leave them to the seed. Where one of the kinds
        befalls an etcd there is one."""
        rng = self.random = random.Random(seed)
        self.seed: Final = seed
        self.loop: Final = loop
        self.findings: Final = Findings(hours=1)
        self._kinds: Final = kinds
        names = _REGIONS[: regions or rng.choice((1, 2, 3))]
        has_standby = len(names) == 1 or rng.random() < 0.5
        self.semi_sync: Final = rng.random() < 0.8
        servers = [Server(f"{region}-db", region, number) for number, region in enumerate(names, 1)]
        if has_standby:
            servers.append(Server("east-standby", "east", len(servers) + 1))
        # Drawn apart, so that what else a seed draws is as it was.
        ways = random.Random(f"ways of {seed}")
        self.machines: Final = Machines(loop, rng, servers, refuses=ways.random() < 0.5)
        self.rejoins: Final = ways.random() < 0.5
        self._breaks_at = ways.choice([*PromotionStep, *[None] * 2 * len(PromotionStep)])
        """The step of a promotion that fails, once."""
        self.watchers_a_region: Final = ways.choice((1, 1, 2))
        self._heals_after = ways.choice((None, 2.5 * ways.random()))
        """Seconds after the failure of that step at which all links are mended, or None."""
        self._broke = False
        self._head = b""
        self._operator: Final = Process("operator", "east")
        self._served_at: Final = {"write": 0.0, "critical read": 0.0}
        self._longest_wait: Final = dict.fromkeys(self._served_at, 0.0)
        """Longest time without one that was answered, since the incident."""
        self.master: Final = servers[0]
        self._etcd_kinds, self.etcd = self._draw_etcd()
        self.topology = self._document(servers)
        self.store: Final = cast("TopologyStore", _Store(self))
        self.locks: Final = LockTable(loop)
        self.watchers: Final[dict[str, _Watcher]] = {}
        self.acknowledged: Final[dict[int, int]] = {}
        """Server number → the last of its transactions that was acknowledged."""
        self._well_since: Final[dict[tuple[str, str], float]] = {}
        self._died_at = -1.0
        self._hangs = False
        """The master did not die: it stands still for good."""
        self._lively_until: Final[dict[str, float]] = {}
        """Server → when it last had run for `_LIVELY_SECONDS` without a pause."""
        self._kinds_drawn: list[str] = []
        self._processes: Final[list[Process]] = []

    def _document(self, servers: list[Server]) -> Topology:
        names = dict.fromkeys(server.region for server in servers)
        regions = tuple(
            Region(
                name=region,
                leaders=_tier(f"{region}-leader"),
                followers=(_tier(f"{region}-follower"),),
                watchers=tuple(WatcherProcess(name=each, frames="127.0.0.1:1") for each in self._named(region)),
            )
            for region in names
        )
        listed = {server.name: DatabaseServer(name=server.name, port=server.number) for server in servers}
        standby = listed.pop("east-standby", None)
        database = Database(
            name="db",
            master_region="east",
            servers={region.name: listed[f"{region.name}-db"] for region in regions},
            shards=((0, 0),),
            semi_sync=self.semi_sync,
            standbys={} if standby is None else {"east": standby},
        )
        return Topology(version=1, shards=1, regions=regions, databases=(database,))

    # etcd

    def _draw_etcd(self) -> tuple[list[str], SimEtcd | None]:
        """Return what befalls the etcd of this hour, and the etcd, or None for files."""
        rng = random.Random(f"etcd of {self.seed}")
        kinds = [kind for kind in self._kinds if kind in _OF_ETCD]
        if not self._kinds and rng.random() < 0.5:
            kinds = [rng.choice(sorted(_OF_ETCD))] if rng.random() < 0.8 else []
        elif not kinds:
            return [], None
        at = rng.choice(("elsewhere", *self.machines.regions.values()))
        self.machines.regions[ETCD] = at
        return kinds, SimEtcd(self.machines, self._read_document)

    def _read_document(self, etcd: SimEtcd) -> None:
        """Note a newer topology that etcd has."""
        head = etcd.keys.get(_HEAD_KEY)
        if head is None or head.value == self._head:
            return
        self._head = head.value
        values = {key: each.value for key, each in etcd.keys.items()}
        found = EtcdTopology(etcd, PLACE, on_error=_ignore)._parse(Snapshot(0, 0, values))
        if found.version > self.topology.version:
            self.topology = found

    async def import_newest(self) -> None:
        """Store the newest topology as an operator does when etcd was restored."""
        assert self.etcd is not None, "this befalls an etcd"
        store = EtcdTopology(SimEtcdClient(self.etcd), PLACE, on_error=_ignore)
        while True:
            with suppress(TaoError):
                found = await store.load()
                await store.replace(found.version, edits.as_version(self.topology, self.topology.version + 1))
                return
            await asyncio.sleep(_OPERATOR_SECONDS)

    def restore_etcd(self, snapshot: EtcdSnapshot) -> None:
        """Start etcd with a snapshot, and have an operator mend the topology."""
        assert self.etcd is not None, "this befalls an etcd"
        self.etcd.restore(snapshot)
        self.etcd.start()
        self.later(_OPERATOR_SECONDS, lambda: self._run(self._operator, self.import_newest()))

    # the watchers

    def _named(self, region: str) -> list[str]:
        """Return the names of a region's watchers."""
        return [f"{region}-watcher", f"{region}-watcher-2"][: self.watchers_a_region]

    async def report_of(self, name: str, timeout_seconds: float) -> pb.WatcherReport:
        """Return the report of a watcher, which the present process asks for. Raises `TaoError`."""
        asking, asked = CURRENT.get(), self.watchers[name]
        assert asking is not None
        wait = self.machines.one_way_seconds(asking.name, name)
        deadline = self.loop.now + timeout_seconds
        await asyncio.sleep(wait)
        is_cut = self.machines.is_cut(asking.name, name)
        if is_cut or asked.process.state != "runs":
            if not (is_cut and self.machines.refuses):
                await asyncio.sleep(max(0.0, deadline - self.loop.now))
            raise ConnectionLost(f"{name} did not answer")
        report = asked.report()
        await asyncio.sleep(wait)
        return report

    async def on_step(self, watcher: _Watcher, step: PromotionStep) -> None:
        """Look at the old master at the last moment at which a promotion can be undone."""
        if step is self._breaks_at:
            self._breaks_at, self._broke = None, True
            if self._heals_after is not None:
                self.later(self._heals_after, self.machines.heal)
            raise ConnectionLost("the connection to a replica broke")
        if step is not PromotionStep.RAISE_EPOCH:
            return
        database = self.topology.databases[0]
        old = self.machines.servers[database.servers[database.master_region].name]
        if any(each.epoch > database.version_epoch for each in self.machines.servers.values()):
            return  # it was interrupted, and can only be finished
        self.findings.promotions += 1
        may_report = self.loop.now - self.machines.healed_at >= _WELL_SECONDS
        reporting = [
            own
            for own in self._named(old.region)
            if may_report
            and not self.machines.is_cut(own, watcher.process.name)
            and self.watchers[own].process.state == "runs"
        ]
        replicas = [name for name in self.machines.servers if name != old.name]
        since = [self._well_since.get((name, old.name)) for name in (watcher.process.name, *reporting, *replicas)]
        if any(each is not None and self.loop.now - each >= _WELL_SECONDS for each in since):
            self.findings.false.append(f"seed {self.seed}: {watcher.process.name} replaced {old.name}")
        pauses = {"master pauses", "master stands still"}.issuperset(self._kinds_drawn)
        if pauses and self.loop.now - self._lively_until[old.name] < ProbeSettings().master_hangs_seconds:
            self.findings.false.append(f"seed {self.seed}: {watcher.process.name} replaced {old.name} in a pause")
        if not self.semi_sync:
            self._forget_lost()

    def _forget_lost(self) -> None:
        """What an asynchronous master had not sent yet is lost with it."""
        best: dict[int, int] = {}
        for server in self.machines.servers.values():
            if server is not self.master:
                best = {number: max(last, best.get(number, 0)) for number, last in server.log.items()} | {
                    number: last for number, last in best.items() if number not in server.log
                }
        for number in list(self.acknowledged):
            self.acknowledged[number] = min(self.acknowledged[number], best.get(number, 0))

    async def _note_who_is_well(self) -> None:
        while True:
            for server in self.machines.servers.values():
                runs = server.runs and server.stands_still_until <= self.loop.now
                in_time = self.machines.slow.get(server.name, 0.0) < ProbeSettings().timeout_seconds
                if runs and self.loop.now - server.stands_still_until >= _LIVELY_SECONDS:
                    self._lively_until[server.name] = self.loop.now
                for name in (*self.watchers, *self.machines.servers):
                    if runs and in_time and not self.machines.is_cut(name, server.name):
                        self._well_since.setdefault((name, server.name), self.loop.now)
                    else:
                        self._well_since.pop((name, server.name), None)
            await asyncio.sleep(0.02)

    # clients

    async def _write(self, server: Server) -> None:
        while True:
            await asyncio.sleep(_CLIENT_SECONDS * self.random.random() * 2)
            if server.read_only:
                continue
            began = self.loop.now
            with suppress(TaoError):
                number = await write(self.machines, server, _ANSWER_SECONDS)
                self._note_served("write")
                self.acknowledged[server.number] = max(number, self.acknowledged.get(server.number, 0))
                if 0 <= self._died_at < began:
                    took = self.findings.hung_seconds if self._hangs else self.findings.replaced_seconds
                    took.append(self.loop.now - self._died_at)
                    self._died_at = -1.0

    async def _read(self, server: Server) -> None:
        while True:
            await asyncio.sleep(_CLIENT_SECONDS * self.random.random() * 2)
            if server.read_only:
                continue
            acknowledged = dict(self.acknowledged)
            with suppress(TaoError):
                found = await critical_read(self.machines, server, _ANSWER_SECONDS)
                self._note_served("critical read")
                lacks = [number for of, number in acknowledged.items() if found.get(of, 0) < number]
                if lacks and self.semi_sync:
                    self.findings.stale_reads.append(f"seed {self.seed}: {server.name} without {lacks}")

    def _note_served(self, what: str) -> None:
        self._longest_wait[what] = max(self._longest_wait[what], self.loop.now - self._served_at[what])
        self._served_at[what] = self.loop.now

    # the course of an hour

    async def play(self) -> None:
        """Play the seconds around the incident."""
        self._open_master()
        if self.etcd is not None:
            await EtcdTopology(self.etcd, PLACE, on_error=_ignore).change(0, self.topology)
            self.machines.regions[self._operator.name] = self._operator.region
        for region in self.region_names():
            for name in self._named(region):
                self.watchers[name] = _Watcher(self, name, region)
                self.machines.regions[name] = region
        # The first one acts.
        for watcher in self.random.sample([*self.watchers.values()], len(self.watchers)):
            watcher.process.context.run(self._start, watcher)
        self._run(Process("observer", "east"), self._note_who_is_well())
        for region in self.region_names():
            client = Process(f"{region}-client", region)
            self.machines.regions[client.name] = region
            for server in self.machines.servers.values():
                self._run(client, self._write(server))
                self._run(client, self._read(server))
        self.loop.call_later(self.random.random(), self.machines.close_without_lease)
        await asyncio.sleep(_BEFORE_SECONDS + self.random.random())
        kinds = self._kinds_drawn = self._draw_kinds()
        self.findings.incidents[" and ".join(sorted(kinds))] += 1
        for what in self._longest_wait:
            self._longest_wait[what] = 0.0
        for kind in kinds:
            (_INCIDENTS | _OF_ETCD)[kind](self)
            self._note_loss(kinds)
            await asyncio.sleep(self.random.choice((0.0, 3.0)) * self.random.random())
        await asyncio.sleep(_AFTER_SECONDS + (0.0 if set(kinds).isdisjoint(_OF_ETCD) else _ETCD_SECONDS))
        if self._broke:
            await self._see_writes_resume()
        self._end(kinds)

    def _note_loss(self, kinds: Sequence[str]) -> None:
        """Note when a master was lost for good, if nothing else befalls it."""
        self._hangs = self.master.stands_still_until - self.loop.now > _FOR_GOOD_SECONDS
        is_lost = self._hangs if [*kinds] == ["master stands still"] else [*kinds] == ["master killed"]
        if is_lost and self.semi_sync and self._breaks_at is None:
            self._died_at = self.loop.now

    def _draw_kinds(self) -> list[str]:
        names = sorted(_INCIDENTS)
        kinds = [*self._kinds] or [self.random.choice(names) for _ in range(1 if self.random.random() < 0.7 else 2)]
        if self._etcd_kinds and not self._kinds:
            kinds = [*self._etcd_kinds, *(kinds if self.random.random() < 0.7 else [])]
            self.random.shuffle(kinds)
        return kinds

    async def _see_writes_resume(self) -> None:
        """Mend everything after a promotion that failed, and expect that writes go on."""
        self.machines.heal()
        if self.etcd is not None and self.etcd.is_away:
            self.etcd.start()
        for server in self.machines.servers.values():
            server.disk_stands_still_until = 0.0
            if not server.runs:
                self._back(server)
        for watcher in self.watchers.values():
            self.loop.resume(watcher.process)
        await asyncio.sleep(_RESUMED_SECONDS)
        # A slow way there and back lets a single write fail.
        if self.loop.now - self._served_at["write"] > 3 * _ANSWER_SECONDS:
            self.findings.stuck.append(f"seed {self.seed}: no write since {self._served_at['write']:.2f}")

    def _open_master(self) -> None:
        for server in self.machines.servers.values():
            server.terms = LeaseSettings().terms(semi_sync=self.semi_sync)
            server.master_row = self.master.name
            server.log[self.master.number] = 1
            if server is not self.master:
                server.following, server.io_runs = self.master, True
        self.master.read_only, self.master.waits = False, self.semi_sync
        self.master.lease_ends = self.loop.now + self.master.terms.seconds

    def _start(self, watcher: _Watcher) -> None:
        self._processes.append(watcher.process)
        watcher.start()

    def _run(self, process: Process, job: Coroutine[object, object, None]) -> None:
        self._processes.append(process)
        process.add(self.loop.create_task(job, context=process.context.copy()))

    def _end(self, kinds: Sequence[str]) -> None:
        database = self.topology.databases[0]
        master = self.machines.servers[database.servers[database.master_region].name]
        lost = [number for of, number in self.acknowledged.items() if master.log.get(of, 0) < number]
        if lost and self.semi_sync:
            self.findings.lost_writes.append(f"seed {self.seed}: {kinds}: {master.name} lacks {lost}")
        self.findings.lost_writes += [f"seed {self.seed}: {each}" for each in self.machines.two_masters]
        if self.semi_sync and _OF_ETCD.keys() >= set(kinds):
            for what, since in self._served_at.items():
                wait = max(self._longest_wait[what], self.loop.now - since)
                if wait > _OPEN_SECONDS:
                    self.findings.closed.append(f"seed {self.seed}: {kinds}: no {what} for {wait:.2f} s")
        took = self.findings.replaced_seconds + self.findings.hung_seconds
        late = self._died_at >= 0 or any(each > REPLACED_SECONDS for each in took)
        if late and len(self.region_names()) == 1:
            self.findings.late.append(f"seed {self.seed}: {took}")
        self.findings.errors += [f"seed {self.seed}: {each}" for each in self.loop.errors]

    def sweep(self) -> None:
        """Let all tasks end."""
        for process in self._processes:
            self.loop.sweep(process)

    # incidents

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.loop.call_later(seconds, what)

    def kill(self, server: Server, back_after: float | None) -> None:
        server.restart(runs=False)
        if back_after is not None:
            self.later(back_after, lambda: self._back(server))

    def _back(self, server: Server) -> None:
        server.restart(runs=True)
        if server.following is not None:
            self.machines.send(server.following)

    def stand_still(self, server: Server, seconds: float) -> None:
        server.stands_still_since, server.stands_still_until = self.loop.now, self.loop.now + seconds

    def cut_off(self, names: Iterable[str], others: Iterable[str], seconds: float) -> None:
        for one in names:
            for other in others:
                self.machines.cut(one, other)
        self.later(seconds, self.machines.heal)

    def all_names(self) -> list[str]:
        return [*self.machines.regions]

    def region_names(self) -> list[str]:
        return [region.name for region in self.topology.regions]

    def of_region(self, region: str) -> list[str]:
        return [name for name, at in self.machines.regions.items() if at == region]


def _any_seconds(hour: Hour, most: float) -> float:
    """Return how long a fault lasts: often about as long as what watchers wait for, or for good."""
    return hour.random.choice((0.2 * hour.random.random(), hour.random.random(), 10.0)) * most


def _replicas(hour: Hour) -> list[Server]:
    return [server for server in hour.machines.servers.values() if server is not hour.master]


def _cut_some_watchers(hour: Hour) -> None:
    """Cut the master off from some watchers, and not from its replicas."""
    watchers = [name for name in hour.watchers if hour.random.random() < 0.7]
    hour.cut_off([hour.master.name], watchers, _any_seconds(hour, 12))


def _cut_other_watchers(hour: Hour) -> None:
    """Cut the watchers of other regions off from the master's region, and no database server."""
    region = hour.master.region
    others = [name for name in hour.watchers if name not in hour.of_region(region)]
    hour.cut_off(others, hour.of_region(region), _any_seconds(hour, 12))


def _cut_replicas(hour: Hour) -> None:
    hour.cut_off([hour.master.name], [each.name for each in _replicas(hour)], _any_seconds(hour, 12))


def _cut_region(hour: Hour) -> None:
    region = hour.random.choice(("east", "east", *hour.region_names()))
    inside = hour.of_region(region)
    hour.cut_off(inside, [name for name in hour.all_names() if name not in inside], _any_seconds(hour, 14))


def _cut_machine(hour: Hour) -> None:
    """Lose the master's machine to all but, perhaps, its region's clients."""
    hour.cut_off(
        [hour.master.name],
        [name for name in hour.all_names() if "client" not in name or hour.random.random() < 0.5],
        _any_seconds(hour, 14),
    )


def _cut_rack(hour: Hour) -> None:
    """Cut off the master with one watcher of its region, and the region's clients."""
    region = hour.master.region
    others = [f"{region}-watcher-2"] if hour.watchers_a_region > 1 else []
    inside = [hour.master.name, f"{region}-client", *others]
    hour.cut_off(inside, [name for name in hour.all_names() if name not in inside], _any_seconds(hour, 14))


def _restart_replica(hour: Hour) -> None:
    hour.kill(hour.random.choice(_replicas(hour)), _any_seconds(hour, 5))


def _slow_master(hour: Hour) -> None:
    hour.machines.slow[hour.master.name] = 2.5 * hour.random.random()
    hour.later(_any_seconds(hour, 12), hour.machines.heal)


def _pause_master(hour: Hour, until: float = 0.0) -> None:
    """Let the master pause again and again for ten seconds, each time for less than makes it a lost one."""
    until = until or hour.loop.now + 10.0
    seconds = 0.95 * hour.random.random() * ProbeSettings().master_hangs_seconds
    hour.stand_still(hour.master, seconds)
    if hour.loop.now < until:
        hour.later(seconds + _LIVELY_SECONDS + hour.random.random(), partial(_pause_master, hour, until))


def _stop_disk(hour: Hour) -> None:
    hour.master.disk_stands_still_until = hour.loop.now + _any_seconds(hour, 10)


def _pause_watchers(hour: Hour) -> None:
    for watcher in hour.watchers.values():
        if hour.random.random() < 0.6:
            hour.loop.pause(watcher.process)
            hour.later(_any_seconds(hour, 10), partial(hour.loop.resume, watcher.process))


_INCIDENTS: Final[dict[str, Callable[[Hour], None]]] = {
    "master killed": lambda hour: hour.kill(hour.master, None),
    "master restarted": lambda hour: hour.kill(hour.master, _any_seconds(hour, 6)),
    "master stands still": lambda hour: hour.stand_still(hour.master, _any_seconds(hour, 10)),
    "master pauses": _pause_master,
    "master's disk stands still": _stop_disk,
    "master slow": _slow_master,
    "master cut off from watchers": _cut_some_watchers,
    "other watchers cut off": _cut_other_watchers,
    "master cut off from replicas": _cut_replicas,
    "master's machine cut off": _cut_machine,
    "rack cut off": _cut_rack,
    "region cut off": _cut_region,
    "replica restarted": _restart_replica,
    "replica stands still": lambda hour: hour.stand_still(hour.random.choice(_replicas(hour)), _any_seconds(hour, 10)),
    "watchers paused": _pause_watchers,
}


def _stop_etcd(hour: Hour) -> None:
    assert hour.etcd is not None, "this befalls an etcd"
    hour.etcd.stop()
    hour.later(_any_seconds(hour, 12), hour.etcd.start)


def _cut_etcd(hour: Hour) -> None:
    """Cut etcd off from the watchers of some regions, or from some watchers of all."""
    watchers = [*hour.watchers]
    if hour.random.random() < 0.5:
        watchers = hour.of_region(hour.random.choice(hour.region_names()))
    elif hour.random.random() < 0.7:
        watchers = [name for name in watchers if hour.random.random() < 0.5]
    hour.cut_off([ETCD], watchers, _any_seconds(hour, 12))


def _restore_etcd(hour: Hour) -> None:
    """Restore a snapshot of now, a little later."""
    assert hour.etcd is not None, "this befalls an etcd"
    stops_after = 6.0 * hour.random.random()
    hour.later(stops_after, hour.etcd.stop)
    hour.later(stops_after + _STOPPED_SECONDS, partial(hour.restore_etcd, hour.etcd.snapshot()))


_OF_ETCD: Final[dict[str, Callable[[Hour], None]]] = {
    "etcd away": _stop_etcd,
    "etcd cut off": _cut_etcd,
    "etcd restored": _restore_etcd,
}


def play_hour(seed: int, kinds: Sequence[str] = (), regions: int = 0) -> Findings:
    """Play one hour (`Hour`), and return what it has brought."""
    loop = SimLoop()
    asyncio.set_event_loop(loop)
    try:
        with _quiet_logs():
            hour = Hour(seed, loop, kinds, regions)
            substitutions = [*statements(hour.machines), Substitution(LockFiles, partial(SimLockFiles, hour.locks))]
            with replaced(substitutions):
                loop.run_until_complete(hour.play())
                hour.sweep()
                loop.run_until_complete(asyncio.sleep(0.1))
        return hour.findings
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def play_hours(seeds: Iterable[int]) -> Findings:
    """Play hours one after the other."""
    found = Findings()
    for seed in seeds:
        found.add(play_hour(seed))
    return found


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Log nothing, which would take most of the time."""
    kept = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**kept)
