"""What the check of rights adds to the handling of a batch of cached reads, measured within one process.

Two followers never cost quite the same, and on a busy machine the CPU of one changes by a tenth from second to second.
Here one read service decodes, answers and encodes prepared batches, with its rules and without them in slices of some
milliseconds, as ABBA: without, with, with, without. What changes slowly changes both sides of such a quadruple. CPU is
that of the thread. Sockets and the event loop are left out, so the percentage is an upper bound of the one for a whole
follower.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Final, NamedTuple, cast

import msgspec
import structlog

from loadtest.dataset import Dataset, StoredList
from loadtest.drivers import Batch, WrongAnswer
from loadtest.memory_process import OneArena
from tao.access.document import load_access
from tao.cache import CacheSettings, GraphCache
from tao.model.edge_block import PREFIX, encode_block
from tao.model.graph import Edge, encode_count, encode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import next_version
from tao.observability.logs import Logger
from tao.runtime.clock import LoopClock
from tao.schema.registry import Schema
from tao.serving.access import AccessControl
from tao.serving.misses import ReadPolicy
from tao.serving.read_service import ReadService
from tao.serving.single_flight import FillSettings, SingleFlight
from tao.serving.sources import FetchRequest
from tao.serving.traffic import Traffic
from tao.wire.identity import PeerIdentity
from tao.wire.v1 import session_pb2 as pb

_SLICE_SECONDS: Final = 0.004
_CACHE_BYTES: Final = 256 << 20
_DEADLINE_MS: Final = 60_000
_SAMPLES: Final = 2_000
_SEED: Final = 11
_MICRO: Final = 1e6


class Interval(NamedTuple):
    """A median and the middle 95 % of bootstrapped ones."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the median of values and its interval."""
        chance = Random(_SEED)
        drawn = [statistics.median(chance.choices(values, k=len(values))) for _ in range(_SAMPLES)]
        cuts = statistics.quantiles(drawn, n=40, method="inclusive")
        return cls(statistics.median(values), cuts[0], cuts[-1])

    def named(self, name: str) -> dict[str, float]:
        """Return the three values under names for the JSON."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}


class PathCosts(msgspec.Struct, frozen=True, kw_only=True):
    """CPU of the batch path for a query in microseconds, ``[without rights, with]`` for each quadruple of slices."""

    quadruples: list[tuple[float, float]]

    def figures(self, follower_us: float) -> dict[str, float]:
        """Return what rights add to a query, in microseconds, in percent of the path, and in percent of
        ``follower_us``, the CPU of a whole follower for a query."""
        added = Interval.of([ruled - free for free, ruled in self.quadruples])
        percent = Interval.of([100 * (ruled / free - 1) for free, ruled in self.quadruples])
        whole = Interval(*(100 * each / follower_us for each in added))
        found = {
            "path_us": statistics.median(free for free, _ in self.quadruples),
            **added.named("added_us"),
            **percent.named("path_percent"),
            **whole.named("follower_percent"),
        }
        return {name: round(value, 4) for name, value in found.items()}


class _NoSource:
    """A source that is never asked, because everything is cached."""

    def fetch(self, asked: FetchRequest) -> None:
        raise WrongAnswer(f"{asked.query} is not cached")


class _Sink:
    """The `Reply` of one measured client: encodes each answer, and keeps its size."""

    closed = False

    def __init__(self) -> None:
        self.peer: Final = PeerIdentity("bench", "client")
        self.size_bytes = 0

    def send(self, answer: pb.Answer) -> None:
        self.size_bytes = len(answer.SerializeToString())

    def on_close(self, callback: object) -> None:
        pass


class BatchPath:
    """A read service whose cache holds all that is asked, and its access document."""

    def __init__(self, data: Dataset, schema: Schema, atype: int, rules: str) -> None:
        """``rules``: the text of the access document. Run it within an event loop."""
        log = cast(Logger, structlog.wrap_logger(structlog.ReturnLogger()))  # standard output has the results
        self._access: Final = AccessControl(schema, log)
        self._access.use_document(load_access(rules, "access.yaml"))
        self._readers: Final = self._access.readers
        cache = _filled(data, atype)
        clock = LoopClock()
        flight = SingleFlight(cache, _NoSource(), clock, lambda _: 10_000, FillSettings())
        policy = ReadPolicy(lambda _: None, access=self._access)
        self._reads: Final = ReadService(cache, flight, schema, policy, traffic=Traffic(clock))
        self._sink: Final = _Sink()

    def measure(self, batches: Sequence[Batch], batch: int, quadruples: int) -> PathCosts:
        """Return the costs of batches of so many queries. Raises `WrongAnswer` when one is not answered from the
        cache."""
        messages = [
            pb.Request(number=1, deadline_ms=_DEADLINE_MS, read=each.read).SerializeToString() for each in batches
        ]
        for message, each in zip(messages, batches, strict=True):
            for ruled in (False, True):
                self._run([message], ruled=ruled)
                if self._sink.size_bytes < each.expected:
                    raise WrongAnswer(f"the batch path answers {self._sink.size_bytes} bytes, not {each.expected}")
        with _one_core(), _without_collections():
            one_pass = self._run(messages, ruled=False)
            passes = max(1, round(_SLICE_SECONDS / one_pass))
            queries = 2 * passes * len(messages) * batch
            found = list[tuple[float, float]]()
            for _ in range(quadruples):
                seconds = [0.0, 0.0]
                for ruled in (False, True, True, False):
                    seconds[ruled] += sum(self._run(messages, ruled=ruled) for _ in range(passes))
                found.append((_MICRO * seconds[False] / queries, _MICRO * seconds[True] / queries))
        return PathCosts(quadruples=found)

    def _run(self, messages: Sequence[bytes], *, ruled: bool) -> float:
        """Handle each message, and return the CPU seconds."""
        self._access.readers = self._readers if ruled else None
        at_once, handle, sink, parse = self._reads.answer_at_once, self._reads.handle, self._sink, pb.Request.FromString
        caller = sink.peer.caller
        began = time.thread_time()
        for message in messages:  # as a connection of frames does
            answer = at_once(message, caller, 0)
            if answer is None:
                handle(parse(message), sink)
            else:
                sink.size_bytes = len(answer.encoded)
        return time.thread_time() - began


def _filled(data: Dataset, atype: int) -> GraphCache:
    """Return a cache that holds the objects, counts and lists of the data."""
    # Packed counts displace each other while their blocks grow; here nothing may be missed.
    settings = CacheSettings(arena_bytes={"default": _CACHE_BYTES}, packed_counts_fraction=0.0)
    cache = GraphCache(settings, OneArena())
    for shard in {object_id >> SHARD_SHIFT for object_id in data.objects}:
        cache.open_shard(shard, 1)
    version = next_version(0, 1)
    for object_id, value in data.objects.items():
        cache.store_object(cache.object_ticket(object_id, 0.0), encode_object(version, 1, value), 1, 0.0)
    for stored in (*data.pages, *data.mixed, *(StoredList(each, ()) for each in data.empty)):
        edges = [Edge(id2, time_, b"") for id2, time_ in stored.edges]
        ticket = cache.list_ticket(stored.id1, atype, 0.0)
        cache.store_count(ticket, encode_count(version, len(edges)), 1, 0.0)
        cache.store_list(ticket, encode_block(version, len(edges), edges, PREFIX), 1, 0.0)
    return cache


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep the thread on one core: its caches are then warm in both halves of a quadruple."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage: a collection would fall into one slice and not into the other."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
