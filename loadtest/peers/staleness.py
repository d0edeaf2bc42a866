"""Stale reads: answers older than a write that was acknowledged before the read began, of objects, lists and counts.

One client writes and several readers of another client read; for tao, in the same tier and in the other one. This needs
a small graph and a cluster of its own: a second tier applies every write, which the peers' servers do not do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Final

import msgspec

from loadtest.client_process import StepReport
from loadtest.peers.arena import CONTESTANTS, PeerGraph, Rivals
from loadtest.peers.contestants import TAO, Peer
from loadtest.published.requests import WorkloadRequest
from loadtest.published.workload import Kind
from loadtest.target import OWN_TIER

ONE_TIER: Final = "one tier"
TWO_TIERS: Final = "two tiers"
TWO_CLIENTS: Final = "two clients"
_SECOND_TIER: Final = "tier-2"
_WATCHED: Final = 16
"""Objects, and as many lists."""
_OF_A_PEER: Final = 8
_READERS: Final = 4
_FIRST_TIME: Final = 2_000_000_000
_NUMBER_BYTES: Final = 8


class StaleJob(msgspec.Struct, frozen=True, kw_only=True):
    """Look for stale answers at every contestant and place, for so many seconds each."""

    rivals: Rivals
    seconds: float

    async def work(self, report: StepReport) -> dict[str, list[StaleReads]]:
        """Return the stale reads of each contestant. Raises what the clients raise."""
        found: dict[str, list[StaleReads]] = {}
        async with AsyncExitStack() as stack:
            arena = PeerGraph(self.rivals, stack, 0)
            await arena.fill(report)
            await arena.enter()
            # These lists are empty in the plan.
            empty = [node for node in range(arena.plan.nodes) if not arena.plan.degree(node)]
            for name in self.rivals.contestants:
                report(f"looking for stale answers of {name}", 1.0)
                # The peers write to one set of tables, in turns, so each has lists of its own.
                own = empty[CONTESTANTS.index(name) * _OF_A_PEER :][:_OF_A_PEER]
                places = [(OWN_TIER, TWO_CLIENTS, own)]
                if name == TAO:
                    places = [
                        (OWN_TIER, ONE_TIER, empty[:_WATCHED]),
                        (_SECOND_TIER, TWO_TIERS, empty[_WATCHED : 2 * _WATCHED]),
                    ]
                found[name] = [
                    # The reader stands for another process: it has not seen what the writer has written.
                    await _watch(
                        _Watched(await arena.peer(name), await arena.peer(name, tier), arena.ids, nodes),
                        within,
                        self.seconds,
                    )
                    for tier, within, nodes in places
                ]
        return found


class StaleReads(msgspec.Struct, frozen=True, kw_only=True):
    """The number of answers that were older than a write acknowledged before the read began."""

    reads: int
    stale: int
    within: str
    """The clients or tiers between which stale answers were looked for."""
    stale_by_kind: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Watched:
    """Objects and lists that one client writes and another reads. Numbers grow from 1; 0 stands for the state before
    any write. A write returns when it is acknowledged."""

    writer: Peer
    reader: Peer
    ids: Sequence[int]
    nodes: Sequence[int]

    async def put_object(self, index: int, number: int) -> None:
        """Write the object's number."""
        await self.writer.put_node(self.ids[self.nodes[index]], number.to_bytes(_NUMBER_BYTES, "big") + b"." * 92)

    async def add_edge(self, index: int, number: int) -> None:
        """Add edge ``number`` to a list, its time as new as its number."""
        # There are as many edges as other nodes; after those no edge is new, a point that no run of seconds reaches.
        node, others = self.nodes[index], len(self.ids) - 1
        other = self.ids[(node + 1 + number % others) % len(self.ids)]
        await self.writer.put_link(self.ids[node], other, _FIRST_TIME + number)

    async def object_number(self, index: int) -> int:
        """Return the number of the object that the reader sees."""
        found = await self.reader.answer(WorkloadRequest(Kind.OBJ_GET, self.nodes[index]))
        return int.from_bytes(found[:_NUMBER_BYTES], "big") if isinstance(found, bytes) else -1

    async def newest_number(self, index: int) -> int:
        """Return the number of the newest edge that the reader sees."""
        found = await self.reader.answer(WorkloadRequest(Kind.ASSOC_RANGE, self.nodes[index], limit=1))
        newest = found[0] if isinstance(found, list) and found else None
        return newest[1] - _FIRST_TIME if isinstance(newest, tuple) else 0

    async def count(self, index: int) -> int:
        """Return the count of the list that the reader sees."""
        found = await self.reader.answer(WorkloadRequest(Kind.ASSOC_COUNT, self.nodes[index]))
        return found if isinstance(found, int) else 0


async def _watch(watched: _Watched, within: str, seconds: float) -> StaleReads:
    objects, edges = [0] * len(watched.nodes), [0] * len(watched.nodes)
    for index in range(len(objects)):
        await watched.put_object(index, 0)
    until = perf_counter() + seconds
    kinds = (
        ("objects", watched.object_number, objects),
        ("lists", watched.newest_number, edges),
        ("counts", watched.count, edges),
    )
    reads, stale = 0, dict.fromkeys((kind for kind, *_ in kinds), 0)

    async def write() -> None:
        chance = Random(1)
        while perf_counter() < until:
            index = chance.randrange(len(objects))
            if chance.random() < 0.5:
                await watched.put_object(index, objects[index] + 1)
                objects[index] += 1
            else:
                await watched.add_edge(index, edges[index] + 1)
                edges[index] += 1

    async def read(seed: int) -> None:
        nonlocal reads
        chance = Random(seed)
        while perf_counter() < until:
            index = chance.randrange(len(objects))
            kind, see, acknowledged = kinds[chance.randrange(len(kinds))]
            before = acknowledged[index]
            seen = await see(index)
            reads += 1
            stale[kind] += seen < before

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        for number in range(_READERS):
            group.create_task(read(number))
    return StaleReads(reads=reads, stale=sum(stale.values()), within=within, stale_by_kind=stale)
