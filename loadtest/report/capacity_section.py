"""The note's section on capacity: what queries cost by hit rate, followers and data, and the model made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from loadtest.report.found import number, percent, table

_TAO_SERVER: Final = "2 × 8 cores, 144 GB, 10 Gbit/s"


def capacity(measured: Mapping[str, Any]) -> list[str]:
    """One follower, more of them, more data, and the model."""
    by_rate = [
        (f"{each['batch']}", *_cost(each))
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
        (
            "The published mix by single queries, of which more and more is spread evenly over all keys, so that more "
            "of it misses:"
        ),
        "",
        *table(columns[1:], [_cost(each) for each in measured["by_mix"]]),
        "All reads hits, batches of 20, two load processes:",
        "",
        *table(("followers", "queries/s", "follower µs", "client µs"), followers),
        "Data that grows, read by popularity:",
        "",
        *table(("", "hit rate", "queries/s", "follower µs", "leader µs", "database µs"), growth),
        *_billion(measured),
    ]


def _cost(each: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        percent(each["hit_rate"]),
        number(each["throughput_qps"], 0),
        *(number(each[f"{role}_us"]) for role in ("follower", "leader", "database", "client")),
        number(each["follower_limit_qps"], 0),
    )


def _billion(measured: Mapping[str, Any]) -> list[str]:
    assumed = measured["assumptions"]
    roles = ("follower", "leader", "database")
    rows = [
        (asked, *(_servers(each[role]) for role in roles), number(each["reads_per_follower_server"], 0))
        for asked, each in measured["billion_reads"].items()
    ]
    rows.append(("TAO", *("not published",) * (len(roles) + 1)))
    costs = [
        (
            asked,
            *(number(each[name]) for name in ("hit_us", "miss_us", "leader_hit_us", "leader_miss_us", "database_us")),
            *(number(each[name], 0) for name in ("hit_bytes", "miss_bytes", "database_bytes")),
        )
        for asked, each in measured["costs"].items()
    ]
    writes = percent(assumed["write_share"])
    usable = percent(assumed["utilisation"], 0)
    return [
        "**A billion reads a second.** A query's CPU and bytes are taken to be linear in the misses it makes. Fitted:",
        "",
        *table(
            (
                "asked",
                "follower: hit, µs",
                "miss, µs",
                "leader: hit, µs",
                "miss, µs",
                "database, µs",
                "follower: hit, bytes",
                "miss, bytes",
                "leader to database, bytes",
            ),
            costs,
        ),
        "Assumed, beside that line:",
        "",
        f"- hit rate of followers, {percent(assumed['hit_rate'])}, and writes, {writes} of all requests: published;",
        (
            f"- {percent(assumed['leader_hit_rate'])} of the followers' misses answered by leaders: not published, nor "
            "measured at any size like TAO's;"
        ),
        "- a write is as dear as a miss all the way down, and is told to no other tier or region;",
        (
            f"- servers of the paper ({_TAO_SERVER}), a core of them as fast as one here, {assumed['cores']} cores and "
            f"the network of each used to {usable}; bytes of both directions counted together;"
        ),
        (
            "- what is asked: the published mix of operations, limits, list lengths and sizes (first row), or objects "
            f"of {measured['object_bytes']} bytes alone, one by one and in batches; in all of them 64 awaiters share "
            "a connection, whose messages hold what they ask at one moment;"
        ),
        "- the memory that such a hit rate takes is there, and load is even over servers.",
        "",
        "Servers for the CPU / for the network (Gbit/s of all), the larger in bold:",
        "",
        *table(("asked", "followers", "leaders", "databases", "reads/s of a follower server"), rows),
        (
            'The paper says "thousands of machines" for all roles and regions together, and shows the throughput of '
            "one follower by hit rate (figure 7). What the model leaves out: hot spots, the memory, replication to "
            "further regions, and that requests which touch many servers wait for the slowest."
        ),
        "",
    ]


def _servers(found: Mapping[str, Any]) -> str:
    cpu, network = (number(found[key]) for key in ("for_cpu", "for_network"))
    if found["for_cpu"] >= found["for_network"]:
        cpu = f"**{cpu}**"
    else:
        network = f"**{network}**"
    return f"{cpu} / {network} ({number(found['network_gbit'], 0)})"
