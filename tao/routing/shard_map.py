"""The consistent-hash ring of a tier, and the map from each shard to its servers.

Every server has many points on the ring. A shard belongs to the server of the first point at or after the shard's own
hash, so adding or removing a server moves only the shards that it gains or loses. Hashes are xxHash3 of names and
numbers alone, so clients and servers in any language and on any machine compute the same owners.

The map is computed once per topology, so that a request pays one index. The ring places every shard, an operator's
explicit mapping takes precedence over it and names the servers that serve reads beside the home. Clients and
servers compute the map from the same topology document and so agree without communication.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

import xxhash

from tao.model.errors import InvalidArgument, TopologyError, UnknownShard
from tao.model.ids import MAX_SHARDS

MAX_POINTS: Final = 1 << 20  # about 16 MB and a second to build, far more than any tier needs
POINTS_PER_WEIGHT: Final = 256
"""Points of a server of weight 1, the same for clients and servers. A server's part of the ring deviates from its fair
share by 1/√points, here 6 % (one standard deviation), so in a tier of up to 64 servers each stays within 0.65 to 1.35
of its share. More points would improve the balance, but cost every client memory and time at every change of the
topology: 64 servers take about 10 ms."""
_POINT_SEED: Final = 0x7A0
_SHARD_SEED: Final = 0x7A1  # different, so that no shard hashes onto a server's point by construction
_NAME_SEED: Final = 0x7A2
_SORTED_PARTS: Final = 256
_PART_SHIFT: Final = 56  # the highest byte of a hash chooses its part
_RANK_BITS: Final = 20  # as many ranks as points
_RANK_MASK: Final = (1 << _RANK_BITS) - 1


class Ring:
    """A ring of servers with names and weights. Immutable. The ring gives no shards to a server of weight 0."""

    __slots__ = ("_hashes", "_owners", "names")

    def __init__(self, servers: Mapping[str, float]) -> None:
        """Build the ring from ``servers``, which maps names to weights. Raises as `ring_points`."""
        points = ring_points(servers)
        ranked = sorted(name for name, count in points.items() if count)
        suffixes = [f"#{index}".encode() for index in range(max(points.values()))]
        # A point is one number, its hash and then the rank of its server, and points are sorted by parts: of a ring of
        # 1,000 servers, tuples for the garbage collector or a single sort would stop all threads for a tenth of a
        # second.
        parts: list[list[int]] = [[] for _ in range(_SORTED_PARTS)]
        for rank, name in enumerate(ranked):
            encoded = name.encode()
            for suffix in suffixes[: points[name]]:
                point = xxhash.xxh3_64_intdigest(encoded + suffix, _POINT_SEED)
                parts[point >> _PART_SHIFT].append(point << _RANK_BITS | rank)
        hashes = array("Q")
        owners: list[str] = []
        for part in parts:
            part.sort()  # by name where hashes collide
            hashes.extend([point >> _RANK_BITS for point in part])
            owners.extend([ranked[point & _RANK_MASK] for point in part])
            part.clear()  # freed by parts, too
        self.names: Final[frozenset[str]] = frozenset(servers)
        self._hashes: Final = hashes
        self._owners: Final = tuple(owners)

    def owner(self, shard: int) -> str:
        """Return the server to which the ring gives the shard."""
        place = self._place(shard)
        return self._owners[place if place < len(self._owners) else 0]

    def owners(self, shard: int, count: int) -> tuple[str, ...]:
        """Return the first ``count`` different servers from the shard's point on, or all if there are fewer.

        The first one is the owner. The others take its place when it fails, in this order, and serve its clones."""
        chosen: dict[str, None] = {}
        if count > 0:
            for name in self._walk(shard):
                chosen[name] = None
                if len(chosen) == count:
                    break
        return tuple(chosen)

    def successors(self, name: str) -> tuple[str, ...]:
        """Return the other servers in the order of their points from the hash of a server's name on. They keep copies
        for it, in this order; so the copies of several servers are spread over all."""
        place = bisect_left(self._hashes, xxhash.xxh3_64_intdigest(name.encode(), _NAME_SEED))
        return tuple(each for each in dict.fromkeys(self._walk_from(place)) if each != name)

    def _walk(self, shard: int) -> Iterator[str]:
        """Yield the servers of all points once around the ring, from the shard's point on; names repeat."""
        return self._walk_from(self._place(shard))

    def _walk_from(self, place: int) -> Iterator[str]:
        owners = self._owners
        for index in range(place, len(owners)):
            yield owners[index]
        for index in range(place):
            yield owners[index]

    def _place(self, shard: int) -> int:
        if shard < 0:
            raise InvalidArgument(f"shard {shard} is negative; shards are numbered from 0")
        return bisect_left(self._hashes, xxhash.xxh3_64_intdigest(shard.to_bytes(8, "little"), _SHARD_SEED))


