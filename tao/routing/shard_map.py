"""Shard → servers of one tier, worked out once per topology so that a request pays one index (DESIGN.md §5, §10).

The ring places every shard; an operator's explicit mapping wins over it; a clone count adds servers that serve reads
beside the home. Clients and servers build it from the same topology document and so agree without talking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from tao.model.errors import InvalidArgument, TopologyError
from tao.model.ids import MAX_SHARDS
from tao.routing.ring import Ring

Servers = tuple[str, ...]
"""Different server names; the first is the shard's home, the others its clones."""


class ShardMap:
    """The servers of each of ``shards`` shards (0 … shards-1) in one tier. Immutable."""

    __slots__ = ("_ring", "_servers", "shards")

    def __init__(
        self,
        shards: int,
        ring: Ring,
        explicit: Mapping[int, str | Iterable[str]] | None = None,
        clones: Mapping[int, int] | None = None,
    ) -> None:
        """``explicit``: shard → its home, or its home and clones in order; ``clones``: shard → how many servers serve
        it, home included, the ring naming those that ``explicit`` does not (all, when the tier has fewer).

        Raises `TopologyError` for a shard count, shard, server or clone count that cannot be.
        """
        if not 1 <= shards <= MAX_SHARDS:
            raise TopologyError(f"there can be 1 to {MAX_SHARDS} shards, not {shards}")
        self.shards: Final = shards
        self._ring: Final = ring
        # One tuple per server, not per shard: 65,536 of them would cost every client megabytes.
        alone = {name: (name,) for name in ring.names}
        servers: list[Servers] = [alone[ring.owner(shard)] for shard in range(shards)]
        for shard, named in (explicit or {}).items():
            servers[self._known(shard)] = _checked(shard, (named,) if isinstance(named, str) else tuple(named), ring)
        for shard, count in (clones or {}).items():
            if count < 1:
                raise TopologyError(f"shard {shard} is to be served by {count} servers; it needs at least 1")
            servers[shard] = self._extended(shard, servers[self._known(shard)], count)
        self._servers: Final = tuple(servers)

    def servers(self, shard: int) -> Servers:
        """Who serves the shard, home first. Raises `InvalidArgument` for a shard that does not exist."""
        if 0 <= shard < self.shards:
            return self._servers[shard]
        raise InvalidArgument(f"there is no shard {shard}; they are 0 to {self.shards - 1}")

    def home(self, shard: int) -> str:
        """The server that the shard's writes and messages go to first. Raises as `servers`."""
        return self.servers(shard)[0]

    def first_up(self, shard: int, down: AbstractSet[str]) -> str:
        """Who stands in for a home that is down: the next that is up of the shard's servers, then of the ring from its
        place on; the home, when nobody is up. Raises as `servers`."""
        named = self.servers(shard)
        if named[0] not in down:
            return named[0]
        successors = self._ring.owners(shard, len(self._ring.names))
        return next((name for name in (*named, *successors) if name not in down), named[0])

    def _extended(self, shard: int, servers: Servers, count: int) -> Servers:
        if len(servers) >= count:
            return servers
        ordered = dict.fromkeys((*servers, *self._ring.owners(shard, count)))
        return tuple(ordered)[:count]

    def _known(self, shard: int) -> int:
        if not 0 <= shard < self.shards:
            raise TopologyError(f"the mapping names shard {shard}; shards are 0 to {self.shards - 1}")
        return shard


def _checked(shard: int, servers: Servers, ring: Ring) -> Servers:
    if not servers:
        raise TopologyError(f"shard {shard} is mapped to no server; leave it out to give it back to the ring")
    if len(set(servers)) != len(servers):
        raise TopologyError(f"shard {shard} is mapped to a server twice: {', '.join(servers)}")
    unknown = [name for name in servers if name not in ring.names]
    if unknown:
        raise TopologyError(f"shard {shard} is mapped to {unknown[0]!r}, which is not a server of this tier")
    return servers
