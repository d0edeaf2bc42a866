"""The story of one key, merged from all servers' event logs, beside what each holds and what the database has (§13)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tao.cache.outcomes import Applied
from tao.cli.reaching import cache_servers, each
from tao.model.errors import InvalidArgument, TaoError
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer
from tao.model.versions import counter_of, epoch_of
from tao.peers.links import Links
from tao.routing.routes import Routes
from tao.wire.convert import error_from_pb
from tao.wire.v1 import session_pb2 as pb

CALL_SECONDS: Final = 5.0

RECHECK_SECONDS: Final = 1.0
"""Until a server that looks stale is asked again: what is in flight between regions arrives in less."""

WORDS: Final = {
    "fill_begun": "fill begun, for at least",
    "stored": "fill kept",
    "below_floor": "fill refused, older than what is known",
    "not_kept": "fill answered, not kept",
    "learnt": "version learnt from an answer",
    "applied": "message applied",
    "ignored": "message ignored, not newer than what is held",
    "dropped": "entry dropped for a message",
    "not_cached": "message noted, nothing was held",
    "epoch_bumped": "message voided the shard",
    "evicted": "evicted",
    "opened": "shard opened",
    "closed": "shard given up",
    "voided": "shard voided",
    "types_voided": "types of the shard voided",
    "epoch_raised": "version epoch raised",
}
"""For people; what happened as `tao.cache.outcomes` and `tao.cache.witness` name it."""


@dataclass(frozen=True, slots=True)
class Event:
    """``version`` 0: none. ``cause``: who or what brought it; may be empty."""

    unix_ms: int
    server: str
    event: str
    version: int
    cause: str
    of_shard: bool


@dataclass(frozen=True, slots=True)
class Holding:
    """What a server has of the key now. ``cached_version`` None: nothing. ``stale``: less than the database had,
    and so it was when it was asked once more."""

    server: str
    role: str
    region: str
    cached_version: int | None = None
    floor: int = 0
    since_unix_ms: int = 0
    error: str = ""
    stale: bool = False


@dataclass(slots=True)
class Tale:
    """The whole story. ``stored_version`` None: the database could not be asked, ``stored_error`` says why; 0: it has
    no such key."""

    stored_version: int | None = None
    stored_error: str = ""
    servers: list[Holding] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def stale(self) -> list[Holding]:
        """Servers that hold less than the database, and not only because it was just written."""
        return [held for held in self.servers if held.stale]

    @property
    def unreachable(self) -> list[Holding]:
        """Servers whose part is missing."""
        return [held for held in self.servers if held.error]


async def tell(routes: Routes, links: Links, key: int, atype: int, *, recheck_seconds: float = RECHECK_SECONDS) -> Tale:
    """Ask all servers for an object (``atype`` 0) or a list, and the master database, by its leader. Who holds less is
    asked again after ``recheck_seconds``: the key may have been written between the two."""
    asked = pb.Inspect(stories=True)
    if atype:
        asked.list_id1s.append(key)
        asked.list_atypes.append(atype)
    else:
        asked.obj_ids.append(key)

    async def ask(server: CacheServer) -> pb.Inspection:
        answer = await links.to(server).ask(pb.Request(inspect=asked), CALL_SECONDS)
        return answer.inspection

    if key >> SHARD_SHIFT >= routes.shards:
        raise InvalidArgument(f"id {key} is of shard {key >> SHARD_SHIFT}; this cluster has {routes.shards} shards")
    tale = Tale()
    servers = cache_servers(routes.topology)
    answers = await each([server for _, server in servers], ask)
    # Afterwards: the leader keeps what it reads for this, and must be seen as it was.
    try:
        tale.stored_version = await _stored_version(routes, links, key, atype)
    except TaoError as error:
        tale.stored_error = error.message
    for (role, server), answer in zip(servers, answers, strict=True):
        region = routes.locate(server.name).region
        if isinstance(answer, TaoError):
            tale.servers.append(Holding(server.name, role, region, error=answer.message))
            continue
        (story,) = answer.stories
        held = [version_of(entry.value) for entry in answer.entries if entry.value]
        if not held and not story.events:
            continue  # it never had to do with the key
        floor = max(entry.floor for entry in answer.entries)
        tale.servers.append(Holding(server.name, role, region, max(held) if held else None, floor, story.since_unix_ms))
        tale.events += [
            Event(told.unix_ms, server.name, told.event, told.version, told.cause, told.of_shard)
            for told in story.events
        ]
    await _look_again(tale, [server for _, server in servers], ask, _owner(routes, key), recheck_seconds)
    tale.events.sort(key=lambda event: event.unix_ms)  # stable: each server's own order stays
    return tale


async def _look_again(
    tale: Tale,
    servers: Sequence[CacheServer],
    ask: Callable[[CacheServer], Awaitable[pb.Inspection]],
    owner: CacheServer,
    recheck_seconds: float,
) -> None:
    """Find out which of those that hold less than was read from the database are stale."""
    stored = tale.stored_version or 0
    behind = {held.server for held in tale.servers if held.cached_version is not None and held.cached_version < stored}
    if not behind:
        return
    await asyncio.sleep(recheck_seconds)
    suspects = [server for server in servers if server.name in behind]
    stale: set[str] = set()
    for server, answer in zip(suspects, await each(suspects, ask), strict=True):
        if isinstance(answer, TaoError):
            stale.add(server.name)
            continue
        held_now = [version_of(entry.value) for entry in answer.entries if entry.value]
        by = [event.event for event in answer.stories[0].events if event.version >= stored and not event.of_shard]
        # The owner learns from what it has read for this: what it has by that, and by no message, nobody had told it.
        is_mended_by_us = server.name == owner.name and bool(by) and by[0] not in set(Applied)
        if is_mended_by_us or (held_now and max(held_now) < stored):
            stale.add(server.name)
    tale.servers = [dataclasses.replace(held, stale=held.server in stale) for held in tale.servers]


def _owner(routes: Routes, key: int) -> CacheServer:
    shard = key >> SHARD_SHIFT
    return routes.leaders(routes.master_region(shard)).home(shard)


async def _stored_version(routes: Routes, links: Links, key: int, atype: int) -> int:
    """By a critical read of the shard's owner. Raises `TaoError`."""
    read = pb.ReadBatch(critical=True)
    if atype:
        read.count_id1s.append(key)
        read.count_atypes.append(atype)
    else:
        read.obj_ids.append(key)
    request = pb.Request(topology_version=routes.version, read=read)
    answer = (await links.to(_owner(routes, key)).ask(request, CALL_SECONDS)).read
    if answer.errors:
        raise error_from_pb(answer.errors[0])
    return version_of(answer.values[0])


def version_text(version: int | None) -> str:
    """``epoch.counter``: the promotions of the shard's master, and how often the key was changed."""
    return "-" if not version else f"{epoch_of(version)}.{counter_of(version)}"
