"""Asks servers for their readiness, their figures and their most-read shards and keys."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tao.admin.connection import ClusterTarget, ask_each, current_topology, operator_links
from tao.admin.documents import find_tier
from tao.cache.memory_advice import ArenaUse
from tao.model.errors import OperatorError, ProtocolError, TaoError, Unavailable
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer, Topology
from tao.runtime.admin_client import PROBE_SECONDS, admin_get
from tao.wire.v1 import session_pb2 as pb

HTTP_OK: Final = 200
_READY_PAUSE_SECONDS: Final = 0.1
_TRAFFIC_SECONDS: Final = 5.0
_LIMIT_FACTOR: Final = 4
"""Each server is asked for so many times the shards that are shown: a shard that is spread over clones may rank low at
each of them."""

Stats = Mapping[str, Any]
"""The figures of one server. (`Any`: each role has its own figures.)"""
Traffic = Mapping[tuple[str, str], pb.Traffic | TaoError]
"""The traffic of each server, or the error, by tier (as ``region/tier``) and server name."""


async def unreadiness(address: str) -> str:
    """Return why the server at an admin address is not ready, as it says itself; an empty text when it is ready.

    Raises what `admin_get` raises."""
    status, body = await admin_get(address, "/ready")
    return "" if status == HTTP_OK else body.decode(errors="replace").strip() or f"status {status}"


async def is_ready(address: str) -> bool:
    """True when the server at this admin address is ready; False when it is not, or does not answer."""
    try:
        return not await unreadiness(address)
    except Unavailable:
        return False


async def wait_until_ready(address: str, timeout_seconds: float) -> None:
    """Return once the server is ready. Raises `OperatorError` with its latest answer when that takes longer."""
    last = "it does not answer"
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    last = (await unreadiness(address))[:200]
                except Unavailable as error:
                    last = error.message
                if not last:
                    return
                await asyncio.sleep(_READY_PAUSE_SECONDS)
    except TimeoutError:
        raise OperatorError(f"not ready within {timeout_seconds:g} s ({last})") from None


async def server_stats(address: str, timeout_seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """Return the figures of the server at an admin address (``/stats``). Raises what `admin_get` raises.

    `Any`: each role has its own figures."""
    status, body = await admin_get(address, "/stats", timeout_seconds)
    if status != HTTP_OK:
        raise Unavailable(f"{address}/stats answers with status {status}")
    try:
        figures = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"{address}/stats is not JSON: {error}") from error
    if not isinstance(figures, dict):
        raise ProtocolError(f"{address}/stats is not a JSON object")
    return figures


def admin_addresses(topology: Topology) -> dict[str, str]:
    """Return the admin address of every cache server and tailer by name, empty where the topology has none."""
    servers = {server.name: server.admin for _, server in topology.cache_servers}
    return servers | {tailer.name: tailer.admin for region in topology.regions for tailer in region.tailers}


async def cache_server_stats(topology: Topology) -> dict[str, Stats | TaoError]:
    """Return the figures of every cache server by name, or the error of one that does not answer."""

    async def ask(server: CacheServer) -> Stats:
        if not server.admin:
            raise OperatorError("has no admin address in the topology")
        return await server_stats(server.admin)

    servers = [server for _, server in topology.cache_servers]
    answers = await ask_each(servers, ask)
    return {server.name: answer for server, answer in zip(servers, answers, strict=True)}


def mean_arena_use(servers: Sequence[Stats]) -> list[ArenaUse]:
    """Return the mean use of each arena over the servers of a tier, which share one settings file."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for server in servers:
        for arena in server["arenas"]:
            by_name.setdefault(arena["name"], []).append(arena)

    def mean(arenas: Sequence[Mapping[str, Any]], key: str) -> int:
        return int(sum(arena[key] for arena in arenas) // len(arenas))

    return [
        ArenaUse(
            name,
            mean(same, "bytes"),
            mean(same, "budget_bytes"),
            mean(same, "evictions"),
            sum(arena["returns"][0] for arena in same) // len(same),
            mean(same, "kept"),
        )
        for name, same in by_name.items()
    ]


async def follower_traffic(target: ClusterTarget, limit: int, tier: str | None) -> tuple[Topology, Traffic]:
    """Ask the followers, of one tier or of all, which shards and keys are read most.

    Raises what connecting raises, and `TopologyError` for a tier that does not exist."""
    topology = await current_topology(target)
    wanted = find_tier(topology, tier) if tier is not None else None
    asked = [
        (place.path, server)
        for place, server in topology.cache_servers
        if place.role == "follower" and wanted in (None, (place.region.name, place.tier.name))
    ]
    async with operator_links(topology, target.secret, target.tls) as links:

        async def ask(server: CacheServer) -> pb.Traffic:
            request = pb.Request(inspect=pb.Inspect(hot_limit=_LIMIT_FACTOR * limit))
            return (await links.to(server).ask(request, _TRAFFIC_SECONDS)).inspection.traffic

        answers = await ask_each([server for _, server in asked], ask)
    return topology, {(place, server.name): each for (place, server), each in zip(asked, answers, strict=True)}


def merge_traffic(topology: Topology, traffic: Traffic, limit: int) -> dict[str, Any]:  # Any: JSON
    """Add up the rates of each tier's servers and return the ``limit`` most-read shards and keys, busiest first."""
    totals: defaultdict[str, float] = defaultdict(float)
    shards: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    keys: defaultdict[tuple[str, int, int], float] = defaultdict(float)
    silent: dict[str, str] = {}
    for (tier, server), found in traffic.items():
        if isinstance(found, TaoError):
            silent[server] = found.message
            continue
        totals[tier] += found.read_rate
        for shard, rate in zip(found.shards, found.shard_rates, strict=True):
            shards[tier, shard][server] = rate
        for key_id, atype, rate in zip(found.key_ids, found.key_atypes, found.key_rates, strict=True):
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
