"""The SDK: an asynchronous client, a synchronous one with the same methods, and values typed by the schema.

    from tao.client import connect

    async with connect("127.0.0.1:7000") as graph:
        alice = await graph.obj_add("user", {"name": "Alice"})
        bob = await graph.obj_add("user", {"name": "Bob"})
        await graph.assoc_add(alice, "friend", bob)
        friends = await graph.assoc_range(alice, "friend", 0, 50)
        for friend in await graph.obj_get_many(friends.id2s):
            print(friend.fields["name"])

Queries that wait in one tick of the event loop travel as one batch per server. Wrong arguments fail before the network,
with the name of the argument or field. `SyncGraph` has the same methods for programs without an event loop. The package
needs neither the database driver nor metrics nor the other dependencies of the servers.

To follow a query through the code, read the modules in this order: `reads` (the operation), `request_builder` (its
arguments, checked), `router` (the server), `server_queues` (the batch of this tick), `dispatcher` (sending and
retries), `calls` (the answers). To follow a write: `writes`, `request_builder`, `operations`, `own_writes`.
"""

from tao.client.consistency import Consistency
from tao.client.diagnostics import MEMORY, ClientStats, Served, Trace
from tao.client.edge_sets import EdgeCount, EdgeSet, SetPage, SetPages, UnreadList
from tao.client.graph import Graph, connect
from tao.client.jobs import Job
from tao.client.journaled import Later
from tao.client.operations import SomeFailed
from tao.client.own_writes import Recording
from tao.client.reads import AssocPage
from tao.client.settings import ClientSettings
from tao.client.sync_graph import SyncAccepted, SyncEdgeSet, SyncGraph, SyncJob, SyncLater
from tao.client.two_hops import Candidate, KeptTwoHops, TwoHops
from tao.client.values import Accepted, AddedObject, Assoc, AssocList, Counter, EdgeState, EdgeWrite, Object
from tao.model.errors import (
    DeadlineExceeded,
    Fenced,
    IdNotReserved,
    InternalError,
    InvalidArgument,
    InvalidField,
    ListFull,
    NoCopy,
    NoJournal,
    NotCommutative,
    NotMine,
    ObjectDeleted,
    OperationAhead,
    OperationTooOld,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    ProtocolError,
    RequestError,
    RetryableError,
    StaleRead,
    TaoError,
    TlsMismatch,
    TooLarge,
    TopologyError,
    Unauthorized,
    Unavailable,
    UnknownJob,
    UnknownShard,
    UnknownType,
    WriteLost,
    WrongType,
)
from tao.model.tokens import WriteToken
from tao.wire.identity import Credentials
from tao.wire.tls import TlsFiles

__all__ = [
    "MEMORY",
    "Accepted",
    "AddedObject",
    "Assoc",
    "AssocList",
    "AssocPage",
    "Candidate",
    "ClientSettings",
    "ClientStats",
    "Consistency",
    "Counter",
    "Credentials",
    "DeadlineExceeded",
    "EdgeCount",
    "EdgeSet",
    "EdgeState",
    "EdgeWrite",
    "Fenced",
    "Graph",
    "IdNotReserved",
    "InternalError",
    "InvalidArgument",
    "InvalidField",
    "Job",
    "KeptTwoHops",
    "Later",
    "ListFull",
    "NoCopy",
    "NoJournal",
    "NotCommutative",
    "NotMine",
    "Object",
    "ObjectDeleted",
    "OperationAhead",
    "OperationTooOld",
    "OutcomeUnknown",
    "Overloaded",
    "PermissionDenied",
    "ProtocolError",
    "Recording",
    "RequestError",
    "RetryableError",
    "Served",
    "SetPage",
    "SetPages",
    "SomeFailed",
    "StaleRead",
    "SyncAccepted",
    "SyncEdgeSet",
    "SyncGraph",
    "SyncJob",
    "SyncLater",
    "TaoError",
    "TlsFiles",
    "TlsMismatch",
    "TooLarge",
    "TopologyError",
    "Trace",
    "TwoHops",
    "Unauthorized",
    "Unavailable",
    "UnknownJob",
    "UnknownShard",
    "UnknownType",
    "UnreadList",
    "WriteLost",
    "WriteToken",
    "WrongType",
    "connect",
]
