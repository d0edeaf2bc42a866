"""Are caches as they should be? Samples what this leader tells, and looks into its region afterwards (DESIGN.md §15).

In the manner of Meta's Polaris: of every message the key is looked up in every cache of the region that serves it, its
leader's and its followers', a second later. What is older than the message said, or is of the database's version with
other content, is looked at again ten seconds and a minute later; what is stale then is an inconsistency. So what is in
flight is told from what is wrong, and both are counted. Bulk invalidations name no key and are left to `tao verify`.

Its cost is bounded by messages a second, each a few words with followers and a read of the master database. Of a second
in which more are told as many are followed up, each message as likely as any other: the first ones would be those of
whoever writes in bursts. Which share that is stands beside what is found.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from tao.leader.reservoir import Reservoir
from tao.model.changes import (
    ListChange,
    ListInvalidation,
    Message,
    ObjectChange,
    ObjectInvalidation,
    ShardInvalidation,
    ShardMessages,
)
from tao.model.edge_block import header
from tao.model.errors import SettingsError, TaoError
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock, ReadStore
from tao.model.queries import CountQuery, ObjectQuery, Query, RangeQuery
from tao.model.topology import CacheServer
from tao.model.versions import NEVER_WRITTEN
from tao.observability.consistency import Consistency
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.peers.links import Links
from tao.routing.routes import Routes
from tao.serving.comparison import Verdict, compare_list, compare_value
from tao.wire.v1 import session_pb2 as pb

_WINDOW_SECONDS: Final = 1.0  # of which the messages share the bound
_COMPARED_EDGES: Final = 512  # of a longer list, version and count: to read it whole holds the loop for milliseconds


@dataclass(frozen=True, slots=True)
class CheckerSettings:
    """How caches are watched for inconsistencies."""

    max_samples_per_second: int = 100
    """Messages followed up; of more, so many at random. Each costs a look at every server that has its shard and a read
    by primary key at the master database. 0: none, the checker is off."""

    first_look_seconds: float = 1.0
    """After the message. Delivery takes milliseconds: what is stale then is worth a second look."""

    second_look_seconds: float = 10.0
    """After the message: longer than a follower's reconnection takes."""

    last_look_seconds: float = 60.0
    """After the message: nobody is in flight for so long. What is stale now is an inconsistency."""

    timeout_seconds: float = 5.0
    """For one server's answer, or the database's. Who does not answer is not judged."""

    tick_seconds: float = 0.25
    """Between two looks at what is due: a look may come so much later."""

    def __post_init__(self) -> None:
        if not 0 < self.first_look_seconds < self.second_look_seconds < self.last_look_seconds:
            raise SettingsError("first_look_seconds, second_look_seconds and last_look_seconds must grow from above 0")
        if self.max_samples_per_second < 0:
            raise SettingsError("max_samples_per_second must be at least 0")

    @property
    def looks_seconds(self) -> tuple[float, float, float]:
        """After the message."""
        return self.first_look_seconds, self.second_look_seconds, self.last_look_seconds

    @property
    def max_waiting(self) -> int:
        """Samples that wait for one of the looks: all of a time in which every answer was waited for in vain."""
        seconds = self.last_look_seconds + 2 * self.timeout_seconds + self.tick_seconds + _WINDOW_SECONDS
        return ceil(self.max_samples_per_second * seconds)


@dataclass(slots=True)
class _Sample:
    """``suspects``: servers that were stale at the last look, or were before and did not answer; None before any."""

    key: int
    atype: int
    version: int
    began: float
    suspects: set[str] | None = None


@dataclass(slots=True)
class _Held:
    """What a server holds of a sampled key."""

    sample: _Sample
    entry: pb.CachedEntry
    stored: bytes = b""


@dataclass(slots=True)
class CheckerFigures:
    """Since the start. ``told``: messages, ``followed``: those of them that were looked at, or name nothing to look at;
    ``samples``: keys, the messages of a second being one for each; ``looks``: servers asked for a sampled key the first
    time; ``stale``: that were, by look; ``unresolved``: that were, and were not to be asked at the last."""

    told: int = 0
    followed: int = 0
    samples: int = 0
    looks: int = 0
    unanswered: int = 0
    unresolved: int = 0
    stale: list[int] = field(default_factory=lambda: [0, 0, 0])
    newest_inconsistency: float | None = None
    """When it was found, on the checker's clock."""

    @property
    def followed_ratio(self) -> float:
        """Of the messages told; 1 while there are none."""
        return self.followed / self.told if self.told else 1.0

    @property
    def consistency(self) -> Consistency:
        """Of all first looks whose end is known, those that were still stale at the last."""
        return Consistency(self.looks - self.unresolved, self.stale[-1])


