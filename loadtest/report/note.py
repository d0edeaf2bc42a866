"""`python -m loadtest report`: one Markdown note, and plots in a folder beside it, from the scenarios' JSON files.

The aims stand first, met or not, then ratios to the alternatives, because absolute figures depend on the machine. The
note names the scenarios that were not measured, and what cannot be reproduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from loadtest.published.workload import published_results
from loadtest.report.found import Found, aims, leaves, number, percent, read_folder, table
from loadtest.report.plots import draw, has_drawing

_TITLES: Final = {
    "run": "A published workload",
    "locality": "What the hit rate depends on",
    "geo": "Two regions",
    "herd": "All clients miss one key",
    "storm": "A tier restarts cold under load",
    "capacity": "Capacity",
    "whale": "A very long list",
    "recovery": "After a crash",
}
_MOST_FIGURES: Final = 40
PROFILED: Final = ("run", "peers", "geo", "herd", "storm", "capacity", "recovery", "whale")
"""Scenarios whose largest costs are described by hand, in files named after them."""
_PROFILES: Final = Path(__file__).parent.parent / "profiles"
_PROSE: Final = Path(__file__).parent / "prose"
NOT_REPRODUCED: Final = (
    (
        "**Production traffic.** Requests are drawn from published distributions; their repetition and the "
        "length of the longest lists (one in a hundred of TAO's counts was above 512,000) were not published and are "
        "assumed."
    ),
    "**The failed share over 90 days** and the shares of failover of section 8: a run takes minutes.",
    (
        "**Latencies of a loaded production network and of a PHP client**: all processes are on one "
        "machine, over loopback, and "
        "share its cores; hits and misses are compared in form, not in hardware."
    ),
    "**Figure 7's absolute rates**, of servers with sixteen cores: one follower process here has one core at most.",
    "**Replication lag under production load**: the regions here are two, a delay line apart, with little load.",
)


def write_note(folder: Path, file: Path, remark: str = "") -> list[str]:
    """Read the JSON files in ``folder``, and write the note and its plots; returns the scenarios that are missing.

    Raises `OperatorError` for files that no scenario wrote."""
    found = read_folder(folder)
    drawings = file.parent / file.stem
    for name, measured in found.measured.items():
        draw(name, measured, drawings / f"{name}.png")
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(note(found, remark)).replace("](benchmarks/", f"]({drawings.name}/")
    file.write_text(text.rstrip() + "\n", encoding="utf-8")
    return found.missing


def note(found: Found, remark: str = "") -> list[str]:
    """Return the lines of the note; ``remark`` is about the machine or the occasion."""
    lines = [
        "# Benchmarks: results",
        "",
        (
            "`python -m loadtest report` makes this page from the JSON files of the scenarios, which "
            "`loadtest/README.md` describes. On a machine that does other work as well, ratios and CPU per query "
            f"suffer least, and tails of latency most. {remark}"
        ).rstrip(),
        "",
        "## Aims",
        "",
        *aims(found),
        "## Beside what one would pick instead",
        "",
        *section("peers", found),
        "## Published, here, and the peers",
        "",
        *one_table(found),
    ]
    for name, title in _TITLES.items():
        lines += [f"## {title}", "", *section(name, found)]
    for name in found.others:
        lines += [f"## `{name}`", "", *section(name, found)]
    lines += ["## What was not reproduced, and why", "", *(f"- {each}" for each in NOT_REPRODUCED)]
    lines += [f"- **`{name}`**: not measured; its JSON file was not there." for name in found.missing]
    lines += [f"- **`{name}`**: its largest costs; nobody has profiled it." for name in PROFILED if not profile(name)]
    return [*lines, "", *_conditions(found)]


def section(name: str, found: Found) -> list[str]:
    """Return the section of a scenario: what it is, its tables, its picture, its notes, and its largest costs."""
    measured = found.get(name)
    if measured is None:
        return [f"Not measured: `{name}`.", "", *profile(name)]
    lines = _file_lines(_PROSE / f"{name}.md")
    for each in measured.get("tables", ()):
        if "verdict" in each["columns"]:
            continue  # the aims stand at the head of the note
        lines += [f"**{each['title']}**", ""] if each["title"] else []
        lines += table(tuple(each["columns"]), [tuple(row) for row in each["rows"]])
    if "tables" not in measured:
        lines += _numbers(measured)
    if has_drawing(name):
        lines += [f"![{name}](benchmarks/{name}.png)", ""]
    notes = [f"- {note}" for note in measured.get("notes", ())]
    return [*lines, *notes, *([""] if notes else []), *profile(name)]


def _numbers(measured: Mapping[str, Any]) -> list[str]:
    """Return a scenario's numbers by name, for a file without tables."""
    rows = [(f"`{name}`", number(value, 2)) for name, value in leaves(measured)]
    left = len(rows) - _MOST_FIGURES
    more = [f"… and {left} more in its JSON.", ""] if left > 0 else []
    return [*table(("figure", "value"), rows[:_MOST_FIGURES]), *more]


def profile(scenario: str) -> list[str]:
    """Return the largest costs of a scenario as a profiler showed them, written by hand; empty where nobody looked."""
    return _file_lines(_PROFILES / f"{scenario}.md")


def _file_lines(file: Path) -> list[str]:
    return [*file.read_text(encoding="utf-8").rstrip().splitlines(), ""] if file.exists() else []


def _conditions(found: Found) -> list[str]:
    machines: dict[str, list[str]] = {}
    commands = []
    versions: dict[str, str] = {}
    for name, measured in found.measured.items():
        machine = measured["machine"]
        cores = f"{machine['cpus']} × {machine['cpu']}, {machine['memory_mb']:,} MB"
        described = f"{cores}, {machine['kernel']}, {machine['python']}"
        machines.setdefault(described, []).append(name)
        versions |= machine["versions"]
        if "command" in measured:
            commands.append(measured["command"])
    lines = ["## Machine, versions, commands", ""]
    lines += [f"- {', '.join(names)}: {machine}" for machine, names in machines.items()]
    lines += [f"- {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}", ""]
    return [*lines, *(f"    {command}" for command in commands)]


_PEERS: Final = ("redis_lookaside", "memcached_lookaside", "mysql")
_NAMES: Final = {
    "tao": "tao",
    "redis_lookaside": "Redis look-aside",
    "memcached_lookaside": "memcached look-aside",
    "mysql": "MySQL alone",
}


def one_table(found: Found) -> list[str]:
    """Return the table of all figures that were published or compared; a dash stands where there is none."""
    paper = published_results()
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
