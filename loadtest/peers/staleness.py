"""Stale reads: answers older than a write that was acknowledged before the read began, of objects, lists and counts.

One client writes and several readers of another client read; for tao, in the same tier and in the other one. This needs
a small graph and a cluster of its own: a second tier applies every write, which the peers' servers do not do.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random
from time import perf_counter
from typing import Final, Protocol

import msgspec

from loadtest.client_process import StepReport
from loadtest.peers.arena import PeerGraph, Rivals
from loadtest.peers.contestants import AnswerSource
from loadtest.peers.lookaside import SqlContestant
from loadtest.peers.names import CONTESTANTS, TAO
from loadtest.published.contestant import LINK, NODE
from tao.client import Graph

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

    async def work(self, report: StepReport) -> StaleResult:
        """Return the stale reads of each contestant. Raises what the clients raise."""
        found: dict[str, list[StaleReads]] = {}
        async with AsyncExitStack() as stack:
            arena = await PeerGraph.filled(self.rivals, stack, report)
            # These lists are empty in the plan; the second half is for the second tier, or unused.
            empty = [node for node in range(arena.plan.nodes) if not arena.plan.degree(node)][: 2 * _WATCHED]
            first, second = empty[:_WATCHED], empty[_WATCHED:]
            for name in self.rivals.contestants:
                report(f"looking for stale answers of {name}", 1.0)
                if name != TAO:
                    peer = arena.peers[name]
                    assert isinstance(peer, SqlContestant)
                    # The peers write to one set of tables, in turns, so each has lists of its own.
                    nodes = empty[CONTESTANTS.index(name) * _OF_A_PEER :][:_OF_A_PEER]
                    found[name] = [
                        await _watch(_OfPeer(peer, await arena.peer(name), arena.ids, nodes), TWO_CLIENTS, self.seconds)
                    ]
                    continue
                writer = await arena.graph(self.rivals.tier)
                found[name] = [
                    # This client stands for another process: it has not seen what the writer's client has written.
                    await _watch(_OfTao(writer, await arena.graph(tier), arena.ids, nodes), within, self.seconds)
                    for tier, within, nodes in (
                        (self.rivals.tier, ONE_TIER, first),
                        (_SECOND_TIER, TWO_TIERS, second),
                    )
                ]
        return StaleResult(found=found)


class StaleReads(msgspec.Struct, frozen=True, kw_only=True):
    """The number of answers that were older than a write acknowledged before the read began."""

    reads: int
    stale: int
    within: str
    """The clients or tiers between which stale answers were looked for."""
    stale_by_kind: dict[str, int]


class StaleResult(msgspec.Struct, frozen=True, kw_only=True):
    """The stale reads of each contestant."""

    found: dict[str, list[StaleReads]]


class Watched(Protocol):
    """Objects and lists that one client writes and another reads. Numbers grow from 1; 0 stands for the state before
    any write."""

    async def put_object(self, index: int, number: int) -> None:
        """Write the object's number. Returns when the write is acknowledged."""

    async def add_edge(self, index: int, number: int) -> None:
        """Add edge ``number`` to a list, its time as new as its number. Returns when the write is acknowledged."""

    async def object_number(self, index: int) -> int:
        """Return the number of the object that a reader sees."""

    async def newest_number(self, index: int) -> int:
        """Return the number of the newest edge that a reader sees."""

    async def count(self, index: int) -> int:
        """Return the count of the list that a reader sees."""


class _OfPeer:
    """The watched objects and lists of a peer."""

    def __init__(self, writer: SqlContestant, reader: SqlContestant, ids: list[int], nodes: list[int]) -> None:
        self._writer = writer
        self._reader = reader
        self._ids = ids
        self.nodes = nodes

    async def put_object(self, index: int, number: int) -> None:
        await self._writer.put_node(self._ids[self.nodes[index]], _numbered(number))

    async def add_edge(self, index: int, number: int) -> None:
        id1, id2 = _ends(self._ids, self.nodes[index], number)
        await self._writer.put_links([(id1, id2, _FIRST_TIME + number, b"")])

    async def object_number(self, index: int) -> int:
        return _number(await self._reader.node(self._ids[self.nodes[index]], AnswerSource()))

    async def newest_number(self, index: int) -> int:
        edges = await self._reader.newest(self._ids[self.nodes[index]], 1, AnswerSource())
        return edges[0][1] - _FIRST_TIME if edges else 0

    async def count(self, index: int) -> int:
        return await self._reader.count(self._ids[self.nodes[index]], AnswerSource())


class _OfTao:
    """The watched objects and lists of tao."""

    def __init__(self, writer: Graph, reader: Graph, ids: list[int], nodes: list[int]) -> None:
        self._writer = writer
        self._reader = reader
        self._ids = ids
        self.nodes = nodes

    async def put_object(self, index: int, number: int) -> None:
        await self._writer.obj_update(self._ids[self.nodes[index]], {"payload": _numbered(number)}, NODE)

    async def add_edge(self, index: int, number: int) -> None:
        id1, id2 = _ends(self._ids, self.nodes[index], number)
        await self._writer.assoc_add(id1, LINK, id2, _FIRST_TIME + number)

    async def object_number(self, index: int) -> int:
        found = await self._reader.obj_get(self._ids[self.nodes[index]])
        payload = None if found is None else found.fields["payload"]
        return _number(payload if isinstance(payload, bytes) else None)

    async def newest_number(self, index: int) -> int:
        edges = await self._reader.assoc_range(self._ids[self.nodes[index]], LINK, 0, 1)
        return edges[0].time - _FIRST_TIME if edges else 0

    async def count(self, index: int) -> int:
        return await self._reader.assoc_count(self._ids[self.nodes[index]], LINK)


async def _watch(watched: _OfPeer | _OfTao, within: str, seconds: float) -> StaleReads:
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


def _ends(ids: list[int], node: int, number: int) -> tuple[int, int]:
    # There are as many edges as other nodes; after those no edge is new, a point that no run of seconds reaches.
    return ids[node], ids[(node + 1 + number % (len(ids) - 1)) % len(ids)]


def _numbered(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big") + b"." * 92


def _number(payload: bytes | None) -> int:
    return -1 if payload is None else int.from_bytes(payload[:_NUMBER_BYTES], "big")
