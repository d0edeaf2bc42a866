"""Callers, their rights, and a region of servers that check them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from tao.access.document import load_access
from tao.model.errors import TaoError
from tao.model.writes import AssocAdd, ObjAdd, Write
from tao.serving.audit import Denial
from tao.serving.configuration import Configuration
from tao.wire.client_session import Waiter
from tao.wire.convert import write_to_pb
from tao.wire.session import RequestHandler, failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FOLLOWS, FRIEND, LIKES, NOTE, SCHEMA, USER, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.region_rig import RegionRig

CHECKIN = SCHEMA.otype("checkin").number
USER_ID, CHECKIN_ID, NOBODY = make_id(64), make_id(65), make_id(66)
OTHER = make_id(67)
RULES = """
format: 1
version: {version}
mode: {mode}
roles:
  reader:
    read: {{objects: [user], associations: [friend, likes, liked_by, comment]}}
    critical: {{objects: [user], associations: [friend]}}
    min_staleness_ms: 3000
  writer:
    write: {{objects: [user], associations: [friend, likes, note]}}
  subscriber:
    read: {{associations: [subscribes, subscribers]}}
    write: {{associations: [subscribes, subscribers]}}
    critical: {{associations: [subscribes, subscribers]}}
  watcher: {{watch: all}}
  everything: {{read: all, write: all, critical: all, watch: all, administer: all}}
  dropper: {{administer: {{objects: [user]}}}}
  batch: {{read: all, write: all, critical: all, budget: {{units_per_second: 10, units_under_way: 4}}}}
callers:
  reader: [reader]
  writer: [reader, writer]
  subscriber: [subscriber]
  root: [everything, watcher]
  batch: [batch]
  operator/ann: [dropper]
  operator/root: [everything]
anonymous: [watcher]
"""


def use_rules(*configurations: Configuration, mode: str = "enforce", version: int = 1) -> None:
    for configuration in configurations:
        configuration.access.use_document(load_access(RULES.format(mode=mode, version=version), "access.yaml"))


@asynccontextmanager
async def region_with_edges() -> AsyncIterator[RegionRig]:
    """A region with a user, a check-in, and an edge of some types from the user; nothing is cached at the follower."""
    rig = RegionRig()
    await rig.start()
    await rig.near.write(ObjAdd(USER_ID, USER, b"\x80", False), ObjAdd(CHECKIN_ID, CHECKIN, b"\x80", False))
    for atype in (FRIEND, LIKES, COMMENT, FOLLOWS, NOTE):
        await rig.near.write(AssocAdd(USER_ID, atype, CHECKIN_ID, 7, b""))
    for shard in range(4):
        rig.near.cache.close_shard(shard)
        rig.near.cache.open_shard(shard, 1)
    yield rig
    assert await rig.close() == []


def record_denials(*configurations: Configuration) -> list[Denial]:
    """Return the list to which the denials of these servers are added from now on."""
    denials: list[Denial] = []
    for configuration in configurations:
        configuration.access.on_denied = denials.append
    return denials


async def ask(
    server: RequestHandler, request: pb.Request, caller: str = "", *, peer: str = "client", deadline_ms: int = 60_000
) -> pb.Answer:
    """Return the whole answer to a request of a caller. Raises the error of the whole request."""
    request.deadline_ms = deadline_ms
    waiter = Waiter(asyncio.get_running_loop())
    try:
        server.handle(request, MemoryReply(waiter.take, peer=peer, caller=caller))
    except TaoError as error:
        waiter.take(failure(error))
    return await waiter.answer()


def batch(**columns: object) -> pb.Request:
    return pb.Request(read=pb.ReadBatch(**columns))  # type: ignore[arg-type]  # columns by name


def counts_of(*atypes: int, critical: bool = False) -> pb.Request:
    return batch(count_id1s=[USER_ID] * len(atypes), count_atypes=atypes, critical=critical)


class Read(NamedTuple):
    """The parts of a read's answer, by slot: values, and reasons of failures."""

    values: dict[int, bytes]
    reasons: dict[int, str]


async def read(server: RequestHandler, request: pb.Request, caller: str) -> Read:
    answer = (await ask(server, request, caller)).read
    slots = answer.slots or range(len(answer.values))
    reasons = {slot: each.reason for slot, each in zip(answer.failed_slots, answer.errors, strict=True)}
    return Read(dict(zip(slots, answer.values, strict=True)), reasons)


async def errors_of(server: RequestHandler, caller: str, *writes: Write, peer: str = "client") -> list[str]:
    """Return the message of each write's error, "" for one that was done."""
    request = pb.Request(write=pb.WriteBatch(writes=[write_to_pb(write) for write in writes]))
    answer = (await ask(server, request, caller, peer=peer)).write
    slots = answer.slots or range(len(writes))
    found = {slot: result.error.message for slot, result in zip(slots, answer.results, strict=True)}
    return [found[slot] for slot in range(len(writes))]


def settling(*atypes: int) -> pb.Request:
    return pb.Request(settle_pairs=pb.SettlePairs(pairs=[pb.Pair(low_id=USER_ID, high_id=CHECKIN_ID, atypes=atypes)]))
