"""Consistent-hash ring: which server of a tier a shard belongs to (DESIGN.md §5).

Every server stands on the ring at many points; a shard belongs to the server of the first point at or after its own
hash. Adding or removing a server therefore moves only the shards that it gains or loses. Hashes are xxHash3 of names
and numbers alone, so clients and servers, in any language and on any machine, come to the same answer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import xxhash

from tao.model.errors import InvalidArgument, TopologyError

MAX_POINTS: Final = 1 << 20  # about 16 MB and a second to build; no tier comes near it
_POINT_SEED: Final = 0x7A0
_SHARD_SEED: Final = 0x7A1  # its own, so that no shard hashes onto a server's point by construction


@dataclass(frozen=True, slots=True)
class RingSettings:
    """How a ring is built. Clients and servers must agree, so these belong to the topology document."""

    virtual_nodes_per_weight: int = 256
    """Points of a server of weight 1. A server's part of the ring deviates from its fair share by 1/√points, here 6 %
    (one standard deviation), so in a tier of up to 64 servers each stays within 0.65 to 1.35 of its share. More would
    balance better but cost memory and time in every client at every topology change: 64 servers take about 10 ms."""


class Ring:
    """Servers by name, with weights, on one ring. Immutable. A server of weight 0 is given nothing by the ring."""

    __slots__ = ("_hashes", "_owners", "names")

    def __init__(self, servers: Mapping[str, float], settings: RingSettings | None = None) -> None:
        """Raises `TopologyError` when no weight is above 0, one is below, or the points are more than `MAX_POINTS`."""
        per_weight = (settings or RingSettings()).virtual_nodes_per_weight
        points = {name: _points(name, weight, per_weight) for name, weight in servers.items()}
        if not any(points.values()):
            raise TopologyError("a tier needs at least one server whose weight is above 0")
        if sum(points.values()) > MAX_POINTS:
            raise TopologyError(f"the ring would have {sum(points.values())} points, at most {MAX_POINTS} are allowed")
        placed = sorted(
            (xxhash.xxh3_64_intdigest(f"{name}#{index}".encode(), _POINT_SEED), name)  # by name where hashes collide
            for name, count in points.items()
            for index in range(count)
        )
        self.names: Final[frozenset[str]] = frozenset(servers)
        self._hashes: Final = array("Q", (point for point, _ in placed))
        self._owners: Final = tuple(name for _, name in placed)

    def owner(self, shard: int) -> str:
        """The server that the ring gives the shard to."""
        place = self._place(shard)
        return self._owners[place if place < len(self._owners) else 0]

    def owners(self, shard: int, count: int) -> tuple[str, ...]:
        """The first ``count`` different servers from the shard's place on (fewer when there are fewer): the owner,
        then who takes its place when it fails, in order; also the servers that carry its clones."""
        chosen: dict[str, None] = {}
        if count > 0:
            for name in self._walk(shard):
                chosen[name] = None
                if len(chosen) == count:
                    break
        return tuple(chosen)

    def _walk(self, shard: int) -> Iterator[str]:
        """The servers of all points once around, from the shard's place on; names repeat."""
        place = self._place(shard)
        owners = self._owners
        for index in range(place, len(owners)):
            yield owners[index]
        for index in range(place):
            yield owners[index]

    def _place(self, shard: int) -> int:
        if shard < 0:
            raise InvalidArgument(f"shard {shard} is negative")
        return bisect_left(self._hashes, xxhash.xxh3_64_intdigest(shard.to_bytes(8, "little"), _SHARD_SEED))


def _points(name: str, weight: float, per_weight: int) -> int:
    if not 0 <= weight <= MAX_POINTS:  # also refuses NaN
        raise TopologyError(f"server {name!r} has weight {weight}; weights are 0 to {MAX_POINTS}")
    # A small weight still means "some": rounding it to no points would silently take the server out.
    return max(1, round(weight * per_weight)) if weight > 0 else 0
