"""Check the caches of the region: sample the messages that this leader publishes, and inspect the caches afterwards.

The method is that of Meta's Polaris. A second after a message, its key is looked up in every cache of the region that
serves it, the leader's and the followers'. An entry that is older than the message, or has the database's version with
other content, is inspected again ten seconds and a minute after the message. An entry that is stale then is an
inconsistency. So delays are distinguished from errors, and both are counted. Bulk invalidations name no key and are
left to `tao check`.

The cost is bounded by messages per second; each takes a short exchange with each follower and a read of the master
database. If more messages are published in a second, each is sampled with equal probability: taking the first ones
would sample the writers of bursts. The share that was sampled is reported beside the result."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log, log1p
from typing import Final, Generic, NamedTuple, TypeVar

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
from tao.observability.consistency import MeasuredConsistency
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.routing.routes import Routes
from tao.serving.inspection import Verdict, compare_list, compare_value
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb

Item = TypeVar("Item")
Offered = TypeVar("Offered")


class Reservoir(Generic[Item]):
    """A uniform random sample of bounded size of a stream of unknown length, with Li's algorithm L.

    See "Reservoir-sampling algorithms of time complexity O(n(1 + log(N/n)))", 1994. Once the sample is full, the
    algorithm draws how many items to skip before the next replacement, so most items cost nothing. ``items`` is the
    sample of what was offered since the reservoir was made or emptied."""

    __slots__ = ("_passed_over", "_size", "_threshold", "items")

    def __init__(self, size: int) -> None:
        """``size``: the size of the sample, at least 1."""
        self._size: Final = size
        self.items: list[Item] = []
        self.empty()

    def empty(self) -> None:
        """Start with another stream."""
        self.items.clear()
        self._passed_over = 0
        self._threshold = 1.0

    def sample(self, offered: Sequence[Offered]) -> Iterator[Offered]:
        """Yield the next items of the stream that enter the sample. The caller must `put` each of them, in any form."""
        at = self._passed_over
        while at < len(offered):
            yield offered[at]
            at += 1
            if len(self.items) == self._size:
                self._threshold *= exp(log(_chance()) / self._size)
                at += int(log(_chance()) / log1p(-self._threshold))
        self._passed_over = at - len(offered)

    def put(self, item: Item) -> None:
        """Add an item, replacing a random one when the sample is full."""
        if len(self.items) < self._size:
            self.items.append(item)
        else:
            self.items[random.randrange(self._size)] = item


def _chance() -> float:
    """Return a random number above 0 and below 1."""
    return random.random() or 0.5


_WINDOW_SECONDS: Final = 1.0
"""Length of the window whose messages share the bound on samples."""
_COMPARED_EDGES: Final = 512
"""Of a longer list only version and count are compared: reading it as a whole blocks the loop for milliseconds."""


@dataclass(frozen=True, slots=True)
class CheckerSettings:
    """How caches are checked for inconsistencies."""

    max_samples_per_second: int = 100
    """Messages checked per second, a random sample if there are more. Each costs an inspection of every server that
    has its shard, and one read by primary key at the master database. 0 switches the checker off."""

    first_look_seconds: float = 1.0
    """Time after the message. Delivery takes milliseconds, so an entry that is stale then is worth a second look."""

    second_look_seconds: float = 10.0
    """Time after the message: longer than a follower's reconnection takes."""

    last_look_seconds: float = 60.0
    """Time after the message: longer than any delivery takes. An entry that is stale then is an inconsistency."""

    timeout_seconds: float = 5.0
    """Time limit for the answer of a server or of the database. A server that does not answer is not judged."""

    tick_seconds: float = 0.5
    """Interval between two checks for due looks. A look may be late by this much. Each costs an exchange with every
    server, and a read, as soon as anything is due."""

    def __post_init__(self) -> None:
        if not 0 < self.first_look_seconds < self.second_look_seconds < self.last_look_seconds:
            raise SettingsError(
                "first_look_seconds, second_look_seconds and last_look_seconds must be above 0 and ascend"
            )
        if self.max_samples_per_second < 0:
            raise SettingsError("max_samples_per_second must be at least 0")

    @property
    def looks_seconds(self) -> tuple[float, float, float]:
        """Return the times of the looks after the message."""
        return self.first_look_seconds, self.second_look_seconds, self.last_look_seconds

    @property
    def max_waiting(self) -> int:
        """Return the bound on samples that wait for one look: all samples of a period in which every answer timed
        out."""
        seconds = self.last_look_seconds + 2 * self.timeout_seconds + self.tick_seconds + _WINDOW_SECONDS
        return ceil(self.max_samples_per_second * seconds)


