"""Scenario `hostile`: bounded attacks on a follower that asks for tokens, and an honest client beside each of them.

The honest client's requests take turns with its pauses: a hit, a miss and a new connection over frames, and a gRPC
call. Each attack is measured in rounds of three turns: undisturbed; beside the attack, which a process of its own makes
again and again; and beside a process that burns as much CPU as the attacker did at the same times, on as many cores,
and attacks nobody. The attacker stands for other machines, so it has a core of its own, in which also the system works
for it, and servers and client share the others in all turns. On one core, or with `--shared-cores`, all share all, and
the attacker gets what nobody else wants; then the ratio to the undisturbed turns contains the attacker's own CPU, and
the ratio to the burnt ones does not. Connections cost the system CPU, too, at any listener. So the attacks that only
open them have a fourth turn, in which they are made on a listener of a few lines.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from loadtest import options
from loadtest.client_process import StepReport, run_job
from loadtest.hostile.attacks import OVER_TLS, STRANGERS, Grip, Ports, flood, open_client, prepare
from loadtest.hostile.bare_listener import bare_listener
from loadtest.hostile.honest_client import HIT, HONEST, HonestClient
from loadtest.results import Aim, Listing, ScenarioResult, at_most, listings_of
from loadtest.rounds import cpu_seconds, percentile
from loadtest.scenario import SCHEMA, BenchSettings, Progress, ProgressListener, Scenario
from loadtest.table import listing
from tao.devcluster.certificates import APPLICATION, tls_files
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Role, Shape
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.state_folder import StateFolder
from tao.runtime.token_file import TokenEntry, TokenRole, dump_tokens, entry_for, new_secret
from tao.wire.identity import Credentials

FLOOD: Final = "126,000 critical reads of one client"
ATTACKS: Final = (*STRANGERS, FLOOD)
UNDISTURBED, ATTACKED, BURNT, ELSEWHERE = "undisturbed", "attacked", "burnt", "elsewhere"
TURNS: Final = (UNDISTURBED, ATTACKED, BURNT)
_CONNECTIONS_ALONE: Final = frozenset({"600 ungreeted connections", "600 half-open TLS connections"})
"""The attacks whose turns include one on a listener that has nothing to do with the servers."""
BOUND: Final = 1.5
"""The honest client's p99 beside an attack, as a multiple of the one without."""
_MAX_GROWTH_MB: Final = 100
_SHAPE: Final = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=4, watchers=1)
_FOLLOWER, _WATCHER = "follower-1a", "watcher-1"
_HOLD_SECONDS: Final = 0.2
_SLICE_SECONDS: Final = 0.01
_WHOLE_CORE: Final = 0.05
"""A remainder of a core that needs no thread of its own."""
_HASHED: Final = bytes(1 << 19)
_LOOK_SECONDS: Final = 0.05
_ROUNDS: Final = 3
_FORMERLY: Final = {
    "12,000 calls of headers": "health checks and reads with a token refused",
    "40 requests of 16 MB before the greeting": "84 → 676 MB",
    "10 messages of 15 MB": "500 MB",
    "10 messages of 60 MB, compressed": "90 MB for 14 KB sent",
    "400 silent admin connections": "32 were enough to reset /health and /ready",
    "600 ungreeted connections": "each took one of the places of all for 60 s",
    "600 half-open TLS connections": "each took one of the places of all for 60 s",
    "600 replayed TLS handshakes": "each cost a key exchange and a signature",
    "600 wrong greetings": "a line in the log for each",
    "600 forged watcher reports": "one page was enough to mark servers down and age a lease",
    FLOOD: "everybody's misses starved",
}
"""What each attack did before servers had bounds against it."""
_COLUMNS: Final = {
    "attack": "{attack}",
    "formerly": "{formerly}",
    "memory, MB": "{growth_mb:+.0f}",
    "server cores": "{server_cores:.2f}",
    **{f"{kind}, p99 ms": f"{{{kind.replace(' ', '_')}}}" for kind in HONEST},
}
_OVERVIEW_NOTE: Final = (
    "First table: the most memory by which the servers have grown in a turn beside the attack, and the honest client's "
    "p99 undisturbed / attacked / burnt, and for connections alone / elsewhere."
)
_NOTE: Final = (
    "Figures of all rounds together. *undisturbed* and *burnt* are the same client without an attack; beside *burnt*, "
    "a process uses as much CPU as the attacker did. Beside *elsewhere*, the attack is made on a listener that is none "
    "of the servers."
)


@dataclass(frozen=True, kw_only=True)
class HostileOptions(options.Options):
    """The options of the scenario."""

    seconds: float = options.SECONDS.default(10.0, toy=0.2, help="Measured seconds beside each attack.")
    attack: tuple[str, ...] = options.ATTACK.default(())
    shared_cores: bool = options.SHARED_CORES.default(False)


