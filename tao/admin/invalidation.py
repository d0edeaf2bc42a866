"""Invalidates shards or types at all cache servers, in an order that lets no invalidated value come back.

A cache that fills again must not get from its source a value that is about to be invalidated there. So the leaders of
the shards' master regions come first, then the leaders of the other regions, who may fill from those, then the
followers. Followers get the invalidation from their leaders as well; they are asked directly so that each has a result,
also one that is subscribed to no leader now. Each server invalidates what it holds of the shards, whichever server the
topology names for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tao.admin.connection import ask_each
from tao.model.errors import TaoError, TopologyError
from tao.model.topology import CacheServer
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb

SHARDS_PER_CALL: Final = 1_000
"""The most shards of one request. They take a server's event loop some ten milliseconds, in which it answers no other
request."""

CALL_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Types:
    """The numbers of the types to invalidate; no number means all types."""

    otypes: tuple[int, ...] = ()
    atypes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Shards to invalidate at one server. Steps with a lower ``stage`` come first."""

    stage: int
    server: CacheServer
    shards: tuple[int, ...]


@dataclass(slots=True)
class ServerResult:
    """The result at one server.

    ``has``: how many of the shards the topology places there. ``invalidated``: how many it held and has invalidated."""

    server: str
    role: str
    region: str
    has: int
    invalidated: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of an invalidation, and their results by server."""

    shards: tuple[int, ...]
    steps: tuple[Step, ...]
    results: dict[str, ServerResult] = field(default_factory=dict)


def plan_invalidation(routes: Routes, shards: Sequence[int], servers: Sequence[str]) -> Plan:
    """Return the plan. Empty ``shards`` or ``servers`` mean all. Raises `TopologyError` for one that does not exist."""
    for shard in shards:
        if not 0 <= shard < routes.shards:
            raise TopologyError(f"there is no shard {shard}: this cluster has shards 0 to {routes.shards - 1}")
    for name in servers:
        routes.server(name)
    wanted = tuple(sorted(set(shards))) or tuple(range(routes.shards))
    steps: list[Step] = []
    results: dict[str, ServerResult] = {}
    for place, server in routes.topology.cache_servers:
        if servers and server.name not in servers:
            continue
        region = place.region.name
        has = len(set(routes.shards_of(server.name)).intersection(wanted))
        results[server.name] = ServerResult(server.name, place.role, region, has)
        if place.role == "follower":
            steps.append(Step(2, server, wanted))
            continue
        mastered = tuple(shard for shard in wanted if routes.master_region(shard) == region)
        others = tuple(shard for shard in wanted if routes.master_region(shard) != region)
        steps += [Step(stage, server, part) for stage, part in enumerate((mastered, others)) if part]
    return Plan(wanted, tuple(sorted(steps, key=lambda step: step.stage)), results)


def types_named(schema: Schema, names: Sequence[str]) -> Types:
    """Return the object and association types with these names or numbers. Raises `UnknownType`."""
    otypes: list[int] = []
    atypes: list[int] = []
    for name in names:
        of_objects = [each.number for each in schema.objects if name in (each.name, str(each.number))]
        of_edges = [each.number for each in schema.assocs if name in (each.name, str(each.number))]
        if not of_objects and not of_edges:
            schema.atype(name)
        otypes += of_objects
        atypes += of_edges
    return Types(tuple(otypes), tuple(atypes))


async def invalidate(
    plan: Plan, links: Links, types: Types, on_progress: Callable[[str, int], None] = lambda _server, _shards: None
) -> list[ServerResult]:
    """Carry out the plan and return the results; a server that fails has its error there.

    ``on_progress`` receives a server's name and how many shards have been invalidated at all servers so far."""
    total = 0

    async def do(step: Step) -> None:
        nonlocal total
        result = plan.results[step.server.name]
        for start in range(0, len(step.shards), SHARDS_PER_CALL):
            part = step.shards[start : start + SHARDS_PER_CALL]
            asked = pb.Invalidate(shards=part, otypes=types.otypes, atypes=types.atypes)
            answer = await links.to(step.server).ask(pb.Request(invalidate=asked), CALL_SECONDS)
            result.invalidated += answer.invalidated.shards
            total += answer.invalidated.shards
            on_progress(step.server.name, total)

    for stage in sorted({step.stage for step in plan.steps}):
        steps = [step for step in plan.steps if step.stage == stage]
        for step, done in zip(steps, await ask_each(steps, do), strict=True):
            if isinstance(done, TaoError):
                plan.results[step.server.name].error = done.message
    return list(plan.results.values())