class _Subject(NamedTuple):
    """The key that a message changes, and its version after the change. ``atype`` is 0 for an object."""

    key: int
    atype: int
    version: int


@dataclass(slots=True)
class _Sample:
    """A sampled key. ``suspects``: servers that were stale at the last look, or were before and did not answer; None
    before the first look."""

    key: int
    atype: int
    version: int
    began: float
    suspects: set[str] | None = None


@dataclass(slots=True)
class _Inspected:
    """A server's cached entry of a sampled key, and the stored value."""

    sample: _Sample
    entry: pb.CachedEntry
    stored: bytes = b""


@dataclass(slots=True)
class CheckerCounts:
    """Counts since the start.

    ``published``: messages published. ``followed``: messages that were checked, or name nothing to check. ``samples``:
    keys; the messages of one second for a key count as one. ``looks``: first looks at a server for a sampled key.
    ``unanswered``: looks that a server did not answer. ``stale``: stale entries, by look. ``unresolved``: stale
    entries that could not be inspected at the last look."""

    published: int = 0
    followed: int = 0
    samples: int = 0
    looks: int = 0
    unanswered: int = 0
    unresolved: int = 0
    stale: list[int] = field(default_factory=lambda: [0, 0, 0])
    newest_inconsistency: float | None = None
    """When the last inconsistency was found, on the checker's clock."""

    @property
    def followed_ratio(self) -> float:
        """Return the share of messages that were checked; 1 while there are none."""
        return self.followed / self.published if self.published else 1.0

    @property
    def consistency(self) -> MeasuredConsistency:
        """Return how many of the first looks with a known result ended as inconsistencies."""
        return MeasuredConsistency(self.looks - self.unresolved, self.stale[-1])