async def run(settings: BenchSettings, progress: Progress, asked: HostileOptions) -> ScenarioResult:
    """Measure the honest client beside each attack. Raises `OperatorError`."""
    rounds = 1 if settings.toy else _ROUNDS
    attacks = [name for name in ATTACKS if not asked.attack or any(each in name for each in asked.attack)]
    measured: dict[str, dict[str, float]] = {}
    faults = set[str]()
    with _own_core(is_shared=asked.shared_cores or settings.toy) as attackers_core:
        for tls in (False, True):
            some = [name for name in attacks if (name in OVER_TLS) is tls]
            if some:
                turns = _Plan(some, rounds, asked.seconds / rounds, attackers_core)
                measured |= await _attack(settings, progress, turns, faults, tls=tls)
    measured = {(key := f"{name}: {turn}"): measured[key] for name in attacks for turn in turns_of(name)}
    return ScenarioResult(
        conditions={
            "rounds": rounds,
            "round_seconds": asked.seconds / rounds,
            "cores": os.cpu_count() or 0,
            "attacker": "on the cores of all" if attackers_core is None else "on a core of its own",
        },
        listings=[_overview(attacks, measured), *listings_of(measured)],
        notes=[_OVERVIEW_NOTE, _NOTE],
        aims=[aim for name in attacks for aim in _aims(name, measured)],
        faults=sorted(faults)[:20],
        measured=measured,
    )


class _Plan(NamedTuple):
    """Attacks on one cluster."""

    attacks: list[str]
    rounds: int
    seconds: float
    """The length of a turn."""
    core: int | None
    """The attacker's core; None: it shares those of all."""


@contextmanager
def _own_core(*, is_shared: bool) -> Iterator[int | None]:
    """Give up one core, and yield its number: it is the attacker's. This process and those that it starts use the
    others meanwhile. None: all use all."""
    cores = os.sched_getaffinity(0)
    if is_shared or len(cores) < 2:
        yield None
        return
    os.sched_setaffinity(0, cores - {max(cores)})
    try:
        yield max(cores)
    finally:
        os.sched_setaffinity(0, cores)


async def _attack(
    settings: BenchSettings, progress: Progress, plan: _Plan, faults: set[str], *, tls: bool
) -> dict[str, dict[str, float]]:
    """Make attacks on a cluster that is started for them, and return the figures of each kind of turn of each."""
    secrets = {name: new_secret() for name in ("servers", "honest", "hog")}
    tokens_file = settings.work_dir / "tokens.yaml"
    tokens_file.write_text(_accepted(secrets))
    tokens: dict[str, object] = {"token": secrets["servers"], "accepted_tokens_file": str(tokens_file)}
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / ("hostile_tls" if tls else "hostile"),
        shape=_SHAPE,
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
        server_settings=dict.fromkeys((Role.LEADER, Role.FOLLOWER, Role.TAILER, Role.WATCHER), tokens),
        tls=tls,
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(DevCluster(cluster_settings, progress.step))
        ports, of_watcher = cluster.record.ports[_FOLLOWER], cluster.record.ports[_WATCHER]
        target = Ports(
            grpc=f"{LOOPBACK}:{ports['grpc']}",
            frames=f"{LOOPBACK}:{ports['frames']}",
            admin=f"{LOOPBACK}:{ports['admin']}",
            watcher=f"{LOOPBACK}:{of_watcher['frames']}",
        )
        pids = {process.name: process.pid for process in (await cluster.status()).processes}
        servers = AttackedServers([pids[name] for name in (_FOLLOWER, "leader-1", _WATCHER)], settings.work_dir)
        files = tls_files(StateFolder(cluster_settings.state_dir), APPLICATION) if tls else None
        honest = await stack.enter_async_context(
            HonestClient(target, Credentials("honest", "client", secrets["honest"]), files)
        )
        elsewhere = ""
        if not _CONNECTIONS_ALONE.isdisjoint(plan.attacks):
            log = settings.work_dir / "bare_listener.log"
            elsewhere = await stack.enter_async_context(bare_listener(log))
        job = AttackJob(
            attacks=plan.attacks,
            ports=target,
            elsewhere=elsewhere,
            token=secrets["hog"],
            rounds=plan.rounds,
            seconds=plan.seconds,
            core=plan.core,
            is_toy=settings.toy,
        )
        measured = await _measure(servers, job, honest, progress)
        faults.update(honest.failures)
        if down := (await cluster.topology()).marked_by_watcher:
            faults.add(f"servers that run were marked down: {', '.join(down)}")
    return measured


