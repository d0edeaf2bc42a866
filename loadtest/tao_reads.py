"""A follower's cached reads: through the SDK over either transport, through bare sessions, and through unary gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, Literal

import grpc

from loadtest.dataset import LINK, VALUE_BYTES, Dataset, Operation, Query, StoredList
from loadtest.drivers import Batch, Call, WrongAnswer, sessions
from loadtest.rounds import Drive
from tao.client import ClientSettings, Graph, Object, connect
from tao.model.graph import OBJECT_HEADER_BYTES
from tao.wire.frames_client import connect_frames
from tao.wire.grpc_client import connect_grpc
from tao.wire.identity import Credentials
from tao.wire.links import LinkSettings
from tao.wire.session import Session
from tao.wire.settings import SessionSettings
from tao.wire.v1 import graph_pb2 as pb_graph
from tao.wire.v1 import graph_pb2_grpc
from tao.wire.v1 import session_pb2 as pb

CREDENTIALS = Credentials("loadtest", "client")
Transport = Literal["frames", "grpc"]
_TIMEOUT_SECONDS: Final = 30.0
"""A busy machine should show as a low figure, not as an error."""


async def open_graph(topology_file: str, transport: Transport, stack: AsyncExitStack) -> Graph:
    """A graph that uses this transport alone, of the cluster in the topology file; closed with the stack."""
    settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS, links=LinkSettings(transport=transport))
    return await stack.enter_async_context(connect(topology_file, settings=settings))


class GraphReads:
    """Calls against one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    async def verify(self, data: Dataset) -> None:
        """Read every object and list once, which also warms the follower. Raises `WrongAnswer`."""
        for ids in _batches(list(data.objects), 1000):
            for object_id, found in zip(ids, await self._graph.obj_get_many(ids), strict=True):
                if found is None or found.id != object_id or found.fields["value"] != _value(data, object_id):
                    raise WrongAnswer(f"the graph has another object {object_id}")
        for stored in (*data.pages, *data.mixed, *(StoredList(id1, ()) for id1 in data.empty)):
            got = await self._graph.assoc_range(stored.id1, LINK, 0, len(stored.edges) + 1)
            if tuple(zip(got.id2s, got.times, strict=True)) != stored.edges:
                raise WrongAnswer(f"the graph has another list of {stored.id1}")
            if await self._graph.assoc_count(stored.id1, LINK) != len(stored.edges):
                raise WrongAnswer(f"the graph has another count of {stored.id1}")

    def gets(self, ids: Sequence[int]) -> list[Call]:
        """One object a call."""
        return [Call(self._graph.obj_get, (object_id,), _is_there, 1) for object_id in ids]

    def pages(self, lists: Sequence[StoredList], edges: int) -> list[Call]:
        """The newest ``edges`` of a list a call."""
        return [
            Call(self._graph.assoc_range, (stored.id1, LINK, 0, edges), len, min(edges, len(stored.edges)))
            for stored in lists
        ]

    def mix(self, queries: Sequence[Query]) -> list[Call]:
        """The paper's mix."""
        return [self._mixed(query) for query in queries]

    def many(self, batches: Sequence[Sequence[int]]) -> list[Call]:
        """A many-form a call."""
        return [Call(self._graph.obj_get_many, (list(batch),), _how_many, len(batch)) for batch in batches]

    def _mixed(self, query: Query) -> Call:
        graph, expected = self._graph, query.expected
        if query.operation is Operation.OBJ_GET:
            return Call(graph.obj_get, (query.id,), _is_there, 1)
        if query.operation is Operation.ASSOC_COUNT:
            return Call(graph.assoc_count, (query.id, LINK), int, expected)
        if query.operation is Operation.ASSOC_RANGE:
            return Call(graph.assoc_range, (query.id, LINK, 0, query.limit), len, expected)
        if query.operation is Operation.ASSOC_TIME_RANGE:
            return Call(graph.assoc_time_range, (query.id, LINK, query.high, query.low, query.limit), len, expected)
        return Call(graph.assoc_get, (query.id, LINK, (query.id2,)), len, expected)


async def open_sessions(address: str, transport: Transport, count: int, stack: AsyncExitStack) -> list[Session]:
    """Separate connections; closed with the stack."""
    connect_to = connect_frames if transport == "frames" else connect_grpc
    opened: list[Session] = []
    for _ in range(count):
        session = await connect_to(address, SessionSettings(), CREDENTIALS)
        stack.push_async_callback(session.close)
        opened.append(session)
    return opened


def session_gets(opened: Sequence[Session], batches: Sequence[Sequence[int]], topology_version: int) -> Drive:
    """Messages of one batch of objects each; the batches are of one size."""
    expected = (OBJECT_HEADER_BYTES + VALUE_BYTES) * len(batches[0])
    return sessions(opened, [Batch(pb.ReadBatch(obj_ids=batch), expected) for batch in batches], topology_version)


async def open_unary(address: str, stack: AsyncExitStack) -> Callable[[Sequence[int]], list[Call]]:
    """``gets`` by the plain unary method, over one channel; closed with the stack."""
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
    # Any: the generated stub serves the synchronous and the asynchronous channel under one name.
    stub: Any = graph_pb2_grpc.GraphStub(channel)

    def get(object_id: int) -> Awaitable[pb_graph.ObjGetReply]:
        answer: Awaitable[pb_graph.ObjGetReply] = stub.ObjGet(pb_graph.ObjGetRequest(id=object_id))
        return answer

    return lambda ids: [Call(get, (object_id,), _data_bytes, VALUE_BYTES) for object_id in ids]


def _value(data: Dataset, object_id: int) -> bytes:
    return data.objects[object_id][4:]


def _is_there(found: Object | None) -> int:
    return found is not None


def _how_many(found: Sequence[Object | None]) -> int:
    # An object is always true, and asking it costs less than comparing it with None.
    return len(found) if all(found) else 0


def _data_bytes(reply: pb_graph.ObjGetReply) -> int:
    return len(reply.data)


def _batches(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]
