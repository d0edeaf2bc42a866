"""What the cache needs of the schema: arenas and list limits by type (`tao.cache.ArenaChoice`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tao.cache.settings import DEFAULT_ARENA
from tao.schema.registry import Schema
from tao.schema.types import DEFAULT_LIST_LIMIT

_MIB: Final = 1 << 20


def arena_budgets(cache_mb: float, arena_mb: Mapping[str, int]) -> dict[str, int]:
    """Bytes by arena, from the settings of a server, in MiB: of the default arena, and of further ones by name."""
    return {DEFAULT_ARENA: int(cache_mb * _MIB), **{name: mb * _MIB for name, mb in arena_mb.items()}}


class SchemaArenas:
    """Arenas of the schema's types; a type whose arena has no budget here shares the default one."""

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
