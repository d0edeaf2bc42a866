"""Probes of database servers, cache servers, tailers and the watchers of other regions.

A database server is asked whether it answers, is open, which master it follows and how far it is behind. A cache server
or tailer gets an empty read over the wire that all clients use; the links' failure detectors judge failures, slowness
and recovery. Other watchers report what they see over frames, each to watchers and operators alone: a forged report
could have two masters opened at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tao.model.errors import TaoError
from tao.model.ports import Clock
from tao.model.topology import CacheServer, Database, TailerProcess, Topology, WatcherProcess
from tao.observability.logs import Logger
from tao.replication.kept_sessions import KeptSessions
from tao.replication.lost_master import Questions
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.runtime.tasks import BackgroundTasks
from tao.serving.audit import AuditTrail
from tao.watcher.marks import ServerVerdict, WatcherReport, lag_verdict, steady_verdict
from tao.watcher.settings import ProbeSettings
from tao.wire.links import Link, Links
from tao.wire.v1 import session_pb2 as pb

_SECOND_LOOK_SECONDS: Final = 0.2
"""Time until a database is looked at again whose commits may wait for acknowledgements that were lost. All its writes
wait then. Longer than an acknowledgement needs that is only on its way: a look itself takes some round trips."""

_AFTER_SECONDS: Final = 0.01
"""A probe ends so long after the moment for which it is to be known whether the master has answered."""
_APART_SECONDS: Final = 0.1
"""Least time between the beginnings of two probes of a master that may hang: some failures come at once."""
_SHORTEST_SHARE: Final = 0.3
"""The least share of its time limit that a probe of a silent master gets: three round trips between distant regions."""


@dataclass(frozen=True, slots=True)
class WatcherContext:
    """What the parts of one watcher process share: its background tasks, clock, log and audit log."""

    tasks: BackgroundTasks
    clock: Clock
    log: Logger
    audit: AuditTrail = field(default_factory=AuditTrail)


class DatabaseProbes:
    """Keeps the verdicts on database servers from the last probes, and since when silent ones have been silent."""

    def __init__(
        self,
        topology: Callable[[], Topology],
        accounts: SetAccounts,
        region: str,
        settings: ProbeSettings,
        context: WatcherContext,
        observe: Callable[[ReplicationSet, list[SetMember], float], None],
    ) -> None:
        """``observe`` is called in the loop after each probe of a database, with the time the probe began. It must be
        quick."""
        self._topology: Final = topology
        self._accounts: Final = accounts
        self._region: Final = region
        self._clock: Final = context.clock
        self._settings: Final = settings
        self._tasks: Final = context.tasks
        self._observe: Final = observe
        self._looking: Final = set[str]()
        self._answered_at: Final[dict[str, float]] = {}
        self._following_at: Final[dict[str, float]] = {}
        self._good_probes: Final[dict[str, int]] = {}
        self._refused_connections: Final[dict[str, int]] = {}
        self._unanswered: Final = set[str]()
        self._questions: Final = defaultdict[str, Questions](Questions)
        """Master → the questions that it has not answered yet."""
        self._heard_at: Final[dict[str, float]] = {}
        """Master → when its last answer came."""
        self._answered_late_at: Final[dict[str, float]] = {}
        """Master → when it answered a question last for whose answer no probe had waited."""
        self._asked_at: Final[dict[str, float]] = {}
        """Database → when its last probe began."""
        self._sessions: Final[dict[str, tuple[Database, KeptSessions]]] = {}
        """Database → its sessions, and the database as the topology had it when they were opened. Between distant
        regions a new session a probe would make a probe last for as long as the pause between two."""
        self.verdicts: dict[str, ServerVerdict] = {}
        self.refusals: dict[str, str] = {}
        """Why servers cannot be judged, by server."""
        self.lags: dict[str, float | None] = {}
        self.waits_for_replica: dict[str, bool] = {}
        """Per semi-synchronous database whose master is open: whether its commits wait for a replica."""

    async def run(self) -> None:
        """Probe until cancelled. A database whose servers hang does not delay the others."""
        while True:
            databases = self._topology().databases
            for name in self._sessions.keys() - {database.name for database in databases}:
                self._sessions.pop(name)[1].close()
            for database in databases:
                if database.name not in self._looking:
                    self._looking.add(database.name)
                    self._tasks.start(self._look(database), f"look at {database.name}")
            await asyncio.sleep(self._settings.interval_seconds)

    def close(self) -> None:
        """Withdraw all questions and close the sessions, once no probe runs any more."""
        for questions in self._questions.values():
            questions.withdraw()
        for _, sessions in self._sessions.values():
            sessions.close()

    def silent_seconds(self, server: str) -> float:
        """Return how long ago the server last answered, counted from the first probe when it never has.

        Counted from the answer of a master, which may be slow, and from the beginning of the probe that another server
        answered."""
        now = self._clock.monotonic()
        answered_at = self._answered_at.setdefault(server, now)
        return now - max(answered_at, self._heard_at.get(server, answered_at))

    def is_dead(self, master: str) -> bool:
        """Return whether nothing has listened at a master's address for some probes in a row."""
        return self.verdicts.get(master) is ServerVerdict.DEAD

    async def _look(self, database: Database) -> None:
        try:
            if await self._ask(database):
                await asyncio.sleep(_SECOND_LOOK_SECONDS)
                await self._ask(database)
            while self._may_hang(database):
                await asyncio.sleep(max(0.0, self._asked_at[database.name] + _APART_SECONDS - self._clock.monotonic()))
                if database not in self._topology().databases:
                    return  # it has another master, perhaps, and is looked at by what the topology says now
                await self._ask(database)
        finally:
            self._looking.discard(database.name)

    def _may_hang(self, database: Database) -> bool:
        """Return whether the master leaves probes unanswered, and it is to be known soon for how long, and whether the
        watchers of its region find so too."""
        master = database.servers[database.master_region].name
        is_silent = master in self._unanswered and not self._refused_connections[master]
        until = self._settings.hangs_after_seconds + self._settings.timeout_seconds
        return database.semi_sync and is_silent and self.silent_seconds(master) < until

    def _answer_seconds(self, database: Database) -> float:
        """Return the time limit of a probe of the master. It ends when that would have been silent for long enough to
        be lost, and is short for some time from then on."""
        settings = self._settings
        master = database.servers[database.master_region].name
        if not database.semi_sync or master not in self._answered_at:
            return settings.timeout_seconds
        left = settings.hangs_after_seconds - self.silent_seconds(master) + _AFTER_SECONDS
        if left < -settings.timeout_seconds:
            return settings.timeout_seconds
        return min(settings.timeout_seconds, max(_SHORTEST_SHARE * settings.timeout_seconds, left))

    async def _ask(self, database: Database) -> bool:
        """Observe a database. Returns whether commits of its master may wait for lost acknowledgements."""
        replicas = ReplicationSet(
            database,
            self._accounts,
            seen_from=self._region,
            statement_seconds=self._settings.timeout_seconds,
            sessions=self._sessions_of(database),
        )
        began = self._asked_at[database.name] = self._clock.monotonic()
        members = await self._members(replicas)
        for member in members:
            if member.state is not None or member.refuses:
                self._answered_at[member.name] = began
                self._unanswered.discard(member.name)
            else:
                self._unanswered.add(member.name)
                self._answered_at.setdefault(member.name, began)
            self.refusals.pop(member.name, None)
            if member.refuses:
                self.refusals[member.name] = member.error
            self._refused_connections[member.name] = (
                self._refused_connections.get(member.name, 0) + 1 if member.is_refused else 0
            )
            verdict = self._verdict(replicas, member, began)
            self._good_probes[member.name] = (
                self._good_probes.get(member.name, 0) + 1 if verdict is ServerVerdict.UP else 0
            )
            self.verdicts[member.name] = steady_verdict(
                verdict,
                database.places[member.region].down,
                self._good_probes[member.name],
                probes_until_up=self._settings.answers_until_up,
            )
            if member.is_master:
                self._note_waiting(database, member)
        self._observe(replicas, members, began)
        return replicas.has_lost_acknowledgements(members)

    async def _members(self, replicas: ReplicationSet) -> list[SetMember]:
        """Return the state of all servers of a set, queried concurrently."""
        database = replicas.database
        seconds = self._answer_seconds(database)
        return list(
            await asyncio.gather(
                *(
                    self._master(replicas, seconds) if each == database.master_region else replicas.member(each)
                    for each in database.places
                )
            )
        )

    async def _master(self, replicas: ReplicationSet, seconds: float) -> SetMember:
        """Return the state of the master, or that it has not answered for some seconds. The question is not withdrawn
        then: a late answer shows that it is slow, while one that hangs gives none."""
        region, master = replicas.database.master_region, replicas.master.name
        asked = replicas.member(region, self._settings.master_gone_seconds)
        question = self._questions[master].ask(asked, f"does {master} answer")
        question.add_done_callback(partial(self._note_answer, self._heard_at))
        await asyncio.wait((question,), timeout=seconds)
        if question.done():
            return question.result()
        question.add_done_callback(partial(self._note_answer, self._answered_late_at))
        error = f"{master} has not answered for {seconds:.2f} s"
        return SetMember(master, region, None, error, is_master=True, is_silent=True)

    def _note_answer(self, answered_at: dict[str, float], question: asyncio.Task[SetMember]) -> None:
        if question.cancelled() or question.exception() is not None:
            return
        member = question.result()
        if member.state is not None or member.refuses:
            answered_at[member.name] = self._clock.monotonic()

    def _answers_late(self, master: str) -> bool:
        """Return whether a master has answered a question lately for whose answer no probe has waited."""
        settings, now = self._settings, self._clock.monotonic()
        lately = settings.interval_seconds * settings.cache_failures
        return now - self._answered_late_at.get(master, -math.inf) < lately

    def _sessions_of(self, database: Database) -> KeptSessions:
        """Return the sessions of a database, new ones when anything of it has changed: its servers may have moved."""
        before, sessions = self._sessions.get(database.name, (None, None))
        if sessions is None or before != database:
            if sessions is not None:
                sessions.close()
            sessions = KeptSessions()
            self._sessions[database.name] = database, sessions
        return sessions

    def _note_waiting(self, database: Database, master: SetMember) -> None:
        if database.semi_sync and master.state is not None and not master.state.read_only:
            self.waits_for_replica[database.name] = master.state.waits_for_replica
        else:
            self.waits_for_replica.pop(database.name, None)

    def _verdict(self, replicas: ReplicationSet, member: SetMember, now: float) -> ServerVerdict:
        settings = self._settings
        is_marked = replicas.database.places[member.region].down
        if member.is_master and self._refused_connections[member.name] >= settings.master_refusals:
            return ServerVerdict.DEAD
        if member.refuses:
            return ServerVerdict.REFUSED
        if member.is_master and member.state is None and self._answers_late(member.name):
            return ServerVerdict.UP
        if member.state is None:
            gone = self.silent_seconds(member.name) >= settings.interval_seconds * settings.cache_failures
            return ServerVerdict.DOWN if gone else ServerVerdict.UNSURE
        if member.is_master:
            return ServerVerdict.UP
        following = member.state.following
        self.lags[member.name] = following.lag_seconds if following is not None else None
        if following is None or not replicas.follows(member, replicas.database.master_region):
            # It is an old master that is back, or somebody is working on it. Its data may belong to another history.
            return ServerVerdict.DOWN
        if following.receiving and following.applying:
            self._following_at[member.name] = now
            return lag_verdict(
                following.lag_seconds,
                is_marked,
                down_seconds=settings.lag_down_seconds,
                up_seconds=settings.lag_up_seconds,
            )
        # Cut off from its master, it is as old as its last message from there, and still useful until that is too old.
        behind = now - self._following_at.setdefault(member.name, now)
        return lag_verdict(behind, is_marked, down_seconds=settings.lag_down_seconds, up_seconds=0.0)


