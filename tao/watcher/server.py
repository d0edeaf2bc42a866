"""Wires the parts of a watcher process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Final

from tao.model.errors import TaoError, TopologyConflict
from tao.model.topology import CacheServer, Topology, lists
from tao.observability.logs import Logger, configure_logs, logger
from tao.observability.metrics import Metrics
from tao.replication.accounts import Account
from tao.replication.etcd_locks import open_locks
from tao.replication.locks import (
    ACTIVITY,
    LockHold,
    LockTaken,
    databases_being_changed,
    keep_alive,
)
from tao.replication.promotion import Promoter, PromotionStep
from tao.replication.promotion_plan import SetMember
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.replication.shard_move import MoveSettings, ShardMoves
from tao.routing.failure_detector import DetectorSettings
from tao.routing.routes import Routes
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.runtime.clock import LoopClock
from tao.runtime.process import run_server
from tao.runtime.tasks import BackgroundTasks
from tao.serving.audit import AuditTrail
from tao.serving.metrics import register_audit
from tao.serving.status_port import StatusPort, StatusService
from tao.topology.registration import follow_absences
from tao.topology.stores import EtcdConnections, open_topology
from tao.watcher.interrupted_moves import InterruptedMoves
from tao.watcher.marks import ServerVerdict, WatcherReport, marks_by_database, wanted_marks, with_marks
from tao.watcher.mastership import Mastership
from tao.watcher.probes import DatabaseProbes, PeerReports, ServerProbes, WatcherContext, servers_at_frames
from tao.watcher.refused_turns import RefusedTurns
from tao.watcher.settings import WatcherSettings
from tao.watcher.shard_clones import Cloner, CloningSettings, HotShards, topology_version_of
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb

ACTIVE_LOCK: Final = "watcher"


class WatcherServer:
    """One watcher process. Call `start`, then use the `tao.runtime.process.RunningServer` protocol."""

    def __init__(self, settings: WatcherSettings, log: Logger) -> None:
        self._settings: Final = settings
        self._log: Final = log
        self._tasks: Final = BackgroundTasks(settings.name, log)
        self._etcd: Final = EtcdConnections(settings.etcd)
        self._topology_store: Final = open_topology(
            settings.topology_file, self._etcd, lambda error: log.error("topology_unusable", reason=error.message)
        )
        self._locks: Final = open_locks(settings.topology_file, self._etcd, LoopClock().monotonic)
        self._refused_turns: Final = RefusedTurns(settings.region)
        self._left_to_others = False
        self._marks_set = 0
        self._servers_removed = 0

    async def start(self) -> WatcherServer:
        """Start probing. Raises `OperatorError` or `OSError` when files or the admin port are not available."""
        settings, probes = self._settings, self._settings.probes
        self._topology = await self._topology_store.load()
        Routes(self._topology).region(settings.region)  # raises here when the region is unknown
        self._port = StatusPort(settings, self._log)
        await self._port.load(self._own_server(), self._lists)
        tls = settings.database_tls.if_set
        accounts = SetAccounts(
            Account(settings.administrator_user, settings.administrator_password, tls),
            Account(settings.replicator_user, settings.replicator_password, tls),
        )
        audit = self._audit = await AuditTrail.open(settings.audit, settings.name, LoopClock().unix_ms, self._log)
        audit.started(self._topology, accepted=self._port.accepted)
        context = WatcherContext(self._tasks, LoopClock(), self._log, audit)
        links = self._links = self._open_links()
        promoter = Promoter(
            self._topology_store,
            self._locks,
            accounts,
            settings.promotion,
            seen_from=settings.region,
            on_step=self._log_step,
        )
        self._servers = ServerProbes(links, self._current, probes)
        self._databases = DatabaseProbes(
            self._current,
            accounts,
            settings.region,
            probes,
            context,
            self._observe,
        )
        peers = self._peers = PeerReports(links, self._current, settings.region, probes, settings.name)
        if settings.peers:
            self._log.warning("peers_setting_ignored", instead="frames of each watcher in the topology")
        mastership = self._mastership = Mastership(
            settings,
            promoter,
            self._locks,
            peers,
            self._databases.silent_seconds,
            context,
            self._databases.is_dead,
        )
        hot_shards = self._hot_shards = self._build_hot_shards(links, context)
        self._moves = self._build_interrupted_moves(accounts, context)
        metrics = Metrics(role="watcher", server=settings.name)
        self._register(metrics)
        pages = AdminPages(metrics=metrics.render, stats=self._stats, not_ready=lambda: "")
        host, _, port = settings.admin.rpartition(":")
        self._admin = AdminServer(AdminSettings(host=host or "127.0.0.1", port=int(port or 0)), pages, self._log)
        await self._admin.start()
        await self._start_port(self._port, audit)
        self._tasks.start(self._port.follow_credentials(), "accepted credentials")
        self._tasks.keep(self._servers.run, "cache servers and tailers")
        self._tasks.keep(self._databases.run, "database servers")
        self._tasks.keep(self._peers.run, "other watchers")
        self._tasks.keep(mastership.keep_leases, "leases")
        self._tasks.keep(self._run_as_active, "activity")
        self._tasks.keep(self._report_refusals, "refusals")
        if audit.log is not None:
            self._tasks.keep(audit.log.keep_publishing, "publication of the audit log's hash")
        self._tasks.keep(self._moves.run, "interrupted moves")
        if settings.clone_hot_shards:
            self._tasks.keep(hot_shards.run, "hot shards")
        self._stop_watching = self._topology_store.watch(self._use_topology)
        self._log.info("watcher_started", region=settings.region, dry_run=settings.dry_run)
        return self

    async def _start_port(self, port: StatusPort, audit: AuditTrail) -> None:
        """Answer other watchers."""
        service = StatusService("get_watcher_report", self._report, audit)
        await port.start(service, lambda: self._topology.version, audit.connection_refused)
        others = [each for region in self._topology.regions for each in region.watchers]
        if not self._peers.is_listed:
            self._log.error(
                "watcher_not_listed",
                reason="the topology does not list this watcher in its region, so others do not know when it renewed "
                "a lease: it renews none unless it acts. Add it with its frames address, and restart it",
            )
        elif self._own_server() is None and len(others) > 1:
            self._log.warning(
                "watcher_without_address",
                reason="the topology has no frames address of this watcher, so others cannot ask it: they wait for a "
                "whole lease before they replace a master of its region. Add it, and restart this watcher",
            )

    def _open_links(self) -> Links:
        """Return links to the servers of the topology, which open when they are first used."""
        settings, probes = self._settings, self._settings.probes
        detector = DetectorSettings(
            failures_until_down=probes.cache_failures,
            answers_until_up=probes.answers_until_up,
            first_probe_seconds=probes.retry_seconds,
            max_probe_seconds=2 * probes.interval_seconds,
            probe_timeout_seconds=probes.timeout_seconds,
        )
        credentials = Credentials(settings.name, "watcher", settings.token, settings.token_file)
        links = Links(LinkSettings(detector=detector), credentials, settings.tls.if_set, region=settings.region)
        links.keep_only(self._topology.server_places)
        return links

    def _own_server(self) -> CacheServer | None:
        """Return the address that the topology has for this watcher, if it has any."""
        listed = [each for region in self._topology.regions for each in servers_at_frames(region.watchers)]
        return next((each for each in listed if each.name == self._settings.name), None)

    def _lists(self, role: str, name: str, region: str) -> bool:
        return lists(self._topology.server_places, role, name, region)

    def _report(self) -> pb.Answer:
        report = pb.WatcherReport(
            region=self._settings.region,
            verdicts={name: verdict.value for name, verdict in self._verdicts().items()},
            renewed_seconds_ago=self._mastership.renewed_seconds_ago(),
        )
        return pb.Answer(watcher_report=report)

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`. A watcher serves no requests, so there is nothing to drain."""

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`. Another watcher takes over at once."""
        self._stop_watching()
        await self._tasks.close()
        self._databases.close()
        await self._port.close()
        await self._admin.close()
        await self._links.close()
        await self._etcd.close()
        await self._audit.close()

    async def reload(self) -> None:
        """See `tao.runtime.process.RunningServer`. Read the topology now."""
        self._use_topology(await self._topology_store.load())

    def _build_hot_shards(self, links: Links, context: WatcherContext) -> HotShards:
        def log_step(step: str) -> None:
            self._log.info("clone_step_started", step=step)

        settings, cloning = self._settings, CloningSettings()
        cloner = Cloner(self._topology_store, topology_version_of(links, cloning), cloning, log_step)
        return HotShards(
            self._current,
            lambda: self._mastership.is_active,
            links,
            cloner,
            settings.cloning,
            context,
            dry_run=settings.dry_run,
        )

    def _build_interrupted_moves(self, accounts: SetAccounts, context: WatcherContext) -> InterruptedMoves:
        settings = self._settings
        moves = ShardMoves(self._topology_store, self._locks, accounts, MoveSettings(), seen_from=settings.region)
        return InterruptedMoves(
            moves,
            self._current,
            lambda: self._mastership.is_active,
            settings.moves_check_seconds,
            context,
            dry_run=settings.dry_run,
        )

    def _observe(self, replicas: ReplicationSet, members: list[SetMember], began: float) -> None:
        self._mastership.observe(replicas, members, began)

    async def _log_step(self, step: PromotionStep) -> None:
        self._log.info("promotion_step_started", step=step.name.lower())

    def _current(self) -> Topology:
        return self._topology

    def _use_topology(self, topology: Topology) -> None:
        if topology.version > self._topology.version:
            self._topology = topology
            self._audit.use_topology(topology)
            self._links.keep_only(topology.server_places)
            self._port.listing_changed()

    async def _run_as_active(self) -> None:
        """Wait for the lock of the active watcher, and act while this process holds it and leaves it to nobody."""
        answers = ""
        while True:
            if self._leaves_to_others():
                await asyncio.sleep(self._settings.probes.interval_seconds)
                continue
            try:
                async with self._locks.held(ACTIVE_LOCK, exclusive=True, terms=ACTIVITY) as hold:
                    answers = ""
                    async with keep_alive(hold, ACTIVITY):
                        await self._act(hold)
            except LockTaken:
                pass
            except TaoError as error:  # the lock is lost, or cannot be seen, perhaps only for a while
                if answers != error.message:
                    answers = error.message
                    self._log.error("activation_failed", reason=answers)
            await asyncio.sleep(self._settings.probes.interval_seconds)

    async def _act(self, hold: LockHold) -> None:
        self._log.warning("watcher_activated")
        self._mastership.active_since = LoopClock().monotonic()
        self._mastership.activity = hold
        try:
            while not self._leaves_to_others():
                await asyncio.sleep(self._settings.probes.interval_seconds)
                hold.check()
                await self._change_marks()
        finally:
            self._mastership.activity = None

    def _leaves_to_others(self) -> bool:
        """Return whether another watcher is to act: those of all other regions refuse this one."""
        regions = (region.name for region in self._topology.regions if region.watchers)
        now = LoopClock().unix_ms() / 1000
        leaves = self._refused_turns.is_of_others(self._peers.all_refuse, regions, now)
        if leaves and not self._left_to_others:
            self._log.error("activity_left_to_others", reason="; ".join(self._peers.refusals.values()))
        self._left_to_others = leaves
        return leaves

    async def _report_refusals(self) -> None:
        """Log once what cannot be judged because one side refuses the other, and when that is over."""
        known: dict[str, str] = {}
        while True:
            before, known = known, self._refusals()
            for name in known.keys() - before.keys():
                self._log.error("watcher_refused", target=name, reason=known[name])
            for name in before.keys() - known.keys():
                self._log.info("watcher_refused_no_longer", target=name)
            await asyncio.sleep(self._settings.probes.interval_seconds)

    def _refusals(self) -> dict[str, str]:
        return {**self._servers.refusals, **self._databases.refusals, **self._peers.refusals}

    def _verdicts(self) -> dict[str, ServerVerdict]:
        return {**self._servers.verdicts, **self._databases.verdicts}

    async def _change_marks(self) -> None:
        report = WatcherReport(self._settings.region, self._verdicts())
        before, settings = self._topology, self._settings
        marks = wanted_marks(before, report, self._peers.reports)
        of_databases = marks_by_database(before, marks)
        for busy in await databases_being_changed(self._locks, of_databases):
            marks = [mark for mark in marks if mark not in of_databases[busy]]
        marked = with_marks(before, marks)
        after = follow_absences(marked, LoopClock().unix_ms(), settings.remove_after_seconds)
        removed = sorted(before.server_places.keys() - after.server_places.keys())
        for mark in marks:
            self._log.warning("mark_changed", target=mark.server, down=mark.down, dry_run=settings.dry_run)
        if settings.dry_run or after is before:
            self._log_removed(before, removed)
            return
        try:
            self._use_topology(await self._topology_store.change(before.version, after))
            self._marks_set += len(marks)
            self._servers_removed += len(removed)
            self._log_removed(before, removed)
            for mark in marks:
                self._audit.acted("mark_changed", target=mark.server, down=mark.down)
            for name in removed:
                self._audit.acted("absent_server_removed", target=name)
        except TopologyConflict:
            # Another process changed the document. The next round uses the new one.
            self._use_topology(await self._topology_store.load())
        except TaoError as error:
            self._log.error("marks_not_stored", reason=error.message)

    def _log_removed(self, before: Topology, removed: Iterable[str]) -> None:
        now_ms = LoopClock().unix_ms()
        for name in removed:
            place, server = before.place_of(name), Routes(before).server(name)
            gone_ms = server.registration.gone_unix_ms if server.registration else now_ms
            self._log.warning(
                "absent_server_removed",
                target=name,
                tier=place.path,
                gone_seconds=round((now_ms - gone_ms) / 1000),
                dry_run=self._settings.dry_run,
            )

    def _stats(self) -> dict[str, object]:
        mastership = self._mastership
        return {
            "server": self._settings.name,
            "role": "watcher",
            "region": self._settings.region,
            "active": mastership.is_active,
            "topology_version": self._topology.version,
            "verdicts": self._verdicts(),
            "refusals": self._refusals(),
            "peers": {region: report is not None for region, report in self._peers.reports.items()},
            "replication_lag_seconds": self._databases.lags,
            "waits_for_replica": self._databases.waits_for_replica,
            "lost_databases": mastership.lost_databases(),
            "marks_set": self._marks_set,
            "servers_removed": self._servers_removed,
            "cloning": self._hot_shards.done,
            "released_moves": self._moves.released,
            "actions": mastership.actions,
            "failed_actions": mastership.failed_actions,
            # The former names of both.
            "deeds": mastership.actions,
            "failed_deeds": mastership.failed_actions,
            "renewed_seconds_ago": mastership.renewed_seconds_ago(),
            "renewed_leases": mastership.renewals,
            "missed_renewals": mastership.missed_renewals,
            "last_promotion": mastership.last_promotion,
            **({} if self._audit.log is None else {"audit": self._audit.log.summary()}),
        }

    def _register(self, metrics: Metrics) -> None:
        mastership = self._mastership
        if self._audit.log is not None:
            register_audit(metrics, self._audit.log)
        metrics.gauge("active_info", "1 at the watcher that acts.", lambda: float(mastership.is_active))
        for name, label, help_text in (
            (
                "actions_total",
                "action",
                "Actions on masters and their replicas that were completed, and ones that failed.",
            ),
            ("deeds_total", "deed", "The former name of `actions_total`."),
        ):
            metrics.gauge_family(
                name, help_text, label, lambda: {**mastership.actions, "failed": mastership.failed_actions}
            )
        metrics.gauge_family(
            "marks_total", "Down marks set and taken away.", "outcome", lambda: {"stored": self._marks_set}
        )
        metrics.gauge_family(
            "removals_total",
            "Servers that had registered themselves, were gone for long, and were removed from the topology.",
            "outcome",
            lambda: {"stored": float(self._servers_removed)},
        )
        metrics.gauge_family(
            "clonings_total",
            "Shards cloned because they were read much, clones given back, failures, what a dry run would have done.",
            "outcome",
            self._hot_shards.done.copy,
        )
        metrics.gauge_family(
            "moves_total",
            "Moves of shards that were interrupted, after which leaders could write the shard again.",
            "outcome",
            lambda: {"released": float(self._moves.released)},
        )
        metrics.gauge_family(
            "lease_renewals_total",
            "Of masters' leases.",
            "outcome",
            lambda: {"done": mastership.renewals, "missed": mastership.missed_renewals},
        )
        metrics.gauge_family(
            "waits_for_replica_info",
            "Of each semi-synchronous database: 1 while commits wait for a replica, 0 while what is acknowledged would "
            "be lost with the master.",
            "database",
            lambda: {name: float(waits) for name, waits in self._databases.waits_for_replica.items()},
        )
        metrics.gauge(
            "refusing_servers",
            "Servers, databases and watchers that refuse this one, or that it refuses, for what the other shows: it "
            "cannot judge them, and replaces nothing for that.",
            lambda: float(len(self._refusals())),
        )
        metrics.gauge_family("watched_servers", "Servers by how they do here.", "verdict", self._by_verdict)

    def _by_verdict(self) -> dict[str, float]:
        verdicts = [*self._verdicts().values()]
        return {verdict.value: float(verdicts.count(verdict)) for verdict in ServerVerdict}


def run_watcher(settings: WatcherSettings) -> int:
    """Run a watcher in this process until it is asked to stop. Returns the exit status."""
    configure_logs("watcher", settings.name, settings.log_level, settings.log_form, sys.stderr)
    log = logger("watcher")
    return run_server(lambda: WatcherServer(settings, log).start(), log=log)
