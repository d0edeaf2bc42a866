"""Clones shards that are read too much, and gives clones back, in the follower tiers of all regions.

Off unless the settings say so, and done by the watcher that acts. What to do `tao.routing.hot_shards` decides by what
the followers say of their reads; `tao.watcher.cloning` does it. When a follower that is not marked down does not
answer, its tier is left alone: what it is asked is not known, and nothing is hurried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tao.model.errors import TaoError
from tao.model.topology import CacheServer, Tier, Topology
from tao.observability.logs import Logger
from tao.peers.links import Links
from tao.routing.hot_shards import NO_ROUNDS, Advice, CloningPolicy, Rounds, ShardLoad, advise
from tao.topology.cloning import hosts_of
from tao.watcher.cloning import Cloner
from tao.wire.v1 import session_pb2 as pb

_SHARDS_ASKED_FOR: Final = 200
_ANSWER_SECONDS: Final = 2.0


class HotShards:
    """The policy at work. ``done``: what was changed, and what would have been, by kind."""

    def __init__(
        self,
        topology: Callable[[], Topology],
        is_active: Callable[[], bool],
        links: Links,
        cloner: Cloner,
        policy: CloningPolicy,
        log: Logger,
        *,
        dry_run: bool,
    ) -> None:
        self._topology: Final = topology
        self._is_active: Final = is_active
        self._links: Final = links
        self._cloner: Final = cloner
        self._policy: Final = policy
        self._log: Final = log
        self._dry_run: Final = dry_run
        self._rounds: Final[dict[tuple[str, str], Rounds]] = {}
        self.done: Final = {"cloned": 0, "given_back": 0, "failed": 0, "would": 0}

    async def run(self) -> None:
        """Until cancelled; while another watcher acts, nothing is counted."""
        while True:
            await asyncio.sleep(self._policy.interval_seconds)
            if self._is_active():
                await self.once()
            else:
                self._rounds.clear()

    async def once(self) -> None:
        """One round over all tiers."""
        for region in self._topology().regions:
            for tier in region.followers:
                await self._look_at(region.name, tier)

    async def _look_at(self, region: str, tier: Tier) -> None:
        place = (region, tier.name)
        try:
            told = await asyncio.gather(*(self._ask(server) for server in tier.servers if not server.down))
        except TaoError as error:
            self._rounds.pop(place, None)
            self._log.info("hot_shards_unknown", region=region, tier=tier.name, reason=error.message)
            return
        before = self._rounds.get(place, NO_ROUNDS)
        advice, self._rounds[place] = advise(loads_of(tier, told), len(told), self._policy, before)
        if advice is not None:
            await self._follow(region, tier, advice)

    async def _follow(self, region: str, tier: Tier, advice: Advice) -> None:
        more = advice.copies >= len(hosts_of(tier, advice.shard))
        event = "shard_cloned" if more else "clone_given_back"
        where = {"region": region, "tier": tier.name, "shard": advice.shard}
        self._log.warning(event, **where, copies=advice.copies, why=advice.why, dry_run=self._dry_run)
        if self._dry_run:
            self.done["would"] += 1
            return
        try:
            plan = await self._cloner.plan(region, tier.name, advice.shard, advice.copies, by_watcher=True)
            await self._cloner.run(plan)
        except TaoError as error:
            self.done["failed"] += 1
            self._log.error("shard_not_cloned", **where, reason=error.message)
        else:
            self.done["cloned" if more else "given_back"] += 1

    async def _ask(self, server: CacheServer) -> pb.Traffic:
        request = pb.Request(inspect=pb.Inspect(hot_limit=_SHARDS_ASKED_FOR))
        return (await self._links.to(server).ask(request, _ANSWER_SECONDS)).inspection.traffic


def loads_of(tier: Tier, told: list[pb.Traffic]) -> dict[int, ShardLoad]:
    """By shard: of those that any server names among its most read, and of those with clones."""
    rates: dict[int, float] = {shard: 0.0 for shard, hosts in tier.moved.items() if len(hosts) > 1}
    for traffic in told:
        for shard, rate in zip(traffic.shards, traffic.shard_rates, strict=True):
            rates[shard] = rates.get(shard, 0.0) + rate
    loads = {}
    for shard, rate in rates.items():
        servers = len(tier.moved.get(shard, ("",)))
        ours = servers == 1 or shard in tier.cloned_by_watcher
        loads[shard] = ShardLoad(rate, servers, ours)
    return loads