class ServerProbes:
    """Keeps the verdicts on cache servers and tailers from the last round, and on dead ones from the last failure. A
    tailer without a ``frames`` address in the topology is not probed."""

    def __init__(self, links: Links, topology: Callable[[], Topology], settings: ProbeSettings) -> None:
        self._links: Final = links
        self._topology: Final = topology
        self._settings: Final = settings
        self._found: dict[str, ServerVerdict] = {}

    @property
    def verdicts(self) -> dict[str, ServerVerdict]:
        """The present verdicts by server. A link finds out between two rounds that its server is dead, or refuses."""
        dead = dict.fromkeys(filter(self._links.is_down_at, self._found), ServerVerdict.DOWN)
        return self._found | dead | dict.fromkeys(self.refusals, ServerVerdict.REFUSED)

    @property
    def refusals(self) -> dict[str, str]:
        """Why a watcher cannot judge servers, by server."""
        return {name: refusal for name in self._found if (refusal := self._links.refusal_at(name))}

    async def run(self) -> None:
        """Probe all servers concurrently until cancelled. The slowest answer decides the length of a round."""
        while True:
            servers = [
                server
                for region in self._topology().regions
                for servers in (*(tier.servers for tier in region.tiers), servers_at_frames(region.tailers))
                for server in servers
            ]
            verdicts = await asyncio.gather(*map(self._ask, servers))
            self._found = {server.name: verdict for server, verdict in zip(servers, verdicts, strict=True)}
            await asyncio.sleep(self._settings.interval_seconds)

    async def _ask(self, server: CacheServer) -> ServerVerdict:
        link = self._links.to(server)
        if link.is_down:
            return ServerVerdict.DOWN  # the link probes by itself meanwhile
        try:
            await link.ask(pb.Request(read=pb.ReadBatch()), self._settings.timeout_seconds)
        except TaoError:
            # A refusal is an answer. The link's failure detector decides whether and how much a silence counts.
            return self._judged(link)
        return ServerVerdict.UP

    def _judged(self, link: Link) -> ServerVerdict:
        if link.is_down:
            return ServerVerdict.DOWN
        return ServerVerdict.UP if link.is_up else ServerVerdict.UNSURE


