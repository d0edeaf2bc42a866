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

SENTENCES: Final = {
    "fill_begun": "A read found nothing cached that it could use, and fetched it{at_least}.",
    "stored": "What {origin} answered was cached: reads are answered with this version from now on.",
    "below_floor": "What {origin} answered was rejected, since a newer version is known: it is fetched further up.",
    "not_kept": "What {origin} answered went to the reader and was not cached: the next read fetches it again.",
    "learnt": "An answer or a token named this version: no older one is cached or answered from now on.",
    "applied": "A change came{cause} and was applied to what was cached: reads see it from now on.",
    "ignored": "A change came{cause} that was in what is cached already: nothing had to be done.",
    "dropped": "A change came{cause} that did not fit what was cached, which was dropped: the next read fetches it.",
    "not_cached": "A change came{cause} while nothing was cached: it was noted, so that no older version is cached.",
    "epoch_bumped": "A change came{cause} with a higher version epoch: all that was cached of the shard was dropped.",
    "evicted": "It was evicted to make room for others: the next read fetches it.",
    "opened": "The server began to serve the shard, with nothing of it cached.",
    "closed": "The server stopped serving the shard, and dropped what it had cached of it.",
    "voided": "All that was cached of the shard was invalidated{cause}: reads fetch it again.",
    "types_voided": "All that was cached of some types of the shard was invalidated{cause}: reads fetch it again.",
    "epoch_raised": "The shard's version epoch became known or rose, as after a promotion: earlier ones are not used.",
}
"""A sentence for each event, by the name that the servers record: what happened, and what it means for reads."""

_ORIGINS: Final = {"leader": "the leader's cache", "database": "the database", "": "its source"}


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


def sentence_of(event: Event) -> str:
    """Return what happened, and what it means, as a sentence. An event of a newer release is shown by its name."""
    return SENTENCES.get(event.event, f"{event.event}{{cause}}").format(
        at_least=", accepting this version or a newer one" if event.version else "",
        origin=_ORIGINS.get(event.cause, event.cause),
        cause=f" ({event.cause})" if event.cause else "",
    )


def state_of(held: Holding, stored_version: int | None) -> str:
    """Return what it means that a server holds this version while the master database has ``stored_version``."""
    if held.error:
        return f"It could not be asked: {held.error}"
    if held.cached_version is None:
        return "It holds nothing: the next read fetches it."
    if stored_version is None:
        return "It could not be compared with the database."
    if held.stale:
        return "STALE: it is older than the database, and still was when asked again."
    if held.cached_version < stored_version:
        return "It had not heard of a write under way, and had when asked again."
    if held.cached_version > stored_version:
        return "It is newer than what the database answered just before: a write is under way."
    return "It is up to date."


def version_text(version: int | None) -> str:
    """Return a version as ``epoch.counter``: promotions of the shard's master, and changes of the key."""
    return "-" if not version else f"{epoch_of(version)}.{counter_of(version)}"
