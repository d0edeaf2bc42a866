"""How a cache server joins its tier by itself, leaves it, and is removed once it is gone. Pure functions: document in,
document out.

A server that registers gets an entry of weight 0: it is listed, so that others accept it, and has no shards. Then its
weight comes nearer to its share in steps. A follower takes an eighth of its share at a time, because it begins with an
empty cache, and each shard that it takes is missed for a while; a leader takes all at once, because clients do not
notice its misses. A server that leaves goes back to weight 0 the same way, and one whose share was lowered goes down by
an eighth of what it has. The next step follows from the document and from nothing else. So it is taken once, even if
several processes try it, or one process tries it twice.

Entries that operators have added have no `Registration`, and are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from tao.model.errors import NameTaken, TopologyError
from tao.model.topology import CacheServer, PlacedServer, PlacedTier, Registration, Role, Tier, Topology
from tao.routing.shard_map import ring_points
from tao.topology import edits

STEPS: Final = 8
"""Steps from weight 0 to the whole share of a follower."""


@dataclass(frozen=True, slots=True)
class Registrant:
    """A server that registers: its role, its place, and the entry that it is to have if it has none."""

    role: Role
    region: str
    tier: str
    server: CacheServer

    @property
    def share(self) -> float:
        """The weight that the server is to have."""
        return self.server.registration.share if self.server.registration else self.server.weight


def register(topology: Topology, wanted: Registrant) -> Topology:
    """Return the document with an entry for the server; the same document when it has one already.

    The server of a gRPC address is the same one: it keeps its weight when it starts again, gets its new other
    addresses, and stays where it was about to leave. An entry with another address is replaced if its server is gone
    or has left the ring. Raises `NameTaken` for any other, and `TopologyError` for a tier that does not exist, that is
    not one of servers of this role, or whose ring has no room for the share."""
    _check_tier(topology, wanted)
    name = wanted.server.name
    found = placed(topology, name)
    if found is None:
        return edits.add_server(topology, wanted.region, wanted.tier, wanted.server)
    known = found.server
    if known.grpc == wanted.server.grpc and not known.registration:
        return topology  # an operator has added it, and sees to it
    is_in_place = (found.place.region.name, found.place.tier.name) == (wanted.region, wanted.tier)
    if known.grpc == wanted.server.grpc and is_in_place:
        present = {
            "frames": wanted.server.frames,
            "admin": wanted.server.admin,
            "registration": _joined(known, wanted.share),
        }
        is_same = msgspec.structs.replace(known, **present) == known
        return topology if is_same else edits.change_server(topology, name, **present)
    if known.grpc != wanted.server.grpc and not is_replaceable(known):
        raise NameTaken(_why_taken(found, wanted))
    removed = edits.remove_server(topology, name)
    return edits.as_version(edits.add_server(removed, wanted.region, wanted.tier, wanted.server), topology.version + 1)


def step(topology: Topology, name: str, *, is_ready: bool) -> Topology:
    """Return the document after the next step of a server to its share, or to 0 while it leaves; the same document when
    it has arrived, is not ``is_ready`` for more shards, or is none that has joined by itself.

    Raises `TopologyError` when the last server of a tier with a weight would leave the ring."""
    found = placed(topology, name)
    if found is None or not found.server.registration:
        return topology
    server, registration = found.server, found.server.registration
    goal, present = 0 if registration.leaving else STEPS, eighths(server)
    if server.weight == registration.share * goal / STEPS or (goal > present and not is_ready):
        return topology
    nearer = goal if found.place.role == "leader" else _next_eighths(present, goal)
    if nearer == 0:
        return edits.take_off_ring(topology, name)  # with the shards that are mapped to it by hand
    return edits.change_server(topology, name, weight=registration.share * nearer / STEPS)


def _next_eighths(present: int, goal: int) -> int:
    """Return how many eighths of its share a follower has after its next step. One that has more than its share,
    because that was lowered, gives up an eighth of what it has, so that the steps are few however low the share."""
    return present + 1 if goal > present else max(goal, present - max(1, present // STEPS))


def eighths(server: CacheServer) -> int:
    """Return how many eighths of its share a server that has joined by itself has."""
    return round(STEPS * server.weight / server.registration.share) if server.registration else STEPS


def leave(topology: Topology, name: str, *, leaving: bool = True, at_once: bool = False) -> Topology:
    """Return the document in which a server that has joined by itself leaves, or stays after all; ``at_once``: it has
    left the ring, because it cannot take the steps itself."""
    found = placed(topology, name)
    if found is None or not found.server.registration:
        raise TopologyError(f"{name} has not joined by itself")
    registration = msgspec.structs.replace(found.server.registration, leaving=leaving)
    changed = topology
    if registration != found.server.registration:
        changed = edits.change_server(topology, name, registration=registration)
    if at_once and found.server.weight:
        changed = edits.as_version(edits.take_off_ring(changed, name), topology.version + 1)
    return changed


def follow_absences(topology: Topology, now_unix_ms: int, remove_after_seconds: float) -> Topology:
    """Return the document after noting since when servers that joined by themselves are gone, and removing those that
    have been for ``remove_after_seconds`` (0: none); the same document when nothing changes.

    A server is gone while a watcher's mark says so: an operator who marks one down has reasons. The last server of a
    tier that has a weight and is not marked is never removed, and no other one if that is missing."""
    changed = topology
    for found in topology.cache_servers:
        server, registration = found.server, found.server.registration
        if not registration:
            continue
        is_gone = server.down and server.name in topology.marked_by_watcher
        if is_gone is not bool(registration.gone_unix_ms):
            noted = msgspec.structs.replace(registration, gone_unix_ms=now_unix_ms if is_gone else 0)
            changed = edits.change_server(changed, server.name, registration=noted)
        elif is_gone and _is_overdue(registration, now_unix_ms, remove_after_seconds):
            tier = changed.place_of(server.name).tier
            if _others_in_use(tier, server.name):
                changed = edits.remove_server(changed, server.name)
    return changed if changed is topology else edits.as_version(changed, topology.version + 1)


def is_replaceable(server: CacheServer) -> bool:
    """Return whether another server may take over an entry: its own is gone, or has left the ring."""
    registration = server.registration
    if not registration:
        return False
    return registration.gone_unix_ms > 0 or (registration.leaving and server.weight == 0)


def placed(topology: Topology, name: str) -> PlacedServer | None:
    """Return a cache server and its place; None when there is none of that name."""
    for region in topology.regions:
        for tier in region.tiers:
            for server in tier.servers:
                if server.name == name:
                    return PlacedServer(PlacedTier(region, tier), server)
    return None


def _joined(server: CacheServer, share: float) -> Registration:
    assert server.registration, "no other entry is kept"
    return msgspec.structs.replace(server.registration, share=share, leaving=False)


def _is_overdue(registration: Registration, now_unix_ms: int, remove_after_seconds: float) -> bool:
    return 0 < remove_after_seconds * 1000 <= now_unix_ms - registration.gone_unix_ms


def _others_in_use(tier: Tier, name: str) -> bool:
    return any(server.takes_shards for server in tier.servers if server.name != name)


def _check_tier(topology: Topology, wanted: Registrant) -> None:
    place = next(
        (each for each in topology.tiers if (each.region.name, each.tier.name) == (wanted.region, wanted.tier)), None
    )
    if place is None:
        known = ", ".join(each.path for each in topology.tiers)
        raise TopologyError(
            f"{wanted.server.name} cannot join {wanted.region}/{wanted.tier}, which does not exist; there are {known}"
        )
    if place.role != wanted.role:
        raise TopologyError(
            f"{wanted.server.name} is a {wanted.role} and cannot join {place.path}, a tier of {place.role}s"
        )
    weights = {server.name: server.weight for server in place.tier.servers}
    try:
        ring_points({**weights, wanted.server.name: wanted.share})
    except TopologyError as error:
        raise TopologyError(
            f"{wanted.server.name} cannot join {place.path} with a share of {wanted.share:g}: {error.message}"
        ) from error


def _why_taken(found: PlacedServer, wanted: Registrant) -> str:
    name, there = found.server.name, f"{found.place.path} at {found.server.grpc}"
    if not found.server.registration:
        return (
            f"an operator has added {name} to {there}, not at {wanted.server.grpc}: correct the address in one of both "
            f"places, or `tao topology remove-server {name}` first"
        )
    return (
        f"{name} is registered in {there}, not at {wanted.server.grpc}: give this server another name; or `tao drain "
        f"{name}` if that one is to go, or wait until a watcher has marked it down if it is gone already"
    )