class ConsistencyChecker:
    """The checker of one leader. `note` samples every published message, `run` does the rest."""

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
        """``region``: the region whose followers are checked."""
        self._store: Final = store
        self._routes: Final = routes
        self._region: Final = region
        self._links: Final = links
        self._clock: Final = clock
        self._settings: Final = settings
        self._log: Final = log
        self._window: Final[Reservoir[tuple[Message, float]]] = Reservoir(settings.max_samples_per_second)
        self._window_published = 0
        self._window_ends = 0.0
        self._waiting: Final = tuple(deque[_Sample]() for _ in settings.looks_seconds)
        self.counts: Final = CheckerCounts()

    def note(self, published: ShardMessages) -> None:
        """Sample messages that are being published. Takes half a microsecond for messages that are not sampled."""
        if not self._settings.max_samples_per_second:
            return
        now = self._clock.monotonic()
        if now >= self._window_ends:
            self._end_window(now)
        self._window_published += len(published.messages)
        for message in self._window.sample(published.messages):
            self._window.put((message, now))

    def _end_window(self, now: float) -> None:
        """Queue the samples of the window for their looks, the messages of a key as one sample.

        An entry as new as the newest message of the key is as new as all."""
        samples: dict[tuple[int, int], _Sample] = {}
        for message, published_at in self._window.items:
            key, atype, version = _subject(message)
            if version != NEVER_WRITTEN:
                sample = samples.setdefault((key, atype), _Sample(key, atype, version, published_at))
                sample.version, sample.began = max(version, sample.version), max(published_at, sample.began)
        self.counts.published += self._window_published
        if len(self._waiting[0]) + len(samples) <= self._settings.max_waiting:
            self.counts.followed += len(self._window.items)
            self.counts.samples += len(samples)
            self._waiting[0].extend(sorted(samples.values(), key=lambda sample: sample.began))
        self._window.empty()
        self._window_published = 0
        self._window_ends = now + _WINDOW_SECONDS

    async def run(self) -> None:
        """Do the looks that are due, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.tick_seconds)
            for look in range(len(self._waiting)):
                await self.look(look)

    async def look(self, look: int) -> None:
        """Do the due looks of this number (0 is the first)."""
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
                        self._count_unanswered(server, [sample], look)
        # Servers are inspected concurrently: one that hangs must not delay the looks at others.
        inspections = await asyncio.gather(
            *(self._inspect(server, samples, look) for server, samples in asked.values())
        )
        found = [(server, each) for (server, _), some in zip(asked.values(), inspections, strict=True) for each in some]
        if found:
            self._judge(found, look, by_version_alone=not await self._read_stored([each for _, each in found]))
        if look + 1 < len(self._waiting):
            suspect = [sample for sample in due if sample.suspects]
            room = self._settings.max_waiting - len(self._waiting[look + 1])
            self._waiting[look + 1].extend(suspect[:room])
            self.counts.unresolved += sum(len(sample.suspects or ()) for sample in suspect[room:])

    async def _read_stored(self, inspected: Sequence[_Inspected]) -> bool:
        """Read the stored values, once for all servers that hold a key. Returns whether they could be read."""
        queries = [_query_for(each.entry) for each in inspected]
        different = list(dict.fromkeys(queries))
        try:
            read = await self._store.read(different, critical=True, timeout_seconds=self._settings.timeout_seconds)
        except TaoError:
            return False
        stored = dict(zip(different, read.values, strict=True))
        for each, query in zip(inspected, queries, strict=True):
            each.stored = stored[query]
        return True

    def _judge(self, found: Sequence[tuple[CacheServer, _Inspected]], look: int, *, by_version_alone: bool) -> None:
        for server, each in found:
            if not _is_stale(each, by_version_alone=by_version_alone):
                continue
            self.counts.stale[look] += 1
            if each.sample.suspects is not None:
                each.sample.suspects.add(server.name)
            if look == len(self._waiting) - 1:
                self.counts.newest_inconsistency = self._clock.monotonic()
                self._log.error(
                    "inconsistency_found",
                    server=server.name,
                    id=each.sample.key,
                    atype=each.sample.atype,
                    cached_version=version_of(each.entry.value),
                    message_version=each.sample.version,
                )

    def _count_unanswered(self, server: CacheServer, samples: Sequence[_Sample], look: int) -> None:
        """Count servers that did not answer. A server that was stale stays suspect and does not count as repaired."""
        self.counts.unanswered += len(samples)
        if look:
            for sample in samples:
                if sample.suspects is not None:
                    sample.suspects.add(server.name)
        if look == len(self._waiting) - 1:
            self.counts.unresolved += len(samples)

    async def _inspect(self, server: CacheServer, samples: Sequence[_Sample], look: int) -> list[_Inspected]:
        """Return the server's entries of these keys. A key that is not cached cannot be stale."""
        lists = [sample for sample in samples if sample.atype]
        asked = pb.Inspect(
            obj_ids=[sample.key for sample in samples if not sample.atype],
            list_id1s=[sample.key for sample in lists],
            list_atypes=[sample.atype for sample in lists],
        )
        try:
            answer = await self._links.to(server).ask(pb.Request(inspect=asked), self._settings.timeout_seconds)
        except TaoError:
            self._count_unanswered(server, samples, look)
            return []
        if look == 0:
            self.counts.looks += len(samples)
        entries: dict[tuple[int, int], pb.CachedEntry] = {}
        for entry in answer.inspection.entries:
            # A list's count and its edges have one version. The edges say more, and come first.
            if entry.value and not (entry.kind == "list" and header(entry.value)[2] > _COMPARED_EDGES):
                entries.setdefault((entry.id, entry.atype), entry)
        return [
            _Inspected(sample, entries[sample.key, sample.atype])
            for sample in samples
            if (sample.key, sample.atype) in entries
        ]

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        counts = self.counts
        metrics.gauge_family(
            "consistency_total",
            "Messages published, messages checked, their keys, first looks at servers, unanswered looks, "
            "inconsistencies found, and stale entries that could not be inspected at the last look.",
            "event",
            lambda: {
                "told": counts.published,
                "followed": counts.followed,
                "sample": counts.samples,
                "look": counts.looks,
                "unanswered": counts.unanswered,
                "inconsistency": counts.stale[-1],
                "unresolved": counts.unresolved,
            },
        )
        metrics.gauge_family(
            "stale_looks_total",
            "Looks that found a stale entry, by seconds after the message.",
            "after_seconds",
            lambda: {
                f"{seconds:g}": stale for seconds, stale in zip(self._settings.looks_seconds, counts.stale, strict=True)
            },
        )
        metrics.gauge(
            "inconsistency_ratio",
            "Ratio of inconsistencies to first looks.",
            lambda: counts.stale[-1] / max(1, counts.consistency.looks),
        )
        metrics.gauge(
            "followed_messages_ratio",
            "Ratio of checked to published messages; below 1 when more are published than may be sampled per second.",
            lambda: counts.followed_ratio,
        )

    def summary(self) -> dict[str, object]:
        """Return the numbers for `/stats`."""
        counts = self.counts
        newest = counts.newest_inconsistency
        return {
            "published": counts.published,
            "told": counts.published,  # the former name
            "followed_ratio": round(counts.followed_ratio, 4),
            "samples": counts.samples,
            "looks": counts.looks,
            "unanswered": counts.unanswered,
            "stale_after_seconds": {
                f"{seconds:g}": stale for seconds, stale in zip(self._settings.looks_seconds, counts.stale, strict=True)
            },
            "inconsistencies": counts.stale[-1],
            "unresolved": counts.unresolved,
            "seconds_since_inconsistency": None if newest is None else round(self._clock.monotonic() - newest, 1),
            "nines": round(counts.consistency.nines, 2),
        }


