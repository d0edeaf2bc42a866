"""What a run of a published workload found, as its JSON and its tables have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from loadtest.published import figures
from loadtest.published.conformity import Line, Tally, compare, reads_of
from loadtest.published.driver import LoadResult
from loadtest.published.graph_plan import GraphPlan
from loadtest.published.recording import Merged, Summary
from loadtest.published.watch import Counts, Second, Used
from loadtest.published.workload import READS, Kind, workload_named
from loadtest.results import Listing, Quantity


class Misses(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of all reads that missed, by cause, as counters have them. A miss has one, the first of these that is
    true of it as far as counters can tell: they count causes, and not which of two came together."""

    joined: float
    """Waited for a fetch that another miss had begun."""
    first_time: float
    """Of what no load process had asked for before."""
    incomplete: float
    """Of more of a list than the part of it that was cached."""
    came_back: float
    """Of what had left the cache for want of room, while no more than its budget had left since."""
    too_large: float
    """Of what takes too large a part of the cache to be kept."""
    not_kept: float
    """Of what was fetched and not kept, because a write or the shard's beginning came in between."""
    dropped: float
    """Of what a write dropped that could not be applied to it."""
    left_long_ago: float
    """All others: of what left longer ago."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found; latencies in milliseconds. None: of processes that are not known."""

    workload: str
    source: str
    settings: dict[str, Any]
    """`RunSettings`; `Any`: text and numbers."""
    data_bytes: int
    cache_bytes: int
    """Of each follower; leaders of a cluster of its own have as much."""
    throughput_qps: float
    reads: int
    writes: int
    hit_rate: float
    """Of what the tier was asked: a hit is what a follower answered out of its memory."""
    hit_rate_with_joined: float
    """The same if who waited for another's fetch were a hit."""
    misses: Misses
    failed_fraction: float
    failed: dict[str, int]
    warm_requests_per_node: float
    """Answered before measuring began, as a multiple of the objects of the graph."""
    failed_warming: dict[str, int]
    """Before measuring began; no part of ``failed``."""
    wrong_answers: int
    operations: dict[str, dict[str, Summary | None]]
    """Operation → ``all_ms``, and for reads ``hit_ms`` and ``miss_ms``, which traced probers beside the load saw."""
    generated: list[Line]
    """Every property of the workload: asked, and as generated."""
    throughput_by_second: list[int]
    by_second: list[Second]
    server_cpu_us_per_query: float | None
    client_cpu_us_per_query: float
    database_cpu_us_per_query: float | None


def measured_of(
    settings: dict[str, Any], plan: GraphPlan, cache_bytes: int, results: Sequence[LoadResult], used: Used
) -> tuple[Measured, Merged]:
    """Of all load processes together, and the histograms behind it."""
    workload = workload_named(settings["workload"])
    merged, tally = Merged(), Tally()
    for result in results:
        merged.add(result.recording)
        tally.add(result.tally)
    answered, failed = tally.answered, merged.failed.total()
    reads = reads_of(tally)
    elapsed = max(result.elapsed for result in results)
    client_cpu = sum(result.client_cpu_seconds for result in results)
    operations: dict[str, dict[str, Summary | None]] = {}
    for kind in workload.mix:
        operations[kind] = {"all_ms": merged.summary(kind)}
        if kind in READS:
            operations[kind] |= {f"{how}_ms": merged.summary(f"{how} {kind}") for how in ("hit", "miss")}
    whole = used.whole
    asked = max(1, whole.hits + whole.misses)

    def a_query(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e6 * seconds / max(1, answered), 2)

    measured = Measured(
        workload=workload.name,
        source=workload.source,
        settings=settings,
        data_bytes=plan.payload_bytes,
        cache_bytes=cache_bytes,
        throughput_qps=round(answered / elapsed, 1),
        reads=reads,
        writes=answered - reads,
        hit_rate=whole.hits / asked,
        hit_rate_with_joined=(whole.hits + min(whole.joined, whole.misses)) / asked,
        misses=misses_by_cause(whole, sum(result.first_time for result in results)),
        failed_fraction=failed / max(1, answered + failed),
        failed=dict(merged.failed),
        warm_requests_per_node=round(sum(result.warmed for result in results) / plan.nodes, 2),
        failed_warming=_added(result.failed_warming for result in results),
        wrong_answers=sum(result.wrong for result in results),
        operations=operations,
        generated=list(compare(workload, plan, tally)),
        throughput_by_second=[merged.per_second[second] for second in range(int(elapsed))],
        by_second=used.by_second,
        server_cpu_us_per_query=a_query(whole.follower_cpu),
        client_cpu_us_per_query=round(1e6 * client_cpu / max(1, answered), 2),
        database_cpu_us_per_query=a_query(whole.database_cpu),
    )
    return measured, merged


