"""Keep a server's cache in line with its settings, schema and topology, and free its memory in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from tao.cache import GraphCache
from tao.cache.settings import DEFAULT_ARENA
from tao.model.ports import Clock
from tao.model.versions import FIRST_EPOCH
from tao.routing.routes import Routes
from tao.schema.registry import Schema
from tao.schema.types import DEFAULT_LIST_LIMIT

_MIB: Final = 1 << 20


def arena_budgets(cache_mb: float, arena_mb: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each arena: the default one and the further ones, whose budgets the settings give in MiB."""
    return {DEFAULT_ARENA: int(cache_mb * _MIB), **{name: mb * _MIB for name, mb in arena_mb.items()}}


class SchemaArenas:
    """The arenas and list limits of the schema's types, a `tao.cache.ArenaChoice`. A type whose arena has no budget on
    this server shares the default arena."""

    def __init__(self, schema: Schema, arenas: Mapping[str, int]) -> None:
        def known(arena: str) -> str:
            return arena if arena in arenas else DEFAULT_ARENA

        self._objects: Final = {otype.number: known(otype.arena) for otype in schema.objects}
        self._lists: Final = {atype.number: known(atype.arena) for atype in schema.assocs}
        self._limits: Final = {atype.number: atype.limit for atype in schema.assocs}

    def object_arena(self, otype: int) -> str:
        return self._objects.get(otype, DEFAULT_ARENA)

    def list_arena(self, atype: int) -> str:
        return self._lists.get(atype, DEFAULT_ARENA)

    def list_limit(self, atype: int) -> int:
        return self._limits.get(atype, DEFAULT_LIST_LIMIT)


class TopologyEpochs:
    """Passes the version epochs in the topology on to a cache. A promotion raises the epoch of a database, and every
    cache that learns the new topology drops the shards of that database, whatever the lost master had sent."""

    def __init__(self, cache: GraphCache) -> None:
        self._cache: Final = cache
        self._known: Final[dict[str, int]] = {}

    def follow_routes(self, routes: Routes) -> None:
        """Apply the epochs of a newer topology. Call this with every newer topology's routes."""
        for database in routes.topology.databases:
            if database.version_epoch > self._known.get(database.name, FIRST_EPOCH):
                self._known[database.name] = database.version_epoch
                for first, last in database.shards:
                    for shard in range(first, last + 1):
                        if self._cache.is_open(shard):
                            self._cache.open_shard(shard, database.version_epoch)


CHECK_SECONDS: Final = 0.1
"""Interval between two checks for dropped tables: their memory is freed no later than this."""

STEP_SECONDS: Final = 0.002
"""Pause between two steps of freeing, in which the loop serves requests."""

FLOOR_CHECKS: Final = 300
"""Checks between two rounds of dropping old version floors: every 30 s, half of the time that floors are kept."""


async def maintain_cache(cache: GraphCache, clock: Clock) -> None:
    """Free dropped tables in steps, and drop old version floors, until cancelled."""
    checks = 0
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        more = cache.reclaim_step()
        while more:
            await asyncio.sleep(STEP_SECONDS)
            more = cache.reclaim_step()
        checks += 1
        if checks % FLOOR_CHECKS == 0:
            cache.forget_old_floors(clock.monotonic())
