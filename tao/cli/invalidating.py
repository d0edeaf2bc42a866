"""Bulk invalidation over a whole cluster: which servers are told to void what, in which order (DESIGN.md §7, §13).

A cache that fills again must not get from further up what is about to be voided there. So the leaders of shards' master
regions come first, then the other regions' leaders, who may fill from those, then the followers. Followers hear of it
from their leaders, too; they are told directly so that each of them has a result, also one that follows nobody now.
Each server voids what it has of the shards, whoever the topology says should have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tao.cli.reaching import cache_servers, each
from tao.model.errors import TaoError, TopologyError
from tao.model.topology import CacheServer
from tao.peers.links import Links
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.wire.v1 import session_pb2 as pb

SHARDS_PER_CALL: Final = 1_000
"""Some ten milliseconds of a server's loop, in which it answers nobody."""

CALL_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Types:
    """Numbers of the types to void; none: everything."""

    otypes: tuple[int, ...] = ()
    atypes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One server is told of these shards. Steps of lower ``stage`` come first."""

    stage: int
    server: CacheServer
    shards: tuple[int, ...]


@dataclass(slots=True)
class ServerResult:
    """``has``: shards among those wanted that the topology gives it; ``voided``: that it had and voided."""

    server: str
    role: str
    region: str
    has: int
    voided: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done, and where."""

    shards: tuple[int, ...]
    steps: tuple[Step, ...]
    results: dict[str, ServerResult] = field(default_factory=dict)


def plan_invalidation(routes: Routes, shards: Sequence[int], servers: Sequence[str]) -> Plan:
    """``shards``, ``servers``: empty means all. Raises `TopologyError` for one that does not exist."""
    for shard in shards:
        if not 0 <= shard < routes.shards:
            raise TopologyError(f"there is no shard {shard}: this cluster has shards 0 to {routes.shards - 1}")
    for name in servers:
        routes.server(name)
    wanted = tuple(sorted(set(shards))) or tuple(range(routes.shards))
    steps: list[Step] = []
    results: dict[str, ServerResult] = {}
    for role, server in cache_servers(routes.topology):
        if servers and server.name not in servers:
            continue
        place = routes.locate(server.name)
        has = len(set(routes.shards_of(server.name)).intersection(wanted))
        results[server.name] = ServerResult(server.name, role, place.region, has)
        if role == "follower":
            steps.append(Step(2, server, wanted))
            continue
        mastered = tuple(shard for shard in wanted if routes.master_region(shard) == place.region)
        others = tuple(shard for shard in wanted if routes.master_region(shard) != place.region)
        steps += [Step(stage, server, part) for stage, part in enumerate((mastered, others)) if part]
    return Plan(wanted, tuple(sorted(steps, key=lambda step: step.stage)), results)


def types_named(schema: Schema, names: Sequence[str]) -> Types:
    """Object and association types by name or number. Raises the schema's `TaoError` for one that is neither."""
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
    """Do it; a server that fails is passed over and named. ``on_progress`` hears a server and how many shards have been
    voided at all of them."""
    total = 0

    async def do(step: Step) -> None:
        nonlocal total
        result = plan.results[step.server.name]
        for start in range(0, len(step.shards), SHARDS_PER_CALL):
            part = step.shards[start : start + SHARDS_PER_CALL]
            asked = pb.Invalidate(shards=part, otypes=types.otypes, atypes=types.atypes)
            answer = await links.to(step.server).ask(pb.Request(invalidate=asked), CALL_SECONDS)
            result.voided += answer.invalidated.shards
            total += answer.invalidated.shards
            on_progress(step.server.name, total)

    for stage in sorted({step.stage for step in plan.steps}):
        steps = [step for step in plan.steps if step.stage == stage]
        for step, done in zip(steps, await each(steps, do), strict=True):
            if isinstance(done, TaoError):
                plan.results[step.server.name].error = done.message
    return list(plan.results.values())
