"""What `tao shard hot` shows: every server's samples, put together by tier (DESIGN.md §10)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from tao.cli.connecting import graph_of
from tao.cli.reaching import operator_links
from tao.cli.topology import place_of
from tao.model.errors import TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer, Topology
from tao.wire.v1 import session_pb2 as pb

ANSWER_SECONDS: Final = 5.0
_ASKED_FOR: Final = 4
"""Times as many of each server as are shown: what is spread over clones may stand low everywhere."""

Answers = Mapping[tuple[str, str], pb.Traffic | TaoError]
"""By tier, as ``region/tier``, and server."""


async def ask_all(connect: str | None, token: str, limit: int, tier: str | None) -> tuple[Topology, Answers]:
    """Ask the followers, of one tier or of all. Raises as `graph_of`, and `TopologyError` for a tier that is none."""
    async with graph_of(connect) as graph:
        topology = graph.topology
    wanted = place_of(topology, tier) if tier is not None else None
    asked = [
        (f"{region.name}/{each.name}", server)
        for region in topology.regions
        for each in region.followers
        for server in each.servers
        if wanted in (None, (region.name, each.name))
    ]
    async with operator_links(token) as links:

        async def ask(server: CacheServer) -> pb.Traffic | TaoError:
            request = pb.Request(inspect=pb.Inspect(hot_limit=_ASKED_FOR * limit))
            try:
                return (await links.to(server).ask(request, ANSWER_SECONDS)).inspection.traffic
            except TaoError as error:
                return error

        answers = await asyncio.gather(*(ask(server) for _, server in asked))
    return topology, {(place, server.name): each for (place, server), each in zip(asked, answers, strict=True)}


def merged(topology: Topology, answers: Answers, limit: int) -> dict[str, Any]:  # Any: JSON
    """Shards and keys of each tier by their rates over all its servers, the most read first."""
    totals: defaultdict[str, float] = defaultdict(float)
    shards: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    keys: defaultdict[tuple[str, int, int], float] = defaultdict(float)
    silent: dict[str, str] = {}
    for (tier, server), told in answers.items():
        if isinstance(told, TaoError):
            silent[server] = told.message
            continue
        totals[tier] += told.read_rate
        for shard, rate in zip(told.shards, told.shard_rates, strict=True):
            shards[tier, shard][server] = rate
        for key_id, atype, rate in zip(told.key_ids, told.key_atypes, told.key_rates, strict=True):
            keys[tier, key_id, atype] += rate
    shown_shards = [
        {
            "tier": tier,
            "shard": shard,
            "reads_per_second": round(sum(by_server.values()), 1),
            "share": round(sum(by_server.values()) / (totals[tier] or 1.0), 4),
            "servers": sorted(by_server),
            "busiest": max(by_server, key=by_server.__getitem__),
        }
        for (tier, shard), by_server in sorted(shards.items(), key=lambda item: -sum(item[1].values()))[:limit]
    ]
    shown_keys = [
        {
            "tier": tier,
            "id": key_id,
            "atype": atype,
            "shard": key_id >> SHARD_SHIFT,
            "reads_per_second": round(rate, 1),
            "share": round(rate / (totals[tier] or 1.0), 4),
        }
        for (tier, key_id, atype), rate in sorted(keys.items(), key=lambda item: -item[1])[:limit]
    ]
    return {
        "topology_version": topology.version,
        "tiers": {tier: round(rate, 1) for tier, rate in totals.items()},
        "shards": shown_shards,
        "keys": shown_keys,
        "silent": silent,
    }