def ring_points(servers: Mapping[str, float]) -> dict[str, int]:
    """Return the number of points of each server on the ring of ``servers``, which maps names to weights.

    Raises `TopologyError` when no weight is above 0, one is negative, or there are more than `MAX_POINTS` points."""
    points = {name: _points(name, weight) for name, weight in servers.items()}
    if not any(points.values()):
        raise TopologyError("a tier needs at least one server whose weight is above 0")
    if sum(points.values()) > MAX_POINTS:
        raise TopologyError(
            f"the ring would have {sum(points.values())} points, more than {MAX_POINTS}; use lower weights"
        )
    return points


def _points(name: str, weight: float) -> int:
    if not 0 <= weight <= MAX_POINTS:  # also refuses NaN
        raise TopologyError(f"server {name!r} has weight {weight}; weights are 0 to {MAX_POINTS}")
    # A small weight still means some points: rounding it to none would silently remove the server.
    return max(1, round(weight * POINTS_PER_WEIGHT)) if weight > 0 else 0


Servers = tuple[str, ...]
"""Distinct server names; the first is the shard's home, the others are its clones."""


class ShardMap:
    """The servers of each of ``shards`` shards (0 … shards-1) in one tier. Immutable."""

    __slots__ = ("_ring", "_servers", "shards")

    def __init__(
        self,
        shards: int,
        ring: Ring,
        explicit: Mapping[int, Servers],
    ) -> None:
        """Compute the map. ``explicit`` maps a shard to its home and its clones, in order.

        Raises `TopologyError` for an invalid shard count, shard or server."""
        if not 1 <= shards <= MAX_SHARDS:
            raise TopologyError(f"there can be 1 to {MAX_SHARDS} shards, not {shards}")
        self.shards: Final = shards
        self._ring: Final = ring
        # One shared tuple per server: 65,536 tuples, one per shard, would cost every client megabytes.
        singles = {name: (name,) for name in ring.names}
        servers: list[Servers] = [singles[ring.owner(shard)] for shard in range(shards)]
        for shard, named in explicit.items():
            if not 0 <= shard < shards:
                raise TopologyError(f"the mapping names shard {shard}; shards are 0 to {shards - 1}")
            servers[shard] = _checked(shard, named, ring)
        self._servers: Final = tuple(servers)

    def servers(self, shard: int) -> Servers:
        """Return the servers of the shard, its home first. Raises `UnknownShard`."""
        if 0 <= shard < self.shards:
            return self._servers[shard]
        raise UnknownShard(f"there is no shard {shard}; they are 0 to {self.shards - 1}")

    def home(self, shard: int) -> str:
        """Return the server that receives the shard's writes and messages first. Raises as `servers`."""
        return self.servers(shard)[0]

    def successors(self, name: str) -> Servers:
        """See `Ring.successors`."""
        return self._ring.successors(name)

    def first_up(self, shard: int, down: AbstractSet[str]) -> str:
        """Return the shard's home or, when that is ``down``, its substitute.

        The substitute is the first server that is up among the shard's servers, then along the ring; the home, when no
        server is up. Raises as `servers`."""
        named = self.servers(shard)
        if named[0] not in down:
            return named[0]
        successors = self._ring.owners(shard, len(self._ring.names))
        return next((name for name in (*named, *successors) if name not in down), named[0])


def _checked(shard: int, servers: Servers, ring: Ring) -> Servers:
    if not servers:
        raise TopologyError(f"shard {shard} is mapped to no server; leave it out to give it back to the ring")
    if len(set(servers)) != len(servers):
        raise TopologyError(f"shard {shard} is mapped to a server twice: {', '.join(servers)}")
    unknown = [name for name in servers if name not in ring.names]
    if unknown:
        raise TopologyError(f"shard {shard} is mapped to {unknown[0]!r}, which is not a server of this tier")
    return servers
