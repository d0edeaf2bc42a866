"""Simulate watchers, leases and links around one database, hour after hour, and count promotions that were not due.

The watchers are the product's own: probes, reports, locks, renewals, decisions, and a promotion with all its steps.
Replaced are the statements that they send to database servers (`tests.sim.replicated`). Each hour has one incident, and
only the seconds around it are played: in between nothing happens that could be misjudged.

A promotion is *false* when its master was well: its process ran, and throughout the two seconds before somebody could
have heard from it. That is the watcher that promoted, and any of the master's own region that could say so, if the
master answered every question within `ProbeSettings.master_hangs_seconds`; and a replica, if no heartbeat came so late
that one seemed to be missed. What a replica could hear does not count for one that is closed, because its lease is
over, and out of the reach of the watcher that promotes: if that gave up, nobody would open it. Also checked: no
acknowledged write of a semi-synchronous database is missing at a later master; no critical read, by a client with any
topology, lacks what was acknowledged before it began; and writes go on within `REPLACED_SECONDS` of the loss of a
master that died or stood still for good, if nothing else befell it. One that pauses again and again, each time for less
than `ProbeSettings.master_hangs_seconds`, keeps its place. In some hours a step of a promotion fails, and links are
perhaps mended before the next attempt, so that the old master goes on. Then everything is mended at the end, and writes
have to go on.

In some hours the topology and the locks are in etcd (`tests.sim.etcd`), which is away, restored from a snapshot, or out
of reach of some watchers, alone or beside another incident. While nothing else happens, a semi-synchronous master has
to stay open, and to answer critical reads.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Final, cast

import structlog

from tao.model.errors import TaoError
from tao.model.ports import TopologyStore
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology, WatcherProcess
from tao.replication.locks import LockFiles
from tao.replication.promotion import PromotionStep
from tao.replication.promotion_plan import SILENT_SECONDS
from tao.replication.server_statements import HEARTBEAT_SECONDS
from tao.storage.failures import ConnectionLost
from tao.topology import edits
from tao.topology.etcd_document import Snapshot
from tao.topology.etcd_store import EtcdTopology
from tao.watcher.settings import LeaseSettings, ProbeSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.memory_etcd import PLACE
from tests.sim.etcd import ETCD, EtcdSnapshot, SimEtcd, SimEtcdClient
from tests.sim.incidents import INCIDENTS, LIVELY_SECONDS, OF_ETCD
from tests.sim.locks import LockTable, SimLockFiles
from tests.sim.loop import CURRENT, Process, SimLoop
from tests.sim.lost_watchers import SimStore, SimWatcher, ignore
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
_OPEN_SECONDS: Final = 2 * (_ANSWER_SECONDS + 2 * _CLIENT_SECONDS) + 0.1
"""Longest time without a write or a critical read while nothing but etcd fails: two questions in a row of the only
client may be lost on the way."""
_ETCD_SECONDS: Final = 18.0
"""What an hour is longer in which something befalls etcd: the locks of a watcher that is cut off last for seconds, a
promotion may have to outlast two leases, and a snapshot is restored when all locks have ended."""
_OPERATOR_SECONDS: Final = 0.5
_HEAD_KEY: Final = PLACE.key("topology/head")
_WELL_SECONDS: Final = 2.0
"""Longer than it takes to find out, a last time, that a master does not answer."""
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

    def totals(self) -> str:
        """Return in a line how many hours were played, and how often each rule was broken."""
        broken = {
            "false": self.false,
            "lost writes": self.lost_writes,
            "stale reads": self.stale_reads,
            "late": self.late,
            "closed": self.closed,
            "stuck": self.stuck,
            "errors": self.errors,
        }
        counts = ", ".join(f"{what} {len(found)}" for what, found in broken.items())
        return f"{self.hours} hours, {self.promotions} promotions: {counts}"

    @property
    def violations(self) -> list[str]:
        return [*self.false, *self.lost_writes, *self.stale_reads, *self.late, *self.closed, *self.stuck, *self.errors]


def _tier(server: str) -> Tier:
    return Tier(name=f"{server}s", servers=(CacheServer(name=server, grpc="127.0.0.1:1"),))


class Hour:
    """One hour of one database, with one incident."""

    def __init__(self, seed: int, loop: SimLoop, kinds: Sequence[str] = (), regions: int = 0) -> None:
        """``kinds`` of incidents, and number of ``regions``: none and 0 leave them to the seed. Where one of the kinds
        befalls an etcd there is one."""
        rng = random.Random(seed)
        self.random: Final[random.Random] = rng
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
        self.master: Final[Server] = servers[0]
        self._etcd_kinds, self.etcd = self._draw_etcd()
        self.topology = self._document(servers)
        self.store: Final = cast("TopologyStore", SimStore(self))
        self.locks: Final = LockTable(loop)
        self.watchers: Final[dict[str, SimWatcher]] = {}
        self.acknowledged: Final[dict[int, int]] = {}
        """Server number → the last of its transactions that was acknowledged."""
        self._died_at = -1.0
        self._hangs = False
        """The master did not die: it stands still for good."""
        self._lively_until: Final[dict[str, float]] = {}
        """Server → the beginning of the last pause before which it had run for `LIVELY_SECONDS`."""
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
        kinds = [kind for kind in self._kinds if kind in OF_ETCD]
        if not self._kinds and rng.random() < 0.5:
            kinds = [rng.choice(sorted(OF_ETCD))] if rng.random() < 0.8 else []
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
        found = EtcdTopology(etcd, PLACE, on_error=ignore)._parse(Snapshot(0, 0, values))
        if found.version > self.topology.version:
            self.topology = found

    async def import_newest(self) -> None:
        """Store the newest topology as an operator does when etcd was restored."""
        assert self.etcd is not None, "this befalls an etcd"
        store = EtcdTopology(SimEtcdClient(self.etcd), PLACE, on_error=ignore)
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

    async def on_step(self, watcher: SimWatcher, step: PromotionStep) -> None:
        """Look at the old master at the last moment at which a promotion can be undone."""
        if step is self._breaks_at:
            self._breaks_at, self._broke = None, True
            if self._heals_after is not None:
                self.later(self._heals_after, self.machines.heal)
            raise ConnectionLost("the connection to a replica broke")
        database = self.topology.databases[0]
        old = self.machines.servers[database.servers[database.master_region].name]
        if step is not PromotionStep.RAISE_EPOCH:
            return
        if any(each.epoch > database.version_epoch for each in self.machines.servers.values()):
            return  # it was interrupted, and can only be finished
        self.findings.promotions += 1
        if self._was_well(old, watcher):
            self.findings.false.append(f"seed {self.seed}: {watcher.process.name} replaced {old.name}")
        if {"master pauses", "master stands still"}.issuperset(self._kinds_drawn) and self._was_lively(old):
            self.findings.false.append(f"seed {self.seed}: {watcher.process.name} replaced {old.name} in a pause")
        if not self.semi_sync:
            self._forget_lost()

    def _was_well(self, old: Server, watcher: SimWatcher) -> bool:
        """Return whether somebody could have heard from a master that is replaced, all the time (see above)."""
        may_report = self.loop.now - self.machines.healed_at >= _WELL_SECONDS
        witnesses = {
            own: ProbeSettings().master_hangs_seconds
            for own in self._named(old.region)
            if may_report
            and not self.machines.is_cut(own, watcher.process.name)
            and self.watchers[own].process.state == "runs"
        }
        witnesses[watcher.process.name] = ProbeSettings().master_hangs_seconds
        if not (old.read_only and self.machines.is_cut(watcher.process.name, old.name)):
            witnesses |= dict.fromkeys(self.machines.servers.keys() - {old.name}, SILENT_SECONDS - HEARTBEAT_SECONDS)
        since = min(self.machines.well_since(name, old, seconds) for name, seconds in witnesses.items())
        return self.loop.now - since >= _WELL_SECONDS

    def _was_lively(self, old: Server) -> bool:
        """Return whether a master has lately run for long enough to answer, or pauses for less than makes it a lost
        one."""
        now, paused_at = self.loop.now, old.stands_still_since
        runs_for = now - old.stands_still_until
        lively_until = now if runs_for >= LIVELY_SECONDS else self._lively_until.get(old.name, paused_at)
        return old.runs and now - lively_until < ProbeSettings().master_hangs_seconds

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

    # clients

    async def _ask_all(self, ask: Callable[[Server], Coroutine[object, object, None]]) -> None:
        """Ask each server that is open, again and again, as those do that take it for the master."""
        asked: dict[str, asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(_CLIENT_SECONDS * self.random.random() * 2)
            for server in self.machines.servers.values():
                if not server.read_only and (server.name not in asked or asked[server.name].done()):
                    asked[server.name] = self.loop.create_task(ask(server))

    async def _write(self, server: Server) -> None:
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
            await EtcdTopology(self.etcd, PLACE, on_error=ignore).change(0, self.topology)
            self.machines.regions[self._operator.name] = self._operator.region
        for region in self.region_names():
            for name in self._named(region):
                self.watchers[name] = SimWatcher(self, name, region)
                self.machines.regions[name] = region
        # The first one acts.
        for watcher in self.random.sample([*self.watchers.values()], len(self.watchers)):
            watcher.process.context.run(self._start, watcher)
        for region in self.region_names():
            client = Process(f"{region}-client", region)
            self.machines.regions[client.name] = region
            self._run(client, self._ask_all(self._write))
            self._run(client, self._ask_all(self._read))
        self.loop.call_later(self.random.random(), self.machines.close_without_lease)
        await asyncio.sleep(_BEFORE_SECONDS + self.random.random())
        kinds = self._kinds_drawn = self._draw_kinds()
        self.findings.incidents[" and ".join(sorted(kinds))] += 1
        for what in self._longest_wait:
            self._longest_wait[what] = 0.0
        for kind in kinds:
            (INCIDENTS | OF_ETCD)[kind](self)
            self._note_loss(kinds)
            await asyncio.sleep(self.random.choice((0.0, 3.0)) * self.random.random())
        await asyncio.sleep(_AFTER_SECONDS + (0.0 if set(kinds).isdisjoint(OF_ETCD) else _ETCD_SECONDS))
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
        names = sorted(INCIDENTS)
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
            server.disk_stands_still_until = server.refuses_until = 0.0
            if not server.runs:
                self._back(server)
        for watcher in self.watchers.values():
            self.loop.resume(watcher.process)
        # By then it has been replaced if that is possible. Nobody takes the place of one that acknowledged alone.
        self.later(_RESUMED_SECONDS / 2, self._resume_master)
        await asyncio.sleep(_RESUMED_SECONDS)
        # A slow way there and back lets a single write fail.
        if self.loop.now - self._served_at["write"] > 3 * _ANSWER_SECONDS:
            self.findings.stuck.append(f"seed {self.seed}: no write since {self._served_at['write']:.2f}")

    def _resume_master(self) -> None:
        database = self.topology.databases[0]
        master = self.machines.servers[database.servers[database.master_region].name]
        master.stands_still_until = min(master.stands_still_until, self.loop.now)

    def _open_master(self) -> None:
        for server in self.machines.servers.values():
            server.terms = LeaseSettings().terms(semi_sync=self.semi_sync)
            server.master_row = self.master.name
            server.log[self.master.number] = 1
            if server is not self.master:
                server.following, server.io_runs = self.master, True
        self.master.read_only, self.master.waits = False, self.semi_sync
        self.master.lease_ends = self.loop.now + self.master.terms.seconds

    def _start(self, watcher: SimWatcher) -> None:
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
        if kinds == ["master refuses watchers"] and self.semi_sync and master.refuses_until > self.loop.now:
            others = [each for each in self.machines.servers.values() if each is not master]
            if not any(each.following is master and each.io_runs for each in others):
                self.findings.stuck.append(f"seed {self.seed}: {master.name} waits for replicas that have stopped")
        if self.semi_sync and OF_ETCD.keys() >= set(kinds):
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
        server.started_at = self.loop.now
        if server.following is not None:
            self.machines.send(server.following)

    def stand_still(self, server: Server, seconds: float) -> None:
        if self.loop.now - server.stands_still_until >= LIVELY_SECONDS:
            self._lively_until[server.name] = self.loop.now
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
    """Play hours one after the other, and collect garbage between them: while one is played most of what is made lives
    on, and looking for what does not takes longer than the hour."""
    found = Findings()
    gc.disable()
    gc.freeze()
    try:
        for seed in seeds:
            found.add(play_hour(seed))
            gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
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
