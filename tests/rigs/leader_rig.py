"""One leader's real parts over a store of the test's choice, wired as `tao.leader.server` wires them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tao.cache import CacheSettings, GraphCache
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.inverse_path import InversePath, InverseSettings
from tao.leader.job_requests import JobRequests
from tao.leader.jobs import JobPath, JobSettings
from tao.leader.node_pages import NodePages
from tao.leader.ownership import Ownership, OwnershipSettings
from tao.leader.pair_scans import PairScans
from tao.leader.relay_path import RelayPath, RelayPathSettings, TouchPath
from tao.leader.remote_inverses import Copied, Deposed, InverseFence
from tao.leader.replica_shards import ForwardedWrites
from tao.leader.service import LeaderService, WriteRequests
from tao.leader.write_path import WritePath, WritePathSettings, Written
from tao.model.changes import ShardMessages
from tao.model.errors import Fenced, TaoError, Unavailable
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock, IntentReads, ReadStore, WriteStore
from tao.model.rows import IntentRow, ShardRow
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology
from tao.model.writes import Coordinator, SettleEdge, Write
from tao.observability.logs import logger
from tao.schema.registry import load_schema
from tao.serving.audit import AuditTrail
from tao.serving.configuration import Configuration
from tao.serving.forward_path import ForwardSettings, apply_messages
from tao.serving.misses import ReadPolicy
from tao.serving.read_service import ReadService
from tao.serving.server import SchemaArenas
from tao.serving.single_flight import FillSettings, SingleFlight
from tao.serving.sources import DatabaseReadSettings, DatabaseSource
from tao.serving.traffic import Traffic
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.memory_store import MemoryScans, MemoryStore
from tests.rigs.pacing import Gate, ManualClock, Tasks
from tests.rigs.server_context import make_context

SCHEMA = load_schema((Path(__file__).parents[2] / "config/schema.yaml").read_text(), "schema.yaml")
ARENAS = {"default": 8 << 20}
FRIEND, LIKES, LIKED_BY, COMMENT, FOLLOWS, FOLLOWED_BY, NOTE = 1, 4, 5, 10, 11, 12, 14
USER = 1
SHARDS = 4


def make_id(number: int, shard: int = 0) -> int:
    return shard << SHARD_SHIFT | number


def make_topology(
    version: int = 1,
    *,
    near: dict[int, tuple[str, ...]] | None = None,
    leaders: dict[int, tuple[str, ...]] | None = None,
    servers: tuple[str, ...] = ("near-1", "near-2"),
    leader_servers: tuple[str, ...] = ("leader-1", "leader-2"),
) -> Topology:
    """Return a topology. ``near`` and ``leaders`` map shards to servers; other shards are on the first server."""

    def tier(name: str, names: tuple[str, ...], moved: dict[int, tuple[str, ...]] | None) -> Tier:
        places = dict.fromkeys(range(SHARDS), names[:1]) | (moved or {})
        each = tuple(CacheServer(name=server, grpc=f"{server}:7000", frames=f"{server}:7001") for server in names)
        return Tier(name=name, servers=each, moved=places)

    region = Region(
        name="east",
        leaders=tier("leaders", leader_servers, leaders),
        followers=(tier("near", servers, near),),
    )
    server = DatabaseServer(name="db")
    database = Database(name="db", master_region="east", servers={"east": server}, shards=((0, SHARDS - 1),))
    return Topology(version=version, shards=SHARDS, regions=(region,), databases=(database,))


class OtherRigs:
    """`OtherLeaders` in the same process. ``gate`` delays a copy; ``faults`` fail copies before they are written or,
    with ``after_writing``, afterwards."""

    def __init__(self) -> None:
        self.rigs: dict[int, LeaderRig] = {}
        self.gate: Gate | None = None
        self.faults: list[TaoError] = []
        self.after_writing = False
        self.settled: list[tuple[SettleEdge, ...]] = []
        self.handed_over: list[IntentRow] = []
        self.timeouts: list[float] = []

    async def settle(
        self,
        shard: int,
        settles: Sequence[SettleEdge],
        coordinator: Coordinator,
        timeout_seconds: float,
        *,
        background: bool = False,
    ) -> Copied:
        self.timeouts.append(timeout_seconds)
        gate, self.gate = self.gate, None
        if gate is not None:
            await gate.pass_through()
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and not self.after_writing:
            raise fault
        self.settled.append(tuple(settles))
        rig = self.rigs[shard]
        claim = pb.Coordinator(shard=coordinator.shard, generation=coordinator.generation)
        try:
            await rig.inverse_fence.admit(pb.WriteBatch(coordinator=claim))
        except Fenced as error:
            raise Deposed(error.message) from error
        copied = Copied([], [])
        for settle in settles:
            deadline = rig.clock.monotonic() + timeout_seconds
            written, _ = await rig.inverses.write(settle, deadline, sub_write=not background)
            copied.messages.extend(written.messages)
            copied.add(settle, written.outcome.registers, written.outcome.node)
        if fault is not None:
            raise fault
        return copied

    def leader_name(self, shard: int) -> str:
        return self.rigs[shard].name

    async def hand_over(self, intent: IntentRow, timeout_seconds: float) -> list[ShardMessages]:
        self.handed_over.append(intent)
        try:
            return await self.rigs[intent.low_id >> SHARD_SHIFT].inverses.settle_pair(intent, timeout_seconds)
        except TaoError as error:
            raise Unavailable("not just now") from error


class LeaderRig:
    """The parts of a leader as attributes. ``write`` executes a write as a request does."""

    def __init__(
        self,
        store: WriteStore,
        read_store: IntentReads,
        *,
        name: str = "leader-1",
        others: OtherRigs | None = None,
        clock: Clock | None = None,
        writes: WritePathSettings | None = None,
        inverses: InverseSettings | None = None,
        ownership: OwnershipSettings | None = None,
        fills: FillSettings | None = None,
        topology: Topology | None = None,
        region: str = "east",
        links: Links | None = None,
        audit: AuditTrail | None = None,
    ) -> None:
        self.name = name
        self.store = store
        self.pairs = read_store if isinstance(read_store, MemoryStore) else MemoryStore(0)
        self.clock = clock or ManualClock()
        self.tasks = Tasks()
        self.others = others or OtherRigs()
        self.configuration = Configuration(topology or make_topology(), SCHEMA, logger("test"))
        arenas = SchemaArenas(SCHEMA, ARENAS)
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), arenas)
        self.publisher = Publisher(DeliverySettings(), f"{name}-{id(self)}", lambda _: "db")
        settings = ownership or OwnershipSettings(check_seconds=0.001, retry_seconds=0.001)
        self.context = make_context(
            self.configuration,
            links or Links(LinkSettings(), Credentials(name, "leader")),
            self.tasks,
            name=name,
            region=region,
            tier="leaders",
            clock=self.clock,
            audit=audit,
        )
        self.ownership = Ownership(self.context, settings, store, on_taken=self._opened, on_given_up=self._closed)
        self.inverse_fence = InverseFence(store, timeout_seconds=1.0)
        self.writes = WritePath(
            self.context, writes or WritePathSettings(), self.ownership, store, self.cache, self.publisher
        )
        self.inverses = InversePath(
            self.context,
            inverses or InverseSettings(),
            self.writes,
            self.ownership,
            self.others,
            read_store,
            store,
        )
        self.pages = NodePages(self.context, self.writes, self.ownership, self.others)
        self.jobs = JobPath(self.context, JobSettings(search_seconds=0.0), self.ownership, store, self.writes)
        self.scans = MemoryScans(store if isinstance(store, MemoryStore) else MemoryStore(0))
        self._make_read_path(read_store, fills or FillSettings(max_refetches=2), arenas)
        self._make_relay_path()

    def _make_read_path(self, read_store: ReadStore, fills: FillSettings, arenas: SchemaArenas) -> None:
        self.source = DatabaseSource(
            read_store, lambda _: "db", self.tasks, DatabaseReadSettings(first_pause_seconds=0.0)
        )
        self.single_flight = SingleFlight(self.cache, self.source, self.clock, arenas.list_limit, fills)
        self.reads = ReadService(
            self.cache,
            self.single_flight,
            SCHEMA,
            ReadPolicy(self._admit, access=self.configuration.access),
            traffic=Traffic(self.clock),
        )

    def _make_relay_path(self) -> None:
        def apply(messages: ShardMessages, _sent_at: float = 0.0) -> None:
            apply_messages(self.cache, self.clock, messages, insert=True)

        self.forwarded = ForwardedWrites(
            self.context, ForwardSettings(), self.publisher, hosts=lambda _: False, apply=apply
        )
        self.touches = TouchPath(
            lambda write, deadline: self.writes.commit(write, deadline, both_sides=True),
            self.cache,
            RelayPathSettings().touched_keys_per_write,
        )
        self.relays = RelayPath(
            self.context,
            RelayPathSettings(),
            self.cache,
            self.touches,
            self.publisher,
            hosts=lambda _: False,
            apply=apply,
        )
        requests = WriteRequests(
            self.context,
            self.ownership,
            self.writes,
            self.inverses,
            self.inverse_fence,
            self.forwarded,
            self.pages,
        )
        jobs = JobRequests(self.context, JobSettings(), self.jobs, self.ownership, self.writes, self.scans)
        scans = PairScans(self.pairs, self.cache, self._admit, self.clock, self.tasks)
        others = {"scan_pairs": scans.handle, **jobs.handlers}
        self.service = LeaderService(
            self.context, self.cache, self.reads, requests, self.relays, self.publisher, others
        )

    async def take(self, *shards: int) -> None:
        """Take these shards, as after a start."""
        self.ownership.want(shards)
        for shard in shards:
            rows = await self.store.take_ownership([shard], self.name, timeout_seconds=1)
            self.ownership.owned[shard] = rows[shard]
            self._opened(rows[shard])

    async def write(self, write: Write, *, within: float = 5.0) -> tuple[Written, bool]:
        return await self.inverses.write(write, self.clock.monotonic() + within)

    async def allocate(self, shard: int, count: int = 1, *, within: float = 5.0) -> int:
        return await self.writes.ids.allocate(shard, count, deadline=self.clock.monotonic() + within)

    async def admit_id(self, object_id: int, *, within: float = 5.0) -> None:
        await self.writes.ids.admit(object_id, self.clock.monotonic() + within)

    async def close(self) -> None:
        await self.tasks.close()

    def _opened(self, row: ShardRow) -> None:
        self.inverse_fence.note(row)
        self.cache.close_shard(row.shard)
        self.cache.open_shard(row.shard, row.version_epoch)
        self.publisher.open_shard(row.shard, row.generation, row.version_epoch)
        self.inverses.shard_taken()

    def _closed(self, shard: int) -> None:
        self.cache.close_shard(shard)
        self.publisher.close_shard(shard)

    def _admit(self, shard: int) -> TaoError | None:
        if self.ownership.may_read(shard):
            return None
        return self.configuration.routes.unknown_shard(shard) or self.ownership.not_owned(shard)
