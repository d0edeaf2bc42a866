"""Wiring of a tailer process: the only place where its parts are put together."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from tao.model.errors import TopologyError
from tao.model.topology import CacheServer, Database, DatabaseServer, region_of_place
from tao.observability.logs import Logger, configure_logs, logger
from tao.observability.metrics import Metrics
from tao.replication.gtid import rewound
from tao.routing.routes import Routes
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.runtime.clock import LoopClock
from tao.runtime.process import run_server
from tao.runtime.tasks import BackgroundTasks
from tao.serving.audit import AuditTrail
from tao.serving.configuration import Configuration, open_schema
from tao.serving.metrics import register_audit
from tao.serving.status_port import StatusPort, StatusService
from tao.storage.session import ServerAccount
from tao.storage.tls import DatabaseTls
from tao.tailer.continuity import Continuity, Rewind
from tao.tailer.delivery_path import DeliveryPath, LinkedLeaders, RelayScope
from tao.tailer.leader_outbox import contents_of
from tao.tailer.reader import BinlogReader
from tao.tailer.settings import TailerSettings
from tao.tailer.tail_path import Checkpoint, Lag, TailPath, Translator
from tao.topology.stores import EtcdConnections, open_topology
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb

_UPPER_HALF: Final = 1 << 31


class TailerServer:
    """The parts of one tailer process. Call `start`; then this is a `tao.runtime.process.RunningServer`."""

    def __init__(self, settings: TailerSettings, log: Logger) -> None:
        self._settings: Final = settings
        self._log: Final = log
        self._tasks: Final = BackgroundTasks(settings.name, log)
        self._etcd: Final = EtcdConnections(settings.etcd)
        self._topology_store: Final = open_topology(
            settings.topology_file, self._etcd, lambda error: log.error("topology_unusable", reason=error.message)
        )
        self._schema_source: Final = open_schema(settings.schema_file, self._etcd)
        self._tls: DatabaseTls | None = None

    async def start(self) -> TailerServer:
        """Begin to follow the binlog, waiting for a database server that is away.

        Raises `OperatorError` or `OSError` when a file or the admin port cannot be used."""
        settings = self._settings
        self._tls = settings.database_tls.if_set
        self._configuration = Configuration(
            await self._topology_store.load(), await self._schema_source.load(), self._log
        )
        database, server = self._database(), self._binlog_server(self._configuration.routes)
        self._connect_leaders()
        self._open_readers(server)
        self._wire_paths(database)
        audit = self._audit = await AuditTrail.open(settings.audit, settings.name, LoopClock().unix_ms, self._log)
        await self._start_admin()
        await self._start_answering(audit)
        self._tasks.start(self._tail.run(self._delivery), "tail")
        self._tasks.keep(self._rewind.run, "rewind")
        self._tasks.start(self._schema_source.watch(self._configuration.use_schema_text), "schema")
        self._stop_watching = self._topology_store.watch(self._configuration.use_topology)
        self._log.info("tailer_started", database=database.name, database_server=server.name, region=settings.region)
        return self

    def _connect_leaders(self) -> None:
        """Open links to leaders on demand, and close those that the topology does not name any more."""
        settings = self._settings
        credentials = Credentials(settings.name, "tailer", settings.token, settings.token_file)
        links = self._links = Links(LinkSettings(), credentials, settings.tls.if_set)
        self._configuration.on_routes(lambda routes: links.keep_only(routes.topology.server_places))
        links.keep_only(self._configuration.routes.topology.server_places)

    def _open_readers(self, server: DatabaseServer) -> None:
        """Create the reader that follows the binlog, and a second one that reads parts of it again for `Rewind`."""
        settings, login = self._settings, self._login(server)
        own_id = settings.server_id or self._derived_server_id()
        self._reader = BinlogReader(login, own_id, settings.reader, self._log)
        # The purpose is part of the derived server_id, so it must not change.
        self._second_reader = BinlogReader(login, self._derived_server_id("/again"), settings.reader, self._log)
        self._configuration.on_routes(self._read_from)
        self._read_from(self._configuration.routes)

    def _wire_paths(self, database: Database) -> None:
        settings, configuration, log = self._settings, self._configuration, self._log
        unix_ms = LoopClock().unix_ms
        self._lag = Lag(unix_ms)
        checkpoint = Checkpoint(settings.state_folder, settings.database_server)
        translator = Translator(lambda: configuration.schema, self._shards, settings.tail.max_touches_per_shard)
        tail = self._tail = TailPath(self._reader, checkpoint, translator, self._lag, unix_ms, settings.tail, log)
        continuity = Continuity(database.name, lambda: self._database().version_epoch, self._has_shard)
        self._held = frozenset(self._shards())
        configuration.on_routes(lambda _: self._gain_shards(continuity))
        delivery = self._delivery = DeliveryPath(
            RelayScope(settings.region, database.name, lambda: configuration.routes, self._refresh_routes),
            LinkedLeaders(self._links, lambda: configuration.routes.version),
            continuity,
            tail.acknowledged,
            self._spawn,
            settings.delivery,
            log,
        )
        self._rewind = Rewind(
            self._second_reader,
            continuity,
            delivery.resend,
            lambda transaction: contents_of(translator.translate(transaction), settings.delivery),
            lambda source, number: rewound(tail.position, source.rpartition(":")[2], number),
            settings.rewind,
            log,
        )
        delivery.on_wanted = self._rewind.request
        delivery.decode = tail.decode
        delivery.on_asking = self._reader.leave_undecoded

    async def _start_admin(self) -> None:
        metrics = Metrics(role="tailer", server=self._settings.name)
        self._register_binlog(metrics)
        self._register_relays(metrics)
        if self._audit.log is not None:
            register_audit(metrics, self._audit.log)
        pages = AdminPages(metrics=metrics.render, stats=self._stats, not_ready=self._not_ready)
        host, _, port = self._settings.admin.rpartition(":")
        self._admin = AdminServer(AdminSettings(host=host or "127.0.0.1", port=int(port or 0)), pages, self._log)
        await self._admin.start()

    async def _start_answering(self, audit: AuditTrail) -> None:
        """Answer watchers at the ``frames`` address that the topology has for this tailer, if it has any, and record
        who is refused."""
        configuration = self._configuration
        listed = [each for region in configuration.routes.topology.regions for each in region.tailers if each.frames]
        own = next((each for each in listed if each.name == self._settings.name), None)
        server = None if own is None else CacheServer(name=own.name, grpc="", frames=own.frames)
        self._port = StatusPort(self._settings, self._log)
        await self._port.load(server, configuration.lists)
        audit.started(configuration.routes.topology, configuration.schema, accepted=self._port.accepted)
        configuration.on_routes(lambda routes: audit.use_topology(routes.topology))
        configuration.on_schema(audit.use_schema)
        service = StatusService("probe", lambda: pb.Answer(read=pb.ReadAnswer()), audit)
        await self._port.start(service, lambda: configuration.routes.version, audit.connection_refused)
        if audit.log is not None:
            self._tasks.keep(audit.log.keep_publishing, "publication of the audit log's hash")
        configuration.on_routes(lambda _: self._port.listing_changed())
        self._tasks.start(self._port.follow_credentials(), "accepted credentials")

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`. A tailer serves no requests; unacknowledged relays are repeated."""

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`. Stores the position."""
        self._stop_watching()
        await self._tasks.close()
        await self._port.close()
        await self._admin.close()
        await self._links.close()
        await self._etcd.close()
        await self._audit.close()

    async def reload(self) -> None:
        """See `tao.runtime.process.RunningServer`. Reads the topology and the schema again."""
        await self._refresh_routes()
        await self._schema_source.look(self._configuration.use_schema_text)

    async def _refresh_routes(self) -> None:
        self._configuration.use_topology(await self._topology_store.load())

    def _derived_server_id(self, purpose: str = "") -> int:
        """Derive a reader's server_id from the tailer's name: it must be unique in the replication set."""
        return _UPPER_HALF | zlib.crc32(f"{self._settings.name}{purpose}".encode())

    def _read_from(self, routes: Routes) -> None:
        account = self._login(self._binlog_server(routes))
        for reader in (self._reader, self._second_reader):
            reader.read_from(account)

    def _spawn(self, job: Coroutine[Any, Any, None]) -> object:
        return self._tasks.start(job, "leader outbox")

    def _database(self) -> Database:
        settings = self._settings
        for database in self._configuration.routes.topology.databases:
            # The region's server and its standby change places in a promotion.
            if any(
                server.name == settings.database_server and region_of_place(place) == settings.region
                for place, server in database.places.items()
            ):
                return database
        raise TopologyError(
            f"{settings.topology_file} names no database server {settings.database_server!r} in region "
            f"{settings.region!r}; correct database_server or region in the tailer's settings"
        )

    def _binlog_server(self, routes: Routes) -> DatabaseServer:
        """Return the server whose binlog is read now, with its address in this region."""
        return routes.binlog_server(self._database().name, self._settings.region).seen_from(self._settings.region)

    def _login(self, server: DatabaseServer) -> ServerAccount:
        settings = self._settings
        return ServerAccount(server.host, server.port, settings.user, settings.password, server.socket, self._tls)

    def _shards(self) -> Iterable[int]:
        for first, last in self._database().shards:
            yield from range(first, last + 1)

    def _gain_shards(self, continuity: Continuity) -> None:
        before, self._held = self._held, frozenset(self._shards())
        continuity.gain(sorted(self._held - before))

    def _has_shard(self, shard: int) -> bool:
        return any(first <= shard <= last for first, last in self._database().shards)

    def _not_ready(self) -> str:
        return self._tail.trouble or ("" if self._reader.connected else "the binlog is not connected")

    def _stats(self) -> dict[str, object]:
        tail, reader, delivery = self._tail, self._reader, self._delivery
        lag = self._lag.seconds()
        counts = tail.counts
        return {
            "server": self._settings.name,
            "role": "tailer",
            "region": self._settings.region,
            "database_server": self._settings.database_server,
            "reads_from": self._binlog_server(self._configuration.routes).name,
            "topology_version": self._configuration.routes.version,
            "schema_hash": self._configuration.schema.version_hash,
            "trouble": tail.trouble,
            **({} if self._audit.log is None else {"audit": self._audit.log.summary()}),
            "connected": reader.connected,
            "position": tail.position,
            "lag_seconds": None if lag == float("inf") else lag,
            "heartbeat_delay_seconds": self._lag.heartbeat_delay_seconds,
            "transactions": counts.transactions,
            "rows": counts.rows,
            "messages": counts.messages,
            "touches": counts.touches,
            "invalidated_shards": counts.invalidated_shards,
            "lost_binlogs": counts.lost_binlogs,
            "unacknowledged_bytes": delivery.unacknowledged_bytes,
            "resent_shards": self._rewind.shards,
            "not_resent_shards": self._rewind.failed_shards,
            # The former names of three of them.
            "void_shards": counts.invalidated_shards,
            "told_again_shards": self._rewind.shards,
            "not_told_again_shards": self._rewind.failed_shards,
        }

    def _register_binlog(self, metrics: Metrics) -> None:
        tail, reader, lag = self._tail, self._reader, self._lag
        metrics.gauge("replication_lag_seconds", "Age of the newest heartbeat or commit in the binlog.", lag.seconds)
        metrics.gauge(
            "heartbeat_delay_seconds",
            "Time from the writing of the newest heartbeat at its master to its arrival here.",
            lambda: lag.heartbeat_delay_seconds,
        )
        metrics.gauge_family(
            "binlog_total",
            "Transactions and rows read from the binlog, and the messages, touches and invalidations made of them.",
            "what",
            lambda: {
                "transaction": tail.counts.transactions,
                "row": tail.counts.rows,
                "message": tail.counts.messages,
                "touch": tail.counts.touches,
                "void_shard": tail.counts.invalidated_shards,
                "row_passed_over": tail.counts.skipped_rows,
                "row_with_unknown_columns": tail.counts.unknown_column_rows,
            },
        )
        metrics.gauge_family(
            "binlog_faults_total",
            "Undecodable events, oversized or repeated transactions, broken connections, lost binlogs.",
            "fault",
            lambda: {
                "unknown_event": reader.unknown_events,
                "oversized_transaction": reader.oversized,
                "duplicate_transaction": reader.duplicates,
                "reconnection": max(0, reader.connections - 1),
                "silence": reader.silences,
                "lost_binlog": tail.counts.lost_binlogs,
                "heartbeat_from_the_future": lag.from_the_future,
            },
        )
        metrics.gauge(
            "binlog_waiting_bytes",
            "Estimated bytes of transactions read ahead of delivery.",
            lambda: reader.waiting_bytes,
        )
        metrics.gauge("binlog_connections", "1 while the binlog's stream is open.", lambda: float(reader.connected))

    def _register_relays(self, metrics: Metrics) -> None:
        delivery, rewind = self._delivery, self._rewind
        metrics.gauge_family(
            "relays_total",
            "Relays to leaders: acknowledged, retried, rejected for their content; parts replaced by bulk "
            "invalidations because a leader was away too long; parts of shards that the topology does not have.",
            "outcome",
            lambda: {
                "acknowledged": delivery.acknowledged_relays,
                "repeated": delivery.retried_relays,
                "refused": delivery.rejected_relays,
                "given_way": delivery.dropped_parts,
                "unrouted": delivery.unrouted_parts,
            },
        )
        metrics.gauge_family(
            "relay_references_total",
            "Transactions of a shard that were relayed without their messages: the leader has entered its own, or was "
            "missing them.",
            "outcome",
            lambda: {"entered": delivery.references["entered"], "missing": delivery.references["missing"]},
        )
        metrics.gauge(
            "relay_unacknowledged_bytes",
            "Estimated bytes of messages that leaders have not acknowledged.",
            lambda: delivery.unacknowledged_bytes,
        )
        metrics.gauge_family(
            "relay_leader_bytes",
            "Estimated bytes of messages that a leader has not acknowledged, by leader.",
            "leader",
            delivery.leader_bytes,
        )
        metrics.gauge_family(
            "relay_collapses_total",
            "Times that a leader's messages reached a bound and were replaced by invalidations of their shards: the "
            "leader was away, or slow, or did not accept some shards.",
            "cause",
            lambda: dict(delivery.collapses),
        )
        metrics.gauge_family(
            "rewound_total",
            "Shards sent again from the binlog to leaders that took over from others, shards for which that failed, "
            "and transactions read again.",
            "what",
            lambda: {
                "shard": rewind.shards,
                "refused_shard": rewind.failed_shards,
                "transaction": rewind.transactions,
            },
        )


def run_tailer(settings: TailerSettings) -> int:
    """Run a tailer in this process until it is stopped. Returns the exit status."""
    configure_logs("tailer", settings.name, settings.log_level, settings.log_form, sys.stderr)
    log = logger("tailer")
    return run_server(lambda: TailerServer(settings, log).start(), log=log)