def misses_by_cause(counts: Counts, first_time: int) -> Misses:
    """``first_time``: reads of what was never asked for before. Each cause takes of what those before it have left."""
    asked, left = max(1, counts.hits + counts.misses), counts.misses
    causes = {
        "joined": counts.joined,
        "first_time": first_time,
        "incomplete": counts.incomplete,
        "came_back": counts.came_back,
        "too_large": counts.too_large,
        "not_kept": max(0, counts.not_kept - counts.too_large),
        "dropped": counts.dropped,
    }
    shares = {}
    for cause, caused in causes.items():
        some = min(left, caused)
        shares[cause] = some / asked
        left -= some
    return Misses(**shares, left_long_ago=left / asked)


def quantities(measured: Measured) -> list[Quantity]:
    """The head of the table that a run prints."""
    found = [
        Quantity(name="throughput", value=measured.throughput_qps, unit="queries_per_second"),
        Quantity(name="warmed by", value=measured.warm_requests_per_node, unit="requests_a_node"),
        Quantity(name="hit rate", value=100 * measured.hit_rate, unit="percent"),
        *(
            Quantity(name=f"missed: {name.replace('_', ' ')}", value=100 * share, unit="percent")
            for name, share in msgspec.to_builtins(measured.misses).items()
        ),
        Quantity(name="failed", value=1e6 * measured.failed_fraction, unit="per_million"),
        Quantity(name="client CPU", value=measured.client_cpu_us_per_query, unit="µs_per_query"),
    ]
    if measured.server_cpu_us_per_query is not None:
        found.append(Quantity(name="follower CPU", value=measured.server_cpu_us_per_query, unit="µs_per_query"))
    return found


def latency_listing(measured: Measured) -> Listing:
    """Figure 8 of the paper: hits and misses by operation; for TAO's workload with the paper's own beside them."""
    published: dict[str, Any] = figures.atc13().published_results if measured.workload == "tao_atc13" else {}
    rows: list[tuple[str, ...]] = []
    for kind, found in measured.operations.items():
        for how in ("hit_ms", "miss_ms") if Kind(kind) in READS else ("all_ms",):
            summary = found.get(how)
            if summary is None:
                continue
            paper = published.get(how, {}).get(kind, {})
            rows.append(
                (
                    f"{kind} {how.removesuffix('_ms')}",
                    f"{summary.count:,}",
                    *(f"{value:.2f}" for value in (summary.p50, summary.avg, summary.p99, summary.p999)),
                    *(f"{paper[key]:.1f}" if key in paper else "" for key in ("p50", "avg", "p99")),
                )
            )
    columns = ("latency, ms", "samples", "p50", "avg", "p99", "p99.9", "TAO p50", "TAO avg", "TAO p99")
    return Listing(title="", columns=columns, rows=rows)


def generated_listing(lines: list[Line]) -> Listing:
    """What was asked and what was generated."""
    rows: list[tuple[str, ...]] = [
        (line.name, f"{line.asked:.4f}", "" if line.generated is None else f"{line.generated:.4f}") for line in lines
    ]
    return Listing(title="", columns=("property", "asked", "generated"), rows=rows)


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
