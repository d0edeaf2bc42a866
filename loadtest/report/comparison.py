"""The head of the note: ratios to the peers, and published, our and the peers' figures in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from loadtest.published import figures
from loadtest.report.found import Found, number, percent, table

_PEERS: Final = ("redis_lookaside", "memcached_lookaside", "mysql")
_NAMES: Final = {
    "tao": "tao",
    "redis_lookaside": "Redis look-aside",
    "memcached_lookaside": "memcached look-aside",
    "mysql": "MySQL alone",
}
_FIGURES: Final = (
    "", "queries/s", "p50 ms", "p99 ms", "server µs", "client µs", "all µs", "hit rate / joined / first", "MB cached",
    "stale reads",
)  # fmt: skip
_COMPARED: Final = ("throughput", "p50", "p99", "server_cpu", "client_cpu", "total_cpu")


def ratios(found: Found) -> list[str]:
    """What a user would pick instead, side by side in one run."""
    peers = found.get("peers")
    if peers is None:
        return ["Not measured: `peers`.", ""]
    rows: list[tuple[str, ...]] = [
        (_NAMES[name], *(f"{peers[name]['ratio'][what]:.2f} ×" for what in _COMPARED))
        for name in _PEERS
        if name in peers and peers[name]["ratio"]
    ]
    columns = ("tao compared with", "throughput", "p50", "p99", "servers' CPU", "client's CPU", "all CPU")
    lines = table(columns, rows)
    lines += [
        (
            "Above 1 is in tao's favour, in every column; with one application process, which for a peer is more of a "
            "limit than for tao. A hit is a read answered without the database; whoever waits for another's fetch has "
            "*joined*, which is none; *first* is the part of what asked the database that nobody had asked this "
            f"contestant for before, which no cache has. {_warming(peers['warming'])}"
        ),
        "",
    ]
    absolute = [
        (
            _NAMES[name],
            number(each["throughput_qps"], 0),
            number(each["p50_ms"], 2),
            number(each["p99_ms"], 2),
            number(each["server_cpu_us_per_query"]),
            number(each["client_cpu_us_per_query"]),
            number(each["total_cpu_us_per_query"]),
            " / ".join(percent(each[share]) for share in ("hit_rate", "joined_share", "first_read_share")),
            _memory(each["memory"]),
            ", ".join(f"{stale['stale']} of {stale['reads']:,} ({stale['within']})" for stale in each["stale"]) or "–",
        )
        for name, each in peers.items()
        if name in _NAMES
    ]
    lines += table(_FIGURES, absolute) + _shapes(peers["figures"])
    wins = [f"- {each}." for each in peers["peers_win"]] or ["- nowhere in this run."]
    lines += ["![latencies, throughput by round, hit rates](benchmarks/peers.png)", ""]
    return [*lines, "Where a peer is better than tao, in every shape of load:", "", *wins, ""]


def _memory(servers: Sequence[Mapping[str, Any]]) -> str:
    """What each has taken, of what it was given: classes of sizes and tables may take several times that."""
    taken = " + ".join(number(server["cached"] / 1e6) for server in servers)
    return f"{taken} of {number(servers[0]['budget'] / 1e6)} each" if servers else "–"


def _warming(found: Mapping[str, Any]) -> str:
    until = (
        "the last window brought no cache half a point of hit rate"
        if found["steady"]
        else "the bound of it was reached"
    )
    return (
        f"Every cache was warmed with the same {number(found['requests'])} requests, "
        f"{number(found['requests_per_node'])} a node, until {until}."
    )


def _shapes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every shape of load, the many awaiters of single queries among them."""
    by_shape: dict[str, dict[str, Mapping[str, Any]]] = {}
    for each in found:
        by_shape.setdefault(each["shape"], {})[each["contestant"]] = each
    rows: list[tuple[str, ...]] = []
    for shape, of in by_shape.items():
        asked = [of[name] for name in _NAMES if name in of]
        rows += [
            (f"{shape}: queries/s", *(number(each["per_second"], 0) for each in asked)),
            (
                "p50 / p99 ms",
                *(f"{number(each['p50_us'] / 1000, 2)} / {number(each['p99_us'] / 1000, 2)}" for each in asked),
            ),
            ("p99 ms of hits / misses", *(f"{_p99(each['hit_ms'])} / {_p99(each['miss_ms'])}" for each in asked)),
            (
                "server / client / all µs a query",
                *(
                    " / ".join(number(each[f"{whose}_cpu_us"]) for whose in ("server", "client", "total"))
                    for each in asked
                ),
            ),
        ]
    took_part = {name for of in by_shape.values() for name in of}
    return table(("", *(text for name, text in _NAMES.items() if name in took_part)), rows) if rows else []


