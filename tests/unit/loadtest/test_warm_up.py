"""Caches are warmed with the same requests, until none gains from more of them; hits are reported for a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pytest

from loadtest.peers.caches import REDIS, Cache, Lease
from loadtest.peers.contestants import MYSQL, TAO, SqlPeer, TaoPeer
from loadtest.peers.lookaside import Lookaside
from loadtest.peers.warm_up import WarmBounds, ask_all, is_steady, warmed
from loadtest.published.contestant import Payloads
from loadtest.published.requests import WorkloadRequest
from loadtest.published.workload import Kind
from loadtest.rounds import Source
from tao.client.diagnostics import MEMORY, Served

BOUNDS = WarmBounds(window_requests=100, most_requests=1_000, most_seconds=600.0)


class Caches:
    """Windows whose hit rates are given."""

    def __init__(self, rates: Mapping[str, Sequence[float | None]]) -> None:
        self._rates = {name: iter(some) for name, some in rates.items()}
        self.asked = {name: list[int]() for name in rates}

    async def warmed(self, bounds: WarmBounds = BOUNDS) -> Any:
        def window(name: str) -> Any:
            async def ask(count: int) -> float | None:
                self.asked[name].append(count)
                return next(self._rates[name])

            return ask

        return await warmed({name: window(name) for name in self._rates}, bounds, lambda _step, _done: None)


async def test_all_are_warmed_until_the_last_of_them_gains_nothing_and_equally() -> None:
    caches = Caches({TAO: [0.8, 0.9, 0.9, 0.9], REDIS: [0.7, 0.8, 0.85, 0.854], MYSQL: [None] * 4})
    found = await caches.warmed()
    assert (found.requests, found.steady) == (400, True)
    assert list(caches.asked.values()) == [[100] * 4] * 3
    assert found.hit_rates == {TAO: [0.8, 0.9, 0.9, 0.9], REDIS: [0.7, 0.8, 0.85, 0.854]}


async def test_warming_ends_at_its_bounds() -> None:
    rising = [number / 10 for number in range(10)]
    found = await Caches({TAO: rising}).warmed(WarmBounds(window_requests=100, most_requests=250, most_seconds=600.0))
    assert (found.requests, found.steady, found.hit_rates) == (250, False, {TAO: rising[:3]})
    at_once = await Caches({TAO: rising}).warmed(WarmBounds(window_requests=1, most_requests=9, most_seconds=0.0))
    assert (at_once.requests, at_once.steady) == (0, False)


async def test_who_has_no_cache_is_asked_one_window_and_is_not_called_steady() -> None:
    caches = Caches({MYSQL: [None] * 9})
    found = await caches.warmed()
    assert (found.requests, found.steady, caches.asked) == (100, False, {MYSQL: [100]})


@pytest.mark.parametrize(("rates", "steady"), [([0.9], False), ([0.9, 0.94, 0.91, 0.944], True), ([0.9, 0.91], False)])
def test_steady_is_what_no_longer_rises_above_its_best(rates: list[float], steady: bool) -> None:
    assert is_steady({TAO: rates}) is steady


class Memory(Cache):
    """A cache in this process."""

    def __init__(self) -> None:
        super().__init__(())
        self.values: dict[bytes, bytes] = {}
        self.multi_gets = 0

    @classmethod
    async def open(cls, host: str, ports: Sequence[int], connections: int) -> Self:
        return cls()

    async def get(self, key: bytes) -> bytes | None:
        return self.values.get(key)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.multi_gets += 1
        return [self.values.get(key) for key in keys]

    async def lease(self, keys: Sequence[bytes]) -> list[Lease | None]:
        return [1 for _ in keys]

    async def fill(self, values: Mapping[bytes, tuple[bytes, Lease]]) -> None:
        self.values.update({key: value for key, (value, _) in values.items()})

    async def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.values.pop(key, None)

    async def used_bytes(self) -> list[int]:
        return []

    async def close(self) -> None:
        return


class Database:
    """Stands for the pool, connection and cursor of a look-aside's database: node ``n`` has ``n`` links."""

    def acquire(self) -> Database:
        return self

    def cursor(self) -> Database:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return

    async def execute(self, statement: str, values: Any) -> None:
        if "FROM node" in statement:
            self._rows: list[tuple[Any, ...]] = [(each, b"%d" % each) for each in values[0]]
        elif "link_count" in statement:
            self._rows = [(values[0],)]
        else:
            others = sorted(values[1], reverse=True) if "id2 IN" in statement else range(values[0], 0, -1)
            self._rows = [(other, other, b"") for other in others if other <= values[0]][: values[-1]]

    async def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows


ASKED = [
    WorkloadRequest(Kind.OBJ_GET, 3),
    WorkloadRequest(Kind.OBJ_GET, 3),
    WorkloadRequest(Kind.READ_MANY, others=(3, 4, 5)),
    WorkloadRequest(Kind.ASSOC_COUNT, 7),
    WorkloadRequest(Kind.ASSOC_RANGE, 7, limit=50),
    WorkloadRequest(Kind.ASSOC_RANGE, 200, limit=50),
    WorkloadRequest(Kind.ASSOC_RANGE, 200, limit=1_000),
    WorkloadRequest(Kind.ASSOC_GET, 200, others=(2, 199)),
]


async def test_what_is_asked_in_batches_leaves_in_a_cache_what_single_queries_leave() -> None:
    async def asked(in_batches: bool) -> tuple[Memory, list[Source]]:
        cache = Memory()
        peer = SqlPeer(Lookaside(Database(), cache), range(1_000), Payloads(b"x"))
        if in_batches:
            return cache, await ask_all(peer, iter(ASKED), len(ASKED))
        return cache, [await peer.ask(each) for each in ASKED]

    single, one_by_one = await asked(in_batches=False)
    batched, at_once = await asked(in_batches=True)
    assert batched.values == single.values
    assert {b"o3", b"o4", b"o5", b"c7", b"p7", b"p200", b"l200", b"e200:2"} <= set(single.values)
    assert sorted(at_once) == sorted(one_by_one)
    assert batched.multi_gets < single.multi_gets + len(ASKED)


class Traced:
    """An SDK client whose answers to even objects come out of memory."""

    def __init__(self) -> None:
        self.trace_open: list[Served] | None = None

    @contextmanager
    def trace(self) -> Iterator[list[Served]]:
        self.trace_open = []
        try:
            yield self.trace_open
        finally:
            self.trace_open = None

    async def obj_get(self, object_id: int) -> None:
        await asyncio.sleep(0)
        if self.trace_open is not None:
            by = MEMORY if object_id % 2 == 0 else "leader-1"
            self.trace_open.append(Served("obj_get", str(object_id), "follower-1a", "tier-1", by))


async def test_hits_are_distinguished_from_misses_only_while_the_trace_is_open() -> None:
    client: Any = Traced()
    peer = TaoPeer(client, range(10), Payloads(b"x"))
    assert await peer.ask(WorkloadRequest(Kind.OBJ_GET, 2)) is Source.UNKNOWN
    with peer.sampled():
        found: dict[int, set[Source]] = {1: set(), 2: set()}
        while any(len(each) < 2 for each in found.values()):
            for node, hows in found.items():
                hows.add(await peer.ask(WorkloadRequest(Kind.OBJ_GET, node)))
    assert found == {1: {Source.UNKNOWN, Source.MISS}, 2: {Source.UNKNOWN, Source.HIT}}
    assert await peer.ask(WorkloadRequest(Kind.OBJ_GET, 2)) is Source.UNKNOWN
    await asyncio.sleep(0)
    assert client.trace_open is None
