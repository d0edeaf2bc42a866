"""The load process' part of `geo`: one phase at constant rates, every latency counted from the intended start.

Visibility is sampled, since what looks for a value is load, too: of every tenth write the acknowledged value is asked
of a follower in the other region that has the object cached, first when it could have arrived at the earliest and then
every two milliseconds. The answer's arrival counts, so that a figure is late by a poll and a read at most, never early.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from random import Random
from time import perf_counter
from typing import Final

from loadtest.collector import settle_collector
from loadtest.jobs import GeoJob, GeoPhase
from loadtest.open_loop import Samples, at_rate
from loadtest.waiting import within
from tao.client import ClientSettings, Graph, Object, connect
from tao.model.errors import DeadlineExceeded, TaoError
from tao.model.ids import SEQUENCE_PER_MS, make_id

WRITES_PER_SECOND: Final = 50
"""In each region; half update an object, half add an edge with its inverse."""
VISIBLE_WRITES_PER_SECOND: Final = 500
READS_PER_SECOND: Final = 500
MISSES_PER_SECOND: Final = 50
POLL_SECONDS: Final = 0.002
_SAMPLED_EVERY: Final = 10
_EARLIEST: Final = 0.4
"""Part of the round trip before which nothing can have arrived: it takes half of one."""
_GIVE_UP_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.05
_TIMEOUT_SECONDS: Final = 10.0
_WARM_UP_SECONDS: Final = 2.0
_UNREAD_UNIX_MS: Final = 1_600_000_000_000
_SAMPLES_KEPT: Final = 100_000

Operation = Callable[[], Awaitable[None]]


async def run_geo(job: GeoJob, tell: Callable[[str, float], None]) -> dict[str, Samples]:
    """The phase's samples by name. Raises `TaoError`."""
    async with AsyncExitStack() as stack:
        near = await _graph(job, job.master_region, stack)
        far = await _graph(job, job.remote_region, stack)
        tell(f"{job.phase}: preparing", 0.0)
        ids = await _objects(near, far, job.objects)
        warm_up = min(_WARM_UP_SECONDS, job.seconds)
        phase = _PHASES[job.phase](job, near, far, ids)
        tell(f"{job.phase}: warming up", 0.0)
        await phase(warm_up)
        tell(f"{job.phase}: measuring", 0.1)
        settle_collector()
        return await phase(job.seconds)


Phase = Callable[[float], Awaitable[dict[str, Samples]]]
"""Run for so many seconds."""


def _writes(job: GeoJob, near: Graph, far: Graph, ids: Sequence[int]) -> Phase:
    async def phase(seconds: float) -> dict[str, Samples]:
        here, there = Samples(), Samples()
        # Half of the objects each: two regions that write one object wait for each other, which is another figure.
        await asyncio.gather(
            at_rate(WRITES_PER_SECOND, seconds, _mixed_writes(near, ids[::2], job.seed), here),
            at_rate(WRITES_PER_SECOND, seconds, _mixed_writes(far, ids[1::2], job.seed + 1), there),
        )
        return {"same_region": here, "remote_region": there}

    return phase


def _mixed_writes(graph: Graph, ids: Sequence[int], seed: int) -> list[Operation]:
    chance, numbers = Random(seed), itertools.count()

    async def update() -> None:
        await graph.obj_update(chance.choice(ids), {"value": b"%d" % next(numbers)}, "item")

    async def add() -> None:
        id1, id2 = chance.sample(ids, 2)
        await graph.assoc_add(id1, "peer", id2, next(numbers))

    return [update, add]


def _visible(job: GeoJob, near: Graph, far: Graph, ids: Sequence[int]) -> Phase:
    values, objects, turns = itertools.count(1), itertools.cycle(ids), itertools.count()

    async def phase(seconds: float) -> dict[str, Samples]:
        written, seen = Samples(), Samples()
        looking = set[asyncio.Task[None]]()

        async def look(object_id: int, number: int, acknowledged: float) -> None:
            await asyncio.sleep(_EARLIEST * job.rtt_ms / 1000)
            while True:
                found = await far.obj_get(object_id)
                now = perf_counter()
                if found is not None and _number_in(found) >= number:
                    seen.seconds.append(now - acknowledged)
                    return
                if now - acknowledged > _GIVE_UP_SECONDS:
                    raise DeadlineExceeded(f"object {object_id} was not seen in {_GIVE_UP_SECONDS:g} s")
                await asyncio.sleep(POLL_SECONDS)

        async def write() -> None:
            object_id, number = next(objects), next(values)
            await near.obj_update(object_id, {"value": b"%d" % number}, "item")
            if next(turns) % _SAMPLED_EVERY == 0:
                looking.add(asyncio.create_task(look(object_id, number, perf_counter())))

        await at_rate(VISIBLE_WRITES_PER_SECOND, seconds, [write], written)
        for outcome in await asyncio.gather(*looking, return_exceptions=True):
            if isinstance(outcome, TaoError):
                seen.failed += 1
            elif isinstance(outcome, BaseException):
                raise outcome
        seen.elapsed = written.elapsed
        return {"visible": seen, "visible_writes": written}

    return phase


def _number_in(found: Object) -> int:
    value = found.fields["value"]
    assert isinstance(value, bytes)
    return int(value)


def _reads(job: GeoJob, _: Graph, far: Graph, ids: Sequence[int]) -> Phase:
    chance = Random(job.seed)
    unread = (
        make_id(number % job.shards, _UNREAD_UNIX_MS + number // SEQUENCE_PER_MS, number % SEQUENCE_PER_MS)
        for number in itertools.count(job.seed * _SAMPLES_KEPT)
    )

    async def hit() -> None:
        await far.obj_get(chance.choice(ids))

    async def miss() -> None:
        await far.assoc_range(next(unread), "link", 0, 10)

    async def phase(seconds: float) -> dict[str, Samples]:
        hits, misses = Samples(), Samples()
        await asyncio.gather(
            at_rate(READS_PER_SECOND, seconds, [hit], hits), at_rate(MISSES_PER_SECOND, seconds, [miss], misses)
        )
        return {"reads": hits, "misses": misses}

    return phase


_PHASES: Final[dict[GeoPhase, Callable[[GeoJob, Graph, Graph, Sequence[int]], Phase]]] = {
    "writes": _writes,
    "visible": _visible,
    "reads": _reads,
}


async def _graph(job: GeoJob, region: str, stack: AsyncExitStack) -> Graph:
    settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
    return await stack.enter_async_context(connect(job.topology_file, region=region, settings=settings))


async def _objects(near: Graph, far: Graph, count: int) -> list[int]:
    """New ones, in the caches of both regions."""
    ids = await near.obj_add_many([("item", {"value": b"0"})] * count)

    async def all_there() -> bool:
        return None not in await far.obj_get_many(ids)

    await within(_GIVE_UP_SECONDS, all_there, _LOOK_SECONDS, "the other region has not got the objects")
    return ids
