"""Waiting until a cache server that was marked is asked nothing any more, or one that was unmarked serves again.

What is looked at is what servers say of themselves on their admin ports: which document they go by, what they own, and
counters, which stand still when nobody asks. Whoever refuses a connection is gone and needs nothing; whoever is silent
may only be paused, or busy, and is waited for: nobody knows what it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tao.model.errors import OperatorError, TaoError, TopologyError
from tao.model.topology import Tier, Topology
from tao.routing.routes import Routes

PAUSE_SECONDS: Final = 0.1
QUIET_SECONDS: Final = 1.0
"""For which a server must have been asked nothing: callers that know the new topology stay away at once, and a request
under way is answered or given up within seconds."""
_HTTP_OK: Final = 200

Show = Callable[[str], None]
"""Told what is waited for."""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a server. ``marked``: it is passed over by whoever goes by the topology. ``waiting_for``: what had
    not come when the time was up."""

    server: str
    role: str
    safe_to_stop: bool
    marked: bool
    topology_version: int = 0
    waiting_for: list[str] = []
    notes: list[str] = []
    """What an operator should know besides."""

    def describe(self) -> str:
        """One line."""
        if self.waiting_for:
            return f"{self.server}: still waiting for: {'; '.join(self.waiting_for)}"
        if self.safe_to_stop:
            return f"{self.server}: safe to stop" + (f"; then: tao undrain {self.server}" if self.marked else "")
        return f"{self.server}: in use"


async def drain_cache_server(file: Path, name: str, timeout_seconds: float, show: Show) -> Drained:
    """Mark a leader or follower and wait until nobody needs it. Raises `TopologyError` when nobody could stand in,
    `OperatorError` when it cannot be seen who goes by the mark; nothing is marked then."""

    def check(before: Topology, name: str) -> None:
        _check_stand_in(before, name)
        check_seen(before)

    topology = await marked(file, name, down=True, check=check)
    place = Routes(topology).locate(name)
    watched = Quiet()

    async def missing() -> list[str]:
        stats = await figures(topology, wanted=name)
        return [*_unheard(stats, topology.version), *_unfinished(name, place.tier, topology, stats, watched)]

    left = await until_none(missing, timeout_seconds, show)
    return Drained(
        server=name,
        role=place.role,
        safe_to_stop=not left,
        marked=True,
        topology_version=topology.version,
        waiting_for=left,
    )


async def undrain_cache_server(file: Path, name: str, timeout_seconds: float, show: Show) -> Drained:
    """Wait until a server is ready, unmark it, and wait until it has what is its own."""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    before = await load(file)
    server = Routes(before).server(name)

    async def unready() -> list[str]:
        return await not_ready(name, server.admin)

    left = await until_none(unready, timeout_seconds, show)
    topology = before
    if not left:
        topology = await marked(file, name, down=False)

        async def missing() -> list[str]:
            return [*_unheard(await figures(topology), topology.version), *await unready()]

        left = await until_none(missing, deadline - asyncio.get_running_loop().time(), show)
    return Drained(
        server=name,
        role=Routes(topology).locate(name).role,
        safe_to_stop=False,
        marked=Routes(topology).server(name).down,
        topology_version=topology.version,
        waiting_for=left,
    )


async def load(file: Path) -> Topology:
    """The document as it is. Raises `TopologyError`."""
    from tao.topology.file_store import TopologyFile

    return await TopologyFile(file, on_error=_raise).load()


async def marked(
    file: Path, name: str, *, down: bool, check: Callable[[Topology, str], None] | None = None
) -> Topology:
    """The document after the mark was set, or taken away, by hand; unchanged when it was so already. Raises
    `TopologyError`."""
    from tao.model.errors import TopologyConflict
    from tao.topology import edits
    from tao.topology.file_store import TopologyFile

    store = TopologyFile(file, on_error=_raise)
    while True:
        before = await store.load()
        if check is not None:
            check(before, name)
        databases = {server.name for each in before.databases for server in each.servers.values()}
        edit = edits.mark_database_server if name in databases else edits.mark_server
        after = edit(before, name, down)
        if msgspec.structs.replace(after, version=before.version) == before:
            return before
        try:
            return await store.change(before.version, after)
        except TopologyConflict:
            continue  # a watcher was faster, with a mark of its own


async def until_none(missing: Callable[[], Any], timeout_seconds: float, show: Show) -> list[str]:
    """Look until nothing is missing; what still is when the time is up. `Any`: an awaitable of a list of texts."""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    shown = ""
    while True:
        left: list[str] = await missing()
        if not left or asyncio.get_running_loop().time() >= deadline:
            return left
        if left[0] != shown:
            shown = left[0]
            show(shown)
        await asyncio.sleep(PAUSE_SECONDS)


def check_seen(topology: Topology) -> None:
    """Raises `OperatorError` when a server has no admin address."""
    unseen = [name for name, (admin, _) in _looked_at(topology).items() if not admin]
    if unseen:
        they = "has no admin address" if len(unseen) == 1 else "have no admin addresses"
        raise OperatorError(
            f"{', '.join(unseen)} {they} in the topology: nobody can see whether all go by a mark; add them, or use "
            "tao topology mark-down and look yourself"
        )