def _accepted(secrets: dict[str, str]) -> str:
    entries: list[TokenEntry] = []
    roles: list[tuple[TokenRole, str, str]] = [
        *((role, "", "servers") for role in ("leader", "follower", "tailer", "watcher")),
        *(("client", name, name) for name in ("honest", "hog")),
    ]
    for role, caller, secret in roles:
        entries.append(entry_for(secrets[secret], caller, role, None, [each.id for each in entries]))
    return dump_tokens(tuple(entries))


SCENARIO: Final = Scenario(
    name="hostile",
    summary="attacks of strangers and of a greedy client: their cost, and an honest client's latencies meanwhile",
    run=run,
    options=HostileOptions,
    help=__doc__ or "",
    in_bench=False,
)


def turns_of(attack: str) -> tuple[str, ...]:
    """Return the turns of an attack in a round."""
    return (*TURNS, ELSEWHERE) if attack in _CONNECTIONS_ALONE else TURNS


class AttackJob(msgspec.Struct, frozen=True, kw_only=True):
    """Take the turns of all attacks, and report each as it begins."""

    attacks: list[str]
    ports: Ports
    elsewhere: str
    """The address of a listener that is none of the servers; empty when no attack is made on it."""
    token: str
    """The token of the client that floods."""
    rounds: int
    seconds: float
    """The length of one turn."""
    core: int | None
    """The core of this process alone; None: it shares those of all."""
    is_toy: bool

    async def work(self, report: StepReport) -> list[float]:
        """Return the CPU time that this process has used in each turn.

        On the cores of all, the attacker has one only while nobody else wants it. Niceness would not do: once on a
        core, it would keep it for a slice of milliseconds. At toy size, where the machine may have no idle core for
        minutes, niceness has to do."""
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})
        elif self.is_toy:
            os.nice(19)
        else:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        prepare()
        used: list[float] = []
        waves: list[_Wave] = []
        total = self.rounds * sum(len(turns_of(attack)) for attack in self.attacks)
        for attack in self.attacks:
            for _ in range(self.rounds):
                for turn in turns_of(attack):
                    report(f"{attack}: {turn}", len(used) / total)
                    began = time.process_time()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self.seconds):
                            await self._take_turn(turn, attack, waves)
                    used.append(time.process_time() - began)
                    await asyncio.sleep(_HOLD_SECONDS)
        return used

    async def _take_turn(self, turn: str, attack: str, waves: list[_Wave]) -> None:
        """Take one turn, until cancelled. ``waves``: those of the latest attack."""
        if turn == UNDISTURBED:
            await asyncio.sleep(self.seconds)
        elif turn == BURNT:
            ends = time.perf_counter() + self.seconds
            for wave in waves:
                await _burn(wave, ends)
                await asyncio.sleep(_HOLD_SECONDS)
        elif attack == FLOOD:
            waves.clear()
            with _wave(waves):
                await self._flood()
        else:
            waves.clear()
            ports = Ports(*(self.elsewhere,) * 3) if turn == ELSEWHERE else self.ports
            while True:
                async with Grip() as grip:
                    with _wave(waves):
                        await STRANGERS[attack](ports, grip)
                    await asyncio.sleep(_HOLD_SECONDS)

    async def _flood(self) -> None:
        session = await open_client(self.ports.frames, Credentials("hog", "client", self.token))
        try:
            while True:
                await flood(session, HIT)
        finally:
            await session.close()


class _Wave(NamedTuple):
    """One attack, or the part of it that a turn had time for."""

    seconds: float
    cores: float
    """What the attacker has used of the machine's cores meanwhile."""


@contextmanager
def _wave(waves: list[_Wave]) -> Iterator[None]:
    """Add what happens meanwhile to the waves."""
    began, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        seconds = max(1e-6, time.perf_counter() - began)
        waves.append(_Wave(seconds, (time.process_time() - cpu) / seconds))


async def _burn(wave: _Wave, ends: float) -> None:
    """Use as much CPU as the attacker did in a wave, until ``ends`` at most."""
    threads = max(1, math.ceil(wave.cores - _WHOLE_CORE))
    share = min(1.0, wave.cores / threads)
    cpu_seconds = wave.cores * wave.seconds / threads
    await asyncio.gather(*(asyncio.to_thread(_hash, share, cpu_seconds, ends) for _ in range(threads)))


def _hash(share: float, cpu_seconds: float, ends: float) -> None:
    """Use a share of a core, until so much is used. Hashing so much at once does not hold the lock of the
    interpreter."""
    until = time.thread_time() + cpu_seconds
    while (used := time.thread_time()) < until and time.perf_counter() < ends:
        slice_ends = min(until, used + share * _SLICE_SECONDS)
        while time.thread_time() < slice_ends:
            sha256(_HASHED)
        time.sleep((1 - share) * _SLICE_SECONDS)


