"""The figures that a demonstration measures, for its own tables and for `tao demo --json FILE`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tao.model.errors import TaoError


class DemonstrationFailed(TaoError):
    """A check failed. The message says what was expected and what was found."""

    reason = "DEMONSTRATION_FAILED"


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of single queries, as their caller measured them."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Return the percentiles of at least one latency in seconds."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(p50_ms=1000 * ordered[last * 50 // 100], p99_ms=1000 * ordered[last * 99 // 100])


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The load of the graph.

    ``edges``: lines of the file; ``directed_edges``: the edges that they became, one at each end. ``settled_seconds``:
    from the last acknowledgement until no edge lacked its inverse."""

    objects: int
    edges: int
    directed_edges: int
    longest_list: int
    seconds: float
    objects_per_second: float
    edges_per_second: float
    settled_seconds: float


class PassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One pass that reads everything once, with the number of answers by the server that had them."""

    name: str
    tier: str
    queries: int
    by_follower: int
    by_leader: int
    by_database: int
    seconds: float
    objects: Latency
    lists: Latency
    counts: Latency

    @property
    def hit_rate(self) -> float:
        """The share of queries that a follower answered from its memory."""
        return self.by_follower / self.queries if self.queries else 0.0

    @property
    def per_second(self) -> float:
        """Queries per second."""
        return self.queries / self.seconds


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one process. ``entries`` and ``cache_bytes`` are None for processes without a cache."""

    name: str
    role: str
    entries: int | None
    cache_bytes: int | None
    resident_bytes: int


class SpreadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Writes through one tier that were looked for in another.

    ``seen_…``: milliseconds from the acknowledgement until the write was seen. ``version_before``, ``version_after``:
    the versions of a list, which count its writes."""

    writes: int
    acknowledged: Latency
    seen_p50_ms: float
    seen_max_ms: float
    version_before: int
    version_after: int


class CheckFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Cache entries compared with the database."""

    compared: int
    wrong: int
    seconds: float


class RegionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Writes and reads in two regions, ``rtt_ms`` apart; the first is the master region.

    ``seen_…``: from the acknowledgement of a write in the first region until the second shows it. ``behind_ms``,
    ``by_token_ms``, ``critical_ms``: a plain read in the second region, one with the token of the write, and a critical
    one, while replication is stopped. ``caught_up_ms``: from its restart until reads see the write."""

    rtt_ms: float
    acknowledged_in_master_region: Latency
    acknowledged_elsewhere: Latency
    seen_p50_ms: float
    seen_max_ms: float
    behind_ms: float
    by_token_ms: float
    critical_ms: float
    caught_up_ms: float
    compared: int
    wrong: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a demonstration."""

    start_seconds: float
    load: LoadFigures
    passes: list[PassFigures]
    servers: list[ServerFigures]
    spread: SpreadFigures
    check: CheckFigures
    regions: RegionFigures
    seconds: float
