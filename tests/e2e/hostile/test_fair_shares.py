"""One client with more costly work than a server can do delays itself, and no other client."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import msgspec
import pytest

from loadtest.hostile.attacks import flood, open_client, outcomes
from tao.client import Graph
from tao.model.topology import CacheServer
from tao.wire.identity import Credentials
from tao.wire.session import Session
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.hostile_rig import USER, Rig, new_user
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="package"),
]

MISSES = 100


@asynccontextmanager
async def client(server: CacheServer, name: str) -> AsyncIterator[Session]:
    session = await open_client(server.frames, Credentials(name, "client"))
    try:
        yield session
    finally:
        await session.close()


async def misses(session: Session, first_id: int, ids: count[int], flood: asyncio.Task[Any]) -> tuple[float, int]:
    """Read objects that nothing has cached, one after the other. Returns the time that 99 of 100 took at most, and how
    many were answered before all of a flood was."""
    seconds, before = [], 0
    for _ in range(MISSES):
        began = time.perf_counter()
        answer = await session.ask(pb.Request(read=pb.ReadBatch(obj_ids=[first_id + next(ids)])), PATIENT_SECONDS)
        seconds.append(time.perf_counter() - began)
        before += not flood.done()
        assert not answer.read.errors, answer.read.errors[0].message
    return sorted(seconds)[MISSES * 99 // 100 - 1], before


async def test_a_flood_of_critical_reads_delays_its_own_client_alone(rig: Rig, graph: Graph) -> None:
    user = await new_user(graph)
    follower, ids = rig.follower_of(user), count(1 << 30)
    async with client(follower, "honest") as honest, client(follower, "hog") as hog:
        no_flood = asyncio.create_task(asyncio.Event().wait())
        alone, _ = await misses(honest, user, ids, no_flood)
        no_flood.cancel()
        flooding = asyncio.create_task(flood(hog, user))
        await asyncio.sleep(0)  # it is sent
        # By the time of this answer the server has received all of it.
        await hog.ask(pb.Request(read=pb.ReadBatch(obj_ids=[user])), PATIENT_SECONDS)
        beside, before = await misses(honest, user, ids, flooding)
        outcomes = Counter(await flooding)
    # The client has more than may wait; what was refused was refused at once.
    assert outcomes["OVERLOADED"] > 50, outcomes
    assert outcomes["answered"] > 10, outcomes
    # Each would wait for all of the flood that was there before it if it had no turn of its own.
    assert before >= MISSES // 10
    times = f"{alone * 1000:.1f} ms alone, {beside * 1000:.1f} ms beside the flood"
    sys.stdout.write(f"\np99 of misses: {times}; {outcomes}\n")


HONEST_REQUESTS = 40
FLOOD_MISSES, MISSES_OF_A_BATCH = 12_000, 1_000
FLOOD_WRITES, WRITES_OF_A_BATCH = 3_200, 32


def reads(first_id: int, number: int = 1) -> pb.Request:
    """Return a request of so many objects that nothing has: the ids from the first one on, of its shard."""
    return pb.Request(read=pb.ReadBatch(obj_ids=range(first_id, first_id + number)))


def update(object_id: int, times: int = 1) -> pb.Request:
    write = pb.Write(obj_update=pb.ObjUpdate(id=object_id, otype=USER, patch=msgspec.msgpack.encode({1: "again"})))
    return pb.Request(write=pb.WriteBatch(writes=[write] * times))


async def answered_beside(hog: Session, requests: list[pb.Request], honest: Session, asked: list[pb.Request]) -> int:
    """Have a client send all of its requests, and beside them another one its own, one after the other. Fail when any
    fails. Returns how many of the latter were answered before the last of the former."""
    assert await outcomes(honest, asked[:1]) == ["answered"]  # so the other client is not alone
    flooding = asyncio.create_task(outcomes(hog, requests))
    await asyncio.sleep(0)  # it is sent
    before = 0
    for request in asked[1:]:
        assert await outcomes(honest, [request]) == ["answered"]
        before += not flooding.done()
    assert Counter(await flooding) == {"answered": len(requests)}
    return before


async def test_a_flood_of_misses_delays_its_own_client_alone(rig: Rig, graph: Graph) -> None:
    user = await new_user(graph)
    follower = rig.follower_of(user)
    nothing = user + (1 << 31)
    floods = [reads(nothing + first, MISSES_OF_A_BATCH) for first in range(0, FLOOD_MISSES, MISSES_OF_A_BATCH)]
    own = [reads(nothing - 1 - number) for number in range(HONEST_REQUESTS)]
    async with client(follower, "honest") as honest, client(follower, "hog") as hog:
        before = await answered_beside(hog, floods, honest, own)
    # In the order of their arrival, none would be answered before the whole flood.
    assert before >= HONEST_REQUESTS // 4


async def test_a_flood_of_writes_delays_its_own_client_alone(rig: Rig, graph: Graph) -> None:
    user = await new_user(graph)
    follower, hers = rig.follower_of(user), await graph.obj_add("user", {"name": "n"}, near=user)
    floods = [update(hers, WRITES_OF_A_BATCH)] * (FLOOD_WRITES // WRITES_OF_A_BATCH)
    async with client(follower, "honest") as honest, client(follower, "hog") as hog:
        before = await answered_beside(hog, floods, honest, [update(user)] * HONEST_REQUESTS)
    assert before >= HONEST_REQUESTS // 4