class PeerReports:
    """Keeps the reports of the other regions' watchers: None while none of a region answers."""

    def __init__(
        self,
        links: Links,
        topology: Callable[[], Topology],
        region: str,
        settings: ProbeSettings,
        name: str = "",
    ) -> None:
        """``region`` and ``name`` are those of this watcher."""
        self._name: Final = name
        self._links: Final = links
        self._topology: Final = topology
        self._region: Final = region
        self._settings: Final = settings
        self.reports: dict[str, WatcherReport | None] = dict.fromkeys(self._watched_regions())
        self._heard: dict[str, list[WatcherReport]] = {}
        """Region → what all its watchers but this one reported last, the own region too."""

    async def run(self) -> None:
        """Fetch the reports until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._settings.interval_seconds)

    async def look(self) -> None:
        """Fetch the reports once."""
        others = self._watched_regions()
        regions = [*others, self._region]
        found = await asyncio.gather(*(self._ask_all(region) for region in regions))
        self._heard = {region: _judged(all_) for region, all_ in zip(regions, found, strict=True)}
        self.reports = {region: next(iter(self._heard[region]), None) for region in others}

    def says_up(self, region: str, server: str) -> bool:
        """Return whether another watcher of the region, which may be the own one, judges the server to be up."""
        return any(report.verdicts.get(server) is ServerVerdict.UP for report in self._heard.get(region, ()))

    def says_silent(self, region: str, server: str) -> bool:
        """Return whether another watcher of the region got no answer from the server last time."""
        answered = (ServerVerdict.UP, ServerVerdict.REFUSED)
        found = (report.verdicts.get(server, ServerVerdict.UP) for report in self._heard.get(region, ()))
        return any(verdict not in answered for verdict in found)

    def refuse(self, region: str) -> bool:
        """Return whether watchers of another region are there, refuse this one, and so keep from it what they see."""
        is_silent = region in self.reports and self.reports[region] is None
        return is_silent and any(self._links.refusal_at(each.name) for each in self._others_of(region))

    @property
    def is_listed(self) -> bool:
        """Whether the topology names this watcher in its region, so that others know whom to ask for its renewals."""
        regions = self._topology().regions
        return any(
            each.name == self._name for region in regions if region.name == self._region for each in region.watchers
        )

    @property
    def all_refuse(self) -> bool:
        """Whether no other region reports and watchers of one refuse this one: it is at fault, and not one of them."""
        return not any(self.reports.values()) and any(map(self.refuse, self.reports))

    @property
    def refusals(self) -> dict[str, str]:
        """Why other watchers do not report, by their names."""
        watchers = [each.name for region in self._topology().regions for each in region.watchers]
        return {name: refusal for name in watchers if (refusal := self._links.refusal_at(name))}

    def says_dead(self, region: str, server: str) -> bool:
        """Return whether the watcher of a master's region finds that nothing listens at its address."""
        report = self.reports.get(region)
        return report is not None and report.verdicts.get(server) is ServerVerdict.DEAD

    async def renewed_seconds_ago(self, region: str, database: str) -> float:
        """Ask the other watchers of a region how long ago one renewed a master's lease. Returns 0, a moment ago, when
        one does not say, and infinity when there are none."""
        others = self._others_of(region)
        asked = servers_at_frames(others)
        reports = await asyncio.gather(*(self._ask(each, region) for each in asked))
        agos = [0.0 if report is None else report.renewed_seconds_ago.get(database, 0.0) for report in reports]
        return min(agos, default=math.inf) if len(asked) == len(others) else 0.0

    def _watched_regions(self) -> list[str]:
        """Return the other regions that have a watcher."""
        regions = self._topology().regions
        return [region.name for region in regions if region.name != self._region and region.watchers]

    def _others_of(self, region: str) -> list[WatcherProcess]:
        """Return the watchers of a region but this one; those without an address of frames are silent."""
        return [
            watcher
            for each in self._topology().regions
            if each.name == region
            for watcher in each.watchers
            if watcher.name != self._name
        ]

    async def _ask_all(self, region: str) -> list[pb.WatcherReport | None]:
        others = servers_at_frames(self._others_of(region))
        return list(await asyncio.gather(*(self._ask(each, region) for each in others)))

    async def _ask(self, watcher: CacheServer, region: str) -> pb.WatcherReport | None:
        """Return what a watcher sees; None, for whatever reason, when that is not known."""
        link = self._links.to(watcher)
        try:
            answer = await link.ask(
                pb.Request(get_watcher_report=pb.GetWatcherReport()), self._settings.timeout_seconds
            )
        except TaoError:
            return None
        return answer.watcher_report if answer.watcher_report.region == region else None


def servers_at_frames(processes: Iterable[TailerProcess | WatcherProcess]) -> list[CacheServer]:
    """Return the tailers or watchers that can be asked, as servers to connect to."""
    return [CacheServer(name=each.name, grpc="", frames=each.frames) for each in processes if each.frames]


def _judged(reports: list[pb.WatcherReport | None]) -> list[WatcherReport]:
    """Return the reports that came, with the verdicts that this version knows."""
    known = {verdict.value for verdict in ServerVerdict}
    return [
        WatcherReport(each.region, {name: ServerVerdict(said) for name, said in each.verdicts.items() if said in known})
        for each in reports
        if each is not None
    ]
