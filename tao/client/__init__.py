"""The SDK: an asynchronous client, its synchronous twin, and schema-typed values.

    from tao.client import connect

    async with connect("127.0.0.1:7000") as graph:
        alice = await graph.obj_add("user", {"name": "Alice"})
        bob = await graph.obj_add("user", {"name": "Bob"})
        await graph.assoc_add(alice, "friend", bob)
        friends = await graph.assoc_range(alice, "friend", 0, 50)
        for friend in await graph.obj_get_many(friends.id2s):
            print(friend.fields["name"])

Queries that wait in one tick of the event loop travel as one batch per server; wrong use fails before the network,
with the name of the argument or field. `SyncGraph` has the same methods for programs without an event loop.

Installs alone: it reaches neither the database nor metrics nor the servers' other extras. One reads a query's way in
this order: `reads` (the operation; `paging` for lists of any length) → `requests` (its arguments, checked) →
`routing` (which server) → `lanes` (the batch of this tick) → `dispatch` (sending, and what becomes of failures) →
`calls` (what the answers mean).
"""

from tao.client.failures import SomeFailed
from tao.client.graph import Graph, connect
from tao.client.own_writes import Recording
from tao.client.paging import AssocPage
from tao.client.settings import ClientSettings
from tao.client.stats import ClientStats
from tao.client.sync import SyncGraph
from tao.client.trace import MEMORY, Served, Trace
from tao.client.values import Assoc, AssocList, Object
from tao.model.errors import (
    DeadlineExceeded,
    Fenced,
    InternalError,
    InvalidArgument,
    InvalidField,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    ProtocolError,
    RequestError,
    RetryableError,
    StaleRead,
    TaoError,
    TooLarge,
    TopologyError,
    Unauthorized,
    Unavailable,
    UnknownType,
    WriteLost,
    WrongType,
)
from tao.model.tokens import WriteToken
from tao.wire.identity import Credentials
from tao.wire.tls import TlsFiles

__all__ = [
    "MEMORY",
    "Assoc",
    "AssocList",
    "AssocPage",
    "ClientSettings",
    "ClientStats",
    "Credentials",
    "DeadlineExceeded",
    "Fenced",
    "Graph",
    "InternalError",
    "InvalidArgument",
    "InvalidField",
    "NotMine",
    "Object",
    "OutcomeUnknown",
    "Overloaded",
    "ProtocolError",
    "Recording",
    "RequestError",
    "RetryableError",
    "Served",
    "SomeFailed",
    "StaleRead",
    "SyncGraph",
    "TaoError",
    "TlsFiles",
    "TooLarge",
    "TopologyError",
    "Trace",
    "Unauthorized",
    "Unavailable",
    "UnknownType",
    "WriteLost",
    "WriteToken",
    "WrongType",
    "connect",
]
