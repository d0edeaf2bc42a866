"""Scenario `etcd_faults`: etcd is killed, silent, cut off from a region, compacted and restored from a snapshot, under
the load of `chaos` and with its judgement. At the end the regions are cut off from each other, and a master is killed.

Two regions keep their topology and locks in an etcd in the first one. As long as nothing but etcd fails no read may
fail, whatever it demands. No database may ever have two masters, no server may go back to an older document, and
masters stay open, because their commits wait for a replica: also one in the region that is cut off from etcd alone, for
longer than a lease.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

from loadtest import options
from loadtest.conditions import within
from loadtest.faults.chaos import ZEROS, measured_of
from loadtest.faults.harness import Outcome
from loadtest.faults.injection import FAULTS, LINE_CUT, Injector, stopped
from loadtest.faults.load import Demand, RecordedOptions, run_recorded
from loadtest.faults.plan import Action, PlanStep, after
from loadtest.faults.record import RunRecord
from loadtest.region_cluster import MASTER, REMOTE, SEMI_SYNC_RTT_MS, RegionCluster
from loadtest.results import Aim, Conditions, ScenarioResult, at_least, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.admin.documents import ClusterTexts, import_documents
from tao.admin.server_stats import server_stats
from tao.devcluster.layout import Role
from tao.devcluster.line_control import Cut, Heal, ask_line
from tao.etcd.client import EtcdClient
from tao.etcd.location import EtcdLocation, EtcdSettings
from tao.etcd.v3 import rpc_pb2 as pb
from tao.model.errors import TaoError
from tao.model.topology import Topology
from tao.replication.locks import MASTERSHIP
from tao.storage.dialect import SessionSetup
from tao.storage.session import ServerAccount, open_session
from tao.topology.document import dump_topology
from tao.topology.stores import EtcdConnections, open_topology

_ETCD: Final = "etcd"
_AWAY_SECONDS: Final = 12.0
"""Time for which etcd is away: twice as long as a lease lasts."""
_TOY_AWAY_SECONDS: Final = 2.0
_CUT_SECONDS: Final = 2.5
"""How long a region is cut off. Its masters have no replica within reach, so they close when their leases end."""
_ALONE_SHARE: Final = 0.7
"""The part of the time in which nothing but etcd fails, where other faults follow."""
_WELL_SECONDS: Final = 240.0
_AROUND_SECONDS: Final = 600.0
_SEEN_SECONDS: Final = 60.0
"""Time in which every server has to use a new document."""
_LOOK_SECONDS: Final = 0.2
_CHANGES: Final = 3
"""Changes of the topology that a cut region or a restored etcd does not have."""
_ETCD_CUT: Final = "etcd_cut"
_ETCD_COMPACTED: Final = "etcd_compacted"
_CUT: Final = frozenset({_ETCD_CUT, _ETCD_COMPACTED})
"""Faults while which the other region does not reach etcd, and everything else."""
_AWAY: Final = frozenset({"etcd_kill", "etcd_stop", *_CUT})
"""Faults while which etcd does not answer all, and every master can be reached: it stays open."""


@asynccontextmanager
async def _cut_off(injector: Injector) -> AsyncIterator[str]:
    """Cut the other region off from etcd, and from nothing else."""
    async with _region_without_etcd(injector):
        yield _ETCD


@asynccontextmanager
async def _region_without_etcd(injector: Injector) -> AsyncIterator[None]:
    line, between = injector.cluster.line_control, (MASTER, REMOTE)
    port = injector.cluster.record.ports[_ETCD]["client"]
    try:
        await ask_line(line, Cut(between, to_port=port))
        yield
    finally:
        await ask_line(line, Heal(between))


@asynccontextmanager
async def _compacted(injector: Injector) -> AsyncIterator[str]:
    """Cut the other region off from etcd alone, change the topology, and have etcd forget how: the region has to read
    everything again."""
    place = _place(injector)
    async with _region_without_etcd(injector):
        yield _ETCD
        changed = await _change(place)
        client = EtcdClient(place, EtcdSettings())
        revision = (await client.read(place.key("topology/head"))).header.revision
        await client.call(lambda each: each.kv.Compact, pb.CompactionRequest(revision=revision, physical=True))
        await client.close()
    await _until_seen(injector.regions, changed.version)


@asynccontextmanager
async def _restored(injector: Injector) -> AsyncIterator[str]:
    """Bring etcd back to a snapshot from before some changes; mend it by an import of the document that servers use."""
    regions, cluster, place = injector.regions, injector.cluster, _place(injector)
    data = cluster.etcd_data
    kept = data.with_name("etcd-kept")
    await cluster.kill(_ETCD)
    await asyncio.to_thread(shutil.copytree, data, kept)
    await cluster.restart(_ETCD)
    changed = await _change(place)
    await _until_seen(regions, changed.version)
    await cluster.kill(_ETCD)
    await asyncio.to_thread(shutil.rmtree, data)
    await asyncio.to_thread(kept.rename, data)
    await asyncio.sleep(MASTERSHIP.takeover_seconds)  # as the instructions say: then nobody holds a lock any more
    await cluster.restart(_ETCD)
    try:
        yield _ETCD
    finally:
        # What a server uses is the newest document: a master may have been replaced since.
        texts = ClusterTexts(dump_topology(regions.topology), None, None)
        mended = await import_documents(place, texts, changed.version)
    await _until_seen(regions, mended.version)


def _place(injector: Injector) -> EtcdLocation:
    place = injector.cluster.topology_place
    assert isinstance(place, EtcdLocation), "this cluster has an etcd"
    return place


async def _change(place: EtcdLocation) -> Topology:
    """Store some versions that say the same."""
    etcd = EtcdConnections(EtcdSettings())
    try:
        store = open_topology(place, etcd, lambda _: None)
        found = await store.load()
        for _ in range(_CHANGES):
            found = await store.change(found.version, found)
        return found
    finally:
        await etcd.close()


async def _until_seen(regions: RegionCluster, version: int) -> None:
    async def seen() -> bool:
        return all(found >= version for found in (await _versions(regions)).values())

    await within(_SEEN_SECONDS, seen, _LOOK_SECONDS, f"not every server uses version {version} of the topology")


async def _versions(regions: RegionCluster) -> dict[str, int]:
    """Return the version of the topology that each server uses; 0 for one that does not answer."""
    names = [name for role in (Role.LEADER, Role.FOLLOWER, Role.WATCHER) for name in regions.named(role)]

    async def version(name: str) -> int:
        with suppress(TaoError):
            return int((await server_stats(regions.cluster.admin(name)))["topology_version"])
        return 0

    return dict(zip(names, await asyncio.gather(*map(version, names)), strict=True))


_OF_ETCD: Final[dict[str, Action]] = {
    "etcd_kill": partial(stopped, victim=lambda _: _ETCD),
    "etcd_stop": partial(stopped, victim=lambda _: _ETCD, pause=True),
    _ETCD_CUT: _cut_off,
    _ETCD_COMPACTED: _compacted,
    "etcd_restored": _restored,
}
_OTHERS: Final[dict[str, Action]] = {"link_cut": FAULTS["link_cut"], "master_kill": FAULTS["master_kill"]}
"""Faults that make some reads fail; the last one shows that a lost master is replaced after all that befell etcd."""
_KINDS: Final = {**_OF_ETCD, **_OTHERS}
_TOY_KINDS: Final = ("etcd_kill", _ETCD_CUT, "etcd_restored")


@dataclass(frozen=True, kw_only=True)
class EtcdFaultsOptions(RecordedOptions):
    """The options of `etcd_faults`."""

    seconds: float = options.SECONDS.default(240.0, toy=4.0, help="Seconds of load.")
    kinds: tuple[str, ...] = options.FAULT.default((), toy=_TOY_KINDS, choices=sorted(_KINDS))


@dataclass(slots=True)
class EtcdAlone:
    """What was read as long as nothing but etcd failed."""

    reads: int = 0
    failed: int = 0
    failed_plain: int = 0
    """Of these, the reads that any copy could have answered."""

    def take(self, record: RunRecord) -> None:
        """Take the counts of a run so far."""
        self.reads, self.failed = record.reads, record.failed_reads
        self.failed_plain = sum(count for (_, demand, _), count in record.failures.items() if demand == Demand.PLAIN)


@dataclass(slots=True)
class Watch:
    """What is looked at all the time."""

    looks: int = 0
    looks_without_etcd: int = 0
    """Of these, the looks while etcd did not answer all."""
    open_at_once: Counter[str] = field(default_factory=Counter)
    """Looks that found two servers of a database open, by database."""
    closed: Counter[str] = field(default_factory=Counter)
    """Looks that found none of a database open while etcd did not answer all, by database."""
    held_without_etcd: Counter[str] = field(default_factory=Counter)
    """Looks that found a master open in the region that is cut off from etcd, by database."""
    steps_back: Counter[str] = field(default_factory=Counter)
    """Times that a server used an older document than before, by server."""

    async def run(self, regions: RegionCluster, record: RunRecord) -> None:
        """Look until cancelled."""
        used: dict[str, int] = {}
        while True:
            databases, was_away = regions.topology.databases, False
            for each in databases:
                servers = [server.name for server in each.servers.values()]
                is_open = await asyncio.gather(*(_is_open(regions, name) for name in servers))
                away = bool(record.active) and all(fault.kind in _AWAY for fault in record.active)
                was_away = was_away or away
                self.open_at_once[each.name] += is_open.count(True) > 1
                self.closed[each.name] += away and True not in is_open
                is_cut = any(fault.kind in _CUT for fault in record.active) and each.master_region == REMOTE
                self.held_without_etcd[each.name] += is_cut and True in is_open
            for name, version in (await _versions(regions)).items():
                if version:
                    self.steps_back[name] += version < used.get(name, 0)
                    used[name] = version
            self.looks += 1
            self.looks_without_etcd += was_away
            await asyncio.sleep(_LOOK_SECONDS)


async def _is_open(regions: RegionCluster, name: str) -> bool | None:
    """Return whether a database server takes writes; None when it does not answer."""
    account, server = regions.accounts.administrator, regions.cluster.database(name)
    deadline = asyncio.get_running_loop().time() + 1.0
    login = ServerAccount(server.host, server.port, account.user, account.password, socket="", tls=None)
    try:
        session = await open_session(login, name, SessionSetup(writes=True), deadline=deadline)
        try:
            (((read_only,),),) = await session.run("SELECT @@GLOBAL.read_only", deadline=deadline)
            return not read_only
        finally:
            session.quit()
    except TaoError:
        return None


async def run(settings: BenchSettings, progress: Progress, wanted: EtcdFaultsOptions) -> ScenarioResult:
    """Inject faults of etcd until the time is over, and judge. Raises `OperatorError` when the cluster does not
    start."""
    away_seconds = _TOY_AWAY_SECONDS if settings.toy else _AWAY_SECONDS
    watch, alone = Watch(), EtcdAlone()
    plan = partial(_plan, wanted, away_seconds, alone)
    outcome = await run_recorded(settings, progress, wanted, plan, _WELL_SECONDS, etcd=True, beside=watch.run)
    measured = {"etcd_alone": asdict(alone), "looks": watch.looks, **measured_of(outcome, wanted.seed)}
    demands = [*outcome.demands(measured, ZEROS), *_aims(outcome, watch, alone, toy=settings.toy)]
    conditions: Conditions = {
        "seed": wanted.seed,
        "seconds": wanted.seconds,
        "away seconds": away_seconds,
        "rtt_ms": SEMI_SYNC_RTT_MS,
        "durability": "semi_sync",
    }
    unexplained = [f"{each.seconds} s: {each}" for each in outcome.record.failed if not each.explained][:5]
    return result_of(conditions, measured, demands, examples=[*unexplained, *outcome.record.examples], aims=[])


def _aims(outcome: Outcome, watch: Watch, alone: EtcdAlone, *, toy: bool = False) -> list[Aim]:
    """Return what has to hold of what has happened: an aim about faults that the run did not have is left out. At toy
    size there is one database, with its master beside etcd."""
    counts = _counts(outcome)
    shape = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    looks, reads, away_looks = f"{watch.looks} looks", f"{alone.reads:,} reads", f"{watch.looks_without_etcd} looks"
    of_etcd = [
        at_most("no plain read fails while nothing but etcd fails", alone.failed_plain, 0, reads),
        at_most("no read fails while nothing but etcd fails", alone.failed, 0, reads),
        at_least("reads are judged while nothing but etcd fails", alone.reads, 1),
    ]
    away = [at_most("masters stay open while etcd does not answer all", watch.closed.total(), 0, away_looks)]
    seen_away = [at_least("databases are looked at while etcd does not answer all", watch.looks_without_etcd, 1)]
    cut = [at_least("open masters that are cut off from etcd are seen", watch.held_without_etcd.total(), 1, looks)]
    return [
        *(of_etcd if counts.keys() & _OF_ETCD.keys() else []),
        at_most("no read fails that another server could have answered", outcome.record.unexplained.total(), 0, shape),
        at_most("no database has two masters", watch.open_at_once.total(), 0, looks),
        *(away if counts.keys() & _AWAY else []),
        *(seen_away if counts.keys() & _AWAY and not toy else []),
        at_most("no server goes back to an older document", watch.steps_back.total(), 0, looks),
        at_least("databases are looked at", watch.looks, 1, looks),
        *(cut if _ETCD_CUT in counts and not toy else []),
    ]


def _counts(outcome: Outcome) -> Counter[str]:
    return Counter(fault.kind for fault in outcome.record.faults)


def _plan(
    wanted: EtcdFaultsOptions, away_seconds: float, alone: EtcdAlone, injector: Injector, record: RunRecord
) -> Iterator[Sequence[PlanStep]]:
    """Inject every kind in turn, then again, until the time is over; each at least once. Those of etcd come first, by
    themselves, and what was read until then is counted."""
    chosen = wanted.kinds or tuple(_KINDS)
    of_etcd, others = ([kind for kind in chosen if kind in kinds] for kinds in (_OF_ETCD, _OTHERS))
    until = wanted.seconds * (_ALONE_SHARE if others else 1.0)
    if of_etcd:
        yield from _in_turn(of_etcd, until, away_seconds, injector, record)
        alone.take(record)
    if others:
        yield from _in_turn(others, wanted.seconds, away_seconds, injector, record)
    record.done = 1.0


def _in_turn(
    kinds: Sequence[str], until: float, away_seconds: float, injector: Injector, record: RunRecord
) -> Iterator[Sequence[PlanStep]]:
    done, began = 0, record.now()
    while done < len(kinds) or record.now() < until:
        record.done = min((record.now() - began) / max(1.0, until - began), done / len(kinds), 1.0)
        kind = kinds[done % len(kinds)]
        pause = injector.chance.uniform(0.2, 1.0) * min(4.0, until / 4)
        seconds = _CUT_SECONDS if kind in LINE_CUT else away_seconds
        yield [PlanStep(kind, _KINDS[kind], after(pause), seconds)]
        done += 1


SCENARIO: Final = Scenario(
    name="etcd_faults",
    summary="two regions with their topology in etcd, which is killed, cut off, compacted and restored, under load",
    run=run,
    options=EtcdFaultsOptions,
    help="""Run two regions that keep their topology in etcd, while etcd is killed, silent, cut off from a region,
    compacted and restored from a snapshot.

    No read may fail as long as nothing but etcd fails. At the end the regions are cut off from each other, and a
    master is killed. No database may have two masters, and what `chaos` checks has to hold. The exit status is 1
    otherwise.""",
    in_bench=False,
    seconds_bound=lambda wanted: wanted.seconds + _AROUND_SECONDS,
)