async def figures(topology: Topology, *, wanted: str = "") -> dict[str, dict[str, Any]]:
    """``/stats`` of all cache servers and tailers by name: an empty one of whoever is silent, none of whoever is gone,
    and none of silent servers marked down, ``wanted`` apart: their machine may be lost, and all pass them over. `Any`:
    each role has its own."""
    from tao.devcluster.readiness import server_stats
    from tao.runtime.admin_client import NobodyListens

    async def one(name: str, admin: str, down: bool) -> dict[str, Any] | None:
        try:
            return await server_stats(admin)
        except NobodyListens:
            return None  # it hears of the document when it starts
        except TaoError:
            return None if down and name != wanted else {}

    looked_at = {name: place for name, place in _looked_at(topology).items() if place[0]}
    answers = await asyncio.gather(*(one(name, *place) for name, place in looked_at.items()))
    return {name: stats for name, stats in zip(looked_at, answers, strict=True) if stats is not None}


def _looked_at(topology: Topology) -> dict[str, tuple[str, bool]]:
    """Cache servers and tailers: the admin address, and whether it is marked down."""
    found: dict[str, tuple[str, bool]] = {}
    for region in topology.regions:
        for tier in (region.leaders, *region.followers):
            found.update({server.name: (server.admin, server.down) for server in tier.servers})
        found.update({tailer.name: (tailer.admin, False) for tailer in region.tailers})
    return found


async def not_ready(name: str, admin: str) -> list[str]:
    """Why a server is not ready, if it is not. Raises `OperatorError` for one that cannot be asked."""
    from tao.runtime.admin_client import admin_get

    if not admin:
        raise OperatorError(f"{name} has no admin address in the topology: nobody can see whether it is ready")
    try:
        status, body = await admin_get(admin, "/ready")
    except TaoError as error:
        return [f"{name} to answer ({error.message})"]
    return [] if status == _HTTP_OK else [f"{name} to be ready: {body.decode(errors='replace').strip()}"]


class Quiet:
    """Whether counters stand still, and for how long they have."""

    def __init__(self) -> None:
        self._count: object = None
        self._since = 0.0

    def lasts(self, count: object, now: float) -> bool:
        """``count`` was read now: has it been the same for `QUIET_SECONDS`?"""
        if count != self._count:
            self._count, self._since = count, now
        return now - self._since >= QUIET_SECONDS


def work_of(stats: Mapping[str, Any]) -> tuple[int, ...]:
    """What a cache server has been asked so far: reads by what became of them, and writes."""
    writes = stats["writes"]
    done = writes["forwarded"] if "forwarded" in writes else writes["committed"]
    return (stats["hits"], stats["misses"], stats["failures"], done, writes["failed"])


def _unheard(stats: Mapping[str, Mapping[str, Any]], version: int) -> list[str]:
    late = [name for name, each in stats.items() if each and each["topology_version"] < version]
    silent = [name for name, each in stats.items() if not each]
    return [*(f"{name} to answer" for name in silent), *(f"{name} to notice topology {version}" for name in late)]


def _unfinished(
    name: str, tier: str, topology: Topology, stats: Mapping[str, Mapping[str, Any]], watched: Quiet
) -> list[str]:
    own = stats.get(name)
    if not own:
        return []  # it is gone already; a silent one is waited for in any case
    found: list[str] = []
    if own["role"] == "leader":
        shards = own["owned_shards"] + own["hosted_shards"]
        if shards:
            found.append(f"{shards} shards to be handed over")
        found += [
            f"{other} to take its shards"
            for other in _others(topology, name)
            if stats.get(other) and not _has_all(topology, other, stats[other])
        ]
    if not watched.lasts(work_of(own), asyncio.get_running_loop().time()):
        found.append(f"{name} to be asked nothing any more (by clients of {tier} that follow the topology)")
    return found


def _has_all(topology: Topology, leader: str, stats: Mapping[str, Any]) -> bool:
    return bool(stats["owned_shards"] + stats["hosted_shards"] >= len(Routes(topology).shards_of(leader)))


def _others(topology: Topology, name: str) -> Sequence[str]:
    """Servers of the same tier that are not marked."""
    return [server.name for server in _tier_of(topology, name).servers if server.name != name and not server.down]


def _tier_of(topology: Topology, name: str) -> Tier:
    for region in topology.regions:
        for tier in (region.leaders, *region.followers):
            if any(server.name == name for server in tier.servers):
                return tier
    raise TopologyError(f"there is no server {name!r}")


def _check_stand_in(topology: Topology, name: str) -> None:
    """Raises `TopologyError` when nobody would be left to ask."""
    tier = _tier_of(topology, name)
    if _others(topology, name):
        return
    region = next(each for each in topology.regions if tier in (each.leaders, *each.followers))
    behind = [each for each in region.followers if each != tier and any(not server.down for server in each.servers)]
    if tier == region.leaders or not behind:
        raise TopologyError(
            f"{name} is the last server of {tier.name} in {region.name} that is not marked: nobody would stand in"
        )


def _raise(error: TopologyError) -> None:
    raise error
