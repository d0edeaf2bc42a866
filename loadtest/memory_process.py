"""A process that fills one cache and says what it grew by, or what its hits cost: see `loadtest.memory`.

One job a process, so that no filling finds memory that another has freed.
"""

from __future__ import annotations

import gc
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Final

import msgspec

from loadtest.client_process import StepReport
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.workload import tao_atc13
from tao.model.edge_block import PREFIX, pack_columns
from tao.model.graph import encode_count, encode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.versions import next_version

SHARDS: Final = 64
ATYPE: Final = 1
COUNTS_FRACTION: Final = 0.2
_PAGE_BYTES: Final = 4096
_WORD: Final = struct.Struct("<Q")
_VERSION: Final = next_version(0, 1)
_ROUNDS: Final = 5


class MemoryJob(msgspec.Struct, frozen=True):
    """``what``: count, negative, object, list, mix or hits. ``entries`` of ``edges`` each, of ``data_bytes`` payload
    (of an edge, or the object). ``core``: as it is, or ``python`` or ``dictionary`` for counts without the compiled
    module or without packing."""

    what: str
    entries: int
    edges: int = 0
    data_bytes: int = 0
    core: str = "packed"

    async def work(self, report: StepReport) -> dict[str, float]:
        """Do the job, and return its figures."""
        if self.core == "python":
            for core in ("packed_core", "answers_core", "records_core"):
                sys.modules[f"tao.cache.{core}"] = None  # type: ignore[assignment]  # as where nothing was compiled
        return hit_figures(self) if self.what == "hits" else memory_figures(self)


class OneArena:
    """One arena; no list is cut."""

    def object_arena(self, otype: int) -> str:
        return "default"

    def list_arena(self, atype: int) -> str:
        return "default"

    def list_limit(self, atype: int) -> int:
        return 10_000


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def key_of(place: int) -> int:
    """Ids as they come: one after the other on every shard in turn, and in the form that a message's decoder gives
    them. A sum of two integers keeps room for a carry, and would take 16 bytes more for each entry."""
    (key,) = _WORD.unpack(_WORD.pack((place % SHARDS << SHARD_SHIFT) + (place // SHARDS + 1) * 64))
    return int(key)


class Filled:
    """A cache and what puts things into it."""

    def __init__(self, job: MemoryJob, budget_bytes: int) -> None:
        from tao.cache import CacheSettings, GraphCache  # after the core was chosen

        fraction = 0.0 if job.core == "dictionary" else COUNTS_FRACTION
        settings = CacheSettings(arena_bytes={"default": budget_bytes}, packed_counts_fraction=fraction)
        self.cache = GraphCache(settings, OneArena())
        for shard in range(SHARDS):
            self.cache.open_shard(shard, 1)

    def object(self, key: int, size: int) -> None:
        value = encode_object(_VERSION, 1, bytes(size))
        self.cache.store_object(self.cache.object_ticket(key, 0.0), value, 1, 0.0)

    def count(self, key: int, count: int) -> None:
        self.cache.store_count(self.cache.list_ticket(key, ATYPE, 0.0), encode_count(_VERSION, count), 1, 0.0)

    def list(self, key: int, edges: int, data: list[bytes]) -> None:
        id2s, times = range(key + edges, key, -1), range(10**9 + edges, 10**9, -1)
        block = pack_columns(_VERSION, edges, PREFIX, id2s, times, data)
        self.cache.store_list(self.cache.list_ticket(key, ATYPE, 0.0), block, 1, 0.0)


def memory_figures(job: MemoryJob) -> dict[str, float]:
    """Fill a cache; returns the growth of the process, the arenas' own account, and the number of entries."""
    buckets = 8
    while buckets * 8 < job.entries:
        buckets *= 2
    bucket_bytes, part = (112, 3 / 2) if job.what == "count" else (80, 3)
    # Room for the power of two of buckets that holds the entries; twice as many come, so that all of it is full.
    budget = int(buckets * bucket_bytes * part / COUNTS_FRACTION) + 1024
    counts = job.what in ("count", "negative")
    filled = Filled(job, budget if counts and job.core != "dictionary" else 8 << 30)
    plan = GraphPlan(tao_atc13(), job.entries, 1) if job.what == "mix" else None
    gc.collect()
    before = resident_bytes()
    payload = 0
    for place in range((2 if job.core != "dictionary" else 1) * buckets * 8 if counts else job.entries):
        key = key_of(place)
        if plan is not None:
            filled.object(key, plan.object_size(place))
            if place % 3:
                sizes = [plan.edge_size(place, index) for index in range(plan.degree(place))]
                filled.list(key, plan.degree(place), [bytes(size) for size in sizes])
            else:
                filled.count(key, plan.degree(place))
        elif counts:
            filled.count(key, place % 50 + 1 if job.what == "count" else 0)
        elif job.what == "object":
            filled.object(key, job.data_bytes)
            payload += job.data_bytes
        else:
            filled.list(key, job.edges, [bytes(job.data_bytes)] * job.edges)
            payload += job.edges * job.data_bytes
    gc.collect()
    grown = max(_PAGE_BYTES, resident_bytes() - before)
    (arena,) = filled.cache.arenas()
    entries = arena.objects + arena.lists + arena.counts
    return {
        "grown_bytes": grown,
        "believed_bytes": arena.bytes,
        "entries": entries,
        "evictions": arena.evictions,
        "payload_bytes": payload,
        "bytes_per_entry": grown / entries,
    }


def least_microseconds(run: Callable[[], object], operations: int) -> float:
    """CPU of one of the operations that a call makes: the least of some rounds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        begun = process_time()
        run()
        best = min(best, process_time() - begun)
    return 1e6 * best / operations


def hit_figures(job: MemoryJob) -> dict[str, float]:
    """CPU of a hit by operation, in the process: as many operations as there are entries."""
    filled = Filled(job, 1 << 30)
    entries, cache = job.entries, filled.cache
    for place in range(entries):
        filled.object(key_of(place), 673)
        filled.list(key_of(place), 100, [])
        filled.count(key_of(place + entries), place % 50)
    ids = [key_of(place * 7919 % entries) for place in range(entries)]
    # While packed counts grow, a few in a hundred displace each other: asked for is what is there.
    held = [key for place in range(entries, 2 * entries) if cache.peek_count(key := key_of(place), ATYPE)]
    counted = [held[place * 7919 % len(held)] for place in range(entries)]
    hundreds = [ids[start : start + 100] for start in range(0, entries, 100)]
    operations: dict[str, Callable[[], object]] = {
        "obj_get": lambda: [cache.object(key) for key in ids],
        "obj_get, by the hundred": lambda: [cache.objects(keys) for keys in hundreds],
        "assoc_count, of a count": lambda: [cache.count(key, ATYPE) for key in counted],
        "assoc_count, of a list": lambda: [cache.count(key, ATYPE) for key in ids],
        "assoc_range, all": lambda: [cache.range(key, ATYPE, 0, 1000) for key in ids],
        "assoc_range, a page of 50": lambda: [cache.range(key, ATYPE, 0, 50) for key in ids],
        "assoc_time_range": lambda: [cache.time_range(key, ATYPE, 10**9 + 60, 10**9 + 20, 50) for key in ids],
        "assoc_get": lambda: [cache.edge(key, ATYPE, key + 50) for key in ids],
    }
    return {name: least_microseconds(run, entries) for name, run in operations.items()}
