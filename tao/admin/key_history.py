"""Collects the history of one key: the events that all servers recorded, and the versions that they and the database
have now."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tao.admin.connection import ask_each
from tao.cache.outcomes import Applied
from tao.model.errors import InvalidArgument, TaoError
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.topology import CacheServer
from tao.model.versions import counter_of, epoch_of
from tao.routing.routes import Routes
from tao.wire.convert import error_from_pb
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb

CALL_SECONDS: Final = 5.0

RECHECK_SECONDS: Final = 1.0
"""A server that looks stale is asked again after so long; messages between regions arrive in less."""

WORDS: Final = {
    "fill_begun": "fill started, for at least",
    "stored": "fill kept",
    "below_floor": "fill rejected, older than a version seen before",
    "not_kept": "fill answered, not kept",
    "learnt": "version seen in an answer",
    "applied": "message applied",
    "ignored": "message ignored, not newer than what is held",
    "dropped": "entry dropped for a message",
    "not_cached": "message noted, nothing was held",
    "epoch_bumped": "message invalidated the shard",
    "evicted": "evicted",
    "opened": "shard opened",
    "closed": "shard closed",
    "voided": "shard invalidated",
    "types_voided": "types of the shard invalidated",
    "epoch_raised": "version epoch raised",
}
"""The text for a person of each event, by the name that the servers record."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event at one server.

    ``version`` 0: the event has none. ``cause``: what brought it, may be empty. ``of_shard``: it concerns the whole
    shard of the key."""

    unix_ms: int
    server: str
    event: str
    version: int
    cause: str
    of_shard: bool


@dataclass(frozen=True, slots=True)
class Holding:
    """What one server holds of the key now.

    ``cached_version`` None: nothing. ``floor``: the newest version that it has seen. ``stale``: it held an older
    version than the database, and still did when it was asked again."""

    server: str
    role: str
    region: str
    cached_version: int | None = None
    floor: int = 0
    since_unix_ms: int = 0
    error: str = ""
    stale: bool = False


@dataclass(slots=True)
class KeyTimeline:
    """The history of one key over all servers.

    ``stored_version`` None: the database could not be asked, for the reason in ``stored_error``; 0: it has no such
    key."""

    stored_version: int | None = None
    stored_error: str = ""
    servers: list[Holding] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def stale(self) -> list[Holding]:
        """The servers that hold an older version than the database, and not only because it was just written."""
        return [held for held in self.servers if held.stale]

    @property
    def unreachable(self) -> list[Holding]:
        """The servers that could not be asked."""
        return [held for held in self.servers if held.error]


async def key_timeline(
    routes: Routes, links: Links, key: int, atype: int, *, recheck_seconds: float = RECHECK_SECONDS
) -> KeyTimeline:
    """Ask all servers, and the master database through its leader, about an object (``atype`` 0) or a list.

    A server that holds an older version than the database is asked again after ``recheck_seconds``: the key may have
    been written in between. Raises `InvalidArgument` for an id of no shard of this cluster."""
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
    history = KeyTimeline()
    servers = routes.topology.cache_servers
    answers = await ask_each([server for _, server in servers], ask)
    # After the servers: the leader caches what it reads for this, and must be inspected as it was before.
    try:
        history.stored_version = await _stored_version(routes, links, key, atype)
    except TaoError as error:
        history.stored_error = error.message
    for (place, server), answer in zip(servers, answers, strict=True):
        role, region = place.role, place.region.name
        if isinstance(answer, TaoError):
            history.servers.append(Holding(server.name, role, region, error=answer.message))
            continue
        (story,) = answer.stories
        held = [version_of(entry.value) for entry in answer.entries if entry.value]
        if not held and not story.events:
            continue  # it has never held the key
        floor = max(entry.floor for entry in answer.entries)
        history.servers.append(
            Holding(server.name, role, region, max(held) if held else None, floor, story.since_unix_ms)
        )
        history.events += [
            Event(event.unix_ms, server.name, event.event, event.version, event.cause, event.of_shard)
            for event in story.events
        ]
    await _mark_stale(history, [server for _, server in servers], ask, _owner(routes, key), recheck_seconds)
    history.events.sort(key=lambda event: event.unix_ms)  # stable: each server's own order stays
    return history


async def _mark_stale(
    history: KeyTimeline,
    servers: Sequence[CacheServer],
    ask: Callable[[CacheServer], Awaitable[pb.Inspection]],
    owner: CacheServer,
    recheck_seconds: float,
) -> None:
    """Ask the servers again that hold an older version than the database, and mark those that are stale."""
    stored = history.stored_version or 0
    behind = {
        held.server for held in history.servers if held.cached_version is not None and held.cached_version < stored
    }
    if not behind:
        return
    await asyncio.sleep(recheck_seconds)
    suspects = [server for server in servers if server.name in behind]
    stale: set[str] = set()
    for server, answer in zip(suspects, await ask_each(suspects, ask), strict=True):
        if isinstance(answer, TaoError):
            stale.add(server.name)
            continue
        held_now = [version_of(entry.value) for entry in answer.entries if entry.value]
        by = [event.event for event in answer.stories[0].events if event.version >= stored and not event.of_shard]
        # The owner caches what it read for this question. A version that it has from there, and from no message, had
        # not been delivered to it.
        is_fresh_by_our_read = server.name == owner.name and bool(by) and by[0] not in set(Applied)
        if is_fresh_by_our_read or (held_now and max(held_now) < stored):
            stale.add(server.name)
    history.servers = [dataclasses.replace(held, stale=held.server in stale) for held in history.servers]


def _owner(routes: Routes, key: int) -> CacheServer:
    shard = key >> SHARD_SHIFT
    return routes.leaders(routes.master_region(shard)).home(shard)


async def _stored_version(routes: Routes, links: Links, key: int, atype: int) -> int:
    """Return the version in the database, by a critical read through the shard's owner. Raises `TaoError`."""
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
    """Return a version as ``epoch.counter``: promotions of the shard's master, and changes of the key."""
    return "-" if not version else f"{epoch_of(version)}.{counter_of(version)}"
