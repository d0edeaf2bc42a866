"""What a demonstration has measured, as values: for its own tables and for `tao demo --json FILE`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tao.model.errors import TaoError


class DemonstrationFailed(TaoError):
    """The cluster did not do what is claimed of it. The message says what was expected and what came."""

    reason = "DEMONSTRATION_FAILED"


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Of single queries, as their caller saw it."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Of at least one measurement."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(p50_ms=1000 * ordered[last * 50 // 100], p99_ms=1000 * ordered[last * 99 // 100])


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``edges`` are lines of the file; ``directed_edges`` what they became, one at each end. ``settled_seconds``: from
    the last acknowledgement until no edge lacked its other end."""

    objects: int
    edges: int
    directed_edges: int
    longest_list: int
    seconds: float
    objects_per_second: float
    edges_per_second: float
    settled_seconds: float


class PassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything read once. Answers by whoever had them; the hit rate is that of the followers asked."""

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
        """Part of the queries that a follower answered from its memory."""
        return self.by_follower / self.queries if self.queries else 0.0

    @property
    def per_second(self) -> float:
        """Queries in a second."""
        return self.queries / self.seconds


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One process. Databases and tailers have no cache: their entries and cache bytes are None."""

    name: str
    role: str
    entries: int | None
    cache_bytes: int | None
    resident_bytes: int


class SpreadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Writes through one tier, looked for in another: milliseconds from the writer's answer until they were seen.
    ``version_before`` and ``version_after`` count the writes that a list has seen."""

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
    """Writes and reads in two regions, ``rtt_ms`` apart; the first is the master region. ``seen``: from the answer to a
    writer of the first until the second shows it. ``behind_ms``, ``by_token_ms`` and ``critical_ms``: a read of the
    second region, one with the token of the write, and a critical one, while its database stood still;
    ``caught_up_ms``: from its release until all reads knew."""

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
    """The whole demonstration."""

    start_seconds: float
    load: LoadFigures
    passes: list[PassFigures]
    servers: list[ServerFigures]
    spread: SpreadFigures
    check: CheckFigures
    regions: RegionFigures
    seconds: float