@dataclass(frozen=True, slots=True)
class AttackedServers:
    """The servers whose memory and CPU are measured."""

    pids: list[int]
    folder: Path

    def memory_mb(self) -> float:
        """Return the resident memory of the servers."""
        return sum(_resident_mb(pid) for pid in self.pids)

    def cpu(self) -> float:
        """Return the CPU seconds that the servers have used."""
        return sum(map(cpu_seconds, self.pids))


@dataclass(slots=True)
class _Turns:
    """What all turns of one kind have brought."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in HONEST})
    server_cpu: float = 0.0
    other_cpu: float = 0.0
    elapsed: float = 0.0
    growth_mb: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return latencies in ms, cores used, and the most memory by which the servers have grown in a turn."""
        ordered = {kind: sorted(times) for kind, times in self.seconds.items()}
        found = {f"{kind} p50_ms": 1e3 * percentile(times, 0.5) for kind, times in ordered.items()}
        found |= {f"{kind} p99_ms": 1e3 * percentile(times, 0.99) for kind, times in ordered.items()}
        found["server_cores"] = self.server_cpu / self.elapsed
        found["other_cores"] = self.other_cpu / self.elapsed
        found["growth_mb"] = self.growth_mb
        return {name: round(value, 3) for name, value in found.items()}


async def _measure(
    servers: AttackedServers, job: AttackJob, honest: HonestClient, progress: Progress
) -> dict[str, dict[str, float]]:
    """Return the figures of each kind of turn of each attack."""
    turns: dict[str, _Turns] = {f"{attack}: {turn}": _Turns() for attack in job.attacks for turn in turns_of(attack)}
    begun: asyncio.Queue[str] = asyncio.Queue()
    attacking = asyncio.create_task(
        run_job(job, ProgressListener(progress, begun.put_nowait), servers.folder / "attacker.log", list[float])
    )
    attacking.add_done_callback(lambda _: begun.put_nowait(""))
    order: list[_Turns] = []
    while name := await begun.get():
        order.append(turns[name])
        await _take_turn(servers, honest, turns[name], job.seconds)
    for each, used in zip(order, await attacking, strict=True):
        each.other_cpu += used
    return {name: each.figures() for name, each in turns.items()}


async def _take_turn(servers: AttackedServers, honest: HonestClient, turns: _Turns, seconds: float) -> None:
    began, cpu, memory = time.perf_counter(), servers.cpu(), _MemoryWatch(servers)
    try:
        found = await honest.measure(seconds)
    finally:
        turns.growth_mb = max(turns.growth_mb, memory.end())
    turns.server_cpu += servers.cpu() - cpu
    turns.elapsed += time.perf_counter() - began
    for kind, times in found.items():
        turns.seconds[kind] += times


class _MemoryWatch:
    """Looks at the memory of the servers until its end."""

    def __init__(self, servers: AttackedServers) -> None:
        self._servers: Final = servers
        self._before = self._most = servers.memory_mb()
        self._watching: Final = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            self._most = max(self._most, self._servers.memory_mb())
            await asyncio.sleep(_LOOK_SECONDS)

    def end(self) -> float:
        """Return how much memory the servers have grown by at most."""
        self._watching.cancel()
        return self._most - self._before


def _resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def _overview(attacks: list[str], measured: dict[str, dict[str, float]]) -> Listing:
    """Return the table of what each attack did once, and does now."""
    rows = list[dict[str, object]]()
    for attack in attacks:
        turns = [measured[f"{attack}: {turn}"] for turn in turns_of(attack)]
        attacked = turns[TURNS.index(ATTACKED)]
        p99s = {
            kind.replace(" ", "_"): " / ".join(f"{figures[f'{kind} p99_ms']:.1f}" for figures in turns)
            for kind in HONEST
        }
        rows.append({"attack": attack, "formerly": _FORMERLY[attack], **attacked, **p99s})
    return listing(_COLUMNS, rows, "What each attack did before servers had bounds against it, and does now")


def _aims(attack: str, measured: dict[str, dict[str, float]]) -> Iterator[Aim]:
    alone, attacked, burnt = (measured[f"{attack}: {turn}"] for turn in TURNS)
    for kind in HONEST:
        p99 = f"{kind} p99_ms"
        for beside, figures in (("undisturbed", alone), ("burnt CPU", burnt)):
            ratio = attacked[p99] / figures[p99]
            yield at_most(f"p99 of {kind}: at most {BOUND:g} × {beside}", round(ratio, 3), BOUND, attack)
    growth = attacked["growth_mb"]
    yield at_most(f"memory of the servers: at most {_MAX_GROWTH_MB} MB more", growth, _MAX_GROWTH_MB, attack)
