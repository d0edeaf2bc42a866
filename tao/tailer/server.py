"""A tailer, wired: the only place where its parts are put together (DESIGN.md §14)."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from tao.model.errors import TopologyError
from tao.model.topology import Database, DatabaseServer
from tao.observability.logs import Logger, configure_logs, logger
from tao.observability.metrics import Metrics
from tao.peers.links import Links, LinkSettings
from tao.routing.routes import Routes
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.runtime.clock import LoopClock
from tao.runtime.process import run_server
from tao.runtime.tasks import BackgroundTasks
from tao.serving.configuration import Configuration
from tao.serving.schema_file import SchemaFile
from tao.storage.gtid import rewound
from tao.storage.session import ServerAccount
from tao.tailer.checkpoint import Checkpoint
from tao.tailer.continuity import Continuity
from tao.tailer.delivery_path import DeliveryPath
from tao.tailer.lag import Lag
from tao.tailer.leaders import LinkedLeaders
from tao.tailer.reader import BinlogReader
from tao.tailer.rewind import Rewind
from tao.tailer.settings import TailerSettings
from tao.tailer.tail_path import TailPath, meaning_of
from tao.topology.file_store import TopologyFile
from tao.wire.identity import Credentials

_UPPER_HALF: Final = 1 << 31


class TailerServer:
    """One tailer process' parts. `start` follows; then the `tao.runtime.process.RunningServer` protocol."""

    def __init__(self, settings: TailerSettings, log: Logger) -> None:
        self._settings: Final = settings
        self._log: Final = log
        self._tasks: Final = BackgroundTasks(settings.name, log)
        self._topology_file: Final = TopologyFile(
            settings.topology_file, on_error=lambda error: log.error("topology_unusable", reason=error.message)
        )
        self._schema_file: Final = SchemaFile(settings.schema_file)

    async def start(self) -> TailerServer:
        """Begin to follow the binlog. Raises `OperatorError` or `OSError` when files or the admin port cannot be had;
        a database server that is away is waited for."""
        settings = self._settings
        configuration = self._configuration = Configuration(
            await self._topology_file.load(), await self._schema_file.load(), self._log
        )
        database, server = self._database(), self._binlog_of(configuration.routes)
        credentials = Credentials(settings.name, "tailer", settings.token)
        links = self._links = Links(LinkSettings(), credentials, settings.tls.if_set)
        configuration.on_routes(lambda routes: links.keep_only(routes.server_names()))
        configuration.on_routes(self._read_from)
        reader = self._reader = BinlogReader(
            self._login(server),
            settings.server_id or self._server_id(),
            settings.reader,
            self._log,
        )
        unix_ms = LoopClock().unix_ms
        lag = self._lag = Lag(unix_ms)
        tail = self._tail = TailPath(
            reader,
            Checkpoint(settings.state_folder, settings.database_server),
            lambda: configuration.schema,
            self._shards,
            lag,
            unix_ms,
            settings.tail,
            self._log,
        )
        continuity = Continuity(database.name, lambda: self._database().version_epoch, self._holds)
        delivery = self._delivery = DeliveryPath(
            settings.region,
            database.name,
            lambda: configuration.routes,
            self._refresh_routes,
            LinkedLeaders(self._links, lambda: configuration.routes.version),
            continuity,
            tail.acknowledged,
            self._spawn_lane,
            settings.delivery,
            self._log,
        )
        again = self._again = BinlogReader(self._login(server), self._server_id("/again"), settings.reader, self._log)
        rewind = self._rewind = Rewind(
            again,
            continuity,
            delivery,
            lambda each: meaning_of(each, configuration.schema, self._shards, settings.tail.max_touches_per_shard),
            lambda source, number: rewound(tail.position, source.rpartition(":")[2], number),
            settings.delivery,
            settings.rewind,
            self._log,
        )
        delivery.on_wanted = rewind.wanted
        metrics = Metrics(role="tailer", server=settings.name)
        self._register(metrics)
        pages = AdminPages(metrics=metrics.render, stats=self._stats, not_ready=self._not_ready)
        host, _, port = settings.admin.rpartition(":")
        self._admin = AdminServer(AdminSettings(host=host or "127.0.0.1", port=int(port or 0)), pages, self._log)
        await self._admin.start()
        self._tasks.start(tail.run(delivery), "tail")
        self._tasks.keep(rewind.run, "reading again")
        self._tasks.start(self._schema_file.watch(configuration.use_schema_text), "schema")
        self._stop_watching = self._topology_file.watch(configuration.use_topology)
        self._log.info("tailing", database=database.name, database_server=server.name, region=settings.region)
        return self

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`: nobody asks a tailer anything; what is under way is repeated."""

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`. The position is stored."""
        self._stop_watching()
        await self._tasks.close()
        await self._admin.close()
        await self._links.close()

    async def reload(self) -> None:
        """See `tao.runtime.process.RunningServer`: look at both files now."""
        await self._refresh_routes()
        await self._schema_file.look(self._configuration.use_schema_text)

    async def _refresh_routes(self) -> None:
        self._configuration.use_topology(await self._topology_file.load())

    def _server_id(self, purpose: str = "") -> int:
        """Of a reader: the servers of a replication set and their readers must not have one twice."""
        return _UPPER_HALF | zlib.crc32(f"{self._settings.name}{purpose}".encode())

    def _read_from(self, routes: Routes) -> None:
        account = self._login(self._binlog_of(routes))
        for reader in (self._reader, self._again):
            reader.read_from(account)

    def _spawn_lane(self, job: Coroutine[Any, Any, None]) -> object:
        return self._tasks.start(job, "lane")

    def _database(self) -> Database:
        settings = self._settings
        for database in self._configuration.routes.topology.databases:
            server = database.servers.get(settings.region)
            if server is not None and server.name == settings.database_server:
                return database
        raise TopologyError(
            f"{settings.topology_file} names no database server {settings.database_server!r} in region "
            f"{settings.region!r}; correct database_server or region in the tailer's settings"
        )

    def _binlog_of(self, routes: Routes) -> DatabaseServer:
        """The server whose binlog is read now, with the address that is good from this region."""
        return routes.binlog_server(self._database().name, self._settings.region).seen_from(self._settings.region)

    def _login(self, server: DatabaseServer) -> ServerAccount:
        settings = self._settings
        return ServerAccount(server.host, server.port, settings.user, settings.password, server.socket)

    def _shards(self) -> Iterable[int]:
        for first, last in self._database().shards:
            yield from range(first, last + 1)

    def _holds(self, shard: int) -> bool:
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
            "reads_from": self._binlog_of(self._configuration.routes).name,
            "topology_version": self._configuration.routes.version,
            "schema_hash": self._configuration.schema.version_hash,
            "trouble": tail.trouble,
            "connected": reader.connected,
            "position": tail.position,
            "lag_seconds": None if lag == float("inf") else lag,
            "heartbeat_delay_seconds": self._lag.heartbeat_delay_seconds,
            "transactions": counts.transactions,
            "rows": counts.rows,
            "messages": counts.messages,
            "touches": counts.touches,
            "void_shards": counts.void_shards,
            "lost_binlogs": counts.lost_binlogs,
            "unacknowledged_bytes": delivery.unacknowledged_bytes,
            "told_again_shards": self._rewind.shards,
            "not_told_again_shards": self._rewind.refused,
        }

    def _register(self, metrics: Metrics) -> None:
        tail, reader, delivery, lag = self._tail, self._reader, self._delivery, self._lag
        metrics.gauge("replication_lag_seconds", "Age of the newest proof that the binlog is read.", lag.seconds)
        metrics.gauge(
            "heartbeat_delay_seconds",
            "From the writing of the newest heartbeat on its master to its coming here.",
            lambda: lag.heartbeat_delay_seconds,
        )
        metrics.gauge_family(
            "binlog_total",
            "What came out of the binlog and what became of it.",
            "what",
            lambda: {
                "transaction": tail.counts.transactions,
                "row": tail.counts.rows,
                "message": tail.counts.messages,
                "touch": tail.counts.touches,
                "void_shard": tail.counts.void_shards,
                "row_passed_over": tail.counts.passed_over_rows,
                "row_with_unknown_columns": tail.counts.unknown_column_rows,
            },
        )
        metrics.gauge_family(
            "binlog_faults_total",
            "What did not go smoothly: unreadable events, broken connections, binlogs that could not be continued.",
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
        metrics.gauge_family(
            "relays_total",
            "Relays to leaders: acknowledged, repeated, refused for their content; parts that gave way to bulk "
            "invalidation when a leader was away too long; parts of shards unknown here.",
            "outcome",
            lambda: {
                "acknowledged": delivery.relays,
                "repeated": delivery.repeated,
                "refused": delivery.refused,
                "given_way": delivery.given_way,
                "unrouted": delivery.unrouted,
            },
        )
        metrics.gauge(
            "relay_unacknowledged_bytes", "Waiting for leaders, estimated.", lambda: delivery.unacknowledged_bytes
        )
        metrics.gauge_family(
            "rewound_total",
            "For leaders that went on where others had ended: shards told again from the binlog, shards that could not "
            "be, and transactions read for it.",
            "what",
            lambda: {
                "shard": self._rewind.shards,
                "refused_shard": self._rewind.refused,
                "transaction": self._rewind.transactions,
            },
        )
        metrics.gauge("binlog_waiting_bytes", "Read ahead of delivery, estimated.", lambda: reader.waiting_bytes)
        metrics.gauge("binlog_connections", "1 while the binlog's stream is open.", lambda: float(reader.connected))


def run_tailer(settings: TailerSettings) -> int:
    """Run a tailer in this process until it is told to stop; returns the exit status."""
    configure_logs("tailer", settings.name, settings.log_level, settings.log_form, sys.stderr)
    log = logger("tailer")
    return run_server(lambda: TailerServer(settings, log).start(), log=log)
