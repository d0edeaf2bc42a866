"""The note's sections, one a scenario: what was measured, and the plot of it. Each is given that scenario's figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from loadtest.locality import skew_name
from loadtest.report.aims import AIMED_HIT_RATE, AIMED_SHARE
from loadtest.report.found import leaves, number, percent, table

_MOST_FIGURES: Final = 40
_CAUSES: Final = {
    "joined": "another miss had begun the fetch, which was waited for",
    "first_time": "no one had asked for it before",
    "incomplete": "a shorter part of the list was cached, or an older one than asked for",
    "came_back": "it had left for want of room, while no more than the cache's size had left since",
    "too_large": "it takes too large a part of the cache to be kept",
    "not_kept": "it was fetched before and not kept, because a write came in between",
    "dropped": "a write had dropped it, which could not be applied to what was cached",
    "left_long_ago": "it had left for want of room longer ago",
}


def run(measured: Mapping[str, Any]) -> list[str]:
    """A published workload."""
    share = measured["cache_bytes"] / measured["data_bytes"]
    worst = sorted(
        (line for line in measured["generated"] if line["generated"] is not None and line["asked"]),
        key=lambda line: -abs(line["generated"] / line["asked"] - 1) * min(1.0, 100 * line["asked"]),
    )[:3]
    differs = ", ".join(f"{line['name']} {line['generated']:.4g} for {line['asked']:.4g}" for line in worst)
    return [
        (
            f"`{measured['workload']}`: {number(measured['throughput_qps'], 0)} queries/s, hit rate "
            f"{percent(measured['hit_rate'], 2)} with a cache of {share:.0%} of the payload bytes, warmed with "
            f"{number(measured['warm_requests_per_node'])} requests a node, failed share "
            f"{measured['failed_fraction']:.2g}."
        ),
        "",
        (
            f"CPU per query: follower {number(measured['server_cpu_us_per_query'])} µs, client "
            f"{number(measured['client_cpu_us_per_query'])} µs, database "
            f"{number(measured['database_cpu_us_per_query'])} µs. "
            f"Of what was asked of the generator, these differ most: {differs}."
        ),
        "",
        *_misses(measured),
        "![latencies, published and here](benchmarks/run.png)",
        "",
    ]


def _misses(measured: Mapping[str, Any]) -> list[str]:
    causes = measured["misses"]
    joined = percent(measured["hit_rate_with_joined"], 2)
    return [
        (
            "A hit is what a follower answered out of its memory; who waited for a fetch has missed, also when another "
            f"had begun it. Counted the other way the hit rate is {joined}. Of all reads, these missed:"
        ),
        "",
        *table(
            ("because", "share of reads"),
            [(_CAUSES.get(name, name.replace("_", " ")), percent(share, 2)) for name, share in causes.items()],
        ),
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
    enough = [each for each in surface if each["hit_rate"] >= AIMED_HIT_RATE and each["cache_share"] <= AIMED_SHARE]
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
        "![latencies](benchmarks/geo.png)",
        "",
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
            number(measured["leader_fetches"][what]),
            *(number((measured["latency_ms"].get(what) or {}).get(key), 0) for key in ("p50", "p99", "max")),
        )
        for what in queries
    ]
    return [
        (
            f"{measured['clients']:,} clients in {measured['processes']} processes and "
            f"{measured['processes'] * measured['sessions']} sessions, {measured['followers']} "
            "followers of all tiers, nothing "
            "cached anywhere. Statements that name the key are counted by the database, fetches from it by the "
            "leaders; the most of all rounds:"
        ),
        "",
        *table(("everybody wants", "database statements", "leaders' fetches", "p50 ms", "p99 ms", "max ms"), rows),
        (
            "Latencies count from the common start: with so few cores, they are the time in which the "
            "load processes send "
            "and read ten thousand messages."
        ),
        "",
        "![latencies of each round](benchmarks/herd.png)",
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
                ("fetches of the leader from it", number(measured["leader_fetches_before"]),
                 number(measured["leader_fetches_most"])),
                ("reads of the leader", number(measured["leader_reads_before"]), number(measured["leader_reads_most"])),
            ],
        ),
        "![the storm, second by second](benchmarks/storm.png)",
        "",
    ]  # fmt: skip


def whale(measured: Mapping[str, Any]) -> list[str]:
    """A list too long for any cache."""

    def ms(name: str) -> str:
        return number(measured.get(f"{name}:ms"), 2)

    def without_database(name: str) -> str:
        return percent(measured.get(f"{name}_without_database:ratio"), 2)

    asked = [
        ("its count", ms("count")),
        ("its first page of 100", ms("first_page")),
        ("a page in the middle, by cursor", ms("deep_page_by_cursor")),
        ("a page in the middle, by position", ms("deep_page_by_position")),
        ("an edge more, and is it there", ms("add")),
    ]
    members = [
        (what, without_database(name), ms(key))
        for what, name, key in (
            ("not there, before the leader has a filter", "before", "before_not_there"),
            ("not there, with the filter", "after", "after_not_there"),
            ("there, far down, asked at the list", "there_direct", "there_direct"),
            ("there, asked at the inverse lists for the first time", "there_turned_first", "there_turned_first"),
            ("there, asked at the inverse lists again", "there_turned", "there_turned"),
        )
    ]
    return [
        (
            f"One list of {number(measured['edges'])} edges, put into the database as a bulk load would. Walking down "
            f"it: {number(measured.get('walk:edges_per_second'), 0)} edges/s. Wrong answers: "
            f"{number(measured['wrong_answers'])}."
        ),
        "",
        *table(("asked", "p50 ms"), asked),
        "Is an edge there? Batches of 100 questions, each for another edge:",
        "",
        *table(("", "answered without the database", "a batch, p50 ms"), members),
        (
            f"The filter takes {number(measured.get('filter:bytes_per_edge'), 2)} bytes an edge, errs in "
            f"{percent(measured.get('false_positives:ratio'), 2)} of the questions, and is there "
            f"{number(measured.get('build:seconds'), 0)} s after the first question, paced by the leader's settings."
        ),
        "",
        "![latencies](benchmarks/whale.png)",
        "",
    ]


def recovery(measured: Mapping[str, Any]) -> list[str]:
    """What a crash takes from clients, and for how long."""
    rows = [
        (role, what, number(each["p50"], 2), number(each["max"], 2), number(each["count"]))
        for role, found in measured.items()
        if role not in ("machine", "command")
        for what, each in found.items()
    ]
    return [
        (
            "Seconds from a process' crash until clients had again what it gave them; of a master also until its "
            "watcher was sure, and how long the promotion took. `start`: what the process itself took until it was "
            "ready, which of a tailer is part of its figure, since nobody stands in for it:"
        ),
        "",
        *table(("crash of a", "until", "p50 s", "max s", "times"), rows),
        "![seconds after a crash](benchmarks/recovery.png)",
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
