"""The note's sections, one a scenario: what was measured, and the plot of it. Each is given that scenario's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from loadtest.locality import skew_name
from loadtest.report.found import leaves, number, percent, table

_AIMED_HIT_RATE: Final = 0.964
_AIMED_SHARE: Final = 0.2
_MOST_FIGURES: Final = 40
_TAO_SERVER: Final = "2 × 8 cores, 144 GB, 10 Gbit/s"


def run(measured: Mapping[str, Any]) -> list[str]:
    """A published workload."""
    share = measured["cache_bytes"] / measured["data_bytes"]
    met = measured["hit_rate"] >= _AIMED_HIT_RATE and share <= _AIMED_SHARE and not measured["failed_fraction"]
    worst = sorted(
        (line for line in measured["generated"] if line["generated"] is not None and line["asked"]),
        key=lambda line: -abs(line["generated"] / line["asked"] - 1) * min(1.0, 100 * line["asked"]),
    )[:3]
    differs = ", ".join(f"{line['name']} {line['generated']:.4g} for {line['asked']:.4g}" for line in worst)
    return [
        (
            f"`{measured['workload']}`: {number(measured['throughput_qps'], 0)} queries/s, hit rate "
            f"{percent(measured['hit_rate'], 2)} with a cache of {share:.0%} of the payload bytes, failed share "
            f"{measured['failed_fraction']:.2g}. Aim (≥ 96.4 % at ≤ 20 %, nothing failed): "
            f"{'met' if met else 'not met'}."
        ),
        "",
        (
            f"CPU per query: follower {number(measured['server_cpu_us_per_query'])} µs, client "
            f"{number(measured['client_cpu_us_per_query'])} µs, database "
            f"{number(measured['database_cpu_us_per_query'])} µs. "
            f"Of what was asked of the generator, these differ most: {differs}."
        ),
        "",
        (
            "Why a run hits less than the simulation below has not been measured. What the simulated "
            "trace lacks: cold caches, writes, and single pairs of `assoc_get`."
        ),
        "",
        "![latencies, published and here](benchmarks/run.png)",
        "",
    ]


def locality(measured: Mapping[str, Any]) -> list[str]:
    """Hit rate by assumption."""
    surface = measured["surface"]
    by_point = {(each["skew"], each["again"], each["cache_share"]): each for each in surface}
    again = sorted({each["again"] for each in surface})
    share = max(each["cache_share"] for each in surface)
    rows = [
        (
            skew_name(skew),
            *(
                f"{percent(by_point[skew, each, share]['hit_rate'])} (new: "
                f"{percent(by_point[skew, each, share]['first_time_share'])})"
                for each in again
            ),
        )
        for skew in dict.fromkeys(each["skew"] for each in surface)
    ]
    enough = [each for each in surface if each["hit_rate"] >= _AIMED_HIT_RATE and each["cache_share"] <= _AIMED_SHARE]
    points = ", ".join(
        f"({skew_name(each['skew'])}, {each['again']:.0%}, {each['cache_share']:.0%})" for each in enough
    )
    return [
        (
            "How skewed TAO's reads were, its paper does not say. Facebook later published, with CacheLib, how often "
            "each key was asked for in traces of TAO's followers (411 million requests for lists, 437 million for "
            "objects): the most asked-for fifth of the keys that were asked for at all takes 93.5 % of the requests "
            "for lists and 92.1 % of those for objects. That is *measured* below and what `run` and `peers` draw from, "
            "scaled to fewer keys as CacheLib's own benchmark scales it, by shares of the keys. How repetitive reads "
            f"are within a moment was never published; assumed are {measured['assumed_again']:.0%} repetitions of the "
            "last 512 keys. CacheLib's benchmark draws without any repetition: the column of 0 % is what the published "
            "figures alone give. The product's eviction policy over "
            f"{number(measured['requests'])} requests for {number(measured['nodes'])} nodes, by Zipf exponent or as "
            f"measured (down) and repetitions (across), with a cache of {share:.0%} of the bytes; in brackets what is "
            "asked for the first time, which no cache can answer:"
        ),
        "",
        *table(("skew", *(f"{each:.0%} repeated" for each in again)), rows),
        "96.4 % with at most 20 % is reached at (skew, repeated, cache): " + (points or "no point of these") + ".",
        "",
        (
            "What this leaves open: the traces are of some years after the paper; a key that nobody asked for within "
            "them is no part of the data here, which makes a fifth of the data less than it is for TAO, most of whose "
            "data is old and rarely asked for (section 3.4). The 60 % are a guess: that pages are assembled of the "
            "same few things for a while is plain, how much nobody has said. The published 96.4 % are a result, and "
            "no assumption was chosen to give them."
        ),
        "",
        "![hit rate by assumption](benchmarks/locality.png)",
        "",
    ]


def geo(measured: Mapping[str, Any]) -> list[str]:
    """Two regions."""
    rows = []
    for name in ("write_ms", "read_ms"):
        rows += [(f"{name.removesuffix('_ms')}, {where.replace('_', ' ')}", *_latency(each))
                 for where, each in measured[name].items()]  # fmt: skip
    rows.append(("visible in the other region", *_latency(measured["visible_ms"])))
    failed = ", ".join(f"{name} {count}" for name, count in measured["failed"].items() if count) or "none"
    return [
        f"Round trip {measured['rtt_ms']:g} ms. Failed: {failed}.",
        "",
        *table(("milliseconds", "avg", "p50", "p99", "count"), rows),
    ]


def _latency(each: Mapping[str, Any]) -> tuple[str, ...]:
    return (number(each["avg"]), number(each["p50"]), number(each["p99"]), number(each["count"]))


def herd(measured: Mapping[str, Any]) -> list[str]:
    """Everybody misses one key."""
    queries = measured["database_queries"]
    rows = [
        (
            f"one {what}",
            number(queries[what]),
            *(number((measured["latency_ms"].get(what) or {}).get(key), 0) for key in ("p50", "p99", "max")),
        )
        for what in queries
    ]
    return [
        (
            f"{measured['clients']:,} clients in {measured['processes']} processes and "
            f"{measured['processes'] * measured['sessions']} sessions, {measured['followers']} "
            "followers of two tiers, nothing "
            "cached anywhere. Statements that name the key are counted by the database; the most of all rounds:"
        ),
        "",
        *table(("everybody wants", "database statements", "p50 ms", "p99 ms", "max ms"), rows),
        (
            "Latencies count from the common start: with so few cores, they are the time in which the "
            "load processes send "
            "and read ten thousand messages."
        ),
        "",
    ]


def storm(measured: Mapping[str, Any]) -> list[str]:
    """A tier restarts cold."""
    recovery = measured["recovery_seconds"]
    return [
        (f"{number(measured['rate'], 0)} requests a second that wait for nobody; all followers of the "
         "tier restart, away "
        f"for {number(measured['tier_away_seconds'])} s. Of {number(measured['answered'])} requests "
        f"{number(sum(measured['failed'].values()))} failed. Hit rate {percent(measured['old_hit_rate'])} before, "
        f"{percent(measured['lowest_hit_rate'])} at the lowest, and within a point of the old one "
        f"{'not within the run' if recovery is None else f'after {recovery:.0f} s'}."),
        "",
        *table(
            ("a second", "before", "worst second after"),
            [
                ("SELECTs of the database", number(measured["database_selects_before"]),
                 number(measured["database_selects_most"])),
                ("reads of the leader", number(measured["leader_reads_before"]), number(measured["leader_reads_most"])),
            ],
        ),
        "![the storm, second by second](benchmarks/storm.png)",
        "",
    ]  # fmt: skip


def capacity(measured: Mapping[str, Any]) -> list[str]:
    """One follower, more of them, more data, and the model."""
    by_rate = [
        (
            f"{each['batch']}",
            percent(each["hit_rate"]),
            number(each["throughput_qps"], 0),
            number(each["follower_us"]),
            number(each["leader_us"]),
            number(each["database_us"]),
            number(each["client_us"]),
            number(each["follower_limit_qps"], 0),
        )
        for each in sorted(measured["by_hit_rate"], key=lambda cost: (cost["batch"], cost["hit_rate"]))
    ]
    columns = ("batch", "hit rate", "queries/s", "follower µs", "leader µs", "database µs", "client µs", "alone/s")
    growth = [
        (
            f"× {each['growth']}: {each['objects']:,} objects, cache {each['cache_mb']} MB",
            percent(each["cost"]["hit_rate"]),
            number(each["cost"]["throughput_qps"], 0),
            *(number(each["cost"][f"{role}_us"]) for role in ("follower", "leader", "database")),
        )
        for each in measured["by_growth"]
    ]
    followers = [
        (f"{each['followers']}", number(each["cost"]["throughput_qps"], 0), number(each["cost"]["follower_us"]),
         number(each["cost"]["client_us"]))
        for each in measured["by_followers"]
    ]  # fmt: skip
    return [
        (
            f"All processes share {measured['cpus']} cores, so rates are the machine's; *alone* is a "
            "million divided by the "
            "follower's CPU per query: what one follower can do whose core nobody else wants."
        ),
        "",
        *table(columns, by_rate),
        "![one follower by hit rate](benchmarks/capacity.png)",
        "",
        "All reads hits, batches of 20, two load processes:",
        "",
        *table(("followers", "queries/s", "follower µs", "client µs"), followers),
        "Data that grows, read by popularity:",
        "",
        *table(("", "hit rate", "queries/s", "follower µs", "leader µs", "database µs"), growth),
        *_billion(measured),
    ]


def _billion(measured: Mapping[str, Any]) -> list[str]:
    assumed = measured["assumptions"]
    rows = [
        (
            f"here, batches of {batch}",
            number(each["follower_servers"]),
            number(each["leader_servers"]),
            number(each["database_servers"]),
            number(each["follower_network_gbit"], 0),
            number(each["reads_per_follower_server"], 0),
        )
        for batch, each in measured["billion_reads"].items()
    ]
    rows.append(
        ("TAO, as published", '"thousands of machines"', "among them", "among them", "–", "figure 7: by hit rate")
    )
    costs = "; ".join(
        f"batches of {batch}: a hit {each['hit_us']:.1f} µs and {each['hit_bytes']:.0f} bytes, a miss "
        f"{each['miss_us']:.1f} µs, a leader's read {each['leader_us']:.1f} µs, a database's "
        f"{each['database_us']:.1f} µs"
        for batch, each in measured["costs"].items()
    )
    return [
        "**A billion reads a second.** A query's CPU is taken to be linear in the misses it makes; fitted: "
        + costs
        + ".",
        (
            f"Assumed: hit rate {percent(assumed['hit_rate'])} (published), "
            f"{percent(assumed['leader_hit_rate'])} of misses "
            f"answered by leaders (not published), writes {percent(assumed['write_share'])} of "
            "requests and as dear as a miss "
            f"all the way down, servers of the paper ({_TAO_SERVER}), a core of them as fast as one here, "
            f"{assumed['cores']} cores used to {percent(assumed['utilisation'], 0)}."
        ),
        "",
        *table(("", "follower servers", "leaders", "databases", "followers' Gbit/s", "reads/s of a server"), rows),
        (
            "What the model leaves out: hot spots, the memory that the hit rate takes, replication to "
            "further regions, and "
            "that requests which touch many servers wait for the slowest."
        ),
        "",
    ]


def other(measured: Mapping[str, Any]) -> list[str]:
    """Any scenario's numbers by name."""
    rows = [(f"`{name}`", number(value, 2)) for name, value in leaves(measured)]
    left = len(rows) - _MOST_FIGURES
    return [
        *table(("figure", "value"), rows[:_MOST_FIGURES]),
        *([f"… and {left} more in its JSON.", ""] if left > 0 else []),
    ]
