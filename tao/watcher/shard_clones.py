"""Starts and ends clones of a shard while it is read and written, for the command and for the watcher.

`tao.topology.clones` computes two documents. The first is stored, every server of the tier has to use it, and then the
second is stored. An interruption leaves a shard that is served and invalidated correctly; the next call continues from
what the document says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from tao.model.errors import TaoError, TopologyConflict, TopologyError, Unavailable
from tao.model.topology import CacheServer, Tier, Topology
from tao.routing.cloning_policy import NO_ROUNDS, Advice, CloningPolicy, Rounds, ShardLoad, advise
from tao.topology.clones import Cloning, hosts_of, plan_copies, tier_of
from tao.watcher.probes import WatcherContext
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb


class TopologyEditor(Protocol):
    """The part of `tao.topology.file_store.TopologyFile` that reads and changes the document."""

    async def load(self) -> Topology: ...

    async def change(self, expected_version: int, changed: Topology) -> Topology: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CloningSettings:
    """Time limits while the servers of a tier adopt a document."""

    timeout_seconds: float = 30.0
    """Time in which every server of the tier has to use a new document; a healthy one takes half a second. Mark down a
    server that does not: it sends changes to the servers that its old document names."""

    poll_seconds: float = 0.1
    """Interval between queries to a server."""

    answer_seconds: float = 2.0
    """Time limit for one answer."""

    max_conflicts: int = 5
    """Bound on conflicting changes of the document."""


VersionAt = Callable[[CacheServer], Awaitable[int]]
"""Returns the topology version that a server uses now. Raises a `TaoError`."""


class Cloner:
    """Changes how many servers serve a shard."""

    def __init__(
        self,
        store: TopologyEditor,
        version_at: VersionAt,
        settings: CloningSettings,
        on_step: Callable[[str], None],
    ) -> None:
        """``on_step`` receives a text for people about what is being done or waited for."""
        self._store: Final = store
        self._version_at: Final = version_at
        self._settings: Final = settings
        self._on_step: Final = on_step

    async def plan(self, region: str, tier: str, shard: int, copies: int, *, by_watcher: bool = False) -> Cloning:
        """Return what `run` would do. Raises as `plan_copies`."""
        return plan_copies(await self._store.load(), region, tier, shard, copies, by_watcher=by_watcher)

    async def run(self, cloning: Cloning) -> Topology:
        """Carry out the plan, and return the document that every server of the tier uses afterwards.

        Raises `TopologyError` when the shard's placement changed since the plan, `Unavailable` when a server does not
        adopt a document in time.
        """
        if cloning.is_nothing:
            return await self._store.load()
        stored = await self._change(lambda found: self._first_of(found, cloning))
        self._on_step(
            f"version {stored.version}: changes go to {', '.join((*cloning.between, *cloning.extra_receivers))}"
        )
        await self._wait_until_seen(cloning, stored)
        stored = await self._change(cloning.second)
        self._on_step(f"version {stored.version}: served by {', '.join(cloning.after)}")
        await self._wait_until_seen(cloning, stored)
        return stored

    @staticmethod
    def _first_of(found: Topology, cloning: Cloning) -> Topology:
        now = plan_copies(
            found,
            cloning.region,
            cloning.tier,
            cloning.shard,
            len(cloning.after) - 1,
            by_watcher=cloning.by_watcher,
        )
        if now != cloning:
            where = f"shard {cloning.shard} of {cloning.region}/{cloning.tier}"
            raise TopologyError(f"{where} is served by {', '.join(now.before)} by now: look again")
        return cloning.first(found)

    async def _change(self, edit: Callable[[Topology], Topology]) -> Topology:
        """Store a change by compare-and-set, and retry when something else in the document changed at the same time."""
        for left in reversed(range(self._settings.max_conflicts)):
            before = await self._store.load()
            try:
                return await self._store.change(before.version, edit(before))
            except TopologyConflict:
                if not left:
                    raise
        raise AssertionError("max_conflicts is at least 1")

    async def _wait_until_seen(self, cloning: Cloning, stored: Topology) -> None:
        version, servers = stored.version, _servers_asked(stored, cloning)
        waiting = [server.name for server in servers]
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                while True:
                    heard = await asyncio.gather(*(self._has_seen(server, version) for server in servers))
                    waiting = [server.name for server, has in zip(servers, heard, strict=True) if not has]
                    if not waiting:
                        return
                    self._on_step(f"waiting for {', '.join(waiting)} to go by version {version}")
                    await asyncio.sleep(self._settings.poll_seconds)
                    servers = _servers_asked(await self._store.load(), cloning)  # some may be marked meanwhile
        except TimeoutError:
            raise Unavailable(
                f"{', '.join(waiting)} did not hear of topology version {version} within "
                f"{self._settings.timeout_seconds:g} s: mark down what is gone, then do this again"
            ) from None

    async def _has_seen(self, server: CacheServer, version: int) -> bool:
        try:
            return await self._version_at(server) >= version
        except TaoError:
            return False


def _servers_asked(topology: Topology, cloning: Cloning) -> list[CacheServer]:
    return [server for server in tier_of(topology, cloning.region, cloning.tier).servers if not server.down]


def topology_version_of(links: Links, settings: CloningSettings) -> VersionAt:
    """Return a function that queries the servers over ``links``."""

    async def version_at(server: CacheServer) -> int:
        answer = await links.to(server).ask(pb.Request(get_topology=pb.GetTopology()), settings.answer_seconds)
        return answer.topology.version

    return version_at


_SHARDS_ASKED_FOR: Final = 200
_ANSWER_SECONDS: Final = 2.0


class HotShards:
    """Clones hot shards, and removes clones, in the follower tiers of all regions.

    Off unless the settings enable it, and done by the active watcher. `tao.routing.cloning_policy` decides from the
    read rates that followers report. When a follower that is not marked down does not answer, its tier is left alone,
    because its load is unknown. ``done``: completed and simulated actions, by kind.
    """

    def __init__(
        self,
        topology: Callable[[], Topology],
        is_active: Callable[[], bool],
        links: Links,
        cloner: Cloner,
        policy: CloningPolicy,
        context: WatcherContext,
        *,
        dry_run: bool,
    ) -> None:
        self._topology: Final = topology
        self._is_active: Final = is_active
        self._links: Final = links
        self._cloner: Final = cloner
        self._build_hot_shards: Final = policy
        self._log: Final = context.log
        self._audit: Final = context.audit
        self._dry_run: Final = dry_run
        self._rounds: Final[dict[tuple[str, str], Rounds]] = {}
        self.done: Final = {"cloned": 0, "given_back": 0, "failed": 0, "would": 0}

    async def run(self) -> None:
        """Run rounds until cancelled. Rounds do not count while another watcher is active."""
        while True:
            await asyncio.sleep(self._build_hot_shards.interval_seconds)
            if self._is_active():
                await self.once()
            else:
                self._rounds.clear()

    async def once(self) -> None:
        """Check all tiers once."""
        for region in self._topology().regions:
            for tier in region.followers:
                await self._check_tier(region.name, tier)

    async def _check_tier(self, region: str, tier: Tier) -> None:
        place = (region, tier.name)
        try:
            answers = await asyncio.gather(*(self._ask(server) for server in tier.servers if not server.down))
        except TaoError as error:
            self._rounds.pop(place, None)
            self._log.info("hot_shards_unknown", region=region, tier=tier.name, reason=error.message)
            return
        before = self._rounds.get(place, NO_ROUNDS)
        advice, self._rounds[place] = advise(loads_of(tier, answers), len(answers), self._build_hot_shards, before)
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
            self._audit.acted(event, error, **where, copies=advice.copies)
        else:
            self.done["cloned" if more else "given_back"] += 1
            self._audit.acted(event, None, **where, copies=advice.copies)

    async def _ask(self, server: CacheServer) -> pb.Traffic:
        request = pb.Request(inspect=pb.Inspect(hot_limit=_SHARDS_ASKED_FOR))
        return (await self._links.to(server).ask(request, _ANSWER_SECONDS)).inspection.traffic


def loads_of(tier: Tier, answers: list[pb.Traffic]) -> dict[int, ShardLoad]:
    """Return the load of each shard that a server reports among its most read, and of each cloned shard."""
    rates: dict[int, float] = {shard: 0.0 for shard, hosts in tier.moved.items() if len(hosts) > 1}
    for traffic in answers:
        for shard, rate in zip(traffic.shards, traffic.shard_rates, strict=True):
            rates[shard] = rates.get(shard, 0.0) + rate
    loads = {}
    for shard, rate in rates.items():
        servers = len(tier.moved.get(shard, ("",)))
        ours = servers == 1 or shard in tier.cloned_by_watcher
        loads[shard] = ShardLoad(rate, servers, ours)
    return loads
