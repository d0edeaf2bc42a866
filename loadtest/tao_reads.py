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

CREDENTIALS: Final = Credentials("loadtest", "client")
Transport = Literal["frames", "grpc"]
TRANSPORTS: Final[dict[str, Transport]] = {"frames": "frames", "gRPC stream": "grpc"}
"""The contestants that keep a stream of messages, and their transports."""
_TIMEOUT_SECONDS: Final = 30.0
"""A busy machine should show as a low figure, not as an error."""
_FRAMING_BYTES: Final = 4
"""What precedes an object's value as it is stored."""
_AT_ONCE: Final = 1_000


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
        all_ids = list(data.objects)
        for start in range(0, len(all_ids), _AT_ONCE):
            ids = all_ids[start : start + _AT_ONCE]
            for object_id, found in zip(ids, await self._graph.obj_get_many(ids), strict=True):
                value = data.objects[object_id][_FRAMING_BYTES:]
                if found is None or found.id != object_id or found.fields["value"] != value:
                    raise WrongAnswer(f"the graph has another object {object_id}")
        for stored in (*data.pages, *data.mixed, *(StoredList(id1, ()) for id1 in data.empty)):
            got = await self._graph.assoc_range(stored.id1, LINK, 0, len(stored.edges) + 1)
            if tuple(zip(got.id2s, got.times, strict=True)) != stored.edges:
                raise WrongAnswer(f"the graph has another list of {stored.id1}")
            if await self._graph.assoc_count(stored.id1, LINK) != len(stored.edges):
                raise WrongAnswer(f"the graph has another count of {stored.id1}")

    def call(self, asked: Query | Sequence[int]) -> Call:
        """Return the call of one query, or of the many-form for several objects."""
        graph = self._graph
        if not isinstance(asked, Query):
            return Call(graph.obj_get_many, (list(asked),), _how_many, len(asked))
        match asked.operation:
            case Operation.OBJ_GET:
                return Call(graph.obj_get, (asked.id,), _is_there, 1)
            case Operation.ASSOC_COUNT:
                return Call(graph.assoc_count, (asked.id, LINK), int, asked.expected)
            case Operation.ASSOC_RANGE:
                return Call(graph.assoc_range, (asked.id, LINK, 0, asked.limit), len, asked.expected)
            case Operation.ASSOC_TIME_RANGE:
                window = (asked.id, LINK, asked.high, asked.low, asked.limit)
                return Call(graph.assoc_time_range, window, len, asked.expected)
            case Operation.ASSOC_GET:
                return Call(graph.assoc_get, (asked.id, LINK, (asked.id2,)), len, asked.expected)


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


async def open_unary(address: str, stack: AsyncExitStack) -> Callable[[Query], Call]:
    """The call of an object by the plain unary method, over one channel; closed with the stack."""
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
    # Any: the generated stub serves the synchronous and the asynchronous channel under one name.
    stub: Any = graph_pb2_grpc.GraphStub(channel)

    def get(object_id: int) -> Awaitable[pb_graph.ObjGetReply]:
        answer: Awaitable[pb_graph.ObjGetReply] = stub.ObjGet(pb_graph.ObjGetRequest(id=object_id))
        return answer

    return lambda query: Call(get, (query.id,), _data_bytes, VALUE_BYTES)


def _is_there(found: Object | None) -> int:
    return found is not None


def _how_many(found: Sequence[Object | None]) -> int:
    # An object is always true, and asking it costs less than comparing it with None.
    return len(found) if all(found) else 0


def _data_bytes(reply: pb_graph.ObjGetReply) -> int:
    return len(reply.data)
