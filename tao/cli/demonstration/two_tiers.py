"""Writes through one tier of caches, seen through another: how soon, on which sides, and by what message.

The first write makes Erin a friend of Cathy, and so changes a page that was rendered before. More writes follow for a
distribution; a single one tells little about a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from tao.cli.checking.access import Access
from tao.cli.demonstration.checkin_page import Cast
from tao.cli.demonstration.figures import DemonstrationFailed, Latency, SpreadFigures
from tao.cli.demonstration.seeing import seconds_until
from tao.cli.demonstration.stage import SHAPE
from tao.client import MEMORY, Graph
from tao.model.graph import decode_count
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import counter_of
from tao.wire.v1 import session_pb2 as pb

_REPEATS: Final = 20
_CALL_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Side:
    """One end of the new edge, as a tier shows it."""

    edge: str
    tier: str
    found: bool
    answered_by: str


@dataclass(frozen=True, slots=True)
class CachedList:
    """A list as one server holds it: how many writes it has seen, and its count."""

    server: str
    writes_seen: int
    count: int


@dataclass(frozen=True, slots=True)
class NewFriendship:
    """What became of the write, step by step. ``changed_in_place``: the far tier's server never had to ask anybody."""

    before: CachedList
    after: CachedList
    acknowledged_seconds: float
    seen_seconds: float
    changed_in_place: bool
    sides: list[Side]


async def befriend(near: Graph, far: Graph, access: Access, cast: Cast, far_tier: str) -> NewFriendship:
    """Make Erin a friend of Cathy through ``near`` and wait until ``far`` shows it.

    Raises `DemonstrationFailed` when it does not, or a side of it is missing."""
    await far.assoc_range(cast.cathy, "friend", 0, 10)  # so that there is something in its memory to be changed
    before = await _cached(far, access, far_tier, cast.cathy)
    began = time.perf_counter()
    await near.assoc_add(cast.erin, "friend", cast.cathy)
    acknowledged = time.perf_counter() - began

    async def seen() -> bool:
        return bool(await far.assoc_get(cast.cathy, "friend", [cast.erin]))

    with far.trace() as trace:
        delay = await seconds_until(seen, "Erin's friendship with Cathy", "tier")
    in_place = all(served.answered_by == MEMORY for served in trace)
    after = await _cached(far, access, far_tier, cast.cathy)
    sides = [
        await _side(graph, tier, names, id1, id2)
        for graph, tier in ((near, SHAPE.tier_names[0]), (far, far_tier))
        for names, id1, id2 in (("Erin -> Cathy", cast.erin, cast.cathy), ("Cathy -> Erin", cast.cathy, cast.erin))
    ]
    missing = [f"{side.edge} in {side.tier}" for side in sides if not side.found]
    if missing:
        raise DemonstrationFailed(f"the new friendship has not the edge {', '.join(missing)}")
    if after.writes_seen != before.writes_seen + 1 or after.count != before.count + 1:
        raise DemonstrationFailed(f"one write turned {before} into {after}")
    return NewFriendship(before, after, acknowledged, delay, in_place, sides)


async def measure_spread(near: Graph, far: Graph, cast: Cast, first: NewFriendship) -> SpreadFigures:
    """Let David like the post and take it back, again and again. Raises as `befriend`."""
    acknowledged, seen = [first.acknowledged_seconds], [first.seen_seconds]
    for number in range(_REPEATS):
        wanted = 1 - number % 2

        async def arrived(wanted: int = wanted) -> bool:
            return await far.assoc_count(cast.checkin, "liked_by") == wanted

        await far.assoc_count(cast.checkin, "liked_by")
        began = time.perf_counter()
        if wanted:
            await near.assoc_add(cast.david, "likes", cast.checkin)
        else:
            await near.assoc_delete(cast.david, "likes", cast.checkin)
        acknowledged.append(time.perf_counter() - began)
        seen.append(await seconds_until(arrived, "David's like", "tier"))
    return SpreadFigures(
        writes=len(seen),
        acknowledged=Latency.of(acknowledged),
        seen_p50_ms=Latency.of(seen).p50_ms,
        seen_max_ms=1000 * max(seen),
        version_before=first.before.writes_seen,
        version_after=first.after.writes_seen,
    )


async def _side(graph: Graph, tier: str, edge: str, id1: int, id2: int) -> Side:
    with graph.trace() as trace:
        found = await graph.assoc_get(id1, "friend", [id2])
    return Side(edge, tier, bool(found), trace[-1].answered_by)


async def _cached(graph: Graph, access: Access, tier: str, user: int) -> CachedList:
    """The friend list of a user in the memory of the tier's server for it."""
    server = access.routes.tier(graph.region, tier).home(user >> SHARD_SHIFT)
    friend = graph.schema.atype("friend").number
    request = pb.Request(inspect=pb.Inspect(list_id1s=[user], list_atypes=[friend]))
    answer = await access.links.to(server).ask(request, _CALL_SECONDS)
    value = next((entry.value for entry in answer.inspection.entries if entry.value), b"")
    if not value:
        raise DemonstrationFailed(f"{server.name} does not hold the friend list that it was asked for a moment ago")
    version, count = decode_count(value)
    return CachedList(server.name, counter_of(version), count)
