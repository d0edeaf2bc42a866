"""A cluster without a network: followers that answer from dictionaries, or as a test's behaviour says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from tao.client.configuration import ClientConfiguration
from tao.client.graph import Graph
from tao.client.settings import ClientSettings
from tao.model.edge_block import COMPLETE, LIMIT_CUT, PREFIX, empty_block, encode_block
from tao.model.errors import TaoError
from tao.model.graph import ABSENT, EXISTS, EXISTS_NOT, Edge, encode_count, encode_object
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.queries import TimeRangeQuery
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, ServerPlace, Tier, Topology
from tao.schema.registry import Schema, load_schema
from tao.topology.document import dump_topology
from tao.wire.convert import error_to_pb
from tao.wire.session import AnswerHandler
from tao.wire.v1 import session_pb2 as pb

SCHEMA = load_schema((Path(__file__).parents[3] / "config/schema.yaml").read_text(), "schema.yaml")
SHARDS = 16

Behaviour = Callable[["FakeLink", pb.Request, AnswerHandler], None]


def make_id(number: int, shard: int = 0) -> int:
    return shard << SHARD_SHIFT | number


def tier(name: str, *servers: str, moved: dict[int, tuple[str, ...]] | None = None) -> Tier:
    return Tier(
        name=name,
        servers=tuple(CacheServer(name=each, grpc=f"{each}:7000", frames=f"{each}:7001") for each in servers),
        moved=moved or {},
    )


def make_topology(
    version: int = 1,
    near: tuple[str, ...] = ("near-1",),
    far: tuple[str, ...] = ("far-1",),
    moved: dict[int, tuple[str, ...]] | None = None,
) -> Topology:
    followers = [tier("near", *near, moved=moved)] + ([tier("far", *far)] if far else [])
    return Topology(
        version=version,
        shards=SHARDS,
        regions=(Region(name="east", leaders=tier("leaders", "leader-1"), followers=tuple(followers)),),
        databases=(
            Database(
                name="db",
                master_region="east",
                servers={"east": DatabaseServer(name="db-east")},
                shards=((0, SHARDS - 1),),
            ),
        ),
    )


class FakeCluster:
    """The contents that all followers share, and one `FakeLink` per server. It replaces `tao.wire.links.Links`."""

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology or make_topology()
        self.schema: Schema = SCHEMA
        self.objects: dict[int, bytes] = {}
        self.lists: dict[tuple[int, int], list[Edge]] = {}
        self.versions: dict[tuple[int, int], int] = {}
        self.counters: dict[tuple[int, int], int] = {}
        self.links: dict[str, FakeLink] = {}
        self.lists_reserved_ids = False
        """Whether leaders are of the former version, which lists reserved ids."""

    def to(self, server: CacheServer) -> FakeLink:
        return self.link(server.name)

    def link(self, name: str) -> FakeLink:
        return self.links.setdefault(name, FakeLink(name, self))

    def keep_only(self, places: Mapping[str, ServerPlace]) -> None:
        self.kept = set(places)

    def figures(self) -> dict[str, dict[str, object]]:
        return {name: {"health": "down" if link.is_down else "up"} for name, link in self.links.items()}

    async def close(self) -> None:
        self.is_closed = True

    async def connect(self, settings: ClientSettings | None = None, tier_name: str | None = None) -> Graph:
        settings = settings or ClientSettings()
        configuration = await ClientConfiguration.fetch(self.topology, None, self, settings)
        return Graph(self, configuration, settings, tier_name, unix_seconds=lambda: 1_700_000_000.5)

    def batches(self, server: str | None = None) -> list[pb.Request]:
        """Return the reads, writes and reads of counters that were sent to one server or to all."""
        links = [self.link(server)] if server else list(self.links.values())
        return [sent for link in links for sent in link.sent if sent.WhichOneof("body") in _BATCHES]


_BATCHES = ("read", "write", "get_counters")


class FakeLink:
    """A link to one follower. ``behaviour`` replaces its answers to reads and writes, and ``of_receipts`` what it
    answers about journaled writes."""

    def __init__(self, name: str, cluster: FakeCluster) -> None:
        self.name = name
        self.cluster = cluster
        self.sent: list[pb.Request] = []
        self.timeouts: list[float] = []
        self.behaviour: Behaviour | None = None
        self.of_receipts: pb.WriteResult | TaoError = pb.WriteResult(found=True, forgotten=True)
        self.watchers: list[AnswerHandler] = []
        self.is_down = False
        self.is_impaired = False

    def hold(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: AnswerHandler) -> None:
        self.sent.append(request)
        self.timeouts.append(timeout_seconds)
        body = request.WhichOneof("body")
        if body == "watch":
            self.watchers.append(on_answer)
        elif self.behaviour is not None and body in ("read", "write"):
            asyncio.get_running_loop().call_soon(self.behaviour, self, request, on_answer)
        else:
            asyncio.get_running_loop().call_soon(lambda: on_answer(self.answer(request)))

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        self.sent.append(request)
        if request.HasField("await_applied"):
            self.timeouts.append(timeout_seconds)
        if self.behaviour is not None and request.HasField("get_counters"):
            answered: asyncio.Future[pb.Answer | TaoError] = asyncio.get_running_loop().create_future()
            self.behaviour(self, request, answered.set_result)
            answer = await answered
            if isinstance(answer, TaoError):
                raise answer
            return answer
        return self.answer(request)

    def answer(self, request: pb.Request) -> pb.Answer:
        match request.WhichOneof("body"):
            case "read":
                return pb.Answer(read=pb.ReadAnswer(values=self.values(request.read)))
            case "write" if all(each.HasField("counter_add") for each in request.write.writes):
                for each in request.write.writes:
                    self.done(each)
                return pb.Answer(write=pb.WriteAnswer(all_counted=True))
            case "write":
                return pb.Answer(write=pb.WriteAnswer(results=[self.result(each) for each in request.write.writes]))
            case "get_counters":
                found = pb.CounterValues()
                for key in zip(request.get_counters.ids, request.get_counters.atypes, strict=True):
                    found.values.append(self.cluster.counters.get(key, 0))
                    found.max_behind_ms.append(1100)
                return pb.Answer(counter_values=found)
            case "await_applied":
                if isinstance(self.of_receipts, TaoError):
                    raise self.of_receipts
                return pb.Answer(write=pb.WriteAnswer(results=[self.of_receipts]))
            case "get_topology":
                topology = self.cluster.topology
                document = pb.TopologyDocument(version=topology.version, json=dump_topology(topology).encode())
                return pb.Answer(topology=document)
            case "get_schema":
                schema = self.cluster.schema
                document_ = pb.SchemaDocument(hash=schema.version_hash, json=schema.to_json().encode())
                return pb.Answer(schema=document_)
            case "reserve_ids":
                wanted = request.reserve_ids
                first = make_id(1, wanted.shard)
                if self.cluster.lists_reserved_ids:
                    return pb.Answer(reserved_ids=pb.ReservedIds(ids=range(first, first + wanted.count)))
                assert wanted.as_interval
                return pb.Answer(reserved_ids=pb.ReservedIds(first=first, count=wanted.count))
        raise AssertionError(request)

    def values(self, batch: pb.ReadBatch) -> list[bytes]:
        """Return the answers in slot order."""
        objects, lists = self.cluster.objects, self.cluster.lists
        values = [objects.get(each, encode_object(0, ABSENT, b"")) for each in batch.obj_ids]
        counted = zip(batch.count_id1s, batch.count_atypes, strict=True)
        values.extend(encode_count(1, len(lists.get(key, []))) for key in counted)
        for id1, atype, pos, limit in zip(
            batch.range_id1s, batch.range_atypes, batch.range_positions, batch.range_limits, strict=True
        ):
            values.append(_block(lists.get((id1, atype), []), slice(pos, pos + limit)))
        for id1, atype, high, low, limit, start in zip(
            batch.time_range_id1s,
            batch.time_range_atypes,
            batch.time_range_highs,
            batch.time_range_lows,
            batch.time_range_limits,
            batch.time_range_starts or [0] * len(batch.time_range_id1s),
            strict=True,
        ):
            query = TimeRangeQuery(id1, atype, high, low, limit, start)
            first = (high, query.below_id2 - 1) if query.below_id2 else (high, MAX_ID)
            whole = lists.get((id1, atype), [])
            edges = [edge for edge in whole if first >= (edge.time, edge.id2) >= (low, 0)][query.pos :]
            bound = self.cluster.schema.atype(atype).limit
            cut = LIMIT_CUT if limit > bound else 0
            values.append(_block(edges, slice(min(limit, bound)), len(whole), cut))
        ends = 0
        for id1, atype, count, high, low in zip(
            batch.get_id1s, batch.get_atypes, batch.get_id2_counts, batch.get_highs, batch.get_lows, strict=True
        ):
            wanted = batch.get_id2s[ends : ends + count]
            ends += count
            whole = lists.get((id1, atype), [])
            edges = [edge for edge in whole if edge.id2 in wanted and high >= edge.time >= low]
            values.append(encode_block(1, len(whole), edges, 0))
        for id1, atype, id2 in zip(batch.exist_id1s, batch.exist_atypes, batch.exist_id2s, strict=True):
            values.append(EXISTS if id2 in {edge.id2 for edge in lists.get((id1, atype), [])} else EXISTS_NOT)
        return values

    def result(self, write: pb.Write) -> pb.WriteResult:
        """Apply a write, and return its result with the version that it reached."""
        result = self.done(write)
        change = getattr(write, write.WhichOneof("operation") or "")
        key = (change.id1, change.atype) if hasattr(change, "id1") else (result.id or change.id, 0)
        version = self.cluster.versions[key] = self.cluster.versions.get(key, 0) + 1
        result.changed_ids.append(key[0])
        result.changed_atypes.append(key[1])
        result.changed_versions.append(version)
        return result

    def done(self, write: pb.Write) -> pb.WriteResult:
        if write.HasField("counter_add"):
            counted = write.counter_add
            key = counted.id, counted.atype
            self.cluster.counters[key] = self.cluster.counters.get(key, 0) + counted.by
            return pb.WriteResult(found=True)
        if write.HasField("obj_add"):
            added = write.obj_add
            object_id = added.id or make_id(len(self.cluster.objects) + 1, added.shard)
            existed = object_id in self.cluster.objects
            self.cluster.objects[object_id] = encode_object(1, added.otype, added.data)
            return pb.WriteResult(id=object_id, found=existed)
        if write.HasField("obj_delete"):
            return pb.WriteResult(found=self.cluster.objects.pop(write.obj_delete.id, None) is not None)
        if write.HasField("assoc_delete"):
            gone = write.assoc_delete
            kept = [each for each in self.cluster.lists.get((gone.id1, gone.atype), []) if each.id2 != gone.id2]
            self.cluster.lists[gone.id1, gone.atype] = kept
        if write.HasField("assoc_add"):
            edge = write.assoc_add
            stored = self.cluster.lists.setdefault((edge.id1, edge.atype), [])
            stored.append(Edge(edge.id2, edge.time, edge.data))
            stored.sort(key=lambda each: (each.time, each.id2), reverse=True)
        return pb.WriteResult(found=True)


def failing(error: TaoError, times: int = 1_000_000) -> Behaviour:
    """Fail a number of messages, then answer."""
    left = times

    def behaviour(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
        nonlocal left
        left -= 1
        on_answer(pb.Answer(error=error_to_pb(error)) if left >= 0 else link.answer(request))

    return behaviour


def silent(link: FakeLink, request: pb.Request, on_answer: AnswerHandler) -> None:
    """Never answer."""


def _block(edges: list[Edge], part: slice, count: int | None = None, flags: int = 0) -> bytes:
    if not edges and not count:
        return empty_block(1)
    return encode_block(1, len(edges) if count is None else count, edges[part], COMPLETE | PREFIX | flags)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until the condition holds; pytest's timeout is the bound."""
    while not condition():  # noqa: ASYNC110 - an Event would have to be set by the code under test
        await asyncio.sleep(0)