def _p99(found: Mapping[str, Any] | None) -> str:
    return "–" if found is None else number(found["p99"], 2)


def one_table(found: Found) -> list[str]:
    """Published | here | peers, figure by figure; a dash where nobody has one."""
    paper = figures.atc13().published_results
    run, geo, peers = found.get("run") or {}, found.get("geo") or {}, found.get("peers") or {}

    def of_peers(key: str, show: Any) -> tuple[str, ...]:
        return tuple(show(peers.get(name, {}).get(key)) for name in _PEERS)

    nobody = ("–",) * len(_PEERS)
    rows: list[tuple[str, ...]] = [
        ("hit rate of reads, by itself", percent(paper["overall_read_hit_rate"]), percent(run.get("hit_rate")),
         *nobody),
        ("failed share", f"{paper['failed_query_fraction_90_days']:.1e}", _share(run.get("failed_fraction")), *nobody),
        # What stands beside the peers is of their run: another load, and another graph.
        ("hit rate of reads, in turns", "–", percent(peers.get("tao", {}).get("hit_rate")),
         *of_peers("hit_rate", percent)),
        ("queries/s, of this machine", "–", number(peers.get("tao", {}).get("throughput_qps"), 0),
         *of_peers("throughput_qps", lambda value: number(value, 0))),
        ("all queries, p50 ms", "–", number(peers.get("tao", {}).get("p50_ms"), 2),
         *of_peers("p50_ms", lambda value: number(value, 2))),
        ("all queries, p99 ms", "–", number(peers.get("tao", {}).get("p99_ms"), 2),
         *of_peers("p99_ms", lambda value: number(value, 2))),
    ]  # fmt: skip
    for how in ("hit_ms", "miss_ms"):
        for kind, published in paper[how].items():
            ours = (run.get("operations", {}).get(kind) or {}).get(how) or {}
            rows.append(
                (
                    f"`{kind}` {how.removesuffix('_ms')}, p50 / avg / p99 ms",
                    _three(published, 1),
                    _three(ours, 2),
                    *nobody,
                )
            )
    writes: Mapping[str, Any] = paper["write_ms"]
    for where, key in (("same_region", "same_region_avg"), ("remote_region", "remote_region_avg")):
        ours = geo.get("write_ms", {}).get(where, {})
        name = f"write, {where.replace('_', ' ')}, avg ms"
        rows.append((name, number(writes[key]), number(ours.get("avg")), *nobody))
    lag = geo.get("visible_ms", {})
    rows.append(
        ("visible in the other region, p50 / p99 ms", "85 % < 1 s, 99 % < 3 s",
         f"{number(lag.get('p50'))} / {number(lag.get('p99'))}", *nobody)
    )  # fmt: skip
    columns = ("figure", "TAO, published", "here", *(_NAMES[name] for name in _PEERS))
    return table(columns, rows)


def _three(found: Mapping[str, Any], digits: int) -> str:
    return " / ".join(number(found.get(key), digits) for key in ("p50", "avg", "p99"))


def _share(value: Any) -> str:
    return "–" if not isinstance(value, (int, float)) else "0" if not value else f"{value:.1e}"
