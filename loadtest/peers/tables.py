"""The tables of `peers` in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtest.peers.aims import Shapes, ratios
from loadtest.peers.names import TAO
from loadtest.peers.warming import Warming
from loadtest.published.recording import Summary
from loadtest.results import Listing


def shape_listing(shapes: Shapes) -> Listing:
    """Every contestant in every shape."""
    rows: list[tuple[str, ...]] = []
    for shape, of in shapes.items():
        for name, each in of.items():
            ratio = ratios(of[TAO], each) if TAO in of and name != TAO else {}
            rows.append(
                (
                    f"{shape}: {name}",
                    f"{each.per_second:,.0f}",
                    _ratio(ratio, "throughput"),
                    f"{each.p50_us / 1000:.2f}",
                    f"{each.p99_us / 1000:.2f}",
                    _ratio(ratio, "p99"),
                    f"{max(each.rounds_p99_us) / 1000:.2f}",
                    _p99(each.hit_ms),
                    _p99(each.miss_ms),
                    *(f"{value:.1f}" for value in (each.server_cpu_us, each.client_cpu_us, each.total_cpu_us)),
                    str(sum(each.failed.values())),
                )
            )
    columns = (
        "shape of load", "queries/s", "tao ×", "p50 ms", "p99 ms", "tao ×", "worst", "hits' p99", "misses' p99",
        "server µs", "client µs", "total µs", "failed",
    )  # fmt: skip
    return Listing(title="", columns=columns, rows=rows)


def _ratio(found: Mapping[str, float], what: str) -> str:
    return f"{found[what]:.2f}" if what in found else ""


def _p99(found: Summary | None) -> str:
    return "" if found is None else f"{found.p99:.2f}"


def ratio_listing(measured: Mapping[str, Any]) -> Listing:
    """Of the first shape; `Any`: `loadtest.peers.outcome.OfContestant`."""
    names = ("throughput", "p50", "p99", "server_cpu", "client_cpu", "total_cpu")
    rows: list[tuple[str, ...]] = [
        (
            name,
            *(_ratio(found.ratio, each) for each in names),
            _percent(found.hit_rate),
            _percent(found.joined_share),
            _percent(found.follower_hit_rate),
            _percent(found.first_read_share),
        )
        for name, found in measured.items()
    ]
    columns = (
        "tao to", *(each.replace("_", " ") for each in names), "hit rate", "joined", "of them in the follower",
        "of misses first reads",
    )  # fmt: skip
    return Listing(title="", columns=columns, rows=rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def warming_listing(warming: Warming, nodes: int) -> Listing:
    """The hit rate of each window, by cache."""
    rows: list[tuple[str, ...]] = [(name, *map(_percent, rates)) for name, rates in warming.hit_rates.items()]
    windows = max(map(len, warming.hit_rates.values()), default=0)
    columns = [
        f"{min(warming.requests, (number + 1) * warming.window_requests) / nodes:.1f}" for number in range(windows)
    ]
    return Listing(title="", columns=("hit rate while warmed, by requests a node", *columns), rows=rows)


def stale_listing(measured: Mapping[str, Any]) -> Listing:
    """As `ratio_listing`."""
    rows: list[tuple[str, ...]] = [
        (
            f"{name}, {each.within}",
            f"{each.reads:,}",
            f"{each.stale:,}",
            ", ".join(f"{kind} {number:,}" for kind, number in each.stale_by_kind.items()),
        )
        for name, found in measured.items()
        for each in found.stale
    ]
    return Listing(title="", columns=("contestant", "reads after writes", "stale", "of them"), rows=rows)