class ConsistencyChecker:
    """One leader's. `note` is told of every message, `run` does the rest."""

    def __init__(
        self,
        store: ReadStore,
        routes: Callable[[], Routes],
        region: str,
        links: Links,
        clock: Clock,
        settings: CheckerSettings,
        log: Logger,
    ) -> None:
        """``region``: whose followers are looked at."""
        self._store: Final = store
        self._routes: Final = routes
        self._region: Final = region
        self._links: Final = links
        self._clock: Final = clock
        self._settings: Final = settings
        self._log: Final = log
        self._window: Final[Reservoir[tuple[Message, float]]] = Reservoir(settings.max_samples_per_second)
        self._window_told = 0
        self._window_ends = 0.0
        self._waiting: Final = tuple(deque[_Sample]() for _ in settings.looks_seconds)
        self.figures: Final = CheckerFigures()

    def note(self, told: ShardMessages) -> None:
        """These messages are being told. Time: half a microsecond, but for the sampled ones."""
        if not self._settings.max_samples_per_second:
            return
        now = self._clock.monotonic()
        if now >= self._window_ends:
            self._end_window(now)
        self._window_told += len(told.messages)
        for message in self._window.chosen(told.messages):
            self._window.put((message, now))

    def _end_window(self, now: float) -> None:
        """What was sampled waits for its looks, the messages of a key together: what is as new as the newest of them is
        as new as all."""
        samples: dict[tuple[int, int], _Sample] = {}
        for message, told_at in self._window.items:
            key, atype, version = _subject(message)
            if version != NEVER_WRITTEN:
                sample = samples.setdefault((key, atype), _Sample(key, atype, version, told_at))
                sample.version, sample.began = max(version, sample.version), max(told_at, sample.began)
        self.figures.told += self._window_told
        if len(self._waiting[0]) + len(samples) <= self._settings.max_waiting:
            self.figures.followed += len(self._window.items)
            self.figures.samples += len(samples)
            self._waiting[0].extend(sorted(samples.values(), key=lambda sample: sample.began))
        self._window.empty()
        self._window_told = 0
        self._window_ends = now + _WINDOW_SECONDS

    async def run(self) -> None:
        """Look when looks are due, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.tick_seconds)
            for look in range(len(self._waiting)):
                await self.look(look)

    async def look(self, look: int) -> None:
        """Take the looks of that number (0 is the first) that are due."""
        waiting, now = self._waiting[look], self._clock.monotonic()
        if now >= self._window_ends:
            self._end_window(now)
        due: list[_Sample] = []
        while waiting and waiting[0].began + self._settings.looks_seconds[look] <= now:
            due.append(waiting.popleft())
        asked: dict[str, tuple[CacheServer, list[_Sample]]] = {}
        routes = self._routes()
        tiers = (*routes.follower_tiers(self._region), routes.leaders(self._region))
        for sample in due:
            suspects, sample.suspects = sample.suspects, set()
            for tier in tiers:
                for server in tier.hosts(sample.key >> SHARD_SHIFT):
                    if suspects is not None and server.name not in suspects:
                        continue
                    if not server.down:
                        asked.setdefault(server.name, (server, []))[1].append(sample)
                    elif suspects is not None:
                        self._leave_unanswered(server, [sample], look)
        # Side by side: a server that hangs must not delay the looks at others.
        await asyncio.gather(*(self._look_at(server, samples, look) for server, samples in asked.values()))
        if look + 1 < len(self._waiting):
            suspect = [sample for sample in due if sample.suspects]
            room = self._settings.max_waiting - len(self._waiting[look + 1])
            self._waiting[look + 1].extend(suspect[:room])
            self.figures.unresolved += sum(len(sample.suspects or ()) for sample in suspect[room:])

    async def _look_at(self, server: CacheServer, samples: Sequence[_Sample], look: int) -> None:
        try:
            held = await self._held_at(server, samples)
        except TaoError:
            self._leave_unanswered(server, samples, look)
            return
        if look == 0:
            self.figures.looks += len(samples)
        if not held:
            return
        by_version_alone = False
        try:
            read = await self._store.read(
                [_query_for(each.entry) for each in held],
                critical=True,
                timeout_seconds=self._settings.timeout_seconds,
            )
        except TaoError:
            by_version_alone = True
        else:
            for each, stored in zip(held, read.values, strict=True):
                each.stored = stored
        stale = {id(each.sample): each for each in held if _is_stale(each, by_version_alone=by_version_alone)}
        self.figures.stale[look] += len(stale)
        for each in stale.values():
            if each.sample.suspects is not None:
                each.sample.suspects.add(server.name)
            if look == len(self._waiting) - 1:
                self.figures.newest_inconsistency = self._clock.monotonic()
                self._log.error(
                    "inconsistency_found",
                    server=server.name,
                    id=each.sample.key,
                    atype=each.sample.atype,
                    cached_version=version_of(each.entry.value),
                    told_version=each.sample.version,
                )

    def _leave_unanswered(self, server: CacheServer, samples: Sequence[_Sample], look: int) -> None:
        """Who was found stale and does not answer now stays suspect, and is not taken for mended."""
        self.figures.unanswered += len(samples)
        if look:
            for sample in samples:
                if sample.suspects is not None:
                    sample.suspects.add(server.name)
        if look == len(self._waiting) - 1:
            self.figures.unresolved += len(samples)

    async def _held_at(self, server: CacheServer, samples: Sequence[_Sample]) -> list[_Held]:
        """What the server has of these keys; what it has not cannot be stale."""
        lists = [sample for sample in samples if sample.atype]
        asked = pb.Inspect(
            obj_ids=[sample.key for sample in samples if not sample.atype],
            list_id1s=[sample.key for sample in lists],
            list_atypes=[sample.atype for sample in lists],
        )
        answer = await self._links.to(server).ask(pb.Request(inspect=asked), self._settings.timeout_seconds)
        entries: dict[tuple[int, int], pb.CachedEntry] = {}
        for entry in answer.inspection.entries:
            # Of a list, its count and its edges are of one version; the edges say more, and come first.
            if entry.value and not (entry.kind == "list" and header(entry.value)[2] > _COMPARED_EDGES):
                entries.setdefault((entry.id, entry.atype), entry)
        return [
            _Held(sample, entries[sample.key, sample.atype])
            for sample in samples
            if (sample.key, sample.atype) in entries
        ]

    def register(self, metrics: Metrics) -> None:
        """Have its figures collected."""
        figures = self.figures
        metrics.gauge_family(
            "consistency_total",
            "Messages told, those followed up, their keys, looks at servers for them, unanswered ones, inconsistencies "
            "found, and those that were stale and could not be asked at the last look.",
            "event",
            lambda: {
                "told": figures.told,
                "followed": figures.followed,
                "sample": figures.samples,
                "look": figures.looks,
                "unanswered": figures.unanswered,
                "inconsistency": figures.stale[-1],
                "unresolved": figures.unresolved,
            },
        )
        metrics.gauge_family(
            "stale_looks_total",
            "Looks that found an entry older than it had to be, by seconds after the message.",
            "after_seconds",
            lambda: {
                f"{seconds:g}": stale
                for seconds, stale in zip(self._settings.looks_seconds, figures.stale, strict=True)
            },
        )
        metrics.gauge(
            "inconsistency_ratio",
            "Part of the looks that found an inconsistency.",
            lambda: figures.stale[-1] / max(1, figures.consistency.looks),
        )
        metrics.gauge(
            "followed_messages_ratio",
            "Part of the messages told that was followed up: below 1, more were told than may be a second.",
            lambda: figures.followed_ratio,
        )

    def summary(self) -> dict[str, object]:
        """For `/stats`."""
        figures = self.figures
        newest = figures.newest_inconsistency
        return {
            "told": figures.told,
            "followed_ratio": round(figures.followed_ratio, 4),
            "samples": figures.samples,
            "looks": figures.looks,
            "unanswered": figures.unanswered,
            "stale_after_seconds": {
                f"{seconds:g}": stale
                for seconds, stale in zip(self._settings.looks_seconds, figures.stale, strict=True)
            },
            "inconsistencies": figures.stale[-1],
            "unresolved": figures.unresolved,
            "seconds_since_inconsistency": None if newest is None else round(self._clock.monotonic() - newest, 1),
            "nines": round(figures.consistency.nines, 2),
        }


def _subject(message: Message) -> tuple[int, int, int]:
    """Id, type (0: the object) and version; no version for what cannot be followed up: a bulk invalidation, or a change
    of someone else's, whose version is told of in its turn."""
    match message:
        case ObjectChange():
            return message.id, 0, message.after
        case ObjectInvalidation():
            return message.id, 0, message.version
        case ListChange():
            return message.id1, message.atype, message.after
        case ListInvalidation():
            return message.id1, message.atype, message.version
        case ShardInvalidation():
            return 0, 0, NEVER_WRITTEN


def _query_for(entry: pb.CachedEntry) -> Query:
    match entry.kind:
        case "object":
            return ObjectQuery(entry.id)
        case "count":
            return CountQuery(entry.id, entry.atype)
        case _:
            return RangeQuery(entry.id, entry.atype, 0, header(entry.value)[2] + 1)


def _is_stale(held: _Held, *, by_version_alone: bool) -> bool:
    """Older than the message, or of the stored version with other content. What equals the database is right, even when
    the message told of more: a write that was lost with its master."""
    behind = version_of(held.entry.value) < held.sample.version
    if by_version_alone:
        return behind
    compare = compare_list if held.entry.kind == "list" else compare_value
    verdict = compare(held.entry.value, held.stored)
    return verdict is Verdict.DIFFERENT or (behind and verdict is not Verdict.EQUAL)