def _subject(message: Message) -> _Subject:
    """Return the key that a message changes.

    The version is `NEVER_WRITTEN` for a message that cannot be checked: a bulk invalidation, or a foreign change,
    whose version follows in a later message."""
    match message:
        case ObjectChange():
            return _Subject(message.id, 0, message.after)
        case ObjectInvalidation():
            return _Subject(message.id, 0, message.version)
        case ListChange():
            return _Subject(message.id1, message.atype, message.after)
        case ListInvalidation():
            return _Subject(message.id1, message.atype, message.version)
        case ShardInvalidation():
            return _Subject(0, 0, NEVER_WRITTEN)


def _query_for(entry: pb.CachedEntry) -> Query:
    match entry.kind:
        case "object":
            return ObjectQuery(entry.id)
        case "count":
            return CountQuery(entry.id, entry.atype)
        case _:
            return RangeQuery(entry.id, entry.atype, 0, header(entry.value)[2] + 1)


def _is_stale(inspected: _Inspected, *, by_version_alone: bool) -> bool:
    """Return whether the entry is older than the message, or has the stored version with other content.

    An entry that equals the database is correct, even if the message had a higher version: that write was lost with
    its master."""
    behind = version_of(inspected.entry.value) < inspected.sample.version
    if by_version_alone:
        return behind
    compare = compare_list if inspected.entry.kind == "list" else compare_value
    verdict = compare(inspected.entry.value, inspected.stored)
    return verdict is Verdict.DIFFERENT or (behind and verdict is not Verdict.EQUAL)
