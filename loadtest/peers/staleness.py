"""How often is an answer older than what was acknowledged before it was asked for? Of objects, lists and counts.

One client writes, several readers of another client ask; of tao within one tier, and from the other one. This has a
small graph and a cluster of its own: a second tier applies every write, which is nothing that a peer's servers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from time import perf_counter
from typing import Final, Protocol

import msgspec

from loadtest.peers.arena import Arena, Rivals
from loadtest.peers.how import Asked
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


class StaleJob(msgspec.Struct, frozen=True, kw_only=True, tag="peers_stale"):
    """Look for stale answers, so long at every contestant and place."""

    rivals: Rivals
    seconds: float


class StaleReads(msgspec.Struct, frozen=True, kw_only=True):
    """How often an answer was older than what had been acknowledged before it was asked for."""

    reads: int
    stale: int
    within: str
    """Between whom."""
    stale_by_kind: dict[str, int]


class StaleResult(msgspec.Struct, frozen=True, kw_only=True):
    """By contestant."""

    found: dict[str, list[StaleReads]]


class Watched(Protocol):
    """What one client writes and another reads. Numbers begin at 1 and grow; 0: nothing was written."""

    async def put_object(self, index: int, number: int) -> None:
        """Returns when the write is acknowledged."""

    async def add_edge(self, index: int, number: int) -> None:
        """Edge ``number`` of a list that had none, as new as its number; returns when it is acknowledged."""

    async def object_number(self, index: int) -> int:
        """Of the object that a reader sees."""

    async def newest_number(self, index: int) -> int:
        """Of the newest edge that a reader sees."""

    async def count(self, index: int) -> int:
        """Of the list, as a reader sees it."""


async def run_stale(job: StaleJob, tell: Callable[[str, float], None]) -> StaleResult:
    """Raises what the clients raise."""
    found: dict[str, list[StaleReads]] = {}
    async with AsyncExitStack() as stack:
        arena = await Arena.filled(job.rivals, stack, tell)
        # Lists that are empty as planned; the second half for the second tier, or nobody.
        empty = [node for node in range(arena.plan.nodes) if not arena.plan.degree(node)][: 2 * _WATCHED]
        first, second = empty[:_WATCHED], empty[_WATCHED:]
        for name in job.rivals.contestants:
            tell(f"looking for stale answers of {name}", 1.0)
            if name != TAO:
                peer = arena.peers[name]
                assert isinstance(peer, SqlContestant)
                # The peers write to one set of tables, and in turns: each has lists of its own.
                nodes = empty[CONTESTANTS.index(name) * _OF_A_PEER :][:_OF_A_PEER]
                found[name] = [
                    await _watch(_OfPeer(peer, await arena.peer(name), arena.ids, nodes), TWO_CLIENTS, job.seconds)
                ]
                continue
            writer = await arena.graph(job.rivals.tier)
            found[name] = [
                # Another process' client: it does not know what the writer's has written.
                await _watch(_OfTao(writer, await arena.graph(tier), arena.ids, nodes), within, job.seconds)
                for tier, within, nodes in (
                    (job.rivals.tier, ONE_TIER, first),
                    (_SECOND_TIER, TWO_TIERS, second),
                )
            ]
    return StaleResult(found=found)


class _OfPeer:
    """`Watched`, of a peer."""

    def __init__(self, writer: SqlContestant, reader: SqlContestant, ids: list[int], nodes: list[int]) -> None:
        self._writer = writer
        self._reader = reader
        self._ids = ids
        self.nodes = nodes

    async def put_object(self, index: int, number: int) -> None:
        """See `Watched`."""
        await self._writer.put_node(self._ids[self.nodes[index]], _numbered(number))

    async def add_edge(self, index: int, number: int) -> None:
        """See `Watched`."""
        id1, id2 = _ends(self._ids, self.nodes[index], number)
        await self._writer.put_links([(id1, id2, _FIRST_TIME + number, b"")])

    async def object_number(self, index: int) -> int:
        """See `Watched`."""
        return _number(await self._reader.node(self._ids[self.nodes[index]], Asked()))

    async def newest_number(self, index: int) -> int:
        """See `Watched`."""
        edges = await self._reader.newest(self._ids[self.nodes[index]], 1, Asked())
        return edges[0][1] - _FIRST_TIME if edges else 0

    async def count(self, index: int) -> int:
        """See `Watched`."""
        return await self._reader.count(self._ids[self.nodes[index]], Asked())


class _OfTao:
    """`Watched`, of tao."""

    def __init__(self, writer: Graph, reader: Graph, ids: list[int], nodes: list[int]) -> None:
        self._writer = writer
        self._reader = reader
        self._ids = ids
        self.nodes = nodes

    async def put_object(self, index: int, number: int) -> None:
        """See `Watched`."""
        await self._writer.obj_update(self._ids[self.nodes[index]], {"payload": _numbered(number)}, NODE)

    async def add_edge(self, index: int, number: int) -> None:
        """See `Watched`."""
        id1, id2 = _ends(self._ids, self.nodes[index], number)
        await self._writer.assoc_add(id1, LINK, id2, _FIRST_TIME + number)

    async def object_number(self, index: int) -> int:
        """See `Watched`."""
        found = await self._reader.obj_get(self._ids[self.nodes[index]])
        payload = None if found is None else found.fields["payload"]
        return _number(payload if isinstance(payload, bytes) else None)

    async def newest_number(self, index: int) -> int:
        """See `Watched`."""
        edges = await self._reader.assoc_range(self._ids[self.nodes[index]], LINK, 0, 1)
        return edges[0].time - _FIRST_TIME if edges else 0

    async def count(self, index: int) -> int:
        """See `Watched`."""
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
    # As many edges as there are other nodes; beyond that none is new, which no run of seconds reaches.
    return ids[node], ids[(node + 1 + number % (len(ids) - 1)) % len(ids)]


def _numbered(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big") + b"." * 92


def _number(payload: bytes | None) -> int:
    return -1 if payload is None else int.from_bytes(payload[:_NUMBER_BYTES], "big")
